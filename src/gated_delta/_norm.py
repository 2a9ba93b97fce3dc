"""RMSNorm over the last axis, of heads and of whole vectors."""

import equinox as eqx
from jaxtyping import Array, Float

from ._activations import Activation, NormNumerics, gated_rms_norm
from ._types import accumulation_dtype, operand_dtype


class RMSNorm(eqx.Module):
    """`gated_rms_norm` over the last axis, with one weight for all vectors.

    `one_plus`: multiplies by `1 + weight`, as the layer norms of Qwen's models do.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    numerics: NormNumerics = eqx.field(static=True, default="float32")
    one_plus: bool = eqx.field(static=True, default=False)

    def __call__(
        self,
        x: Float[Array, "*axes dim"],
        gate: Float[Array, "*axes dim"] | None = None,
        activation: Activation = "silu",
    ) -> Float[Array, "*axes dim"]:
        weight = self.weight
        if self.one_plus:
            weight = 1 + weight.astype(accumulation_dtype(operand_dtype(weight.dtype, x.dtype)))
        return gated_rms_norm(x, weight, gate, activation=activation, eps=self.eps, numerics=self.numerics)
