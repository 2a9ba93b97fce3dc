"""Ask other people's implementations that run on a CPU for our laws, and write the tables of docs/conformance.md.

`make conformance-peers` runs it in each of two environments, `conformance` (JAX) and `conformance-torch`; with names of
peers it repeats only those. A peer that is not installed is named, and keeps what it gave in an earlier run.
Every function is called as its documentation says; where it documents a limit, the limit is a capability below and not
a failure. A line of a failure is repeated by that environment's Python, with src and scripts on its path, after
`from conformance_peers import peer`.
"""

import argparse
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import distribution, version
from pathlib import Path
from typing import Any, NamedTuple

from gated_delta import Chunked
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
EXAMPLES, SECONDS, SEED = 20, 180.0, 0

# What none of them promises is not asked: to contain a NaN, to refuse what does not fit, a log decay of -inf. Those of
# -100 are: in float32 that is a full forget already.
MODEST: dict[str, Any] = dict(contains=False, refuses=False, dtypes=("float32",), erase_max=1.0, max_decay=100.0)
# GDN and KDA, with one gate for each value head; GDN-2, with gates of the key head.
GDN: dict[str, Any] = dict(decay=("head",), erase=("head",), tied=(True,), owner=("value",))
KDA: dict[str, Any] = {**GDN, "decay": ("channel",)}
GDN2: dict[str, Any] = dict(
    decay=("channel",), erase=("channel",), write=("channel",), tied=(False,), owner=("key",), write_owner=("value",)
)


def tokamax(how: str, lower_bound: float | None = None, **offered) -> Implementation:
    """Without a lower bound it takes log decays, whose numerical range is the caller's."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of every shape that is not tuned
    api = importlib.import_module("tokamax._src.ops.kda.api")
    function = functools.partial(api.kimi_delta_attention, implementation=how)
    adapted = tokamax_style(function, lower_bound=lower_bound)
    limits = {**MODEST, "max_decay": min(MODEST["max_decay"], adapted.capabilities.max_decay), **offered}
    return dataclasses.replace(adapted, capabilities=dataclasses.replace(adapted.capabilities, **limits))


def deltanet(how: str) -> Implementation:
    """The token loops that its tests compare with, or the chunked scan in JAX that it has where there is no TPU.

    The scan runs at its float32 setting and takes heads of 128 only; two of the loops take only as many value channels
    as key channels.
    """
    options: dict[str, Any] = {}
    if how == "reference":
        package, dims = importlib.import_module("deltanet_tpu.reference"), (8,)
        gdn, kda, gdn2 = package.reference_gdn, package.reference_kda, package.token_serial_gdn2
    else:
        package, dims = importlib.import_module("deltanet_tpu"), (128,)
        gdn, kda, gdn2 = package.chunk_gdn, package.chunk_kda, package.chunk_gdn2
        options = dict(fallback_scan=True, precision="fp32")

    def call(q, k, v, *, log_decay, beta=None, erase=None, write=None, **more):
        gates = (erase, write) if beta is None else (beta,)
        function = gdn2 if beta is None else gdn if log_decay.shape[-1] == 1 else kda
        return function(q, k, v, log_decay, *gates, output_final_state=True, **options, **more)

    def one(q, k, v, *, log_decay, beta=None, erase=None, write=None, state):
        gates = (erase, write) if beta is None else (beta, beta)
        return importlib.import_module("deltanet_tpu").gdn2_decode_step(q, k, v, log_decay, *gates, state)

    gates: dict[str, Any] = dict(decay=("head", "channel"), erase=("head", "channel"), write=("head", "channel"))
    sizes: dict[str, Any] = dict(key_dims=dims, value_dims=dims)
    offered = Capabilities(**MODEST, **gates, **sizes, write_owner=("value",), packing=("ids",), padding=False)
    return plain(call, capabilities=offered, step=one if how == "scan" else None)


def maxtext() -> Implementation:
    """It returns a final state only where an initial one is given: zeros, if there is none. Products in float32."""
    module = importlib.import_module("maxtext.models.qwen3")
    jnp = importlib.import_module("jax.numpy")
    options = dict(compute_dtype=jnp.float32)

    def call(q, k, v, *, log_decay, beta, initial_state=None):
        if initial_state is None:
            initial_state = jnp.zeros((*v.shape[::2], k.shape[-1], v.shape[-1]), jnp.float32)
        gates = log_decay[..., 0], beta[..., 0]
        return module.jax_chunk_gated_delta_rule(q, k, v, *gates, initial_state=initial_state, **options)

    def one(q, k, v, *, log_decay, beta, state):
        token = (x[:, None] for x in (q, k, v, log_decay[..., 0], beta[..., 0]))
        out, state = module.jax_ar_gated_delta_rule(*token, state, **options)
        return out[:, 0], state

    return plain(call, capabilities=Capabilities(**MODEST, **GDN, grouped=False, packing=()), step=one)


def atomic(name: str, **options) -> Implementation:
    """Documented in its source as the ground truth of its kernels, and as their chunked cross-check."""
    function = getattr(importlib.import_module("atomic_ops.reference"), name)

    def call(q, k, v, *, log_decay, erase, write, initial_state=None, scale=None):
        scale = k.shape[-1] ** -0.5 if scale is None else scale
        return function(q, k, v, log_decay, erase, write, scale, h0=initial_state, **options)

    multiple = options.get("chunk_size", 1)
    offered = Capabilities(**MODEST, **GDN2, grouped=False, packing=(), time_multiple=multiple)
    return plain(call, capabilities=offered)


def transformers(name: str) -> Implementation:
    """Of Qwen3-Next: what runs where no kernels are installed."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    function = inspect.unwrap(getattr(module, name))  # not what stands in for it where fla is installed

    def call(q, k, v, *, log_decay, beta, initial_state=None):
        gates = log_decay[..., 0], beta[..., 0]
        return function(q, k, v, *gates, initial_state=initial_state, output_final_state=True)

    return plain(call, framework="torch", capabilities=Capabilities(**MODEST, **GDN, packing=()))


