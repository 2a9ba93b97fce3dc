"""Cases C48 and C51 to C53: the type checker, tracing and compiling, and the harness of the tests themselves."""

import logging
import os
import resource
import subprocess
import sys

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gated_delta
from gated_delta import Chunked, Gates, Recurrent, explain, gated_delta_step

from .harness import BACKENDS, MEMBERS, call, error, little_optimised, random_inputs, run

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)


def small_inputs(member="kda", seed=100, **options):
    arrays = random_inputs(member, seed, time=6, key_dim=4, value_dim=4, **options)
    return {name: jnp.asarray(x) for name, x in arrays.items()}


@pytest.mark.parametrize("member", MEMBERS)
@by_backend
def test_right_inputs_pass_the_type_checker_under_every_transform(backend, member):
    """C48: traced only, since the checker runs at trace time."""
    arrays = small_inputs(member)

    def forward(arrays):
        return call(arrays, backend=backend)

    def loss(arrays):
        return jnp.sum(forward(arrays)[0])

    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), arrays)
    forms = {
        "jit": jax.jit(forward),
        "grad": jax.grad(loss),
        "filter_grad": eqx.filter_grad(loss),
        "checkpoint": jax.grad(jax.checkpoint(loss)),
        "filter_checkpoint": eqx.filter_grad(eqx.filter_checkpoint(loss)),
        "hessian-free second use": lambda arrays: (loss(arrays), forward(arrays)),
    }
    shapes = jax.eval_shape(forward, arrays)
    for name, form in forms.items():
        assert jax.tree.leaves(jax.eval_shape(form, arrays)), name
    for form in (jax.vmap(forward), eqx.filter_vmap(forward), jax.vmap(jax.grad(loss)), jax.jit(jax.vmap(forward))):
        assert all(x.shape[0] == 2 for x in jax.tree.leaves(jax.eval_shape(form, stacked)))

    def layer(v, arrays):
        return call(arrays | {"v": v}, backend=backend)[0], None

    out, _ = jax.eval_shape(lambda arrays: jax.lax.scan(layer, arrays["v"][0], arrays), stacked)
    assert out.shape == shapes[0].shape
    assert (
        explain(
            *(jax.ShapeDtypeStruct(arrays[x].shape, jnp.float32) for x in ("q", "k", "v")), Gates(), backend=backend
        ).chosen
        == backend
    )


@by_backend
def test_gates_pass_the_type_checker_as_a_tree(backend):
    """C48: placeholders in the leaves, and only some leaves traced."""
    arrays = small_inputs("gdn2")
    gates = Gates(arrays["log_decay"], arrays["erase"], arrays["write"])
    q, k, v = (arrays[name] for name in ("q", "k", "v"))
    nothing = jax.tree.map(lambda _: None, gates)
    assert nothing.log_decay is None and nothing.erase_max == gates.erase_max
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), gates)
    expected = jax.eval_shape(lambda gates: gated_delta.gated_delta(q, k, v, gates, backend=backend), gates)
    assert jax.eval_shape(lambda gates: gated_delta.gated_delta(q, k, v, gates, backend=backend), shapes) == expected
    traced, kept = eqx.partition(gates, lambda x: x is gates.erase)

    def combined(traced):
        return gated_delta.gated_delta(q, k, v, eqx.combine(traced, kept), backend=backend)

    assert jax.eval_shape(combined, traced) == expected
    assert jax.tree.structure(gates) == jax.tree.structure(shapes)
    assert hash(jax.tree.structure(gates)) == hash(jax.tree.structure(shapes))
    step = jax.eval_shape(
        lambda gates: gated_delta_step(q[:, 0], k[:, 0], v[:, 0], jax.tree.map(lambda x: x[:, 0], gates)), gates
    )
    assert step[0].shape == (1, 2, 4) and step[1].shape == (1, 2, 4, 4)


def test_numpy_inputs_are_accepted():
    """C48."""
    arrays = random_inputs("gdn2", 101, time=6, key_dim=4, value_dim=4)
    for backend in BACKENDS:
        expected = run(arrays, backend)
        out, state = call(arrays, backend=backend, cu_seqlens=np.array([0, 6]))
        assert isinstance(out, jax.Array) and isinstance(state, jax.Array)
        assert error(out, expected["out"]) < 1e-5 and error(state, expected["final_state"]) < 1e-5


WRONG_HEADS = """
import jax, jax.numpy as jnp
{hook}
from gated_delta import Gates, gated_delta
q, k = jnp.ones((1, 5, 2, 4)), jnp.ones((1, 5, 3, 4))
for form in (lambda f: f(), lambda f: jax.jit(f)(), lambda f: jax.eval_shape(f)):
    try:
        form(lambda: gated_delta(q, k, q, Gates()))
    except Exception as error:
        print(type(error).__name__, error)
"""
HOOK = "import jaxtyping; jaxtyping.install_import_hook('gated_delta', 'beartype.beartype')"


