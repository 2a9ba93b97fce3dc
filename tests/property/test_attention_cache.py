"""Attention over caches: however a document comes, in pieces or token by token, it is one call over all of it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_delta import softmax_attention
from gated_delta.attention import BlockedAttention, DenseAttention, KVCache, PagedKVCache, cached_attention
from gated_delta.testing import quick_jit

from .attention import RandomAttention, assert_close

ROWS, TIME, PIECE, PAGE = 3, 19, 5, 4
SIZES = dict(kv_heads=2, key_dim=4, value_dim=3)
BLOCKED = BlockedAttention(4, 8)
SLOTS = np.array([5, 0, 2], np.int32)
WINDOW = 6


def arrays_of(seed):
    return RandomAttention(batch=ROWS, time=TIME, seed=seed).arrays()


def problem_of(seed, window=None):
    return RandomAttention(batch=ROWS, time=TIME, window=window, seed=seed)


def cache_of(kind):
    """And the slots of its rows: in slots of NaN, of which only those that are written are read."""
    if kind == "rows":
        return KVCache.empty(ROWS, capacity=TIME + 1, **SIZES), None
    if kind == "ring":
        return KVCache.empty(ROWS, capacity=WINDOW, **SIZES), None
    if kind == "slots":
        cache = KVCache.empty(7, capacity=24, **SIZES)
    else:
        cache = PagedKVCache.empty(7, pages=20, page_size=PAGE, slot_pages=6, **SIZES)
        cache = dataclasses.replace(cache, free=jnp.asarray(np.random.default_rng(0).permutation(20), jnp.int32))
    spoiled = dict(keys=jnp.full_like(cache.keys, 7e4), values=jnp.full_like(cache.values, -7e4))
    return dataclasses.replace(cache, **spoiled), SLOTS


KINDS = ("rows", "slots", "pages", "ring")
kinds = pytest.mark.parametrize("kind", KINDS)
quick_kinds = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in ("pages", "ring") else pytest.mark.slow) for kind in KINDS]
)


@functools.cache
def runner(kind, backend=BLOCKED):
    window = WINDOW if kind == "ring" else None

    def run(q, k, v, cache, slots, lengths, fresh):
        if isinstance(cache, PagedKVCache):
            cache = cache.reserve(slots, lengths, fresh=fresh)
        options = dict(slots=slots, lengths=lengths, fresh=fresh, window=window, backend=backend)
        return cached_attention(q, k, v, cache, **options, return_log_sum_exp=True)

    return quick_jit(run)


def feed(arrays, kind, lengths, backend=BLOCKED, piece=PIECE):
    """Outputs and log-sum-exps of all tokens, `lengths[i]` of every row in piece `i`, and the cache behind them."""
    cache, slots = cache_of(kind)
    seen, whole = np.zeros(ROWS, int), [np.zeros((ROWS, TIME, 4, 3), np.float32), np.zeros((ROWS, TIME, 4), np.float32)]
    for number, length in enumerate(lengths):
        parts = {name: np.full((ROWS, piece, *x.shape[2:]), np.nan, np.float32) for name, x in arrays.items()}
        for row, (start, count) in enumerate(zip(seen, length)):
            for name, x in arrays.items():
                parts[name][row, :count] = x[row, start : start + count]
        fresh = np.full(ROWS, number == 0)
        found, cache = runner(kind, backend)(**parts, cache=cache, slots=slots, lengths=np.int32(length), fresh=fresh)
        for row, (start, count) in enumerate(zip(seen, length)):
            for target, part in zip(whole, found):
                target[row, start : start + count] = part[row, :count]
                assert not np.isfinite(part[row, count:]).any() or not np.asarray(part[row, count:]).any()
        seen = seen + length
    return (*whole, cache, seen)


@st.composite
def cuts(draw):
    """Lengths `[pieces, ROWS]` of pieces of at most `PIECE` tokens, `TIME` in all."""
    rows = []
    for _ in range(ROWS):
        left, lengths = TIME, []
        while left and len(lengths) < 12:
            lengths.append(min(draw(st.integers(0, PIECE)), left))
            left -= lengths[-1]
        rows.append(lengths)
    pieces = max(map(len, rows))
    return np.array([row + [0] * (pieces - len(row)) for row in rows]).T


@pytest.mark.smoke
@quick_kinds
@settings(max_examples=5)
@given(seed=st.integers(0, 2**16), lengths=cuts())
def test_pieces_of_any_lengths_are_the_whole(kind, seed, lengths):
    problem = problem_of(seed, WINDOW if kind == "ring" else None)
    out, log_sum_exp, cache, seen = feed(problem.arrays(), kind, lengths)
    wanted = problem.expected()
    for row in range(ROWS):
        found = {"out": out[row, : seen[row]], "log_sum_exp": log_sum_exp[row, : seen[row]]}
        assert_close(found, {name: wanted[name][row, : seen[row]] for name in found}, problem)
    count = cache.count if kind in ("rows", "ring") else cache.count[SLOTS]
    np.testing.assert_array_equal(count, seen)


@quick_kinds
def test_token_by_token_is_the_whole(kind):
    problem = problem_of(1, WINDOW if kind == "ring" else None)
    out, log_sum_exp, _, _ = feed(problem.arrays(), kind, np.ones((TIME, ROWS), int), piece=1)
    wanted = problem.expected()
    found = {"out": out, "log_sum_exp": log_sum_exp}
    assert_close(found, {name: wanted[name] for name in found}, problem)


@pytest.mark.slow
def test_pages_are_a_cache_side_by_side_bit_for_bit():
    """In whatever order the pages lie, where the sums are the same."""
    arrays, lengths = arrays_of(2), np.array([[5, 3, 0], [5, 5, 5], [1, 5, 5], [5, 4, 5]])
    found = [feed(arrays, kind, lengths, DenseAttention())[:2] for kind in ("slots", "pages")]
    for first, second in zip(*found):
        np.testing.assert_array_equal(first, second)


@quick_kinds
def test_padding_rows_touch_nothing_and_fresh_rows_begin_again(kind):
    arrays = arrays_of(3)
    lengths = np.full((2, ROWS), PIECE)
    _, _, before, _ = feed(arrays, kind, lengths)
    part = {name: x[:, :PIECE] for name, x in arrays.items()}
    slots, run = cache_of(kind)[1], runner(kind)
    full = np.full(ROWS, PIECE, np.int32)
    if slots is not None:
        slots = np.array([-1, 0, 99], np.int32)
    else:
        full = full * np.array([0, 1, 0], np.int32)
    fresh = np.array([slots is not None, True, slots is not None])
    (out, log_sum_exp), after = run(**part, cache=before, slots=slots, lengths=full, fresh=fresh)
    assert not np.asarray(out)[[0, 2]].any() and (np.asarray(log_sum_exp)[[0, 2]] == -np.inf).all()
    mine = 0 if slots is not None else 1
    others = np.arange(len(before.count)) != mine
    for name in ("count", "lost") if kind == "pages" else ("keys", "values", "count", "lost"):
        old, new = (np.asarray(getattr(cache, name))[others] for cache in (before, after))
        np.testing.assert_array_equal(old, new, err_msg=name)
    assert int(after.count[mine]) == PIECE
    window = WINDOW if kind == "ring" else None
    alone = softmax_attention(**{name: x[1:2] for name, x in part.items()}, window=window)
    np.testing.assert_allclose(out[1], alone[0], atol=1e-5)


@quick_kinds
def test_a_bad_token_spoils_its_document_from_there_on_and_no_other_row(kind):
    """With a window, until it is out of sight. A fresh document knows nothing of it."""
    arrays, lengths = arrays_of(4), np.array([[5, 5, 5], [4, 5, 5], [5, 5, 5], [5, 4, 4]])
    clean = feed(arrays, kind, lengths)
    planted = {**arrays, "k": arrays["k"].copy()}
    planted["k"][0, 7, 1, 2] = np.nan
    found = feed(planted, kind, lengths)
    marks = np.zeros((ROWS, TIME, 4), bool)
    marks[0, 7 : 7 + (WINDOW if kind == "ring" else TIME), 2:] = True
    for first, second in zip(clean[:2], found[:2]):
        assert np.isnan(second[marks]).all()
        np.testing.assert_array_equal(second[~marks], first[~marks])
    assert all(np.isfinite(np.asarray(x)).all() for x in (found[2].keys, found[2].values))
    part = {name: x[:, :PIECE] for name, x in arrays.items()}
    again = np.ones(ROWS, bool)
    (out, _), cache = runner(kind)(
        **part, cache=found[2], slots=cache_of(kind)[1], lengths=5 * np.ones(ROWS, np.int32), fresh=again
    )
    assert (
        np.isfinite(out).all() and (np.asarray(cache.lost if kind in ("rows", "ring") else cache.lost[SLOTS]) < 0).all()
    )


@pytest.mark.parametrize("kind", [pytest.param("rows", marks=pytest.mark.slow), "pages"])
def test_a_token_without_room_is_lost_and_says_so(kind):
    """All pages of the pool, or all entries of the row, are taken: what is written before stays right."""
    arrays = arrays_of(5)
    if kind == "rows":
        cache, slots = KVCache.empty(ROWS, capacity=7, **SIZES), None
    else:
        cache, slots = PagedKVCache.empty(ROWS, pages=5, page_size=PAGE, **SIZES), np.arange(ROWS, dtype=np.int32)

    @quick_jit
    def run(q, k, v, cache):
        if kind == "pages":
            cache = cache.reserve(np.arange(ROWS, dtype=np.int32), jnp.full(ROWS, PIECE))
        return cached_attention(q, k, v, cache, slots=slots, backend=BLOCKED)

    outs = []
    for start in (0, 5, 10):
        out, cache = run(**{name: x[:, start : start + PIECE] for name, x in arrays.items()}, cache=cache)
        outs.append(np.asarray(out))
    whole = np.concatenate(outs, axis=1)
    room = np.array([7, 7, 7]) if kind == "rows" else np.array([8, 8, 4])
    wanted = np.asarray(softmax_attention(**arrays))[:, :15]
    for row in range(ROWS):
        np.testing.assert_allclose(whole[row, : room[row]], wanted[row, : room[row]], atol=1e-5)
        assert np.isnan(whole[row, room[row] :]).all()


@pytest.mark.slow
@kinds
def test_gradients_through_a_cache_are_those_of_the_whole(kind):
    problem = problem_of(6, WINDOW if kind == "ring" else None)
    arrays = problem.arrays()
    cache, slots = cache_of(kind)
    cache = jax.tree.map(lambda a: 0 * a if jnp.issubdtype(a.dtype, jnp.floating) else a, cache)
    d_out, d_lse = problem.cotangents()

    @quick_jit
    @jax.grad
    def gradients(arrays):
        total, state = 0.0, cache
        for start, stop in ((0, 5), (5, 10), (10, 11), (11, 16), (16, 19)):
            part = {name: x[:, start:stop] for name, x in arrays.items()}
            if kind == "pages":
                state = state.reserve(slots, jnp.full(ROWS, stop - start))
            window = WINDOW if kind == "ring" else None
            found, state = cached_attention(
                **part, cache=state, slots=slots, window=window, backend=BLOCKED, return_log_sum_exp=True
            )
            total += jnp.sum(found[0] * d_out[:, start:stop]) + jnp.sum(found[1] * d_lse[:, start:stop])
        return total

    found = {f"d_{name}": x for name, x in gradients(arrays).items()}
    assert_close(found, {name: problem.expected()[name] for name in found}, problem)


# ---- pages -----------------------------------------------------------------------------------------------------------

reserve = quick_jit(lambda cache, slots, lengths, fresh: cache.reserve(slots, lengths, fresh=fresh))
release = quick_jit(lambda cache, slots: cache.release(slots))


@settings(max_examples=20)
@given(data=st.data())
def test_every_page_has_one_owner_and_comes_back(data):
    """Any order of reserving and releasing: no page twice, none lost, and as many for each slot as its tokens need."""
    cache = PagedKVCache.empty(4, pages=9, page_size=2, slot_pages=5, kv_heads=1, key_dim=1)
    counts = np.zeros(4, int)
    for _ in range(data.draw(st.integers(1, 8))):
        slots = np.array(data.draw(st.permutations([0, 1, 2, 3, -1, 7]))[:3], np.int32)
        if data.draw(st.booleans()):
            cache = release(cache, slots)
            counts[[s for s in slots if 0 <= s < 4]] = 0
        else:
            lengths = np.array([data.draw(st.integers(0, 4)) for _ in slots], np.int32)
            fresh = np.array([data.draw(st.booleans()) for _ in slots])
            cache = reserve(cache, slots, lengths, fresh)
            for slot, length, begins in zip(slots, lengths, fresh):
                if 0 <= slot < 4:
                    counts[slot] = min(length + (0 if begins else counts[slot]), 10)
            held = np.asarray(cache.table >= 0).sum(1)
            counts = np.minimum(counts, 2 * held)  # those that found no page do not come
            cache = dataclasses.replace(cache, count=jnp.asarray(counts, jnp.int32))
        table, free = np.asarray(cache.table), np.asarray(cache.free)[: int(cache.free_count)]
        pages = np.concatenate([table[table >= 0], free])
        assert sorted(pages) == list(range(9))
        held = (table >= 0).sum(1)
        assert all((row[:n] >= 0).all() and (row[n:] < 0).all() for row, n in zip(table, held))
        assert (held >= -(-counts // 2)).all()


def test_new_slots_lengths_and_tables_compile_nothing():
    traces = []

    @jax.jit
    def run(q, k, v, cache, slots, lengths, fresh):
        traces.append(None)
        cache = cache.reserve(slots, lengths, fresh=fresh)
        return cached_attention(q, k, v, cache, slots=slots, lengths=lengths, fresh=fresh)

    part = {name: x[:, :2] for name, x in arrays_of(0).items()}
    cache = cache_of("pages")[0]
    for slots, lengths in (([5, 0, 2], [2, 1, 0]), ([0, -1, 6], [1, 2, 2])):
        fresh = np.array([True, False, False])
        _, cache = run(**part, cache=cache, slots=np.int32(slots), lengths=np.int32(lengths), fresh=fresh)
    assert len(traces) == 1


# ---- errors ----------------------------------------------------------------------------------------------------------


def call(**changes):
    part = {name: x[:, :2] for name, x in arrays_of(0).items()}
    cache = changes.pop("cache", None)
    return cached_attention(**part | changes, cache=cache_of("rows")[0] if cache is None else cache)


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(cache=3), TypeError, r"`cache` must be a `KVCache` or a `PagedKVCache`, but an? int came"),
        (dict(cache=cache_of("slots")[0]), ValueError, "`cache` has 7 slots for 3 rows: say by `slots` which"),
        (dict(cache=KVCache.empty(capacity=3, **SIZES)), ValueError, "needs a leading axis of rows or slots"),
        (
            dict(cache=KVCache.empty(3, capacity=3, kv_heads=1, key_dim=4)),
            ValueError,
            r"must have the kv_heads, key_dim and value_dim of `k` and `v`, \(2, 4, 3\), but they are \(1, 4, 4\)",
        ),
        (dict(slots=np.array([0, 1, 0])), ValueError, "`cached_attention` needs slots that differ .* comes twice: 0"),
        (dict(slots=np.array([0, 1])), ValueError, "`slots` must have one entry for each of the 3 rows"),
        (dict(lengths=np.array([0, 1, 3])), ValueError, "`lengths` must lie in 0 to time = 2"),
        (dict(lengths=np.array([0.0, 1.0, 2.0])), TypeError, "`lengths` must be a JAX or NumPy array of integers"),
        (dict(fresh=np.array([0, 1, 0])), ValueError, "`fresh` must be a boolean array"),
        (dict(window=40), ValueError, "`cache` needs a capacity of at least `window=40`, but it is 20"),
        (dict(k=np.zeros((3, 1, 2, 4)), v=np.zeros((3, 1, 2, 3))), ValueError, "needs the keys of the queries' own"),
    ],
)
def test_what_does_not_fit_is_said(changes, error, message):
    with pytest.raises(error, match=message):
        call(**changes)


def test_sizes_of_caches_are_checked():
    with pytest.raises(ValueError, match="`capacity=0` must be at least 1"):
        KVCache.empty(3, capacity=0, **SIZES)
    with pytest.raises(TypeError, match="`pages` must be a Python int"):
        PagedKVCache.empty(3, pages=2.0, page_size=2, **SIZES)
    with pytest.raises(TypeError, match="`dtype` must hold floating-point numbers"):
        KVCache.empty(3, capacity=2, **SIZES, dtype=jnp.int32)
