"""Serving: a pool that never mixes requests, windows that go back, prompts piece by piece, and what is refused.

The state machine at the end drives all of it in random order beside one reference state per request.
"""

import collections
import functools
import itertools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from gated_delta import GDN, GDN2, DeltaNet, Recurrent
from gated_delta.pallas import PallasTPU
from gated_delta.serving import (
    ReplayWindow,
    StatePool,
    begin_replay,
    commit,
    end_replay,
    pooled_step,
    prefill,
    window,
)
from gated_delta.testing.laws import draw_parameters

pytestmark = pytest.mark.inference

FAST = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
fast_jit = functools.partial(jax.jit, compiler_options=FAST)
MODEL = 4
MAKERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=1, value_heads=2, key_dim=3, value_dim=2),
    "gdn2": functools.partial(GDN2, MODEL, key_heads=1, value_heads=1, key_dim=3, value_dim=2),
    "delta": functools.partial(DeltaNet, MODEL, key_heads=1, value_heads=1, key_dim=3, value_dim=2, conv_width=None),
}


@functools.cache
def make_mixer(name):
    return draw_parameters(eqx.filter_eval_shape(MAKERS[name], key=jax.random.key(0)), 0)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def copied(tree):
    """In NumPy, with nothing of a donated buffer held."""
    return jax.tree.map(lambda a: np.array(a), tree)


def row_of(tree, row):
    return jax.tree.map(lambda a: np.asarray(a)[row], tree)


def assert_close(actual, expected):
    """Float32 rounding, for values of any size up to a few units."""
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(e, np.float32), rtol=0, atol=2e-5)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def random_states(pool, seed, rows):
    """As `gather` would return them, but random."""
    return jax.tree.map(lambda a: jnp.asarray(draw(seed, rows, *a.shape)).astype(a.dtype), pool.initial)


# ---- the pool --------------------------------------------------------------------------------------------------------


def tree_of_states():
    """As a hybrid model's: two layers, a cache that stands in it twice, and a count."""
    cache = jnp.zeros((3, 2))
    return [make_mixer("gdn").init_state(), (cache, cache, jnp.array(0)), {"second": make_mixer("gdn2").init_state()}]


def test_rows_are_read_and_written_by_slot_and_padding_touches_nothing():
    load = fast_jit(lambda pool, slots, states: pool.scatter(slots, states))
    take = fast_jit(lambda pool, slots: pool.gather(slots))
    pool = StatePool(tree_of_states(), 5)
    before = load(pool, np.arange(5), random_states(pool, 0, 5))
    slots = np.array([3, -1, 0, 5, -5, 2**31 - 1, -(2**31)])
    states = random_states(pool, 1, len(slots))
    after = load(before, slots, states)
    assert_equal(row_of(after.states, [3, 0]), row_of(states, [0, 2]))
    assert_equal(row_of(after.states, [1, 2, 4]), row_of(before.states, [1, 2, 4]))
    read = take(after, slots)
    assert_equal(row_of(read, [0, 2]), row_of(states, [0, 2]))
    for row in (1, 3, 4, 5, 6):
        assert_equal(row_of(read, row), pool.initial)
    fork = take(after, np.zeros(7, int))
    assert_equal(row_of(fork, 6), row_of(states, 2))
    assert not any(a.weak_type for a in jax.tree.leaves((pool, after)))  # a second program would be compiled
    assert_equal(StatePool(jnp.arange(2), 300).gather(np.array([200, 255], np.uint8)), np.array([[0, 1]] * 2))


def test_concrete_slots_of_64_bits_are_not_cut_to_32():
    pool = StatePool(jnp.zeros(2), 3)
    after = pool.scatter(np.array([2**32 + 1, 2, -(2**40)]), jnp.ones((3, 2)))
    assert_equal(after.states, np.array([[0, 0], [0, 0], [1, 1]], np.float32))


def test_a_fresh_request_starts_from_the_first_state_whatever_its_slot_holds():
    initial = {"window": jnp.zeros(3), "recurrent": jnp.full((2, 3), 0.5)}
    pool = StatePool(initial, 2)
    rubbish = pool.scatter(np.array([0, 1]), jax.tree.map(lambda a: jnp.full((2, *a.shape), jnp.nan), initial))
    first, kept = (row_of(rubbish.gather(np.array([1, 0]), fresh=np.array([True, False])), row) for row in (0, 1))
    assert_equal(first, initial)
    assert all(np.all(np.isnan(a)) for a in jax.tree.leaves(kept))
    clean = rubbish.reset(np.array([1, -1]))
    assert_equal(row_of(clean.states, 1), initial)
    assert all(np.all(np.isnan(a)) for a in jax.tree.leaves(row_of(clean.states, 0)))


