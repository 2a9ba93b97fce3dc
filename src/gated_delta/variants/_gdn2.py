"""GDN-2: decay and erase per key channel and key head, write per value channel."""

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

gdn2 = Variant(decay="channel", decay_owner="key", erase="channel", write="channel", tied=False)


@no_type_check
def GDN2(
    model: int,
    *,
    key_heads: int | None = None,
    value_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    conv_width: int | None = 4,
    conv_bias: bool = False,
    doubled_erase: bool = False,
    decay_bound: Number | None = None,
    decay_rank: Rank = "value_dim",
    has_rate: bool = True,
    decay_rates: tuple[Number, Number] | None = None,
    step_init: StepInitialisation = "log_uniform",
    output_gate: Activation | None = "silu",
    output_gate_rank: Rank = "value_dim",
    output_gate_bias: bool = True,
    norm_eps: Number = 1e-5,
    norm_numerics: NormNumerics = "float32",
    init: Initialisation = "xavier",
    inverse: str = "exact",
    precision: str | None = None,
    backend: AbstractBackend | None = None,
    key: PRNGKeyArray,
) -> GatedDeltaMixer:
    r"""Gated DeltaNet-2: erase $b_t$ and write $w_t$ are gates of their own, one per channel, and so is the decay.

    $$S_t = (I - k_t (b_t \odot k_t)^\top)\,\mathrm{Diag}(\alpha_t)\,S_{t-1} + k_t (w_t \odot v_t)^\top, \qquad
      \log \alpha_t = -e^{A}\,\mathrm{softplus}(a_t + c)$$

    Decay and erase belong to the key head, write to the value head. Two public versions disagree: the authors' code has
    a SiLU output gate and Xavier initialisation of gain $2^{-2.5}$, which are the defaults here; fla's port has
    `output_gate="sigmoid", init="uniform"`. A file of weights does not say which it is.

    **Arguments:** those not named here are the fields of `MixerConfig`.

    - `key_dim`: 128, or `model` where that is smaller. `value_dim`: `key_dim`. `key_heads`: as many as make the keys as
        wide as the model. `value_heads`: `key_heads`; more of them share queries, keys, decay and erase in groups.
    - `doubled_erase`: the erase gate in (0, 2); never the write gate.
    - `decay_bound`: a bound in [-5, 0) selects the bounded decay, `bound * sigmoid(exp(A_log) * (raw + dt_bias))`.
    - `decay_rank`, `output_gate_rank`: `"value_dim"`, a number, or `None` for full rank.
    - `decay_rates`: `(1, 16)`, or `(1, 1)` with a bound.

    ??? cite "Reference"
        *Gated DeltaNet-2*, arXiv:2605.22791, section 3.
    """
    sizes = choose_sizes(model, key_heads, value_heads, key_dim, value_dim)
    config = MixerConfig(
        dataclasses.replace(gdn2, erase_max=2.0 if doubled_erase else 1.0, log_decay_min=decay_bound),
        **sizes,
        conv_width=conv_width,
        conv_bias=conv_bias,
        decay_rank=choose_rank(decay_rank, sizes["value_dim"]),
        has_rate=has_rate,
        decay_rates=choose_rates(decay_rates, decay_bound, 1.0),
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
