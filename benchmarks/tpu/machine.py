"""Executes the scalar side of a machine program, to learn how often every bundle runs and what its DMAs move.

Loops, grid steps and pipeline stages of a TPU program are scalar code: counters, predicates, branches with delay slots.
A scalar is an int of 32 bits, a `Pointer`, or `Unknown`: something that hangs on data which is not in the program.
"""

import collections
import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from tpu.dump import Instruction

GRANULE = 32  # bytes that a DMA counts in
MASK = 0xFFFFFFFF


@dataclasses.dataclass(frozen=True, slots=True)
class Pointer:
    base: str
    offset: int | None  # None: somewhere in what `base` names


@dataclasses.dataclass(frozen=True, slots=True)
class Unknown:
    origin: str  # the instruction whose result is not known


Value = int | Pointer | Unknown


@dataclasses.dataclass(frozen=True)
class Branch:
    """A branch that hangs on data. `index` counts all branches of its program, from 0."""

    program: str
    index: int
    bundle: int
    target: int
    origin: str

    @property
    def is_loop(self) -> bool:
        return self.target <= self.bundle

    def __str__(self):
        span = f"from {self.bundle:#x} to {self.target:#x}"
        what = f"a loop back {span}" if self.is_loop else f"a jump over {self.target - self.bundle} bundles {span}"
        return f"{self.program}:{self.index}, {what}, by `{self.origin}`"


Settle = Callable[[Branch], str | int | None]


