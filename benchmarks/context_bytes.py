"""What devices send each other when a sequence is split over them, counted in compiled programs. No device is timed.

    JAX_PLATFORMS=cpu python benchmarks/context_bytes.py

Every layer and its gradient are compiled for virtual CPU devices at two lengths, and the permutations of both programs
must be the same. A row says, for one sequence and one layer: how many messages a device waits for one after the other,
how many bytes these are, and how many it sends on average; and what it sends of the convolutions' inputs, beside that.
"""

import argparse
import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gated_delta import KDA, cast_params, sla_r4
from gated_delta.sharding import local_mixers
from gated_delta.testing import collectives

LAYERS = {
    "KDA, 16 heads of 128 x 128": functools.partial(KDA, 2048, key_heads=16),
    "SLA-R4, 2 key heads of 256 x 512": functools.partial(sla_r4, 2048),
}
LENGTHS = 64, 256  # tokens per device


def permutations(make, devices: int, tokens: int, exchange: str | None, backward: bool):
    """Those of one layer's program."""
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    mixer = eqx.filter_eval_shape(lambda: cast_params(make(key=jax.random.key(0)), jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1, tokens * devices, mixer.config.model), jnp.bfloat16)

    def local(mixer, x):
        return local_mixers(mixer, context="context", exchange=exchange)(x)[0]

    tokens_apart = P(None, "context")
    run = jax.shard_map(local, mesh=mesh, in_specs=(P(), tokens_apart), out_specs=tokens_apart)

    def gradient(mixer, x):
        return jax.grad(lambda mixer, x: jnp.sum(run(mixer, x).astype(jnp.float32) ** 2), argnums=(0, 1))(mixer, x)

    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(gradient if backward else run, compiler_options=options).lower(mixer, x).compile()
    return [c for c in collectives(compiled) if c.kind == "collective-permute"]


def count(found, devices: int):
    """Messages one after the other, their bytes, and bytes sent by a device on average: of states, and of windows."""
    states = [c for c in found if len(c.shapes[0]) == 4]
    windows = [c for c in found if len(c.shapes[0]) == 3]
    assert len(states) + len(windows) == len(found)

    def sums(some):
        return len(some), sum(c.bytes for c in some), sum(c.bytes * c.pairs for c in some) // devices

    return {"states": sums(states), "windows": sums(windows)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", help="write the numbers there too")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rows = []
    print("| layer | devices | exchange | pass | messages | waits for, KiB | sends, KiB | windows, KiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for layer, make in LAYERS.items():
        for devices in options.devices:
            for exchange in ("ring", "steps"):
                counts = {}
                for name, backward in (("forward", False), ("both", True)):
                    found = [permutations(make, devices, n, exchange, backward) for n in LENGTHS]
                    kinds = [sorted((c.shapes, c.pairs) for c in some) for some in found]
                    assert kinds[0] == kinds[1], f"{layer} over {devices} devices sends what depends on the length"
                    counts[name] = count(found[0], devices)
                rows.append({"layer": layer, "devices": devices, "exchange": exchange, **counts})
                for name, of in counts.items():
                    messages, waits, sends = of["states"]
                    print(
                        f"| {layer} | {devices} | {exchange} | {name} | {messages} | {waits / 1024:.0f} | "
                        f"{sends / 1024:.0f} | {of['windows'][2] / 1024:.1f} |",
                        flush=True,
                    )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"jax": jax.__version__, "tokens per device": LENGTHS, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
