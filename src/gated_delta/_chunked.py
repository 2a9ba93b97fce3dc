"""The XLA backend: cut every row into chunks, factor all of them, carry the state from chunk to chunk."""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ._backend import AbstractBackend, Problem, Result, entry_state
from ._chunk_layout import ChunkLayout, lay_out
from ._heads import Columns
from ._tile import Arithmetic, Tile, chunk_step
from ._types import CHUNK_SIZES, no_type_check


@no_type_check
class Chunked(AbstractBackend):
    """Runs chunks of tokens as matrix products, on any platform XLA compiles for.

    - `chunk_size`: tokens solved together: 16, 32, 64 or 128. `None` leaves it to the backend: on a CPU 32, but 64 for
        states of 2^17 numbers and more, and 16 for decays per key channel without `branch`; elsewhere 64.
    - `residuals`: what is kept for the backward pass beside the inputs. `"solves"`: the state that enters each chunk,
        its products with the chunk's keys and queries, and the inverses of the chunk's solve; the rest is recomputed.
        `"states"`: only the states. `"none"`: the states of one chunk in eight; the states between them are recomputed
        too. `"all"`: whatever the backward pass reads.
    - `branch`: whether each chunk looks at its decays per channel and takes a shorter way where they are slow; both are
        right for any decay. Where heads or rows are sharded that look costs a collective, and on a GPU a wait.
        `None`: on a CPU with a single device.
    """

    chunk_size: int | None = eqx.field(static=True, default=None)
    residuals: Literal["solves", "states", "none", "all"] = eqx.field(static=True, default="solves")
    branch: bool | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.chunk_size is not None and self.chunk_size not in CHUNK_SIZES:
            raise ValueError(f"`Chunked(chunk_size={self.chunk_size})` must be one of {CHUNK_SIZES}, or None.")
        if self.residuals not in ("solves", "states", "none", "all"):
            raise ValueError(f"`Chunked(residuals={self.residuals!r})` must be 'solves', 'states', 'none' or 'all'.")

    def why_not(self, problem: Problem) -> str | None:
        return None

    def __call__(self, problem: Problem) -> Result:
        near = "mended" if self.branches else "safe"
        arithmetic = Arithmetic(problem.operand.name, problem.precision, problem.inverse, problem.erase_max, near)
        time = problem.k.shape[1]
        size = min(
            self.chunk_size or _chunk_size(problem, self.branches), max(1 << (time - 1).bit_length(), CHUNK_SIZES[0])
        )
        layout = lay_out(problem, size)
        tiles = _tiles(problem, layout, size)
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
                entry = tile.document[..., -1:]
            state, out = chunk_step(state, tile, arithmetic, _keep)
            if slot is not None:
                final = final.at[rows, slot].set(state, mode="drop", unique_indices=True)
            return (state, entry, final), out

        state = entry_state(problem)
        entry = None if tiles.document is None else tiles.document[0, ..., :1] * 0
        final = None
        if layout.slot is not None:
            final = jnp.broadcast_to(state[:, None], problem.state_shape) if bank is None else bank
        xs = (tiles, *jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (layout.begin, layout.slot)))
        (state, _, final), out = self._scan(one_chunk, (state, entry, final), xs)
        out = jnp.transpose(out, (1, 0, 3, 2, 4))
        out = layout.gather(out.reshape(out.shape[0], -1, *out.shape[3:]))
        out = out * jnp.asarray(problem.scale, problem.accumulation)
        return out, state[:, None] if final is None else final

    @property
    def branches(self) -> bool:
        """`branch`, or what `None` stands for here."""
        if self.branch is not None:
            return self.branch
        return jax.default_backend() == "cpu" and jax.device_count() == 1

    def _scan(self, body, carry, xs):
        length = jax.tree.leaves(xs)[0].shape[0]
        if self.residuals == "all":
            return jax.lax.scan(body, carry, xs)
        policy = jax.checkpoint_policies.save_only_these_names(_KEPT) if self.residuals == "solves" else None
        body = jax.checkpoint(body, prevent_cse=False, policy=policy)
        if self.residuals != "none" or length <= _GROUP:
            return jax.lax.scan(body, carry, xs)
        return _scan_in_groups(body, carry, xs, length)


def _chunk_size(problem: Problem, branch: bool) -> int:
    """The fastest on the machines we tried (docs: Benchmarks)."""
    if jax.default_backend() != "cpu":
        return 64
    key_dim, width = problem.state_shape[3:]
    if not branch and problem.log_decay is not None and problem.log_decay.shape[3] == key_dim > 1:
        return 16
    return 64 if key_dim * width >= 2**17 else 32


_KEPT = "gated_delta_solves"


def _keep(x):
    return checkpoint_name(x, _KEPT)


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


def _tiles(problem: Problem, layout: ChunkLayout, size: int) -> Tile:
    """The inputs of every chunk, `[chunks, batch, heads, size, dim]`."""

    def cut(x):
        x = layout.lay(x).reshape(x.shape[0], layout.chunks, size, *x.shape[2:])
        return jnp.transpose(x, (1, 0, 3, 2, 4))

    def gate(x, dim):
        if x is None:
            return None
        if x.shape[3] == dim > 1:
            return cut(x)
        columns = layout.lay(x).reshape(x.shape[0], layout.chunks, size, -1)
        return Columns(jnp.swapaxes(columns, 0, 1), x.shape[3])

    key_dim, width = problem.k.shape[3], problem.v.shape[3]
    log_decay, erase = gate(problem.log_decay, key_dim), gate(problem.erase, key_dim)
    write = gate(problem.erase if problem.tied else problem.write, width)
    document = layout.document
    if document is not None:
        document = jnp.swapaxes(document.reshape(-1, layout.chunks, 1, 1, size), 0, 1)
    return Tile(cut(problem.q), cut(problem.k), cut(problem.v), log_decay, erase, write, document)
