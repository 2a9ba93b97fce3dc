"""Packed documents that reach over the borders of shards."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from gated_delta._packing import check_packing


def across_shards(
    segment_ids, shape: tuple[int, int], axis_name: str
) -> tuple[Int[Array, "batch time"], Bool[Array, " batch"]]:
    """The ids of a shard as those before it make them, and whether its first document is the one that enters.

    Ids that fall below one before them, on whichever device it is, are padding. The first document of all continues the
    initial state; a row without tokens passes on what enters.

    **Raises:** as `gated_delta` for `segment_ids`.
    """
    check_packing(segment_ids, None, None, *shape, False)
    ids = jnp.asarray(segment_ids)
    ids = ids.astype(jnp.int64 if ids.dtype.itemsize == 8 else jnp.int32)
    real = ids >= 0
    largest = jnp.max(jnp.where(real, ids, -1), axis=1, initial=-1)
    everyones = lax.all_gather(largest, axis_name)  # [devices, batch]
    is_before = jnp.arange(everyones.shape[0]) < lax.axis_index(axis_name)
    before = jnp.max(jnp.where(is_before[:, None], everyones, -1), axis=0)
    ids = jnp.where(ids < before[:, None], -1, ids)
    real = ids >= 0
    if ids.shape[1] == 0:
        return ids, jnp.ones_like(before, dtype=bool)
    first = jnp.take_along_axis(ids, jnp.argmax(real, axis=1)[:, None], axis=1)[:, 0]
    return ids, (before < 0) | (first == before) | ~jnp.any(real, axis=1)
