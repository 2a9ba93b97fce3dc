"""Our operator, layers and models against other people's code: goldens/README.md says where the files come from."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save, save_file

from gated_delta import Chunked, Gates, Recurrent, cast_params, gated_delta
from gated_delta.checkpoints import export_mixer, load_mixer

GOLDENS = Path(__file__).parent / "goldens"
CORE = {
    "gdn": ("gdn_basic", "gdn_grouped_state", "gdn_strong_decay", "gdn_no_decay_beta2"),
    "kda": ("kda_basic", "kda_grouped_state", "kda_strong_decay"),
    "gdn2": ("gdn2_basic", "gdn2_state", "gdn2_strong_decay", "gdn2_erase_to_2"),
}
TOLERANCES = {
    "float64": dict(core=1e-10, layer=1e-10, gradient=1e-10),
    "float32": dict(core=2e-6, layer=5e-5, gradient=1e-4),
}
# Compiles five times faster; the arithmetic is the same but for the order of some sums.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(eqx.filter_jit, compiler_options=FAST)
precisions = pytest.mark.parametrize("dtype", ["float64", "float32"])


def assert_golden(actual, expected, tolerance, name):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, name
    error = np.abs(actual - expected).max() / np.abs(expected).max()
    assert error <= tolerance, f"{name} is off by {error:.2g} of its largest value; {tolerance:g} is allowed."


# ---- the operator ----------------------------------------------------------------------------------------------------


def test_every_core_file_is_tested():
    names = {path.stem for path in (GOLDENS / "core").iterdir()}
    assert names == {name for names in CORE.values() for name in names}


def core_shapes(arrays):
    """Shape of every array when batch, time, heads and value_dim are padded to the largest of the file's kind."""
    batch, time, key_dim, value_dim = 2, 70, 8, 16
    key_heads, value_heads = (3, 3) if "w" in arrays else (2, 4)
    keys, values = (batch, time, key_heads, key_dim), (batch, time, value_heads, value_dim)
    gate = (batch, time, value_heads, *arrays["g"].shape[3:])
    shapes = dict(q=keys, k=keys, v=values, g=gate, beta=gate[:3], b=gate, w=values)
    shapes["initial_state"] = (batch, value_heads, key_dim, value_dim)
    return {name: shapes[name] for name in (*arrays, "initial_state")}


def core_place(name, arrays):
    """Where the file's array lies in the padded one. Where two value heads serve a key head, a file without groups has
    the first of each pair."""
    batch, time, heads, value_dim = arrays["v"].shape
    key_heads, key_dim = arrays["k"].shape[2:]
    values = slice(0, 2 * heads, 2) if "w" not in arrays and heads == key_heads else slice(heads)
    if name == "initial_state":
        return slice(batch), values, slice(key_dim), slice(value_dim)
    if name in ("q", "k"):
        return slice(batch), slice(time), slice(key_heads), slice(key_dim)
    return slice(batch), slice(time), values, *(slice(n) for n in arrays[name].shape[3:])


@functools.cache
def core_function(backend, erase_max):
    @functools.partial(jax.jit, compiler_options=FAST)
    def run(arrays, cotangents):
        def loss(arrays):
            if "beta" in arrays:
                gates = Gates.tied(arrays["beta"], arrays["g"], erase_max=erase_max)
            else:
                gates = Gates(arrays["g"], arrays["b"], arrays["w"], erase_max=erase_max)
            out, state = gated_delta(
                arrays["q"], arrays["k"], arrays["v"], gates, initial_state=arrays["initial_state"], backend=backend
            )
            return jnp.sum(out * cotangents[0]) + jnp.sum(state * cotangents[1]), (out, state)

        return jax.value_and_grad(loss, has_aux=True)(arrays)

    return run


