"""Modules from features to final gates. Their arithmetic is float32 or wider, whatever dtype their parameters have."""

import abc

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ._activations import Activation, decay_by_head, inverse_softplus, sigmoid_gate
from ._linear import Linear, LowRank, make_linear
from ._types import accumulation_dtype
from ._variant import Number


class AbstractDecay(eqx.Module):
    """Features to `log_decay`, at most 0, per token, owning head and decay group.

    Parameters named `A_log` and `dt_bias` are
    kept in float32 by `cast_params` and out of weight decay by `weight_decay_mask`.
    """

    @property
    @abc.abstractmethod
    def log_decay_min(self) -> float | None:
        """The promise that goes with the result: its smallest value, or `None` (see `Gates`)."""

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads groups"]:
        """Log decay in nats per token, float32 or wider."""


class SoftplusDecay(AbstractDecay):
    """`log_decay = -exp(A_log) * softplus(project(x) + dt_bias)`: one rate per head, one bias per head and decay group.

    A new module forgets a factor `exp(-rate * step)` per token: `rate = exp(A_log)` is uniform in `rates`, and
    `step = softplus(dt_bias)` log-uniform in `[0.001, 0.1]`.
    """

    project: Linear | LowRank
    A_log: Float[Array, " heads"]
    dt_bias: Float[Array, "heads groups"]

    def __init__(
        self,
        model: int,
        heads: int,
        groups: int,
        *,
        rank: int | None = None,
        rates: tuple[Number, Number] = (1.0, 16.0),
        step_init: str = "log_uniform",
        init: str = "uniform",
        key: PRNGKeyArray,
    ):
        project_key, rate_key, step_key = jax.random.split(key, 3)
        self.project = make_linear(model, rank, heads * groups, bias=False, init=init, key=project_key)
        self.A_log = _draw_rates(rate_key, heads, rates)
        self.dt_bias = _draw_steps(step_key, (heads, groups), step_init)

    @property
    def log_decay_min(self) -> None:
        return None

    def raw(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads groups"]:
        """What is activated, in the accumulation dtype."""
        return _split_heads(self.project(x, accumulation_dtype(x.dtype)), self.dt_bias.shape[1])

    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads groups"]:
        return decay_by_head(self.raw(x), self.A_log, self.dt_bias)


class BoundedDecay(AbstractDecay):
    """`log_decay = bound * sigmoid(exp(A_log) * (project(x) + dt_bias))`; `A_log` may be absent (a rate of 1)."""

    project: Linear | LowRank
    A_log: Float[Array, " heads"] | None
    dt_bias: Float[Array, "heads groups"]
    bound: float = eqx.field(static=True)

    def __init__(
        self,
        model: int,
        heads: int,
        groups: int,
        *,
        bound: Number = -5.0,
        has_rate: bool = True,
        rank: int | None = None,
        rates: tuple[Number, Number] = (1.0, 1.0),
        step_init: str = "log_uniform",
        init: str = "uniform",
        key: PRNGKeyArray,
    ):
        project_key, rate_key, step_key = jax.random.split(key, 3)
        self.project = make_linear(model, rank, heads * groups, bias=False, init=init, key=project_key)
        self.A_log = _draw_rates(rate_key, heads, rates) if has_rate else None
        self.dt_bias = _draw_steps(step_key, (heads, groups), step_init)
        self.bound = float(bound)

    def __check_init__(self):
        if not -5 <= self.bound < 0:
            raise ValueError(f"`BoundedDecay(bound={self.bound})` must lie in [-5, 0).")

    @property
    def log_decay_min(self) -> float:
        return self.bound

    def raw(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads groups"]:
        """What is activated, in the accumulation dtype."""
        return _split_heads(self.project(x, accumulation_dtype(x.dtype)), self.dt_bias.shape[1])

    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads groups"]:
        return decay_by_head(self.raw(x), self.A_log, self.dt_bias, self.bound)


class SigmoidGate(eqx.Module):
    """`maximum * sigmoid(project(x))`: an erase gate, a write gate or a beta, per head or per channel."""

    project: Linear
    dim: int = eqx.field(static=True)
    maximum: float = eqx.field(static=True)

    def __init__(
        self, model: int, heads: int, dim: int = 1, *, maximum: float = 1.0, init: str = "uniform", key: PRNGKeyArray
    ):
        self.project = Linear(model, heads * dim, init=init, key=key)
        self.dim = dim
        self.maximum = maximum

    def raw(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads dim"]:
        """What is activated, in the accumulation dtype."""
        return _split_heads(self.project(x, accumulation_dtype(x.dtype)), self.dim)

    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads dim"]:
        return sigmoid_gate(self.raw(x), self.maximum)


class OutputGate(eqx.Module):
    """What `activation` is applied to before it multiplies the normalised output: raw values, per head and channel."""

    project: Linear | LowRank
    dim: int = eqx.field(static=True)
    activation: Activation = eqx.field(static=True)

    def __init__(
        self,
        model: int,
        heads: int,
        dim: int,
        *,
        activation: Activation,
        rank: int | None = None,
        bias: bool = False,
        init: str = "uniform",
        key: PRNGKeyArray,
    ):
        self.project = make_linear(model, rank, heads * dim, bias=bias, init=init, key=key)
        self.dim = dim
        self.activation = activation

    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch heads dim"]:
        return _split_heads(self.project(x), self.dim)


def _split_heads(x, dim):
    return x.reshape(*x.shape[:-1], x.shape[-1] // dim, dim)


def _draw_rates(key, heads, rates):
    return jnp.log(jax.random.uniform(key, (heads,), minval=rates[0], maxval=rates[1]))


def _draw_steps(key, shape, step_init):
    if step_init != "log_uniform":
        return {"ones": jnp.ones, "zeros": jnp.zeros}[step_init](shape)
    low, high = jnp.log(1e-3), jnp.log(0.1)
    return inverse_softplus(jnp.exp(jax.random.uniform(key, shape, minval=low, maxval=high)))
