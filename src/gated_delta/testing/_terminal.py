"""`gated-delta check`: progress, tables and report files."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gated_delta._backend import AbstractBackend
from gated_delta._variant import Variant

from ._capabilities import Capabilities
from ._conformance import Interrupted, ask, ask_law, ask_variant
from ._implementations import Implementation, implementation
from ._report import Report
from ._subjects import is_variant, variant_subject
from .laws import LAWS, LAYER_LAWS, STEP_LAWS, Layer


def _console() -> Console:
    """As wide as the terminal; for a file or a pipe wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, 140))


def list_laws():
    console = _console()
    for title, laws in (("operator", LAWS), ("layer", LAYER_LAWS), ("own step", STEP_LAWS)):
        width = max(len(name) for name in laws)
        console.print(f"[bold]{title}[/bold]")
        for name, law in laws.items():
            console.print(f"  {name:<{width}}  {law.claim}", highlight=False)


def check(subjects: Sequence[Any], variants: Sequence[Variant] | None, options: Any) -> int:
    """Print the report of every subject, write the files that were asked for, and give the exit code.

    Ctrl-C ends it with the report, and the files, of what was asked until then.
    """
    console, reports, is_interrupted = _console(), [], False
    end = None if options.time_budget is None else time.monotonic() + options.time_budget
    for index, subject in enumerate(subjects):
        seconds = None if end is None else max(1.0, end - time.monotonic()) / (len(subjects) - index)
        try:
            reports.append(_report(subject, variants, options, seconds, console))
        except Interrupted as stop:
            reports.append(stop.report)
            is_interrupted = True
        console.print(reports[-1].table())
        for said in (reports[-1].summary, *reports[-1].failures()):
            console.print(f"\n{said}", soft_wrap=True, markup=False, highlight=False)
        if is_interrupted:
            rest = ", ".join(map(str, subjects[index + 1 :]))
            print(f"interrupted{f'; not asked: {rest}' if rest else ''}", file=sys.stderr)
            break
    for path, text in ((options.json, _json(reports)), (options.junit, _junit(reports))):
        if path is not None:
            try:
                Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    return 130 if is_interrupted else 0 if all(report.passed for report in reports) else 1


def _report(
    subject: Any, variants: Sequence[Variant] | None, options: Any, seconds: float | None, console: Console
) -> Report:
    shared: dict[str, Any] = dict(
        only=options.only,
        expected_failures=options.expected_failure,
        max_examples=options.max_examples,
        seed=options.seed,
        time_budget=seconds,
    )
    is_new = options.gates is not None or is_variant(subject)
    columns = (
        TextColumn("{task.fields[law]}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    if not is_new and _is_interpreted(subject):
        _say_how_long(implementation(subject), options, seconds, console)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        done: dict[str, float] = {}
        laws = len(options.only or (LAYER_LAWS if is_new else LAWS))
        task = bar.add_task("", total=laws, law="")

        def progress(law: str, share: float):
            done[law] = share
            bar.update(task, total=max(laws, len(done)), completed=len(done) - 1 + share, law=law)

        shared["progress"] = progress
        if is_new:
            if limits(options):
                raise ValueError("--dtypes, --without and sizes limit a kernel: a layer or a step is asked every law")
            return ask_variant(_named(variant_subject(subject, gates=options.gates), subject, options), **shared)
        checked = _named(_limited(subject, limits(options)), subject, options)
        return ask(checked, **shared, variants=variants, x64=options.x64)


def _named(checked: Any, subject: Any, options: Any) -> Any:
    """What was typed is what its lines say."""
    if options.target is None or isinstance(subject, AbstractBackend):
        return checked
    module, _, path = options.target.partition(":")
    is_made = isinstance(subject, Implementation) or isinstance(checked, Layer)  # the object of that name is it
    how = "{name}" if is_made else checked.how
    return dataclasses.replace(checked, name=path, imports=f"from {module} import {path.partition('.')[0]}", how=how)


def limits(options: Any) -> dict[str, Any]:
    """Fields of `Capabilities` that were typed."""
    given = {
        name: getattr(options, name) for name in ("dtypes", "key_dims", "value_dims", "time_multiple", "max_decay")
    }
    without = {name: () if name == "packing" else False for name in options.without}
    return {name: x for name, x in given.items() if x is not None} | without


def _limited(subject: Any, less: dict[str, Any]) -> Implementation:
    if not less:
        return implementation(subject)
    if isinstance(subject, Implementation):
        if {"gradients", "final_state"} & set(less):
            raise ValueError(
                "what has no gradients or final state says so where its adapter is called: `capabilities=...`"
            )
        return dataclasses.replace(subject, capabilities=dataclasses.replace(subject.capabilities, **less))
    if isinstance(subject, AbstractBackend):
        return implementation(subject, Capabilities(**less))
    return implementation(subject, Capabilities.from_signature(subject, **less))


def _is_interpreted(subject: Any) -> bool:
    return isinstance(subject, AbstractBackend) and bool(getattr(subject, "interpret", False))


def _say_how_long(checked: Implementation, options: Any, seconds: float | None, console: Console):
    """A kernel in an interpreter takes seconds for what others do in milliseconds."""
    laws, begin = len(options.only or LAWS), time.monotonic()
    ask_law(LAWS["shapes"], checked, max_examples=2, seed=options.seed, shrink=False)
    minutes = (time.monotonic() - begin) / 2 * laws * options.max_examples / 60
    if seconds is not None:
        minutes = min(minutes, seconds / 60)
    console.print(f"{checked.name} runs in an interpreter: up to {minutes:.0f} minutes for {laws} laws.")


def _json(reports: Sequence[Report]) -> str:
    return "[\n" + ",\n".join(report.to_json() for report in reports) + "\n]\n"


def _junit(reports: Sequence[Report]) -> str:
    declaration = "<?xml version='1.0' encoding='us-ascii'?>\n"
    suites = "\n".join(report.to_junit().partition("\n")[2] for report in reports)
    return f"{declaration}<testsuites>\n{suites}\n</testsuites>\n"
