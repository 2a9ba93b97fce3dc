"""Speculative windows: a few drafted tokens at once, of which any number is kept.

A recurrent state cannot be truncated. So either the state after every token is returned, or the tokens themselves are
recorded beside a state that is older than they are, and run again with what comes next.
"""

import dataclasses
from typing import Any, Literal, overload

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from gated_delta._gates import Gates
from gated_delta._layer import GatedDeltaMixer, MixerState
from gated_delta._op import gated_delta
from gated_delta._recurrent import Recurrent
from gated_delta._types import a_type, accumulation_dtype, as_float_array, is_concrete, no_type_check

Triple = tuple[Any, Any, Any]  # something of queries, keys and values


class StateWindow(eqx.Module):
    """What `window(keep="all")` keeps, for `commit`.

    **Attributes:**

    - `start`: the state before the window.
    - `recurrent`: the recurrent state after each of its tokens, in the accumulation dtype.
    - `inputs`: of the convolutions of queries, keys and values, `[*batch, taps + tokens, channels]`: the windows of
        `start`, then the tokens. `None` without convolutions.
    """

    start: MixerState
    recurrent: Float[Array, "*batch tokens value_heads key_dim value_dim"]
    inputs: Triple


class ReplayState(eqx.Module):
    """A state and the tokens since, recorded behind their projections: `begin_replay` makes it.

    **Attributes:**

    - `base`: the state before the first record. Windows only read it, until the records are full.
    - `inputs`: projected queries, keys and values, `[*batch, capacity, channels]`, before the convolutions.
    - `gates`: final values; one per record.
    - `fine`: whether the token of a record was finite, for each key head.
    - `count`: records that count; those behind are free.
    """

    base: MixerState
    inputs: Triple
    gates: Gates
    fine: Bool[Array, "*batch capacity key_heads"]
    count: Int[Array, "*batch"]

    @property
    def capacity(self) -> int:
        """How many records there is room for."""
        return self.fine.shape[-2]


class ReplayWindow(eqx.Module):
    """What `window(keep="replay")` keeps, for `commit`.

    **Attributes:**

    - `replay`: with the window's tokens recorded, but not counted.
    - `tokens`: how many there are.
    """

    replay: ReplayState
    tokens: int = eqx.field(static=True)


X = Float[Array | np.ndarray, "*batch tokens model"]
Out = Float[Array, "*batch tokens model"]


@overload
def window(mixer: GatedDeltaMixer, x: X, state: MixerState, *, keep: Literal["final"]) -> tuple[Out, MixerState]: ...
@overload
def window(mixer: GatedDeltaMixer, x: X, state: MixerState, *, keep: Literal["all"]) -> tuple[Out, StateWindow]: ...
@overload
def window(
    mixer: GatedDeltaMixer, x: X, state: ReplayState, *, keep: Literal["replay"]
) -> tuple[Out, ReplayWindow]: ...


@no_type_check
def window(mixer: GatedDeltaMixer, x: X, state: Any, *, keep: str) -> tuple[Out, Any]:
    """Run a few tokens, and keep what it takes to go back to any of them.

    **Arguments:**

    - `x`: `[tokens, model]` or `[batch, tokens, model]`: the last token that is certain and the drafted ones.
    - `state`: the state before them. It is not changed, so `accepted = 0` is always possible.
    - `keep`: `"final"`: the state after the last token, as `mixer(x, state)`. `"all"`: the state after every token, for
        2 to 8 of them: as many times the state. `"replay"`: the tokens' projections; `state` is then a `ReplayState`
        from `begin_replay`, and its large part is read and not written, but where the records are full.

    **Returns:** `(out, kept)`: outputs as `mixer(x, state)` gives them, and for `"final"` the new state, else what
    `commit(kept, accepted)` makes it of.

    **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
    """
    x = as_float_array("x", x)
    mixer._check_x(x, (2, 3), "[tokens, model] or [batch, tokens, model]")
    if keep not in ("final", "all", "replay"):
        raise ValueError(f"`window(keep={keep!r})` must be 'final', 'all' or 'replay'.")
    _check_kind(keep, state)
    if keep == "final":
        return mixer(x, state)
    if x.shape[-2] == 0:
        raise ValueError("`window` needs at least one token.")
    lead = x.shape[:-2]
    if keep == "replay":
        _check_replay(mixer, state, lead, x.shape[-2])
    else:
        mixer._check_state(state, lead)
    run: Any = _keep_records if keep == "replay" else _keep_states
    if lead:
        return run(mixer, x, state)
    return jax.tree.map(lambda a: a[0], run(mixer, x[None], jax.tree.map(lambda a: a[None], state)))