def fla(ops: str, name: str, chunk_size: int | None = None, **offered) -> Implementation:
    """A reference of flash-linear-attention, read from its file: importing the package needs Triton."""
    path = distribution("fla-core").locate_file(f"fla/ops/{ops}/naive.py")
    spec = importlib.util.spec_from_file_location(f"fla_naive_{ops}", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name)
    if chunk_size is not None:
        function = functools.partial(function, chunk_size=chunk_size)
    return fla_style(function, capabilities=Capabilities(**MODEST, packing=(), **offered))


class Peer(NamedTuple):
    package: str
    environment: str
    make: Callable[[], Implementation]


JAX, TORCH = "conformance", "conformance-torch"
ALONE = dict(grouped=False)
PEERS = {
    "tokamax xla": Peer("tokamax", JAX, lambda: tokamax("xla")),
    "tokamax xla_chunked": Peer("tokamax", JAX, lambda: tokamax("xla_chunked", -5.0, time_multiple=64)),
    "deltanet-tpu reference": Peer("deltanet-tpu", JAX, lambda: deltanet("reference")),
    "deltanet-tpu scan": Peer("deltanet-tpu", JAX, lambda: deltanet("scan")),
    "maxtext": Peer("maxtext", JAX, maxtext),
    "atomic-ops serial": Peer("atomic-ops", JAX, lambda: atomic("gdn2_token_serial_reference")),
    "atomic-ops chunked": Peer("atomic-ops", JAX, lambda: atomic("gdn2_chunked_wy_reference", chunk_size=16)),
    "ours": Peer("gated-delta", JAX, lambda: implementation(Chunked())),
    "transformers recurrent": Peer("transformers", TORCH, lambda: transformers("torch_recurrent_gated_delta_rule")),
    "transformers chunk": Peer("transformers", TORCH, lambda: transformers("torch_chunk_gated_delta_rule")),
    "fla GDN recurrent": Peer(
        "fla-core", TORCH, lambda: fla("gated_delta_rule", "naive_recurrent_gated_delta_rule", **GDN, **ALONE)
    ),
    "fla GDN chunk": Peer(
        "fla-core", TORCH, lambda: fla("gated_delta_rule", "naive_chunk_gated_delta_rule", **GDN, **ALONE)
    ),
    "fla KDA recurrent": Peer("fla-core", TORCH, lambda: fla("kda", "naive_recurrent_kda", **KDA)),
    "fla KDA chunk": Peer("fla-core", TORCH, lambda: fla("kda", "naive_chunk_kda", 16, **KDA, time_multiple=16)),
    "fla GDN-2 recurrent": Peer("fla-core", TORCH, lambda: fla("gdn2", "naive_recurrent_gdn2", **GDN2, **ALONE)),
    "fla GDN-2 chunk": Peer("fla-core", TORCH, lambda: fla("gdn2", "naive_chunk_gdn2", **GDN2, **ALONE)),
}


