"""Arguments that several operators or layers have, checked."""

import operator
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


def check_batch(batch: Any):
    """`batch` of an `init_state`: a size, or `None`.

    **Raises:** `TypeError` and `ValueError` for anything else.
    """
    if batch is None:
        return
    rule = "`init_state` needs `batch` to be a Python int of at least 0, or None for a single sequence"
    to_do = "For `x` [batch, time, model] give `x.shape[0]`."
    try:
        size = None if isinstance(batch, bool) else operator.index(batch)
    except TypeError:
        from jax.export import is_symbolic_dim

        if is_symbolic_dim(batch):
            return
        size = None
    if size is None:
        shape = f" of shape {batch.shape}" if isinstance(batch, (jax.Array, np.ndarray)) else ""
        raise TypeError(f"{rule}, but {a_type(batch)}{shape} came. {to_do}")
    if size < 0:
        raise ValueError(f"{rule}, but it is {size}. {to_do}")


def instead_of_a_state(came: Any, name: str) -> str:
    """What to do where `came` was given as the state of `name`, a layer: a sentence behind a blank."""
    if isinstance(came, (jax.Array, np.ndarray)):
        for kind, keyword in ((jnp.bool_, "mask"), (jnp.integer, "segment_ids"), (jax.dtypes.prng_key, "key")):
            if jnp.issubdtype(came.dtype, kind):
                return f" `{keyword}` is a keyword: `{name}(x, {keyword}=...)`."
    if isinstance(came, tuple) and len(came) == 2 and isinstance(came[0], jax.Array):
        return f" A call returns `(out, state)`: pass the second of the two, as in `out, state = {name}(x)`."
    return f" `{name}.init_state()` makes the first one, and every call returns the next."


def one_token_only(x: Any, name: str) -> str:
    """What to add where a state does not fit `x` in `step`: a sentence and a blank, if it may be that of a sequence."""
    if x.ndim != 2:
        return ""
    return (
        f"`step` takes one token, `x` [model] or [batch, model], so that {x.shape} is one token of {x.shape[0]} "
        f"sequences; a sequence goes to `{name}(x, state)`. "
    )


def check_key(key: Any):
    """`key` of a layer's constructor: one random key, of the new kind or the old.

    **Raises:** `TypeError` and `ValueError` for anything else.
    """
    rule = "`key` must be one random key, such as `jax.random.key(0)`"
    if not isinstance(key, (jax.Array, np.ndarray)):
        raise TypeError(f"{rule}, but {a_type(key)} came.")
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    if not is_typed and key.dtype != jnp.uint32:
        raise TypeError(f"{rule}, but an array of {key.dtype} came.")
    if key.ndim != (0 if is_typed else 1):
        raise ValueError(f"{rule}, but keys of shape {key.shape} came. For one layer of each use `eqx.filter_vmap`.")


def class_to_call(named: Any, kind: type) -> str:
    """What came as `backend`, for messages; and what to do where it is the class, a `kind`."""
    if not isinstance(named, type):
        return f"{a_type(named)} came"
    to_do = f": call it, `{named.__name__}()`" if issubclass(named, kind) else ""
    return f"the class `{named.__name__}` came{to_do}"
