r"""The mathematics of one chunk, written once: used by the XLA backend, by the Pallas bodies and by their backward
passes.

Functions advance all heads by one stage before the next stage begins (see `_heads`). Owners of a state (`owners`) are
the key heads or, where gates are given per value head, the value heads; `q` and `k` stay per key head as long as that
is exact.

For one head with entry state $H$, rows $i, j$ of the chunk, $e = \mathrm{erase} \odot k$, $z = \mathrm{write} \odot v$
and $\Gamma_{ij} = \exp\sum_{j < m \le i} \mathrm{log\_decay}_m$ (a vector over key channels):

    P_ij = (e_i * Gamma_ij) . k_j   for i > j            scores of erase keys against keys
    F_ij = (q_i * Gamma_ij) . k_j   for i >= j           scores of queries against keys
    D    = (I + P)^-1 (z - (e * Gamma_i,start) H)        what each token writes
    O    = (q * Gamma_i,start) H + F D
    H'   = Gamma_end,start * H + (k * Gamma_end,i)^T D

Every exponent is a sum of its own tokens and at most 0, but for short cuts that say their error: three with bfloat16
operands, and where `near` is "mended". A decay is divided by only where it is bounded, so no gate is too strong, and a
row never sees a gate that comes after it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from ._heads import Columns, Heads, count, each, first, side_by_side, spread
from ._types import accumulation_dtype

SOLVED = 64
"""Rows of the diagonal blocks of a chunk whose inverses are formed; longer chunks are solved block by block."""

NEAR = 32
"""Rows of the blocks within which decays may be measured from the block's start."""

STEEP = 64.0
"""How much such a block may forget for that, in nats: bfloat16 holds `exp(STEEP)`, and that times a cotangent."""

BOUNDED = 160.0
"""How much it may forget where that is promised, and decays are measured from halfway: `NEAR` tokens of -5."""


LEAST = 18.0
"""The strongest decay of one token, in nats, between pairs of eight rows that forget much, where `near` is "selected".

It hides all but 2e-8 of what came before it, where float32 rounds by 6e-8. What decays leave of a gradient is then off
by that: `d_erase`, where every token of a sequence forgets more.
"""


class Arithmetic(NamedTuple):
    """How products are computed: static and hashable.

    - `operand`: name of the dtype both operands of a product are cast to. Sums are float32, or float64 for float64.
    - `precision`: of products whose operands are float32, in `jax.lax.Precision`'s words; `None` is `"highest"`.
    - `inverse`: `"exact"`, `"approx"`, `"substitution"` or `"truncated:m"`.
    - `erase_max`: the promise of `Gates`.
    - `near`: how key channels with decays of their own are treated within a block of `NEAR` rows. `"safe"`: right for
        any decay. `"cheap"`: right where no block forgets more than `STEEP`. `"bounded"`: where none forgets more than
        `BOUNDED`. `"selected"`: row by row the cheap one where it is right. These three only with bfloat16 operands,
        whose rounding is larger than what they lose. `"mended"`: the cheap one, and where a chunk has rows for which
        that is wrong, a branch mends them; for any operands, in XLA only. Float32 then is right to 5e-7 (decays of
        -0.1 to -10 a token, and resets among slow ones), where `"safe"` is to 2e-7.
    """

    operand: str
    precision: str | None = None
    inverse: str = "exact"
    erase_max: float = 1.0
    near: Literal["safe", "cheap", "bounded", "selected", "mended"] = "safe"

    @property
    def accumulation(self):
        return accumulation_dtype(self.operand)

    @property
    def is_rounding(self) -> bool:
        return self.operand == "bfloat16"


class Tile(eqx.Module):
    """One chunk's inputs; `log_decay` in the accumulation dtype. Queries are not scaled: a backend scales its outputs.

    - `q`, `k`: `[chunk, key_dim]` of every key head; `v`: `[chunk, width]` of every owner.
    - `log_decay`, `erase`, `write`: `Columns`, or as wide as their vector for every owner, or `None`.
    - `document`: `[*rows, 1, 1, chunk]`, in a kernel `[1, chunk]`: numbers of the documents within the tile's row;
        `None`: the tile is inside one document. `entry`: number of the document that the entering state belongs to.
    """

    q: Heads
    k: Heads
    v: Heads
    log_decay: Columns | Heads | None
    erase: Columns | Heads | None
    write: Columns | Heads | None
    document: Int[Array, "..."] | None = None
    entry: Int[Array, "..."] | None = None


class Shared(eqx.Module):
    """Where documents share a chunk: what they must not share is numbers that are not finite, since 0 * inf is NaN.

    - `same`: which rows and columns are of one document.
    - `enters`, `stays`: which rows are of the entering state's document, of the leaving state's.
    - `carries`: whether the entering state leaves.
    - `overflow`, `misread`: rows of values and erase keys, of scores, that overflowed. `Factors` holds zeros there.
    """

    same: Bool[Array, "*rows chunk chunk"]
    enters: Bool[Array, "*rows chunk 1"]
    stays: Bool[Array, "*rows chunk 1"]
    carries: Bool[Array, "*rows 1 1"]
    overflow: Heads = None
    misread: Heads = None


class Factors(eqx.Module):
    """What a chunk does to any state that enters it, for every owner.

    `None` stands for zero (`erase_keys`, `pairs`, `inverse`) and for one (decays). `entry_decay`, `exit_decay` and
    `entry_erase` multiply rows, `[chunk, 1]`, where the keys do not hold them already.
    """

    queries: Heads
    keys: Heads
    scores: Heads
    values: Heads
    erase_keys: Heads | None
    pairs: Heads | None
    inverse: Heads | None
    decay: Heads | None
    entry_decay: Heads | None
    exit_decay: Heads | None
    entry_erase: Heads | None
    shared: Shared | None


# ---- products --------------------------------------------------------------------------------------------------------


def _dot(a, b, contract: tuple[int, int], arithmetic: Arithmetic):
    """Batched product of `[..., i, j]` arrays over the axes `contract` (each -1 or -2), summed in the accumulation
    dtype."""
    rank = max(a.ndim, b.ndim)
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    batch = tuple(range(rank - 2))
    dims = (((rank + contract[0],), (rank + contract[1],)), (batch, batch))
    if arithmetic.is_rounding:
        return lax.dot_general(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32)
    dtype = arithmetic.accumulation
    precision = lax.Precision(arithmetic.precision or "highest")
    return lax.dot_general(a.astype(dtype), b.astype(dtype), dims, precision=precision, preferred_element_type=dtype)


def matmul(a, b, arithmetic: Arithmetic) -> Array:
    """`a @ b`."""
    return _product(a, b, (-1, -2), arithmetic)


def matmul_nt(a, b, arithmetic: Arithmetic) -> Array:
    """`a @ b.T`."""
    return _product(a, b, (-1, -1), arithmetic)


def matmul_tn(a, b, arithmetic: Arithmetic) -> Array:
    """`a.T @ b`."""
    return _product(a, b, (-2, -2), arithmetic)


def _product(a, b, contract, arithmetic) -> Array:
    """Differentiable `_dot`: with bfloat16 operands the cotangents' products round their operands too, never the
    result."""
    if arithmetic.is_rounding:
        return cast(Array, _rounding_product(a.astype(jnp.float32), b.astype(jnp.float32), contract, arithmetic))
    return _dot(a, b, contract, arithmetic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounding_product(a, b, contract, arithmetic):
    return _dot(a, b, contract, arithmetic)


def _rounding_product_fwd(a, b, contract, arithmetic):
    a, b = a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)  # what the products take, and half to keep
    return _dot(a, b, contract, arithmetic), (a, b)


def _rounding_product_bwd(contract, arithmetic, residuals, d_out):
    a, b = residuals
    if contract == (-1, -2):
        return _dot(d_out, b, (-1, -1), arithmetic), _dot(a, d_out, (-2, -2), arithmetic)
    if contract == (-1, -1):
        return _dot(d_out, b, (-1, -2), arithmetic), _dot(d_out, a, (-2, -2), arithmetic)
    return _dot(b, d_out, (-1, -1), arithmetic), _dot(a, d_out, (-1, -2), arithmetic)


_rounding_product.defvjp(_rounding_product_fwd, _rounding_product_bwd)


