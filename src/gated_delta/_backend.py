"""What every backend receives (`Problem`) and what a backend is (`AbstractBackend`)."""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._activations import decay_by_head
from ._options import class_to_call
from ._packing import Packing
from ._raw_gates import Prologue, past
from ._short_convs import ShortConvs, convolved, convolved_past
from ._types import accumulation_dtype, spread_heads


class Problem(eqx.Module):
    """One call of the operator, validated and normalised: what a backend gets.

    `owners` are the heads that own a state: the key heads, each with the values of its whole group side by side
    (`width = group * value_dim`), or, where a gate is given per value head, the value heads (`width = value_dim`).
    Either way owner `g` reads key head `g // (owners / key_heads)`. Padding tokens hold zero vectors and zero gates,
    so they do nothing. Unless the backend `contains` what is not finite, all arrays are finite and log decays lie in
    `[log_decay_floor, 0]`.

    **Attributes:**

    - `q`, `k`, `v`: in the dtype of matrix operands, `operand`.
    - `log_decay`: in the accumulation dtype. `groups` is 1, the number of decay tiles, or key_dim.
    - `erase`, `write`: `None` for no erase and for a write of 1 (or, where `tied`, of `erase`). The last axis of
        `write` divides `width`: each entry serves an equal run of it.
    - `initial_state`: one per slot in the accumulation dtype; `None` for zeros.
    - `packing`: `None` where every row is one document.
    - `scale`: multiplies every output.
    - `group`: values of how many heads lie side by side in an owner's `width`.
    - `inverse`, `precision`, `erase_max`, `log_decay_min`: see `gated_delta` and `Gates`.
    - `convs`: `None`, but for a backend that `takes_raw`, in rows of one document each: queries, keys and values have
        yet to be convolved. Weights are given to every row, and those of values are laid like these.
    - `prologue`: `None`, but for a backend that `takes_raw`: then queries and keys have yet to be normalised, and
        `log_decay`, `erase` and `write` to be activated, in any float dtype; at padding they are `-inf`, gates of 0.
        `A_log` and `dt_bias` are parameters of the decay, given to every row of the batch.
    """

    q: Float[Array, "batch time key_heads key_dim"]
    k: Float[Array, "batch time key_heads key_dim"]
    v: Float[Array, "batch time owners width"]
    log_decay: Float[Array, "batch time owners groups"] | None
    erase: Float[Array, "batch time owners erase_dim"] | None
    write: Float[Array, "batch time owners write_dim"] | None
    initial_state: Float[Array, "batch slots owners key_dim width"] | None
    packing: Packing | None
    scale: float | Float[Array, ""]
    tied: bool = eqx.field(static=True)
    group: int = eqx.field(static=True)
    slots: int = eqx.field(static=True)
    inverse: str = eqx.field(static=True)
    precision: str | None = eqx.field(static=True)
    erase_max: float = eqx.field(static=True)
    log_decay_min: float | None = eqx.field(static=True)
    A_log: Float[Array, "batch owners"] | None = None
    dt_bias: Float[Array, "batch owners groups"] | None = None
    convs: ShortConvs | None = None
    prologue: Prologue | None = eqx.field(static=True, default=None)

    @property
    def operand(self) -> jnp.dtype:
        return self.k.dtype

    @property
    def accumulation(self) -> jnp.dtype:
        return accumulation_dtype(self.k.dtype)

    @property
    def state_shape(self) -> tuple[int, int, int, int, int]:
        batch, _, owners, width = self.v.shape
        return batch, self.slots, owners, self.k.shape[3], width

    def convolved(self, convolve: Callable = convolved) -> "Problem":
        """The same problem behind its convolutions. What is not finite is for the caller to find."""
        if self.convs is None:
            return self
        given = zip((self.q, self.k, self.v), self.convs.weights, self.convs.windows, strict=True)
        q, k, v = (convolve(*x) for x in given)
        return dataclasses.replace(self, q=q, k=k, v=v, convs=None)

    def activated(self) -> "Problem":
        """The same problem behind its prologue. A gate that is NaN and a vector that is not finite become NaN."""
        if self.convs is not None:
            return self.convolved(convolved_past).activated()
        prologue = self.prologue
        if prologue is None:
            return self

        def vector(x):
            if not prologue.has_norm:
                return x
            return past(~jnp.all(jnp.isfinite(x), axis=-1, keepdims=True), prologue.vector, x)

        by_head = functools.partial(decay_by_head, bound=prologue.bound)

        def gate(activate, raw, *parameters):
            parameters = (None if x is None else x[:, None] for x in parameters)  # for every token
            return None if raw is None else past(jnp.isnan(raw), activate, raw, *parameters)

        return dataclasses.replace(
            self,
            q=vector(self.q),
            k=vector(self.k),
            log_decay=gate(by_head, self.log_decay, self.A_log, self.dt_bias),
            erase=gate(prologue.erase, self.erase),
            write=gate(prologue.write, self.write),
            A_log=None,
            dt_bias=None,
            prologue=None,
        )


