"""Over a mesh of four devices, batch rows and heads apart, every result is the one of a single device, and no device
sends anything to another."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gated_delta import Chunked, Recurrent, _recurrent, gated_delta, gated_delta_step
from gated_delta.sharding import PerDevice
from gated_delta.testing import RandomGates, RandomProblem, assert_close, collectives, expected, quick_jit

from .meshes import make_mesh as make_any_mesh
from .subjects import BACKENDS, INTERPRETED

PROBLEM = RandomProblem(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=14)
GATES = {
    "key": RandomGates("channel", erase="channel", write="channel", owner="key"),
    "value": RandomGates("head", erase="head", owner="value", tied=True),
    "none": RandomGates(),
    "tile": RandomGates("tile", decay_tiles=2, erase="head", owner="key", tied=True),
}
ROWS_AND_HEADS = P("rows", None, "heads")
SPECS = {"initial_state": P("rows", "heads"), "segment_ids": P("rows")}


def mesh(kind):
    return make_any_mesh((2, 2), ("rows", "heads"), kind)


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


def problem_of(gates, packed=False, **changes):
    documents = ((5, 16), (-2, 1, 18)) if packed else None
    return dataclasses.replace(PROBLEM, gates=GATES[gates], documents=documents, **changes)


def placed(here, arguments, cotangents=None):
    """Arguments and cotangents over the mesh: rows and heads apart."""

    def put(x, spec):
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(here, spec)), x)

    arguments = {name: put(x, SPECS.get(name, ROWS_AND_HEADS)) for name, x in arguments.items()}
    if cotangents is None:
        return arguments
    return arguments, (put(cotangents[0], ROWS_AND_HEADS), put(cotangents[1], SPECS["initial_state"]))


def run_apart(function, *arguments):
    """What the compiled program gives, if its devices have nothing to say to each other."""
    compiled = quick_jit(function).lower(*arguments).compile()
    assert not collectives(compiled)
    return compiled(*arguments)


CASES = [("key", False), ("value", True), ("none", False), pytest.param("tile", True, marks=pytest.mark.slow)]
APART = [PerDevice(backend, "rows", "heads") for backend in (Chunked(16), INTERPRETED)]  # XLA takes no kernel apart
JIT_BACKENDS = [Recurrent(), Chunked(16), *(pytest.param(backend, marks=pytest.mark.slow) for backend in APART)]


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates, packed", CASES)
def test_inside_shard_map_each_device_does_its_rows_and_heads(kind, backend, gates, packed):
    """With the replication checks that `shard_map` does by default."""
    problem, here = problem_of(gates, packed), mesh(kind)
    specs = {name: SPECS.get(name, ROWS_AND_HEADS) for name in problem.arguments()}
    outer = (ROWS_AND_HEADS, SPECS["initial_state"])
    local = jax.shard_map(
        functools.partial(forward_and_backward, backend),
        mesh=here,
        in_specs=(specs, outer),
        out_specs=(outer, {name: spec for name, spec in specs.items() if name != "segment_ids"}),
    )
    with jax.set_mesh(here):
        arguments, cotangents = placed(here, problem.arguments(), problem.cotangents("float32", "float32"))
        check(problem, run_apart(local, arguments, cotangents))


@pytest.mark.parametrize(
    "backend", [Recurrent(), Chunked(16), pytest.param(INTERPRETED, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("own", ["v", "initial_state", "segment_ids"])
def test_what_differs_from_device_to_device_may_stand_beside_what_does_not(backend, own):
    """One argument is each device's own, all others are the same on both: their cotangents are summed."""
    problem, here = problem_of("key", packed=own == "segment_ids"), make_any_mesh((2,), ("rows",), AxisType.Auto)
    arguments = {
        name: x if name == own else jax.tree.map(lambda x: x[:1], x) for name, x in problem.arguments().items()
    }
    cotangents = problem.cotangents("float32", "float32")

    def over_rows(run):
        specs = {name: P("rows") if name == own else P() for name in arguments}
        gradients = {name: spec for name, spec in specs.items() if name != "segment_ids"}
        return jax.shard_map(run, mesh=here, in_specs=(specs, P("rows")), out_specs=(P("rows"), gradients))

    def at_once(arguments, cotangents):
        def widened(arguments):
            return {
                name: x if name == own else jax.tree.map(lambda x: jnp.repeat(x, 2, axis=0), x)
                for name, x in arguments.items()
            }

        integers = {name: x for name, x in arguments.items() if name == "segment_ids"}
        floats = {name: x for name, x in arguments.items() if name not in integers}
        out, pull = jax.vjp(lambda floats: gated_delta(**widened(floats | integers), backend=Recurrent()), floats)
        return out, pull(cotangents)[0]

    actual = quick_jit(over_rows(functools.partial(forward_and_backward, backend)))(arguments, cotangents)
    wanted = quick_jit(at_once)(arguments, cotangents)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(actual)]
    actual, wanted = (dict(zip(names, map(np.asarray, jax.tree.leaves(x)))) for x in (actual, wanted))
    assert_close(actual, wanted, problem)


