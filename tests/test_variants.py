"""Constructors, records, gates and parameters: what each option builds, and what is refused with which words."""

import functools
import inspect
import json
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gated_delta
from gated_delta import (
    GDN,
    GDN2,
    GLA,
    KDA,
    SLA,
    BoundedDecay,
    DeltaNet,
    GatedDeltaMixer,
    MixerConfig,
    MixerState,
    Recurrent,
    SoftplusDecay,
    SystolicLinearAttention,
    Variant,
    cast_params,
    sla_r1,
    sla_r2,
    sla_r4,
    sla_r8,
    variants,
    weight_decay_mask,
)
from gated_delta._activations import decay_by_head, gated_rms_norm, inverse_softplus, least_decay, sigmoid_gate
from gated_delta._linear import Linear

KEY = jax.random.key(0)
# Compiles five times faster; the arithmetic is the same but for the order of some sums.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(eqx.filter_jit, compiler_options=FAST)
CONSTRUCTORS = [GDN, KDA, GDN2, SLA, DeltaNet, GLA]


def shape_of(constructor, *args, **options) -> GatedDeltaMixer:
    """The layer without the cost of its parameters: `jax.ShapeDtypeStruct`s in their place."""
    return eqx.filter_eval_shape(constructor, *args, key=KEY, **options)


def shapes(mixer):
    return {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree_util.tree_leaves_with_path(mixer)}


def runs(mixer):
    """Whether the layer traces: in a batch, step by step, and to the shapes it should."""
    config = mixer.config
    x = jnp.zeros((2, 3, config.model))
    out, state = eqx.filter_eval_shape(lambda mixer, x: mixer(x), mixer, x)
    stepped, after = eqx.filter_eval_shape(lambda mixer, x: mixer.step(x, mixer.init_state(2)), mixer, x[:, 0])
    assert out.shape == x.shape and stepped.shape == x[:, 0].shape
    assert state.recurrent.shape == (2, config.value_heads, config.key_dim, config.value_dim)
    assert shapes(state) == shapes(after)
    return True


