"""Bugs that others have reported of layers of this kind, as inputs to ours. A number in a docstring names the case."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import GDN, GDN2, KDA, SLA, SoftplusDecay
from gated_delta._activations import l2_normalize
from gated_delta.testing.laws import draw_parameters

# Compiles five times faster; the arithmetic is the same but for the order of some sums.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(eqx.filter_jit, compiler_options=FAST)
MODEL = 16
MAKERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=2, key_dim=32),
    "kda": functools.partial(KDA, MODEL, key_heads=2, key_dim=8),
    "gdn2": functools.partial(GDN2, MODEL, key_heads=2, key_dim=8),
    "sla": functools.partial(SLA, MODEL, group=2, key_heads=1, key_dim=8, value_dim=8),
}


@functools.cache
def make_mixer(name, seed=0):
    return draw_parameters(eqx.filter_eval_shape(MAKERS[name], key=jax.random.key(0)), seed)


def cast(mixer, dtype):
    return jax.tree.map(lambda a: np.asarray(a).astype(dtype), mixer)


@fast_jit
def run(mixer, x, state=None, mask=None, ids=None, offsets=None):
    return mixer(x, state, mask=mask, segment_ids=ids, cu_seqlens=offsets)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_within(tolerance, actual, expected):
    """`max |actual - expected| / max |expected|` of every array."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        assert np.abs(a - e).max() <= tolerance * np.abs(e).max() + 1e-30


def index(state, place):
    return jax.tree.map(lambda a: np.asarray(a)[place], state)


# ---- gates and norms -------------------------------------------------------------------------------------------------


def test_gate_parameters_in_float16_are_raised_before_the_exponential():
    """C09: e^11.5 is above the largest float16."""
    decay = eqx.filter_eval_shape(SoftplusDecay, 4, 2, 1, key=jax.random.key(0))
    stored = (np.full(2, 11.5, np.float16), np.full((2, 1), -10.0, np.float16), np.zeros((2, 4), np.float16))
    decay = eqx.tree_at(lambda d: (d.A_log, d.dt_bias, d.project.weight), decay, tuple(map(jnp.asarray, stored)))
    for dtype in (np.float16, np.float32):
        log_decay = fast_jit(decay)(np.ones((3, 4), dtype))
        assert log_decay.dtype == jnp.float32
        np.testing.assert_allclose(log_decay, -4.48, rtol=0.01)


