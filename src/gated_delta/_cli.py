"""The command line: `gated-delta check`, `explain` and `info`."""

import argparse
import importlib
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

import jax
import jax.numpy as jnp

from . import variants
from ._dispatch import backends
from ._gates import Gates
from ._op import explain
from ._types import DecayGranularity, EraseGranularity, WriteGranularity
from ._variant import Variant

_PACKAGES = ("gated-delta", "jax", "jaxlib", "equinox", "jaxtyping", "libtpu", "numpy", "hypothesis", "rich")


_LIMITS = (
    *("contains", "final_state", "gradients", "grouped", "packing", "padding"),
    *("refuses", "scale", "state", "zero_decay"),
)
"""Fields of `Capabilities` that say whether something is offered."""


class UserError(Exception):
    """A mistake in what was typed: one line on stderr and exit code 2."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. The exit code: 0, 1 where a law does not hold, 2 for a typing mistake, 130 for Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except UserError as mistake:
        print(f"gated-delta {options.command}: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gated-delta", description="Check implementations of the gated delta rule, and see what would run here."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check",
        help="ask a backend, a function, a variant or a layer for every law",
        description="Ask an implementation for every law of the operator: ours, or one of yours. Exit code 1 if a law "
        "does not hold. Ctrl-C prints what was found by then, with exit code 130.",
    )
    check.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:OBJECT",
        help="a backend, a function, an Implementation, a Variant or a layer of yours, found from the current folder; "
        "without it, our own backends",
    )
    check.add_argument(
        "--backend", action="append", metavar="NAME", help="one of ours: chunked, recurrent, pallas-tpu (interpreted)"
    )
    check.add_argument("--variant", action="append", metavar="NAME", help="only the gates of this variant, such as kda")
    check.add_argument(
        "--dtypes", type=_words, metavar="NAMES", help="only these, as in float32,bfloat16; the first is asked most"
    )
    check.add_argument(
        "--without",
        action="append",
        default=[],
        choices=_LIMITS,
        metavar="WHAT",
        help=f"what it does not offer; may be repeated: {', '.join(_LIMITS)}",
    )
    check.add_argument("--key-dims", type=_sizes, metavar="SIZES", help="the only sizes it takes, as in 64,128")
    check.add_argument("--value-dims", type=_sizes, metavar="SIZES", help="the same for values")
    check.add_argument("--time-multiple", type=_positive, metavar="N", help="it takes whole chunks of N tokens")
    check.add_argument("--max-decay", type=float, metavar="NATS", help="the largest -log_decay of a token it takes")
    check.add_argument(
        "--gates", metavar="NAME", help="the target is a step(state, token) whose tokens have these gates, such as kda"
    )
    check.add_argument("--only", action="append", metavar="LAW", help="only this law; may be repeated")
    check.add_argument("--list", action="store_true", help="list the laws and stop")
    check.add_argument("--expected-failure", action="append", default=[], metavar="LAW", help="a law known to fail")
    check.add_argument("--max-examples", type=_positive, default=25, metavar="N", help="cases of each law (default 25)")
    check.add_argument("--seed", type=int, default=0, metavar="N", help="what cases are drawn from (default 0)")
    check.add_argument(
        "--time-budget",
        type=_seconds,
        metavar="TIME",
        help="for all laws, as in 60s or 5m: less time means fewer examples (default: 3m for our own backends)",
    )
    check.add_argument("--x64", action="store_true", help="everything in float64")
    check.add_argument("--json", metavar="FILE", help="write the report as JSON")
    check.add_argument("--junit", metavar="FILE", help="write the report as JUnit XML")
    check.set_defaults(run=_check)

    explained = commands.add_parser(
        "explain",
        help="say which backend a call would run, and why not the others",
        description="Say which backend a call of these sizes would run here, and why the others would not. Nothing is "
        "computed.",
    )
    sizes = {"batch": 1, "time": 4096, "key-heads": 16, "value-heads": None, "key-dim": 128, "value-dim": None}
    for name, default in sizes.items():
        said = {"value-heads": "as many as key heads", "value-dim": "key-dim"}.get(name, default)
        explained.add_argument(f"--{name}", type=_positive, default=default, metavar="N", help=f"default: {said}")
    explained.add_argument("--dtype", default="bfloat16", help="of q, k and v (default bfloat16)")
    explained.add_argument("--variant", metavar="NAME", help="gates of this variant, such as kda (default gdn)")
    explained.add_argument("--decay", choices=get_args(DecayGranularity), help="instead of the variant's")
    explained.add_argument("--decay-tiles", type=_positive, metavar="N", help="with --decay tile")
    explained.add_argument("--erase", choices=get_args(EraseGranularity), help="instead of the variant's")
    explained.add_argument("--write", choices=get_args(WriteGranularity), help="instead of the variant's")
    explained.add_argument("--packed", action="store_true", help="with segment ids")
    explained.set_defaults(run=_explain)

    info = commands.add_parser(
        "info", help="versions, devices and backends", description="Versions, devices, backends."
    )
    info.set_defaults(run=_info)
    return parser


# ---- check -----------------------------------------------------------------------------------------------------------


def _check(options) -> int:
    try:
        from .testing import _terminal
    except ImportError as missing:
        name = (missing.name or str(missing).split(" needs ")[-1].split(",")[0]).split(".")[0]
        raise UserError(f"it needs {name}, which is an extra: pip install 'gated-delta[check]'") from missing
    if options.list:
        _terminal.list_laws()
        return 0
    if options.target is not None and options.backend:
        raise UserError("give a target or --backend, not both")
    subjects = [_load(options.target)] if options.target is not None else _named_backends(options.backend)
    asked = None if options.variant is None else [_variant(name) for name in options.variant]
    if options.target is None:
        asked = list(_variants().values()) if asked is None else asked
        if options.time_budget is None and not options.backend and not options.only:
            options.time_budget = 180.0
    try:
        return _terminal.check(subjects, asked, options)
    except (TypeError, ValueError) as mistake:
        raise UserError(str(mistake)) from mistake


def _named_backends(names: Sequence[str] | None) -> list[Any]:
    ours: dict[str, Any] = {type(backend).__name__.lower(): lambda b=backend: b for backend in backends()}

    def interpreted():
        from .pallas import PallasTPU, TileConfig

        return PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)

    known = {**{name: ours[name] for name in ours if "pallas" not in name}, "pallas-tpu": interpreted}
    default = [name for name in known if name != "pallas-tpu"]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise UserError(f"there is no backend {unknown[0]!r}: the backends are {', '.join(known)}")
    return [known[name]() for name in names or default]


def _load(target: str) -> Any:
    """`module:object`, the module from the current folder or installed; a class without arguments is called."""
    module_name, _, path = target.partition(":")
    if not module_name or not path:
        raise UserError(f"{target!r} must be module:object, as in my_kernels.gdn:backend")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        hint = f"; a module has no ending: {module_name[:-3]}:{path}" if module_name.endswith(".py") else ""
        raise UserError(f"{module_name!r} cannot be imported: {error}{hint}") from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise UserError(f"{getattr(found, '__name__', found)!s} has nothing named {name!r}")
        found = getattr(found, name)
    if isinstance(found, type):
        try:
            return found()
        except TypeError as error:
            raise UserError(f"{target} is a class that needs arguments ({error}): name an instance of it") from error
    return found


def _variants() -> dict[str, Variant]:
    """The records in `gated_delta.variants`, by name."""
    return {name: found for name, found in vars(variants).items() if isinstance(found, Variant)}


def _variant(name: str) -> Variant:
    known = _variants()
    if name.lower() not in known:
        raise UserError(f"there is no variant {name!r}: the variants are {', '.join(sorted(known))}")
    return known[name.lower()]


# ---- explain and info ------------------------------------------------------------------------------------------------


def _explain(options) -> int:
    variant = _variant(options.variant or "gdn")
    decay, erase = options.decay or variant.decay, options.erase or variant.erase
    write = options.write or ("one" if variant.tied else variant.write)
    tied = variant.tied and options.write is None and erase == "head"
    tiles = options.decay_tiles or variant.decay_tiles or 4
    value_heads, value_dim = options.value_heads or options.key_heads, options.value_dim or options.key_dim
    owners = options.key_heads if variant.decay_owner == "key" else value_heads
    lead = (options.batch, options.time)

    def shape(*sizes, dtype=options.dtype):
        return jax.ShapeDtypeStruct((*lead, *sizes), jnp.dtype(dtype))

    def gate(word, heads, width):
        groups = {"head": 1, "tile": tiles, "channel": width}.get(word)
        return None if groups is None else shape(heads, groups, dtype=jnp.float32)

    try:
        gates = Gates(
            gate(decay, owners, options.key_dim),
            gate(erase, owners, options.key_dim),
            None if tied else gate(write, value_heads, value_dim),
            is_tied=tied,
            erase_max=variant.erase_max,
            log_decay_min=None if decay == "none" else variant.log_decay_min,
        )
        q, v = shape(options.key_heads, options.key_dim), shape(value_heads, value_dim)
        ids = shape(dtype=jnp.int32) if options.packed else None
        print(explain(q, q, v, gates, segment_ids=ids))
    except (TypeError, ValueError) as mistake:
        raise UserError(str(mistake)) from mistake
    return 0


def _info(options) -> int:
    del options
    rows = [("Python", platform.python_version())]
    for name in _PACKAGES:
        try:
            rows.append((name, version(name)))
        except PackageNotFoundError:
            rows.append((name, "not installed"))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name:<{width}}  {found}" for name, found in rows))
    print(f"\ndevices: {', '.join(str(device) for device in jax.devices())}")
    x = jax.ShapeDtypeStruct((1, 4096, 16, 128), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((1, 4096, 16, 1), jnp.float32)
    print(f"backends, for a GDN layer:\n{explain(x, x, x, Gates.tied(beta, beta))}")
    return 0


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_positive, _words(text)))


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], units[text[-1]]) if text[-1:] in units else (text, 1)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a time such as 60s or 5m")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
