"""Random inputs as the cases describe them, the operator in all its forms, and the one way to compare."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from gated_delta import Chunked, Gates, Recurrent, gated_delta

BACKENDS = (Recurrent(), Chunked(64))
MEMBERS = ("gdn", "kda", "gdn2", "sla")
GATES = ("log_decay", "beta", "erase", "write")

TINY = float(np.finfo(np.float32).tiny)
"""The smallest normal float32: XLA rounds what is below to 0, so errors are relative to no less."""


# ---- inputs ----------------------------------------------------------------------------------------------------------


def random_inputs(
    member,
    seed,
    *,
    time,
    batch=1,
    heads=2,
    group=None,
    key_dim,
    value_dim,
    owner="key",
    state=True,
    states=None,
    dtype=np.float32,
    slowest=0.05,
    beta_max=1.0,
):
    """Inputs of one member of the family by name, as NumPy arrays; see `reference` for the dict.

    Unit keys, q and v and states standard normal, beta (or erase and write) uniform in (0, beta_max), log decay uniform
    in (-slowest, 0): mild, so that what crosses the end of a chunk still counts. `sla` has groups of two value heads.
    `owner="value"` gives the gates one entry per value head. `states`: their number, where it is not `batch`.
    """
    random = np.random.default_rng(seed)
    group = (2 if member == "sla" else 1) if group is None else group
    value_heads = heads * group
    owners = {"key": heads, "value": value_heads}[owner]
    keys = random.standard_normal((batch, time, heads, key_dim))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    decays = {"gdn": 1, "kda": key_dim, "gdn2": key_dim, "sla": 4}[member]
    out = {
        "q": random.standard_normal((batch, time, heads, key_dim)).astype(dtype),
        "k": keys.astype(dtype),
        "v": random.standard_normal((batch, time, value_heads, value_dim)).astype(dtype),
        "log_decay": -slowest * random.random((batch, time, owners, decays), np.float32),
    }
    if member == "gdn2":
        out["erase"] = beta_max * random.random((batch, time, owners, key_dim), np.float32)
        out["write"] = beta_max * random.random((batch, time, value_heads, value_dim), np.float32)
    else:
        out["beta"] = beta_max * random.random((batch, time, owners, 1), np.float32)
    if state:
        shape = (batch if states is None else states, value_heads, key_dim, value_dim)
        out["initial_state"] = random.standard_normal(shape).astype(np.float32)
    return out


def random_cotangents(arrays, seed, *, states=None):
    """Standard normal cotangents of outputs and final states; `states` are the leading axes of the latter."""
    random = np.random.default_rng(seed)
    batch, _, heads, value_dim = arrays["v"].shape
    states = (batch,) if states is None else states
    shape = (*states, heads, arrays["k"].shape[-1], value_dim)
    d_out = random.standard_normal(arrays["v"].shape).astype(np.float32).astype(arrays["v"].dtype)
    return d_out, random.standard_normal(shape).astype(np.float32)


# ---- the operator ----------------------------------------------------------------------------------------------------


def call(arrays: Mapping, *, erase_max=1.0, log_decay_min=None, **options):
    """`gated_delta` of a dict of arrays, as it is called by hand."""
    promises = {"erase_max": erase_max, "log_decay_min": log_decay_min}
    if "beta" in arrays:
        gates = Gates.tied(arrays["beta"], arrays.get("log_decay"), **promises)
    else:
        gates = Gates(arrays.get("log_decay"), arrays.get("erase"), arrays.get("write"), **promises)
    state = arrays.get("initial_state")
    return gated_delta(arrays["q"], arrays["k"], arrays["v"], gates, initial_state=state, **options)


def run(arrays, backend=None, *, offsets=None, ids=None, **options):
    """`{"out", "final_state"}` of `call` under `jit`, compiled once for all inputs of the same shapes."""
    results = _compiled(backend, tuple(options.items()), False)(_as_jax(arrays), _packing(offsets, ids), None)
    return _as_numpy(results)


def run_with_gradients(arrays, cotangents, backend=None, *, offsets=None, ids=None, **options):
    """`run` and `d_x` for every array x, pulled back from the two cotangents."""
    cotangents = tuple(jnp.asarray(x) for x in cotangents)
    compiled = _compiled(backend, tuple(options.items()), True)
    return _as_numpy(compiled(_as_jax(arrays), _packing(offsets, ids), cotangents))


def run_plain(arrays, backend=None, *, offsets=None, ids=None, **options):
    """`run` outside `jit`."""
    out, state = call(arrays, backend=backend, **_packing(offsets, ids), **options)
    return _as_numpy({"out": out, "final_state": state})


@functools.cache
def _compiled(backend, options, with_gradients):
    options = dict(options)

    def forward(arrays, packing):
        out, state = call(arrays, backend=backend, **packing, **options)
        return {"out": out, "final_state": state}

    def run(arrays, packing, cotangents):
        if not with_gradients:
            return forward(arrays, packing)
        results, pull = jax.vjp(lambda arrays: forward(arrays, packing), arrays)
        (gradients,) = pull(dict(zip(("out", "final_state"), cotangents)))
        return results | {f"d_{name}": x for name, x in gradients.items()}

    return little_optimised(run)


QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
"""LLVM's optimiser off and its work not split: a CPU compiles several times faster, and no formula changes."""


def little_optimised(function):
    """`jax.jit` with `QUICK_COMPILE` on a CPU."""
    return jax.jit(function, compiler_options=QUICK_COMPILE if jax.default_backend() == "cpu" else None)


def _packing(offsets, ids):
    packing = {"cu_seqlens": offsets, "segment_ids": ids}
    return {name: jnp.asarray(x, jnp.int32) for name, x in packing.items() if x is not None}


def _as_jax(arrays):
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def _as_numpy(results):
    return {name: np.asarray(x) for name, x in results.items()}


# ---- errors ----------------------------------------------------------------------------------------------------------


def error(actual, expected) -> float:
    """`max|actual - expected| / max|expected|`; infinite where `actual` is not finite."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape, f"shape {actual.shape} instead of {expected.shape}"
    if not np.isfinite(actual).all():
        return np.inf
    return float(np.max(np.abs(actual - expected), initial=0) / max(np.max(np.abs(expected), initial=0), TINY))


def assert_within(bound, actual, expected, names=None, **bounds):
    """Each array of `actual` within its error bound of `expected`: `bounds` by name, `bound` for the others.

    `names`: which arrays; all of `actual` if `None`, of which none may be missing in `expected`.
    """
    names = list(actual) if names is None else names
    assert names
    errors = {name: error(actual[name], expected[name]) for name in names}
    too_far = {name: x for name, x in errors.items() if not x <= bounds.get(name, bound)}
    assert not too_far, f"errors {too_far} exceed {bound} {bounds or ''}"


def assert_forward_and_gradients_within(forward, gradients, actual, expected):
    """Outputs and states within one bound, every gradient within another."""
    assert_within(gradients, actual, expected, out=forward, final_state=forward)