def test_a_wrong_head_count_of_k_is_one_error_with_and_without_the_checker():
    """C48."""
    printed = []
    source = os.path.dirname(os.path.dirname(gated_delta.__file__))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])}
    for hook in (HOOK, ""):
        command = [sys.executable, "-c", WRONG_HEADS.format(hook=hook)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
        printed.append(result.stdout.splitlines())
    message = (
        "ValueError `k` must have the shape of `q`, [batch, time, key_heads, key_dim] = (1, 5, 2, 4), but its shape is "
        "(1, 5, 3, 4)."
    )
    assert printed == [[message] * 3] * 2


@by_backend
def test_a_new_scale_is_no_new_trace_unless_it_is_static(backend):
    """C51."""
    arrays = small_inputs()
    traces = []

    def scaled(scale):
        traces.append(scale)
        return call(arrays, backend=backend, scale=scale)[0]

    compiled = eqx.filter_jit(scaled)
    expected = run(arrays, backend, scale=1.0)["out"]
    for scales, traced in (((jnp.array(0.1), jnp.array(0.2)), 1), ((0.1, 0.2), 3)):
        for scale in scales:
            assert error(compiled(scale), float(scale) * expected) < 1e-6
        assert len(traces) == traced, "a Python number is static under filter_jit, as documented"
    traces.clear()
    compiled = jax.jit(scaled)
    for scale in (0.1, 0.2):
        assert error(compiled(scale), scale * expected) < 1e-6
    assert len(traces) == 1
    assert "A Python number is static under `jit`" in gated_delta.gated_delta.__doc__


@by_backend
def test_new_gates_are_no_new_trace(backend):
    """C51: as after an update of parameters."""
    arrays = small_inputs()
    traces = []

    @eqx.filter_jit
    def compiled(gates):
        traces.append(gates)
        return gated_delta.gated_delta(arrays["q"], arrays["k"], arrays["v"], gates, backend=backend)[0]

    first = Gates.tied(arrays["beta"], arrays["log_decay"])
    second = Gates.tied(0.5 * arrays["beta"], 2 * arrays["log_decay"])
    assert np.abs(compiled(first) - compiled(second)).max() > 0.01
    assert len(traces) == 1


@by_backend
def test_calls_outside_jit_compile_once(backend, caplog):
    """C51, C53: not once per call, and not once per number given as a scale."""
    arrays = small_inputs(seed=102)

    def calls():
        state = arrays["initial_state"]
        for scale in (0.1, 0.2):
            out, state = call(arrays | {"initial_state": state}, backend=backend, scale=scale)
        tokens = {name: x[:, 0] for name, x in arrays.items() if name != "initial_state"}
        for _ in range(2):
            gates = Gates.tied(tokens["beta"], tokens["log_decay"])
            out, state = gated_delta_step(tokens["q"], tokens["k"], tokens["v"], gates, state)
        return out

    calls()
    with jax.log_compiles(True), caplog.at_level(logging.WARNING):
        caplog.clear()
        calls()
        assert not [record.getMessage() for record in caplog.records if "XLA compilation" in record.getMessage()]
        jax.jit(lambda x: x + 1)(arrays["q"])
        assert [record for record in caplog.records if "XLA compilation" in record.getMessage()], "this test can fail"


PROFILES = ("fast", "thorough", "debug")


def test_no_hypothesis_profile_has_a_deadline_and_one_is_loaded(request):
    """C52."""
    if request.config.getoption("--noconftest"):
        pytest.skip("the profiles are registered in tests/conftest.py, which this run leaves out")
    for name in PROFILES:
        assert hypothesis.settings.get_profile(name).deadline is None
    loaded = hypothesis.settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
    current = hypothesis.settings()
    assert current.deadline is None
    assert (current.max_examples, current.derandomize) == (loaded.max_examples, loaded.derandomize)
    assert current.max_examples != hypothesis.settings.get_profile("default").max_examples


PEAK = 6 * 2**30
"""Bytes that one process of the tests may hold at its peak: two workers then fit into 16 GiB beside everything else."""


def test_the_peak_memory_of_this_process_is_recorded_and_bounded(record_property):
    """C53: of all tests that ran before in the same process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    record_property("peak_memory_bytes", peak)
    assert peak < PEAK


def test_compiled_functions_are_few_and_reused():
    """C53: inputs of one shape share an executable, whatever their values, and functions that are gone leave none."""
    before = little_optimised(lambda x: x)
    for seed in range(3):
        before(small_inputs(seed=seed))
    assert before._cache_size() == 1
    for backend in (Recurrent(), Chunked(64), Chunked(chunk_size=64)):
        for seed in range(3):
            run(small_inputs(seed=seed), backend)
    assert Chunked(64) == Chunked(chunk_size=64) and hash(Chunked(64)) == hash(Chunked(chunk_size=64))
