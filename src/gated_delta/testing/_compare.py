"""What a problem's results should be, how far others are from it, and how far they may be: the one tolerance policy."""

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gated_delta._backend import AbstractBackend
from gated_delta._dispatch import backends as _all_backends
from gated_delta._gates import Gates
from gated_delta._op import explain, gated_delta
from gated_delta._recurrent import Recurrent
from gated_delta._types import operand_dtype

from ._random import RandomProblem
from ._run import Results, bits_for, differentiated

OUTLIER = 50
"""No element may be off by more than this many budgets of the largest expected magnitude of its array."""

UNDERFLOW = {"float16": 6.1e-5, "bfloat16": 1e-30, "float32": 1e-30, "float64": 0.0}
"""Added to the size of what is expected, by the dtype of the result: float32 rounds what is below 1e-38 to 0, and
float16 what is below 6.1e-5 to a multiple of 6e-8."""

_INPUTS = ("q", "k", "v", "log_decay", "erase", "write", "initial_state")


def backends() -> tuple[AbstractBackend, ...]:
    """Every backend of the package with its default options."""
    return _all_backends()


def why_not(backend: AbstractBackend, problem: RandomProblem) -> str | None:
    """Why `backend` cannot run `problem`, or `None` if it can."""
    arguments = problem.arguments()
    with bits_for(arguments):
        explain(**arguments)
        try:
            explain(**arguments, backend=backend)
        except ValueError as error:
            return str(error)
    return None


# ---- results ---------------------------------------------------------------------------------------------------------


def pullback(backend: AbstractBackend | None, problem: RandomProblem) -> Results:
    """Outputs and final state of `problem`, and the gradient of every array it gives, for its own random cotangents.

    Compiled once for all problems of the same shapes and promises. `backend` as in `gated_delta`.
    """
    arguments = problem.arguments()
    return results(backend, arguments, problem.cotangents(arguments["v"].dtype, state_dtype(problem)))


def results(backend: AbstractBackend | None, arguments: Mapping[str, Any], cotangents: tuple[Any, Any]) -> Results:
    """`pullback` for any arguments of `gated_delta`, and cotangents of its two results."""
    return _runner(backend)(arguments, cotangents)


@functools.cache
def _runner(backend: AbstractBackend | None):
    return differentiated(functools.partial(gated_delta, backend=backend))


def expected(problem: RandomProblem) -> Results:
    """What `pullback` should give: the recurrence in float64 on the same (rounded) inputs.

    Each document is run on its own, each value head by itself, with every gate at full width: so packing, grouping,
    owners, granularity and ties are defined here by taking arrays apart and adding their gradients up, in NumPy.
    """
    return dict(_expected(problem))


