"""What each checkpoint family calls the parameters of a layer, and what its config calls the sizes: data.

A family is one record. `tensors` maps the name of a stored tensor to the paths of our parameters that lie in it, row
after row; several names may hold one parameter, where files spell it in several ways, the published one first. Shapes
are nowhere here: they follow from our parameters' by `_layout`. `settings` maps the fields of `MixerConfig` (and
`doubled_beta`, `decay_bound`) to a constant or to a function of the config.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from gated_delta._variant import Number, Variant
from gated_delta.variants import gdn, gdn2, kda

from ._config import ASK, Config, entry


@dataclasses.dataclass(frozen=True)
class Family:
    """One way to store a layer.

    **Attributes:**

    - `name`: in messages.
    - `model_types`: `model_type` of the configs.
    - `variant`: the rule.
    - `tensors`, `settings`: see the top of this file.
    - `grouped`: stored tensors whose rows go key head by key head, each with its share of every parameter.
    """

    name: str
    model_types: tuple[str, ...]
    variant: Variant
    tensors: Mapping[str, str]
    settings: Mapping[str, Any]
    grouped: tuple[str, ...] = ()

    def parts(self, name: str) -> tuple[str, ...]:
        """Paths of our parameters in a stored tensor, in the order of its rows."""
        return tuple(self.tensors[name].split())


def _under(prefix: str, tensors: Mapping[str, str]) -> dict[str, str]:
    """The same tensors, whose names may also carry `prefix`."""
    return {**tensors, **{prefix + name: paths for name, paths in tensors.items()}}


# ---- names -----------------------------------------------------------------------------------------------------------

_DECAY = {"A_log": "decay.A_log", "dt_bias": "decay.dt_bias"}
_ONE_CONV = {"conv1d.weight": "q_conv.weight k_conv.weight v_conv.weight"}
_CONVS = {
    **{f"{name}_conv1d.weight": f"{name}_conv.weight" for name in "qkv"},
    **{f"{name}_conv1d.bias": f"{name}_conv.bias" for name in "qkv"},
}
_QKV = {f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkv"}
_OUT = {"o_norm.weight": "out_norm.weight", "o_proj.weight": "o_proj.weight"}
_QWEN_OUT = {"norm.weight": "out_norm.weight", "out_proj.weight": "o_proj.weight"}

QWEN3_NEXT_TENSORS = {
    "in_proj_qkvz.weight": "q_proj.weight k_proj.weight v_proj.weight out_gate.project.weight",
    "in_proj_ba.weight": "erase.project.weight decay.project.weight",
    **_ONE_CONV,
    **_DECAY,
    **_QWEN_OUT,
}
QWEN3_5_TENSORS = {
    "in_proj_qkv.weight": "q_proj.weight k_proj.weight v_proj.weight",
    "in_proj_z.weight": "out_gate.project.weight",
    "in_proj_b.weight": "erase.project.weight",
    "in_proj_a.weight": "decay.project.weight",
    **_ONE_CONV,
    **_DECAY,
    **_QWEN_OUT,
}
LARA_MINI_TENSORS = {
    "in_proj.weight": " ".join(list(QWEN3_5_TENSORS.values())[:4]),  # rows q, k, v, z, b, a
    **_ONE_CONV,
    **_DECAY,
    "out_norm.weight": "out_norm.weight",
    "out_proj.weight": "o_proj.weight",
}
GDN_TENSORS = {
    **_QKV,
    "g_proj.weight": "out_gate.project.weight",
    "a_proj.weight": "decay.project.weight",
    "b_proj.weight": "erase.project.weight",
    **_CONVS,
    **_ONE_CONV,
    **_DECAY,
    **_OUT,
}
KIMI_TENSORS = {
    **_QKV,
    **_CONVS,
    **_ONE_CONV,
    **_under(
        "forget_gate.",
        {
            "f_a_proj.weight": "decay.project.down.weight",
            "f_b_proj.weight": "decay.project.up.weight",
            **_DECAY,
        },
    ),
    "g_a_proj.weight": "out_gate.project.down.weight",
    "g_b_proj.weight": "out_gate.project.up.weight",
    "b_proj.weight": "erase.project.weight",
    **_OUT,
}
BAILING_TENSORS = {
    **_QKV,
    **_CONVS,
    **_ONE_CONV,
    **_under("forget_gate.", {"f_proj.weight": "decay.project.weight", **_DECAY}),
    "g_proj.weight": "out_gate.project.weight",
    "b_proj.weight": "erase.project.weight",
    "o_norm.weight": "out_norm.weight",
    "dense.weight": "o_proj.weight",
    "o_proj.weight": "o_proj.weight",
}
FLA_KDA_TENSORS = {
    **_QKV,
    **_CONVS,
    "f_proj.0.weight": "decay.project.down.weight",
    "f_proj.1.weight": "decay.project.up.weight",
    "b_proj.weight": "erase.project.weight",
    **_DECAY,
    "g_proj.0.weight": "out_gate.project.down.weight",
    "g_proj.1.weight": "out_gate.project.up.weight",
    "g_proj.1.bias": "out_gate.project.up.bias",
    **_OUT,
}
GDN2_TENSORS = {**FLA_KDA_TENSORS, "w_proj.weight": "write.project.weight"}

# ---- configs ---------------------------------------------------------------------------------------------------------

_ACTIVATION = {"qkv_activation": entry("hidden_act", default="silu")}
_LINEAR_SIZES = {
    **_ACTIVATION,
    "model": entry("hidden_size"),
    "key_heads": entry("linear_num_key_heads"),
    "value_heads": entry("linear_num_value_heads"),
    "key_dim": entry("linear_key_head_dim"),
    "value_dim": entry("linear_value_head_dim"),
    "conv_width": entry("linear_conv_kernel_dim", default=4),
}
_QWEN = {
    **_LINEAR_SIZES,
    "output_gate": "silu",
    "norm_eps": entry("rms_norm_eps", default=1e-6),
    "norm_numerics": "qwen",
    "step_init": "ones",
    "init": "normal",
}
_KIMI_HEADS = entry("linear_attn_config.num_heads", "linear_num_heads")
_KIMI_DIM = entry("linear_attn_config.head_dim", "linear_head_dim")
_KIMI = {
    **_ACTIVATION,
    "model": entry("hidden_size"),
    "key_heads": _KIMI_HEADS,
    "value_heads": _KIMI_HEADS,
    "key_dim": _KIMI_DIM,
    "value_dim": _KIMI_DIM,
    "conv_width": entry("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim", default=4),
    "decay_rank": _KIMI_DIM,
    "output_gate": "sigmoid",
    "output_gate_rank": _KIMI_DIM,
    "norm_eps": entry("rms_norm_eps", default=1e-5),
}


_BAILING_DIM = entry("linear_head_dim", "head_dim")  # transformers saves the rotary size as head_dim


def _glm_bound(config: Config) -> Number | None:
    bound = config("linear_attn_config.gate_lower_bound", "linear_lower_bound", default=-5.0)
    safe = config("linear_attn_config.safe_gate", default="linear_attn_config" in config.entries)
    return -5.0 if bound is None and safe else bound


def _fla_sizes(expand_v: Number) -> dict[str, Any]:
    def value_dim(config):
        return round(config("head_dim") * config("expand_v", default=expand_v))

    return {
        "model": entry("hidden_size"),
        "key_heads": entry("num_heads"),
        "value_heads": lambda config: config("num_v_heads", default=None) or config("num_heads"),
        "key_dim": entry("head_dim"),
        "value_dim": value_dim,
        "conv_width": lambda c: c("conv_size", default=4) if c("use_short_conv", default=True) else None,
        "conv_bias": entry("conv_bias", default=False),
        "doubled_beta": entry("allow_neg_eigval", default=False),
        "norm_eps": entry("norm_eps", default=1e-5),
    }


def _fla_gate(config: Config) -> str | None:
    gate = config("output_gate_activation", default="silu")
    return ("silu" if gate == "swish" else gate) if config("use_gate", default=True) else None


_FLA_KDA = {
    **_fla_sizes(1),
    "decay_rank": _fla_sizes(1)["value_dim"],
    "output_gate": "sigmoid",
    "output_gate_rank": _fla_sizes(1)["value_dim"],
    "output_gate_bias": True,
}

FAMILIES = (
    Family(
        "qwen3_next",
        ("qwen3_next",),
        gdn,
        QWEN3_NEXT_TENSORS,
        _QWEN,
        grouped=("in_proj_qkvz.weight", "in_proj_ba.weight"),
    ),
    Family(
        "qwen3_5",
        ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
        gdn,
        QWEN3_5_TENSORS,
        _QWEN,
    ),
    Family(
        "qwen4_exp",
        ("qwen4_exp", "qwen4_exp_text"),
        gdn,
        QWEN3_5_TENSORS,
        {**_QWEN, "output_gate": lambda c: c("output_gate_type", default=None) or c("hidden_act", default="silu")},
    ),
    Family("lara_mini", ("lara_mini",), gdn, LARA_MINI_TENSORS, _QWEN),
    Family(
        "olmo_hybrid",
        ("olmo_hybrid",),
        gdn,
        GDN_TENSORS,
        {
            **_LINEAR_SIZES,
            "doubled_beta": entry("linear_allow_neg_eigval", default=True),
            "output_gate": "silu",
            "norm_eps": 1e-5,
        },
    ),
    Family("kimi_linear", ("kimi_linear",), kda, KIMI_TENSORS, _KIMI),
    Family("glm5_next", ("glm5_next", "glm5_next_text"), kda, KIMI_TENSORS, {**_KIMI, "decay_bound": _glm_bound}),
    Family(
        "bailing_hybrid",
        ("bailing_hybrid",),
        kda,
        BAILING_TENSORS,
        {
            **_ACTIVATION,
            "model": entry("hidden_size"),
            "key_heads": entry("num_attention_heads"),
            "value_heads": entry("num_attention_heads"),
            "key_dim": _BAILING_DIM,
            "value_dim": _BAILING_DIM,
            "conv_width": entry("short_conv_kernel_size", default=4),
            "output_gate": "sigmoid",
            "norm_eps": entry("rms_norm_eps", default=1e-6),
            "decay_bound": lambda c: c("kda_lower_bound", default=-5.0) if c("kda_safe_gate", default=True) else None,
        },
    ),
    Family("fla's GatedDeltaNet", ("gated_deltanet",), gdn, GDN_TENSORS, {**_fla_sizes(2), "output_gate": _fla_gate}),
    Family(
        "fla's KimiDeltaAttention",
        ("kda",),
        kda,
        FLA_KDA_TENSORS,
        {**_FLA_KDA, "decay_bound": entry("lower_bound", default=None)},
    ),
    Family("GDN-2", ("gdn2", "gated_deltanet2"), gdn2, GDN2_TENSORS, {**_FLA_KDA, "output_gate": ASK}),
)