# ---- constructors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("constructor", CONSTRUCTORS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("model", [6, 128, 2048])
def test_defaults_work_for_any_width(constructor, model):
    mixer = shape_of(constructor, model)
    assert runs(mixer)
    if constructor is not SLA:
        heads = max(1, model // (256 if constructor is GLA else 128))
        assert mixer.config.key_dim == min(128, model) and mixer.config.key_heads == heads


def test_systolic_presets_hold_states_of_one_size():
    for group, preset in ((1, sla_r1), (2, sla_r2), (4, sla_r4), (8, sla_r8)):
        config = shape_of(preset, 2048).config
        assert (config.value_heads, config.key_dim, config.value_dim) == (8, 256, 128)
        assert config.key_heads == 8 // group
        assert config.variant == variants.sla and config.variant.decay_groups(256) == 4
    assert SLA is SystolicLinearAttention


def test_parameters_have_the_shapes_of_the_published_layers():
    gdn = shapes(shape_of(GDN, 64, key_heads=2, value_heads=4, key_dim=8, value_dim=16))
    assert gdn[".decay.A_log"] == (4,) and gdn[".decay.dt_bias"] == (4, 1) and gdn[".erase.project.weight"] == (4, 64)
    assert gdn[".q_conv.weight"] == (4, 16) and gdn[".v_conv.weight"] == (4, 64)
    assert gdn[".out_gate.project.weight"] == (64, 64) and gdn[".out_norm.weight"] == (16,)
    kda = shapes(shape_of(KDA, 64, key_heads=2, value_heads=4, key_dim=8, value_dim=16))
    assert kda[".decay.A_log"] == (4,) and kda[".decay.dt_bias"] == (4, 8)  # per value head
    assert kda[".decay.project.down.weight"] == (16, 64) and kda[".decay.project.up.weight"] == (32, 16)
    assert kda[".out_gate.project.up.bias"] == (64,)
    gdn2 = shapes(shape_of(GDN2, 64, key_heads=2, value_heads=4, key_dim=8, value_dim=16))
    assert gdn2[".decay.A_log"] == (2,) and gdn2[".decay.dt_bias"] == (2, 8)  # per key head
    assert gdn2[".erase.project.weight"] == (16, 64) and gdn2[".write.project.weight"] == (64, 64)
    sla = shapes(shape_of(SLA, 64, group=4, key_heads=2, key_dim=8, value_dim=16))
    assert sla[".decay.A_log"] == (2,) and sla[".decay.dt_bias"] == (2, 4) and sla[".erase.project.weight"] == (2, 64)
    delta_net = shapes(shape_of(DeltaNet, 64, key_heads=2, key_dim=8))
    assert delta_net[".erase.project.weight"] == (2, 64) and delta_net[".v_conv.weight"] == (4, 16)
    assert not [name for name in delta_net if "decay" in name or "out_gate" in name]
    gla = shapes(shape_of(GLA, 64, key_heads=2, value_heads=4, key_dim=8))
    assert gla[".decay.project.down.weight"] == (16, 64) and gla[".decay.dt_bias"] == (2, 8)  # per key head
    assert gla[".v_proj.weight"] == (64, 64) and gla[".out_gate.project.weight"] == (64, 64)
    assert not [name for name in gla if "erase" in name or "write" in name or "conv" in name]


OPTIONS = [
    *((constructor, dict(conv_width=None)) for constructor in CONSTRUCTORS),
    *((constructor, dict(decay_bound=-5)) for constructor in CONSTRUCTORS if constructor is not DeltaNet),
    (GDN, dict(conv_width=1, conv_bias=True)),
    (GDN, dict(doubled_beta=True, decay_bound=-2.5, has_rate=False, decay_rank=3)),
    (GDN, dict(output_gate=None, step_init="ones", norm_numerics="qwen", norm_eps=1e-6, init="normal")),
    (KDA, dict(decay_rank=None, output_gate_rank=None, output_gate_bias=False, output_gate="silu")),
    (KDA, dict(key_heads=2, value_heads=4, doubled_beta=True, decay_rates=(1, 2))),
    (GDN2, dict(output_gate="sigmoid", init="uniform", doubled_erase=True, inverse="substitution")),
    (GDN2, dict(key_heads=2, value_heads=4, decay_rank=None, precision="high")),
    (SLA, dict(erase="channel")),
    (SLA, dict(erase="channel", write="channel", decay_tiles=1)),
    (SLA, dict(write="head", decay_tiles=8, doubled_beta=True)),
    (SLA, dict(write="channel", decay_rank="value_dim", inverse="approx")),
    (DeltaNet, dict(value_heads=4, doubled_beta=True, output_gate="silu", output_gate_rank="value_dim")),
    (GLA, dict(value_heads=4, conv_width=4, decay_rank=None, step_init="ones", output_gate_bias=True)),
    (GLA, dict(qkv_activation="silu", decay_bound=-5, has_rate=False, output_gate=None)),
]


@pytest.mark.parametrize("constructor, options", OPTIONS, ids=lambda x: getattr(x, "__name__", str(x)))
def test_every_option_builds_a_layer_that_runs_and_its_config_rebuilds_it(constructor, options):
    sizes = dict(key_heads=2, key_dim=8) | options
    mixer = shape_of(constructor, 16, **sizes)
    assert runs(mixer)
    assert mixer.write is None or mixer.config.variant.write != "one"
    config = MixerConfig.from_json(mixer.config.to_json())
    assert config == mixer.config and hash(config) == hash(mixer.config)
    again = shape_of(GatedDeltaMixer, config)
    assert jax.tree.structure(again) == jax.tree.structure(mixer) and shapes(again) == shapes(mixer)
    assert repr(config) == repr(mixer.config) and "key_dim=8" in repr(config)


def test_members_without_a_constructor_are_records_too():
    for variant in (
        Variant(decay="none", erase="none", write="one", tied=False),  # linear attention
        Variant(decay="head", decay_owner="key", erase="none", write="one", tied=False),  # RetNet-like
        Variant(decay="head", erase="none", write="head", tied=False),  # Mamba-2-like
    ):
        assert runs(shape_of(GatedDeltaMixer, MixerConfig(variant, 8, 2, 4, 4, 4)))


def test_promises_travel_with_the_gates():
    def gates(mixer):
        return eqx.filter_eval_shape(lambda mixer: mixer._gates(jnp.zeros((1, 3, 16))), mixer)

    plain = gates(shape_of(KDA, 16, key_heads=2, key_dim=8))
    assert (plain.is_tied, plain.erase_max, plain.log_decay_min) == (True, 1.0, None)
    promised = gates(shape_of(KDA, 16, key_heads=2, key_dim=8, doubled_beta=True, decay_bound=-4))
    assert (promised.erase_max, promised.log_decay_min) == (2.0, -4.0)
    doubled = gates(shape_of(GDN2, 16, key_heads=2, key_dim=8, doubled_erase=True))
    assert not doubled.is_tied and doubled.erase_max == 2.0 and doubled.write is not None


def test_approximate_inverse_is_the_default_of_sla_for_bfloat16_only():
    choices = {
        (dtype, doubled): shape_of(SLA, 16, doubled_beta=doubled)._inverse(jnp.dtype(dtype))
        for dtype in ("bfloat16", "float32", "float16", "float64")
        for doubled in (False, True)
    }
    assert [pair for pair, choice in choices.items() if choice == "approx"] == [("bfloat16", False)]
    assert set(choices.values()) == {"approx", "exact"}
    for constructor in (GDN, KDA, GDN2):
        assert shape_of(constructor, 16)._inverse(jnp.dtype("bfloat16")) == "exact"


def test_a_backend_is_part_of_the_structure_and_can_be_replaced():
    mixer = shape_of(GDN, 16, backend=Recurrent())
    assert jax.tree.structure(mixer) != jax.tree.structure(shape_of(GDN, 16))
    replaced = eqx.tree_at(lambda m: m.backend, mixer, Recurrent(checkpoint_every=2))
    assert str(replaced.backend) != str(mixer.backend) and runs(replaced)


def test_a_variant_is_a_record_a_constructor_and_no_mathematics():
    for path in Path(inspect.getfile(variants)).parent.glob("_*.py"):
        source = path.read_text()
        assert len(source.splitlines()) <= 120, path.name
        assert "jnp." not in source and "jax.numpy" not in source, path.name


# ---- initial values --------------------------------------------------------------------------------------------------


def test_initial_decays_are_those_of_the_literature():
    decay = fast_jit(lambda key: SoftplusDecay(1, 1024, 1, key=key))(KEY)
    rates, steps = np.exp(decay.A_log), np.log1p(np.exp(np.asarray(decay.dt_bias, np.float64)))
    assert 1 <= rates.min() < 2 and 15 < rates.max() <= 16 and abs(rates.mean() - 8.5) < 0.5
    assert 0.00099 < steps.min() < 0.0015 and 0.08 < steps.max() < 0.1001
    assert abs(np.mean(np.log(steps)) - np.log(0.01)) < 0.2  # log-uniform
    bounded = fast_jit(lambda key: BoundedDecay(8, 4, 2, step_init="ones", key=key))(KEY)
    assert not np.any(bounded.A_log) and np.all(bounded.dt_bias == 1)
    assert BoundedDecay(8, 4, 2, has_rate=False, key=KEY).A_log is None


@pytest.mark.parametrize(
    "init, limit", [("uniform", 16**-0.5), ("normal", None), ("xavier", 2**-2.5 * (6 / 80) ** 0.5)]
)
def test_initial_matrices(init, limit):
    linear = fast_jit(lambda key: Linear(16, 64, bias=True, init=init, key=key))(KEY)
    weight = np.asarray(linear.weight)
    assert weight.shape == (64, 16)
    if limit is None:
        assert abs(weight.std() - 0.02) < 0.002
    else:
        assert 0.9 * limit < np.abs(weight).max() <= limit
    assert np.any(linear.bias) == (init == "uniform")


# ---- published layers in NumPy, token by token -----------------------------------------------------------------------


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def heads_of(linear, x, heads):
    return (x @ np.asarray(linear.weight, np.float64).T).reshape(len(x), heads, -1)


def rms_norm(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)


def unit(x):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + 1e-6)