@no_type_check
def commit(kept: PyTree, accepted: Int[Array | np.ndarray, "*batch"] | int) -> PyTree:
    """The state after the first `accepted` tokens of a window, of each row: from 0 to all of them.

    **Arguments:**

    - `kept`: what `window` returned, or any tree with such things in it, as the list of a model's layers; the rest of
        the tree is returned as it is.
    - `accepted`: one for each row, or one for all. Traced values are limited to what the window has, concrete ones
        raise.

    **Returns:** a `MixerState` for a `StateWindow`, in the dtypes of the state that came; a `ReplayState` for a
    `ReplayWindow`.
    """

    def is_window(x):
        return isinstance(x, StateWindow | ReplayWindow)

    if not any(is_window(x) for x in jax.tree.leaves(kept, is_leaf=is_window)):
        raise TypeError(
            "`commit` needs what `window` returned under keep='all' or keep='replay', but there is none in the tree. "
            "keep='final' returns the state itself."
        )
    return jax.tree.map(lambda x: _commit(x, accepted) if is_window(x) else x, kept, is_leaf=is_window)


@no_type_check
def begin_replay(mixer: GatedDeltaMixer, state: MixerState, *, capacity: int = 16, dtype: Any = None) -> ReplayState:
    """`state`, and room for the records of `capacity` tokens, none yet.

    For a pool, take the state of one request: `StatePool(begin_replay(mixer, mixer.init_state()), slots)`.

    - `capacity`: static; at least the longest window. The more, the less often the state is written, and the more
        tokens each window runs again: 16 to 64.
    - `dtype`: of the recorded inputs; that of the state's windows (or, without convolutions, of the weights) if `None`.
        Give the dtype of `x` where it differs.
    """
    if not isinstance(state, MixerState):
        raise TypeError(f"`begin_replay` needs a `MixerState`, but {a_type(state)} came.")
    if isinstance(capacity, bool) or not isinstance(capacity, int) or capacity < 1:
        raise ValueError(f"`begin_replay` needs `capacity` to be an int of at least 1, not {capacity!r}.")
    lead = state.recurrent.shape[:-3]
    mixer._check_state(state, lead)
    window, weight = state.q_window, mixer.q_proj.weight
    dtype = (weight.dtype if window is None else window.dtype) if dtype is None else jnp.dtype(dtype)
    x = jax.ShapeDtypeStruct((*lead, capacity, mixer.config.model), dtype)
    shapes = eqx.filter_eval_shape(lambda x: (mixer._project(x)[1:], mixer._gates(x)), x)
    (inputs, fine), gates = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    return ReplayState(state, inputs, gates, ~fine, jnp.zeros(lead, jnp.int32))


@no_type_check
def end_replay(mixer: GatedDeltaMixer, replay: ReplayState) -> MixerState:
    """The state after the records that count."""
    if not isinstance(replay, ReplayState):
        raise TypeError(f"`end_replay` needs a `ReplayState`, but {a_type(replay)} came.")
    lead = replay.count.shape
    _check_replay(mixer, replay, lead, 0)
    if lead:
        return _fold(mixer, replay)
    return jax.tree.map(lambda a: a[0], _fold(mixer, jax.tree.map(lambda a: a[None], replay)))


