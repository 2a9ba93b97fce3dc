"""Traced values cannot be refused: they are limited, alike in every backend; `checked=True` refuses them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, gated_delta
from gated_delta.testing import RandomGates, RandomProblem, assert_close, quick_jit, results

from .subjects import BACKENDS

KDA = RandomGates("channel", erase="head", owner="value", tied=True)
PROBLEM = RandomProblem(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, gates=KDA, state=True, seed=16)
COTANGENTS = PROBLEM.cotangents("float32", "float32")


def with_decay(arguments, decay):
    return {**arguments, "gates": dataclasses.replace(arguments["gates"], log_decay=jnp.asarray(decay))}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("value", [0.05, 5.0, 1e30])
def test_a_positive_log_decay_is_limited_to_zero_and_has_no_gradient(backend, value):
    arguments = PROBLEM.arguments()
    decay = np.array(arguments["gates"].log_decay)
    where = np.random.default_rng(0).uniform(size=decay.shape) < 0.3
    limited = results(backend, with_decay(arguments, np.where(where, value, decay)), COTANGENTS)
    zero = results(backend, with_decay(arguments, np.where(where, 0.0, decay).astype(np.float32)), COTANGENTS)
    for name in zero:
        if name == "d_log_decay":
            assert not limited[name][where].any()
            assert zero[name][where].all()
            np.testing.assert_array_equal(limited[name][~where], zero[name][~where])
        else:
            np.testing.assert_array_equal(limited[name], zero[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_an_infinite_decay_forgets_everything_and_has_no_gradient(backend):
    arguments = PROBLEM.arguments()
    decay = np.array(arguments["gates"].log_decay)
    decay[:, 10] = -np.inf
    actual = results(backend, with_decay(arguments, decay), COTANGENTS)
    other = {**with_decay(arguments, decay), "initial_state": -3 * arguments["initial_state"]}
    other["v"] = np.where(np.arange(21).reshape(1, -1, 1, 1) < 10, 7.0, arguments["v"]).astype(np.float32)
    changed = results(backend, other, COTANGENTS)
    assert not actual["d_log_decay"][:, 10].any()
    for name, until in (("out", np.s_[:, 10:]), ("final_state", np.s_[:])):
        np.testing.assert_array_equal(actual[name][until], changed[name][until])


def ids_problem(slots):
    return dataclasses.replace(PROBLEM, documents=((21,), (21,)), packing="slots" if slots else "ids", slots=4)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("slots", [False, True])
def test_falling_ids_are_padding(backend, slots):
    problem = ids_problem(slots)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    falling = np.array([[0, 0, 2, 1, 1, 2, -1, 0, 3, 1, *[3] * 11], [1, 0, -1, 0, *[1] * 17]], np.int32)
    padding = np.where(falling < np.maximum.accumulate(falling, axis=1), -1, falling).astype(np.int32)
    one, two = (results(backend, {**arguments, "segment_ids": ids}, cotangents) for ids in (falling, padding))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_ids_past_the_number_of_segments_are_padding(backend):
    problem = ids_problem(True)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    ids = np.array([[0] * 5 + [1] * 6 + [4] * 2 + [2] * 3 + [7] * 5, [3] * 20 + [4]], np.int32)
    beyond = results(backend, {**arguments, "segment_ids": ids}, cotangents)
    padding = results(backend, {**arguments, "segment_ids": np.where(ids > 3, -1, ids)}, cotangents)
    for name in beyond:
        np.testing.assert_array_equal(beyond[name], padding[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize(
    "bad, good",
    [
        ([0, 9, 5, 21], [0, 9, 9, 21]),
        ([0, 9, 12, 30], [0, 9, 12, 21]),
        ([-4, 9, 12, 21], [0, 9, 12, 21]),
    ],
    ids=["falling", "past the end", "below zero"],
)
def test_bad_offsets_are_limited(backend, bad, good):
    problem = dataclasses.replace(PROBLEM, batch=1, documents=((7, 7, 7),), packing="offsets")
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    one, two = (results(backend, {**arguments, "cu_seqlens": np.array(x, np.int32)}, cotangents) for x in (bad, good))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_broken_promise_of_erase_costs_no_nan(backend):
    """Promised to be at most 1 and given as 2, in bfloat16 too."""
    for dtype in ("float32", "bfloat16"):
        problem = dataclasses.replace(PROBLEM, dtype=dtype)
        arguments = problem.arguments()
        gates = Gates.tied(2 + 0 * arguments["gates"].erase, arguments["gates"].log_decay)
        cotangents = problem.cotangents(dtype, "float32")
        doubled = dataclasses.replace(gates, erase_max=2.0)
        broken, kept = (results(backend, {**arguments, "gates": x}, cotangents) for x in (gates, doubled))
        assert all(np.isfinite(x).all() for x in broken.values())
        if dtype == "float32":
            assert_close(broken, kept, dataclasses.replace(problem, gates=dataclasses.replace(KDA, erase_max=2.0)))


def test_a_broken_promise_of_decay_costs_no_nan():
    arguments = PROBLEM.arguments()
    gates = dataclasses.replace(arguments["gates"], log_decay=arguments["gates"].log_decay * 100, log_decay_min=-5.0)
    actual = results(Chunked(16), {**arguments, "gates": gates}, COTANGENTS)
    assert all(np.isfinite(x).all() for x in actual.values())


SMALL = dataclasses.replace(PROBLEM, key_heads=1, group=2, state=False)
CHECKED = {
    "decay above 0": ({"log_decay": (0, 3, 1, 2, 0.5)}, r"`gates.log_decay` must be at most 0"),
    "erase above its promise": ({"erase": (1, 3, 0, 0, 1.5)}, r"`gates.erase \(beta\)` must be in \[0, 1\]"),
    "erase below 0": ({"erase": (1, 3, 0, 0, -0.5)}, r"`gates.erase \(beta\)` must be in \[0, 1\]"),
    "falling ids": ({"segment_ids": [0] * 9 + [2] * 5 + [1] * 7}, r"`segment_ids` must rise along time"),
    "ids past num_segments": ({"segment_ids": [0] * 9 + [5] * 12}, r"`segment_ids` must be below `num_segments=3`"),
    "falling offsets": ({"cu_seqlens": [0, 9, 5, 21]}, r"`cu_seqlens` must begin with 0, never fall"),
    "offsets past the end": ({"cu_seqlens": [0, 9, 12, 30]}, r"`cu_seqlens` must begin with 0, never fall"),
    "offsets not from 0": ({"cu_seqlens": [1, 9, 12, 21]}, r"`cu_seqlens` must begin with 0, never fall"),
}


def bad_arguments(changes):
    """Arguments that a call refuses where it can see them."""
    packed = next((name for name in changes if name in ("segment_ids", "cu_seqlens")), None)
    packing = {None: None, "segment_ids": "slots", "cu_seqlens": "offsets"}[packed]
    documents = {} if packing is None else {"documents": ((7, 7, 7),), "packing": packing, "slots": 3}
    problem = dataclasses.replace(SMALL, batch=2 if packing is None else 1, **documents)
    arguments = problem.arguments()
    static = {"num_segments": arguments.pop("num_segments")} if packing == "slots" else {}
    for name, value in changes.items():
        if name == packed:
            arguments[name] = np.array(value if packed == "cu_seqlens" else [value], np.int32)
        else:
            *index, number = value
            gate = np.array(getattr(arguments["gates"], name))
            gate[tuple(index)] = number
            arguments["gates"] = dataclasses.replace(arguments["gates"], **{name: jnp.asarray(gate)})
    return arguments, static


@pytest.mark.parametrize("changes, message", CHECKED.values(), ids=CHECKED)
def test_checked_mode_raises_under_jit_what_concrete_values_raise(changes, message):
    arguments, static = bad_arguments(changes)

    def run(checked, arguments):
        return gated_delta(**arguments, **static, checked=checked)

    with pytest.raises(ValueError, match=message):
        run(False, arguments)
    with pytest.raises(Exception, match=message):  # of another class in each version of jax
        jax.block_until_ready(quick_jit(functools.partial(run, True))(arguments))
    jax.block_until_ready(quick_jit(functools.partial(run, False))(arguments))


def test_checked_mode_lets_good_values_pass():
    arguments = SMALL.arguments()
    plain, checked = (
        quick_jit(lambda arguments: gated_delta(**arguments, checked=checked))(arguments)  # noqa: B023
        for checked in (False, True)
    )
    for x, y in zip(plain, checked):
        np.testing.assert_array_equal(x, y)
