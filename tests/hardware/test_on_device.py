"""On an accelerator, if there is one, every backend that runs there gives what the recurrence gives on the CPU.

`JAX_PLATFORMS=tpu make test ARGS=tests/hardware`, or `cuda`.
"""

import dataclasses

import jax
import numpy as np
import pytest

from gated_delta import Chunked, Recurrent
from gated_delta.pallas import PallasTPU
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, pullback, results, why_not

PLATFORM = jax.default_backend()
pytestmark = pytest.mark.skipif(PLATFORM == "cpu", reason="no accelerator: jax runs on the CPU here")

SIZES = dict(batch=2, time=200, key_heads=4, group=2, key_dim=128, value_dim=128, state=True, seed=5)
GATES = {
    "gdn": RandomGates("head", erase="head", owner="value", tied=True),
    "kda": RandomGates("channel", erase="head", tied=True),
    "kda, strong decays": RandomGates("channel", erase="head", tied=True, log_decays="strong"),
    "gdn2": RandomGates("channel", erase="channel", write="channel"),
    "sla": RandomGates("tile", decay_tiles=2, erase="head", tied=True),
    "linear attention": RandomGates(write="head"),
}
BACKENDS = [PallasTPU(), Chunked(), Recurrent()]


def check(backend, problem):
    if (reason := why_not(backend, problem)) is not None:
        pytest.skip(f"{backend}: {reason}")
    assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_results_and_gradients_agree_with_the_recurrence(gates, backend, dtype):
    check(backend, RandomProblem(**SIZES, dtype=dtype, gates=GATES[gates]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["ids", "offsets"])
def test_documents_agree_too(packing, backend, dtype):
    documents = {"ids": ((20, -3, 177), (200,)), "offsets": ((0, 90, 1, 109),)}[packing]
    problem = RandomProblem(**SIZES, dtype=dtype, gates=GATES["kda"], packing=packing, documents=documents)
    check(backend, dataclasses.replace(problem, batch=len(documents)))


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_bad_token_spoils_its_document_only(backend):
    problem = RandomProblem(**SIZES, gates=GATES["gdn"], documents=((20, 180), (200,)))
    if (reason := why_not(backend, problem)) is not None:
        pytest.skip(f"{backend}: {reason}")
    arguments = problem.arguments()
    arguments["k"] = np.array(arguments["k"])
    arguments["k"][0, 9, 0, 3] = np.nan
    out = np.isnan(results(backend, arguments, problem.cotangents("float32", "float32"))["out"])
    assert out[0, 9:20, :2].all() and not out[0, 20:].any() and not out[0, :, 2:].any() and not out[1].any()
