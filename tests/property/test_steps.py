"""One token of many rows: from and to the slots of a pool, by XLA and by the kernel, in JAX's TPU interpreter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from gated_delta import (
    Chunked,
    Gates,
    RawGates,
    Recurrent,
    _recurrent,
    explain,
    gated_delta,
    gated_delta_raw_step,
    gated_delta_step,
)
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import RandomGates, RandomProblem, assert_close, quick_jit

KERNEL = PallasTPU(interpret=True)
BY_HEADS = PallasTPU(TileConfig(owners=2), interpret=True)
SIZES = dict(batch=5, time=1, key_heads=2, group=2, key_dim=8, value_dim=6, state=True, seed=1)
GDN = RandomGates("head", erase="head", owner="value", tied=True)
FAMILIES = {
    "gdn": GDN,
    "kda": RandomGates("channel", erase="head", owner="key", tied=True),
    "gdn2": RandomGates("channel", erase="channel", write="channel"),
    "gdn2 by value heads": RandomGates("channel", erase="channel", write="channel", owner="value"),
    "sla": RandomGates("tile", decay_tiles=4, erase="head", tied=True),
    "gla": RandomGates("channel"),
    "linear attention": RandomGates(write="head", write_owner="key"),
    "no gate": RandomGates(),
}
QUICK = ("gdn", "gdn2", "sla", "gla")
families = pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
SLOTS = np.array([-1, 3, 6, 9, 0])
FRESH = np.array([False, False, True, False, False])


def problem_of(family, **changes):
    return RandomProblem(**SIZES | changes, gates=FAMILIES[family])


def token_of(problem):
    """Arguments of `gated_delta_step` but for the state, and a state for every row."""
    arguments = problem.arguments()
    state = arguments.pop("initial_state")
    return jax.tree.map(lambda x: x[:, 0], arguments), state


def pool_of(state):
    """7 slots: each row's state where `SLOTS` says, and elsewhere, and where a row begins, NaN."""
    pool = np.full((7, *state.shape[1:]), np.nan, np.float32)
    pool[SLOTS[[1, 4]]] = state[[1, 4]]
    return pool


@functools.cache
def stepper(backend):
    return quick_jit(functools.partial(gated_delta_step, backend=backend))


def alone(token, state):
    return dict(zip(("out", "final_state"), map(np.asarray, stepper(None)(**token, state=state))))


@families
@pytest.mark.parametrize("backend", [Recurrent(), KERNEL], ids=["xla", "kernel"])
def test_rows_step_in_their_slots_and_nothing_else_is_touched(backend, family):
    """A row that goes on, one that begins in a slot of NaN, and padding before, between and behind them."""
    problem = problem_of(family)
    token, state = token_of(problem)
    pool = pool_of(state)
    out, new = map(np.asarray, stepper(backend)(**token, state=pool, slots=SLOTS, fresh=FRESH))
    state = np.where(FRESH[:, None, None, None], 0, state)
    real = [1, 2, 4]
    wanted = {name: x[real] for name, x in alone(token, state).items()}
    assert_close({"out": out[real], "final_state": new[SLOTS[real]]}, wanted, problem)
    assert not out[[0, 3]].any()
    others = [1, 2, 4, 5]
    np.testing.assert_array_equal(new[others], pool[others])


@pytest.mark.parametrize("family", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)])
def test_rows_may_step_one_after_another(family, monkeypatch):
    """As on a CPU whose caches do not hold the states of all of them."""
    monkeypatch.setattr(_recurrent, "_CACHE_BYTES", 0)
    problem = problem_of(family, batch=4, key_dim=6)  # in no program that is compiled already
    token, state = token_of(problem)
    pool, slots = np.full((7, *state.shape[1:]), np.nan, np.float32), np.array([2, 9, 5, 0])
    pool[[2, 0]] = state[[0, 3]]
    fresh = np.array([False, True, True, False])
    steps = [quick_jit(lambda **arguments: gated_delta_step(**arguments)) for _ in range(2)]
    out, new = map(np.asarray, steps[0](**token, state=pool, slots=slots, fresh=fresh))
    plain_out, plain = map(np.asarray, steps[1](**token, state=state, fresh=fresh))
    np.testing.assert_array_equal(out, np.where(slots[:, None, None] < 7, plain_out, 0))
    np.testing.assert_array_equal(new[[2, 5, 0]], plain[[0, 2, 3]])
    np.testing.assert_array_equal(new[[1, 3, 4, 6]], pool[[1, 3, 4, 6]])
    arguments = problem.arguments() | {"initial_state": np.where(fresh[:, None, None, None], 0, state)}
    wanted_out, wanted = gated_delta(**arguments, backend=Recurrent())
    assert_close({"out": plain_out[:, None], "final_state": plain}, {"out": wanted_out, "final_state": wanted}, problem)


