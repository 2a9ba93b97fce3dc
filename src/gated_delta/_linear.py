"""Linear maps over the last axis of arrays with any leading axes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray


class Linear(eqx.Module):
    """`x @ weight.T + bias` over the last axis. The parameters are cast to the dtype of `x`.

    `weight` is [outputs, inputs], as in `eqx.nn.Linear` and in PyTorch's files.
    """

    weight: Float[Array, "outputs inputs"]
    bias: Float[Array, " outputs"] | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = False, init: str = "uniform", key: PRNGKeyArray):
        weight_key, bias_key = jax.random.split(key)
        limit = inputs**-0.5
        shape = (outputs, inputs)
        if init == "normal":
            self.weight = 0.02 * jax.random.normal(weight_key, shape)
        elif init == "xavier":
            limit_xavier = 2**-2.5 * (6 / (inputs + outputs)) ** 0.5
            self.weight = jax.random.uniform(weight_key, shape, minval=-limit_xavier, maxval=limit_xavier)
        else:
            self.weight = jax.random.uniform(weight_key, shape, minval=-limit, maxval=limit)
        self.bias = None
        if bias and init == "uniform":
            self.bias = jax.random.uniform(bias_key, (outputs,), minval=-limit, maxval=limit)
        elif bias:
            self.bias = jnp.zeros((outputs,))

    def __call__(self, x: Float[Array, "*batch inputs"], out_dtype=None) -> Float[Array, "*batch outputs"]:
        """`out_dtype`: of the result, and of the sums it is made of; that of `x` if `None`."""
        dims = (((x.ndim - 1,), (1,)), ((), ()))
        out = jax.lax.dot_general(x, self.weight.astype(x.dtype), dims, preferred_element_type=out_dtype)
        if self.bias is not None:
            out = out + self.bias.astype(out.dtype).reshape((1,) * (out.ndim - 1) + self.bias.shape)
        return out


class LowRank(eqx.Module):
    """Two linear maps with nothing between them: `up(down(x))`. Only the second has a bias, if any has."""

    down: Linear
    up: Linear

    def __init__(
        self, inputs: int, rank: int, outputs: int, *, bias: bool = False, init: str = "uniform", key: PRNGKeyArray
    ):
        down_key, up_key = jax.random.split(key)
        self.down = Linear(inputs, rank, init=init, key=down_key)
        self.up = Linear(rank, outputs, bias=bias, init=init, key=up_key)

    def __call__(self, x: Float[Array, "*batch inputs"], out_dtype=None) -> Float[Array, "*batch outputs"]:
        return self.up(self.down(x), out_dtype)


def make_linear(inputs: int, rank: int | None, outputs: int, *, bias: bool, init: str, key: PRNGKeyArray):
    """A `Linear`, or a `LowRank` where `rank` is given."""
    if rank is None:
        return Linear(inputs, outputs, bias=bias, init=init, key=key)
    return LowRank(inputs, rank, outputs, bias=bias, init=init, key=key)


@eqx.filter_custom_jvp
def spoiled_rows(linear: Any, x: Float[Array, "*batch inputs"]) -> Float[Array, "*batch outputs"]:
    """`linear(x)`: a row of `x` that is not finite has outputs that are not, and no part in any derivative.

    So nobody has to say which rows these are: not the devices to each other either, over which inputs are split.
    """
    return linear(x)


@spoiled_rows.def_jvp
def _(primals, tangents):
    linear, x = primals
    out = spoiled_rows(linear, x)
    clean = jnp.where(jnp.isfinite(x), x, jnp.zeros_like(x))
    _, d_out = eqx.filter_jvp(lambda linear, x: linear(x), (linear, clean), tangents)
    fine = jnp.all(jnp.isfinite(out), axis=-1, keepdims=True)
    return out, jnp.where(fine, d_out, jnp.zeros_like(d_out))
