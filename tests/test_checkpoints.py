"""Weights of published checkpoints: every family's names and shapes, round trips, what is read, and what is refused.

The numbers that loaded layers compute are in test_goldens.py.
"""

import json
import re
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from gated_delta import KDA, Recurrent, cast_params
from gated_delta.checkpoints import export_mixer, load_mixer

pytestmark = pytest.mark.inference
GOLDENS = Path(__file__).parent / "goldens"
BF16 = jnp.bfloat16


# ---- the families, written down a second time ------------------------------------------------------------------------
# D model, H and G key and value heads, K and V their sizes, k taps: as in the published tables.


def qwen3_next(D, H, G, K, V, k):
    return {
        "in_proj_qkvz.weight": (2 * H * K + 2 * G * V, D),
        "in_proj_ba.weight": (2 * G, D),
        "conv1d.weight": (2 * H * K + G * V, 1, k),
        "A_log": (G,),
        "dt_bias": (G,),
        "norm.weight": (V,),
        "out_proj.weight": (D, G * V),
    }


def qwen3_5(D, H, G, K, V, k):
    return {
        "in_proj_qkv.weight": (2 * H * K + G * V, D),
        "in_proj_z.weight": (G * V, D),
        "in_proj_b.weight": (G, D),
        "in_proj_a.weight": (G, D),
        "conv1d.weight": (2 * H * K + G * V, 1, k),
        "A_log": (G,),
        "dt_bias": (G,),
        "norm.weight": (V,),
        "out_proj.weight": (D, G * V),
    }


def lara_mini(D, H, G, K, V, k):
    return {
        "in_proj.weight": (2 * H * K + 2 * G * V + 2 * G, D),
        "conv1d.weight": (2 * H * K + G * V, 1, k),
        "A_log": (G,),
        "dt_bias": (G,),
        "out_norm.weight": (V,),
        "out_proj.weight": (D, G * V),
    }


def projections(D, H, G, K, V, k):
    """What all layers with separate projections have."""
    keys, values = H * K, G * V
    linear = {"q_proj.weight": (keys, D), "k_proj.weight": (keys, D), "v_proj.weight": (values, D)}
    convs = {f"{name}_conv1d.weight": (size, 1, k) for name, size in zip("qkv", (keys, keys, values))}
    return {**linear, **convs, "o_norm.weight": (V,), "o_proj.weight": (D, values)}


def olmo_hybrid(D, H, G, K, V, k):
    gates = {"g_proj.weight": (G * V, D), "a_proj.weight": (G, D), "b_proj.weight": (G, D)}
    return {**projections(D, H, G, K, V, k), **gates, "A_log": (G,), "dt_bias": (G,)}


def fla_gdn_with_bias(D, H, G, K, V, k):
    biases = {f"{name}_conv1d.bias": (size,) for name, size in zip("qkv", (H * K, H * K, G * V))}
    return {**olmo_hybrid(D, H, G, K, V, k), **biases}


def fla_gdn_without_gate(D, H, G, K, V, k):
    shapes = olmo_hybrid(D, H, G, K, V, k)
    del shapes["g_proj.weight"]
    return shapes


def fla_gdn_without_convolution(D, H, G, K, V, k):
    return {name: shape for name, shape in olmo_hybrid(D, H, G, K, V, k).items() if "conv" not in name}


def kimi_linear(D, H, G, K, V, k):
    return {
        **projections(D, H, H, K, K, k),
        "f_a_proj.weight": (K, D),
        "f_b_proj.weight": (H * K, K),
        "g_a_proj.weight": (K, D),
        "g_b_proj.weight": (H * K, K),
        "b_proj.weight": (H, D),
        "A_log": (1, 1, H, 1),
        "dt_bias": (H * K,),
    }


def glm5_next(D, H, G, K, V, k):
    return {**kimi_linear(D, H, G, K, V, k), "A_log": (H,)}


def in_memory(D, H, G, K, V, k):
    """Kimi's and GLM's layers as transformers has them in memory."""
    shapes = glm5_next(D, H, G, K, V, k)
    shapes = {name: shape for name, shape in shapes.items() if "conv" not in name}
    moved = ("f_a_proj.weight", "f_b_proj.weight", "A_log", "dt_bias")
    shapes = {f"forget_gate.{name}" if name in moved else name: shape for name, shape in shapes.items()}
    return {**shapes, "conv1d.weight": (3 * H * K, 1, k)}


def bailing_hybrid(D, H, G, K, V, k):
    shapes = projections(D, H, H, K, K, k)
    shapes["dense.weight"] = shapes.pop("o_proj.weight")
    gates = {"f_proj.weight": (H * K, D), "g_proj.weight": (H * K, D), "b_proj.weight": (H, D)}
    return {**shapes, **gates, "A_log": (H,), "dt_bias": (H * K,)}


def fla_kda(D, H, G, K, V, k):
    return {
        **projections(D, H, G, K, V, k),
        "f_proj.0.weight": (V, D),
        "f_proj.1.weight": (G * K, V),
        "g_proj.0.weight": (V, D),
        "g_proj.1.weight": (G * V, V),
        "g_proj.1.bias": (G * V,),
        "b_proj.weight": (G, D),
        "A_log": (G,),
        "dt_bias": (G * K,),
    }


def gdn2(D, H, G, K, V, k):
    return {
        **fla_kda(D, H, G, K, V, k),
        "f_proj.1.weight": (H * K, V),
        "b_proj.weight": (H * K, D),
        "w_proj.weight": (G * V, D),
        "A_log": (H,),
        "dt_bias": (H * K,),
    }


def linear_config(model_type, D, H, G, K, V, k):
    return {
        "model_type": model_type,
        "hidden_size": D,
        "linear_num_key_heads": H,
        "linear_num_value_heads": G,
        "linear_key_head_dim": K,
        "linear_value_head_dim": V,
        "linear_conv_kernel_dim": k,
    }


