"""A sequence that is split over devices gives what it gives on one: outputs, states and every gradient."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.sharding import ContextParallel, context_parallel_gated_delta
from gated_delta.testing import RandomGates, RandomKeys, RandomProblem, assert_close, collectives, expected, quick_jit

from .meshes import SHAPES, make_mesh, place
from .subjects import INTERPRETED

GATES = {
    "gdn": RandomGates("head", erase="head", owner="value", tied=True),
    "kda": RandomGates("channel", erase="head", owner="value", tied=True),
    "gdn2": RandomGates("channel", erase="channel", write="channel", owner="key"),
    "sla": RandomGates("tile", decay_tiles=2, erase="head", owner="key", tied=True),
}
TOKENS = P("data", "context", "model")
SPECS = {"initial_state": P("data", "model"), "segment_ids": P("data", "context")}
OUTER = (TOKENS, SPECS["initial_state"])


def padded(x, time):
    """Along time, by zeros, or by padding's id."""
    fill = -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0
    return jnp.pad(x, [(0, 0), (0, time - x.shape[1]), *[(0, 0)] * (x.ndim - 2)], constant_values=fill)


def split_arguments(problem, devices):
    """The arguments and cotangents of a problem whose time is a multiple of `devices`, by padding where it is not."""
    arguments, (d_out, d_final) = problem.arguments(), problem.cotangents(problem.dtype, "float32")
    time = -(-problem.time // devices) * devices
    if time != problem.time and "segment_ids" not in arguments:
        arguments["segment_ids"] = np.zeros((problem.batch, problem.time), np.int32)
    state = {name: arguments.pop(name) for name in ("initial_state", "scale") if name in arguments}
    arguments = jax.tree.map(lambda x: padded(jnp.asarray(x), time), arguments)
    return arguments | state, (padded(jnp.asarray(d_out), time), jnp.asarray(d_final))


def local(arguments, cotangents, **options):
    """On each device: results and the gradient of every float array."""
    ids = arguments.get("segment_ids")
    floats = {name: x for name, x in arguments.items() if name != "segment_ids"}
    call = functools.partial(context_parallel_gated_delta, axis_name="context", segment_ids=ids, **options)
    out, pull = jax.vjp(lambda floats: call(**floats), floats)
    return out, pull(cotangents)[0]


def specs_of(names):
    return {name: SPECS.get(name, TOKENS) for name in names}


@functools.cache
def split_run(mesh, names, options):
    """Derivatives are taken inside of the `shard_map`."""
    specs = specs_of(names)
    gradients = {name: spec for name, spec in specs.items() if name != "segment_ids"}
    run = functools.partial(local, **dict(options))
    return quick_jit(jax.shard_map(run, mesh=mesh, in_specs=(specs, OUTER), out_specs=(OUTER, gradients)))


def split_run_from_outside(mesh, names, options, checks):
    """They are taken of the `shard_map`."""
    call = functools.partial(context_parallel_gated_delta, axis_name="context", **dict(options))
    inside = jax.shard_map(
        lambda arguments: call(**arguments), mesh=mesh, in_specs=(specs_of(names),), out_specs=OUTER, check_vma=checks
    )

    def run(arguments, cotangents):
        ids = {name: x for name, x in arguments.items() if name == "segment_ids"}
        floats = {name: x for name, x in arguments.items() if name != "segment_ids"}
        out, pull = jax.vjp(lambda floats: inside(floats | ids), floats)
        return out, pull(cotangents)[0]

    return quick_jit(run)


def check(problem, results):
    """Against the toolkit's expectation."""
    (out, final_state), gradients = results
    actual = {"out": out, "final_state": final_state}
    gates = gradients.pop("gates")
    actual |= {f"d_{name}": x for name, x in gradients.items()}
    for name in ("log_decay", "erase", "write"):
        if getattr(gates, name) is not None:
            actual[f"d_{name}"] = getattr(gates, name)
    for name, x in actual.items():
        actual[name] = np.asarray(x) if "state" in name else np.asarray(x)[:, : problem.time]
    assert_close(actual, expected(problem), problem)


def check_over(mesh, problem, **options):
    arguments, cotangents = split_arguments(problem, mesh.shape["context"])
    run = split_run(mesh, tuple(arguments), tuple(options.items()))
    check(problem, run(arguments, cotangents))


def problem_of(name, packed=False, **changes):
    problem = RandomProblem(
        time=21, key_heads=1, group=2, key_dim=4, value_dim=3, state=True, seed=11, gates=GATES[name]
    )
    # documents that begin and end at borders of shards of 3 and 6 tokens, within them, and over several of them
    documents = ((3, 9, 1, -1, 7),) if packed else None
    return dataclasses.replace(problem, documents=documents, **changes)


def along_context(devices):
    return make_mesh((1, 1, devices))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("packed, devices", [(True, 8), (False, 4), (True, 2)])
def test_a_split_sequence_gives_what_it_gives_on_one_device(name, packed, devices):
    check_over(along_context(devices), problem_of(name, packed), backend=Chunked(16))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_over_every_mesh_of_eight_devices(shape, name, packed):
    documents = tuple((8 + row, -row, 13 - 2 * row) if row else (1, 20) for row in range(7))
    documents += ((3, 3, 3, 3, 3, 3, 3),)  # each row's documents are cut elsewhere
    problem = problem_of(name, batch=8, key_heads=8, seed=sum(shape))
    problem = dataclasses.replace(problem, documents=documents if packed else None)
    check_over(make_mesh(shape), problem, backend=Chunked(16))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, Recurrent(), Chunked(32, "none"), INTERPRETED], ids=str)
