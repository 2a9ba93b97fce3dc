"""Asking an implementation for every law: `check_backend`, and `conformance_suite` for pytest."""

import dataclasses
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity
from hypothesis.errors import FlakyFailure, Unsatisfiable, UnsatisfiedAssumption

from gated_delta._chunked import Chunked
from gated_delta._variant import Variant

from ._capabilities import Capabilities
from ._compare import OffBudget
from ._failures import arrays_of, gates_that_raise, is_said_by, message_of, place_of
from ._implementations import Implementation, implementation
from ._naming import line_of
from ._own_step import OwnStep, describe_gates
from ._random import RandomGates, RandomProblem
from ._report import SIZES, Outcome, Report
from ._smaller import size, smaller
from ._subjects import is_variant, variant_subject
from .laws import ALWAYS, LAWS, LAYER_LAWS, STEP_LAWS, Cases, Law, Layer, found_gates

_PATIENCE = 60.0
"""Seconds after which a law that is still being asked says so."""

_SHRINKING = 20.0
"""Seconds for making a failing case small, or as many as its law had, where that is less (but 1). Half of them are for
Hypothesis, which stays within the shapes of the law; then other shapes are tried. The smallest by then is reported."""

_PLAINLY_WRONG = 10.0
"""Budgets by which a smaller case must be off, where the first one was by more than twice that: rounding that exceeds
its budget by little is another failure."""

ALL_LAWS = {**LAWS, **LAYER_LAWS, **STEP_LAWS}

Progress = Callable[[str, float], None]
"""Told the law that is being asked, and the share of its examples that is done."""


class ConformanceError(AssertionError):
    """Some law does not hold. `report` has all outcomes."""

    def __init__(self, report: Report):
        super().__init__(f"\n{report}")
        self.report = report


class Interrupted(KeyboardInterrupt):
    """Ctrl-C came while laws were asked. `report` has what was found by then."""

    def __init__(self, report: Report):
        super().__init__(f"\n{report}")
        self.report = report