def kimi_config(model_type, D, H, G, K, V, k):
    sizes = {"head_dim": K, "num_heads": H, "short_conv_kernel_size": k}
    return {"model_type": model_type, "hidden_size": D, "linear_attn_config": sizes}


def glm_config(model_type, D, H, G, K, V, k):
    sizes = {"linear_head_dim": K, "linear_num_heads": H, "linear_conv_kernel_dim": k}
    return {"model_type": "glm5_next", "text_config": {"model_type": model_type, "hidden_size": D, **sizes}}


def bailing_config(model_type, D, H, G, K, V, k):
    sizes = {"num_attention_heads": H, "head_dim": K, "short_conv_kernel_size": k}
    return {"model_type": model_type, "hidden_size": D, **sizes}


def fla_config(model_type, D, H, G, K, V, k):
    sizes = {"num_heads": H, "num_v_heads": G, "head_dim": K, "expand_v": V / K, "conv_size": k}
    return {"model_type": model_type, "hidden_size": D, **sizes}


SIZES = dict(D=12, H=2, G=6, K=4, V=10, k=3)
FAMILIES = {  # name: shapes, config, model_type, prefix of layer {}, more of the config, options of load_mixer
    "qwen3_next": (qwen3_next, linear_config, "qwen3_next", "model.layers.{}.linear_attn.", {}, {}),
    "qwen3_5": (qwen3_5, linear_config, "qwen3_5_text", "model.layers.{}.linear_attn.", {}, {}),
    "qwen3_5_moe": (qwen3_5, linear_config, "qwen3_5_moe", "model.language_model.layers.{}.linear_attn.", {}, {}),
    "qwen4_exp": (
        qwen3_5,
        linear_config,
        "qwen4_exp",
        "model.language_model.layers.{}.linear_attn.",
        {"output_gate_type": "sigmoid"},
        {},
    ),
    "lara_mini": (lara_mini, linear_config, "lara_mini", "model.layers.{}.linear_attn.", {}, {}),
    "olmo_hybrid": (olmo_hybrid, linear_config, "olmo_hybrid", "model.layers.{}.linear_attn.", {}, {}),
    "kimi_linear": (kimi_linear, kimi_config, "kimi_linear", "model.layers.{}.self_attn.", {}, {}),
    "kimi in memory": (in_memory, kimi_config, "kimi_linear", "model.layers.{}.self_attn.", {}, {}),
    "glm5_next": (glm5_next, glm_config, "glm5_next_text", "model.language_model.layers.{}.self_attn.", {}, {}),
    "bailing_hybrid": (bailing_hybrid, bailing_config, "bailing_hybrid", "model.layers.{}.attention.", {}, {}),
    "fla gdn": (olmo_hybrid, fla_config, "gated_deltanet", "model.layers.{}.attn.", {}, {}),
    "fla gdn, bias": (
        fla_gdn_with_bias,
        fla_config,
        "gated_deltanet",
        "model.layers.{}.attn.",
        {"conv_bias": True, "allow_neg_eigval": True},
        {},
    ),
    "fla gdn, no gate": (
        fla_gdn_without_gate,
        fla_config,
        "gated_deltanet",
        "model.layers.{}.attn.",
        {"use_gate": False},
        {},
    ),
    "fla gdn, no convolution": (
        fla_gdn_without_convolution,
        fla_config,
        "gated_deltanet",
        "model.layers.{}.attn.",
        {"use_short_conv": False},
        {},
    ),
    "fla kda": (fla_kda, fla_config, "kda", "model.layers.{}.attn.", {}, {}),
    "fla gdn2": (gdn2, fla_config, "gdn2", "model.layers.{}.attn.", {}, {"output_gate": "sigmoid"}),
    "nvidia gdn2": (gdn2, fla_config, "gdn2", "transformer.h.{}.attn.", {}, {"output_gate": "silu"}),
}
families = pytest.mark.parametrize("family", FAMILIES)
LAYER = 2


def make_config(family):
    _, config, model_type, _, more, _ = FAMILIES[family]
    return {**config(model_type, **SIZES), **more}


def make_tensors(family, dtype=np.float32, layer=LAYER, gates=None):
    """Random tensors of one layer, the decay's two in the dtype `gates`."""
    shapes, _, _, prefix, _, _ = FAMILIES[family]
    rng, tensors = np.random.default_rng(layer), {}
    for name, shape in shapes(**SIZES).items():
        is_gate = name.endswith(("A_log", "dt_bias"))
        tensors[prefix.format(layer) + name] = rng.normal(size=shape).astype((is_gate and gates) or dtype)
    return tensors


def load(family, source, **options):
    return load_mixer(source, layer=LAYER, config=make_config(family), **FAMILIES[family][5], **options)


