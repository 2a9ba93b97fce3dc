"""Cases C18 to C24 and C26: documents packed into one row."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, gated_delta

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_forward_and_gradients_within,
    assert_within,
    call,
    little_optimised,
    random_cotangents,
    random_inputs,
    run,
    run_plain,
    run_with_gradients,
)
from .reference import packed

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def packed_inputs(member, seed, time, documents, dim=16, **options):
    return random_inputs(member, seed, time=time, states=documents, key_dim=dim, value_dim=dim, **options)


def ids_of(offsets, time):
    """Segment ids of the documents between `offsets`, -1 past the last."""
    ids = np.full((1, time), -1, np.int32)
    for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
        ids[:, start:stop] = i
    return ids


BOUNDARIES = [0, 5, 69, 70, 133, 200]
"""Lengths 5, 64, 1, 63, 67."""


@pytest.mark.parametrize("member", MEMBERS)
def test_state_stops_at_the_end_of_a_document_that_has_its_own(member):
    """C18, by offsets."""
    arrays = packed_inputs(member, 30, 200, 5, dim=32, heads=2)
    cotangents = random_cotangents(arrays, 31, states=(5,))
    expected = packed(arrays, BOUNDARIES, *cotangents)
    for backend in BACKENDS if member == "gdn2" else (Chunked(64),):
        actual = run_with_gradients(arrays, cotangents, backend, offsets=BOUNDARIES)
        assert_within(2e-5, actual, expected)


@pytest.mark.parametrize("member", ["gdn2", "sla"])
def test_state_stops_at_the_end_of_a_document_in_the_middle_of_a_chunk(member):
    """C18, by segment ids: the first document begins with the row's state, the last leaves it."""
    arrays = packed_inputs(member, 32, 200, 1, dim=32, heads=2)
    cotangents = random_cotangents(arrays, 33)
    zeros = np.zeros((5, *arrays["initial_state"].shape[1:]))
    states, d_states = zeros.copy(), zeros.copy()
    states[0], d_states[-1] = arrays["initial_state"][0], cotangents[1][0]
    expected = packed(arrays | {"initial_state": states}, BOUNDARIES, cotangents[0], d_states)
    expected["final_state"] = expected["final_state"][-1:]
    expected["d_initial_state"] = expected["d_initial_state"][:1]
    for backend in BACKENDS if member == "gdn2" else (Chunked(64),):
        actual = run_with_gradients(arrays, cotangents, backend, ids=ids_of(BOUNDARIES, 200))
        assert_within(2e-5, actual, expected)


@pytest.mark.parametrize("member", ["gdn", "gdn2"])
@by_backend
def test_an_empty_document_keeps_its_state_bit_for_bit(backend, member):
    """C19."""
    offsets = [0, 0, 10, 10, 74, 74]
    arrays = packed_inputs(member, 34, 74, 5)
    cotangents = random_cotangents(arrays, 35, states=(5,))
    actual = run_with_gradients(arrays, cotangents, backend, offsets=offsets)
    assert_forward_and_gradients_within(2e-5, 1e-4, actual, packed(arrays, offsets, *cotangents))
    for empty in (0, 2, 4):
        np.testing.assert_array_equal(actual["final_state"][empty], arrays["initial_state"][empty])
        np.testing.assert_array_equal(actual["d_initial_state"][empty], cotangents[1][empty])


@pytest.mark.parametrize("member", ["gdn", "gdn2"])
@by_backend
def test_offsets_padded_to_a_fixed_length_add_empty_documents(backend, member):
    """C20."""
    arrays = packed_inputs(member, 36, 40, 5)
    actual = run(arrays, backend, offsets=[0, 12, 40, 40, 40, 40])
    short = arrays | {"initial_state": arrays["initial_state"][:2]}
    expected = run(short, backend, offsets=[0, 12, 40])
    assert_within(1e-6, {"out": actual["out"], "final_state": actual["final_state"][:2]}, expected)
    assert_within(2e-5, expected, packed(short, [0, 12, 40], *random_cotangents(short, 37, states=(2,))))
    np.testing.assert_array_equal(actual["final_state"][2:], arrays["initial_state"][2:])


