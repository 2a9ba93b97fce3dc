"""A token that is not finite spoils its own document and heads from there on, and nothing else: bit for bit."""

import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gated_delta import Chunked, gated_delta
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import RandomGates, RandomProblem, check_law, quick_jit, results

from .subjects import BACKENDS

DOCUMENTS = ((5, 0, 9, 7), (-2, 16, 1, -1, 1))
PROBLEM = RandomProblem(
    batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=11, documents=DOCUMENTS
)
GATES = {
    "value": RandomGates("channel", erase="channel", write="channel", owner="value"),
    "key": RandomGates("channel", erase="channel", write="channel", owner="key"),
}
ARRAYS = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")
GATE_ARRAYS = ("log_decay", "erase", "write")


def plant(arguments, name, index, value):
    """The arguments with one element of one array changed."""

    def changed(x):
        x = np.array(x)
        x[index] = value
        return x

    if name in GATE_ARRAYS:
        gates = arguments["gates"]
        where = [getattr(gates, other) if other != name else changed(getattr(gates, other)) for other in GATE_ARRAYS]
        return {**arguments, "gates": jax.tree.unflatten(jax.tree.structure(gates), where)}
    return {**arguments, name: changed(arguments[name])}


def has_own_states(problem):
    return problem.documents is not None and problem.packing == "slots"


def document_of(problem, name, index):
    """The document, within its row, that an element of an array belongs to; -1 for padding."""
    ids = problem.segment_ids
    if name != "initial_state":
        return ids[index[:2]]
    return index[1] if has_own_states(problem) else ids[index[0]][ids[index[0]] >= 0].min()


def spoiled_by(problem, name, index):
    """Which outputs `[batch, time, value_heads]` and states `[*states, value_heads]` may be spoiled."""
    ids = problem.segment_ids
    out = np.zeros((problem.batch, problem.time, problem.value_heads), bool)
    state = np.zeros(problem.state_shape[:-2], bool)
    row, head = index[0], index[-3] if name == "initial_state" else index[2]
    document = document_of(problem, name, index)
    if name == "initial_state":
        tokens, heads = ids[row] == document, slice(head, head + 1)
    else:
        tokens = (ids[row] == document) & (np.arange(problem.time) >= index[1])
        shared = name in ("q", "k") or (name in ("log_decay", "erase") and problem.gates.owner == "key")
        heads = slice(head * problem.group, (head + 1) * problem.group) if shared else slice(head, head + 1)
    if document < 0 or not (ids[row] == document).any():  # padding; or a state that no token continues
        return out, state
    out[row, tokens, heads] = True
    if has_own_states(problem):
        state[row, document, heads] = True
    else:
        state[row, heads] = document == ids[row].max()
    return out, state


def check(backend, problem, name, index, value):
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    clean = results(backend, arguments, cotangents)
    planted = plant(arguments, name, index, value)
    actual = results(backend, planted, cotangents)
    out, state = spoiled_by(problem, name, index)
    if name == "initial_state" and has_own_states(problem) and not state.any():  # no token continues it: it is as given
        np.testing.assert_array_equal(actual["final_state"][index[:2]], planted[name][index[:2]])
        actual["final_state"] = plant({"it": actual["final_state"]}, "it", index, clean["final_state"][index])["it"]
    for result, marks in (("out", out), ("final_state", state)):
        assert np.isnan(actual[result][marks]).all(), f"{result} is not marked"
        np.testing.assert_array_equal(actual[result][~marks], clean[result][~marks], err_msg=result)
    # gradients: finite everywhere, and unchanged in every document and group of heads that has no mark
    ids, group = problem.segment_ids, problem.group
    for gradient in [key for key in actual if key.startswith("d_")]:
        assert np.isfinite(actual[gradient]).all(), gradient
    touched = np.zeros_like(ids, bool)
    document = document_of(problem, name, index)
    if document >= 0:
        touched[index[0]] = ids[index[0]] == document
    heads = out.any((0, 1)) | state.any(tuple(range(state.ndim - 1)))
    for gradient in ("q", "k", "v", *GATE_ARRAYS):
        x, wanted = actual[f"d_{gradient}"], clean[f"d_{gradient}"]
        np.testing.assert_array_equal(x[~touched], wanted[~touched], err_msg=f"d_{gradient} of another document")
        other = ~heads if x.shape[2] == problem.value_heads else ~heads.reshape(-1, group).any(1)
        np.testing.assert_array_equal(x[:, :, other], wanted[:, :, other], err_msg=f"d_{gradient} of another head")


@st.composite
def plants(draw, problem):
    """One element of one array of `problem`."""
    name = draw(st.sampled_from(ARRAYS))
    arguments = problem.arguments()
    shape = np.shape(arguments[name] if name in arguments else getattr(arguments["gates"], name))
    return name, tuple(draw(st.integers(0, n - 1)) for n in shape)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("owner", GATES)
