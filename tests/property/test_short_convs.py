"""The operator behind short convolutions: wherever these are done, it is `gated_delta_raw` of what they give."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

from gated_delta import GDN, KDA, SLA, Chunked, GatedDeltaMixer, RawGates, Recurrent, ShortConvs, gated_delta_raw
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.sharding import PerDevice
from gated_delta.testing import quick_jit

KERNEL = PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)
IN_A_ROW = PallasTPU(TileConfig(chunk_size=16, chunks=2), interpret=True)
BUDGET = {"float32": 2e-5, "bfloat16": 1e-1}
"""Relative RMS, as in `test_raw.py`."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Sizes, and what the gates are: `groups` of decays, owned by key heads if `shared`."""

    time: int = 37
    width: int = 4
    key_heads: int = 2
    group: int = 2
    key_dim: int = 8
    value_dim: int = 6
    groups: int = 1
    shared: bool = False
    erases: bool = True
    windows: bool = True
    dtype: str = "float32"
    seed: int = 0
    batch: int = 2

    def arguments(self):
        """Those of `gated_delta_raw`, and cotangents of its results."""
        rng = np.random.default_rng(self.seed)
        value_heads = self.key_heads * self.group
        owners = self.key_heads if self.shared else value_heads

        def draw(*shape, dtype="float32"):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        dims = {"q": (self.key_heads, self.key_dim), "k": (self.key_heads, self.key_dim)}
        dims["v"] = (value_heads, self.value_dim)
        vectors = {name: draw(self.batch, self.time, *dim, dtype=self.dtype) for name, dim in dims.items()}
        weights = {name: 0.5 * draw(self.width, *dim) for name, dim in dims.items()}
        windows = {
            f"{name}_window": draw(self.batch, self.width - 1, *dim, dtype=self.dtype) if self.windows else None
            for name, dim in dims.items()
        }
        tokens = self.batch, self.time, owners
        made = RawGates.tied if self.erases else lambda _, *gates, **parameters: RawGates(*gates, **parameters)
        parameters = {"A_log": draw(owners), "dt_bias": draw(owners, self.groups)}
        gates = made(draw(*tokens), draw(*tokens, self.groups), **parameters)
        state = draw(self.batch, value_heads, self.key_dim, self.value_dim)
        cotangents = draw(*vectors["v"].shape, dtype=self.dtype), draw(*state.shape)
        convs = ShortConvs(**weights, **windows)
        return vectors | {"gates": gates, "convs": convs, "initial_state": state}, cotangents


@functools.cache
def compiled(backend):
    return quick_jit(functools.partial(gated_delta_raw, backend=backend))


@functools.cache
def compiled_gradient(backend):
    def both(arguments, cotangents):
        out, pull = jax.vjp(lambda given: gated_delta_raw(**given, backend=backend), arguments)
        return out, pull(cotangents)[0]

    return quick_jit(both)


def convolved(x, weight, window):
    """By the formula, in the dtype of the arguments."""
    width, time = weight.shape[0], x.shape[1]
    window = jnp.zeros((x.shape[0], width - 1, *x.shape[2:]), x.dtype) if window is None else window
    padded = jnp.concatenate([window, x], axis=1)
    out = sum(weight[m] * padded[:, m : m + time] for m in range(width))
    return out / (1 + jnp.exp(-out))


@quick_jit
def by_formula(arguments, cotangents):
    def run(q, k, v, gates, convs, initial_state):
        q, k, v = (convolved(*x) for x in zip((q, k, v), convs.weights, convs.windows, strict=True))
        return gated_delta_raw(q, k, v, gates, initial_state=initial_state, backend=Recurrent())

    out, pull = jax.vjp(lambda given: run(**given), arguments)
    return out, pull(cotangents)[0]