def test_only_storing_rounds():
    pool = StatePool((make_mixer("gdn").init_state(), jnp.zeros(3)), 2, recurrent_dtype=jnp.bfloat16)
    slots, (state, rest) = np.array([1, 0]), random_states(pool, 0, 2)
    assert pool.states[0].recurrent.dtype == jnp.bfloat16 and pool.states[1].dtype == jnp.float32
    pool = pool.scatter(slots, (state, rest))
    read, other = pool.gather(slots)
    assert read.recurrent.dtype == jnp.float32
    rounded = state.recurrent.astype(jnp.bfloat16).astype(jnp.float32)
    assert_equal((read, other), (eqx.tree_at(lambda s: s.recurrent, state, rounded), rest))
    assert_equal(pool.scatter(slots, (read, other)).states, pool.states)  # once rounded, never again


def test_donation_writes_in_place_and_nothing_else_touches_what_the_caller_has():
    initial = tree_of_states()
    pool = StatePool(initial, 64)

    def step(pool, slots):
        states = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), pool.gather(slots))
        return pool.scatter(slots, states)

    slots = jnp.array([3, 1])
    before = copied(pool.states)
    expected = copied(fast_jit(step)(pool, slots).states)
    assert_equal(pool.states, before)  # not donated: as it was
    donating = jax.jit(step, donate_argnums=0)
    memory = donating.lower(pool, slots).compile().memory_analysis()
    size = sum(a.nbytes for a in jax.tree.leaves(pool))
    assert memory.alias_size_in_bytes >= size and memory.temp_size_in_bytes < size / 4
    where = [a.unsafe_buffer_pointer() for a in jax.tree.leaves(pool.states)]
    after = donating(pool, slots)
    assert [a.unsafe_buffer_pointer() for a in jax.tree.leaves(after.states)] == where
    assert_equal(after.states, expected)
    assert all(a.is_deleted() for a in jax.tree.leaves(pool.states))
    assert not any(a.is_deleted() for a in jax.tree.leaves(initial))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["mask", "offsets"])
def test_rows_that_begin_go_on_and_have_one_token_share_a_call(form):
    """Padded rows, and the same documents packed into one; against each request alone, token by token."""
    mixer, lengths = make_mixer("gdn2"), [9, 1, 4, 1, 0]
    fresh, slots = np.array([False, False, True, True, False]), np.array([2, 5, 0, 4, -1])
    pool = StatePool(mixer.init_state(), 6)
    pool = pool.scatter(np.arange(6), random_states(pool, 0, 6))
    rows = draw(1, 5, 9, MODEL)
    state = pool.gather(slots, fresh)
    if form == "mask":
        mask = np.arange(9) < np.array(lengths)[:, None]
        out, new = eqx.filter_jit(lambda x, s: mixer(x, s, mask=mask), compiler_options=FAST)(rows, state)
    else:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        packed = np.concatenate([row[:length] for row, length in zip(rows, lengths)])
        packed = np.concatenate([packed, np.full((3, MODEL), np.nan, np.float32)])  # of a fixed length
        run = eqx.filter_jit(lambda x, s: mixer(x, s, cu_seqlens=offsets), compiler_options=FAST)
        out, new = run(packed[None], state)
        out = [out[0, begin:end] for begin, end in itertools.pairwise(offsets)]
    after = pool.scatter(slots, new)
    for row, (slot, length) in enumerate(zip(slots[:4], lengths)):
        begin = mixer.init_state() if fresh[row] else jax.tree.map(lambda a, slot=slot: a[slot], pool.states)
        outs, states = alone("gdn2", rows[row], begin)
        assert_close((np.asarray(out[row])[:length], row_of(after.states, slot)), (outs[:length], states[length - 1]))
    assert_equal(row_of(after.states, [1, 3]), row_of(pool.states, [1, 3]))


@functools.cache
def _alone(name):
    mixer = make_mixer(name)

    def run(x, state):
        def body(state, token):
            out, state = mixer.step(token, state)
            return state, (out, state)

        return jax.lax.scan(body, state, x)[1]

    return fast_jit(run)


def alone(name, x, state):
    """Outputs, and the state after each token: one request, the recurrence token by token."""
    outs, states = _alone(name)(x, state)
    return np.asarray(outs), [row_of(states, t) for t in range(len(x))]


# ---- steps in place --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, kernel", [("gdn", False), pytest.param("delta", False, marks=pytest.mark.slow), ("gdn", True)]
)
def test_a_step_in_the_slots_is_one_between_gather_and_scatter(name, kernel):
    mixer, x = make_mixer(name), draw(1, 4, MODEL)
    if kernel:
        mixer = eqx.tree_at(lambda m: m.backend, mixer, PallasTPU(interpret=True), is_leaf=lambda a: a is None)
    pool = StatePool(mixer.init_state(), 5)
    pool = pool.scatter(np.arange(5), random_states(pool, 0, 5))
    pool = eqx.tree_at(lambda p: p.states, pool, jax.tree.map(lambda a: a.at[4].set(jnp.nan), pool.states))
    slots, fresh = np.array([3, -1, 4, 0]), np.array([False, False, True, False])
    out, states = fast_jit(lambda s: pooled_step(mixer, x, s, slots, fresh=fresh))(pool.states)
    wanted, new = fast_jit(lambda x, s: make_mixer(name).step(x, s))(x, pool.gather(slots, fresh))
    wanted_states = pool.scatter(slots, new).states
    assert_close((row_of(out, [0, 2, 3]), states), (row_of(wanted, [0, 2, 3]), wanted_states))
    assert_equal(row_of(states, [1, 2]), row_of(pool.states, [1, 2]))


