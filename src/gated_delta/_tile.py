r"""The mathematics of one chunk, written once: used by the XLA backend, by the Pallas bodies and by their backward
passes.

Arrays are `[*heads, chunk, dim]`; every function advances all heads by one stage before the next stage begins, because
a matrix unit is filled by independent products that stand side by side in the program. Owners of a state (`owners`)
are the key heads or, where gates are given per value head, the value heads; `q` and `k` stay per key head as long as
that is exact.

For one head with entry state $H$, rows $i, j$ of the chunk, $e = \mathrm{erase} \odot k$, $z = \mathrm{write} \odot v$
and $\Gamma_{ij} = \exp\sum_{j < m \le i} \mathrm{log\_decay}_m$ (a vector over key channels):

    P_ij = (e_i * Gamma_ij) . k_j   for i > j            scores of erase keys against keys
    F_ij = (q_i * Gamma_ij) . k_j   for i >= j           scores of queries against keys
    M    = (I + P)^-1                                    unit lower triangular
    Y    = M (e * Gamma_i,start)     U = M z             the UT transform: corrections are U - Y H
    D    = U - Y H                                       what each token writes
    O    = (q * Gamma_i,start) H + F D
    H'   = Gamma_end,start * H + (k * Gamma_end,i)^T D

Every exponent is formed as a sum of its own tokens and is at most 0. Nothing is ever divided by a decay, so no gate is
too strong, and a row never sees a gate that comes after it.
"""

import dataclasses
import functools
from typing import NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._types import accumulation_dtype


class Arithmetic(NamedTuple):
    """How products are computed: static and hashable.

    - `operand`: name of the dtype both operands of a product are cast to. Sums are float32, or float64 for float64.
    - `precision`: of products whose operands are float32, in `jax.lax.Precision`'s words; `None` is `"highest"`.
    - `inverse`: `"exact"`, `"approx"`, `"substitution"` or `"truncated:m"`.
    - `erase_max`: the promise of `Gates`.
    """

    operand: str
    precision: str | None = None
    inverse: str = "exact"
    erase_max: float = 1.0

    @property
    def accumulation(self):
        return accumulation_dtype(self.operand)


class Tile(eqx.Module):
    """One chunk's inputs; `log_decay` in the accumulation dtype. Queries are not scaled: a backend scales its outputs.

    `document` numbers the documents within the tile's row (`None`: the tile is inside one document) and `entry` is the
    number of the document that the entering state belongs to.
    """

    q: Float[Array, "*heads chunk key_dim"]
    k: Float[Array, "*heads chunk key_dim"]
    v: Float[Array, "*owners chunk width"]
    log_decay: Float[Array, "*owners chunk groups"] | None
    erase: Float[Array, "*owners chunk erase_dim"] | None
    write: Float[Array, "*owners chunk write_dim"] | None
    document: Int[Array, "*rows 1 1 chunk"] | None = None
    entry: Int[Array, "*rows 1 1 1"] | None = None


class Shared(eqx.Module):
    """Where documents share a chunk: what they must not share is numbers that are not finite, since 0 * inf is NaN.

    - `same`: which rows and columns are of one document.
    - `enters`, `stays`: which rows are of the entering state's document, of the leaving state's.
    - `carries`: whether the entering state leaves.
    - `overflow`, `misread`: rows of values and erase keys, of scores, that overflowed. `Factors` holds zeros there.
    """

    same: Bool[Array, "*rows 1 chunk chunk"]
    enters: Bool[Array, "*rows 1 chunk 1"]
    stays: Bool[Array, "*rows 1 chunk 1"]
    carries: Bool[Array, "*rows 1 1 1"]
    overflow: Bool[Array, "*owners chunk 1"]
    misread: Bool[Array, "*owners chunk 1"] | None = None