def _parts(x, number: int) -> list:
    """`x` as a sum of bfloat16 parts: two hold 16 bits of every number, three all 24 of a float32."""
    parts = []
    for _ in range(number):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(x.dtype)
    return parts


def _select_and_add(ones, x, arithmetic: Arithmetic, parts: int, at_once: bool = False):
    """`ones @ x` for a matrix of zeros and ones: sums of rows of `x`, by a product that rounds them like additions do.

    With bfloat16 operands `x` comes in `parts`, and the sums are right to 8, 16 or 24 bits. `at_once`: one product adds
    up the parts as well.
    """
    with jax.named_scope("exact_sums"):
        if not arithmetic.is_rounding:
            return _dot(ones, x, (-1, -2), Arithmetic(arithmetic.operand))
        return cast(Array, _rounding_sums(ones, x, parts, at_once))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounding_sums(ones, x, parts, at_once):
    if at_once:
        ones = jnp.concatenate([ones] * parts, axis=-1)
        return _dot(ones, jnp.concatenate(_parts(x, parts), axis=-2), (-1, -2), Arithmetic("bfloat16"))
    return _sum_of_parts(ones, x, (-1, -2), parts)


def _rounding_sums_fwd(ones, x, parts, at_once):
    return _rounding_sums(ones, x, parts, at_once), ones


def _rounding_sums_bwd(parts, at_once, ones, d_out):
    return None, _sum_of_parts(ones, d_out, (-2, -2), parts)


_rounding_sums.defvjp(_rounding_sums_fwd, _rounding_sums_bwd)


def _sum_of_parts(ones, x, contract, parts: int):
    rounding = Arithmetic("bfloat16")
    return functools.reduce(jnp.add, [_dot(ones, part, contract, rounding) for part in _parts(x, parts)])


# ---- masks -----------------------------------------------------------------------------------------------------------


def _rows_and_columns(rows: int, columns: int, ndim: int = 2):
    """Row and column numbers of a `[rows, columns]` matrix, behind axes of 1 up to `ndim`."""
    shape = (*(1,) * (ndim - 2), rows, columns)
    return lax.broadcasted_iota(jnp.int32, shape, ndim - 2), lax.broadcasted_iota(jnp.int32, shape, ndim - 1)


def _ones_where(mask, dtype):
    return jnp.where(mask, 1, 0).astype(dtype)


def _either(condition, yes, no):
    """`jnp.where` of masks, which not every TPU compiler takes."""
    return (condition & yes) | (~condition & no)


def _halvings(size: int, least: int = 1) -> list[int]:
    """least, 2 * least, ... size / 2: a pair of rows i > j meets at the one `half` whose block of 2 * half it
    straddles."""
    return [1 << n for n in range(least.bit_length() - 1, size.bit_length() - 1)]


def _meet(rows, columns, half: int):
    """Where row and column lie in the second and first half of one block of `2 * half`: `half` is the highest bit in
    which they differ, and the row has it."""
    return (((rows ^ columns) & -half) == half) & ((rows & half) != 0)


def _mask(x, keep):
    return x if keep is None else jnp.where(keep, x, 0)


# ---- decays ----------------------------------------------------------------------------------------------------------

Same: TypeAlias = Array | None
"""Which rows and columns of a chunk are of one document; `None` where all are. Sums that pairs of rows are measured by
have their own document in them only: of a sum over another, what cancels in the gradient would leave its rounding."""


class _NoDecay:
    """Nothing is forgotten."""

    entry = exit = total = None

    def scores(
        self, left: list[Heads], k: Heads, owners: int, arithmetic: Arithmetic
    ) -> tuple[list[Heads], list[Heads], Heads]:
        """`sum_d left_i[d] Gamma_ij[d] k_j[d]` for every `left`, the queries last: valid where i > j, and for queries
        where i = j. And what `entering` and `leaving` take, for every owner."""
        return self._raw_scores(left, k, owners, arithmetic), [spread(x, owners) for x in left], spread(k, owners)

    def _raw_scores(self, left, k, owners, arithmetic) -> list[Heads]:
        chunk, heads = first(k).shape[-2], max(map(count, left))
        left, k = [spread(x, heads) for x in left], spread(k, heads)
        both = each(lambda k, *left: matmul_nt(jnp.concatenate(left, axis=-2), k, arithmetic), k, *left)
        parts = each(lambda x: tuple(x[..., i : i + chunk, :] for i in range(0, x.shape[-2], chunk)), both)
        return [spread(x, owners) for x in parts]

    def entering(self, x: Heads) -> Heads:
        """Keys or queries times their decay since the start of the chunk."""
        return x

    def leaving(self, x: Heads) -> Heads:
        """Keys times the decay after them."""
        return x


class _GroupDecay(_NoDecay):
    """A few decays per token and owner, each for an equal run of key channels: one mask for each.

    - `entry`, `exit`: with one decay, `[chunk, 1]` factors of rows, which then stay out of keys and queries.
    """

    def __init__(self, log_decay: Columns, key_dim: int, arithmetic: Arithmetic, same: Same = None):
        self.log_decay, self.run, self.arithmetic = log_decay, key_dim // log_decay.groups, arithmetic
        self.key_dim, self.same = key_dim, same
        values = log_decay.values
        chunk = values.shape[-2]
        i, m = _rows_and_columns(2 * chunk, chunk, values.ndim)
        own = _either(i < chunk, m <= i, m > i - chunk)
        if same is not None:
            own = own & jnp.concatenate([_without_heads(same, values.ndim)] * 2, axis=-2)
        sums = _select_and_add(_ones_where(own, values.dtype), values, arithmetic, parts=3)
        self.from_start = sums[..., :chunk, :]
        groups = log_decay.groups
        start, end = (Columns(jnp.exp(x), groups) for x in (self.from_start, sums[..., chunk:, :]))
        whole = Columns(jnp.exp(self.from_start[..., -1:, :]), groups)
        if groups == 1:
            self.entry, self.exit, self.total = start.column(0), end.column(0), whole.column(0)
        else:
            self.starts, self.ends = start.wide(key_dim), end.wide(key_dim)
            self.total = each(lambda x: jnp.swapaxes(x, -1, -2), whole.wide(key_dim))

    def _raw_scores(self, left, k, owners, arithmetic):
        out = None
        for group, gamma in enumerate(self._pair_decays()):
            channels = slice(group * self.run, (group + 1) * self.run)
            part = [each(lambda x: x[..., channels], x) for x in left]  # noqa: B023
            raw = super()._raw_scores(part, each(lambda x: x[..., channels], k), owners, arithmetic)  # noqa: B023
            if out is None:
                out = [each(jnp.multiply, x, gamma) for x in raw]
            else:
                out = [each(lambda out, x, gamma: out + x * gamma, y, x, gamma) for y, x in zip(out, raw, strict=True)]
        assert out is not None
        return out

    def _pair_decays(self):
        """`Gamma_ij` of every group for i >= j, one after the other; 1 elsewhere, to be masked.

        With bfloat16 operands the exponent is a difference of sums from the start of the chunk, each at most 14,080
        large, since every log decay is at least -110. Measured over chunks of 128, the decay is then off by 2e-6 for
        slow decays, 6e-5 down to -5 a token, 1.2e-3 where resets stand among slow tokens, and 6e-3 in the worst case
        tried, 96 resets before slow tokens; the budget of bfloat16 is 1e-2.
        """
        groups, chunk = self.log_decay.groups, self.log_decay.values.shape[-2]
        if self.arithmetic.is_rounding:
            sums, ndim = Columns(self.from_start, groups), self.log_decay.values.ndim
            rows, columns = _rows_and_columns(chunk, chunk, ndim if ndim == 2 else ndim + 1)

            behind = rows >= columns if self.same is None else (rows >= columns) & self.same

            def between(i, j):
                return jnp.exp(jnp.where(behind, i - j, 0))

            return (each(between, sums.column(group), sums.row(group)) for group in range(groups))

        def own_sums(row):
            i, m = _rows_and_columns(chunk, chunk, row.ndim)
            until = jnp.where(m <= i, row, 0)
            return jnp.exp(_select_and_add(until, _ones_where(i > m, row.dtype), self.arithmetic, parts=3))

        return (each(own_sums, self.log_decay.row(group)) for group in range(groups))

    def entering(self, x):
        return x if self.log_decay.groups == 1 else each(jnp.multiply, x, self.starts)

    def leaving(self, x):
        return x if self.log_decay.groups == 1 else each(jnp.multiply, x, self.ends)


