"""Padding is nothing: whatever it holds, wherever it stands, it is zero, has no gradient, and changes nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, pullback, results

BACKENDS = [Recurrent(), Chunked(16)]
GATES = {
    "channel": RandomGates("channel", erase="channel", write="channel", owner="key", log_decays="mixed"),
    "head": RandomGates("head", erase="head", owner="value", tied=True, log_decays="resets"),
    "none": RandomGates(),
}
PADDED = RandomProblem(
    batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=10, documents=((21,), (21,))
)
STATES = ("final_state", "d_initial_state")


def fill(x, tokens, value):
    """`x` `[batch, time, ...]` with `value` at `tokens` `[batch, time]`."""
    return np.where(tokens.reshape(*tokens.shape, *(1,) * (x.ndim - 2)), np.float32(value), x)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("row", [(-8, 13), (13,), (-1, 5, -7, 8)], ids=["left", "right", "between documents"])
def test_rows_with_padding_are_the_rows_without(backend, gates, row):
    problem = dataclasses.replace(PADDED, gates=GATES[gates], documents=(row, (21,)))
    assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", ["channel", "head"])
def test_padding_inside_a_document_may_as_well_stand_at_its_end(backend, gates):
    problem = dataclasses.replace(PADDED, gates=GATES[gates])
    arguments, (d_out, d_state) = problem.arguments(), problem.cotangents("float32", "float32")
    ids = np.zeros((2, 21), np.int32)
    ids[0, [0, 10, 11, 12, 15]] = -1
    order = np.argsort(ids < 0, axis=1, kind="stable")

    def to_the_end(x):
        return np.take_along_axis(np.asarray(x), order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

    arguments["segment_ids"] = ids
    state = arguments.pop("initial_state")
    moved = jax.tree.map(to_the_end, arguments)
    actual = results(backend, {**arguments, "initial_state": state}, (d_out, d_state))
    wanted = results(backend, {**moved, "initial_state": state}, (to_the_end(d_out), d_state))
    actual = {name: x if name in STATES else to_the_end(x) for name, x in actual.items()}
    assert_close(actual, wanted, problem, moved)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("rubbish", [np.nan, np.inf, -np.inf, 1e30])
def test_what_padding_holds_changes_nothing_bit_for_bit(backend, rubbish):
    problem = dataclasses.replace(PADDED, gates=GATES["channel"], documents=((-3, 9, -4, 4), (2, -9, 10)))
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    padding = arguments["segment_ids"] < 0
    held = {
        name: jax.tree.map(lambda x: fill(x, padding, rubbish), arguments[name]) for name in ("q", "k", "v", "gates")
    }
    clean, actual = results(backend, arguments, cotangents), results(backend, {**arguments, **held}, cotangents)
    for name, x in actual.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
        assert name in STATES or not x[padding].any(), name


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_zero_keys_and_gates_pad_without_ids(backend):
    """How a user with fixed shapes fills a row up: k = erase = write = log_decay = 0."""
    problem = dataclasses.replace(PADDED, documents=None, gates=GATES["channel"])
    arguments, (d_out, d_state) = problem.arguments(), problem.cotangents("float32", "float32")
    padding = np.broadcast_to(np.arange(21) >= 13, (2, 21))
    gates = arguments["gates"]
    padded = {**arguments, "k": fill(arguments["k"], padding, 0)}
    padded["gates"] = Gates(*(fill(x, padding, 0) for x in (gates.log_decay, gates.erase, gates.write)))
    actual = results(backend, padded, (fill(d_out, padding, 0), d_state))
    short = {name: jax.tree.map(lambda x: x[:, :13], arguments[name]) for name in ("q", "k", "v", "gates")}
    wanted = results(backend, {**short, "initial_state": arguments["initial_state"]}, (d_out[:, :13], d_state))
    actual = {name: x if name in STATES else x[:, :13] for name, x in actual.items()}
    assert_close(actual, wanted, problem, short)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked(64)], ids=str)
def test_left_padding_gives_zeros_and_then_the_same_outputs(backend):
    problem = RandomProblem(time=12, key_dim=4, value_dim=3, gates=GATES["head"], documents=((-5, 7),))
    wanted = expected(problem)
    actual = pullback(backend, problem)
    assert not actual["out"][:, :5].any()
    assert_close(actual, wanted, problem)
