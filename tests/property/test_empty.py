"""No token, no row, no document: nothing is computed, states pass, and shapes and dtypes are as ever."""

import dataclasses

import jax
import numpy as np
import pytest

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.testing import RandomGates, RandomProblem, results

BACKENDS = [None, Recurrent(), Chunked()]
PROBLEM = RandomProblem(batch=2, time=3, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=15)
KDA = RandomGates("channel", erase="head", owner="value", tied=True)
GATES = [KDA, RandomGates(), RandomGates("tile", write="head")]


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", GATES, ids=repr)
def test_without_tokens_states_and_their_gradients_pass(backend, gates):
    problem = dataclasses.replace(PROBLEM, time=0, gates=gates)
    cotangents = problem.cotangents("float32", "float32")
    actual = results(backend, problem.arguments(), cotangents)
    assert actual["out"].shape == (2, 0, 6, 5)
    np.testing.assert_array_equal(actual["final_state"], problem.arguments()["initial_state"])
    np.testing.assert_array_equal(actual["d_initial_state"], cotangents[1])
    assert actual["d_q"].shape == (2, 0, 2, 4)


@pytest.mark.smoke
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_tokens_and_states_the_state_is_zero(dtype):
    problem = dataclasses.replace(PROBLEM, time=0, state=False, gates=KDA, dtype=dtype)
    out, state = gated_delta(**problem.arguments())
    assert out.dtype == dtype and state.dtype == "float32"
    np.testing.assert_array_equal(state, np.zeros((2, 6, 4, 5)))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["none", "ids", "slots"])
def test_without_rows_results_have_no_rows(backend, packing):
    problem = dataclasses.replace(PROBLEM, batch=0, gates=KDA)
    arguments = problem.arguments()
    states = (0, 3) if packing == "slots" else (0,)
    arguments["initial_state"] = np.zeros((*states, 6, 4, 5), np.float32)
    if packing != "none":
        arguments["segment_ids"] = np.zeros((0, 3), np.int32)
    if packing == "slots":
        arguments["num_segments"] = 3
    out, state = jax.jit(gated_delta, static_argnames=("num_segments", "backend"))(**arguments, backend=backend)
    assert out.shape == (0, 3, 6, 5) and state.shape == (*states, 6, 4, 5)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_without_documents_every_token_is_padding(backend):
    problem = dataclasses.replace(PROBLEM, batch=1, gates=KDA, documents=((),), packing="offsets")
    actual = results(backend, problem.arguments(), problem.cotangents("float32", "float32"))
    assert actual["out"].shape == (1, 3, 6, 5) and not actual["out"].any()
    assert actual["final_state"].shape == (0, 6, 4, 5)
    assert not any(actual[name].any() for name in actual if name.startswith("d_"))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_without_tokens_packed_documents_are_empty(backend):
    problem = dataclasses.replace(PROBLEM, batch=1, time=0, gates=KDA, documents=((0, 0),), packing="offsets")
    actual = results(backend, problem.arguments(), problem.cotangents("float32", "float32"))
    np.testing.assert_array_equal(actual["final_state"], problem.arguments()["initial_state"])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["slots", "offsets"])
def test_a_document_without_tokens_leaves_a_state_that_is_not_finite_as_it_came(backend, packing):
    """In part: what is finite in it stays so."""
    problem = dataclasses.replace(PROBLEM, batch=1, gates=KDA, documents=((2, 0, 1),), packing=packing, slots=3)
    arguments = problem.arguments()
    state = np.array(arguments["initial_state"])
    documents = state[0] if packing == "slots" else state
    documents[1, 2, 1, 3] = np.nan
    arguments["initial_state"] = state
    _, final = gated_delta(**arguments, backend=backend)
    final = np.asarray(final).reshape(documents.shape)
    np.testing.assert_array_equal(final[1], documents[1])
    assert np.isfinite(final[[0, 2]]).all()
