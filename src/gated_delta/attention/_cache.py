"""Keys and values of the tokens so far: side by side, or in pages of a table."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gated_delta._slots import check_distinct, check_fresh, check_slots, is_slot, target
from gated_delta._types import check_float_dtype, is_concrete, no_type_check
from gated_delta._variant import check_size


class KVCache(eqx.Module):
    """Keys and values of one document for each row (or slot), side by side: a plain pytree of arrays.

    The token at position `p` of its document lies at entry `p % capacity`: so where attention has a window of at most
    `capacity` the cache is a ring, and a document may have any length. Without a window a token beyond the capacity
    finds no room: it is lost, as one that is not finite is, and outputs from there on are NaN.

    **Attributes:**

    - `keys`, `values`: as they are attended to: normalised, and turned to their positions.
    - `count`: tokens of the document so far.
    - `lost`: the position of the last of them that was not finite or found no room, -1 for none.
    """

    keys: Float[Array, "*rows capacity kv_heads key_dim"]
    values: Float[Array, "*rows capacity kv_heads value_dim"]
    count: Int[Array, "*rows"]
    lost: Int[Array, "*rows kv_heads"]

    @no_type_check
    @classmethod
    def empty(
        cls,
        *rows: int,
        capacity: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        dtype: Any = jnp.float32,
    ) -> "KVCache":
        """Before the first token: `KVCache.empty(slots, capacity=..., ...)`, without `slots` for one sequence."""
        value_dim = key_dim if value_dim is None else value_dim
        _check_sizes(capacity=capacity, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
        check_float_dtype("dtype", jnp.dtype(dtype))
        return cls(
            jnp.zeros((*rows, capacity, kv_heads, key_dim), dtype),
            jnp.zeros((*rows, capacity, kv_heads, value_dim), dtype),
            jnp.zeros(rows, jnp.int32),
            jnp.full((*rows, kv_heads), -1, jnp.int32),
        )

    @property
    def capacity(self) -> int:
        """Entries of each row."""
        return self.keys.shape[-3]


class PagedKVCache(eqx.Module):
    """Keys and values in pages that slots share: a slot takes pages as its document grows, and gives them back.

    A value like any other: methods return a new cache. Under `jit` with the cache donated they write in place. Every
    shape is static, and no new slots, lengths or tables recompile.

    **Attributes:**

    - `keys`, `values`: `[pages, page_size, kv_heads, dim]`.
    - `table`: the pages of each slot, in the order of its tokens; -1 where it has none. Whoever shares pages between
        slots, or takes them in an order of its own, writes this table itself, and leaves `reserve` and `release` alone.
    - `count`, `lost`: as in `KVCache`. A token whose page the table does not have finds no room.
    - `free`: the first `free_count` entries are the pages that no slot has.
    """

    keys: Float[Array, "pages page_size kv_heads key_dim"]
    values: Float[Array, "pages page_size kv_heads value_dim"]
    table: Int[Array, "slots slot_pages"]
    count: Int[Array, " slots"]
    lost: Int[Array, "slots kv_heads"]
    free: Int[Array, " pages"]
    free_count: Int[Array, ""]

    @no_type_check
    @classmethod
    def empty(
        cls,
        slots: int,
        *,
        pages: int,
        page_size: int,
        kv_heads: int,
        key_dim: int,
        value_dim: int | None = None,
        slot_pages: int | None = None,
        dtype: Any = jnp.float32,
    ) -> "PagedKVCache":
        """All pages free. `slot_pages` is how many a slot may have, all of them if `None`."""
        value_dim = key_dim if value_dim is None else value_dim
        slot_pages = pages if slot_pages is None else slot_pages
        _check_sizes(
            slots=slots,
            pages=pages,
            page_size=page_size,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            slot_pages=slot_pages,
        )
        check_float_dtype("dtype", jnp.dtype(dtype))
        return cls(
            jnp.zeros((pages, page_size, kv_heads, key_dim), dtype),
            jnp.zeros((pages, page_size, kv_heads, value_dim), dtype),
            jnp.full((slots, slot_pages), -1, jnp.int32),
            jnp.zeros((slots,), jnp.int32),
            jnp.full((slots, kv_heads), -1, jnp.int32),
            jnp.arange(pages, dtype=jnp.int32)[::-1],
            jnp.array(pages, jnp.int32),
        )

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.keys.shape[1]

    @property
    def capacity(self) -> int:
        """Tokens that a slot with all the pages it may have holds."""
        return self.table.shape[1] * self.page_size

    @no_type_check
    def reserve(
        self,
        slots: Int[Array | np.ndarray, " rows"],
        lengths: Int[Array | np.ndarray, " rows"],
        *,
        fresh: Bool[Array | np.ndarray, " rows"] | None = None,
        checked: bool = False,
    ) -> "PagedKVCache":
        """The cache with pages for `lengths` more tokens in `slots`: call it before they come.

        - `slots`: as for `StatePool.scatter`: -1 for a padding row, and none may come twice.
        - `fresh`: rows whose slot begins a new document. It keeps the pages of the one before.
        - `checked`: raise at run time, under `jit` too, where a slot comes twice.

        Where pages run out, later rows get fewer than they need or none: compare `free_count` before, or see what comes
        of it, outputs that are NaN.

        **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
        """
        slots = check_distinct("reserve", check_slots(slots, self.table.shape[0]), self.table.shape[0], checked)
        lengths = check_lengths(lengths, slots.shape[0], None)
        fresh = check_fresh(fresh, slots.shape[0])
        real, table, count = is_slot(slots, self.table.shape[0]), own(self.table, slots), own(self.count, slots)
        count = count if fresh is None else jnp.where(fresh, 0, count)
        held = jnp.sum(table >= 0, axis=1, dtype=jnp.int32)
        needed = jnp.minimum(-(-(count + lengths) // self.page_size), table.shape[1])
        new = jnp.where(real, jnp.maximum(needed - held, 0), 0)
        before = jnp.cumsum(new) - new
        which = jnp.arange(table.shape[1], dtype=jnp.int32)[None] - held[:, None]  # of a row's new pages
        place = self.free_count - 1 - (before[:, None] + which)
        takes = (which >= 0) & (which < new[:, None]) & (place >= 0)
        pages = self.free.at[jnp.maximum(place, 0)].get(mode="clip")
        return dataclasses.replace(
            self,
            table=put_rows(self.table, jnp.where(takes, pages, table), slots),
            free_count=jnp.maximum(self.free_count - jnp.sum(new, dtype=jnp.int32), 0),
        )

    @no_type_check
    def release(self, slots: Int[Array | np.ndarray, " rows"], *, checked: bool = False) -> "PagedKVCache":
        """The cache with the pages of `slots` free again, and nothing in them. `slots` and `checked` as for `reserve`.

        **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
        """
        slots = check_distinct("release", check_slots(slots, self.table.shape[0]), self.table.shape[0], checked)
        pages = own(self.table, slots)
        pages = jnp.where(is_slot(slots, self.table.shape[0])[:, None], pages, -1).reshape(-1)
        back = pages >= 0
        place = self.free_count + jnp.cumsum(back.astype(jnp.int32)) - 1
        beyond = self.free.shape[0] + jnp.arange(pages.shape[0], dtype=jnp.int32)
        return dataclasses.replace(
            self,
            table=put_rows(self.table, jnp.full((slots.shape[0], self.table.shape[1]), -1, jnp.int32), slots),
            count=put_rows(self.count, jnp.zeros(slots.shape, jnp.int32), slots),
            lost=put_rows(self.lost, jnp.full((slots.shape[0], self.lost.shape[1]), -1, jnp.int32), slots),
            free=self.free.at[jnp.where(back, place, beyond)].set(pages, mode="drop", unique_indices=True),
            free_count=(self.free_count + jnp.sum(back, dtype=jnp.int32)).astype(jnp.int32),
        )


def own(stored, slots):
    """What is stored in `slots`, of slot 0 for padding rows; without slots there is one for each row."""
    if slots is None:
        return stored
    return stored.at[jnp.where(is_slot(slots, stored.shape[0]), slots, 0)].get(mode="promise_in_bounds")


def put_rows(stored, rows, slots):
    """`stored` with `rows` in `slots`; padding rows write nothing."""
    if slots is None:
        return rows.astype(stored.dtype)
    index = target(slots, stored.shape[0])
    return stored.at[index].set(rows.astype(stored.dtype), mode="drop", unique_indices=True)


def check_lengths(lengths: Any, rows: int, time: int | None) -> Int[Array, " rows"]:
    """`[rows]` numbers of tokens in 0 to `time`, which all have for `None`.

    **Raises:** `TypeError` and `ValueError` for anything else.
    """
    if lengths is None and time is not None:
        return jnp.full((rows,), time, jnp.int32)
    if not isinstance(lengths, (jax.Array, np.ndarray)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        came = getattr(lengths, "dtype", type(lengths).__name__)
        raise TypeError(f"`lengths` must be a JAX or NumPy array of integers, but {came} came.")
    if lengths.shape != (rows,):
        raise ValueError(f"`lengths` must have one entry for each of {rows} rows, but its shape is {lengths.shape}.")
    most = 2**30 if time is None else time
    if is_concrete(lengths):
        values = np.asarray(lengths)
        if values.size and (values.min() < 0 or values.max() > most):
            bound = "2^30" if time is None else f"time = {time}"
            raise ValueError(f"`lengths` must lie in 0 to {bound}, but they are {values}.")
    return jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, most)


def _check_sizes(**sizes):
    for name, value in sizes.items():
        check_size(name, value)