def peer(name: str) -> Implementation:
    """A peer by its name in the tables."""
    return dataclasses.replace(PEERS[name].make(), name=f'peer("{name}")')


def main(arguments: list[str] | None = None):
    """Check the peers of one environment, or those of them that are named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--environment", choices=(JAX, TORCH), required=True, help="whose packages are installed")
    parser.add_argument("names", nargs="*", metavar="PEER", help="such as 'tokamax xla': only these")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in PEERS]
    if unknown:
        parser.error(f"there is no peer {unknown[0]!r}: the peers are {', '.join(PEERS)}")
    names = [name for name in options.names or PEERS if PEERS[name].environment == options.environment]
    if len(names) == 1:
        check(names[0])
        return
    for name in names:  # each in a process of its own: the programs compiled for all are more than a process can map
        command = [sys.executable, __file__, "--environment", options.environment, name]
        if subprocess.run(command).returncode:
            print(f"{name} is left out: its process failed", file=sys.stderr)


def check(name: str):
    """Ask one peer, and write what came of it beside what came of the others."""
    try:
        subject = peer(name)
    except ImportError as missing:
        print(f"{name} is left out: {missing}", file=sys.stderr)
        return
    wide = max(subject.capabilities.key_dims or (0,)) > 64  # thousands of such heads are gigabytes of states
    laws = [law for law in LAWS if not (wide and law == "large_launch")]
    report = ask(subject, only=laws, max_examples=EXAMPLES, seed=SEED, time_budget=SECONDS)
    print(report, flush=True)
    package = PEERS[name].package
    of = "this version" if name == "ours" else version(package)
    found = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    found[name] = {"version": f"{package} {of}", **json.loads(report.to_json())}
    write({name: found[name] for name in PEERS if name in found})


def write(found: dict[str, dict]):
    """The results, and the part of the page that is made of them."""
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    for word, made in (("table", tables(found)), ("failures", failures(found))):
        before, rest = text.split(f"<!-- peers: begin {word} -->")
        after = rest.split(f"<!-- peers: end {word} -->")[1]
        text = f"{before}<!-- peers: begin {word} -->\n\n{made}\n\n<!-- peers: end {word} -->{after}"
    PAGE.write_text(text, encoding="utf-8")


def tables(found: dict[str, dict]) -> str:
    """For each environment a table with a row for each law, and which versions these are."""
    lines = []
    for of in (JAX, TORCH):
        reports = [{o["law"]: o for o in found[name]["outcomes"]} for name in found if PEERS[name].environment == of]
        names = [name.replace(" ", "<br>") for name in found if PEERS[name].environment == of]
        lines += [f"| law | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        lines += [f"| `{law}` | {' | '.join(mark(report.get(law)) for report in reports)} |" for law in LAWS] + [""]
    versions = dict.fromkeys(report["version"] for name, report in found.items() if name != "ours")
    return "\n".join([*lines, f"Versions: {', '.join(versions)}."])


def mark(outcome: dict | None) -> str:
    """A cell: how many examples there were, where they were few; empty for what is not offered."""
    if outcome is None or outcome["status"] == "not offered":
        return ""
    if outcome["status"] == "failed":
        return "**no**"
    return "yes" if outcome["examples"] >= EXAMPLES else f"yes ({outcome['examples']})"


def failures(found: dict[str, dict]) -> str:
    """The smallest failing input of every failure."""
    lines = []
    for name, report in found.items():
        for outcome in report["outcomes"]:
            if outcome["status"] == "failed":
                said = " ".join(outcome["message"].split("Problem:")[0].split())
                said = said if len(said) < 240 else f"{said[:240]}..."
                lines.append(f"- **{name}**, `{outcome['law']}`: {said}\n\n    `{outcome['line']}`")
    return "\n".join(lines) or "None."


if __name__ == "__main__":
    main()