# ---- the state after every token -------------------------------------------------------------------------------------


def _keep_states(mixer, x, state):
    projected, new, fine = mixer._project(x)
    inputs = _each(_append, _windows(state), new)
    q, k, v = _heads(mixer, _windows(state), new, fine, x.dtype)
    options = mixer._operator_options(v.dtype)

    def one_token(state, token):
        q, k, v, gates = jax.tree.map(lambda a: a[:, None], token)
        out, state = gated_delta(q, k, v, gates, initial_state=state, backend=Recurrent(), **options)
        return state, (out[:, 0], state)

    tokens = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (q, k, v, mixer._gates(projected)))
    start = state.recurrent.astype(accumulation_dtype(x.dtype))
    _, (out, states) = lax.scan(one_token, start, tokens)
    out, states = jnp.moveaxis(out, 0, 1), jnp.moveaxis(states, 0, 1)
    return mixer._finish(projected, out), StateWindow(state, states, inputs)


def _commit_states(kept: StateWindow, accepted) -> MixerState:
    start = kept.start
    last = jnp.maximum(accepted - 1, 0)
    state = jnp.take_along_axis(kept.recurrent, _at(last, 5), axis=1)[:, 0].astype(start.recurrent.dtype)
    state = jnp.where(_at(accepted, 4) == 0, start.recurrent, state)
    q, k, v = _last_inputs(_windows(start), kept.inputs, accepted)
    return MixerState(q, k, v, state)


# ---- records ---------------------------------------------------------------------------------------------------------


def _keep_records(mixer, x, replay: ReplayState):
    tokens = x.shape[1]
    full = replay.count + tokens > replay.capacity
    replay = lax.cond(jnp.any(full), lambda replay: _empty(mixer, replay, full), lambda replay: replay, replay)
    projected, new, fine = mixer._project(x)
    inputs, gates, fine = jax.tree.map(
        lambda records, new: jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=0))(
            records, new.astype(records.dtype), replay.count
        ),
        (replay.inputs, replay.gates, replay.fine),
        (new, mixer._gates(projected), fine),
    )
    replay = dataclasses.replace(replay, inputs=inputs, gates=gates, fine=fine)
    out, _ = _run_records(mixer, replay, replay.count + tokens, x.dtype)
    return mixer._finish(projected, _cut(out, replay.count, tokens)), ReplayWindow(replay, tokens)


def _run_records(mixer, replay: ReplayState, count, dtype):
    """Outputs of the operator at every record, and the state after `count` of them."""
    q, k, v = _heads(mixer, _windows(replay.base), replay.inputs, replay.fine, dtype)
    ids = jnp.where(jnp.arange(replay.capacity, dtype=jnp.int32) < count[:, None], 0, -1)
    return gated_delta(
        q,
        k,
        v,
        replay.gates,
        initial_state=replay.base.recurrent,
        segment_ids=ids,
        backend=mixer.backend,
        **mixer._operator_options(v.dtype),
    )


def _fold(mixer, replay: ReplayState) -> MixerState:
    base = replay.base
    _, state = _run_records(mixer, replay, replay.count, replay.inputs[0].dtype)
    inputs = _each(_append, _windows(base), replay.inputs)
    q, k, v = _last_inputs(_windows(base), inputs, replay.count)
    return MixerState(q, k, v, state.astype(base.recurrent.dtype))


def _empty(mixer, replay: ReplayState, full) -> ReplayState:
    """The rows that are full with their records in the base."""
    folded = _fold(mixer, replay)
    base = jax.tree.map(lambda new, old: jnp.where(_at(full, old.ndim), new, old), folded, replay.base)
    return dataclasses.replace(replay, base=base, count=jnp.where(full, 0, replay.count))


# ---- shared ----------------------------------------------------------------------------------------------------------