@precisions
@pytest.mark.parametrize("backend", [Chunked(), Recurrent()], ids=str)
@pytest.mark.parametrize("kind, name", [(kind, name) for kind, names in CORE.items() for name in names])
def test_operator_equals_the_naive_recurrence(kind, name, backend, dtype):
    """Padded with zero tokens, heads, channels and rows, which change nothing, the files of a kind share a program."""
    file = {key: value.astype(dtype) for key, value in load_file(GOLDENS / "core" / f"{name}.safetensors").items()}
    inputs = {key[3:]: value for key, value in file.items() if key.startswith("in/")}
    cotangent_o, cotangent_state = inputs.pop("cotangent_o"), inputs.pop("cotangent_state")
    shapes = core_shapes(inputs)

    def pad(array, key):
        padded = np.zeros(shapes[key], dtype)
        if array is not None:
            padded[core_place(key, inputs)] = array
        return padded

    def cut(array, key):
        return np.asarray(array)[core_place(key, inputs)]

    arrays = {key: pad(inputs.get(key), key) for key in shapes}
    tolerance = TOLERANCES[dtype]
    with jax.enable_x64(dtype == "float64"):
        run = core_function(backend, 1.0 if kind == "kda" else 2.0)
        cotangents = pad(cotangent_o, "v"), pad(cotangent_state, "initial_state")
        (_, (out, state)), gradients = run(arrays, cotangents)
    assert out.dtype == state.dtype == dtype
    assert_golden(cut(out, "v"), file["out/o"], tolerance["core"], "o")
    assert_golden(cut(state, "initial_state"), file["out/final_state"], tolerance["core"], "final_state")
    for key in inputs:
        assert_golden(cut(gradients[key], key), file[f"grad/{key}"], tolerance["gradient"], f"gradient of {key}")


# ---- layers ----------------------------------------------------------------------------------------------------------

MODEL_TYPES = {  # of layers that lie alone, by the class in the file's metadata
    "GatedDeltaNet": "gated_deltanet",
    "GatedDeltaNet2": "gdn2",
    "Glm5NextTextLinearAttention": "glm5_next_text",
    "KimiDeltaAttention": "kda",
    "Qwen4ExpTextGatedDeltaNet": "qwen4_exp_text",
}
LAYERS = sorted(
    [path.parent.name for path in GOLDENS.glob("*/layer0.safetensors")] + [path.stem for path in GOLDENS.glob("fla_*")]
)
EVERY_RUN = {"fla_gdn2", "hf_kimi_linear", "hf_qwen3_5", "hf_qwen3_5_hybrid", "hf_qwen3_next"}
ONLY_SLOW = {"fla_gated_deltanet", "fla_kda", "fla_kda_lower_bound"}  # the rest runs in float32 from a state every time


def test_every_layer_file_is_tested():
    assert len(LAYERS) == 14


def load_layer(name):
    """Our layer with the parameters of a golden file, by the public loader."""
    if (GOLDENS / name / "config.json").exists():
        return load_mixer(GOLDENS / name, layer=0)
    path = layer_file(name)
    with safe_open(path, "np") as opened:
        metadata = opened.metadata()
    parameters = {key[6:]: array for key, array in load_file(path).items() if key.startswith("param/")}
    config = {**json.loads(metadata["config"]), "model_type": MODEL_TYPES[metadata["layer_class"]]}
    output_gate = "sigmoid" if config["model_type"] == "gdn2" else None
    return load_mixer(parameters, config=config, output_gate=output_gate)


def layer_file(name):
    path = GOLDENS / f"{name}.safetensors"
    return path if path.exists() else GOLDENS / name / "layer0.safetensors"


