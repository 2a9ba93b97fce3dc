"""Packed documents: segment ids and offsets, checked and brought into the one form that backends use."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from ._types import a_type, is_concrete


class Packing(eqx.Module):
    """Which document each token belongs to, in the form that backends use.

    **Attributes:**

    - `start`: true on the first token of every document that does not begin with the entry state of its row.
    - `slot`: index of the token's document among the states of its row; padding counts to the document before it, and
        to no slot (an index equal to `Problem.slots`) where there is none. `None`: a row has one state, which its first
        document begins with and its last document leaves.
    """

    start: Bool[Array, "batch time"]
    slot: Int[Array, "batch time"] | None

    @property
    def document(self) -> Int[Array, "batch time"]:
        """Rank of each token's document within its row, rising; padding counts to the document before it."""
        return jnp.cumsum(self.start.astype(jnp.int32), axis=1)

    @property
    def first_token(self) -> Int[Array, "batch time"]:
        """Index of the first token of each token's document."""
        time = jnp.arange(self.start.shape[1], dtype=jnp.int32)
        return lax.cummax(jnp.where(self.start, time, 0), axis=1)


def check_packing(
    segment_ids, cu_seqlens, num_segments, batch: int, time: int, checked: bool
) -> tuple[Packing | None, Bool[Array, "rows time"] | None, tuple[int, ...]]:
    """The packing, which tokens are real (`None`: all), and the leading axes of the states.

    **Raises:** `TypeError` or `ValueError` for what `gated_delta` documents of its arguments of the same names.
    """
    if segment_ids is not None and cu_seqlens is not None:
        raise ValueError("Give `segment_ids` or `cu_seqlens`, not both: they say the same thing in two ways.")
    if num_segments is not None and segment_ids is None:
        raise ValueError(
            "`num_segments` goes with `segment_ids`; with `cu_seqlens` its length says how many documents."
        )
    if cu_seqlens is not None:
        return _packing_from_offsets(as_int_array("cu_seqlens", cu_seqlens), batch, time, checked)
    if segment_ids is None:
        return None, None, (batch,)
    segment_ids = as_int_array("segment_ids", segment_ids)
    if segment_ids.shape != (batch, time):
        raise ValueError(
            f"`segment_ids` must be [batch, time] = {(batch, time)}, but its shape is {segment_ids.shape}."
        )
    if num_segments is not None and (isinstance(num_segments, bool) or not isinstance(num_segments, int)):
        raise TypeError(f"`num_segments` must be a Python int, since it is a shape, but {a_type(num_segments)} came.")
    if num_segments is not None and num_segments < 1:
        raise ValueError(f"`num_segments` must be at least 1, but it is {num_segments}.")
    segment_ids = check_ids(segment_ids, num_segments, checked)
    return _packing_from_ids(segment_ids, num_segments)


def as_int_array(name, value):
    """`value`, which must be an integer array.

    **Raises:** `TypeError` that says `name` and what came.
    """
    if not isinstance(value, (jax.Array, np.ndarray)):
        raise TypeError(f"`{name}` must be a JAX or NumPy array of integers, but {a_type(value)} came.")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`{name}` must hold integers, but its dtype is {value.dtype}.")
    return value


def check_ids(ids, num_segments, checked, name: str = "segment_ids"):
    """Ids that rise along time and stay below `num_segments`; negative ones may stand anywhere."""
    if ids.size == 0:
        return ids
    rises = f"`{name}` must rise along time (negative ids are padding and may stand anywhere)"
    below = f"`segment_ids` must be below `num_segments={num_segments}`"
    if is_concrete(ids):
        values = np.asarray(ids)
        if num_segments is not None and values.max() >= num_segments:
            raise ValueError(f"{below}, but the largest is {values.max()}.")
        falls = (values < np.maximum.accumulate(values, axis=1)) & (values >= 0)
        if falls.any():
            row, position = (int(i) for i in np.argwhere(falls)[0])
            to_do = "" if values[row, position] else f" Where 0 is padding, pass `jnp.where({name} == 0, -1, {name})`."
            raise ValueError(f"{rises}, but row {row} falls to {values[row, position]} at token {position}.{to_do}")
    elif checked:
        ids = eqx.error_if(ids, (ids < lax.cummax(ids, axis=1)) & (ids >= 0), f"{rises}, but those of this call fall.")
        if num_segments is not None and num_segments <= jnp.iinfo(ids.dtype).max:
            ids = eqx.error_if(ids, ids >= num_segments, f"{below}, but those of this call are not.")
    return ids


def _packing_from_ids(ids, num_segments):
    # Traced ids that fall are padding, and so are ids past `num_segments`. They are compared in the dtype they came in,
    # so that neither an id beyond int32 nor a `num_segments` beyond int8 wraps around.
    if isinstance(ids, np.ndarray) and ids.dtype.itemsize > 4:
        # JAX would cut these to 32 bits. Only their order counts.
        ranks = ids if num_segments is not None else np.unique(ids, return_inverse=True)[1].reshape(ids.shape)
        ids = np.where(ids < 0, -1, ranks.astype(np.int64)).astype(np.int32)
    ids = jnp.asarray(ids)
    real = ids >= 0
    if num_segments is not None and num_segments <= jnp.iinfo(ids.dtype).max:
        real = real & (ids < num_segments)
    top = lax.cummax(jnp.where(real, ids, jnp.zeros_like(ids)), axis=1)
    real = real & (ids == top)
    seen = lax.cummax(real.astype(jnp.int32), axis=1) > 0
    seen_before = jnp.concatenate([jnp.zeros_like(seen[:, :1]), seen[:, :-1]], axis=1)
    changes = top != jnp.concatenate([top[:, :1], top[:, :-1]], axis=1)
    if num_segments is None:
        return Packing(changes & seen_before, None), real, (ids.shape[0],)
    start = seen & (changes | ~seen_before)
    slot = jnp.where(seen, top.astype(jnp.int32), num_segments)
    return Packing(start, slot), real, (ids.shape[0], num_segments)


def _packing_from_offsets(offsets, batch, time, checked):
    if batch != 1:
        raise ValueError(
            f"`cu_seqlens` packs documents along time and needs batch 1, but batch is {batch}. Reshape to one row, or "
            "use `segment_ids`."
        )
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ValueError(f"`cu_seqlens` must be [documents + 1], but its shape is {offsets.shape}.")
    documents = offsets.shape[0] - 1
    limit = min(time, jnp.iinfo(offsets.dtype).max)
    rule = f"`cu_seqlens` must begin with 0, never fall, and end at most at time = {time}"
    if is_concrete(offsets):
        values = np.asarray(offsets).astype(np.int64)  # the difference of two unsigned numbers cannot be negative
        if values[0] != 0 or (np.diff(values) < 0).any() or values[-1] > time:
            raise ValueError(f"{rule}, but it is {np.array2string(values, threshold=12)}.")
    elif checked:
        bad = (offsets[0] != 0) | jnp.any(offsets[1:] < offsets[:-1]) | (offsets[-1] > limit)
        offsets = eqx.error_if(offsets, bad, f"{rule}, but that of this call does not.")
    offsets = lax.cummax(jnp.clip(jnp.asarray(offsets), 0, limit).astype(jnp.int32))
    if documents == 0 or time == 0:
        return None, None, (documents,)
    position = jnp.arange(time, dtype=jnp.int32)
    document = jnp.searchsorted(offsets, position, side="right").astype(jnp.int32) - 1
    real = (document >= 0) & (document < documents)
    packing, _, _ = _packing_from_ids(jnp.where(real, document, -1)[None], documents)
    return packing, real[None], (documents,)