def test_a_step_in_the_slots_keeps_their_dtype():
    mixer, slots = make_mixer("gdn"), np.array([1, 0])
    pool = StatePool(mixer.init_state(), 2, recurrent_dtype=jnp.bfloat16)
    _, states = fast_jit(lambda s: pooled_step(mixer, draw(0, 2, MODEL), s, slots))(pool.states)
    assert jax.tree.map(lambda a: a.dtype, states) == jax.tree.map(lambda a: a.dtype, pool.states)


# ---- windows ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_any_number_of_a_windows_tokens_can_be_kept(name):
    """Windows of 3 with 0 to 3 accepted, one after the other, over several overflows of 4 records."""
    mixer, x = make_mixer(name), draw(0, 4, 30, MODEL)
    start = jax.tree.map(lambda a: jnp.asarray(draw(1, 4, *a.shape)), mixer.init_state())
    references = [alone(name, row, row_of(start, i)) for i, row in enumerate(x)]
    states = [[row_of(start, i), *references[i][1]] for i in range(4)]

    @fast_jit
    def speculate(x, state, replay, accepted):
        out, kept = window(mixer, x, state, keep="all")
        again, records = window(mixer, x, replay, keep="replay")
        state, replay = commit([kept, records], accepted)
        return out, again, state, replay, end_replay(mixer, replay)

    seen, replay, state = np.zeros(4, int), begin_replay(mixer, start, capacity=4), start
    for accepted in ([0, 1, 2, 3], [3, 3, 0, 1], [1, 0, 3, 2], [3, 2, 1, 3], [0, 0, 0, 0], [3, 3, 3, 3]):
        here = np.stack([row[n : n + 3] for row, n in zip(x, seen)])
        before = copied((state, replay))
        out, again, new, new_replay, folded = speculate(here, state, replay, np.array(accepted))
        assert_equal((state, replay), before)
        state, replay, seen = new, new_replay, seen + accepted
        for row in range(4):
            expected = references[row][0][seen[row] - accepted[row] :][:3]
            assert_close((out[row], again[row]), (expected, expected))
            wanted = states[row][seen[row]]
            assert_close((row_of(state, row), row_of(folded, row)), (wanted, wanted))
        nothing = np.array(accepted) == 0
        assert_equal(row_of(state, nothing), row_of(before[0], nothing))  # bit for bit


@pytest.mark.slow
def test_a_window_of_one_sequence_and_the_final_state():
    mixer, x = make_mixer("delta"), draw(0, 3, MODEL)
    outs, states = alone("delta", x, mixer.init_state())

    @fast_jit
    def run(x):
        state = mixer.init_state()
        out, kept = window(mixer, x, state, keep="all")
        again, records = window(mixer, x, begin_replay(mixer, state, capacity=3), keep="replay")
        last, final = window(mixer, x, state, keep="final")
        return (out, again, last), (commit(kept, 2), end_replay(mixer, commit(records, 2)), final)

    assert_close(run(x), ((outs, outs, outs), (states[1], states[1], states[2])))


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "replay"])
def test_a_rejected_token_that_is_not_finite_leaves_no_trace_and_an_accepted_one_shows(keep):
    mixer, x = make_mixer("gdn"), draw(0, 2, 3, MODEL)
    start = jax.tree.map(lambda a: jnp.asarray(draw(1, 2, *a.shape)), mixer.init_state())
    x[0, 1] = np.nan

    @fast_jit
    def speculate(x, accepted):
        out, kept = window(mixer, x, begin_replay(mixer, start) if keep == "replay" else start, keep=keep)
        state = commit(kept, accepted)
        return out, end_replay(mixer, state) if keep == "replay" else state

    out, state = speculate(x, np.array([1, 3]))
    _, expected = speculate(np.nan_to_num(x), np.array([1, 3]))
    assert np.all(np.isnan(out[0, 1:])) and np.all(np.isfinite(out[0, 0])) and np.all(np.isfinite(out[1]))
    assert_equal(state, expected)
    _, spoiled = speculate(x, np.array([2, 3]))
    assert np.all(np.isnan(spoiled.recurrent[0])) and np.all(np.isfinite(spoiled.recurrent[1]))


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "replay"])
def test_a_window_rounds_a_bfloat16_state_only_when_it_is_kept(keep):
    mixer, x = make_mixer("gdn"), draw(0, 1, 4, MODEL)
    wide = mixer.init_state(1)
    wide = eqx.tree_at(lambda s: s.recurrent, wide, jnp.asarray(draw(1, 1, 2, 3, 2)).astype(jnp.bfloat16))

    @fast_jit
    def speculate(x, state):
        _, kept = window(mixer, x, begin_replay(mixer, state, capacity=4) if keep == "replay" else state, keep=keep)
        return end_replay(mixer, commit(kept, 4)) if keep == "replay" else commit(kept, 4)

    state = speculate(x, wide)
    exact = eqx.tree_at(lambda s: s.recurrent, wide, wide.recurrent.astype(jnp.float32))
    expected = alone("gdn", x[0], row_of(exact, 0))[1][-1].recurrent
    assert state.recurrent.dtype == jnp.bfloat16
    ulp = 2.0**-8 * np.abs(expected) + 1e-5
    assert np.all(np.abs(np.asarray(state.recurrent[0], np.float32) - expected) <= ulp)


