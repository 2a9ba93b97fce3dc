"""What a JAX function costs on a TPU by the compiler's schedule, with no TPU at hand.

    python benchmarks/tpu_schedule.py my_kernel.py:forward --chip tpu7x --tokens 8192 --heads 16
    python benchmarks/tpu_schedule.py "my_kernel.py:forward(chunk=64)" "my_kernel.py:forward(chunk=128)" --ratio 1

A function returns `(callable, arguments)`, the arguments as a list of `jax.ShapeDtypeStruct`; a third element, a dict,
may say `tokens`, `heads`, `settle` (a list of what --settle takes) and `operands`. A callable that donates arguments is
under `jax.jit` already. libtpu (`pip install jax[tpu]`, no
TPU needed) compiles it in a process of its own and dumps its final bundles. Their scalar code is executed, so that
loops and grids count as often as they run. Each bundle is one cycle; a stall is an empty bundle.

Branches and loops that hang on data: the values of a kernel's integer operands are computed where they do not depend on
the function's arguments, and given by `operands`, {kernel: {index: values}}, where they do. What still hangs on data (a
`pl.when` on a gate's value) is an error that lists each branch, until `--settle NAME:INDEX=run|skip|COUNT` decides it
(NAME is a shell pattern, INDEX may be *). What was settled is printed with the figures.

The time is the larger of cycles over clock and HBM bytes over bandwidth, summed over the programs that run one after
the other. It is a floor: it leaves out waits for DMAs that do not overlap, launch gaps and bank conflicts in VMEM.
Copies that XLA gives to SparseCores have a row of their own, with bytes and no cycles; to keep them on the TensorCore:
--flag xla_tpu_enable_offloading_copy_to_sparsecore=false.
"""

import argparse
import ast
import json
import pathlib
import sys

from rich.console import Console
from rich.table import Table
from tpu.report import CHIPS, Settling, schedule


def parse_function(text: str) -> tuple[str, dict]:
    """`file.py:name(chunk=64)` as ("file.py:name", {"chunk": 64})."""
    head, bracket, rest = text.partition("(")
    try:
        call = ast.parse(f"f({rest}" if bracket else "f()", mode="eval").body
        if call.args or ":" not in head or not head.rpartition(":")[2].isidentifier():
            raise ValueError
        return head, {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError, AttributeError):
        message = f"{text!r} is not file.py:function or file.py:function(keyword=literal, ...)"
        raise argparse.ArgumentTypeError(message) from None


def parse_flag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def cost_cells(one: dict) -> list[str]:
    """Cells of COST_COLUMNS, for a program or a group of them."""
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


COST_COLUMNS = ("cycles", "stalls", "MXU", "fills", "spills", "VMEM MiB", "HBM MB", "est. ms")
UNITS = ("MATPUSH", "VALU", "VLOAD", "VSTORE", "XLU", "EUP", "SALU")


def new_table(title: str, *columns: str, left: tuple[str, ...] = ()) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def details(name: str, record: dict, least: float = 0.005) -> Table:
    """Every program, all its calls together; those that take less than `least` of the time in one line."""
    columns = ("program", "kind", "calls", *COST_COLUMNS, *UNITS, "bound", "of time")
    title = f"{name} on {record['chip']}: its programs, all calls of each"
    table = new_table(title, *columns, left=("program", "kind", "bound"))
    small = []
    for one in sorted(record["programs"], key=lambda one: -one["seconds"]):
        part = one["seconds"] / record["all"]["seconds"]
        if part < least:
            small.append(part)
            continue
        shares = [f"{one['share'].get(unit, 0):.0%}" for unit in UNITS]
        cells = (*cost_cells(one), *shares, one["bound"], f"{part:.1%}")
        table.add_row(one["program"], one["kind"], str(one["calls"]), *cells)
    if small:
        blank = [""] * (len(columns) - 2)
        table.add_row(f"{len(small)} more, each below {least:.1%}", *blank, f"{sum(small):.1%}")
    return table