Result = tuple[Float[Array, "batch time owners width"], Float[Array, "batch slots owners key_dim width"]]


class AbstractBackend(eqx.Module):
    """A way to run the operator. What it changes is speed and memory, never the numbers beyond rounding.

    - `contains`: whether the backend itself limits log decays (`limit_log_decay`) and keeps a token that is not finite
        to its own document and heads. Else it is given clean problems, and what is spoiled is marked afterwards.
    - `takes_raw`: whether it takes problems with a `prologue` and `convs`. Else these are done for it. Goes with
        `contains`.
    """

    contains: ClassVar[bool] = False
    takes_raw: ClassVar[bool] = False

    @abc.abstractmethod
    def __call__(self, problem: Problem) -> Result:
        """Outputs and final states of `problem`, both in its accumulation dtype."""

    @abc.abstractmethod
    def why_not(self, problem: Problem) -> str | None:
        """Why this backend cannot run `problem` (whose arrays may be shapes only), or `None` if it can."""


StepResult = tuple[Float[Array, "batch value_heads value_dim"], Float[Array, "states value_heads key_dim value_dim"]]


class AbstractStepper(AbstractBackend):
    """A backend that `gated_delta_step` can name too: it runs one token of every row, from and to where its state lies.

    It keeps what is not finite to its own row and heads, limits log decays itself, and takes raw problems if it
    `takes_raw`.
    """

    @abc.abstractmethod
    def step(self, problem: Problem, state: Any, slots: Any, fresh: Any) -> StepResult:
        """Outputs in the accumulation dtype, or rounded to that of the operands, and the new states, in the dtype and
        shape of `state`.

        - `problem`: of one token, without packing and without an initial state.
        - `state`: `[states, value_heads, key_dim, value_dim]`.
        - `slots`: which of them belongs to each row; what is no slot is a padding row: its output is 0, and it touches
            nothing. `None`: there is one state for each row.
        - `fresh`: rows that begin with zeros, whatever their state holds; `None`: no row does.
        """

    @abc.abstractmethod
    def why_not_step(self, problem: Problem, state: Any) -> str | None:
        """Why this backend cannot run that (`state` may be a shape only), or `None` if it can."""


def check_named(named: Any):
    """A `backend` argument is a backend or `None`.

    **Raises:** `TypeError` if it is not.
    """
    if named is not None and not isinstance(named, AbstractBackend):
        raise TypeError(
            "`backend` must be a backend such as `gated_delta.Chunked()`, or None, but "
            f"{class_to_call(named, AbstractBackend)}."
        )


def entry_state(problem: Problem) -> Float[Array, "batch owners key_dim width"]:
    """The state each row begins with: its only initial state, or zeros where every document brings its own.

    Zeros are made from the inputs, not from a shape: so they carry the inputs' sharding and manual mesh axes, as the
    carry of a loop must.
    """
    if problem.initial_state is not None and not has_own_states(problem):
        return problem.initial_state[:, 0]
    owners = problem.v.shape[2]
    keys = (0 * problem.k[:, 0]).astype(problem.accumulation)
    values = (0 * problem.v[:, 0]).astype(problem.accumulation)
    return spread_heads(keys, owners, axis=1)[..., :, None] * values[..., None, :]


def has_own_states(problem: Problem) -> bool:
    """Whether every document has a state of its own to begin with and to leave."""
    return problem.packing is not None and problem.packing.slot is not None
