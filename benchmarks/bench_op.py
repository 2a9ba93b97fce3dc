"""Forward and backward of Gated DeltaNet in float32 on a CPU, ours beside a peer's, their calls interleaved in one run.

    make bench                                   # installs the peer in an environment of its own, then runs this
    python benchmarks/bench_op.py --shape s --peer-python .venv-maxtext/bin/python

Each implementation compiles `value_and_grad` of the sum of squared outputs over all inputs in a process of its own,
pinned to `--cores` cores; then single calls alternate. The table gives the least CPU time and wall time over all
rounds.
"""

import argparse
import json
import math
import os
import pathlib
import platform
import subprocess
import sys

from cases import SHAPES
from rich.console import Console
from rich.table import Table

HERE = pathlib.Path(__file__).parent


class Worker:
    def __init__(self, name: str, python: str, shape: str, cores: int):
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        command = [python, str(HERE / "worker.py"), name, shape, str(cores)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=HERE
        )
        self.name = name
        self.hello = self._read()
        self.calls: list[dict] = []

    def _read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(f"bench_op: the process of {self.name!r} ended without an answer (its error is above).")

    def call(self):
        self.process.stdin.write("call\n")
        self.process.stdin.flush()
        self.calls.append(self._read())

    def least(self, key: str) -> float:
        return min(call[key] for call in self.calls)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="s")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--peer-python", help="Python of an environment with maxtext; without it only ours is timed")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    options = parser.parse_args()

    workers = [Worker("ours", sys.executable, options.shape, options.cores)]
    if options.peer_python and pathlib.Path(options.peer_python).exists():
        workers.append(Worker("maxtext", options.peer_python, options.shape, options.cores))
    else:
        print(f"maxtext is left out: no Python at {options.peer_python}. `make bench` installs it.")
    for _ in range(options.rounds):
        for worker in workers:
            worker.call()
    for worker in workers[1:]:
        if not math.isclose(worker.hello["loss"], workers[0].hello["loss"], rel_tol=1e-4):
            raise SystemExit(f"bench_op: {worker.name} computes another loss: they do not do the same work.")

    shape = SHAPES[options.shape]
    table = Table(title=f"Gated DeltaNet, forward + backward, float32, {shape}, {options.cores} core(s)")
    for column in ("implementation", "CPU ms", "ratio to ours", "wall ms", "compile s", "peak MB", "versions"):
        table.add_column(column)
    ours = workers[0].least("cpu_ms")
    for worker in workers:
        cpu, hello = worker.least("cpu_ms"), worker.hello
        versions = ", ".join(f"{name} {version}" for name, version in hello["versions"].items())
        cells = (f"{cpu:.1f}", f"{cpu / ours:.2f}", f"{worker.least('wall_ms'):.1f}", f"{hello['compile_s']:.1f}")
        table.add_row(worker.name, *cells, f"{hello['peak_mb']:.0f}", f"{versions}, Python {hello['python']}")
    Console(width=160 if not sys.stdout.isatty() else None).print(table)
    if options.json:
        record = {
            "shape": vars(shape),
            "cores": options.cores,
            "machine": platform.machine(),
            "results": [{"name": w.name, **w.hello, "calls": w.calls} for w in workers],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
