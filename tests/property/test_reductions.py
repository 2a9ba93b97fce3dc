"""Members of the family become each other where their gates say the same; grouping is widening."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent
from gated_delta.testing import RandomGates, RandomProblem, assert_close, results

BACKENDS = [Recurrent(), Chunked(16)]
BASE = RandomProblem(batch=2, time=21, key_heads=2, group=3, key_dim=4, value_dim=5, state=True, seed=5)
KDA = dataclasses.replace(BASE, gates=RandomGates(decay="channel", erase="head", owner="value", tied=True))
COTANGENTS = BASE.cotangents("float32", "float32")


def agree(backend, problem, one, other):
    """Results that must be equal bit for bit where the backend is the recurrence, and within budget elsewhere."""
    if backend == Recurrent():
        for name in ("out", "final_state"):
            np.testing.assert_array_equal(one[name], other[name])
    assert_close(one, other, problem)


def with_gates(arguments, gates):
    return {**arguments, "gates": gates}


def wide(x, width):
    return jnp.repeat(x, width // x.shape[-1], axis=-1)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_gdn2_with_equal_gates_is_kda(backend):
    arguments = KDA.arguments()
    decay, beta = arguments["gates"].log_decay, arguments["gates"].erase
    apart = Gates(decay, wide(beta, KDA.key_dim), wide(beta, KDA.value_dim))
    kda, gdn2 = (results(backend, with_gates(arguments, gates), COTANGENTS) for gates in (arguments["gates"], apart))
    d_write = gdn2.pop("d_write").sum(-1, keepdims=True)
    gdn2["d_erase"] = gdn2["d_erase"].sum(-1, keepdims=True) + d_write
    agree(backend, KDA, gdn2, kda)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("owner", ["key", "value"])
@pytest.mark.parametrize("groups, finer", [(1, 4), (1, 2), (2, 4)])
def test_equal_decays_are_one_coarser_decay(backend, owner, groups, finer):
    """KDA with equal channels is GDN; one tile is one decay per head, and as many tiles as channels one per channel."""
    gates = RandomGates(decay="tile", decay_tiles=groups, erase="head", owner=owner, tied=True)
    problem = dataclasses.replace(BASE, gates=gates)
    arguments = problem.arguments()
    decay, beta = arguments["gates"].log_decay, arguments["gates"].erase
    spread = Gates.tied(beta, wide(decay, finer))
    coarse, fine = (
        results(backend, with_gates(arguments, gates), COTANGENTS) for gates in (arguments["gates"], spread)
    )
    shape = (*fine["d_log_decay"].shape[:-1], groups, finer // groups)
    fine["d_log_decay"] = fine["d_log_decay"].reshape(shape).sum(-1)
    agree(backend, problem, fine, coarse)


ENDS = {
    "one tile is gdn with shared gates": (RandomGates(decay="tile", decay_tiles=1), RandomGates(decay="head")),
    "a tile per channel is kda with key-owned gates": (
        RandomGates(decay="tile", decay_tiles=4),
        RandomGates(decay="channel"),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("sla, other", ENDS.values(), ids=ENDS)
def test_sla_has_gdn_and_kda_at_its_ends(backend, sla, other):
    tied = dict(erase="head", owner="key", tied=True)
    problems = (dataclasses.replace(BASE, gates=dataclasses.replace(gates, **tied)) for gates in (sla, other))
    one, two = (results(backend, problem.arguments(), COTANGENTS) for problem in problems)
    for name in two:
        np.testing.assert_array_equal(one[name], two[name])


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_group_is_one_head_with_a_wider_value(backend):
    problem = dataclasses.replace(BASE, gates=RandomGates("channel", erase="channel", write="channel", owner="key"))
    arguments = problem.arguments()
    heads, width = problem.key_heads, problem.group * problem.value_dim
    gates = arguments["gates"]

    def widen(x):
        """`[..., heads * group, value_dim]` as `[..., heads, group * value_dim]`, and back."""
        return x.reshape(*x.shape[:2], -1, width if x.shape[-1] == problem.value_dim else problem.value_dim)

    def widen_state(state):
        state = state.reshape(problem.batch, heads, problem.group, problem.key_dim, problem.value_dim)
        return np.swapaxes(state, 2, 3).reshape(problem.batch, heads, problem.key_dim, width)

    wide_gates = Gates(gates.log_decay, gates.erase, widen(gates.write))
    wider = {**arguments, "v": widen(arguments["v"]), "gates": wide_gates}
    wider["initial_state"] = widen_state(arguments["initial_state"])
    whole = results(backend, wider, (widen(COTANGENTS[0]), widen_state(COTANGENTS[1])))
    grouped = results(backend, arguments, COTANGENTS)
    for name in ("out", "d_v", "d_write"):
        grouped[name] = widen(grouped[name])
    for name in ("final_state", "d_initial_state"):
        grouped[name] = widen_state(grouped[name])
    agree(backend, problem, grouped, whole)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
@pytest.mark.parametrize("owner", ["key", "value"])
def test_a_shared_key_is_that_key_repeated(backend, owner):
    problem = dataclasses.replace(BASE, gates=RandomGates("head", erase="head", write="head", owner=owner))
    arguments = problem.arguments()
    gates = arguments["gates"]

    def repeat(x):
        return jnp.repeat(x, problem.value_heads // x.shape[2], axis=2)

    repeated = {**arguments, "q": repeat(arguments["q"]), "k": repeat(arguments["k"])}
    repeated["gates"] = Gates(repeat(gates.log_decay), repeat(gates.erase), gates.write)
    apart, shared = results(backend, repeated, COTANGENTS), results(backend, arguments, COTANGENTS)
    for name in ("d_q", "d_k", "d_log_decay", "d_erase"):
        batch, time, heads, dim = shared[name].shape
        apart[name] = apart[name].reshape(batch, time, heads, -1, dim).sum(3)
    agree(backend, problem, shared, apart)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_an_absent_gate_is_the_number_it_stands_for(backend):
    problem = dataclasses.replace(BASE, gates=RandomGates("head", erase="head", write="head", owner="value"))
    arguments = problem.arguments()
    gates = arguments["gates"]
    pairs = [
        (Gates(None, gates.erase, gates.write), Gates(0 * gates.log_decay, gates.erase, gates.write)),
        (Gates(gates.log_decay, None, gates.write), Gates(gates.log_decay, 0 * gates.erase, gates.write)),
        (Gates(gates.log_decay, gates.erase), Gates(gates.log_decay, gates.erase, 0 * gates.write + 1)),
    ]
    for absent, neutral in pairs:
        one, two = (results(backend, with_gates(arguments, gates), COTANGENTS) for gates in (absent, neutral))
        assert_close(one, {name: two[name] for name in one}, problem)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_delta_net_is_kda_that_never_decays(backend):
    arguments = KDA.arguments()
    beta, decay = arguments["gates"].erase, 0 * arguments["gates"].log_decay
    kda, delta_net = (results(backend, with_gates(arguments, Gates.tied(beta, d)), COTANGENTS) for d in (decay, None))
    agree(backend, KDA, {name: kda[name] for name in delta_net}, delta_net)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_gla_is_gdn2_that_never_erases_and_writes_with_one(backend):
    problem = dataclasses.replace(BASE, gates=RandomGates("channel", erase="channel", write="channel", owner="key"))
    arguments = problem.arguments()
    gates = arguments["gates"]
    gates = Gates(gates.log_decay, 0 * gates.erase, 0 * gates.write + 1)
    gdn2, gla = (results(backend, with_gates(arguments, g), COTANGENTS) for g in (gates, Gates(gates.log_decay)))
    agree(backend, problem, {name: gdn2[name] for name in gla}, gla)


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_no_state_no_scale_and_negative_zero_are_their_defaults(backend):
    problem = dataclasses.replace(KDA, state=False)
    arguments = problem.arguments()
    plain = results(backend, arguments, COTANGENTS)
    zeros = np.zeros(problem.state_shape, np.float32)
    full = results(backend, {**arguments, "initial_state": zeros, "scale": problem.key_dim**-0.5}, COTANGENTS)
    assert_close(plain, {name: full[name] for name in plain}, problem)
    traced = results(backend, {**arguments, "scale": np.float32(problem.key_dim**-0.5)}, COTANGENTS)
    assert_close(traced, plain, problem)
    beta, decay = arguments["gates"].erase, jnp.zeros_like(arguments["gates"].log_decay)
    both = (with_gates(arguments, Gates.tied(beta, sign * decay)) for sign in (1.0, -1.0))
    zero, negative = (results(backend, arguments, COTANGENTS) for arguments in both)
    for name in zero:
        np.testing.assert_array_equal(zero[name], negative[name])


@pytest.mark.smoke
@pytest.mark.parametrize("backend", [Recurrent(), Chunked()], ids=str)
def test_erasing_nothing_and_decaying_nothing_sums_the_writes(backend):
    """Linear attention by one cumulative sum."""
    problem = RandomProblem(time=20, key_dim=4, value_dim=3)
    arguments = problem.arguments()
    q, k, v = (arguments[name][0, :, 0].astype(np.float64) for name in "qkv")
    states = np.cumsum(k[:, :, None] * v[:, None, :], axis=0)
    out = problem.key_dim**-0.5 * np.einsum("tk,tkv->tv", q, states)
    actual = results(backend, arguments, problem.cotangents("float32", "float32"))
    np.testing.assert_allclose(actual["out"][0, :, 0], out, rtol=0, atol=1e-5 * np.abs(out).max())
    np.testing.assert_allclose(actual["final_state"][0, 0], states[-1], rtol=0, atol=1e-5)
