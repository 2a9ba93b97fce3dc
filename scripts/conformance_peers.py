"""Ask other people's implementations that run on a CPU for our laws, and write the table of docs/conformance.md.

`make conformance-peers` runs it in an environment that holds them; with names of peers it repeats only those. A peer
that is not installed is left out and named.
Every function is called as its documentation says; where it documents a limit, the limit is a capability below and not
a failure.
"""

import dataclasses
import functools
import importlib
import json
import sys
from importlib.metadata import version
from pathlib import Path

from gated_delta import Chunked, variants
from gated_delta.testing import (
    LAWS,
    Capabilities,
    Implementation,
    ask,
    fla_style,
    implementation,
    plain,
    tokamax_style,
)

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "conformance.md"
RESULTS = ROOT / "benchmarks" / "results" / "conformance-peers.json"
BEGIN, END = "<!-- peers: begin -->", "<!-- peers: end -->"
EXAMPLES, SECONDS, SEED = 20, 240.0, 0

# What none of them promises is not asked: to contain a NaN, and to refuse what does not fit.
MODEST = dict(contains=False, refuses=False, dtypes=("float32",), erase_max=1.0)


def tokamax(how: str, lower_bound: float | None = None) -> Implementation:
    """Its API says that without gate activation the numerical range is the caller's."""
    api = importlib.import_module("tokamax._src.ops.kda.api")
    function = functools.partial(api.kimi_delta_attention, implementation=how)
    adapted = tokamax_style(function, lower_bound=lower_bound, name=f"tokamax {how}")
    return dataclasses.replace(adapted, capabilities=dataclasses.replace(adapted.capabilities, **MODEST))


def deltanet(name: str, **offered) -> Implementation:
    """Its pure-JAX scan, the path it has for machines without a TPU, at its float32 setting: heads of 128 only."""
    function = functools.partial(
        getattr(importlib.import_module("deltanet_tpu"), name), fallback_scan=True, precision="fp32"
    )
    return fla_style(
        function,
        framework="jax",
        name=f"deltanet_tpu.{name}",
        capabilities=Capabilities(key_dims=(128,), value_dims=(128,), **MODEST, **offered),
    )


def atomic(name: str, **options) -> Implementation:
    """Documented in its source as the ground truth of its kernels, and as their chunked cross-check."""
    function = getattr(importlib.import_module("atomic_ops.reference"), name)

    def call(q, k, v, *, log_decay, erase, write, initial_state=None, scale=None):
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        return function(q, k, v, log_decay, erase, write, scale, h0=initial_state, **options)

    words = dict(decay=("channel",), erase=("channel",), write=("channel",), tied=(False,), grouped=False, packing=())
    multiple = dict(time_multiple=options.get("chunk_size", 1))
    return plain(call, name=f"atomic_ops {name}", capabilities=Capabilities(**MODEST, **words, **multiple))


KDA = dict(decay=("channel",), erase=("head",), write=("one",), tied=(True,), owner=("key",))
GDN = dict(decay=("head",), erase=("head",), write=("one",), tied=(True,))
GDN2 = dict(
    decay=("channel",), erase=("channel",), write=("channel",), tied=(False,), owner=("key",), write_owner=("value",)
)
IDS = dict(packing=("ids",), padding=False)
PEERS = {
    "tokamax xla": ("tokamax", lambda: tokamax("xla")),
    "tokamax xla_chunked": ("tokamax", lambda: tokamax("xla_chunked", lower_bound=-5.0)),
    "deltanet-tpu gdn": ("deltanet-tpu", lambda: deltanet("chunk_gdn", **GDN, **IDS)),
    "deltanet-tpu kda": ("deltanet-tpu", lambda: deltanet("chunk_kda", **KDA, **IDS)),
    "deltanet-tpu gdn2": ("deltanet-tpu", lambda: deltanet("chunk_gdn2", **GDN2, **IDS)),
    "atomic-ops serial": ("atomic-ops", lambda: atomic("gdn2_token_serial_reference")),
    "atomic-ops chunked": ("atomic-ops", lambda: atomic("gdn2_chunked_wy_reference", chunk_size=16)),
    "ours": ("gated-delta", lambda: implementation(Chunked(), Capabilities.of(variants.kda, variants.gdn2))),
}


def main(names: list[str]):
    """Check the peers named, or all; keep what came of them beside what came of the others; write the page."""
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if names and RESULTS.exists() else {}
    for name, (package, make) in PEERS.items():
        if names and name not in names:
            continue
        try:
            subject = make()
            wide = subject.capabilities.key_dims is not None  # thousands of such heads are gigabytes of states
            laws = [law for law in LAWS if not (wide and law == "large_launch")]
            report = ask(subject, only=laws, max_examples=EXAMPLES, seed=SEED, time_budget=SECONDS)
        except ImportError as missing:
            print(f"{name} is left out: {missing}", file=sys.stderr)
            continue
        print(report, flush=True)
        found[name] = {"version": f"{package} {version(package)}", **json.loads(report.to_json())}
    found = {name: found[name] for name in PEERS if name in found}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(found)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


def table(found: dict[str, dict]) -> str:
    """A row for each law; below it the smallest failing input of every failure."""
    marks = {"passed": "yes", "failed": "**no**", "not offered": ""}
    lines = [f"| law | {' | '.join(found)} |", f"| --- |{' --- |' * len(found)}"]
    for law in LAWS:
        status = [{o["law"]: o["status"] for o in report["outcomes"]} for report in found.values()]
        lines.append(f"| `{law}` | {' | '.join(marks[of.get(law, 'not offered')] for of in status)} |")
    lines += ["", f"Versions: {', '.join(dict.fromkeys(report['version'] for report in found.values()))}.", ""]
    for name, report in found.items():
        for outcome in report["outcomes"]:
            if outcome["status"] == "failed":
                said = " ".join(outcome["message"].split("Problem:")[0].split())
                said = said if len(said) < 240 else f"{said[:240]}..."
                lines.append(f"- **{name}**, `{outcome['law']}`: {said}\n\n    `{outcome['line']}`")
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    main(sys.argv[1:])
