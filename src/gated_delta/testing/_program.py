"""Looking into programs: every equation of a jaxpr, wherever it stands, and what a compiled program sends."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(jaxpr: Jaxpr | ClosedJaxpr) -> Iterator[JaxprEqn]:
    """Every equation of a program, those inside loops, calls and kernels included."""
    inner = jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr
    for equation in inner.eqns:
        yield equation
        for value in equation.params.values():
            for part in _parts(value):
                yield from equations(part)


def _parts(value: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    if isinstance(value, (Jaxpr, ClosedJaxpr)):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _parts(item)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective operation of a compiled program.

    **Attributes:**

    - `kind`: `"all-reduce"`, `"all-gather"`, `"all-to-all"`, `"reduce-scatter"`, `"collective-permute"` or
        `"collective-broadcast"`.
    - `shapes`: of the arrays that each device gets from it.
    - `bytes`: of these.
    - `pairs`: of a permutation, how many devices send something; else 0.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    pairs: int


_KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_CALL = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(_KINDS)})(?P<start>-start)?\(")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


def collectives(compiled: jax.stages.Compiled) -> list[Collective]:
    """What the devices of a compiled program send each other, in the order of its text.

    An operation inside of a loop is one entry, however often the loop runs.
    """
    found = []
    for line in (compiled.as_text() or "").splitlines():
        call = _CALL.search(line)
        if call is None:
            continue
        arrays = _ARRAY.findall(call["type"])
        if call["start"] and len(arrays) > 1:  # what is sent, what comes, and numbers of the runtime's
            arrays = arrays[1:2] if call["kind"] != "all-reduce" else arrays
        shapes = tuple(tuple(int(n) for n in dims.split(",") if n) for _, _, dims in arrays)
        widths = [1 if name == "pred" else max(int(bits) // 8, 1) for name, bits, _ in arrays]
        size = sum(width * math.prod(shape) for width, shape in zip(widths, shapes, strict=True))
        pairs = _PAIRS.search(line)
        found.append(Collective(call["kind"], shapes, size, pairs[1].count("},{") + 1 if pairs else 0))
    return found
