"""Where the real tokens of every row are: padding moves to the end of its row first of all, and back afterwards."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ._packing import check_packing
from ._types import a_type, is_concrete


class Documents(eqx.Module):
    """Which document each token belongs to, in rows whose padding is at the end.

    **Attributes:**

    - `position`: of a token in its document, from 0.
    - `is_first`: whether the token's document is the first of its row.
    - `count`: real tokens per row.
    - `segment_ids`: for the operator, -1 at padding; `None` with `offsets`.
    - `offsets`: where documents begin, if each has states of its own and the batch is one row; else `None`.
    """

    position: Int[Array, "batch time"]
    is_first: Bool[Array, "batch time"]
    count: Int[Array, " batch"]
    segment_ids: Int[Array, "batch time"] | None
    offsets: Int[Array, " documents_and_1"] | None


class Rows(eqx.Module):
    """The way to rows whose padding is at the end, and back.

    What is between `gather` and `scatter` sees the real tokens in their order, then padding: so a padded sequence is
    cut into the same chunks as the sequence alone, and only one place knows that padding can be anywhere.

    **Attributes:**

    - `place`: where each token goes; `None`: all padding is at the end already.
    - `real`: which tokens are real, in the order that came.
    - `documents`: in the new order.
    """

    place: Int[Array, "batch time"] | None
    real: Bool[Array, "batch time"]
    documents: Documents

    def gather(self, x: Float[Array, "batch time channels"]) -> Float[Array, "batch time channels"]:
        """Real tokens first; padding is zero."""
        x = jnp.where(self.real[..., None], x, jnp.zeros_like(x))
        return x if self.place is None else _take(x, _inverse(self.place))

    def scatter(self, out: Float[Array, "batch time channels"]) -> Float[Array, "batch time channels"]:
        """Every token where it came from; padding is zero."""
        out = out if self.place is None else _take(out, self.place)
        return jnp.where(self.real[..., None], out, jnp.zeros_like(out))


def make_rows(mask: Any, segment_ids: Any, cu_seqlens: Any, batch: int, time: int) -> Rows | None:
    """What `GatedDeltaMixer` was told about padding and documents, checked; `None` if it was told nothing.

    **Raises:** `TypeError` and `ValueError` as `gated_delta` for ids and offsets, for a mask that is no boolean
    `[batch, time]` array, and for a concrete mask that takes a token out of the middle of a document of `cu_seqlens`.
    """
    if cu_seqlens is not None:
        mask = None if mask is None else _check_mask(mask, batch, time)
        return _rows_from_offsets(mask, segment_ids, cu_seqlens, batch, time)
    if segment_ids is None and mask is None:
        return None
    segment_ids = hidden_ids(mask, segment_ids, batch, time)
    _, real, _ = check_packing(segment_ids, None, None, batch, time, False)
    assert real is not None
    place = _place(real)
    ids = lax.cummax(jnp.where(real, segment_ids, -1).astype(jnp.int32), axis=1)
    ids = _take(jnp.where(real, ids, -1), _inverse(place))
    packing, _, _ = check_packing(ids, None, None, batch, time, False)
    return Rows(place, real, _documents(packing, real, ids, None))


def hidden_ids(mask: Any, segment_ids: Any, batch: int, time: int) -> Any:
    """Segment ids with padding where the mask says so; one document if there is only a mask.

    **Raises:** as `make_rows` for the mask. Ids that do not fit are left for their own error.
    """
    if mask is None:
        return segment_ids
    mask = _check_mask(mask, batch, time)
    if segment_ids is None:
        return jnp.where(mask, 0, -1)
    return _hide(segment_ids, mask) if getattr(segment_ids, "shape", None) == mask.shape else segment_ids


def _hide(segment_ids, mask):
    """Ids of masked tokens do not count, so they need not rise. What is no integer array is left for its own error."""
    return jnp.where(mask, segment_ids, -1) if jnp.issubdtype(segment_ids.dtype, jnp.integer) else segment_ids


def _rows_from_offsets(mask, segment_ids, cu_seqlens, batch, time):
    packing, real, _ = check_packing(segment_ids, cu_seqlens, None, batch, time, False)
    offsets = lax.cummax(jnp.clip(jnp.asarray(cu_seqlens), 0, time).astype(jnp.int32))
    if real is None:  # no token or no document
        real = jnp.zeros((batch, time), bool)
    place = None
    if mask is not None:
        if is_concrete(mask) and is_concrete(cu_seqlens):
            _check_agreement(np.asarray(mask)[0], int(np.asarray(cu_seqlens)[-1]))
        real = real & mask
        place = _place(real)
        before = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(real[0].astype(jnp.int32))])
        offsets = before[offsets]
        packing, _, _ = check_packing(None, offsets, None, batch, time, False)
    return Rows(place, real, _documents(packing, real, None, offsets))


def _check_agreement(mask, end):
    """Documents are all that is before `end`, since offsets begin with 0."""
    lost = np.flatnonzero(~mask[:end])
    if lost.size:
        raise ValueError(
            f"`mask` contradicts `cu_seqlens`: token {lost[0]} belongs to a document, but the mask says padding. "
            "Leave the mask out, or give `segment_ids` with -1 at padding instead of offsets."
        )


def _documents(packing, real, segment_ids, offsets):
    first = jnp.zeros(real.shape, jnp.int32) if packing is None else packing.first_token
    position = jnp.arange(real.shape[1], dtype=jnp.int32)[None] - first
    count = jnp.sum(real, axis=1, dtype=jnp.int32)
    return Documents(position, first == 0, count, segment_ids, offsets)


def _check_mask(mask, batch, time):
    if not isinstance(mask, (jax.Array, np.ndarray)) or mask.dtype != bool:
        came = f"dtype {mask.dtype}" if isinstance(mask, (jax.Array, np.ndarray)) else a_type(mask)
        raise TypeError(
            f"`mask` must be a boolean JAX or NumPy array, true at real tokens, but {came} came. For a mask of ones "
            "and zeros use `mask != 0`; for documents use `segment_ids`."
        )
    if mask.shape != (batch, time):
        raise ValueError(f"`mask` must have one entry per token, {(batch, time)}, but its shape is {mask.shape}.")
    return mask


def _place(real):
    """Position of every token when the real ones of its row stand first, both kinds in their order."""
    real_before = jnp.cumsum(real.astype(jnp.int32), axis=1)
    others_before = jnp.cumsum((~real).astype(jnp.int32), axis=1)
    return jnp.where(real, real_before - 1, jnp.sum(real, axis=1, keepdims=True, dtype=jnp.int32) + others_before - 1)


def _inverse(place):
    time = jnp.arange(place.shape[1], dtype=jnp.int32)
    return jax.vmap(lambda row: jnp.zeros_like(row).at[row].set(time, unique_indices=True))(place)


def _take(x, index):
    return jax.vmap(lambda row, index: row.at[index].get(mode="promise_in_bounds", unique_indices=True))(x, index)
