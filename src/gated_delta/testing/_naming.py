"""How lines of Python name what is checked, so that the line of a failure runs as it is pasted."""

import math
import re
import sys
from collections.abc import Iterable
from typing import Any

from ._capabilities import Capabilities

_IN_EVERY_LINE = ("RandomGates", "RandomKeys", "RandomProblem", "check_law")
_IN_SOME_LINES = ("Capabilities", "OwnStep", "fla_style", "plain", "tokamax_style")


def line_of(law: str, subject: Any, case: dict[str, Any]) -> str:
    """The Python that repeats a case, once `imports_of` its line is done."""
    how = getattr(subject, "how", "{name}")
    if "{name}" in how:  # a name that is more than a word, such as `peer("maxtext")`, is all of it
        how = how.replace("{name}", subject.name) if re.fullmatch(r"[\w.]+", subject.name) else subject.name
    return f'check_law("{law}", {how}{"".join(f", {name}={_code(x)}" for name, x in case.items())})'


def imports_of(lines: Iterable[str], own: Iterable[str]) -> str:
    """What the lines of failures need: names of the toolkit, and the statements `own`, which name the subjects."""
    text = " ".join(lines)
    names = {*_IN_EVERY_LINE, *(name for name in _IN_SOME_LINES if f"{name}(" in text)}
    toolkit = f"from gated_delta.testing import {', '.join(sorted(names))}"
    return "; ".join(dict.fromkeys((toolkit, *filter(None, own))))


def import_of(x: Any, name: str) -> str:
    """The statement that makes the name of a function or class known, if it stands in a module."""
    module = getattr(x, "__module__", None)
    is_global = module is not None and getattr(x, "__qualname__", None) == name
    return f"from {module} import {name.partition('.')[0]}" if is_global else ""


def imports_of_call(call: str, module: str) -> str:
    """The statements for the classes in the repr of an object, from where they are public."""
    found: dict[str, list[str]] = {}
    for name in dict.fromkeys(re.findall(r"\b([A-Z]\w*)\(", call)):
        for place in ("gated_delta", "gated_delta.pallas", module):
            if hasattr(sys.modules.get(place), name):
                found.setdefault(place, []).append(name)
                break
    return "; ".join(f"from {place} import {', '.join(names)}" for place, names in found.items())


def _code(value: Any) -> str:
    is_number = isinstance(value, float) and math.isfinite(value)
    return repr(value) if is_number or not isinstance(value, float) else f'float("{value}")'


def keywords_note(name: str, offered: Capabilities) -> str:
    """What is said of a function with `**kw`."""
    given = {"initial_state": offered.state, "scale": offered.scale, "segment_ids": "ids" in offered.packing}
    given |= {"num_segments": "slots" in offered.packing, "cu_seqlens": "offsets" in offered.packing}
    taken = ", ".join(word for word, is_given in given.items() if is_given)
    return (
        f"`**` among the parameters of {name} counts as taking every argument ({taken} here): where it ignores one, "
        "name what it takes, or limit `capabilities`."
        if taken
        else ""
    )
