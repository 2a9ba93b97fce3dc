"""How many tokens are solved together, and what is kept for the backward pass, changes no number beyond rounding."""

import pytest

from gated_delta import Chunked, Recurrent
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, pullback

LONG = RandomProblem(time=130, key_heads=1, group=2, key_dim=4, value_dim=3, state=True, seed=6)
WAYS = [
    Chunked(16, residuals="none"),  # 9 chunks: one group of 8 and one chunk more
    Chunked(16, residuals="all"),
    Chunked(16, residuals="states"),
    Chunked(32),
    Chunked(64, residuals="all"),
    Chunked(64, residuals="none"),
    Chunked(128),
]
COARSE = [(Chunked(128), "head", "value"), (Chunked(16, residuals="none"), "tile", "key")]


@pytest.mark.parametrize("backend, decay, owner", [*((way, "channel", "key") for way in WAYS), *COARSE], ids=str)
def test_every_chunk_size_and_every_choice_of_residuals_agrees(backend, decay, owner):
    gates = RandomGates(decay=decay, erase="head", owner=owner, tied=True, log_decays="resets")
    problem = RandomProblem(**{**vars(LONG), "gates": gates})
    assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("every", [1, 7, 64, 1000])
def test_the_recurrence_may_keep_any_of_its_states(every):
    problem = RandomProblem(**{**vars(LONG), "time": 23, "gates": RandomGates("head", erase="head", tied=True)})
    assert_close(pullback(Recurrent(checkpoint_every=every), problem), expected(problem), problem)
