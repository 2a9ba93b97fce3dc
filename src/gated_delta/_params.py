"""Which parameters decay and which stay in float32: for any Equinox model that contains our layers."""

from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ._gate_modules import AbstractDecay
from ._norm import RMSNorm
from ._types import a_type, accumulation_dtype

Model = TypeVar("Model")
_GATE_PARAMETERS = ("A_log", "dt_bias")
_NORMS = (RMSNorm, eqx.nn.RMSNorm, eqx.nn.LayerNorm, eqx.nn.GroupNorm)


def weight_decay_mask(model: PyTree) -> PyTree:
    """Which parameters weight decay applies to: a tree of booleans in the structure of `model`, for `optax`'s `mask`.

    True for weights with two axes or more: linear maps, embeddings, taps of convolutions. False for `A_log`, `dt_bias`,
    biases, and everything in a norm, also in layers that are stacked by `eqx.filter_vmap`; and for what is no float
    array. `model` may hold parameters, their gradients, or `jax.ShapeDtypeStruct`s.
    """

    def decays(path, leaf):
        name = getattr(path[-1], "name", None) if path else None
        if isinstance(leaf, _NORMS):
            return jax.tree.map(lambda _: False, leaf)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(leaf.dtype, jnp.floating):
            return False
        return name != "bias" and name not in _GATE_PARAMETERS and leaf.ndim >= 2

    return jax.tree_util.tree_map_with_path(decays, model, is_leaf=lambda x: isinstance(x, _NORMS))


def cast_params(model: Model, dtype: Any) -> Model:
    """`model` with its float parameters in `dtype`, except `A_log` and `dt_bias` of our decays, which get float32.

    (float64, if `dtype` is.) Rounded to bfloat16, `A_log` would move a rate by up to 0.8 %, and an optimiser's small
    steps would no longer change it. Other people's modules in `model` are cast as a whole.
    """
    try:
        dtype = jnp.dtype(dtype)
    except TypeError as error:
        came = repr(dtype) if isinstance(dtype, str) else a_type(dtype)
        raise TypeError(
            f"`cast_params` needs a floating-point dtype, such as `jnp.bfloat16` or 'bfloat16', but {came} came."
        ) from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"`cast_params` needs a floating-point dtype, but it is {dtype}.")

    def to(target):
        return lambda x: x.astype(target) if eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating) else x

    def cast(x):
        if not isinstance(x, AbstractDecay):
            return to(dtype)(x)
        keep = to(accumulation_dtype(dtype))
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (keep if getattr(path[-1], "name", None) in _GATE_PARAMETERS else to(dtype))(leaf), x
        )

    return jax.tree.map(cast, model, is_leaf=lambda x: isinstance(x, AbstractDecay))
