"""What a JAX function costs on a TPU by the compiler's schedule, with no TPU at hand.

    python benchmarks/tpu_schedule.py my_kernel.py:forward --chip tpu7x --tokens 8192 --heads 16
    python benchmarks/tpu_schedule.py "my_kernel.py:forward(chunk=64)" "my_kernel.py:forward(chunk=128)" --ratio 1

A function returns `(callable, arguments)`, the arguments as a list of `jax.ShapeDtypeStruct`; a third element, a dict,
may say `tokens`, `heads`, `settle` and `operands`. libtpu (`pip install jax[tpu]`, no TPU needed) compiles it in a
process of its own and dumps its final bundles. Their scalar code is executed, so that loops and grids count as often as
they run, and each bundle is one cycle, stalls included.

A branch that hangs on data (a `pl.when` on an array's value, a loop up to a prefetched number) has no count of its own:
the error lists each such branch, and `--settle NAME:INDEX=run|skip|COUNT` decides it, for programs whose name matches
NAME (a shell pattern). `operands`, {name: {index: values}}, gives the integers of a scalar-prefetch operand instead.
What was settled is printed with the figures.

The time is the larger of cycles over clock and HBM bytes over bandwidth, summed over the programs called one after the
other. It is a floor: it leaves out waits for DMAs that do not overlap, launch gaps and bank conflicts in VMEM.
"""

import argparse
import ast
import json
import pathlib
import sys

from rich.console import Console
from rich.table import Table
from tpu.report import CHIPS, Settling, Unsettled, schedule


def parse_function(text: str) -> tuple[str, dict]:
    """`file.py:name(chunk=64)` as ("file.py:name", {"chunk": 64})."""
    path, _, call = text.rpartition(":") if "(" not in text else text[: text.index("(")].rpartition(":")[:2] + ("",)
    if "(" in text:
        head = text[: text.index("(")]
        path, _, name = head.rpartition(":")
        call = name + text[text.index("(") :]
    node = ast.parse(call, mode="eval").body
    if isinstance(node, ast.Name):
        return text, {}
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name):
        raise argparse.ArgumentTypeError(f"{text!r} is not file.py:function or file.py:function(keyword=literal, ...)")
    return f"{path}:{node.func.id}", {word.arg: ast.literal_eval(word.value) for word in node.keywords}


def overview(records: list[dict], names: list[str], ratio_to: int | None) -> Table:
    table = Table(title="By the compiler's schedule, one TensorCore")
    for column in ("function", "chip", "cycles", "stalls", "MXU", "fills", "spills", "VMEM MiB", "HBM MB", "est. ms"):
        table.add_column(column, justify="left" if column in ("function", "chip") else "right")
    per = any("cycles_per_token_and_head" in record["all"] for record in records)
    if per:
        table.add_column("cycles per token and head\nPallas + glue = all", justify="right")
    if ratio_to is not None:
        table.add_column("ratio", justify="right")
    for i, (name, record) in enumerate(zip(names, records)):
        total = record["all"]
        cells = [name, record["chip"], *cost_cells(total)]
        if per:
            parts = [record[group].get("cycles_per_token_and_head") for group in ("pallas", "glue", "all")]
            cells.append("{:.2f} + {:.2f} = {:.2f}".format(*parts) if None not in parts else "")
        if ratio_to is not None:
            same_chip = [r for r, n in zip(records, names) if r["chip"] == record["chip"] and n == names[ratio_to]]
            cells.append(f"{total['cycles'] / same_chip[0]['all']['cycles']:.2f}" if same_chip else "")
        table.add_row(*cells)
    return table


def cost_cells(one: dict) -> list[str]:
    return [
        f"{one['cycles']:,}",
        f"{one['stalls'] / max(one['cycles'], 1):.0%}",
        f"{one['share'].get('MATMUL', 0):.0%}",
        f"{one['busy'].get('VLOAD:FILL', 0):,}",
        f"{one['busy'].get('VSTORE:SPILL', 0):,}",
        f"{one['vmem_bytes'] / 2**20:.2f}",
        f"{(one['hbm_read'] + one['hbm_written']) / 1e6:.1f}",
        f"{one['seconds'] * 1e3:.4f}",
    ]


def details(name: str, record: dict, least: float = 0.005) -> Table:
    table = Table(title=f"{name}, {record['chip']}: its programs, all calls of each")
    columns = (
        "program",
        "kind",
        "calls",
        "cycles",
        "stalls",
        "MXU",
        "fills",
        "spills",
        "VMEM MiB",
        "HBM MB",
        "est. ms",
    )
    units = ("MATPUSH", "VALU", "VLOAD", "VSTORE", "XLU", "EUP", "SALU")
    for column in columns + units + ("bound", "of all"):
        table.add_column(column, justify="left" if column in ("program", "kind", "bound") else "right")
    small = []
    for one in sorted(record["programs"], key=lambda one: -one["cycles"]):
        part = one["cycles"] / record["all"]["cycles"]
        if part < least:
            small.append(part)
            continue
        shares = [f"{one['share'].get(unit, 0):.0%}" for unit in units]
        table.add_row(
            one["program"], one["kind"], str(one["calls"]), *cost_cells(one), *shares, one["bound"], f"{part:.1%}"
        )
    if small:
        table.add_row(f"{len(small)} more, each under {least:.1%}", *[""] * (len(columns + units)), f"{sum(small):.1%}")
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="+", metavar="file.py:function[(keyword=value, ...)]")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="may be repeated; default tpu7x")
    parser.add_argument("--settle", action="append", default=[], type=Settling.parse, metavar="NAME:INDEX=CHOICE")
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--heads", type=int, help="value heads")
    parser.add_argument("--ratio", type=int, metavar="N", help="cycles over those of the Nth function, from 1")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter that has jax and libtpu (default: this one)"
    )
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    parser.add_argument("--keep", type=pathlib.Path, help="a new folder that keeps libtpu's dumps")
    options = parser.parse_args()

    records, names = [], []
    for chip in options.chip or ["tpu7x"]:
        for i, text in enumerate(options.functions):
            function, keywords = parse_function(text)
            keep = options.keep and options.keep / f"{chip}-{i + 1}"
            try:
                records.append(
                    schedule(
                        function,
                        chip,
                        keywords=keywords,
                        settle=tuple(options.settle),
                        tokens=options.tokens,
                        heads=options.heads,
                        python=options.python,
                        keep=keep,
                    )
                )
            except (Unsettled, RuntimeError) as error:
                raise SystemExit(f"tpu_schedule: {text} on {chip}: {error}") from None
            names.append(text.rsplit("/", 1)[-1])
    console = Console(width=None if sys.stdout.isatty() else 220)
    for name, record in zip(names, records):
        console.print(details(name, record))
        for one in record["programs"]:
            for settled in one["settled"]:
                console.print(f"settled as {settled}", style="yellow", highlight=False)
    console.print(overview(records, names, None if options.ratio is None else options.ratio - 1))
    print("versions:", ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
