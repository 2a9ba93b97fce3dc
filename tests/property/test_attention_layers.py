"""The softmax attention layer: its formula; pieces, steps, documents and padding are what they are elsewhere."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_delta import AttentionConfig, KVCache, SoftmaxAttention, cast_params, weight_decay_mask
from gated_delta.attention import BlockedAttention, PagedKVCache
from gated_delta.serving import StatePool, pooled_step, prefill
from gated_delta.testing import quick_jit

from .attention import dense

MODEL, ROWS, TIME = 12, 2, 11
PLAIN = AttentionConfig(MODEL, query_heads=3)
FULL = AttentionConfig(
    MODEL,
    query_heads=4,
    kv_heads=2,
    key_dim=8,
    value_dim=5,
    capacity=24,
    rotary=0.5,
    rotary_base=100.0,
    qk_norm="head",
    norm_one_plus=True,
    output_gate="sigmoid",
    softcap=3.0,
)
RING = dataclasses.replace(FULL, window=4, capacity=None, qk_norm="all", norm_one_plus=False, output_gate="silu")
CONFIGS = {"full": FULL, "ring": RING}
configs = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
quick_configs = pytest.mark.parametrize(
    "config", [pytest.param(FULL, marks=pytest.mark.slow), RING], ids=CONFIGS.keys()
)


@functools.cache
def mixer_of(config):
    """With norms that are not their first values."""
    mixer = quick_jit(lambda key: SoftmaxAttention(config, backend=BlockedAttention(4, 8), key=key))(jax.random.key(0))
    norms = [x for x in (mixer.q_norm, mixer.k_norm) if x is not None]
    rng = np.random.default_rng(1)
    for index in range(len(norms)):
        where = lambda m, index=index: (m.q_norm, m.k_norm)[index].weight  # noqa: E731
        weight = where(mixer)
        mixer = eqx.tree_at(where, mixer, weight + 0.3 * rng.standard_normal(weight.shape).astype(weight.dtype))
    return mixer


def inputs(seed=0, rows=ROWS, time=TIME):
    return np.random.default_rng(seed).standard_normal((rows, time, MODEL)).astype(np.float32)


@functools.cache
def runner(config):
    mixer = mixer_of(config)
    return quick_jit(lambda x, state, mask, ids: mixer(x, state, mask=mask, segment_ids=ids))


@functools.cache
def stepper(config):
    return quick_jit(lambda x, state: mixer_of(config).step(x, state))


def by_hand(config, mixer, x):
    """The layer in NumPy, float64, one document a row."""
    heads, kv_heads, key_dim, value_dim = config.sizes
    x = x.astype(np.float64)

    def project(linear, x):
        return x @ np.asarray(linear.weight).astype(np.float64).T

    def normed(x, norm, count):
        x = x.reshape(*x.shape[:2], count, key_dim)
        if norm is None:
            return x
        weight = np.asarray(norm.weight).astype(np.float64) + (1 if config.norm_one_plus else 0)
        axes = (2, 3) if config.qk_norm == "all" else (3,)
        size = np.sqrt(np.mean(np.square(x), axis=axes, keepdims=True) + config.norm_eps)
        return x / size * weight.reshape(-1, key_dim)

    def turned(x):
        half = config.rotary_channels // 2
        for i in range(half):
            angle = np.arange(x.shape[1])[None, :, None] * config.rotary_base ** (-i / half)
            pair = x[..., i] + 1j * x[..., i + half]
            pair = pair * np.exp(1j * angle)
            x = x.copy()
            x[..., i], x[..., i + half] = pair.real, pair.imag
        return x

    q = turned(normed(project(mixer.q_proj, x), mixer.q_norm, heads))
    k = turned(normed(project(mixer.k_proj, x), mixer.k_norm, kv_heads))
    v = project(mixer.v_proj, x).reshape(*x.shape[:2], kv_heads, value_dim)
    distance = np.arange(x.shape[1])[:, None] - np.arange(x.shape[1])[None]
    visible = (distance >= 0) & (distance < (config.window or x.shape[1]))
    visible = np.broadcast_to(visible, (x.shape[0], *visible.shape))
    out = dense(
        q,
        k,
        v,
        visible,
        scale=key_dim**-0.5 if config.scale is None else config.scale,
        softcap=config.softcap,
        d_out=np.zeros((*q.shape[:3], value_dim)),
        d_log_sum_exp=np.zeros(q.shape[:3]),
    )["out"]
    out = out.reshape(*x.shape[:2], -1)
    if mixer.out_gate is not None:
        gate = project(mixer.out_gate.project, x)
        out = out * (gate if config.output_gate == "silu" else 1) / (1 + np.exp(-gate))
    return project(mixer.o_proj, out)


@pytest.mark.parametrize(
    "config", [pytest.param(PLAIN, marks=pytest.mark.slow), *CONFIGS.values()], ids=["plain", *CONFIGS]
)
def test_the_layer_is_its_formula(config):
    x = inputs()
    out, _ = runner(config)(x, None, None, None)
    np.testing.assert_allclose(out, by_hand(config, mixer_of(config), x), atol=2e-6)


@pytest.mark.smoke
@quick_configs
@settings(max_examples=4)
@given(seed=st.integers(0, 2**16), cut=st.integers(0, TIME))
def test_a_state_goes_on_at_any_cut(config, seed, cut):
    """Padded parts of one length, so that one program runs."""
    x = inputs(seed)
    run = runner(config)
    whole, end = run(x, None, None, None)
    first = np.arange(TIME)[None] < np.full((ROWS, 1), cut)
    out, state = run(x, mixer_of(config).init_state(ROWS, dtype=x.dtype), first, None)
    again, state = run(np.roll(x, -cut, axis=1), state, np.arange(TIME)[None] < np.full((ROWS, 1), TIME - cut), None)
    np.testing.assert_allclose(np.concatenate([out[:, :cut], again[:, : TIME - cut]], axis=1), whole, atol=1e-5)
    assert jax.tree.structure(state) == jax.tree.structure(end)
    for name in ("keys", "values", "count", "lost"):
        np.testing.assert_allclose(getattr(state, name), getattr(end, name), atol=1e-5, err_msg=name)


@quick_configs
def test_steps_are_the_whole_and_keep_shapes_and_dtypes(config):
    x, mixer = inputs(), mixer_of(config)
    whole, end = runner(config)(x, None, None, None)

    def body(state, token):
        out, state = mixer.step(token, state)
        return state, out

    state, outs = quick_jit(lambda x, state: jax.lax.scan(body, state, jnp.swapaxes(x, 0, 1)))(
        x, mixer.init_state(ROWS)
    )
    np.testing.assert_allclose(jnp.swapaxes(outs, 0, 1), whole, atol=1e-5)
    np.testing.assert_array_equal(state.count, end.count)


def test_a_sequence_without_a_batch_is_a_batch_of_one():
    x, mixer = inputs(), mixer_of(RING)
    whole, states = runner(RING)(x, None, None, None)
    out, state = runner(RING)(x[0], None, None, None)
    np.testing.assert_allclose(out, whole[0], atol=1e-5)
    assert state.keys.shape == states.keys.shape[1:] and state.count.shape == ()
    out, state = stepper(RING)(x[0, 0], mixer.init_state())
    np.testing.assert_allclose(out, whole[0, 0], atol=1e-5)
    assert state.keys.shape == states.keys.shape[1:] and state.count.shape == ()


@quick_configs
def test_documents_are_what_they_are_alone_and_padding_is_nothing(config):
    """With a state, which goes on in the first document; the state returned is that of the last."""
    x, run, mixer = inputs(3), runner(config), mixer_of(config)
    _, state = run(inputs(4), mixer.init_state(ROWS), np.ones((ROWS, TIME), bool), None)
    ids = np.array([[0, 0, 0, -1, 3, 3, 3, 3, 3, 7, 7], [-1, 2, 2, 2, 2, 2, 2, 2, 2, 2, -1]], np.int32)
    loud = np.where(ids[..., None] < 0, np.nan, x).astype(np.float32)
    out, end = run(loud, state, None, ids)
    assert not np.asarray(out)[ids < 0].any()
    for row, document in ((0, 0), (0, 3), (0, 7), (1, 2)):
        where = ids[row] == document
        tokens = np.zeros((ROWS, TIME, MODEL), np.float32)
        tokens[:, : where.sum()] = x[row, where]
        mask = np.broadcast_to(np.arange(TIME)[None] < where.sum(), (ROWS, TIME))
        begin = state if document in (0, 2) else mixer.init_state(ROWS)
        begin = jax.tree.map(lambda a, row=row: np.asarray(a)[[row, row]], begin)
        alone, after = run(tokens, begin, mask, None)
        np.testing.assert_allclose(out[row, where], alone[0, : where.sum()], atol=1e-5)
        if document in (7, 2):
            count, capacity = int(after.count[0]), after.keys.shape[1]
            assert int(end.count[row]) == count
            entries = np.arange(max(0, count - capacity), count) % capacity
            np.testing.assert_allclose(end.keys[row, entries], after.keys[0, entries], atol=1e-5)


@pytest.mark.slow
@configs
def test_a_mask_beside_ids_is_ids_with_padding(config):
    x, run = inputs(3), runner(config)
    ids = np.array([[0, 0, 0, 1, 1, 3, 3, 3, 3, 7, 7]] * ROWS, np.int32)
    mask = np.random.default_rng(0).random(ids.shape) < 0.7
    masked, _ = run(x, None, mask, ids)
    np.testing.assert_allclose(masked, run(x, None, None, np.where(mask, ids, -1))[0], atol=1e-6)


def test_a_bad_token_spoils_what_sees_it_and_no_gradient():
    x, mixer = inputs(5), mixer_of(RING)
    clean, _ = runner(RING)(x, None, None, None)
    x[0, 4, 7] = np.inf
    out, state = runner(RING)(x, None, None, None)
    marks = np.zeros((ROWS, TIME), bool)
    marks[0, 4:8] = True
    assert np.isnan(out[marks]).all()
    np.testing.assert_array_equal(out[~marks], clean[~marks])
    assert np.isfinite(state.keys).all() and state.lost.tolist() == [[4, 4], [-1, -1]]
    out, _ = stepper(RING)(x[:, 0], state)  # 11 stands 7 behind 4: out of sight
    assert np.isfinite(out).all()

    def loss(mixer, x):
        out, _ = mixer(x)
        return jnp.sum(jnp.where(jnp.isfinite(out), out, 0))

    gradient = quick_jit(lambda mixer, x: eqx.filter_grad(loss)(mixer, x))

    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient(mixer, x)))


@pytest.mark.slow
def test_prefill_pools_and_pages_give_what_the_layer_gives():
    """A long prompt in pieces, into a pool's slots, and on from there: contiguous by `StatePool`, or in pages."""
    x, mixer = inputs(6, time=16), mixer_of(FULL)
    whole, _ = quick_jit(lambda x: mixer(x))(x)
    lengths = np.array([10, 6], np.int32)

    @quick_jit
    def read(x):
        step = lambda x, state, mask: mixer(x, state, mask=mask)  # noqa: E731
        return prefill(step, x, mixer.init_state(ROWS), piece=4, lengths=lengths)

    done = read(x[:, :10])
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(done.out[row], whole[row, length - 1], atol=1e-5)
    slots = np.array([4, 1], np.int32)
    pool = StatePool(mixer.init_state(), slots=5).scatter(slots, done.state)
    paged = PagedKVCache.empty(5, pages=16, page_size=4, slot_pages=6, kv_heads=2, key_dim=8, value_dim=5)

    @quick_jit
    def extend(x, cache, slots, lengths):
        if isinstance(cache, PagedKVCache):
            cache = cache.reserve(slots, lengths)
        return mixer.extend(x, cache, slots, lengths=lengths)

    token = quick_jit(lambda x, states, slots: pooled_step(mixer, x, states, slots))
    out, paged = extend(x[:, :10], paged, slots, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(out[row, :length], whole[row, :length], atol=1e-5)
        assert not np.asarray(out)[row, length:].any()
    for states in (pool.states, paged):
        for ahead in range(3):
            tokens = x[np.arange(ROWS), lengths + ahead]
            if isinstance(states, PagedKVCache):
                states = states.reserve(slots, np.ones(ROWS, np.int32))
            out, states = token(tokens, states, slots)
            np.testing.assert_allclose(out, whole[np.arange(ROWS), lengths + ahead], atol=1e-5)


@pytest.mark.slow
def test_dtypes_follow_x_and_states_keep_theirs():
    x, mixer = jnp.asarray(inputs(), jnp.bfloat16), mixer_of(FULL)
    run = quick_jit(lambda x, state: mixer(x, state))
    out, state = run(x, None)
    assert out.dtype == state.keys.dtype == jnp.bfloat16 and state.count.dtype == jnp.int32
    exact, _ = runner(FULL)(inputs(), None, None, None)
    assert np.abs(np.asarray(out, np.float32) - exact).max() < 0.03 * np.abs(exact).max()
    state = mixer.init_state(ROWS, dtype=jnp.bfloat16)
    out, state = jax.eval_shape(run, x, state)
    assert state.keys.dtype == jnp.bfloat16
    out, state = jax.eval_shape(run, x, mixer.init_state(ROWS))
    assert out.dtype == jnp.bfloat16 and state.keys.dtype == jnp.float32
    assert mixer.init_state(3).keys.dtype == jnp.float32 and mixer.init_state(3, capacity=7).keys.shape == (3, 7, 2, 8)
    assert cast_params(mixer, jnp.bfloat16).q_norm.weight.dtype == jnp.bfloat16
    decayed = weight_decay_mask(mixer)
    assert decayed.q_proj.weight and decayed.out_gate.project.weight and not decayed.q_norm.weight


def test_configs_are_json_and_know_their_sizes():
    for config in (PLAIN, FULL, RING):
        assert AttentionConfig.from_json(config.to_json()) == config
    assert PLAIN.sizes == (3, 3, 4, 4) and FULL.rotary_channels == 4
    with pytest.raises(
        ValueError, match=r"no `AttentionConfig`: unknown entries \['heads'\], missing entries \['query_"
    ):
        AttentionConfig.from_json('{"model": 4, "heads": 2}')
    with pytest.raises(ValueError, match="needs a JSON object"):
        AttentionConfig.from_json("[]")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(query_heads=5), ValueError, "needs `key_dim` where query_heads = 5 does not divide model = 12"),
        (dict(kv_heads=2), ValueError, "query_heads to be a multiple of kv_heads, but they are 3 and 2"),
        (dict(window=0), ValueError, "`window=0` must be at least 1"),
        (dict(window=4, capacity=3), ValueError, "a state must hold a whole window"),
        (dict(rotary=0.3), ValueError, r"an even number of the key_dim = 4 channels turn, but it is 1.2"),
        (dict(rotary=1.5), ValueError, "must lie in 0 to 1"),
        (
            dict(qk_norm="l2"),
            ValueError,
            "`AttentionConfig.qk_norm='l2'.` is not known: use one of 'none', 'head', 'all'",
        ),
        (dict(output_gate="relu"), ValueError, "use one of 'silu', 'sigmoid'"),
        (dict(softcap=0.0), ValueError, "`softcap=0.0` must be above 0 and finite"),
        (dict(norm_one_plus=1), TypeError, "`norm_one_plus` must be True or False"),
        (dict(key_dim=2.0), TypeError, "`key_dim` must be a Python int"),
    ],
)
def test_configs_that_mean_nothing_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        AttentionConfig(**dict(model=MODEL, query_heads=3) | changes)


