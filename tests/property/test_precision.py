"""Every product of float32 operands says how precisely it is computed, and one argument of the operator sets it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.testing import RandomGates, RandomProblem, equations

GATES = {
    "channel": RandomGates("channel", erase="channel", write="channel", owner="key"),
    "tile": RandomGates("tile", erase="head", owner="value", tied=True),
    "none": RandomGates(),
}
PROBLEM = RandomProblem(time=40, key_heads=2, group=2, key_dim=8, value_dim=5, state=True)


def products(problem, backend, **options):
    """Every matrix product of a forward and backward pass, but those that add up.

    There one factor is 0 and 1, and the sum is to be exact: at the highest precision, or in bfloat16 parts.
    """

    arguments = problem.arguments()
    options |= {"inverse": arguments.pop("inverse", "exact")}

    def run(arguments):
        out, pull = jax.vjp(lambda arguments: gated_delta(**arguments, **options, backend=backend), arguments)
        return pull(jax.tree.map(jnp.ones_like, out))

    found = [e for e in equations(jax.make_jaxpr(run)(arguments)) if e.primitive.name == "dot_general"]
    sums = [e for e in found if "exact_sums" in str(e.source_info.name_stack)]
    for e in sums:
        assert operands(e) == {"bfloat16"} or e.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
    return [e for e in found if e not in sums]


def operands(product):
    return {x.aval.dtype.name for x in product.invars}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("precision", [None, "default", "high", "highest", jax.lax.Precision.HIGH], ids=str)
def test_every_float32_product_has_the_precision_asked_for(gates, precision):
    wanted = jax.lax.Precision.HIGHEST if precision is None else jax.lax.Precision(precision)
    found = products(dataclasses.replace(PROBLEM, gates=GATES[gates]), Chunked(16), precision=precision)
    assert len(found) >= 10
    for product in found:
        assert operands(product) == {"float32"}
        assert product.params["precision"] in (wanted, (wanted, wanted)), product


@pytest.mark.parametrize("erase_max, solve", [(1.0, {"bfloat16"}), (2.0, {"bfloat16", "float32"})])
def test_bfloat16_products_add_up_in_float32(erase_max, solve):
    """With a doubled beta the solve, and only that, has float32 operands."""
    gates = dataclasses.replace(GATES["channel"], erase_max=erase_max)
    found = products(dataclasses.replace(PROBLEM, gates=gates, dtype="bfloat16"), Chunked(16))
    assert {name for product in found for name in operands(product)} == solve
    for product in found:
        assert product.outvars[0].aval.dtype == jnp.float32
        if operands(product) == {"float32"}:
            assert product.params["precision"] == (jax.lax.Precision.HIGHEST,) * 2
            assert product.outvars[0].aval.shape[-2:] == (16, 16)


def test_an_approximate_solve_of_float32_inputs_has_bfloat16_operands_only_there():
    problem = dataclasses.replace(PROBLEM, gates=GATES["tile"], inverse="approx")
    found = products(problem, Chunked(16))
    rounded = [product for product in found if operands(product) == {"bfloat16"}]
    assert rounded and all(product.outvars[0].aval.shape[-2:] == (16, 16) for product in rounded)
    assert all(product.params["precision"] is not None for product in found if operands(product) == {"float32"})


def test_the_recurrence_has_no_product_to_round():
    """Sums of elementwise products: exact operands on every platform."""
    assert products(dataclasses.replace(PROBLEM, gates=GATES["channel"]), Recurrent()) == []
