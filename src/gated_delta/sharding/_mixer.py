"""Mixers inside a `jax.shard_map`: each device has some of the heads, some of the tokens, or both."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from gated_delta._explicit import varying
from gated_delta._layer import GatedDeltaMixer, MixerState, add_axis
from gated_delta._linear import Linear
from gated_delta._rows import hidden_ids
from gated_delta._types import as_float_array, no_type_check
from gated_delta.attention import SoftmaxAttention

from ._context import ContextParallel
from ._exchange import Exchange
from ._halo import ShardConv
from ._ids import across_shards


@no_type_check
def local_mixers(
    tree: PyTree, *, heads: str | None = None, context: str | None = None, exchange: Exchange | None = None
) -> Any:
    """`tree` with every `GatedDeltaMixer` as a `LocalMixer`: for the inside of a `jax.shard_map`.

    - `tree`: a mixer or a model, as `jax.shard_map` hands it to a device by the `mixer_specs`.
    - `heads`: the mesh axis that the heads are split over, `None` if they are not.
    - `context`: the mesh axis that sequences are split over, in contiguous runs of equal length; `None` if they are
        not.
    - `exchange`: as of `ContextParallel`.

    An axis that is split over devices by the compiler, not by hand, has no business here.

    **Raises:** `ValueError` outside of a `jax.shard_map` over these axes; where a device does not have its share of a
    mixer's heads; for a tree with `LocalMixer`s; and, with `context`, for one with a `SoftmaxAttention`, which would
    have to see the tokens of other devices.
    """
    sizes = {}
    for word, axis in (("heads", heads), ("context", context)):
        if axis is not None:
            try:
                sizes[word] = lax.axis_size(axis)
            except NameError as error:
                raise ValueError(
                    f"`local_mixers({word}={axis!r})` is for the inside of a `jax.shard_map` over a mesh axis of that "
                    "name, and there is none here."
                ) from error

    def is_layer(x):
        return isinstance(x, GatedDeltaMixer | LocalMixer | SoftmaxAttention)

    def local(x):
        if isinstance(x, LocalMixer):
            raise ValueError("`local_mixers` has been here already: there is a `LocalMixer` in the tree.")
        if isinstance(x, SoftmaxAttention) and context is not None:
            raise ValueError(
                f"`local_mixers(context={context!r})` would leave a `SoftmaxAttention` in the tree, and let it see the "
                "tokens of its own device only. Give it the mixers alone, and run the attention outside."
            )
        if not isinstance(x, GatedDeltaMixer):
            return x
        mixer = x if heads is None else _with_own_heads(x, heads, sizes["heads"])
        return LocalMixer(mixer, heads, context, exchange)

    return jax.tree.map(local, tree, is_leaf=is_layer)


class LocalMixer(eqx.Module):
    """A device's part of a `GatedDeltaMixer`: called like one, with this device's tokens. `local_mixers` makes it.

    **Attributes:**

    - `mixer`: with this device's heads.
    - `heads`, `context`: the mesh axes that heads and sequences are split over, or `None`.
    - `exchange`: as of `ContextParallel`.
    """

    mixer: GatedDeltaMixer
    heads: str | None = eqx.field(static=True)
    context: str | None = eqx.field(static=True)
    exchange: Exchange | None = eqx.field(static=True)

    @no_type_check
    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch time model"],
        state: MixerState | None = None,
        *,
        mask: Bool[Array | np.ndarray, "*batch time"] | None = None,
        segment_ids: Int[Array | np.ndarray, "*batch time"] | None = None,
        cu_seqlens: Int[Array | np.ndarray, " documents_and_1"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch time model"], MixerState]:
        """`GatedDeltaMixer.__call__` for this device's tokens.

        `state` and what is returned have this device's heads, and belong to whole sequences: they are the same on every
        device of the `context` axis. There, `cu_seqlens` is refused.
        """
        x = self._enter(x)
        if self.context is None:
            return self.mixer(x, state, mask=mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens, key=key)
        if cu_seqlens is not None:
            raise ValueError(
                "Documents of `cu_seqlens` have states of their own, which cannot be split over devices. Give "
                "`segment_ids`: each row has then one state."
            )
        continues = None
        if mask is not None or segment_ids is not None:
            self.mixer._check_x(x, (2, 3), "[time, model] or [batch, time, model]")
            single = x.ndim == 2
            if single:
                mask, segment_ids = add_axis("mask", mask), add_axis("segment_ids", segment_ids)
            rows = (1 if single else x.shape[0], x.shape[-2])
            ids, continues = across_shards(hidden_ids(mask, segment_ids, *rows), rows, self.context)
            segment_ids = ids[0] if single else ids
        return self._with_shards(continues)(x, state, segment_ids=segment_ids)

    @no_type_check
    def step(
        self, x: Float[Array | np.ndarray, "*batch model"], state: MixerState
    ) -> tuple[Float[Array, "*batch model"], MixerState]:
        """`GatedDeltaMixer.step`: the same on every device of the `context` axis."""
        return self.mixer.step(self._enter(x), state)

    @no_type_check
    def init_state(self, batch: int | None = None, *, dtype: Any = None) -> MixerState:
        """`GatedDeltaMixer.init_state` of this device's heads."""
        return self.mixer.init_state(batch, dtype=dtype)

    def _enter(self, x):
        """One sum over devices for the cotangent of `x`, rather than one for each projection."""
        x = as_float_array("x", x)
        return x if self.heads is None else varying(x, frozenset({self.heads}))

    def _with_shards(self, continues) -> GatedDeltaMixer:
        assert self.context is not None
        mixer, convs = self.mixer, lambda m: (m.q_conv, m.k_conv, m.v_conv)
        backend = ContextParallel(self.context, mixer.backend, self.exchange, continues)
        mixer = eqx.tree_at(lambda m: m.backend, mixer, backend, is_leaf=lambda x: x is None)
        if mixer.q_conv is None:
            return mixer
        shards = tuple(ShardConv(conv, self.context, self.exchange, continues) for conv in convs(mixer))
        return eqx.tree_at(convs, mixer, shards)