class Machine:
    """One call of one program.

    - `words`: what SMEM holds at the start, by allocation.
    - `scalars`, `arrays`: arguments of the call by index: its scalars, and integer arrays that it copies into SMEM.
    - `settle(branch)` decides a branch that hangs on data: "run" falls through, "skip" jumps, a number is how often a
        loop's body runs for each entry. None leaves it unsettled: it falls through, and is listed in `unsettled`.
    """

    def __init__(
        self,
        program: str,
        bundles: Sequence[Sequence[Instruction]],
        delay_slots: int,
        *,
        words: Mapping[str, int] = {},
        scalars: Mapping[int, int] = {},
        arrays: Mapping[int, Sequence[int]] = {},
        settle: Settle = lambda branch: None,
    ):
        self.program, self.delay_slots, self.settle = program, delay_slots, settle
        self.scalars, self.arrays = scalars, arrays
        self.values: dict[str, Value] = {}  # by name
        self.registers: dict[str, Value] = {}
        self.memory: dict[Pointer, Value] = {Pointer(name, 0): value for name, value in words.items()}
        self.read_bytes = self.written_bytes = self.transfers = 0
        self.calls: collections.Counter[tuple[str, tuple[int | None, ...]]] = collections.Counter()
        self.settled: dict[Branch, str | int] = {}
        self.unsettled: dict[Branch | str, None] = {}
        self._passes: collections.Counter[int] = collections.Counter()
        self._definitions: dict[str, list[Instruction]] = collections.defaultdict(list)
        for bundle in bundles:
            for one in bundle:
                if one.result:
                    self._definitions[one.result].append(one)
        self.bundles = self._slice(bundles)
        self._index = {b: i for i, b in enumerate(b for b, bundle in enumerate(bundles) if _branch(bundle))}

    def _slice(self, bundles: Sequence[Sequence[Instruction]]) -> list[list[Instruction]]:
        """Only what branches, DMAs and calls hang on."""
        every = [one for bundle in bundles for one in bundle]
        stores = [one for one in every if one.op == "sst"]
        keep = {one for one in every if one.is_branch or one.is_dma or one.callee}
        names = [name for one in keep for name in (one.guard, one.size and one.size.lstrip("%")) if name]
        names += [name for one in keep if one.callee or "to_smem" in one.op for name in one.names]
        seen: set[str] = set()
        while names:
            name = names.pop()
            if name in seen:
                continue
            seen.add(name)
            for one in self._definitions[name]:
                keep.add(one)
                names += one.names
                if one.op == "sld" and stores:
                    keep.update(stores)
                    names += [name for store in stores for name in store.names]
                    stores = []
        return [[one for one in bundle if one in keep] for bundle in bundles]

    def run(self, limit: int = 50_000_000) -> list[int]:
        """How often each bundle runs."""
        count = len(self.bundles)
        leaders = {0, count}
        for b, bundle in enumerate(self.bundles):
            if one := _branch(bundle):
                if one.target is None:
                    raise NotImplementedError(f"{self.program}: a branch without a fixed target: `{one.text}`")
                leaders |= {min(b + self.delay_slots + 1, count), one.target}
        starts = sorted(leaders)
        end = dict(itertools.pairwise(starts))
        code = {start: [(b, one) for b in range(start, end[start]) for one in self.bundles[b]] for start in starts[:-1]}
        runs: collections.Counter[int] = collections.Counter()
        at, jump = 0, None  # jump: (the bundle after its delay slots, the target)
        while at < count:
            runs[at] += 1
            limit -= 1
            if limit < 0:
                raise RuntimeError(f"{self.program} does not end: it was left in bundle {at:#x}.")
            for b, one in code[at]:
                if not one.is_branch:
                    self._execute(one)
                elif self._is_taken(b, one):
                    if jump:
                        raise NotImplementedError(f"{self.program}: a jump in the delay slots of another, in {b:#x}")
                    jump = (min(b + self.delay_slots + 1, count), one.target)
            at = end[at]
            if jump and at >= jump[0]:
                at, jump = jump[1], None
        counts = [0] * count
        for start, times in runs.items():
            counts[start : end[start]] = [times] * (end[start] - start)
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
        if not branch.is_loop and choice in ("run", "skip"):
            return choice == "skip"
        raise ValueError(f"{choice!r} does not settle {branch}: a loop takes its count, a jump 'run' or 'skip'.")

    def _execute(self, one: Instruction):
        holds = self._holds(one)
        if one.is_dma or one.callee or one.op == "sst":
            if holds is False:
                return
            if one.op == "sst":
                self._store(self._read(one.args[0]), holds if isinstance(holds, Unknown) else self._read(one.args[1]))
            elif one.is_dma:
                self._transfer(one)
            else:
                values = map(self._read, one.args)
                self.calls[one.callee, tuple(value if isinstance(value, int) else None for value in values)] += 1
        elif holds is False:
            if one.otherwise:
                self._write(one.result, self.values.get(one.otherwise, Unknown(one.text)))
        elif one.result:
            self._write(one.result, holds if isinstance(holds, Unknown) else self._compute(one))

    def _write(self, name: str, value: Value):
        self.values[name] = self.registers[_register(name)] = value

    def _store(self, where: Value, value: Value):
        if not isinstance(where, Pointer):  # it may be anywhere, except where registers are kept
            self._forget(lambda base: not base.endswith("_spill"))
        elif where.offset is None:
            self._forget(lambda base: base == where.base)
        else:
            self.memory[where] = value

    def _forget(self, hit: Callable[[str], bool]):
        self.memory = {where: value for where, value in self.memory.items() if not hit(where.base)}

    def _holds(self, one: Instruction) -> bool | Unknown:
        if not one.guard:
            return True
        value = self.values.get(one.guard, Unknown(one.text))
        return value if isinstance(value, Unknown) else bool(value) != one.negated

    def _read(self, arg: str) -> Value:
        total: Value = 0
        for term in _terms(arg):
            value = self.values.get(term, _NOT_WRITTEN) if isinstance(term, str) else term
            total = _add(total, value) if total != 0 else value
        return total

    def _compute(self, one: Instruction) -> Value:
        op, unknown = one.op.split(".")[0], Unknown(one.text)
        if op in ("sphi", "pphi"):
            registers = {_register(name) for name in (one.result, *one.names)}
            if len(registers) > 1:
                raise NotImplementedError(f"{self.program}: a phi of several registers: `{one.text}`")
            return self.registers.get(registers.pop(), unknown)
        if op == "inlined_call_operand":
            index = int(re.search(r"index: (\d+)", one.text).group(1))
            if "<no memory space>" not in one.text:
                return Pointer(f"operand {index}", 0)
            return self.scalars.get(index, self.arrays[index][0] & MASK if index in self.arrays else unknown)
        values = [self._read(arg) for arg in one.args]
        values = [unknown if value is _NOT_WRITTEN else value for value in values]
        if op == "sld":
            return self.memory.get(values[0], unknown) if isinstance(values[0], Pointer) else unknown
        if op in ("smov", "pmov", "int_to_ptr") and values:
            return values[-1]
        if op == "scalar_select":
            chosen, yes, no = values
            return (yes if yes == no else chosen) if isinstance(chosen, Unknown) else yes if chosen else no
        if op in _LOGIC:
            return _logic(op, values)
        if len(values) != 2 or ".f32" in one.op:
            return unknown
        if op in ("sadd", "scalar_lea"):
            return _add(*values)
        a, b = values
        if isinstance(a, Unknown) or isinstance(b, Unknown):
            return a if isinstance(a, Unknown) else b
        if isinstance(a, Pointer) and isinstance(b, Pointer) and a.base == b.base and None not in (a.offset, b.offset):
            a, b = a.offset & MASK, b.offset & MASK  # comparisons and differences within one array
        if isinstance(a, Pointer) and isinstance(b, int):
            if op in ("sshll", "sshrl"):  # the same place in other units
                return a
            return _add(a, -b & MASK) if op == "ssub" else unknown
        if isinstance(a, Pointer) or isinstance(b, Pointer):
            return unknown
        if op == "scmp":
            order = (a, b) if ".u32" in one.op else (_signed(a), _signed(b))
            return int(getattr(operator, one.op.split(".")[1])(*order))
        if op in ("smin", "smax"):
            return (min if op == "smin" else max)(a, b, key=int if ".u32" in one.op else _signed)
        return _ARITHMETIC[op](a, b) & MASK if op in _ARITHMETIC else unknown

    def _transfer(self, one: Instruction):
        if match := re.fullmatch(r"dma\.(\w+?)_to_(\w+)", one.op):
            source, destination = match.groups()
        elif one.op == "dma.general":
            source, destination = self._space(one.args[0]), self._space(one.args[1])
        else:  # a wait
            return
        if destination == "smem":
            self._load_array(one)
        if "hbm" not in (source, destination):
            return
        size = self._read(one.size) if one.size else _NOT_WRITTEN
        if not isinstance(size, int):
            self.unsettled[f"{self.program}, a DMA whose size is data, by `{_origin(size, one)}`"] = None
            return
        self.transfers += 1
        self.read_bytes += GRANULE * size * (source == "hbm")
        self.written_bytes += GRANULE * size * (destination == "hbm")

    def _load_array(self, one: Instruction):
        """A DMA into SMEM brings an argument whose values are given, or something unknown."""
        source, destination = self._read(one.args[0]), self._read(one.args[1])
        if not isinstance(destination, Pointer):
            self._store(destination, _NOT_WRITTEN)
            return
        self._forget(lambda base: base == destination.base)
        whole = isinstance(source, Pointer) and source.base.startswith("operand") and source.offset == 0
        if whole and destination.offset is not None:
            for i, value in enumerate(self.arrays.get(int(source.base.split()[1]), ())):
                self.memory[Pointer(destination.base, destination.offset + i)] = value & MASK

    def _space(self, arg: str, depth: int = 8) -> str:
        """The memory that a pointer points to, by the instructions that made it."""
        for one in self._definitions[arg.lstrip("%")] if depth else []:
            if match := re.search(r"\.(hbm|vmem|smem)\b", one.op):
                return match.group(1)
            if found := next(filter(None, (self._space(inner, depth - 1) for inner in one.args)), ""):
                return found
        return ""


