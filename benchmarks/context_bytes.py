"""What devices send each other when a sequence is split over them, counted in compiled programs. No device is timed.

    JAX_PLATFORMS=cpu python benchmarks/context_bytes.py             # bytes sent
    JAX_PLATFORMS=cpu python benchmarks/context_bytes.py --products  # multiplications, beside those of one device

Every layer and its gradient are compiled for virtual CPU devices at two lengths, and the permutations of both programs
must be the same. A row says, for one sequence and one layer: how many messages a device waits for one after the other,
how many bytes these are, and how many it sends on average; and what it sends of the convolutions' inputs, beside that.

`--products` counts the multiplications in matrix products of the traced programs, loops as often as they run: of a
device with its own tokens of a sequence, over those of a device that has as many tokens and no others to wait for.
"""

import argparse
import functools
import itertools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gated_delta import KDA, Gates, cast_params, gated_delta, sla_r4
from gated_delta.sharding import context_parallel_gated_delta, local_mixers
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


# ---- multiplications -------------------------------------------------------------------------------------------------


def multiplications(jaxpr) -> int:
    """In matrix products; of a conditional's branches, the one with most."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        values = [x for value in equation.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        inner = [multiplications(getattr(x, "jaxpr", x)) for x in values if hasattr(x, "eqns")]
        if equation.primitive.name == "while" and any(inner):
            raise ValueError("a loop that nobody knows the end of")
        total += equation.params.get("length", 1) * (max if "branches" in equation.params else sum)([0, *inner])
    return total


def products(make, devices: int, tokens: int, backward: bool, layer: bool) -> int:
    """Of one device, per token: of a whole layer, or of its operator."""
    mesh = jax.make_mesh((devices,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    mixer = eqx.filter_eval_shape(lambda: cast_params(make(key=jax.random.key(0)), jnp.bfloat16))
    config, time = mixer.config, P(None, "context")

    def array(*shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct((1, tokens * devices, *shape), dtype)

    def of_layer(arguments):
        mixer, x = arguments
        return local_mixers(mixer, context="context" if devices > 1 else None)(x)[0]

    def of_operator(arguments):
        if devices > 1:
            return context_parallel_gated_delta(**arguments, axis_name="context")[0]
        return gated_delta(**arguments)[0]

    if layer:
        function, arguments, specs = of_layer, (mixer, array(config.model)), (P(), time)
    else:
        owners = config.key_heads if config.variant.decay_owner == "key" else config.value_heads
        groups = config.variant.decay_tiles if config.variant.decay == "tile" else config.key_dim
        keys = array(config.key_heads, config.key_dim)
        gates = Gates(array(owners, groups, dtype=jnp.float32), array(owners, 1, dtype=jnp.float32), is_tied=True)
        arguments = {"q": keys, "k": keys, "v": array(config.value_heads, config.value_dim), "gates": gates}
        function, specs = of_operator, time
    run = jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=time)

    def gradient(arguments):
        out, pull = jax.vjp(run, arguments)
        return pull(out)

    jaxpr = jax.make_jaxpr(gradient if backward else run)(arguments)
    return multiplications(jaxpr.jaxpr) // tokens


def print_products(devices: int, tokens: int):
    print(f"Multiplications per token, {tokens} tokens on each of {devices} devices, over those of one device alone:")
    print("| layer | operator, forward | operator, both | layer, forward | layer, both |")
    print("| --- | --- | --- | --- | --- |")
    for name, make in LAYERS.items():
        cells = []
        for layer, backward in itertools.product((False, True), repeat=2):
            split, alone = (products(make, n, tokens, backward, layer) for n in (devices, 1))
            cells.append(f"{split / 1e6:.2f} M / {alone / 1e6:.2f} M = {split / alone:.2f}")
        print("|", " | ".join((name, *cells)), "|", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--json", help="write the numbers there too")
    parser.add_argument("--products", action="store_true", help="count multiplications instead, at the last count")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    if options.products:
        print_products(options.devices[-1], 4096)
        return
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