@pytest.mark.parametrize("member", ["sla", "gdn2"])
@by_backend
def test_a_buffer_longer_than_the_last_offset_gives_zeros_and_takes_nothing(backend, member):
    """C21."""
    offsets = [0, 17, 70]
    arrays = packed_inputs(member, 38, 96, 2)
    cotangents = random_cotangents(arrays, 39, states=(2,))
    rubbish = {name: x.copy() for name, x in arrays.items()}
    for name in rubbish.keys() - {"initial_state"}:
        rubbish[name][:, 70:] = 1e3
    actual = run_with_gradients(rubbish, cotangents, backend, offsets=offsets)
    for name, x in actual.items():
        if name not in ("final_state", "d_initial_state"):
            assert not x[:, 70:].any(), name
    assert_forward_and_gradients_within(2e-5, 1e-4, actual, packed(arrays, offsets, *cotangents))
    clean = run_with_gradients(arrays, cotangents, backend, offsets=offsets)
    for name, x in actual.items():
        np.testing.assert_array_equal(x, clean[name], err_msg=name)
    if member == "sla":
        assert not run_plain(rubbish, backend, offsets=offsets)["out"][:, 70:].any()


@pytest.mark.parametrize(
    "member, offsets, size",
    [
        ("gdn", [0, 781, 2048], 32),
        ("gdn2", [0, 781, 2048], 32),
        ("gdn2", [0, 57, 59, 64], 128),
        ("gdn2", range(34), 64),
    ],
    ids=["gdn, two", "two", "three", "single tokens"],
)
def test_every_ragged_document_is_as_if_alone(member, offsets, size):
    """C22."""
    offsets = list(offsets)
    arrays = packed_inputs(member, 40, offsets[-1], len(offsets) - 1)
    expected = packed(arrays, offsets, *random_cotangents(arrays, 41, states=(len(offsets) - 1,)))
    assert_within(2e-5, run(arrays, Chunked(size), offsets=offsets), expected)
    own = {name: x for name, x in arrays.items() if name != "initial_state"}
    no_states = np.zeros(arrays["initial_state"].shape)
    mixed = run(own, Chunked(size), ids=ids_of(offsets, offsets[-1]))
    expected = packed(own | {"initial_state": no_states}, offsets, np.zeros(own["v"].shape), no_states)
    assert_within(2e-5, mixed, expected, names=["out"])
    assert_within(2e-5, {"final_state": mixed["final_state"][0]}, {"final_state": expected["final_state"][-1]})


def short_documents(documents):
    lengths = np.random.default_rng(42).integers(1, 3, documents)
    return [0, *(int(x) for x in np.cumsum(lengths))]


@by_backend
def test_thousands_of_short_documents_are_each_right(backend):
    """C23."""
    offsets = short_documents(2100)
    arrays = packed_inputs("kda", 43, offsets[-1], 2100, heads=1)
    expected = packed(arrays, offsets, *random_cotangents(arrays, 44, states=(2100,)))
    assert_within(2e-5, run(arrays, backend, offsets=offsets), expected)


@by_backend
def test_the_program_does_not_grow_with_the_number_of_documents(backend):
    """C23: the bound on compilation is that there is not one operation more."""

    def operations(documents):
        offsets = short_documents(documents)
        arrays = packed_inputs("kda", 43, offsets[-1], documents, heads=1)
        lowered = jax.jit(lambda x, o: call(x, backend=backend, cu_seqlens=o)).lower(arrays, np.int32(offsets))
        return len(lowered.as_text().splitlines())

    assert operations(2100) == operations(210)


SHAPE = (1, 12, 1, 4)


def a_call(batch=1, **packing):
    x = jnp.ones((batch, *SHAPE[1:]))
    return gated_delta(x, x, x, Gates.tied(0.5 * x[..., :1]), **packing)


