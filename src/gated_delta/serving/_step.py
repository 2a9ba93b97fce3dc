"""One token of many requests, each from and to its slot."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gated_delta._layer import GatedDeltaMixer, MixerState
from gated_delta._slots import check_distinct, check_fresh, check_slots, put, take
from gated_delta._types import as_float_array, no_type_check


@no_type_check
def pooled_step(
    mixer: GatedDeltaMixer,
    x: Float[Array | np.ndarray, "rows model"],
    states: MixerState,
    slots: Int[Array | np.ndarray, " rows"],
    *,
    fresh: Bool[Array | np.ndarray, " rows"] | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "rows model"], MixerState]:
    """`mixer.step` of rows whose states lie in the slots of a pool, without gathering the large ones.

    A mixer whose backend is a `PallasTPU` reads each recurrent state once from its slot and writes it once back, in
    place where `states` are donated under `jit`; other mixers gather, step and scatter, as `StatePool` does.

    **Arguments:**

    - `states`: every array with a leading axis of slots: the `states` of a `StatePool`, or one layer's part of them.
    - `slots`, `fresh`: as for `StatePool.gather`; no slot may come twice. A `fresh` row begins with
        `mixer.init_state()`.
    - `checked`: raise at run time, under `jit` too, where a slot comes twice.

    **Returns:** outputs, whose padding rows nobody should read, and the new `states`, in the dtypes that came.

    **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
    """
    x = as_float_array("x", x)
    mixer._check_x(x, (2,), "[rows, model]")
    count = _check_states(mixer, states)
    slots = check_slots(slots, count, x.shape[0])
    slots = check_distinct("pooled_step", slots, count, checked)
    fresh = check_fresh(fresh, x.shape[0])

    def own(window):
        return None if window is None else take(window, jnp.zeros(window.shape[1:], window.dtype), slots, fresh)

    windows = [states.q_window, states.k_window, states.v_window]
    out, new, recurrent = mixer._run_token(x, [own(window) for window in windows], states.recurrent, slots, fresh)
    q, k, v = (None if old is None else put(old, rows, slots) for old, rows in zip(windows, new, strict=True))
    return out, MixerState(q, k, v, recurrent)


def _check_states(mixer: GatedDeltaMixer, states: Any) -> int:
    recurrent: Any = getattr(states, "recurrent", None)
    count = recurrent.shape[0] if getattr(recurrent, "ndim", 0) else 0
    mixer._check_state(states, (count,))
    if not isinstance(states, MixerState) or count == 0:
        raise ValueError(
            "`pooled_step` needs `states` with a leading axis of at least one slot: "
            "`StatePool(mixer.init_state(), slots).states`."
        )
    return count
