"""The short convolution of a shard: its window holds the last inputs of the shards before."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from gated_delta._conv import ShortConv
from gated_delta._rows import Documents

from ._exchange import Exchange, WindowMap, broadcast_last, prefix


class ShardConv(eqx.Module):
    """A `ShortConv` over sequences that are split over the mesh axis `axis_name`; called like one.

    The window that it is given is that of the whole sequence, the same on every device of the axis, and so is the one
    it returns. `continues`: whether the first document of each row is the last one of the shard before; `None` where
    there are no documents.
    """

    conv: ShortConv
    axis_name: str = eqx.field(static=True)
    exchange: Exchange | None = eqx.field(static=True)
    continues: Bool[Array, " batch"] | None

    @property
    def taps_before(self) -> int:
        return self.conv.taps_before

    def __call__(
        self,
        x: Float[Array, "*batch time channels"],
        window: Float[Array, "*batch taps channels"] | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Array, "*batch time channels"], Float[Array, "*batch taps channels"]]:
        dtype = x.dtype if window is None else window.dtype
        zeros = jnp.zeros((*x.shape[:-2], self.taps_before, x.shape[-1]), x.dtype)
        first = zeros if window is None else window.astype(x.dtype)
        _, tail = self.conv(x, zeros, documents)
        own = WindowMap(tail, self._shift(x, documents))
        entering = prefix(own, first, self.axis_name, self.exchange)
        if self.continues is not None:
            entering = jnp.where(self.continues[:, None, None], entering, 0)
        out, new = self.conv(x, entering, documents)
        return out, broadcast_last(new, self.axis_name).astype(dtype)

    def _shift(self, x, documents):
        """How many places of a window the shard fills, or `None` for all of them, whatever the documents."""
        taps, time = self.taps_before, x.shape[-2]
        if documents is None:
            return None if time >= taps else jnp.full(x.shape[:-2], time, jnp.int32)
        assert self.continues is not None
        count = jnp.minimum(documents.count, taps)
        last = jnp.maximum(documents.count - 1, 0)[:, None]
        is_first = jnp.take_along_axis(documents.is_first, last, axis=1)[:, 0]
        return jnp.where((is_first & self.continues) | (documents.count == 0), count, taps)
