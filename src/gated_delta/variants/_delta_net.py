"""DeltaNet: one beta per head and no decay, the rule that the family begins with."""

import dataclasses

from jaxtyping import PRNGKeyArray

from gated_delta._activations import Activation, NormNumerics
from gated_delta._backend import AbstractBackend
from gated_delta._layer import GatedDeltaMixer
from gated_delta._variant import (
    Initialisation,
    MixerConfig,
    Number,
    Rank,
    Variant,
    choose_rank,
    choose_sizes,
    no_type_check,
)

delta_net = Variant(decay="none", decay_owner="value", erase="head", write="head", tied=True)


@no_type_check
def DeltaNet(
    model: int,
    *,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    conv_width: int | None = 4,
    conv_bias: bool = False,
    doubled_beta: bool = False,
    output_gate: Activation | None = None,
    output_gate_rank: Rank = None,
    output_gate_bias: bool = False,
    norm_eps: Number = 1e-5,
    norm_numerics: NormNumerics = "float32",
    init: Initialisation = "uniform",
    inverse: str = "exact",
    precision: str | None = None,
    backend: AbstractBackend | None = None,
    key: PRNGKeyArray,
) -> GatedDeltaMixer:
    r"""DeltaNet: the delta rule with one $\beta_t$ per value head. It forgets only what it overwrites.

    $$S_t = (I - \beta_t k_t k_t^\top)\,S_{t-1} + \beta_t k_t v_t^\top, \qquad \beta_t = \sigma(\cdot)$$

    **Arguments:** those not named here are the fields of `MixerConfig`.

    - `key_dim`: 128, or `model` where that is smaller. `value_dim`: `key_dim`. `key_heads`: as many as make the keys as
        wide as the model. `value_heads`: `key_heads`; more of them share queries and keys in groups.
    - `doubled_beta`: beta in (0, 2), so that a transition may have negative eigenvalues.
    - `output_gate`: `None`, `"silu"` or `"sigmoid"`. `output_gate_rank`: a number, `"value_dim"`, or `None` for full
        rank.

    ??? cite "Reference"
        Yang et al., *Parallelizing Linear Transformers with the Delta Rule over Sequence Length*, 2024,
        arXiv:2406.06484; the rule: Schlag, Irie and Schmidhuber, 2021, arXiv:2102.11174.
    """
    sizes = choose_sizes(model, key_heads, value_heads, key_dim, value_dim)
    config = MixerConfig(
        dataclasses.replace(delta_net, erase_max=2.0 if doubled_beta else 1.0),
        **sizes,
        conv_width=conv_width,
        conv_bias=conv_bias,
        output_gate=output_gate,
        output_gate_rank=choose_rank(output_gate_rank, sizes["value_dim"]),
        output_gate_bias=output_gate_bias,
        norm_eps=norm_eps,
        norm_numerics=norm_numerics,
        init=init,
        inverse=inverse,
        precision=precision,
    )
    return GatedDeltaMixer(config, backend=backend, key=key)
