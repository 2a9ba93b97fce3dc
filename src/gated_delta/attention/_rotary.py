"""Rotary positions: pairs of channels turn by angles that grow with a token's position."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from gated_delta._types import accumulation_dtype


def rotate(
    x: Float[Array, "*lead time heads dim"], position: Int[Array, "*lead time"], channels: int, base: float
) -> Float[Array, "*lead time heads dim"]:
    """The first `channels` of every head turned, in the dtype of `x`; channel `i` makes a pair with the one half of
    them further on. Angles are float32 or wider, and rates float32, as in the code of published models.
    """
    if channels == 0:
        return x
    dtype = accumulation_dtype(x.dtype)
    rates = 1 / np.float32(base) ** (np.arange(0, channels, 2, dtype=np.float32) / channels)
    rates = jnp.asarray(rates, dtype).reshape((1,) * (x.ndim - 1) + (-1,))
    angle = position.astype(dtype)[..., None, None] * rates
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second, rest = jnp.split(x, [channels // 2, channels], axis=-1)
    first, second = first.astype(dtype), second.astype(dtype)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(a.astype(x.dtype) for a in turned), rest], axis=-1)
