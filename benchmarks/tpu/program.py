"""A machine program as libtpu dumps it: read it, execute its scalar side, and count what runs.

A TPU program is a list of bundles; a bundle issues in one cycle, and every stall the compiler knows of is an empty
bundle. Loops, grid steps and pipeline stages are scalar code: counters, predicates, branches with delay slots. So the
number of times each bundle runs follows from executing the scalar instructions alone, and everything else is a sum
over bundles.

A scalar is an int of 32 bits, a `Pointer`, or `Unknown`: what hangs on data that is not in the program.
"""

import collections
import dataclasses
import operator
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

GRANULE = 32  # bytes that a DMA counts in
MASK = 0xFFFFFFFF
# What the runtime leaves in SMEM for a program to read, by the dump's tags: core 0 of chip 0 runs a program, seeded.
RUNTIME_WORDS = {
    r"- core index$": 0,
    r"- chip ID$": 0,
    r"- program descriptor state$|0xfffa8 - tc block word$": 1,
    r"- rng seed$|0xfff80 - tc block word$": 1,
}


@dataclasses.dataclass(frozen=True)
class Pointer:
    base: str
    offset: int | None  # None: somewhere in what `base` names


@dataclasses.dataclass(frozen=True)
class Unknown:
    origin: str  # the instruction whose result is not known


Value = int | Pointer | Unknown


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    result: str | None
    op: str
    args: tuple[str, ...]
    guard: str | None = None  # a predicate's name: issues always, takes effect where it holds
    negated: bool = False
    otherwise: str | None = None  # the value in the result's register where the guard does not hold
    target: int | None = None  # of a branch
    size: str | None = None  # of a DMA, in granules
    callee: str | None = None  # of a call
    text: str = ""

    @property
    def names(self) -> list[str]:
        read = [name for arg in self.args for name in re.findall(r"%(\w+)", arg)]
        return read + [name for name in (self.guard, self.otherwise) if name]


# ------------------------------------------------------------------------------------------------------------- reading
_BUNDLE = re.compile(r"^ *(?:0x[0-9a-f]+|\d+) +(?:[A-Z]{2})? *:[ >]*\{", re.M)
_GUARD = re.compile(r"\((!?)%(p\w+)(?:, *%(\w+))?\) *,?")
_KEPT = re.compile(r"%[sp]\d|sbr|dma\.|inlined_call")


def read_bundles(text: str) -> list[list[Instruction]]:
    """The scalar, branch, DMA and call instructions of every bundle, in the order in which they take effect."""
    text = re.sub(r"(inlined_call\b[^\n/]*)/\* %?(\S+)(?: =.*?)?\*/", r"\1 CALLEE=\2 ", text, flags=re.S)
    text = text.replace("/*size_in_granules=*/", "SIZE=")
    text = re.sub(r"/\*.*?\*/|\[(?:resolvable|thread):\S*\]", "", text, flags=re.S)
    starts = [*_BUNDLE.finditer(text)]
    ends = [match.start() for match in starts[1:]] + [len(text)]
    return [_read_bundle(text[match.end() : end]) for match, end in zip(starts, ends)]


def _read_bundle(text: str) -> list[Instruction]:
    if not _KEPT.search(text):
        return []
    found = [_read_instruction(part.strip()) for part in text.rsplit("}", 1)[0].split(";;")]
    # A phi is the register itself, so it comes first; a cast to a pointer renames a result of its own bundle.
    order = {"sphi": 0, "pphi": 0, "int_to_ptr": 2}
    return sorted((one for one in found if one), key=lambda one: order.get(one.op.split(".")[0], 1))


