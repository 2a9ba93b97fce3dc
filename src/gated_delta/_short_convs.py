"""`ShortConvs`: the convolutions of queries, keys and values that the operator is given."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._activations import add_taps, raise_dtype
from ._raw_gates import past
from ._types import as_float_array


class ShortConvs(eqx.Module):
    r"""Causal convolutions of queries, keys and values over time, each channel by itself and followed by SiLU:

    $$x_t \leftarrow \mathrm{silu}\Big(\sum_{m=0}^{\mathrm{width} - 1} \mathrm{weight}_m\,
      x_{t - (\mathrm{width} - 1) + m}\Big).$$

    **Attributes:**

    - `q`, `k`: weights `[width, key_heads, key_dim]`; the last tap is on the token itself.
    - `v`: weights `[width, value_heads, value_dim]`.
    - `q_window`, `k_window`, `v_window`: `[batch, width - 1, heads, dim]`, the inputs before the first token, oldest
        first; `None` for zeros. The next call's are the last `width - 1` inputs of this one.
    """

    q: Float[Array, "*batch width key_heads key_dim"]
    k: Float[Array, "*batch width key_heads key_dim"]
    v: Float[Array, "*batch width heads value_dim"]
    q_window: Float[Array, "batch taps key_heads key_dim"] | None
    k_window: Float[Array, "batch taps key_heads key_dim"] | None
    v_window: Float[Array, "batch taps heads value_dim"] | None

    def __init__(self, q, k, v, *, q_window=None, k_window=None, v_window=None):
        given = {"q": q, "k": k, "v": v, "q_window": q_window, "k_window": k_window, "v_window": v_window}
        for name, x in given.items():
            setattr(self, name, None if x is None else as_float_array(f"convs.{name}", x))

    @property
    def weights(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v

    @property
    def windows(self) -> tuple[Any, Any, Any]:
        return self.q_window, self.k_window, self.v_window


def convolved(
    x: Float[Array, "batch time heads dim"], weight: Any, window: Any
) -> Float[Array, "batch time heads dim"]:
    """`x` behind its convolution and SiLU, in its own dtype. `weight` has an axis of rows."""
    time, width = x.shape[1], weight.shape[1]
    padded, weight = raise_dtype(jnp.concatenate([window_before(x, weight, window), x], axis=1), weight)
    taps = [weight[:, m : m + 1] for m in range(width)]
    return jax.nn.silu(add_taps(lambda back: padded[:, width - 1 - back :][:, :time], taps)).astype(x.dtype)


def convolved_past(x: Float[Array, "batch time heads dim"], weight: Any, window: Any) -> Any:
    """`convolved`, but an input that is not finite makes its own token NaN (the first, if it is in the window), and
    gives others nothing, in gradients neither."""
    window = window_before(x, weight, window)
    bad, bad_before = ~jnp.isfinite(x), ~jnp.isfinite(window)
    bad = bad.at[:, 0].set(bad[:, 0] | jnp.any(bad_before, axis=1))
    window = jnp.where(bad_before, jnp.zeros_like(window), window)
    return past(bad, lambda x, weight: convolved(x, weight, window), x, weight)


def window_before(x, weight, window):
    """The inputs before the first of `x`, in its dtype; zeros if `None`."""
    if window is not None:
        return window.astype(x.dtype)
    return jnp.zeros((x.shape[0], weight.shape[1] - 1, *x.shape[2:]), x.dtype)
