"""Strategies draw what they claim, shrink to little, and print as the line that rebuilds what was drawn."""

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings
from hypothesis.vendor.pretty import pretty

import gated_delta.testing
from gated_delta import Variant
from gated_delta.testing import (
    DECAY_FAMILIES,
    KEY_FAMILIES,
    LAYOUTS,
    PACKED_LAYOUTS,
    STRENGTH_FAMILIES,
    RandomGates,
    RandomKeys,
    RandomProblem,
    gates,
    keys,
    lengths,
    problems,
    segment_ids,
    variants,
)


def draws(strategy, number=200):
    """What a strategy gives, again and again the same."""
    drawn = []

    @settings(max_examples=number, derandomize=True, database=None, phases=[Phase.generate])
    @given(strategy)
    def collect(x):
        drawn.append(x)

    collect()
    return drawn


def smallest(strategy, condition=lambda x: True):
    return find(strategy, condition, settings=settings(max_examples=500, derandomize=True, database=None))


def test_problems_reach_every_layout_and_family():
    drawn = draws(problems(), 500)
    assert {p.keys.family for p in drawn} == set(KEY_FAMILIES)
    assert {p.gates.log_decays for p in drawn} == set(DECAY_FAMILIES)
    assert {p.gates.strengths for p in drawn} == set(STRENGTH_FAMILIES)
    shapes = {(p.batch, p.time, p.key_heads, p.group, p.gates.decay, p.gates.erase, p.packing, p.slots) for p in drawn}
    assert shapes == {
        (p.batch, p.time, p.key_heads, p.group, p.gates.decay, p.gates.erase, p.packing, p.slots)
        for p in (*LAYOUTS, *PACKED_LAYOUTS)
    }


def test_layouts_cover_granularities_owners_ties_groups_and_lengths_about_a_chunk():
    every = (*LAYOUTS, *PACKED_LAYOUTS)
    assert {p.gates.decay for p in every} == {"none", "head", "tile", "channel"}
    assert {(p.gates.erase, p.gates.tied) for p in every} == {
        ("none", False),
        ("head", False),
        ("head", True),
        ("channel", False),
    } - {("head", False)}
    assert {p.gates.write for p in every} == {"one", "head", "channel"}
    assert {(p.gates.owner, p.group > 1) for p in every} == set(itertools.product(("key", "value"), (False, True)))
    assert {p.gates.erase_max for p in every} == {1.0, 2.0}
    assert {p.packing for p in PACKED_LAYOUTS} == {"ids", "slots", "offsets"}
    assert {p.time for p in LAYOUTS} >= {1, 15, 16, 17, 31, 33, 63, 64, 65}
    assert any(p.key_dim == p.value_dim for p in every)
    sizes = ("batch", "time", "key_heads", "value_heads", "key_dim", "value_dim")
    assert any(len({getattr(p, size) for size in sizes}) == len(sizes) for p in every), "all sizes different"


def test_shapes_are_few():
    """Each compiles, and stays in memory."""
    assert len({dataclasses.replace(p, seed=0, documents=None) for p in draws(problems(), 500)}) <= 500
    static = ("batch", "time", "key_heads", "group", "key_dim", "value_dim", "packing", "slots", "state", "dtype")
    assert len({tuple(getattr(p, name) for name in static) for p in draws(problems(), 500)}) <= 20


def test_decays_reach_every_extreme():
    decays = [
        np.asarray(p.arguments()["gates"].log_decay)
        for p in draws(problems(layouts=[p for p in LAYOUTS if p.gates.decay != "none"]))
    ]
    flat = np.concatenate([x.ravel() for x in decays])
    for value in (0, np.float32(-1e-6), -30, -1e4, -1e9, -np.inf):
        assert (flat == value).any(), value
    assert ((flat < -1e-3) & (flat > -1)).any() and ((flat < -1) & (flat >= -5)).any()
    steps = [x for x in decays if x.shape[1] > 1 and x.shape[-1] > 1]
    assert any(len(np.unique(x[0, 0, 0])) > 1 for x in steps), "mixed per channel"
    assert any(len(np.unique(x[0, :, 0, 0])) > 1 for x in steps), "mixed per token"
    assert any(np.isneginf(x).all((2, 3)).any() and (x > -0.2).all((2, 3)).any() for x in steps), "reset, then slow"