def run_published(name, mixer, x):
    """`x` `[time, 8]` through the layer as its paper writes it, two heads of 4 channels."""
    q, k, v = (heads_of(linear, x, 2) for linear in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    if name == "delta_net":
        q, k, v = (a * sigmoid(a) for a in (q, k, v))
        q, k, beta = unit(q), unit(k), sigmoid(heads_of(mixer.erase.project, x, 2))
    else:
        low = x @ np.asarray(mixer.decay.project.down.weight, np.float64).T
        z = -heads_of(mixer.decay.project.up, low, 2) - np.asarray(mixer.decay.dt_bias, np.float64)
        forget = sigmoid(z) ** (1 / 16)
    out, state = np.zeros(v.shape), np.zeros((2, 4, v.shape[-1]))
    for t in range(len(x)):
        for head in range(2):
            if name == "delta_net":
                old = state[head].T @ k[t, head]
                state[head] += beta[t, head] * np.outer(k[t, head], v[t, head] - old)
            else:
                state[head] = forget[t, head][:, None] * state[head] + np.outer(k[t, head], v[t, head])
            out[t, head] = state[head].T @ q[t, head] / 2
    out = rms_norm(out)
    if name == "gla":
        gate = heads_of(mixer.out_gate.project, x, 2)
        out = out * gate * sigmoid(gate)
    return out.reshape(len(x), -1) @ np.asarray(mixer.o_proj.weight, np.float64).T


@pytest.mark.parametrize(
    "name, constructor",
    [("delta_net", functools.partial(DeltaNet, conv_width=None)), ("gla", GLA)],
    ids=["delta_net", "gla"],
)
def test_layers_without_decay_or_erase_are_those_of_their_papers(name, constructor):
    x = np.random.default_rng(0).standard_normal((19, 8)).astype(np.float32)
    mixer = fast_jit(lambda key: constructor(8, key_heads=2, key_dim=4, key=key))(KEY)
    out, _ = fast_jit(lambda mixer, x: mixer(x))(mixer, x)
    expected = run_published(name, mixer, x.astype(np.float64))
    assert np.sqrt(np.mean((out - expected) ** 2)) <= 1e-5 * np.sqrt(np.mean(expected**2))


# ---- gate arithmetic -------------------------------------------------------------------------------------------------


def test_decays_against_float64():
    rng = np.random.default_rng(0)
    raw, A_log, dt_bias = rng.normal(size=(50, 3, 4)) * 5, rng.uniform(-1, 3, 3), rng.normal(size=(3, 4))
    raw[0] = 200
    raw[1] = -200
    y, A = raw + dt_bias, np.exp(A_log)[:, None]
    low = [jnp.asarray(a, jnp.float32) for a in (raw, A_log, dt_bias)]
    np.testing.assert_allclose(decay_by_head(*low), -A * np.logaddexp(y, 0), rtol=2e-5, atol=1e-37)
    bounded = decay_by_head(*low, -5.0)
    np.testing.assert_allclose(bounded, -5 * np.exp(-np.logaddexp(-A * y, 0)), rtol=2e-4, atol=1e-37)
    assert np.asarray(bounded).min() >= -5
    np.testing.assert_array_equal(
        decay_by_head(low[0], None, low[2], -5.0), decay_by_head(low[0], 0 * low[1], low[2], -5.0)
    )
    least, decay = (
        np.asarray(x) for x in (least_decay(low[0], low[1][None, :, None], low[2][None]), decay_by_head(*low))
    )
    assert np.all(least <= decay * (1 - 1e-6)) and np.all(1.32 * decay <= least)
    gate = np.asarray(sigmoid_gate(low[0], 2.0))
    assert gate.min() >= 0 and gate.max() <= 2
    x = np.array([1e-4, 1e-3, 0.1, 1.0, 30.0], np.float32)
    np.testing.assert_allclose(np.logaddexp(inverse_softplus(jnp.asarray(x)), 0), x, rtol=1e-3)


@pytest.mark.parametrize("A_log", [11.5, 80.0, 88.0, 90.0, 1000.0, np.inf])
@pytest.mark.parametrize("form", ["softplus", "bounded"])
def test_gradients_are_finite_at_any_rate(form, A_log):
    """A product of a rate beyond float32 with a slope of 0 is 0, in the value and in the gradient."""
    raw = jnp.array([[-1e4, -60.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 60.0]], jnp.float32)
    zeros = jnp.zeros((1, 8))

    @fast_jit
    def pull(raw, A_log, dt_bias):
        def decay(raw, A_log, dt_bias):
            return decay_by_head(raw, A_log, dt_bias, None if form == "softplus" else -5.0)

        out, pull = jax.vjp(decay, raw, A_log, dt_bias)
        return out, pull(jnp.ones_like(out) * 1e-3)

    out, gradients = pull(raw, jnp.full(1, A_log, jnp.float32), zeros)
    assert not np.any(np.isnan(out)) and np.all(out <= 0)
    if form == "bounded":
        assert np.all(out >= -5)
        saturated = np.array([0, 1, 2, 6, 7])
        assert np.all(np.isfinite(gradients[0])) and not np.any(np.asarray(gradients[0])[0, saturated])
    assert not any(np.any(np.isnan(g)) for g in gradients)


def test_bounded_decay_has_the_gradient_of_its_formula():
    rng = np.random.default_rng(1)
    raw, A_log, dt_bias, d_out = (
        rng.normal(size=(9, 2, 3)),
        rng.normal(size=2),
        rng.normal(size=(2, 3)),
        rng.normal(size=(9, 2, 3)),
    )
    with jax.enable_x64(True):
        _, pull = jax.vjp(lambda *a: decay_by_head(*a, -4.0), *(jnp.asarray(a) for a in (raw, A_log, dt_bias)))
        d_raw, d_A_log, d_bias = pull(jnp.asarray(d_out))
    y, A = raw + dt_bias, np.exp(A_log)[:, None]
    u = 1 / (1 + np.exp(-A * y))
    expected = -4 * A * u * (1 - u) * d_out
    np.testing.assert_allclose(d_raw, expected, rtol=1e-12)
    np.testing.assert_allclose(d_bias, expected.sum(0), rtol=1e-12)
    np.testing.assert_allclose(d_A_log, (expected * y).sum((0, 2)), rtol=1e-12)


def test_gates_at_the_ends_of_their_ranges_do_not_trip_the_operator():
    """Outside jit the operator refuses gates beyond their promises, but for the rounding of a bound to float32."""
    mixer = fast_jit(lambda key: KDA(4, key_heads=1, key_dim=4, decay_bound=-4.9, doubled_beta=True, key=key))(KEY)
    gates = fast_jit(lambda mixer, x: mixer._gates(x))(mixer, np.array([[[1e4] * 4, [-1e4] * 4]], np.float32))
    erase, log_decay = (np.asarray(gate, np.float64) for gate in (gates.erase, gates.log_decay))
    assert erase.min() >= 0 and erase.max() == 2
    assert log_decay.max() <= 0 and -4.9 * (1 + np.finfo(np.float32).eps) <= log_decay.min() < -4.89


def test_norm_gate_numerics_differ_only_in_low_precision():
    rng = np.random.default_rng(2)
    x, gate, weight = rng.normal(size=(40, 16)), rng.normal(size=(40, 16)), rng.normal(size=16)
    normal = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * weight
    exact = {"silu": normal * gate / (1 + np.exp(-gate)), "sigmoid": normal / (1 + np.exp(-gate))}
    for activation, expected in exact.items():
        for numerics in ("float32", "qwen"):
            norm = functools.partial(gated_rms_norm, activation=activation, eps=1e-5, numerics=numerics)
            out = norm(*(jnp.asarray(a, jnp.float32) for a in (x, weight, gate)))
            np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
    low = [jnp.asarray(a, jnp.bfloat16) for a in (x, weight, gate)]
    once, thrice = (
        np.asarray(gated_rms_norm(*low, activation="silu", eps=1e-5, numerics=n), np.float64)
        for n in ("float32", "qwen")
    )
    low = [np.asarray(a, np.float64) for a in low]
    normal = low[0] / np.sqrt(np.mean(low[0] ** 2, -1, keepdims=True) + 1e-5)
    expected = normal * low[1] * low[2] / (1 + np.exp(-low[2]))
    assert np.abs(once / expected - 1).max() <= 2**-8  # one rounding to bfloat16
    assert 2**-8 < np.abs(thrice / expected - 1).max() <= 3 * 2**-8


# ---- parameters ------------------------------------------------------------------------------------------------------


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    mixers: GatedDeltaMixer
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear
    name: str = "not an array"


def make_model():
    def make(key):
        stacked = eqx.filter_vmap(lambda key: KDA(8, key_heads=2, key_dim=4, conv_bias=True, key=key))
        return Model(
            eqx.nn.Embedding(5, 8, key=key),
            stacked(jax.random.split(key, 3)),
            eqx.nn.LayerNorm(8),
            eqx.nn.Linear(8, 5, key=key),
        )

    return eqx.filter_eval_shape(make, KEY)


def test_weight_decay_applies_to_matrices_only():
    model = make_model()
    mask = weight_decay_mask(model)
    assert jax.tree.structure(mask) == jax.tree.structure(model)
    decayed = {jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_leaves_with_path(mask) if leaf}
    assert decayed == {
        ".embedding.weight",
        ".head.weight",
        *(f".mixers.{name}_proj.weight" for name in "qkvo"),
        *(f".mixers.{name}_conv.weight" for name in "qkv"),
        ".mixers.decay.project.down.weight",
        ".mixers.decay.project.up.weight",
        ".mixers.erase.project.weight",
        ".mixers.out_gate.project.down.weight",
        ".mixers.out_gate.project.up.weight",
    }
    assert all(isinstance(leaf, bool) for leaf in jax.tree.leaves(mask))
    parameters = eqx.filter(model, lambda leaf: hasattr(leaf, "shape"))
    assert jax.tree.structure(weight_decay_mask(parameters)) == jax.tree.structure(parameters)


def test_gate_parameters_stay_float32_when_a_model_is_cast():
    model = fast_jit(lambda key: GDN(8, key_heads=2, key_dim=4, key=key))(KEY)
    for dtype, kept in (("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")):
        low = eqx.filter_eval_shape(cast_params, [model, np.arange(3, dtype=np.int32), "a string"], dtype)
        dtypes = {
            jax.tree_util.keystr(path): str(leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(low[0])
        }
        for name, came in dtypes.items():
            assert came == (kept if name in (".decay.A_log", ".decay.dt_bias") else dtype), name
        assert low[1].dtype == jnp.int32 and low[2] == "a string"
    low = fast_jit(lambda model: cast_params(model, "bfloat16"))(model)
    np.testing.assert_array_equal(low.decay.A_log, model.decay.A_log)
    raised = eqx.filter_eval_shape(
        lambda low: cast_params(low, "bfloat16"), eqx.tree_at(lambda m: m.decay.A_log, low, np.zeros(2, np.float16))
    )
    assert raised.decay.A_log.dtype == jnp.float32
    with jax.enable_x64(True):
        assert eqx.filter_eval_shape(cast_params, model, "float64").decay.A_log.dtype == jnp.float64
    with pytest.raises(TypeError, match="`cast_params` needs a floating-point dtype, but it is int32"):
        cast_params(model, jnp.int32)


def test_a_layer_is_written_to_a_file_and_read_back(tmp_path):
    make = fast_jit(lambda key: GDN2(8, key_heads=2, key_dim=4, key=key))
    first, second = make(KEY), make(jax.random.key(1))
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", first)
    read = eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", second)
    jax.tree.map(np.testing.assert_array_equal, read, first)


# ---- what is refused -------------------------------------------------------------------------------------------------


def config_with(**changes):
    return MixerConfig(
        **{**dict(variant=Variant(), model=8, key_heads=2, value_heads=2, key_dim=4, value_dim=4), **changes}
    )


REFUSED = [
    (
        lambda: Variant(decay="row"),
        r"`Variant\(decay='row'\)` is not known: use one of 'none', 'head', 'tile', 'channel'",
    ),
    (lambda: Variant(decay_owner="head"), r"`Variant\(decay_owner='head'\)` is not known: use one of 'key', 'value'"),
    (lambda: Variant(qk_norm="rms"), r"`Variant\(qk_norm='rms'\)` is not known"),
    (lambda: Variant(erase="channel"), r"`Variant\(tied=True\)` needs `erase='head'` and `write='head'`, but"),
    (lambda: Variant(decay="tile"), r"a number of tiles goes with `decay='tile'`, and only with it"),
    (lambda: Variant(decay_tiles=4), r"a number of tiles goes with `decay='tile'`, and only with it"),
    (lambda: Variant(decay="tile", decay_tiles=0), r"`Variant\(decay_tiles=0\)` must be at least 1"),
    (lambda: Variant(erase_max=1.5), r"`Variant\(erase_max=1.5\)` must be 1, or 2 where"),
    (lambda: Variant(log_decay_min=-6), r"a bounded decay needs a bound in \[-5, 0\)"),
    (lambda: Variant(decay="none", log_decay_min=-5), r"a bounded decay needs a bound in \[-5, 0\)"),
    (lambda: config_with(value_heads=3), r"value_heads to be a multiple of key_heads, but they are 3 and 2"),
    (lambda: config_with(key_dim=0), r"`key_dim=0` must be at least 1"),
    (lambda: config_with(conv_width=0), r"`conv_width=0` must be at least 1"),
    (
        lambda: config_with(variant=variants.sla, key_dim=6),
        r"key_dim to be a multiple of decay_tiles, but they are 6 and 4",
    ),
    (lambda: config_with(has_rate=False), r"`has_rate=False` \(no `A_log`\) needs a bounded decay"),
    (
        lambda: config_with(decay_rates=(0, 16)),
        r"`decay_rates=\(0.0, 16.0\)` must be \(low, high\) with 0 < low <= high",
    ),
    (lambda: config_with(output_gate="tanh"), r"`MixerConfig\(output_gate='tanh'\)` is not known: use one of 'silu'"),
    (lambda: config_with(norm_numerics="fast"), r"`MixerConfig\(norm_numerics='fast'\)` is not known"),
    (lambda: config_with(init="zeros"), r"`MixerConfig\(init='zeros'\)` is not known"),
    (lambda: config_with(step_init="twos"), r"`MixerConfig\(step_init='twos'\)` is not known"),
    (lambda: config_with(qkv_activation="relu"), r"`MixerConfig\(qkv_activation='relu'\)` is not known"),
    (lambda: config_with(norm_eps=0), r"`norm_eps=0.0` must be above 0"),
    (lambda: GDN(8, decay_rank="half", key=KEY), r"A rank of 'half' is not known: use a number, 'value_dim', or None"),
    (lambda: GDN(8, key_heads=2, value_heads=3, key=KEY), r"value_heads to be a multiple of key_heads"),
    (lambda: SLA(8, erase="row", key=KEY), r"`Variant\(erase='row'\)` is not known"),
    (
        lambda: SLA(8, doubled_beta=True, inverse="approx", key=KEY),
        r"`inverse='approx'` needs gates with `erase_max` of at",
    ),
    (lambda: GDN(8, inverse="neumann", key=KEY), r"`inverse='neumann'` is not known"),
    (lambda: GDN(8, inverse="truncated:3", key=KEY), r"`inverse='truncated:3'` is right only where decay is strong"),
    (lambda: GDN(8, precision="bf16", key=KEY), r"`precision='bf16'` must be one of"),
    (lambda: BoundedDecay(8, 2, 2, bound=-6, key=KEY), r"`BoundedDecay\(bound=-6.0\)` must lie in \[-5, 0\)"),
    (lambda: MixerConfig.from_json("[]"), r"needs a JSON object with an object `variant`"),
    (
        lambda: MixerConfig.from_json(edited(pages=3)),
        r"no `MixerConfig`: unknown entries \['pages'\], missing entries \[\]",
    ),
    (
        lambda: MixerConfig.from_json(edited("model")),
        r"no `MixerConfig`: unknown entries \[\], missing entries \['model'\]",
    ),
    (lambda: MixerConfig.from_json(edited(variant={"gate": 1})), r"no `Variant`: unknown entries \['gate'\]"),
]


def edited(*without, **changes):
    record = json.loads(config_with().to_json())
    return json.dumps({name: value for name, value in {**record, **changes}.items() if name not in without})


@pytest.mark.parametrize("make, message", REFUSED, ids=lambda p: p[:40] if isinstance(p, str) else "")
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: config_with(model=8.0), r"`model` must be a Python int, since it is a shape, but a float came"),
        (lambda: config_with(variant="gdn"), r"`MixerConfig\(variant=...\)` must be a `Variant`, but a str came"),
        (
            lambda: config_with(norm_eps="1e-5"),
            r"`norm_eps` must be a Python number, since it is static, but a str came",
        ),
        (lambda: GDN(8, decay_bound="-5", key=KEY), r"`log_decay_min` must be a Python number"),
        (lambda: GDN(8.0, key=KEY), r"`model` must be a Python int"),
        (lambda: GatedDeltaMixer("gdn", key=KEY), r"`GatedDeltaMixer` needs a `MixerConfig`, but a str came"),
    ],
)
def test_what_is_of_the_wrong_type_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


