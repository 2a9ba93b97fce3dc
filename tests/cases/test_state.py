"""Cases C27 to C29, C31 and C33: the state that goes in and comes out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta, gated_delta_step

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_within,
    call,
    error,
    little_optimised,
    random_cotangents,
    random_inputs,
    run,
    run_with_gradients,
)
from .reference import cut, recurrence

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


@pytest.mark.parametrize(
    "backend, member",
    [(Chunked(64), "gdn2"), (Recurrent(), "sla")],
    ids=["chunked gdn2", "recurrent sla"],
)
@pytest.mark.parametrize("splits", [[1], [2], [3], [63], [64], [65], [149], [50, 100]], ids=str)
def test_any_split_gives_the_same_answer(splits, backend, member):
    """C27."""
    arrays = random_inputs(member, 50, time=150, heads=1, key_dim=16, value_dim=16)
    whole = run(arrays, backend)
    state, outs = arrays["initial_state"], []
    for start, stop in zip([0, *splits], [*splits, 150]):
        part = run(cut(arrays, start, stop) | {"initial_state": state}, backend)
        state = part["final_state"]
        outs.append(part["out"])
    assert_within(2e-5, {"out": np.concatenate(outs, axis=1), "final_state": state}, whole)
    assert_within(2e-5, whole, recurrence(arrays))


@pytest.mark.parametrize("member", ["gdn", "kda", "sla"])
def test_a_split_inside_a_chunk_gives_the_same_answer(member):
    """C27: of the chunked form, where one part fills a chunk and a half."""
    arrays = random_inputs(member, 51, time=150, heads=1, key_dim=16, value_dim=16)
    first = run(cut(arrays, 0, 50, state=slice(None)), Chunked(32))
    rest = run(cut(arrays, 50, 150) | {"initial_state": first["final_state"]}, Chunked(32))
    expected = recurrence(arrays)
    out = np.concatenate([first["out"], rest["out"]], axis=1)
    assert_within(2e-5, {"out": out, "final_state": rest["final_state"]}, expected)


@pytest.mark.parametrize("key_dim, value_dim", [(16, 16), (8, 24)])
def test_states_have_the_key_axis_first_in_every_form(key_dim, value_dim):
    """C28: chunked, token by token, chunked again."""
    arrays = random_inputs("kda", 52, time=60, heads=1, key_dim=key_dim, value_dim=value_dim)
    arrays["initial_state"] = np.zeros((1, 1, key_dim, value_dim), np.float32)
    arrays["initial_state"][0, 0, 1, 2] = 1
    nothing = arrays | {"beta": 0 * arrays["beta"], "log_decay": 0 * arrays["log_decay"]}
    for backend in BACKENDS:
        kept = run(nothing, backend)
        np.testing.assert_array_equal(kept["final_state"], arrays["initial_state"])
        read = np.zeros(kept["out"].shape)
        read[..., 2] = key_dim**-0.5 * arrays["q"][..., 1]
        assert_within(1e-6, {"out": kept["out"]}, {"out": read})

    results = {}
    for order in (BACKENDS, BACKENDS[::-1]):
        state = arrays["initial_state"]
        for i, backend in enumerate((*order, order[0])):
            part = run(cut(arrays, 20 * i, 20 * i + 20) | {"initial_state": state}, backend)
            state = part["final_state"]
        results[str(order[0])] = part
    first, second = results.values()
    assert_within(2e-5, first, second)
    assert_within(2e-5, {"final_state": state}, recurrence(arrays))


def test_a_state_of_the_wrong_shape_is_refused_and_the_order_documented():
    """C28."""
    q, v = jnp.ones((1, 3, 1, 8)), jnp.ones((1, 3, 1, 24))
    gates = Gates.tied(0.5 * q[..., :1])
    transposed = jnp.zeros((1, 1, 24, 8))
    message = r"`initial_state` must be .* = \(1, 1, 8, 24\), key axis first, but its shape is \(1, 1, 24, 8\)"
    with pytest.raises(ValueError, match=message):
        gated_delta(q, q, v, gates, initial_state=transposed)
    with pytest.raises(ValueError, match=message.replace("initial_state", "state")):
        gated_delta_step(q[:, 0], q[:, 0], v[:, 0], jax.tree.map(lambda x: x[:, 0], gates), transposed)
    assert "key axis first" in gated_delta.__doc__
    assert "[batch, value_heads, key_dim, value_dim]" in gated_delta_step.__doc__


@pytest.mark.parametrize("member", MEMBERS)
def test_the_state_decays_then_is_read_then_written(member):
    """C29."""
    decays = {"gdn": 1, "kda": 4, "gdn2": 4, "sla": 4}[member]
    first, one = np.eye(1, 4, dtype=np.float32).reshape(1, 1, 1, 4), np.ones((1, 1, 1, 4), np.float32)
    arrays = {"q": one, "k": first, "v": 0 * one, "initial_state": np.eye(4, dtype=np.float32)[None, None]}
    arrays["log_decay"] = np.full((1, 1, 1, decays), -np.log(2), np.float32)
    arrays |= {"erase": one, "write": one} if member == "gdn2" else {"beta": one[..., :1]}
    expected = {"out": np.array([0, 0.5, 0.5, 0.5]), "final_state": np.diag([0, 0.5, 0.5, 0.5])}
    for backend in BACKENDS:
        actual = run(arrays, backend, scale=1.0)
        actual = {"out": actual["out"][0, 0, 0], "final_state": actual["final_state"][0, 0]}
        assert max(np.max(np.abs(actual[name] - expected[name])) for name in actual) < 1e-6


def test_a_step_decays_the_state_then_reads_then_writes():
    """C29."""
    one, first = jnp.ones((1, 1, 4)), jnp.eye(1, 4)[None]
    gates = Gates.tied(one[..., :1], jnp.full((1, 1, 1), -np.log(2), jnp.float32))
    out, state = gated_delta_step(one, first, 0 * one, gates, jnp.eye(4)[None, None], scale=1.0)
    np.testing.assert_allclose(out[0, 0], [0, 0.5, 0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(state[0, 0], np.diag([0, 0.5, 0.5, 0.5]), atol=1e-6)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("state_dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_the_state_stays_float32_through_256_steps(state_dtype, member):
    """C31."""
    arrays = random_inputs(member, 53, time=256, key_dim=16, value_dim=16, dtype=jnp.bfloat16)
    arrays["initial_state"] = arrays["initial_state"].astype(state_dtype)
    names = [name for name in arrays if name != "initial_state"]

    @little_optimised
    def step(tokens, state):
        if "beta" in tokens:
            gates = Gates.tied(tokens["beta"], tokens["log_decay"])
        else:
            gates = Gates(tokens["log_decay"], tokens["erase"], tokens["write"])
        return gated_delta_step(tokens["q"], tokens["k"], tokens["v"], gates, state)

    state, outs = jnp.asarray(arrays["initial_state"]), []
    for t in range(256):
        out, state = step({name: arrays[name][:, t] for name in names}, state)
        assert state.dtype == jnp.float32 and out.dtype == jnp.bfloat16
        outs.append(out)
    expected = recurrence(arrays)
    assert_within(1e-4, {"final_state": state}, expected)
    assert_within(1e-2, {"out": np.stack(outs, axis=1)}, expected)


@by_backend
def test_a_state_of_bfloat16_is_raised_to_float32(backend):
    """C31: of the operator itself."""
    arrays = random_inputs("kda", 54, time=40, key_dim=16, value_dim=16, dtype=jnp.bfloat16)
    arrays["initial_state"] = arrays["initial_state"].astype(jnp.bfloat16)
    actual = run(arrays, backend)
    assert actual["final_state"].dtype == np.float32 and actual["out"].dtype == jnp.bfloat16
    assert_within(1e-2, actual, recurrence(arrays))


@by_backend
def test_arguments_left_out_equal_their_defaults(backend):
    """C33: no initial state, no scale, and a loss on outputs, on states or on both."""
    arrays = random_inputs("kda", 55, time=16, key_dim=8, value_dim=8, state=False)
    zeros = arrays | {"initial_state": np.zeros((1, 2, 8, 8), np.float32)}
    d_out, d_final_state = random_cotangents(arrays, 56)
    without = run_with_gradients(arrays, (d_out, d_final_state), backend)
    assert_within(1e-6, without, run_with_gradients(zeros, (d_out, d_final_state), backend))
    assert_within(1e-6, without, run_with_gradients(arrays, (d_out, d_final_state), backend, scale=8**-0.5))

    losses = {
        "out": lambda out, state: jnp.sum(out * d_out),
        "state": lambda out, state: jnp.sum(state * d_final_state),
        "both": lambda out, state: jnp.sum(out * d_out) + jnp.sum(state * d_final_state),
    }
    gradient = {
        name: little_optimised(jax.grad(lambda arrays, loss=loss: loss(*call(arrays, backend=backend))))(arrays)
        for name, loss in losses.items()
    }
    for name in arrays:
        assert error(gradient["both"][name], without[f"d_{name}"]) < 1e-6
        assert error(gradient["out"][name] + gradient["state"][name], without[f"d_{name}"]) < 1e-6
        zero = np.zeros_like(d_final_state)
        only_out = run_with_gradients(arrays, (d_out, zero), backend)[f"d_{name}"]
        assert error(gradient["out"][name], only_out) < 1e-6
    assert not np.asarray(gradient["state"]["q"]).any()


def test_a_step_from_no_state_equals_one_from_zeros():
    """C33."""
    arrays = random_inputs("kda", 57, time=1, key_dim=16, value_dim=16, state=False)
    q, k, v, log_decay, beta = (jnp.asarray(arrays[name][:, 0]) for name in ("q", "k", "v", "log_decay", "beta"))
    gates = Gates.tied(beta, log_decay)
    without = gated_delta_step(q, k, v, gates)
    for state, scale in ((jnp.zeros((1, 2, 16, 16)), None), (None, 0.25)):
        for actual, expected in zip(gated_delta_step(q, k, v, gates, state, scale=scale), without):
            assert error(actual, expected) < 1e-6
