"""Attention of the next tokens of every row, from and to a cache: prefill, long prompts in pieces, and decoding."""

import dataclasses
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from gated_delta._explicit import is_sharded_explicitly
from gated_delta._options import check_precision, check_scale
from gated_delta._rows import Documents
from gated_delta._slots import check_distinct, check_fresh, check_slots, is_slot
from gated_delta._types import Scalar, a_type, accumulation_dtype, as_float_array, no_type_check, operand_dtype

from ._backend import AbstractAttentionBackend, AttentionProblem
from ._cache import KVCache, PagedKVCache, check_lengths, own, put_rows
from ._dispatch import choose
from ._finite import finite, marked, only
from ._op import Options, check_options, check_shapes, spec_of


@no_type_check
def cached_attention(
    q: Any,
    k: Any,
    v: Any,
    cache: KVCache | PagedKVCache,
    *,
    slots: Any = None,
    lengths: Any = None,
    fresh: Any = None,
    window: int | None = None,
    scale: Scalar | None = None,
    softcap: float | None = None,
    precision: str | lax.Precision | None = None,
    backend: AbstractAttentionBackend | None = None,
    return_log_sum_exp: bool = False,
    checked: bool = False,
) -> Any:
    """Put the next tokens of every row into a cache, and attend from them to what it then holds: causal attention.

    One function for a whole prompt, for a piece of one, and, with a time of 1, for decoding: whatever the pieces, the
    results are those of one `softmax_attention` over all tokens of the document.

    **Arguments:**

    - `q`, `k`, `v`: `[rows, time, heads, dim]`, as for `softmax_attention`; keys already turned to their positions,
        which begin at `cache.count`.
    - `cache`: with a leading axis of rows, or of slots. What is computed has the dtype of its keys and values, to which
        `k` and `v` are rounded.
    - `slots`: `[rows]` integers: which slot of the cache is that of each row. -1, or anything else out of range, is a
        padding row: its output is 0 and it touches nothing. None may come twice: that raises where they are concrete or
        `checked`. `None`: row after row; needed for a `PagedKVCache` of other than as many slots as rows.
    - `lengths`: `[rows]`: how many tokens of each row are real, the others, behind them, are padding; all if `None`.
    - `fresh`: `[rows]` booleans: rows that begin a document, whatever their slot holds.
    - `window`, `scale`, `softcap`, `precision`, `backend`, `return_log_sum_exp`, `checked`: as for `softmax_attention`.
        A `KVCache` needs a capacity of at least `window`.

    **Returns:** the outputs, in the dtype of `v` (with `return_log_sum_exp` a pair with the log-sum-exps), and the new
    cache, updated in place where it is donated under `jit`. A `PagedKVCache` must have the pages before: `reserve`.

    A token that is not finite, or for which there is no room, makes the outputs of its document NaN from there on (with
    a window until it is out of sight), and nothing else.

    **Raises:** as `softmax_attention`, and `TypeError` for what is no cache.
    """
    q, k, v = (as_float_array(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    check_shapes(q, k, v)
    check_options(Options(True, window, scale, softcap, precision, checked))
    if k.shape[1] != q.shape[1]:
        raise ValueError(
            f"`cached_attention` needs the keys of the queries' own tokens, but `q` is {q.shape} and `k` {k.shape}."
        )
    check_cache(cache, k.shape, v.shape, slots is not None)
    check_room(cache, window)
    rows, count = q.shape[0], cache.count.shape[0]
    if slots is not None:
        slots = check_distinct("cached_attention", check_slots(slots, count, rows), count, checked)
    lengths, fresh = check_lengths(lengths, rows, q.shape[1]), check_fresh(fresh, rows)
    rules = Rules(
        None if window is None else min(window, 2**30),
        check_scale(scale, q.shape[3]),
        None if softcap is None else float(softcap),
        check_precision(precision) or "highest",
    )
    tokens = Tokens.of_lengths(lengths, q.shape[1])
    out, log_sum_exp, cache = advance(backend, rules, q, k, v, cache, slots, fresh, tokens)
    return ((out, log_sum_exp) if return_log_sum_exp else out), cache


class Rules(eqx.Module):
    """The options of attention over a cache."""

    window: int | None = eqx.field(static=True)
    scale: Any
    softcap: float | None = eqx.field(static=True)
    precision: str = eqx.field(static=True)


class Tokens(eqx.Module):
    """The next tokens of every row, the real ones first.

    **Attributes:**

    - `real`: which they are.
    - `position`: of a token in its document, from 0 at the first of this call.
    - `is_first`: whether the token's document is the first of its row, which continues what is in the cache.
    - `document`: its rank in the row; `None`: there is one.
    """

    real: Bool[Array, "rows time"]
    position: Int[Array, "rows time"]
    is_first: Bool[Array, "rows time"]
    document: Int[Array, "rows time"] | None

    @classmethod
    def of_lengths(cls, lengths: Int[Array, " rows"], time: int) -> "Tokens":
        """One document in each row."""
        position = jnp.broadcast_to(jnp.arange(time, dtype=jnp.int32)[None], (lengths.shape[0], time))
        return cls(position < lengths[:, None], position, jnp.full(position.shape, True), None)

    @classmethod
    def of_documents(cls, documents: Documents, has_several: bool) -> "Tokens":
        time = documents.position.shape[1]
        real = jnp.arange(time, dtype=jnp.int32)[None] < documents.count[:, None]
        begins = (documents.position == 0) & ~documents.is_first
        rank = jnp.cumsum(begins.astype(jnp.int32), axis=1) if has_several else None
        return cls(real, documents.position, documents.is_first, rank)

    @property
    def segments(self) -> Int[Array, "rows time"]:
        """The document of every token, -1 at padding."""
        return jnp.where(self.real, 0 if self.document is None else self.document, -1)

    def positions(self, count: Int[Array, " rows"]) -> Int[Array, "rows time"]:
        """Of every token in its document, behind `count` tokens of the first."""
        return self.position + jnp.where(self.is_first, count[:, None], 0)


def advance(backend, rules: Rules, q, k, v, cache, slots, fresh, tokens: Tokens) -> tuple[Any, Any, Any]:
    """Outputs in the dtype of `v`, log-sum-exps, and the cache with these tokens in it. Arguments are checked."""
    arrays = (q, k, v, cache, slots, fresh, tokens)
    if not is_sharded_explicitly(arrays):
        return _advance(backend, rules, *arrays)
    batch, time, heads, _ = spec_of(q)
    stored = jax.tree.map(lambda x: P(*jax.typeof(x).sharding.spec), cache)
    shardings = (P(batch, time, heads, spec_of(v)[3]), P(batch, time, heads), stored)
    run = jax.sharding.auto_axes(lambda arrays: _advance(backend, rules, *arrays), out_sharding=shardings)
    return cast(tuple[Any, Any, Any], run(arrays))


@eqx.filter_jit
def _advance(backend, rules: Rules, q, k, v, cache, slots, fresh, tokens: Tokens):
    if 0 in q.shape[:2]:
        dtype = accumulation_dtype(operand_dtype(cache.keys.dtype, cache.values.dtype))
        return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype), jnp.full(q.shape[:3], -jnp.inf, dtype), cache
    count, lost = held(cache, slots, fresh)
    if slots is not None:
        real = tokens.real & is_slot(slots, cache.count.shape[0])[:, None]
        tokens = dataclasses.replace(tokens, real=real)
    fine_query, fine_key = finite(q), finite(k) & finite(v)
    q, k, clean = only(fine_query, q), only(fine_key, k), only(fine_key, v)
    stored, bad, end = _append(cache, slots, k, clean, fine_key, count, lost, tokens, rules.window is not None)
    problem = _problem(rules, q, k, clean, cache, stored, slots, count, end, tokens)
    runs = choose(problem, backend)
    result = runs(problem if runs.takes_pages else problem.gathered())
    spoiled = _spoiled(tokens, tokens.positions(count), bad, lost, rules.window)
    out, log_sum_exp = marked(result, ~fine_query | jnp.repeat(spoiled, problem.group, axis=2))
    real = tokens.real[..., None]
    out = jnp.where(real[..., None], out, jnp.zeros_like(out)).astype(v.dtype)
    return out, jnp.where(real, log_sum_exp, -jnp.inf), stored


@eqx.filter_jit
def filled(k, v, tokens: Tokens, capacity: int, is_ring: bool) -> KVCache:
    """A cache that holds nothing but the last document of these tokens, in the dtypes of `k` and `v`."""
    rows, _, kv_heads, key_dim = k.shape
    nothing = KVCache.empty(rows, capacity=capacity, kv_heads=kv_heads, key_dim=key_dim, value_dim=v.shape[3])
    nothing = dataclasses.replace(nothing, keys=nothing.keys.astype(k.dtype), values=nothing.values.astype(v.dtype))
    if k.shape[1] == 0:
        return nothing
    fine = finite(k) & finite(v)
    count, lost = nothing.count, nothing.lost
    return _append(nothing, None, only(fine, k), only(fine, v), fine, count, lost, tokens, is_ring)[0]


def _append(cache, slots, k, v, fine, count, lost, tokens: Tokens, is_ring: bool):
    """The cache with the last document of these tokens in it, which tokens are lost, and how many it then has."""
    position = tokens.positions(count)
    place = _Place.of(cache, slots, position, is_ring)
    bad = tokens.real[..., None] & ~(fine & place.has_room[..., None])
    kept = _last_document(tokens)
    end = jnp.max(jnp.where(kept, position + 1, 0), axis=1)
    end = jnp.where(jnp.any(kept, axis=1), end, count)
    goes_on = ~jnp.any(kept & ~tokens.is_first, axis=1)
    latest = jnp.max(jnp.where(bad & kept[..., None], position[..., None], -1), axis=1)
    latest = jnp.maximum(latest, jnp.where(goes_on[:, None], lost, -1))
    cache = _store(cache, place, k, v, kept)
    count, lost = put_rows(cache.count, end, slots), put_rows(cache.lost, latest, slots)
    return dataclasses.replace(cache, count=count, lost=lost), bad, end


def held(cache: KVCache | PagedKVCache, slots, fresh) -> tuple[Int[Array, " rows"], Int[Array, "rows kv_heads"]]:
    """How many tokens of its document each row has, and where the last lost one is."""
    count, lost = own(cache.count, slots), own(cache.lost, slots)
    if fresh is None:
        return count, lost
    return jnp.where(fresh, 0, count), jnp.where(fresh[:, None], -1, lost)


class _Place(eqx.Module):
    """Where each token lies in a cache: `row` of its keys (or page), and `entry` in it."""

    row: Int[Array, "rows time"]
    entry: Int[Array, "rows time"]
    has_room: Bool[Array, "rows time"]

    @classmethod
    def of(cls, cache: KVCache | PagedKVCache, slots, position, is_ring: bool) -> "_Place":
        capacity = cache.capacity
        if isinstance(cache, PagedKVCache):
            table = own(cache.table, slots)
            page = jnp.take_along_axis(table, jnp.minimum(position // cache.page_size, table.shape[1] - 1), axis=1)
            return cls(jnp.maximum(page, 0), position % cache.page_size, (page >= 0) & (position < capacity))
        row = jnp.arange(position.shape[0], dtype=jnp.int32) if slots is None else slots.astype(jnp.int32)
        row = jnp.broadcast_to(row[:, None], position.shape)
        has_room = jnp.full(position.shape, True) if is_ring else position < capacity
        return cls(row, position % capacity, has_room)


def _last_document(tokens: Tokens) -> Bool[Array, "rows time"]:
    """The real tokens of each row's last document: those that stay."""
    if tokens.document is None:
        return tokens.real
    last = jnp.max(jnp.where(tokens.real, tokens.document, -1), axis=1, keepdims=True)
    return tokens.real & (tokens.document == last)


def _store(cache, place: _Place, k, v, kept):
    """The cache with the tokens `kept`, but for those that a ring would overwrite at once and those without room."""
    written = kept & place.has_room
    if isinstance(cache, KVCache):
        back = jnp.cumsum(kept[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]  # a token's rank from the end, from 1
        written = written & (back <= cache.capacity)
    count = kept.size
    beyond = cache.keys.shape[0] + jnp.arange(count, dtype=jnp.int32).reshape(kept.shape)
    row = jnp.where(written, place.row, beyond)  # what is not written has a place of its own beyond the end

    def put(stored, new):
        return stored.at[row, place.entry].set(new.astype(stored.dtype), mode="drop", unique_indices=True)

    return dataclasses.replace(cache, keys=put(cache.keys, k), values=put(cache.values, v))


def _problem(rules: Rules, q, k, v, before, cache, slots, count, end, tokens: Tokens) -> AttentionProblem:
    """Attention from these tokens to what the cache holds: in place, where every key of a row is in it.

    Else, for several tokens of a ring and for several documents, to what it held `before` and to the tokens themselves.
    """
    operand = operand_dtype(cache.keys.dtype, cache.values.dtype)
    rows, time = q.shape[:2]
    pages, offset, segments, causal, window = None, count, (None, None), True, rules.window
    is_ring = isinstance(cache, KVCache) and window is not None
    if tokens.document is None and (not is_ring or time == 1):
        k, v = cache.keys, cache.values
        if isinstance(cache, PagedKVCache):
            pages = jnp.maximum(own(cache.table, slots), 0)
        elif slots is not None:
            pages = jnp.where(is_slot(slots, k.shape[0]), slots, 0).astype(jnp.int32)[:, None]
        if is_ring:  # whatever is in sight is seen, in any order
            assert window is not None
            behind = (end[:, None] - 1 - jnp.arange(cache.capacity, dtype=jnp.int32)[None]) % cache.capacity
            seen = behind < jnp.minimum(end, window)[:, None]
            segments = jnp.zeros((rows, 1), jnp.int32), jnp.where(seen, 0, -1)
            offset, causal, window = None, False, None
    else:
        k, v = k.astype(cache.keys.dtype), v.astype(cache.values.dtype)
        old_k, old_v, valid = _history(before, slots, count, window)
        k, v = jnp.concatenate([old_k, k], axis=1), jnp.concatenate([old_v, v], axis=1)
        segments = tokens.segments, jnp.concatenate([jnp.where(valid, 0, -1), tokens.segments], axis=1)
        offset = jnp.full((rows,), valid.shape[1], jnp.int32)
    return AttentionProblem(
        q=q.astype(operand),
        k=k.astype(operand),
        v=v.astype(operand),
        query_offset=offset,
        query_segments=segments[0],
        key_segments=segments[1],
        scale=rules.scale if isinstance(rules.scale, (int, float)) else rules.scale.astype(accumulation_dtype(operand)),
        causal=causal,
        window=window,
        softcap=rules.softcap,
        precision=rules.precision,
        pages=pages,
    )


def _history(cache: KVCache | PagedKVCache, slots, count, window: int | None):
    """The keys and values of each row, the latest at the end where there is a window, and which of them are any."""
    assert isinstance(cache, KVCache)  # documents in pages each have a slot
    if window is None:
        valid = jnp.arange(cache.capacity, dtype=jnp.int32)[None] < count[:, None]
        return own(cache.keys, slots), own(cache.values, slots), valid
    length = min(window - 1, cache.capacity)
    position = count[:, None] - length + jnp.arange(length, dtype=jnp.int32)[None]
    row = jnp.arange(count.shape[0], dtype=jnp.int32) if slots is None else slots
    index = jnp.where(is_slot(row, cache.keys.shape[0]), row, 0).astype(jnp.int32)[:, None], position % cache.capacity
    k, v = (x.at[index].get(mode="promise_in_bounds") for x in (cache.keys, cache.values))
    return k, v, position >= 0


def _spoiled(tokens: Tokens, position, bad, lost, window: int | None) -> Bool[Array, "rows time kv_heads"]:
    """Which outputs a lost token of the same document spoils, of this call or in the cache."""
    time = jnp.arange(position.shape[1], dtype=jnp.int32)[None, :, None]
    back = time - lax.cummax(jnp.where(bad, time, -1 - position.shape[1]), axis=1)  # how long ago the last one was
    here = back <= tokens.position[..., None]
    before = tokens.is_first[..., None] & (lost[:, None] >= 0)
    if window is not None:
        here = here & (back < window)
        before = before & (position[..., None] - lost[:, None] < window)
    return here | before


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_cache(cache: Any, k_shape: tuple[int, ...], v_shape: tuple[int, ...], has_slots: bool):
    """`cache` has a leading axis and fits keys and values of these shapes."""
    if not isinstance(cache, (KVCache, PagedKVCache)):
        raise TypeError(f"`cache` must be a `KVCache` or a `PagedKVCache`, but {a_type(cache)} came.")
    rows, _, kv_heads, key_dim = k_shape
    if cache.keys.ndim != 4 or cache.count.ndim != 1:
        raise ValueError(
            f"`cache` needs a leading axis of rows or slots, but its count has the shape {cache.count.shape}: make it "
            f"by `{type(cache).__name__}.empty(slots, ...)`."
        )
    came = (*cache.keys.shape[2:], cache.values.shape[3])
    if came != (kv_heads, key_dim, v_shape[3]):
        raise ValueError(
            f"`cache` must have the kv_heads, key_dim and value_dim of `k` and `v`, {(kv_heads, key_dim, v_shape[3])}, "
            f"but they are {came}."
        )
    if not has_slots and cache.count.shape[0] != rows:
        raise ValueError(
            f"`cache` has {cache.count.shape[0]} slots for {rows} rows: say by `slots` which is that of each row."
        )


def check_room(cache: KVCache | PagedKVCache, window: int | None):
    """A ring holds a whole window."""
    if isinstance(cache, KVCache) and window is not None and cache.capacity < window:
        raise ValueError(
            f"`cache` needs a capacity of at least `window={window}`, but it is {cache.capacity}: the keys in sight "
            "must be in it."
        )
