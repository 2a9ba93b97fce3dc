"""One implementation in one process: builds and compiles it, then times a call whenever the runner asks.

Run by `bench_op.py` with the Python of that implementation's environment. Answers one JSON line per line on standard
input.
"""

import importlib.metadata
import json
import os
import resource
import sys
import time
import warnings


def jax_step(function, arrays, has_gradient: bool):
    """A call without arguments, and what is known of it: compile time, peak memory, loss."""
    import jax
    import jax.numpy as jnp

    names = list(arrays)
    args = [jnp.asarray(x) for x in arrays.values()]

    def loss(*args):
        return jnp.sum(jnp.square(function(**dict(zip(names, args)))))

    run = jax.value_and_grad(loss, argnums=tuple(range(len(args)))) if has_gradient else loss
    if not has_gradient:  # the output leaves, as a layer would take it

        def run(*args):
            out = function(**dict(zip(names, args)))
            return jnp.sum(jnp.square(out)), out

    started = time.perf_counter()
    step = jax.jit(run).lower(*args).compile()
    compile_s = time.perf_counter() - started
    value, _ = jax.block_until_ready(step(*args))
    memory = step.memory_analysis()
    peak = memory.temp_size_in_bytes + memory.output_size_in_bytes + memory.argument_size_in_bytes
    known = {"compile_s": compile_s, "peak_mb": peak / 2**20, "loss": float(value)}
    return lambda: jax.block_until_ready(step(*args)), known


def torch_step(function, arrays, has_gradient: bool):
    """The same, without a compilation; peak memory is what the process grew by."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    args = {name: torch.from_numpy(x).requires_grad_(has_gradient) for name, x in arrays.items()}

    def step():
        with torch.set_grad_enabled(has_gradient):
            loss = function(**args).square().sum()
        if has_gradient:
            torch.autograd.grad(loss, list(args.values()))
        return loss

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    value = step()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    arguments = sum(x.nbytes for x in arrays.values())
    return step, {"compile_s": 0.0, "peak_mb": (grown * 1024 + arguments) / 2**20, "loss": float(value)}


def main(name: str, shape: str, mode: str, cores: int):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # before JAX starts its threads
    warnings.filterwarnings("ignore")  # peers', on import
    from cases import inputs_of, parse_shape
    from implementations import IMPLEMENTATIONS

    how = IMPLEMENTATIONS[name]
    arrays = {key: how.prepare(key, x) for key, x in inputs_of(how.op, parse_shape(shape)).items()}
    make_step = torch_step if how.is_torch else jax_step
    step, known = make_step(how.make(), arrays, mode == "gradient")
    packages = (how.package, "torch") if how.is_torch else (how.package, "jax", "jaxlib")
    known["versions"] = {package: importlib.metadata.version(package) for package in packages}
    known["python"] = sys.version.split()[0]
    print(json.dumps(known), flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        step()
        taken = {"cpu_ms": 1e3 * (time.process_time() - cpu), "wall_ms": 1e3 * (time.perf_counter() - wall)}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
