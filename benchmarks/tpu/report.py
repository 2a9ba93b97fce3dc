"""From a function to its figures: compile it in a process of its own, execute every program, add up."""

import collections
import dataclasses
import fnmatch
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from tpu import dump
from tpu.compile import LABELS, libtpu_environment
from tpu.machine import Branch, Machine, Settle


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore. `peak` (bf16 flop/s) and `hbm` (byte/s) are the chip's published figures over its cores, `macs`
    what all its MXUs do in a cycle. The clock is not published: it is the rate at which full MXUs reach `peak`."""

    peak: float
    hbm: float
    macs: int
    delay_slots: int

    @property
    def clock(self) -> float:
        return self.peak / 2 / self.macs


CHIPS = {
    "tpu7x": Chip(peak=1153.5e12, hbm=3690e9, macs=2 * 256**2 * 2, delay_slots=6),
    "v6e": Chip(peak=918e12, hbm=1638e9, macs=2 * 256**2 * 2, delay_slots=4),
    "v5p": Chip(peak=229.5e12, hbm=1382.5e9, macs=4 * 128**2, delay_slots=4),
    "v5e": Chip(peak=197e12, hbm=819e9, macs=4 * 128**2, delay_slots=4),
}
TOP = "TLP"  # libtpu's name for the program that calls all others
# What the runtime leaves in SMEM for a program to read, by the dump's tags: core 0 of chip 0 runs it, with a seed.
RUNTIME_WORDS = {
    r"- core index$": 0,
    r"- chip ID$": 0,
    r"- program descriptor state$|0xfffa8 - tc block word$": 1,
    r"- rng seed$|0xfff80 - tc block word$": 1,
}


class Unsettled(RuntimeError):
    """Branches that hang on data, with no choice made."""


@dataclasses.dataclass(frozen=True)
class Settling:
    """A choice for the branches that match: `NAME:INDEX=run`, `=skip`, or a loop's count."""

    name: str  # of the program, a shell pattern
    index: str  # of the branch in its program, or *
    choice: str | int

    @classmethod
    def parse(cls, text: str) -> "Settling":
        match = re.fullmatch(r"(.+):(\d+|\*)=(run|skip|[1-9]\d*)", text)
        if not match:
            raise ValueError(f"{text!r} settles nothing: write NAME:INDEX=run, NAME:INDEX=skip or NAME:INDEX=COUNT.")
        name, index, choice = match.groups()
        return cls(name, index, choice if choice in ("run", "skip") else int(choice))

    def decides(self, branch: Branch) -> bool:
        if isinstance(self.choice, int) != branch.is_loop or self.index not in ("*", str(branch.index)):
            return False
        return fnmatch.fnmatchcase(branch.program, self.name)


@dataclasses.dataclass
class Counts:
    """What one call of a program costs."""

    cycles: int
    stalls: int  # of these, the cycles whose bundle is empty
    busy: dict[str, int]  # slots taken, by unit
    hbm_read: int
    hbm_written: int
    transfers: int
    settled: dict[Branch, str | int]
    unsettled: list[Branch | str]
    calls: Mapping[tuple[str, tuple[int | None, ...]], int]


class Program:
    """One dumped program: `files` are its dumps, by label."""

    def __init__(self, name: str, files: Mapping[str, pathlib.Path]):
        bundles, utilisation, allocations = (files[label].read_text(errors="replace") for label in LABELS)
        self.name = name
        self.bundles = dump.read_bundles(bundles)
        self.slots, self.rows = dump.read_utilisation(utilisation)
        self.allocations = dump.read_allocations(allocations)
        if len(self.rows) != len(self.bundles):
            raise RuntimeError(
                f"{name} has {len(self.bundles)} bundles, and {len(self.rows)} lines say what they use: libtpu writes "
                "its dumps in another form than this tool reads."
            )

    @property
    def vmem_bytes(self) -> int:
        return dump.covered_bytes([one for one in self.allocations.values() if one.space == "vmem"])

    def count(self, delay_slots: int, **settings) -> Counts:
        """Executes one call; `settings` are `Machine`'s."""
        words = {
            name: value
            for name, allocation in self.allocations.items()
            for tag, value in RUNTIME_WORDS.items()
            if re.search(tag, allocation.tag)
        }
        machine = Machine(self.name, self.bundles, delay_slots, words=words, **settings)
        ran = [(times, row) for times, row in zip(machine.run(), self.rows) if times]
        return Counts(
            cycles=sum(times for times, _ in ran),
            stalls=sum(times for times, row in ran if not any(row)),
            busy={unit: sum(times * row[i] for times, row in ran) for i, unit in enumerate(self.slots)},
            hbm_read=machine.read_bytes,
            hbm_written=machine.written_bytes,
            transfers=machine.transfers,
            settled=machine.settled,
            unsettled=[*machine.unsettled],
            calls=machine.calls,
        )


