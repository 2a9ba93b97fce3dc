"""Asking an implementation for every law: `check_backend`, and `conformance_suite` for pytest."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import FlakyFailure, Unsatisfiable, UnsatisfiedAssumption

from gated_delta._variant import Variant

from ._capabilities import Capabilities
from ._implementations import Implementation, implementation
from ._random import RandomProblem
from ._report import Outcome, Report
from .laws import LAWS, Law

_SHRINKING = 20.0
"""Seconds for making a failing case small. Whatever is smallest by then is reported."""

Progress = Callable[[str, float], None]
"""Told the law that is being asked, and the share of its examples that is done."""


class ConformanceError(AssertionError):
    """Some law does not hold. `report` has all outcomes."""

    def __init__(self, report: Report):
        super().__init__(f"\n{report}")
        self.report = report


def check_backend(
    subject: Any,
    *,
    capabilities: Capabilities | None = None,
    variants: Iterable[Variant] | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    time_budget: float | None = None,
    slow: bool = False,
    x64: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Ask `subject` for every law of the operator, and report them all.

    **Arguments:**

    - `subject`: a backend, or any function: as it is where it has the signature of `plain`, else behind `plain`,
        `fla_style` or `tokamax_style`.
    - `capabilities`: what may be asked. What is left out is reported as not offered.
    - `variants`: only the gates of these.
    - `only`: names of laws; all of `LAWS` but the slow ones if `None`.
    - `expected_failures`: names of laws that are known to fail. One of them that passes is a failure too.
    - `max_examples`: cases for each law. `seed`: what they are drawn from. `time_budget`: seconds for all laws.
    - `slow`: slow laws too. `x64`: everything in float64.

    **Returns:** a `Report`; `print` it.

    **Raises:** `ConformanceError`, with the report, if any law fails. `ValueError` for a law that does not exist.
    """
    report = ask(
        implementation(subject, capabilities),
        variants=variants,
        only=only,
        expected_failures=expected_failures,
        max_examples=max_examples,
        seed=seed,
        time_budget=time_budget,
        slow=slow,
        x64=x64,
        progress=progress,
    )
    if not report.passed:
        raise ConformanceError(report)
    return report


def check_law(name: str, subject: Any, **case: Any) -> float:
    """Check one case of one law: what the line of a failure does. The worst error in budgets.

    **Raises:** `AssertionError` if the law does not hold for it.
    """
    _check_names([name])
    return LAWS[name].check(implementation(subject), **case)


def ask(
    subject: Implementation,
    *,
    variants: Iterable[Variant] | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    time_budget: float | None = None,
    slow: bool = False,
    x64: bool = False,
    progress: Progress | None = None,
) -> Report:
    """`check_backend` that returns the report, whatever is in it."""
    names = [name for name, law in LAWS.items() if slow or not law.is_slow] if only is None else list(only)
    _check_names([*names, *expected_failures])
    subject = limited(subject, variants, x64)
    end, outcomes = None if time_budget is None else time.monotonic() + time_budget, []
    for index, name in enumerate(names):
        seconds = None if end is None else max(0.0, end - time.monotonic()) / (len(names) - index)
        outcome = ask_law(LAWS[name], subject, max_examples=max_examples, seed=seed, seconds=seconds, progress=progress)
        outcomes.append(_as_expected(outcome, name in expected_failures))
    return Report(subject.name, tuple(outcomes), seed)


def limited(subject: Implementation, variants: Iterable[Variant] | None, x64: bool) -> Implementation:
    """The implementation with less to be asked of it."""
    offered = subject.capabilities
    if variants is not None:
        wanted = Capabilities.of(*variants)
        words = {name: getattr(wanted, name) for name in ("decay", "erase", "write", "owner", "tied")}
        both = {name: tuple(word for word in getattr(offered, name) if word in given) for name, given in words.items()}
        missing = [name for name, given in both.items() if not given]
        if missing:
            raise ValueError(f"{subject.name} offers no gate of these variants: nothing is left of {missing[0]}.")
        offered = dataclasses.replace(offered, **both, erase_max=min(offered.erase_max, max(wanted.erase_max, 1.0)))
    if x64:
        offered = dataclasses.replace(offered, dtypes=("float64",))
    if offered == subject.capabilities:
        return subject
    others = {name: dataclasses.replace(other, capabilities=offered) for name, other in subject.variations.items()}
    return dataclasses.replace(subject, capabilities=offered, variations=others)


