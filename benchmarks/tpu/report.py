"""From a function to its figures: compile in a process of its own, execute every program that the top level calls, add up."""

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
from collections.abc import Mapping

from tpu import program
from tpu.compile import LABELS, libtpu_environment


@dataclasses.dataclass(frozen=True)
class Chip:
    """One TensorCore. `peak` (bf16 flop/s) and `hbm` (byte/s) are the published figures of the chip over its cores; the
    clock is not published: it is the rate at which full MXUs, `macs` per cycle, reach `peak`."""

    peak: float
    hbm: float
    macs: int
    delay_slots: int
    vmem_mib: int

    @property
    def clock(self) -> float:
        return self.peak / 2 / self.macs


CHIPS = {
    "tpu7x": Chip(peak=1153.5e12, hbm=3690e9, macs=2 * 256**2 * 2, delay_slots=6, vmem_mib=64),
    "v6e": Chip(peak=918e12, hbm=1638e9, macs=2 * 256**2 * 2, delay_slots=4, vmem_mib=128),
    "v5p": Chip(peak=229.5e12, hbm=1382.5e9, macs=4 * 128**2, delay_slots=4, vmem_mib=64),
    "v5e": Chip(peak=197e12, hbm=819e9, macs=4 * 128**2, delay_slots=4, vmem_mib=128),
}
TOP = "TLP"  # libtpu's name for the program that calls the others


class Unsettled(RuntimeError):
    pass


@dataclasses.dataclass(frozen=True)
class Settling:
    """Decides the branches of the programs whose name matches: `NAME:INDEX=run`, `=skip`, or a loop's count."""

    name: str
    index: str  # of the branch in its program, or *
    choice: str | int

    @classmethod
    def parse(cls, text: str) -> "Settling":
        match = re.fullmatch(r"(.+):(\d+|\*)=(run|skip|\d+)", text)
        if not match:
            raise ValueError(f"{text!r} settles nothing: write NAME:INDEX=run, NAME:INDEX=skip or NAME:INDEX=COUNT.")
        name, index, choice = match.groups()
        return cls(name, index, choice if choice in ("run", "skip") else int(choice))

    def decides(self, branch: program.Branch) -> bool:
        loop = isinstance(self.choice, int)
        return (
            loop == branch.is_loop
            and self.index in ("*", str(branch.index))
            and fnmatch.fnmatchcase(branch.program, self.name)
        )