@pytest.mark.parametrize("large", [False, True])
def test_one_token_beside_states_that_all_devices_share(large, monkeypatch):
    monkeypatch.setattr(_recurrent, "_CACHE_BYTES", 0 if large else 2**25)
    problem, here = dataclasses.replace(problem_of("key"), time=1), make_any_mesh((2,), ("rows",), AxisType.Auto)
    arguments = problem.arguments()
    state = arguments.pop("initial_state")[:1]
    token: dict[str, Any] = {name: jax.tree.map(lambda x: x[:, 0], x) for name, x in arguments.items()}

    def step(token, state):
        return gated_delta_step(**token, state=state)

    local = jax.shard_map(step, mesh=here, in_specs=(P("rows"), P()), out_specs=P("rows"))
    actual = quick_jit(local)(token, state)
    wanted = gated_delta(**arguments, initial_state=jnp.repeat(state, 2, axis=0), backend=Recurrent())
    names = ("out", "final_state")
    assert_close(dict(zip(names, (actual[0][:, None], actual[1]))), dict(zip(names, wanted)), problem)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("backend", JIT_BACKENDS, ids=str)
@pytest.mark.parametrize("gates, packed", CASES)
def test_jit_takes_sharded_arrays(kind, backend, gates, packed):
    problem, here = problem_of(gates, packed), mesh(kind)
    with jax.set_mesh(here):
        arguments, cotangents = placed(here, problem.arguments(), problem.cotangents("float32", "float32"))
        check(problem, run_apart(functools.partial(forward_and_backward, backend), arguments, cotangents))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_without_a_state_each_device_begins_from_zeros(kind):
    problem, here = problem_of("value", state=False), mesh(kind)
    specs = dict.fromkeys(problem.arguments(), ROWS_AND_HEADS)
    local = jax.shard_map(
        lambda arguments: gated_delta(**arguments),
        mesh=here,
        in_specs=(specs,),
        out_specs=(ROWS_AND_HEADS, SPECS["initial_state"]),
    )
    with jax.set_mesh(here):
        out, final_state = quick_jit(local)(placed(here, problem.arguments()))
    actual, wanted = {"out": out, "final_state": final_state}, expected(problem)
    assert_close(actual, {name: wanted[name] for name in actual}, problem)


def test_sharded_arrays_keep_their_sharding():
    problem, here = problem_of("value"), mesh(AxisType.Explicit)
    with jax.set_mesh(here):
        out, state = quick_jit(lambda arguments: gated_delta(**arguments))(placed(here, problem.arguments()))
    assert out.sharding.is_equivalent_to(NamedSharding(here, ROWS_AND_HEADS), out.ndim)
    assert state.sharding.is_equivalent_to(NamedSharding(here, SPECS["initial_state"]), state.ndim)
    actual, wanted = {"out": out, "final_state": state}, expected(problem)
    assert_close(actual, {name: wanted[name] for name in actual}, problem)


@pytest.mark.parametrize("packing", ["slots", "offsets"])
def test_explicitly_sharded_heads_have_a_state_per_document(packing):
    batch = {"slots": 2, "offsets": 1}[packing]
    documents = ((5, 16), (-2, 1, 18))[:batch]
    problem = dataclasses.replace(problem_of("key"), batch=batch, documents=documents, packing=packing, slots=4)
    here = mesh(AxisType.Explicit)
    states = P(None, "heads") if packing == "offsets" else P(None, None, "heads")
    specs = {"initial_state": states, "segment_ids": P(), "cu_seqlens": P()}
    with jax.set_mesh(here):
        arguments = problem.arguments()
        static = {name: arguments.pop(name) for name in ("num_segments",) if name in arguments}
        for name, x in arguments.items():
            spec = specs.get(name, P(None, None, "heads"))
            arguments[name] = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(here, spec)), x)  # noqa: B023
        out, state = quick_jit(lambda arguments: gated_delta(**arguments, **static))(arguments)
    assert state.sharding.is_equivalent_to(NamedSharding(here, states), state.ndim)
    actual, wanted = {"out": out, "final_state": state}, expected(problem)
    assert_close(actual, {name: wanted[name] for name in actual}, problem)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_shapes_are_refused_over_a_mesh_too(kind):
    here = mesh(kind)
    with jax.set_mesh(here):
        arguments: Any = placed(here, problem_of("none").arguments())
        keys = jax.device_put(np.zeros((2, 21, 4, 4), np.float32), NamedSharding(here, ROWS_AND_HEADS))
        with pytest.raises(ValueError, match="multiple of key_heads, but v has 6 and k has 4"):
            gated_delta(**{**arguments, "q": keys, "k": keys})


def test_a_backend_for_each_device_says_why_it_cannot_run():
    arguments, here = problem_of("key").arguments(), mesh(AxisType.Auto)
    with jax.set_mesh(here):
        for backend, reason in (
            (
                PerDevice(rows="data", heads="heads"),
                r"the mesh here are \('rows', 'heads'\), and 'data' is none of them",
            ),
            (PerDevice(rows=("rows", "heads"), heads=None), "batch is 2, and it needs a multiple of the 4 devices"),
        ):
            with pytest.raises(ValueError, match=reason):
                gated_delta(**arguments, backend=backend)
        inside = functools.partial(gated_delta, backend=PerDevice(None, "rows", None))
        local = jax.shard_map(lambda a: inside(**a), in_specs=(P("rows"),), out_specs=P("rows"), axis_names={"rows"})
        with pytest.raises(ValueError, match=r"inside of a `jax.shard_map` over 'rows' already"):
            local(arguments)
    with pytest.raises(ValueError, match=r"the axes of the mesh here are \(\), and 'data' is none of them"):
        gated_delta(**arguments, backend=PerDevice())
