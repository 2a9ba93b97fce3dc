"""Smaller cases than one that fails: with fewer tokens, heads, rows and channels than the shapes that laws draw."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from ._capabilities import Capabilities
from ._random import RandomProblem


def size(case: dict[str, Any]) -> tuple[int, int]:
    """What is compared to call a case smaller: how many numbers it holds, then how long its line is."""
    problem = case.get("problem")
    return problem.numbers if isinstance(problem, RandomProblem) else 0, len(repr(case))


def smaller(case: dict[str, Any], offered: Capabilities) -> Iterator[dict[str, Any]]:
    """Cases on offer that hold fewer numbers. Each has one size that is less, but the first all except time.

    Places in the problem, such as the token at which it is cut, are kept inside it.
    """
    problem = case.get("problem")
    if not isinstance(problem, RandomProblem):
        return
    least = {"batch": 1, "key_heads": 1, "group": 1, "key_dim": 2, "value_dim": 2}
    if problem.gates.decay == "tile":
        least["key_dim"] = problem.gates.decay_tiles
    for name, dims in (("key_dim", offered.key_dims), ("value_dim", offered.value_dims)):
        least[name] = least[name] if dims is None else min(dims)
    first = 1 + any(name in case for name in ("cut", "real", "token"))
    times = [max(n, first) for n in (1, 2, 3, problem.time // 4, problem.time // 2, problem.time - 1)]
    times = [-(-n // offered.time_multiple) * offered.time_multiple for n in times]
    changes: list[dict[str, Any]] = [{**least, "state": False}, dict(least)]
    changes += [{"time": n} for n in dict.fromkeys(times)] + [{name: n} for name, n in least.items()]
    changes += [{name: 2} for name in ("batch", "key_heads", "group")] + [{"state": False}]
    for change in changes:
        less = {name: n for name, n in change.items() if n < getattr(problem, name)}
        found = _with(case, problem, less)
        if less and offered.why_not(found["problem"]) is None:
            yield found


def _with(case: dict[str, Any], problem: RandomProblem, change: dict[str, Any]) -> dict[str, Any]:
    if problem.documents is not None:
        batch, time = change.get("batch", problem.batch), change.get("time", problem.time)
        change = {**change, "documents": tuple(_cropped(row, time) for row in problem.documents[:batch])}
    changed = dataclasses.replace(problem, **change)
    last = {"cut": changed.time, "real": changed.time, "token": changed.time, "head": changed.value_heads}
    last |= {"row": changed.key_dim, "column": changed.value_dim} if "column" in case else {"row": changed.batch}
    places = {name: min(case[name], n - 1) for name, n in last.items() if name in case}
    return {**case, "problem": changed, **places}


def _cropped(lengths: tuple[int, ...], time: int) -> tuple[int, ...]:
    """Documents and padding of a row as far as its first `time` tokens hold them; the later ones are empty."""
    kept = []
    for n in lengths:
        used = min(abs(n), time)
        time -= used
        kept.append(used if n >= 0 else -used)
    return tuple(kept)
