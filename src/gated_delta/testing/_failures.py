"""What is said of a kernel that raises: where and with what arrays, and for which kinds of gates."""

import dataclasses
import inspect
import sysconfig
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gated_delta import variants as _variants
from gated_delta._variant import Variant

from ._capabilities import gates_of
from ._compare import state_dtype
from ._implementations import Implementation
from ._random import RandomGates, RandomProblem

_TOOLKIT = Path(__file__).resolve().parent
_OTHERS = (sysconfig.get_paths()["stdlib"], "site-packages", "dist-packages")


# ---- an exception ----------------------------------------------------------------------------------------------------


def is_said_by(check: Callable[..., Any], failure: Exception) -> bool:
    """Whether a failure is what the check of a law says, and not what a kernel raises (which may assert, too)."""
    frames = traceback.extract_tb(failure.__traceback__)
    if not isinstance(failure, AssertionError) or not frames:
        return isinstance(failure, AssertionError)
    place = frames[-1].filename
    return _is_under(place, _TOOLKIT) or place == inspect.unwrap(check).__code__.co_filename


def place_of(failure: Exception) -> str:
    """File, line and function of the kernel that raised it: of the innermost call that is nobody's library."""
    frames = [
        frame
        for frame in traceback.extract_tb(failure.__traceback__)
        if not _is_under(frame.filename, _TOOLKIT)
        and not any(place in frame.filename for place in _OTHERS)
        and (not frame.filename.startswith("<") or frame.filename == "<stdin>")
    ]
    own = [frame for frame in frames if not _is_under(frame.filename, _TOOLKIT.parent)] or frames
    if not own:
        return ""
    path = Path(own[-1].filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{own[-1].lineno} in {own[-1].name}"


def message_of(failure: Exception) -> str:
    """Its kind and what it says; of a bare assertion, its line."""
    frames = traceback.extract_tb(failure.__traceback__)
    said = str(failure) or (frames[-1].line if frames else "")
    return f"{type(failure).__name__}: {said}"


def arrays_of(problem: RandomProblem, words: Mapping[str, str]) -> str:
    """The arrays of a problem with dtypes and shapes, by the names that the kernel has for them."""
    arguments = problem.arguments()
    gates = arguments.pop("gates")
    given = {name: arguments.pop(name) for name in "qkv"}
    given |= {name: getattr(gates, name) for name in ("log_decay", "erase", "write")} | arguments
    said = []
    for name, x in given.items():
        own = words.get(f"d_{name}", f"d_{name}").removeprefix("d_")
        if hasattr(x, "shape"):
            said.append(f"{own} {x.dtype}[{', '.join(map(str, x.shape))}]")
        elif x is not None:
            said.append(f"{own}={x}")
    return ", ".join(said)


def _is_under(file: str, folder: Path) -> bool:
    return Path(file).is_relative_to(folder)


# ---- gates that raise ------------------------------------------------------------------------------------------------

_WORDS = ("decay", "erase", "write", "owner", "tied")


def gates_that_raise(subject: Implementation) -> str:
    """One line on the kinds of gates that an implementation raises for, and how it is asked for the others alone.

    Nothing where it raises for none of them.
    """
    offered, kinds = subject.capabilities, {True: [], False: []}
    family = (offered.decays(("mild", "tiny", "zero")) or ["mild"])[0]
    for gates in offered.gates():
        layout = RandomProblem(time=2, key_heads=2, group=2, key_dim=4, value_dim=3, gates=gates)
        problem = offered.fit(dataclasses.replace(layout, gates=dataclasses.replace(gates, log_decays=family)))
        if problem is not None and subject.refusal(problem) is None:
            raised = _raises(subject, problem)
            if raised is not None:
                kinds[raised].append(gates)
    if not kinds[True]:
        return ""
    if not kinds[False]:
        return (
            f"{subject.name} raises for every kind of gates that it was asked for. A gate is [batch, time, heads, 1] "
            "with one number per head, and [batch, time, heads, key_dim] with one per channel."
        )
    left = {
        word: tuple(dict.fromkeys(getattr(gates, word) for gates in kinds[False]))
        for word in _WORDS
        if {getattr(gates, word) for gates in kinds[False]} < {getattr(gates, word) for gates in offered.gates()}
    }
    blamed = [
        f"{word}={name!r}"
        for word in left
        for name in dict.fromkeys(getattr(gates, word) for gates in kinds[True])
        if name not in left[word]
    ]
    count = f"{len(kinds[True])} of the {len(kinds[True]) + len(kinds[False])} kinds of gates that it was asked for"
    among = f" (those with {', '.join(blamed)})" if blamed else f", such as {kinds[True][0]!r}"
    fields = ", ".join(f"{word}={names!r}" for word, names in left.items())
    members = [name for name, gates in _members().items() if any(_same(gates, kind) for kind in kinds[False])]
    ways = [f"variants={members[:1]!r}, which is `--variant {members[0]}` on the command line"] if members else []
    ways += [f"capabilities=Capabilities({fields})"] if fields else []
    said = f" If it need not take those, ask for less: {', or '.join(ways)}." if ways else ""
    return f"{subject.name} raises for {count}{among}, and runs for the others.{said}"


def _raises(subject: Implementation, problem: RandomProblem) -> bool | None:
    """`None` if it declines the problem."""
    try:
        subject.run(problem.arguments(), problem.cotangents(problem.dtype, state_dtype(problem)))
    except NotImplementedError:
        return None
    except Exception:
        return True
    return False


def _members() -> dict[str, RandomGates]:
    """Gates of the named variants, those that are asked for most often first."""
    found = {name: gates_of(x) for name, x in vars(_variants).items() if isinstance(x, Variant)}
    return {**{name: found[name] for name in ("gdn", "kda") if name in found}, **found}


def _same(one: RandomGates, other: RandomGates) -> bool:
    return all(getattr(one, word) == getattr(other, word) for word in _WORDS)
