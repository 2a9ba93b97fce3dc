"""One token of every row: the decoding form of the operator, from and to where the states lie."""

from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._backend import AbstractBackend, AbstractStepper, Problem
from ._dispatch import choose_stepper
from ._explicit import is_sharded_explicitly, varying_alike, with_automatic_axes
from ._gates import Gates
from ._op import _check_gates_type, _check_raw, _prepare, with_time
from ._raw_gates import RawGates
from ._slots import check_distinct, check_fresh, check_slots
from ._types import Scalar, as_float_array, no_type_check
from ._variant import QKNorm


@no_type_check
def gated_delta_step(
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    state: Any = None,
    *,
    slots: Any = None,
    fresh: Any = None,
    scale: Scalar | None = None,
    backend: AbstractBackend | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "batch value_heads value_dim"], Float[Array, "states value_heads key_dim value_dim"]]:
    """Run one token of every sequence, by the recurrence: the decoding form of `gated_delta`.

    **Arguments:** as for `gated_delta` without its time axis: `q`, `k` are `[batch, key_heads, key_dim]`, `v` is
    `[batch, value_heads, value_dim]`, gates are `[batch, heads, 1 | groups | dim]`; and

    - `state`: `[batch, value_heads, key_dim, value_dim]`, zeros if `None`; with `slots`
        `[slots, value_heads, key_dim, value_dim]`, the states of more requests than this call has rows.
    - `slots`: `[batch]` integers: which of the states is that of each row. -1, or anything else out of range, is a
        padding row: its output is 0 and it touches nothing. None may come twice: that raises where they are concrete or
        `checked`, and otherwise leaves one of the rows, or a mixture, in that slot.
    - `fresh`: `[batch]` booleans: rows that begin with zeros, whatever their state holds, NaN included.
    - `backend`: `None` or `Recurrent()` is what XLA makes of it. `PallasTPU()` reads every state once and writes it
        once, in place where `state` is donated under `jit`.

    **Returns:** outputs in the dtype of `v`, and the new state. Feeding tokens one by one equals one call of
    `gated_delta`. Without `slots` the state is float32 (float64 if any of `q`, `k`, `v` is); with them it is all of
    `state`, in its own dtype: of bfloat16 states those of this call are widened, and rounded where they are stored.

    A token that is not finite spoils output and state of its own row and heads, and their gradients. New slots never
    recompile.

    **Raises:** as `gated_delta`.
    """
    return _run((q, k, v, _check_gates_type(gates), state, slots, fresh), scale, checked, None, backend)


@no_type_check
def gated_delta_raw_step(
    q: Any,
    k: Any,
    v: Any,
    gates: RawGates,
    state: Any = None,
    *,
    qk_norm: QKNorm = "l2",
    slots: Any = None,
    fresh: Any = None,
    scale: Scalar | None = None,
    backend: AbstractBackend | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "batch value_heads value_dim"], Float[Array, "states value_heads key_dim value_dim"]]:
    """`gated_delta_step` from what a layer projects, as `gated_delta_raw` is `gated_delta`.

    **Arguments:** as for both, without a time axis. `PallasTPU` normalises and activates inside its kernel.

    **Returns:** as `gated_delta_step`.

    **Raises:** as `gated_delta`.
    """
    return _run((q, k, v, _check_raw(gates, qk_norm), state, slots, fresh), scale, checked, qk_norm, backend)


def _run(arrays, scale, checked, qk_norm, backend):
    who = "gated_delta_step" if qk_norm is None else "gated_delta_raw_step"
    vectors = {name: as_float_array(name, value) for name, value in zip("qkv", arrays)}
    for name, value in vectors.items():
        if value.ndim != 3:
            raise ValueError(
                f"`{who}` needs `{name}` to be [batch, heads, dim], without time, but its shape is {value.shape}."
            )
    vectors = [value[:, None] for value in vectors.values()]
    arrays = (*vectors, with_time(arrays[3]), *arrays[4:])

    def run(arrays):
        q, k, v, gates, state, slots, fresh = arrays
        batch = v.shape[0]
        call = _prepare(q, k, v, gates, None, None, None, None, (scale, "exact", None, checked), qk_norm)
        state = _check_state(who, state, slots, (batch, v.shape[2], k.shape[3], v.shape[3]), call.state_dtype)
        if slots is not None:
            slots = check_slots(slots, state.shape[0], batch)
            slots = check_distinct(who, slots, state.shape[0], checked)
        fresh = check_fresh(fresh, batch)
        if call.problem is None:
            return jnp.zeros(v.shape, v.dtype), state
        stepper = choose_stepper(call.problem, state, backend)
        out, state = _execute(stepper, call.problem, state, slots, fresh)
        return out.astype(v.dtype)[:, None], state

    if is_sharded_explicitly(arrays):
        leading = "batch" if arrays[5] is None else "slots"
        out, state = with_automatic_axes(run, arrays, vectors[2], (leading,))
    else:
        out, state = run(arrays)
    return out[:, 0], state


@eqx.filter_jit
def _execute(backend: AbstractStepper, problem: Problem, state, slots, fresh):
    """Under `jit` by itself, for calls outside of it."""
    problem, state, slots, fresh = varying_alike((problem, state, slots, fresh))
    problem = problem if backend.takes_raw else problem.activated()
    return backend.step(problem, state, slots, fresh)


def _check_state(who: str, state, slots, shape, dtype):
    """The states, `shape` for one per row; widened unless they lie in slots."""
    batch, heads, key_dim, value_dim = shape
    if state is None:
        if slots is not None:
            raise ValueError(f"`{who}` needs `state` where it has `slots`: they say which of its states are meant.")
        return jnp.zeros(shape, dtype)
    state = as_float_array("state", state)
    states = "batch" if slots is None else "slots"
    if state.ndim != 4 or state.shape[1:] != shape[1:] or (slots is None and state.shape[0] != batch):
        wanted = f"[{states}, value_heads, key_dim, value_dim]"
        wanted += f" = ({batch if slots is None else 'slots'}, {heads}, {key_dim}, {value_dim}), key axis first"
        raise ValueError(f"`state` must be {wanted}, but its shape is {state.shape}.")
    if state.shape[0] == 0 and batch > 0:
        raise ValueError(f"`{who}` needs a `state` of at least one slot, but its shape is {state.shape}.")
    return state.astype(dtype) if slots is None else state