@pytest.mark.parametrize("slots", [[-1, 8], [-1, 1, -1], [2, -1, -1, 0, -1]], ids=str)
def test_padding_may_be_anywhere_or_everywhere(slots):
    problem = problem_of("gdn", batch=len(slots), key_heads=1, group=1)
    token, state = token_of(problem)
    pool = np.random.default_rng(0).standard_normal((3, *state.shape[1:])).astype(np.float32)
    out, new = map(np.asarray, stepper(KERNEL)(**token, state=pool, slots=np.array(slots)))
    real = [row for row, slot in enumerate(slots) if 0 <= slot < 3]
    there = [slots[row] for row in real]
    if real:
        wanted = alone(token, pool[np.clip(slots, 0, 2)])
        wanted = {name: x[real] for name, x in wanted.items()}
        assert_close({"out": out[real], "final_state": new[there]}, wanted, problem)
    np.testing.assert_array_equal(np.delete(new, there, axis=0), np.delete(pool, there, axis=0))
    assert not np.delete(out, real, axis=0).any()


@pytest.mark.parametrize("family", [*QUICK[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in QUICK[1:])])
def test_a_block_may_hold_a_part_of_the_heads(family):
    problem = problem_of(family)
    token, state = token_of(problem)
    out, new = stepper(BY_HEADS)(**token, state=state)
    assert_close({"out": np.asarray(out), "final_state": np.asarray(new)}, alone(token, state), problem)