def assert_same_tensors(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        came = actual[name]
        assert (came.dtype, came.shape, came.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


def assert_same_mixer(actual, expected):
    assert actual.config == expected.config
    assert bool(eqx.tree_equal(actual, expected))


# ---- there and back --------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("gates", [None, np.float32], ids=["one dtype", "float32 gates"])
@pytest.mark.parametrize("dtype", [np.float32, BF16, np.float16], ids=["float32", "bfloat16", "float16"])
def test_load_then_export_is_byte_identical(family, dtype, gates, tmp_path):
    tensors = make_tensors(family, dtype, gates=gates)
    first = next(iter(tensors))
    tensors[first].flat[:3] = [-0.0, np.inf, np.finfo(np.float16).tiny / 2]
    others = {**make_tensors(family, dtype, layer=LAYER + 1), "model.embed_tokens.weight": np.zeros((5, 12), dtype)}
    path = tmp_path / "model.safetensors"
    save_file({**tensors, **others}, path)
    mixer = load(family, path)
    exported = export_mixer(mixer, like=path, layer=LAYER)
    assert_same_tensors(exported, tensors)
    assert save(exported) == save(tensors)
    for part in (mixer.decay.A_log, mixer.decay.dt_bias):
        assert part.dtype == np.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(eqx.tree_at(lambda m: m.decay, mixer, None))} == {np.dtype(dtype)}


@families
def test_a_mapping_and_a_file_are_the_same_checkpoint(family, tmp_path):
    tensors = make_tensors(family)
    save_file(tensors, tmp_path / "some.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(make_config(family)))
    from_mapping = load(family, {name: jnp.asarray(array) for name, array in tensors.items()})
    options = FAMILIES[family][5]
    for source in (tmp_path, tmp_path / "some.safetensors", str(tmp_path / "some.safetensors")):
        assert_same_mixer(load_mixer(source, layer=LAYER, **options), from_mapping)
    prefix = FAMILIES[family][3].format(LAYER)
    bare = {name.removeprefix(prefix): array for name, array in tensors.items()}
    assert_same_mixer(load_mixer(bare, config=make_config(family), **options), from_mapping)
    assert_same_tensors(export_mixer(from_mapping, like=bare), bare)


@families
def test_our_own_config_needs_no_other(family):
    tensors = make_tensors(family)
    mixer = load(family, tensors, backend=Recurrent())
    again = load_mixer(tensors, layer=LAYER, config=mixer.config, backend=Recurrent())
    assert_same_mixer(again, mixer)
    rng = np.random.default_rng(0)
    fresh = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), np.float32), mixer)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in tensors.items()}
    exported = export_mixer(fresh, like=shapes, layer=LAYER)
    assert_same_mixer(load_mixer(exported, layer=LAYER, config=mixer.config, backend=Recurrent()), fresh)


def test_export_rounds_to_the_stored_dtypes():
    tensors = make_tensors("kimi_linear", BF16, gates=np.float32)
    mixer = cast_params(load("kimi_linear", tensors), np.float32)
    assert_same_tensors(export_mixer(mixer, like=tensors, layer=LAYER), tensors)


def aligned(array):
    """A copy that begins where XLA would take memory over instead of copying it."""
    memory = np.empty(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_a_loaded_layer_does_not_alias_the_callers_arrays():
    tensors = {name: aligned(array) for name, array in make_tensors("olmo_hybrid").items()}
    mixer = load("olmo_hybrid", tensors)
    before = jax.tree.map(np.array, mixer)
    for array in tensors.values():
        array[...] = np.nan
    assert_same_mixer(jax.tree.map(np.array, mixer), before)


# ---- the same layer under other names --------------------------------------------------------------------------------


def golden(name):
    return load_file(GOLDENS / name / "model.safetensors")


def layer_of(tensors, prefix):
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}


def test_rows_that_go_by_key_head():
    """Qwen3-Next's fused tensors, put together from Qwen3.5's row by row."""
    folder = GOLDENS / "hf_qwen3_5"
    split = layer_of(golden("hf_qwen3_5"), "model.layers.1.linear_attn.")
    heads, key_dim, values = 2, 8, 2 * 16  # 4 value heads of 16
    q, k, v = np.split(split["in_proj_qkv.weight"], [16, 32])
    z, b, a = (split[f"in_proj_{name}.weight"] for name in "zba")
    qkvz, ba = [], []
    for head in range(heads):
        keys, value = slice(head * key_dim, (head + 1) * key_dim), slice(head * values, (head + 1) * values)
        qkvz += [q[keys], k[keys], v[value], z[value]]
        ba += [b[2 * head : 2 * head + 2], a[2 * head : 2 * head + 2]]
    fused = {name: array for name, array in split.items() if not name.startswith("in_proj")}
    fused |= {"in_proj_qkvz.weight": np.concatenate(qkvz), "in_proj_ba.weight": np.concatenate(ba)}
    config = json.loads((folder / "config.json").read_text())
    loaded = load_mixer(fused, config={**config, "model_type": "qwen3_next"})
    assert_same_mixer(loaded, load_mixer(folder, layer=1))


def test_one_projection_for_everything():
    folder = GOLDENS / "hf_qwen3_5"
    split = layer_of(golden("hf_qwen3_5"), "model.layers.1.linear_attn.")
    fused = {name: split[name] for name in ("A_log", "dt_bias", "conv1d.weight", "out_proj.weight")}
    fused["out_norm.weight"] = split["norm.weight"]
    fused["in_proj.weight"] = np.concatenate([split[f"in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")])
    config = json.loads((folder / "config.json").read_text())
    loaded = load_mixer(fused, config={**config, "model_type": "lara_mini"})
    assert_same_mixer(loaded, load_mixer(folder, layer=1))


def test_kimis_layers_as_transformers_has_them_in_memory():
    folder = GOLDENS / "hf_kimi_linear"
    published = layer_of(golden("hf_kimi_linear"), "model.layers.1.self_attn.")
    memory = {}
    for name, array in published.items():
        if "conv" not in name:
            memory["forget_gate." * name.startswith(("f_", "A_log", "dt_bias")) + name] = array
    memory["conv1d.weight"] = np.concatenate([published[f"{name}_conv1d.weight"] for name in "qkv"])
    loaded = load_mixer(memory, config=folder)
    assert_same_mixer(loaded, load_mixer(folder, layer=1))


