"""Over a mesh of four devices, batch rows and heads apart, every result is the one of a single device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, quick_jit

BACKENDS = [Recurrent(), Chunked(16)]
PROBLEM = RandomProblem(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=14)
GATES = {
    "key": RandomGates("channel", erase="channel", write="channel", owner="key"),
    "value": RandomGates("head", erase="head", owner="value", tied=True),
    "none": RandomGates(),
}
ROWS_AND_HEADS = P("rows", None, "heads")
SPECS = {"initial_state": P("rows", "heads"), "segment_ids": P("rows")}


def mesh(kind):
    devices = jax.devices("cpu")[:4]
    if len(devices) < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(kind,) * 2, devices=devices)


def specs_of(arguments):
    return {name: SPECS.get(name, ROWS_AND_HEADS) for name in arguments}


def forward_and_backward(backend, arguments, cotangents):
    """Results by name, as the toolkit has them, written for arrays that are sharded or inside a `shard_map`."""
    integers = {name: arguments[name] for name in arguments if name == "segment_ids"}
    floats = {name: x for name, x in arguments.items() if name not in integers}
    out, pull = jax.vjp(lambda floats: gated_delta(**floats, **integers, backend=backend), floats)
    return out, pull(cotangents)[0]


def check(problem, result):
    (out, final_state), gradients = result
    gates = gradients.pop("gates")
    actual = {"out": out, "final_state": final_state} | {f"d_{name}": x for name, x in gradients.items()}
    for name in ("log_decay", "erase", "write"):
        if getattr(gates, name) is not None:
            actual[f"d_{name}"] = getattr(gates, name)
    assert_close(actual, expected(problem), problem)


def problem_of(gates, packed):
    documents = ((5, 16), (-2, 1, 18)) if packed else None
    return dataclasses.replace(PROBLEM, gates=GATES[gates], documents=documents)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates, packed", [("key", False), ("value", True), ("none", False)])
def test_inside_shard_map_each_device_does_its_rows_and_heads(kind, backend, gates, packed):
    """With the replication checks that `shard_map` does by default."""
    problem, here = problem_of(gates, packed), mesh(kind)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    specs = specs_of(arguments)
    floats = {name: spec for name, spec in specs.items() if name != "segment_ids"}
    outer = (ROWS_AND_HEADS, SPECS["initial_state"])
    local = jax.shard_map(
        functools.partial(forward_and_backward, backend),
        mesh=here,
        in_specs=(specs, outer),
        out_specs=(outer, floats),
    )
    with jax.set_mesh(here):
        check(problem, quick_jit(local)(arguments, cotangents))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates, packed", [("key", False), ("value", True), ("none", False)])
def test_jit_takes_sharded_arrays(kind, backend, gates, packed):
    problem, here = problem_of(gates, packed), mesh(kind)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    with jax.set_mesh(here):

        def put(x, spec):
            return jax.device_put(x, NamedSharding(here, spec))

        specs = specs_of(arguments)
        arguments = {name: jax.tree.map(lambda x: put(x, specs[name]), x) for name, x in arguments.items()}  # noqa: B023
        cotangents = put(cotangents[0], ROWS_AND_HEADS), put(cotangents[1], SPECS["initial_state"])
        result = quick_jit(functools.partial(forward_and_backward, backend))(arguments, cotangents)
    check(problem, result)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_without_a_state_each_device_begins_from_zeros(kind):
    problem, here = dataclasses.replace(problem_of("value", False), state=False), mesh(kind)
    arguments = problem.arguments()
    specs, outer = specs_of(arguments), (ROWS_AND_HEADS, SPECS["initial_state"])
    with jax.set_mesh(here):
        local = jax.shard_map(lambda arguments: gated_delta(**arguments), mesh=here, in_specs=(specs,), out_specs=outer)
        out, final_state = quick_jit(local)(arguments)
    wanted = expected(problem)
    assert_close(
        {"out": out, "final_state": final_state}, {name: wanted[name] for name in ("out", "final_state")}, problem
    )


def test_sharded_arrays_keep_their_sharding():
    problem, here = problem_of("value", False), mesh(AxisType.Explicit)
    arguments = problem.arguments()
    with jax.set_mesh(here):
        specs = specs_of(arguments)
        put = {
            name: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(here, specs[name])), x)  # noqa: B023
            for name, x in arguments.items()
        }
        out, state = jax.jit(gated_delta)(**put)
    assert out.sharding.is_equivalent_to(NamedSharding(here, ROWS_AND_HEADS), out.ndim)
    assert state.sharding.is_equivalent_to(NamedSharding(here, SPECS["initial_state"]), state.ndim)
    assert np.isfinite(out).all()
