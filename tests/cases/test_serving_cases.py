"""Cases C30, C32, C46 and C57 to C59: snapshots, ways back, states updated in place, and the short convolution."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import GDN, KDA, ShortConv
from gated_delta._rows import make_rows
from gated_delta.serving import StatePool, begin_replay, commit, end_replay, prefill, window
from gated_delta.testing.laws import draw_parameters

from .harness import assert_within, little_optimised

pytestmark = pytest.mark.inference
MODEL = 16


@functools.cache
def make_mixer(maker=GDN):
    make = functools.partial(maker, MODEL, key_heads=2, value_heads=2, key_dim=16, value_dim=8)
    return draw_parameters(eqx.filter_eval_shape(make, key=jax.random.key(0)), 0)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def leaves(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def row_of(tree, row):
    return jax.tree.map(lambda a: np.asarray(a)[row], tree)


@functools.cache
def _recurrence(maker):
    mixer = make_mixer(maker)

    def body(state, token):
        out, state = mixer.step(token, state)
        return state, (out, state)

    return little_optimised(lambda x, state: jax.lax.scan(body, state, jnp.swapaxes(x, 0, 1))[1])


def recurrence(x, state, maker=GDN):
    """Token by token: outputs, and the states after 0, 1, 2, ... tokens."""
    out, states = _recurrence(maker)(x, state)
    return np.swapaxes(out, 0, 1), [state, *(row_of(states, t) for t in range(x.shape[1]))]


# ---- states ----------------------------------------------------------------------------------------------------------


def test_snapshots_at_the_ends_of_whole_chunks_and_the_last_state_behind_the_rest():
    """C30: 130 tokens in chunks of 64; beside them a row that ends with a chunk, and one without tokens."""
    mixer, x, lengths = make_mixer(), draw(0, 3, 130, MODEL), np.array([130, 64, 0])
    begin = mixer.init_state(3)

    @little_optimised
    def run(x, lengths):
        return prefill(lambda x, s, m: mixer(x, s, mask=m), x, begin, piece=64, lengths=lengths, snapshots=True)

    behind = np.where(np.arange(130)[:, None] < lengths[:, None, None], x, np.nan)
    result = run(behind, lengths)
    seen = np.array([[0, 0, 0], [64, 64, 0], [128, 64, 0], [130, 64, 0]])
    np.testing.assert_array_equal(result.snapshots.tokens, seen)
    outs, states = recurrence(x, begin)
    for row, length in enumerate(lengths):
        expected = [row_of(states[n], row) for n in (*seen[:, row], length)]
        actual = [row_of(result.snapshots.states, (i, row)) for i in range(4)] + [row_of(result.state, row)]
        for a, e in zip(actual, expected, strict=True):
            assert_within(2e-5, leaves(a), leaves(e))
        assert_within(2e-5, {"out": result.out[row]}, {"out": outs[row, length - 1] if length else np.zeros(MODEL)})


def test_two_of_four_drafted_tokens_are_accepted():
    """C32: the state is that of a clean run of two; the saved ones were not changed."""
    mixer, x = make_mixer(KDA), draw(0, 1, 4, MODEL)
    start = jax.tree.map(lambda a: jnp.asarray(draw(1, *a.shape)), mixer.init_state(1))
    saved = start, begin_replay(mixer, start)
    before = jax.tree.map(np.array, saved)

    @little_optimised
    def run(x, saved):
        windows = [window(mixer, x, state, keep=keep)[1] for state, keep in zip(saved, ("all", "replay"))]
        state, replay = commit(windows, 2)
        return state, end_replay(mixer, replay)

    _, states = recurrence(x, start, KDA)
    for state in run(x, saved):
        assert_within(1e-6, leaves(state), leaves(states[2]))
    jax.tree.map(np.testing.assert_array_equal, saved, before)


def test_recurrent_and_convolution_states_updated_in_place():
    """C46: plain, under jit, with donation, under vmap; without donation the caller's arrays are unchanged."""
    initial = {"window": jnp.zeros((3, 8)), "recurrent": jnp.zeros((2, 16, 8))}
    x, slots = draw(0, 2), np.array([2, 0])

    def step(pool, slots, x):
        def go_on(a):
            return 0.5 * a + x.reshape(2, *(1,) * (a.ndim - 1))

        return pool.scatter(slots, jax.tree.map(go_on, pool.gather(slots)))

    def make_pool():
        pool = StatePool(initial, 3)
        return eqx.tree_at(
            lambda p: p.states, pool, jax.tree.map(lambda a: jnp.asarray(draw(1, *a.shape)), pool.states)
        )

    pool, given = make_pool(), make_pool()
    before = jax.tree.map(np.array, pool)
    two = jax.tree.map(lambda a: jnp.stack([a, a]), pool)
    results = [
        step(pool, slots, x),
        jax.jit(step)(pool, slots, x),
        row_of(jax.jit(jax.vmap(step))(two, np.stack([slots] * 2), np.stack([x] * 2)), 1),
        jax.jit(step, donate_argnums=0)(given, slots, x),
    ]
    jax.tree.map(np.testing.assert_array_equal, pool, before)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.states))
    for result in results:
        for name, old in leaves(before.states).items():
            expected = np.stack([0.5 * old[0] + x[1], old[1], 0.5 * old[2] + x[0]])
            np.testing.assert_allclose(leaves(result.states)[name], expected, rtol=1e-6, atol=1e-6)


