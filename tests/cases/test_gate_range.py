"""Cases C01 to C08: how strong, weak or wrong a decay may be."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta, gated_delta_step

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_forward_and_gradients_within,
    assert_within,
    call,
    error,
    little_optimised,
    random_cotangents,
    random_inputs,
    run,
    run_plain,
    run_with_gradients,
)
from .reference import cut, recurrence, recurrence_with_gradients

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def with_gate(arrays, log_decay, **others):
    """`arrays` with the log decay replaced, by one number or by an array, and other gates by one number each."""
    given = {name: np.full_like(arrays[name], value) for name, value in others.items()}
    return arrays | given | {"log_decay": np.broadcast_to(np.float32(log_decay), arrays["log_decay"].shape)}


@pytest.mark.parametrize("decay", [-60.0, -2661.0])
@pytest.mark.parametrize("member", ["kda", "gdn2"])
@by_backend
def test_one_fast_channel_among_slow_ones_is_exact_and_keeps_only_the_last_token(backend, member, decay):
    """C01."""
    arrays = random_inputs(member, 1, time=65, heads=2, key_dim=64, value_dim=64)
    strengths = {name: 0.5 for name in ("beta", "erase", "write") if name in arrays}
    arrays = with_gate(arrays, -0.01, **strengths)
    arrays["log_decay"] = arrays["log_decay"].copy()
    arrays["log_decay"][:, :, 0, 3] = decay
    cotangents = random_cotangents(arrays, 2)
    actual = run_with_gradients(arrays, cotangents, backend)
    assert_within(1e-4, actual, recurrence_with_gradients(arrays, *cotangents))

    before = recurrence(cut(arrays, 0, 64, state=slice(None)))["final_state"][0, 0]
    last = {name: arrays[name][0, 64, 0].astype(np.float64) for name in ("k", "v", "log_decay")}
    reading = (np.exp(last["log_decay"])[:, None] * before).T @ (0.5 * last["k"])
    only_the_last_write = last["k"][3] * (0.5 * last["v"] - reading)
    assert np.max(np.abs(actual["final_state"][0, 0, 3] - only_the_last_write)) < 1e-6


@pytest.mark.parametrize("member", ["gdn", "kda", "gdn2"])
@by_backend
def test_a_uniform_decay_is_exact_at_every_level(backend, member):
    """C02."""
    arrays = random_inputs(member, 3, time=128, key_dim=64, value_dim=64)
    strengths = {name: 0.9 for name in ("beta", "erase", "write") if name in arrays}
    errors = {}
    for level in (-0.5, -1.0, -1.3, -1.4, -2.0, -2.5, -3.0, -5.0):
        inputs = with_gate(arrays, level, **strengths)
        actual, expected = run(inputs, backend), recurrence(inputs)
        errors[level] = max(error(actual[name], expected[name]) for name in actual)
    assert max(errors.values()) <= 2e-5, errors
    assert max(errors.values()) <= 4 * min(errors.values()), f"a step between the levels: {errors}"


@pytest.mark.parametrize("member", ["gdn", "kda", "gdn2"])
@by_backend
def test_a_decay_without_a_lower_bound_is_exact(backend, member):
    """C03, with an initial state; half of the channels are half of the tokens where a head has one decay."""
    arrays = random_inputs(member, 4, time=129, heads=2, key_dim=32, value_dim=32)
    cotangents = random_cotangents(arrays, 5)
    half = np.random.default_rng(6).random(arrays["log_decay"].shape[1 if member == "gdn" else 3]) < 0.5
    mixed = np.where(half[:, None, None] if member == "gdn" else half, -25.8, 0.0)
    for decay in (-5.6, -8.0, -20.0, -25.8, -100.0, mixed):
        inputs = with_gate(arrays, decay)
        actual = run_with_gradients(inputs, cotangents, backend)
        assert all(np.isfinite(x).all() for x in actual.values())
        expected = recurrence_with_gradients(inputs, *cotangents)
        assert_forward_and_gradients_within(2e-5, 1e-4, actual, expected)


@pytest.mark.parametrize("member", ["gdn", "kda", "gdn2"])
@by_backend
def test_a_decay_without_a_lower_bound_is_exact_from_no_initial_state(backend, member):
    """C03, without an initial state."""
    arrays = random_inputs(member, 7, time=129, heads=2, key_dim=32, value_dim=32, state=False)
    for decay in (-5.6, -8.0, -20.0, -25.8, -100.0):
        inputs = with_gate(arrays, decay)
        assert_within(2e-5, run(inputs, backend), recurrence(inputs))


@pytest.mark.parametrize("member", ["gdn", "kda"])
@by_backend
def test_the_decay_mask_poisons_no_gradient(backend, member):
    """C04."""
    arrays = random_inputs(member, 8, time=64, key_dim=16, value_dim=16)
    arrays = {name: jnp.asarray(x) for name, x in with_gate(arrays, -8.0, beta=0.5).items()}
    expected = recurrence_with_gradients(arrays, np.ones_like(arrays["v"]), np.zeros(arrays["initial_state"].shape))
    gradient = jax.grad(lambda arrays: jnp.sum(call(arrays, backend=backend)[0]))
    actual = {f"d_{name}": x for name, x in little_optimised(gradient)(arrays).items()}
    assert_within(1e-4, actual, expected)
    with jax.debug_nans(True):
        for form in (little_optimised(gradient), gradient) if member == "gdn" else (little_optimised(gradient),):
            assert_within(1e-4, {f"d_{name}": x for name, x in form(arrays).items()}, expected)


@pytest.mark.parametrize(
    "member, time",
    [("gdn2", time) for time in (7, 50, 64, 65, 192)]
    + [("gdn", time) for time in (50, 65, 192)]
    + [("kda", time) for time in (7, 64, 65)],
)
def test_a_decay_of_zero_is_the_ungated_rule(member, time):
    """C05: the chunked form. The recurrent form has no chunks and runs at the longest time below."""
    check_a_decay_of_zero(Chunked(64), member, time)


@pytest.mark.parametrize("member", ["gdn", "kda", "gdn2"])
def test_a_decay_of_zero_is_the_ungated_rule_token_by_token(member):
    """C05."""
    check_a_decay_of_zero(Recurrent(), member, 192)


def check_a_decay_of_zero(backend, member, time):
    arrays = random_inputs(member, 9, time=time, heads=1, key_dim=64, value_dim=64)
    cotangents = random_cotangents(arrays, 10)
    ungated = {name: x for name, x in arrays.items() if name != "log_decay"}
    expected = recurrence_with_gradients(ungated, *cotangents)
    expected["d_log_decay"] = recurrence_with_gradients(with_gate(arrays, 0.0), *cotangents)["d_log_decay"]
    assert np.max(np.abs(expected["d_log_decay"])) > 1
    results = [run_with_gradients(with_gate(arrays, zero), cotangents, backend) for zero in (0.0, -0.0)]
    for actual in results:
        assert_forward_and_gradients_within(2e-5, 1e-4, actual, expected)


@by_backend
def test_no_decay_equals_a_decay_of_zeros(backend):
    """C06."""
    arrays = random_inputs("gdn", 11, batch=2, time=160, heads=2, key_dim=32, value_dim=48)
    cotangents = random_cotangents(arrays, 12)
    ungated = {name: x for name, x in arrays.items() if name != "log_decay"}
    without = run_with_gradients(ungated, cotangents, backend)
    zeros = run_with_gradients(with_gate(arrays, 0.0), cotangents, backend)
    assert set(without) == {*(f"d_{name}" for name in ungated), "out", "final_state"}
    assert_within(1e-5, without, zeros)
    assert_within(1e-5, without, recurrence_with_gradients(ungated, *cotangents))


def check_halving(actual, arrays, times):
    """The state halves with every token; `times[i]` tokens lead to the final state i."""
    start = arrays["initial_state"].astype(np.float64)
    expected = start * 2.0 ** -np.asarray(times, np.float64)[:, None, None, None]
    assert_within(5e-5, {"final_state": actual["final_state"]}, {"final_state": expected})


def halving_inputs(member, time, **options):
    """2**-130 of a state of size 1 is no normal float32, which XLA rounds to 0: the states here are of size 2**20."""
    arrays = random_inputs(member, 13, time=time, key_dim=8, value_dim=8, **options)
    large = np.float32(2**20) * arrays["initial_state"]
    return with_gate(arrays, -np.log(2.0)) | {"k": np.zeros_like(arrays["k"]), "initial_state": large}


@pytest.mark.parametrize("time", [10, 64, 65, 130])
@by_backend
def test_a_decay_is_a_natural_logarithm(backend, time):
    """C07, outputs and states, of a decay per channel."""
    arrays = halving_inputs("kda", time)
    actual = run(arrays, backend)
    check_halving(actual, arrays, [time])
    expected = recurrence(arrays)["out"]
    halves = 2.0 ** -np.arange(1, time + 1)
    read = np.einsum("bhkv,bthk->bthv", arrays["initial_state"].astype(np.float64), arrays["q"])
    np.testing.assert_allclose(expected, 8**-0.5 * halves[:, None, None] * read, rtol=1e-6)
    per_token = [error(actual["out"][:, t], expected[:, t]) for t in range(time)]
    assert max(per_token) < 5e-5


@pytest.mark.parametrize("member", MEMBERS)
@by_backend
def test_a_decay_is_a_natural_logarithm_in_every_member(backend, member):
    """C07, all four times as documents of one call."""
    times = [10, 64, 65, 130]
    arrays = halving_inputs(member, sum(times), states=4)
    check_halving(run(arrays, backend, offsets=[0, *np.cumsum(times)]), arrays, times)


def test_the_documentation_says_natural_logarithm():
    """C07."""
    assert "natural logarithm" in Gates.__doc__


@pytest.mark.parametrize("decay", [0.05, 5.0])
@pytest.mark.parametrize("member", MEMBERS)
@by_backend
def test_a_positive_decay_is_refused_by_its_largest_value(backend, member, decay):
    """C08, concrete."""
    arrays = random_inputs(member, 14, time=64, heads=1, key_dim=16, value_dim=16)
    arrays["log_decay"][0, 17, 0, 0] = decay
    pattern = rf"`gates\.log_decay` must be at most 0 .*largest value is {decay:g}, at index \(0, 17, 0, 0\)"
    with pytest.raises(ValueError, match=pattern):
        run_plain(arrays, backend)


@pytest.mark.parametrize("decay", [0.05, 5.0])
def test_a_positive_decay_of_one_step_is_refused(decay):
    """C08, concrete."""
    x = np.ones((1, 1, 16), np.float32)
    gates = Gates.tied(x[..., :1], np.full((1, 1, 1), decay, np.float32))
    with pytest.raises(ValueError, match=rf"`gates\.log_decay` must be at most 0 .*largest value is {decay:g}"):
        gated_delta_step(x, x, x, gates)


@pytest.mark.parametrize("member", ["gdn", "kda"])
def test_a_traced_positive_decay_is_limited_to_zero_with_no_gradient_in_every_backend(member):
    """C08, under jit."""
    arrays = random_inputs(member, 15, time=64, heads=1, key_dim=16, value_dim=16)
    cotangents = random_cotangents(arrays, 16)
    positive = np.random.default_rng(17).random(arrays["log_decay"].shape) < 0.3
    limited = arrays | {"log_decay": np.where(positive, np.float32(0), arrays["log_decay"])}
    for backend in BACKENDS:
        expected = run_with_gradients(limited, cotangents, backend)
        for decay in (0.05, 5.0):
            inputs = arrays | {"log_decay": np.where(positive, np.float32(decay), arrays["log_decay"])}
            actual = run_with_gradients(inputs, cotangents, backend)
            assert not actual["d_log_decay"][positive].any()
            assert actual["d_log_decay"][~positive].any()
            for name in actual:
                if name != "d_log_decay":
                    np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def test_a_traced_positive_decay_of_one_step_is_limited_to_zero():
    """C08, under jit."""
    arrays = random_inputs("kda", 18, time=1, heads=1, key_dim=16, value_dim=16)
    q, k, v, log_decay, beta = (jnp.asarray(arrays[name][:, 0]) for name in ("q", "k", "v", "log_decay", "beta"))

    @jax.jit
    def step(log_decay):
        return gated_delta_step(q, k, v, Gates.tied(beta, log_decay), arrays["initial_state"])

    for actual, expected in zip(step(jnp.full_like(log_decay, 5.0)), step(jnp.zeros_like(log_decay))):
        np.testing.assert_array_equal(actual, expected)
    assert not jax.grad(lambda x: jnp.sum(step(x)[0]))(jnp.full_like(log_decay, 5.0)).any()


@by_backend
def test_checked_mode_raises_for_a_traced_positive_decay(backend):
    """C08, checked."""
    arrays = random_inputs("gdn", 19, time=64, heads=1, key_dim=16, value_dim=16)
    names = ("q", "k", "v", "beta")

    @eqx.filter_jit
    def checked(log_decay):
        q, k, v, beta = (jnp.asarray(arrays[name]) for name in names)
        return gated_delta(q, k, v, Gates.tied(beta, log_decay), backend=backend, checked=True)

    checked(jnp.asarray(arrays["log_decay"]))
    for decay in (0.05, 5.0):
        with pytest.raises(RuntimeError, match=r"`gates\.log_decay` must be at most 0"):
            jax.block_until_ready(checked(jnp.full(arrays["log_decay"].shape, decay)))
