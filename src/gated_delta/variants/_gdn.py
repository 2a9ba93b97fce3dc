"""GDN: one decay and one beta per value head."""

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
    StepInitialisation,
    Variant,
    choose_rank,
    choose_rates,
    choose_sizes,
    no_type_check,
)

gdn = Variant(decay="head", decay_owner="value", erase="head", write="head", tied=True)


@no_type_check
def GDN(
    model: int,
    *,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    conv_width: int | None = 4,
    conv_bias: bool = False,
    doubled_beta: bool = False,
    decay_bound: Number | None = None,
    decay_rank: Rank = None,
    has_rate: bool = True,
    decay_rates: tuple[Number, Number] | None = None,
    step_init: StepInitialisation = "log_uniform",
    output_gate: Activation | None = "silu",
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
    r"""Gated DeltaNet: the delta rule with one decay $\alpha_t$ and one $\beta_t$ per value head.

    $$S_t = \alpha_t (I - \beta_t k_t k_t^\top) S_{t-1} + \beta_t k_t v_t^\top, \qquad
      \log \alpha_t = -e^{A}\,\mathrm{softplus}(a_t + b), \quad \beta_t = \sigma(\cdot)$$

    **Arguments:** those not named here are the fields of `MixerConfig`.

    - `key_dim`: 128, or `model` where that is smaller. `value_dim`: `key_dim`. `key_heads`: as many as make the keys as
        wide as the model. `value_heads`: `key_heads`; more of them share queries and keys in groups.
    - `doubled_beta`: beta in (0, 2), so that a transition may have negative eigenvalues (OLMo-Hybrid).
    - `decay_bound`: a bound in [-5, 0) selects the bounded decay, `bound * sigmoid(exp(A_log) * (raw + dt_bias))`.
    - `decay_rank`, `output_gate_rank`: a number, `"value_dim"`, or `None` for full rank.
    - `decay_rates`: `(0.01, 16)`, or `(1, 1)` with a bound.
    - `output_gate`: `"silu"`, `"sigmoid"` or `None`. Qwen's checkpoints: SiLU, `norm_eps=1e-6, norm_numerics="qwen"`.

    ??? cite "Reference"
        Yang, Kautz and Hatamizadeh, *Gated Delta Networks*, 2024, arXiv:2412.06464.
    """
    sizes = choose_sizes(model, key_heads, value_heads, key_dim, value_dim)
    config = MixerConfig(
        dataclasses.replace(gdn, erase_max=2.0 if doubled_beta else 1.0, log_decay_min=decay_bound),
        **sizes,
        conv_width=conv_width,
        conv_bias=conv_bias,
        decay_rank=choose_rank(decay_rank, sizes["value_dim"]),
        has_rate=has_rate,
        decay_rates=choose_rates(decay_rates, decay_bound, 0.01),
        step_init=step_init,
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