# ---- the short convolution -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2])
def test_left_padding_leaves_no_trace(batch):
    """C57: 5 tokens of padding with embeddings of size 10."""
    mixer, real = make_mixer(), draw(0, batch, 15, MODEL)
    padding = draw(1, batch, 5, MODEL)
    padding *= 10 / np.linalg.norm(padding, axis=-1, keepdims=True)
    run = little_optimised(lambda x, mask: mixer(x, mask=jnp.broadcast_to(mask, x.shape[:2])))
    time = jnp.arange(20)
    out, state = run(np.concatenate([padding, real], axis=1), time >= 5)
    expected, wanted = run(np.concatenate([real, 0 * padding], axis=1), time < 15)
    assert not np.any(out[:, :5])
    assert_within(2e-5, {"out": out[:, 5:]} | leaves(state), {"out": expected[:, :15]} | leaves(wanted))


def make_conv(channels, bias):
    conv = eqx.filter_eval_shape(ShortConv, channels, 4, bias=bias, key=jax.random.key(0))
    return draw_parameters(conv, 0)


@pytest.mark.parametrize("activation", [None, jax.nn.silu], ids=["none", "silu"])
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_fewer_tokens_than_the_width(bias, activation):
    """C58: against the last rows of a long run that begins with zeros."""
    conv, long = make_conv(5, bias), np.concatenate([np.zeros((1, 3, 5), np.float32), draw(0, 1, 9, 5)], axis=1)

    def act(x):
        return x if activation is None else activation(x)

    @little_optimised
    def run(x, window):
        out, window = conv(x, window)
        return act(out), window

    whole, _ = run(long, None)
    for time in (1, 2, 3):
        for first in (3, 9):  # behind zeros alone, and behind other tokens
            x, before = long[:, first : first + time], long[:, first - 3 : first]
            out, new = run(x, before)
            assert_within(1e-6, {"out": out}, {"out": whole[:, first : first + time]})
            np.testing.assert_array_equal(new, long[:, first + time - 3 : first + time])
            if first == 3:
                without, last = run(x, None)
                assert_within(1e-6, {"out": without}, {"out": out})
                np.testing.assert_array_equal(last, new)


def test_gradients_of_packed_convolutions_are_those_of_each_document():
    """C59: lengths 1, 2, 3, 4, 50; documents with windows of their own."""
    lengths, conv = [1, 2, 3, 4, 50], make_conv(24, True)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    x, windows = draw(0, 1, 60, 24), draw(1, 5, 3, 24)
    d_out, d_new = draw(2, 1, 60, 24), draw(3, 5, 3, 24)

    @little_optimised
    def pull_packed(conv, x, windows):
        rows = make_rows(None, None, offsets, 1, 60)
        results, pull = jax.vjp(lambda conv, x, windows: conv(x, windows, rows.documents), conv, x, windows)
        return results, pull((d_out, d_new))

    # Alone: rows padded behind their end; only what lies before it is differentiated.
    padded, d_padded = np.zeros((5, 50, 24), np.float32), np.zeros((5, 50, 24), np.float32)
    for i, length in enumerate(lengths):
        tokens = slice(offsets[i], offsets[i + 1])
        padded[i, :length], d_padded[i, :length] = x[0, tokens], d_out[0, tokens]

    @little_optimised
    def pull_alone(conv, x, windows):
        def run(conv, x, windows):
            out, _ = conv(x, windows)
            seen = jnp.concatenate([windows, x], axis=1)
            return out, jnp.stack([seen[i, length : length + 3] for i, length in enumerate(lengths)])

        results, pull = jax.vjp(run, conv, x, windows)
        return results, pull((d_padded, d_new))

    (out, new), (d_conv, d_x, d_windows) = pull_packed(conv, x, windows)
    (alone, alone_new), (d_alone, d_alone_x, d_alone_windows) = pull_alone(conv, padded, windows)
    real = np.arange(50) < np.array(lengths)[:, None]
    np.testing.assert_array_equal(new, alone_new)
    actual = {"out": out[0], "d_x": d_x[0], "d_windows": d_windows}
    expected = {"out": alone[real], "d_x": d_alone_x[real], "d_windows": d_alone_windows}
    assert_within(1e-6, actual, expected)
    assert_within(1e-5, leaves(d_conv), leaves(d_alone))