@pytest.mark.inference
@pytest.mark.parametrize("name", LAYERS)
def test_a_golden_layer_comes_back_byte_for_byte(name):
    folder, mixer = GOLDENS / name, load_layer(name)
    if (folder / "config.json").exists():
        like, layer = folder, 0
        stored = load_file(folder / "model.safetensors")
        expected = {key: array for key, array in stored.items() if ".0.linear_attn." in key or ".0.self_attn." in key}
    else:
        like, layer = {key[6:]: a for key, a in load_file(layer_file(name)).items() if key.startswith("param/")}, None
        expected = like
    exported = export_mixer(mixer, like=like, layer=layer)
    assert save(exported) == save(expected)


@fast_jit
def call(mixer, x, state, mask):
    return mixer(x, state, mask=mask)


@fast_jit
def step(mixer, x, state):
    return mixer.step(x, state)


@fast_jit
def gradients(mixer, x, cotangent):
    def loss(arguments):
        out, _ = arguments[0](arguments[1])
        return jnp.sum(out * cotangent), out

    return eqx.filter_value_and_grad(loss, has_aux=True)((mixer, x))


class Golden:
    """A layer file: its arrays, and our layer with its parameters."""

    def __init__(self, name, dtype):
        self.file = load_file(layer_file(name))
        with safe_open(layer_file(name), "np") as opened:
            self.metadata = opened.metadata()
        mixer = load_layer(name)
        self.mixer = mixer if dtype == "float32" else cast_params(mixer, dtype)
        self.x = self.file["in/hidden"].astype(dtype)

    def part(self, first, last, state):
        """Tokens `first` to `last` in one call, right-padded to the full length: so every call is the same program."""
        tokens = np.zeros_like(self.x)
        tokens[:, : last - first] = self.x[:, first:last]
        mask = np.broadcast_to(np.arange(self.x.shape[1]) < last - first, self.x.shape[:2])
        out, state = call(self.mixer, tokens, state, mask)
        return np.asarray(out)[:, : last - first], state


@pytest.fixture(scope="module")
def golden(request):
    name, dtype = request.param
    with jax.enable_x64(dtype == "float64"):
        yield Golden(name, dtype)


def goldens(*, every_run):
    """Every layer in both dtypes. Those not in `every_run` are slow."""
    cases = [(name, dtype) for dtype in ("float64", "float32") for name in LAYERS]
    marks = {False: [pytest.mark.slow], True: []}
    return pytest.mark.parametrize(
        "golden",
        [pytest.param(case, marks=marks[case in every_run], id="-".join(case)) for case in cases],
        indirect=True,
    )


BOTH_DTYPES = [(name, dtype) for name in sorted(EVERY_RUN) for dtype in ("float32", "float64")]


def layer_tolerance(golden, kind="layer"):
    return TOLERANCES[golden.x.dtype.name][kind]


@pytest.mark.inference
@goldens(every_run=BOTH_DTYPES)
def test_layer_and_its_gradients(golden):
    """Gradients go out as the parameters came in: under the names, in the shapes and in the dtype of the file's."""
    cotangent = golden.file["in/cotangent"].astype(golden.x.dtype)
    (_, out), (d_mixer, d_x) = gradients(golden.mixer, golden.x, cotangent)
    assert_golden(out, golden.file["out/hidden"], layer_tolerance(golden), "hidden")
    assert_golden(d_x, golden.file["grad/hidden"], layer_tolerance(golden, "gradient"), "gradient of hidden")
    expected = {name[5:]: array for name, array in golden.file.items() if name.startswith("grad/")}
    del expected["hidden"]
    actual = export_mixer(d_mixer, like=expected)
    assert actual.keys() == expected.keys()
    for name in actual:
        assert_golden(actual[name], expected[name], layer_tolerance(golden, "gradient"), f"gradient of {name}")


