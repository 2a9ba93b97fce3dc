"""Options that both operators have, checked."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._types import a_type

_PRECISIONS = ("default", "high", "highest")


def check_precision(precision: Any) -> str | None:
    """`precision` in the words of `jax.lax.Precision`, lower case.

    **Raises:** `ValueError` for anything else.
    """
    if precision is None:
        return None
    name = precision.name.lower() if isinstance(precision, lax.Precision) else precision
    if not isinstance(name, str) or name.lower() not in _PRECISIONS:
        raise ValueError(f"`precision={precision!r}` must be one of {_PRECISIONS}, a `jax.lax.Precision`, or None.")
    return name.lower()


def check_scale(scale: Any, key_dim: int) -> float | jax.Array:
    """`scale` as a Python float or a scalar array; `key_dim ** -0.5` for `None`.

    **Raises:** `TypeError` and `ValueError` for anything else.
    """
    if scale is None:
        return key_dim**-0.5
    if isinstance(scale, bool) or not isinstance(scale, (int, float, np.generic, np.ndarray, jax.Array)):
        raise TypeError(f"`scale` must be a number or a scalar array, but {a_type(scale)} came.")
    if isinstance(scale, (int, float)):
        return float(scale)
    if scale.ndim != 0 or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(f"`scale` must be one float number, but it is {scale.dtype}{list(scale.shape)}.")
    return jnp.asarray(scale)
