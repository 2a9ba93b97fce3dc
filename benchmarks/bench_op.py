"""The operator in float32 on a CPU, ours beside what others wrote, their calls interleaved in one run.

    make bench                                       # peers are what `make bench-peers` could install
    python benchmarks/bench_op.py --ops gdn --shapes s m --modes gradient --cores 1
    python benchmarks/bench_op.py --ops gdn --shapes b1t1024h4k64v64 b1t262144h4k64v64 --only ours

Each implementation compiles its forward pass, or `value_and_grad` of the sum of squared outputs over all inputs, in a
process of its own pinned to `--cores` cores; then single calls alternate. The table has the least CPU time (of one
core) or wall time (of more) over all rounds, and its ratio to the fastest of the others.
"""

import argparse
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from cases import SHAPES, parse_shape
from implementations import IMPLEMENTATIONS
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent
OPS = ("gdn", "kda", "gdn2", "sla")
MODES = ("forward", "gradient")
SECONDS = 12.0  # of calls that one implementation may take in a table, but for a least number of rounds


class Missing(Exception):
    """An implementation that is not here, or does not run: left out, and named."""


class Worker:
    def __init__(self, name: str, shape: str, mode: str, cores: int):
        self.name, self.calls = name, []
        environment = IMPLEMENTATIONS[name].environment
        python = sys.executable if environment is None else str(ROOT / f".venv-{environment}" / "bin" / "python")
        if not pathlib.Path(python).exists():
            raise Missing(f"there is no {python}; `make bench-peers` installs it")
        command = [python, str(HERE / "worker.py"), name, shape, mode, str(cores)]
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            cwd=HERE,
        )
        self.hello = self._read()

    def _read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if "Error: " in line]
        raise Missing((lines or [f"its process ended with exit code {code}"])[-1])

    def call(self):
        self.process.stdin.write("call\n")
        self.process.stdin.flush()
        self.calls.append(self._read())

    def wants_more(self, rounds: int) -> bool:
        spent = sum(call["wall_ms"] for call in self.calls) / 1e3
        return len(self.calls) < 3 or (len(self.calls) < rounds and spent < SECONDS)

    def least(self, key: str) -> float:
        return min(call[key] for call in self.calls)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(op: str, shape: str, mode: str, cores: int, rounds: int, only: str) -> list[dict]:
    """A record for every implementation of `op` that is here, ours first."""
    sizes, workers = parse_shape(shape), []
    for name, how in IMPLEMENTATIONS.items():
        unfit = how.only_128 and (sizes.key_dim, sizes.value_dim) != (128, 128)
        if how.op != op or not re.search(only, name) or unfit:
            continue
        try:
            workers.append(Worker(name, shape, mode, cores))
        except Missing as why:
            print(f"{name} is left out: {why}", file=sys.stderr)
    while any(worker.wants_more(rounds) for worker in workers):
        for worker in workers:
            if worker.wants_more(rounds):
                worker.call()
    for worker in workers[1:]:
        if not math.isclose(worker.hello["loss"], workers[0].hello["loss"], rel_tol=1e-3):
            raise SystemExit(
                f"bench_op: {worker.name} computes {worker.hello['loss']}, {workers[0].name} "
                f"{workers[0].hello['loss']}: they do not do the same work."
            )
    for worker in workers:
        worker.close()
    key = "cpu_ms" if cores == 1 else "wall_ms"
    return [
        {"name": w.name, "op": op, "shape": shape, "mode": mode, "cores": cores, "ms": w.least(key), **w.hello}
        for w in workers
    ]


def table(records: list[dict]) -> Table:
    first = records[0]
    unit = "CPU ms of one core" if first["cores"] == 1 else f"wall ms of {first['cores']} cores"
    out = Table(title=f"{first['op']}, {first['mode']}, float32, {parse_shape(first['shape'])}", title_justify="left")
    for column in ("implementation", unit, "to the fastest peer", "compile s", "peak MB", "versions"):
        out.add_column(column, justify="left" if column in ("implementation", "versions") else "right")
    peers = [r["ms"] for r in records if not r["name"].startswith("ours")]
    for r in records:
        ratio = f"{r['ms'] / min(peers):.2f}" if peers else ""
        versions = ", ".join(f"{name} {version}" for name, version in r["versions"].items())
        numbers = (f"{r['ms']:.1f}", ratio, f"{r['compile_s']:.1f}", f"{r['peak_mb']:.0f}")
        out.add_row(r["name"], *numbers, versions)
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=list(OPS))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="s, m, b, or sizes as in b1t2048h4k64v64")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=20, help="calls of each, at most")
    parser.add_argument("--only", default="", help="a regular expression of names: leave out others")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    options = parser.parse_args()
    for shape in options.shapes:
        try:
            parse_shape(shape)
        except ValueError as wrong:
            parser.error(str(wrong))

    console, found = Console(width=None if sys.stdout.isatty() else 150), []
    for op in options.ops:
        for shape in options.shapes:
            for mode in options.modes:
                records = measure(op, shape, mode, options.cores, options.rounds, options.only)
                if records:
                    console.print(table(records))
                found += records
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