@pytest.mark.parametrize("backend", [Recurrent(), KERNEL], ids=["xla", "kernel"])
def test_states_of_bfloat16_are_rounded_where_they_are_stored_and_nowhere_else(backend):
    token, state = token_of(problem_of("gdn2"))
    pool = jnp.asarray(np.nan_to_num(pool_of(state)), jnp.bfloat16)
    run = stepper(backend)
    out, new = run(**token, state=pool, slots=SLOTS, fresh=FRESH)
    wide_out, wide = run(**token, state=pool.astype(jnp.float32), slots=SLOTS, fresh=FRESH)
    assert new.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, wide_out)
    np.testing.assert_array_equal(new, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", [Recurrent(), KERNEL], ids=["xla", "kernel"])
@pytest.mark.parametrize("family", ["gdn2", pytest.param("gla", marks=pytest.mark.slow)])
def test_what_is_not_finite_spoils_its_own_row_and_heads(family, backend, value):
    """In every row one number of another array: the last row has none."""
    problem = problem_of(family, batch=8)
    token, state = token_of(problem)
    clean = stepper(backend)(**token, state=state)
    gates = {name: getattr(token["gates"], name) for name in ("log_decay", "erase", "write")}
    arrays = {"q": token["q"], "k": token["k"], "v": token["v"], "state": state}
    arrays |= {name: x for name, x in gates.items() if x is not None}
    spoiled = np.zeros((8, 4), bool)
    for row, name in enumerate(arrays):
        arrays[name] = np.array(arrays[name])
        arrays[name][row, 1, ..., 2] = value
        of_values = arrays[name].shape[1] == problem.value_heads
        spoiled[row, 1 if of_values else slice(2, 4)] = True
    bad = {name: arrays.pop(name) for name in gates if name in arrays}
    arrays["gates"] = Gates(**gates | bad)
    for name, actual, wanted in zip(("out", "state"), _traced(backend)(**arrays), clean, strict=True):
        actual, wanted = np.asarray(actual), np.asarray(wanted)
        assert np.isnan(actual[spoiled]).all(), name
        np.testing.assert_array_equal(actual[~spoiled], wanted[~spoiled], err_msg=name)


@functools.cache
def _traced(backend):
    """Gates that are concrete would be refused."""
    return quick_jit(lambda **arguments: gated_delta_step(**arguments, backend=backend))


RAW = {
    "softplus": dict(decay="channel", bound=None, qk_norm="l2"),
    "bounded": dict(decay="head", bound=-5.0, qk_norm="none"),
}


@pytest.mark.parametrize("form", ["softplus", pytest.param("bounded", marks=pytest.mark.slow)])
def test_raw_gates_are_activated_inside(form):
    decay, bound, norm = RAW[form].values()
    problem = problem_of("kda")
    token, state = token_of(problem)
    rng = np.random.default_rng(0)
    groups = 8 if decay == "channel" else 1
    shapes = (5, 2, groups), (2,), (2, groups), (5, 2)
    raw, A_log, dt_bias, beta = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    gates = RawGates.tied(beta, raw, A_log=A_log, dt_bias=dt_bias, bound=bound)

    def run(backend):
        step = functools.partial(gated_delta_raw_step, qk_norm=norm, scale=0.3, backend=backend)
        out, new = quick_jit(step)(3 * token["q"], 3 * token["k"], token["v"], gates, state)
        return {"out": np.asarray(out), "final_state": np.asarray(new)}

    assert_close(run(KERNEL), run(None), problem)


@pytest.mark.parametrize("scale", [0.5, "traced"])
def test_the_kernel_takes_any_scale_and_rounds_its_output_once(scale):
    problem = problem_of("gdn", dtype="bfloat16")
    token, state = token_of(problem)

    def run(backend):
        def call(scale):
            return gated_delta_step(**token, state=state, scale=scale, backend=backend)

        out, new = quick_jit(call)(jnp.float32(0.5)) if scale == "traced" else call(scale)
        assert out.dtype == jnp.bfloat16 and new.dtype == jnp.float32
        return {"out": np.asarray(out), "final_state": np.asarray(new)}

    assert_close(run(KERNEL), run(None), problem)


def test_the_derivatives_of_the_kernel_are_those_of_the_recurrence():
    problem = problem_of("gdn2", batch=2)
    token, state = token_of(problem)

    def gradients(backend):
        def loss(token, state):
            out, new = gated_delta_step(**token, state=state, slots=np.array([1, -1]), backend=backend)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(new))

        token_part, state_part = quick_jit(jax.grad(loss, argnums=(0, 1)))(token, jnp.asarray(state))
        gates = {f"d_{name}": getattr(token_part["gates"], name) for name in ("log_decay", "erase", "write")}
        return gates | {f"d_{name}": token_part[name] for name in "qkv"} | {"d_initial_state": state_part}

    assert_close(gradients(KERNEL), gradients(None), problem)


@pytest.mark.parametrize("backend", [Recurrent(), KERNEL], ids=["xla", "kernel"])
def test_rows_that_a_vmap_maps_are_rows(backend):
    token, state = token_of(problem_of("gdn"))
    mapped = jax.tree.map(lambda x: x[:, None], (token, state))
    step = quick_jit(jax.vmap(lambda token, state: gated_delta_step(**token, state=state, backend=backend)))
    for actual, wanted in zip(step(*mapped), stepper(backend)(**token, state=state)):
        np.testing.assert_allclose(actual[:, 0], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", [Recurrent(), KERNEL], ids=["xla", "kernel"])
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=["pools", "slots", "both"])
def test_pools_that_a_vmap_maps_stay_apart(backend, axes):
    token, state = token_of(problem_of("gdn"))
    pools = np.stack([pool_of(state), pool_of(2 * state)])
    slots = np.stack([SLOTS, SLOTS[::-1]])

    def step(pool, slots):
        return gated_delta_step(**token, state=pool, slots=slots, backend=backend)

    given = [x if axis == 0 else x[0] for x, axis in zip((pools, slots), axes)]
    out, new = map(np.asarray, quick_jit(jax.vmap(step, axes))(*given))
    for member in range(2):
        own = [x[member if axis == 0 else 0] for x, axis in zip((pools, slots), axes)]
        for actual, wanted in zip((out[member], new[member]), stepper(backend)(**token, state=own[0], slots=own[1])):
            np.testing.assert_allclose(actual, wanted, rtol=1e-5, atol=1e-6)


