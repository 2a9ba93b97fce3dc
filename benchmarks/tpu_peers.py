"""Our TPU kernels beside the peers', by the compiler's schedule, with no TPU at hand.

    make tpu-schedule                                        # installs the peers, then runs this: about half an hour
    make tpu-schedule ARGS="--only KDA --chip v6e"
    make tpu-schedule ARGS="--only requests"                 # one token of many requests
    make tpu-schedule ARGS="--no-peers --time 65536"         # ours only, at another length

One sequence of 8192 tokens, bf16 q, k, v, float32 gates in log space, forward and forward + backward, everything that
XLA adds included. Figures are cycles of one TensorCore per token and value head; `tpu_schedule.py` says what they
count. And one token of 1 to 256 requests, whose float32 states are updated in place: estimated time, and bytes over
those of one read and one write of the states.

Ours and the peers are compiled by the same jax and libtpu, those of `benchmarks/tpu-peers.txt`. All figures stay in
`--json`, and a peer that stands there with the same versions is not compiled again.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys

from rich.table import Table
from tpu.report import CHIPS, schedule
from tpu_schedule import COST_COLUMNS, console, cost_cells, new_table, notes, parse_function, per_token

HERE = pathlib.Path(__file__).parent
RESULTS = HERE / "results" / "tpu-schedule.json"
DISTRIBUTIONS = ("jax", "libtpu", "tokamax", "deltanet-tpu", "flywheel-tpu")


@dataclasses.dataclass(frozen=True)
class Row:
    """A case of ours and its peers: name, and call of a function of `tpu/ours.py` or `tpu/peers.py`. A fused layer has
    convolution, norm and gates inside, and no backward pass."""

    name: str
    ours: str
    peers: dict[str, str]
    layers: dict[str, str] = dataclasses.field(default_factory=dict)


TOKAMAX = "tokamax KDA, chunk 64, bounded gates"
ROWS = (
    Row("SLA-R4, 4 key heads x 256, 16 value heads, approx", "sla(inverse='approx')", {TOKAMAX: "tokamax_kda()"}),
    Row("SLA-R4, 4 key heads x 256, 16 value heads, exact", "sla(inverse='exact')", {TOKAMAX: "tokamax_kda()"}),
    Row(
        "SLA-R4, 8 key heads x 256, 32 value heads, approx",
        "sla_8(inverse='approx')",
        {f"{TOKAMAX}, 32 heads": "tokamax_kda(heads=32)"},
    ),
    Row(
        "KDA, 16 heads, unbounded gates",
        "kda()",
        {TOKAMAX: "tokamax_kda()", "deltanet-tpu KDA": "deltanet_tpu(kind='kda')"},
        {"flywheel KDA layer": "flywheel_layer(kind='kda')"},
    ),
    Row(
        "GDN, 16 heads",
        "gdn()",
        {"deltanet-tpu GDN": "deltanet_tpu(kind='gdn')"},
        {"flywheel GDN layer": "flywheel_layer(kind='gdn')", "tokamax GDN layer": "tokamax_layer()"},
    ),
    Row(
        "GDN, 16 key heads, 32 value heads with gates of their own",
        "gdn_grouped()",
        {"deltanet-tpu GDN 16/32": "deltanet_tpu(kind='gdn', heads=32, key_heads=16)"},
        {
            "flywheel GDN layer 16/32": "flywheel_layer(kind='gdn', heads=32, key_heads=16)",
            "tokamax GDN layer 16/32": "tokamax_layer(heads=32, key_heads=16)",
        },
    ),
    Row("GDN-2, 16 heads", "gdn2()", {"deltanet-tpu GDN-2": "deltanet_tpu(kind='gdn2')"}),
)
STEPS = {
    batch: Row(
        f"GDN, 16 key heads, 32 value heads, {batch} requests",
        f"step(batch={batch})",
        {"deltanet-tpu step, plain JAX": f"deltanet_tpu_step(batch={batch})"},
        {
            "flywheel GDN layer": f"flywheel_layer_step(batch={batch})",
            "tokamax GDN layer": f"tokamax_layer_step(batch={batch})",
        },
    )
    for batch in (1, 8, 64, 256)
}
STATE_BYTES = 32 * 128 * 128 * 4  # of one request


class Schedules:
    """Figures, by what was compiled, in a file."""

    def __init__(self, path: pathlib.Path, python: str, settings: dict):
        self.path, self.python, self.settings = path, python, settings
        self.kept: dict[str, dict] = json.loads(path.read_text()) if path.exists() else {}
        code = "import importlib.metadata as m, json, sys; have = {d.name: d.version for d in m.distributions()}; "
        code += "print(json.dumps({d: have[d] for d in sys.argv[1:] if d in have}))"
        command = [python, "-c", code, *DISTRIBUTIONS]
        self.versions = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        if "libtpu" not in self.versions:
            raise SystemExit(f"tpu_peers: {python} has no libtpu; `make tpu-schedule` installs one (Python 3.12).")

    def get(self, file: str, call: str, chip: str, backward: bool, again: bool) -> dict:
        function, keywords = parse_function(f"{file}:{call}")
        keywords |= self.settings | ({"backward": True} if backward else {})
        key = f"{chip}, {function}({', '.join(f'{name}={value!r}' for name, value in sorted(keywords.items()))})"
        known = self.kept.get(key)
        if known and not again and known["environment"] == self.versions:
            return known
        print(f"compiling {key}", flush=True)
        try:
            record = schedule(str(HERE / "tpu" / function), chip, keywords=keywords, python=self.python)
            # Of XLA's many small programs the sum is enough.
            kept = [one for one in record["programs"] if one["kind"] in ("pallas", "SparseCore") or one["settled"]]
        except (RuntimeError, ValueError) as error:
            print(f"  {error}", flush=True)
            return {"error": str(error)}
        self.kept[key] = {"environment": self.versions, **record, "function": function, "programs": kept}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.kept, indent=1, sort_keys=True) + "\n")
        return self.kept[key]


def add(table: Table, name: str, record: dict, ours: dict | None = None):
    if "error" in record:
        table.add_row(name, record["error"].strip().splitlines()[-1][:60])
        return
    comparable = ours is not None and "error" not in ours
    ratio = record["all"]["cycles_per_token_and_head"] / ours["all"]["cycles_per_token_and_head"] if comparable else 1
    table.add_row(name, per_token(record), f"{ratio:.2f}" if comparable else "", *cost_cells(record["all"]))


def sequences(schedules: Schedules, chip: str, backward: bool, options) -> bool:
    """The table of a pass over one sequence; whether anything failed."""
    title = f"{chip}, {'forward + backward' if backward else 'forward'}: by the compiler's schedule, one TensorCore"
    columns = ("implementation", "cycles per token and head:\nPallas + glue = all", "over ours", *COST_COLUMNS)
    table = new_table(title, *columns, left=("implementation",))
    shown: list[tuple[str, dict]] = []
    for row in ROWS:
        if options.only not in row.name:
            continue
        ours = schedules.get("ours.py", row.ours, chip, backward, again=True)
        add(table, row.name, ours)
        shown.append((row.name, ours))
        peers = {} if options.no_peers or options.batch else row.peers | ({} if backward else row.layers)
        for name, call in peers.items():
            shown.append((name, schedules.get("peers.py", call, chip, backward, options.again)))
            add(table, f"  {name}", shown[-1][1], ours)
        table.add_section()
    return show(table, shown)


def steps(schedules: Schedules, chip: str, options) -> bool:
    """The table of one token of many requests; whether anything failed."""
    title = f"{chip}, one token of many requests: by the compiler's schedule, one TensorCore"
    columns = ("implementation", "time over ours", "bytes over the least", *COST_COLUMNS)
    table = new_table(title, *columns, left=("implementation",))
    shown: list[tuple[str, dict]] = []
    for batch, row in STEPS.items():
        if options.only not in row.name:
            continue
        ours = schedules.get("ours.py", row.ours, chip, False, again=True)
        add_step(table, row.name, ours, batch)
        shown.append((row.name, ours))
        for name, call in ({} if options.no_peers else row.peers | row.layers).items():
            shown.append((name, schedules.get("peers.py", call, chip, False, options.again)))
            add_step(table, f"  {name}", shown[-1][1], batch, ours)
        table.add_section()
    return show(table, shown)


def show(table: Table, shown: list[tuple[str, dict]]) -> bool:
    """Print the table, if it has a row, and what has to be known beside it; whether anything failed."""
    if shown:
        console().print(table)
    for name, record in shown:
        for note in notes(record) if "error" not in record else ():
            console().print(f"{name}: {note}", style="yellow", highlight=False, soft_wrap=True)
    return any("error" in record for _, record in shown)


def add_step(table: Table, name: str, record: dict, batch: int, ours: dict | None = None):
    if "error" in record:
        table.add_row(name, record["error"].strip().splitlines()[-1][:60])
        return
    moved = (record["all"]["hbm_read"] + record["all"]["hbm_written"]) / (2 * batch * STATE_BYTES)
    comparable = ours is not None and "error" not in ours
    ratio = f"{record['all']['seconds'] / ours['all']['seconds']:.2f}" if comparable else ""
    table.add_row(name, ratio, f"{moved:.2f}", *cost_cells(record["all"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", action="append", choices=CHIPS, help="may be repeated; default tpu7x and v6e")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--time", type=int, help="tokens of a sequence (default 8192)")
    parser.add_argument("--batch", type=int, help="sequences (default 1); ours only")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--again", action="store_true", help="compile the peers again too")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the environment with libtpu and the peers"
    )
    parser.add_argument("--json", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    settings = {name: getattr(options, name) for name in ("time", "batch") if getattr(options, name)}
    python = options.python
    os.environ["PYTHONPATH"] = str(HERE.parent / "src")  # ours need not be installed beside the peers
    if not pathlib.Path(python).exists():
        print(f"The peers are left out: there is no {python}.")
        python, options.no_peers = sys.executable, True
    schedules = Schedules(options.json, python, settings)

    failed = False
    for chip in options.chip or ["tpu7x", "v6e"]:
        for backward in (False, True):
            failed |= sequences(schedules, chip, backward, options)
        if not settings:
            failed |= steps(schedules, chip, options)
    print("versions:", ", ".join(f"{name} {version}" for name, version in schedules.versions.items()))
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