# ---- long prompts ----------------------------------------------------------------------------------------------------


def million(time):
    """Token ids to the state, one head of 128 x 128; the embedding is inside, so that no array but the ids is long."""
    mixer = eqx.filter_eval_shape(functools.partial(GDN, 128, key_heads=1, key_dim=128), key=jax.random.key(0))

    def run(mixer, embed, tokens):
        return prefill(lambda t, s, m: mixer(embed[t], s, mask=m), tokens, mixer.init_state(1), piece=512)

    embed, tokens = jax.ShapeDtypeStruct((16, 128), jnp.float32), jax.ShapeDtypeStruct((1, time), jnp.int32)
    return run, (mixer, embed, tokens)


def test_a_prompt_of_a_million_tokens_has_the_shapes_of_a_short_one():
    long, short = (jax.tree.map(lambda a: a.shape, eqx.filter_eval_shape(*_call(million(t)))) for t in (2**20, 512))
    assert long == short and long.state.recurrent == (1, 1, 128, 128)
    run, arguments = million(2**20)
    biggest = max(x.aval.size for e in _equations(jax.make_jaxpr(run)(*arguments).jaxpr) for x in e.outvars)
    assert biggest < 2**19  # the ids are an argument; all that is made is of the size of a piece


def _call(run_and_arguments):
    run, arguments = run_and_arguments
    return (run, *arguments)


def _equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for part in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(part, "jaxpr", part)
            if hasattr(inner, "eqns"):
                yield from _equations(inner)


@pytest.mark.slow
def test_a_long_prompt_needs_the_memory_of_a_short_one_and_has_its_state():
    """2^20 tokens compiled, 2^16 run, against the recurrence over the same tokens."""
    held = []
    for time in (2**12, 2**20):
        run, arguments = million(time)
        held.append(fast_jit(run).lower(*arguments).compile().memory_analysis().temp_size_in_bytes)
    assert held[1] <= 1.01 * held[0]
    run, (shapes, embed, _) = million(2**16)
    mixer, embed = draw_parameters(shapes, 0), draw(0, *embed.shape)
    tokens = np.random.default_rng(1).integers(0, 16, (1, 2**16))
    result = jax.jit(run)(mixer, embed, tokens)
    exact = eqx.tree_at(lambda m: m.backend, mixer, Recurrent(), is_leaf=lambda x: x is None)
    expected = jax.jit(run)(exact, embed, tokens)
    for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        assert np.abs(np.asarray(a) - np.asarray(e)).max() <= 2e-5 * np.abs(np.asarray(e)).max()


# ---- what is refused -------------------------------------------------------------------------------------------------


