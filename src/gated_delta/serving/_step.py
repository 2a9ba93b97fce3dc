"""One token of many requests, each from and to its slot."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from gated_delta._hybrid import HybridStack
from gated_delta._layer import GatedDeltaMixer, MixerState
from gated_delta._pooled import pooled_token
from gated_delta._slots import check_distinct, check_fresh, check_slots
from gated_delta._types import as_float_array, no_type_check
from gated_delta.attention import SoftmaxAttention


@no_type_check
def pooled_step(
    mixer: GatedDeltaMixer | SoftmaxAttention | HybridStack,
    x: Float[Array | np.ndarray, "rows model"],
    states: Any,
    slots: Int[Array | np.ndarray, " rows"],
    *,
    fresh: Bool[Array | np.ndarray, " rows"] | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "rows model"], Any]:
    """`mixer.step` of rows whose states lie in the slots of a pool, without gathering the large ones.

    A mixer whose backend is a `PallasTPU` reads each recurrent state once from its slot and writes it once back, in
    place where `states` are donated under `jit`; other gated delta mixers gather, step and scatter, as `StatePool`
    does. Softmax attention writes one key and one value, and reads the cache as far as its longest row goes. A
    `HybridStack` does so layer by layer.

    **Arguments:**

    - `states`: every array with a leading axis of slots: the `states` of a `StatePool`, or one layer's part of them;
        for a `SoftmaxAttention` also a `PagedKVCache`.
    - `slots`, `fresh`: as for `StatePool.gather`; no slot may come twice. A `fresh` row begins with
        `mixer.init_state()`.
    - `checked`: raise at run time, under `jit` too, where a slot comes twice.

    **Returns:** outputs, whose padding rows nobody should read, and the new `states`, in the dtypes that came.

    **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
    """
    x = as_float_array("x", x)
    if isinstance(mixer, SoftmaxAttention):
        mixer._check_x(x, (2,), "[rows, model]")
        out, states = mixer.extend(x[:, None], states, slots, fresh=fresh, checked=checked)
        return out[:, 0], states
    count = _check_stack(mixer, x, states) if isinstance(mixer, HybridStack) else _check_states(mixer, x, states)
    slots = check_slots(slots, count, x.shape[0])
    slots = jnp.asarray(check_distinct("pooled_step", slots, count, checked))
    fresh = check_fresh(fresh, x.shape[0])
    fresh = None if fresh is None else jnp.asarray(fresh)
    return (
        mixer.pooled(x, states, slots, fresh)
        if isinstance(mixer, HybridStack)
        else pooled_token(mixer, x, states, slots, fresh)
    )


def _check_states(mixer: GatedDeltaMixer, x, states: Any) -> int:
    mixer._check_x(x, (2,), "[rows, model]")
    recurrent: Any = getattr(states, "recurrent", None)
    count = recurrent.shape[0] if getattr(recurrent, "ndim", 0) else 0
    mixer._check_state(states, (count,))
    if not isinstance(states, MixerState) or count == 0:
        raise ValueError(
            "`pooled_step` needs `states` with a leading axis of at least one slot: "
            "`StatePool(mixer.init_state(), slots).states`."
        )
    return count


def _check_stack(stack: HybridStack, x, states: Any) -> int:
    if x.ndim != 2 or x.shape[1] != stack.config.model:
        raise ValueError(f"`x` must be [rows, model] with model = {stack.config.model}, but its shape is {x.shape}.")
    stack._check_state(states)
    leading = {a.shape[:2] for a in jax.tree.leaves(states)}
    if states is None or len(leading) != 1 or (*leading,)[0][1:] != (stack.config.repeats,):
        raise ValueError(
            f"`pooled_step` needs `states` whose arrays have leading axes of slots and of {stack.config.repeats} "
            "repeats: `StatePool(stack.init_state(), slots).states`."
        )
    return (*leading,)[0][0]