def ask_law(
    law: Law,
    subject: Implementation,
    *,
    max_examples: int = 25,
    seed: int = 0,
    seconds: float | None = None,
    shrink: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Check `max_examples` cases of one law, and make a failing one small."""
    cases = law.cases(subject)
    if isinstance(cases, str):
        return Outcome(law.name, "not offered", message=cases)
    begin = time.monotonic()
    state = _Asking(law, subject, None if seconds is None else begin + seconds, max_examples, progress)
    phases = [Phase.generate, Phase.target, *([Phase.shrink] if shrink else [])]
    # A new shape compiles for seconds and a problem that an implementation declines is drawn again: health checks
    # would call the first too slow and the second a filter that is too strict.
    settings = hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        phases=phases,
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
    )
    message = ""
    try:
        hypothesis.seed(seed)(settings(hypothesis.given(cases)(state.check)))()
    except (Unsatisfiable, UnsatisfiedAssumption):
        pass
    except FlakyFailure:
        message = f"It fails and then passes on the same input: {state.message}"
    except Exception:
        message = state.message
    taken = time.monotonic() - begin
    if state.failing is not None:
        return Outcome(law.name, "failed", state.examples, state.worst, taken, message or state.message, state.line())
    if not state.examples:
        if state.is_late:
            return Outcome(law.name, "out of time", seconds=taken, message="no time was left for a single example")
        return Outcome(law.name, "not offered", seconds=taken, message=state.refused or "no case can be drawn")
    return Outcome(law.name, "passed", state.examples, state.worst, taken)


class _Asking:
    """The function that Hypothesis calls, and what it has seen."""

    def __init__(self, law: Law, subject: Implementation, end: float | None, total: int, progress: Progress | None):
        self.law, self.subject, self.end, self.total, self.progress = law, subject, end, total, progress
        self.examples, self.worst, self.refused, self.message = 0, 0.0, "", ""
        self.failing: dict[str, Any] | None = None
        self.give_up: float | None = None
        self.is_late = False

    def check(self, case):
        now = time.monotonic()
        if self.failing is not None:
            if self.give_up is not None and now > self.give_up and case != self.failing:
                hypothesis.reject()
        elif self.end is not None and now > self.end:
            self.is_late = True
            hypothesis.reject()
        if isinstance(case.get("problem"), RandomProblem):
            reason = self.subject.refusal(case["problem"])
            if reason is not None:
                self.refused = reason
                hypothesis.reject()
        try:
            error = float(self.law.check(self.subject, **case))
        except NotImplementedError as unoffered:
            self.refused = str(unoffered)
            hypothesis.reject()
        except UnsatisfiedAssumption:
            raise
        except Exception as failure:
            said = str(failure) if isinstance(failure, AssertionError) else f"{type(failure).__name__}: {failure}"
            self.failing, self.message = case, said
            self.give_up = self.give_up or now + _SHRINKING
            raise
        if self.failing is None:
            self.examples += 1
            self.worst = max(self.worst, error)
            if self.progress is not None:
                self.progress(self.law.name, min(1.0, self.examples / self.total))
        hypothesis.target(error)

    def line(self) -> str:
        assert self.failing is not None
        case = "".join(f", {name}={value!r}" for name, value in self.failing.items())
        return f'check_law("{self.law.name}", {self.subject.name}{case})'


def _as_expected(outcome: Outcome, expected: bool) -> Outcome:
    if not expected:
        return outcome
    if outcome.status == "failed":
        return dataclasses.replace(outcome, status="expected failure")
    if outcome.status == "passed":
        message = "this law passes: take it out of `expected_failures`"
        return dataclasses.replace(outcome, status="unexpected pass", message=message)
    return outcome


def _check_names(names: Iterable[str]):
    unknown = [name for name in names if name not in LAWS]
    if unknown:
        raise ValueError(f"There is no law {unknown[0]!r}. The laws are: {', '.join(LAWS)}.")


def conformance_suite(
    subject: Any,
    *,
    capabilities: Capabilities | None = None,
    variants: Iterable[Variant] | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    slow: bool = False,
    x64: bool = False,
) -> Callable[..., None]:
    """A pytest test for every law: `test_mine = conformance_suite(my_backend)` in a file of tests is all it takes.

    Arguments as for `check_backend`. A law that is not offered is skipped with its reason; an expected failure is an
    xfail, and fails when it passes.
    """
    import pytest

    checked = limited(implementation(subject, capabilities), variants, x64)
    names = [name for name, law in LAWS.items() if slow or not law.is_slow] if only is None else list(only)
    _check_names([*names, *expected_failures])

    @pytest.mark.parametrize("law", names)
    def test_conformance(law: str):
        outcome = ask_law(LAWS[law], checked, max_examples=max_examples, seed=seed)
        outcome = _as_expected(outcome, law in expected_failures)
        if outcome.status == "not offered":
            pytest.skip(outcome.message)
        if outcome.status == "expected failure":
            pytest.xfail(outcome.message)
        if not outcome.is_good:
            pytest.fail(f"{outcome.message}\n  {outcome.line}", pytrace=False)

    return test_conformance