@pytest.mark.parametrize("name", ["gdn", pytest.param("gdn2", marks=pytest.mark.slow)])
def test_a_layer_cast_to_bfloat16_as_a_whole(name):
    """C09: a user's tree map casts the gate parameters too; the gate is still computed in float32."""
    mixer, x = make_mixer(name), draw(0, 2, 70, MODEL).astype(jnp.bfloat16)
    low = cast(mixer, jnp.bfloat16)
    same = cast(low, np.float32)
    out, _ = run(low, x)
    expected, _ = run(same, x.astype(jnp.float32))
    assert out.dtype == jnp.bfloat16
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    assert np.sqrt(np.sum((out - expected) ** 2) / np.sum(expected**2)) <= 1e-2
    gate = fast_jit(lambda mixer, x: mixer.decay(x))
    assert gate(low, x).dtype == jnp.float32
    # A low-rank input passes its bottleneck in the dtype of x; from there on it is float32 as well.
    tolerance = 1e-5 if name == "gdn" else 1e-2
    assert_within(tolerance, gate(low, x), gate(same, x.astype(jnp.float32)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_zero_vector_through_the_norm(dtype):
    """C34: the documented slope at zero is eps ** -0.5 = 1000."""
    x = draw(0, 5, 8)
    x[2] = 0

    @fast_jit
    def pull(x):
        out, pull = jax.vjp(l2_normalize, x)
        return out, pull(jnp.ones_like(out))[0]

    out, d_x = (np.asarray(a, np.float32) for a in pull(jnp.asarray(x, dtype)))
    others = np.array([0, 1, 3, 4])
    assert not np.any(out[2]) and np.all(np.isfinite(d_x)) and np.abs(d_x).max() <= 1000
    without, d_without = (np.asarray(a, np.float32) for a in pull(jnp.asarray(x[others], dtype)))
    np.testing.assert_array_equal(out[others], without)
    np.testing.assert_array_equal(d_x[others], d_without)


@pytest.mark.parametrize("name", [pytest.param("gdn", marks=pytest.mark.slow), "gdn2"])
def test_a_token_of_zeros_through_the_layer(name):
    """C34: query and key are exactly 0 there, since the convolutions have no bias."""
    mixer, x = make_mixer(name), draw(0, 2, 9, MODEL)
    x[0, :4] = 0
    gradients = fast_jit(eqx.filter_grad(lambda arguments: jnp.sum(arguments[0](arguments[1])[0] ** 2)))((mixer, x))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize("dtype, row", [("float16", np.full(128, 300.0)), ("bfloat16", np.full(256, 0.0101))])
def test_norms_are_summed_in_float32(dtype, row):
    """C41: the sum of squares is above the largest float16; in bfloat16 it would stop growing."""
    x = jnp.asarray(row, dtype)
    out = l2_normalize(x)
    assert out.dtype == dtype
    values = np.asarray(x, np.float64)
    expected = values / np.sqrt(np.sum(values**2) + 1e-6)
    spacing = float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(expected[0]))
    assert np.abs(np.asarray(out, np.float64) - expected).max() <= 2 * spacing


# ---- packing and padding ---------------------------------------------------------------------------------------------


@fast_jit
def pull(mixer, x, cotangent, ids, offsets):
    def loss(arguments):
        out, state = arguments[0](arguments[1], segment_ids=ids, cu_seqlens=offsets)
        return jnp.sum(out * cotangent), (out, state)

    return eqx.filter_value_and_grad(loss, has_aux=True)((mixer, x))


def test_states_and_windows_stop_at_the_boundary():
    """C18: width 4, 2 heads of 32 x 32; outputs, states, windows and gradients of every slice as if alone."""
    mixer, lengths = make_mixer("gdn"), np.array([5, 64, 1, 63, 67])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    x, cotangent = draw(0, 200, MODEL), draw(1, 200, MODEL)
    slices = [slice(*offsets[i : i + 2]) for i in range(5)]
    # Alone: rows padded behind their end, where no mask is needed because nothing looks ahead.
    rows, row_cotangents = (np.zeros((5, 67, MODEL), np.float32) for _ in range(2))
    for row, tokens in enumerate(slices):
        rows[row, : lengths[row]], row_cotangents[row, : lengths[row]] = x[tokens], cotangent[tokens]
    (_, (alone, _)), (d_mixer, d_alone) = pull(mixer, rows, row_cotangents, None, None)
    real = np.arange(67) < lengths[:, None]
    ids = np.repeat(np.arange(5), lengths)
    for packing in ((ids, None), (None, offsets)):
        (_, (out, state)), (packed_d_mixer, d_x) = pull(mixer, x, cotangent, *packing)
        assert_within(2e-5, out, np.asarray(alone)[real])
        assert_within(2e-5, d_x, np.asarray(d_alone)[real])
        assert_within(2e-5, packed_d_mixer, d_mixer)
    states = states_of_steps(mixer, rows, mixer.init_state(5))
    for row, length in enumerate(lengths):
        assert_within(2e-5, index(state, row), index(states, (length - 1, row)))


@fast_jit
def states_of_steps(mixer, x, state):
    """The state after every token, one by one."""

    def body(state, token):
        state = mixer.step(token, state)[1]
        return state, state

    return jax.lax.scan(body, state, jnp.swapaxes(x, 0, 1))[1]


def test_an_all_true_mask_beside_offsets_changes_nothing_and_a_contradiction_raises():
    """C25"""
    mixer, x, offsets = make_mixer("gdn"), draw(0, 1, 40, MODEL), np.array([0, 12, 40])
    expected = run(mixer, x, offsets=offsets)
    masked = run(mixer, x, mask=np.ones((1, 40), bool), offsets=offsets)
    assert_within(1e-6, masked, expected)
    wrong = np.ones((1, 40), bool)
    wrong[0, 20] = False
    with pytest.raises(ValueError, match=r"`mask` contradicts `cu_seqlens`: token 20 belongs to a document"):
        eqx.filter_eval_shape(lambda mixer: mixer(x, mask=wrong, cu_seqlens=offsets), mixer)
    # Where the values are traced nothing can raise: the token is padding, as documented.
    out, state = run(mixer, x, mask=wrong, offsets=offsets)
    assert not np.any(np.asarray(out)[0, 20])
    without, last = run(mixer, np.delete(x, 20, axis=1), offsets=np.array([0, 12, 39]))
    assert_within(2e-5, (np.delete(out, 20, axis=1), state), (without, last))


@pytest.mark.parametrize("name", ["gdn", "sla", *(pytest.param(n, marks=pytest.mark.slow) for n in ("kda", "gdn2"))])
def test_any_split_gives_the_same_answer(name):
    """C27: the parts are right-padded to one length, so that they share a program."""
    mixer, x = make_mixer(name), draw(0, 1, 150, MODEL)
    whole = run(mixer, x, mixer.init_state(1), np.ones((1, 150), bool))
    for cuts in ([1], [2], [3], [63], [64], [65], [149], [50, 100]):
        state, outs = mixer.init_state(1), []
        for first, last in zip([0, *cuts], [*cuts, 150]):
            part = np.zeros_like(x)
            part[:, : last - first] = x[:, first:last]
            out, state = run(mixer, part, state, np.arange(150)[None] < last - first)
            outs.append(np.asarray(out)[:, : last - first])
        assert_within(2e-5, (np.concatenate(outs, axis=1), state), whole)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_the_state_keeps_its_dtypes_over_many_steps():
    """C31: 256 single steps in bfloat16 as the body of a scan, which refuses a carry that changes its type."""
    mixer, x = make_mixer("gdn"), draw(0, 2, 256, MODEL).astype(jnp.bfloat16)

    @fast_jit
    def decode(mixer, x, state):
        def body(state, token):
            out, state = mixer.step(token, state)
            return state, out

        return jax.lax.scan(body, state, jnp.swapaxes(x, 0, 1))

    state, out = decode(mixer, x, mixer.init_state(2, dtype=jnp.bfloat16))
    assert out.dtype == state.q_window.dtype == jnp.bfloat16 and state.recurrent.dtype == jnp.float32
    # Each step rounds the same values as the whole, so all that differs is the order of float32 sums.
    whole_out, whole = run(mixer, x)
    assert_within(1e-2, (np.swapaxes(np.asarray(out), 0, 1), state.q_window), (whole_out, whole.q_window))
    exact = mixer.init_state(2, dtype=jnp.bfloat16)
    low = eqx.tree_at(lambda s: s.recurrent, exact, exact.recurrent.astype(jnp.bfloat16))
    stored, _ = decode(mixer, x[:, :5], low)
    assert stored.recurrent.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["gdn2"])
