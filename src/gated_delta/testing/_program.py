"""Looking into compiled-to-be programs: every equation of a jaxpr, wherever it stands."""

from collections.abc import Iterator
from typing import Any

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
