"""Bugs planted in a plain implementation: the law that names each finds it; nothing is found where there is none."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from gated_delta import variants
from gated_delta.testing import (
    LAWS,
    LAYOUTS,
    Capabilities,
    Implementation,
    RandomGates,
    RandomProblem,
    ask,
    assert_close,
    check_law,
    expected,
    plain,
)
from gated_delta.testing._conformance import ask_law, limited

from .plain import Plain
from .planted import FROM_REPORTS, OWN, TRACED, Bug, mask_after_exp
from .test_strategies import draws

BUGS = {**FROM_REPORTS, **OWN}
RIGHT = Implementation(
    "Plain()", Capabilities(), Plain(), variations={"again": Implementation("", Capabilities(), Plain())}
)


def outcomes(law, make):
    """Of 100 examples for each of three seeds; not made small, for it is enough that they fail."""
    return [ask_law(LAWS[law], make(), max_examples=100, seed=seed, shrink=False) for seed in range(3)]


@pytest.mark.parametrize("name", BUGS)
def test_the_law_that_names_a_bug_finds_it(name):
    bug = BUGS[name]
    for outcome in outcomes(bug.law, lambda: bug.plant(name)):
        assert outcome.status == "failed", f"{bug.law} passed {outcome.examples} examples"
        assert outcome.line.startswith(f'check_law("{bug.law}", ')


@pytest.mark.parametrize("name", TRACED)
def test_the_law_that_names_a_bug_of_a_traced_function_finds_it(name):
    law, function = TRACED[name]
    subject = plain(function, capabilities=Capabilities())
    subject = Implementation(name, Capabilities(gradients=False), subject.run, function)
    for outcome in outcomes(law, lambda: subject):
        assert outcome.status == "failed", f"{law} passed {outcome.examples} examples"


PACKED_BUGS = ("packed rows begin with an empty state", "boundary at the start of a chunk missed")
ONE = (variants.gdn, variants.kda, variants.gdn2)


@pytest.mark.parametrize("variant", ONE, ids=("gdn", "kda", "gdn2"))
@pytest.mark.parametrize("name", PACKED_BUGS)
def test_a_kernel_of_one_variant_that_takes_ids_alone_is_found_out_too(name, variant):
    offered = Capabilities.of(variant, packing=("ids",))
    for outcome in outcomes("packing", lambda: dataclasses.replace(BUGS[name].plant(name), capabilities=offered)):
        assert outcome.status == "failed", f"packing passed {outcome.examples} examples"


def one_nat_at_most(self, log_decay):
    return np.cumsum(np.maximum(log_decay, -1), axis=2)


@pytest.mark.parametrize("limit, changes", [(2.0, {"sums": one_nat_at_most}), (10.0, {"pair_decay": mask_after_exp})])
def test_decays_are_asked_up_to_the_strongest_that_is_offered(limit, changes):
    """With the mask after the exponential 16 tokens overflow from 5.5 nats a token on."""
    offered = Capabilities(max_decay=limit)
    plant = Bug("extreme_gates", changes).plant
    for outcome in outcomes("extreme_gates", lambda: dataclasses.replace(plant("bug"), capabilities=offered)):
        assert outcome.status == "failed", f"extreme_gates passed {outcome.examples} examples"
    right = ask_law(LAWS["extreme_gates"], dataclasses.replace(RIGHT, capabilities=offered), max_examples=10)
    assert right.status == "passed", right


AT_ONCE = {
    "gates of the key head for value heads": (1, Capabilities.of("gdn")),
    "decays of key heads in turn": (2, Capabilities(decay=("head",), erase=("head",), tied=(True,))),
    "keys wrong beyond 16 channels": (2, Capabilities.of("gdn")),
    "beta halved from token 131 on": (3, Capabilities.of("gdn")),
    "no beta in a short last launch of 256": (3, Capabilities.of("kda")),
}


@pytest.mark.parametrize("law", ["recurrence", "gradients"])
@pytest.mark.parametrize("name", AT_ONCE)
def test_groups_owners_real_sizes_and_long_rows_are_asked_first_whatever_the_time(name, law):
    """Each was missed once: by drawn problems, whose first had no groups, by sizes of at most 8, by 130 tokens."""
    examples, offered = AT_ONCE[name]
    subject = dataclasses.replace(BUGS[name].plant(name), capabilities=offered)
    outcome = ask_law(LAWS[law], subject, max_examples=examples, seconds=0.0, shrink=False)
    assert outcome.status == "failed", f"{law} passed {outcome.examples} examples"


def test_every_granularity_of_decay_and_erase_is_asked_with_every_owner_and_heads_in_groups():
    first = Capabilities().first()
    assert all(p.group > 1 and p.key_heads > 1 and p.gates.log_decays == "mild" for p in first) and len(first) < 13
    assert {(p.gates.decay, p.gates.owner) for p in first} >= set(
        itertools.product(("head", "tile", "channel"), ("key", "value"))
    )
    assert {(p.gates.erase, p.gates.owner) for p in first} >= set(
        itertools.product(("head", "channel"), ("key", "value"))
    )
    assert {(p.gates.write, p.gates.write_owner) for p in first} >= set(
        itertools.product(("head", "channel"), ("key", "value"))
    )
    offered = Capabilities(decay=("head",), erase=("head",), write=("head",), tied=(True,))
    assert [kind.owner for kind in offered.gates()] == ["value", "key"]
    assert {p.gates.owner for p in offered.layouts() if p.group > 1 and p.key_heads > 1} == {"key", "value"}
    limited_sizes = Capabilities(key_dims=(16,), value_dims=(8, 32), time_multiple=64, grouped=False, max_decay=0.1)
    assert all(limited_sizes.why_not(p) is None for p in limited_sizes.first()) and limited_sizes.first()


CANNOT_HAVE = {
    "decays of key heads in turn": ONE,
    "tiles in turn": ONE,
    "erase and write swapped": ONE[:2],
    "write gate forgotten": ONE[:2],
    "decays per channel in bfloat16": ONE[:1],
    "gradient of beta from its erase alone": ONE[2:],
    "gates of the key head for value heads": ONE[2:],
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", ONE, ids=("gdn", "kda", "gdn2"))
@pytest.mark.parametrize("name", BUGS)
def test_every_bug_that_a_kernel_of_one_variant_can_have_is_found(name, variant):
    subject = limited(BUGS[name].plant(name), [variant], x64=False)
    laws = dict.fromkeys((BUGS[name].law, "recurrence", "shapes"))
    found = any(ask_law(LAWS[law], subject, max_examples=100, shrink=False).status == "failed" for law in laws)
    assert found == (variant not in CANNOT_HAVE.get(name, ()))


@pytest.mark.parametrize("variant", ONE, ids=("gdn", "kda", "gdn2"))
def test_packed_problems_of_one_variant_have_a_state_several_rows_and_documents_that_begin_with_a_chunk(variant):
    for way in ("ids", "slots", "offsets"):
        subject = dataclasses.replace(RIGHT, capabilities=Capabilities.of(variant, packing=(way,)))
        drawn = [case["problem"] for case in draws(LAWS["packing"].cases(subject), 100)]
        hard = [p for p in drawn if p.state and (p.batch > 1 or way == "offsets")]
        begins = [np.flatnonzero(np.diff(row, prepend=-2)) for p in hard for row in p.segment_ids]
        assert max(p.time for p in hard) > 64 and any((begin % 16).any() for begin in begins)
        assert all(any(size in begin for begin in begins) for size in (16, 64)), way


@pytest.mark.parametrize("variant", ONE, ids=("gdn", "kda", "gdn2"))
def test_without_a_bug_a_kernel_of_one_variant_passes(variant):
    subject = dataclasses.replace(RIGHT, capabilities=Capabilities.of(variant))
    for seed in range(3):
        report = ask(subject, only=["packing", "resume_documents", "zero_length"], max_examples=2, seed=seed)
        assert {outcome.status for outcome in report.outcomes} == {"passed"}, report


def test_there_are_enough_bugs_and_every_law_names_one():
    assert len(BUGS) + len(TRACED) >= 70 and len(FROM_REPORTS) >= 36
    named = {bug.law for bug in BUGS.values()} | {law for law, _ in TRACED.values()}
    assert named == set(LAWS)
    assert all(bug.case for bug in FROM_REPORTS.values())


def test_a_bug_is_where_it_was_planted():
    """Every one changes a method that exists, and no two are the same."""
    for name, bug in BUGS.items():
        assert all(hasattr(Plain, changed) for changed in bug.changes), name
    counts = collections.Counter((bug.law, *sorted(map(repr, bug.changes.items()))) for bug in BUGS.values())
    assert max(counts.values()) == 1


@pytest.mark.slow
def test_without_a_bug_every_law_holds():
    report = ask(RIGHT, max_examples=10)
    assert report.passed, report
    assert {o.law for o in report.outcomes if o.status == "not offered"} == {"transforms"}


@pytest.mark.slow
def test_without_a_bug_twenty_runs_find_none():
    for seed in range(100, 120):
        report = ask(RIGHT, max_examples=12, seed=seed)
        assert report.passed, report


@pytest.mark.parametrize("layout", LAYOUTS, ids=repr)
def test_the_plain_implementation_is_right(layout):
    cotangents = layout.cotangents("float32", "float32")
    assert_close(Plain()(layout.arguments(), cotangents), expected(layout), layout)


def test_the_line_of_a_failure_repeats_it():
    bug = BUGS["head index modulo heads"]
    subject = bug.plant("modulo")
    outcome = ask_law(LAWS["grouping"], subject, max_examples=100)
    names = {
        "check_law": check_law,
        "Plain": lambda: subject,
        "RandomProblem": RandomProblem,
        "RandomGates": RandomGates,
    }
    with pytest.raises(AssertionError, match="budget"):
        eval(outcome.line, names)
    names["Plain"] = lambda: RIGHT
    assert eval(outcome.line, names) <= 1


def test_a_failing_case_is_made_small():
    bug = BUGS["no scale is a scale of one"]
    outcome = ask_law(LAWS["recurrence"], bug.plant("scale"), max_examples=100)
    assert outcome.status == "failed" and 'check_law("recurrence", Plain(), problem=RandomProblem(' in outcome.line
    assert "time=" not in outcome.line and "seed=" not in outcome.line  # one token, seed 0


def test_a_number_that_is_wrong_by_less_than_the_budget_is_no_failure():
    def nearly(arguments, cotangents):
        return {name: x * np.float32(1 + 2e-6) for name, x in Plain()(arguments, cotangents).items()}

    outcome = ask_law(LAWS["recurrence"], Implementation("nearly", Capabilities(), nearly))
    assert outcome.status == "passed" and 0.1 < outcome.worst < 1
