"""The reference of the cases is right: by finite differences, and as the package's oracle computes it in float64."""

import jax
import numpy as np
import pytest

from gated_delta import Recurrent

from .harness import MEMBERS, assert_within, random_cotangents, random_inputs, run_with_gradients
from .reference import packed, recurrence, recurrence_with_gradients


def a_case(member):
    arrays = random_inputs(member, 0, batch=2, time=6, heads=2, group=2, key_dim=4, value_dim=3, slowest=1.0)
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    return arrays, tuple(x.astype(np.float64) for x in random_cotangents(arrays, 1))


@pytest.mark.parametrize("member", MEMBERS)
def test_the_gradients_of_the_reference_are_its_finite_differences(member):
    arrays, (d_out, d_final_state) = a_case(member)
    results = recurrence_with_gradients(arrays, d_out, d_final_state, scale=0.7)

    def loss(arrays):
        forward = recurrence(arrays, scale=0.7)
        return np.sum(forward["out"] * d_out) + np.sum(forward["final_state"] * d_final_state)

    random = np.random.default_rng(2)
    for name, x in arrays.items():
        direction, step = random.standard_normal(x.shape), 1e-5
        above, below = (loss(arrays | {name: x + sign * step * direction}) for sign in (1, -1))
        slope = np.sum(results[f"d_{name}"] * direction)
        assert abs((above - below) / (2 * step) - slope) < 1e-8 * max(1, abs(slope)), name


@pytest.mark.parametrize("member", MEMBERS)
def test_the_recurrent_backend_in_float64_is_the_reference(member):
    arrays, cotangents = a_case(member)
    with jax.enable_x64(True):
        actual = run_with_gradients(arrays, cotangents, Recurrent())
    assert all(x.dtype == np.float64 for x in actual.values())
    assert_within(1e-12, actual, recurrence_with_gradients(arrays, *cotangents))


def test_packed_documents_are_the_documents_alone():
    arrays = random_inputs("gdn2", 3, time=9, states=3, key_dim=4, value_dim=3)
    cotangents = random_cotangents(arrays, 4, states=(3,))
    actual = packed(arrays, [0, 5, 5, 8], *cotangents)
    alone = {name: x[:, 5:8] for name, x in arrays.items() if name != "initial_state"}
    alone["initial_state"] = arrays["initial_state"][2:]
    expected = recurrence_with_gradients(alone, cotangents[0][:, 5:8], cotangents[1][2:])
    for name, x in expected.items():
        rows = slice(2, 3) if name in ("final_state", "d_initial_state") else (slice(None), slice(5, 8))
        np.testing.assert_array_equal(actual[name][rows], x)
    np.testing.assert_array_equal(actual["final_state"][1], arrays["initial_state"][1])
    assert not actual["out"][:, 8:].any() and not actual["d_k"][:, 8:].any()