def compiled(function: str, keywords: Mapping, chip: str, folder: pathlib.Path, python: str, timeout: float) -> dict:
    """Compiles `file.py:name(**keywords)` into `folder` with the interpreter `python`, and returns what it recorded."""
    settings = json.dumps({"function": function, "keywords": dict(keywords), "chip": chip, "folder": str(folder)})
    script = pathlib.Path(__file__).with_name("compile.py")
    done = subprocess.run(
        [python, str(script), settings],
        env={**os.environ, **libtpu_environment(folder)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(f"{function} does not compile for {chip}:\n" + "\n".join(lines[-25:]))
    return json.loads((folder / "compiled.json").read_text())


def schedule(
    function: str,
    chip: str,
    *,
    keywords: Mapping = {},
    settle: tuple[Settling, ...] = (),
    tokens: int | None = None,
    heads: int | None = None,
    python: str = sys.executable,
    keep: pathlib.Path | None = None,
    timeout: float = 1200,
) -> dict:
    """The figures of `file.py:name(**keywords)` on one TensorCore of `chip`, as JSON-able data.

    `settle`, `tokens` and `heads` add to what the function says itself. `keep` is a new folder that keeps the dumps.
    """
    with tempfile.TemporaryDirectory(prefix="tpu-schedule-") as scratch:
        folder = keep or pathlib.Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        record = compiled(function, keywords, chip, folder, python, timeout)
        facts = record.pop("facts")
        rules = settle + tuple(map(Settling.parse, facts.get("settle", ())))
        tokens, heads = tokens or facts.get("tokens"), heads or facts.get("heads")
        operands = record.pop("operands") | facts.get("operands", {})
        programs = _programs(record.pop("hlo"), folder, CHIPS[chip], rules, operands)
    record |= {"function": function, "keywords": dict(keywords), "chip": chip, "tokens": tokens, "heads": heads}
    groups = {
        "pallas": [one for one in programs if one["kind"] == "pallas"],
        "glue": [one for one in programs if one["kind"] != "pallas"],
        "all": programs,
    }
    per = (tokens or 0) * (heads or 1)
    return record | {name: _total(members, per) for name, members in groups.items()} | {"programs": programs}


def _programs(hlo: str, folder: pathlib.Path, chip: Chip, rules: tuple[Settling, ...], operands: Mapping) -> list[dict]:
    files, instructions = program.dumped(folder, LABELS), _instructions(hlo)
    unsettled: dict[program.Branch | str, None] = {}

    def settle(branch):
        return next((rule.choice for rule in rules if rule.decides(branch)), None)

    def counted(name: str, dump: str, kind: str, calls: Mapping[tuple, int]) -> list[tuple[int, program.Counts]]:
        given = operands.get(re.sub(r"\.\d+$", "", name), {})
        given = {int(index): values for index, values in given.items()}
        text = program.Program(name, files[dump])
        # Most programs do the same in every call. Where they do not, their scalar arguments tell the calls apart.
        alike = text.count(chip.delay_slots, operands=given)
        if not alike.unsettled:
            counts = [(sum(calls.values()), alike)]
        else:
            counts = []
            for arguments, times in calls.items():
                scalars = {i: value for i, value in enumerate(arguments) if value is not None}
                counts += [(times, text.count(chip.delay_slots, settle=settle, scalars=scalars, operands=given))]
        unsettled.update(dict.fromkeys(one for _, count in counts for one in count.unsettled))
        found.append(_figures(name, kind, counts, chip))
        return counts

    found: list[dict] = []
    [(_, top)] = counted(TOP, TOP, "top level", {(): 1})
    calls: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for (name, arguments), times in top.calls.items():
        calls[name][arguments] += times
    for name in calls:
        dump = name
        if "packed-bundles-post-ra" not in files.get(name, {}):  # one of several identical programs is dumped
            same = [n for n in calls if n in files and instructions.get(n) == instructions.get(name, ())]
            if not same:
                raise RuntimeError(f"libtpu dumped no program {name}, nor one like it.")
            dump = same[0]
        counted(name, dump, instructions.get(name, ("", "?"))[1], calls[name])
    if unsettled:
        raise Unsettled(
            "These hang on data, so the program alone does not say how often their code runs. Settle each branch with "
            "--settle NAME:INDEX=run (the code that the jump would skip runs), =skip, or for a loop =COUNT:\n  "
            + "\n  ".join(map(str, unsettled))
        )
    return found


def _instructions(hlo: str) -> dict[str, tuple[str, str]]:
    """Name of an HLO instruction: (what it is, less the names of its operands and of what it calls; its kind)."""
    found = {}
    for name, text in re.findall(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*)$", hlo, re.M):
        bare = re.sub(r"/\*.*?\*/|metadata=\{[^}]*\}|backend_config=.*|sharding=\{.*?\}\}?", "", text)
        kind = re.search(r"\b([a-z][\w\-]*)\(", re.sub(r"\{[^}]*\}", "", text))
        pallas = 'custom_call_target="tpu_custom_call"' in text
        found[name] = (re.sub(r"%[\w.\-]+", "%", bare), "pallas" if pallas else kind.group(1) if kind else "?")
    return found


def _figures(name: str, kind: str, counts: list[tuple[int, program.Counts]], chip: Chip) -> dict:
    """One program, summed over its calls; `counts` pairs how many calls with what one of them costs."""
    out = {"program": name, "kind": kind, "calls": sum(times for times, _ in counts)}
    for key in ("cycles", "stalls", "hbm_read", "hbm_written", "transfers"):
        out[key] = sum(times * getattr(one, key) for times, one in counts)
    out["busy"] = {unit: sum(times * one.busy[unit] for times, one in counts) for unit in counts[0][1].busy}
    out["capacity"] = counts[0][1].capacity
    out["vmem_bytes"] = counts[0][1].vmem_bytes
    seconds = {"core": out["cycles"] / chip.clock, "hbm": (out["hbm_read"] + out["hbm_written"]) / chip.hbm}
    settled = {branch: choice for _, one in counts for branch, choice in one.settled.items()}
    return out | {
        "share": _share(out),
        "seconds": max(seconds.values()),
        "bound": max(seconds, key=seconds.__getitem__),
        "settled": [f"{choice}: {branch}" for branch, choice in settled.items()],
    }


def _share(figures: dict) -> dict:
    cycles = max(figures["cycles"], 1)
    return {unit: round(figures["busy"][unit] / (slots * cycles), 4) for unit, slots in figures["capacity"].items()}


def _total(programs: list[dict], per: int) -> dict:
    keys = ("cycles", "stalls", "hbm_read", "hbm_written", "seconds", "calls")
    out = {key: sum(one[key] for one in programs) for key in keys}
    out["capacity"] = programs[0]["capacity"] if programs else {}
    out["busy"] = {unit: sum(one["busy"][unit] for one in programs) for unit in out["capacity"]}
    out["share"] = _share(out)
    out["vmem_bytes"] = max((one["vmem_bytes"] for one in programs), default=0)
    if per:
        out["cycles_per_token_and_head"] = out["cycles"] / per
    return out
