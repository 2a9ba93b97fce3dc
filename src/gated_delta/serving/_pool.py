"""The states of many requests in one set of arrays, read and written by slot."""

from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from gated_delta._layer import MixerState
from gated_delta._slots import check_distinct, check_fresh, check_slots, put, take
from gated_delta._types import a_type, check_float_dtype, no_type_check

S = TypeVar("S")


class StatePool(eqx.Module, Generic[S]):
    """A fixed number of slots, each with the state of one request: of a layer, or of a whole model.

    A value like any other: methods return a new pool. Under `jit` with the pool donated, `scatter` and `reset` write in
    place; without, the pool that came stays as it is. New slots never recompile, a new number of rows does: fill up
    with padding rows, whose slot is -1 (or anything else that is no slot). They read the first state and write nothing.

    **Attributes:**

    - `states`: the tree of states, every array with a leading axis of slots.
    - `initial`: the state of a request before its first token, in the dtypes that `gather` returns.
    - `checked`: whether traced slots that come twice raise in `scatter`.
    """

    states: S
    initial: S
    checked: bool = eqx.field(static=True)

    @no_type_check
    def __init__(self, initial: S, slots: int, *, recurrent_dtype: Any = None, checked: bool = False):
        """**Arguments:**

        - `initial`: the state of one request before its first token, as `mixer.init_state()` gives it: any pytree of
            arrays, without an axis for the batch. It is copied.
        - `slots`: how many requests have a place at once.
        - `recurrent_dtype`: what the recurrent part of every `MixerState` in the tree is stored in, `jnp.bfloat16` for
            half the memory. `gather` widens it and `scatter` rounds it, and nothing else rounds. `None`: as it is.
        - `checked`: raise at run time, under `jit` too, where a slot comes twice in one `scatter`. It does not export.
        """
        if isinstance(slots, bool) or not isinstance(slots, int):
            raise TypeError(
                f"`StatePool` needs `slots` to be a Python int, since it is a shape, but {a_type(slots)} came."
            )
        if slots < 1:
            raise ValueError(f"`StatePool(slots={slots})` must have at least 1 slot.")
        if not jax.tree.leaves(initial):
            raise ValueError("`StatePool` needs a state with at least one array: `mixer.init_state()` makes one.")
        # Copies: donating the pool must not take the caller's arrays away, nor one array in two places.
        self.initial = jax.tree_util.tree_map_with_path(_copy, initial)
        stored = self.initial if recurrent_dtype is None else _store_recurrent(self.initial, recurrent_dtype)
        self.states = jax.tree.map(lambda a: jnp.broadcast_to(a, (slots, *a.shape)), stored)
        self.checked = checked

    @property
    def slots(self) -> int:
        """How many there are."""
        return jax.tree.leaves(self.states)[0].shape[0]

    @no_type_check
    def gather(
        self, slots: Int[Array | np.ndarray, " rows"], fresh: Bool[Array | np.ndarray, " rows"] | None = None
    ) -> S:
        """The states in `slots`, every array with a leading axis of rows.

        A row where `fresh` is true, and a padding row, gets the first state instead, whatever its slot holds, NaN
        included. A slot may come twice: so a request is forked.

        **Raises:** `TypeError` and `ValueError` for slots that are no `[rows]` integers, or `fresh` that is no `[rows]`
        booleans.
        """
        slots = check_slots(slots, self.slots)
        fresh = check_fresh(fresh, slots.shape[0])
        return jax.tree.map(lambda stored, first: take(stored, first, slots, fresh), self.states, self.initial)

    @no_type_check
    def scatter(self, slots: Int[Array | np.ndarray, " rows"], states: S) -> "StatePool[S]":
        """The pool with `states`, as `gather` returned them and a model went on from there, in `slots`.

        Padding rows write nothing. No slot may come twice: concrete slots raise; traced ones raise if the pool is
        `checked`, and otherwise leave one of the rows, or a mixture, in that slot, and nothing elsewhere.

        **Raises:** as `gather`, and `ValueError` for states of another structure, shape or kind of dtype than the
        pool's.
        """
        slots = check_slots(slots, self.slots)
        self._check_states(states, slots.shape[0])
        slots = check_distinct("StatePool", slots, self.slots, self.checked)
        new = jax.tree.map(lambda stored, rows: put(stored, rows, slots), self.states, states)
        return eqx.tree_at(lambda pool: pool.states, self, new)

    @no_type_check
    def reset(self, slots: Int[Array | np.ndarray, " rows"]) -> "StatePool[S]":
        """The pool with the first state in `slots`, so that nothing of a finished request stays. As `scatter`.

        Not needed for the next request, which is `fresh`.
        """
        rows = getattr(slots, "shape", (0,))[:1]
        return self.scatter(slots, jax.tree.map(lambda a: jnp.broadcast_to(a, (*rows, *a.shape)), self.initial))

    def _check_states(self, states, rows):
        wanted = jax.tree_util.tree_flatten_with_path(self.initial)
        came = jax.tree_util.tree_flatten_with_path(states)
        if wanted[1] != came[1]:
            raise ValueError(
                f"`scatter` needs states of the pool's structure, {wanted[1]}, but {came[1]} came. Return what "
                "`gather` gave, run further, in the same tree."
            )
        for (path, first), (_, new) in zip(wanted[0], came[0]):
            name, shape = f"states{jax.tree_util.keystr(path)}", (rows, *first.shape)
            if not isinstance(new, (jax.Array, np.ndarray)) or new.shape != shape:
                raise ValueError(
                    f"`scatter` needs `{name}` to be an array of the shape {shape}, since there are {rows} slots, but "
                    f"{getattr(new, 'shape', type(new).__name__)} came. There is one slot for each row, -1 for padding."
                )
            floating = [jnp.issubdtype(dtype, jnp.floating) for dtype in (first.dtype, new.dtype)]
            if new.dtype != first.dtype and not all(floating):
                raise ValueError(
                    f"`scatter` needs `{name}` to be {first.dtype}, as in the pool, but it is {new.dtype}."
                )


def _copy(path, leaf):
    if not isinstance(leaf, (jax.Array, np.ndarray)):
        raise TypeError(
            f"`StatePool` needs a tree of arrays, but initial{jax.tree_util.keystr(path)} is {a_type(leaf)}. "
            "A number that changes belongs in an array, one that does not in the model."
        )
    return jnp.array(leaf, jnp.result_type(leaf))  # never weakly typed: what a program returns would be another type


def _store_recurrent(initial, dtype):
    dtype = jnp.dtype(dtype)
    check_float_dtype("recurrent_dtype", dtype)

    def is_state(x):
        return isinstance(x, MixerState)

    def store(x):
        return eqx.tree_at(lambda s: s.recurrent, x, x.recurrent.astype(dtype)) if is_state(x) else x

    if not any(is_state(x) for x in jax.tree.leaves(initial, is_leaf=is_state)):
        raise ValueError("`recurrent_dtype` is for trees with a `MixerState`, but `initial` has none.")
    return jax.tree.map(store, initial, is_leaf=is_state)
