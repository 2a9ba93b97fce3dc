"""The hybrid stack: a loop over its blocks, however it is scanned, stepped, pooled or rematerialised."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import (
    AttentionConfig,
    HybridConfig,
    HybridStack,
    MixerConfig,
    MixerState,
    Recurrent,
    Variant,
    weight_decay_mask,
)
from gated_delta.attention import KVCache
from gated_delta.serving import StatePool, pooled_step
from gated_delta.testing import equations, quick_jit

MODEL, ROWS, TIME = 8, 2, 9
DELTA = MixerConfig(Variant(), model=MODEL, key_heads=1, value_heads=2, key_dim=4, value_dim=4)
ATTENTION = AttentionConfig(MODEL, query_heads=2, kv_heads=1, window=5, rotary=1.0)
CONFIG = HybridConfig("dA", hidden=12, repeats=3, delta=DELTA, attention=ATTENTION)


@functools.cache
def stack_of(**changes):
    config = dataclasses.replace(CONFIG, **changes)
    return quick_jit(lambda key: HybridStack(config, backend=Recurrent(), key=key))(jax.random.key(1))


def inputs(seed=0, time=TIME):
    return np.random.default_rng(seed).standard_normal((ROWS, time, MODEL)).astype(np.float32)


@functools.cache
def runner():
    stack = stack_of()
    return quick_jit(lambda x, state, mask, ids: stack(x, state, mask=mask, segment_ids=ids))


def test_it_is_its_blocks_one_after_the_other():
    stack, x = stack_of(), inputs()
    out, states = runner()(x, None, None, None)
    wanted, kinds = x, []

    @quick_jit
    def alone(block, x):
        mixed, state = block.mixer(block.mixer_norm(x))
        return x + mixed + block.mlp(block.mlp_norm(x + mixed)), state

    for index in range(6):
        block = stack.block(index)
        wanted, state = alone(block, wanted)
        kinds.append(type(state))
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(states[index % 2])):
            np.testing.assert_allclose(a, b[:, index // 2], atol=1e-5)
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    assert kinds == [MixerState, KVCache] * 3
    with pytest.raises(IndexError, match="There is no block 6: the stack has 6"):
        stack.block(6)


@functools.cache
def stepper():
    stack = stack_of()
    return quick_jit(lambda x, state: stack.step(x, state))


@pytest.mark.smoke
def test_steps_and_pieces_are_the_whole():
    stack, x, run = stack_of(), inputs(), runner()
    begin = stack.init_state(ROWS, dtype=x.dtype)
    whole, end = run(x, None, None, None)
    state, outs = begin, []
    for token in np.swapaxes(x, 0, 1):
        out, state = stepper()(token, state)
        outs.append(out)
    np.testing.assert_allclose(np.stack(outs, axis=1), whole, atol=1e-5)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=1e-5)

    mask = np.arange(TIME)[None] < np.array([[4], [7]])
    loud = np.where(mask[..., None], x, np.nan).astype(np.float32)
    out, state = run(loud, begin, mask, None)
    assert not np.asarray(out)[~mask].any()
    rest = np.stack([np.roll(x[0], -4, axis=0), np.roll(x[1], -7, axis=0)])
    out, state = run(rest, state, np.arange(TIME)[None] < np.array([[5], [2]]), None)
    np.testing.assert_allclose(out[0, :5], whole[0, 4:], atol=1e-5)
    np.testing.assert_allclose(out[1, :2], whole[1, 7:], atol=1e-5)


@pytest.mark.slow
def test_documents_and_single_sequences_are_what_they_are_alone():
    stack, x, run = stack_of(), inputs(), runner()
    whole, _ = run(x, None, None, None)
    ids = np.array([[-1, 0, 0, 0, 0, 2, 2, 2, 2]] * ROWS, np.int32)
    loud = np.where(ids[..., None] < 0, np.nan, np.roll(x, 1, axis=1)).astype(np.float32)
    packed, _ = run(loud, None, None, ids)
    assert not np.asarray(packed)[:, 0].any()
    np.testing.assert_allclose(packed[:, 1:5], whole[:, :4], atol=1e-5)
    np.testing.assert_allclose(run(x[0], None, None, None)[0], whole[0], atol=1e-5)
    out, single = stepper()(x[0, 0], stack.init_state())
    np.testing.assert_allclose(out, whole[0, 0], atol=1e-5)
    assert jax.tree.map(jnp.shape, single) == jax.tree.map(lambda a: a.shape[1:], stack.init_state(ROWS))


def test_ids_that_fall_are_padding_of_every_block_under_jit():
    """As where 0 is padding. Ids that a mask hides make none fall."""
    run, x = runner(), inputs(5)
    mask = np.arange(TIME)[None] != np.array([[0], [4]])
    ids = np.array([[9, 1, 1, 2, 2, 2, 0, 0, 0], [3, 3, 3, 3, 9, 3, 3, 1, 4]], np.int32)
    padding = np.array([[-1, 1, 1, 2, 2, 2, -1, -1, -1], [3, 3, 3, 3, -1, 3, 3, -1, 4]], np.int32)
    one, two = (run(x, None, mask, i) for i in (ids, padding))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.asarray(one[0])[padding < 0].any()


@pytest.mark.slow
def test_pooled_steps_are_steps_of_their_slots_and_touch_no_other():
    stack, x = stack_of(), inputs(2)
    pool = StatePool(stack.init_state(), slots=5)
    _, state = runner()(x, stack.init_state(ROWS), np.ones((ROWS, TIME), bool), None)
    slots = np.array([3, -1, 0], np.int32)
    pool = pool.scatter(slots[[0, 2]], state)
    spoiled = jax.tree.map(lambda a: a.at[0].set(7) if a.ndim else a, pool.states)
    tokens = np.stack([x[0, 0], x[1, 1], x[1, 0]])
    fresh = np.array([False, False, True])
    out, states = quick_jit(lambda x, s, slots, fresh: pooled_step(stack, x, s, slots, fresh=fresh))(
        tokens, spoiled, slots, fresh
    )
    wanted, after = stepper()(
        tokens[[0, 2]], jax.tree.map(lambda a, b: jnp.stack([a[0], b]), state, stack.init_state())
    )
    np.testing.assert_allclose(np.asarray(out)[[0, 2]], wanted, atol=1e-5)
    for new, old, a in zip(*map(jax.tree.leaves, (states, spoiled, after))):
        np.testing.assert_array_equal(new[np.array([1, 2, 4])], old[np.array([1, 2, 4])])
        assert new.dtype == old.dtype
        if a.ndim < 5:  # a fresh cache keeps what lies beyond its count
            np.testing.assert_allclose(new[3], a[0], atol=1e-5)
    with pytest.raises(ValueError, match="leading axes of slots and of 3 repeats"):
        pooled_step(stack, tokens, stack.init_state(), slots)
    with pytest.raises(ValueError, match=r"needs slots that differ from row to row"):
        pooled_step(stack, tokens, states, np.array([1, 1, 2]))
    with pytest.raises(ValueError, match=r"`x` must be .rows, model. with model = 8"):
        pooled_step(stack, tokens[:, :3], states, slots)


@pytest.mark.slow
def test_rematerialisation_changes_no_gradient_and_the_pattern_is_traced_once():
    x = inputs(3)

    def loss(stack, x):
        return jnp.sum(jnp.square(stack(x)[0]))

    gradients = [
        quick_jit(lambda stack, x: eqx.filter_grad(loss)(stack, x))(stack_of(remat=remat), x) for remat in (False, True)
    ]
    for a, b in zip(*map(jax.tree.leaves, gradients)):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    several, one = stack_of(), stack_of(repeats=1)
    program = jax.make_jaxpr(lambda x: several(x)[0])(x)
    lengths = [eqn.params["length"] for eqn in program.eqns if eqn.primitive.name == "scan"]
    assert lengths == [3]
    once = jax.make_jaxpr(lambda x: one(x)[0])(x)
    assert sum(1 for _ in equations(program)) < 1.2 * sum(1 for _ in equations(once))


@pytest.mark.slow
def test_training_keeps_no_states_and_weight_decay_spares_norms():
    """States that nobody takes cost nothing; stacked norms still do not decay."""
    stack = stack_of(attention=dataclasses.replace(ATTENTION, capacity=2**14))
    x = inputs(4)
    gradient = quick_jit(lambda stack, x: eqx.filter_grad(lambda stack: jnp.sum(stack(x)[0]))(stack))
    compiled = gradient.lower(stack, x).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**14 * 4 * ROWS * 3 * 2
    decays = weight_decay_mask(stack)
    assert decays.blocks[0].mlp.gate_up.weight and decays.blocks[1].mixer.q_proj.weight
    assert not decays.blocks[0].mixer_norm.weight and not decays.blocks[0].mixer.out_norm.weight


def test_configs_are_json():
    for config in (CONFIG, HybridConfig("AA", hidden=4, attention=ATTENTION, remat=True, norm_one_plus=True)):
        assert HybridConfig.from_json(config.to_json()) == config
        assert config.model == MODEL
    with pytest.raises(
        ValueError, match=r"no `HybridConfig`: unknown entries \['depth'\], missing entries \['hidden'\]"
    ):
        HybridConfig.from_json('{"pattern": "d", "depth": 3}')
    with pytest.raises(ValueError, match="needs a JSON object"):
        HybridConfig.from_json("3")


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(pattern="dB"), ValueError, "must be a string of the letters d .* and A"),
        (dict(pattern=""), ValueError, "must be a string of the letters"),
        (dict(pattern="A"), ValueError, "`delta` goes with the letter d, and only with it"),
        (dict(attention=None), ValueError, "`attention` goes with the letter A, and only with it"),
        (dict(delta=3), TypeError, "`delta` must be a `MixerConfig`, but an? int came"),
        (dict(attention=AttentionConfig(4, query_heads=2)), ValueError, "`delta` has 8 and `attention` 4"),
        (dict(repeats=0), ValueError, "`repeats=0` must be at least 1"),
        (dict(remat=1), TypeError, "`remat` must be True or False"),
        (dict(norm_eps=0.0), ValueError, "`norm_eps=0.0` must be above 0"),
    ],
)
def test_configs_that_mean_nothing_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_what_does_not_fit_is_said():
    stack, x = stack_of(), inputs()
    with pytest.raises(TypeError, match="`HybridStack` needs a `HybridConfig`, but a str came"):
        HybridStack("dA", key=jax.random.key(0))
    with pytest.raises(TypeError, match="must be a tuple of the states of 2 mixers"):
        stack(x, [1, 2])
    with pytest.raises(TypeError, match=r"`step` needs a state: begin with `stack.init_state"):
        stack.step(x[:, 0], None)
