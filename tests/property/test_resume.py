"""A sequence cut anywhere, its state handed on, is the whole sequence. Documents that are cut: test_conformance."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from gated_delta import Chunked, Recurrent, gated_delta, gated_delta_step
from gated_delta.testing import (
    RandomGates,
    RandomProblem,
    assert_close,
    expected,
    quick_jit,
)

BACKENDS = [Recurrent(), Chunked(16)]
PROBLEM = RandomProblem(
    batch=2,
    time=37,
    key_heads=1,
    group=2,
    key_dim=4,
    value_dim=3,
    gates=RandomGates("channel", erase="head", owner="value", tied=True),
    state=True,
    seed=9,
)


def in_pieces(arguments, cuts, backend):
    """One call for each piece, each with the final state of the one before."""
    state, outs, time = arguments.pop("initial_state"), [], arguments["q"].shape[1]
    for begin, end in zip((0, *cuts), (*cuts, time)):
        piece = jax.tree.map(lambda x: x[:, begin:end], arguments)  # noqa: B023
        out, state = gated_delta(**piece, initial_state=state, backend=backend)
        outs.append(out)
    return jnp.concatenate(outs, axis=1), state


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("cuts", [(1,), (15, 17), (16,), (36,), (12, 24)], ids=str)
def test_pieces_are_the_whole_in_outputs_and_states(backend, cuts):
    out, state = quick_jit(lambda arguments: in_pieces(arguments, cuts, backend))(PROBLEM.arguments())
    wanted = expected(PROBLEM)
    assert_close({"out": out, "final_state": state}, {name: wanted[name] for name in ("out", "final_state")}, PROBLEM)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_pieces_are_the_whole_in_gradients(backend):
    """The gradient that comes back through the handed-on state included."""

    def run(arguments, cotangents):
        _, pull = jax.vjp(lambda arguments: in_pieces(dict(arguments), (11, 20), backend), arguments)
        return pull(cotangents)[0]

    gradients = quick_jit(run)(PROBLEM.arguments(), PROBLEM.cotangents("float32", "float32"))
    gates = gradients.pop("gates")
    actual = {f"d_{name}": x for name, x in gradients.items()}
    actual |= {"d_log_decay": gates.log_decay, "d_erase": gates.erase}
    wanted = expected(PROBLEM)
    assert_close(actual, {name: wanted[name] for name in actual}, PROBLEM)


@pytest.mark.parametrize(
    "gates",
    [
        PROBLEM.gates,
        RandomGates(),
        RandomGates("tile", erase="channel", write="channel", owner="key"),
        RandomGates("head", write="head", owner="value"),
    ],
    ids=repr,
)
def test_steps_are_the_whole(gates):
    problem = dataclasses.replace(PROBLEM, gates=gates)
    arguments = problem.arguments()
    state = arguments.pop("initial_state")

    @quick_jit
    def run(arguments, state):
        def step(state, token):
            out, state = gated_delta_step(**token, state=state)
            return state, out

        state, out = jax.lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), arguments))
        return {"out": jnp.moveaxis(out, 0, 1), "final_state": state}

    wanted = expected(problem)
    assert_close(run(arguments, state), {name: wanted[name] for name in ("out", "final_state")}, problem)


@pytest.mark.smoke
def test_a_step_begins_from_zeros_without_a_state():
    arguments = dataclasses.replace(PROBLEM, time=1).arguments()
    arguments.pop("initial_state")
    token = jax.tree.map(lambda x: x[:, 0], arguments)
    out, state = gated_delta_step(**token)
    whole_out, whole_state = gated_delta(**arguments, backend=Recurrent())
    problem = dataclasses.replace(PROBLEM, time=1)
    assert_close({"out": out[:, None], "final_state": state}, {"out": whole_out, "final_state": whole_state}, problem)