def bad_calls():
    mixer = make_mixer("gdn")
    pool, state = StatePool(mixer.init_state(), 4), mixer.init_state(2)
    x, slots = jnp.zeros((2, 3, MODEL)), np.array([0, 1])
    transposed = eqx.tree_at(lambda s: s.recurrent, state, jnp.swapaxes(state.recurrent, -1, -2))
    replay = begin_replay(mixer, state, capacity=2)
    _, kept = eqx.filter_eval_shape(window, mixer, x, state, keep="all")

    def run(x, s, m):
        return mixer(x, s, mask=m)

    return {
        "no int": (lambda: StatePool(state, 2.0), TypeError, "`slots` to be a Python int, .* but a float came"),
        "no slots": (lambda: StatePool(state, 0), ValueError, r"`StatePool\(slots=0\)` must have at least 1"),
        "no state": (lambda: StatePool({}, 2), ValueError, "needs a state with at least one array"),
        "a number": (lambda: StatePool({"n": 0}, 2), TypeError, r"initial\['n'\] is an int"),
        "no recurrent": (
            lambda: StatePool(jnp.zeros(2), 2, recurrent_dtype=jnp.bfloat16),
            ValueError,
            "`recurrent_dtype` is for trees with a `MixerState`",
        ),
        "integer storage": (
            lambda: StatePool(state, 2, recurrent_dtype=jnp.int8),
            TypeError,
            "`recurrent_dtype` must hold floating-point numbers",
        ),
        "list": (lambda: pool.gather([0, 1]), TypeError, "`slots` must be a JAX or NumPy array of integers.* a list"),
        "float slots": (lambda: pool.reset(np.zeros(2)), TypeError, "`slots` must be .* but dtype float64 came"),
        "two axes": (lambda: pool.gather(slots[None]), ValueError, r"`slots` must be \[rows\], but .* \(1, 2\)"),
        "fresh": (
            lambda: pool.gather(slots, fresh=np.array([True])),
            ValueError,
            r"`fresh` must be a boolean array with one entry for each of 2 slots, but bool \(1,\) came",
        ),
        "twice": (
            lambda: pool.scatter(np.array([1, 1]), state),
            ValueError,
            "slots that differ from row to row .* but one comes twice: 1",
        ),
        "too many slots": (
            lambda: pool.scatter(np.array([0, 1, 2]), state),
            ValueError,
            r"`states.q_window` to be an array of the shape \(3, 3, 3\), since there are 3 slots, but \(2, 3, 3\) came",
        ),
        "layout in the pool": (
            lambda: pool.scatter(slots, transposed),
            ValueError,
            r"`states.recurrent` to be an array of the shape \(2, 2, 3, 2\).* but \(2, 2, 2, 3\) came",
        ),
        "structure": (lambda: pool.scatter(slots, [state]), ValueError, "needs states of the pool's structure"),
        "dtype": (
            lambda: pool.scatter(slots, jax.tree.map(lambda a: a.astype(jnp.int32), state)),
            ValueError,
            "needs `states.q_window` to be float32, as in the pool, but it is int32",
        ),
        "step with time": (
            lambda: pooled_step(mixer, x, pool.states, slots),
            ValueError,
            r"`x` must be \[rows, model\] with model = 4, but its shape is \(2, 3, 4\)",
        ),
        "step of fewer slots": (
            lambda: pooled_step(mixer, x[:, 0], pool.states, slots[:1]),
            ValueError,
            r"one entry for each of the 2 rows of this call, -1 for padding, but its shape is \(1,\)",
        ),
        "step twice": (
            lambda: pooled_step(mixer, x[:, 0], pool.states, np.array([1, 1])),
            ValueError,
            "`pooled_step` needs slots that differ from row to row .* but one comes twice: 1",
        ),
        "step without slots": (
            lambda: pooled_step(mixer, x[:, 0], None, slots),
            ValueError,
            "needs `states` with a leading axis of at least one slot",
        ),
        "step of one state": (
            lambda: pooled_step(mixer, x[:, 0], mixer.init_state(), slots),
            ValueError,
            r"`state.q_window` must have the shape \(2, 3, 3\)",
        ),
        "layout": (
            lambda: mixer(x, transposed),
            ValueError,
            r"`state.recurrent` must have the shape \(2, 2, 3, 2\) .* but it is \(2, 2, 2, 3\).*key axis first",
        ),
        "batch": (lambda: mixer(x[:1], state), ValueError, r"`state.q_window` must have the shape \(1, 3, 3\)"),
        "window batch": (
            lambda: window(mixer, x[:1], state, keep="all"),
            ValueError,
            r"`state.q_window` must have the shape \(1, 3, 3\)",
        ),
        "keep": (lambda: window(mixer, x, state, keep="last"), ValueError, r"`window\(keep='last'\)` must be 'final'"),
        "no replay": (
            lambda: window(mixer, x, state, keep="replay"),
            TypeError,
            "needs a `ReplayState`, but a MixerState came. `begin_replay` makes",
        ),
        "replay": (
            lambda: window(mixer, x, replay, keep="all"),
            TypeError,
            "needs a `MixerState`, but a ReplayState came",
        ),
        "too long": (
            lambda: window(mixer, x, replay, keep="replay"),
            ValueError,
            "window has 3 tokens, but the `ReplayState` has room for 2",
        ),
        "empty": (lambda: window(mixer, x[:, :0], state, keep="all"), ValueError, "at least one token"),
        "capacity": (lambda: begin_replay(mixer, state, capacity=0), ValueError, "`capacity` to be an int"),
        "not begun": (lambda: begin_replay(mixer, replay), TypeError, "needs a `MixerState`, but a ReplayState"),
        "not ended": (lambda: end_replay(mixer, state), TypeError, "needs a `ReplayState`, but a MixerState"),
        "nothing to commit": (lambda: commit(state, 1), TypeError, "there is none in the tree"),
        "too many": (lambda: commit(kept, 4), ValueError, r"`accepted` must lie in 0 to 3.* but it is \[4 4\]"),
        "negative": (lambda: commit(kept, np.array([0, -1])), ValueError, "`accepted` must lie in 0 to 3"),
        "accepted": (lambda: commit(kept, np.array([1])), ValueError, r"must have the shape \(2,\).* but it is \(1,\)"),
        "accepted float": (lambda: commit(kept, np.ones(2)), TypeError, "array of integers.* but float64 came"),
        "piece": (lambda: prefill(run, x, state, piece=0), ValueError, "needs `piece`, .* of at least 1, not 0"),
        "lengths": (
            lambda: prefill(run, x, state, piece=2, lengths=np.array([1, 4])),
            ValueError,
            r"`lengths` must lie in 0 to time = 3, but they are \[1 4\]",
        ),
        "lengths of rows": (
            lambda: prefill(run, x, state, piece=2, lengths=np.array([1])),
            ValueError,
            r"one entry for each of 2 rows, but its shape is \(1,\)",
        ),
        "lengths float": (
            lambda: prefill(run, x, state, piece=2, lengths=np.ones(2)),
            TypeError,
            "`lengths` must be a JAX or NumPy array of integers, but float64 came",
        ),
        "no inputs": (lambda: prefill(run, x[0, 0], state, piece=2), ValueError, r"\[batch, time, ...\], but \(4,\)"),
        "nothing to begin with": (lambda: prefill(run, x, None, piece=2), TypeError, "needs a state to begin with"),
    }  # fmt: skip


