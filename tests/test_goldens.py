"""Our operator and layers against other people's code: see goldens/README.md for where the files come from."""

import functools
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from gated_delta import GDN, GDN2, KDA, Chunked, Gates, Recurrent, gated_delta

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


def split(array, *sizes):
    return np.split(array, np.cumsum(sizes)[:-1])


def qwen3_5(file):
    """transformers' names to the paths of our parameters."""
    q, k, v = split(file["in_proj_qkv.weight"], 16, 16, 64)
    convs = split(file["conv1d.weight"][:, 0], 16, 16, 64)
    return {
        ".q_proj.weight": q,
        ".k_proj.weight": k,
        ".v_proj.weight": v,
        **{f".{name}_conv.weight": conv.T for name, conv in zip("qkv", convs)},
        ".decay.project.weight": file["in_proj_a.weight"],
        ".decay.A_log": file["A_log"],
        ".decay.dt_bias": file["dt_bias"][:, None],
        ".erase.project.weight": file["in_proj_b.weight"],
        ".out_gate.project.weight": file["in_proj_z.weight"],
        ".out_norm.weight": file["norm.weight"],
        ".o_proj.weight": file["out_proj.weight"],
    }


def kimi_linear(file):
    file = {name.removeprefix("forget_gate."): array for name, array in file.items()}
    if "conv1d.weight" in file:
        convs = split(file["conv1d.weight"], 32, 32, 32)
    else:
        convs = [file[f"{name}_conv1d.weight"] for name in "qkv"]
    return {
        **{f".{name}_proj.weight": file[f"{name}_proj.weight"] for name in "qkvo"},
        **{f".{name}_conv.weight": conv[:, 0].T for name, conv in zip("qkv", convs)},
        ".decay.project.down.weight": file["f_a_proj.weight"],
        ".decay.project.up.weight": file["f_b_proj.weight"],
        ".decay.A_log": file["A_log"].reshape(2),
        ".decay.dt_bias": file["dt_bias"].reshape(2, 16),
        ".erase.project.weight": file["b_proj.weight"],
        ".out_gate.project.down.weight": file["g_a_proj.weight"],
        ".out_gate.project.up.weight": file["g_b_proj.weight"],
        ".out_norm.weight": file["o_norm.weight"],
    }


def fla_gdn2(file):
    return {
        **{f".{name}_proj.weight": file[f"{name}_proj.weight"] for name in "qkvo"},
        **{f".{name}_conv.weight": file[f"{name}_conv1d.weight"][:, 0].T for name in "qkv"},
        ".decay.project.down.weight": file["f_proj.0.weight"],
        ".decay.project.up.weight": file["f_proj.1.weight"],
        ".decay.A_log": file["A_log"],
        ".decay.dt_bias": file["dt_bias"].reshape(2, 16),
        ".erase.project.weight": file["b_proj.weight"],
        ".write.project.weight": file["w_proj.weight"],
        ".out_gate.project.down.weight": file["g_proj.0.weight"],
        ".out_gate.project.up.weight": file["g_proj.1.weight"],
        ".out_gate.project.up.bias": file["g_proj.1.bias"],
        ".out_norm.weight": file["o_norm.weight"],
    }


LAYERS = {
    "hf_qwen3_5": (
        functools.partial(
            GDN, 32, key_heads=2, value_heads=4, key_dim=8, value_dim=16, norm_eps=1e-6, norm_numerics="qwen"
        ),
        qwen3_5,
        "model.layers.0.linear_attn.",
    ),
    "hf_kimi_linear": (
        functools.partial(KDA, 32, key_heads=2, key_dim=16, output_gate_bias=False),
        kimi_linear,
        "model.layers.0.self_attn.",
    ),
    "fla_gdn2": (functools.partial(GDN2, 32, key_heads=2, key_dim=16, output_gate="sigmoid"), fla_gdn2, "param/"),
}


class Golden:
    """A layer file: its arrays, our layer with its parameters, and our layer's functions compiled once."""

    def __init__(self, name, dtype):
        make, self.rename, prefix = LAYERS[name]
        path = GOLDENS / f"{name}.safetensors"
        path = path if path.exists() else GOLDENS / name / "layer0.safetensors"
        self.file = load_file(path)
        with safe_open(path, "np") as opened:
            self.numbers = {key: int(value) for key, value in opened.metadata().items() if key.startswith("n_")}
        source = load_file(path.with_name("model.safetensors")) if prefix.startswith("model") else self.file
        weights = {key.removeprefix(prefix): value for key, value in source.items() if key.startswith(prefix)}
        self.mixer = put(eqx.filter_eval_shape(make, key=jax.random.key(0)), self.rename(weights), dtype)
        self.x = self.file["in/hidden"].astype(dtype)
        self.call = fast_jit(lambda mixer, x, state, mask: mixer(x, state, mask=mask))
        self.step = fast_jit(lambda mixer, x, state: mixer.step(x, state))

    def part(self, first, last, state):
        """Tokens `first` to `last` in one call, right-padded to the full length: so every call is the same program."""
        tokens = np.zeros_like(self.x)
        tokens[:, : last - first] = self.x[:, first:last]
        mask = np.broadcast_to(np.arange(self.x.shape[1]) < last - first, self.x.shape[:2])
        out, state = self.call(self.mixer, tokens, state, mask)
        return np.asarray(out)[:, : last - first], state


