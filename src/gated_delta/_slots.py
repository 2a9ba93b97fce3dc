"""Slots of a pool: which state belongs to which row of a call, checked; states read and written by slot.

A slot that is none, -1 or anything else out of range, is that of a padding row.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from ._types import a_type, is_concrete


def is_slot(slots: Any, count: int) -> Any:
    return (slots >= 0) & (slots < count)


def check_slots(slots: Any, count: int, rows: int | None = None) -> Any:
    """`slots` as `[rows]` integers that hold every slot below `count`.

    **Raises:** `TypeError` and `ValueError` for anything else, and where there are not `rows` of them.
    """
    if not isinstance(slots, (jax.Array, np.ndarray)) or not jnp.issubdtype(slots.dtype, jnp.integer):
        came = f"dtype {slots.dtype}" if isinstance(slots, (jax.Array, np.ndarray)) else a_type(slots)
        raise TypeError(f"`slots` must be a JAX or NumPy array of integers, one for each row, but {came} came.")
    if slots.ndim != 1:
        raise ValueError(f"`slots` must be [rows], but its shape is {slots.shape}.")
    if rows is not None and slots.shape != (rows,):
        raise ValueError(
            f"`slots` must have one entry for each of the {rows} rows of this call, -1 for padding, but its shape is "
            f"{slots.shape}."
        )
    if isinstance(slots, np.ndarray):  # before JAX cuts 64 bits to 32, which may make a slot of what is none
        slots = slots.astype(np.int64)
        return np.where(is_slot(slots, count), slots, -1).astype(np.int32)
    return slots.astype(jnp.int32) if slots.dtype.itemsize < 4 else slots


def check_fresh(fresh: Any, rows: int) -> Any:
    """`fresh` as `[rows]` booleans, or `None`.

    **Raises:** `ValueError` for anything else.
    """
    if fresh is None:
        return None
    if not isinstance(fresh, (jax.Array, np.ndarray)) or fresh.dtype != bool or fresh.shape != (rows,):
        came = f"{fresh.dtype} {fresh.shape}" if isinstance(fresh, (jax.Array, np.ndarray)) else type(fresh).__name__
        raise ValueError(f"`fresh` must be a boolean array with one entry for each of {rows} slots, but {came} came.")
    return fresh


def check_distinct(who: str, slots: Any, count: int, checked: bool) -> Any:
    """`slots`, which are about to be written: none may come twice.

    **Raises:** `ValueError` that names `who` where they are concrete; where they are traced at run time, if `checked`.
    """
    twice = f"`{who}` needs slots that differ from row to row (-1 for padding), but one comes twice"
    if is_concrete(slots):
        values, counts = np.unique(np.asarray(slots), return_counts=True)
        again = values[(counts > 1) & is_slot(values, count)]
        if again.size:
            raise ValueError(f"{twice}: {again[0]}. Two rows of one request cannot both be what its slot holds.")
    elif checked:
        ordered = jnp.sort(slots)
        same = (ordered[1:] == ordered[:-1]) & is_slot(ordered[1:], count)
        slots = eqx.error_if(slots, same, f"{twice}.")
    return slots


def take(
    stored: Shaped[Array, "slots ..."],
    first: Shaped[Array, "..."],
    slots: Int[Array | np.ndarray, " rows"],
    fresh: Bool[Array | np.ndarray, " rows"] | None,
) -> Shaped[Array, "rows ..."]:
    """What is stored in `slots`, in the dtype of `first`; `first` itself for padding rows and for those `fresh`."""
    real = is_slot(slots, stored.shape[0])
    if fresh is not None:
        real = real & ~fresh
    index = jnp.where(real, slots, 0).astype(jnp.int32)
    rows = stored.at[index].get(mode="promise_in_bounds").astype(first.dtype)
    return jnp.where(real.reshape(-1, *(1,) * first.ndim), rows, first[None])


def put(
    stored: Shaped[Array, "slots ..."], rows: Shaped[Array, "rows ..."], slots: Int[Array | np.ndarray, " rows"]
) -> Shaped[Array, "slots ..."]:
    """`stored` with `rows` in `slots`, in its own dtype."""
    index = target(slots, stored.shape[0])
    return stored.at[index].set(rows.astype(stored.dtype), mode="drop", unique_indices=True)


def target(slots: Int[Array | np.ndarray, " rows"], count: int) -> Int[Array, " rows"]:
    """Where each row is written: padding beyond the end, every row at a place of its own."""
    beyond = count + jnp.arange(slots.shape[0], dtype=jnp.int32)
    return jnp.where(is_slot(slots, count), slots, beyond.astype(slots.dtype)).astype(jnp.int32)
