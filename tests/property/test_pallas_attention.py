"""The TPU kernels of softmax attention, in JAX's TPU interpreter, give what dense matrices give.

The interpreter fills memory that nobody wrote with NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_delta import softmax_attention
from gated_delta.pallas import AttentionTiles, PallasTPUAttention
from gated_delta.testing import quick_jit

from .attention import (
    HEADS,
    PACKED,
    RULES,
    RandomAttention,
    assert_close,
    check_causality,
    check_isolation,
    pullback,
    results,
)

# Blocks of two tiles of queries, steps of two tiles of keys; and without a lead, one of each.
KERNEL = PallasTPUAttention(AttentionTiles(queries=16, keys=16, tile=8), interpret=True)
SMALL = PallasTPUAttention(AttentionTiles(queries=8, keys=8, tile=8), interpret=True)


@pytest.mark.parametrize("rules", [RULES[0], pytest.param(RULES[1], marks=pytest.mark.slow)], ids=", ".join)
def test_kernels_agree_with_dense_matrices(rules):
    problem = RandomAttention(batch=1, time=40 if "documents" not in rules else 21, **rules, **HEADS[0], seed=1)
    assert_close(pullback(KERNEL, problem), problem.expected(), problem)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [KERNEL, SMALL], ids=["two tiles", "one tile"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: ", ".join(rules))
@settings(max_examples=3)
@given(heads=st.sampled_from(HEADS), size=st.sampled_from([0.0, 1.0]), seed=st.integers(0, 2**16))
def test_every_mask_dtype_and_grouping_agrees_with_dense_matrices(backend, dtype, rules, heads, size, seed):
    problem = RandomAttention(**rules, **heads, dtype=dtype, size=size, seed=seed)
    assert_close(pullback(backend, problem), problem.expected(), problem)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(128, 128), (128, 64), (192, 128), (256, 256), (64, 256)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_heads_of_real_models_agree_with_dense_matrices(dims, dtype):
    key_dim, value_dim = dims
    heads = dict(query_heads=2, kv_heads=1, key_dim=key_dim, value_dim=value_dim)
    problem = RandomAttention(batch=1, time=37, **heads, dtype=dtype, softcap=3.0, seed=2)
    assert_close(pullback(KERNEL, problem), problem.expected(), problem)


@pytest.mark.slow
def test_long_sequences_are_cut_and_merged():
    """Keys that do not fit into vector memory come in parts: here of one step."""
    backend = PallasTPUAttention(AttentionTiles(queries=16, keys=16, tile=8, resident_keys=16), interpret=True)
    problem = RandomAttention(batch=1, time=37, window=20, **HEADS[0], seed=3)
    assert_close(pullback(backend, problem), problem.expected(), problem)


@pytest.mark.slow
@pytest.mark.parametrize("rules", [RULES[i] for i in (0, 2, 4, 5)], ids=lambda rules: ", ".join(rules))
def test_parts_agree_with_dense_matrices_under_every_mask(rules):
    backend = PallasTPUAttention(AttentionTiles(queries=16, keys=8, tile=8, resident_keys=16), interpret=True)
    problem = RandomAttention(**rules, **HEADS[2], seed=3)
    assert_close(pullback(backend, problem), problem.expected(), problem)


@pytest.mark.slow
@pytest.mark.parametrize("jump", [70.0, 3000.0])
def test_a_score_far_above_all_before_it_is_right_too(jump):
    """Its block is done again where a weight or a sum would overflow; the other queries keep their bits."""
    problem = RandomAttention(batch=1, time=40, query_heads=1, kv_heads=1, key_dim=4, value_dim=3, seed=4)
    arrays = problem.arrays()
    loud = {name: x.copy() for name, x in arrays.items()}
    loud["q"][:, 33, :, 0], loud["k"][:, 11, :, 0] = 1.0, 2 * jump
    loud["q"][:, :33, :, 0] = loud["q"][:, 34:, :, 0] = 0.0
    quiet = {**loud, "q": loud["q"].copy()}
    quiet["q"][:, 33, :, 0] = 0.0
    found, before = (results(KERNEL, problem, x, problem.cotangents()) for x in (loud, quiet))
    scores = loud["q"][0, :, 0] @ loud["k"][0, :, 0].T / 2
    scores = np.where(np.tri(40, dtype=bool), scores, -np.inf).astype(np.float64)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    wanted = weights / weights.sum(1, keepdims=True) @ loud["v"][0, :, 0]
    np.testing.assert_allclose(found["out"][0, :, 0], wanted, atol=1e-5)
    others = np.arange(40) != 33
    for name in ("out", "log_sum_exp"):
        np.testing.assert_array_equal(found[name][:, others], before[name][:, others], err_msg=name)


@pytest.mark.slow
@settings(max_examples=3)
@given(seed=st.integers(0, 2**16), cut=st.integers(0, 20))
def test_what_comes_later_changes_nothing_bit_for_bit(seed, cut):
    check_causality(KERNEL, seed, cut)


@pytest.mark.slow
@settings(max_examples=3)
@given(seed=st.integers(0, 2**16), value=st.sampled_from([np.nan, np.inf, 1e30]))
def test_documents_do_not_touch_each_other_and_padding_touches_nothing(seed, value):
    check_isolation(KERNEL, seed, value)


@pytest.mark.slow
def test_a_query_that_sees_no_key_is_0_and_passes_no_gradient():
    problem = RandomAttention(
        **RULES[5] | dict(documents=((21,), (10, 11)), key_documents=((-30,), (-4, 20, 6))), **HEADS[0]
    )
    found = pullback(KERNEL, problem)
    lonely = ~problem.visible().any(-1)
    assert lonely.any() and not lonely.all()
    assert not found["out"][lonely].any() and not found["d_q"][lonely].any()
    assert (found["log_sum_exp"][lonely] == -np.inf).all()
    assert_close(found, problem.expected(), problem)


@pytest.mark.slow
def test_an_array_as_scale_has_a_gradient():
    problem = RandomAttention(batch=1, softcap=2.0, seed=5)
    arrays = problem.arrays()

    def loss(scale, backend):
        return jnp.sum(jnp.square(softmax_attention(**arrays, scale=scale, softcap=2.0, backend=backend)))

    slopes = [quick_jit(jax.grad(lambda s, b=b: loss(s, b)))(jnp.float32(0.6)) for b in (KERNEL, None)]
    assert float(slopes[1]) == pytest.approx(float(slopes[0]), rel=1e-4) and slopes[0] != 0


@pytest.mark.slow
def test_a_mapped_axis_becomes_rows_of_the_batch():
    problem = RandomAttention(window=6, documents=PACKED, seed=9)
    ids = problem.integers()["segment_ids"]

    def one(q, k, v, ids):
        return softmax_attention(q[None], k[None], v[None], segment_ids=ids[None], window=6, backend=KERNEL)[0]

    mapped = quick_jit(jax.vmap(one))(**problem.arrays(), ids=ids)
    np.testing.assert_array_equal(mapped, pullback(KERNEL, problem)["out"])


def test_the_default_kernel_says_why_it_cannot_run_here():
    if jax.default_backend() == "tpu":
        pytest.skip("there is a TPU, where it runs")
    with pytest.raises(ValueError, match=r"cannot run: it needs a TPU, and the default platform is"):
        softmax_attention(**RandomAttention().arrays(), backend=PallasTPUAttention())


def test_what_no_kernel_computes_is_refused():
    wide = RandomAttention(dtype="float64")
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"cannot run: float64 has no TPU kernel"):
        softmax_attention(**wide.arrays(), backend=KERNEL)
    huge = jax.ShapeDtypeStruct((1, 4096, 1, 4096), jnp.float32)
    with pytest.raises(ValueError, match=r"heads of 4096 and 4096 channels .* leave no room .*; smaller `queries`"):
        jax.eval_shape(lambda x: softmax_attention(x, x, x, backend=PallasTPUAttention(ahead_of_time=True)), huge)


@pytest.mark.parametrize(
    "tiles, message",
    [
        (dict(tile=12), "must be a multiple of 8"),
        (dict(queries=100), "`AttentionTiles\\(queries=100\\)` must be whole tiles, of 128"),
        (dict(keys=12, tile=8), "`AttentionTiles\\(keys=12\\)` must be whole tiles, of 8"),
    ],
    ids=str,
)
def test_tiles_are_checked(tiles, message):
    with pytest.raises(ValueError, match=message):
        AttentionTiles(**tiles)


def test_tiles_are_part_of_what_compiles():
    assert hash(KERNEL) != hash(dataclasses.replace(KERNEL, tiles=AttentionTiles()))