def test_gates_reach_zero_one_and_two():
    erases = [p.arguments()["gates"].erase for p in draws(problems())]
    flat = np.concatenate([np.asarray(x).ravel() for x in erases if x is not None])
    for value in (0, 1, 2):
        assert (flat == value).any(), value
    assert ((flat > 0) & (flat < 1)).any() and ((flat > 1) & (flat < 2)).any()


@pytest.mark.parametrize("family", KEY_FAMILIES)
def test_keys_are_of_their_family(family):
    made = RandomKeys(family).build(np.random.default_rng(0), 1, 50, 1, 64)[0, :, 0]
    sizes = np.linalg.norm(made, axis=-1)
    real = sizes > 0
    np.testing.assert_allclose(sizes[real], 1)
    assert real.all() == (family != "some_zero") and real.any()
    cosines = (made @ made.T)[np.triu_indices(50, 1)]
    low, high = {
        "independent": (-0.6, 0.6),
        "some_zero": (-0.6, 0.6),
        "correlated": (0.8, 0.97),
        "near": (0.99, 0.99999),
        "identical": (1 - 1e-12, 1 + 1e-12),
        "repeating": (-0.6, 1 + 1e-12),
        "flipped": (-1 - 1e-12, 1 + 1e-12),
    }[family]
    assert low <= cosines.min() and cosines.max() <= high
    if family == "flipped":
        np.testing.assert_allclose(np.abs(cosines), 1)
        assert (cosines < 0).any() and (cosines > 0).any()
    if family == "repeating":
        assert len(np.unique(made.round(12), axis=0)) == 3


def test_lengths_reach_every_edge_of_a_chunk_and_fit():
    drawn = draws(lengths(time=130), 500)
    seen = set(itertools.chain.from_iterable(drawn))
    assert seen >= {0, 1, 15, 16, 17, 63, 64, 65}
    assert all(sum(map(abs, row)) <= 130 for row in drawn)
    assert any(row and row[0] < 0 for row in drawn), "padding on the left"
    assert any(n < 0 for row in drawn for n in row[1:-1]), "padding between documents"
    assert any(a == b == 0 for row in drawn for a, b in itertools.pairwise(row)), "offsets that repeat"
    assert any(sum(map(abs, row)) < 130 for row in drawn) and any(sum(map(abs, row)) == 130 for row in drawn)
    assert min(itertools.chain.from_iterable(draws(lengths(time=20, padding=False)))) >= 0
    assert {len(row) for row in draws(lengths(time=20, documents=4))} == {4}


def test_segment_ids_rise_and_are_minus_one_for_padding():
    drawn = draws(segment_ids(batch=2, time=9))
    for ids in drawn:
        assert ids.shape == (2, 9) and ids.dtype == np.int32 and ids.min() >= -1
        for row in ids:
            assert (np.diff(row[row >= 0]) >= 0).all()
    assert any((ids == -1).all() for ids in drawn) and any((ids >= 0).all() for ids in drawn)


def test_drawn_gates_and_keys_can_be_built():
    sizes = dict(batch=1, time=3, key_heads=1, value_heads=2, key_dim=4, value_dim=3)
    drawn = draws(gates(), 300)
    for made in drawn:
        built = made.build(np.random.default_rng(0), **sizes)
        assert built.is_tied == made.tied and (built.log_decay is None) == (made.decay == "none")
    assert {made.tied for made in drawn} == {True, False}
    assert {made.family for made in draws(keys(families=["near", "flipped"]))} == {"near", "flipped"}
    assert all(made.erase == "none" and not made.tied for made in draws(gates(erase=["none"])))


