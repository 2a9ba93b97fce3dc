"""SLA: decay tiles and one beta per key head, shared by a group of value heads; our reading of an abstract."""

import dataclasses

from jaxtyping import PRNGKeyArray

from gated_delta._activations import Activation, NormNumerics
from gated_delta._backend import AbstractBackend
from gated_delta._layer import GatedDeltaMixer
from gated_delta._types import EraseGranularity, WriteGranularity
from gated_delta._variant import (
    Initialisation,
    MixerConfig,
    Number,
    Rank,
    StepInitialisation,
    Variant,
    choose_group_sizes,
    choose_rank,
    choose_rates,
    no_type_check,
)

sla = Variant(decay="tile", decay_tiles=4, decay_owner="key", erase="head", write="head", tied=True)


@no_type_check
def SystolicLinearAttention(
    model: int,
    *,
    group: int = 4,
    key_heads: int | None = None,
    key_dim: int | None = None,
    value_dim: int | None = None,
    decay_tiles: int = 4,
    erase: EraseGranularity = "head",
    write: WriteGranularity | None = None,
    conv_width: int | None = 4,
    conv_bias: bool = False,
    doubled_beta: bool = False,
    decay_bound: Number | None = None,
    decay_rank: Rank = None,
    has_rate: bool = True,
    decay_rates: tuple[Number, Number] | None = None,
    step_init: StepInitialisation = "log_uniform",
    output_gate: Activation | None = "sigmoid",
    output_gate_rank: Rank = "value_dim",
    output_gate_bias: bool = True,
    norm_eps: Number = 1e-5,
    norm_numerics: NormNumerics = "float32",
    init: Initialisation = "uniform",
    inverse: str = "auto",
    precision: str | None = None,
    backend: AbstractBackend | None = None,
    key: PRNGKeyArray,
) -> GatedDeltaMixer:
    r"""Systolic Linear Attention: wide keys whose channels decay in tiles, and a group of value heads per key head.

    $$S_t = (I - \beta_t k_t k_t^\top)\,\mathrm{Diag}(\alpha_t)\,S_{t-1} + \beta_t k_t v_t^\top, \qquad
      \alpha_t \text{ equal within a tile of key channels}$$

    Only the method's abstract is known to us. It names keys of 256, grouped value heads, four decay tiles of 64, a
    chunk solve of matrix products that is approximate by default, and a member SLA-R4; the rest is our decision.

    **Arguments:** those not named here are the fields of `MixerConfig`.

    - `group`: value heads per key head, which share queries, keys, decay and beta: 4 is SLA-R4.
    - `key_dim`: 256, or what a smaller `model` leaves. `value_dim`: 128, or `model`. `key_heads`: so that a state holds
        128 * model numbers, whatever the group, as far as whole groups allow.
    - `decay_tiles`: any divisor of `key_dim`.
    - `erase`: `"head"` or `"channel"`. `write`: `None` is the beta that also erases, or, beside a channel-wise erase,
        one gate per value head, `"head"`; `"channel"` is one per value channel.
    - `doubled_beta`: the erase in (0, 2) (a tied beta too); the chunk solve is then exact.
    - `decay_bound`: a bound in [-5, 0) selects the bounded decay, `bound * sigmoid(exp(A_log) * (raw + dt_bias))`.
    - `decay_rank`, `output_gate_rank`: a number, `"value_dim"`, or `None` for full rank.
    - `decay_rates`: `(1, 16)`, or `(1, 1)` with a bound.
    - `inverse`: `"auto"` is `"approx"` for bfloat16 `x` and `"exact"` otherwise.

    ??? cite "Reference"
        *Systolic Linear Attention*, arXiv:2611.06828, abstract.
    """
    write = write if write is not None or erase == "head" else "head"
    variant = dataclasses.replace(
        sla,
        decay_tiles=decay_tiles,
        erase=erase,
        write=write or "head",
        tied=write is None,
        erase_max=2.0 if doubled_beta else 1.0,
        log_decay_min=decay_bound,
    )
    sizes = choose_group_sizes(model, group, decay_tiles, key_heads, key_dim, value_dim)
    config = MixerConfig(
        variant,
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


SLA = SystolicLinearAttention
"""`SystolicLinearAttention` by a shorter name."""
