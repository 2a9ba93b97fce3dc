"""Cases C39, C40 and C45: in which precision sums, products and states are held."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from gated_delta import Chunked, Gates, Recurrent, gated_delta_step

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_within,
    call,
    error,
    little_optimised,
    random_cotangents,
    random_inputs,
    run,
    run_with_gradients,
)
from .reference import packed, recurrence_with_gradients

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def bfloat16_decays(member, time, dtype):
    arrays = random_inputs(member, 80, time=time, key_dim=4, value_dim=4, dtype=dtype)
    arrays["k"] = np.zeros_like(arrays["k"])
    arrays["log_decay"] = np.full(arrays["log_decay"].shape, -0.011, jnp.bfloat16)
    arrays["initial_state"] = np.ones_like(arrays["initial_state"])
    return arrays, np.exp(time * np.float64(jnp.bfloat16(-0.011)))


@pytest.mark.parametrize("member, dtype", [(member, np.float32) for member in MEMBERS] + [("kda", jnp.bfloat16)])
@by_backend
def test_decays_in_bfloat16_are_summed_in_float32(backend, member, dtype):
    """C39."""
    for time in (64, 256) if member == "kda" else (256,):
        arrays, expected = bfloat16_decays(member, time, dtype)
        actual = run(arrays, backend)["final_state"]
        assert np.max(np.abs(actual / expected - 1)) < 1e-5


def test_decays_in_bfloat16_are_right_step_by_step():
    """C39."""
    arrays, expected = bfloat16_decays("kda", 256, np.float32)
    tokens = {name: jnp.asarray(arrays[name][:, 0]) for name in ("q", "k", "v", "log_decay", "beta")}

    @jax.jit
    def step(state, _):
        gates = Gates.tied(tokens["beta"], tokens["log_decay"])
        return gated_delta_step(tokens["q"], tokens["k"], tokens["v"], gates, state)[::-1]

    state, _ = lax.scan(step, jnp.asarray(arrays["initial_state"]), length=256)
    assert np.max(np.abs(state / expected - 1)) < 1e-5


def products(jaxpr):
    """Every `dot_general` of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jax.tree.leaves(tuple(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from products(getattr(inner, "jaxpr", inner))


def is_in_parts(product):
    return {v.aval.dtype for v in product.invars} == {jnp.dtype(jnp.bfloat16)}


def precisions(arrays, backend, **options):
    """The precisions of the products of float32 by float32, forward and backward, and the number of all products.

    Without those that add up: one factor is 0 and 1 and the sum is to be exact, whatever is asked for.
    """
    cotangents = random_cotangents(arrays, 81)

    def both_ways(arrays):
        results, pull = jax.vjp(lambda arrays: call(arrays, backend=backend, **options), arrays)
        return results, pull(cotangents)

    every = list(products(jax.make_jaxpr(both_ways)(arrays).jaxpr))
    sums = [x for x in every if "exact_sums" in str(x.source_info.name_stack)]
    assert all(x.params["precision"] == (lax.Precision.HIGHEST,) * 2 or is_in_parts(x) for x in sums)
    found = [x for x in every if x not in sums]
    full = [x for x in found if all(v.aval.dtype == jnp.float32 for v in x.invars)]
    return {x.params["precision"] for x in full}, len(full), len(found)


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("inverse", ["exact", "substitution"])
def test_every_product_of_float32_states_its_precision(inverse, member):
    """C40: one public argument sets it, and the highest is the default."""
    arrays = random_inputs(member, 82, time=80, key_dim=8, value_dim=8)
    for given, meant in ((None, "HIGHEST"), ("default", "DEFAULT"), ("high", "HIGH"), (lax.Precision.HIGH, "HIGH")):
        found, full, products = precisions(arrays, Chunked(64), inverse=inverse, precision=given)
        assert found == {(lax.Precision[meant],) * 2}
        assert full == products >= 15, "some are found: 18 for the fewest"
    assert precisions(arrays, Recurrent(), inverse=inverse)[2] == 0, "sums of products have no precision to set"


def test_the_precision_holds_in_documents_that_share_chunks():
    """C40."""
    arrays = random_inputs("gdn2", 83, time=80, key_dim=8, value_dim=8)
    for packing in ({"segment_ids": jnp.zeros((1, 80), int)}, {"cu_seqlens": jnp.array([0, 80])}):
        found, full, products = precisions(arrays, Chunked(64), **packing)
        assert found == {(lax.Precision.HIGHEST,) * 2} and full == products >= 20


def test_the_approximate_inverse_of_float32_has_no_other_rounded_product():
    """C40: its products of bfloat16 operands are the ones it promises."""
    arrays = random_inputs("sla", 84, time=64, key_dim=8, value_dim=8)
    _, exact, _ = precisions(arrays, Chunked(64))
    found, full, products = precisions(arrays, Chunked(64), inverse="approx")
    assert found == {(lax.Precision.HIGHEST,) * 2}
    assert products == exact and 0 < products - full == 2 * 3, "3 halvings of 64, of an inverse that is kept"


@by_backend
def test_float32_with_64_bit_mode_on_is_the_same(backend):
    """C45: with offsets of int64."""
    arrays = random_inputs("kda", 85, time=40, states=3, key_dim=8, value_dim=8)
    cotangents = random_cotangents(arrays, 86, states=(3,))
    offsets = [0, 7, 7, 30]
    expected = run_with_gradients(arrays, cotangents, backend, offsets=offsets)
    assert_within(1e-5, expected, packed(arrays, offsets, *cotangents))
    with jax.enable_x64(True):

        @little_optimised
        def both_ways(arrays, offsets):
            def forward(arrays):
                out, state = call(arrays, backend=backend, cu_seqlens=offsets)
                return {"out": out, "final_state": state}

            results, pull = jax.vjp(forward, arrays)
            gradients = pull(dict(zip(("out", "final_state"), cotangents)))[0]
            return results | {f"d_{name}": x for name, x in gradients.items()}

        wide_offsets = jnp.asarray(offsets)
        assert wide_offsets.dtype == jnp.int64
        actual = both_ways({name: jnp.asarray(x) for name, x in arrays.items()}, wide_offsets)
    assert all(x.dtype == jnp.float32 for x in actual.values())
    assert_within(1e-6, actual, expected)


@by_backend
@pytest.mark.parametrize("packing", ["offsets", "ids"])
def test_float32_with_64_bit_mode_on_lowers_for_a_tpu(packing, backend):
    """C45: no 64-bit number is left that the lowering for a TPU would refuse."""
    arrays = random_inputs("sla", 87, time=40, key_dim=8, value_dim=8)
    with jax.enable_x64(True):
        given = {"offsets": {"cu_seqlens": jnp.array([0, 40])}, "ids": {"segment_ids": jnp.zeros((1, 40), int)}}[
            packing
        ]

        def loss(arrays, given):
            return jnp.sum(call(arrays, backend=backend, **given)[0])

        exported = jax.export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(
            {name: jnp.asarray(x) for name, x in arrays.items()}, given
        )
    assert exported.platforms == ("tpu",)
    assert all(x.dtype == jnp.float32 for x in exported.out_avals)
    assert "xf64>" not in exported.mlir_module(), "only scalar constants, which XLA folds, may be wider"


@pytest.mark.parametrize("member", MEMBERS)
def test_float64_inputs_are_computed_in_float64(member):
    """C45."""
    arrays = {
        name: x.astype(np.float64) for name, x in random_inputs(member, 88, time=70, key_dim=8, value_dim=8).items()
    }
    cotangents = tuple(x.astype(np.float64) for x in random_cotangents(arrays, 89))
    expected = recurrence_with_gradients(arrays, *cotangents)
    with jax.enable_x64(True):
        for backend in BACKENDS:
            actual = run_with_gradients(arrays, cotangents, backend)
            assert all(x.dtype == np.float64 for x in actual.values())
            assert_within(1e-12, actual, expected)


def test_a_float64_step_is_computed_in_float64():
    """C45."""
    arrays = random_inputs("kda", 90, time=1, key_dim=8, value_dim=8)
    arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
    expected = recurrence_with_gradients(arrays, *random_cotangents(arrays, 91))
    with jax.enable_x64(True):
        q, k, v, log_decay, beta = (jnp.asarray(arrays[name][:, 0]) for name in ("q", "k", "v", "log_decay", "beta"))
        out, state = gated_delta_step(q, k, v, Gates.tied(beta, log_decay), arrays["initial_state"])
        assert out.dtype == state.dtype == jnp.float64
        assert error(out, expected["out"][:, 0]) < 1e-12 and error(state, expected["final_state"]) < 1e-12
