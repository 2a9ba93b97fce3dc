"""Words shared by every room: axis names, gate granularities, and the dtype policy. Imports nothing of ours."""

from typing import Literal, TypeAlias, TypeVar

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

State: TypeAlias = Float[Array, "states value_heads key_dim value_dim"]
"""Recurrent state, key axis first, float32 (float64 where the inputs are)."""

DecayGranularity: TypeAlias = Literal["none", "head", "tile", "channel"]
EraseGranularity: TypeAlias = Literal["none", "head", "channel"]
WriteGranularity: TypeAlias = Literal["one", "head", "channel"]
Owner: TypeAlias = Literal["key", "value"]

Scalar: TypeAlias = float | int | np.ndarray | np.generic | jax.Array

T = TypeVar("T")

CHUNK_SIZES = (16, 32, 64, 128)
"""Tokens that may be solved together. Powers of two: the chunk is halved again and again in `_tile`."""


def no_type_check(x: T) -> T:
    """Keep run-time type checkers off `x`, which checks its arguments by hand: so its errors read the same for all.

    jaxtyping's import hook goes by this name. `typing.no_type_check` would hide the annotations from static checkers
    too.
    """
    x.__no_type_check__ = True  # pyright: ignore[reportAttributeAccessIssue]
    return x


def operand_dtype(*dtypes) -> jnp.dtype:
    """The dtype of matrix operands: bfloat16 if every input is, float64 if any is, else float32."""
    dtypes = tuple(jnp.dtype(dtype) for dtype in dtypes)
    if any(dtype == jnp.float64 for dtype in dtypes):
        return jnp.dtype(jnp.float64)
    if all(dtype == jnp.bfloat16 for dtype in dtypes):
        return jnp.dtype(jnp.bfloat16)
    return jnp.dtype(jnp.float32)


def accumulation_dtype(operand) -> jnp.dtype:
    """The dtype of sums, log decays, exponentials and the state: float64 for float64 operands, else float32."""
    return jnp.dtype(jnp.float64) if jnp.dtype(operand) == jnp.float64 else jnp.dtype(jnp.float32)


def a_type(value) -> str:
    """What `value` is, with its article, for messages: "an int", "a list", "a JAX array"."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return "a JAX array" if isinstance(value, jax.Array) else "a NumPy array"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def as_float_array(name: str, value) -> jax.Array:
    """`value` as a floating-point JAX array.

    **Raises:** `TypeError` that says `name` and what came, for anything but a float array of JAX or NumPy.
    """
    if not isinstance(value, (jax.Array, np.ndarray, np.generic)):
        raise TypeError(f"`{name}` must be a JAX or NumPy array of floating-point numbers, but {a_type(value)} came.")
    check_float_dtype(name, value.dtype)
    return jnp.asarray(value)


def check_float_dtype(name: str, dtype):
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"`{name}` must hold floating-point numbers, but its dtype is {dtype}. Convert it, for example with "
            f"`{name}.astype(jnp.float32)`."
        )


def spread_heads(x: Shaped[Array, "..."], owners: int, axis: int) -> Shaped[Array, "..."]:
    """Give each owner the entry of its key head: head `g // (owners / heads)` along `axis`."""
    heads = x.shape[axis]
    if heads == owners:
        return x
    split = (*x.shape[: axis + 1], owners // heads, *x.shape[axis + 1 :])
    return jnp.broadcast_to(jnp.expand_dims(x, axis + 1), split).reshape(*x.shape[:axis], owners, *x.shape[axis + 1 :])


def is_concrete(x) -> bool:
    """Whether the values of `x` can be read here: no tracer, no mere shape, no part of an array that lies elsewhere."""
    return not isinstance(x, (jax.core.Tracer, jax.ShapeDtypeStruct)) and getattr(x, "is_fully_addressable", True)
