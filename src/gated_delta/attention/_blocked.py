"""The XLA backend: tiles of scores, each written, used and forgotten, forward and backward. The maths is in `_tile`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from gated_delta._types import no_type_check

from ._backend import AbstractAttentionBackend, AttentionProblem, AttentionResult, is_visible
from ._tile import Arithmetic, absorb, begin, finish, gradients, masked, scores


@no_type_check
class BlockedAttention(AbstractAttentionBackend):
    """Runs blocks of queries over blocks of keys, on any platform XLA compiles for.

    Memory grows with time, not with its square: for the backward pass the inputs, the outputs and one log-sum-exp per
    query are kept. Blocks that no query sees are skipped: behind a causal query, outside of a window, of other
    documents, of a cache that is not filled so far. First derivatives in reverse mode; for others name
    `DenseAttention()`.

    - `queries`, `keys`: of one block. `None` leaves them to the backend.
    """

    takes_pages = True

    queries: int | None = eqx.field(static=True, default=None)
    keys: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        for name in ("queries", "keys"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"`BlockedAttention({name}={value!r})` must be an int of at least 1, or None.")

    def why_not(self, problem: AttentionProblem) -> str | None:
        return None

    def __call__(self, problem: AttentionProblem) -> AttentionResult:
        rules = _Rules(
            Arithmetic(problem.operand.name, problem.accumulation.name, problem.softcap, problem.precision),
            problem.causal,
            problem.window,
            *self._blocks(problem),
        )
        segments = (problem.query_segments, problem.key_segments)
        where = _Where(problem.query_offset, *segments, problem.pages)
        scale = problem.scale
        if isinstance(scale, (int, float)):
            return _attend(rules, scale, problem.q, problem.k, problem.v, where)
        scale = scale.astype(problem.accumulation)
        return _attend_scaled(rules, problem.q, problem.k, problem.v, scale, where)

    def _blocks(self, problem: AttentionProblem) -> tuple[int, int]:
        queries, keys = min(self.queries or _QUERIES, problem.q.shape[1]), min(self.keys or _KEYS, problem.keys)
        if problem.pages is not None and problem.k.shape[1] < keys:
            keys = keys // problem.k.shape[1] * problem.k.shape[1]  # whole pages
        return queries, keys


_QUERIES, _KEYS = 128, 128


class _Rules(NamedTuple):
    arithmetic: Arithmetic
    causal: bool
    window: int | None
    queries: int  # of one block
    keys: int


class _Where(NamedTuple):
    """The integer arrays of a problem."""

    offset: Int[Array, " batch"] | None
    query_segments: Int[Array, "batch time"] | None
    key_segments: Int[Array, "batch keys"] | None
    pages: Int[Array, "batch pages"] | None


class _Kept(NamedTuple):
    """For the backward pass."""

    q: Float[Array, "batch time query_heads key_dim"]
    k: Float[Array, "key_rows keys kv_heads key_dim"]
    v: Float[Array, "key_rows keys kv_heads value_dim"]
    where: _Where
    out: Float[Array, "batch time query_heads value_dim"]
    log_sum_exp: Float[Array, "batch time query_heads"]


# ---- gradients -------------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(rules: _Rules, scale: float, q, k, v, where: _Where):
    return _forward(rules, q, k, v, scale, where)


def _attend_forward(rules, scale, q, k, v, where):
    out, log_sum_exp = _forward(rules, q, k, v, scale, where)
    return (out, log_sum_exp), _Kept(q, k, v, where, out, log_sum_exp)


def _attend_backward(rules, scale, kept, cotangents):
    d_q, d_k, d_v, _ = _backward(rules, scale, kept, cotangents)
    return d_q, d_k, d_v, None


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_scaled(rules: _Rules, q, k, v, scale, where: _Where):
    """With a scale that has a gradient."""
    return _forward(rules, q, k, v, scale, where)


def _attend_scaled_forward(rules, q, k, v, scale, where):
    out, log_sum_exp = _forward(rules, q, k, v, scale, where)
    return (out, log_sum_exp), (scale, _Kept(q, k, v, where, out, log_sum_exp))


def _attend_scaled_backward(rules, residuals, cotangents):
    scale, kept = residuals
    d_q, d_k, d_v, d_scale = _backward(rules, scale, kept, cotangents)
    return d_q, d_k, d_v, d_scale, None


_attend_scaled.defvjp(_attend_scaled_forward, _attend_scaled_backward)


# ---- blocks of queries over blocks of keys ---------------------------------------------------------------------------


def _forward(rules: _Rules, q, k, v, scale, where: _Where):
    layout = _Layout.of(rules, q, k, where)
    tile_of = layout.tiles(k, v)
    first_k, first_v = (jnp.swapaxes(x[:1, :1] if where.pages is not None else x[:, :1], 1, 2) for x in (k, v))

    def one_block(block: _Block, q):
        def one_tile(index, running):
            k, v = tile_of(index)
            tile = scores(q, k, scale, rules.arithmetic)
            return absorb(running, masked(tile, layout.visible(block, index)), v, rules.arithmetic)

        nothing = begin(q, first_k, first_v, rules.arithmetic)
        out, log_sum_exp = finish(layout.over_keys(block, one_tile, nothing))
        return out.astype(q.dtype), log_sum_exp

    blocks = layout.blocks()
    _, (out, log_sum_exp) = layout.over_queries(
        lambda carry, xs: (carry, one_block(*xs)), None, (blocks, layout.cut(q))
    )
    return layout.joined(out), layout.joined(log_sum_exp)[..., 0]


def _backward(rules: _Rules, scale, kept: _Kept, cotangents):
    if kept.where.pages is not None:
        return _backward_of_pages(rules, scale, kept, cotangents)
    (d_out, d_log_sum_exp), (q, k, v, where, out, log_sum_exp) = cotangents, kept
    layout = _Layout.of(rules, q, k, where)
    tile_of = layout.tiles(k, v)
    dtype = jnp.dtype(rules.arithmetic.accumulation)
    # A row that overflowed has no gradient: an infinite log-sum-exp makes all its weights 0.
    lost = ~(jnp.isfinite(log_sum_exp) | (log_sum_exp == -jnp.inf))
    less = jnp.sum(out.astype(dtype) * d_out.astype(dtype), axis=-1) - d_log_sum_exp
    less = jnp.where(lost | (log_sum_exp == -jnp.inf), jnp.zeros_like(less), less)
    log_sum_exp = jnp.where(lost, jnp.inf, log_sum_exp)

    def one_block(carry, xs):
        block, q, d_out, log_sum_exp, less = xs

        def one_tile(index, carry):
            d_q, d_k, d_v = carry
            k, v = tile_of(index)
            visible = layout.visible(block, index)
            parts = gradients(q, k, v, visible, scale, log_sum_exp, d_out, less, rules.arithmetic)
            d_k, d_v = (layout.add(total, part, index) for total, part in zip((d_k, d_v), parts[1:], strict=True))
            return d_q + parts[0], d_k, d_v

        d_q = (0 * q).astype(dtype) + nothing
        d_q, *carry = layout.over_keys(block, one_tile, (d_q, *carry))
        return tuple(carry), d_q

    rows = (layout.cut(x) for x in (q, d_out, log_sum_exp[..., None], less[..., None]))
    # Made from the inputs, so that it varies over a mesh as they do: [batch, heads, 1, 1].
    nothing = sum((0 * jnp.swapaxes(x[:, :1, : k.shape[2], :1], 1, 2)).astype(dtype) for x in (q, k, v, d_out))
    totals = tuple((0 * jnp.swapaxes(x, 1, 2)).astype(dtype) + nothing for x in (k, v))
    (d_k, d_v), d_q = layout.over_queries(one_block, totals, (layout.blocks(), *rows))
    d_q = layout.joined(d_q)
    d_scale = None if isinstance(scale, (int, float)) else jnp.sum(q.astype(dtype) * d_q)
    d_k, d_v = (jnp.swapaxes(x, 1, 2) for x in (d_k, d_v))
    return (d_q * scale).astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_scale


def _backward_of_pages(rules, scale, kept: _Kept, cotangents):
    def rows(x):
        return x.at[kept.where.pages].get(mode="promise_in_bounds").reshape(kept.q.shape[0], -1, *x.shape[2:])

    (k, v), pull = jax.vjp(lambda k, v: (rows(k), rows(v)), kept.k, kept.v)
    kept = kept._replace(k=k, v=v, where=kept.where._replace(pages=None))
    d_q, d_k, d_v, d_scale = _backward(rules, scale, kept, cotangents)
    d_k, d_v = pull((d_k, d_v))
    return d_q, d_k, d_v, d_scale


class _Block(NamedTuple):
    """A block of queries: rows are those of one group of heads, head by head.

    `first` and `end` bound the blocks of keys that any of them sees.
    """

    position: Int[Array, "batch_or_1 rows"]
    segment: Int[Array, "batch rows"] | None
    first: Int[Array, ""]
    end: Int[Array, ""]


class _Layout(NamedTuple):
    """How a problem is cut into blocks, and which of them meet.

    Keys lie in `pages` of `page` entries; without pages there is one. A block of keys is a part of a page, or several
    pages. The last one of a page, or of all, may begin before it should, so that no array is padded: keys that it
    shares with the block before it count there.
    """

    rules: _Rules
    where: _Where
    time: int
    group: int
    page: int
    pages: int

    @classmethod
    def of(cls, rules: _Rules, q, k, where: _Where) -> "_Layout":
        pages = 1 if where.pages is None else where.pages.shape[1]
        return cls(rules, where, q.shape[1], q.shape[2] // k.shape[2], k.shape[1], pages)

    @property
    def query_blocks(self) -> int:
        return -(-self.time // self.rules.queries)

    # ---- queries

    def cut(self, x: Float[Array, "batch time query_heads dim"]) -> Float[Array, "blocks batch heads rows dim"]:
        size = self.rules.queries
        batch, time, heads, dim = x.shape
        x = jnp.pad(x, [(0, 0), (0, self.query_blocks * size - time), (0, 0), (0, 0)])
        x = x.reshape(batch, self.query_blocks, size, heads // self.group, self.group, dim)
        x = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
        return x.reshape(self.query_blocks, batch, heads // self.group, self.group * size, dim)

    def joined(self, x: Float[Array, "blocks batch heads rows dim"]) -> Float[Array, "batch time query_heads dim"]:
        blocks, batch, heads, rows, dim = x.shape
        size = rows // self.group
        x = jnp.transpose(x.reshape(blocks, batch, heads, self.group, size, dim), (1, 0, 4, 2, 3, 5))
        return x.reshape(batch, blocks * size, heads * self.group, dim)[:, : self.time]

    def blocks(self) -> _Block:
        """All of them, with a leading axis."""
        rules, where, size = self.rules, self.where, self.rules.queries
        index = jnp.arange(self.query_blocks, dtype=jnp.int32)
        position = index[:, None] * size + jnp.arange(size, dtype=jnp.int32)[None]  # [blocks, size]
        lowest, highest = position[:, 0], jnp.minimum(position[:, -1], self.time - 1)
        position = jnp.tile(position, (1, self.group))[:, None]
        if where.offset is not None:
            position = position + where.offset[None, :, None]
            lowest, highest = lowest + jnp.min(where.offset), highest + jnp.max(where.offset)
        first, end = jnp.zeros_like(lowest), jnp.full_like(highest, self.page * self.pages)
        if rules.causal:
            end = jnp.minimum(end, highest + 1)
        if rules.window is not None:
            first = jnp.maximum(first, lowest - rules.window + 1)
            if not rules.causal:
                end = jnp.minimum(end, highest + rules.window)
        segment = None
        if where.query_segments is not None and where.key_segments is not None:
            padding = self.query_blocks * size - self.time
            segment = jnp.pad(where.query_segments, [(0, 0), (0, padding)], constant_values=-1)
            segment = jnp.swapaxes(segment.reshape(-1, self.query_blocks, size), 0, 1)  # [blocks, batch, size]
            document_first, document_end = _keys_of_documents(segment, where.key_segments)
            first, end = jnp.maximum(first, document_first), jnp.minimum(end, document_end)
            segment = jnp.tile(segment, (1, 1, self.group))
        last = self.block_of(jnp.maximum(end - 1, 0))
        return _Block(position, segment, self.block_of(first), jnp.where(end > first, last + 1, 0))

    def over_queries(self, body: Callable, carry: Any, xs: Any) -> tuple[Any, Any]:
        if self.query_blocks > 1:
            return lax.scan(body, carry, xs)
        carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
        return carry, jax.tree.map(lambda y: y[None], ys)

    # ---- keys

    @property
    def several(self) -> int:
        """Whole pages in one block of keys; 0 where a page has more than one block."""
        return self.rules.keys // self.page

    @property
    def page_blocks(self) -> int:
        """Blocks of keys in one page, where it has more than one."""
        return -(-self.page // self.rules.keys)

    @property
    def key_blocks(self) -> int:
        return -(-self.pages // self.several) if self.several else self.pages * self.page_blocks

    def block_of(self, key):
        """The block that a key counts in."""
        if self.several:
            return key // self.rules.keys
        return key // self.page * self.page_blocks + key % self.page // self.rules.keys

    def begin_of(self, index):
        """The first key that counts in a block."""
        if self.several:
            return index * self.rules.keys
        return index // self.page_blocks * self.page + index % self.page_blocks * self.rules.keys

    def start_of(self, index):
        """The first key of a block, which may be one of the block before."""
        if self.several:
            return jnp.minimum(index * self.several, self.pages - self.several) * self.page
        within = jnp.minimum(index % self.page_blocks * self.rules.keys, self.page - self.rules.keys)
        return index // self.page_blocks * self.page + within

    def tiles(self, k, v) -> Callable:
        """From the index of a block of keys to its keys and values, `[batch, heads, keys, dim]`."""
        if self.where.pages is not None:
            return lambda index: (self._from_pages(k, index), self._from_pages(v, index))

        def part(x, index, axis):
            return lax.dynamic_slice_in_dim(x, self.start_of(index), self.rules.keys, axis=axis)

        if self.query_blocks == 1:  # every block is read once: keys that nobody sees are not touched at all
            return lambda index: tuple(jnp.swapaxes(part(x, index, 1), 1, 2) for x in (k, v))
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
        return lambda index: (part(k, index, 2), part(v, index, 2))

    def _from_pages(self, x, index):
        size, pages, start = self.rules.keys, self.where.pages, self.start_of(index)
        assert pages is not None
        if self.several:
            own = lax.dynamic_slice_in_dim(pages, start // self.page, self.several, axis=1)
            tile = x.at[own].get(mode="promise_in_bounds").reshape(own.shape[0], size, *x.shape[2:])
        else:
            own = lax.dynamic_slice_in_dim(pages, start // self.page, 1, axis=1)[:, 0]
            within, zero = (jnp.asarray(i, own.dtype) for i in (start % self.page, 0))
            tile = jax.vmap(lambda page: lax.dynamic_slice(x, (page, within, zero, zero), (1, size, *x.shape[2:]))[0])(
                own
            )
        return jnp.swapaxes(tile, 1, 2)

    def add(self, total, part, index):
        start = self.start_of(index)
        old = lax.dynamic_slice_in_dim(total, start, self.rules.keys, axis=2)
        return lax.dynamic_update_slice_in_dim(total, old + part, start, axis=2)

    def over_keys(self, block: _Block, body: Callable, carry: Any) -> Any:
        if self.key_blocks == 1:
            return body(0, carry)
        return lax.fori_loop(block.first, block.end, body, carry)

    def visible(self, block: _Block, index):
        """Which keys of a block its queries see, `[batch or 1, 1, rows, keys]`; `None`: all of them."""
        size, start = self.rules.keys, self.start_of(index)
        key = (start + jnp.arange(size, dtype=jnp.int32))[None, None, None]
        segments = (None, None)
        if block.segment is not None and self.where.key_segments is not None:
            keys = lax.dynamic_slice_in_dim(self.where.key_segments, start, size, axis=1)
            segments = block.segment[:, None, :, None], keys[:, None, None]
        visible = is_visible(
            block.position[:, None, :, None], key, *segments, causal=self.rules.causal, window=self.rules.window
        )
        if self.pages % self.several if self.several else self.page % size:
            counts = key >= self.begin_of(index)
            visible = counts if visible is None else visible & counts
        return visible


def _keys_of_documents(queries, keys):
    """Where the documents of every block of queries, `[blocks, batch, queries]`, begin and end among the keys."""
    top = lax.cummax(keys, axis=1)[None]  # padding counts to the document before it
    low = jnp.min(jnp.where(queries < 0, jnp.iinfo(queries.dtype).max, queries), axis=2, keepdims=True)
    high = jnp.max(queries, axis=2, keepdims=True)
    begin = jnp.sum(top < low, axis=2, dtype=jnp.int32)
    end = jnp.sum(top <= high, axis=2, dtype=jnp.int32)
    return jnp.min(begin, axis=1), jnp.max(end, axis=1)