def _read_instruction(text: str) -> Instruction | None:
    match = re.match(r"(?:%(\w+) = |\d+ = )?([a-z][\w.\-]*)(.*)", text, re.S)
    if not match:
        return None
    result, op, rest = match.groups()
    result = result if result and re.match(r"[sp]\d", result) else None
    if not result and not op.startswith(("sbr", "dma.", "sst", "inlined_call")):
        return None
    guard = _GUARD.search(rest)
    if guard:
        rest = rest[: guard.start()] + rest[guard.end() :]
    target, callee = re.search(r"bundleno = (\d+)", rest), re.search(r"CALLEE=(\S+)", rest)
    args = _split(rest)
    if op == "sst" and len(args) == 1:  # [address] value
        args = re.fullmatch(r"(.*\])\s*(\S+)", args[0], re.S).groups()
    return Instruction(
        result=result,
        op=op,
        args=tuple(arg for arg in args if not arg.startswith(("SIZE=", "CALLEE="))),
        guard=guard and guard.group(2),
        negated=bool(guard and guard.group(1)),
        otherwise=guard and guard.group(3),
        target=int(target.group(1)) if target else None,
        size=next((arg.removeprefix("SIZE=") for arg in args if arg.startswith("SIZE=")), None),
        callee=callee.group(1) if callee else None,
        text=" ".join(text.split()),
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
    found = re.finditer(r"^\s*(#\w+) \[shape = .*?space=(\w+), size = (\w+)(?:, offset = (\w+))?.*?tag = '(.*?)'", text, re.M)
    return {
        name: Allocation(space, int(offset, 0) if offset else None, int(size, 0), tag)
        for name, space, size, offset, tag in (match.groups() for match in found)
    }


def read_utilisation(text: str) -> tuple[dict[str, int], list[list[int]]]:
    """The capacity of each unit, and how many of its slots every bundle takes."""
    lines = [line for line in text.splitlines() if line.strip()]
    units = [name.strip() for name in lines[1].split(",")]
    return dict(zip(units, map(int, lines[2].split()))), [[int(x) for x in line.split()] for line in lines[4:]]


# ----------------------------------------------------------------------------------------------------------- executing
def _signed(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


_ARITHMETIC = {
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b & 31),
    "sshrl": lambda a, b: a >> (b & 31),
    "sshra": lambda a, b: _signed(a) >> (b & 31),
}
_COMPARISONS = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}
_MOVES = ("smov", "pmov", "int_to_ptr")
_RUN, _SKIP = "run", "skip"


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch that hangs on data. `index` counts all branches of its program."""

    program: str
    index: int
    bundle: int
    target: int
    origin: str

    @property
    def is_loop(self) -> bool:
        return self.target <= self.bundle

    def __str__(self):
        what = "a loop back" if self.is_loop else f"a jump over {self.target - self.bundle} bundles"
        return f"{self.program}:{self.index} is {what} from {self.bundle:#x} to {self.target:#x}, by `{self.origin}`"


class Machine:
    """Executes what branches, DMAs and calls depend on.

    `settle(branch)` decides a branch that hangs on data: "run" falls through, "skip" jumps, a number is how often the
    body of a loop runs; None leaves it unsettled: it falls through, and is listed in `unsettled`. `scalars` are the
    scalar arguments of this call; `operands` the values of integer arrays, for kernels that read them by DMA into SMEM;
    both by index.
    """

    def __init__(
        self,
        program: str,
        bundles: Sequence[Sequence[Instruction]],
        delay_slots: int,
        *,
        words: Mapping[str, int] = {},
        settle: Callable[[Branch], str | int | None] = lambda branch: None,
        scalars: Mapping[int, int] = {},
        operands: Mapping[int, Sequence[int]] = {},
    ):
        self.program, self.slots, self.settle = program, delay_slots, settle
        self.scalars, self.operands = scalars, operands
        self.values: dict[str, Value] = {}  # by name
        self.registers: dict[str, Value] = {}
        self.memory: dict[Pointer, Value] = {Pointer(name, 0): value for name, value in words.items()}
        self.read_bytes = self.written_bytes = self.transfers = 0
        self.calls: collections.Counter[tuple[str, tuple[int | None, ...]]] = collections.Counter()
        self.settled: dict[Branch, str | int] = {}
        self.unsettled: dict[Branch | str, None] = {}
        self._passes = collections.Counter()
        self._definitions = collections.defaultdict(list)
        for bundle in bundles:
            for instruction in bundle:
                if instruction.result:
                    self._definitions[instruction.result].append(instruction)
        self.bundles = self._slice(bundles)
        branches = [b for b, bundle in enumerate(bundles) for one in bundle if one.op.startswith("sbr")]
        self._index = {b: i for i, b in enumerate(branches)}

    def _slice(self, bundles: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
        every = [one for bundle in bundles for one in bundle]
        stores = [one for one in every if one.op == "sst"]
        keep = {one for one in every if one.op.startswith(("sbr", "dma.", "inlined_call"))}
        open_names = [name for one in keep for name in (one.guard, one.size and one.size.lstrip("%")) if name]
        open_names += [name for one in keep if "to_smem" in one.op or one.callee for name in one.names]
        seen = set()
        while open_names:
            name = open_names.pop()
            if name in seen:
                continue
            seen.add(name)
            for one in self._definitions[name]:
                keep.add(one)
                open_names += one.names
                if one.op == "sld" and stores:
                    keep.update(stores)
                    open_names += [name for store in stores for name in store.names]
                    stores = []
        return [[one for one in bundle if one in keep] for bundle in bundles]

    def run(self, limit: int = 50_000_000) -> list[int]:
        """How often each bundle runs."""
        count, ends = len(self.bundles), {}
        leaders = {0, count}
        for b, bundle in enumerate(self.bundles):
            for one in bundle:
                if one.op.startswith("sbr"):
                    if one.target is None:
                        raise NotImplementedError(f"{self.program}: a branch without a fixed target: `{one.text}`")
                    leaders |= {min(b + self.slots + 1, count), one.target}
        ordered = sorted(leaders)
        ends = dict(zip(ordered, ordered[1:]))
        code = {start: [(b, one) for b in range(start, ends[start]) for one in self.bundles[b]] for start in ordered[:-1]}
        runs = collections.Counter()
        pc, pending = 0, None  # pending: (the bundle at which the jump happens, its target)
        while pc < count:
            runs[pc] += 1
            limit -= 1
            if limit < 0:
                raise RuntimeError(f"{self.program} does not end: it was left in bundle {pc:#x}.")
            for b, one in code[pc]:
                if one.op.startswith("sbr"):
                    if self._is_taken(b, one) and pending is None:
                        pending = (min(b + self.slots + 1, count), one.target)
                else:
                    self._execute(one)
            pc = ends[pc]
            if pending and pc >= pending[0]:
                pc, pending = pending[1], None
        counts = [0] * count
        for start, times in runs.items():
            counts[start : ends[start]] = [times] * (ends[start] - start)
        return counts

    def _is_taken(self, b: int, one: Instruction) -> bool:
        holds = self._holds(one)
        if not isinstance(holds, Unknown):
            return holds
        branch = Branch(self.program, self._index[b], b, one.target, holds.origin)
        choice = self.settle(branch)
        if choice is None:
            self.unsettled[branch] = None
            return False
        self.settled[branch] = choice
        if branch.is_loop and isinstance(choice, int) and choice > 0:
            self._passes[b] += 1
            return self._passes[b] % choice != 0
        if not branch.is_loop and choice in (_RUN, _SKIP):
            return choice == _SKIP
        raise ValueError(f"{branch}: it cannot be settled as {choice!r}; a loop takes its count, a jump 'run' or 'skip'.")

    def _execute(self, one: Instruction):
        holds = self._holds(one)
        if one.op == "inlined_call":
            if holds is not False and one.callee:
                values = map(self._read, one.args)
                self.calls[one.callee, tuple(v if isinstance(v, int) else None for v in values)] += 1
        elif one.op.startswith("dma."):
            if holds is not False:
                self._transfer(one)
        elif one.op == "sst":
            self._store(self._address(one.args[0]), self._read(one.args[1]), holds)
        elif holds is False:
            if one.otherwise:
                self._write(one, self.values.get(one.otherwise, Unknown(one.text)))
        else:
            self._write(one, holds if isinstance(holds, Unknown) else self._compute(one))

    def _write(self, one: Instruction, value: Value):
        self.values[one.result] = self.registers[_register(one.result)] = value

    def _store(self, where: Value, value: Value, holds: bool | Unknown):
        if holds is False:
            return
        if not isinstance(where, Pointer):  # it may be anywhere, except where registers are kept
            self._forget(lambda base: not base.endswith("_spill"))
        elif where.offset is None:
            self._forget(lambda base: base == where.base)
        else:
            self.memory[where] = holds if isinstance(holds, Unknown) else value

    def _forget(self, hit: Callable[[str], bool]):
        self.memory = {where: value for where, value in self.memory.items() if not hit(where.base)}

    def _holds(self, one: Instruction) -> bool | Unknown:
        if not one.guard:
            return True
        value = self.values.get(one.guard, Unknown(one.text))
        return value if isinstance(value, Unknown) else bool(value) != one.negated

    def _read(self, arg: str) -> Value:
        if arg.startswith("%"):
            return self.values.get(arg[1:], Unknown(arg))
        if arg.startswith("["):
            return self._address(arg)
        if arg.startswith("#"):
            return Pointer(arg, 0)
        try:
            return int(arg.lstrip("$"), 0) & MASK
        except ValueError:
            return Unknown(arg)

    def _address(self, arg: str) -> Value:
        where: Value = 0
        for term in re.sub(r"\w*:|[\[\]]", "", arg).split("+"):
            where = _add(where, self._read(term.strip()))
        return where

    def _compute(self, one: Instruction) -> Value:
        op, unknown = one.op.split(".")[0], Unknown(one.text)
        if op in ("sphi", "pphi"):
            registers = {_register(name) for name in (one.result, *one.names)}
            if len(registers) > 1:
                raise NotImplementedError(f"{self.program}: a phi over several registers: `{one.text}`")
            return self.registers.get(registers.pop(), unknown)
        if op == "sld":
            where = self._address(one.args[0])
            return self.memory.get(where, unknown) if isinstance(where, Pointer) else unknown
        if op == "inlined_call_operand":
            index = re.search(r"index: (\d+)", one.text)
            if not index:
                return unknown
            index = int(index.group(1))
            if "<no memory space>" in one.text:
                return self.scalars.get(index, self.operands[index][0] & MASK if index in self.operands else unknown)
            return Pointer(f"operand {index}", 0)
        values = [self._read(arg) for arg in one.args]
        values = [unknown if isinstance(v, Unknown) and v.origin.startswith("%") else v for v in values]
        if op in _MOVES and values:
            return values[-1]
        if op in ("por", "pnor", "pand", "pnand", "pxor", "pneg"):
            return _logic(op, values)
        if op == "scalar_select":
            if isinstance(values[0], Unknown):
                return values[1] if values[1] == values[2] else values[0]
            return values[1] if values[0] else values[2]
        if op in ("sadd", "scalar_lea") and len(values) == 2 and ".f32" not in one.op:
            return _add(*values)
        for value in values:
            if isinstance(value, Unknown):
                return value
        if op == "scmp" and len(values) == 2:
            a, b = values
            if isinstance(a, Pointer) and isinstance(b, Pointer) and a.base == b.base:
                a, b = (unknown if p.offset is None else p.offset for p in (a, b))
            if not (isinstance(a, int) and isinstance(b, int)) or ".f32" in one.op:
                return unknown
            unsigned = ".u32" in one.op
            return int(_COMPARISONS[one.op.split(".")[1]](*((a, b) if unsigned else (_signed(a), _signed(b)))))
        if op in ("smin", "smax") and all(isinstance(value, int) for value in values):
            return (min if op == "smin" else max)(values, key=int if ".u32" in one.op else _signed)
        if op in _ARITHMETIC and len(values) == 2 and ".f32" not in one.op:
            a, b = values
            if isinstance(a, int) and isinstance(b, int):
                return _ARITHMETIC[op](a, b) & MASK
            if isinstance(a, Pointer) and op in ("sshll", "sshrl"):  # an address in other units: the same place
                return a
            if isinstance(a, int):
                return unknown
            if isinstance(a, Pointer) and isinstance(b, int) and op == "ssub":
                return _add(a, -b & MASK)
            if op == "ssub" and a.base == b.base and None not in (a.offset, b.offset):
                return (a.offset - b.offset) & MASK
        return unknown

    def _transfer(self, one: Instruction):
        spaces = re.fullmatch(r"dma\.(\w+?)_to_(\w+)", one.op)
        if spaces:
            source, destination = spaces.groups()
        elif one.op == "dma.general":
            source, destination = self._space(one.args[0]), self._space(one.args[1])
        else:  # waits
            return
        size = self._read(one.size) if one.size else Unknown(one.text)
        if destination == "smem":
            self._load_operand(one, size)
        if "hbm" not in (source, destination):
            return
        if not isinstance(size, int):
            self.unsettled[f"{self.program} has a DMA whose size is data, by `{getattr(size, 'origin', one.text)}`"] = None
            return
        self.transfers += 1
        self.read_bytes += GRANULE * size * (source == "hbm")
        self.written_bytes += GRANULE * size * (destination == "hbm")

    def _load_operand(self, one: Instruction, size: Value):
        """A DMA into SMEM brings an operand whose values were given, or something unknown."""
        pointers = [self._read(arg) for arg in one.args if arg.startswith(("%", "[", "#"))]
        pointers = [value for value in pointers if isinstance(value, Pointer)]
        into = [p for p in pointers if p.base.startswith("#")][:1]
        given = [self.operands[int(p.base.split()[1])] for p in pointers if p.base.startswith("operand")
                 and int(p.base.split()[1]) in self.operands]
        for pointer in into:
            self._forget(lambda base, into=pointer.base: base == into)
            for values in given:
                for i, value in enumerate(values):
                    self.memory[Pointer(pointer.base, pointer.offset + i)] = value & MASK

    def _space(self, arg: str, depth: int = 8) -> str:
        """The memory that a pointer points to, by the instructions that made it."""
        for one in self._definitions[arg.lstrip("%")] if depth else []:
            match = re.search(r"\.(hbm|vmem|smem)\b", one.op)
            found = match.group(1) if match else next(filter(None, (self._space(a, depth - 1) for a in one.args)), "")
            if found:
                return found
        return ""


def _register(name: str) -> str:
    return name.rsplit("_", 1)[-1]


def _add(a: Value, b: Value) -> Value:
    if isinstance(b, Pointer):
        a, b = b, a
    if isinstance(a, Pointer) and not isinstance(b, Pointer):
        known = a.offset is not None and isinstance(b, int)
        return Pointer(a.base, a.offset + _signed(b) if known else None)
    if isinstance(a, int) and isinstance(b, int):
        return (a + b) & MASK
    return a if isinstance(a, Unknown) else b if isinstance(b, Unknown) else Unknown(f"{a} + {b}")


def _logic(op: str, values: list[Value]) -> Value:
    if op == "pneg":
        return values[0] if isinstance(values[0], Unknown) else int(not values[0])
    unknown = next((value for value in values if isinstance(value, Unknown)), None)
    known = [bool(value) for value in values if not isinstance(value, Unknown)]
    if op == "pxor":
        return unknown or int(known[0] != known[1])
    decisive = op in ("por", "pnor")  # one operand that is this decides
    if unknown and decisive not in known:
        return unknown
    return int((decisive in known) == (op in ("por", "pnand")))



# ------------------------------------------------------------------------------------------------------------ counting
@dataclasses.dataclass
class Counts:
    """What one call of a program costs."""

    cycles: int
    stalls: int  # of these, the cycles whose bundle is empty
    busy: dict[str, int]  # slots taken, by unit
    capacity: dict[str, int]  # slots per cycle
    vmem_bytes: int
    hbm_read: int
    hbm_written: int
    transfers: int
    settled: dict[Branch, str | int]
    unsettled: list[Branch | str]
    calls: collections.Counter[tuple[str, tuple[int | None, ...]]]

    def share(self, unit: str) -> float:
        return self.busy[unit] / (self.capacity[unit] * self.cycles) if self.cycles else 0.0


class Program:
    """One dumped program: `files` are its dumps, by label."""

    def __init__(self, name: str, files: Mapping[str, pathlib.Path]):
        self.name = name
        self.bundles = read_bundles(files["packed-bundles-post-ra"].read_text(errors="replace"))
        self.allocations = read_allocations(files["post-delay-converter"].read_text(errors="replace"))
        text = files["pre-delay_hlo-static-per-bundle-utilization"].read_text()
        self.capacity, self.rows = read_utilisation(text)
        if len(self.rows) != len(self.bundles):
            raise RuntimeError(
                f"{name}: {len(self.bundles)} bundles, but the utilisation of {len(self.rows)}: an unknown dump format."
            )

    def count(self, delay_slots: int, **settings) -> Counts:
        """Executes one call; `settings` as for `Machine`."""
        words = {
            name: value
            for name, allocation in self.allocations.items()
            for tag, value in RUNTIME_WORDS.items()
            if re.search(tag, allocation.tag)
        }
        machine = Machine(self.name, self.bundles, delay_slots, words=words, **settings)
        times = machine.run()
        ran = [(n, row) for n, row in zip(times, self.rows) if n]
        busy = {unit: sum(n * row[i] for n, row in ran) for i, unit in enumerate(self.capacity)}
        capacity = dict(self.capacity)
        if "MXU" in busy:  # as libtpu before 0.0.52 calls it
            busy["MATMUL"], capacity["MATMUL"] = busy["MXU"], capacity["MXU"]
        vmem = [a for a in self.allocations.values() if a.space == "vmem"]
        return Counts(
            cycles=sum(times),
            stalls=sum(n for n, row in ran if not any(row)),
            busy=busy,
            capacity=capacity,
            vmem_bytes=max(((a.offset or 0) + a.size for a in vmem), default=0),
            hbm_read=machine.read_bytes,
            hbm_written=machine.written_bytes,
            transfers=machine.transfers,
            settled=machine.settled,
            unsettled=[*machine.unsettled],
            calls=machine.calls,
        )


def dumped(folder: pathlib.Path, labels: Sequence[str]) -> dict[str, dict[str, pathlib.Path]]:
    """Program name, then label: file."""
    files: dict[str, dict[str, pathlib.Path]] = collections.defaultdict(dict)
    pattern = re.compile(rf"\d+-(.+)-\d+-({'|'.join(map(re.escape, labels))})\.txt")
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match:
            files[match.group(1)][match.group(2)] = path
    return files