@pytest.mark.parametrize("exchange", ["ring", "steps"])
@pytest.mark.parametrize("packed", [False, True])
def test_any_backend_and_exchange_runs_a_shard(backend, exchange, packed):
    check_over(along_context(4), problem_of("gdn2", packed), backend=backend, exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize("backend", [Chunked(16), INTERPRETED], ids=str)
@pytest.mark.parametrize("name", ["gdn2", "sla"])
def test_shards_of_bfloat16(name, backend):
    """The kernels' outputs are bfloat16 too, where XLA's are not rounded yet."""
    check_over(along_context(2), problem_of(name, packed=True, dtype="bfloat16"), backend=backend)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3, 5, 7, 8])
@pytest.mark.parametrize("exchange", ["ring", "steps"])
def test_any_number_of_devices(devices, exchange):
    check_over(along_context(devices), problem_of("gdn", packed=True), backend=Chunked(16), exchange=exchange)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("checks", [True, False])
def test_kinds_of_axes_and_replication_checks(kind, checks):
    mesh = make_mesh((2, 2, 2), kind=kind)
    problem = problem_of("kda", batch=2, key_heads=2)
    arguments, cotangents = split_arguments(problem, 2)
    specs = specs_of(arguments)
    run = split_run_from_outside(mesh, tuple(arguments), (("backend", Chunked(16)),), checks)
    with jax.set_mesh(mesh):
        placed = {name: place(mesh, x, jax.tree.map(lambda _: specs[name], x)) for name, x in arguments.items()}  # noqa: B023
        check(problem, run(placed, place(mesh, cotangents, OUTER)))


HARD = {
    "keys": st.sampled_from([RandomKeys("independent"), RandomKeys("identical"), RandomKeys("correlated")]),
    "log_decays": st.sampled_from(["zero", "mild", "strong", "full", "resets", "mixed"]),
    "strengths": st.sampled_from(["uniform", "max", "mixed"]),
}


@st.composite
def rows_of_documents(draw, batch, time):
    """Runs of tokens of one document, and of padding (negative), that fill `time` in each row."""
    rows = []
    for _ in range(batch):
        cuts = draw(st.lists(st.integers(1, time - 1), max_size=5, unique=True))
        lengths = np.diff([0, *sorted(cuts), time])
        is_padding = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
        rows.append(tuple(int(-n if pad else n) for n, pad in zip(lengths, is_padding, strict=True)))
    return tuple(rows)


RANDOM = [("gdn2", 8), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("kda", 8), ("sla", 4), ("gdn", 2)))]


@pytest.mark.parametrize("name, devices", RANDOM)
@given(data=st.data())
def test_any_lengths_documents_and_gates(name, devices, data):
    """Real tokens, padding and documents lie anywhere: shards without a token, and documents over all of them."""
    choices = {word: data.draw(strategy, label=word) for word, strategy in HARD.items()}
    gates = dataclasses.replace(GATES[name], log_decays=choices["log_decays"], strengths=choices["strengths"])
    problem = problem_of(
        name,
        batch=2,
        time=24,
        seed=data.draw(st.integers(0, 99), label="seed"),
        gates=gates,
        keys=choices["keys"],
    )
    documents = data.draw(rows_of_documents(2, 24), label="documents")
    check_over(along_context(devices), dataclasses.replace(problem, documents=documents), backend=Chunked(16))


