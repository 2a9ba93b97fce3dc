"""`Gates`: the canonical form of what every member of the family decides per token."""

from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._types import as_float_array, check_float_dtype

GateArray: TypeAlias = Float[Array | jax.ShapeDtypeStruct, "*batch_and_time heads_and_groups"] | None


class Gates(eqx.Module):
    r"""Decay, erase and write of every token, as final values (after their activations).

    With state $S$ (key_dim by value_dim), one token does

    $$S \leftarrow \exp(\mathrm{log\_decay}) \odot S, \qquad
      S \leftarrow S + k\,(\mathrm{write} \odot v - S^\top(\mathrm{erase} \odot k))^\top.$$

    The last axis says how fine a gate is; an array without that axis is per head. `owners` is either the number of key
    heads or the number of value heads, the same for `log_decay` and `erase`: key-owned gates are shared by the whole
    group of value heads that a key head serves, and their chunk solve is done once for the group.

    **Attributes:**

    - `log_decay`: `[batch, time, owners, 1 | tiles | key_dim]`, natural logarithm of the retained fraction, in nats
        per token, at most 0; `-inf` forgets everything. `None`: no decay.
    - `erase`: `[batch, time, owners, 1 | key_dim]`, weight of the old reading, in `[0, erase_max]`. `None`: never
        erase.
    - `write`: `[batch, time, value_heads | key_heads, 1 | value_dim]`, weight of the new value. `None`: write with 1,
        or, where `is_tied`, with `erase`.

    For `gated_delta_step` the arrays have no `time` axis.

    - `is_tied`: `erase` is the delta rule's beta, both erase and write. Made by `Gates.tied`.
    - `erase_max`: static promise, the largest value `erase` can take: 1, or 2 where beta is doubled. It decides how
        precisely the chunk is solved. A broken promise may cost precision, never a NaN.
    - `log_decay_min`: static promise, the smallest value `log_decay` can take (-5 for a bounded gate), or `None`. It
        may select a faster product of decays in a kernel.
    """

    log_decay: GateArray
    erase: GateArray
    write: GateArray
    is_tied: bool = eqx.field(static=True)
    erase_max: float = eqx.field(static=True)
    log_decay_min: float | None = eqx.field(static=True)

    def __init__(self, log_decay=None, erase=None, write=None, *, erase_max=1.0, log_decay_min=None, is_tied=False):
        if is_tied and (erase is None or write is not None):
            raise ValueError(
                "`Gates(is_tied=True)` needs `erase` (the beta that both erases and writes) and no `write`; "
                "`Gates.tied(beta, log_decay)` builds it."
            )
        check_promises("Gates", erase_max, "log_decay_min", log_decay_min)
        self.log_decay = as_gate("log_decay", log_decay)
        self.erase = as_gate("erase", erase)
        self.write = as_gate("write", write)
        self.is_tied = is_tied
        self.erase_max = float(erase_max)
        self.log_decay_min = None if log_decay_min is None else float(log_decay_min)

    @classmethod
    def tied(cls, beta, log_decay=None, *, erase_max=1.0, log_decay_min=None) -> "Gates":
        """One `beta`, `[batch, time, owners]` or `[batch, time, owners, 1]`, used as both erase and write.

        The gradient of the result's `erase` is that of beta: the sum of both uses.
        """
        return cls(log_decay, beta, erase_max=erase_max, log_decay_min=log_decay_min, is_tied=True)


def as_gate(name, value) -> Any:
    """A float array; `None` and a `jax.ShapeDtypeStruct` (for `explain`) pass as they are."""
    if isinstance(value, jax.ShapeDtypeStruct):
        check_float_dtype(name, value.dtype)
        return value
    return None if value is None else as_float_array(name, value)


def check_promises(owner: str, erase_max, bound_name: str, bound):
    """The static numbers of `Gates` and `RawGates`."""
    try:
        erase_ok = 0 < float(erase_max) <= 2
        bound_ok = bound is None or float(bound) < 0
    except TypeError as error:
        raise TypeError(
            f"`{owner}` needs `erase_max` and `{bound_name}` to be Python numbers: they are static promises, not "
            "arrays."
        ) from error
    if not erase_ok:
        raise ValueError(
            f"`{owner}(erase_max={erase_max})` must lie in (0, 2]: beyond 2 one token can grow the state without bound."
        )
    if not bound_ok:
        raise ValueError(
            f"`{owner}({bound_name}={bound})` must be negative: it is the smallest log decay in nats per token. "
            "Leave it `None` where there is no bound."
        )


def log_decay_floor(dtype) -> float:
    """The value below which `exp` is exactly 0 in `dtype`: every log decay is limited to it before any sum.

    So `-inf` means a full forget, and no sum ever holds an offset so large that the small steps beside it are lost.
    """
    return -750.0 if jnp.dtype(dtype) == jnp.float64 else -110.0


def limit_log_decay(log_decay: Float[Array, "..."]) -> Float[Array, "..."]:
    """Into `[log_decay_floor, 0]`, with zero gradient outside and the full gradient at exactly 0."""
    floor = log_decay_floor(log_decay.dtype)
    above = jnp.where(log_decay < floor, jnp.full_like(log_decay, floor), log_decay)
    return jnp.where(log_decay > 0, 0 * log_decay, above)  # NaN for infinity
