"""One token of rows whose states lie in the slots of a pool: a layer's part of a pooled step."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ._layer import GatedDeltaMixer, MixerState
from ._slots import put, take


def pooled_token(
    mixer: GatedDeltaMixer,
    x: Float[Array, "rows model"],
    states: MixerState,
    slots: Int[Array, " rows"],
    fresh: Bool[Array, " rows"] | None,
) -> tuple[Float[Array, "rows model"], MixerState]:
    """`mixer.step` from and to `slots` of `states`, which are checked. Only the windows are gathered."""

    def own(window):
        return None if window is None else take(window, jnp.zeros(window.shape[1:], window.dtype), slots, fresh)

    windows = [states.q_window, states.k_window, states.v_window]
    out, new, recurrent = mixer._run_token(x, [own(window) for window in windows], states.recurrent, slots, fresh)
    q, k, v = (None if old is None else put(old, rows, slots) for old, rows in zip(windows, new, strict=True))
    return out, MixerState(q, k, v, recurrent)
