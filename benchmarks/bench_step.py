"""One token of every request on a CPU core: ours beside others' steps, and beside a copy of the states.

    make bench-step                                  # peers are what `make bench-peers` could install
    python benchmarks/bench_step.py --batch 8 --rounds 5
    python benchmarks/bench_step.py --shapes s m b   # of bench_op.py

Gated DeltaNet in float32, 16 key and 32 value heads of 128 x 128 as in Qwen3-Next, from and to states that are donated
where JAX runs. Each implementation has a process of its own, pinned to one core; they take turns of some hundred calls.
The table has the median and the 99th percentile of a call's wall time, tokens per second, and how much longer the
median is than that of a copy of the states into other memory, by NumPy; and how long JAX takes for such a copy.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable

import numpy as np

ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def state(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.key_dim, self.value_dim


def inputs(sizes: Sizes, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32: unit queries and keys, beta in (0, 1), log decays like freshly initialised ones; no time axis."""
    rng = np.random.default_rng(seed)
    keys, heads = (sizes.batch, sizes.key_heads, sizes.key_dim), (sizes.batch, sizes.heads)
    q, k = (rng.standard_normal(keys) for _ in range(2))
    arrays = {
        "q": q / np.linalg.norm(q, axis=-1, keepdims=True),
        "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
        "v": rng.standard_normal((*heads, sizes.value_dim)),
        "log_decay": -rng.uniform(1, 16, heads) * np.exp(rng.uniform(np.log(1e-3), np.log(0.1), heads)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal(heads))),
    }
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}


# ---- implementations: `(state, **inputs) -> (state, out)` ------------------------------------------------------------


def _ours():
    import gated_delta as gd

    def step(state, q, k, v, log_decay, beta):
        out, state = gd.gated_delta_step(q, k, v, gd.Gates.tied(beta, log_decay), state)
        return state, out

    return step


def _maxtext():
    import jax.numpy as jnp
    from maxtext.models import qwen3

    def step(state, q, k, v, log_decay, beta):
        group = v.shape[1] // q.shape[1]  # its layer repeats queries and keys too
        q, k = (jnp.repeat(x, group, axis=1) for x in (q, k))
        arrays = (x[:, None] for x in (q, k, v, log_decay, beta))
        out, state = qwen3.jax_ar_gated_delta_rule(*arrays, state, compute_dtype=jnp.float32)
        return state, out[:, 0]

    return step


def _deltanet():
    import deltanet_tpu

    def step(state, q, k, v, log_decay, beta):
        out, state = deltanet_tpu.gdn_decode_step(q, k, v, log_decay, beta, state)
        return state, out

    return step


def _transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

    def step(state, **arrays):
        arrays = (x[:, None] for x in arrays.values())
        out, state = torch_recurrent_gated_delta_rule(*arrays, initial_state=state, output_final_state=True)
        return state, out[:, 0]

    return step


@dataclasses.dataclass(frozen=True)
class Implementation:
    package: str
    environment: str | None  # which `.venv-*` holds it; `None`: the one that runs this
    make: Callable
    is_torch: bool = False
    only_128: bool = False


def _jax_copy():
    import jax.numpy as jnp

    def step(state, v, **arrays):
        return jnp.copy(state), v

    return step


OURS, COPY, JAX_COPY = "ours", "a copy of the states", "the same by JAX"
IMPLEMENTATIONS = {
    OURS: Implementation("gated-delta", None, _ours),
    "maxtext": Implementation("maxtext", "conformance", _maxtext),
    "deltanet-tpu": Implementation("deltanet-tpu", "conformance", _deltanet, only_128=True),
    "transformers": Implementation("transformers", "conformance-torch", _transformers, is_torch=True),
    COPY: Implementation("numpy", None, lambda: None),
    JAX_COPY: Implementation("jax", None, _jax_copy),
}


# ---- in the process of one of them -----------------------------------------------------------------------------------


def _jax_call(step, arrays, state, donates: bool):
    import jax
    import jax.numpy as jnp

    run = jax.jit(lambda state, arrays: step(state, **arrays), donate_argnums=(0,) if donates else ())
    arrays = jax.tree.map(jnp.asarray, arrays)
    held = [jnp.array(state)]

    def call():
        held[0], out = run(held[0], arrays)
        return jax.block_until_ready((held[0], out))[1]

    return call


def _torch_call(step, arrays, state):
    import torch

    torch.set_num_threads(1)
    arrays = {name: torch.from_numpy(x) for name, x in arrays.items()}
    held = [torch.from_numpy(state.copy())]

    def call():
        with torch.inference_mode():
            held[0], out = step(held[0], **arrays)
        return out

    return call


def _copy_call(state):
    other = np.zeros_like(state)

    def call():
        np.copyto(other, state)
        return other[:, :, 0]

    return call