@pytest.mark.inference
@goldens(every_run=[*BOTH_DTYPES, *((name, "float32") for name in LAYERS if name not in ONLY_SLOW)])
def test_layer_in_parts(golden):
    """Prefill, single tokens, and what is left in one more call, each continuing the state of the one before."""
    file, time = golden.file, golden.x.shape[1]
    prefill = int(golden.metadata["n_prefill"])
    decode = int(golden.metadata.get("n_decode", time - prefill))
    out, state = golden.part(0, prefill, golden.mixer.init_state(2))
    tolerance = layer_tolerance(golden)
    outs = [out]
    kind, limit = ("out", tolerance) if "out/recurrent_state_after_prefill" in file else ("out_f32", 5e-5)
    expected = file[f"{kind}/recurrent_state_after_prefill"]
    if golden.metadata.get("recurrent_state_layout") == "[B,HV,V,K]":
        expected = np.swapaxes(expected, 2, 3)
    assert_golden(state.recurrent, expected, limit, "state after the prefill")
    windows = {name: np.swapaxes(getattr(state, f"{name}_window"), 1, 2) for name in "qkv"}
    if kind == "out":  # theirs holds one input more than a convolution needs
        joined = np.concatenate(list(windows.values()), axis=1)
        assert_golden(joined, file["out/conv_state_after_prefill"][..., 1:], limit, "windows after the prefill")
    else:
        for name, window in windows.items():
            assert_golden(window, file[f"out_f32/conv_state_after_prefill_{name}"][..., 1:], limit, f"{name} window")
    for index in range(prefill, prefill + decode):
        out, state = step(golden.mixer, golden.x[:, index], state)
        outs.append(np.asarray(out)[:, None])
    if prefill + decode < time:
        out, state = golden.part(prefill + decode, time, state)
        outs.append(out)
        assert_golden(state.recurrent, file["out/final_recurrent_state"], tolerance, "last state")
    assert_golden(np.concatenate(outs, axis=1), file["out/hidden"], tolerance, "hidden in parts")


@pytest.mark.inference
@goldens(every_run=[*BOTH_DTYPES, *((name, "float32") for name in LAYERS if name not in ONLY_SLOW)])
def test_padded_layer(golden):
    file, tested = golden.file, 0
    for side in ("left", "right"):
        name = next((f"{kind}/{side}_padded" for kind in ("out", "out_f32") if f"{kind}/{side}_padded" in file), None)
        if name is None:
            continue  # transformers' layers do not serve right padding
        mask = file[f"in/{side}_pad_mask"] != 0
        out, _ = call(golden.mixer, golden.x, golden.mixer.init_state(2), mask)
        tolerance = layer_tolerance(golden) if name.startswith("out/") else 5e-5
        assert_golden(np.asarray(out)[mask], file[name][mask], tolerance, name)
        assert not np.any(np.asarray(out)[~mask])
        tested += 1
    assert tested


# ---- models, by examples/hybrid_from_checkpoint.py -------------------------------------------------------------------