def put(mixer, arrays, dtype):
    """Our layer with the given parameters, every one of them."""
    paths = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(mixer)}
    assert paths == {path: array.shape for path, array in arrays.items()}
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[jax.tree_util.keystr(path)].astype(dtype), mixer)


@pytest.fixture(scope="module", params=[(name, dtype) for dtype in ("float64", "float32") for name in LAYERS], ids=str)
def golden(request):
    name, dtype = request.param
    with jax.enable_x64(dtype == "float64"):
        yield Golden(name, dtype)


def layer_tolerance(golden, kind="layer"):
    return TOLERANCES[golden.x.dtype.name][kind]


def test_layer_and_its_gradients(golden):
    cotangent = golden.file["in/cotangent"].astype(golden.x.dtype)

    @fast_jit
    def run(mixer, x):
        def loss(arguments):
            out, _ = arguments[0](arguments[1])
            return jnp.sum(out * cotangent), out

        return eqx.filter_value_and_grad(loss, has_aux=True)((mixer, x))

    (_, out), (d_mixer, d_x) = run(golden.mixer, golden.x)
    assert_golden(out, golden.file["out/hidden"], layer_tolerance(golden), "hidden")
    assert_golden(d_x, golden.file["grad/hidden"], layer_tolerance(golden, "gradient"), "gradient of hidden")
    expected = golden.rename({name[5:]: array for name, array in golden.file.items() if name.startswith("grad/")})
    actual = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(d_mixer)}
    assert actual.keys() == expected.keys()
    for path in actual:
        assert_golden(actual[path], expected[path], layer_tolerance(golden, "gradient"), f"gradient of {path}")


def test_layer_in_parts(golden):
    """Prefill, single tokens, and what is left in one more call, each continuing the state of the one before."""
    file, time = golden.file, golden.x.shape[1]
    prefill = golden.numbers["n_prefill"]
    decode = golden.numbers.get("n_decode", time - prefill)
    out, state = golden.part(0, prefill, golden.mixer.init_state(2))
    tolerance = layer_tolerance(golden)
    outs = [out]
    kind, limit = ("out", tolerance) if "out/recurrent_state_after_prefill" in file else ("out_f32", 5e-5)
    assert_golden(state.recurrent, file[f"{kind}/recurrent_state_after_prefill"], limit, "state after the prefill")
    windows = {name: np.swapaxes(getattr(state, f"{name}_window"), 1, 2) for name in "qkv"}
    if kind == "out":  # theirs holds one input more than a convolution needs
        joined = np.concatenate(list(windows.values()), axis=1)
        assert_golden(joined, file["out/conv_state_after_prefill"][..., 1:], limit, "windows after the prefill")
    else:
        for name, window in windows.items():
            assert_golden(window, file[f"out_f32/conv_state_after_prefill_{name}"][..., 1:], limit, f"{name} window")
    for index in range(prefill, prefill + decode):
        out, state = golden.step(golden.mixer, golden.x[:, index], state)
        outs.append(np.asarray(out)[:, None])
    if prefill + decode < time:
        out, state = golden.part(prefill + decode, time, state)
        outs.append(out)
        assert_golden(state.recurrent, file["out/final_recurrent_state"], tolerance, "last state")
    assert_golden(np.concatenate(outs, axis=1), file["out/hidden"], tolerance, "hidden in parts")


def test_padded_layer(golden):
    file = golden.file
    for side in ("left", "right"):
        name = next((f"{kind}/{side}_padded" for kind in ("out", "out_f32") if f"{kind}/{side}_padded" in file), None)
        if name is None:
            continue  # transformers' layers do not serve right padding
        mask = file[f"in/{side}_pad_mask"] != 0
        out, _ = golden.call(golden.mixer, golden.x, golden.mixer.init_state(2), mask)
        tolerance = layer_tolerance(golden) if name.startswith("out/") else 5e-5
        assert_golden(np.asarray(out)[mask], file[name][mask], tolerance, name)
        assert not np.any(np.asarray(out)[~mask])


def test_the_files_say_which_layer_they_hold():
    for name, (make, _, _) in LAYERS.items():
        path = GOLDENS / f"{name}.safetensors"
        path = path if path.exists() else GOLDENS / name / "layer0.safetensors"
        with safe_open(path, "np") as opened:
            config = json.loads(opened.metadata()["config"])
        mixer = eqx.filter_eval_shape(make, key=jax.random.key(0))
        assert config["hidden_size"] == mixer.config.model
        heads = config.get("linear_num_key_heads", config.get("linear_num_heads", config.get("num_heads")))
        assert heads == mixer.config.key_heads
