"""Memory of long sequences on one device: peak against length for every residual policy, and in segments.

    python benchmarks/long_sequences.py                  # the memory figures of docs/scaling.md and the plot
    python benchmarks/long_sequences.py --no-run         # only what XLA says it will hold
    python benchmarks/long_sequences.py --draw           # only the plot, from the figures kept in results/

*Planned* is what the compiled program holds at once by XLA's own plan: arguments, results and temporary arrays.
*Measured* is by how much the resident memory of a process of its own rose, arguments and call (Linux: VmHWM).

What is run: Gated DeltaNet, 4 heads of 128 x 128, float32, one sequence. `training` is one call of `gated_delta` and
the gradients of all its inputs. `segments` is a language model of bytes with one such layer of width 512, whose loss
over the whole text is computed by a scan over segments of 4096 tokens that carries the layer's state; its training
keeps one state for every segment and computes the rest again.
"""

import argparse
import json
import pathlib
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from gated_delta import GDN, Chunked, GatedDeltaMixer, Gates, gated_delta

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "long-sequences.json"
PLOT = HERE.parent / "docs" / "figures" / "long-sequences.svg"
HEADS, DIM, MODEL, SEGMENT = 4, 128, 512, 4096
POLICIES = ("all", "solves", "states", "none")
LENGTHS = [1 << n for n in (12, 14, 16, 17, 18, 20)]
LONGEST_RUN = {"forward": 1 << 20, "training": 1 << 17, "segments, forward": 1 << 20, "segments, training": 1 << 17}
MEASURED = [1 << 14, 1 << 17, 1 << 20]


# ---- what is measured ------------------------------------------------------------------------------------------------


class ByteModel(eqx.Module):
    """Bytes to the loss of the next byte, over a segment of a text and from the state before it."""

    embedding: eqx.nn.Embedding
    mixer: GatedDeltaMixer
    head: eqx.nn.Linear

    def __init__(self, key):
        embedding_key, mixer_key, head_key = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(256, MODEL, key=embedding_key)
        self.mixer = GDN(MODEL, key_heads=HEADS, key_dim=DIM, value_dim=DIM, key=mixer_key)
        self.head = eqx.nn.Linear(MODEL, 256, key=head_key)

    def __call__(self, tokens, targets, state):
        x = jax.vmap(self.embedding)(tokens)
        out, state = self.mixer(x, state)
        scores = jax.nn.log_softmax(jax.vmap(self.head)(x + out))
        return -jnp.sum(jnp.take_along_axis(scores, targets[:, None], axis=1)), state


def loss_in_segments(model: ByteModel, text):
    """Mean loss of `text`, `[time + 1]`, segment by segment: what is kept for the gradient is the state before each."""
    tokens, targets = (x.reshape(-1, SEGMENT) for x in (text[:-1], text[1:]))

    @jax.checkpoint
    def body(state, segment):
        loss, state = model(*segment, state)
        return state, loss

    _, losses = jax.lax.scan(body, model.mixer.init_state(), (tokens, targets))
    return jnp.sum(losses) / tokens.size


def operator_arguments(length: int) -> dict:
    def array(*shape):
        return jax.ShapeDtypeStruct((1, length, *shape), jnp.float32)

    gates = Gates(array(HEADS, 1), array(HEADS, 1), is_tied=True)
    return {"q": array(HEADS, DIM), "k": array(HEADS, DIM), "v": array(HEADS, DIM), "gates": gates}


def make_case(what: str, policy: str, length: int):
    """A function and its arguments as shapes."""
    if what.startswith("segments"):
        model = eqx.filter_eval_shape(ByteModel, jax.random.key(0))
        dynamic, static = eqx.partition(model, lambda x: hasattr(x, "dtype"))
        text = jax.ShapeDtypeStruct((length + 1,), jnp.int32)

        def loss(dynamic, text):
            return loss_in_segments(eqx.combine(dynamic, static), text)

        return (loss if what.endswith("forward") else jax.value_and_grad(loss)), (dynamic, text)

    backend = Chunked(residuals=cast(Any, policy))

    def forward(arguments):
        return gated_delta(**arguments, backend=backend)

    def training(arguments):
        out, pull = jax.vjp(lambda arguments: forward(arguments)[0], arguments)
        return pull(jnp.ones_like(out))

    return (forward if what == "forward" else training), (operator_arguments(length),)


def values_of(shapes, length: int):
    """Arrays to run with: small random numbers, slow decays, random bytes."""
    rng = np.random.default_rng(0)

    def one(path, x):
        if x.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 256, x.shape), jnp.int32)
        value = jax.random.normal(jax.random.key(len(str(path))), x.shape, x.dtype) * DIM**-0.5
        return -0.1 * jnp.abs(value) if "log_decay" in str(path) else value

    return jax.tree_util.tree_map_with_path(one, shapes)


# ---- one measurement, in a process of its own ------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise SystemExit(f"long_sequences: /proc/self/status has no {name}; measuring needs Linux (else: --no-run)")


