"""The one tolerance: what it allows, what it does not, and what it says."""

import dataclasses

import numpy as np
import pytest

from gated_delta import Chunked, Recurrent
from gated_delta.testing import (
    LAYOUTS,
    RandomGates,
    RandomKeys,
    RandomProblem,
    assert_close,
    backends,
    budget,
    expected,
    pullback,
    relative_error,
    why_not,
)

KDA = RandomProblem(time=9, key_dim=4, value_dim=3, gates=RandomGates("channel", erase="head", tied=True), state=True)
DOUBLED = dataclasses.replace(KDA, gates=dataclasses.replace(KDA.gates, erase_max=2.0))
CORRELATED = RandomKeys("identical")
ALONE = RandomGates("head", write="one", log_decays="full")


@pytest.mark.parametrize(
    "problem, allowed",
    [
        (dataclasses.replace(KDA, dtype="float64"), 1e-12),
        (KDA, 1e-5),
        (dataclasses.replace(KDA, keys=CORRELATED), 1e-5),
        (DOUBLED, 1e-5),
        (dataclasses.replace(DOUBLED, keys=CORRELATED), 1e-4),
        (dataclasses.replace(KDA, inverse="approx"), 2e-2),
        (dataclasses.replace(KDA, dtype="bfloat16", key_dim=32), 1e-2),
        (dataclasses.replace(KDA, dtype="bfloat16"), 1e-1),
        (dataclasses.replace(KDA, dtype="bfloat16", value_dtype="float32"), 1e-5),
        (dataclasses.replace(KDA, dtype="float16"), 1e-5),
    ],
    ids=repr,
)
def test_a_budget_follows_from_operands_keys_and_promises(problem, allowed):
    assert budget(problem) == allowed


def test_a_narrow_result_may_be_rounded_once_more():
    assert budget(KDA, "float16") == 1e-3 and budget(KDA, "bfloat16") == 1e-2
    assert budget(KDA, np.float32) == budget(KDA)


def test_errors_are_relative_to_the_root_mean_square_and_counted_in_budgets():
    wanted = expected(KDA)
    assert relative_error(wanted, wanted, KDA) == 0
    for name in wanted:
        off = {**wanted, name: wanted[name] * (1 + 3e-5)}
        if name not in ("out", "d_log_decay", "d_erase"):
            np.testing.assert_allclose(relative_error(off, wanted, KDA), 3, rtol=1e-6)
        with pytest.raises(AssertionError, match=f"`{name}` is off by"):
            assert_close({**wanted, name: wanted[name] * 1.1}, wanted, KDA)


def test_only_outputs_and_the_gradients_of_log_decay_and_of_erase_have_a_floor():
    """0.02 * sqrt(tokens * channels) * (RMS(q * d_q) + RMS(k * d_k)), and 0.1 * RMS(v . d_v) of a tied beta."""
    wanted = expected(KDA)
    arguments = KDA.arguments()
    size = sum(np.sqrt(np.mean((arguments[name] * wanted[f"d_{name}"]) ** 2)) for name in "qk")
    floor = 0.02 * np.sqrt(KDA.time) * size
    tiny = {**wanted, "d_log_decay": 0 * wanted["d_log_decay"]}
    off = {**tiny, "d_log_decay": tiny["d_log_decay"] + 2e-5 * floor}
    np.testing.assert_allclose(relative_error(off, tiny, KDA), 2, rtol=1e-6)
    floor = 0.1 * np.sqrt(np.mean(np.sum(arguments["v"] * wanted["d_v"], axis=-1) ** 2))
    tiny = {**wanted, "d_erase": 0 * wanted["d_erase"]}
    off = {**tiny, "d_erase": tiny["d_erase"] + 2e-5 * floor}
    np.testing.assert_allclose(relative_error(off, tiny, KDA), 2, rtol=1e-6)
    gates = dataclasses.replace(KDA.gates, tied=False, write="head", log_decays="strong")
    rounded = dataclasses.replace(KDA, dtype="bfloat16", gates=gates)
    for problem, may_vanish in ((rounded, True), (dataclasses.replace(rounded, dtype="float32"), False)):
        wanted = expected(problem)
        tiny = {**wanted, "d_erase": 0 * wanted["d_erase"]}
        off = {**tiny, "d_erase": tiny["d_erase"] + 1e-9}
        assert (relative_error(off, tiny, problem) < 1) == may_vanish
    wanted = expected(KDA)
    for name in ("d_q", "d_v", "final_state"):
        zero = {**wanted, name: 0 * wanted[name]}
        assert relative_error({**zero, name: zero[name] + 1e-9}, zero, KDA) > 1e6