def work(name: str, sizes: Sizes):
    """Answers every number on standard input with the times of so many calls, in microseconds."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])  # before JAX starts its threads
    warnings.filterwarnings("ignore")  # peers', on import
    how = IMPLEMENTATIONS[name]
    arrays = inputs(sizes)
    state = np.random.default_rng(1).standard_normal(sizes.state).astype(np.float32)
    if name == COPY:
        call = _copy_call(state)
    elif how.is_torch:
        call = _torch_call(how.make(), arrays, state)
    else:
        call = _jax_call(how.make(), arrays, state, donates=name != JAX_COPY)
    first = np.asarray(call(), np.float64)
    packages = {how.package} | ({"torch"} if how.is_torch else {"jax", "jaxlib"} if name != COPY else set())
    versions = {package: importlib.metadata.version(package) for package in sorted(packages)}
    print(json.dumps({"sum": float(np.sum(np.square(first))), "versions": versions}), flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            started = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - started) / 1e3)
        print(json.dumps(times), flush=True)


# ---- the runner ------------------------------------------------------------------------------------------------------


class Missing(Exception):
    """An implementation that is not here, or does not run: left out, and named."""


class Worker:
    def __init__(self, name: str, sizes: Sizes):
        self.name, self.times = name, []
        environment = IMPLEMENTATIONS[name].environment
        python = sys.executable if environment is None else str(ROOT / f".venv-{environment}" / "bin" / "python")
        if not pathlib.Path(python).exists():
            raise Missing(f"there is no {python}; `make bench-peers` installs it")
        command = [python, __file__, "--worker", json.dumps([name, dataclasses.astuple(sizes)])]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.errors = tempfile.TemporaryFile("w+")
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(command, **pipes, stderr=self.errors, env=environment)
        self.hello = self._read()

    def _read(self):
        for line in self.process.stdout:
            if line[:1] in "{[":
                return json.loads(line)
        code = self.process.wait()
        self.errors.seek(0)
        said = self.errors.read().strip().splitlines()
        raise Missing(said[-1] if said else f"its process ended with exit code {code}")

    def calls(self, count: int) -> list[float]:
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self._read()

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def measure(sizes: Sizes, rounds: int, seconds: float) -> list[dict]:
    """A record for each implementation that is here."""
    workers = []
    for name, how in IMPLEMENTATIONS.items():
        if how.only_128 and (sizes.key_dim, sizes.value_dim) != (128, 128):
            continue
        try:
            workers.append(Worker(name, sizes))
        except Missing as why:
            print(f"{name} is left out: {why}", file=sys.stderr)
    sums = {worker.name: worker.hello["sum"] for worker in workers if worker.name not in (COPY, JAX_COPY)}
    for name, found in sums.items():
        if not math.isclose(found, sums[OURS], rel_tol=1e-4):
            raise SystemExit(f"bench_step: {name} computes {found}, ours {sums[OURS]}: not the same work.")
    counts = {}
    for worker in workers:
        warm = sorted(worker.calls(20))[10]
        counts[worker.name] = max(10, min(1000, int(seconds * 1e6 / rounds / warm)))
    for _ in range(rounds):
        for worker in workers:
            worker.times += worker.calls(counts[worker.name])
    for worker in workers:
        worker.close()
    return [
        {
            "name": worker.name,
            "sizes": dataclasses.asdict(sizes),
            "p50_us": float(np.percentile(worker.times, 50)),
            "p99_us": float(np.percentile(worker.times, 99)),
            "calls": len(worker.times),
            "versions": worker.hello["versions"],
        }
        for worker in workers
    ]


def table(sizes: Sizes, records: list[dict]):
    from rich.table import Table

    megabytes = 4 * math.prod(sizes.state) / 2**20
    title = (
        f"One token of {sizes.batch} requests, {sizes.key_heads}/{sizes.heads} heads of {sizes.key_dim} x "
        f"{sizes.value_dim}: {megabytes:g} MiB of states"
    )
    out = Table(title=title, title_justify="left")
    columns = ("implementation", "p50 us", "p99 us", "tokens/s", "over ours", "over the copy", "calls", "versions")
    for column in columns:
        out.add_column(column, justify="left" if column in ("implementation", "versions") else "right")
    medians = {record["name"]: record["p50_us"] for record in records}
    for record in records:
        name, median = record["name"], record["p50_us"]
        versions = ", ".join(f"{package} {version}" for package, version in record["versions"].items())
        ratios = (f"{median / medians[OURS]:.2f}", f"{median / medians[COPY]:.2f}")
        tokens = "" if name in (COPY, JAX_COPY) else f"{sizes.batch / median * 1e6:,.0f}"
        out.add_row(name, f"{median:.1f}", f"{record['p99_us']:.1f}", tokens, *ratios, str(record["calls"]), versions)
    return out


def main():
    from cases import parse_shape
    from rich.console import Console

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--shapes", nargs="*", default=[], help="of bench_op.py, such as s, m, b, instead of batches")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each implementation")
    parser.add_argument("--seconds", type=float, default=5.0, help="of calls of one implementation, in all")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    options = parser.parse_args()
    cases = [Sizes(batch, 16, 32, 128, 128) for batch in options.batch]
    if options.shapes:
        shapes = map(parse_shape, options.shapes)
        cases = [Sizes(one.batch, one.heads, one.heads, one.key_dim, one.value_dim) for one in shapes]
    records = []
    for sizes in cases:
        records += (found := measure(sizes, options.rounds, options.seconds))
        Console(width=160 if not sys.stdout.isatty() else None).print(table(sizes, found))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        name, sizes = json.loads(sys.argv[2])
        work(name, Sizes(*sizes))
    else:
        main()