def measure(what: str, policy: str, length: int, run: bool) -> dict:
    function, shapes = make_case(what, policy, length)
    compiled = jax.jit(function).lower(*shapes).compile()
    memory = cast(Any, compiled.memory_analysis())
    kinds = {
        "arguments": memory.argument_size_in_bytes,
        "results": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
    }
    record = {"what": what, "policy": policy, "length": length, "planned": sum(kinds.values()), **kinds}
    if run:
        before = status("VmRSS")  # arguments belong to what rises
        values = values_of(shapes, length)
        jax.block_until_ready(values)
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
        started = time.perf_counter()
        out = jax.block_until_ready(compiled(*values))
        record["seconds"] = time.perf_counter() - started
        record["measured"] = status("VmHWM") - before
        record["finite"] = all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(out))
    return record


def in_own_process(*arguments) -> dict:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"long_sequences: {arguments} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_all(run: bool, console: Console) -> list[dict]:
    cases = [("forward", "none")] + [("training", policy) for policy in POLICIES]
    cases += [("segments, forward", "solves"), ("segments, training", "solves")]
    records = []
    for what, policy in cases:
        for length in LENGTHS:
            runs = run and length in MEASURED and length <= LONGEST_RUN[what]
            records.append(in_own_process(what, policy, length) if runs else measure(what, policy, length, run=False))
            console.print(line(records[-1]), soft_wrap=True)
    return records


# ---- what is shown ---------------------------------------------------------------------------------------------------


def line(one: dict) -> str:
    text = f"{one['what']}, {one['policy']}, {one['length']} tokens: {one['planned'] / 2**20:,.0f} MiB planned"
    if "measured" in one:
        text += f", {one['measured'] / 2**20:,.0f} measured, {one['seconds']:.1f} s"
    return text if one.get("finite", True) else text + ", NOT FINITE"


def growth(records: list[dict]) -> tuple[float, float]:
    """Bytes at length 0 and bytes per token, through the two longest."""
    a, b = sorted(records, key=lambda one: one["length"])[-2:]
    slope = (b["planned"] - a["planned"]) / (b["length"] - a["length"])
    return b["planned"] - slope * b["length"], slope


def by_case(records: list[dict]) -> dict[str, list[dict]]:
    found: dict[str, list[dict]] = {}
    for one in records:
        own = one["what"] == "training"
        found.setdefault(f"training, {one['policy']!r}" if own else one["what"], []).append(one)
    return found


def table(records: list[dict]) -> Table:
    lengths = (1 << 14, 1 << 17, 1 << 20)
    table = Table(title="MiB held at once: planned (measured)")
    table.add_column("case")
    for length in lengths:
        table.add_column(f"{length} tokens", justify="right")
    table.add_column("bytes per token", justify="right")
    table.add_column("float32 per token and head", justify="right")
    for name, own in by_case(records).items():
        cells = []
        for length in lengths:
            one = next(one for one in own if one["length"] == length)
            held = f" ({one['measured'] / 2**20:,.0f})" if "measured" in one else ""
            cells.append(f"{one['planned'] / 2**20:,.0f}{held}")
        _, slope = growth(own)
        table.add_row(name, *cells, f"{slope:,.0f}", f"{slope / 4 / HEADS:,.1f}")
    return table


def draw(records: list[dict], path: pathlib.Path):
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    colours = dict(
        zip(by_case(records), ("tab:gray", "tab:red", "tab:orange", "tab:blue", "tab:green", "black", "tab:purple"))
    )
    for name, own in by_case(records).items():
        style = "--" if name.startswith("segments") else "-"
        lengths = [one["length"] for one in own]
        axes.plot(lengths, [one["planned"] / 2**20 for one in own], style, color=colours[name], label=name)
        ran = [one for one in own if "measured" in one]
        axes.plot(
            [one["length"] for one in ran],
            [one["measured"] / 2**20 for one in ran],
            "o",
            color=colours[name],
            markersize=5,
        )
    forbidden = [4 * HEADS * DIM * DIM * length / 2**20 for length in LENGTHS]
    axes.plot(LENGTHS, forbidden, ":", color="tab:brown", label="one state per token (never held)")
    axes.set(xlabel="tokens", ylabel="MiB held at once")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_title("GDN, 4 heads of 128 x 128, float32: lines are planned by XLA, dots measured", fontsize=10)
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(fontsize=8)
    path.parent.mkdir(exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "0"}):  # the same figures make the same file
        figure.savefig(path, metadata={"Date": None})


def main():
    jax.config.update("jax_platforms", "cpu")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-run", action="store_true", help="compile only")
    parser.add_argument("--draw", action="store_true", help="only table and plot, of the figures that are kept")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, policy, length = options.one
        print(json.dumps(measure(what, policy, int(length), run=True)))
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    if not options.draw:
        records = measure_all(not options.no_run, console)
        versions = {"jax": version("jax"), "python": platform.python_version(), "device": jax.devices()[0].device_kind}
        RESULTS.write_text(json.dumps({"versions": versions, "records": records}, indent=1) + "\n")
    kept = json.loads(RESULTS.read_text())
    console.print(table(kept["records"]))
    print(kept["versions"])
    draw(kept["records"], PLOT)


if __name__ == "__main__":
    main()