@pytest.mark.parametrize("erase, shared", [("channel", (3,)), ("head", (2, 3))])
def test_the_gradient_of_erase_may_be_off_by_a_rounding_of_what_is_added_up_in_it(erase, shared):
    """By hand for the only token: `k[i] * state[i, v] * d_written[v]`, over all that shares the element."""
    gates = RandomGates("head", erase=erase, write="channel", owner="value")
    problem = RandomProblem(time=1, key_dim=4, value_dim=3, group=2, gates=gates, state=True)
    wanted, arguments = expected(problem), problem.arguments()
    gates = arguments["gates"]
    state = np.exp(gates.log_decay[:, 0, :, :, None]) * arguments["initial_state"]
    d_written = wanted["d_v"][:, 0] / gates.write[:, 0]
    parts = np.repeat(arguments["k"][:, 0], 2, axis=1)[..., None] * state * d_written[:, :, None]
    floor = 0.02 * np.sqrt(np.mean(np.sum(parts**2, axis=shared)))
    tiny = {**wanted, "d_erase": 0 * wanted["d_erase"]}
    off = {**tiny, "d_erase": tiny["d_erase"] + 2e-5 * floor}
    np.testing.assert_allclose(relative_error(off, tiny, problem), 2, rtol=1e-5)


def test_parts_that_cancel_in_the_only_element_are_no_error():
    """Found by 500 examples: six parts of up to 0.65 leave 0.0013."""
    gates = RandomGates("channel", erase="channel", write="channel", log_decays="mixed", strengths="mixed")
    sizes = dict(batch=2, time=24, group=2, key_dim=4, value_dim=3, state=True)
    problem = RandomProblem(seed=60, **sizes, documents=((1, 1, -22), (-24,)), gates=gates)
    wanted = expected(problem)
    for backend in (Recurrent(), Chunked(16)):
        assert_close(pullback(backend, problem), wanted, problem)
    wrong = {**wanted, "d_erase": wanted["d_erase"] * (1 + 1e-2)}
    assert relative_error(wrong, wanted, problem) > 1


def test_an_output_may_be_off_by_a_rounding_of_what_is_added_up_in_it():
    """By hand for many tokens of which each begins anew: `scale * q[i] * k[i] * v[j]`, over the key channels `i`."""
    problem = RandomProblem(time=4000, key_heads=2, group=2, key_dim=8, value_dim=5, gates=ALONE)
    arguments, wanted = problem.arguments(), expected(problem)
    q, k = (np.repeat(arguments[name], 2, axis=2) for name in "qk")
    parts = 8**-0.5 * (q * k)[..., None] * arguments["v"][..., None, :]
    floor = 0.02 * np.sqrt(np.mean(np.sum(parts**2, axis=3)))
    tiny = {**wanted, "out": 0 * wanted["out"]}
    error = relative_error({**tiny, "out": tiny["out"] + 2e-5 * floor}, tiny, problem)
    np.testing.assert_allclose(error, 2, rtol=0.05)  # the cotangents have a variance of 1 on the mean only


def test_a_query_nearly_orthogonal_to_the_only_key_is_no_error():
    """Found by 500 examples: parts of up to 0.9 leave 0.006 at most."""
    gates = RandomGates("channel", erase="channel", write="channel", log_decays="strong")
    sizes = dict(batch=2, time=24, group=2, key_dim=4, value_dim=3, state=True)
    keys = RandomKeys("correlated")
    problem = RandomProblem(seed=21, **sizes, keys=keys, documents=((1, -23), (-24,)), gates=gates)
    wanted = expected(problem)
    for backend in (Recurrent(), Chunked(16)):
        assert_close(pullback(backend, problem), wanted, problem)
    wrong = {**wanted, "out": wanted["out"] * (1 + 1e-3)}
    assert relative_error(wrong, wanted, problem) > 1


