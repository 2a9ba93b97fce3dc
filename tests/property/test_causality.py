"""What comes later changes nothing, bit for bit: not outputs, not gradients, in the same compiled program."""

import dataclasses

import numpy as np
import pytest

from gated_delta import Chunked
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import LAWS, RandomGates, RandomProblem, implementation, results

from .subjects import BACKENDS

TIME, CUTS = 21, (0, 1, 7, 14, 15, 16, 19, 20)
PROBLEM = RandomProblem(batch=2, time=TIME, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=7)
GATES = {
    "head": RandomGates("head", erase="head", owner="value", tied=True, log_decays="mild"),
    "tile": RandomGates("tile", erase="head", owner="key", tied=True, log_decays="mixed"),
    "channel": RandomGates("channel", erase="channel", write="channel", owner="key", log_decays="mixed"),
    "bounded": RandomGates("channel", erase="head", owner="value", tied=True, log_decay_min=-5.0, log_decays="bounded"),
    "none": RandomGates(erase="head", tied=True),
}


def cotangents_until(problem, cut):
    out, state = problem.cotangents(problem.dtype, "float32")
    out[:, cut + 1 :] = 0
    return out, np.zeros_like(state)


def check(backend, problem, cuts=CUTS):
    subject = implementation(backend)
    for cut in cuts:
        LAWS["causality"].check(subject, problem=problem, cut=cut)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_a_prefix_does_not_depend_on_what_follows(backend, gates):
    check(backend, dataclasses.replace(PROBLEM, gates=GATES[gates]))


@pytest.mark.parametrize("inverse", ["approx", "substitution"])
def test_a_prefix_does_not_depend_on_what_follows_with_another_inverse(inverse):
    check(Chunked(16), dataclasses.replace(PROBLEM, gates=GATES["head"], inverse=inverse))


def test_a_prefix_does_not_depend_on_what_follows_in_bfloat16():
    check(Chunked(16), dataclasses.replace(PROBLEM, gates=GATES["channel"], dtype="bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize("gates", ["tile", "channel"])
def test_a_prefix_does_not_depend_on_the_path_that_later_decays_make_a_kernel_take(gates):
    check_paths(PallasTPU(TileConfig(chunk_size=64, chunks=1), interpret=True), gates, "bfloat16")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prefix_does_not_depend_on_the_branch_that_later_decays_make_a_chunk_take(dtype):
    check_paths(Chunked(64, branch=True), "channel", dtype)


def check_paths(backend, gates, dtype):
    """A chunk that forgets much takes another path; rows before keep their bits."""
    problem = dataclasses.replace(
        PROBLEM, batch=1, time=70, dtype=dtype, gates=dataclasses.replace(GATES[gates], log_decays="mild")
    )
    arguments = problem.arguments()
    before = results(backend, arguments, cotangents_until(problem, 20))
    steep = np.array(arguments["gates"].log_decay)
    steep[:, 21:] = -50
    gates = dataclasses.replace(arguments["gates"], log_decay=steep)
    after = results(backend, {**arguments, "gates": gates}, cotangents_until(problem, 20))
    for name in ("out", "d_q", "d_k", "d_v", "d_log_decay", "d_erase"):
        np.testing.assert_array_equal(after[name][:, :21], before[name][:, :21], err_msg=name)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["ids", "slots"])
def test_a_prefix_does_not_depend_on_where_later_documents_end(backend, packing):
    gates = GATES["channel"]
    documents = ((11, 4, 5), (3, 17))
    problem = dataclasses.replace(PROBLEM, gates=gates, documents=documents, packing=packing, slots=5)
    before = results(backend, problem.arguments(), cotangents_until(problem, 10))
    for later in (((11, 0, 2, 8), (3, 8, 10)), ((16, 5), (3, 18)), ((11, -5, 3), (3, 8, -2, 1, 1))):
        other = dataclasses.replace(problem, documents=later)
        after = results(backend, other.arguments(), cotangents_until(problem, 10))
        for name in ("out", "d_q", "d_k", "d_v", "d_log_decay", "d_erase", "d_write"):
            np.testing.assert_array_equal(before[name][:, :11], after[name][:, :11], err_msg=f"{name}, {later}")