def expected(arguments, cotangents):
    """In float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(np.float64)), (arguments, cotangents))
        return jax.tree.map(np.asarray, by_formula(*wide))


def assert_near(actual, wanted, dtype):
    actual, wanted = (jax.tree_util.tree_leaves_with_path(x) for x in (actual, wanted))
    for (path, x), (_, want) in zip(actual, wanted, strict=True):
        assert x.shape == want.shape
        error = np.linalg.norm(np.asarray(x).astype(np.float64) - want)
        name = jax.tree_util.keystr(path)
        assert error <= BUDGET[dtype] * np.linalg.norm(want), f"{name} is off by {error:.2g}"


CASES = {
    "gdn": Case(),
    "sla": Case(groups=4, shared=True, group=3),
    "kda, without windows": Case(groups=8, group=1, shared=True, windows=False),
    "two taps": Case(width=2),
    "one tap": Case(width=1),
    "five taps, which is all that a step sees": Case(width=5, time=16),
    "more taps than a step sees": Case(width=6),
    "more taps than tokens": Case(time=2),
    "one token": Case(time=1),
    "wide keys and values": Case(key_dim=130, value_dim=140, key_heads=1),
    "gla: no gate says that padding writes nothing": Case(groups=8, group=1, shared=True, erases=False),
    "bfloat16": Case(dtype="bfloat16", group=1),
    "kda in bfloat16": Case(dtype="bfloat16", groups=8, group=1, shared=True),
    "odd heads in bfloat16": Case(dtype="bfloat16", key_heads=3, group=1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gdn" else pytest.mark.slow) for name in CASES]
)
def test_kernels_convolve(name):
    """Without a gradient inside of the kernel, with one before it."""
    case = CASES[name]
    arguments, cotangents = case.arguments()
    wanted, gradient = expected(arguments, cotangents)
    assert_near(compiled(KERNEL)(**arguments), wanted, case.dtype)
    if name == "gdn":
        return  # the gradient's kernels are those of other tests; see the slow cases
    assert_near(compiled_gradient(KERNEL)(arguments, cotangents), (wanted, gradient), case.dtype)


@pytest.mark.slow
def test_chunks_in_a_row_follow_each_other():
    case = Case(time=70)
    arguments, cotangents = case.arguments()
    assert_near(compiled(IN_A_ROW)(**arguments), expected(arguments, cotangents)[0], case.dtype)


@pytest.mark.parametrize(
    "name", ["gdn", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "gdn")]
)
@given(seed=st.integers(0, 99))
def test_backends_that_do_not_convolve_get_what_is_convolved(name, seed):
    case = dataclasses.replace(CASES[name], seed=seed)
    arguments, cotangents = case.arguments()
    assert_near(compiled_gradient(Chunked(16))(arguments, cotangents), expected(arguments, cotangents), case.dtype)


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("split", [2, *(pytest.param(split, marks=pytest.mark.slow) for split in (1, 20))])
def test_pieces_with_the_last_inputs_between_them_are_the_whole(backend, split):
    arguments, _ = Case().arguments()
    wanted = compiled(backend)(**arguments)
    convs, gates, state = arguments["convs"], arguments["gates"], arguments["initial_state"]
    outs = []
    for piece in (slice(0, split), slice(split, None)):
        part = {name: arguments[name][:, piece] for name in "qkv"}
        own = dataclasses.replace(gates, raw_decay=gates.raw_decay[:, piece], raw_erase=gates.raw_erase[:, piece])
        out, state = compiled(backend)(**part, gates=own, convs=convs, initial_state=state)
        windows = {f"{name}_window": last(getattr(convs, f"{name}_window"), part[name]) for name in "qkv"}
        convs = dataclasses.replace(convs, **windows)
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, axis=1), wanted[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, wanted[1], rtol=0, atol=2e-5)


def last(window, x):
    return jnp.concatenate([window, x], axis=1)[:, -window.shape[1] :]


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name, value", [("v", np.nan), ("k", np.inf), ("v_window", np.nan)])
def test_an_input_that_is_not_finite_spoils_its_own_heads_from_there_on(backend, name, value):
    arguments, cotangents = Case().arguments()
    (clean, _), clean_gradient = compiled_gradient(backend)(arguments, cotangents)
    index = (0, 2 if name == "v_window" else 9, 1, 3)
    if name == "v_window":
        convs = arguments["convs"]
        arguments["convs"] = dataclasses.replace(convs, v_window=convs.v_window.at[index].set(value))
    else:
        arguments[name] = arguments[name].at[index].set(value)
    lost = np.zeros(clean.shape[:3], bool)
    lost[0, 0 if name == "v_window" else 9 :, slice(2, 4) if name == "k" else slice(1, 2)] = True
    (out, _), gradient = compiled_gradient(backend)(arguments, cotangents)
    for found in (out, compiled(backend)(**arguments)[0]):
        np.testing.assert_array_equal(np.isnan(found).all(-1), lost)
        np.testing.assert_allclose(found[~lost], clean[~lost], rtol=0, atol=2e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradient))
    np.testing.assert_allclose(gradient["v"][1], clean_gradient["v"][1], rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
def test_a_mapped_axis_of_the_weights_is_an_ensemble(backend):
    arguments, _ = Case(batch=1).arguments()
    convs = arguments["convs"]
    weights = jnp.stack([convs.v, 2 * convs.v])

    @quick_jit
    def run(weights):
        def member(v):
            return gated_delta_raw(**{**arguments, "convs": dataclasses.replace(convs, v=v)}, backend=backend)

        return jax.vmap(member)(weights)

    outs, states = run(weights)
    for n, v in enumerate(weights):
        out, state = compiled(backend)(**{**arguments, "convs": dataclasses.replace(convs, v=v)})
        np.testing.assert_allclose(outs[n], out, rtol=0, atol=2e-5)
        np.testing.assert_allclose(states[n], state, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("inner", [Chunked(16), KERNEL], ids=str)
def test_devices_convolve_their_own_rows_and_heads(inner):
    arguments, _ = Case().arguments()
    if len(jax.devices("cpu")) < 4:
        pytest.skip("needs four devices")
    axes = ("rows", "heads"), (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), axes[0], axis_types=axes[1], devices=jax.devices("cpu")[:4])
    out, state = quick_jit(functools.partial(gated_delta_raw, backend=PerDevice(inner, *axes[0], mesh)))(**arguments)
    wanted = compiled(Chunked(16))(**arguments)
    np.testing.assert_allclose(out, wanted[0], rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, wanted[1], rtol=0, atol=2e-5)


def test_no_token_leaves_the_state():
    arguments, _ = Case(time=0).arguments()
    out, state = gated_delta_raw(**arguments)
    assert out.shape == (2, 0, 4, 6)
    np.testing.assert_array_equal(state, arguments["initial_state"])


# ---- layers ----------------------------------------------------------------------------------------------------------

MODEL = 12
LAYERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    "kda": functools.partial(KDA, MODEL, key_heads=2, key_dim=8, value_dim=6),
    "sla": functools.partial(SLA, MODEL, group=2, key_heads=2, key_dim=8, value_dim=6),
}


def spied(monkeypatch):
    calls = []

    def run(*arguments, **options):
        calls.append(options)
        return gated_delta_raw(*arguments, **options)

    monkeypatch.setattr("gated_delta._layer.gated_delta_raw", run)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("batched", [False, True])
def test_layers_leave_convolutions_to_kernels(name, batched, monkeypatch):
    """Over two calls, the second of two tokens, with the outputs and the states that they have elsewhere."""
    calls = spied(monkeypatch)
    mixer = LAYERS[name](key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 21, MODEL) if batched else (21, MODEL))

    def in_pieces(backend):
        state, outs = None, []
        given = eqx.tree_at(lambda m: m.backend, mixer, backend, is_leaf=lambda x: x is None)
        arrays, static = eqx.partition(given, eqx.is_array)
        run = quick_jit(lambda arrays, x, state: eqx.combine(arrays, static)(x, state))
        for piece in (slice(0, 19), slice(19, 21)):
            out, state = run(arrays, x[..., piece, :], state)
            outs.append(out)
        return jnp.concatenate(outs, axis=-2), state

    wanted = in_pieces(Chunked(16))
    assert not calls
    actual = in_pieces(KERNEL)
    assert calls and all(call["convs"] is not None for call in calls)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_layers_convolve_what_a_kernel_would_not(monkeypatch):
    """Packed documents, biases, other activations, and convolutions of one's own."""
    calls = spied(monkeypatch)
    x = jax.random.normal(jax.random.key(1), (1, 5, MODEL))
    plain = LAYERS["gdn"](key=jax.random.key(0), backend=KERNEL)
    eqx.filter_eval_shape(plain, x)
    assert calls.pop()["convs"] is not None
    eqx.filter_eval_shape(plain, x, segment_ids=jnp.zeros((1, 5), jnp.int32))
    for changes in ({"conv_bias": True}, {"qkv_activation": "none"}, {"conv_width": None}):
        config = dataclasses.replace(plain.config, **changes)
        eqx.filter_eval_shape(GatedDeltaMixer(config, key=jax.random.key(0), backend=KERNEL), x)

    class Own(type(plain.q_conv)):
        pass

    own = eqx.tree_at(lambda m: m.q_conv, plain, Own(16, key=jax.random.key(2)))
    eqx.filter_eval_shape(own, x)
    assert len(calls) == 5 and all(call["convs"] is None for call in calls)