def overview(records: list[dict], names: list[str], ratio_to: str | None) -> Table:
    per = any("cycles_per_token_and_head" in record["all"] for record in records)
    columns = ["function", "chip", *COST_COLUMNS]
    columns += ["cycles per token and head:\nPallas + glue = all"] if per else []
    columns += ["cycles, ratio"] if ratio_to else []
    table = new_table("By the compiler's schedule, one TensorCore", *columns, left=("function", "chip"))
    reference = {record["chip"]: record for record, name in zip(records, names) if name == ratio_to}
    for name, record in zip(names, records):
        cells = [name, record["chip"], *cost_cells(record["all"])]
        cells += [per_token(record)] if per else []
        if ratio_to:
            cells.append(f"{record['all']['cycles'] / reference[record['chip']]['all']['cycles']:.2f}")
        table.add_row(*cells)
    return table


def per_token(record: dict) -> str:
    parts = [record[group].get("cycles_per_token_and_head") for group in ("pallas", "glue", "all")]
    return "" if None in parts else "{:.2f} + {:.2f} = {:.2f}".format(*parts)


def notes(record: dict) -> list[str]:
    """What has to be known beside the figures."""
    found = [f"settled: {settled}" for one in record["programs"] for settled in one["settled"]]
    copies = [one for one in record["programs"] if one["kind"] == "SparseCore"]
    if copies:
        moved = sum(one["hbm_read"] + one["hbm_written"] for one in copies)
        found.append(f"{len(copies)} copies are left to SparseCores: {moved / 1e6:.1f} MB in the time, in no cycle")
    return found


def console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 230)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("functions", nargs="+", type=parse_function, metavar="file.py:function[(keyword=value, ...)]")
    parser.add_argument("--chip", action="append", choices=CHIPS, help="may be repeated; default tpu7x")
    parser.add_argument("--settle", action="append", default=[], type=Settling.parse, metavar="NAME:INDEX=CHOICE")
    parser.add_argument("--tokens", type=int, help="of all batch rows together")
    parser.add_argument("--heads", type=int, help="value heads")
    parser.add_argument("--ratio", type=int, metavar="N", help="cycles over those of the Nth function, from 1")
    parser.add_argument("--flag", action="append", default=[], type=parse_flag, metavar="NAME=VALUE", help="for XLA")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has jax and libtpu (default: this)")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures there")
    parser.add_argument("--keep", type=pathlib.Path, help="a new folder that keeps libtpu's dumps")
    options = parser.parse_args()
    if options.ratio is not None and not 1 <= options.ratio <= len(options.functions):
        parser.error(f"--ratio {options.ratio} is not the number of one of the {len(options.functions)} functions")

    names = [f"{function.rsplit('/', 1)[-1]}{_listed(keywords)}" for function, keywords in options.functions]
    records = []
    for chip in options.chip or ["tpu7x"]:
        for i, (function, keywords) in enumerate(options.functions):
            try:
                record = schedule(
                    function,
                    chip,
                    keywords=keywords,
                    settle=options.settle,
                    tokens=options.tokens,
                    heads=options.heads,
                    keep=options.keep and options.keep / f"{chip}-{i + 1}",
                    flags=dict(options.flag),
                    python=options.python,
                )
            except (RuntimeError, ValueError) as error:
                raise SystemExit(f"tpu_schedule: {names[i]} on {chip}: {error}") from None
            records.append(record)
            console().print(details(names[i], record))
            for note in notes(record):
                console().print(note, style="yellow", highlight=False, soft_wrap=True)
    ratio_to = None if options.ratio is None else names[options.ratio - 1]
    console().print(overview(records, names * len(options.chip or [1]), ratio_to))
    print("versions:", ", ".join(f"{name} {version}" for name, version in records[0]["versions"].items()))
    if options.json:
        options.json.write_text(json.dumps(records, indent=1) + "\n")


def _listed(keywords: dict) -> str:
    return f"({', '.join(f'{name}={value!r}' for name, value in keywords.items())})" if keywords else ""


if __name__ == "__main__":
    main()
