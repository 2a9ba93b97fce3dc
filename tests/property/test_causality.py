"""What comes later changes nothing, bit for bit: not outputs, not gradients, in the same compiled program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Recurrent
from gated_delta.testing import RandomGates, RandomKeys, RandomProblem, results

TIME, CUTS = 21, (0, 1, 7, 14, 15, 16, 19, 20)
PROBLEM = RandomProblem(batch=2, time=TIME, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=7)
GATES = {
    "head": RandomGates("head", erase="head", owner="value", tied=True, log_decays="mild"),
    "tile": RandomGates("tile", erase="head", owner="key", tied=True, log_decays="mixed"),
    "channel": RandomGates("channel", erase="channel", write="channel", owner="key", log_decays="mixed"),
    "bounded": RandomGates("channel", erase="head", owner="value", tied=True, log_decay_min=-5.0, log_decays="bounded"),
    "none": RandomGates(erase="head", tied=True),
}
BACKENDS = [Recurrent(), Chunked(16)]


def later_differs(problem, cut):
    """The arguments of `problem` and of one that differs in everything after token `cut`, in keys and gates most."""
    decays = "strong" if problem.gates.log_decay_min is None else "bounded"
    other = dataclasses.replace(
        problem,
        seed=problem.seed + 1,
        keys=RandomKeys("identical"),
        gates=dataclasses.replace(problem.gates, log_decays=decays),
    )
    one, two = problem.arguments(), other.arguments()
    fixed = {name: one.pop(name) for name in ("initial_state", "num_segments", "inverse") if name in one}

    def join(x, y):
        return np.concatenate([x[:, : cut + 1], y[:, cut + 1 :]], axis=1)

    two = {name: two[name] for name in one}
    return {**one, **fixed}, {**jax.tree.map(join, one, two), **fixed}


def cotangents_until(problem, cut):
    out, state = problem.cotangents("float32", "float32")
    out[:, cut + 1 :] = 0
    return out, np.zeros_like(state)


def check(backend, problem, cuts=CUTS):
    for cut in cuts:
        one, two = (results(backend, x, cotangents_until(problem, cut)) for x in later_differs(problem, cut))
        assert not np.array_equal(one["final_state"], two["final_state"]) or cut == TIME - 1
        for name in one:
            if name == "final_state":
                continue
            until = slice(None) if name == "d_initial_state" else (slice(None), slice(cut + 1))
            np.testing.assert_array_equal(one[name][until], two[name][until], err_msg=f"{name}, cut after {cut}")
            if name.startswith("d_") and name != "d_initial_state":
                assert not one[name][:, cut + 1 :].any(), f"{name} reaches tokens that nothing reads"


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("gates", GATES)
def test_a_prefix_does_not_depend_on_what_follows(backend, gates):
    check(backend, dataclasses.replace(PROBLEM, gates=GATES[gates]))


@pytest.mark.parametrize("inverse", ["approx", "substitution"])
def test_a_prefix_does_not_depend_on_what_follows_with_another_inverse(inverse):
    check(Chunked(16), dataclasses.replace(PROBLEM, gates=GATES["head"], inverse=inverse))


def test_a_prefix_does_not_depend_on_what_follows_in_bfloat16():
    problem = dataclasses.replace(PROBLEM, gates=GATES["channel"], dtype="bfloat16")
    for cut in CUTS:
        one, two = later_differs(problem, cut)
        out, state = cotangents_until(problem, cut)
        one, two = (results(Chunked(16), x, (out.astype(jnp.bfloat16), state)) for x in (one, two))
        for name in ("out", "d_q", "d_k", "d_v", "d_log_decay"):
            np.testing.assert_array_equal(one[name][:, : cut + 1], two[name][:, : cut + 1])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("packing", ["ids", "slots"])
def test_a_prefix_does_not_depend_on_where_later_documents_end(backend, packing):
    gates = GATES["channel"]
    documents = ((11, 4, 5), (3, 17))
    problem = dataclasses.replace(PROBLEM, gates=gates, documents=documents, packing=packing, slots=5)
    before = results(backend, problem.arguments(), cotangents_until(problem, 10))
    for later in (((11, 0, 2, 8), (3, 8, 10)), ((16, 5), (3, 18)), ((11, -5, 3), (3, 8, -2, 1, 1))):
        other = dataclasses.replace(problem, documents=later)
        after = results(backend, other.arguments(), cotangents_until(problem, 10))
        for name in ("out", "d_q", "d_k", "d_v", "d_log_decay", "d_erase", "d_write"):
            np.testing.assert_array_equal(before[name][:, :11], after[name][:, :11], err_msg=f"{name}, {later}")