def test_arguments_that_do_not_fit_are_refused():
    mixer = shape_of(GDN, 8, key_heads=2, key_dim=4)
    x, state = np.zeros((2, 5, 8), np.float32), eqx.filter_eval_shape(mixer.init_state, 2)
    single = eqx.filter_eval_shape(mixer.init_state)

    def call(x, *args, **options):
        return eqx.filter_eval_shape(lambda mixer: mixer(x, *args, **options), mixer)

    offsets, ids = np.array([0, 2, 5]), np.zeros((2, 5), int)
    for arguments, options, error, message in (
        ((x[..., :7],), {}, ValueError, r"`x` must be \[time, model\] or \[batch, time, model\] with model = 8, but"),
        ((x[None],), {}, ValueError, r"`x` must be \[time, model\] or"),
        ((x.astype(int),), {}, TypeError, r"`x` must hold floating-point numbers, but its dtype is int64"),
        (("text",), {}, TypeError, r"`x` must be a JAX or NumPy array of floating-point numbers, but a str came"),
        (
            (x, single),
            {},
            ValueError,
            r"`state.q_window` must have the shape \(2, 3, 8\) for this call, but it is \(3, 8\)",
        ),
        ((x[0], state), {}, ValueError, r"`state.q_window` must have the shape \(3, 8\) for this call"),
        ((x, x), {}, TypeError, r"`state` must be a `MixerState`, but a NumPy array came"),
        (
            (x[0], state),
            dict(cu_seqlens=np.array([0, 5])),
            ValueError,
            r"must have the shape \(1, 3, 8\) for this call",
        ),
        (
            (x,),
            dict(mask=np.ones((2, 5))),
            TypeError,
            r"`mask` must be a boolean JAX or NumPy array.*dtype float64 came",
        ),
        ((x,), dict(mask=[True]), TypeError, r"`mask` must be a boolean JAX or NumPy array.*a list came"),
        (
            (x,),
            dict(mask=np.ones((2, 4), bool)),
            ValueError,
            r"`mask` must have one entry per token, \(2, 5\), but its",
        ),
        (
            (x[0],),
            dict(mask=np.ones((2, 5), bool)),
            ValueError,
            r"`mask` must be \[time\] where `x` is \[time, model\]",
        ),
        ((x[0],), dict(segment_ids=ids), ValueError, r"`segment_ids` must be \[time\] where `x` is \[time, model\]"),
        ((x,), dict(segment_ids=ids[:, :4]), ValueError, r"`segment_ids` must be \[batch, time\] = \(2, 5\)"),
        ((x,), dict(segment_ids=ids.astype(float)), TypeError, r"`segment_ids` must hold integers"),
        ((x,), dict(segment_ids=np.array([[0, 1, 0, 1, 1]] * 2)), ValueError, r"`segment_ids` must rise along time"),
        ((x,), dict(cu_seqlens=offsets), ValueError, r"needs batch 1, but batch is 2"),
        (
            (x[0],),
            dict(cu_seqlens=offsets, segment_ids=ids[0]),
            ValueError,
            r"Give `segment_ids` or `cu_seqlens`, not both",
        ),
    ):
        with pytest.raises(error, match=message):
            call(*arguments, **options)
    with pytest.raises(TypeError, match=r"`step` needs a state: begin with `mixer.init_state\(\)`"):
        mixer.step(x[0, 0], None)
    with pytest.raises(ValueError, match=r"`x` must be one token, \[model\] or \[batch, model\], with model = 8"):
        mixer.step(x, state)


def test_ids_of_masked_tokens_need_not_rise():
    mixer, x = shape_of(GDN, 8, key_heads=2, key_dim=4), np.zeros((1, 4, 8), np.float32)
    ids, mask = np.array([[0, 7, 1, 1]]), np.array([[True, False, True, True]])
    out, _ = eqx.filter_eval_shape(lambda mixer: mixer(x, segment_ids=ids, mask=mask), mixer)
    assert out.shape == x.shape


def test_names_of_the_layers_are_public():
    for name in (
        "GDN",
        "KDA",
        "GDN2",
        "SLA",
        "SystolicLinearAttention",
        "DeltaNet",
        "GLA",
        "GatedDeltaMixer",
        "MixerConfig",
        "MixerState",
    ):
        assert getattr(gated_delta, name).__doc__
    assert MixerState.__annotations__.keys() == {"q_window", "k_window", "v_window", "recurrent"}
