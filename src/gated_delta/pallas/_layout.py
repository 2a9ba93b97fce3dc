"""The arrays of a kernel call and the blocks that a grid step sees of them.

The grid is (batch, owner block, chunk), the last in order. Vectors, and gates as wide as their vector, are columns:
`[batch, heads, time, dim]`. Gates of a few numbers per token are rows, `[batch, owners, groups, time]`: their tokens
lie along the lanes, since a last axis of 1 or 4 would fill one lane in a hundred.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from gated_delta._tile import Arithmetic, Tile

from ._config import Sizes

VMEM_LIMIT_BYTES = 60 * 2**20  # of the 64 MiB of TPU v5p and 7x; v5e and v6e have 128


class Operands(NamedTuple):
    """Differentiable inputs, padded to whole chunks, or something for each: its block, its reference, a flag.

    `None` for a gate that is not there. `Plan.rows` says which gates are rows.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    erase: Any
    write: Any


class Chunks(NamedTuple):
    """Integers in scalar memory, `[batch * chunks]` each.

    - `slot`: which state of its row a chunk belongs to.
    - `begin`, `end`: 1 where the chunk is its document's first, last. A chunk that begins loads the state of its slot.
    - `entry`: number of the document that the entering state belongs to, where documents share chunks.
    """

    slot: Any
    begin: Any
    end: Any
    entry: Any


class Plan(NamedTuple):
    """Everything static about a call."""

    sizes: Sizes
    arithmetic: Arithmetic
    rows: Operands  # of bool
    tied: bool
    scale: float
    has_bank: bool  # initial states are given
    has_slots: bool  # every document has states of its own
    start_dtype: str  # of the states kept for the backward pass
    interpret: bool


def used(plan: Plan) -> tuple[bool, ...]:
    """Which of the operands there are."""
    return tuple(x is not None for x in plan.rows)


def compiler_params():
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
    )


class Blocks:
    """Block specs of one call; `chunk_of` maps the last grid index to a chunk (the backward pass runs them in
    reverse)."""

    def __init__(self, plan: Plan, chunks: int, chunk_of):
        self.plan, self.chunks, self.chunk_of = plan, chunks, chunk_of

    def operands(self, operands: Operands) -> Operands:
        sizes = self.plan.sizes
        heads = Operands(sizes.key_heads, sizes.key_heads, *(sizes.owners,) * 4)
        return Operands(*(self._operand(*x) for x in zip(operands, heads, self.plan.rows, strict=True)))

    def _operand(self, array, heads, is_row):
        if array is None:
            return None
        chunk, chunk_of = self.plan.sizes.chunk, self.chunk_of
        if is_row:
            return pl.BlockSpec((1, heads, array.shape[2], chunk), lambda b, h, c, *_: (b, h, 0, chunk_of(c)))
        return pl.BlockSpec((1, heads, chunk, array.shape[3]), lambda b, h, c, *_: (b, h, chunk_of(c), 0))

    def column(self, dim: int):
        """`[batch, owners, time, dim]`."""
        sizes, chunk_of = self.plan.sizes, self.chunk_of
        return pl.BlockSpec((1, sizes.owners, sizes.chunk, dim), lambda b, h, c, *_: (b, h, chunk_of(c), 0))

    def document(self):
        """`[batch, 1, time]`."""
        chunk_of = self.chunk_of
        return pl.BlockSpec((1, 1, self.plan.sizes.chunk), lambda b, h, c, *_: (b, 0, chunk_of(c)))

    def start(self, key_dim: int, width: int):
        """`[batch, owners, chunks, key_dim, width]`."""
        chunk_of = self.chunk_of
        shape = (1, self.plan.sizes.owners, 1, key_dim, width)
        return pl.BlockSpec(shape, lambda b, h, c, *_: (b, h, chunk_of(c), 0, 0))

    def slot(self, key_dim: int, width: int):
        """`[batch, slots, owners, key_dim, width]`: the block of the slot that the chunk belongs to."""
        chunk_of, chunks = self.chunk_of, self.chunks
        shape = (1, 1, self.plan.sizes.owners, key_dim, width)
        return pl.BlockSpec(shape, lambda b, h, c, slot, *_: (b, slot[b * chunks + chunk_of(c)], h, 0, 0))


def load_tile(plan: Plan, refs: Operands, document_ref, entry) -> Tile:
    """The chunk's inputs as `_tile` takes them."""
    values = Operands(*(None if ref is None else ref[0] for ref in refs))
    log_decay, erase, write = (
        jnp.swapaxes(x, -1, -2) if is_row else x for x, is_row in zip(values[3:], plan.rows[3:], strict=True)
    )
    document = None if document_ref is None else document_ref[...]
    entry = None if document_ref is None else jnp.full((1, 1, 1), entry, jnp.int32)
    return Tile(values.q, values.k, values.v, log_decay, erase, erase if plan.tied else write, document, entry)


def store_cotangents(plan: Plan, refs: Operands, tile: Operands):
    for ref, value, is_row in zip(refs, tile, plan.rows, strict=True):
        if ref is not None:
            ref[0] = (jnp.swapaxes(value, -1, -2) if is_row else value).astype(ref.dtype)


def like(shape, dtype, *arrays) -> jax.ShapeDtypeStruct:
    """An output's shape, varying over the manual mesh axes that any of `arrays` varies over."""
    axes = frozenset().union(*(getattr(jax.typeof(x), "vma", frozenset()) for x in arrays if x is not None))
    manual: dict[str, Any] = {"vma": axes} if axes else {}
    return jax.ShapeDtypeStruct(shape, dtype, **manual)
