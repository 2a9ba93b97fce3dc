"""Any float dtype of any argument: the arithmetic, and the dtypes of results, are what the operator documents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, target

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.testing import (
    LAYOUTS,
    RandomGates,
    RandomProblem,
    assert_close,
    expected,
    problems,
    pullback,
    relative_error,
    results,
)

BACKENDS = [Recurrent(), Chunked(16)]
WIDE = RandomProblem(
    time=65,
    group=2,
    key_dim=32,
    value_dim=8,
    gates=RandomGates("channel", erase="head", owner="key", tied=True),
    state=True,
)
SOME = [LAYOUTS[2], LAYOUTS[4], LAYOUTS[10]]


FORGOTTEN = RandomProblem(  # every token forgets all: 1e-13 remains of `d_erase`
    time=65,
    key_heads=2,
    key_dim=4,
    value_dim=6,
    gates=RandomGates("channel", erase="channel", write="channel", log_decays="strong"),
    state=True,
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@given(problem=problems(layouts=SOME))
@example(problem=FORGOTTEN)
def test_any_problem_agrees_in_other_dtypes(dtype, problem):
    problem = dataclasses.replace(problem, dtype=dtype)
    actual, wanted = pullback(Chunked(64), problem), expected(problem)
    target(relative_error(actual, wanted, problem), label="error in budgets")
    assert_close(actual, wanted, problem)


@given(problem=problems(layouts=[WIDE], dtypes=["bfloat16"], keys=["independent", "some_zero"]))
def test_bfloat16_keeps_two_digits_where_keys_are_apart(problem):
    assert_close(pullback(Chunked(64), problem), expected(problem), problem)


@given(problem=problems(layouts=SOME[1:], log_decays=["mild", "bounded", "mixed"]))
def test_the_approximate_inverse_keeps_its_budget(problem):
    gates = dataclasses.replace(problem.gates, erase_max=1.0)
    problem = dataclasses.replace(problem, inverse="approx", gates=gates)
    assert_close(pullback(Chunked(64), problem), expected(problem), problem)


MIXED = [
    dict(value_dtype="bfloat16"),
    dict(dtype="bfloat16", value_dtype="float32"),
    dict(gate_dtype="bfloat16"),
    dict(gate_dtype="float16", state_dtype="float16"),
    dict(dtype="bfloat16", gate_dtype="float32", state_dtype="float32"),
    dict(dtype="float16", value_dtype="bfloat16"),
    dict(state_dtype="bfloat16"),
    dict(gate_dtype="float64", state_dtype="float64"),
    dict(dtype="bfloat16", value_dtype="float64"),
]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_dtypes_may_be_mixed(backend, dtypes):
    problem = dataclasses.replace(WIDE, time=17, seed=12, **dtypes)
    arguments, actual = problem.arguments(), pullback(backend, problem)
    wide = "float64" if "float64" in (problem.dtype, problem.value_dtype) else "float32"
    assert actual["out"].dtype == arguments["v"].dtype
    assert actual["final_state"].dtype == wide
    given = {**arguments, "log_decay": arguments["gates"].log_decay, "erase": arguments["gates"].erase}
    for name, x in actual.items():
        if name.startswith("d_"):
            assert x.dtype == given[name[2:]].dtype, name
    assert_close(actual, expected(problem), problem)


def test_a_float16_result_is_the_float32_result_rounded():
    problem = dataclasses.replace(WIDE, time=17, dtype="float16")
    arguments = problem.arguments()
    raised = jax.tree.map(lambda x: x.astype(jnp.float32), arguments)
    out, state = gated_delta(**arguments, backend=Recurrent())
    raised_out, raised_state = gated_delta(**raised, backend=Recurrent())
    np.testing.assert_array_equal(out, raised_out.astype(jnp.float16))
    np.testing.assert_array_equal(state, raised_state)


def test_small_log_decays_in_bfloat16_add_up_in_float32():
    """A sum in bfloat16 would be off by 1% at 64 tokens."""
    decay = jnp.full((1, 256, 1, 1), -0.011, jnp.bfloat16)
    problem = RandomProblem(time=256, key_dim=1, value_dim=1, gates=RandomGates(decay="head"), dtype="bfloat16")
    arguments = {**problem.arguments(), "initial_state": np.ones((1, 1, 1, 1), np.float32)}
    arguments["gates"] = dataclasses.replace(arguments["gates"], log_decay=decay)
    arguments["k"] = 0 * arguments["k"]
    cotangents = problem.cotangents(jnp.bfloat16, "float32")
    wanted = np.exp(256 * float(decay[0, 0, 0, 0]))
    for backend in BACKENDS:
        state = results(backend, arguments, cotangents)["final_state"]
        np.testing.assert_allclose(state, wanted, rtol=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked(64)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_numpy_arrays_are_taken_and_results_have_the_documented_dtypes(backend, dtype):
    problem = dataclasses.replace(WIDE, time=5, dtype=dtype)
    arguments = problem.arguments()
    assert isinstance(arguments["q"], np.ndarray)
    out, state = gated_delta(**arguments, backend=backend)
    assert out.dtype == jnp.dtype(dtype) and state.dtype == jnp.float32
    wanted = expected(problem)
    assert_close({"out": out, "final_state": state}, {name: wanted[name] for name in ("out", "final_state")}, problem)


def test_64_bit_mode_changes_nothing_for_float32():
    problem = dataclasses.replace(WIDE, time=17, documents=((5, 12),), packing="offsets")
    plain = pullback(Chunked(16), problem)
    arguments = problem.arguments()
    arguments["cu_seqlens"] = arguments["cu_seqlens"].astype(np.int64)
    with jax.enable_x64(True):
        actual = results(Chunked(16), arguments, problem.cotangents("float32", "float32"))
    for name, x in actual.items():
        assert x.dtype == plain[name].dtype
        np.testing.assert_array_equal(x, plain[name], err_msg=name)
