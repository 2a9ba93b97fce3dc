"""Softmax attention: every backend against dense matrices, and what a mask, a document and a bad token may touch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gated_delta import explain_attention, softmax_attention
from gated_delta.attention import BlockedAttention, DenseAttention
from gated_delta.testing import quick_jit

from .attention import (
    HEADS,
    NAMES,
    PACKED,
    RULES,
    RandomAttention,
    assert_close,
    attentions,
    check_causality,
    check_isolation,
    dense,
    of_dtype,
    pullback,
    results,
)

BLOCKED = BlockedAttention(8, 5)
BACKENDS = [DenseAttention(), BLOCKED]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=["dense", "blocked"])
quick_backends = pytest.mark.parametrize(
    "backend", [pytest.param(BACKENDS[0], marks=pytest.mark.slow), BLOCKED], ids=["dense", "blocked"]
)


# ---- the truth -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(seed=st.integers(0, 2**16), softcap=st.sampled_from([None, 1.5]))
def test_the_expected_gradients_are_the_slopes_of_the_expected_outputs(seed, softcap):
    """Central differences in float64, extrapolated, of what everything else is compared with."""
    problem = RandomAttention(time=5, softcap=softcap, documents=((3, 2), (-1, 4)), seed=seed)
    arrays = {name: x.astype(np.float64) for name, x in problem.arrays().items()}
    d_out, d_lse = (x.astype(np.float64) for x in problem.cotangents())
    options = dict(visible=problem.visible(), scale=0.5, softcap=softcap, d_out=d_out)
    d_lse = np.where(options["visible"].any(-1)[..., None], d_lse, 0)
    rng = np.random.default_rng(seed)
    directions = {name: rng.standard_normal(x.shape) for name, x in arrays.items()}

    def loss(step):
        moved = {name: x + step * directions[name] for name, x in arrays.items()}
        found = dense(**moved, **options, d_log_sum_exp=d_lse)
        finite = np.where(d_lse == 0, 0, found["log_sum_exp"])
        return np.sum(found["out"] * d_out) + np.sum(finite * d_lse)

    slopes = [(loss(h) - loss(-h)) / (2 * h) for h in (1e-3, 5e-4)]
    found = dense(**arrays, **options, d_log_sum_exp=d_lse)
    slope = sum(np.sum(found[f"d_{name}"] * directions[name]) for name in arrays)
    assert (4 * slopes[1] - slopes[0]) / 3 == pytest.approx(slope, rel=1e-8, abs=1e-8)


@pytest.mark.smoke
@backends
@settings(max_examples=6)
@given(problem=attentions(rules=RULES[:3], heads=HEADS[:1]))
def test_outputs_and_gradients_are_those_of_dense_matrices(backend, problem):
    assert_close(pullback(backend, problem), problem.expected(), problem)


FIXED = ("causal", "window", "softcap", "scale", "documents", "key_documents", "offset", "keys")


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, dtype",
    [
        *((backend, "float32") for backend in (*BACKENDS, BlockedAttention(), BlockedAttention(64, 3))),
        *((backend, "float64") for backend in BACKENDS),
        (BLOCKED, "bfloat16"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rules", RULES, ids=lambda rules: ", ".join(rules))
@settings(max_examples=6)
@given(problem=attentions(), single=st.booleans())
def test_every_mask_dtype_and_grouping_gives_dense_attention(backend, dtype, rules, problem, single):
    blank = dataclasses.asdict(RandomAttention())
    problem = dataclasses.replace(problem, **{name: rules.get(name, blank[name]) for name in FIXED})
    if single:  # one query
        keys, offset = (problem.keys, problem.offset) if problem.keys else (7, (6, 2))
        changes = dict(documents=None, key_documents=None, keys=keys, offset=offset)
        problem = dataclasses.replace(problem, time=1, **changes, **HEADS[0])
    problem = of_dtype(problem, dtype)
    assert_close(pullback(backend, problem), problem.expected(), problem)


@quick_backends
@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(dict(causal=True, window=6), id="causal window"),
        pytest.param(dict(causal=False, documents=PACKED), id="documents", marks=pytest.mark.slow),
        pytest.param(dict(causal=True, dtype="bfloat16"), id="bfloat16", marks=pytest.mark.slow),
        pytest.param(dict(causal=False, window=4), id="window", marks=pytest.mark.slow),
    ],
)
def test_it_agrees_with_jax_nn_dot_product_attention(backend, rules):
    """Where that has the same mask. A query that sees no key is the mean of all values there; it is left out here."""
    problem = RandomAttention(**rules, **HEADS[0], seed=4)
    problem = dataclasses.replace(problem, value_dim=problem.key_dim)  # which it asks for
    visible = problem.visible()
    d_out, d_lse = problem.cotangents()
    d_out = np.where(visible.any(-1)[..., None, None], d_out, 0).astype(d_out.dtype)

    @quick_jit
    def theirs(arrays):
        def call(arrays):
            q, k, v = (arrays[name] for name in "qkv")
            if problem.documents is not None or not problem.causal:
                return jax.nn.dot_product_attention(q, k, v, mask=jnp.asarray(visible)[:, None])
            window = None if problem.window is None else (problem.window - 1, 0)
            return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=window)

        out, pull = jax.vjp(call, arrays)
        return out, pull(jnp.asarray(d_out))[0]

    with jax.numpy_dtype_promotion("standard"):
        out, gradients = theirs(problem.arrays())
    out = np.where(visible.any(-1)[..., None, None], out, 0)
    wanted = {"out": out, **{f"d_{name}": gradients[name] for name in "qkv"}}
    ours = results(backend, problem, problem.arrays(), (d_out, 0 * d_lse))
    wanted = {name: np.asarray(x).astype(np.float64) for name, x in wanted.items()}
    assert_close(ours, wanted, problem)


@pytest.mark.slow
def test_the_default_is_exact_where_blocks_are_many():
    """Longer than several blocks of the default size both ways, in pieces that are no multiple of them."""
    problem = RandomAttention(time=701, documents=((300, -20, 381), (701,)), window=400, seed=8)
    assert_close(pullback(None, problem), problem.expected(), problem)


# ---- what may touch what ---------------------------------------------------------------------------------------------


@quick_backends
@given(seed=st.integers(0, 2**16), cut=st.integers(0, 20))
def test_what_comes_later_changes_nothing_bit_for_bit(backend, seed, cut):
    check_causality(backend, seed, cut)


@backends
@given(seed=st.integers(0, 2**16), value=st.sampled_from([np.nan, np.inf, 1e30]))
def test_documents_do_not_touch_each_other_and_padding_touches_nothing(backend, seed, value):
    check_isolation(backend, seed, value)


@quick_backends
@given(data=st.data())
def test_a_bad_token_spoils_what_sees_it_and_nothing_else(backend, data):
    problem = RandomAttention(documents=PACKED, window=6, seed=data.draw(st.integers(0, 2**16)))
    arrays, cotangents = problem.arrays(), problem.cotangents()
    name = data.draw(st.sampled_from("qkv"))
    index = tuple(data.draw(st.integers(0, n - 1)) for n in arrays[name].shape)
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    planted = {**arrays, name: arrays[name].copy()}
    planted[name][index] = value
    clean, actual = (results(backend, problem, x, cotangents) for x in (arrays, planted))
    row, token, head, _ = index
    marks = np.zeros(clean["log_sum_exp"].shape, bool)
    if name == "q":
        marks[row, token, head] = problem.integers()["segment_ids"][row, token] >= 0
    else:
        marks[row, problem.visible()[row, :, token], 2 * head : 2 * head + 2] = True
    for result in ("out", "log_sum_exp"):
        assert np.isnan(actual[result][marks]).all(), result
        np.testing.assert_array_equal(actual[result][~marks], clean[result][~marks], err_msg=result)
    other = np.ones(problem.integers()["segment_ids"].shape, bool)
    other[row] = problem.integers()["segment_ids"][row] != problem.integers()["segment_ids"][row, token]
    for gradient in ("d_q", "d_k", "d_v"):
        assert np.isfinite(actual[gradient]).all(), gradient
        np.testing.assert_array_equal(actual[gradient][other], clean[gradient][other], err_msg=gradient)


@quick_backends
def test_a_query_that_sees_no_key_is_0_and_passes_no_gradient(backend):
    """Half of the queries stand before all keys of their document."""
    problem = RandomAttention(
        **RULES[5] | dict(documents=((21,), (10, 11)), key_documents=((-30,), (-4, 20, 6))), **HEADS[0]
    )
    found = pullback(backend, problem)
    lonely = ~problem.visible().any(-1)
    assert lonely.any() and not lonely.all()
    assert not found["out"][lonely].any() and not found["d_q"][lonely].any()
    assert (found["log_sum_exp"][lonely] == -np.inf).all()
    assert all(np.isfinite(found[name]).all() for name in NAMES if name != "log_sum_exp")
    assert_close(found, problem.expected(), problem)


@pytest.mark.parametrize("shape", [(0, 3, 3), (2, 0, 0), (2, 0, 3), (2, 3, 0)], ids=str)
def test_nothing_to_do_is_no_error(shape):
    batch, time, keys = shape
    q, k = np.zeros((batch, time, 2, 4), np.float16), np.zeros((batch, keys, 1, 4), np.float16)
    v = np.zeros((batch, keys, 1, 5), np.float16)
    out, log_sum_exp = softmax_attention(q, k, v, causal=False, return_log_sum_exp=True)
    assert out.shape == (batch, time, 2, 5) and out.dtype == np.float16 and not np.asarray(out).any()
    assert log_sum_exp.shape == (batch, time, 2) and log_sum_exp.dtype == np.float32
    assert (np.asarray(log_sum_exp) == -np.inf).all()


# ---- ways to say the same thing --------------------------------------------------------------------------------------


def test_offsets_ids_and_documents_alone_are_one_thing():
    problem = RandomAttention(batch=1, documents=((5, 1, 12, -3),), seed=3)
    arrays = problem.arrays()
    run = quick_jit(functools.partial(softmax_attention, backend=BLOCKED))
    by_ids = run(**arrays, **problem.integers())
    np.testing.assert_array_equal(by_ids, run(**arrays, cu_seqlens=np.array([0, 5, 6, 18], np.int32)))
    wide = np.where(problem.integers()["segment_ids"] < 0, -1, problem.integers()["segment_ids"] + np.int64(2**40))
    with pytest.raises(ValueError, match="rise along time"):
        softmax_attention(**arrays, segment_ids=wide[:, ::-1])
    ranked = quick_jit(lambda arrays: softmax_attention(**arrays, segment_ids=wide, backend=BLOCKED))(arrays)
    np.testing.assert_array_equal(ranked, by_ids)
    alone = run(**{name: x[:, 6:18] for name, x in arrays.items()})
    np.testing.assert_allclose(by_ids[:, 6:18], alone, atol=1e-6)


def test_traced_ids_that_fall_are_padding_and_checked_ones_raise():
    problem = RandomAttention(batch=1, seed=3)
    arrays = problem.arrays()
    ids = np.repeat([[3, 1, 4]], 7, axis=1).reshape(1, 21)[:, np.argsort(np.tile([0, 1, 2], 7), kind="stable")]
    padding = np.where(ids < np.maximum.accumulate(ids, axis=1), -1, ids)
    run = quick_jit(functools.partial(softmax_attention, backend=BLOCKED))
    out = run(**arrays, segment_ids=ids)
    np.testing.assert_array_equal(out, run(**arrays, segment_ids=padding))
    np.testing.assert_array_equal(out, run(**arrays, segment_ids=ids, key_segment_ids=ids))
    checked = quick_jit(functools.partial(softmax_attention, checked=True, backend=BLOCKED))
    with pytest.raises(Exception, match="must rise along time"):
        jax.block_until_ready(checked(**arrays, segment_ids=ids))


@pytest.mark.slow
def test_the_log_sum_exp_merges_attention_over_parts_of_the_keys():
    problem = RandomAttention(causal=False, seed=6)
    arrays = problem.arrays()
    run = quick_jit(functools.partial(softmax_attention, causal=False, return_log_sum_exp=True))
    whole, log_sum_exp = run(**arrays)
    parts = [run(arrays["q"], arrays["k"][:, s], arrays["v"][:, s]) for s in (slice(0, 10), slice(10, 21))]
    total = np.logaddexp(*(part[1] for part in parts))
    np.testing.assert_allclose(total, log_sum_exp, atol=1e-5)
    merged = sum(np.exp(part[1] - total)[..., None] * part[0] for part in parts)
    np.testing.assert_allclose(merged, whole, atol=1e-5)


@pytest.mark.parametrize(
    "dtypes",
    [("bfloat16",) * 3, pytest.param(("float16",) * 3, marks=pytest.mark.slow), ("bfloat16", "float32", "float16")],
    ids=str,
)
def test_dtypes_are_kept_and_sums_are_wide(dtypes):
    problem = RandomAttention(seed=2)
    arrays = {name: x.astype(jnp.dtype(dtype)) for (name, x), dtype in zip(problem.arrays().items(), dtypes)}
    out, log_sum_exp = quick_jit(functools.partial(softmax_attention, return_log_sum_exp=True))(**arrays)
    assert out.dtype == jnp.dtype(dtypes[2]) and log_sum_exp.dtype == jnp.float32
    wide = dense(
        **arrays, visible=problem.visible(), scale=0.5, softcap=None, d_out=0 * out, d_log_sum_exp=0 * log_sum_exp
    )
    assert_close({"out": out}, {"out": wide["out"]}, problem, "bfloat16" if "bfloat16" in dtypes else "float16")
    assert_close({"lse": log_sum_exp}, {"lse": wide["log_sum_exp"]}, problem)


@pytest.mark.slow
def test_an_array_as_scale_has_a_gradient():
    problem = RandomAttention(softcap=2.0, seed=5)
    arrays = problem.arrays()

    def loss(scale, backend):
        return jnp.sum(jnp.square(softmax_attention(**arrays, scale=scale, softcap=2.0, backend=backend)))

    slopes = [quick_jit(jax.grad(functools.partial(loss, backend=b)))(jnp.float32(0.6)) for b in BACKENDS]
    assert float(slopes[1]) == pytest.approx(float(slopes[0]), rel=1e-5) and slopes[0] != 0


@pytest.mark.slow
def test_a_mapped_axis_is_a_batch_of_calls():
    problem = RandomAttention(window=6, documents=PACKED, seed=9)
    ids = problem.integers()["segment_ids"]
    one = functools.partial(softmax_attention, window=6, backend=BLOCKED)
    mapped = quick_jit(
        jax.vmap(lambda q, k, v, ids: one(q[None], k[None], v[None], segment_ids=ids[None])[0]),
    )(**problem.arrays(), ids=ids)
    np.testing.assert_allclose(mapped, pullback(BLOCKED, problem)["out"], atol=1e-6)


# ---- choosing a backend ----------------------------------------------------------------------------------------------


def test_explain_says_what_runs_and_computes_nothing():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    explanation = explain_attention(
        shape(2, 2**20, 32, 128), shape(2, 2**20, 4, 128), shape(2, 2**20, 4, 64), window=4096, softcap=30.0
    )
    assert explanation.chosen == BlockedAttention()
    assert explanation.reasons["DenseAttention()"] is None
    assert "32 query heads over 4, key_dim 128, value_dim 64, bfloat16 operands" in explanation.problem
    assert "causal, window 4096, softcap 30" in explanation.problem
    assert f"  {BlockedAttention()}: runs" in str(explanation).splitlines()


class Picky(DenseAttention):
    def why_not(self, problem):
        return None if problem.operand == jnp.float64 else "it is Sunday"


def test_a_named_backend_runs_or_raises():
    problem = RandomAttention(time=3)
    with pytest.raises(ValueError, match=r"Picky\(\) cannot run: it is Sunday. A named .*explain_attention` lists"):
        softmax_attention(**problem.arrays(), backend=Picky())
    with pytest.raises(ValueError, match="cannot run: it is Sunday"):
        explain_attention(**problem.arrays(), backend=Picky())
    seen = []

    class Spy(DenseAttention):
        def __call__(self, problem):
            seen.append(problem)
            return super().__call__(problem)

    softmax_attention(**problem.arrays(), backend=Spy())
    assert seen[0].scale == 0.5 and seen[0].group == 2 and seen[0].query_segments is None


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_grows_with_time_and_not_with_its_square():
    """The compiler's own account of temporaries of a training step, 4 times as long: less than 8 times as much."""

    def bytes_for(time, backend):
        x = jax.ShapeDtypeStruct((1, time, 2, 16), jnp.float32)

        def loss(q, k, v):
            return jnp.sum(softmax_attention(q, k, v, backend=backend))

        compiled = quick_jit(jax.grad(loss, (0, 1, 2))).lower(x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert bytes_for(4096, None) < 6 * bytes_for(1024, None)
    assert bytes_for(4096, None) < bytes_for(4096, DenseAttention()) / 10
