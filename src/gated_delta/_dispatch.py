"""The only file that knows every backend: which one runs a problem, and why the others cannot."""

from typing import Any

from ._backend import AbstractBackend, AbstractStepper, Problem, check_named
from ._chunked import Chunked
from ._explanation import Explanation, refusal
from ._recurrent import Recurrent
from ._types import no_type_check


def backends() -> tuple[AbstractBackend, ...]:
    """The backends that need not be named, with their default options, in the order in which they are tried."""
    return (Chunked(), Recurrent())


def named_only() -> tuple[AbstractBackend, ...]:
    """Those that a call has to name: no chip has run `PallasTPU` yet."""
    from .pallas import PallasTPU  # takes longer than to import the rest of the package

    return (PallasTPU(),)


@no_type_check
def choose(problem: Problem, named: AbstractBackend | None) -> AbstractBackend:
    """The backend named, or else the first that can run.

    **Raises:** `TypeError` if `named` is no backend, `ValueError` if it cannot run `problem`.
    """
    if named is None:
        return next(backend for backend in backends() if backend.why_not(problem) is None)
    check_named(named)
    reason = named.why_not(problem)
    if reason is not None:
        raise refusal(named, reason, "explain")
    return named


@no_type_check
def choose_stepper(problem: Problem, state: Any, named: AbstractBackend | None) -> AbstractStepper:
    """The backend named, or else the recurrence, for one token of every row.

    **Raises:** as `choose`.
    """
    if named is None:
        return Recurrent()
    check_named(named)
    reason = _why_not_step(named, problem, state)
    if reason is not None:
        raise refusal(named, reason, "explain")
    assert isinstance(named, AbstractStepper)
    return named


def _why_not_step(backend: AbstractBackend, problem: Problem, state: Any) -> str | None:
    if isinstance(backend, AbstractStepper):
        return backend.why_not_step(problem, state)
    return "it has no form for single tokens; Recurrent and PallasTPU have"


@no_type_check
def explain_problem(problem: Problem, named: AbstractBackend | None) -> Explanation:
    check_named(named)
    reasons = {str(backend): backend.why_not(problem) for backend in _tried(named)}
    return _explanation(choose(problem, named), reasons, problem)


@no_type_check
def explain_step(problem: Problem, state: Any, named: AbstractBackend | None) -> Explanation:
    """The same of one token of every row, from `state`."""
    check_named(named)
    reasons = {str(backend): _why_not_step(backend, problem, state) for backend in _tried(named)}
    return _explanation(choose_stepper(problem, state, named), reasons, problem)


def _explanation(chosen: AbstractBackend, reasons: dict[str, str | None], problem: Problem) -> Explanation:
    return Explanation(chosen, reasons, describe(problem), tuple(map(str, named_only())))


def _tried(named: AbstractBackend | None) -> tuple[AbstractBackend, ...]:
    known = (*backends(), *named_only())
    return known if named is None else (named, *(b for b in known if b != named))


def describe(problem: Problem) -> str:
    """Shapes, dtype and gate granularities of a problem in one line."""
    batch, time, key_heads, key_dim = problem.k.shape
    owners, width = problem.v.shape[2:]

    def granularity(x, names):
        return names[0] if x is None else names.get(x.shape[-1], f"{x.shape[-1]} groups")

    decay = granularity(problem.log_decay, {0: "none", 1: "head", key_dim: "channel"})
    erase = granularity(problem.erase, {0: "none", 1: "head", key_dim: "channel"})
    write = "as erase" if problem.tied else granularity(problem.write, {0: "one", 1: "head", width: "channel"})
    return (
        f"batch {batch}, time {time}, key_heads {key_heads}, key_dim {key_dim}, "
        f"{owners} states of {key_dim} x {width}, "
        f"{problem.operand.name} operands; decay: {decay}, erase: {erase}, write: {write}; inverse: {problem.inverse}"
    )