def _heads(mixer, windows: Triple, inputs: Triple, fine, dtype) -> Triple:
    """Queries, keys and values for the operator, of inputs `[batch, time, channels]` behind their windows."""

    def convolve(conv, a, window):
        return mixer._convolve(conv, a.astype(dtype), window, None)[0]

    q, k, v = _each(convolve, (mixer.q_conv, mixer.k_conv, mixer.v_conv), inputs, windows)
    q, k, v = mixer._split_heads(q, k, v, fine, dtype)
    return *mixer._normalise(q, k, dtype), v


def _windows(state: MixerState) -> Triple:
    return state.q_window, state.k_window, state.v_window


def _each(function, *triples: Triple) -> Triple:
    q, k, v = map(function, *triples)
    return q, k, v


def _append(window, inputs):
    return None if window is None else jnp.concatenate([window, inputs.astype(window.dtype)], axis=1)


def _last_inputs(windows: Triple, inputs: Triple, count) -> Triple:
    """The windows after `count` of the tokens whose inputs stand behind `windows`."""
    return _each(lambda window, a: None if window is None else _cut(a, count, window.shape[1]), windows, inputs)


def _cut(x, begins, length: int):
    """`x[row, begins[row] : begins[row] + length]` of every row."""
    return jax.vmap(lambda row, begin: lax.dynamic_slice_in_dim(row, begin, length, axis=0))(x, begins)


def _at(per_row, ndim: int):
    return per_row.reshape(-1, *(1,) * (ndim - 1))


def _commit(kept: StateWindow | ReplayWindow, accepted) -> MixerState | ReplayState:
    if isinstance(kept, StateWindow):
        tokens, lead = kept.recurrent.shape[-4], kept.recurrent.shape[:-4]
    else:
        tokens, lead = kept.tokens, kept.replay.count.shape
    accepted = _check_accepted(accepted, lead, tokens)
    if isinstance(kept, ReplayWindow):
        return dataclasses.replace(kept.replay, count=kept.replay.count + accepted)
    if lead:
        return _commit_states(kept, accepted)
    return jax.tree.map(lambda a: a[0], _commit_states(jax.tree.map(lambda a: a[None], kept), accepted[None]))


def _check_accepted(accepted, lead, tokens):
    if isinstance(accepted, int) and not isinstance(accepted, bool):
        accepted = np.full(lead, accepted, np.int32)
    if not isinstance(accepted, (jax.Array, np.ndarray)) or not jnp.issubdtype(accepted.dtype, jnp.integer):
        came = getattr(accepted, "dtype", type(accepted).__name__)
        raise TypeError(f"`accepted` must be an int or an array of integers, one for each row, but {came} came.")
    if accepted.shape != lead:
        raise ValueError(f"`accepted` must have the shape {lead} of this window's rows, but it is {accepted.shape}.")
    if is_concrete(accepted):
        values = np.asarray(accepted)
        if np.any((values < 0) | (values > tokens)):
            raise ValueError(f"`accepted` must lie in 0 to {tokens}, the tokens of this window, but it is {values}.")
    return jnp.clip(jnp.asarray(accepted).astype(jnp.int32), 0, tokens)


def _check_kind(keep, state):
    wanted = ReplayState if keep == "replay" else MixerState
    if not isinstance(state, wanted):
        raise TypeError(
            f"`window(keep={keep!r})` needs a `{wanted.__name__}`, but {a_type(state)} came. `begin_replay` "
            "makes a `ReplayState` of a `MixerState`, and `end_replay` the reverse."
        )


def _check_replay(mixer, replay: ReplayState, lead, tokens: int):
    mixer._check_state(replay.base, lead)
    if tokens > replay.capacity:
        raise ValueError(
            f"This window has {tokens} tokens, but the `ReplayState` has room for {replay.capacity}: give "
            f"`begin_replay` a `capacity` of at least {tokens}."
        )