def compiled(
    function: str,
    keywords: Mapping,
    chip: str,
    folder: pathlib.Path,
    *,
    flags: Mapping[str, str] = {},
    python: str = sys.executable,
    timeout: float = 3600,
) -> dict:
    """Compiles `file.py:name(**keywords)` into `folder` with the interpreter `python`; what it recorded."""
    settings = dict(function=function, keywords=dict(keywords), chip=chip, folder=str(folder), flags=dict(flags))
    script = pathlib.Path(__file__).with_name("compile.py")
    command = [python, str(script), json.dumps(settings)]
    environment = {**os.environ, **libtpu_environment(folder)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it did not compile within {timeout:.0f} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError("it does not compile:\n" + "\n".join(lines[-25:]))
    return json.loads((folder / "compiled.json").read_text())


def schedule(
    function: str,
    chip: str,
    *,
    keywords: Mapping = {},
    settle: Sequence[Settling] = (),
    tokens: int | None = None,
    heads: int | None = None,
    keep: pathlib.Path | None = None,
    **settings,
) -> dict:
    """The figures of `file.py:name(**keywords)` on one TensorCore of `chip`, as data that JSON can hold.

    `settle`, `tokens` and `heads` go before what the function says itself; `keep` is a new folder that keeps the dumps;
    `settings` are those of `compiled`. Raises `Unsettled` where the figures hang on data, `RuntimeError` where it does
    not compile.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as scratch:
        folder = keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        record = compiled(function, keywords, chip, folder, **settings)
        facts, arrays, hlo = record.pop("facts"), record.pop("operands"), dump.Hlo(record.pop("hlo"))
        rules = [*settle, *map(Settling.parse, facts.get("settle", ()))]
        programs = figures(folder, hlo, CHIPS[chip], rules, arrays | facts.get("operands", {}))
    tokens, heads = tokens or facts.get("tokens"), heads or facts.get("heads")
    groups = {
        "pallas": [one for one in programs if one["kind"] == "pallas"],
        "glue": [one for one in programs if one["kind"] != "pallas"],
        "all": programs,
    }
    per = (tokens or 0) * (heads or 1)
    return {
        "function": function,
        "keywords": dict(keywords),
        "chip": chip,
        "tokens": tokens,
        "heads": heads,
        "flags": dict(settings.get("flags", {})),
        **record,
        **{name: _total(members, per) for name, members in groups.items()},
        "programs": programs,
    }


def figures(
    folder: pathlib.Path, hlo: dump.Hlo, chip: Chip, rules: Sequence[Settling], arrays: Mapping[str, Mapping]
) -> list[dict]:
    """Of every program that ran, over all its calls. `arrays` are integer arguments, by program and index."""
    files = dump.dumped(folder, LABELS)
    unsettled: dict[Branch | str, None] = {}

    def settle(branch: Branch) -> str | int | None:
        return next((rule.choice for rule in rules if rule.decides(branch)), None)

    def counted(name: str, calls: Mapping[tuple, int], source: str) -> tuple[dict, list]:
        program = Program(name, files[source])
        known = {int(i): values for i, values in arrays.get(re.sub(r"\.\d+$", "", name), {}).items()}
        counts = _all_calls(program, chip.delay_slots, calls, known, settle)
        unsettled.update(dict.fromkeys(one for _, each in counts for one in each.unsettled))
        kind = "top level" if name == TOP else hlo.kinds.get(name, "?")
        return _figures(program, kind, counts, chip), counts

    top, [(_, counts)] = counted(TOP, {(): 1}, TOP)
    calls: dict[str, dict[tuple, int]] = collections.defaultdict(dict)
    for (name, arguments), times in counts.calls.items():
        calls[name][arguments] = times
    found = [top]
    for name in calls:
        source = name if name in files else _twin(name, [one for one in calls if one in files], hlo)
        found.append(counted(name, calls[name], source)[0])
    found += [_sparse_core(n, chip) for n in hlo.sparse_core_bytes]
    if unsettled:
        raise Unsettled(
            "these hang on data, so the program alone does not say how often their code runs. Settle a branch with "
            "--settle NAME:INDEX=run (the code that the jump would skip runs), =skip, or for a loop =COUNT:\n  "
            + "\n  ".join(map(str, unsettled))
        )
    return found


def _twin(name: str, dumped: Sequence[str], hlo: dump.Hlo) -> str:
    """libtpu dumps one of several programs that are the same."""
    signature = hlo.signature(name)
    for other in dumped:
        if hlo.signature(other) == signature:
            return other
    raise RuntimeError(f"libtpu dumped no program {name}, nor one like it.")


def _all_calls(
    program: Program, delay_slots: int, calls: Mapping[tuple, int], arrays: Mapping, settle: Settle
) -> list[tuple[int, Counts]]:
    """How many calls, and what each of them costs. Most programs do the same in every call; where they do not, the
    scalar arguments tell the calls apart."""
    alike = program.count(delay_slots, arrays=arrays)
    if not alike.unsettled:
        return [(sum(calls.values()), alike)]
    counts = []
    for arguments, times in calls.items():
        scalars = {i: value for i, value in enumerate(arguments) if value is not None}
        counts.append((times, program.count(delay_slots, arrays=arrays, scalars=scalars, settle=settle)))
    return counts


def _figures(program: Program, kind: str, counts: list[tuple[int, Counts]], chip: Chip) -> dict:
    out = {"program": program.name, "kind": kind, "calls": sum(times for times, _ in counts)}
    for key in ("cycles", "stalls", "hbm_read", "hbm_written", "transfers"):
        out[key] = sum(times * getattr(one, key) for times, one in counts)
    out["busy"] = {unit: sum(times * one.busy[unit] for times, one in counts) for unit in program.slots}
    settled = {branch: choice for _, one in counts for branch, choice in one.settled.items()}
    return out | {
        "slots": program.slots,
        "share": _share(out["busy"], program.slots, out["cycles"]),
        "vmem_bytes": program.vmem_bytes,
        **_time(out, chip),
        "settled": [f"{branch}: {choice}" for branch, choice in settled.items()],
    }


def _sparse_core(moved: int, chip: Chip) -> dict:
    """A copy that XLA gives to a SparseCore: no cycle of the TensorCore, which waits for it."""
    out = {"program": "a copy", "kind": "SparseCore", "calls": 1, "cycles": 0, "stalls": 0, "transfers": 1}
    out |= {"hbm_read": moved // 2, "hbm_written": moved - moved // 2}
    return out | {"busy": {}, "slots": {}, "share": {}, "vmem_bytes": 0, **_time(out, chip), "settled": []}


def _time(one: dict, chip: Chip) -> dict:
    seconds = {"core": one["cycles"] / chip.clock, "hbm": (one["hbm_read"] + one["hbm_written"]) / chip.hbm}
    bound = max(seconds, key=seconds.__getitem__)
    return {"seconds": seconds[bound], "bound": bound}


def _share(busy: Mapping[str, int], slots: Mapping[str, int], cycles: int) -> dict[str, float]:
    return {unit: round(busy[unit] / (slots[unit] * max(cycles, 1)), 4) for unit in slots}


def _total(programs: list[dict], per: int) -> dict:
    keys = ("calls", "cycles", "stalls", "hbm_read", "hbm_written", "seconds")
    out = {key: sum(one[key] for one in programs) for key in keys}
    slots = next((one["slots"] for one in programs if one["slots"]), {})
    out["busy"] = {unit: sum(one["busy"].get(unit, 0) for one in programs) for unit in slots}
    out["share"] = _share(out["busy"], slots, out["cycles"])
    out["vmem_bytes"] = max((one["vmem_bytes"] for one in programs), default=0)
    if per:
        out["cycles_per_token_and_head"] = out["cycles"] / per
    return out