@pytest.mark.parametrize("packing", ["none", "ids", "slots"])
@given(data=st.data())
def test_what_is_not_finite_stays_in_its_document_and_heads(backend, owner, packing, data):
    problem = dataclasses.replace(PROBLEM, gates=GATES[owner])
    changes = {"documents": None} if packing == "none" else {"packing": packing, "slots": 5}
    problem = dataclasses.replace(problem, **changes)
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    name, index = data.draw(plants(problem))
    if name == "log_decay" and value == -np.inf:
        value = np.nan  # a full forget is a legal gate
    check(backend, problem, name, index, value)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("name", ["q", "v", "write", "initial_state"])
def test_what_is_huge_stays_in_its_document_and_heads(backend, name):
    """1e30 is finite: its own document overflows or not, others do not change."""
    problem = dataclasses.replace(PROBLEM, gates=GATES["value"], packing="slots", slots=5)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    index = {"initial_state": (0, 2, 4, 1, 1), "q": (0, 7, 1, 2)}.get(name, (0, 7, 4, 2))
    out, state = spoiled_by(problem, name, index)
    clean, actual = (results(backend, x, cotangents) for x in (arguments, plant(arguments, name, index, 1e30)))
    np.testing.assert_array_equal(actual["out"][~out], clean["out"][~out])
    np.testing.assert_array_equal(actual["final_state"][~state], clean["final_state"][~state])
    other = problem.segment_ids != 2
    other[1] = True
    for gradient in ("d_q", "d_k", "d_v", "d_log_decay", "d_erase", "d_write"):
        np.testing.assert_array_equal(actual[gradient][other], clean[gradient][other], err_msg=gradient)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_key_whose_square_overflows_counts_as_not_finite(backend):
    problem = dataclasses.replace(PROBLEM, gates=GATES["value"], packing="slots", slots=5)
    check(backend, problem, "k", (0, 7, 1, 2), 1e30)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_neighbours_of_huge_values_in_other_rows_heads_and_documents_do_not_change(backend):
    """Everything but one document of one head of one row is 1e30 or NaN: that one is as if alone."""
    problem = dataclasses.replace(PROBLEM, gates=GATES["value"], packing="slots", slots=5)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    mine = problem.segment_ids == 2
    mine[1] = False
    clean = results(backend, arguments, cotangents)
    for value in (1e30, np.nan):
        loud = {name: np.where(mine[:, :, None, None], arguments[name], np.float32(value)) for name in "qkv"}
        actual = results(backend, {**arguments, **loud}, cotangents)
        for name in ("out", "d_q", "d_k", "d_v", "d_log_decay", "d_erase", "d_write"):
            np.testing.assert_array_equal(actual[name][mine], clean[name][mine], err_msg=name)
        np.testing.assert_array_equal(actual["final_state"][0, 2], clean["final_state"][0, 2])


def test_a_bad_token_reaches_no_later_call_that_starts_afresh():
    """NaN in the state spoils what continues from it; without it nothing remains in a compiled function."""
    problem = RandomProblem(time=4, gates=RandomGates("head", erase="head", tied=True))
    arguments = problem.arguments()
    run = quick_jit(lambda arguments: gated_delta(**arguments))
    before, _ = run(arguments)
    _, state = run(plant(arguments, "v", (0, 3, 0, 0), np.nan))
    assert np.isnan(state).all()
    continued, _ = gated_delta(**arguments, initial_state=state)
    assert np.isnan(continued).all()
    np.testing.assert_array_equal(run(arguments)[0], before)


SHARING = RandomProblem(seed=49, time=70, key_dim=8, value_dim=6, documents=((34, 36, 0),))
"""Both documents have tokens between 32 and 64, whose decays are measured from one place where there is one document.
"""
SHARED = {
    "head": RandomGates("head", erase="head", owner="value", tied=True),
    "tile": RandomGates("tile", erase="head", tied=True),
    "channel": RandomGates("channel", erase="channel", write="channel"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gates", SHARED.values(), ids=SHARED)
@pytest.mark.parametrize(
    "backend",
    [
        Chunked(64, branch=True),
        pytest.param(Chunked(64, branch=False), marks=pytest.mark.slow),
        pytest.param(PallasTPU(TileConfig(chunk_size=64), interpret=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_neighbour_leaves_no_rounding_in_the_gradient_of_a_decay(backend, gates, dtype):
    problem = dataclasses.replace(SHARING, gates=gates, dtype=dtype)
    check_law("no_leak_between_documents", backend, problem=problem, value=1e30, token=47, row=0)
    check_law("no_leak_between_documents", backend, problem=problem, value=1e30, token=3, row=0)
