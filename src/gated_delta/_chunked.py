"""The XLA backend: cut every row into chunks, factor all of them, carry the state from chunk to chunk."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ._backend import AbstractBackend, Problem, Result, entry_state
from ._tile import Arithmetic, Tile, chunk_step
from ._types import CHUNK_SIZES


class Chunked(AbstractBackend):
    """Runs chunks of tokens as matrix products, on any platform XLA compiles for.

    - `chunk_size`: tokens solved together: 16, 32, 64 or 128.
    - `residuals`: what is kept for the backward pass beside the inputs. `"states"`: the state that enters each chunk,
        the rest is recomputed. `"all"`: whatever the backward pass reads. `"none"`: the states of one chunk in eight;
        the states between them are recomputed too.
    """

    chunk_size: int = eqx.field(static=True, default=64)
    residuals: Literal["states", "all", "none"] = eqx.field(static=True, default="states")

    def __check_init__(self):
        if self.chunk_size not in CHUNK_SIZES:
            raise ValueError(f"`Chunked(chunk_size={self.chunk_size})` must be one of {CHUNK_SIZES}.")
        if self.residuals not in ("states", "all", "none"):
            raise ValueError(f"`Chunked(residuals={self.residuals!r})` must be 'states', 'all' or 'none'.")

    def why_not(self, problem: Problem) -> str | None:
        return None

    def __call__(self, problem: Problem) -> Result:
        arithmetic = Arithmetic(problem.operand.name, problem.precision, problem.inverse, problem.erase_max)
        time = problem.k.shape[1]
        size = min(self.chunk_size, max(1 << (time - 1).bit_length(), CHUNK_SIZES[0]))
        packing = problem.packing
        if packing is not None and packing.slot is not None:
            layout = _layout_documents(problem, packing.start, packing.slot, packing.document, size)
        else:
            layout = _layout_rows(problem, size)
        tiles = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), layout.tiles)
        bank = problem.initial_state
        rows = jnp.arange(problem.k.shape[0])

        def one_chunk(carry, xs):
            state, entry, final = carry
            tile, begin, slot = xs
            if begin is not None:
                own = jnp.zeros_like(state) if bank is None else bank.at[rows, slot].get(mode="fill", fill_value=0)
                state = jnp.where(begin[:, None, None, None], own, state)
            elif entry is not None:
                tile = dataclasses.replace(tile, entry=entry)
                entry = tile.document[..., -1]
            state, out = chunk_step(state, tile, arithmetic)
            if slot is not None:
                final = final.at[rows, slot].set(state, mode="drop")
            return (state, entry, final), out

        state = entry_state(problem)
        entry = None if tiles.document is None else tiles.document[0, :, :, 0] * 0
        final = None
        if layout.slot is not None:
            final = jnp.broadcast_to(state[:, None], problem.state_shape) if bank is None else bank
        xs = (tiles, *jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (layout.begin, layout.slot)))
        (state, _, final), out = self._scan(one_chunk, (state, entry, final), xs)
        out = layout.gather(jnp.moveaxis(out, 0, 1)) * jnp.asarray(problem.scale, problem.accumulation)
        return out, state[:, None] if final is None else final

    def _scan(self, body, carry, xs):
        length = jax.tree.leaves(xs)[0].shape[0]
        if self.residuals == "all":
            return jax.lax.scan(body, carry, xs)
        body = jax.checkpoint(body, prevent_cse=False)
        if self.residuals == "states" or length <= _GROUP:
            return jax.lax.scan(body, carry, xs)
        return _scan_in_groups(body, carry, xs, length)


_GROUP = 8  # chunks between kept states under residuals="none"


def _scan_in_groups(body, carry, xs, length):
    whole = length - length % _GROUP
    group = jax.checkpoint(lambda carry, xs: jax.lax.scan(body, carry, xs), prevent_cse=False)
    carry, out = jax.lax.scan(group, carry, jax.tree.map(lambda x: x[:whole].reshape(-1, _GROUP, *x.shape[1:]), xs))
    out = out.reshape(whole, *out.shape[2:])
    if whole == length:
        return carry, out
    carry, rest = group(carry, jax.tree.map(lambda x: x[whole:], xs))
    return carry, jnp.concatenate([out, rest])


class _Layout(NamedTuple):
    """Chunks of every row, `[batch, chunks, heads, size, dim]`, and the way back.

    `begin` and `slot` are per chunk, where every document has states of its own: whether the chunk is its document's
    first, and which slot the document has (out of range for a chunk without one).
    """

    tiles: Tile
    begin: Bool[Array, "batch chunks"] | None
    slot: Int[Array, "batch chunks"] | None
    gather: Callable


def _layout_rows(problem: Problem, size: int) -> _Layout:
    """Cut each row every `size` tokens; documents may begin anywhere in a chunk."""
    batch, time = problem.k.shape[:2]
    chunks = -(-time // size)

    def cut(x):
        x = jnp.pad(x, ((0, 0), (0, chunks * size - time), *((0, 0),) * (x.ndim - 2)))
        return jnp.swapaxes(x.reshape(batch, chunks, size, *x.shape[2:]), 2, 3)

    document = None
    if problem.packing is not None:
        document = jnp.pad(problem.packing.document, ((0, 0), (0, chunks * size - time)), mode="edge")
        document = document.reshape(batch, chunks, 1, size)

    def gather(out):
        return jnp.swapaxes(out, 2, 3).reshape(batch, chunks * size, *out.shape[2:3], out.shape[4])[:, :time]

    return _Layout(_tiles(problem, cut, document), None, None, gather)


def _layout_documents(problem: Problem, start, slot, document, size: int) -> _Layout:
    """Begin every document at a new chunk, so that a chunk never holds two: at most one more chunk per document."""
    batch, time = problem.k.shape[:2]
    chunks = time // size + problem.slots + 1  # the one more: padding before the first document
    target = jax.vmap(lambda document: _aligned_positions(document, size, problem.slots + 1))(document)
    source = jnp.full((batch, chunks * size), time, target.dtype)
    source = jax.vmap(lambda s, t: s.at[t].set(jnp.arange(time, dtype=t.dtype)))(source, target)

    def cut(x):
        x = jax.vmap(lambda x, s: x.at[s].get(mode="fill", fill_value=0))(x, source)
        return jnp.swapaxes(x.reshape(batch, chunks, size, *x.shape[2:]), 2, 3)

    def gather(out):
        out = jnp.swapaxes(out, 2, 3).reshape(batch, chunks * size, out.shape[2], out.shape[4])
        return jax.vmap(lambda x, t: x[t])(out, target)

    first = source[:, ::size]
    begin = jax.vmap(lambda x, s: x.at[s].get(mode="fill", fill_value=False))(start, first)
    slot = jax.vmap(lambda x, s: x.at[s].get(mode="fill", fill_value=problem.slots))(slot, first)
    return _Layout(_tiles(problem, cut, None), begin, slot, gather)


def _aligned_positions(document: Int[Array, " time"], size: int, documents: int) -> Int[Array, " time"]:
    """Where each token of a row goes when every document begins at a multiple of `size`."""
    lengths = jax.ops.segment_sum(jnp.ones_like(document), document, documents)
    starts = jnp.cumsum(lengths) - lengths
    chunks = -(-lengths // size)
    moved = (jnp.cumsum(chunks) - chunks) * size
    return jnp.arange(document.shape[0], dtype=document.dtype) + (moved - starts)[document]


def _tiles(problem: Problem, cut, document) -> Tile:
    write = problem.erase if problem.tied else problem.write
    optional = (problem.log_decay, problem.erase, write)
    log_decay, erase, write = (None if x is None else cut(x) for x in optional)
    return Tile(cut(problem.q), cut(problem.k), cut(problem.v), log_decay, erase, write, document)