# ---- errors ----------------------------------------------------------------------------------------------------------


def with_convs(**changes):
    arguments, _ = Case().arguments()
    return {**arguments, "convs": dataclasses.replace(arguments["convs"], **changes)}


ERRORS = {
    "type": (
        lambda: Case().arguments()[0] | {"convs": 4},
        TypeError,
        "`convs` must be a `gated_delta.ShortConvs` or None, but an int",
    ),
    "weights": (
        lambda: with_convs(v=jnp.zeros((4, 2, 6))),
        ValueError,
        r"`convs.v` must be \[width, heads, dim\] with the 4 heads x 6 of `v` .* but its shape is \(4, 2, 6\)",
    ),
    "widths": (lambda: with_convs(k=jnp.zeros((3, 2, 8))), ValueError, "`convs.k` must be .* one width for all three"),
    "window": (
        lambda: with_convs(k_window=jnp.zeros((2, 4, 2, 8))),
        ValueError,
        r"`convs.k_window` must be \[batch, width - 1, heads, dim\] = \(2, 3, 2, 8\), but its shape is \(2, 4, 2, 8\)",
    ),
    "packed": (
        lambda: with_convs() | {"segment_ids": jnp.zeros((2, 37), jnp.int32)},
        ValueError,
        "`convs` needs rows of one document each, but `segment_ids` or `cu_seqlens` came",
    ),
    "integers": (lambda: with_convs(q=jnp.zeros((4, 2, 8), int)), TypeError, "`convs.q` must hold floating-point"),
}


@pytest.mark.parametrize("cause, error, message", ERRORS.values(), ids=ERRORS)
def test_an_error_says_what_is_needed_and_what_came(cause, error, message):
    with pytest.raises(error, match=message):
        gated_delta_raw(**cause())
