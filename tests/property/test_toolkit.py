"""Bugs planted in the chunked backend, each the essence of a real one: the comparison finds every one of them."""

import contextlib
import dataclasses
from unittest import mock

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, _chunked, _op, _tile
from gated_delta.testing import RandomGates, RandomKeys, RandomProblem, assert_close, expected, pullback, results

SIZES = dict(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=17)
PROBLEMS = {
    "key": RandomProblem(**SIZES, gates=RandomGates("channel", erase="channel", write="channel", owner="key")),
    "value": RandomProblem(**SIZES, gates=RandomGates("head", erase="head", owner="value", tied=True)),
    "untied": RandomProblem(**SIZES, gates=RandomGates("tile", erase="head", write="head", owner="value")),
}
PROBLEMS["packed"] = dataclasses.replace(PROBLEMS["key"], documents=((5, 0, 16), (-2, 17, 1)))
PROBLEMS["slots"] = dataclasses.replace(PROBLEMS["packed"], packing="slots", slots=4)
PROBLEMS["collinear"] = dataclasses.replace(
    PROBLEMS["value"],
    keys=RandomKeys("identical"),
    gates=dataclasses.replace(PROBLEMS["value"].gates, log_decays="zero", strengths="one"),
)
PROBLEMS["strong"] = dataclasses.replace(
    PROBLEMS["value"], gates=dataclasses.replace(PROBLEMS["value"].gates, log_decays="strong")
)
PROBLEMS["slow"] = dataclasses.replace(
    PROBLEMS["value"], gates=dataclasses.replace(PROBLEMS["value"].gates, log_decays="resets")
)


class Planted(Chunked):
    """The chunked backend, named after its bug so that nothing compiled without the bug is used."""

    bug: str = eqx.field(static=True, default="none")


class Altered(Planted):
    """Its problem or its result is changed by a function."""

    before: object = eqx.field(static=True, default=lambda problem: problem)
    after: object = eqx.field(static=True, default=lambda problem, out, state: (out, state))

    def __call__(self, problem):
        return self.after(problem, *super().__call__(self.before(problem)))


def around(function):
    """A patch that puts `function(real, *arguments)` in the place of `real`."""

    def patch(module, name):
        real = getattr(module, name)
        return mock.patch.object(module, name, lambda *arguments: function(real, *arguments))

    return patch


# ---- bugs ------------------------------------------------------------------------------------------------------------


def exp_before_mask(real, decays, group, chunk):
    prefix = decays.from_start[..., group]
    rows, columns = _tile._rows_and_columns(chunk, decays.total.ndim)
    gamma = jnp.exp(prefix[..., :, None] - prefix[..., None, :])
    return jnp.where(rows >= columns, gamma, 0)


def no_gradient_through_the_solve(real, pairs, inverse, right, arithmetic):
    return _tile._dot(jax.lax.stop_gradient(inverse), right, (-1, -2), arithmetic)


