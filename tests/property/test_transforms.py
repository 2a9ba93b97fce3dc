"""Under JAX's transformations the operator is a plain function of arrays."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta, gated_delta_step
from gated_delta.testing import (
    RandomGates,
    RandomProblem,
    assert_close,
    expected,
    pullback,
    quick_jit,
)

from .subjects import BACKENDS

KDA = RandomGates("channel", erase="head", owner="value", tied=True)
PROBLEM = RandomProblem(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, gates=KDA, state=True, seed=13)


def outputs(problem):
    wanted = expected(problem)
    return {name: wanted[name] for name in ("out", "final_state")}


def named(result):
    return dict(zip(("out", "final_state"), result))


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked()], ids=str)
def test_jit_and_eager_agree_with_the_recurrence(backend):
    problem = dataclasses.replace(PROBLEM, time=9, key_heads=1, group=2)
    arguments = problem.arguments()
    assert_close(named(gated_delta(**arguments, backend=backend)), outputs(problem), problem)
    jitted = eqx.filter_jit(gated_delta)(**arguments, backend=backend)
    assert_close(named(jitted), outputs(problem), problem)


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked()], ids=str)
def test_the_gradient_of_a_loss_agrees(backend):
    problem = dataclasses.replace(PROBLEM, time=9, key_heads=1, group=2)
    d_out, d_state = problem.cotangents("float32", "float32")

    @jax.jit
    @jax.grad
    def gradient(arguments):
        out, state = gated_delta(**arguments, backend=backend)
        return jnp.sum(out * d_out) + jnp.sum(state * d_state)

    got = gradient(problem.arguments())
    gates = got.pop("gates")
    actual = {f"d_{name}": x for name, x in got.items()} | {"d_log_decay": gates.log_decay, "d_erase": gates.erase}
    wanted = expected(problem)
    assert_close(actual, {name: wanted[name] for name in actual}, problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_vmap_is_a_loop(backend):
    """Over every array at once, documents included."""
    packed = dataclasses.replace(PROBLEM, documents=((4, 0, 12), (-3, 18)), packing="slots", slots=3)
    several = [dataclasses.replace(packed, seed=seed) for seed in range(3)]
    several[1] = dataclasses.replace(several[1], documents=((1, 1, 19), (16,)))
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *(arrays_only(problem) for problem in several))
    cotangents = jax.tree.map(lambda *xs: np.stack(xs), *(p.cotangents("float32", "float32") for p in several))

    def run(arguments, cotangents):
        ids = arguments.pop("segment_ids")
        call = lambda arguments: gated_delta(**arguments, segment_ids=ids, num_segments=3, backend=backend)  # noqa: E731
        out, pull = jax.vjp(call, arguments)
        return out, pull(cotangents)[0]

    result, gradients = quick_jit(jax.vmap(run))(stacked, cotangents)
    for index, problem in enumerate(several):
        actual = named(jax.tree.map(lambda x: x[index], result))  # noqa: B023
        gates = gradients["gates"]
        actual |= {f"d_{name}": gradients[name][index] for name in ("q", "k", "v", "initial_state")}
        actual |= {"d_log_decay": gates.log_decay[index], "d_erase": gates.erase[index]}
        assert_close(actual, expected(problem), problem)


def arrays_only(problem):
    arguments = problem.arguments()
    arguments.pop("num_segments", None)
    return arguments


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_vmap_over_one_argument_alone(backend):
    arguments = PROBLEM.arguments()
    values = np.stack([arguments["v"], 2 * arguments["v"], 0 * arguments["v"]])
    run = quick_jit(jax.vmap(lambda v: gated_delta(**{**arguments, "v": v, "initial_state": None}, backend=backend)[0]))
    one, two, none = run(values)
    wanted = expected(dataclasses.replace(PROBLEM, state=False))["out"]
    for out, factor in ((one, 1), (two, 2), (none, 0)):
        assert_close({"out": out}, {"out": factor * wanted}, PROBLEM)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_remat_and_scan_over_layers_change_no_gradient(backend):
    """Three layers in a `lax.scan`, each rematerialised, against a Python loop."""
    arguments = {**PROBLEM.arguments(), "scale": 1.0}
    writes = np.random.default_rng(0).uniform(0.1, 1, (3, *arguments["v"].shape)).astype(np.float32)
    state = arguments.pop("initial_state")
    values = arguments.pop("v")
    gates = arguments.pop("gates")

    def layer(values, write):
        out, _ = gated_delta(
            **arguments,
            v=values,
            gates=Gates(gates.log_decay, gates.erase, write),
            initial_state=state,
            backend=backend,
        )
        return values + out, None

    def looped(values, writes):
        for write in writes:
            values, _ = layer(values, write)
        return values

    def scanned(values, writes):
        return jax.lax.scan(jax.checkpoint(layer), values, writes)[0]

    def gradient(run):
        return quick_jit(jax.grad(lambda values, writes: jnp.sum(jnp.sin(run(values, writes))), argnums=(0, 1)))

    actual, wanted = gradient(scanned)(values, writes), gradient(looped)(values, writes)
    names = ("d_v", "d_write")
    assert_close(dict(zip(names, actual)), dict(zip(names, wanted)), PROBLEM)


@pytest.mark.parametrize("name", ["q", "k", "v", "log_decay", "erase", "initial_state"])
def test_forward_mode_of_the_recurrence_is_the_transpose_of_its_gradient(name):
    """<cotangent, jvp(direction)> = <gradient, direction>, in float64."""
    problem = dataclasses.replace(PROBLEM, dtype="float64", time=9)
    arguments, gradients = problem.arguments(), pullback(Recurrent(), problem)
    cotangents = problem.cotangents("float64", "float64")
    with jax.enable_x64(True):
        direction = np.random.default_rng(1).standard_normal(gradients[f"d_{name}"].shape)

        def moved(x):
            if name in ("log_decay", "erase"):
                gates = eqx.tree_at(lambda gates: getattr(gates, name), arguments["gates"], x)
                return gated_delta(**{**arguments, "gates": gates}, backend=Recurrent())
            return gated_delta(**{**arguments, name: x}, backend=Recurrent())

        primal = arguments[name] if name in arguments else getattr(arguments["gates"], name)
        _, tangents = jax.jvp(moved, (jnp.asarray(primal),), (direction,))
        _, linear = jax.linearize(moved, jnp.asarray(primal))
        slope = sum(jnp.vdot(c, t) for c, t in zip(cotangents, tangents))
        np.testing.assert_allclose(slope, np.vdot(gradients[f"d_{name}"], direction), rtol=1e-11)
        np.testing.assert_allclose(linear(direction)[0], tangents[0], rtol=1e-11, atol=1e-12)


def test_forward_mode_through_chunks_is_right_or_jaxs_own_error():
    """Without erase no chunk is solved, and there is a derivative; a solve has a rule for reverse mode only."""
    arguments = PROBLEM.arguments()
    gates = arguments["gates"]
    direction = np.random.default_rng(1).standard_normal(arguments["v"].shape).astype(np.float32)

    def run(v, gates, backend):
        return gated_delta(**{**arguments, "v": v, "gates": gates}, backend=backend)

    free = Gates(gates.log_decay, None, gates.erase)
    for backend in (Recurrent(), Chunked(16)):
        _, (d_out, _) = quick_jit(lambda v, d_v: jax.jvp(lambda v: run(v, free, backend), (v,), (d_v,)))(  # noqa: B023
            arguments["v"], direction
        )
        difference = [np.asarray(run(arguments["v"] + sign * direction, free, Recurrent())[0]) for sign in (1, -1)]
        np.testing.assert_allclose(d_out, (difference[0] - difference[1]) / 2, atol=1e-4)  # it is linear in v
    with pytest.raises(TypeError, match=r"can't apply forward-mode autodiff \(jvp\) to a custom_vjp function"):
        jax.jvp(lambda v: run(v, gates, Chunked()), (arguments["v"],), (direction,))


@pytest.mark.parametrize("name", ["k", "v", "erase", "log_decay"])
def test_second_derivatives_through_chunks_are_those_of_the_recurrence(name):
    problem = dataclasses.replace(PROBLEM, dtype="float64", time=17, key_heads=1, group=2, batch=1)
    arguments, (d_out, _) = problem.arguments(), problem.cotangents("float64", "float64")
    with jax.enable_x64(True):
        primal = jnp.asarray(arguments[name] if name in arguments else getattr(arguments["gates"], name))
        direction = np.random.default_rng(2).standard_normal(primal.shape)

        def second(backend):
            def loss(x):
                changed = {**arguments}
                if name in arguments:
                    changed[name] = x
                else:
                    changed["gates"] = eqx.tree_at(lambda gates: getattr(gates, name), arguments["gates"], x)
                return jnp.sum(d_out * jnp.sin(gated_delta(**changed, backend=backend)[0]))

            return quick_jit(jax.grad(lambda x: jnp.vdot(jax.grad(loss)(x), direction)))(primal)

        actual, wanted = (np.asarray(second(backend)) for backend in (Chunked(16), Recurrent()))
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-10 * np.abs(wanted).max())


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_integer_arguments_have_no_gradient_and_no_error(backend):
    problem = dataclasses.replace(PROBLEM, batch=1, documents=((4, 9),), packing="offsets")
    arguments = problem.arguments()
    offsets = arguments.pop("cu_seqlens")

    def loss(arguments, offsets):
        out, state = gated_delta(**arguments, cu_seqlens=offsets, backend=backend)
        return jnp.sum(out) + jnp.sum(state)

    gradients = quick_jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(arguments, offsets)
    assert gradients[1].dtype == jax.dtypes.float0
    filtered = quick_jit(lambda arguments: eqx.filter_grad(lambda x: loss(x, offsets))(arguments))(arguments)
    np.testing.assert_allclose(filtered["q"], gradients[0]["q"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_scale_that_is_an_array_compiles_once_and_has_a_gradient(backend):
    arguments, traces = PROBLEM.arguments(), []

    @quick_jit
    def run(scale):
        traces.append(None)
        return jax.value_and_grad(lambda scale: jnp.sum(gated_delta(**arguments, scale=scale, backend=backend)[0]))(
            scale
        )

    total, slope = run(jnp.float32(0.1))
    other, _ = run(jnp.float32(0.2))
    assert len(traces) == 1
    np.testing.assert_allclose(other, 2 * total, rtol=1e-5)
    np.testing.assert_allclose(slope, total / 0.1, rtol=1e-4)


def test_a_program_with_the_operator_in_it_can_be_exported():
    arguments = PROBLEM.arguments()
    exported = jax.export.export(jax.jit(lambda arguments: gated_delta(**arguments)))(arguments)
    assert_close(named(exported.call(arguments)), outputs(PROBLEM), PROBLEM)


def test_a_step_works_in_a_vmap_and_a_loop():
    arguments = PROBLEM.arguments()
    state = arguments.pop("initial_state")
    token = jax.tree.map(lambda x: x[:, :1][:, 0], arguments)
    out, new = gated_delta_step(**token, state=state)
    rows = jax.tree.map(lambda x: x[:, None], token)
    mapped = jax.vmap(lambda token, state: gated_delta_step(**token, state=state))(rows, state[:, None])
    np.testing.assert_allclose(mapped[0][:, 0], out, rtol=1e-6)
    looped = jax.lax.fori_loop(0, 1, lambda _, state: gated_delta_step(**token, state=state)[1], state)
    np.testing.assert_allclose(looped, new, rtol=1e-6)


def test_a_chunk_that_branches_does_so_under_vmap_too():
    """A mapped predicate would make both ways be computed for every chunk."""
    problem = dataclasses.replace(PROBLEM, time=40, gates=dataclasses.replace(KDA, log_decays="mixed"))
    arguments, backend = problem.arguments(), Chunked(32, branch=True)
    d_out, d_state = problem.cotangents("float32", "float32")

    def loss(arguments, d_out, d_state):
        one = jax.tree.map(lambda x: x[None], arguments)
        out, state = gated_delta(**one, backend=backend)
        return jnp.sum(out[0] * d_out) + jnp.sum(state[0] * d_state)

    gradient = jax.vmap(jax.grad(loss))
    branches = str(jax.make_jaxpr(gradient)(arguments, d_out, d_state)).count("cond[")
    assert branches == str(
        jax.make_jaxpr(jax.grad(loss))(*jax.tree.map(lambda x: x[0], (arguments, d_out, d_state)))
    ).count("cond[")
    assert branches >= 2
    got = jax.jit(gradient)(arguments, d_out, d_state)
    gates = got.pop("gates")
    actual = {f"d_{name}": x for name, x in got.items()} | {"d_log_decay": gates.log_decay, "d_erase": gates.erase}
    wanted = {name: x for name, x in expected(problem).items() if name in actual}
    assert_close(actual, wanted, problem)