class _ChannelDecay(_NoDecay):
    """A decay for every key channel: the decay between two rows is split at a seam between them.

    A pair of rows i > j meets at the seam of one block of `2 * half` rows. Both carry `exp` of their sums to it, at
    most 1: nothing can overflow, and a product underflows only if its true value does. Blocks of `near` rows are the
    leaves.
    """

    def __init__(self, log_decay: Columns | Heads, key_dim: int, arithmetic: Arithmetic, same: Same = None):
        self.log_decay, self.key_dim, self.arithmetic, self.same = log_decay, key_dim, arithmetic, same
        some = first(log_decay.values if isinstance(log_decay, Columns) else log_decay)
        self.chunk = some.shape[-2]
        self.near = min(NEAR, self.chunk)
        self.ndim = some.ndim
        self.to = self._sums(lambda i, m: m <= i)  # over the block's tokens up to and including the row
        leg = _map(jnp.exp, self.to)
        # Not from the wide legs: what decays states from chunk to chunk has to be right to the last bit.
        self.totals = [self._block_total(leg, b) for b in self._blocks()]
        self.total = each(lambda *x: jnp.swapaxes(functools.reduce(jnp.multiply, x), -1, -2), *self.totals)

    def _sums(self, selects: Callable):
        i, m = _rows_and_columns(self.near, self.near, self.ndim)
        return _map(lambda x: _add_in_blocks(selects(i, m), x, self.arithmetic, self.same), self.log_decay)

    def _block_total(self, leg: Columns | Heads, b: int) -> Heads:
        last = _map(lambda x: self._block(x, b)[..., -1:, :], leg)
        return last.wide(self.key_dim) if isinstance(last, Columns) else last

    def _blocks(self):
        return range(self.chunk // self.near)

    def _block(self, x, b: int):
        return x[..., b * self.near : (b + 1) * self.near, :]

    def scores(self, left, k, owners, arithmetic) -> tuple[list[Heads], list[Heads], Heads]:
        left, k = [spread(x, owners) for x in left], spread(k, owners)
        is_cheap = arithmetic.is_rounding and arithmetic.near == "cheap"
        after = None if is_cheap else self._sums(lambda i, m: m > i)  # over the block's tokens after the row
        if arithmetic.near in ("safe", "mended") or not arithmetic.is_rounding:
            to, after = (_exp_wide(x, self.key_dim) for x in (self.to, after))
            entered, ends = [each(jnp.multiply, x, to) for x in left], each(jnp.multiply, k, after)
            if arithmetic.near == "mended":
                keys = each(lambda k, to: k * jnp.exp(jnp.minimum(-to, STEEP)), k, self.to)
                out, holds = self._near_from_start(left, k, entered, keys), self._forgets_little()
                out = cast(list, _mend(out, left, k, self.log_decay, holds, self.same, arithmetic))
            else:
                out = self._near_for_any(left, k)
        else:
            halfway = BOUNDED / 2 if arithmetic.near == "bounded" else 0.0
            entered, ends, near, keys = cast(Any, _decayed(left, k, self.to, after, self.key_dim, halfway))
            if halfway:
                out = self._near_from_start(left, k, near, keys)
            else:
                shorter = each(self._ends_from_start, keys, *self.totals)
                ends = shorter if is_cheap else each(jnp.where, self._block_forgets_little(), shorter, ends)
                out = self._by_blocks_of_rows(left, k, entered, keys, ends)
                if not is_cheap:
                    both = zip(out, self._near_for_any(left, k), strict=True)
                    out = [each(self._where_it_holds, self._forgets_little(), x, y) for x, y in both]
                return out, entered, ends
        for half in _halvings(self.chunk, self.near):
            out = self._far_scores(out, entered, ends, half, arithmetic)
        return out, entered, ends

    def _near_for_any(self, left: list[Heads], k: Heads) -> list[Heads]:
        """Scores of pairs within a block of `NEAR` rows, for any decay."""
        if isinstance(self.log_decay, Columns):
            return _GroupDecay(self.log_decay, self.key_dim, self.arithmetic, self.same)._raw_scores(
                left, k, count(k), self.arithmetic
            )
        return _near_of_channels(left, k, self.log_decay, self.same, self.arithmetic)

    def _near_from_start(self, left: list[Heads], k: Heads, near: list[Heads], keys: Heads) -> list[Heads]:
        """The same where a block forgets little: one product for all pairs, of what `_decayed` makes of `left` and `k`.

        Elsewhere, and above the diagonal, it leaves finite numbers without a meaning.
        """

        def multiply(keys, *near):
            both = matmul_nt(jnp.concatenate(near, axis=-2), keys, self.arithmetic)
            return tuple(both[..., n : n + self.chunk, :] for n in range(0, both.shape[-2], self.chunk))

        *pairs, scores = each(multiply, keys, *near)
        return [*pairs, each(_without_decay_on_diagonal, scores, left[-1], k)]

    def _by_blocks_of_rows(
        self, left: list[Heads], k: Heads, entered: list[Heads], keys: Heads, ends: Heads
    ) -> list[Heads]:
        """All scores where blocks forget little: one product for each block of rows, all measured from its start."""

        def rows(b):
            def multiply(keys, ends, *both):
                totals, entered = both[: len(self.totals)], both[len(self.totals) :]
                before = [self._chained(ends, 0, b * self.near, totals, lambda n: reversed(range(n)))] if b else []
                after = self.chunk - (b + 1) * self.near
                zeros = [jnp.zeros((*keys.shape[:-2], after, keys.shape[-1]), keys.dtype)] if after else []
                right = jnp.concatenate([*before, self._block(keys, b), *zeros], axis=-2)
                both = matmul_nt(jnp.concatenate([self._block(x, b) for x in entered], axis=-2), right, self.arithmetic)
                return tuple(self._block(both, n) for n in range(len(entered)))

            return each(multiply, keys, ends, *self.totals, *entered)

        blocks = zip(*(rows(b) for b in self._blocks()), strict=True)
        *pairs, scores = [each(lambda *x: jnp.concatenate(x, axis=-2), *x) for x in blocks]
        return [*pairs, each(_without_decay_on_diagonal, scores, left[-1], k)]

    def _where_it_holds(self, holds, scores, near):
        """`scores`, but `near` in a block of rows and columns whose row forgets more."""
        i, j = _rows_and_columns(self.chunk, self.chunk, scores.ndim)
        return jnp.where(holds | (j < (i & -self.near)), scores, near)

    def _ends_from_start(self, keys, *totals):
        """Keys times their decay to the end of the block, from those divided by the decay since its start."""
        return jnp.concatenate([self._block(keys, b) * totals[b] for b in self._blocks()], axis=-2)

    def _forgets_little(self) -> Heads:
        """Rows, `[chunk, 1]`, for which the start of the block is near enough: none depends on what comes after it."""
        return each(lambda x: x >= -STEEP, self._least())

    def _block_forgets_little(self) -> Heads:
        """Rows whose block has only such rows."""

        def last(least):
            ends = [self._block(least, b)[..., -1:, :] for b in self._blocks()]
            shape = (*least.shape[:-2], self.near, 1)
            return jnp.concatenate([jnp.broadcast_to(x, shape) for x in ends], axis=-2) >= -STEEP

        return each(last, self._least())

    def _least(self) -> Heads:
        """The least sum of log decays since the start of the block, over the channels: `[chunk, 1]`."""
        if isinstance(self.to, Columns):
            columns = [self.to.column(group) for group in range(self.to.groups)]
            return each(lambda *x: functools.reduce(jnp.minimum, x), *columns)
        return each(lambda to: jnp.min(to, axis=-1, keepdims=True), self.to)

    def _far_scores(self, out, left, ends, half, arithmetic):
        """`out` with the pairs that meet at `half`."""
        seconds = range(half, self.chunk, 2 * half)

        def second(x, *totals):
            return jnp.concatenate([self._chained(x, s, half, totals, range) for s in seconds], axis=-2)

        def first_halves(x, *totals):
            rows = [self._chained(x, s - half, half, totals, lambda n: reversed(range(n))) for s in seconds]
            zeros = jnp.zeros_like(rows[0])
            return jnp.concatenate([y for x in rows for y in (x, zeros)], axis=-2)

        def multiply(ends, left):
            part = matmul_nt(left, ends, arithmetic)
            rows = len(seconds) * half
            return tuple(part[..., i : i + rows, :] for i in range(0, part.shape[-2], rows))

        right = each(first_halves, ends, *self.totals)
        rows = [each(second, x, *self.totals) for x in left]
        parts = each(multiply, right, each(lambda *x: jnp.concatenate(x, axis=-2), *rows))

        def put(out, part):
            _, j = _rows_and_columns(half, self.chunk, out.ndim)
            merged = []
            for n, s in enumerate(seconds):
                ours = (j >= s - half) & (j < s)
                new = jnp.where(ours, part[..., n * half : (n + 1) * half, :], out[..., s : s + half, :])
                merged += [out[..., s - half : s, :], new]
            return jnp.concatenate(merged, axis=-2)

        return [each(put, x, part) for x, part in zip(out, parts, strict=True)]

    def _chained(self, x, start: int, rows: int, totals, order):
        """Rows of `x`, which end at their own block, times the totals of the blocks between them and the far side,
        taken in `order`."""
        n, at = rows // self.near, start // self.near
        out: list[Any] = [None] * n
        run = None
        for b in order(n):
            block = self._block(x, at + b)
            out[b] = block if run is None else block * run
            run = totals[at + b] if run is None else run * totals[at + b]
        return out[0] if n == 1 else jnp.concatenate(out, axis=-2)

    def entering(self, x):
        return each(lambda x, *totals: self._chained(x, 0, self.chunk, totals, range), x, *self.totals)

    def leaving(self, x):
        def end(x, *totals):
            return self._chained(x, 0, self.chunk, totals, lambda n: reversed(range(n)))

        return each(end, x, *self.totals)


def _map(f: Callable, log_decay: Columns | Heads):
    """`f` of log decays, however they lie."""
    return log_decay.map(f) if isinstance(log_decay, Columns) else each(f, log_decay)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _decayed(left, k, to, after, dim: int, halfway: float):
    """What scores and states need of rows whose block forgets little, for sums of log decays `to` and `after` each row.

    `left` times `exp(to)`; `k` times `exp(after)`, if there is one; and for the pairs inside of the block `left` times
    `exp(to + halfway)`, and `k` divided by that.
    """
    return _decayed_fwd(left, k, to, after, dim, halfway)[0]


def _decayed_fwd(left, k, to, after, dim, halfway):
    most = halfway or STEEP
    leg, end = _exp_wide(to, dim), None if after is None else _exp_wide(after, dim)
    back = _exp_wide(_map(lambda to: jnp.minimum(-halfway - to, most), to), dim)
    shifted = _exp_wide(_map(lambda to: to + halfway, to), dim) if halfway else leg
    entered = [each(jnp.multiply, x, leg) for x in left]
    near = [each(jnp.multiply, x, shifted) for x in left] if halfway else entered
    ends = None if end is None else each(jnp.multiply, k, end)
    out = entered, ends, near, each(jnp.multiply, k, back)
    return out, (out, (leg, end, shifted, back), (to, after))


def _decayed_bwd(dim, halfway, residuals, d_out):
    # The gradient of x exp(s) for s is that product times its own cotangent: no factor is widened or summed up apart.
    (entered, ends, near, keys), (leg, end, shifted, back), (to, after) = residuals
    d_entered, d_ends, d_near, d_keys = d_out
    if halfway:
        d_left = [each(lambda d, f, e, g: d * f + e * g, d, leg, e, shifted) for d, e in zip(d_entered, d_near)]
        pairs = zip(entered, d_entered, near, d_near)
        own = [each(lambda x, d, y, e: x * d + y * e, x, d, y, e) for x, d, y, e in pairs]
    else:
        d_both = [each(jnp.add, *d) for d in zip(d_entered, d_near)]
        d_left = [each(jnp.multiply, d, leg) for d in d_both]
        own = [each(jnp.multiply, x, d) for x, d in zip(entered, d_both)]
    d_to = each(lambda y, d, *own: functools.reduce(jnp.add, own) - y * d, keys, d_keys, *own)
    d_k, d_after = each(jnp.multiply, d_keys, back), None
    if after is not None:
        d_k = each(lambda d_k, d, end: d_k + d * end, d_k, d_ends, end)
        d_after = _sum_copies(each(jnp.multiply, ends, d_ends), after, dim)
    return d_left, d_k, _sum_copies(d_to, to, dim), d_after


_decayed.defvjp(_decayed_fwd, _decayed_bwd)


def _exp_wide(logs: Columns | Heads, dim: int) -> Heads:
    """`exp` of them for every key channel."""
    factors = _map(jnp.exp, logs)
    return _copy_columns(factors, dim) if isinstance(factors, Columns) else factors


def _sum_copies(wide: Heads, columns: Columns | Heads, dim: int):
    """`_copy_columns` transposed: sums over the channels that share one of `columns`."""
    if not isinstance(columns, Columns):
        return wide
    chunk, ones = columns.values.shape[-2], _copies(columns, dim)

    def sums(x, ones):
        # The few columns go through the unit, and the rows wait in it: that is shorter than the other way round.
        return _dot(ones, jnp.concatenate(_parts(x, 2), axis=-2), (-1, -1), Arithmetic("bfloat16"))

    with jax.named_scope("exact_sums"):
        both = functools.reduce(jnp.add, each(sums, wide, [ones[:, i * dim : (i + 1) * dim] for i in range(len(wide))]))
    return Columns(jnp.swapaxes(both[:, :chunk] + both[:, chunk:], -1, -2), columns.groups)


def _copy_columns(columns: Columns, dim: int) -> list:
    """`columns.wide(dim)` in a kernel, right to 16 bits: a matrix unit copies lanes faster than what is made for it."""
    ones = _copies(columns, dim)
    parts, ones = jnp.concatenate(_parts(columns.values, 2), axis=-1), jnp.concatenate([ones, ones], axis=-2)
    with jax.named_scope("exact_sums"):
        wide = _dot(parts, ones, (-1, -2), Arithmetic("bfloat16"))
    return [wide[:, i * dim : (i + 1) * dim] for i in range(columns.owners)]


def _copies(columns: Columns, dim: int):
    """Ones where a column, in rows, belongs to a channel of all owners' `dim` each."""
    m, n = _rows_and_columns(columns.values.shape[-1], columns.owners * dim)
    return _ones_where(n // (dim // columns.groups) == m, jnp.bfloat16)


def _add_in_blocks(own, log_decay, arithmetic, same: Same, parts: int = 2, at_once: bool = False):
    """Sums over the rows of each block that `own`, `[sets * near, near]`, selects, of the row's own document:
    `[sets * chunk, key_dim]`."""
    near, (chunk, key_dim) = own.shape[-1], log_decay.shape[-2:]
    starts = range(0, chunk, near)

    def add(own, x):
        return _select_and_add(_ones_where(own, log_decay.dtype), x, arithmetic, parts, at_once)

    if same is None:
        sums = add(own, jnp.concatenate([log_decay[..., b : b + near, :] for b in starts], axis=-1))
        blocks = [sums[..., n * key_dim : (n + 1) * key_dim] for n in range(len(starts))]
    else:
        same, sets = _without_heads(same, log_decay.ndim), own.shape[-2] // near
        alike = [jnp.concatenate([same[..., b : b + near, b : b + near]] * sets, axis=-2) for b in starts]
        blocks = [add(own & here, log_decay[..., b : b + near, :]) for b, here in zip(starts, alike, strict=True)]
    rows = range(0, own.shape[-2], near)
    return jnp.concatenate([x[..., row : row + near, :] for row in rows for x in blocks], axis=-2)


def _without_heads(same, ndim: int):
    """Outside kernels `same` has an axis of heads, which gates of a few numbers per token have not."""
    return same if same.ndim == ndim else same[..., 0, :, :]


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def _mend(
    scores: list[Array],
    left: list[Array],
    k: Array,
    log_decay: Array,
    holds: Array,
    same: Same,
    arithmetic: Arithmetic,
):
    """`scores` with those rows replaced for which `holds`, `[*rows, heads, chunk, 1]`, is false.

    Where it is true for all rows nothing is computed. The rows for which it is true keep their bits in either case, so
    no row depends on what comes after it. The backward pass has a branch of its own, and needs the inputs only.
    """

    def mended():
        found = _near_of_channels(left, k, log_decay, same, arithmetic)
        return [jnp.where(holds, x, y) for x, y in zip(scores, found, strict=True)]

    return lax.cond(_anywhere(~holds), mended, lambda: scores)


def _mend_fwd(scores, left, k, log_decay, holds, same, arithmetic):
    return _mend(scores, left, k, log_decay, holds, same, arithmetic), (left, k, log_decay, holds, same)


def _mend_bwd(arithmetic, residuals, d_out):
    *inputs, holds, same = residuals

    def mended():
        _, pull = jax.vjp(lambda left, k, log_decay: _near_of_channels(left, k, log_decay, same, arithmetic), *inputs)
        return [jnp.where(holds, d, 0) for d in d_out], *pull([jnp.where(holds, 0, d) for d in d_out])

    def unmended():
        return d_out, *jax.tree.map(jnp.zeros_like, tuple(inputs))

    return *lax.cond(_anywhere(~holds), mended, unmended), None, None


_mend.defvjp(_mend_fwd, _mend_bwd)


@jax.custom_batching.custom_vmap
def _anywhere(x):
    """`jnp.any` over everything, a mapped axis included: what branches on it stays a branch under `jax.vmap`."""
    return jnp.any(x)


@_anywhere.def_vmap
def _anywhere_of_mapped(_, mapped, x):
    return _anywhere(x), False


def _near_of_channels(left: list[Heads], k: Heads, log_decay: Heads, same: Same, arithmetic: Arithmetic) -> list[Heads]:
    """Scores of pairs within a block of `NEAR` rows for any decays of channels: a product for each kind of `_legs`."""
    if len(left) == 1 and not arithmetic.is_rounding:  # no erase gate, and so no solve: forward mode works, and stays
        return _scores_by_legs(left, k, log_decay, same, arithmetic)
    return cast(list, _lean_scores_by_legs(left, k, log_decay, same, arithmetic))


def _scores_by_legs(left: list[Heads], k: Heads, log_decay: Heads, same: Same, arithmetic: Arithmetic) -> list[Heads]:
    chunk = first(k).shape[-2]
    i, j = _rows_and_columns(chunk, chunk, first(k).ndim)

    def multiply(half, before, after, k, *left):
        return tuple(_cut(matmul_nt(*_with_legs(half, before, after, k, left), arithmetic), len(left)))

    def put(half, out, found):
        pairs = _pairs(_seconds(half, i), _seconds(half, j), half)
        return _with_seconds(half, out, jnp.where(pairs, found, _seconds(half, out)))

    def diagonal(left, k):
        return jnp.where(i == j, jnp.sum(left * k, axis=-1, keepdims=True), 0)

    nothing = each(lambda k: jnp.zeros((*k.shape[:-1], chunk), k.dtype), k)
    out = [*(nothing for _ in left[1:]), each(diagonal, left[-1], k)]  # erase keys have none
    legs = _legs(log_decay, same, arithmetic)
    products = [each(functools.partial(multiply, half), before, after, k, *left) for half, before, after in legs]
    for (half, _, _), found in zip(legs, products, strict=True):
        out = [each(functools.partial(put, half), x, y) for x, y in zip(out, found, strict=True)]
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _lean_scores_by_legs(left, k, log_decay, same, arithmetic):
    """The same; its backward pass holds what belongs to one product at a time."""
    return _scores_by_legs(left, k, log_decay, same, arithmetic)


def _lean_scores_by_legs_fwd(left, k, log_decay, same, arithmetic):
    # Not the inputs themselves: a second derivative in a scan mistakes others for them (jax 0.10.2).
    kept = jax.tree.map(lambda x: x + jnp.asarray(-0.0, x.dtype), (left, k, log_decay))
    return _lean_scores_by_legs(left, k, log_decay, same, arithmetic), (*kept, same)


def _lean_scores_by_legs_bwd(arithmetic, inputs, d_out):
    # Product by product, so that nothing of one is kept while others are worked on: legs are found again.
    left, k, log_decay, same = inputs
    number, chunk = len(left), first(k).shape[-2]
    i, j = _rows_and_columns(chunk, chunk, first(k).ndim)

    def of_diagonal(d, q, k):
        d = jnp.sum(jnp.where(i == j, d, 0), axis=-1, keepdims=True)
        return d * k, d * q

    def of_product(half, before, after, k, d_k, *rest):
        left, d_left, d_out = (rest[n : n + number] for n in range(0, 3 * number, number))
        rows, keys = _with_legs(half, before, after, k, left)
        pairs = _pairs(_seconds(half, i), _seconds(half, j), half)
        d = jnp.concatenate([jnp.where(pairs, _seconds(half, d), 0) for d in d_out], axis=-2)
        d_rows = [d * after for d in _cut(matmul(d, keys, arithmetic), number)]
        d_keys = _firsts(half, matmul_tn(d, rows, arithmetic)) * before
        d_left = [_with_seconds(half, x, _seconds(half, x) + d) for x, d in zip(d_left, d_rows, strict=True)]
        # The gradient of x exp(s) for s is that product times its own cotangent.
        own = functools.reduce(jnp.add, [_seconds(half, x) * d for x, d in zip(left, d_rows, strict=True)])
        d_sums = _merge(half, _firsts(half, k) * d_keys, own) if half else own - k * d_keys
        return d_sums, _with_firsts(half, d_k, _firsts(half, d_k) + d_keys), *d_left

    def of_sums(half, d_log_decay, log_decay, d_sums):
        # Seams in one part: what they add up does not cancel.
        pull = jax.vjp(lambda x: _leg_sums(x, half, same, arithmetic, parts=1 if half else 2), log_decay)[1]
        return d_log_decay + pull(d_sums)[0]

    d_q, d_k = each(of_diagonal, d_out[-1], left[-1], k)
    d_left = [*(each(jnp.zeros_like, x) for x in left[:-1]), d_q]
    d_log_decay = each(jnp.zeros_like, log_decay)
    for half, before, after in _legs(log_decay, same, arithmetic):
        step = functools.partial(of_product, half)
        d_sums, d_k, *d_left = each(step, before, after, k, d_k, *left, *d_left, *d_out)
        d_log_decay = each(functools.partial(of_sums, half), d_log_decay, log_decay, d_sums)
    return d_left, d_k, d_log_decay, None


_lean_scores_by_legs.defvjp(_lean_scores_by_legs_fwd, _lean_scores_by_legs_bwd)


def _legs(log_decay: Heads, same: Same, arithmetic: Arithmetic) -> list[tuple[int, Heads, Heads]]:
    """Kinds of pairs, as `_pairs` numbers them, and for each the factors of keys and of rows behind them: the decay
    between two rows is the product of both.

    Of pairs that meet at a seam these are the decays to it, at most 1. Where `near` is "selected" one kind has all
    pairs of eight rows: decays from the first of them, no token's stronger than `LEAST`, measured from halfway.
    """
    seams = _halvings(min(NEAR, first(log_decay).shape[-2]))

    def at_seam(log_decay, half):
        leg = jnp.exp(_leg_sums(log_decay, half, same, arithmetic))
        return _firsts(half, leg), _seconds(half, leg)

    def in_eight(log_decay):
        sums, halfway = _leg_sums(log_decay, 0, same, arithmetic), 3.5 * LEAST
        return jnp.exp(-halfway - sums), jnp.exp(halfway + sums)

    within = []
    if arithmetic.near == "selected":
        within, seams = [(0, *each(in_eight, log_decay))], [half for half in seams if half >= 8]
    return [*within, *((half, *each(at_seam, log_decay, half)) for half in seams)]


def _leg_sums(log_decay, half: int, same: Same, arithmetic: Arithmetic, parts: int = 2):
    near = min(NEAR, log_decay.shape[-2])
    i, m = _rows_and_columns(near, near, log_decay.ndim)
    if half:
        own = ((i ^ m) < half) & _either((i & half) != 0, m <= i, m > i)
    else:
        own, log_decay = ((i ^ m) < 8) & (m <= i) & ((m & 7) != 0), jnp.maximum(log_decay, -LEAST)
    # Pairs that meet at a seam are of one document only if all between them is.
    return _add_in_blocks(own, log_decay, arithmetic, None if half else same, parts, at_once=True)


def _pairs(rows, columns, half: int):
    """Those that meet at a seam of `half`; those within eight rows for 0."""
    return _meet(rows, columns, half) if half else (rows > columns) & ((rows ^ columns) < 8)


def _with_legs(half: int, before, after, k, left) -> tuple[Array, Array]:
    """Rows of every `left` that stand behind a seam, and keys before one, each times its leg. Keys lie where they
    did."""
    keys = _firsts(half, k) * before
    rows = jnp.concatenate([_seconds(half, x) * after for x in left], axis=-2)
    return rows, keys if half < 8 else _merge(half, keys, jnp.zeros_like(keys))


def _firsts(half: int, x):
    """First halves of the blocks of `2 * half` rows; all rows, where a half is no whole register of a TPU."""
    return x if half < 8 else _runs(half, x, 0)


def _seconds(half: int, x):
    return x if half < 8 else _runs(half, x, half)


def _runs(half: int, x, start: int):
    return jnp.concatenate([x[..., s : s + half, :] for s in range(start, x.shape[-2], 2 * half)], axis=-2)


def _merge(half: int, firsts, seconds):
    """Halves put together again; of all rows the sum."""
    if half < 8:
        return firsts + seconds
    parts = [x[..., s : s + half, :] for s in range(0, firsts.shape[-2], half) for x in (firsts, seconds)]
    return jnp.concatenate(parts, axis=-2)


def _with_firsts(half: int, x, firsts):
    return firsts if half < 8 else _merge(half, firsts, _seconds(half, x))


def _with_seconds(half: int, x, seconds):
    return seconds if half < 8 else _merge(half, _firsts(half, x), seconds)


def _cut(x, number: int) -> list:
    """`number` equal runs of rows."""
    rows = x.shape[-2] // number
    return [x[..., n * rows : (n + 1) * rows, :] for n in range(number)]


@jax.custom_jvp
def _without_decay_on_diagonal(scores, left, k):
    """`scores`, whose diagonal, `left_i . k_i`, is known not to depend on a decay.

    Through the product its cotangent would reach the decays twice, as two roundings of opposite sign: noise of 1e-2,
    and all of the gradient where decays are strong.
    """
    return scores


@_without_decay_on_diagonal.defjvp
def _without_decay_on_diagonal_jvp(primals, tangents):
    scores, left, k = primals
    d_scores, d_left, d_k = tangents
    i, j = _rows_and_columns(scores.shape[-2], scores.shape[-1], scores.ndim)
    diagonal = jnp.sum(d_left * k + left * d_k, axis=-1, keepdims=True)
    return scores, jnp.where(i == j, diagonal, d_scores)


def promised_near(log_decay_min: float | None) -> Literal["cheap", "bounded"] | None:
    """What `Arithmetic.near` may be for every chunk by the promise of `Gates`; `None`: each has to be looked at."""
    if log_decay_min is None or NEAR * log_decay_min < -BOUNDED:
        return None
    return "cheap" if NEAR * log_decay_min >= -STEEP else "bounded"


def forgets_much(log_decay: Heads):
    """Whether a block of `NEAR` rows may forget more than `STEEP`: never false where one does."""
    chunk = first(log_decay).shape[-2]

    def least(log_decay):
        below = jnp.minimum(log_decay, 0)
        blocks = [range(start, min(start + NEAR, chunk), 8) for start in range(0, chunk, NEAR)]
        sums = [functools.reduce(jnp.add, [below[..., row : row + 8, :] for row in rows]) for rows in blocks]
        return functools.reduce(jnp.minimum, sums)

    every = each(least, log_decay)
    return ~(8 * jnp.min(functools.reduce(jnp.minimum, every) if isinstance(every, list) else every) >= -STEEP)


# ---- the chunk solve -------------------------------------------------------------------------------------------------


def block_inverses(pairs: Heads, arithmetic: Arithmetic, same: Array | None = None) -> Heads:
    """`(I + pairs)^-1` for strictly lower triangular `pairs`: its diagonal blocks of `SOLVED` rows, side by side.

    `[block, chunk]` for every owner; `"substitution"` and `"truncated:m"` form the whole inverse, `[chunk, chunk]`.
    `same`: which rows and columns share a document, where `pairs` is 0 between documents. Products are then masked, so
    that a document that overflows spoils no other (0 * inf); `"substitution"` gives no such promise.

    - `"exact"`: blocks of eight rows by elimination, then block doubling. Every intermediate is an entry of the inverse
        of a diagonal block, or a product of two with `pairs`; no power of `pairs` is formed, so identical keys are
        harmless. Products are float32; for bfloat16 inputs with `erase_max <= 1` they have bfloat16 operands, and one
        correction of third order follows, `out (1 + rest + rest**2)`, whose `rest` is taken from two parts of `pairs`.
    - `"approx"`: the same with bfloat16 operands and without the correction.
    - `"substitution"`: XLA's triangular solve, row by row. Does not run inside a kernel.
    - `"truncated:m"`: the first m powers of the Neumann series, by Horner's rule.
    """
    method, _, terms = arithmetic.inverse.partition(":")
    if method == "substitution":
        return xla_triangular_inverse(pairs)
    if method == "truncated":
        return each(lambda pairs: _truncated_series(pairs, int(terms), arithmetic, same), pairs)
    chunk, ndim = first(pairs).shape[-1], first(pairs).ndim
    block = min(SOLVED, chunk)
    side = each(lambda x: _diagonal_blocks(x, block), pairs)
    same = None if same is None else _diagonal_blocks(same, block)
    corrects = method == "exact" and arithmetic.is_rounding and arithmetic.erase_max <= 1
    products = Arithmetic("bfloat16") if method == "approx" or corrects else _exactly(arithmetic)
    rounded = jnp.bfloat16 if products.is_rounding else first(pairs).dtype

    def multiply(a, b):
        return _mask(_dot(a, _on_diagonal(b), (-1, -2), products), same)

    i, j = _rows_and_columns(block, chunk, ndim)
    j = j & (block - 1)
    high = each(lambda x: x.astype(rounded), side)
    out = each(lambda x: x.astype(rounded), _inverses_of_eights(side, products))
    for half in _halvings(block, 8):
        below = each(lambda x: jnp.where(_meet(i, j, half), x, jnp.zeros_like(x)), high)  # noqa: B023
        step = each(lambda below, out: multiply(below, out).astype(rounded), below, out)
        out = each(lambda out, step: out - multiply(out, step).astype(rounded), out, step)
    dtype = first(pairs).dtype
    if not corrects:
        return each(lambda x: x.astype(dtype), out)

    def residual(pairs, out):
        """`I - (I + pairs) out`, exact but for the rounding of sums."""
        parts = _dot(jnp.concatenate(_parts(pairs, 2), axis=-2), _on_diagonal(out), (-1, -2), products)
        return jnp.where(i == j, 1, 0) - out.astype(dtype) - _mask(parts[..., :block, :] + parts[..., block:, :], same)

    rest = each(residual, side, out)
    rest = each(lambda rest: rest + multiply(rest, rest), rest)
    return each(lambda out, rest: out.astype(dtype) + multiply(out, rest), out, rest)


def _exactly(arithmetic: Arithmetic) -> Arithmetic:
    operand = "float64" if arithmetic.operand == "float64" else "float32"
    return Arithmetic(operand, arithmetic.precision)


def _truncated_series(pairs, terms: int, arithmetic, same):
    i, j = _rows_and_columns(pairs.shape[-2], pairs.shape[-1], pairs.ndim)
    identity = jnp.where(i == j, 1, 0).astype(pairs.dtype)
    out = jnp.broadcast_to(identity, pairs.shape)
    for _ in range(terms):
        out = identity - _mask(matmul(pairs, out, arithmetic), same)
    return out


def _diagonal_blocks(x, block: int):
    """The diagonal blocks of `[chunk, chunk]` side by side: `[block, chunk]`."""
    _, j = _rows_and_columns(block, x.shape[-1], x.ndim)
    out = x[..., :block, :]
    for start in range(block, x.shape[-2], block):
        out = jnp.where(j >= start, x[..., start : start + block, :], out)
    return out


def _on_diagonal(x):
    """`_diagonal_blocks` undone, with zeros elsewhere."""
    block, chunk = x.shape[-2:]
    if block == chunk:
        return x
    _, j = _rows_and_columns(block, chunk, x.ndim)
    zeros = jnp.zeros_like(x)
    rows = [jnp.where((j & -block) == start, x, zeros) for start in range(0, chunk, block)]
    return jnp.concatenate(rows, axis=-2)


def _inverses_of_eights(side: Heads, products: Arithmetic) -> Heads:
    """Inverses of the diagonal blocks of eight rows within blocks side by side, zeros elsewhere: by elimination.

    All blocks of eight are brought into eight rows; there, column m of every block has to stand beside each of its
    columns, which a product with a matrix of zeros and ones does for all heads at once.
    """
    block, chunk = first(side).shape[-2:]
    ndim = first(side).ndim
    i, j = _rows_and_columns(8, chunk, ndim)
    inside = j & (block - 1)

    def gather(side):
        out = side[..., :8, :]
        for start in range(8, block, 8):
            out = jnp.where((inside & -8) == start, side[..., start : start + 8, :], out)
        return jnp.where((inside & 7) < i, out, 0)

    def columns(rows):
        m, n = _rows_and_columns(chunk, chunk, rows.ndim)
        chosen = jnp.concatenate([_ones_where(m == (n & -8) + column, rows.dtype) for column in range(7)], axis=-1)
        with jax.named_scope("exact_sums"):
            if not products.is_rounding:
                return _dot(rows, chosen, (-1, -2), Arithmetic(products.operand))
            parts = jnp.concatenate(_parts(rows, 2), axis=-1)  # one product adds them up as well
            return _dot(parts, jnp.concatenate([chosen, chosen], axis=-2), (-1, -2), products)

    def eliminate(columns):
        out = jnp.broadcast_to(jnp.where((inside & 7) == i, 1, 0).astype(columns.dtype), (*columns.shape[:-1], chunk))
        for m in range(7):
            out = out - columns[..., m * chunk : (m + 1) * chunk] * out[..., m : m + 1, :]
        zeros = jnp.zeros_like(out)
        return jnp.concatenate([jnp.where((inside & -8) == start, out, zeros) for start in range(0, block, 8)], axis=-2)

    return each(eliminate, side_by_side(columns, each(gather, side)))


def xla_triangular_inverse(pairs):
    """The one function here that lowers in XLA only."""
    identity = jnp.broadcast_to(jnp.eye(pairs.shape[-1], dtype=pairs.dtype), pairs.shape)
    return lax.linalg.triangular_solve(pairs, identity, left_side=True, lower=True, unit_diagonal=True)


def solve(
    pairs: Heads,
    inverse: Heads,
    right: Heads,
    arithmetic: Arithmetic,
    *,
    guards: bool = False,
    solution: Heads | None = None,
) -> Heads:
    """`(I + pairs)^-1 right` for `inverse` of `block_inverses`; its gradient goes to `pairs` and `right`.

    The gradient is the implicit one: with x the solution, d_right = (I + pairs)^-T d_x and d_pairs = -d_right x^T below
    the diagonal. No second inverse, and none of the products that made it, is differentiated. `guards`: a block's
    numbers that are not finite do not reach the next block, which another document may share (0 * inf). `solution`:
    the result, where it is known and only its gradient is wanted.
    """
    known = jax.tree.map(lax.stop_gradient, (inverse, solution))
    return _solve(pairs, known, right, arithmetic, False, guards)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _solve(pairs, known, right, arithmetic, transposed, guards):
    """The solution of `(I + pairs) x = right`, or of its transpose; derivatives take it for the solution that it is."""
    inverse, solution = known
    if solution is not None:
        return solution
    block, chunk = first(inverse).shape[-2:]
    if block == chunk:
        return each(lambda m, x: _dot(m, x, (-2, -2) if transposed else (-1, -2), arithmetic), inverse, right)
    starts = list(range(0, chunk, block))
    parts: dict[int, Heads] = {}
    for start in reversed(starts) if transposed else starts:
        rest = each(lambda x: x[..., start : start + block, :], right)  # noqa: B023
        for done in parts:
            known = each(lambda x: jnp.where(jnp.isfinite(x), x, 0), parts[done]) if guards else parts[done]
            rest = each(_without, rest, pairs, known, start, done, arithmetic, transposed)
        contract = (-2, -2) if transposed else (-1, -2)
        parts[start] = each(
            lambda m, x: _dot(m[..., start : start + block], x, contract, arithmetic),  # noqa: B023
            inverse,
            rest,
        )
    return each(lambda *x: jnp.concatenate(x, axis=-2), *(parts[start] for start in starts))


def _without(rest, pairs, x, start: int, done: int, arithmetic: Arithmetic, transposed: bool):
    """`rest`, of the block of rows at `start`, minus what the solved block at `done` contributes to it."""
    block = rest.shape[-2]
    row, column = (done, start) if transposed else (start, done)
    factor = pairs[..., row : row + block, column : column + block]
    return rest - _dot(factor, x, (-2, -2) if transposed else (-1, -2), arithmetic)


def _solve_fwd(pairs, known, right, arithmetic, transposed, guards):
    out = _solve(pairs, known, right, arithmetic, transposed, guards)
    return out, (pairs, known, out)


def _solve_bwd(arithmetic, transposed, guards, residuals, d_out):
    # Solutions again, not bare products with `inverse`: so that a second derivative is right as well.
    pairs, known, out = residuals
    d_right = _solve(pairs, (known[0], None), d_out, arithmetic, not transposed, guards)
    chunk = first(pairs).shape[-1]
    i, j = _rows_and_columns(chunk, chunk, first(pairs).ndim)

    def d_pairs(d_right, out):
        left, right = (out, d_right) if transposed else (d_right, out)
        return jnp.where(i > j, -_dot(left, right, (-1, -1), arithmetic), 0)

    return each(d_pairs, d_right, out), jax.tree.map(jnp.zeros_like, known), d_right


_solve.defvjp(_solve_fwd, _solve_bwd)


# ---- the chunk -------------------------------------------------------------------------------------------------------


def keep_nothing(x: Heads) -> Heads:
    return x


class Kept(NamedTuple):
    """What a chunk's gradient reads of what its forward pass found, for every owner. `None`: it is found again.

    - `inverse`, `scores`: as in `Factors`; `pairs`: below the diagonal, before a number per token scales them.
    - `recalled`: what the state holds for the erase keys, before that number too; `written`: the solution.
    """

    inverse: Heads | None = None
    pairs: Heads | None = None
    scores: Heads | None = None
    recalled: Heads | None = None
    written: Heads | None = None


NOTHING_KEPT = Kept()


def known(computed: Heads, value: Heads | None) -> Heads:
    """`value`, if it was kept, for `computed`, which is then done only for its derivative."""
    return computed if value is None else each(_known, computed, value)


@jax.custom_vjp
def _known(computed, value):
    return value


_known.defvjp(lambda computed, value: (value, None), lambda _, d: (d, None))


def chunk_factors(
    tile: Tile,
    arithmetic: Arithmetic,
    kept: Kept = NOTHING_KEPT,
    keep: Callable[[Heads], Heads] = keep_nothing,
) -> tuple[Factors, Kept]:
    """Everything about a chunk that needs no state: may run for all chunks at once.

    And what is found of `Kept`. `kept`: that of the same tile, where only the gradient is wanted. `keep`: marks what is
    worth keeping for a backward pass.
    """
    dtype = arithmetic.accumulation
    chunk, key_dim = first(tile.k).shape[-2:]
    owners, width, ndim = count(tile.v), first(tile.v).shape[-1], first(tile.v).ndim
    q, k = (each(lambda x: x.astype(dtype), x) for x in (tile.q, tile.k))
    shared = _shared_by_documents(tile)
    same = None if shared is None else shared.same
    decay = _decays(tile.log_decay, key_dim, arithmetic, same)
    i, j = _rows_and_columns(chunk, chunk, ndim)

    values = _times(each(lambda x: x.astype(dtype), tile.v), _gate(tile.write, width, dtype))
    erase = _gate(tile.erase, key_dim, dtype)
    by_row = isinstance(tile.erase, Columns)  # a number per token leaves the product: raw keys are shared by all owners
    entry_erase = erase_keys = pairs = raw = inverse = None
    if erase is None:
        (scores,), (queries,), keys = decay.scores([q], k, owners, arithmetic)
    else:
        erase_keys = k if by_row else each(jnp.multiply, spread(k, owners), erase)
        (pairs, scores), (entered, queries), keys = decay.scores([erase_keys, q], k, owners, arithmetic)
        if chunk == 1:
            pairs = None
        else:
            pairs = each(lambda x: jnp.where(i > j, x, 0), pairs)  # first: above the diagonal anything may stand
            pairs = raw = known(pairs, kept.pairs)
            pairs = _times(pairs, erase) if by_row else pairs
            pairs = each(lambda x: _mask(x, same), pairs)  # last: no cotangent comes from between documents
            inverse = kept.inverse
            if inverse is None:
                inverse = keep(block_inverses(jax.tree.map(lax.stop_gradient, pairs), arithmetic, same))
        erase_keys = decay.entering(entered)
        entry_erase = _times(decay.entry, erase) if by_row else decay.entry
    scores = known(each(lambda x: _mask(jnp.where(i >= j, x, 0), same), scores), kept.scores)
    found = Kept(inverse, raw, scores)
    queries, keys = decay.entering(queries), decay.leaving(keys)
    factors = Factors(
        queries,
        keys,
        scores,
        values,
        erase_keys,
        pairs,
        inverse,
        decay.total,
        decay.entry,
        decay.exit,
        entry_erase,
        shared,
    )
    return (factors if shared is None else _between_documents(factors, shared)), found


def _decays(log_decay: Columns | Heads | None, key_dim: int, arithmetic: Arithmetic, same: Same) -> _NoDecay:
    if log_decay is None:
        return _NoDecay()
    if isinstance(log_decay, Columns) and (log_decay.groups == 1 or arithmetic.near in ("safe", "mended")):
        return _GroupDecay(log_decay, key_dim, arithmetic, same)
    return _ChannelDecay(log_decay, key_dim, arithmetic, same)


def _gate(gate: Columns | Heads | None, dim: int, dtype) -> Heads | None:
    if gate is None:
        return None
    return (
        gate.map(lambda x: x.astype(dtype)).wide(dim)
        if isinstance(gate, Columns)
        else each(lambda x: x.astype(dtype), gate)
    )


def _times(x: Heads | None, gate: Heads | None) -> Heads | None:
    if x is None or gate is None:
        return gate if x is None else x
    return each(jnp.multiply, x, gate)


def _shared_by_documents(tile: Tile) -> Shared | None:
    """Which pairs share a document; which rows belong to the entering state's and to the leaving state's document;
    whether the entering state leaves. `None` for a tile inside one document."""
    if tile.document is None or tile.entry is None:
        return None
    document, entry = tile.document, tile.entry
    column, last = jnp.swapaxes(document, -1, -2), document[..., -1:]
    return Shared(column == document, column == entry, column == last, entry == last)


def _between_documents(factors: Factors, shared: Shared) -> Factors:
    """`factors` of a chunk that documents share: rows cut off from the states of other documents, and no number that is
    not finite."""
    values, overflow = each(_zero_overflow, factors.values)
    scores, misread = each(_zero_overflow, factors.scores)
    erase_keys, pairs, inverse = factors.erase_keys, factors.pairs, factors.inverse
    # Before rows are cut off: of a document's first token no other product shows its erase gate, nor its decay.
    queries, unread = each(_zero_overflow, factors.queries)
    misread = each(jnp.logical_or, misread, unread)
    if erase_keys is not None:
        erase_keys, lost = each(_zero_overflow, erase_keys)
        erase_keys = each(lambda x: jnp.where(shared.enters, x, 0), erase_keys)
        pairs, broken = each(_zero_overflow, pairs)
        overflow = each(lambda *x: functools.reduce(jnp.logical_or, x), overflow, lost, broken)
    dtype = first(factors.values).dtype
    one = jnp.ones(shared.carries.shape, dtype)
    if factors.decay is None:
        decay = each(lambda _: jnp.where(shared.carries, one, 0), factors.values)
    else:
        decay = each(lambda x: jnp.where(shared.carries, x, 0), factors.decay)
    return dataclasses.replace(
        factors,
        queries=each(lambda x: jnp.where(shared.enters, x, 0), queries),
        keys=each(lambda x: jnp.where(shared.stays, x, 0), factors.keys),
        scores=scores,
        values=values,
        erase_keys=erase_keys,
        pairs=pairs,
        inverse=inverse,
        decay=decay,
        shared=dataclasses.replace(shared, overflow=overflow, misread=misread),
    )


def _zero_overflow(x, axis: int | tuple[int, ...] = -1):
    """`x` with 0 for every row (or all of `axis`) that is not finite; and where that is."""
    overflow = ~jnp.all(jnp.isfinite(x), axis=axis, keepdims=True)
    return jnp.where(overflow, 0, x), overflow


def chunk_advance(
    state: Heads,
    factors: Factors,
    arithmetic: Arithmetic,
    keep: Callable[[Heads], Heads] = keep_nothing,
    kept: Kept = NOTHING_KEPT,
) -> tuple[Heads, Heads, Kept]:
    """The chain from chunk to chunk: the state after it, its outputs, and what is found of `Kept`.

    `keep` and `kept`: as of `chunk_factors`.
    """
    shared, lost = factors.shared, None
    if shared is not None:
        state, lost = each(lambda x: _zero_overflow(x, (-2, -1)), state)
    chunk, overflow = first(factors.values).shape[-2], None
    if factors.erase_keys is None:
        read = each(lambda x, state: matmul(x, state, arithmetic), factors.queries, state)
        written, raw = factors.values, None
    else:
        both = each(lambda *x: jnp.concatenate(x, axis=-2), factors.erase_keys, factors.queries)
        both = keep(each(lambda x, state: matmul(x, state, arithmetic), both, state))
        recalled, read = each(lambda x: (x[..., :chunk, :], x[..., chunk:, :]), both)
        recalled = raw = known(recalled, kept.recalled)
        right = each(jnp.subtract, factors.values, _times(recalled, factors.entry_erase))
        if shared is not None:
            right, overflow = each(_zero_overflow, right)
        written = right
        if factors.pairs is not None:
            guards = shared is not None
            written = solve(factors.pairs, factors.inverse, right, arithmetic, guards=guards, solution=kept.written)
    found = Kept(recalled=raw, written=written)
    if shared is not None:
        written, lost_rows = each(_zero_overflow, written)
        overflow = lost_rows if overflow is None else each(jnp.logical_or, overflow, lost_rows)
    read = _times(read, factors.entry_decay)
    out = each(lambda read, f, d: read + matmul(f, d, arithmetic), read, factors.scores, written)
    stays = _times(state, factors.decay)
    leaving = _times(written, factors.exit_decay)
    state = each(lambda stays, k, d: stays + matmul_tn(k, d, arithmetic), stays, factors.keys, leaving)
    if shared is None:
        return state, out, found

    def mark(state, out, overflow, earlier, misread, lost):
        spoiled, leaves = _spread_overflow(shared, overflow | earlier, lost)
        return jnp.where(leaves, jnp.nan, state), jnp.where(spoiled | misread, jnp.nan, out)

    state, out = each(mark, state, out, overflow, shared.overflow, shared.misread, lost)
    return state, out, found


def _spread_overflow(shared: Shared, overflow, lost):
    """The rows whose outputs are lost, and whether the leaving state is: by `overflow`, or a `lost` entering state."""
    i, j = _rows_and_columns(overflow.shape[-2], overflow.shape[-2], overflow.ndim)
    before = shared.same & (i >= j) & jnp.swapaxes(overflow, -1, -2)
    spoiled = jnp.any(before, axis=-1, keepdims=True) | (shared.enters & lost)
    return spoiled, jnp.any(shared.stays & overflow, axis=-2, keepdims=True) | (shared.carries & lost)


def chunk_step(
    state: Heads, tile: Tile, arithmetic: Arithmetic, keep: Callable[[Heads], Heads] = keep_nothing
) -> tuple[Heads, Heads]:
    """`chunk_factors` and `chunk_advance`."""
    return chunk_advance(state, chunk_factors(tile, arithmetic, keep=keep)[0], arithmetic, keep)[:2]