def test_variants_are_records_of_every_kind():
    drawn = draws(variants(), 300)
    assert {v.decay for v in drawn} == {"none", "head", "tile", "channel"}
    assert {(v.erase, v.tied) for v in drawn} >= {("none", False), ("head", True), ("head", False), ("channel", False)}
    assert {v.write for v in drawn} == {"one", "head", "channel"} and {v.decay_owner for v in drawn} == {"key", "value"}
    assert all(v.tied for v in draws(variants(erase=["head"], tied=[True])))


def test_everything_shrinks_to_the_least():
    assert smallest(variants()) == Variant("none", decay_owner="key", erase="none", write="one", tied=False)
    assert smallest(problems()) == RandomProblem(gates=RandomGates(log_decays="zero"))
    assert smallest(keys()) == RandomKeys()
    assert smallest(gates()) == RandomGates(log_decays="zero")
    assert smallest(lengths(time=50)) == ()
    packed = smallest(problems(packed=True), lambda p: sum(map(len, p.documents)) >= 2)
    assert packed.time == 8 and len(packed.documents) == 1 and packed.seed == 0
    long = smallest(problems(), lambda p: p.time > 60 and p.gates.decay == "channel")
    assert long.seed == 0 and long.keys.family == "independent" and long.gates.log_decays == "zero"


def test_a_problem_prints_as_one_line_that_rebuilds_it():
    for problem in draws(problems()):
        line = repr(problem)
        assert eval(line, vars(gated_delta.testing)) == problem
        assert "\n" not in line and pretty(problem) == line
    assert repr(RandomProblem()) == "RandomProblem()"
    problem = RandomProblem(time=3, keys=RandomKeys("near"), gates=RandomGates(decay="head", log_decays="resets"))
    assert repr(problem) == (
        "RandomProblem(time=3, keys=RandomKeys(family='near'), gates=RandomGates(decay='head', log_decays='resets'))"
    )


def test_a_problem_is_the_same_every_time():
    problem = dataclasses.replace(LAYOUTS[4], seed=77)
    one, two = problem.arguments(), problem.arguments()
    for name in ("q", "k", "v", "initial_state"):
        np.testing.assert_array_equal(one[name], two[name])
    np.testing.assert_array_equal(one["gates"].erase, two["gates"].erase)
    other = dataclasses.replace(problem, seed=78).arguments()
    assert not np.array_equal(one["q"], other["q"])


WRONG = {
    "key family": (
        lambda: RandomKeys("random"),
        r"`RandomKeys\(family='random'\)` must be one of independent, some_zero",
    ),
    "decay family": (lambda: RandomGates(log_decays="x"), r"`RandomGates\(log_decays='x'\)` must be one of zero, tiny"),
    "strengths": (
        lambda: RandomGates(strengths="x"),
        r"`RandomGates\(strengths='x'\)` must be one of uniform, zero, one",
    ),
    "tie": (lambda: RandomGates(tied=True), r"is tied, so it needs erase='head' and write='one'"),
    "rows": (lambda: RandomProblem(batch=2, documents=((1,),)), r"must hold one tuple of lengths for each of 2 rows"),
    "too long": (lambda: RandomProblem(time=3, documents=((2, -2),)), r"must sum to at most time = 3"),
    "slots": (
        lambda: RandomProblem(time=3, documents=((1, 1),), packing="slots", slots=1),
        r"`slots=1` must be at least the 2 documents",
    ),
    "offsets": (
        lambda: RandomProblem(time=3, documents=((-1, 1),), packing="offsets"),
        r"Offsets need one row and no padding before or between documents",
    ),
}


@pytest.mark.parametrize("cause, message", WRONG.values(), ids=WRONG)
def test_what_cannot_be_built_is_refused(cause, message):
    with pytest.raises(ValueError, match=message):
        cause()


def test_without_hypothesis_the_toolkit_says_what_to_install():
    program = "import sys; sys.modules['hypothesis'] = None; import gated_delta; import gated_delta.testing"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (
        "`gated_delta.testing` needs hypothesis, which only tests need: pip install 'gated-delta[test]'." in done.stderr
    )
