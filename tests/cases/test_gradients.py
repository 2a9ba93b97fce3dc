"""Cases C35, C36 and C38: gradients of the gates, beside integers, and in forward mode."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta

from .harness import (
    BACKENDS,
    assert_within,
    call,
    error,
    little_optimised,
    random_cotangents,
    random_inputs,
    run_with_gradients,
)
from .reference import packed, recurrence_with_gradients

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


@pytest.mark.parametrize("member, beta_max", [("gdn", 1.0), ("kda", 1.0), ("kda", 2.0), ("gdn2", 1.0), ("gdn2", 2.0)])
def test_the_gradients_of_erase_and_write_are_complete(member, beta_max):
    """C35."""
    arrays = random_inputs(member, 60, time=130, key_dim=32, value_dim=48, beta_max=beta_max)
    cotangents = random_cotangents(arrays, 61)
    expected = recurrence_with_gradients(arrays, *cotangents)
    for backend in BACKENDS if (member, beta_max) == ("gdn2", 2.0) else (Chunked(64),):
        actual = run_with_gradients(arrays, cotangents, backend, erase_max=beta_max)
        names = [name for name in ("d_beta", "d_erase", "d_write") if name in actual]
        assert names
        assert_within(1e-4, actual, expected, names=names)


@by_backend
def test_equal_erase_and_write_gates_are_one_beta(backend):
    """C35."""
    tied = random_inputs("kda", 62, time=130, key_dim=32, value_dim=48)
    wide = {"erase": np.repeat(tied["beta"], 32, axis=3), "write": np.repeat(tied["beta"], 48, axis=3)}
    apart = {name: x for name, x in tied.items() if name != "beta"} | wide
    cotangents = random_cotangents(tied, 63)
    expected = run_with_gradients(tied, cotangents, backend)
    actual = run_with_gradients(apart, cotangents, backend)
    both = sum(actual.pop(f"d_{name}").astype(np.float64).sum(axis=3, keepdims=True) for name in ("erase", "write"))
    assert_within(2e-5, actual | {"d_beta": both}, expected)


@by_backend
def test_integer_arguments_need_no_gradient(backend):
    """C36."""
    arrays = {name: jnp.asarray(x) for name, x in random_inputs("kda", 64, time=16, key_dim=4, value_dim=4).items()}
    arrays["initial_state"] = jnp.ones((2, 2, 4, 4))
    offsets = jnp.array([0, 5, 16])
    expected = packed(arrays, [0, 5, 16], np.ones_like(arrays["v"]), np.zeros((2, 2, 4, 4)))

    def loss(arrays, offsets):
        return jnp.sum(call(arrays, backend=backend, cu_seqlens=offsets)[0])

    for gradient in (little_optimised(jax.grad(loss)), eqx.filter_jit(eqx.filter_grad(loss))):
        gradients = gradient(arrays, offsets)
        assert_within(1e-5, {f"d_{name}": x for name, x in gradients.items()}, expected)


def test_the_gradient_of_an_integer_argument_is_none_or_float0():
    """C36: of the backend that has rules of its own."""
    arrays = {name: jnp.asarray(x) for name, x in random_inputs("kda", 64, time=16, key_dim=4, value_dim=4).items()}
    offsets, ids = jnp.array([0, 5, 16]), jnp.repeat(jnp.arange(2), jnp.array([5, 11]))[None]
    arrays["initial_state"] = jnp.ones((2, 2, 4, 4))
    expected = packed(arrays, [0, 5, 16], np.ones_like(arrays["v"]), np.zeros((2, 2, 4, 4)))["d_q"]

    def loss(arrays, offsets):
        return jnp.sum(call(arrays, backend=Chunked(64), cu_seqlens=offsets)[0])

    gradients, d_offsets = eqx.filter_jit(eqx.filter_grad(lambda both: loss(*both)))((arrays, offsets))
    assert d_offsets is None and error(gradients["q"], expected) < 1e-5
    for form in (
        lambda *args: jax.vjp(loss, *args)[1](jnp.ones(())),
        jax.grad(loss, argnums=(0, 1), allow_int=True),
    ):
        _, d_offsets = jax.eval_shape(form, arrays, offsets)
        assert d_offsets.dtype == jax.dtypes.float0 and d_offsets.shape == offsets.shape

    def loss_by_ids(q, ids):
        state = arrays["initial_state"][None]
        by_ids = {"segment_ids": ids, "num_segments": 2, "backend": Chunked(64)}
        return jnp.sum(call(arrays | {"q": q, "initial_state": state}, **by_ids)[0])

    assert error(little_optimised(jax.grad(loss_by_ids))(arrays["q"], ids), expected) < 1e-5


def along_q(arrays, backend):
    def forward(q):
        return call(arrays | {"q": q}, backend=backend)

    return forward


@pytest.mark.parametrize("member", ["gdn2", "sla"])
def test_forward_mode_is_right_by_the_recurrent_backend(member):
    """C38, along q; the outputs are linear in q, so their differences are exact at any distance."""
    arrays = {name: jnp.asarray(x) for name, x in random_inputs(member, 65, time=20, key_dim=4, value_dim=4).items()}
    forward = along_q(arrays, Recurrent())
    direction = jax.random.normal(jax.random.key(66), arrays["q"].shape)
    _, (d_out, d_state) = jax.jvp(forward, (arrays["q"],), (direction,))
    differences = forward(arrays["q"] + 0.5 * direction)[0] - forward(arrays["q"] - 0.5 * direction)[0]
    assert error(d_out, differences) < 1e-4
    assert not d_state.any()
    _, linear = jax.linearize(forward, arrays["q"])
    assert error(linear(direction)[0], differences) < 1e-4


def test_forward_mode_is_right_by_the_recurrent_backend_along_every_input():
    """C38: against finite differences in float64."""
    arrays = random_inputs("gdn2", 67, time=20, key_dim=4, value_dim=4)
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        keys = jax.random.split(jax.random.key(68), len(arrays))
        direction = {name: jax.random.normal(key, x.shape, x.dtype) for key, (name, x) in zip(keys, arrays.items())}

        @little_optimised
        def at(distance):
            return call(jax.tree.map(lambda x, d: x + distance * d, arrays, direction), backend=Recurrent())

        _, tangents = jax.jvp(at, (jnp.zeros(()),), (jnp.ones(()),))
        for tangent, above, below in zip(tangents, at(1e-5), at(-1e-5)):
            assert error(tangent, (above - below) / 2e-5) < 1e-7


def test_forward_mode_of_the_chunked_backend_is_refused_in_the_words_of_jax():
    """C38."""
    arrays = {name: jnp.asarray(x) for name, x in random_inputs("kda", 69, time=20, key_dim=4, value_dim=4).items()}
    forward = along_q(arrays, Chunked(64))
    with pytest.raises(TypeError, match="can't apply forward-mode autodiff \\(jvp\\) to a custom_vjp function"):
        jax.jvp(forward, (arrays["q"],), (arrays["q"],))
    assert "forward-mode" in Recurrent.__doc__


@by_backend
def test_forward_mode_is_right_without_an_erase_gate(backend):
    """C38: nothing is solved, so nothing has a rule of its own."""
    arrays = {name: jnp.asarray(x) for name, x in random_inputs("kda", 70, time=20, key_dim=4, value_dim=4).items()}

    def forward(q):
        return gated_delta(q, arrays["k"], arrays["v"], Gates(arrays["log_decay"]), backend=backend)[0]

    _, d_out = jax.jvp(forward, (arrays["q"],), (arrays["q"],))
    assert error(d_out, forward(2 * arrays["q"]) - forward(arrays["q"])) < 1e-4