def test_each_misuse_is_one_clear_error():
    for name, (call, kind, message) in bad_calls().items():
        with pytest.raises(kind, match=message):
            print(name, call())  # shown where nothing is raised


def test_a_checked_pool_refuses_a_slot_that_comes_twice_at_run_time():
    pool = StatePool(jnp.zeros(2), 4, checked=True)
    write = eqx.filter_jit(lambda pool, slots: pool.scatter(slots, jnp.ones((4, 2))), compiler_options=FAST)
    assert np.asarray(write(pool, np.array([2, -1, 0, -1])).states).sum() == 4
    with pytest.raises(RuntimeError, match="slots that differ from row to row"):
        write(pool, np.array([2, -1, 0, 2]))


# ---- everything in random order --------------------------------------------------------------------------------------

SLOTS, ROWS, PIECE, WINDOW, CAPACITY = 4, 3, 4, 3, 5
SEEDS, ORDERS = st.integers(0, 999), st.permutations(range(SLOTS))
PADDING = st.sampled_from([-1, -SLOTS, SLOTS, 2**31 - 1])
LAYERS = ("gdn", "gdn2")  # the first with plain states, the second with recorded tokens


def up_to(most):
    return st.lists(st.integers(0, most), min_size=ROWS, max_size=ROWS)


class Programs:
    """What a server compiles, once for all requests. The pool is donated, as a server would."""

    def __init__(self):
        plain, replaying = map(make_mixer, LAYERS)
        self.traces = collections.Counter()

        def initial():
            return plain.init_state(), begin_replay(replaying, replaying.init_state(), capacity=CAPACITY)

        def run_prompts(pool, slots, fresh, x, lengths):
            self.traces["run_prompts"] += 1
            state, replay = pool.gather(slots, fresh)
            mask = jnp.arange(PIECE) < lengths[:, None]
            first, state = plain(x, state, mask=mask)
            second, new = replaying(x, end_replay(replaying, replay), mask=mask)
            replay = begin_replay(replaying, new, capacity=CAPACITY)
            return (first, second), pool.scatter(slots, (state, replay))

        def step(pool, slots, fresh, x):
            self.traces["step"] += 1
            state, replay = pool.gather(slots, fresh)
            out, state = plain.step(x, state)
            return (out[:, None],), pool.scatter(slots, (state, replay))

        def step_in_place(pool, slots, fresh, x):
            self.traces["step_in_place"] += 1
            out, state = pooled_step(plain, x, pool.states[0], slots, fresh=fresh)
            pool = pool.scatter(slots, pool.gather(slots, fresh))  # what is fresh begins in the other layer too
            return (out[:, None],), eqx.tree_at(lambda p: p.states, pool, (state, pool.states[1]))

        def speculate(pool, slots, fresh, x, accepted):
            self.traces["speculate"] += 1
            state, replay = pool.gather(slots, fresh)
            first, kept = window(plain, x, state, keep="all")
            second, records = window(replaying, x, replay, keep="replay")
            return (first, second), pool.scatter(slots, commit((kept, records), accepted))

        def read(pool):
            state, replay = pool.states
            return state, end_replay(replaying, replay)

        def spoil(states, slot):
            return jax.tree.map(lambda a: a.at[slot].set(jnp.full((), bad(a), a.dtype)), states)

        def bad(a):
            return jnp.nan if jnp.issubdtype(a.dtype, jnp.floating) else 1

        donating = functools.partial(fast_jit, donate_argnums=0)
        self.make_pool = fast_jit(lambda: StatePool(initial(), SLOTS))
        self.run_prompts, self.speculate = map(donating, (run_prompts, speculate))
        self.step, self.step_in_place = map(donating, (step, step_in_place))
        self.reset = donating(lambda pool, slots: pool.reset(slots))
        self.copy = donating(lambda pool, old, new: pool.scatter(new, pool.gather(old)))
        self.load = donating(lambda pool, slots, states: pool.scatter(slots, states))
        self.take = fast_jit(lambda pool, slots: pool.gather(slots))
        self.poison = donating(lambda pool, slot: eqx.tree_at(lambda p: p.states, pool, spoil(pool.states, slot)))
        self.read = fast_jit(read)

    def begin(self):
        return tuple(copied(make_mixer(name).init_state()) for name in LAYERS)