class SummedLinear(eqx.Module):
    """A `Linear` whose inputs are split over a mesh axis: called like one, it returns the whole sum on every device."""

    linear: Linear
    axis_name: str = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch inputs"], out_dtype=None) -> Float[Array, "*batch outputs"]:
        bias = self.linear.bias
        product = eqx.tree_at(lambda m: m.bias, self.linear, None, is_leaf=lambda x: x is None)
        out = lax.psum(product(x, out_dtype), self.axis_name)
        return out if bias is None else out + bias.astype(out.dtype).reshape((1,) * (out.ndim - 1) + bias.shape)


def _with_own_heads(mixer: GatedDeltaMixer, axis_name: str, size: int) -> GatedDeltaMixer:
    """`mixer`, whose arrays are those of this device, with a config that says so, and a sum behind its last product."""
    config = mixer.config
    channels, came = config.key_heads * config.key_dim, mixer.k_proj.weight.shape[-2]
    if config.key_heads % size or came * size != channels:
        raise ValueError(
            f"`local_mixers(heads={axis_name!r})` needs each of {size} devices to have its share of {config.key_heads} "
            f"key heads, which have {channels} channels together, but this device has {came}. Hand the mixer to "
            "`jax.shard_map` with `in_specs` of `mixer_specs`, over an axis whose size divides the key heads."
        )
    own = dataclasses.replace(config, key_heads=config.key_heads // size, value_heads=config.value_heads // size)
    parts = [field.name for field in dataclasses.fields(mixer) if field.name != "config"]
    shapes = eqx.filter_eval_shape(GatedDeltaMixer, own, backend=mixer.backend, key=jax.random.key(0))
    new = [SummedLinear(mixer.o_proj, axis_name) if name == "o_proj" else getattr(mixer, name) for name in parts]
    return eqx.tree_at(lambda m: [getattr(m, name) for name in parts], shapes, new, is_leaf=lambda x: x is None)
