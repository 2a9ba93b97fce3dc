"""Every backend gives what the recurrence gives in float64: outputs, final state, and the gradient of every input."""

import dataclasses
import itertools

import pytest
from hypothesis import assume, example, given, target

from gated_delta import Chunked
from gated_delta.testing import (
    DECAY_FAMILIES,
    KEY_FAMILIES,
    STRENGTH_FAMILIES,
    RandomGates,
    RandomKeys,
    RandomProblem,
    assert_close,
    backends,
    expected,
    problems,
    pullback,
    relative_error,
    why_not,
)

VARIANTS = {
    "linear_attention": RandomGates(),
    "retnet": RandomGates(decay="head"),
    "mamba2": RandomGates(decay="head", write="head", owner="value"),
    "gla": RandomGates(decay="channel"),
    "deltanet": RandomGates(erase="head", tied=True),
    "gdn": RandomGates(decay="head", erase="head", owner="value", tied=True),
    "kda": RandomGates(decay="channel", erase="head", owner="value", tied=True),
    "gdn2": RandomGates(decay="channel", erase="channel", write="channel"),
    "sla": RandomGates(decay="tile", decay_tiles=4, erase="head", tied=True),
}


DECAYS, ERASES, WRITES = ("none", "head", "tile", "channel"), ("none", "head", "channel"), ("one", "head", "channel")


def combinations() -> list[RandomGates]:
    """Every granularity of decay, erase and write, both owners where a gate has one, both ties where they can be."""
    out = []
    for decay, erase in itertools.product(DECAYS, ERASES):
        owners = ("key",) if decay == erase == "none" else ("key", "value")
        for owner in owners:
            out += [RandomGates(decay=decay, erase=erase, write=write, owner=owner) for write in WRITES]
            if erase == "head":
                out.append(RandomGates(decay=decay, erase=erase, owner=owner, tied=True))
    # a write gate of the key heads is shared by the group, whoever owns the others
    for owner, write in itertools.product(("key", "value"), WRITES[1:]):
        out.append(RandomGates(decay="head", erase="channel", write=write, owner=owner, write_owner="key"))
    return out


def pairs_at_once() -> list:
    """`combinations()`, those without a marker chosen so that any two choices meet in one of them."""

    def chosen(gates):
        places = DECAYS.index(gates.decay) + ERASES.index(gates.erase) + WRITES.index(gates.write)
        return gates.tied or (places + (gates.owner == "value")) % 2 == 0

    return [gates if chosen(gates) else pytest.param(gates, marks=pytest.mark.slow) for gates in combinations()]


@pytest.mark.parametrize("gates", pairs_at_once(), ids=repr)
def test_every_combination_of_granularity_owner_and_tie_agrees_in_grouped_heads(gates):
    problem = RandomProblem(
        batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, gates=gates, state=True, seed=1
    )
    branch = gates.decay == "channel" and gates.tied  # which gates there are beside the decay is nothing to a branch
    assert_close(pullback(Chunked(16, branch=branch), problem), expected(problem), problem)


@pytest.mark.parametrize("backend", backends(), ids=str)
@pytest.mark.parametrize("name", VARIANTS)
def test_every_named_variant_agrees_without_grouping(backend, name):
    problem = RandomProblem(time=19, key_heads=2, key_dim=8, value_dim=5, gates=VARIANTS[name], state=True, seed=2)
    assert_close(pullback(backend, problem), expected(problem), problem)


LESS_TELLING = [pytest.param(time, marks=pytest.mark.slow) for time in (2, 15, 16, 17, 32, 127)]


@pytest.mark.parametrize("time", [1, 63, 64, 65, 128, 129, *LESS_TELLING])
def test_every_length_around_a_chunk_agrees(time):
    problem = RandomProblem(time=time, key_dim=4, value_dim=3, gates=VARIANTS["kda"], state=True, seed=3)
    assert_close(pullback(Chunked(64, branch=time % 2 == 1), problem), expected(problem), problem)


@pytest.mark.parametrize("decay, branch", [("head", False), ("tile", False), ("channel", False), ("channel", True)])
def test_no_gate_and_no_key_is_too_extreme(decay, branch):
    gates = RandomGates(decay=decay, erase="channel", write="head", owner="value", erase_max=2.0)
    problem = RandomProblem(time=70, group=2, key_dim=8, value_dim=5, gates=gates, state=True, seed=4)
    strengths = STRENGTH_FAMILIES if decay == "channel" else ("mixed",)
    for log_decays, keys, strength in itertools.product(DECAY_FAMILIES, KEY_FAMILIES, strengths):
        values = dataclasses.replace(gates, log_decays=log_decays, strengths=strength)
        extreme = dataclasses.replace(problem, gates=values, keys=RandomKeys(keys))
        assert_close(pullback(Chunked(64, branch=branch), extreme), expected(extreme), extreme)


EVERYTHING_ERASED = RandomProblem(  # and nothing decays: 1e-8 remains of `d_log_decay`
    seed=165,
    time=8,
    keys=RandomKeys("flipped"),
    gates=RandomGates("head", erase="head", owner="value", tied=True, log_decays="zero", strengths="one"),
    documents=((3,),),
)


@pytest.mark.parametrize("backend", backends(), ids=str)
@given(problem=problems())
@example(problem=EVERYTHING_ERASED)
def test_any_problem_agrees(backend, problem):
    assume(why_not(backend, problem) is None)
    actual, wanted = pullback(backend, problem), expected(problem)
    target(relative_error(actual, wanted, problem), label="error in budgets")
    assert_close(actual, wanted, problem)
