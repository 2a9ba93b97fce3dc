"""The short convolution sees the last real inputs of its own document, wherever these lie, and nothing else."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gated_delta import ShortConv
from gated_delta._rows import make_rows
from gated_delta.testing import segment_ids

BATCH, TIME, CHANNELS = 2, 13, 3
# Compiles five times faster; the arithmetic is the same but for the order of some sums.
FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(eqx.filter_jit, compiler_options=FAST)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@functools.cache
def make_conv(width):
    return eqx.tree_at(
        lambda conv: (conv.weight, conv.bias),
        eqx.filter_eval_shape(ShortConv, CHANNELS, width, bias=True, key=jax.random.key(0)),
        (draw(width, width, CHANNELS), draw(width + 1, CHANNELS)),
    )


@fast_jit
def _convolve(conv, x, window, mask, ids, offsets):
    rows = make_rows(mask, ids, offsets, *x.shape[:2])
    out, window = conv(rows.gather(x), window, rows.documents)
    return rows.scatter(out), window


def convolve(*arguments):
    return jax.tree.map(np.asarray, _convolve(*arguments))


def naive(conv, inputs, window):
    """One document in NumPy: outputs of every input, and the last inputs."""
    weight, bias = (np.asarray(a, np.float64) for a in (conv.weight, conv.bias))
    seen = np.concatenate([window, inputs])
    width = len(weight)
    out = [np.sum(weight * seen[i : i + width], axis=0) + bias for i in range(len(inputs))]
    return np.reshape(out, inputs.shape), seen[len(seen) - (width - 1) :]


widths = pytest.mark.parametrize("width", [1, 2, 4])
masks = st.lists(st.lists(st.booleans(), min_size=TIME, max_size=TIME), min_size=BATCH, max_size=BATCH)


@widths
@given(ids=segment_ids(batch=BATCH, time=TIME), mask=masks, seed=st.integers(0, 99))
def test_rows_of_documents_with_padding_anywhere(width, ids, mask, seed):
    conv = make_conv(width)
    x, window = draw(seed, BATCH, TIME, CHANNELS), draw(seed + 1, BATCH, width - 1, CHANNELS)
    mask = np.array(mask)
    out, new = convolve(conv, x, window, mask, ids, None)
    ids = np.where(mask, ids, -1)
    for row in range(BATCH):
        last = window[row]
        real = ids[row] >= 0
        for index, document in enumerate(np.unique(ids[row][real])):
            tokens = ids[row] == document
            expected, last = naive(conv, x[row, tokens], last if index == 0 else np.zeros_like(last))
            np.testing.assert_allclose(out[row, tokens], expected, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(new[row], last)
        assert not np.any(out[row][~real])


@widths
@given(cuts=st.lists(st.integers(0, TIME), min_size=4, max_size=4), seed=st.integers(0, 99))
def test_documents_with_windows_of_their_own(width, cuts, seed):
    conv = make_conv(width)
    offsets = np.array([0, *sorted(cuts)], np.int32)
    x, windows = draw(seed, 1, TIME, CHANNELS), draw(seed + 1, 4, width - 1, CHANNELS)
    out, new = convolve(conv, x, windows, None, None, offsets)
    for document in range(4):
        tokens = slice(offsets[document], offsets[document + 1])
        expected, last = naive(conv, x[0, tokens], windows[document])
        np.testing.assert_allclose(out[0, tokens], expected, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(new[document], last)  # bit for bit, also where a document is empty
    assert not np.any(out[0, offsets[-1] :])


@given(cut=st.integers(0, TIME), seed=st.integers(0, 99))
def test_a_sequence_in_two_calls(cut, seed):
    conv = make_conv(4)
    x, window = draw(seed, BATCH, TIME, CHANNELS), draw(seed + 1, BATCH, 3, CHANNELS)
    whole, last = convolve(conv, x, window, np.ones((BATCH, TIME), bool), None, None)
    first, second = (np.where((np.arange(TIME) < cut) == side, True, False) for side in (True, False))
    first, second = (np.broadcast_to(mask, (BATCH, TIME)) for mask in (first, second))
    head, middle = convolve(conv, x, window, first, None, None)
    tail, end = convolve(conv, x, middle, second, None, None)
    np.testing.assert_array_equal(head + tail, whole)
    np.testing.assert_array_equal(end, last)


@given(bad=st.integers(0, TIME - 1), begin=st.integers(1, TIME - 1), seed=st.integers(0, 99))
def test_what_is_not_finite_stays_in_its_document_and_reach(bad, begin, seed):
    conv = make_conv(4)
    ids = np.broadcast_to((np.arange(TIME) >= begin).astype(np.int32), (BATCH, TIME))
    x, window = draw(seed, BATCH, TIME, CHANNELS), np.zeros((BATCH, 3, CHANNELS), np.float32)
    clean, _ = convolve(conv, x, window, None, ids, None)
    spoiled = x.copy()
    spoiled[0, bad] = np.nan
    out, _ = convolve(conv, spoiled, window, None, ids, None)
    time = np.arange(TIME)
    hit = (time >= bad) & (time < bad + 4) & (ids[0] == ids[0, bad])
    assert np.all(np.isnan(out[0, hit]))
    np.testing.assert_array_equal(out[0, ~hit], clean[0, ~hit])
    np.testing.assert_array_equal(out[1], clean[1])


@fast_jit
def _plain(conv, x, window):
    return conv(x, window)


def plain(*arguments):
    return jax.tree.map(np.asarray, _plain(*arguments))


def test_without_documents_it_is_the_plain_convolution():
    conv = make_conv(4)
    x, window = draw(0, BATCH, TIME, CHANNELS), draw(1, BATCH, 3, CHANNELS)
    out, new = plain(conv, x, window)
    single, single_new = plain(conv, x[0], window[0])
    for row in range(BATCH):
        expected, last = naive(conv, x[row], window[row])
        np.testing.assert_allclose(out[row], expected, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(new[row], last)
    np.testing.assert_array_equal(single, out[0])
    np.testing.assert_array_equal(single_new, new[0])


@pytest.mark.parametrize("time", [0, 1, 2, 3])
def test_fewer_tokens_than_taps(time):
    conv = make_conv(4)
    x, window = draw(2, time, CHANNELS), draw(3, 3, CHANNELS)
    for given_window in (window, None):
        out, new = plain(conv, x, given_window)
        expected, last = naive(conv, x, np.zeros_like(window) if given_window is None else window)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-6)
        np.testing.assert_array_equal(new, last)


def test_low_precision_inputs_are_summed_in_float32_and_windows_keep_their_dtype():
    conv = make_conv(4)
    x, window = draw(4, BATCH, TIME, CHANNELS).astype(jnp.bfloat16), np.zeros((BATCH, 3, CHANNELS), np.float32)
    out, new = plain(conv, x, window)
    assert out.dtype == new.dtype == jnp.float32
    expected, _ = naive(conv, np.asarray(x[0], np.float64), np.zeros((3, CHANNELS)))
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=2e-6)
    assert plain(conv, x, None)[1].dtype == jnp.bfloat16