programs = functools.cache(Programs)


class Server(RuleBasedStateMachine):
    """Requests come, run in any company, go back, stop, and leave their slots dirty; `states`: what each should be."""

    def __init__(self):
        super().__init__()
        self.programs = programs()
        self.pool = self.programs.make_pool()
        for slot in range(SLOTS):
            self.pool = self.programs.poison(self.pool, slot)
        self.states = {}  # by slot: what the request in it has, one state for each layer
        self.fresh = set()  # slots that hold something of others still
        self.snapshots = []

    # -- requests come and go

    @precondition(lambda self: len(self.states) < SLOTS)
    @rule(pick=st.integers(0, SLOTS - 1), count=st.integers(1, SLOTS))
    def admit(self, pick, count):
        for _ in range(min(count, SLOTS - len(self.states))):
            slot = self._free(pick)
            self.states[slot] = self.programs.begin()
            self.fresh.add(slot)

    @precondition(lambda self: self.states)
    @rule(pick=st.integers(0, SLOTS - 1), how=st.sampled_from(["leave", "reset", "poison"]), again=st.booleans())
    def finish(self, pick, how, again):
        slot = self._taken(pick)
        del self.states[slot]
        self.fresh.discard(slot)
        before = copied(self.pool.states)
        if how == "reset":
            self.pool = self.programs.reset(self.pool, np.array([slot, -1]))
            self._check(before, {slot})
            assert_equal(row_of(self.pool.states, slot), copied(self.pool.initial))
        elif how == "poison":
            self.pool = self.programs.poison(self.pool, slot)
        if again:  # the next request begins in the same slot
            self.states[slot] = self.programs.begin()
            self.fresh.add(slot)

    # -- they run, in one call

    @rule(seed=SEEDS, order=ORDERS, lengths=up_to(PIECE), padding=PADDING)
    def run_prompts(self, seed, order, lengths, padding):
        slots, fresh = self._rows(order, padding)
        lengths = np.where(_is_taken(slots), lengths, 0)
        self._run(self.programs.run_prompts, seed, slots, fresh, PIECE, lengths, lengths)

    @rule(seed=SEEDS, order=ORDERS, padding=PADDING, in_place=st.booleans())
    def step(self, seed, order, padding, in_place):
        slots, fresh = self._rows(order, padding)
        step = self.programs.step_in_place if in_place else self.programs.step
        self._run(lambda p, s, f, x, n: step(p, s, f, x[:, 0]), seed, slots, fresh, 1, np.ones(3, int))

    @rule(seed=SEEDS, order=ORDERS, accepted=up_to(WINDOW), padding=PADDING)
    def speculate(self, seed, order, accepted, padding):
        slots, fresh = self._rows(order, padding)
        before = copied(self.pool.states[1])
        self._run(self.programs.speculate, seed, slots, fresh, WINDOW, np.array(accepted))
        # Where records were free, the large state was not written.
        room = [s for s in slots[_is_taken(slots) & ~fresh] if before.count[s] + WINDOW <= CAPACITY]
        assert_equal(row_of(self.pool.states[1].base, room), row_of(before.base, room))

    # -- states are copied

    @precondition(lambda self: self.states and len(self.states) < SLOTS)
    @rule(old=st.integers(0, SLOTS - 1), new=st.integers(0, SLOTS - 1))
    def fork(self, old, new):
        old, new = self._taken(old), self._free(new)
        if old in self.fresh:
            return
        before = copied(self.pool.states)
        self.pool = self.programs.copy(self.pool, np.array([old, -1]), np.array([new, -1]))
        self.states[new] = self.states[old]
        self._check(before, {new})

    @precondition(lambda self: self.states)
    @rule(pick=st.integers(0, SLOTS - 1))
    def take_snapshot(self, pick):
        slot = self._taken(pick)
        if slot not in self.fresh:
            self.snapshots.append((copied(self.programs.take(self.pool, np.array([slot, -1]))), self.states[slot]))

    @precondition(lambda self: self.snapshots and len(self.states) < SLOTS)
    @rule(which=st.integers(0, 9), pick=st.integers(0, SLOTS - 1))
    def resume_from_a_snapshot(self, which, pick):
        held, states = self.snapshots[which % len(self.snapshots)]
        slot, before = self._free(pick), copied(self.pool.states)
        self.pool = self.programs.load(self.pool, np.array([slot, SLOTS]), held)
        self.states[slot] = states
        self._check(before, {slot})

    # -- and are what they should be

    def _taken(self, pick):
        return sorted(self.states)[pick % len(self.states)]

    def _free(self, pick):
        free = sorted(set(range(SLOTS)) - set(self.states))
        return free[pick % len(free)]

    def _rows(self, order, padding):
        """Requests in the rows, in any order, and padding in the others."""
        slots = np.array([slot if slot in self.states else padding for slot in order[:ROWS]])
        return slots, np.array([slot in self.fresh for slot in slots])

    def _run(self, program, seed, slots, fresh, time, counted, lengths=None):
        """One call; and every request in it alone, of which `counted` tokens stay."""
        x = draw(seed, ROWS, time, MODEL)
        real = np.where(_is_taken(slots), time if lengths is None else lengths, 0)
        kept = np.where(_is_taken(slots), counted, 0) if seed % 2 else real
        x[np.arange(time) >= kept[:, None]] = np.nan  # what is no token, or is rejected, may be anything
        before = copied(self.pool.states)
        outs, self.pool = program(self.pool, slots, fresh, x, counted)
        for row, slot in enumerate(slots):
            if not _is_taken(slot):
                continue
            new = list(self.states[slot])
            for layer, out in enumerate(outs):  # of a step there is only the first layer's
                padded = np.zeros((PIECE, MODEL), np.float32)
                padded[: real[row]] = x[row, : real[row]]
                expected, states = alone(LAYERS[layer], padded, new[layer])
                assert_close(np.asarray(out)[row, : real[row]], expected[: real[row]])
                new[layer] = [new[layer], *states][counted[row]]
            self.states[slot] = tuple(new)
            self.fresh.discard(slot)
        self._check(before, {slot for slot in slots if _is_taken(slot)})
        assert set(self.programs.traces.values()) == {1}  # no slot and no length recompiles

    def _check(self, before, written):
        """Slots that were not written hold what they held, bit for bit, and all others what their requests have."""
        after = copied(self.pool.states)
        others = sorted(set(range(SLOTS)) - written)
        assert_equal(row_of(after, others), row_of(before, others))
        now = copied(self.programs.read(self.pool))
        for slot in set(self.states) - self.fresh:
            for held, expected in zip(now, self.states[slot]):
                assert_close(row_of(held, slot), expected)