@pytest.mark.slow
@pytest.mark.parametrize("name", GATES)
def test_bfloat16(name):
    problem = problem_of(name, packed=True, dtype="bfloat16", key_dim=16, value_dim=16, time=21)
    check_over(along_context(4), problem, backend=Chunked(16))


@pytest.mark.slow
def test_ids_that_fall_are_padding_on_whichever_device_they_are():
    arguments, cotangents = split_arguments(problem_of("gdn", packed=True, time=24), 4)
    run = split_run(along_context(4), tuple(arguments), (("backend", Chunked(16)),))
    ids = jnp.array([[1] * 4 + [0, 1] + [2] * 8 + [0] * 5 + [2] * 2 + [3, 1, 3]], jnp.int32)
    padding = jnp.where(ids < jax.lax.cummax(ids, axis=1), -1, ids)
    one, two = (run(arguments | {"segment_ids": i}, cotangents) for i in (ids, padding))
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)


BAD = [("v", (0, 5, 1, 0)), ("k", (1, 9, 0, 2)), ("erase", (0, 15, 0, 1)), ("initial_state", (1, 0, 2, 1))]


@pytest.mark.slow
@pytest.mark.parametrize("name, index", BAD)
@pytest.mark.parametrize("exchange", ["ring", "steps"])
def test_a_token_that_is_not_finite_spoils_its_document_on_every_device(name, index, exchange):
    """What it does on one device: outputs, states and gradients, NaN for NaN."""
    problem = problem_of("gdn2", batch=2, time=24)
    problem = dataclasses.replace(problem, documents=((3, 9, 12), (20, 4)))
    arguments, cotangents = split_arguments(problem, 4)
    if name == "erase":
        gates = arguments["gates"]
        arguments["gates"] = eqx.tree_at(lambda g: g.erase, gates, gates.erase.at[index].set(jnp.nan))
    else:
        arguments[name] = jnp.asarray(arguments[name]).at[index].set(jnp.inf)
    mesh = along_context(4)
    actual = split_run(mesh, tuple(arguments), (("backend", Chunked(16)), ("exchange", exchange)))(
        arguments, cotangents
    )

    ids = arguments.pop("segment_ids")
    out, pull = jax.vjp(lambda floats: gated_delta(**floats, segment_ids=ids, backend=Chunked(16)), arguments)
    expected = out, pull(cotangents)[0]
    assert np.isnan(out[0]).any()
    for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["ring", "steps"])
def test_what_is_sent_does_not_depend_on_the_number_of_tokens(exchange):
    """A ring sends one state from each device to the next, forth and back, and nothing else is sent."""
    devices, sent = 4, []
    for time in (24, 96):
        problem = problem_of("gdn", time=time)
        arguments, cotangents = split_arguments(problem, devices)
        run = split_run(along_context(devices), tuple(arguments), (("backend", Chunked(16)), ("exchange", exchange)))
        found = collectives(run.lower(arguments, cotangents).compile())
        sent.append(sorted((c.kind, c.shapes, c.pairs) for c in found))
    assert sent[0] == sent[1]
    moved = [shape for kind, shapes, _ in sent[0] for shape in shapes if kind == "collective-permute"]
    state, matrix = (1, 2, 4, 3), (1, 2, 4, 4)
    if exchange == "ring":
        assert moved == 2 * (devices - 1) * [state]
    else:  # two steps, then one state to the next
        assert sorted(moved) == sorted(2 * [matrix, state, matrix, state, state])
    # the final state, and the cotangent of the initial one, are sums over devices
    assert [kind for kind, _, _ in sent[0] if kind != "collective-permute"] in (["all-reduce"], 2 * ["all-reduce"])


def test_a_named_backend_says_why_it_cannot_run():
    arguments = problem_of("gdn").arguments()
    with pytest.raises(ValueError, match=r"no mesh axis 'context' here; it is for the inside of a `jax.shard_map`"):
        context_parallel_gated_delta(**arguments, axis_name="context")
    with pytest.raises(ValueError, match=r"exchange='tree'.* must be one of"):
        ContextParallel("context", exchange="tree")
