"""Pure functions of the layers, to be shared with fused kernels: gates, norms and the taps of a short convolution.

Every function computes in the accumulation dtype of its inputs: float32, or float64 if any input is float64. Shapes are
broadcast by hand, so they also run where JAX forbids implicit rank promotion.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._types import accumulation_dtype, operand_dtype

Activation: TypeAlias = Literal["silu", "sigmoid"]
NormNumerics: TypeAlias = Literal["float32", "qwen"]


def raise_dtype(*arrays: Any) -> tuple[Any, ...]:
    """All arrays in one dtype, float32 or wider; `None` stays `None`."""
    dtype = accumulation_dtype(operand_dtype(*(x.dtype for x in arrays if x is not None)))
    return tuple(None if x is None else x.astype(dtype) for x in arrays)


def _behind(x, ndim: int):
    """`x` with axes of size 1 in front, up to `ndim` of them in all."""
    return x.reshape((1,) * (ndim - x.ndim) + x.shape)


# ---- gates -----------------------------------------------------------------------------------------------------------


HUGE = 1e30
"""Beyond it, either way, a raw value changes no gate: it stands for infinity where `inf * 0` would be NaN."""


def decay_rate(A_log: Float[Array, "*axes"]) -> Float[Array, "*axes"]:
    """`exp(A_log)`, limited so that its product with an activation of 0 is 0 (not NaN), and with `HUGE` is huge.

    Below `exp(-60)` no activation can show what the rate is.
    """
    low, high = -60.0, 700.0 if A_log.dtype == jnp.float64 else 88.0
    above = jnp.where(A_log > high, jnp.full_like(A_log, high), A_log)
    return jnp.exp(jnp.where(A_log < low, jnp.full_like(A_log, low), above))


def activate_decay(
    raw: Float[Array, "..."],
    A_log: Float[Array, "..."] | None,
    dt_bias: Float[Array, "..."] | None,
    bound: float | None,
) -> Float[Array, "..."]:
    """The log decay in nats per token, element by element; arrays of one rank that broadcast.

    `-exp(A_log) * softplus(raw + dt_bias)` without a bound, else `bound * sigmoid(exp(A_log) * (raw + dt_bias))`, which
    is never below it. `None` is a rate `exp(A_log)` of 1, a bias of 0.

    Raw values from `-inf` (no decay: exactly 0) to `inf` have finite gradients: where a gate is saturated its slope is
    0, and stays 0 times the largest rate.
    """
    y, rate = _biased_and_rate(raw, A_log, dt_bias)
    if bound is None:
        return -rate * (jnp.maximum(y, 0) + jnp.log1p(jnp.exp(-jnp.abs(y))))  # 40 % fewer operations than jax's
    y = jnp.where(y < -HUGE, jnp.full_like(y, -HUGE), y)
    return bound * jax.nn.sigmoid(rate * y)


def least_decay(
    raw: Float[Array, "..."], A_log: Float[Array, "..."] | None, dt_bias: Float[Array, "..."] | None
) -> Float[Array, "..."]:
    """A cheap lower bound of `activate_decay` without a bound, by no more than a factor of 1.32.

    `softplus(y)` is at most `exp(y)`, and at most `max(y, 0) + log(2)`.
    """
    y, rate = _biased_and_rate(raw, A_log, dt_bias)
    return -rate * jnp.minimum(jnp.exp(y), jnp.maximum(y, 0) + math.log(2))


def _biased_and_rate(raw, A_log, dt_bias):
    raw, A_log, dt_bias = raise_dtype(raw, A_log, dt_bias)
    y = raw if dt_bias is None else raw + dt_bias
    y = jnp.where(y > HUGE, jnp.full_like(y, HUGE), y)
    return y, 1.0 if A_log is None else decay_rate(A_log)


def decay_by_head(
    raw: Float[Array, "*batch heads groups"],
    A_log: Float[Array, "*#batch heads"] | None,
    dt_bias: Float[Array, "*#batch heads groups"] | None,
    bound: float | None = None,
) -> Float[Array, "*batch heads groups"]:
    """`activate_decay` with one rate per head and one bias per head and decay group."""
    A_log = None if A_log is None else _behind(A_log[..., None], raw.ndim)
    return activate_decay(raw, A_log, None if dt_bias is None else _behind(dt_bias, raw.ndim), bound)


def sigmoid_gate(raw: Float[Array, "..."], maximum: float = 1.0) -> Float[Array, "..."]:
    """`maximum * sigmoid(raw)`: an erase or write gate, or a beta."""
    (raw,) = raise_dtype(raw)
    gate = jax.nn.sigmoid(raw)
    return gate if maximum == 1 else maximum * gate


def inverse_softplus(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The `y` with `softplus(y) = x`, for `x > 0`."""
    return x + jnp.log(-jnp.expm1(-x))