_NOT_WRITTEN = Unknown("a value that no scalar instruction writes")
_LOGIC = ("por", "pnor", "pand", "pnand", "pxor", "pneg")
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


def _signed(x: int) -> int:
    return x - (1 << 32) if x & 0x80000000 else x


def _register(name: str) -> str:
    return name.rsplit("_", 1)[-1]


def _branch(bundle: Sequence[Instruction]) -> Instruction | None:
    return next((one for one in bundle if one.is_branch), None)


def _origin(value: Value, one: Instruction) -> str:
    return value.origin if isinstance(value, Unknown) and value is not _NOT_WRITTEN else one.text


@functools.cache
def _terms(arg: str) -> tuple[str | Value, ...]:
    """What an argument is the sum of: names of values (str) and constants."""
    terms = []
    for term in re.sub(r"\w+:|[\[\]]", "", arg).split("+"):
        term = term.strip()
        if term.startswith("%"):
            terms.append(term[1:])
        elif term.startswith("#"):
            terms.append(Pointer(term, 0))
        else:
            try:
                terms.append(int(term.lstrip("$"), 0) & MASK)
            except ValueError:
                terms.append(Unknown(arg))
    return tuple(terms)


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
    unknown = next((value for value in values if isinstance(value, Unknown)), None)
    known = [bool(value) for value in values if not isinstance(value, Unknown)]
    if op in ("pneg", "pxor"):
        return unknown or int(not known[0] if op == "pneg" else known[0] != known[1])
    decisive = op in ("por", "pnor")  # one operand that is this decides
    if unknown and decisive not in known:
        return unknown
    return int((decisive in known) == (op in ("por", "pnand")))
