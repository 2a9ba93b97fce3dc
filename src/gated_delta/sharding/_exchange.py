"""What enters each shard of a sequence: the maps of the shards before it, one after the other, over a mesh axis.

A shard turns what enters it into what leaves it by a map that is known before anything enters. So either the values go
from device to device, or the maps are composed, in as many steps as the number of devices has bits.
"""

import math
from typing import Any, Literal, TypeAlias, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from gated_delta._tile import Arithmetic, matmul

Exchange: TypeAlias = Literal["ring", "steps"]


class StateMap(eqx.Module):
    """What a shard does to states: `x` to `matrix @ x + offset`; to `offset` alone where a row carries none through."""

    matrix: Float[Array, "batch owners key_dim key_dim"]
    offset: Float[Array, "batch owners key_dim width"]
    carries: Bool[Array, "batch 1 1 1"] | None

    def __call__(self, x: Float[Array, "batch owners key_dim width"]) -> Float[Array, "batch owners key_dim width"]:
        carried = matmul(self.matrix, x, Arithmetic(x.dtype.name))
        if self.carries is not None:  # not by a matrix of zeros, which makes NaN of infinity
            carried = jnp.where(self.carries, carried, 0)
        return carried + self.offset

    def after(self, earlier: "StateMap") -> "StateMap":
        matrix = matmul(self.matrix, earlier.matrix, Arithmetic(self.matrix.dtype.name))
        carries = None if self.carries is None or earlier.carries is None else self.carries & earlier.carries
        return StateMap(matrix, self(earlier.offset), carries)


class WindowMap(eqx.Module):
    """The last inputs of a shard behind those that entered it, which move out by `shift` places.

    `shift`: how many inputs the shard has put into the window, all of them if `None`; `tail` is zero elsewhere.
    """

    tail: Float[Array, "*batch taps channels"]
    shift: Int[Array, "*batch"] | None

    def __call__(self, x: Float[Array, "*batch taps channels"]) -> Float[Array, "*batch taps channels"]:
        if self.shift is None:
            return self.tail
        taps = x.shape[-2]
        place = jnp.arange(taps, dtype=jnp.int32) + self.shift[..., None]
        moved = jnp.take_along_axis(x, jnp.minimum(place, taps - 1)[..., None], axis=-2)
        return jnp.where((place < taps)[..., None], moved, 0) + self.tail

    def after(self, earlier: "WindowMap") -> "WindowMap":
        shift = None
        if self.shift is not None and earlier.shift is not None:
            shift = jnp.minimum(self.shift + earlier.shift, self.tail.shape[-2])
        return WindowMap(self(earlier.tail), shift)


ShardMap: TypeAlias = StateMap | WindowMap
"""What a shard does to whatever enters it: `own(x)` leaves. `own.after(earlier)` is the map of two shards, as large as
one of them."""


def prefix(own: ShardMap, first: Any, axis_name: str, exchange: Exchange | None = None, *, backwards: bool = False):
    """What enters this shard: `first` the first of all, and what the shard before it makes of what entered it, any
    other. `backwards`: from the last shard to the first.

    `exchange`: `"ring"` sends a value from each device to the next, one device after the other. `"steps"` composes
    maps: each device sends its own to those 1, 2, 4, ... places on, then a value to the next. `None` takes what moves
    fewer bytes one after the other.
    """
    size, place = lax.axis_size(axis_name), lax.axis_index(axis_name)
    place = size - 1 - place if backwards else place
    exchange = choose_exchange(own, first, size) if exchange is None else exchange

    def send(x, pairs):
        pairs = [(size - 1 - a, size - 1 - b) if backwards else (a, b) for a, b in pairs]
        return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), x)

    if exchange == "ring":
        for step in range(size - 1):
            first = _choose(place == step + 1, send(own(first), [(step, step + 1)]), first)
        return first
    distance = 1
    while distance < size - 1:  # the last shard's map is nobody's concern
        received = send(own, [(i, i + distance) for i in range(size - 1 - distance)])
        own = _choose(place >= distance, own.after(received), own)
        distance *= 2
    left = send(own(first), [(i, i + 1) for i in range(size - 1)])
    return _choose(place > 0, left, first)


def choose_exchange(own: ShardMap, first: Any, size: int) -> Exchange:
    """What moves fewer bytes one after the other: that is what a device waits for."""
    ring, steps = (critical_bytes(own, first, size, exchange) for exchange in get_args(Exchange))
    return "ring" if ring <= steps else "steps"


def critical_bytes(own: ShardMap, first: Any, size: int, exchange: Exchange) -> int:
    """Bytes that the last device has to wait for."""
    if exchange == "ring":
        return (size - 1) * _bytes(first)
    rounds = math.ceil(math.log2(size - 1)) if size > 2 else 0
    return rounds * _bytes(own) + (size > 1) * _bytes(first)


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _choose(condition, yes, no):
    return jax.tree.map(lambda yes, no: jnp.where(condition, yes, no), yes, no)


def broadcast_last(x: Any, axis_name: str):
    """`x` of the last device on all of them."""
    is_last = lax.axis_index(axis_name) == lax.axis_size(axis_name) - 1
    return jax.tree.map(lambda x: lax.psum(jnp.where(is_last, x, 0), axis_name), x)
