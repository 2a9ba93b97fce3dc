"""How the tokens of every row are laid out in chunks, for every backend that works on chunks."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._backend import Problem


class ChunkLayout(NamedTuple):
    """Whole chunks of tokens, and the way back.

    - `chunks`: how many per row.
    - `lay`: an array `[batch, time, ...]` to `[batch, chunks * size, ...]`, zeros where no token is, or what is given
        after the array. Zeros do nothing.
    - `gather`: the way back.
    - `document`: number of each laid token's document where documents share chunks, else `None`.
    - `begin`, `slot`: per chunk, where every document has states of its own, else `None`: whether the chunk is its
        document's first, and which slot the document has (`Problem.slots` for a chunk without one).
    """

    chunks: int
    lay: Callable
    gather: Callable
    document: Int[Array, "batch laid_time"] | None
    begin: Bool[Array, "batch chunks"] | None
    slot: Int[Array, "batch chunks"] | None


def lay_out(problem: Problem, size: int) -> ChunkLayout:
    """Chunks of `size` tokens.

    Where every document has states of its own, each begins a new chunk, so that a chunk never holds two: at most one
    more chunk per document. Otherwise rows are cut every `size` tokens.
    """
    packing = problem.packing
    if packing is None or packing.slot is None:
        return _cut_rows(problem, size)
    batch, time = problem.k.shape[:2]
    documents = min(problem.slots, time)  # that have tokens, whatever the number of states
    count = time // size + documents + 1  # the one more: padding before the first document
    target = jax.vmap(lambda document: _aligned_positions(document, size, documents + 1))(packing.document)
    source = jnp.full((batch, count * size), time, target.dtype)
    source = jax.vmap(lambda s, t: s.at[t].set(jnp.arange(time, dtype=t.dtype)))(source, target)
    first = source[:, ::size]

    def take(x, source, fill):
        return jax.vmap(lambda x, s: x.at[s].get(mode="fill", fill_value=fill))(x, source)

    return ChunkLayout(
        count,
        lay=lambda x, fill=0: take(x, source, fill),
        gather=lambda x: jax.vmap(lambda x, t: x[t])(x, target),
        document=None,
        begin=take(packing.start, first, False),
        slot=take(packing.slot, first, problem.slots),
    )


def _cut_rows(problem: Problem, size: int) -> ChunkLayout:
    time = problem.k.shape[1]
    count = -(-time // size)

    def pad(x, mode, **options):
        return jnp.pad(x, ((0, 0), (0, count * size - time), *((0, 0),) * (x.ndim - 2)), mode, **options)

    def lay(x, fill=0):
        return pad(x, "constant", constant_values=fill)

    document = None if problem.packing is None else pad(problem.packing.document, "edge")
    return ChunkLayout(count, lay, lambda x: x[:, :time], document, None, None)


def _aligned_positions(document: Int[Array, " time"], size: int, documents: int) -> Int[Array, " time"]:
    """Where each token of a row goes when every document begins at a multiple of `size`."""
    lengths = jax.ops.segment_sum(jnp.ones_like(document), document, documents)
    starts = jnp.cumsum(lengths) - lengths
    chunks = -(-lengths // size)
    moved = (jnp.cumsum(chunks) - chunks) * size
    return jnp.arange(document.shape[0], dtype=document.dtype) + (moved - starts)[document]
