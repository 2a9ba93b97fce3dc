"""Layers over many devices: what they give on one, with nothing sent but what it takes."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gated_delta import (
    GDN,
    GDN2,
    KDA,
    SLA,
    AbstractDecay,
    AttentionConfig,
    Chunked,
    GatedDeltaMixer,
    HybridConfig,
    HybridStack,
    SoftmaxAttention,
)
from gated_delta.sharding import local_mixers, mixer_specs, state_specs
from gated_delta.testing import collectives, quick_jit
from gated_delta.testing.laws import draw_parameters

from .meshes import SHAPES, assert_same, make_mesh, place

MODEL, BATCH, TIME, HEADS = 12, 8, 24, 8
CHUNKED = Chunked(16)
MAKERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=HEADS, value_heads=2 * HEADS, key_dim=4, value_dim=3),
    "kda": functools.partial(KDA, MODEL, key_heads=HEADS, key_dim=4, value_dim=3),
    "gdn2": functools.partial(GDN2, MODEL, key_heads=HEADS, key_dim=4, value_dim=3, conv_bias=True),
    "sla": functools.partial(SLA, MODEL, group=2, key_heads=HEADS, key_dim=8, value_dim=3),
}


@functools.cache
def make_mixer(name, backend=CHUNKED):
    return draw_parameters(eqx.filter_eval_shape(MAKERS[name], backend=backend, key=jax.random.key(0)), len(name))


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@functools.cache
def inputs_of(name, packed):
    """x, a state, segment ids or `None`, and cotangents."""
    mixer = make_mixer(name)
    leaves, structure = jax.tree.flatten(mixer.init_state(BATCH))
    state, d_state = (
        jax.tree.unflatten(structure, [draw(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])
        for seed in (10, 20)
    )
    ids = None
    if packed:  # rows whose documents are cut elsewhere, the last tokens of most are padding
        time, row = np.arange(TIME), np.arange(BATCH)[:, None]
        ids = jnp.asarray(np.where(time < TIME - row, (time >= 5 + row) + (time >= 9 + 2 * row), -1).astype(np.int32))
    return draw(0, BATCH, TIME, MODEL), state, ids, (draw(1, BATCH, TIME, MODEL), d_state)


def run(mixer, x, state, ids, cotangents, call=lambda mixer: mixer):
    """Output and state, and gradients of parameters, x and state."""
    results, pull = jax.vjp(lambda mixer, x, state: call(mixer)(x, state, segment_ids=ids), mixer, x, state)
    return results, pull(cotangents)


@functools.cache
def on_one_device(name, packed):
    return quick_jit(run)(make_mixer(name), *inputs_of(name, packed))


def specs_of(mixer, mesh, packed):
    """Of what `run` takes, and of what it gives."""
    parameters, tokens = mixer_specs(mixer, mesh), P("data", "context" if "context" in mesh.axis_names else None)
    state = state_specs(eqx.filter_eval_shape(mixer.init_state, BATCH), mesh)
    given = (parameters, tokens, state, tokens if packed else None, (tokens, state))
    return given, ((tokens, state), (parameters, tokens, state))


def by_hand(mesh, name, packed, exchange=None, checks=True):
    """Everything split in a `jax.shard_map`: rows, heads and tokens."""
    mixer = make_mixer(name)
    given, results = specs_of(mixer, mesh, packed)
    call = functools.partial(local_mixers, heads="model", context="context", exchange=exchange)
    local = functools.partial(run, call=call)
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=results, check_vma=checks)


@pytest.mark.slow
@pytest.mark.parametrize("shape, name, packed", [((1, 2, 4), "sla", True)])
def test_a_layer_taken_apart_gives_what_it_gives_on_one_device(shape, name, packed):
    mesh = make_mesh(shape)
    actual = quick_jit(by_hand(mesh, name, packed))(make_mixer(name), *inputs_of(name, packed))
    assert_same(actual, on_one_device(name, packed))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_over_every_mesh_of_eight_devices(shape, name, packed):
    test_a_layer_taken_apart_gives_what_it_gives_on_one_device(shape, name, packed)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("shape", [(2, 2, 2), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("exchange", ["ring", "steps"])
def test_both_ways_of_exchange(shape, name, packed, exchange):
    mesh = make_mesh(shape)
    actual = quick_jit(by_hand(mesh, name, packed, exchange))(make_mixer(name), *inputs_of(name, packed))
    assert_same(actual, on_one_device(name, packed))


def under_jit(mesh, mixer, name, packed):
    given, _ = specs_of(mixer, mesh, packed)
    arguments = (mixer, *inputs_of(name, packed))
    return [place(mesh, x, jax.tree.map(lambda _, spec: spec, x, spec)) for x, spec in zip(arguments, given)]


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
EVERY = [
    (name, packed, kind) for name in MAKERS for packed in (False, True) for kind in (AxisType.Auto, AxisType.Explicit)
]


@pytest.mark.slow
@pytest.mark.parametrize("name, packed, kind", EVERY)
def test_under_jit_only_the_projections_sum_over_devices(name, packed, kind):
    mesh = make_mesh((2, 4), ("data", "model"), kind)
    with jax.set_mesh(mesh):
        arguments = under_jit(mesh, make_mixer(name), name, packed)
        compiled = quick_jit(run).lower(*arguments).compile()
        assert_same(compiled(*arguments), on_one_device(name, packed))
        forward = quick_jit(lambda mixer, x, state, ids: mixer(x, state, segment_ids=ids))
        found = collectives(forward.lower(*arguments[:4]).compile())
    assert [(c.kind, c.shapes) for c in found] == [("all-reduce", ((BATCH // 2, TIME, MODEL),))]


# ---- specs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKERS)
def test_the_part_of_a_device_is_a_mixer_of_its_heads(name):
    mixer, mesh = make_mixer(name), make_mesh((2, 4), ("data", "model"))
    own = dataclasses.replace(mixer.config, key_heads=HEADS // 4, value_heads=mixer.config.value_heads // 4)
    part = eqx.filter_eval_shape(GatedDeltaMixer, own, backend=mixer.backend, key=jax.random.key(0))
    state, own_state = mixer.init_state(BATCH), part.init_state(BATCH // 2)
    stacked = jax.tree.map(lambda x: jnp.zeros((3, *x.shape)), mixer)
    for whole, specs, small, lead in (
        (mixer, mixer_specs(mixer, mesh), part, ()),
        (stacked, mixer_specs([stacked], mesh)[0], part, (3,)),
        (state, state_specs(state, mesh), own_state, ()),
    ):
        assert jax.tree.structure(specs) == jax.tree.structure(whole)
        shapes = jax.tree.map(lambda x, spec: NamedSharding(mesh, spec).shard_shape(x.shape), whole, specs)
        assert jax.tree.leaves(shapes, is_leaf=lambda x: isinstance(x, tuple)) == [
            (*lead, *x.shape) for x in jax.tree.leaves(small)
        ]


def test_specs_of_stacks_of_states_and_of_what_is_not_ours():
    mesh, mixer = make_mesh((2, 4), ("data", "model")), make_mixer("kda")
    pattern = dict(hidden=8, repeats=3, delta=mixer.config, attention=AttentionConfig(MODEL, query_heads=2, window=4))
    stack = eqx.filter_eval_shape(HybridStack, HybridConfig("dA", **pattern), key=jax.random.key(0))
    deltas, attention = mixer_specs(stack, mesh).blocks
    assert deltas.mixer.v_proj.weight == P(None, "model", None) and deltas.mlp.down.weight == P()
    assert set(jax.tree.leaves(attention)) == {P()}
    state, cache = state_specs(eqx.filter_eval_shape(stack.init_state, 4), mesh, axis=0)
    assert state.recurrent == P("data", None, "model", None, None) and set(jax.tree.leaves(cache)) == {P()}

    class Constant(AbstractDecay):
        A_log: jax.Array
        log_decay_min = None

        def __call__(self, x):
            return jnp.broadcast_to(-jnp.exp(self.A_log)[:, None], (*x.shape[:-1], len(self.A_log), 1))

    strange = eqx.tree_at(lambda m: m.decay, mixer, Constant(jnp.zeros(HEADS)))
    assert mixer_specs(strange, mesh).decay.A_log == P() and mixer_specs(mixer, mesh).decay.A_log == P("model")
    everywhere = mixer_specs(mixer, mesh, heads=None)
    assert all(spec.count(None) == len(spec) for spec in jax.tree.leaves(everywhere))


def test_what_does_not_fit_a_mesh_is_refused():
    mesh = make_mesh((2, 4), ("data", "model"))
    mixer = eqx.filter_eval_shape(GDN, MODEL, key_heads=6, key_dim=2, key=jax.random.key(0))
    with pytest.raises(
        ValueError, match=r"axis 'model' must divide key_heads, but its size is 4 and key_heads is 6: a"
    ):
        mixer_specs(mixer, mesh)
    with pytest.raises(ValueError, match=r"over an axis 'heads', but the axes of the mesh are \('data', 'model'\)"):
        mixer_specs(mixer, mesh, heads="heads")
    with pytest.raises(ValueError, match=r"'model' must divide value_heads, but its size is 4 and value_heads is 6"):
        state_specs(eqx.filter_eval_shape(mixer.init_state, 2), mesh)
    with pytest.raises(ValueError, match=r"state_specs\(rows='data'\)` splits the batch of states, but a state of one"):
        state_specs(make_mixer("gdn").init_state(), mesh)


def test_local_mixers_say_what_they_need():
    mesh, mixer, x = make_mesh((2, 4), ("model", "context")), make_mixer("gdn"), inputs_of("gdn", False)[0]

    def inside(function):
        tokens = P(None, "context")
        run = jax.shard_map(function, mesh=mesh, in_specs=(P(), tokens), out_specs=tokens)
        return jax.eval_shape(run, mixer, x)

    with pytest.raises(ValueError, match=r"local_mixers\(context='context'\)` is for the inside of a `jax.shard_map`"):
        local_mixers(mixer, context="context")
    with pytest.raises(
        ValueError, match=r"each of 2 devices to have its share of 8 key heads, .* 32 channels .* has 32"
    ):
        inside(lambda mixer, x: local_mixers(mixer, heads="model")(x)[0])
    offsets = jnp.array([0, TIME // 4])
    with pytest.raises(ValueError, match=r"`cu_seqlens` have states of their own, which cannot be split over devices"):
        inside(lambda mixer, x: local_mixers(mixer, context="context")(x[:1], cu_seqlens=offsets)[0])
    with pytest.raises(ValueError, match=r"there is a `LocalMixer` in the tree"):
        inside(lambda mixer, x: local_mixers(local_mixers(mixer, context="context"), heads="model")(x)[0])
    config = AttentionConfig(MODEL, query_heads=2, window=4)
    attention = eqx.filter_eval_shape(SoftmaxAttention, config, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"would leave a `SoftmaxAttention` in the tree"):
        inside(lambda mixer, x: local_mixers([mixer, attention], context="context")[0](x)[0])


# ---- models ----------------------------------------------------------------------------------------------------------


def stack_of(name, layers=2):
    """`layers` mixers with parameters of their own, behind a leading axis."""
    leaves, structure = jax.tree.flatten(make_mixer(name))
    return jax.tree.unflatten(structure, [draw(i, layers, *leaf.shape) * 0.3 for i, leaf in enumerate(leaves)])


def loss_of_stack(mixers, x, call=lambda mixer: mixer):
    """A scanned stack whose blocks are computed anew for the backward pass."""

    @jax.checkpoint
    def block(x, mixer):
        return x + mixer(x)[0], None

    out, _ = jax.lax.scan(block, x, call(mixers))
    return jnp.mean(jnp.sin(out)), out


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("by_hand", [True, False])
def test_a_scanned_stack_with_its_sequence_split_by_hand(kind, by_hand):
    """Heads and rows by hand too, or by the compiler: then the `shard_map` is over the sequence only.

    Of that JAX (0.11) takes no derivative where the other axes are explicit.
    """
    has_gradient = by_hand or kind == AxisType.Auto
    mesh, mixers, x = make_mesh((2, 2, 2), kind=kind), stack_of("kda"), inputs_of("kda", False)[0]
    axes = set(mesh.axis_names) if by_hand else {"context"}
    parameters, tokens = mixer_specs(mixers, mesh), P("data", "context")
    call = functools.partial(local_mixers, heads="model" if by_hand else None, context="context")

    def local(mixers, x):
        part, out = loss_of_stack(mixers, x, call)
        return jax.lax.pmean(part, tuple(axes & {"data", "context"})), out

    own = (parameters, tokens) if by_hand else (jax.tree.map(lambda _: P(), mixers), P(None, "context"))
    loss = jax.shard_map(local, mesh=mesh, in_specs=own, out_specs=(P(), own[1]), axis_names=axes)
    differentiated = functools.partial(jax.value_and_grad, has_aux=True) if has_gradient else lambda f: f
    with jax.set_mesh(mesh):
        placed = place(mesh, mixers, parameters), place(mesh, x, tokens)
        actual = quick_jit(differentiated(loss))(*placed)
    assert_same(actual, quick_jit(differentiated(loss_of_stack))(mixers, x))


@pytest.mark.slow
def test_a_mapped_layer_is_a_batched_one():
    mesh, mixer, (x, state, _, _) = make_mesh((1, 1, 4)), make_mixer("gdn2"), inputs_of("gdn2", False)

    def local(mixer, x, state):
        return jax.vmap(local_mixers(mixer, context="context"))(x, state)

    states = state_specs(state, mesh, rows=None, heads=None)
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P(None, "context"), states), out_specs=(P(None, "context"), states)
    )
    assert_same(quick_jit(run)(mixer, x, state), on_one_device("gdn2", False)[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKERS)
def test_a_short_shard_has_the_inputs_of_several_before(name):
    """Shards of one token, and windows of three: without documents, where nothing says which shards are empty."""
    mesh, mixer = make_mesh((1, 1, 8)), make_mixer(name)
    x, state, _, (d_out, d_state) = inputs_of(name, False)
    few = x[:, :8], state, None, (d_out[:, :8], d_state)
    actual = quick_jit(by_hand(mesh, name, False))(mixer, *few)
    assert_same(actual, quick_jit(run)(mixer, *few))


@pytest.mark.slow
def test_one_token_more_with_the_heads_of_many_devices():
    mesh, mixer, (x, state, _, _) = make_mesh((2, 4), ("data", "model")), make_mixer("gdn"), inputs_of("gdn", False)
    parameters, states = mixer_specs(mixer, mesh), state_specs(state, mesh)
    step = jax.shard_map(
        lambda mixer, x, state: local_mixers(mixer, heads="model").step(x, state),
        mesh=mesh,
        in_specs=(parameters, P("data"), states),
        out_specs=(P("data"), states),
    )
    expected = quick_jit(lambda mixer, x, state: mixer.step(x, state))(mixer, x[:, 0], state)
    assert_same(quick_jit(step)(mixer, x[:, 0], state), expected)
    mesh = make_mesh((2, 4), ("data", "model"), AxisType.Explicit)
    with jax.set_mesh(mesh):
        placed = [place(mesh, *pair) for pair in ((mixer, parameters), (x[:, 0], P("data")), (state, states))]
        actual = quick_jit(lambda mixer, x, state: mixer.step(x, state))(*placed)
    assert_same(actual, expected)


@pytest.mark.slow
def test_kept_states_are_not_sent_again():
    mesh, mixer, x = make_mesh((1, 1, 4)), make_mixer("gdn"), inputs_of("gdn", False)[0]

    def permutations(policy):
        def local(mixer, x):
            block = lambda mixer, x: local_mixers(mixer, context="context")(x)[0]  # noqa: E731
            return (block if policy is None else jax.checkpoint(block, policy=policy))(mixer, x)

        run = jax.shard_map(local, mesh=mesh, in_specs=(P(), P(None, "context")), out_specs=P(None, "context"))
        loss = jax.grad(lambda mixer, x: jnp.sum(run(mixer, x) ** 2))
        sent = collectives(quick_jit(loss).lower(mixer, x).compile())
        return sum(c.kind == "collective-permute" and len(c.shapes[0]) == 4 for c in sent)

    kept = jax.checkpoint_policies.save_only_these_names("gated_delta_shard")
    assert permutations(kept) == permutations(None) < permutations(jax.checkpoint_policies.nothing_saveable)
