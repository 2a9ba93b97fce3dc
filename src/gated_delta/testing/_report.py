"""What came of asking: one outcome per law, as a table, as JSON and as JUnit."""

import dataclasses
import json
from typing import Any, Literal
from xml.etree import ElementTree

from ._naming import imports_of

Status = Literal["passed", "failed", "expected failure", "unexpected pass", "not offered", "interrupted"]

_STYLES = {
    "passed": "green",
    "failed": "bold red",
    "expected failure": "yellow",
    "unexpected pass": "bold red",
    "not offered": "dim",
    "interrupted": "bold yellow",
}


SIZES = ("key_dim", "value_dim", "time", "key_heads", "value_heads")
"""What a report tells of the problems that were asked."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one law.

    - `examples`: how many cases were checked. `worst`: the largest error of all that passed, in budgets.
    - `message`: why it failed, or why it was not asked (to the end, where Ctrl-C interrupted it).
    - `line`: for a failure, one line of Python that repeats its smallest case.
    - `sizes`: of the problems that were asked: `SIZES` of each.
    - `imports`: Python that makes the name of what was checked known to `line`.
    - `raised`, `given`: where the kernel raised, and the arrays of the problem, for a failure that is an exception.
    """

    law: str
    status: Status
    examples: int = 0
    worst: float = 0.0
    seconds: float = 0.0
    message: str = ""
    line: str = ""
    sizes: tuple[tuple[int, ...], ...] = ()
    imports: str = ""
    raised: str = ""
    given: str = ""

    @property
    def failure(self) -> str:
        """What is wrong, over where it was raised and the line that repeats it."""
        raised = f"raised at {self.raised}" + (f", given {self.given}" if self.given else "") if self.raised else ""
        return "\n  ".join(filter(None, (self.message or self.status, raised, self.line)))

    @property
    def repeat(self) -> str:
        """What has to be imported for `line`; nothing where there is none."""
        return f"To repeat a failure: {imports_of([self.line], [self.imports])}" if self.line else ""

    @property
    def is_good(self) -> bool:
        return self.status in ("passed", "expected failure", "not offered")

    @property
    def is_failure(self) -> bool:
        return self.status in ("failed", "unexpected pass")


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcomes of all laws for one implementation. `print` it; `to_json` and `to_junit` are for machines."""

    name: str
    outcomes: tuple[Outcome, ...]
    seed: int
    notes: tuple[str, ...] = ()
    """What else is to be said, a line each."""

    @property
    def passed(self) -> bool:
        """Nothing failed, nothing passed that was expected to fail, and something was asked, all of it to the end."""
        asked = [outcome for outcome in self.outcomes if outcome.status != "not offered"]
        return bool(asked) and all(outcome.is_good for outcome in self.outcomes)

    @property
    def examples(self) -> int:
        return sum(outcome.examples for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        return sum(outcome.seconds for outcome in self.outcomes)

    def sizes(self) -> dict[str, list[Any]]:
        """Every size that was asked; nothing where laws draw no problems of the operator."""
        asked = {size for outcome in self.outcomes for size in outcome.sizes}
        found: dict[str, list[Any]] = {name: sorted(set(column)) for name, column in zip(SIZES[:3], zip(*asked))}
        heads = [f"{keys} and {values}" for keys, values in sorted({size[3:] for size in asked})]
        return found | ({"key and value heads": heads} if heads else {})

    @property
    def summary(self) -> str:
        counts = {status: sum(o.status == status for o in self.outcomes) for status in _STYLES}
        said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
        lines = [f"{self.name}: {said}; {self.examples} examples in {self.seconds:.0f} s, seed {self.seed}"]
        if counts["not offered"] == len(self.outcomes):
            lines.append("Nothing that was asked for is offered, so nothing is shown: this does not pass.")
        sizes = "; ".join(f"{name} {', '.join(map(str, asked))}" for name, asked in self.sizes().items())
        lines += [f"Sizes asked: {sizes}."] if sizes else []
        once = sum(o.examples == 1 and o.status == "passed" for o in self.outcomes)
        if once:
            lines.append(f"{once} of the laws that passed had one example only.")
        lines += self.notes
        return "\n".join(lines)

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table: law, result, examples, worst error in budgets, seconds."""
        return [
            (
                outcome.law,
                outcome.status,
                str(outcome.examples) if outcome.examples else "",
                "" if not outcome.examples else "bits" if outcome.worst == 0 else f"{outcome.worst:.2g}",
                f"{outcome.seconds:.1f}" if outcome.examples else "",
                "" if outcome.is_failure else outcome.message,
            )
            for outcome in self.outcomes
        ]

    def failures(self) -> list[str]:
        """Every failure: what is wrong, and the line that repeats it. Laws that fail alike are one."""
        alike: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in self.outcomes:
            if outcome.is_failure:
                what = outcome.message or outcome.status
                if outcome.raised:  # one exception at one place is one failure, whatever shapes it speaks of
                    what = what.partition(":")[0]
                alike.setdefault((outcome.raised, what), []).append(outcome)
        found = [f"{', '.join(o.law for o in outcomes)}: {outcomes[0].failure}" for outcomes in alike.values()]
        shown = [outcomes[0] for outcomes in alike.values() if outcomes[0].line]
        imports = imports_of([o.line for o in shown], [o.imports for o in shown])
        return [f"To repeat a failure: {imports}", *found] if shown else found

    def __str__(self) -> str:
        rows = [COLUMNS, *self.rows()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        return "\n".join([self.summary, "", *lines, *(f"\n{failure}" for failure in self.failures())])

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(self.table(), Text(f"\n{self.summary}"))

    def table(self) -> Any:
        """For rich; `summary` and `failures` are for printing without a line break, so that they can be copied."""
        from rich.table import Table
        from rich.text import Text

        table = Table(title=self.name, title_justify="left", show_edge=False, pad_edge=False)
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in COLUMNS[2:5] else "left", overflow="fold")
        for row in self.rows():
            table.add_row(row[0], Text(row[1], _STYLES[row[1]]), *row[2:])
        return table

    def to_json(self) -> str:
        fields = [dataclasses.asdict(outcome) for outcome in self.outcomes]
        outcomes = [{name: x for name, x in outcome.items() if name != "sizes"} for outcome in fields]
        record = {"name": self.name, "passed": self.passed, "seed": self.seed, "notes": self.notes}
        return json.dumps({**record, "sizes": self.sizes(), "outcomes": outcomes}, indent=2)

    def to_junit(self) -> str:
        bad = [outcome for outcome in self.outcomes if not outcome.is_good]
        idle = [outcome for outcome in self.outcomes if outcome.status in ("not offered", "expected failure")]
        suite = ElementTree.Element(
            "testsuite",
            name=f"gated-delta: {self.name}",
            tests=str(len(self.outcomes)),
            failures=str(len(bad)),
            errors="0",
            skipped=str(len(idle)),
            time=f"{self.seconds:.3f}",
        )
        for outcome in self.outcomes:
            case = ElementTree.SubElement(
                suite, "testcase", classname=self.name, name=outcome.law, time=f"{outcome.seconds:.3f}"
            )
            if outcome in bad:
                failure = ElementTree.SubElement(case, "failure", message=(outcome.message or outcome.status)[:200])
                failure.text = "\n".join(filter(None, (outcome.failure, outcome.repeat)))
            elif outcome in idle:
                ElementTree.SubElement(case, "skipped", message=f"{outcome.status}: {outcome.message}"[:200])
        return ElementTree.tostring(suite, encoding="us-ascii", xml_declaration=True).decode()


COLUMNS = ("law", "result", "examples", "worst / budget", "seconds", "why")