def check_backend(
    subject: Any,
    *,
    capabilities: Capabilities | None = None,
    variants: Iterable[Variant | str] | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    time_budget: float | None = None,
    x64: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Ask `subject` for every law of the operator, and report them all.

    **Arguments:**

    - `subject`: a backend, or any function: as it is where it has the signature of `plain`, else behind `plain`,
        `fla_style` or `tokamax_style`.
    - `capabilities`: what may be asked. What is left out is reported as not offered.
    - `variants`: only the gates of these: records, or names such as `"kda"`.
    - `only`: names of laws; all of `LAWS` if `None`.
    - `expected_failures`: names of laws that are known to fail. One of them that passes is a failure too.
    - `max_examples`: cases for each law. `seed`: what they are drawn from. `time_budget`: seconds for all laws;
        at least one example of each is checked.
    - `x64`: everything in float64.

    **Returns:** a `Report`; `print` it.

    **Raises:** `ConformanceError`, with the report, if any law fails. `ValueError` for a law that does not exist.
        Ctrl-C is a `KeyboardInterrupt` whose `report` has what was found by then.
    """
    report = ask(
        implementation(subject, capabilities),
        variants=variants,
        only=only,
        expected_failures=expected_failures,
        max_examples=max_examples,
        seed=seed,
        time_budget=time_budget,
        x64=x64,
        progress=progress,
    )
    if not report.passed:
        raise ConformanceError(report)
    return report


def check_law(name: str, subject: Any, *, model: int | None = None, **case: Any) -> float:
    """Check one case of one law: what the line of a failure does. The worst error in budgets.

    `model`: as for `check_variant`.

    **Raises:** `AssertionError` if the law does not hold for it.
    """
    check_names([name], ALL_LAWS)
    checked = implementation(subject) if name in LAWS else variant_subject(subject, model=model)
    return ALL_LAWS[name].check(checked, **case)


def ask(
    subject: Implementation,
    *,
    variants: Iterable[Variant | str] | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    time_budget: float | None = None,
    x64: bool = False,
    progress: Progress | None = None,
) -> Report:
    """`check_backend` that returns the report, whatever is in it."""
    check_names(LAWS if only is None else only)
    check_names(expected_failures)
    subject = limited(subject, variants, x64)
    return ask_all(
        subject,
        [(LAWS[name], subject) for name in (LAWS if only is None else only)],
        expected_failures=expected_failures,
        max_examples=max_examples,
        seed=seed,
        time_budget=time_budget,
        progress=progress,
    )


def ask_all(
    subject: Any,
    laws: Sequence[tuple[Law, Any]],
    *,
    expected_failures: Collection[str] = (),
    max_examples: int,
    seed: int,
    time_budget: float | None,
    progress: Progress | None,
) -> Report:
    """The report about `subject`: each law is asked of the implementation, the `Layer` or the `OwnStep` beside it.

    **Raises:** `Interrupted`, with what was found until Ctrl-C came.
    """
    end, outcomes = None if time_budget is None else time.monotonic() + time_budget, []

    def report(notes: Sequence[str] = ()) -> Report:
        said = filter(None, (getattr(subject, "note", ""), *notes))
        return Report(subject.name, tuple(outcomes), seed, tuple(said))

    for index, (law, asked) in enumerate(laws):
        seconds = None if end is None else max(0.0, end - time.monotonic()) / (len(laws) - index)
        asking = _Asking(law, asked, max_examples, seconds, progress)
        try:
            asking.run(seed)
        except KeyboardInterrupt as stop:
            outcomes.append(_as_expected(asking.outcome(interrupted=True), law.name in expected_failures))
            outcomes += [Outcome(law.name, "interrupted", message="not asked") for law, _ in laws[index + 1 :]]
            raise Interrupted(report()) from stop
        outcomes.append(_as_expected(asking.outcome(), law.name in expected_failures))
    has_raised = any(outcome.raised and outcome.is_failure for outcome in outcomes)
    return report([gates_that_raise(subject)] if has_raised and isinstance(subject, Implementation) else [])


def limited(subject: Implementation, variants: Iterable[Variant | str] | None, x64: bool) -> Implementation:
    """The implementation with less to be asked of it."""
    offered = subject.capabilities
    if isinstance(variants, (str, Variant)):
        shown = repr(variants) if isinstance(variants, str) else "Variant(...)"
        raise TypeError(f"Variants are given in a list, [{shown}], but {shown} came.")
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
    subject: Any,
    *,
    max_examples: int = 25,
    seed: int = 0,
    seconds: float | None = None,
    shrink: bool = True,
    progress: Progress | None = None,
) -> Outcome:
    """Check `max_examples` cases of one law, and make a failing one small."""
    asking = _Asking(law, subject, max_examples, seconds, progress)
    asking.run(seed, shrink)
    return asking.outcome()


class _Asking:
    """One law that is asked of one subject: the function that Hypothesis calls, and what it has seen."""

    def __init__(self, law: Law, subject: Any, total: int, seconds: float | None, progress: Progress | None):
        self.law, self.subject, self.total, self.progress = law, subject, total, progress
        self.begin = time.monotonic()
        self.end = float("inf") if seconds is None else self.begin + seconds
        self.shrinking = _SHRINKING if seconds is None else min(_SHRINKING, max(1.0, seconds))
        self.taken, self.examples, self.worst, self.refused, self.message = 0.0, 0, 0.0, "", ""
        self.raised, self.given = "", ""
        self.failing: dict[str, Any] | None = None
        self.failed: set[str] = set()
        self.failed_at, self.least = float("inf"), 0.0
        self.seeds: set[int] = set()
        self.sizes: set[tuple[int, ...]] = set()
        self.kind: tuple[Any, ...] = ()

    def run(self, seed: int, shrink: bool = True):
        """Ask until there are enough examples, one fails and is small, or time is up."""
        cases = self.law.cases(self.subject)
        if isinstance(cases, str):
            self.refused = cases
            return
        if self.progress is not None:
            self.progress(self.law.name, 0.0)
        said = f"gated-delta: {self.subject.name} is asked for `{self.law.name}` for more than {_PATIENCE:.0f} s."
        slow = threading.Timer(_PATIENCE, lambda: print(said, file=sys.stderr, flush=True))
        slow.daemon = True
        slow.start()
        try:
            self._ask_first()
            if self.examples < self.total if self.failing is None else shrink:
                self._ask_drawn(cases, seed, shrink)
            if self.failing is not None and shrink:
                self._try_other_shapes()
        finally:
            slow.cancel()
            self.taken = time.monotonic() - self.begin

    def _ask_first(self):
        """The first cases of the law, until one fails or time is up: some of them are asked whatever the time."""
        for index, case in enumerate(self.law.first(self.subject)[: self.total]):
            if index >= ALWAYS and time.monotonic() > self.end:
                return
            try:
                self._ask(case)
            except UnsatisfiedAssumption:
                continue
            except Exception:
                if self.failing is None:
                    raise
                return

    def _ask_drawn(self, cases: Cases, seed: int, shrink: bool):
        """Cases that Hypothesis draws, which after a failure are for one that is smaller and fails alike."""
        # A new shape compiles for seconds and a problem that an implementation declines is drawn again: health checks
        # would call the first too slow and the second a filter that is too strict.
        settings = hypothesis.settings(
            max_examples=self.total - self.examples if self.failing is None else self.total,
            deadline=None,
            derandomize=False,  # which a CI machine's own profile would turn on: the seed decides
            database=None,
            phases=[Phase.generate, Phase.target, *([Phase.shrink] if shrink else [])],
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
        )
        try:
            hypothesis.seed(seed)(settings(hypothesis.given(cases)(self._example)))()
        except (Unsatisfiable, UnsatisfiedAssumption):
            pass
        except FlakyFailure:
            self.message = f"It fails and then passes on the same input: {self.message}"
        except Exception:
            if self.failing is None:
                raise

    def outcome(self, interrupted: bool = False) -> Outcome:
        """What came of it; `interrupted` if it was not asked to the end."""
        seen = self.examples, self.worst, self.taken
        sizes = tuple(sorted(self.sizes))
        if self.failing is not None:
            line = line_of(self.law.name, self.subject, self.failing)
            imports = getattr(self.subject, "imports", "")
            return Outcome(self.law.name, "failed", *seen, self.message, line, sizes, imports, self.raised, self.given)
        if interrupted:
            said = f"after {self.examples} of {self.total} examples"
            return Outcome(self.law.name, "interrupted", *seen, said, sizes=sizes)
        if not self.examples:
            why = self.refused or "no case can be drawn"
            return Outcome(self.law.name, "not offered", seconds=self.taken, message=why)
        return Outcome(self.law.name, "passed", *seen, sizes=sizes)

    def _example(self, case: dict[str, Any]):
        """What Hypothesis calls, which replays failing cases: those are never too late."""
        now = time.monotonic()
        if self.failing is None:
            too_late = now > self.end and self.examples
        else:
            too_late = now > self.failed_at + self.shrinking / 2 and repr(case) not in self.failed
        if too_late or self._is_copy(case):
            hypothesis.reject()
        hypothesis.target(self._ask(case))

    def _ask(self, case: dict[str, Any]) -> float:
        """The error of one case.

        **Raises:** `UnsatisfiedAssumption` if it is declined, and what the law raises if it fails.
        """
        if isinstance(case.get("problem"), RandomProblem):
            reason = self.subject.refusal(case["problem"])
            if reason is not None:
                self.refused = reason
                raise UnsatisfiedAssumption
        try:
            error = self._check(case)
        except NotImplementedError as unoffered:
            self.refused = str(unoffered)
            raise UnsatisfiedAssumption from unoffered
        if self.failing is None:
            self._count(case)
            self.examples += 1
            self.worst = max(self.worst, error)
            if self.progress is not None:
                self.progress(self.law.name, min(1.0, self.examples / self.total))
        return error

    def _count(self, case: dict[str, Any]):
        problem = case.get("problem")
        if isinstance(problem, RandomProblem):
            self.sizes.add(tuple(getattr(problem, name) for name in SIZES))

    def _is_copy(self, case: dict[str, Any]) -> bool:
        """Whether it is a copy, by its seed, of a case that came before, in the half that is not steered by errors.

        Hypothesis follows what it draws by five copies with few changes, so that little else would be drawn.
        """
        seed = getattr(case.get("problem"), "seed", 0)  # 0: of laws that do not draw it, too
        if not seed or self.failing is not None or self.examples >= self.total / 2:
            return False
        copied = seed in self.seeds
        self.seeds.add(seed)
        return copied

    def _check(self, case: dict[str, Any]) -> float:
        """The error of a case. Of those that fail the smallest is kept."""
        try:
            return float(self.law.check(self.subject, **case))
        except (NotImplementedError, UnsatisfiedAssumption):
            raise
        except Exception as failure:
            if self.failing is None:
                self._count(case)
                self.failed_at, self.least = time.monotonic(), min(_budgets(failure) / 2, _PLAINLY_WRONG)
            elif _budgets(failure) < self.least or _kind(failure) != self.kind:
                raise UnsatisfiedAssumption from failure  # another failure
            self.failed.add(repr(case))
            if self.failing is None or size(case) < size(self.failing):
                self._keep(case, failure)
            raise

    def _keep(self, case: dict[str, Any], failure: Exception):
        is_plain, words = is_said_by(self.law.check, failure), getattr(self.subject, "words", {})
        said = str(failure) if is_plain else message_of(failure)
        for ours, theirs in words.items():
            said = said.replace(ours, theirs)
        self.failing, self.message, self.kind = case, said, _kind(failure)
        self.raised = "" if is_plain else place_of(failure)
        self.given = arrays_of(case["problem"], words) if self.raised and "problem" in case else ""

    def _try_other_shapes(self):
        """Go from the failing case to ever smaller ones that fail at the same line, until none does or time is up."""
        seen = set(self.failed)
        while self.failing is not None and isinstance(self.subject, Implementation):
            for case in smaller(self.failing, self.subject.capabilities):
                if time.monotonic() > self.failed_at + self.shrinking:
                    return
                if repr(case) not in seen and self.subject.refusal(case["problem"]) is None:
                    seen.add(repr(case))
                    if self._fails_alike(case):
                        break
            else:
                return

    def _fails_alike(self, case: dict[str, Any]) -> bool:
        try:
            self.law.check(self.subject, **case)
        except Exception as failure:
            if _kind(failure) == self.kind and _budgets(failure) >= self.least:
                self._keep(case, failure)
                return True
        return False


def _budgets(failure: Exception) -> float:
    """By how many budgets a case is off; infinitely many, where its law does not say."""
    return failure.budgets if isinstance(failure, OffBudget) else float("inf")


def _kind(failure: Exception) -> tuple[Any, ...]:
    """What two failures have in common: the type, and the line that raised it."""
    place = failure.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return type(failure), place and (place.tb_frame.f_code.co_filename, place.tb_lineno)


def _as_expected(outcome: Outcome, expected: bool) -> Outcome:
    if not expected:
        return outcome
    if outcome.status == "failed":
        return dataclasses.replace(outcome, status="expected failure")
    if outcome.status == "passed":
        message = "this law passes: take it out of `expected_failures`"
        return dataclasses.replace(outcome, status="unexpected pass", message=message)
    return outcome


def check_names(names: Collection[str], laws: Mapping[str, Law] = LAWS):
    if isinstance(names, str):
        raise TypeError(f"Laws are named in a list, [{names!r}], but the word {names!r} came.")
    unknown = [name for name in names if name not in laws]
    if unknown and unknown[0] in ALL_LAWS:
        asks = "check_backend" if unknown[0] in LAWS else "check_variant"
        raise ValueError(f"{unknown[0]!r} is no law of what is checked here: `{asks}` asks for it.")
    if unknown:
        raise ValueError(f"There is no law {unknown[0]!r}. The laws are: {', '.join(laws)}.")


_OF_GATES = ("recurrence", "gradients", "extreme_gates", "ill_conditioned_keys", "reductions")
"""The laws of the operator that a `Variant` is asked for beside those of its layer: they depend on its gates."""


def check_variant(
    subject: Any,
    *,
    gates: RandomGates | str | None = None,
    chunked: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    initial_state: Callable[[], Any] | None = None,
    model: int | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 10,
    seed: int = 0,
    time_budget: float | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check a new member of the family: a record, a layer, or a one-token update.

    **Arguments:**

    - `subject`: one of
        - a `Variant` or its name, `"kda"`, or a `MixerConfig`: the layer it describes is built and checked, and the
            operator with its gates;
        - a layer, or its constructor `make(key=...)`: anything with the call, `step` and `init_state` of
            `GatedDeltaMixer`;
        - `step(state, token)`, which gives `(state, out)` for one `Token` of one head: the gates that express it are
            found, or the token is shown where it departs from the family.
    - `gates`: for a step, the gates that its tokens have: a `RandomGates`, or the name of one of `MEMBERS`, `"kda"`. A
        token with a tied gate has it as `erase`, and no `write`.
    - `chunked`: for a step, a function `chunked(state, tokens)` of many tokens, time first, that gives
        `(state, outs)`. It is checked against the step, in the family or not.
    - `initial_state`: for a step whose state is more than one array, what makes the first.
    - `model`: the size of a layer's inputs, where it has no `config.model`.
    - the others as for `check_backend`; laws are those of `LAYER_LAWS` or `STEP_LAWS`.

    **Returns:** a `Report`. For a step, the message of the law `family` says which gates express it.

    **Raises:** `ConformanceError`, with the report, if any law fails. A step outside the family needs
        `expected_failures={"family"}`.
    """
    checked = variant_subject(subject, gates=gates, chunked=chunked, initial_state=initial_state, model=model)
    report = ask_variant(
        checked,
        only=only,
        expected_failures=expected_failures,
        max_examples=max_examples,
        seed=seed,
        time_budget=time_budget,
        progress=progress,
    )
    if not report.passed:
        raise ConformanceError(report)
    return report


def ask_variant(
    checked: Layer | OwnStep,
    *,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    seed: int = 0,
    **options: Any,
) -> Report:
    """`check_variant` that returns the report, whatever is in it."""
    asked = _variant_laws(checked, only, expected_failures)
    report = ask_all(checked, asked, expected_failures=expected_failures, seed=seed, **options)
    if isinstance(checked, OwnStep):
        report = dataclasses.replace(report, outcomes=tuple(_with_gates(o, checked, seed) for o in report.outcomes))
    return report


def _variant_laws(
    checked: Layer | OwnStep, only: Collection[str] | None, expected_failures: Collection[str]
) -> list[tuple[Law, Any]]:
    """Each law of a layer or a step with what it is asked of: laws of its gates of our operator."""
    laws = STEP_LAWS if isinstance(checked, OwnStep) else LAYER_LAWS
    for names in (only or (), expected_failures):
        check_names(names, {**laws, **{name: LAWS[name] for name in _OF_GATES}})
    asked: list[tuple[Law, Any]] = [(law, checked) for law in laws.values()]
    if isinstance(checked, Layer) and checked.variant is not None:
        operator = implementation(Chunked(), Capabilities.of(checked.variant))
        asked += [(LAWS[name], operator) for name in _OF_GATES]
    return [(law, of) for law, of in asked if only is None or law.name in only]


def _with_gates(outcome: Outcome, step: OwnStep, seed: int) -> Outcome:
    if outcome.law != "family" or outcome.status != "passed":
        return outcome
    found = found_gates(step, step.problem(5, seed, "float64"))
    return dataclasses.replace(outcome, message=describe_gates(found))


def conformance_suite(
    subject: Any,
    *,
    capabilities: Capabilities | None = None,
    variants: Iterable[Variant | str] | None = None,
    gates: RandomGates | str | None = None,
    chunked: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    initial_state: Callable[[], Any] | None = None,
    model: int | None = None,
    only: Collection[str] | None = None,
    expected_failures: Collection[str] = (),
    max_examples: int = 25,
    seed: int = 0,
    x64: bool = False,
) -> Callable[..., None]:
    """A pytest test for every law: `test_mine = conformance_suite(my_backend)` in a file of tests is all it takes.

    The subject is one of `check_backend`; or one of `check_variant`: a `Variant`, a `MixerConfig`, a layer, or a step
    with its `gates`. Arguments as for these. A law that is not offered is skipped with its reason; an expected failure
    is an xfail, and fails when it passes.
    """
    import pytest

    if gates is not None or is_variant(subject):
        if capabilities is not None or variants is not None or x64:
            raise TypeError(
                "`capabilities`, `variants` and `x64` limit a kernel: a layer or a step is asked every law."
            )
        checked = variant_subject(subject, gates=gates, chunked=chunked, initial_state=initial_state, model=model)
        asked = {law.name: (law, of) for law, of in _variant_laws(checked, only, expected_failures)}
    else:
        kernel = limited(implementation(subject, capabilities), variants, x64)
        check_names(LAWS if only is None else only)
        check_names(expected_failures)
        asked = {name: (LAWS[name], kernel) for name in (LAWS if only is None else only)}

    @pytest.mark.parametrize("law", list(asked))
    def test_conformance(law: str):
        outcome = ask_law(*asked[law], max_examples=max_examples, seed=seed)
        outcome = _as_expected(outcome, law in expected_failures)
        if outcome.status == "not offered":
            pytest.skip(outcome.message)
        if outcome.status == "expected failure":
            pytest.xfail(outcome.message)
        if not outcome.is_good:
            pytest.fail("\n".join(filter(None, (outcome.failure, outcome.repeat))), pytrace=False)

    return test_conformance
