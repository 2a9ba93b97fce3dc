"""Cases C10 to C17: sequences that do not fill their chunks, and sizes of heads and launches."""

import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import Chunked, Gates, Recurrent, gated_delta_step

from .harness import (
    BACKENDS,
    MEMBERS,
    assert_forward_and_gradients_within,
    assert_within,
    error,
    little_optimised,
    random_cotangents,
    random_inputs,
    run,
    run_plain,
    run_with_gradients,
)
from .reference import cut, recurrence, recurrence_with_gradients

by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=str)

TIMES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 75, 95, 127, 128, 129, 500)


def long_inputs(member, time, dtype=np.float32):
    """The first `time` tokens of one and the same sequence."""
    arrays = random_inputs(member, 20, time=500, heads=3, key_dim=64, value_dim=64, slowest=0.01, dtype=dtype)
    return cut(arrays, 0, time, state=slice(None))


def check_the_end(actual, arrays, bound):
    assert actual["final_state"].dtype == np.float32
    assert_within(bound, actual, recurrence(arrays), names=["final_state"])


@pytest.mark.parametrize("time", TIMES)
def test_the_final_state_is_right_wherever_the_last_chunk_ends(time):
    """C10: the member whose gates are all per channel at every time, the others in turn at every second."""
    turn = TIMES.index(time)
    for member in ("gdn2",) if turn % 2 else ("gdn2", ("gdn", "kda", "sla")[turn // 2 % 3]):
        arrays = long_inputs(member, time)
        check_the_end(run(arrays, Chunked(64)), arrays, 2e-5)


@pytest.mark.parametrize("time", TIMES)
def test_the_final_state_of_bfloat16_inputs_is_right_wherever_the_last_chunk_ends(time):
    """C10."""
    arrays = long_inputs("kda" if time == 129 else "gdn", time, jnp.bfloat16)
    check_the_end(run(arrays, Chunked(64)), arrays, 1e-2)


@pytest.mark.parametrize("member", MEMBERS)
def test_the_final_state_is_right_token_by_token(member):
    """C10: the recurrent form, which recomputes its last tokens apart."""
    for time, dtype, bound in ((1, np.float32, 2e-5), (129, np.float32, 2e-5), (500, jnp.bfloat16, 1e-2)):
        arrays = long_inputs(member, time, dtype)
        check_the_end(run(arrays, Recurrent()), arrays, bound)


@little_optimised
def step(arrays, state):
    """The last token of `arrays` by `gated_delta_step`."""
    last = {name: x[:, -1] for name, x in arrays.items() if name != "initial_state"}
    q, k, v = (last[name] for name in ("q", "k", "v"))
    if "beta" in last:
        gates = Gates.tied(last["beta"], last["log_decay"])
    else:
        gates = Gates(last["log_decay"], last["erase"], last["write"])
    return gated_delta_step(q, k, v, gates, state)


@pytest.mark.parametrize(
    "member, time", [("gdn2", time) for time in (2, 64, 65, 66, 129)] + [("sla", 65), ("kda", 129)]
)
def test_all_tokens_at_once_equal_all_but_one_and_a_step(member, time):
    """C11."""
    arrays = long_inputs(member, time)
    for backend in BACKENDS if (member, time) == ("gdn2", 65) else (Chunked(64),):
        whole = run(arrays, backend)
        before = run(cut(arrays, 0, time - 1, state=slice(None)), backend)
        out, state = step(arrays, before["final_state"])
        assert_within(2e-5, {"out": out, "final_state": state}, whole | {"out": whole["out"][:, -1]})


def sized_inputs(member, seed, time, key_dim, value_dim, **options):
    return random_inputs(member, seed, time=time, key_dim=key_dim, value_dim=value_dim, **options)


@pytest.mark.parametrize("member, time", [("gdn2", 160), ("kda", 192), ("gdn", 200)])
def test_the_chunk_size_does_not_matter(member, time):
    """C12."""
    arrays = sized_inputs(member, 21, time, 64, 64, heads=2)
    cotangents = random_cotangents(arrays, 22)
    expected = recurrence_with_gradients(arrays, *cotangents)
    results = [run_with_gradients(arrays, cotangents, Chunked(size)) for size in (16, 32, 64, 128)]
    for actual in results:
        assert_forward_and_gradients_within(2e-5, 1e-4, actual, expected)
        assert_forward_and_gradients_within(2e-5, 1e-4, actual, results[0])


@pytest.mark.parametrize("size", [0, 8, 48, 256])
def test_an_unsupported_chunk_size_is_refused(size):
    """C12."""
    with pytest.raises(ValueError, match=r"`Chunked\(chunk_size=.*must be one of \(16, 32, 64, 128\)"):
        Chunked(size)


@pytest.mark.parametrize(
    "member, key_dim, value_dim",
    [("gdn2", k, v) for k, v in ((1, 1), (4, 4), (8, 8), (1, 8), (8, 1))]
    + [("gdn", 1, 1), ("kda", 1, 8), ("sla", 4, 4), ("sla", 8, 1)],
)
def test_very_small_heads_are_right(member, key_dim, value_dim):
    """C14."""
    arrays = sized_inputs(member, 23, 65, key_dim, value_dim)
    expected = recurrence(arrays)
    for backend in BACKENDS if key_dim == 1 else (Chunked(64),):
        assert_within(2e-5, run(arrays, backend), expected)


@pytest.mark.parametrize(
    "member, key_dim, value_dim",
    [
        ("gdn2", 60, 100),
        ("gdn", 100, 60),
        ("kda", 64, 128),
        ("gdn2", 128, 64),
        ("sla", 96, 32),
    ],
)
def test_head_sizes_that_differ_and_are_no_powers_of_two_are_right(member, key_dim, value_dim):
    """C15."""
    arrays = sized_inputs(member, 24, 65, key_dim, value_dim, heads=2)
    cotangents = random_cotangents(arrays, 25)
    expected = recurrence_with_gradients(arrays, *cotangents)
    for backend in BACKENDS if key_dim == 60 else (Chunked(64),):
        assert_forward_and_gradients_within(2e-5, 1e-4, run_with_gradients(arrays, cotangents, backend), expected)


@pytest.mark.parametrize("dtype, bound", [(np.float32, 2e-5), (jnp.bfloat16, 1e-2)], ids=["float32", "bfloat16"])
def test_a_wide_value_head_is_right(dtype, bound):
    """C16."""
    arrays = sized_inputs("kda", 26, 130, 128, 512, heads=1, dtype=dtype)
    expected = recurrence(arrays)
    for backend in BACKENDS:
        actual = run(arrays, backend)
        assert actual["out"].dtype == dtype and actual["final_state"].dtype == np.float32
        assert_within(bound, actual, expected)


def test_a_thousand_chunks_at_once_are_each_right():
    """C17: 8 * 16 * 8 chunks of 64."""
    arrays = sized_inputs("kda", 27, 512, 16, 16, batch=8, heads=16)
    actual, expected = run(arrays, Chunked(64)), recurrence(arrays)
    assert_within(2e-5, actual, expected)
    for row in range(8):
        for head in range(16):
            here = {
                name: x[row : row + 1, head : head + 1]
                if name == "initial_state"
                else x[row : row + 1, :, head : head + 1]
                for name, x in arrays.items()
            }
            alone = run(here, Chunked(64))
            assert error(actual["out"][row, :, head], alone["out"][0, :, 0]) < 2e-5
            assert error(actual["final_state"][row, head], alone["final_state"][0, 0]) < 2e-5
            assert error(alone["out"][0, :, 0], expected["out"][row, :, head]) < 2e-5


@pytest.mark.parametrize("member", ["gdn2", "sla"])
def test_a_plain_call_equals_one_under_jit(member):
    """All cases: outside `jit` the operator is the same program."""
    arrays = sized_inputs(member, 28, 20, 8, 8)
    for backend in BACKENDS:
        plain = run_plain(arrays, backend)
        assert_within(1e-6, plain, run(arrays, backend))
        assert_within(2e-5, plain, recurrence(arrays))