def load_example():
    path = Path(__file__).resolve().parents[1] / "examples" / "hybrid_from_checkpoint.py"
    spec = importlib.util.spec_from_file_location("hybrid_from_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["hybrid_from_checkpoint"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.run = fast_jit(lambda model, tokens, states, mask: model(tokens, states, mask))
    return module


example = load_example()
MODELS = sorted(path.parent.name for path in GOLDENS.glob("*/model_io.safetensors"))


@pytest.fixture
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # as for a reader
        yield


@fast_jit
def layer_by_layer(model, tokens, states):
    """The output of every block."""
    x, mask, outs = model.embed[tokens], jnp.ones(tokens.shape, bool), []
    for block, state in zip(model.blocks, states, strict=True):
        x, _ = block(x, state, mask)
        outs.append(x)
    return outs


@pytest.mark.inference
@pytest.mark.usefixtures("_promotion")
@pytest.mark.parametrize(
    "name, dtype",
    [
        pytest.param(name, dtype, marks=[] if dtype == "float32" and name != "hf_kimi_linear" else [pytest.mark.slow])
        for name in MODELS
        for dtype in ("float64", "float32")
    ],
)
def test_model(name, dtype):
    file = load_file(GOLDENS / name / "model_io.safetensors")
    tokens, greedy = file["in/input_ids"].astype(np.int32), file["out/greedy_ids"]
    new, tolerance = greedy.shape[1] - tokens.shape[1], {"float64": 1e-10, "float32": 1e-4}[dtype]
    with jax.enable_x64(dtype == "float64"):
        model = example.load(GOLDENS / name)
        model = model if dtype == "float32" else cast_params(model, dtype)
        states = model.init_state(2, greedy.shape[1])
        for kind, mask in (
            ("logits", np.ones(tokens.shape, bool)),
            ("left_padded_logits", file["in/left_pad_mask"] > 0),
        ):
            logits, _ = example.run(model, jnp.asarray(tokens), states, jnp.asarray(mask))
            assert_golden(np.asarray(logits)[mask], file[f"out/{kind}"][mask], tolerance, kind)
        assert np.array_equal(example.generate(model, jnp.asarray(tokens), new)[:1], greedy)
        if dtype == "float64":
            for layer, out in enumerate(layer_by_layer(model, tokens, states)):
                assert_golden(out, file[f"out/decoder_layer_{layer}"], tolerance, f"layer {layer}")


@pytest.mark.inference
@pytest.mark.usefixtures("_promotion")
def test_the_example_compares_and_continues(tmp_path, capsys):
    folder = GOLDENS / "hf_qwen3_5"
    assert example.main([str(folder)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[0] == "checkpoint" and line.split()[:3] == ["hf_qwen3_5", "2", "0"]
    assert "12 of 12" in line
    assert example.main([str(folder), "--prompt", "5", "--tokens", "2"]) == 0
    name, *tokens = capsys.readouterr().out.split()
    assert name == "hf_qwen3_5" and tokens[0] == "5" and len(tokens) == 3
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file = load_file(folder / "model_io.safetensors")
    save_file({**file, "out/logits": 1.001 * file["out/logits"]}, tmp_path / "model_io.safetensors")
    assert example.main([str(tmp_path)]) == 1


@pytest.mark.inference
def test_the_example_says_what_it_cannot_load(tmp_path):
    def refusal(name, config=(), without=None):
        tensors = load_file(GOLDENS / name / "model.safetensors")
        save_file({n: a for n, a in tensors.items() if without not in n.split(".")}, tmp_path / "model.safetensors")
        entries = json.loads((GOLDENS / name / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**entries, **dict(config)}))
        with pytest.raises(SystemExit) as caught:
            example.load(tmp_path)
        return str(caught.value)

    assert refusal("hf_qwen3_5", {"model_type": "llama"}).startswith("error: llama is none of qwen3_next, qwen3_5, ")
    assert refusal("hf_kimi_linear", without="A_log") == "error: Kimi's latent attention is not part of this example"
    assert refusal("hf_qwen3_5", without="mlp") == (
        "error: there is no model.layers.0.mlp.gate_proj.weight; layers with experts are not in this example"
    )


@pytest.mark.inference
def test_the_example_loads_a_sharded_multimodal_checkpoint_alike(tmp_path):
    """Without `layer_types`, with the rotary entries at the top, a text config, and the embedding as the head."""
    folder = GOLDENS / "hf_qwen3_5_hybrid"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    for index in range(2):
        part = {name.replace("model.", "model.language_model."): tensors[name] for name in sorted(tensors)[index::2]}
        save_file(part, tmp_path / f"{index}.safetensors")
    shards = {
        name: path.name for path in sorted(tmp_path.glob("*.safetensors")) for name in safe_open(path, "np").keys()
    }
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    text = {name: value for name, value in config.items() if name not in ("layer_types", "rope_parameters")}
    text |= config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    assert eqx.tree_equal(example.load(tmp_path), example.load(folder))
    text["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": text}))
    tied = example.load(tmp_path)
    assert np.array_equal(tied.head, tensors["model.embed_tokens.weight"])
