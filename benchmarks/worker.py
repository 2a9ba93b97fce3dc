"""One implementation in one process: builds and compiles it, then times a call whenever the runner asks.

Run by `bench_op.py` with the Python of that implementation's environment. Answers one JSON line per line on standard
input.
"""

import json
import os
import sys
import time


def ours(inputs):
    import gated_delta as gd

    def forward(q, k, v, log_decay, beta):
        return gd.gated_delta(q, k, v, gd.Gates.tied(beta, log_decay))[0]

    return forward, {"gated-delta": gd.__name__}


def maxtext(inputs):
    import jax.numpy as jnp
    from maxtext.models import qwen3

    def forward(q, k, v, log_decay, beta):
        out = qwen3.jax_chunk_gated_delta_rule(q, k, v, log_decay, beta, chunk_size=64, compute_dtype=jnp.float32)
        return out[0]

    return forward, {}


IMPLEMENTATIONS = {"ours": ours, "maxtext": maxtext}


def main(name: str, shape_name: str, cores: int):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # before JAX starts its threads
    import warnings

    warnings.filterwarnings("ignore")  # a peer's, on import
    import importlib.metadata

    import jax
    import jax.numpy as jnp
    from cases import SHAPES, gdn_inputs

    inputs = {k: jnp.asarray(x) for k, x in gdn_inputs(SHAPES[shape_name]).items()}
    forward, _ = IMPLEMENTATIONS[name](inputs)

    def loss(*args):
        return jnp.sum(jnp.square(forward(*args)))

    args = tuple(inputs.values())
    started = time.perf_counter()
    step = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(args))))).lower(*args).compile()
    compile_s = time.perf_counter() - started
    value, _ = jax.block_until_ready(step(*args))
    memory = step.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes
    distribution = {"ours": "gated-delta"}.get(name, name)
    hello = {
        "versions": {d: importlib.metadata.version(d) for d in (distribution, "jax", "jaxlib")},
        "python": sys.version.split()[0],
        "device": jax.devices()[0].device_kind,
        "compile_s": compile_s,
        "peak_mb": peak / 2**20,
        "loss": float(value),
    }
    print(json.dumps(hello), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        jax.block_until_ready(step(*args))
        print(json.dumps({"cpu_ms": 1e3 * (time.process_time() - cpu), "wall_ms": 1e3 * (time.perf_counter() - wall)}))
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
