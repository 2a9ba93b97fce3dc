"""What a law is, and what laws share: cases to draw, comparisons, and arguments with something planted in them."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from gated_delta.testing._capabilities import Capabilities
from gated_delta.testing._compare import assert_close, expected, relative_error, state_dtype
from gated_delta.testing._implementations import Implementation
from gated_delta.testing._random import KEY_FAMILIES, STRENGTH_FAMILIES, RandomProblem, enough_bits
from gated_delta.testing._run import GATES, Results
from gated_delta.testing._strategies import problems

Cases = st.SearchStrategy[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Law:
    """A claim about every implementation, and how a case of it is checked.

    - `claim`: one sentence. `formula`: the same in LaTeX.
    - `cases`: for an implementation, a strategy of keyword arguments of `check`, or why nothing can be asked.
    - `check`: `check(implementation, **case)` gives the worst error in budgets (0 where bits must be equal), or raises
        `AssertionError` that says what is wrong.
    - `first`: the cases that are asked before any that is drawn; of them the `ALWAYS` first whatever the time.
    """

    name: str
    claim: str
    formula: str
    cases: Callable[[Any], Cases | str]
    check: Callable[..., float]
    first: Callable[[Any], list[dict[str, Any]]] = lambda subject: []


LAWS: dict[str, Law] = {}
"""Every law by its name, in the order in which they are asked."""


ALWAYS = 3
"""Of the first cases of a law so many are asked whatever the time: groups of heads, real dimensions, many tokens."""


def law(
    claim: str,
    formula: str,
    cases: Callable[[Any], Cases | str],
    *,
    first: Callable[[Any], list[dict[str, Any]]] = lambda subject: [],
    registry: dict[str, Law] = LAWS,
):
    """Make the decorated check a law that is called as the function is."""

    def register(check):
        registry[check.__name__] = Law(check.__name__, claim, formula, cases, check, first)
        return check

    return register


# ---- cases -----------------------------------------------------------------------------------------------------------

MILD_KEYS = KEY_FAMILIES[:2]
MILD_DECAYS = ("mild", "tiny", "zero")


def some_problems(
    subject: Implementation,
    where: Callable[[RandomProblem], bool] = lambda layout: True,
    *,
    packed: bool | None = False,
    keys=MILD_KEYS,
    log_decays=MILD_DECAYS,
    strengths=STRENGTH_FAMILIES,
    dtype: str | None = None,
    at_most: int | None = None,
    first: bool = False,
) -> st.SearchStrategy[RandomProblem] | str:
    """Problems that `subject` offers, of the layouts for which `where` holds; or why there are none.

    `first`: of the sizes of what is asked first, too.
    """
    offered = subject.capabilities
    layouts = (*offered.layouts(), *(offered.first() if first else ()))
    pool = [layout for layout in layouts if packed is None or packed == (layout.documents is not None)]
    if packed and not pool:
        return "packed documents are not offered"
    pool = [layout for layout in pool if where(layout)][:at_most]
    families = offered.decays(log_decays)
    if not families:
        return f"log decays that are {', '.join(log_decays)} are not offered"
    if not pool:
        return "the toolkit has no problem of this kind with what is offered"
    drawn = problems(
        layouts=pool, dtypes=[dtype or offered.dtypes[0]], keys=keys, log_decays=families, strengths=strengths
    )
    return drawn.map(lambda problem: fill_up(problem, offered))


def fill_up(problem: RandomProblem, offered: Capabilities) -> RandomProblem:
    """The problem without padding, where that is not offered: the last document of each row takes the rest."""
    if problem.documents is None or offered.padding:
        return problem
    rows = []
    for row in problem.documents:
        kept = [n for n in row if n >= 0] or [0]
        rows.append((*kept[:-1], problem.time - sum(kept[:-1])))
    slots = problem.slots if problem.slots is None else max(problem.slots, *(len(row) for row in rows))
    return dataclasses.replace(problem, documents=tuple(rows), slots=slots)


def cut_up(problem: RandomProblem, seed: int = 0) -> RandomProblem:
    """The problem with its rows cut anew into as many documents as have own states, or 3.

    Half of the cuts are anywhere, half where chunks of 16 or 64 tokens begin. Any change of the problem gives others:
    what Hypothesis draws is often a copy with few changes.
    """
    assert problem.documents is not None
    rng, rows = np.random.default_rng((zlib.crc32(repr(problem).encode()), seed)), []
    for row in problem.documents:
        count = {"ids": 3, "slots": problem.slots or 0, "offsets": len(row)}[problem.packing]
        cuts = rng.integers(0, problem.time + 1, max(count - 1, 0))
        chunks = rng.choice([size for size in (16, 64) if size < problem.time] or [1], cuts.shape)
        cuts = np.sort(np.where(rng.uniform(size=cuts.shape) < 0.5, -(-cuts // chunks) * chunks, cuts))
        cuts = np.minimum(cuts, problem.time)
        rows.append(tuple(int(n) for n in np.diff([0, *cuts, problem.time])) if count else ())
    return dataclasses.replace(problem, documents=tuple(rows))


def cases(**strategies: Any) -> Cases | str:
    """Keyword arguments from strategies; a reason among them is the reason for all."""
    for strategy in strategies.values():
        if isinstance(strategy, str):
            return strategy
    return st.fixed_dictionaries(strategies)


def only_problems(*conditions, **options) -> Callable[[Implementation], Cases | str]:
    return lambda subject: cases(problem=some_problems(subject, *conditions, **options))


def first_problems(subject: Implementation) -> list[dict[str, Any]]:
    return [{"problem": problem} for problem in subject.capabilities.first()]


def and_then(problem: st.SearchStrategy[RandomProblem] | str, **more: Callable[[RandomProblem], Any]) -> Cases | str:
    """A problem and what is drawn for it."""
    if isinstance(problem, str):
        return problem
    return problem.flatmap(
        lambda problem: st.fixed_dictionaries(
            {"problem": st.just(problem), **{name: strategy(problem) for name, strategy in more.items()}}
        )
    )


# ---- running and comparing -------------------------------------------------------------------------------------------


def cotangents_of(problem: RandomProblem) -> tuple[np.ndarray, np.ndarray]:
    return problem.cotangents(problem.value_dtype or problem.dtype, state_dtype(problem))


def run(subject: Implementation, problem: RandomProblem) -> Results:
    return subject.run(problem.arguments(), cotangents_of(problem))


def wanted(subject: Implementation, problem: RandomProblem) -> Results:
    """`expected`, without what the implementation does not offer."""
    offered = subject.capabilities
    return {
        name: x
        for name, x in expected(problem).items()
        if (name != "final_state" or offered.final_state) and (not name.startswith("d_") or offered.gradients)
    }


def forward(found: Results) -> Results:
    return {name: x for name, x in found.items() if not name.startswith("d_")}


def backward(found: Results) -> Results:
    return {name: x for name, x in found.items() if name.startswith("d_")}


def agree(
    actual: Mapping[str, Any],
    wanted: Mapping[str, Any],
    problem: RandomProblem,
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """The worst error in budgets, if that is at most 1."""
    error = relative_error(actual, wanted, problem, arguments)
    if error > 1:
        assert_close(actual, wanted, problem, arguments)
    return error


def same_bits(actual: Any, wanted: Any, what: str):
    actual, wanted = np.asarray(actual), np.asarray(wanted)
    if actual.shape != wanted.shape:
        raise AssertionError(f"{what} has shape {actual.shape} instead of {wanted.shape}.")
    if not np.array_equal(actual, wanted, equal_nan=actual.dtype.kind != "V"):
        differ = ~((actual == wanted) | ((actual != actual) & (wanted != wanted)))
        index = tuple(int(i) for i in np.argwhere(differ)[0])
        raise AssertionError(
            f"{what} must not change by a bit, but {differ.sum()} of {actual.size} numbers do: at {index} there is "
            f"{actual[index]} instead of {wanted[index]}."
        )


# ---- changing arguments ----------------------------------------------------------------------------------------------


def tokens(arguments: Mapping[str, Any], change: Callable[[np.ndarray], Any]) -> dict[str, Any]:
    """The arguments with every array of tokens, `[batch, time, ...]`, changed."""
    changed = {
        name: jax.tree.map(lambda x: change(np.asarray(x)), arguments[name]) for name in ("q", "k", "v", "gates")
    }
    if "segment_ids" in arguments:
        changed["segment_ids"] = change(np.asarray(arguments["segment_ids"]))
    return {**arguments, **changed}


def fill(x: Any, where: np.ndarray, value: float) -> np.ndarray:
    """`x` `[batch, time, ...]` with `value` where `where` `[batch, time]` says."""
    x = np.asarray(x)
    return np.where(where.reshape(*where.shape, *(1,) * (x.ndim - 2)), np.asarray(value).astype(x.dtype), x)


def with_gates(arguments: Mapping[str, Any], **gates: Any) -> dict[str, Any]:
    """The arguments with some gates changed, their tie and promises kept."""
    with enough_bits(*(x.dtype for x in gates.values())):
        return {**arguments, "gates": dataclasses.replace(arguments["gates"], **gates)}


def gate_names(arguments: Mapping[str, Any]) -> list[str]:
    return [name for name in GATES if getattr(arguments["gates"], name) is not None]


def needs(condition: bool):
    """Draw another case unless it holds."""
    if not condition:  # where it holds, `check_law` may be outside of a property test, of which Hypothesis would warn
        assume(False)
