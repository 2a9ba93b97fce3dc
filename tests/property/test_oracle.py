"""The recurrence in float64 is the family's definition, written out as dense matrices; its gradients are its slopes."""

import numpy as np
import pytest
from hypothesis import given

from gated_delta import Recurrent
from gated_delta.testing import LAYOUTS, assert_close, expected, problems, pullback

INPUTS = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")
SHORT = [layout for layout in LAYOUTS if layout.time <= 17]


def arrays_of(problem):
    """The arrays of a problem by name, float64, without those it does not give."""
    arguments = problem.arguments()
    arrays = {name: arguments.get(name, getattr(arguments["gates"], name, None)) for name in INPUTS}
    return {name: np.asarray(x) for name, x in arrays.items() if x is not None}


def run_densely(problem, arrays):
    """Outputs and final state from whole matrices: the transition of every token, and of every pair of tokens.

    With `A_t = (I - k_t (e_t * k_t)^T) diag(exp(log_decay_t))`, the state after token t is
    `sum over s <= t of (A_t ... A_{s+1}) k_s (w_s * v_s)^T`, and `(A_t ... A_1) S_0`.
    """
    batch, time, key_heads, key_dim = arrays["k"].shape
    value_heads, value_dim = arrays["v"].shape[2:]
    out, final = np.zeros(arrays["v"].shape), np.zeros((batch, value_heads, key_dim, value_dim))

    def gate(name, row, t, head, default, width):
        if name not in arrays:
            return np.full(width, default)
        x = arrays[name][row, t]
        return np.repeat(x[head // (value_heads // len(x))], width // x.shape[-1])

    for row, head in np.ndindex(batch, value_heads):
        key_head = head // (value_heads // key_heads)
        transitions, written = [], []
        for t in range(time):
            key = arrays["k"][row, t, key_head]
            erase = gate("erase", row, t, head, 0.0, key_dim)
            write = gate("erase" if problem.gates.tied else "write", row, t, head, 1.0, value_dim)
            decay = np.exp(gate("log_decay", row, t, head, 0.0, key_dim))
            transitions.append((np.eye(key_dim) - np.outer(key, erase * key)) @ np.diag(decay))
            written.append(np.outer(key, write * arrays["v"][row, t, head]))
        begin = arrays["initial_state"][row, head] if "initial_state" in arrays else np.zeros((key_dim, value_dim))
        for t in range(time):
            state, after = np.zeros((key_dim, value_dim)), np.eye(key_dim)
            for s in range(t, -1, -1):
                state = state + after @ written[s]
                after = after @ transitions[s]
            state = state + after @ begin
            out[row, t, head] = key_dim**-0.5 * state.T @ arrays["q"][row, t, key_head]
            final[row, head] = state
    return out, final


@given(problem=problems(layouts=SHORT, dtypes=["float64"]))
def test_the_recurrence_is_the_product_of_dense_transitions(problem):
    actual = pullback(Recurrent(), problem)
    out, final = run_densely(problem, arrays_of(problem))
    assert_close({name: actual[name] for name in ("out", "final_state")}, {"out": out, "final_state": final}, problem)


@given(problem=problems(layouts=SHORT, dtypes=["float64"], log_decays=["mild", "bounded"], strengths=["uniform"]))
def test_the_gradients_are_the_slopes_of_the_dense_form(problem):
    arrays, gradients = arrays_of(problem), pullback(Recurrent(), problem)
    weights = problem.cotangents("float64", "float64")
    rng = np.random.default_rng(problem.seed)

    def loss(moved):
        return sum(np.sum(weight * x) for weight, x in zip(weights, run_densely(problem, moved)))

    for name, x in arrays.items():
        direction = rng.standard_normal(x.shape)
        step = 1e-5  # an error of step**2 times the third derivative, and of 1e-16 / step: both about 1e-10
        ahead, behind = ({**arrays, name: x + sign * step * direction} for sign in (1, -1))
        slope = (loss(ahead) - loss(behind)) / (2 * step)
        size = np.linalg.norm(gradients[f"d_{name}"]) * np.linalg.norm(direction)
        assert abs(slope - np.sum(gradients[f"d_{name}"] * direction)) <= 1e-7 * size, (name, problem)


@given(problem=problems(layouts=SHORT, dtypes=["float64"]))
def test_the_expectation_takes_problems_apart_without_changing_them(problem):
    """What `expected` does in NumPy to arrays, owners, ties and groups is what the recurrence does with them whole."""
    assert_close(pullback(Recurrent(), problem), expected(problem), problem)


@pytest.mark.smoke
def test_one_token_decays_erases_writes_and_is_read_in_this_order():
    from gated_delta import Gates, gated_delta

    half = -np.log(np.float32(2))
    ones, key = np.ones((1, 1, 1, 4), np.float32), np.eye(4, dtype=np.float32)[:1].reshape(1, 1, 1, 4)
    gates = Gates.tied(np.ones((1, 1, 1), np.float32), np.full((1, 1, 1), half))
    state = np.eye(4, dtype=np.float32)[None, None]
    for backend in (Recurrent(), None):
        out, final = gated_delta(ones, key, 0 * ones, gates, initial_state=state, scale=1.0, backend=backend)
        np.testing.assert_allclose(final[0, 0], np.diag([0, 0.5, 0.5, 0.5]), atol=1e-6)
        np.testing.assert_allclose(out[0, 0, 0], [0, 0.5, 0.5, 0.5], atol=1e-6)
