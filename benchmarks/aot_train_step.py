"""Compile the training step of examples/train_distributed.py for many TPU chips that are not there.

    python benchmarks/aot_train_step.py                       # the table of docs/scaling.md; needs jax and libtpu
    python benchmarks/aot_train_step.py --only 4x4x4 --mixer sla

libtpu takes the whole program through its partitioner, its collectives and its memory plan, as it would on the chips;
nothing is run. For each topology: the mesh, the collectives of a step with the bytes that one device receives of them
(loops counted as often as they run), and the memory of one device. A TPU 7x has two devices to a chip. Where the
compiler makes a reduce-scatter it is a fusion around an all-reduce, and counts as that.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from tpu.compile import libtpu_environment

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "aot-train-step.json"


@dataclasses.dataclass(frozen=True)
class Case:
    """A topology, the mesh over its devices, and what is changed in the step's options."""

    topology: str
    data: int
    model: int
    context: int
    options: Sequence[str] = ()

    def __str__(self) -> str:
        return " ".join((self.topology, f"{self.data} x {self.model} x {self.context}", *self.options))


CASES = (
    Case("tpu7x:2x2x1", data=2, model=2, context=2),
    Case("tpu7x:2x2x2", data=4, model=2, context=2),
    Case("tpu7x:4x4x4", data=32, model=2, context=2),
    Case("tpu7x:4x4x4", data=32, model=2, context=2, options=("--fsdp",)),
    Case("v5p:4x4x4", data=16, model=2, context=2, options=("--fsdp",)),
    Case("tpu7x:8x16x16", data=1024, model=2, context=2, options=("--fsdp",)),
)
LAYERS = ("--width", "2048", "--head", "128", "--units", "2", "--length", "8192", "--keep", "mixed")


# ---- in a process of its own -----------------------------------------------------------------------------------------


def compile_step(case: Case, mixer: str, layers: Sequence[str] = LAYERS) -> dict:
    """What libtpu says of the step; the environment must be `libtpu_environment`'s."""
    from importlib.metadata import version

    import jax
    from jax.experimental import topologies

    sys.path.insert(0, str(HERE.parent / "examples"))
    import train_distributed as example

    from gated_delta.pallas import PallasTPU

    devices = topologies.get_topology_desc(platform="tpu", topology_name=case.topology).devices
    rows = 2 * case.data
    options = example.parse([*layers, "--mixer", mixer, "--batch", str(rows), *case.options])
    mesh = example.make_mesh(case.data, case.model, case.context, devices)
    settings = example.settings_of(options, b"")
    example.check_divisible(settings, mesh)
    backend = PallasTPU(ahead_of_time=True) if options.backend == "pallas" else None
    plan = example.Plan(settings, mesh, options.fsdp, backend)
    windows = jax.ShapeDtypeStruct((1, rows, settings.length + 1), "int32", sharding=plan.batch)
    started = time.perf_counter()
    compiled = example.make_step(plan, options.keep).lower(*plan.targets(), windows).compile()
    memory = compiled.memory_analysis()
    return {
        **dataclasses.asdict(case),
        "mixer": options.mixer,
        "devices": len(devices),
        "parameters": sum(math.prod(x.shape) for x in jax.tree.leaves(plan.shapes[0])),
        "seconds": time.perf_counter() - started,
        "versions": {name: version(name) for name in ("jax", "libtpu")},
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "shared": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "collectives": count_collectives(compiled.as_text()),
    }


# ---- collectives of a compiled program -------------------------------------------------------------------------------

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
CALLED = re.compile(r"(?:calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%[\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Text:
    """A part of a compiled program."""

    text: str

    def as_text(self) -> str:
        return self.text


def count_collectives(hlo: str) -> dict[str, dict[str, int]]:
    """How often each kind of collective runs in a call of a compiled program, and the bytes that a device gets of them.

    A loop counts as often as the compiler says, or as the one constant in its condition does, as `lax.scan` makes it;
    another once.
    """
    from gated_delta.testing import collectives

    parts = re.split(r"\n(?=\S)", hlo)  # a computation begins at the left margin
    bodies = {match[2]: part for part in parts if (match := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{", part))}
    (entry,) = (name for name, part in bodies.items() if part.startswith("ENTRY"))
    found = {kind: collections.Counter() for kind in KINDS}

    def walk(name: str, times: int):
        for one in collectives(Text(bodies[name])):
            found[one.kind].update(calls=times, bytes=times * one.bytes)
        for line in bodies[name].splitlines()[1:]:
            inner = times
            if condition := re.search(r" while\(.*condition=%?([\w.\-]+)", line):
                inner *= trips(line, bodies[condition[1]])
            for called in CALLED.findall(line):
                for other in re.findall(r"[\w.\-]+", called):
                    walk(other, inner)

    walk(entry, 1)
    return {kind: dict(counts) for kind, counts in found.items() if counts}


def trips(loop: str, condition: str) -> int:
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop):
        return int(known[1])
    bounds = re.findall(r"s32\[\]\S* constant\((\d+)\)", condition)
    return int(bounds[0]) if len(bounds) == 1 else 1


# ---- the table -------------------------------------------------------------------------------------------------------


def in_own_process(case: Case, mixer: str, python: str = sys.executable, layers: Sequence[str] = LAYERS) -> dict:
    environment = {**os.environ, **libtpu_environment(pathlib.Path("/tmp")), "LIBTPU_INIT_ARGS": ""}
    arguments = json.dumps([dataclasses.asdict(case), mixer, layers])
    command = [python, __file__, "--one", arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{case.topology}: {done.stderr.strip()[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def table(records: list[dict]) -> Table:
    found = Table(title="The training step, compiled for chips that are not there")
    for column in ("topology, data x model x context", "devices", "M parameters", "state, GB", "temporary, GB"):
        found.add_column(column, justify="right")
    for kind in KINDS:
        found.add_column(f"{kind}: calls, MB", justify="right")
    for one in records:
        case = Case(**{field.name: one[field.name] for field in dataclasses.fields(Case)})
        figures = f"{one['parameters'] / 1e6:.0f}", f"{one['arguments'] / 1e9:.2f}", f"{one['temporary'] / 1e9:.2f}"
        sent = [one["collectives"].get(kind, {"calls": 0, "bytes": 0}) for kind in KINDS]
        cells = [f"{counts['calls']}, {counts['bytes'] / 1e6:,.0f}" for counts in sent]
        found.add_row(str(case), str(one["devices"]), *figures, *cells)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases that contain this; the others' figures are kept")
    parser.add_argument("--mixer", default="sla", choices=("gdn", "kda", "gdn2", "sla"))
    parser.add_argument("--python", default=sys.executable, help="interpreter that has jax and libtpu (default: this)")
    parser.add_argument("--show", action="store_true", help="only the table, of the figures that are kept")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        case, *others = json.loads(options.one)
        print(json.dumps(compile_step(Case(**case), *others)))
        return
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = [case for case in CASES if options.only in str(case)]
    if not chosen:
        parser.error(f"no case contains {options.only!r}; the cases are: {', '.join(map(str, CASES))}")
    for case in () if options.show else chosen:
        kept[str(case)] = in_own_process(case, options.mixer, options.python)
        print(f"{case.topology}: compiled in {kept[str(case)]['seconds']:.0f} s", flush=True)
        RESULTS.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    records = [kept[str(case)] for case in chosen if str(case) in kept]
    Console(width=None if sys.stdout.isatty() else 220).print(table(records))
    print("versions:", ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()))


if __name__ == "__main__":
    main()