def test_no_state_equals_a_state_of_zeros(name):
    """C33: outputs and gradients; losses on the output only, on the state only, and on both."""
    mixer, x = make_mixer(name), draw(0, 2, 9, MODEL)

    @fast_jit
    def pull(mixer, x, state, weights):
        def loss(arguments):
            out, new = arguments[0](arguments[1], state)
            return weights[0] * jnp.sum(out**2) + weights[1] * jnp.sum(new.recurrent**2)

        return eqx.filter_value_and_grad(loss)((mixer, x))

    parts = []
    for weights in (jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]), jnp.array([1.0, 1.0])):
        without, zero = (pull(mixer, x, state, weights) for state in (None, mixer.init_state(2)))
        assert_within(1e-6, without, zero)
        parts.append(zero)
    assert_within(1e-6, jax.tree.map(lambda a, b: np.asarray(a) + np.asarray(b), parts[0], parts[1]), parts[2])


# ---- transformations -------------------------------------------------------------------------------------------------


def test_rematerialisation_changes_nothing():
    """C37: under filter_checkpoint, and inside a scan whose body is checkpointed."""
    mixer, x = make_mixer("gdn"), draw(0, 1, 130, MODEL)

    def in_scan(mixer, x):
        arrays, static = eqx.partition(mixer, eqx.is_array)
        stacked = jax.tree.map(lambda a: a[None], arrays)

        @jax.checkpoint
        def body(x, arrays):
            return eqx.combine(arrays, static)(x)[0], None

        return jax.lax.scan(body, x, stacked)[0]

    forms = (lambda m, x: m(x)[0], lambda m, x: eqx.filter_checkpoint(m)(x)[0], in_scan)
    plain, *others = (
        fast_jit(eqx.filter_value_and_grad(lambda arguments, form=form: jnp.mean(form(*arguments) ** 2)))((mixer, x))
        for form in forms
    )
    for other in others:
        assert_within(1e-6, other, plain)


