"""Packed documents are separate runs: outputs, states, and gradients. Any documents: test_conformance."""

import dataclasses

import jax
import numpy as np
import pytest

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.testing import (
    RandomGates,
    RandomProblem,
    assert_close,
    expected,
    pullback,
    results,
)

BACKENDS = [Recurrent(), Chunked(16)]
GATES = RandomGates("channel", erase="head", owner="value", tied=True)
ROW = RandomProblem(time=33, group=2, key_dim=4, value_dim=3, gates=GATES, state=True, documents=((),), seed=8)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["ids", "slots", "offsets"])
def test_a_document_may_end_at_any_token_of_a_chunk(backend, packing):
    for end in range(ROW.time + 1):
        problem = dataclasses.replace(ROW, documents=((end, ROW.time - end),), packing=packing, slots=2)
        assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["slots", "offsets"])
def test_every_token_may_be_a_document(backend, packing):
    problem = dataclasses.replace(ROW, documents=((1,) * ROW.time,), packing=packing, slots=ROW.time)
    assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_the_three_ways_to_pack_say_the_same(backend):
    documents = ((5, 0, 16, 1, 8),)  # and 3 tokens of padding
    offsets = dataclasses.replace(ROW, documents=documents, packing="offsets")
    slots = dataclasses.replace(offsets, packing="slots", slots=5)
    by_offset = pullback(backend, offsets)
    by_slot = pullback(backend, slots)
    for name in ("final_state", "d_initial_state"):
        by_slot[name] = by_slot[name][0]
    assert_close(by_slot, by_offset, offsets)
    only_ids = dataclasses.replace(slots, packing="ids", state=False)
    without_states = dataclasses.replace(slots, state=False)
    assert_close({"out": pullback(backend, only_ids)["out"]}, {"out": pullback(backend, without_states)["out"]}, slots)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_ids_are_names_and_only_their_changes_count(backend):
    problem = dataclasses.replace(ROW, documents=((5, 9, 2, 17),))
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    renamed = np.array([3, 7, 8, 2**30])[arguments["segment_ids"]].astype(np.int32)
    one, two = (
        results(backend, {**arguments, "segment_ids": ids}, cotangents) for ids in (arguments["segment_ids"], renamed)
    )
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["slots", "offsets"])
def test_a_document_without_tokens_leaves_its_state_bit_for_bit(backend, packing):
    problem = dataclasses.replace(ROW, documents=((0, 10, 0, 23, 0),), packing=packing, slots=5)
    actual = pullback(backend, problem)
    begin, d_end = problem.arguments()["initial_state"], problem.cotangents("float32", "float32")[1]
    for document in (0, 2, 4):
        index = document if packing == "offsets" else (0, document)
        np.testing.assert_array_equal(actual["final_state"][index], begin[index])
        np.testing.assert_array_equal(actual["d_initial_state"][index], d_end[index])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_row_without_real_tokens_keeps_its_state_bit_for_bit(backend):
    problem = dataclasses.replace(ROW, documents=((-5,),))
    actual = pullback(backend, problem)
    np.testing.assert_array_equal(actual["final_state"], problem.arguments()["initial_state"])
    np.testing.assert_array_equal(actual["d_initial_state"], problem.cotangents("float32", "float32")[1])
    assert not actual["out"].any()


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["ids", "slots", "offsets"])
def test_tokens_past_the_last_document_are_zero_and_have_zero_gradients(backend, packing):
    problem = dataclasses.replace(ROW, documents=((7, 13),), packing=packing, slots=2)
    arguments = problem.arguments()
    loud = {name: np.array(arguments[name]) for name in "qkv"}
    for x in loud.values():
        x[:, 20:] = 1e3
    cotangents = problem.cotangents("float32", "float32")
    quiet, actual = results(backend, arguments, cotangents), results(backend, {**arguments, **loud}, cotangents)
    for name, x in actual.items():
        np.testing.assert_array_equal(x, quiet[name])
        if name not in ("final_state", "d_initial_state"):
            assert not x[:, 20:].any(), name


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked(64)], ids=str)
def test_three_documents_by_offsets_are_three_runs(backend):
    problem = RandomProblem(time=24, key_dim=4, value_dim=3, gates=GATES, documents=((9, 1, 14),), packing="offsets")
    out, final = jax.jit(gated_delta, static_argnames="backend")(**problem.arguments(), backend=backend)
    wanted = expected(problem)
    assert_close({"out": out, "final_state": final}, {name: wanted[name] for name in ("out", "final_state")}, problem)