def test_half_a_unit_in_the_last_place_of_what_is_added_up_for_a_beta_in_bfloat16_is_no_error():
    """Found by 500 examples: the last token's 16 parts of up to 2.3 leave 0.39."""
    gates = RandomGates("channel", erase="head", tied=True, log_decays="strong")
    sizes = dict(time=65, group=2, key_dim=32, value_dim=8, state=True, dtype="bfloat16")
    problem = RandomProblem(seed=323, **sizes, keys=RandomKeys("some_zero"), gates=gates)
    wanted = expected(problem)
    assert_close(pullback(Chunked(16), problem), wanted, problem)
    wrong = {**wanted, "d_erase": wanted["d_erase"] * 1.03}
    assert relative_error(wrong, wanted, problem) > 1


def test_one_element_may_not_be_far_off_where_the_mean_is_not():
    problem = dataclasses.replace(KDA, time=4000)
    wanted = {"out": np.ones((1, 4000, 1, 3))}
    off = wanted["out"].copy()
    off[0, 7, 0, 0] += 60 * budget(problem)
    assert np.sqrt(np.mean((off - 1) ** 2)) < budget(problem)
    np.testing.assert_allclose(relative_error({"out": off}, wanted, problem), 60 / 50, rtol=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_far_off_by_a_finite_number(bad):
    wanted = expected(KDA)
    off = {**wanted, "d_k": np.full_like(wanted["d_k"], bad)}
    error = relative_error(off, wanted, KDA)
    assert 1e6 < error < np.inf
    with pytest.raises(AssertionError, match=r"`d_k` is not finite: 36 of 36 are .*: out 0, .* d_k not finite"):
        assert_close(off, wanted, KDA)
    off["out"] = wanted["out"].copy()
    off["out"][0, 4:, 0, 1] = bad
    where = r"`out` is not finite: 5 of 27 are NaN or infinite, the first at \(0, 4, 0, 1\)\."
    with pytest.raises(AssertionError, match=where):
        assert_close(off, wanted, KDA)


def test_a_failure_names_outputs_first_and_the_first_token_that_is_off():
    problem = dataclasses.replace(KDA, batch=2)
    wanted = expected(problem)
    out = wanted["out"].copy()
    out[0, 7], out[1, 5, 0, 2] = 4, 3
    with pytest.raises(AssertionError, match=r"`out` is off by .* At \(1, 5, 0, 2\), the first, there is 3 instead of"):
        assert_close({**wanted, "out": out, "d_k": 9 * wanted["d_k"]}, wanted, problem)


def test_results_must_have_the_same_names_and_shapes():
    wanted = expected(KDA)
    with pytest.raises(AssertionError, match="these are expected"):
        assert_close({"out": wanted["out"]}, wanted, KDA)
    with pytest.raises(AssertionError, match=r"`out` has shape \(1, 9, 1\), but \(1, 9, 1, 3\) is expected"):
        assert_close({**wanted, "out": wanted["out"][..., 0]}, wanted, KDA)


def test_a_failure_names_array_error_budget_and_the_problem_in_one_line():
    wanted = expected(KDA)
    with pytest.raises(AssertionError) as caught:
        assert_close({**wanted, "d_v": 1.5 * wanted["d_v"]}, wanted, KDA)
    message = str(caught.value)
    assert message.startswith("`d_v` is off by 0.5: 5e+04 times its budget of 1e-05.")
    assert message.endswith(f"Problem: {KDA!r}") and "\n" not in message


def test_underflow_of_the_result_dtype_is_no_error():
    for dtype, tiny in (("float32", 1e-40), ("float16", 1e-9)):
        problem = dataclasses.replace(KDA, dtype=dtype)
        zero = {"out": np.zeros((1, 9, 1, 3), dtype)}
        assert relative_error(zero, {"out": np.full((1, 9, 1, 3), tiny)}, problem) < 1
    in_float64 = dataclasses.replace(KDA, dtype="float64")
    assert relative_error({"out": np.zeros(3)}, {"out": np.full(3, 1e-40)}, in_float64) > 1


def test_every_backend_that_can_run_is_compared():
    assert Recurrent() in backends() and len(backends()) >= 2
    assert why_not(Recurrent(), KDA) is None


def test_a_bad_problem_is_an_error_and_not_a_reason():
    with pytest.raises(ValueError, match="decay tiles that divides"):
        why_not(Recurrent(), dataclasses.replace(KDA, gates=RandomGates("tile", decay_tiles=3)))


def test_the_expectation_is_remembered_but_not_shared():
    one = expected(LAYOUTS[1])
    one["out"] = None
    assert expected(LAYOUTS[1])["out"] is not None