def test_bailings_full_gates_compute_what_glms_factored_ones_do():
    file = GOLDENS / "hf_glm5_next" / "layer0.safetensors"
    arrays = load_file(file)
    glm = {name[6:].removeprefix("forget_gate."): a for name, a in arrays.items() if name.startswith("param/")}
    bailing = {f"{name}_proj.weight": glm[f"{name}_proj.weight"] for name in "qkvb"}
    convs = np.split(glm["conv1d.weight"], 3)
    bailing |= {f"{name}_conv1d.weight": conv for name, conv in zip("qkv", convs)}
    bailing |= {name: glm[name] for name in ("A_log", "dt_bias", "o_norm.weight")}
    bailing["dense.weight"] = glm["o_proj.weight"]
    for gate in "fg":
        bailing[f"{gate}_proj.weight"] = glm[f"{gate}_b_proj.weight"] @ glm[f"{gate}_a_proj.weight"]
    config = {"model_type": "bailing_hybrid", "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16}
    mixer = load_mixer(bailing, config={**config, "rms_norm_eps": 1e-5}, backend=Recurrent())
    out, _ = jax.jit(lambda x: mixer(x), compiler_options={"xla_backend_optimization_level": 0})(arrays["in/hidden"])
    expected = arrays["out/hidden"]
    assert np.abs(np.asarray(out) - expected).max() <= 5e-5 * np.abs(expected).max()


def test_gdn2_files_of_both_authors_hold_the_same_tensors():
    file = GOLDENS / "fla_gdn2.safetensors"
    tensors = layer_of(load_file(file), "param/")
    config = {"hidden_size": 32, "head_dim": 16, "num_heads": 2}
    fla = load_mixer(tensors, config=config, output_gate="sigmoid")
    nvidia = {f"transformer.h.5.attn.{name}": array for name, array in tensors.items()}
    silu = load_mixer(nvidia, layer=5, config=config, output_gate="silu")
    assert (fla.config.output_gate, silu.config.output_gate) == ("sigmoid", "silu")
    assert jax.tree.all(jax.tree.map(jnp.array_equal, jax.tree.leaves(fla), jax.tree.leaves(silu)))
    assert_same_tensors(export_mixer(silu, like=nvidia, layer=5), nvidia)


# ---- what configs say ------------------------------------------------------------------------------------------------

KIMI_SIZES = {"hidden_size": 12, "linear_num_heads": 2, "linear_head_dim": 4, "linear_conv_kernel_dim": 3}


@pytest.mark.parametrize(
    ("family", "change", "field", "expected"),
    [
        ("qwen3_5", {}, "norm_eps", 1e-6),
        ("qwen3_5", {"rms_norm_eps": 1e-5}, "norm_eps", 1e-5),
        ("qwen3_5", {}, "norm_numerics", "qwen"),
        ("qwen4_exp", {"output_gate_type": None}, "output_gate", "silu"),
        ("qwen4_exp", {}, "output_gate", "sigmoid"),
        ("olmo_hybrid", {}, "variant.erase_max", 2),
        ("olmo_hybrid", {"linear_allow_neg_eigval": False}, "variant.erase_max", 1),
        ("olmo_hybrid", {"rms_norm_eps": 1e-6}, "norm_eps", 1e-5),
        ("kimi_linear", {}, "norm_eps", 1e-5),
        ("kimi_linear", {}, "variant.log_decay_min", None),
        ("kimi_linear", {"linear_attn_config": None, **KIMI_SIZES}, "key_heads", 2),
        ("glm5_next", {}, "variant.log_decay_min", -5),
        ("glm5_next", {"text_config": {"linear_lower_bound": None, **KIMI_SIZES}}, "variant.log_decay_min", None),
        ("bailing_hybrid", {"kda_lower_bound": -4.0}, "variant.log_decay_min", -4),
        ("bailing_hybrid", {"kda_safe_gate": False}, "variant.log_decay_min", None),
        ("bailing_hybrid", {"head_dim": 2, "linear_head_dim": 4}, "key_dim", 4),  # as transformers saves it
        ("bailing_hybrid", {}, "norm_eps", 1e-6),
        ("fla gdn", {"output_gate_activation": "swish"}, "output_gate", "silu"),
        ("fla gdn", {"output_gate_activation": "sigmoid"}, "output_gate", "sigmoid"),
        ("fla gdn", {}, "norm_eps", 1e-5),
        ("fla gdn", {}, "variant.erase_max", 1),
        ("fla gdn, bias", {}, "variant.erase_max", 2),
        ("fla kda", {"lower_bound": -5.0}, "variant.log_decay_min", -5),
        ("fla kda", {}, "variant.log_decay_min", None),
        ("fla gdn2", {"allow_neg_eigval": True}, "variant.erase_max", 2),
        ("nvidia gdn2", {}, "output_gate", "silu"),
    ],
)
def test_a_config_chooses(family, change, field, expected):
    config = {**make_config(family), **change}
    mixer = load_mixer(make_tensors(family), layer=LAYER, config=config, **FAMILIES[family][5])
    value = mixer.config
    for name in field.split("."):
        value = getattr(value, name)
    assert value == expected


@pytest.mark.parametrize(
    ("safe", "bound", "expected"), [(True, None, -5), (False, None, None), (True, -3.0, -3), (False, -3.0, -3)]
)
def test_glms_older_config_has_the_bound_in_an_object(safe, bound, expected):
    linear = {"head_dim": 4, "num_heads": 2, "short_conv_kernel_size": 3, "safe_gate": safe, "gate_lower_bound": bound}
    config = {"model_type": "glm5_next", "hidden_size": 12, "linear_attn_config": linear}
    mixer = load_mixer(make_tensors("glm5_next"), layer=LAYER, config=config)
    assert mixer.config.variant.log_decay_min == expected


PUBLISHED = {  # the sizes of the published models, and shapes as their tables have them
    "qwen3_next": (
        linear_config("qwen3_next", 2048, 16, 32, 128, 128, 4),
        {"in_proj_qkvz": [12288, 2048], "in_proj_ba": [64, 2048], "conv1d": [8192, 1, 4], "out_proj": [2048, 4096]},
    ),
    "qwen3_5": (
        linear_config("qwen3_5", 4096, 16, 32, 128, 128, 4),
        {"in_proj_qkv": [8192, 4096], "in_proj_z": [4096, 4096], "in_proj_a": [32, 4096], "in_proj_b": [32, 4096]},
    ),
    "olmo_hybrid": (
        linear_config("olmo_hybrid", 3840, 30, 30, 96, 192, 4),
        {"q_proj": [2880, 3840], "v_proj": [5760, 3840], "a_proj": [30, 3840], "v_conv1d": [5760, 1, 4]},
    ),
    "kimi_linear": (
        kimi_config("kimi_linear", 2304, 32, 32, 128, 128, 4),
        {"q_proj": [4096, 2304], "f_a_proj": [128, 2304], "f_b_proj": [4096, 128], "b_proj": [32, 2304]},
    ),
    "glm5_next": (
        glm_config("glm5_next", 4096, 64, 64, 128, 128, 4),
        {"v_proj": [8192, 4096], "g_b_proj": [8192, 128], "k_conv1d": [8192, 1, 4], "o_proj": [4096, 8192]},
    ),
    "bailing_hybrid": (
        bailing_config("bailing_hybrid", 2560, 32, 32, 128, 128, 4),
        {"f_proj": [4096, 2560], "g_proj": [4096, 2560], "b_proj": [32, 2560], "dense": [2560, 4096]},
    ),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_shapes_of_the_published_models(family):
    """What a checkpoint with nothing but `dt_bias` would lack."""
    config, shapes = PUBLISHED[family]
    heads = {"bailing_hybrid": 32, "kimi_linear": 32, "glm5_next": 64}.get(family)
    gates = {"qwen3_next": 32, "qwen3_5": 32, "olmo_hybrid": 30}.get(family) or 128 * heads
    with pytest.raises(ValueError, match="missing: ") as error:
        load_mixer({"dt_bias": np.zeros(gates, np.float32)}, config=config)
    assert "of another shape" not in str(error.value)
    said = {name: json.loads(shape) for name, shape in re.findall(r"([\w.]+) (\[[^]]*\])", str(error.value))}
    formula, _, _, _, _, _ = FAMILIES[family]
    assert said.keys() == formula(**SIZES).keys() - {"dt_bias"}
    assert shapes.items() <= {name.removesuffix(".weight"): shape for name, shape in said.items()}.items()


# ---- what is read ----------------------------------------------------------------------------------------------------


def write_sharded(folder, family="qwen3_5", dtype=np.float32):
    """The layer's tensors in two shards of a larger checkpoint, of which nothing else is there."""
    tensors = make_tensors(family, dtype)
    names = sorted(tensors)
    halves = {"model-00002-of-00009.safetensors": names[::2], "model-00007-of-00009.safetensors": names[1::2]}
    index = {f"model.layers.{n}.linear_attn.A_log": "model-00001-of-00009.safetensors" for n in (0, 1, 3)}
    for shard, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / shard)
        index |= dict.fromkeys(part, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(make_config(family)))
    return tensors


def test_only_the_layers_shards_are_opened(tmp_path):
    tensors = write_sharded(tmp_path)
    expected = load("qwen3_5", tensors)
    for source in (tmp_path, tmp_path / "model.safetensors.index.json"):
        assert_same_mixer(load_mixer(source, layer=LAYER), expected)
        assert_same_tensors(export_mixer(expected, like=source, layer=LAYER), tensors)
    with pytest.raises(FileNotFoundError, match=r"model.layers.3.linear_attn.A_log to `.*model-00001-of-00009.safe"):
        load_mixer(tmp_path, layer=3)


def test_nothing_else_of_a_huge_file_is_read(tmp_path):
    """The file claims 64 GiB, which no disk block holds: what would read them would take minutes."""
    tensors = make_tensors("qwen3_5")
    small = save(tensors)
    length = int.from_bytes(small[:8], "little")
    header = json.loads(small[8 : 8 + length])
    data, huge = small[8 + length :], 2**36
    for name in ("model.embed_tokens.weight", "model.layers.0.linear_attn.in_proj_qkv.weight"):
        start = max(entry["data_offsets"][1] for entry in header.values())
        header[name] = {"dtype": "F32", "shape": [huge // 8], "data_offsets": [start, start + huge // 2]}
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data)
        file.truncate(8 + len(text) + len(data) + huge)
    assert_same_mixer(load("qwen3_5", path), load("qwen3_5", tensors))


class Unreadable:
    """An array that must not be read, with a shape and a dtype."""

    def __init__(self, array, shape=None, dtype=None):
        self.shape, self.dtype = shape or array.shape, dtype or array.dtype

    def __array__(self, *_args, **_kwargs):
        raise AssertionError("read")


def test_unreadable_arrays_would_be_noticed():
    tensors = {name: Unreadable(array) for name, array in make_tensors("qwen3_5").items()}
    with pytest.raises(AssertionError, match="read"):
        load("qwen3_5", tensors)


# ---- what is refused -------------------------------------------------------------------------------------------------

PREFIX = "model.layers.2.linear_attn."


def change(tensors, **changes):
    """Tensors of layer 2 with some replaced (or, by `None`, taken out)."""
    changed = {**tensors, **{PREFIX + name.replace("__", "."): array for name, array in changes.items()}}
    return {name: Unreadable(array) for name, array in changed.items() if array is not None}


def array(*shape, dtype="float32"):
    return Unreadable(None, shape, dtype)


def refusal(source, error, **options):
    """The message with which a load is refused, before anything is read."""
    with pytest.raises(error) as caught:
        load_mixer(source, **{"layer": LAYER, "config": make_config("qwen3_5"), **options})
    assert type(caught.value) is error
    return str(caught.value)


def test_missing_unexpected_and_misshapen_tensors_are_one_error():
    tensors = make_tensors("qwen3_5")
    broken = change(
        tensors,
        in_proj_a__weight=None,
        dt_bias=None,
        q_norm__weight=array(4),
        extra=array(1),
        conv1d__weight=array(76, 1, 4),
        norm__weight=array(12),
    )
    assert refusal(broken, ValueError) == (
        "The mapping does not hold a qwen3_5 layer with model = 12, 2 key heads of 4 and 6 value heads of 10 "
        "(the config has hidden_size=12, linear_num_key_heads=2, linear_key_head_dim=4, linear_num_value_heads=6, "
        "linear_value_head_dim=10, linear_conv_kernel_dim=3).\n"
        "  missing: model.layers.2.linear_attn.in_proj_a.weight [6, 12], model.layers.2.linear_attn.dt_bias [6]\n"
        "  unexpected: model.layers.2.linear_attn.extra [1], model.layers.2.linear_attn.q_norm.weight [4]\n"
        "  of another shape: model.layers.2.linear_attn.conv1d.weight is [76, 1, 4] and should be [76, 1, 3], "
        "model.layers.2.linear_attn.norm.weight is [12] and should be [10]"
    )


def test_a_config_that_contradicts_the_shapes():
    tensors = change(make_tensors("qwen3_5"))
    config = {**make_config("qwen3_5"), "linear_num_value_heads": 4}
    message = refusal(tensors, ValueError, config=config)
    assert "4 value heads of 10 (the config has hidden_size=12, " in message and "linear_num_value_heads=4, " in message
    assert "in_proj_qkv.weight is [76, 12] and should be [56, 12]" in message
    assert "A_log is [6] and should be [4]" in message and "missing" not in message
    config = {**make_config("qwen3_5"), "linear_num_value_heads": 5}
    assert refusal(tensors, ValueError, config=config).startswith(
        "The config of this qwen3_5 layer, with linear_num_key_heads=2, linear_num_value_heads=5, does not make a "
        "mixer. A mixer needs value_heads to be a multiple of key_heads, but they are 5 and 2"
    )
    config = {**make_config("qwen3_5"), "linear_key_head_dim": "4"}
    message = refusal(tensors, TypeError, config=config)
    assert message.startswith("The config of this qwen3_5 layer, with linear_key_head_dim='4', does not make a mixer. ")
    message = refusal(tensors, ValueError, config={**make_config("qwen3_5"), "model_type": "qwen3_next"})
    assert "missing: model.layers.2.linear_attn.in_proj_qkvz.weight [136, 12], " in message
    assert "unexpected: model.layers.2.linear_attn.in_proj_a.weight [6, 12], " in message
    config = {**make_config("qwen3_5"), "layer_types": ["linear_attention", "linear_attention", "full_attention"]}
    assert refusal(tensors, ValueError, config=config) == (
        "Layer 2 must be a gated-delta layer, but the config says that these are: 0, 1 (counted from 0)."
    )
    config = make_config("kimi_linear")
    config["linear_attn_config"]["kda_layers"] = [1, 2, 4]
    message = refusal(make_tensors("kimi_linear"), ValueError, config=config)
    assert message.endswith("these are: 0, 1, 3 (counted from 0).")


def test_tensors_of_another_layer():
    tensors = make_tensors("qwen3_5", layer=1)
    assert refusal(tensors, ValueError) == (
        "The mapping must hold the tensors of one gated-delta layer 2, but it has none of that number. "
        "Its gated-delta layers: 1."
    )
    moved = PREFIX.replace("2", "1") + "norm.weight"
    mixed = {name: array for name, array in make_tensors("qwen3_5").items() if "norm" not in name}
    message = refusal({**mixed, moved: array(10)}, ValueError)
    assert message.endswith("missing: model.layers.2.linear_attn.norm.weight [10]")
    twice = {**make_tensors("qwen3_5"), "model.language_model.layers.2.linear_attn.A_log": array(6)}
    assert "it has model.language_model.layers.2.linear_attn. and model.layers.2.linear_attn." in refusal(
        twice, ValueError
    )
    assert "gated-delta layers 2: say which by `layer=...`" in refusal(make_tensors("qwen3_5"), ValueError, layer=None)
    for layer in (-1, True, "2"):
        assert refusal(tensors, ValueError, layer=layer).startswith(f"`layer={layer!r}` must be the number of")


def test_a_parameter_in_two_spellings():
    tensors = {name: Unreadable(a) for name, a in make_tensors("kimi_linear").items()}
    tensors["model.layers.2.self_attn.forget_gate.A_log"] = array(2)
    message = refusal(tensors, ValueError, config=make_config("kimi_linear"))
    assert message.endswith("unexpected: model.layers.2.self_attn.forget_gate.A_log [2]")


def test_olmos_convolution_cut_in_equal_parts():
    """As transformers 5.24.0 saves it."""
    prefix = FAMILIES["olmo_hybrid"][3].format(LAYER)
    tensors = {name: Unreadable(a) for name, a in make_tensors("olmo_hybrid").items()}
    tensors |= {f"{prefix}{name}_conv1d.weight": array(26, 1, 3) for name in "qkv"}
    tensors[f"{prefix}k_conv1d.weight"] = array(26, 1, 3)
    message = refusal(tensors, ValueError, config=make_config("olmo_hybrid"))
    assert message.endswith(
        "q_conv1d.weight is [26, 1, 3] and should be [8, 1, 3], "
        f"{prefix}k_conv1d.weight is [26, 1, 3] and should be [8, 1, 3], "
        f"{prefix}v_conv1d.weight is [26, 1, 3] and should be [60, 1, 3]"
    )


def test_quantised_tensors_and_other_dtypes(tmp_path):
    tensors = make_tensors("qwen3_5")
    scaled = change(tensors, in_proj_z__weight_scale_inv=array(1))
    assert refusal(scaled, TypeError) == (
        "model.layers.2.linear_attn.in_proj_z.weight_scale_inv in the mapping: a quantised checkpoint, which is not "
        "read. Take one in bfloat16 or float32."
    )
    assert "in_proj_z.qweight" in refusal(change(tensors, in_proj_z__qweight=array(1)), TypeError)
    path = tmp_path / "model.safetensors"
    for dtype, word in ((jnp.float8_e4m3fn, "F8_E4M3"), (np.int32, "I32")):
        save_file({**tensors, PREFIX + "in_proj_z.weight": np.zeros((60, 12), dtype)}, path)
        assert refusal(path, TypeError) == (
            "A layer needs tensors of float32, bfloat16, float16 or float64, but these came: "
            f"model.layers.2.linear_attn.in_proj_z.weight ({word})."
        )
    save_file({**tensors, PREFIX + "A_log": np.zeros(6)}, path)
    assert refusal(path, TypeError).startswith("model.layers.2.linear_attn.A_log: float64, which needs `jax.config")
    with jax.enable_x64(True):
        assert load("qwen3_5", path).decay.A_log.dtype == np.float64
    numbers = {**tensors, PREFIX + "A_log": [0.0] * 6}
    assert refusal(numbers, TypeError) == (
        "`model.layers.2.linear_attn.A_log` must be a NumPy or JAX array, but it is a list."
    )


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_truncated_files(size, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(save(make_tensors("qwen3_5"))[:size])
    assert re.fullmatch(
        r"`.*model.safetensors` is not a whole safetensors file \(.+\)\. Fetch or write it again\.",
        refusal(path, ValueError),
    )


def test_broken_shards_and_indices(tmp_path):
    write_sharded(tmp_path)
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-00007-of-00009.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-8])
    assert f"`{shard}` is not a whole safetensors file" in refusal(tmp_path, ValueError)
    shard.write_bytes(save({"other": np.zeros(1)}))
    message = refusal(tmp_path, ValueError)
    assert f"model.layers.2.linear_attn.conv1d.weight is in `{shard}`" in message
    assert message.endswith("but it is not. Index and shards are not of the same checkpoint.")
    shard.unlink()
    message = refusal(tmp_path, FileNotFoundError)
    assert f"to `{shard}`, which is not there. Fetch the missing shard." in message
    index.write_text('{"weight_map": 3}')
    assert "must have an object `weight_map`" in refusal(tmp_path, ValueError)
    index.write_text("{")
    assert "index.json` is not readable as JSON" in refusal(tmp_path, ValueError)
    index.write_text("[]")
    assert "must hold a JSON object, but it holds a list" in refusal(tmp_path, ValueError)
    index.unlink()
    save_file({}, shard)
    message = refusal(tmp_path, FileNotFoundError)
    assert "has model-00002-of-00009.safetensors, model-00007-of-00009.safetensors, shards of one checkpoint" in message
    assert "but not model.safetensors.index.json, which says what is in which. Fetch it" in message
    save_file({}, tmp_path / "other.safetensors")
    assert "but of these it has model-00002-of-00009.safetensors, model-00007" in refusal(tmp_path, FileNotFoundError)
    assert refusal(tmp_path / "nowhere", FileNotFoundError) == f"There is no checkpoint `{tmp_path / 'nowhere'}`."
    assert "but an int came" in refusal(3, TypeError)


def test_configs_that_say_too_little_or_too_much(tmp_path):
    tensors = change(make_tensors("qwen3_5"))
    assert refusal(tensors, ValueError, config=None).startswith("A mapping of arrays needs `config=...`")
    assert refusal(tensors, FileNotFoundError, config=tmp_path).startswith(f"There is no `{tmp_path}/config.json`")
    assert refusal(tensors, TypeError, config=3).endswith("but an int came.")
    message = refusal(tensors, ValueError, config={"model_type": "qwen3_5", "hidden_size": 12})
    assert message == (
        "The config of a qwen3_5 layer needs `linear_num_key_heads`, but has none, and nothing of a similar name. Give "
        "the whole config.json of the checkpoint."
    )
    message = refusal(make_tensors("kimi_linear"), ValueError, config={"model_type": "kimi_linear", "hidden_size": 12})
    assert "needs `linear_attn_config.num_heads` or `linear_num_heads`, but" in message
    message = refusal(tensors, ValueError, config={"model_type": "llama"})
    assert message.startswith("The config's `model_type` is 'llama', and this library knows 'qwen3_next', 'qwen3_5', ")
    nameless = {name: value for name, value in make_config("qwen3_5").items() if name != "model_type"}
    assert refusal(tensors, ValueError, config=nameless) == (
        "The names in the mapping are those of qwen3_5 and of qwen4_exp alike: put `model_type` into the config, "
        "'qwen3_5' or 'qwen4_exp'."
    )
    odd = {"wq.weight": array(4, 4), "wk.weight": array(4, 4)}
    assert refusal(odd, ValueError, layer=None, config=nameless) == (
        "The mapping must hold the tensors of a gated-delta layer of a known family, with names such as A_log or "
        "q_proj.weight, but it has wk.weight, wq.weight."
    )
    assert "`output_gate='sigmoid'` is for GDN-2" in refusal(tensors, ValueError, output_gate="sigmoid")
    message = refusal(make_tensors("fla gdn2"), ValueError, config=make_config("fla gdn2"))
    assert message.startswith("A GDN-2 layer needs `output_gate='silu'` (NVIDIA's code) or `output_gate='sigmoid'`")
    own = load("qwen3_5", make_tensors("qwen3_5")).config
    assert "in the `MixerConfig`" in refusal(tensors, ValueError, config=own, output_gate="silu")


def test_a_lone_shard_says_what_is_missing(tmp_path):
    write_sharded(tmp_path)
    index, shard = tmp_path / "model.safetensors.index.json", tmp_path / "model-00002-of-00009.safetensors"
    with pytest.raises(ValueError, match=r"(?s)missing: .*one shard of several: give `.*index.json` to look into all"):
        load_mixer(shard, layer=LAYER)
    (tmp_path / "model-00007-of-00009.safetensors").unlink()
    index.unlink()
    lack = r"`model-00002-of-00009.safetensors` is one shard of several: fetch model.safetensors.index.json and the oth"
    for source in (shard, tmp_path):
        with pytest.raises(ValueError, match=rf"(?s)missing: .*{lack}"):
            load_mixer(source, layer=LAYER)
        with pytest.raises(ValueError, match=rf"Its gated-delta layers: {LAYER}\. {lack}"):
            load_mixer(source, layer=0)
    save_file({"model.embed_tokens.weight": np.zeros(1)}, shard)
    for layer in (LAYER, None):
        with pytest.raises(ValueError, match=rf"but it has model.embed_tokens.weight\. {lack}"):
            load_mixer(shard, layer=layer)


def test_a_shard_that_holds_the_layer_loads(tmp_path):
    tensors = make_tensors("qwen3_5")
    for name in ("model-00002-of-00009.safetensors", "model-00001-of-00001.safetensors"):
        save_file(tensors, tmp_path / name)
        assert_same_mixer(load("qwen3_5", tmp_path / name), load("qwen3_5", tensors))
    with pytest.raises(ValueError, match=r"Its gated-delta layers: 2\.$"):
        load_mixer(tmp_path / "model-00001-of-00001.safetensors", layer=0)


def test_a_pointer_of_git_lfs(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4967215360\n")
    with pytest.raises(ValueError, match=r"model.safetensors` must be .* but it is the pointer .* `git lfs pull`"):
        load_mixer(tmp_path, layer=LAYER)


def test_a_name_on_a_hub_is_no_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^There is no checkpoint `Qwen/Qwen3.5-4B`. Only local files and fol"):
        load_mixer("Qwen/Qwen3.5-4B", layer=LAYER)
    (tmp_path / "runs").mkdir()
    for path in ("runs/last", "nowhere", "there/model.safetensors", "./a/b/c", "/nowhere/model"):
        with pytest.raises(FileNotFoundError, match=r"^There is no checkpoint `[^`]*`\.$"):
            load_mixer(path, layer=LAYER)


def test_names_of_no_known_layer():
    flat = {f"param/{n:02}": array(4) for n in range(14)}
    few = r"but it has param/00, param/01, param/02 and 11 more \(all begin with `param/`\)\.$"
    with pytest.raises(
        ValueError, match=rf"^The mapping must hold .* of a known family, with names such as A_log .*{few}"
    ):
        load_mixer(flat, config=make_config("qwen3_5"))
    with pytest.raises(ValueError, match=rf"layer 2, with names such as model.layers.2.linear_attn.A_log, {few}"):
        load_mixer(flat, layer=LAYER, config=make_config("qwen3_5"))
    other = {f"{PREFIX}{name}": array(4) for name in ("my_A_log", "my_dt_bias", "a", "b")}
    nameless = {name: value for name, value in make_config("qwen3_5").items() if name != "model_type"}
    with pytest.raises(
        ValueError, match=r"^None of these is the name of a gated-delta layer's tensor: a, b, my_A_log and 1 more\.$"
    ):
        load_mixer(other, layer=LAYER, config=nameless)
    with pytest.raises(ValueError, match=r"but it has no tensors\.$"):
        load_mixer({}, config=make_config("qwen3_5"))
    with pytest.raises(ValueError, match=r"names such as A_log .*but it has param/00"):
        export_mixer(load("qwen3_5", make_tensors("qwen3_5")), like=flat)
    bare = {name.removeprefix(PREFIX): tensor for name, tensor in make_tensors("qwen3_5").items()}
    with pytest.raises(ValueError, match=r"holds one layer, of names without a prefix, .* leave out `layer`\.$"):
        load_mixer(bare, layer=LAYER, config=make_config("qwen3_5"))


def test_a_missing_entry_names_only_what_is_like_it():
    config = make_config("qwen3_5") | {f"rope_{n}": n for n in range(40)}
    config["linear_key_heads"] = config.pop("linear_num_key_heads")
    with pytest.raises(
        ValueError, match=r"needs `linear_num_key_heads`, but has none: of similar names only `linear_"
    ) as e:
        load_mixer(make_tensors("qwen3_5"), layer=LAYER, config=config)
    assert "`linear_key_heads`" in str(e.value) and "rope" not in str(e.value) and "hidden" not in str(e.value)
    config = make_config("kimi_linear")
    config["linear_attn_config"]["nheads"] = config["linear_attn_config"].pop("num_heads")
    with pytest.raises(
        ValueError, match=r"`linear_num_heads`, but has none: of similar names only `linear_attn_config.nh"
    ):
        load_mixer(make_tensors("kimi_linear"), layer=LAYER, config=config)


def test_an_export_that_does_not_fit():
    tensors = make_tensors("qwen3_5")
    kda = eqx.filter_eval_shape(KDA, 12, key_heads=2, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"missing: .*\(our parameter decay\.project\.down\.weight\) \[12, 12\]"):
        export_mixer(kda, like=tensors, layer=LAYER)
    mixer = load("qwen3_5", tensors)
    with pytest.raises(ValueError, match=r"conv1d.weight is \[76, 1, 9\] and should be \[76, 1, 3\]"):
        export_mixer(mixer, like={**tensors, PREFIX + "conv1d.weight": array(76, 1, 9)}, layer=LAYER)
    with pytest.raises(TypeError, match="needs a `GatedDeltaMixer`, but a dict came"):
        export_mixer({}, like=tensors, layer=LAYER)


# ---- what is imported ------------------------------------------------------------------------------------------------


def test_safetensors_is_imported_for_files_alone(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file(make_tensors("qwen3_5"), path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert load("qwen3_5", make_tensors("qwen3_5"))
    with pytest.raises(ImportError, match=r"pip install 'gated-delta\[checkpoints\]'"):
        load("qwen3_5", path)


def test_the_metadata_of_a_file_does_not_matter(tmp_path):
    path, tensors = tmp_path / "model.safetensors", make_tensors("qwen3_5")
    save_file(tensors, path, metadata={"format": "pt"})
    assert safe_open(path, "np").metadata() == {"format": "pt"}
    assert_same_tensors(export_mixer(load("qwen3_5", path), like=path, layer=LAYER), tensors)
