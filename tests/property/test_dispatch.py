"""`explain` says which backend runs a call and why the others cannot; one that is named runs or raises."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import AbstractBackend, Chunked, Explanation, Gates, Recurrent, explain, gated_delta
from gated_delta.pallas import PallasTPU
from gated_delta.testing import RandomGates, RandomProblem, backends, why_not

PROBLEM = RandomProblem(
    batch=2, time=5, key_heads=2, group=3, key_dim=4, value_dim=5, gates=RandomGates("tile", erase="head", tied=True)
)


class Picky(AbstractBackend):
    """Runs nothing but says why."""

    def why_not(self, problem):
        return "it is Sunday"

    def __call__(self, problem):
        raise AssertionError("a backend that cannot run was run")


class Recording(AbstractBackend):
    """Gives ones."""

    def why_not(self, problem):
        return None

    def __call__(self, problem):
        return jnp.ones(problem.v.shape), jnp.ones(problem.state_shape)


@pytest.mark.smoke
def test_the_default_is_the_first_backend_that_can_run():
    explanation = explain(**PROBLEM.arguments())
    assert isinstance(explanation, Explanation)
    assert explanation.chosen == next(b for b in backends() if why_not(b, PROBLEM) is None)
    assert set(explanation.reasons) == {str(backend) for backend in (*backends(), PallasTPU())}
    assert explanation.reasons[str(explanation.chosen)] is None


def test_an_explanation_prints_the_problem_and_a_verdict_per_backend():
    lines = str(explain(**PROBLEM.arguments())).splitlines()
    assert lines[0] == (
        "batch 2, time 5, key_heads 2, key_dim 4, 2 states of 4 x 15, float32 operands; decay: 2 groups, "
        "erase: head, write: as erase; inverse: exact"
    )
    assert "  Chunked(): runs" in lines and "  Recurrent(): could run" in lines
    if (here := jax.default_backend()) != "tpu":
        assert f"  PallasTPU(): cannot run: it needs a TPU, and the default platform is {here}" in lines
    interpreted = explain(**PROBLEM.arguments(), backend=PallasTPU(interpret=True))
    assert "  PallasTPU(interpret=True): runs" in str(interpreted).splitlines()
    other = explain(**PROBLEM.arguments(), backend=Recurrent())
    assert other.chosen == Recurrent()
    assert {"  Recurrent(): runs", "  Chunked(): could run"}.issubset(str(other).splitlines())


@pytest.mark.parametrize(
    "gates, words",
    [
        (RandomGates(), "decay: none, erase: none, write: one"),
        (RandomGates("head", write="head"), "decay: head, erase: none, write: 3 groups"),
        (RandomGates("channel", erase="channel", write="channel"), "decay: channel, erase: channel, write: channel"),
        (RandomGates("head", erase="head", owner="value", tied=True), "decay: head, erase: head, write: as erase"),
    ],
)
def test_an_explanation_names_the_granularities(gates, words):
    assert words in explain(**dataclasses.replace(PROBLEM, gates=gates).arguments()).problem


def test_shapes_are_enough():
    """Nothing is computed: there is nothing to compute with."""

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype)

    gates = Gates.tied(shape(8, 4096, 16), shape(8, 4096, 16, 128, dtype=jnp.float32))
    q, v = shape(8, 4096, 16, 128), shape(8, 4096, 16, 256)
    ids = shape(8, 4096, dtype=jnp.int32)
    explanation = explain(q, q, v, gates, segment_ids=ids, num_segments=7, initial_state=shape(8, 7, 16, 128, 256))
    assert "16 states of 128 x 256, bfloat16 operands" in explanation.problem


def test_a_backend_that_cannot_run_is_skipped_by_default_and_refused_by_name(monkeypatch):
    from gated_delta import _dispatch

    arguments = PROBLEM.arguments()
    monkeypatch.setattr(_dispatch, "backends", lambda: (Picky(), Recording(), Recurrent()))
    monkeypatch.setattr(_dispatch, "named_only", lambda: ())
    explanation = explain(**arguments)
    assert explanation.chosen == Recording()
    assert explanation.reasons == {"Picky()": "it is Sunday", "Recording()": None, "Recurrent()": None}
    assert "  Picky(): cannot run: it is Sunday" in str(explanation).splitlines()
    np.testing.assert_array_equal(gated_delta(**arguments)[0], np.ones((2, 5, 6, 5)))
    with pytest.raises(ValueError, match="cannot run: it is Sunday"):
        gated_delta(**arguments, backend=Picky())
    with pytest.raises(ValueError, match="cannot run: it is Sunday"):
        explain(**arguments, backend=Picky())


def test_a_backend_of_a_users_own_gets_the_normalised_problem():
    """Groups side by side, one state per owner, log decays limited, padding at zero."""
    seen = []

    class Spy(Recording):
        def __call__(self, problem):
            seen.append(problem)
            out, state = super().__call__(problem)
            padding = jnp.stack(
                [jnp.sum(jnp.abs(x[1, :2].astype(jnp.float32))) for x in (problem.k, problem.v, problem.erase)]
            )
            return problem.log_decay.min() * out, jnp.max(padding) * state

    documents = ((2, 1), (-2, 3))
    problem = dataclasses.replace(PROBLEM, documents=documents, packing="slots", slots=4, state=True, dtype="bfloat16")
    arguments = problem.arguments()
    arguments["gates"] = dataclasses.replace(arguments["gates"], log_decay=arguments["gates"].log_decay - 1e6)
    out, state = gated_delta(**arguments, backend=Spy())
    (given,) = seen
    assert given.q.shape == (2, 5, 2, 4) and given.v.shape == (2, 5, 2, 15)
    assert given.state_shape == (2, 4, 2, 4, 15) == given.initial_state.shape
    assert given.k.dtype == jnp.bfloat16 and given.log_decay.dtype == given.initial_state.dtype == jnp.float32
    assert given.tied and given.write is None and given.slots == 4
    np.testing.assert_array_equal(np.asarray(out, np.float32)[problem.segment_ids >= 0], -110)
    np.testing.assert_array_equal(np.asarray(out, np.float32)[problem.segment_ids < 0], 0)
    has_tokens = np.array([[True, True, False, False], [True, False, False, False]])
    np.testing.assert_array_equal(state, np.where(has_tokens[..., None, None, None], 0, arguments["initial_state"]))
    assert out.shape == (2, 5, 6, 5) and state.shape == (2, 4, 6, 4, 5) and out.dtype == jnp.bfloat16


@pytest.mark.smoke
def test_backends_with_equal_options_are_equal_and_compile_once():
    traces = []

    @jax.jit
    def run(arguments, backend):
        traces.append(None)
        return gated_delta(**arguments, backend=backend)

    arguments = PROBLEM.arguments()
    for backend in (Chunked(16), Chunked(16), Chunked(chunk_size=16, residuals="solves")):
        run(arguments, backend)
    assert len(traces) == 1 and Chunked(16) == Chunked(16) != Chunked(32)
    assert str(Chunked(16, "all")) == "Chunked(chunk_size=16, residuals='all')"