class Factors(eqx.Module):
    """What a chunk does to any state that enters it. `None` stands for zero (`erase_keys`) and for one (`decay`)."""

    queries: Float[Array, "*owners chunk key_dim"]
    keys: Float[Array, "*owners chunk key_dim"]
    scores: Float[Array, "*owners chunk chunk"]
    erase_keys: Float[Array, "*owners chunk key_dim"] | None
    values: Float[Array, "*owners chunk width"]
    decay: Float[Array, "*owners_or_rows key_dim_or_1 1"] | None
    shared: Shared | None = None


# ---- products --------------------------------------------------------------------------------------------------------


def _dot(a, b, contract: tuple[int, int], arithmetic: Arithmetic):
    """Batched product of `[..., i, j]` arrays over the axes `contract` (each -1 or -2), summed in the accumulation
    dtype."""
    if a.ndim > b.ndim:
        b = jnp.broadcast_to(b, (*a.shape[: a.ndim - b.ndim], *b.shape))
    batch = tuple(range(a.ndim - 2))
    dims = (((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch))
    if arithmetic.operand == "bfloat16":
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
    if arithmetic.operand == "bfloat16":
        return cast(Array, _rounding_product(a, b, contract, arithmetic))
    return _dot(a, b, contract, arithmetic)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rounding_product(a, b, contract, arithmetic):
    return _dot(a, b, contract, arithmetic)


def _rounding_product_fwd(a, b, contract, arithmetic):
    return _dot(a, b, contract, arithmetic), (a, b)


def _rounding_product_bwd(contract, arithmetic, residuals, d_out):
    a, b = residuals
    if contract == (-1, -2):
        d_a, d_b = _dot(d_out, b, (-1, -1), arithmetic), _dot(a, d_out, (-2, -2), arithmetic)
    elif contract == (-1, -1):
        d_a, d_b = _dot(d_out, b, (-1, -2), arithmetic), _dot(d_out, a, (-2, -2), arithmetic)
    else:
        d_a, d_b = _dot(b, d_out, (-1, -1), arithmetic), _dot(a, d_out, (-1, -2), arithmetic)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


_rounding_product.defvjp(_rounding_product_fwd, _rounding_product_bwd)


# ---- shapes and masks ------------------------------------------------------------------------------------------------


def widen(x: Float[Array, "*axes groups"], width: int) -> Float[Array, "*axes width_or_1"]:
    """Repeat each entry of the last axis over an equal run, to `width` entries; one entry stays one and broadcasts."""
    groups = x.shape[-1]
    if groups in (1, width):
        return x
    run = (*x.shape[:-1], width // groups)
    return jnp.concatenate([jnp.broadcast_to(x[..., i : i + 1], run) for i in range(groups)], axis=-1)


def spread(x, owners: int):
    """Give each owner the tile of its key head, where the third axis from the end counts heads."""
    heads = x.shape[-3]
    if heads == owners:
        return x
    lead, tail = x.shape[:-3], x.shape[-2:]
    x = jnp.broadcast_to(x[..., :, None, :, :], (*lead, heads, owners // heads, *tail))
    return x.reshape(*lead, owners, *tail)


def _rows_and_columns(chunk: int, ndim: int):
    """Row and column numbers of a `[chunk, chunk]` matrix, behind axes of 1 up to `ndim`."""
    shape = (*(1,) * (ndim - 2), chunk, chunk)
    return lax.broadcasted_iota(jnp.int32, shape, ndim - 2), lax.broadcasted_iota(jnp.int32, shape, ndim - 1)


def _halvings(chunk: int) -> list[int]:
    """1, 2, 4, ... chunk / 2: a pair of rows i > j meets at the one `half` whose block of 2 * half it straddles."""
    return [1 << n for n in range(chunk.bit_length() - 1)]


def _meet(rows, columns, half: int):
    """Where row and column lie in the second and first half of one block of `2 * half`: `half` is the highest bit in
    which they differ, and the row has it."""
    return (((rows ^ columns) & -half) == half) & ((rows & half) != 0)


# ---- decays ----------------------------------------------------------------------------------------------------------


class Decays(NamedTuple):
    """Sums of log decay, each formed from its own tokens only, all at most 0 and `[*owners, chunk, groups]`.

    - `to_seam[n]`: from a row to the middle of its block of `2 * half` (`half = 2**n`): over the tokens after the row
        in the first half, over those up to and including the row in the second. The exponent between rows i > j that
        meet at `half` is `to_seam[n]_i + to_seam[n]_j`.
    - `from_start`: over the chunk's tokens up to and including the row.
    - `to_end`: over the tokens after the row.
    - `total`: over the chunk, `[*owners, 1, groups]`.
    """

    to_seam: tuple
    from_start: Array
    to_end: Array
    total: Array


def sum_decays(log_decay: Float[Array, "*owners chunk groups"]) -> Decays:
    *owners, chunk, groups = log_decay.shape
    prefix, suffix, total, to_seam = log_decay, jnp.zeros_like(log_decay), log_decay, []
    for half in _halvings(chunk):
        blocks = (*owners, chunk // (2 * half), 2, half, groups)
        prefix, suffix = prefix.reshape(blocks), suffix.reshape(blocks)
        total = total.reshape(*owners, chunk // (2 * half), 2, 1, groups)
        first, second = total[..., 0, :, :], total[..., 1, :, :]
        seam = jnp.stack([suffix[..., 0, :, :], prefix[..., 1, :, :]], axis=-3)
        to_seam.append(seam.reshape(log_decay.shape))
        prefix = jnp.stack([prefix[..., 0, :, :], first + prefix[..., 1, :, :]], axis=-3)
        suffix = jnp.stack([suffix[..., 0, :, :] + second, suffix[..., 1, :, :]], axis=-3)
        total = first + second
    shape = log_decay.shape
    return Decays(tuple(to_seam), prefix.reshape(shape), suffix.reshape(shape), total.reshape(*owners, 1, groups))


def _pair_decay(decays: Decays, group: int, chunk: int):
    """`Gamma_ij` of one decay group for i >= j, `[*owners, chunk, chunk]`; 1 elsewhere, to be masked."""
    rows, columns = _rows_and_columns(chunk, decays.total.ndim)
    exponent = jnp.zeros(rows.shape, decays.total.dtype)
    for half, seam in zip(_halvings(chunk), decays.to_seam, strict=True):
        seam = seam[..., group]
        exponent = jnp.where(_meet(rows, columns, half), seam[..., :, None] + seam[..., None, :], exponent)
    return jnp.exp(exponent)


# ---- scores ----------------------------------------------------------------------------------------------------------


def decayed_scores(left, k, decays: Decays | None, arithmetic: Arithmetic) -> Array:
    """`sum_d left_i[d] Gamma_ij[d] k_j[d]`, valid where i >= j.

    `left` stacks any number of `[chunk, key_dim]` blocks along its rows.
    """
    if decays is None:
        return matmul_nt(left, k, arithmetic)
    if 1 < decays.total.shape[-1] == k.shape[-1]:
        return scores_by_channel(left, k, decays, arithmetic)
    return scores_by_group(left, k, decays, arithmetic)


def scores_by_group(left, k, decays: Decays, arithmetic: Arithmetic) -> Array:
    """`decayed_scores` by one mask per group of key channels and one product per group, whatever the number of owners
    that share the keys."""
    chunk, groups = k.shape[-2], decays.total.shape[-1]
    owners, blocks, run = decays.total.shape[-3], left.shape[-2] // chunk, k.shape[-1] // groups
    parts = []
    for group in range(groups):
        channels = slice(group * run, (group + 1) * run)
        raw = spread(matmul_nt(left[..., channels], k[..., channels], arithmetic), owners)
        gamma = _pair_decay(decays, group, chunk)
        parts.append(raw * jnp.concatenate([gamma] * blocks, axis=-2))
    return functools.reduce(jnp.add, parts)


def scores_by_channel(left, k, decays: Decays, arithmetic: Arithmetic) -> Array:
    """`decayed_scores` where every key channel has a decay of its own: one product per halving of the chunk.

    The rows that meet at a seam carry `exp` of their sums to it, both at most 1: nothing can overflow, and a product
    underflows only if its true value does.
    """
    chunk, owners = k.shape[-2], decays.total.shape[-3]
    blocks = left.shape[-2] // chunk
    left, k = spread(left, owners), spread(k, owners)
    rows, columns = (jnp.concatenate([x] * blocks, axis=-2) for x in _rows_and_columns(chunk, k.ndim))
    out = jnp.where(rows == columns, matmul_nt(left, k, arithmetic), 0)
    for half, seam in zip(_halvings(chunk), decays.to_seam, strict=True):
        leg = jnp.exp(seam)
        part = matmul_nt(left * jnp.concatenate([leg] * blocks, axis=-2), k * leg, arithmetic)
        out = jnp.where(_meet(rows, columns, half), part, out)
    return out


# ---- the chunk solve -------------------------------------------------------------------------------------------------


def unit_lower_inverse(
    pairs: Float[Array, "*owners chunk chunk"], arithmetic: Arithmetic, same: Array | None = None
) -> Float[Array, "*owners chunk chunk"]:
    """`(I + pairs)^-1` for strictly lower triangular `pairs`, by the method that `arithmetic.inverse` names.

    `same`: which rows and columns share a document, where `pairs` is 0 between documents. Products are then masked, so
    that a document that overflows spoils no other (0 * inf); `"substitution"` gives no such promise.

    - `"exact"`: block doubling. Every intermediate is an entry of the inverse of a diagonal block, or a product of two
        with `pairs`; no power of `pairs` is formed, so identical keys are harmless. Operands are float32, or for
        bfloat16 inputs with `erase_max <= 1` two bfloat16 parts and three products.
    - `"approx"`: block doubling with bfloat16 operands.
    - `"substitution"`: XLA's triangular solve, row by row. Does not run inside a kernel.
    - `"truncated:m"`: the first m powers of the Neumann series, by Horner's rule.
    """
    method, _, terms = arithmetic.inverse.partition(":")
    if method == "substitution":
        return xla_triangular_inverse(pairs)
    chunk = pairs.shape[-1]
    rows, columns = _rows_and_columns(chunk, pairs.ndim)
    identity = jnp.where(rows == columns, 1, 0).astype(pairs.dtype)
    if method == "truncated":
        out = jnp.broadcast_to(identity, pairs.shape)
        for _ in range(int(terms)):
            out = identity - _mask(matmul(pairs, out, arithmetic), same)
        return out
    product = _solve_product(method, arithmetic)

    def multiply(a, b):
        return _mask(product(a, b), same)

    out = identity - jnp.where(_meet(rows, columns, 1), pairs, 0)
    for half in _halvings(chunk)[1:]:
        below = jnp.where(_meet(rows, columns, half), pairs, 0)
        out = out - multiply(out, multiply(below, out))
    return out


def _solve_product(method: str, arithmetic: Arithmetic):
    if method == "approx":
        return lambda a, b: _dot(a, b, (-1, -2), Arithmetic("bfloat16"))
    if arithmetic.operand == "bfloat16" and arithmetic.erase_max <= 1:
        return _three_pass_product
    operand = "float64" if arithmetic.operand == "float64" else "float32"
    return lambda a, b: _dot(a, b, (-1, -2), Arithmetic(operand, arithmetic.precision))


def _three_pass_product(a, b):
    """`a @ b` with each float32 operand in two bfloat16 parts; the product of the two small parts is left out."""
    bf16 = Arithmetic("bfloat16")
    (a_high, a_low), (b_high, b_low) = _split(a), _split(b)
    cross = _dot(a_high, b_low, (-1, -2), bf16) + _dot(a_low, b_high, (-1, -2), bf16)
    return _dot(a_high, b_high, (-1, -2), bf16) + cross


def _split(x):
    high = x.astype(jnp.bfloat16)
    return high, x - high.astype(x.dtype)


def xla_triangular_inverse(pairs):
    """The one function here that lowers in XLA only."""
    identity = jnp.broadcast_to(jnp.eye(pairs.shape[-1], dtype=pairs.dtype), pairs.shape)
    return lax.linalg.triangular_solve(pairs, identity, left_side=True, lower=True, unit_diagonal=True)


def solve(pairs, inverse, right, arithmetic: Arithmetic) -> Array:
    """`(I + pairs)^-1 right` for a given `inverse`; its gradient goes to `pairs` and `right`.

    The gradient is the implicit one: with x the solution, d_right = inverse^T d_x and d_pairs = -d_right x^T below the
    diagonal. No second inverse, and none of the products that made it, is differentiated.
    """
    return cast(Array, _solve(pairs, lax.stop_gradient(inverse), right, arithmetic, False))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _solve(pairs, inverse, right, arithmetic, transposed):
    """`inverse @ right`, or `inverse.T @ right`; derivatives take it for the solution that it is."""
    return _dot(inverse, right, (-2, -2) if transposed else (-1, -2), arithmetic)


def _solve_fwd(pairs, inverse, right, arithmetic, transposed):
    out = _solve(pairs, inverse, right, arithmetic, transposed)
    return out, (pairs, inverse, out)


def _solve_bwd(arithmetic, transposed, residuals, d_out):
    # Solutions again, not bare products with `inverse`: so that a second derivative is right as well.
    pairs, inverse, out = residuals
    d_right = _solve(pairs, inverse, d_out, arithmetic, not transposed)
    rows, columns = _rows_and_columns(inverse.shape[-1], inverse.ndim)
    left, right = (out, d_right) if transposed else (d_right, out)
    d_pairs = jnp.where(rows > columns, -_dot(left, right, (-1, -1), arithmetic), 0)
    return d_pairs, jnp.zeros_like(inverse), d_right


_solve.defvjp(_solve_fwd, _solve_bwd)


# ---- the chunk -------------------------------------------------------------------------------------------------------


def chunk_factors(tile: Tile, arithmetic: Arithmetic) -> Factors:
    """Everything about a chunk that needs no state: may run for all chunks at once."""
    dtype = arithmetic.accumulation
    chunk, key_dim = tile.k.shape[-2:]
    owners, width = tile.v.shape[-3], tile.v.shape[-1]
    q, k = tile.q.astype(dtype), tile.k.astype(dtype)
    decays = None if tile.log_decay is None else sum_decays(tile.log_decay)
    rows, columns = _rows_and_columns(chunk, tile.k.ndim)
    same, enters, stays, carries = _document_masks(tile)

    from_start = to_end = None
    if decays is not None:
        from_start, to_end = (widen(jnp.exp(x), key_dim) for x in (decays.from_start, decays.to_end))
    queries, keys = (
        spread(x, owners) if gamma is None else spread(x, owners) * gamma for x, gamma in ((q, from_start), (k, to_end))
    )
    queries, keys = _mask(queries, enters), _mask(keys, stays)
    decay = None if decays is None else jnp.swapaxes(widen(jnp.exp(decays.total), key_dim), -1, -2)
    if carries is not None:
        decay = jnp.where(carries, jnp.ones(carries.shape, dtype) if decay is None else decay, 0)
    values = tile.v.astype(dtype)
    write = tile.write
    values = values if write is None else values * widen(write.astype(dtype), width)
    shared = None
    if same is not None and enters is not None and stays is not None and carries is not None:
        values, overflow = _zero_overflow(values)
        shared = Shared(same, enters, stays, carries, overflow)

    if tile.erase is None:
        scores = decayed_scores(q, k, decays, arithmetic)
        scores = _mask(jnp.where(rows >= columns, spread(scores, owners), 0), same)
        return _contain_overflow(Factors(queries, keys, scores, None, values, decay, shared))

    erase = tile.erase.astype(dtype)
    by_row = erase.shape[-1] == 1  # one number per token leaves the product: raw keys are shared by all owners
    erased = k if by_row else spread(k, owners) * erase
    left = jnp.concatenate([erased, q if by_row else spread(q, owners)], axis=-2)
    both = spread(decayed_scores(left, k if by_row else spread(k, owners), decays, arithmetic), owners)
    pairs, scores = both[..., :chunk, :], both[..., chunk:, :]
    pairs = _mask(jnp.where(rows > columns, pairs * erase if by_row else pairs, 0), same)
    scores = _mask(jnp.where(rows >= columns, scores, 0), same)
    inverse = unit_lower_inverse(lax.stop_gradient(pairs), arithmetic, same)
    erased = spread(k, owners) * erase if by_row else erased
    erased = _mask(erased if from_start is None else erased * from_start, enters)
    solved = solve(pairs, inverse, jnp.concatenate([erased, values], axis=-1), arithmetic)
    erase_keys, values = solved[..., :key_dim], solved[..., key_dim:]
    return _contain_overflow(Factors(queries, keys, scores, erase_keys, values, decay, shared))


def _mask(x, keep):
    return x if keep is None else jnp.where(keep, x, 0)


def _document_masks(tile: Tile):
    """Which pairs share a document; which rows belong to the entering state's and to the leaving state's document;
    whether the entering state leaves. All `None` for a tile inside one document."""
    if tile.document is None or tile.entry is None:
        return None, None, None, None
    document, entry = tile.document, tile.entry
    column, last = jnp.swapaxes(document, -1, -2), document[..., -1:]
    return column == document, column == entry, column == last, entry == last


def _zero_overflow(x, axis=-1):
    """`x` with 0 for every row (or all of `axis`) that is not finite; and where that is."""
    overflow = ~jnp.all(jnp.isfinite(x), axis=axis, keepdims=True)
    return jnp.where(overflow, 0, x), overflow


def _contain_overflow(factors: Factors) -> Factors:
    """`factors` without numbers that are not finite, where documents share the chunk."""
    shared = factors.shared
    if shared is None:
        return factors
    scores, misread = _zero_overflow(factors.scores)
    values, overflow = _zero_overflow(factors.values)
    overflow, erase_keys = shared.overflow | overflow, factors.erase_keys
    if erase_keys is not None:
        erase_keys, rows = _zero_overflow(erase_keys)
        overflow = overflow | rows
    shared = dataclasses.replace(shared, overflow=overflow, misread=misread)
    return dataclasses.replace(factors, scores=scores, erase_keys=erase_keys, values=values, shared=shared)


def chunk_advance(
    state: Float[Array, "*owners key_dim width"], factors: Factors, arithmetic: Arithmetic
) -> tuple[Float[Array, "*owners key_dim width"], Float[Array, "*owners chunk width"]]:
    """The chain from chunk to chunk: the state after it, and its outputs."""
    shared, overflow, lost = factors.shared, None, None
    if shared is not None:
        state, lost = _zero_overflow(state, (-2, -1))
    written = factors.values
    if factors.erase_keys is not None:
        written = written - matmul(factors.erase_keys, state, arithmetic)
    if shared is not None:
        written, overflow = _zero_overflow(written)
    out = matmul(factors.queries, state, arithmetic) + matmul(factors.scores, written, arithmetic)
    kept = state if factors.decay is None else factors.decay * state
    state = kept + matmul_tn(factors.keys, written, arithmetic)
    if shared is None:
        return state, out
    spoiled, leaves = _spread_overflow(shared, overflow | shared.overflow, lost)
    return jnp.where(leaves, jnp.nan, state), jnp.where(spoiled | shared.misread, jnp.nan, out)


def _spread_overflow(shared: Shared, overflow, lost):
    """The rows whose outputs are lost, and whether the leaving state is: by `overflow`, or a `lost` entering state."""
    rows, columns = _rows_and_columns(overflow.shape[-2], overflow.ndim)
    before = shared.same & (rows >= columns) & jnp.swapaxes(overflow, -1, -2)
    spoiled = jnp.any(before, axis=-1, keepdims=True) | (shared.enters & lost)
    return spoiled, jnp.any(shared.stays & overflow, axis=-2, keepdims=True) | (shared.carries & lost)


def chunk_step(state, tile: Tile, arithmetic: Arithmetic):
    """`chunk_factors` and `chunk_advance`."""
    return chunk_advance(state, chunk_factors(tile, arithmetic), arithmetic)