@functools.lru_cache(maxsize=256)
def _expected(problem: RandomProblem) -> Results:
    arguments = problem.arguments()
    gates = arguments["gates"]
    dtypes = arguments["v"].dtype, state_dtype(problem)
    given = {name: arguments.get(name, getattr(gates, name, None)) for name in _INPUTS}
    narrow = {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in given.items()}
    d_out, d_final = (x.astype(np.float64) for x in problem.cotangents(*dtypes))
    wide = _widen(problem, narrow)
    documents = _documents(problem)
    entry = wide.pop("initial_state")

    # a batch of [documents * value_heads] sequences with one head each, padded to few different sizes by doing nothing
    heads, length = problem.value_heads, max([len(document.positions) for document in documents], default=0)
    rows, time = _rounded_up(len(documents) * heads, _ROWS), _rounded_up(length, _TIMES)
    key_dim, value_dim = (-(-n // 8) * 8 for n in (problem.key_dim, problem.value_dim))
    dims = {"q": key_dim, "k": key_dim, "log_decay": key_dim, "erase": key_dim}
    batch = {name: np.zeros((rows, time, 1, dims.get(name, value_dim))) for name in wide}
    begin, end = (np.zeros((rows, 1, key_dim, value_dim)) for _ in range(2))
    d_read = np.zeros((rows, time, 1, value_dim))
    heads_of = [slice(index * heads, (index + 1) * heads) for index in range(len(documents))]
    for places, (row, positions, state, enters, leaves) in zip(heads_of, documents):
        for name, x in {**wide, "out": d_out}.items():
            target = d_read if name == "out" else batch[name]
            target[places, : len(positions), 0, : x.shape[-1]] = np.swapaxes(x[row, positions], 0, 1)
        begin[places, 0, : problem.key_dim, : problem.value_dim] = entry[state] if enters else 0
        end[places, 0, : problem.key_dim, : problem.value_dim] = d_final[state] if leaves else 0
    scale = problem.key_dim**-0.5 if problem.scale is None else problem.scale
    with jax.enable_x64(True):
        q, k, v, *gate_arrays = (batch[name] for name in _INPUTS[:-1])
        arguments = {"q": q, "k": k, "v": v, "initial_state": begin, "scale": np.float64(scale)}
        arguments["gates"] = Gates(*gate_arrays, erase_max=2.0)
    computed = results(Recurrent(), arguments, (d_read, end))

    read = {name: np.zeros(x.shape) for name, x in {**wide, "out": d_out}.items()}
    final, d_entry = entry.copy(), d_final.copy()  # a state whose document has no tokens passes through
    for places, (row, positions, state, enters, leaves) in zip(heads_of, documents):
        for name, target in read.items():
            source = computed["out" if name == "out" else f"d_{name}"]
            target[row, positions] = np.swapaxes(source[places, : len(positions), 0, : target.shape[-1]], 0, 1)
        if leaves:
            final[state] = computed["final_state"][places, 0, : problem.key_dim, : problem.value_dim]
        if enters:
            d_entry[state] = computed["d_initial_state"][places, 0, : problem.key_dim, : problem.value_dim]
    wanted = {"out": read.pop("out"), "final_state": final}
    gradients = _narrow(problem, {**read, "initial_state": d_entry}, narrow)
    return wanted | {f"d_{name}": x for name, x in gradients.items()}


_ROWS, _TIMES = (4, 16, 64, 256), (8, 40, 72, 136, 304)
"""Sizes that the recurrence is compiled for; what is longer is rounded up to a power of two."""


def _rounded_up(n: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= n), 1 << max(n - 1, 0).bit_length())


def widened(problem: RandomProblem) -> Results:
    """The arrays of a problem in float64 for each value head and at full width, an absent one as what it stands for."""
    arguments = problem.arguments()
    given = {name: arguments.get(name, getattr(arguments["gates"], name, None)) for name in _INPUTS}
    return _widen(problem, {name: None if x is None else np.asarray(x).astype(np.float64) for name, x in given.items()})


class _Document(NamedTuple):
    """A document with tokens: where they are, where its state is, and whether it begins with that and leaves it."""

    row: int
    positions: np.ndarray
    state: tuple[int, ...]
    enters: bool
    leaves: bool


def _documents(problem: RandomProblem) -> list[_Document]:
    ids = problem.segment_ids
    documents = []
    for row in range(problem.batch):
        present = np.unique(ids[row][ids[row] >= 0])
        for document in present:
            positions = np.flatnonzero(ids[row] == document)
            if problem.documents is None or problem.packing == "ids":
                ends = document == present[0], document == present[-1]
                documents.append(_Document(row, positions, (row,), *map(bool, ends)))
            else:
                state = (row, int(document)) if problem.packing == "slots" else (int(document),)
                documents.append(_Document(row, positions, state, True, True))
    return documents


def _widen(problem: RandomProblem, narrow: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """Every array for each value head and at full width; an absent gate as the number it stands for."""
    shape = (problem.batch, problem.time, problem.value_heads)
    dims = {name: problem.value_dim if name in ("v", "write") else problem.key_dim for name in _INPUTS}
    absent = {"log_decay": 0.0, "erase": 0.0, "write": 1.0}
    wide = {}
    for name in _INPUTS[:-1]:
        x = narrow[name]
        if name == "write" and problem.gates.tied:
            x = narrow["erase"]
        if x is None:
            wide[name] = np.full((*shape, dims[name]), absent[name])
        else:
            x = np.repeat(x, problem.value_heads // x.shape[2], axis=2)
            wide[name] = np.repeat(x, dims[name] // x.shape[3], axis=3)
    state = narrow["initial_state"]
    return {**wide, "initial_state": np.zeros(problem.state_shape) if state is None else state}


def _narrow(problem: RandomProblem, wide: Mapping[str, np.ndarray], given: Mapping[str, np.ndarray | None]) -> Results:
    """Gradients of the wide arrays added up to those of the arrays given."""

    def add(x, shape):
        batch, time, heads, dim = shape
        return x.reshape(batch, time, heads, x.shape[2] // heads, dim, x.shape[3] // dim).sum((3, 5))

    gradients = {}
    for name, x in given.items():
        if x is None:
            continue
        gradients[name] = wide[name] if name == "initial_state" else add(wide[name], x.shape)
    if problem.gates.tied:
        erase = given["erase"]
        assert erase is not None
        gradients["erase"] = gradients["erase"] + add(wide["write"], erase.shape)
    return gradients


# ---- tolerance -------------------------------------------------------------------------------------------------------


def budget(problem: RandomProblem, dtype: Any = None) -> float:
    """The largest relative error allowed to a result of `problem` that is returned in `dtype` (default: its operands').

    | operands | budget | on correlated keys | and with erase up to 2 |
    | --- | --- | --- | --- |
    | float64 | 1e-12 | 1e-12 | 1e-12 |
    | float32 | 1e-5 | 1e-5 | 1e-4 |
    | float32, `inverse="approx"` | 2e-2 | 2e-2 | refused |
    | bfloat16 | 1e-2 | 1e-1 | 5e-1 |

    Keys are correlated in every family but the first two, and for bfloat16 also where fewer than 32 channels cannot
    hold the keys of a chunk apart. Then what the tokens write cancels, and bfloat16 products keep the error: worst
    measured 6e-2 without decay and with erase 1, 3e-1 with erase 2, always in gradients; one rounding of the inputs
    alone gives up to 4e-2.

    A result returned in a narrower dtype is rounded once more: bfloat16 1e-2, float16 1e-3.
    """
    operands = _operands(problem)
    correlated = problem.keys.family not in ("independent", "some_zero")
    doubled = problem.gates.erase_max > 1
    if operands == jnp.float64:
        arithmetic = 1e-12
    elif operands == jnp.bfloat16:
        arithmetic = (0.5 if doubled else 1e-1) if correlated or problem.key_dim < 32 else 1e-2
    else:
        arithmetic = 1e-4 if doubled and correlated else 1e-5
    if problem.inverse == "approx":
        arithmetic = max(arithmetic, 2e-2)
    rounding = {"bfloat16": 1e-2, "float16": 1e-3}.get(jnp.dtype(dtype or operands).name, 0.0)
    return max(arithmetic, rounding)


def relative_error(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    problem: RandomProblem,
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """The worst error of any array, in budgets; a finite number even where `actual` is not."""
    return max(_errors(actual, expected, problem, arguments).values())


class OffBudget(AssertionError):
    """Some array is off by this many `budgets`: what `assert_close` raises."""

    def __init__(self, said: str, budgets: float):
        super().__init__(said)
        self.budgets = budgets


def assert_close(
    actual: Mapping[str, Any],
    expected: Mapping[str, Any],
    problem: RandomProblem,
    arguments: Mapping[str, Any] | None = None,
):
    """Fail if any array of `actual` is further from `expected` than its budget, or is not finite.

    The error of an array is RMS(actual - expected) / RMS(expected). Some have a floor under the latter, because they
    are what remains when large numbers cancel. With size = RMS(q * d_q) + RMS(k * d_k):

    - `out`, which adds up over key channels: 0.02 * RMS of the root of the sum of squares of what is added up, which is
        RMS(q * d_q) * sqrt(size of q / size of out) as d_out has variance 1 (found where q and k of the only token are
        nearly orthogonal, so that parts of up to 0.9 leave 0.006 at most: without a floor the float32 recurrence is off
        by 0.4 budgets there, chunks by up to 0.9 on one device and 1.9 on eight).
    - `d_log_decay`, a sum over tokens and over the channels that share a decay, which vanishes as decay does: 0.02 *
        sqrt(tokens * channels) * size. In float32 each number added up may so be off by 2e-7. Where everything is
        erased and nothing decays the sum is 1e-8: there the recurrence is off by 0.7e-7 for each number, chunks by
        1.7e-7, and one rounding of q, k and v moves the sum as far.
    - `d_erase` of a tied beta, which is what it does as erase and as write: 0.1 * RMS(v . d_v) (found where parts of 3
        leave 0.035 in the only token, off by 8e-7, a bit or two of the parts).
    - `d_erase` of any other erase gate, which adds up over value channels, and over heads and key channels that share
        it: 0.02 * RMS of the root of the sum of squares of what is added up (found where six parts of up to 0.65 leave
        0.0013 in the only element: the float32 recurrence is off by 1.7e-8 there, chunks by 3.0e-8).
    - `d_erase` of a tied beta with bfloat16 operands: 0.2 * RMS of that root; each number added up may so be off by
        half a unit in the last place of an operand (found where parts with a root of 3.7 leave 0.39, off by 0.024; to
        round the final state's cotangent alone moves it by 0.018).
    - `d_erase` with bfloat16 operands, which vanishes where every token forgets all: 1e-6 * size. A TPU kernel then
        hides all but 2e-8 of what is forgotten; worst measured 1e-7 of size for the budget of 1e-2.

    Beyond that, no element may be off by more than `OUTLIER` budgets of the largest expected magnitude.

    `arguments` hold `q` and `k` where they are not those of `problem`.

    **Raises:** `AssertionError` that names an array, its error in budgets, the budget, where it is off first, and the
        problem. It names the outputs if they are off, else the state, else the worst gradient.
    """
    errors = _errors(actual, expected, problem, arguments)
    wrong = [name for name, error in errors.items() if error > 1]
    if not wrong:
        return
    name = next((name for name in ("out", "final_state") if name in wrong), max(wrong, key=lambda name: errors[name]))
    got, want = (np.asarray(x[name]).astype(np.float64) for x in (actual, expected))
    if np.isfinite(got).all():
        limit = budget(problem, np.asarray(actual[name]).dtype)
        index = _first(np.abs(got - want) > limit * _rms(want), name)
        said = (
            f"is off by {errors[name] * limit:.2g}: {errors[name]:.3g} times its budget of {limit:g}. "
            f"At {index}, the first, there is {got[index]:.6g} instead of {want[index]:.6g}."
        )
    else:
        bad = ~np.isfinite(got)
        said = f"is not finite: {bad.sum()} of {got.size} are NaN or infinite, the first at {_first(bad, name)}."
    every = ", ".join(
        f"{key} {error:.2g}" if np.isfinite(np.asarray(actual[key]).astype(np.float64)).all() else f"{key} not finite"
        for key, error in errors.items()
    )
    raise OffBudget(f"`{name}` {said} All, in budgets: {every}. Problem: {problem!r}", max(errors.values()))


def _first(bad: np.ndarray, name: str) -> tuple[int, ...]:
    """The index of what is bad first: in time, where the array has a time axis."""
    found = np.argwhere(bad)
    first = 0 if name.endswith("_state") or bad.ndim < 2 else np.argmin(found[:, 1])
    return tuple(int(i) for i in found[first])


_INFINITE = 1e12  # an error that is no number: finite, for `hypothesis.target`


def _errors(
    actual: Mapping[str, Any], expected: Mapping[str, Any], problem: RandomProblem, arguments: Mapping[str, Any] | None
) -> dict[str, float]:
    if set(actual) != set(expected):
        raise AssertionError(f"Results have the names {sorted(actual)}, but these are expected: {sorted(expected)}.")
    errors = {}
    for name, array in actual.items():
        dtype = np.asarray(array).dtype
        limit = budget(problem, dtype)
        got, want = (np.asarray(x).astype(np.float64) for x in (array, expected[name]))
        if got.shape != want.shape:
            raise AssertionError(f"`{name}` has shape {got.shape}, but {want.shape} is expected. Problem: {problem!r}")
        floor = UNDERFLOW[dtype.name]
        if name in ("out", "d_log_decay", "d_erase"):
            floor += _floor(name, problem, want, expected, problem.arguments() if arguments is None else arguments)
        if not np.isfinite(got).all():
            errors[name] = _INFINITE
            continue
        errors[name] = _error(got, want, floor, limit)
        if name == "d_erase" and errors[name] > 1 and (share := _share_of_parts(problem)):  # only then: it takes a run
            errors[name] = _error(got, want, floor + share * _parts_of_erase(problem), limit)
    return errors


def _error(got: np.ndarray, want: np.ndarray, floor: float, limit: float) -> float:
    off = np.abs(got - want)
    rms = _ratio(_rms(off), _rms(want) + floor)
    outlier = _ratio(off.max(initial=0.0), np.abs(want).max(initial=0.0) + floor) / OUTLIER
    return min(max(rms, outlier) / limit, _INFINITE)


def _floor(name: str, problem: RandomProblem, want: np.ndarray, expected: Mapping, arguments: Mapping) -> float:
    """What `assert_close` adds to the size of these three."""

    def moved(name):
        return np.asarray(arguments[name]).astype(np.float64) * np.asarray(expected[f"d_{name}"]).astype(np.float64)

    if name == "out":
        return 0.02 * _rms(moved("q")) * math.sqrt(moved("q").size / max(want.size, 1)) if "d_q" in expected else 0.0
    size = sum(_rms(moved(name)) for name in "qk")
    if name == "d_log_decay":
        channels = problem.key_dim // max(want.shape[-1], 1)
        return 0.02 * math.sqrt(problem.time * channels) * size
    floor = 1e-6 * size if _operands(problem) == jnp.bfloat16 else 0.0
    return floor + (0.1 * _rms(np.sum(moved("v"), axis=-1)) if problem.gates.tied else 0.0)


def _share_of_parts(problem: RandomProblem) -> float:
    """How much of `_parts_of_erase` is added to the size of `d_erase`."""
    if problem.gates.tied:
        return 0.2 if _operands(problem) == jnp.bfloat16 else 0.0
    return 0.02


@functools.lru_cache(maxsize=64)
def _parts_of_erase(problem: RandomProblem) -> float:
    """RMS over `d_erase` of the root of the sum of squares of what is added up in each of its elements.

    Value channels do not see each other: with each as a head of its own, and gates of its own, none are added up.
    """
    arguments, wide = problem.arguments(), widened(problem)
    heads, key_dim, value_dim = problem.value_heads, problem.key_dim, problem.value_dim

    def repeated(x):
        return np.repeat(x, value_dim, axis=2)

    def apart(x):
        return x.reshape(*x.shape[:2], heads * value_dim, 1)

    def state_apart(x):
        return np.swapaxes(x, -1, -2).reshape(*x.shape[:-3], heads * value_dim, key_dim, 1)

    dtypes = arguments["v"].dtype, state_dtype(problem)
    d_out, d_final = (x.astype(np.float64) for x in problem.cotangents(*dtypes))
    with jax.enable_x64(True):
        gates = Gates(repeated(wide["log_decay"]), repeated(wide["erase"]), apart(wide["write"]), erase_max=2.0)
        scale = problem.key_dim**-0.5 if problem.scale is None else problem.scale
        split = {"q": repeated(wide["q"]), "k": repeated(wide["k"]), "v": apart(wide["v"]), "gates": gates}
        split |= {"initial_state": state_apart(wide["initial_state"]), "scale": np.float64(scale)}
        split |= {name: arguments[name] for name in ("segment_ids", "cu_seqlens", "num_segments") if name in arguments}
        parts = results(Recurrent(), split, (apart(d_out), state_apart(d_final)))
    batch, time, owners, dim = arguments["gates"].erase.shape
    squares = np.square(np.asarray(parts["d_erase"])).reshape(batch, time, owners, -1, dim, key_dim // dim).sum((3, 5))
    if problem.gates.tied:  # what beta does as write; `dim` is 1
        squares += np.square(np.asarray(parts["d_write"])).reshape(batch, time, owners, -1, 1).sum(3)
    return _rms(np.sqrt(squares))


def _rms(x: np.ndarray) -> float:
    return math.sqrt(float(np.mean(np.square(x)))) if x.size else 0.0


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else _INFINITE if size == 0 else error / size


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def _operands(problem: RandomProblem):
    return operand_dtype(problem.dtype, problem.dtype, problem.value_dtype or problem.dtype)


def state_dtype(problem: RandomProblem):
    return jnp.float64 if _operands(problem) == jnp.float64 else jnp.float32
