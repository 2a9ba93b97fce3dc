"""The TPU kernels, in JAX's TPU interpreter, give what the recurrence gives; what they cannot run they refuse.

The interpreter fills memory that nobody wrote with NaN.
"""

import dataclasses

import jax
import numpy as np
import pytest

from gated_delta import Chunked, Recurrent, gated_delta
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import RandomGates, RandomProblem, assert_close, expected, pullback, results

KERNEL = PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)
SIZES = dict(batch=2, time=21, key_heads=2, group=2, key_dim=8, value_dim=6, state=True, seed=1)
PROBLEMS = {
    "kda": RandomProblem(**SIZES, gates=RandomGates(decay="channel", erase="head", owner="value", tied=True)),
    "gdn": RandomProblem(**SIZES, gates=RandomGates(decay="head", erase="head", owner="value", tied=True)),
    "gdn2": RandomProblem(**SIZES, gates=RandomGates(decay="channel", erase="channel", write="channel")),
    "sla in bfloat16": RandomProblem(
        **SIZES, dtype="bfloat16", gates=RandomGates(decay="tile", decay_tiles=4, erase="head", tied=True)
    ),
    "linear attention": RandomProblem(**SIZES, gates=RandomGates(write="head")),
    "documents that share chunks": RandomProblem(
        **SIZES,
        documents=((5, -2, 1, 13), (-3, 18)),
        gates=RandomGates(decay="head", erase="head", owner="value", tied=True),
    ),
    "documents with states of their own": RandomProblem(
        **{**SIZES, "batch": 1},
        documents=((0, 5, 1, 0, 12),),
        packing="offsets",
        gates=RandomGates(decay="channel", erase="head", tied=True),
    ),
}