def _is_taken(slot):
    return (slot >= 0) & (slot < SLOTS)


def test_requests_never_mix():
    run_state_machine_as_test(Server, settings=settings(max_examples=6, stateful_step_count=25))


@pytest.mark.slow
def test_requests_never_mix_in_two_hundred_long_runs():
    run_state_machine_as_test(Server, settings=settings(max_examples=200, stateful_step_count=50))


WINDOWS, SLOTS_OF = (sys.modules[f"gated_delta.{name}"] for name in ("serving._window", "_slots"))
GATHER, CUT, COMMIT = StatePool.gather, WINDOWS._cut, WINDOWS._commit


def from_the_end(slots, count):
    return jnp.where(slots >= count, count, slots).astype(jnp.int32)


def beyond_is_the_last(slots, count):
    return jnp.where(slots < 0, 2 * count, jnp.minimum(slots, count - 1)).astype(jnp.int32)


def one_more(accepted, lead, tokens):
    return jnp.minimum(accepted + 1, tokens)


def all_recorded(kept, accepted):
    return COMMIT(kept, kept.tokens if isinstance(kept, ReplayWindow) else accepted)


def last_inputs(x, begins, length):
    return CUT(x, jnp.full_like(begins, x.shape[1] - length), length)


PLANTED_RUNS = settings(max_examples=30, stateful_step_count=30, report_multiple_bugs=False, print_blob=False)
PLANTED = {
    "a negative slot counts from the end": (SLOTS_OF, "target", from_the_end),
    "a slot beyond the end is the last": (SLOTS_OF, "target", beyond_is_the_last),
    "a fresh request goes on": (StatePool, "gather", lambda pool, slots, fresh=None: GATHER(pool, slots)),
    "one token more is kept": (WINDOWS, "_check_accepted", one_more),
    "rejected tokens stay recorded": (WINDOWS, "_commit", all_recorded),
    "the convolution's window is not cut back": (WINDOWS, "_cut", last_inputs),
}


@pytest.mark.slow
@pytest.mark.parametrize("bug", PLANTED)
def test_the_machine_finds_a_planted_bug(bug, monkeypatch):
    monkeypatch.setattr(*PLANTED[bug])
    monkeypatch.setitem(globals(), "programs", functools.cache(Programs))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Server, settings=PLANTED_RUNS)