# ---- norms -----------------------------------------------------------------------------------------------------------


def l2_normalize(x: Float[Array, "*axes dim"], eps: float = 1e-6) -> Float[Array, "*axes dim"]:
    """`x / sqrt(sum(x**2) + eps)` over the last axis, in the dtype of `x`. A zero vector stays zero.

    The sum is taken in float32 or wider. The slope at zero is `eps ** -0.5`.
    """
    (wide,) = raise_dtype(x)
    squares = jnp.sum(jnp.square(wide), axis=-1, keepdims=True)
    return (wide * jax.lax.rsqrt(squares + eps)).astype(x.dtype)


def gated_rms_norm(
    x: Float[Array, "*axes dim"],
    weight: Float[Array, " dim"],
    gate: Float[Array, "*axes dim"] | None,
    *,
    activation: Activation,
    eps: float,
    numerics: NormNumerics = "float32",
) -> Float[Array, "*axes dim"]:
    """RMSNorm over the last axis times `weight`, times the activated `gate` (1 if `None`), in the dtype of `x`.

    `numerics="float32"` rounds once, at the end. `"qwen"` rounds the normalised vector and its product with `weight` to
    the dtype of `x` before the gate, as the code that trained the Qwen checkpoints does. In float32 both are the same.
    """
    wide, weight, gate = raise_dtype(x, weight, gate)
    out = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    weight = _behind(weight, x.ndim)
    if numerics == "qwen":
        out = (out.astype(x.dtype) * weight.astype(x.dtype)).astype(wide.dtype)
    else:
        out = out * weight
    if gate is not None:
        out = out * (jax.nn.silu(gate) if activation == "silu" else jax.nn.sigmoid(gate))
    return out.astype(x.dtype)


# ---- short convolution -----------------------------------------------------------------------------------------------


def causal_taps(
    padded: Float[Array, "*batch padded_time channels"],
    weight: Float[Array, "width channels"],
    reach: Int[Array, "*batch time"] | None = None,
) -> Float[Array, "*batch time channels"]:
    """Depthwise convolution of `width - 1 + time` inputs, in the accumulation dtype. The last tap is the token's own.

    `reach` says how many inputs before its own each token may see; those beyond it count as 0, whatever they hold.
    """
    padded, weight = raise_dtype(padded, weight)
    width = weight.shape[0]
    time = padded.shape[-2] - (width - 1)

    def inputs(back):
        first = width - 1 - back
        x = padded[..., first : first + time, :]
        return x if reach is None or back == 0 else jnp.where((reach >= back)[..., None], x, jnp.zeros_like(x))

    return add_taps(inputs, [_behind(tap, padded.ndim) for tap in weight])


def add_taps(inputs: Callable[[int], Float[Array, "*axes"]], taps: Sequence[Any]) -> Float[Array, "*axes"]:
    """`inputs(back)`: what stood that many tokens before each. The last of `taps` is the token's own."""
    out = inputs(0) * taps[-1]
    for back in range(1, len(taps)):
        out = out + inputs(back) * taps[-1 - back]
    return out