def test_a_donated_pool_is_updated_in_place():
    token, state = token_of(problem_of("gdn", key_dim=32, value_dim=32))
    pool = jnp.zeros((64, *state.shape[1:]))
    step = jax.jit(lambda pool, token: gated_delta_step(**token, state=pool, slots=SLOTS), donate_argnums=0)
    memory = step.lower(pool, token).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes and memory.temp_size_in_bytes < pool.nbytes / 2
    where = pool.unsafe_buffer_pointer()
    _, new = step(pool, token)
    assert new.unsafe_buffer_pointer() == where


@pytest.mark.slow
def test_the_kernel_does_not_race():
    pltpu.reset_tpu_interpret_mode_state()
    watched = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, uninitialized_memory="nan")
    token, state = token_of(problem := problem_of("gdn"))
    backend = PallasTPU(TileConfig(owners=2), interpret=watched)
    _, new = stepper(backend)(**token, state=pool_of(state), slots=SLOTS, fresh=FRESH)
    jax.block_until_ready(new)
    assert interpreter.races is not None and not interpreter.races.races_found
    state = np.where(FRESH[:, None, None, None], 0, state)
    real = [1, 2, 4]
    new = np.asarray(new)[SLOTS[real]]
    assert_close({"final_state": new}, {"final_state": alone(token, state)["final_state"][real]}, problem)


@pytest.mark.parametrize("checked", [False, True])
def test_a_slot_that_comes_twice_is_refused(checked):
    token, state = token_of(problem_of("gdn", batch=2))
    pool, slots = np.zeros((3, *state.shape[1:]), np.float32), np.array([1, 1])
    with pytest.raises(ValueError, match=r"`gated_delta_step` needs slots that differ .* comes twice: 1\."):
        gated_delta_step(**token, state=pool, slots=slots)
    traced = jax.jit(lambda slots: gated_delta_step(**token, state=pool, slots=slots, checked=checked))
    if checked:
        with pytest.raises(RuntimeError, match=r"`gated_delta_step` needs slots that differ"):
            jax.block_until_ready(traced(slots))
    else:
        np.testing.assert_array_equal(np.asarray(traced(slots)[1])[[0, 2]], pool[[0, 2]])


def test_a_backend_without_a_step_says_so_and_explain_too():
    token, state = token_of(problem_of("gdn"))
    with pytest.raises(ValueError, match=r"Chunked\(\) cannot run: it has no form for single tokens"):
        gated_delta_step(**token, state=state, backend=Chunked())
    said = str(explain(**token, initial_state=state))
    assert "Recurrent(): runs" in said and "Chunked" in said and "cannot run: it has no form" in said
    if jax.default_backend() != "tpu":
        assert "PallasTPU(): cannot run: it needs a TPU" in said


def test_the_kernel_says_what_it_cannot_keep():
    token, state = token_of(problem_of("gdn", batch=1))
    pool = np.zeros((2, *state.shape[1:]), np.float16)
    with pytest.raises(ValueError, match=r"it keeps states as float32 or bfloat16, not float16"):
        gated_delta_step(**token, state=pool, slots=np.array([0]), backend=PallasTPU(ahead_of_time=True))
    wide = dataclasses.replace(problem_of("gdn", batch=1), key_heads=1, group=8, key_dim=512, value_dim=640)
    token, state = token_of(wide)
    with pytest.raises(ValueError, match=r"8 of 512 x 640 numbers, take 10485760 bytes .* at most 8388608 bytes do"):
        gated_delta_step(**token, state=state, backend=PallasTPU(ahead_of_time=True))
