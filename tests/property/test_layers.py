"""Layers: padding, packing, splitting and batching change nothing, and nothing spoils more than its own document."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings

from gated_delta import GDN, GDN2, GLA, KDA, SLA, Chunked, Recurrent
from gated_delta.testing import LAYER_LAWS, Layer
from gated_delta.testing._conformance import ask_law
from gated_delta.testing.laws import draw_parameters

MODEL, BATCH, TIME = 12, 2, 21
BUDGET = 1e-5  # relative RMS: that of the operator in float32
MAKERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=2, value_heads=4, key_dim=4, value_dim=3),
    "kda": functools.partial(KDA, MODEL, key_heads=2, key_dim=4, value_dim=3, decay_bound=-5, has_rate=False),
    "gdn2": functools.partial(GDN2, MODEL, key_heads=2, value_heads=4, key_dim=4, value_dim=3, conv_bias=True),
    "sla": functools.partial(SLA, MODEL, group=2, key_heads=2, key_dim=4, value_dim=3, conv_width=None),
    "gla": functools.partial(GLA, MODEL, key_heads=2, value_heads=4, key_dim=4, value_dim=3),
}
# Compiles five times faster; the arithmetic is the same but for the order of some sums.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(eqx.filter_jit, compiler_options=FAST)
variants = pytest.mark.parametrize("name", MAKERS)


@functools.cache
def make_mixer(name):
    return draw_parameters(eqx.filter_eval_shape(MAKERS[name], key=jax.random.key(0)), len(name))


@fast_jit
def run(mixer, x, state, mask, ids, offsets):
    return mixer(x, state, mask=mask, segment_ids=ids, cu_seqlens=offsets)


@fast_jit
def run_steps(mixer, tokens, state):
    def body(state, token):
        out, state = mixer.step(token, state)
        return state, (out, state)

    return jax.lax.scan(body, state, tokens)[1]


def index(state, place):
    return jax.tree.map(lambda a: np.asarray(a)[place], state)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_state(mixer, seed, *batch):
    leaves, structure = jax.tree.flatten(eqx.filter_eval_shape(mixer.init_state, *batch))
    return jax.tree.unflatten(structure, [draw(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])


def alone(mixer, tokens, state):
    """The oracle: a document by itself, token by token, without any mask."""
    padded = np.zeros((TIME, MODEL), np.float32)
    padded[: len(tokens)] = tokens
    out, states = run_steps(mixer, padded, state)
    return np.asarray(out)[: len(tokens)], index(states, len(tokens) - 1) if len(tokens) else state


def zeros(state):
    return jax.tree.map(np.zeros_like, state)


def assert_same(actual, expected):
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        if a.size:
            error = np.sqrt(np.mean((a - e) ** 2)) / (np.sqrt(np.mean(e**2)) + 1e-30)
            assert error <= BUDGET, f"off by {error:.2g} in relative RMS"


@variants
@pytest.mark.parametrize("law", ["layer_documents", "layer_offsets", "layer_causality"])
def test_the_law_holds(name, law):
    subject = Layer(name, make_mixer(name), MODEL)
    outcome = ask_law(LAYER_LAWS[law], subject, max_examples=settings.default.max_examples)
    assert outcome.status == "passed", f"{outcome.message}  {outcome.line}"


@pytest.mark.parametrize("name", ["gdn2", pytest.param("sla", marks=pytest.mark.slow)])
def test_batched_unbatched_and_vmapped_calls_agree(name):
    mixer = make_mixer(name)
    x, state = draw(0, BATCH, TIME, MODEL), draw_state(mixer, 1, BATCH)
    batched = run(mixer, x, state, None, None, None)
    vmapped = fast_jit(lambda mixer, x, state: jax.vmap(mixer)(x, state))(mixer, x, state)
    single = run(mixer, x[0], index(state, 0), None, None, None)
    assert_same(vmapped, batched)
    assert_same(single, index(batched, 0))
    assert_same(single, alone(mixer, x[0], index(state, 0)))


@fast_jit
def pull(mixer, x, cotangent, ids):
    def loss(arguments):
        return jnp.sum(arguments[0](arguments[1], segment_ids=ids)[0] * cotangent)

    return eqx.filter_grad(loss)((mixer, x))


@pytest.mark.parametrize("name", ["sla"])
def test_gradients_under_padding_and_packing(name):
    """A row of two documents and padding, against the two as rows of their own whose tails have no cotangent."""
    mixer, lengths = make_mixer(name), (12, 7)
    x, cotangent = draw(0, 2, TIME, MODEL), draw(1, 2, TIME, MODEL)
    real = np.arange(TIME) < np.array(lengths)[:, None]

    d_mixer, d_x = pull(mixer, x, np.where(real[..., None], cotangent, 0), None)
    ids = np.array([[-1, *[0] * lengths[0], *[1] * lengths[1], -1]], np.int32)
    packed, packed_cotangent = (
        np.concatenate([draw(2, 1, MODEL), *(a[row, : lengths[row]] for row in range(2)), draw(3, 1, MODEL)])[None]
        for a in (x, cotangent)
    )
    packed_d_mixer, packed_d_x = pull(mixer, packed, packed_cotangent, ids)
    assert_same(packed_d_mixer, d_mixer)
    packed_d_x = np.asarray(packed_d_x)
    assert_same(packed_d_x[ids == 0], d_x[0, : lengths[0]])
    assert_same(packed_d_x[ids == 1], d_x[1, : lengths[1]])
    assert not np.any(packed_d_x[ids < 0])


@fast_jit
def pull_past(mixer, x, state, ids, ignored):
    """Outputs and state, and gradients of the outputs that are not `ignored`."""

    def loss(arguments):
        out, new = arguments[0](arguments[1], state, segment_ids=ids)
        return jnp.sum(jnp.where(ignored[..., None], 0, out) ** 2), (out, new)

    (_, results), gradients = eqx.filter_value_and_grad(loss, has_aux=True)((mixer, x))
    return results, gradients


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["gdn", "sla"])
def test_a_token_that_is_not_finite_spoils_its_document_from_there_on(name, value):
    mixer, bad, begin = make_mixer(name), 5, 12
    ids = np.broadcast_to((np.arange(TIME) >= begin).astype(np.int32), (BATCH, TIME))
    x, state = draw(0, BATCH, TIME, MODEL), draw_state(mixer, 1, BATCH)
    spoiled = x.copy()
    spoiled[0, bad, 3] = value
    hit = np.zeros((BATCH, TIME), bool)
    hit[0, bad:begin] = True
    (expected, last), (d_mixer, d_x) = pull_past(mixer, x, state, ids, hit)
    (out, new), (spoiled_d_mixer, spoiled_d_x) = pull_past(mixer, spoiled, state, ids, hit)
    out, expected, d_x, spoiled_d_x = (np.asarray(a) for a in (out, expected, d_x, spoiled_d_x))
    assert np.all(np.isnan(out[hit]))
    assert_same(out[~hit], expected[~hit])
    assert_same(new, last)  # of the last document
    assert_same(spoiled_d_x[~hit], d_x[~hit])
    assert np.all(spoiled_d_x[hit] == 0) and np.all(d_x[hit] == 0)
    assert_same(spoiled_d_mixer, d_mixer)


def test_a_state_that_is_spoiled_spoils_the_call_that_continues_it():
    mixer = make_mixer("gdn")
    x = draw(0, BATCH, TIME, MODEL)
    x[0, -2] = np.nan
    _, state = run(mixer, x, zeros(draw_state(mixer, 0, BATCH)), None, None, None)
    out, _ = run(mixer, draw(1, BATCH, TIME, MODEL), state, None, None, None)
    assert np.all(np.isnan(out[0])) and np.all(np.isfinite(out[1]))


def test_backends_agree():
    mixer, x = make_mixer("gdn2"), draw(0, BATCH, TIME, MODEL)
    state = draw_state(mixer, 1, BATCH)
    results = [
        run(eqx.tree_at(lambda m: m.backend, mixer, backend, is_leaf=lambda a: a is None), x, state, None, None, None)
        for backend in (Chunked(16), Recurrent())
    ]
    assert_same(*results)


LOW = [("gdn", "bfloat16"), ("sla", "bfloat16"), ("gdn2", "float16")]
MORE = [("kda", "bfloat16"), ("gdn2", "bfloat16"), ("gla", "bfloat16"), ("gdn", "float16")]


@pytest.mark.parametrize("name, dtype", [*LOW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_low_precision_inputs(name, dtype):
    mixer, x = make_mixer(name), draw(0, BATCH, TIME, MODEL)
    expected, _ = run(mixer, x, zeros(draw_state(mixer, 0, BATCH)), None, None, None)
    out, state = run(mixer, x.astype(dtype), None, None, None, None)
    assert out.dtype == dtype and state.recurrent.dtype == jnp.float32
    assert state.v_window is None or state.v_window.dtype == dtype
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    error = np.sqrt(np.mean((out - expected) ** 2) / np.mean(expected**2))
    assert error <= 2e-2  # x, weights and what is between them are rounded, not only what the operator gets


@pytest.mark.parametrize("name", ["gdn2", "sla"])
def test_empty_inputs(name):
    mixer = make_mixer(name)
    state = draw_state(mixer, 1, BATCH)
    for x, before, mask, ids, offsets in (
        (draw(0, 0, MODEL), draw_state(mixer, 1), None, None, None),
        (draw(0, BATCH, 0, MODEL), state, None, None, None),
        (draw(0, 0, TIME, MODEL), draw_state(mixer, 1, 0), None, None, None),
        (draw(0, BATCH, 0, MODEL), state, np.ones((BATCH, 0), bool), np.zeros((BATCH, 0), int), None),
        (draw(0, 0, MODEL), state, None, None, np.array([0, 0, 0])),
    ):
        out, new = run(mixer, x, before, mask, ids, offsets)
        assert out.shape == x.shape
        jax.tree.map(np.testing.assert_array_equal, new, before)


def test_a_backend_that_is_none_is_refused_before_the_layer_is_built():
    with pytest.raises(TypeError, match=r"`backend` must be a backend such as .*, or None, but a str came"):
        MAKERS["gdn"](backend="recurrent", key=jax.random.key(0))