def heads_in_turn(real, x, owners):
    return x if x.shape[-3] == owners else jnp.concatenate([x] * (owners // x.shape[-3]), axis=-3)


def power_series(real, pairs, arithmetic, *rest):
    eye = jnp.broadcast_to(jnp.eye(pairs.shape[-1]), pairs.shape)
    out, power = eye - pairs, pairs
    while 2 ** (pairs.shape[-1].bit_length() - 1) > 1 and power is not None:
        for _ in range(pairs.shape[-1].bit_length() - 2):
            power = _tile._dot(power, power, (-1, -2), arithmetic)
            out = _tile._dot(out, eye + power, (-1, -2), arithmetic)
        power = None
    return out


def truncated_series(real, pairs, arithmetic, *rest):
    eye = jnp.broadcast_to(jnp.eye(pairs.shape[-1]), pairs.shape)
    return eye - pairs + _tile._dot(pairs, pairs, (-1, -2), arithmetic)


def changed_factors(**changes):
    def factors(real, tile, arithmetic):
        made = real(tile, arithmetic)
        return dataclasses.replace(made, **{name: change(made, tile) for name, change in changes.items()})

    return factors


def changed_decays(change):
    return lambda real, log_decay: change(real(log_decay), log_decay)


def shift(x):
    """Every row's value from the row before."""
    return jnp.concatenate([jnp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)


def rounded(x):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)


def rounded_carry(real, state, factors, arithmetic):
    new, *rest = real(state, factors, arithmetic)
    return rounded(new), *rest


def no_gradient(x):
    return None if x is None else jax.lax.stop_gradient(x)


def swapped(problem):
    return dataclasses.replace(problem, erase=problem.write, write=problem.erase)


PATCHES = {
    "exp before mask": (_tile, "_pair_decay", exp_before_mask, "strong"),
    "no gradient through the solve": (_tile, "solve", no_gradient_through_the_solve, "value"),
    "head index modulo heads": (_tile, "spread", heads_in_turn, "value"),
    "power series": (_tile, "unit_lower_inverse", power_series, "collinear"),
    "truncated series": (_tile, "unit_lower_inverse", truncated_series, "key"),
    "scores without the token itself": (
        _tile,
        "chunk_factors",
        changed_factors(scores=lambda made, tile: jnp.tril(made.scores, -1)),
        "key",
    ),
    "scores with the next token": (
        _tile,
        "chunk_factors",
        changed_factors(scores=lambda made, tile: made.scores + jnp.eye(made.scores.shape[-1], k=1)),
        "key",
    ),
    "no erase of the entering state": (
        _tile,
        "chunk_factors",
        changed_factors(erase_keys=lambda made, tile: 0 * made.erase_keys),
        "value",
    ),
    "entering state not decayed": (_tile, "chunk_factors", changed_factors(decay=lambda made, tile: None), "value"),
    "write gate forgotten": (
        _chunked,
        "chunk_step",
        lambda real, state, tile, arithmetic: real(state, dataclasses.replace(tile, write=None), arithmetic),
        "key",
    ),
    "decay after the read": (
        _tile,
        "sum_decays",
        changed_decays(lambda made, log_decay: made._replace(from_start=shift(made.from_start))),
        "value",
    ),
    "key decayed by its own token": (
        _tile,
        "sum_decays",
        changed_decays(lambda made, log_decay: made._replace(to_end=made.to_end + log_decay)),
        "key",
    ),
    "last token's decay missing in the state": (
        _tile,
        "sum_decays",
        changed_decays(lambda made, log_decay: made._replace(total=made.total - log_decay[..., 4:5, :])),
        "value",
    ),
    "sums of decay in bfloat16": (
        _tile,
        "sum_decays",
        changed_decays(lambda made, log_decay: jax.tree.map(rounded, made)),
        "value",
    ),
    "powers of two": (_tile, "sum_decays", lambda real, log_decay: real(log_decay * np.float32(np.log(2))), "value"),
    "no gradient to the decay of keys": (
        _tile,
        "sum_decays",
        changed_decays(lambda made, log_decay: made._replace(to_end=no_gradient(made.to_end))),
        "key",
    ),
    "carry in bfloat16": (_tile, "chunk_advance", rounded_carry, "value"),
    "documents not kept apart": (_tile, "_mask", lambda real, x, keep: x, "packed"),
    "padding not emptied": (_op, "_keep", lambda real, x, keep: x, "packed"),
}
ALTERATIONS = {
    "erase and write exchanged": (dict(before=swapped), "untied"),
    "scale forgotten": (dict(before=lambda problem: dataclasses.replace(problem, scale=1.0)), "value"),
    "no gradient to the initial state": (
        dict(before=lambda problem: dataclasses.replace(problem, initial_state=no_gradient(problem.initial_state))),
        "key",
    ),
    "gradient of beta from one use only": (
        dict(before=lambda problem: dataclasses.replace(problem, tied=False, write=no_gradient(problem.erase))),
        "value",
    ),
    "states of documents in reverse": (dict(after=lambda problem, out, state: (out, state[:, ::-1])), "slots"),
    "every document begins with the first state": (
        dict(
            before=lambda problem: dataclasses.replace(
                problem, initial_state=jnp.broadcast_to(problem.initial_state[:, :1], problem.initial_state.shape)
            )
        ),
        "slots",
    ),
    "groups laid out with the value first": (
        dict(
            after=lambda problem, out, state: (
                out.reshape(*out.shape[:-1], -1, 3).swapaxes(-1, -2).reshape(out.shape),
                state,
            )
        ),
        "key",
    ),
}


@contextlib.contextmanager
def planted(name):
    """The backend with this bug in it, and the problem that must show it."""
    if name in ALTERATIONS:
        changes, problem = ALTERATIONS[name]
        yield Altered(16, bug=name, **changes), PROBLEMS[problem]
    else:
        module, attribute, bug, problem = PATCHES[name]
        with around(bug)(module, attribute):
            yield Planted(16, bug=name), PROBLEMS[problem]


@pytest.mark.parametrize("name", [*PATCHES, *ALTERATIONS])
def test_the_comparison_finds_the_bug(name):
    with planted(name) as (backend, problem), pytest.raises(AssertionError, match=r"budget|shape"):
        assert_close(pullback(backend, problem), expected(problem), problem)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_without_a_bug_it_finds_none(problem):
    assert_close(pullback(Planted(16), problem), expected(problem), problem)


def test_the_law_of_causality_finds_a_reference_row_from_the_future():
    """Right to the last bit but one: only the bits of a prefix show it."""

    def about_the_last_row(real, left, k, decays, arithmetic):
        last = jnp.max(jnp.abs(k[..., -1:, :]), axis=-1, keepdims=True) + 1
        return real(left * last, k / last, decays, arithmetic)

    problem = PROBLEMS["value"]
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    later = {**arguments, "k": np.concatenate([arguments["k"][:, :16], -2 * arguments["k"][:, 16:]], axis=1)}
    moved = {**arguments, "k": np.concatenate([arguments["k"][:, :15], -2 * arguments["k"][:, 15:]], axis=1)}
    with around(about_the_last_row)(_tile, "decayed_scores"):
        backend = Planted(16, bug="reference row from the future")
        assert_close(pullback(backend, problem), expected(problem), problem)
        first, second = (results(backend, x, cotangents)["out"][:, :15] for x in (arguments, moved))
    assert not np.array_equal(first, second)
    good = [results(Planted(16), x, cotangents)["out"] for x in (arguments, moved, later)]
    np.testing.assert_array_equal(good[0][:, :15], good[1][:, :15])
    np.testing.assert_array_equal(good[0][:, :16], good[2][:, :16])


def test_the_law_of_containment_finds_a_bad_token_that_is_left_in():
    """Marked or not, it makes gradients that are not finite."""
    problem = PROBLEMS["packed"]
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    bad = {**arguments, "v": np.array(arguments["v"])}
    bad["v"][0, 2, 1, 0] = np.nan

    def leave_it_in(real, arrays, initial_state, *rest):
        return arrays, initial_state, *real(arrays, initial_state, *rest)[2:]

    with around(leave_it_in)(_op, "contain"):
        leaky = results(Planted(16, bug="bad token left in"), bad, cotangents)
    contained = results(Planted(16), bad, cotangents)
    gradients = [name for name in contained if name.startswith("d_")]
    assert all(np.isfinite(contained[name]).all() for name in gradients)
    assert not all(np.isfinite(leaky[name]).all() for name in gradients)
