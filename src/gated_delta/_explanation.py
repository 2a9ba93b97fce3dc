"""What `explain` and `explain_attention` return."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which backend runs a call. `print` it.

    **Attributes:**

    - `chosen`: the backend that runs it.
    - `reasons`: for every backend tried, by name: `None` if it can run, else why not.
    - `problem`: the shapes, dtypes and options of the call in one line.
    - `named_only`: names of the backends that run only where a call names them.
    """

    chosen: Any
    reasons: dict[str, str | None]
    problem: str
    named_only: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self.problem]
        for name, reason in self.reasons.items():
            able = "could run, if named" if name in self.named_only else "could run"
            verdict = f"cannot run: {reason}" if reason else "runs" if name == str(self.chosen) else able
            lines.append(f"  {name}: {verdict}")
        return "\n".join(lines)


def refusal(named: Any, reason: str, explain: str) -> ValueError:
    """What a call that names a backend raises where that cannot run."""
    return ValueError(
        f"{named} cannot run: {reason}. A named backend is never replaced; `backend=None` takes the first that can "
        f"run, and `gated_delta.{explain}` lists them."
    )