@pytest.mark.parametrize(
    "packing, error, message",
    [
        ({"batch": 2, "cu_seqlens": np.array([0, 5, 12])}, ValueError, "`cu_seqlens` .* needs batch 1, but batch is 2"),
        ({"cu_seqlens": np.array([0, 7, 5])}, ValueError, r"`cu_seqlens` must .*never fall.*\[0 7 5\]"),
        ({"cu_seqlens": np.array([0, 5, 13])}, ValueError, r"end at most at time = 12, but it is \[ 0  5 13\]"),
        ({"cu_seqlens": np.array([1, 5, 12])}, ValueError, r"must begin with 0.*\[ 1  5 12\]"),
        ({"cu_seqlens": np.array([0.0, 5.0, 12.0])}, TypeError, "`cu_seqlens` must hold integers, but .* float"),
        ({"cu_seqlens": [0, 5, 12]}, TypeError, "`cu_seqlens` must be a JAX or NumPy array of integers, but a list"),
        ({"cu_seqlens": np.array([[0, 12]])}, ValueError, r"`cu_seqlens` must be \[documents \+ 1\]"),
        (
            {"cu_seqlens": np.array([0, 5, 12]), "initial_state": np.ones((3, 1, 4, 4), np.float32)},
            ValueError,
            r"`initial_state` must be \[documents, .*= \(2, 1, 4, 4\).*\(3, 1, 4, 4\)",
        ),
        ({"segment_ids": np.zeros((1, 11), int)}, ValueError, r"`segment_ids` must be \[batch, time\] = \(1, 12\)"),
        ({"segment_ids": np.zeros((1, 12))}, TypeError, "`segment_ids` must hold integers"),
        ({"segment_ids": np.arange(12)[None, ::-1]}, ValueError, "row 0 falls to 10 at token 1"),
        ({"segment_ids": np.arange(12)[None], "num_segments": 11}, ValueError, "below `num_segments=11`.* 11"),
        ({"segment_ids": np.zeros((1, 12), int), "cu_seqlens": np.array([0, 12])}, ValueError, "not both"),
        ({"num_segments": 2}, ValueError, "`num_segments` goes with `segment_ids`"),
    ],
)
def test_bad_offsets_and_ids_are_refused(packing, error, message):
    """C24, concrete."""
    with pytest.raises(error, match=message):
        a_call(**packing)


@pytest.mark.parametrize(
    "batch, dtype, states, error",
    [(2, jnp.int32, None, ValueError), (1, jnp.float32, None, TypeError), (1, jnp.int32, 3, ValueError)],
)
def test_offsets_of_the_wrong_shape_or_dtype_are_refused_under_jit(batch, dtype, states, error):
    """C24 (a), (e), (f), traced."""
    state = None if states is None else jnp.ones((states, 1, 4, 4))
    with pytest.raises(error, match=r"`cu_seqlens`|`initial_state`"):
        jax.eval_shape(
            lambda offsets: a_call(batch, cu_seqlens=offsets, initial_state=state), jax.ShapeDtypeStruct((3,), dtype)
        )


def test_checked_mode_refuses_bad_traced_offsets_and_ids():
    """C24 (b) to (d), traced."""
    by_offsets = eqx.filter_jit(lambda offsets: a_call(cu_seqlens=offsets, checked=True))
    by_offsets(jnp.array([0, 5, 12]))
    for bad in ([0, 7, 5], [0, 5, 13], [1, 5, 12], [0, 13, 12]):
        with pytest.raises(RuntimeError, match="`cu_seqlens` must begin with 0, never fall"):
            jax.block_until_ready(by_offsets(jnp.array(bad)))
    by_ids = eqx.filter_jit(lambda ids: a_call(segment_ids=ids, num_segments=12, checked=True))
    by_ids(jnp.arange(12)[None])
    with pytest.raises(RuntimeError, match="`segment_ids` must rise"):
        jax.block_until_ready(by_ids(jnp.arange(12)[None, ::-1]))
    with pytest.raises(RuntimeError, match="`segment_ids` must be below"):
        jax.block_until_ready(by_ids(1 + jnp.arange(12)[None]))


def test_bad_traced_offsets_are_limited_as_documented():
    """C24 (b) to (d), traced: falling offsets count as the largest before them."""
    arrays = packed_inputs("kda", 45, 12, 2, dim=4)
    for bad, limited in (([0, 7, 5], [0, 7, 7]), ([0, 5, 99], [0, 5, 12])):
        actual, expected = (run(arrays, Chunked(64), offsets=offsets) for offsets in (bad, limited))
        for name in actual:
            np.testing.assert_array_equal(actual[name], expected[name])


@by_backend
def test_new_offsets_compile_nothing_new(backend):
    """C26."""
    arrays = packed_inputs("kda", 46, 64, 2)
    traces = []

    @little_optimised
    def compiled(arrays, offsets):
        traces.append(offsets)
        return dict(zip(("out", "final_state"), call(arrays, backend=backend, cu_seqlens=offsets)))

    for middle in (10, 32, 63):
        offsets = [0, middle, 64]
        actual = compiled(arrays, jnp.array(offsets))
        assert_within(2e-5, actual, packed(arrays, offsets, *random_cotangents(arrays, 47, states=(2,))))
    assert len(traces) == 1
    assert compiled._cache_size() == 1
