"""Attention over a mesh of four devices, batch rows and heads apart, is that of a single device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from gated_delta import softmax_attention
from gated_delta.attention import BlockedAttention, DenseAttention, KVCache, cached_attention
from gated_delta.testing import quick_jit

from .attention import NAMES, PACKED, RandomAttention, assert_close

PROBLEM = RandomAttention(documents=PACKED, window=6, seed=14)
SPEC = P("rows", None, "heads")
BACKENDS = [pytest.param(DenseAttention(), marks=pytest.mark.slow), BlockedAttention(8, 5)]
backends = pytest.mark.parametrize("backend", BACKENDS, ids=["dense", "blocked"])
kinds = pytest.mark.parametrize(
    "kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit], ids=["auto", "explicit"]
)


def mesh(kind):
    devices = jax.devices("cpu")[:4]
    if len(devices) < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(kind,) * 2, devices=devices)


def placed(here, tree, spec=SPEC):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(here, spec)), tree)


def forward_and_backward(backend, arrays, ids, cotangents):
    def call(arrays):
        return softmax_attention(**arrays, segment_ids=ids, window=6, backend=backend, return_log_sum_exp=True)

    (out, log_sum_exp), pull = jax.vjp(call, arrays)
    (gradients,) = pull(cotangents)
    return out, log_sum_exp, *(gradients[name] for name in "qkv")


def inputs_on(here):
    d_out, d_lse = PROBLEM.cotangents()
    d_lse = np.where(PROBLEM.visible().any(-1)[..., None], d_lse, 0)
    ids = placed(here, PROBLEM.integers()["segment_ids"], P("rows"))
    return placed(here, PROBLEM.arrays()), ids, placed(here, (d_out, d_lse))


@kinds
@backends
def test_jit_takes_sharded_arrays_and_keeps_their_sharding(kind, backend):
    here = mesh(kind)
    with jax.set_mesh(here):
        found = quick_jit(functools.partial(forward_and_backward, backend))(*inputs_on(here))
    assert_close(dict(zip(NAMES, found)), PROBLEM.expected(), PROBLEM)
    if kind == AxisType.Explicit:
        for x in found:
            assert x.sharding.is_equivalent_to(NamedSharding(here, SPEC), x.ndim)


@pytest.mark.slow
@kinds
@backends
def test_inside_shard_map_each_device_does_its_rows_and_heads(kind, backend):
    """With the replication checks that `shard_map` does by default."""
    here = mesh(kind)
    local = jax.shard_map(
        functools.partial(forward_and_backward, backend),
        mesh=here,
        in_specs=(SPEC, P("rows"), SPEC),
        out_specs=SPEC,
    )
    with jax.set_mesh(here):
        found = quick_jit(local)(*inputs_on(here))
    assert_close(dict(zip(NAMES, found)), PROBLEM.expected(), PROBLEM)


@pytest.mark.slow
@kinds
def test_a_cache_may_be_sharded_too(kind):
    here = mesh(kind)
    problem = RandomAttention(seed=3)
    cache = KVCache.empty(2, capacity=24, kv_heads=2, key_dim=4, value_dim=3)

    def run(arrays, cache):
        first, cache = cached_attention(**{name: x[:, :13] for name, x in arrays.items()}, cache=cache)
        second, cache = cached_attention(**{name: x[:, 13:] for name, x in arrays.items()}, cache=cache)
        return first, second, cache

    with jax.set_mesh(here):
        keys, values = placed(here, (cache.keys, cache.values))
        count, lost = placed(here, cache.count, P("rows")), placed(here, cache.lost, P("rows", "heads"))
        spread = KVCache(keys, values, count, lost)
        first, second, spread = quick_jit(run)(placed(here, problem.arrays()), spread)
    found = {"out": np.concatenate([first, second], axis=1)}
    assert_close(found, {"out": problem.expected()["out"]}, problem)
    assert spread.count.tolist() == [21, 21] and jnp.isfinite(spread.keys).all()
