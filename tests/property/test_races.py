"""Over two simulated cores no two grid steps of a kernel touch the same memory, and each gets its part right.

The TPU interpreter only prints what its detector of races finds, so its verdict is read from where it keeps it. Memory
that nobody wrote holds NaN.
"""

import dataclasses

import jax
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from gated_delta.pallas import PallasTPU, TileConfig, _layout
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, pullback

WATCHED = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
SIZES = dict(batch=2, time=33, key_heads=2, group=2, key_dim=8, value_dim=6, state=True, seed=3)
PROBLEMS = {
    "gdn": RandomProblem(**SIZES, gates=RandomGates("head", erase="head", owner="value", tied=True)),
    "kda in bfloat16": RandomProblem(
        **SIZES, dtype="bfloat16", gates=RandomGates("channel", erase="head", tied=True, log_decays="strong")
    ),
    "gdn2": RandomProblem(**SIZES, gates=RandomGates("channel", erase="channel", write="channel")),
    "sla": RandomProblem(**SIZES, gates=RandomGates("tile", decay_tiles=4, erase="head", tied=True)),
    "documents that share chunks": RandomProblem(
        **SIZES, documents=((5, -2, 1, 13), (-3, 18)), gates=RandomGates("head", erase="head", tied=True)
    ),
    "documents with states of their own": RandomProblem(
        **{**SIZES, "batch": 1},
        documents=((0, 5, 1, 0, 27),),
        packing="offsets",
        gates=RandomGates("channel", erase="head", tied=True),
    ),
}


def run(problem, residuals):
    """Results of both kernels, each with one key head in a block, and whether they raced."""
    pltpu.reset_tpu_interpret_mode_state()
    owners = problem.group if problem.gates.owner == "value" else 1
    kernel = PallasTPU(TileConfig(chunk_size=16, owners=owners, chunks=1), residuals=residuals, interpret=WATCHED)
    actual = pullback(kernel, problem)
    jax.block_until_ready(actual)
    assert interpreter.races is not None, "the interpreter did not look for races"
    return actual, interpreter.races.races_found


@pytest.mark.parametrize(
    "problem, residuals",
    [
        pytest.param(name, residuals, marks=() if (name, residuals) == ("gdn", "all") else pytest.mark.slow)
        for name in PROBLEMS
        for residuals in ("states", "all")
    ],
)
def test_no_kernel_races(problem, residuals):
    problem = PROBLEMS[problem]
    actual, raced = run(problem, residuals)
    assert not raced
    assert_close(actual, expected(problem), problem)


def test_a_planted_race_is_found(monkeypatch):
    """Every batch row writes the final states of the first."""

    def first_row(blocks):
        spec = honest(blocks)
        return dataclasses.replace(spec, index_map=lambda b, *rest: spec.index_map(0 * b, *rest))

    honest = _layout.Blocks.slot
    monkeypatch.setattr(_layout.Blocks, "slot", first_row)
    _, raced = run(dataclasses.replace(PROBLEMS["gdn"], seed=4, state=False), "states")
    assert raced
