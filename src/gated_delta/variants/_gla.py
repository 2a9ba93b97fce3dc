"""GLA: one decay per key channel and no erase. Linear attention with gates, where the delta rule is switched off."""

import dataclasses

from jaxtyping import PRNGKeyArray

from gated_delta._activations import Activation, NormNumerics
from gated_delta._backend import AbstractBackend
from gated_delta._layer import GatedDeltaMixer
from gated_delta._variant import (
    Initialisation,
    MixerConfig,
    Number,
    QKVActivation,
    Rank,
    StepInitialisation,
    Variant,
    choose_rank,
    choose_rates,
    choose_sizes,
    no_type_check,
)

gla = Variant(decay="channel", decay_owner="key", erase="none", write="one", tied=False, qk_norm="none")


@no_type_check
def GLA(
    model: int,
    *,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    conv_width: int | None = None,
    conv_bias: bool = False,
    qkv_activation: QKVActivation | None = None,
    decay_bound: Number | None = None,
    decay_rank: Rank = 16,
    has_rate: bool = True,
    decay_rates: tuple[Number, Number] | None = None,
    step_init: StepInitialisation = "zeros",
    output_gate: Activation | None = "silu",
    output_gate_rank: Rank = None,
    output_gate_bias: bool = False,
    norm_eps: Number = 1e-5,
    norm_numerics: NormNumerics = "float32",
    init: Initialisation = "uniform",
    precision: str | None = None,
    backend: AbstractBackend | None = None,
    key: PRNGKeyArray,
) -> GatedDeltaMixer:
    r"""Gated linear attention: a decay $\alpha_t$ per key channel and key head, and every token adds its value.

    $$S_t = \mathrm{Diag}(\alpha_t)\,S_{t-1} + k_t v_t^\top, \qquad
      \log \alpha_t = -e^{A}\,\mathrm{softplus}(a_t + b)$$

    The published $\log \alpha_t = \tfrac{1}{16} \log \sigma(z_t)$ is this decay with $e^{A} = 1/16$ and $a_t + b =
    -z_t$: the rate, which is fixed there, is a parameter here that begins at 1/16. Nothing is erased and nothing is
    solved: a chunk is a masked product. Queries and keys have the lengths that their projections give them.

    **Arguments:** those not named here are the fields of `MixerConfig`.

    - `key_dim`: 128, or `model` where that is smaller. `value_dim`: `2 * key_dim`. `key_heads`: as many as make the
        values as wide as the model. `value_heads`: `key_heads`; more of them share queries, keys and decay in groups.
    - `qkv_activation`: `"silu"` with a convolution and `"none"` without, as in the published code.
    - `decay_bound`: a bound in [-5, 0) selects the bounded decay, `bound * sigmoid(exp(A_log) * (raw + dt_bias))`.
    - `decay_rank`, `output_gate_rank`: a number, `"value_dim"`, or `None` for full rank.
    - `decay_rates`: `(1/16, 1/16)`, or `(1, 1)` with a bound.

    ??? cite "Reference"
        Yang et al., *Gated Linear Attention Transformers with Hardware-Efficient Training*, 2023, arXiv:2312.06635.
    """
    sizes = choose_sizes(model, key_heads, value_heads, key_dim, value_dim, expansion=2)
    config = MixerConfig(
        dataclasses.replace(gla, log_decay_min=decay_bound),
        **sizes,
        conv_width=conv_width,
        conv_bias=conv_bias,
        qkv_activation=qkv_activation or ("none" if conv_width is None else "silu"),
        decay_rank=choose_rank(decay_rank, sizes["value_dim"]),
        has_rate=has_rate,
        decay_rates=choose_rates(decay_rates, decay_bound, 1 / 16, 1 / 16),
        step_init=step_init,
        output_gate=output_gate,
        output_gate_rank=choose_rank(output_gate_rank, sizes["value_dim"]),
        output_gate_bias=output_gate_bias,
        norm_eps=norm_eps,
        norm_numerics=norm_numerics,
        init=init,
        precision=precision,
    )
    return GatedDeltaMixer(config, backend=backend, key=key)
