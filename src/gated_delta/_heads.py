"""One stage of a computation for all heads: over arrays with a heads axis, or over lists with one matrix per head.

A matrix unit is filled by independent products that stand side by side in the program. In a kernel every head is a
matrix of its own, and `each` writes a stage for all of them before the next stage begins; elsewhere the heads are the
third axis from the end, and one operation does them all.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

LANES = 128
"""Of a TPU's registers."""

Heads = Any
"""`[*rows, heads, chunk, dim]`, or a list of `[chunk, dim]`. Functions of one head index from the end."""


def each(stage: Callable, *heads: Heads) -> Heads:
    """`stage` of every head. What is no list is given to all of them; a tuple of results becomes a tuple of heads."""
    lists = [x for x in heads if isinstance(x, list)]
    if not lists:
        return stage(*heads)
    out = [stage(*(x[i] if isinstance(x, list) else x for x in heads)) for i in range(len(lists[0]))]
    return tuple(map(list, zip(*out, strict=True))) if isinstance(out[0], tuple) else out


def count(heads: Heads) -> int:
    return len(heads) if isinstance(heads, list) else heads.shape[-3]


def first(heads: Heads) -> Array:
    """An array with the last two axes, the dtype and the rank of every head."""
    return heads[0] if isinstance(heads, list) else heads


def spread(heads: Heads, owners: int) -> Heads:
    """Give each owner its key head."""
    group = owners // count(heads)
    if group == 1:
        return heads
    if isinstance(heads, list):
        return [x for x in heads for _ in range(group)]
    lead, tail = heads.shape[:-2], heads.shape[-2:]
    wide = jnp.broadcast_to(heads[..., None, :, :], (*lead, group, *tail))
    return wide.reshape(*lead[:-1], owners, *tail)


def side_by_side(matrices: Callable, heads: Heads) -> Heads:
    """`matrices` of all heads' rows as one matrix: a function that works row by row."""
    if not isinstance(heads, list):
        return matrices(heads)
    rows = heads[0].shape[0]
    out = matrices(jnp.concatenate(heads, axis=0))
    return [out[i * rows : (i + 1) * rows] for i in range(len(heads))]


class Columns(eqx.Module):
    """Gates of a few numbers per token, for all owners together: owner by owner `groups` columns.

    In a kernel `values` is one matrix, and its columns and rows are lists over the owners.
    """

    values: Float[Array, "*rows chunk owners_groups"]
    groups: int = eqx.field(static=True)

    @property
    def owners(self) -> int:
        return self.values.shape[-1] // self.groups

    def column(self, group: int) -> Heads:
        """`[chunk, 1]` for every owner."""
        if self.values.ndim == 2:
            return [self.values[:, i : i + 1] for i in range(group, self.values.shape[1], self.groups)]
        return jnp.swapaxes(self.values[..., group :: self.groups], -1, -2)[..., None]

    def row(self, group: int) -> Heads:
        """`[1, chunk]` for every owner."""
        turned = jnp.swapaxes(self.values, -1, -2)
        if self.values.ndim == 2:
            return [turned[i : i + 1] for i in range(group, turned.shape[0], self.groups)]
        return turned[..., group :: self.groups, :][..., None, :]

    def wide(self, dim: int) -> Heads:
        """Every column over an equal run of `dim` channels, `[chunk, dim]`; one column stays one and broadcasts."""
        if self.groups == 1:
            return self.column(0)
        columns = [self.column(group) for group in range(self.groups)]
        return each(lambda *columns: widen(jnp.concatenate(columns, axis=-1), dim), *columns)

    def map(self, f: Callable) -> "Columns":
        return Columns(f(self.values), self.groups)


def widen(x: Float[Array, "*axes groups"], width: int) -> Float[Array, "*axes width_or_1"]:
    """Repeat each entry of the last axis over an equal run, to `width` entries; one entry stays one and broadcasts."""
    groups = x.shape[-1]
    if groups in (1, width):
        return x
    run = width // groups
    if run < LANES and width % LANES == 0 and LANES % run == 0:  # registers of a TPU, one by one
        per = LANES // run
        parts = [_select_columns(x[..., i : i + per], run, LANES) for i in range(0, groups, per)]
        return jnp.concatenate(parts, axis=-1)
    if run % LANES:
        return _select_columns(x, run, width)
    shape = (*x.shape[:-1], run)
    return jnp.concatenate([jnp.broadcast_to(x[..., i : i + 1], shape) for i in range(groups)], axis=-1)


def _select_columns(x, run: int, width: int):
    lane = lax.broadcasted_iota(jnp.int32, (*(1,) * (x.ndim - 1), width), x.ndim - 1)
    out = jnp.broadcast_to(x[..., :1], (*x.shape[:-1], width))
    for i in range(1, x.shape[-1]):
        out = jnp.where(lane >= i * run, x[..., i : i + 1], out)
    return out