@pytest.mark.parametrize("name", MAKERS)
def test_type_checks_hold_under_every_transformation(name):
    """C48: tracing is enough, types are checked nowhere else."""
    mixer, x, shape = make_mixer(name), jnp.zeros((2, 5, MODEL)), eqx.filter_eval_shape

    def loss(mixer, x):
        return jnp.sum(mixer(x)[0])

    out, state = shape(eqx.filter_jit(mixer), x)
    assert out.shape == x.shape and state.recurrent.dtype == jnp.float32
    d_mixer = shape(eqx.filter_grad(lambda mixer, x: loss(eqx.filter_checkpoint(mixer), x)), mixer, x)
    assert d_mixer.o_proj.weight.shape == mixer.o_proj.weight.shape
    assert shape(jax.vmap(jax.grad(lambda x: loss(mixer, x))), x).shape == x.shape
    assert shape(jax.vmap(jax.vmap(mixer)), x[None])[0].shape == (1, *x.shape)
    assert shape(eqx.filter_vmap(mixer, in_axes=1), x)[0].shape == (5, 2, MODEL)
    assert shape(lambda x: jax.vmap(mixer.step)(x, mixer.init_state(2)), x[:, 0])[0].shape == (2, MODEL)
    assert jax.tree.map(lambda _: None, mixer).config == mixer.config
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), mixer)
    assert shape(loss, eqx.combine(*eqx.partition(shapes, eqx.is_array)), x).shape == ()
    assert jax.tree.map(lambda a: a, state).recurrent.shape == state.recurrent.shape
    for call in (mixer, eqx.filter_jit(mixer), functools.partial(shape, mixer)):
        with pytest.raises(ValueError, match=rf"`x` must be .* with model = {MODEL}, but its shape is \(2, 5, 3\)"):
            call(x[..., :3])


@pytest.mark.parametrize("name", MAKERS)
def test_equal_configurations_are_one_structure_and_one_compilation(name):
    """C49, C51: also after the parameters have been updated."""
    first, second = make_mixer(name), make_mixer.__wrapped__(name, 1)
    structures = [jax.tree.structure(mixer) for mixer in (first, second)]
    assert structures[0] == structures[1] and hash(structures[0]) == hash(structures[1])
    assert hash(first.config) == hash(second.config)
    traces = []

    @fast_jit
    def call(mixer, x):
        traces.append(None)
        return jnp.sum(mixer.q_proj(x))

    updated = jax.tree.map(lambda a: 0.9 * a, first)
    for mixer in (first, second, updated):
        call(mixer, jnp.ones((2, MODEL)))
    assert len(traces) == 1


def test_stacked_layers():
    """C50: built by filter_vmap; called by filter_vmap with output axes 1 and -1, and by scan, against a loop."""
    keys, x = jax.random.split(jax.random.key(0), 3), jnp.asarray(draw(0, 2, 5, MODEL))
    layers = fast_jit(eqx.filter_vmap(lambda key: MAKERS["gdn2"](key=key)))(keys)
    arrays, static = eqx.partition(layers, eqx.is_array)
    call = fast_jit(lambda mixer, x: mixer(x)[0])
    singles = [eqx.combine(index(arrays, i), static) for i in range(3)]
    loop = [np.asarray(call(single, x)) for single in singles]
    for axis in (1, -1):
        every = fast_jit(eqx.filter_vmap(lambda mixer, x: mixer(x)[0], in_axes=(eqx.if_array(0), None), out_axes=axis))
        assert_within(1e-6, every(layers, x), np.stack(loop, axis=axis))

    @fast_jit
    def scan(arrays, x):
        return jax.lax.scan(lambda x, arrays: (x + eqx.combine(arrays, static)(x)[0], None), x, arrays)[0]

    expected = x
    for single in singles:
        expected = expected + call(single, expected)
    assert_within(1e-6, scan(arrays, x), expected)
