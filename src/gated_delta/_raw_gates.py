"""`RawGates`: gates before their activations; and `Prologue`, what a backend that takes them has to do first."""

from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from ._activations import activate_decay, decay_by_head, l2_normalize, least_decay, sigmoid_gate
from ._gates import GateArray, Gates, as_gate, check_promises


class RawGates(eqx.Module):
    r"""Decay, erase and write of every token before their activations, and the parameters of the decay.

    $$\mathrm{log\_decay} = -\exp(\mathrm{A\_log})\,\mathrm{softplus}(\mathrm{raw\_decay} + \mathrm{dt\_bias})
      \quad\text{or}\quad
      \mathrm{bound} \cdot \sigma(\exp(\mathrm{A\_log})\,(\mathrm{raw\_decay} + \mathrm{dt\_bias})),$$

    $\mathrm{erase} = \mathrm{erase\_max} \cdot \sigma(\mathrm{raw\_erase})$ and $\mathrm{write} =
    \sigma(\mathrm{raw\_write})$. Infinite raw values are the ends of the gates' ranges.

    **Attributes:**

    - `raw_decay`, `raw_erase`, `raw_write`: in the shapes of `Gates`, and `None` means what it means there.
    - `A_log`: `[owners]`, logarithm of each head's rate; `None` for rates of 1.
    - `dt_bias`: `[owners, groups]`, as many groups as `raw_decay` has, or `[owners]` where that is one; `None` for 0.
    - `bound`: static, below 0: the smallest log decay of the bounded form; `None` for the form without a bound.
    - `is_tied`: `raw_erase` is that of the delta rule's beta, both erase and write. Made by `RawGates.tied`.
    - `erase_max`: static, the largest erase: 1, or 2 where beta is doubled.
    """

    raw_decay: GateArray
    raw_erase: GateArray
    raw_write: GateArray
    A_log: GateArray
    dt_bias: GateArray
    bound: float | None = eqx.field(static=True)
    is_tied: bool = eqx.field(static=True)
    erase_max: float = eqx.field(static=True)

    def __init__(
        self,
        raw_decay=None,
        raw_erase=None,
        raw_write=None,
        *,
        A_log=None,
        dt_bias=None,
        bound=None,
        erase_max=1.0,
        is_tied=False,
    ):
        if is_tied and (raw_erase is None or raw_write is not None):
            raise ValueError(
                "`RawGates(is_tied=True)` needs `raw_erase` (of the beta that both erases and writes) and no "
                "`raw_write`; `RawGates.tied(raw_beta, raw_decay)` builds it."
            )
        if raw_decay is None and not (A_log is None and dt_bias is None and bound is None):
            raise ValueError(
                "`RawGates` needs `raw_decay` where it has `A_log`, `dt_bias` or `bound`: they activate it."
            )
        check_promises("RawGates", erase_max, "bound", bound)
        self.raw_decay = as_gate("raw_decay", raw_decay)
        self.raw_erase = as_gate("raw_erase", raw_erase)
        self.raw_write = as_gate("raw_write", raw_write)
        self.A_log = as_gate("A_log", A_log)
        self.dt_bias = as_gate("dt_bias", dt_bias)
        self.bound = None if bound is None else float(bound)
        self.is_tied = is_tied
        self.erase_max = float(erase_max)

    @classmethod
    def tied(cls, raw_beta, raw_decay=None, *, A_log=None, dt_bias=None, bound=None, erase_max=1.0) -> "RawGates":
        """One `raw_beta`, `[batch, time, owners]` or `[batch, time, owners, 1]`, of both erase and write."""
        return cls(raw_decay, raw_beta, A_log=A_log, dt_bias=dt_bias, bound=bound, erase_max=erase_max, is_tied=True)

    def activated(self) -> Gates:
        """The final gates, float32 or wider. All arrays with a time axis."""

        def gate(raw, maximum):
            return None if raw is None else sigmoid_gate(raw, maximum)

        raw: Any = self.raw_decay
        bias: Any = self.dt_bias
        rate: Any = self.A_log
        log_decay = None
        if raw is not None:
            bias = bias[:, None] if bias is not None and bias.ndim == 1 else bias
            log_decay = decay_by_head(raw if raw.ndim == 4 else raw[..., None], rate, bias, self.bound)
        return Gates(
            log_decay,
            gate(self.raw_erase, self.erase_max),
            gate(self.raw_write, 1.0),
            erase_max=self.erase_max,
            log_decay_min=self.bound,
            is_tied=self.is_tied,
        )


class Prologue(NamedTuple):
    """What is left to do before the rule itself: static. All elementwise, but for the norm over the last axis.

    - `has_norm`: queries and keys get unit length.
    - `bound`, `erase_max`: of `RawGates`.
    """

    has_norm: bool
    bound: float | None
    erase_max: float

    def vector(self, x):
        """A query or key."""
        return l2_normalize(x) if self.has_norm else x

    def log_decay(self, raw, A_log, dt_bias):
        return activate_decay(raw, A_log, dt_bias, self.bound)

    def least_log_decay(self, raw, A_log, dt_bias):
        """No larger than `log_decay`, and cheaper where that is a matter of cost."""
        return least_decay(raw, A_log, dt_bias) if self.bound is None else self.log_decay(raw, A_log, dt_bias)

    def erase(self, raw):
        return sigmoid_gate(raw, self.erase_max)

    def write(self, raw):
        return sigmoid_gate(raw)


def past(bad, activate, x, *parameters):
    """`activate(x, *parameters)`, NaN where `bad`.

    A select on both sides: what is bad has no gradient, and gives none to the parameters.
    """
    out = activate(jnp.where(bad, jnp.zeros_like(x), x), *parameters)
    return jnp.where(bad, jnp.full_like(out, jnp.nan), out)
