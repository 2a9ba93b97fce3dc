"""The short causal convolution before the delta rule, and the last inputs it carries from call to call."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._activations import causal_taps, raise_dtype
from ._rows import Documents


class ShortConv(eqx.Module):
    """Depthwise causal convolution over time: `out[t] = sum_m weight[m] * x[t - (width - 1) + m] + bias`.

    The last tap is on the token itself. What came before the first token is the window: the last `width - 1` inputs of
    the call before, oldest first, or zeros. A new module's taps are uniform within `width ** -0.5`.
    """

    weight: Float[Array, "width channels"]
    bias: Float[Array, " channels"] | None

    def __init__(self, channels: int, width: int = 4, *, bias: bool = False, key: PRNGKeyArray):
        weight_key, bias_key = jax.random.split(key)
        limit = width**-0.5
        self.weight = jax.random.uniform(weight_key, (width, channels), minval=-limit, maxval=limit)
        self.bias = jax.random.uniform(bias_key, (channels,), minval=-limit, maxval=limit) if bias else None

    @property
    def taps_before(self) -> int:
        """Inputs before its own that each token sees, and that a window holds."""
        return self.weight.shape[0] - 1

    def __call__(
        self,
        x: Float[Array, "*batch time channels"],
        window: Float[Array, "*windows taps channels"] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Array, "*batch time channels"], Float[Array, "*windows taps channels"]]:
        """Outputs in the accumulation dtype of `x`, and the new window in the dtype of `window`, or of `x` if `None`.

        With `documents` no token sees another document, and padding leaves no trace in the window. `windows` is the
        batch, or the number of documents where they have states of their own.
        """
        dtype = x.dtype if window is None else window.dtype
        if window is None:
            offsets = None if documents is None else documents.offsets
            window = self._empty_window(x, x.shape[:-2] if offsets is None else (offsets.shape[0] - 1,))
        if x.shape[-2] == 0:
            return raise_dtype(x)[0], window
        window = window.astype(x.dtype)
        if documents is None:
            out, window = _convolve_rows(x, window, self.weight)
        elif documents.offsets is None:
            out, window = _convolve_documents(x, window, self.weight, documents)
        else:
            out, window = _convolve_offsets(x, window, self.weight, documents)
        if self.bias is not None:
            out, bias = raise_dtype(out, self.bias)
            out = out + bias.reshape((1,) * (out.ndim - 1) + bias.shape)
        return out, window.astype(dtype)

    def next_window(
        self, x: Float[Array, "*batch time channels"], window: Float[Array, "*batch taps channels"] | None = None
    ) -> Float[Array, "*batch taps channels"]:
        """The new window of a call without documents."""
        window = self._empty_window(x, x.shape[:-2]) if window is None else window
        return _last_inputs(x, window.astype(x.dtype)).astype(window.dtype)

    def _empty_window(self, x, lead):
        return jnp.zeros((*lead, self.taps_before, x.shape[-1]), x.dtype)


def _last_inputs(x: Float[Array, "*batch time channels"], window: Float[Array, "*batch taps channels"]):
    """As many as the window before `x` has, of both."""
    taps = window.shape[-2]
    recent = jnp.concatenate([window, x[..., max(x.shape[-2] - taps, 0) :, :]], axis=-2)
    return recent[..., recent.shape[-2] - taps :, :]


def _convolve_rows(x, window, weight):
    """Every row is one document, and its window stands before it."""
    return causal_taps(jnp.concatenate([window, x], axis=-2), weight), _last_inputs(x, window)


def _convolve_documents(x, window, weight, documents):
    """A row's window belongs to its first document; the new one holds inputs of its last document only."""
    taps = window.shape[1]
    padded = jnp.concatenate([window, x], axis=1)
    reach = documents.position + jnp.where(documents.is_first, taps, 0)
    # The last real token of a row is the input number `taps + count - 1` of `padded`.
    last = jnp.maximum(documents.count - 1, 0)
    seen = jnp.take_along_axis(reach, last[:, None], axis=1) + 1
    seen = jnp.where(documents.count[:, None] > 0, seen, taps)
    source = documents.count[:, None] + jnp.arange(taps, dtype=jnp.int32)[None]
    kept = jnp.arange(taps, 0, -1, dtype=jnp.int32)[None] <= seen
    new = jax.vmap(lambda row, index: row[index])(padded, source)
    return causal_taps(padded, weight, reach), jnp.where(kept[..., None], new, jnp.zeros_like(new))


def _convolve_offsets(x, windows, weight, documents):
    """One row of documents which all have windows of their own: these reach into the first tokens of each."""
    taps, time = windows.shape[1], x.shape[1]
    offsets = documents.offsets
    padded = jnp.pad(x, ((0, 0), (taps, 0), (0, 0)))
    out = causal_taps(padded, weight, documents.position)
    index = jnp.arange(taps, dtype=jnp.int32)[None]
    begins, lengths = offsets[:-1, None], jnp.diff(offsets)[:, None]
    from_windows = causal_taps(jnp.concatenate([windows, jnp.zeros_like(windows)], axis=1), weight)
    target = jnp.where(index < lengths, begins + index, time)
    out = out.at[0, target].add(from_windows, mode="drop")
    # Input `taps + length` counted from the end of (old window, document): from the document where that is long enough.
    source = lengths + index - taps
    old = jnp.take_along_axis(windows, jnp.clip(lengths + index, 0, max(taps - 1, 0))[..., None], axis=1)
    new = x[0].at[jnp.clip(begins + source, 0, time - 1)].get()
    return out, jnp.where((source >= 0)[..., None], new, old)
