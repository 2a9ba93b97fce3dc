"""Cases C55 and C56: value heads that share key heads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta, gated_delta_step

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_within,
    error,
    random_cotangents,
    random_inputs,
    run_with_gradients,
)
from .reference import recurrence_with_gradients

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def repeated(arrays, group):
    """Every array of the key heads with each head given `group` times in a row."""
    key_heads = arrays["k"].shape[2]
    return {
        name: np.repeat(x, group, axis=2) if name != "initial_state" and x.shape[2] == key_heads else x
        for name, x in arrays.items()
    }


@pytest.mark.parametrize(
    "owner, member", [("key", member) for member in MEMBERS] + [("value", "gdn"), ("value", "kda")]
)
def test_a_group_of_value_heads_is_its_key_head_repeated(owner, member):
    """C55, ratio 3; gates of the key heads, shared by the group, and gates of the value heads."""
    arrays = random_inputs(member, 92, time=65, heads=2, group=3, key_dim=8, value_dim=8, owner=owner)
    cotangents = random_cotangents(arrays, 93)
    for backend in BACKENDS if member == "gdn2" else (Chunked(64),):
        actual = run_with_gradients(arrays, cotangents, backend)
        expected = run_with_gradients(repeated(arrays, 3), cotangents, backend)
        for name, x in expected.items():
            if x.shape != actual[name].shape:
                heads, (batch, time, _, dim) = actual[name].shape[2], x.shape
                expected[name] = x.astype(np.float64).reshape(batch, time, heads, 3, dim).sum(axis=3)
        assert_within(1e-6, actual, expected)
        assert_within(2e-5, actual, recurrence_with_gradients(arrays, *cotangents))


@by_backend
def test_as_many_value_heads_as_key_heads_pair_one_to_one(backend):
    """C55, ratio 1: each head is the head alone."""
    arrays = random_inputs("kda", 94, time=65, heads=3, key_dim=8, value_dim=8)
    cotangents = random_cotangents(arrays, 95)
    together = run_with_gradients(arrays, cotangents, backend)
    for head in range(3):

        def only(name, x, head=head):
            by_state = name.endswith("state")
            return x[:, head : head + 1] if by_state else x[:, :, head : head + 1]

        alone = {name: only(name, x) for name, x in arrays.items()}
        d_out, d_final_state = cotangents
        alone = run_with_gradients(alone, (only("out", d_out), only("final_state", d_final_state)), backend)
        assert_within(1e-6, alone, {name: only(name, x) for name, x in together.items()})


def test_a_step_pairs_the_heads_alike():
    """C55."""
    arrays = random_inputs("kda", 96, time=1, heads=2, group=3, key_dim=8, value_dim=8)
    expected = recurrence_with_gradients(arrays, *random_cotangents(arrays, 97))
    q, k, v, log_decay, beta = (arrays[name][:, 0] for name in ("q", "k", "v", "log_decay", "beta"))
    out, state = gated_delta_step(q, k, v, Gates.tied(beta, log_decay), arrays["initial_state"])
    assert error(out, expected["out"][:, 0]) < 1e-6 and error(state, expected["final_state"]) < 1e-6


@pytest.mark.parametrize("key_heads, value_heads", [(2, 3), (4, 2)])
def test_head_counts_that_do_not_divide_are_refused_by_both_counts(key_heads, value_heads):
    """C56: with values, and while tracing."""
    k, v = jnp.ones((1, 5, key_heads, 4)), jnp.ones((1, 5, value_heads, 4))
    gates = Gates.tied(0.5 * k[..., :1])
    message = f"value_heads to be a multiple of key_heads, but v has {value_heads} and k has {key_heads}"
    for backend in (None, Recurrent(), Chunked(64)):
        with pytest.raises(ValueError, match=message):
            gated_delta(k, k, v, gates, backend=backend)
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda k, v: gated_delta(k, k, v, gates, backend=backend), k, v)  # noqa: B023
    with pytest.raises(ValueError, match=message):
        gated_delta_step(k[:, 0], k[:, 0], v[:, 0], jax.tree.map(lambda x: x[:, 0], gates))