BY_CHANNEL = RandomGates(decay="channel", erase="head", owner="key", tied=True)
WIDE = {**SIZES, "time": 70, "batch": 1, "dtype": "bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize("erase", ["head", "channel"])
@pytest.mark.parametrize("decays", ["mild", "strong", "vast"])
def test_a_chunk_may_forget_little_or_much(decays, erase):
    """With bfloat16 operands each chunk takes the path that its own decays allow."""
    gates = dataclasses.replace(BY_CHANNEL, erase=erase, tied=erase == "head", log_decays=decays)
    problem = RandomProblem(**WIDE, gates=gates)
    assert_close(
        pullback(PallasTPU(TileConfig(chunk_size=64, chunks=1), interpret=True), problem), expected(problem), problem
    )


@pytest.mark.parametrize("steep", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_each_chunk_takes_the_path_of_its_own_decays(steep):
    """Which is chosen one grid step ahead: of two chunks one forgets much."""
    problem = RandomProblem(**WIDE, gates=BY_CHANNEL)
    arguments, (d_out, d_state) = problem.arguments(), problem.cotangents("bfloat16", "float32")
    log_decay = np.array(arguments["gates"].log_decay)
    log_decay[:, 64 * steep : 64 * steep + 6] = -20
    arguments["gates"] = dataclasses.replace(arguments["gates"], log_decay=log_decay)
    actual = results(PallasTPU(TileConfig(chunk_size=64, chunks=1), interpret=True), arguments, (d_out, d_state))
    assert_close(actual, results(Recurrent(), arguments, (d_out, d_state)), problem, arguments)


def test_a_reset_hides_large_values():
    """In a chunk that forgets much, from the rows of the same eight too."""
    problem = RandomProblem(**WIDE, gates=BY_CHANNEL)
    arguments, cotangents = problem.arguments(), problem.cotangents("bfloat16", "float32")
    log_decay, v = np.array(arguments["gates"].log_decay), np.array(arguments["v"])
    log_decay[:, [11, 44]], log_decay[:, 45:50] = -110, -9
    v[:, [10, 43]] *= 1000
    arguments |= {"gates": dataclasses.replace(arguments["gates"], log_decay=log_decay), "v": v}
    actual = results(PallasTPU(TileConfig(chunk_size=64, chunks=1), interpret=True), arguments, cotangents)
    wanted = results(Recurrent(), arguments, cotangents)
    assert_close(actual, wanted, problem, arguments)
    after = [np.asarray(x["out"], np.float32)[:, 11:43] for x in (actual, wanted)]
    np.testing.assert_allclose(*after, atol=0.02 * np.abs(after[1]).max())


@pytest.mark.slow
def test_a_bounded_gate_has_one_path():
    problem = RandomProblem(**WIDE, gates=dataclasses.replace(BY_CHANNEL, log_decays="bounded", log_decay_min=-5.0))
    kernel = PallasTPU(TileConfig(chunk_size=64, chunks=1), interpret=True)
    assert_close(pullback(kernel, problem), expected(problem), problem)


@pytest.mark.slow
@pytest.mark.parametrize("residuals", ["states", "none"])
def test_what_is_kept_for_the_backward_pass_changes_nothing(residuals):
    problem = PROBLEMS["gdn"]
    kernel = PallasTPU(KERNEL.config, residuals=residuals, interpret=True)
    assert_close(pullback(kernel, problem), expected(problem), problem)


@pytest.mark.slow
def test_sizes_that_the_backend_chooses_are_right_too():
    problem = PROBLEMS["sla in bfloat16"]
    assert_close(pullback(PallasTPU(interpret=True), problem), expected(problem), problem)


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_kernels_agree_with_the_recurrence(problem):
    assert_close(pullback(KERNEL, problem), expected(problem), problem)


def test_the_default_kernel_says_why_it_cannot_run_here():
    if jax.default_backend() == "tpu":
        pytest.skip("there is a TPU, where it runs")
    with pytest.raises(ValueError, match=r"cannot run: it needs a TPU, and the default platform is"):
        gated_delta(**PROBLEMS["gdn"].arguments(), backend=PallasTPU())


def test_a_solve_that_is_no_product_is_refused():
    with pytest.raises(ValueError, match=r"cannot run: inverse='substitution' does not run inside a kernel"):
        gated_delta(**{**PROBLEMS["gdn"].arguments(), "inverse": "substitution"}, backend=KERNEL)


def test_a_state_too_large_for_the_chip_is_refused():
    problem = RandomProblem(time=1, key_heads=1, group=8, key_dim=300, value_dim=200, gates=RandomGates("head"))
    with pytest.raises(
        ValueError, match=r"a state of 384 x 2048 numbers .* 8 value heads side by side.* at most 524288"
    ):
        gated_delta(**problem.arguments(), backend=PallasTPU(ahead_of_time=True))


@pytest.mark.slow
def test_two_chunks_in_a_step_are_two_steps():
    problem = RandomProblem(
        **{**SIZES, "time": 70}, gates=RandomGates(decay="tile", decay_tiles=4, erase="head", tied=True)
    )
    kernel = PallasTPU(TileConfig(chunk_size=16, chunks=2), residuals="all", interpret=True)
    assert_close(pullback(kernel, problem), expected(problem), problem)


@pytest.mark.parametrize(
    "name, problem", [("v", "documents that share chunks"), ("k", "documents with states of their own")]
)
def test_a_bad_token_spoils_only_what_it_does_elsewhere(name, problem):
    """The kernels run again without it: the same outputs, states and gradients are lost, and no others."""
    problem = PROBLEMS[problem]
    arguments = {key: np.array(x) if key in "qkv" else x for key, x in problem.arguments().items()}
    arguments[name][0, 9, 0, 1] = np.nan
    cotangents = problem.cotangents("float32", "float32")
    actual, wanted = (results(backend, arguments, cotangents) for backend in (KERNEL, Chunked(16)))
    assert np.isnan(wanted["out"]).any() and not np.isnan(wanted["out"]).all()
    for key, x in wanted.items():
        np.testing.assert_array_equal(np.isnan(actual[key]), np.isnan(x), err_msg=key)
        np.testing.assert_allclose(actual[key], x, rtol=0, atol=2e-5 * np.nanmax(np.abs(x)), err_msg=key)


@pytest.mark.parametrize(
    "name, lengths, token", [("erase", (5, 27), 5), pytest.param("log_decay", (1,) * 32, 21, marks=pytest.mark.slow)]
)
def test_a_bad_gate_of_a_first_token_shows_where_documents_share_chunks(name, lengths, token):
    """Nothing that the document reads is multiplied by it, and no score of the token alone has it."""
    gates = RandomGates(decay="channel", erase="channel", write="channel")
    problem = RandomProblem(time=32, key_dim=4, value_dim=5, documents=(lengths,), gates=gates, seed=3)
    arguments, cotangents = problem.arguments(), problem.cotangents("float32", "float32")
    gate = np.array(getattr(arguments["gates"], name))
    gate[0, token, 0, 1] = np.nan
    arguments["gates"] = dataclasses.replace(arguments["gates"], **{name: gate})
    actual, wanted = (results(backend, arguments, cotangents) for backend in (KERNEL, Chunked(16)))
    document = problem.segment_ids == problem.segment_ids[0, token]
    np.testing.assert_array_equal(np.isnan(wanted["out"]).all((2, 3)), document)
    for key, x in wanted.items():
        np.testing.assert_array_equal(np.isnan(actual[key]), np.isnan(x), err_msg=key)
        np.testing.assert_allclose(actual[key], x, rtol=0, atol=2e-5 * np.nanmax(np.abs(x), initial=0), err_msg=key)
