"""What libtpu dumps of a compiled program: bundles, allocations, the slots that every bundle takes, and XLA's HLO."""

import collections
import dataclasses
import math
import pathlib
import re
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """A scalar, branch, DMA or call instruction. A guarded one takes effect where its predicate holds."""

    result: str | None
    op: str
    args: tuple[str, ...]
    text: str
    guard: str | None = None
    negated: bool = False
    otherwise: str | None = None  # what the result's register holds where the guard does not
    target: int | None = None  # of a branch: a bundle
    size: str | None = None  # of a DMA, in granules
    callee: str | None = None  # of a call

    @property
    def is_branch(self) -> bool:
        return self.op.startswith("sbr")

    @property
    def is_dma(self) -> bool:
        return self.op.startswith("dma.")

    @property
    def names(self) -> list[str]:
        """Of all values it reads."""
        read = [name for arg in self.args for name in re.findall(r"%(\w+)", arg)]
        return read + [name for name in (self.guard, self.otherwise, self.size and self.size.lstrip("%")) if name]


_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|\d+) +(?:[A-Z]{2})? *:[ >]*\{", re.M)
_COMMENT = re.compile(r"/\*.*?\*/|\[(?:resolvable|thread):\S*\]", re.S)
_CALL = re.compile(r"(inlined_call\b[^\n/]*)/\* %?(\S+)(?: =.*?)?\*/", re.S)
_GUARD = re.compile(r"\((!?)%(p\w+)(?:, *%(\w+))?\) *,?")
_WANTED = re.compile(r"%[sp]\d|sbr|dma\.|inlined_call|sst ")


def read_bundles(text: str) -> list[list[Instruction]]:
    """The scalar side of every bundle, its instructions in the order in which they take effect."""
    text = _CALL.sub(r"\1 CALLEE=\2 ", text).replace("/*size_in_granules=*/", "SIZE=")
    text = _COMMENT.sub("", text)
    starts = [*_BUNDLE.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [_read_bundle(text[match.end() : end]) for match, end in zip(starts, ends)]


def _read_bundle(text: str) -> list[Instruction]:
    if not _WANTED.search(text):
        return []
    found = [_read_instruction(part.strip()) for part in text.rsplit("}", 1)[0].split(";;")]
    # A phi is its register as the block begins; a cast to a pointer renames a result of its own bundle.
    order = {"sphi": 0, "pphi": 0, "int_to_ptr": 2}
    return sorted((one for one in found if one), key=lambda one: order.get(one.op.split(".")[0], 1))


def _read_instruction(text: str) -> Instruction | None:
    match = re.match(r"(?:%(\w+) = |\d+ = )?([a-z][\w.\-]*)(.*)", text, re.S)
    if not match:
        return None
    result, op, rest = match.groups()
    if result and not re.match(r"[sp]\d", result):  # a vector's
        result = None
    if not result and not op.startswith(("sbr", "dma.", "sst", "inlined_call")):
        return None
    guard = _GUARD.search(rest)
    if guard:
        rest = rest[: guard.start()] + rest[guard.end() :]
    callee = re.search(r"CALLEE=(\S+)", rest)
    args = _split(rest[: callee.start()] if callee else rest)
    if op == "sst" and len(args) == 1:  # [address] value
        args = list(re.fullmatch(r"(.*\])\s*(\S+)", args[0], re.S).groups())
    target = re.search(r"bundleno = (\d+)", rest)
    return Instruction(
        result=result,
        op=op,
        args=tuple(arg for arg in args if not arg.startswith("SIZE=")),
        text=" ".join(text.split()),
        guard=guard and guard.group(2),
        negated=bool(guard and guard.group(1)),
        otherwise=guard and guard.group(3),
        target=int(target.group(1)) if target else None,
        size=next((arg.removeprefix("SIZE=") for arg in args if arg.startswith("SIZE=")), None),
        callee=callee.group(1) if callee else None,
    )


def _split(text: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[(") - (character in "])")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


@dataclasses.dataclass(frozen=True)
class Allocation:
    space: str
    offset: int | None
    size: int
    tag: str


def read_allocations(text: str) -> dict[str, Allocation]:
    found = re.finditer(
        r"^\s*(#\w+) \[shape = .*?space=(\w+), size = (\w+)(?:, offset = (\w+))?.*?tag = '(.*?)'", text, re.M
    )
    return {
        name: Allocation(space, int(offset, 0) if offset else None, int(size, 0), tag)
        for name, space, size, offset, tag in (match.groups() for match in found)
    }


def covered_bytes(allocations: Sequence[Allocation]) -> int:
    """Bytes that the allocations take, those at one address counted once."""
    total, end = sum(one.size for one in allocations if one.offset is None), 0
    for one in sorted((one for one in allocations if one.offset is not None), key=lambda one: one.offset):
        total += max(0, one.offset + one.size - max(end, one.offset))
        end = max(end, one.offset + one.size)
    return total


def read_utilisation(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """The slots that each unit has in a bundle, and how many of them each bundle takes."""
    lines = [line for line in text.splitlines() if line.strip()]
    units = [name.strip() for name in lines[1].split(",")]
    slots, rows = dict(zip(units, map(int, lines[2].split()))), [[int(x) for x in line.split()] for line in lines[4:]]
    if "MXU" in slots:  # libtpu before 0.0.50 calls it so
        slots["MATMUL"] = slots.pop("MXU")
        rows = [row[1:] + row[:1] for row in rows]
    return slots, rows


def dumped(folder: pathlib.Path, labels: Sequence[str]) -> dict[str, dict[str, pathlib.Path]]:
    """The dumps of every program: its name, then label: file."""
    files: dict[str, dict[str, pathlib.Path]] = collections.defaultdict(dict)
    pattern = re.compile(rf"\d+-(.+)-\d+-({'|'.join(map(re.escape, labels))})\.txt")
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            files[match.group(1)][match.group(2)] = path
    return files


class Hlo:
    """The optimised HLO: what the instructions are that the top-level program calls by name."""

    def __init__(self, text: str):
        self.kinds: dict[str, str] = {}  # of an instruction: "pallas", or HLO's word for it
        self.sparse_core_bytes: list[int] = []  # that each call of a SparseCore reads and writes
        self._lines: dict[str, str] = {}
        self._computations: dict[str, list[str]] = {}
        body: list[str] = []
        for line in text.splitlines():
            if match := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
                body = self._computations[match.group(1)] = []
            elif match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)", line):
                self._note(*match.groups())
                body.append(match.group(1))

    def _note(self, name: str, text: str):
        text = re.sub(r", (?:metadata|backend_config|frontend_attributes|sharding)=.*", "", text)
        opcode = re.search(r"\b([a-z][\w\-]*)\(", re.sub(r"\{[^}]*\}|/\*.*?\*/", "", text))
        self.kinds[name] = "pallas" if '"tpu_custom_call"' in text else opcode.group(1) if opcode else "?"
        self._lines[name] = text
        if self.kinds[name] == "call-start" and '"sparsecore"' in text:
            self.sparse_core_bytes.append(
                sum(map(_array_bytes, re.findall(r"\w+\[[\d,]+\]", text.split(" call-start(")[0])))
            )

    def signature(self, name: str) -> str:
        """What an instruction does, less all names: equal ones are one program."""
        text = self._lines.get(name, name)
        for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", text):
            text += "".join(map(self.signature, self._computations.get(called, ())))
        return re.sub(r"%[\w.\-]+", "%", text)


def _array_bytes(shape: str) -> int:
    """Of a shape like `bf16[8,128]`."""
    dtype, sizes = shape.rstrip("]").split("[")
    bits = re.search(r"\d+", dtype)
    return math.prod(int(size) for size in sizes.split(",")) * (int(bits.group()) if bits else 8) // 8