def test_what_does_not_fit_is_said():
    mixer, x = mixer_of(PLAIN), inputs()
    with pytest.raises(TypeError, match=r"needs an `AttentionConfig`, but an? int came"):
        SoftmaxAttention(3, key=jax.random.key(0))
    with pytest.raises(TypeError, match="`backend` must be an attention backend such as"):
        SoftmaxAttention(PLAIN, backend="dense", key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"`x` must be .* with model = 12, but its shape is"):
        mixer(x[..., :5])
    with pytest.raises(ValueError, match="`init_state` needs `capacity`"):
        mixer.init_state()
    with pytest.raises(ValueError, match="must be at least the window of 4 tokens"):
        mixer_of(RING).init_state(capacity=3)
    with pytest.raises(TypeError, match=r"`state` must be a `KVCache`, but an? int came"):
        mixer(x, 3)
    with pytest.raises(ValueError, match=r"`state` must have keys \[..., capacity, 3, 4\] .* leading axes \(2,\) for"):
        mixer(x, mixer.init_state(capacity=4))
    with pytest.raises(TypeError, match=r"`step` needs a state: begin with"):
        mixer.step(x[:, 0], None)
    with pytest.raises(ValueError, match=r"`mask` must be .time. where `x` is"):
        mixer(x[0], mask=np.ones((2, 3), bool))


@pytest.mark.slow
def test_a_state_without_room_says_so_by_nan():
    _, full = runner(PLAIN)(inputs(), None, None, None)
    assert isinstance(full, KVCache) and full.capacity == TIME
    out, full = stepper(PLAIN)(inputs()[:, 0], full)
    assert np.isnan(out).all()
