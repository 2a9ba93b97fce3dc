"""Softmax attention on a CPU core: in blocks, dense, and `jax.nn.dot_product_attention`; and one token over a cache.

    python benchmarks/bench_attention.py                  # 256 to 2048 tokens, 10 minutes
    python benchmarks/bench_attention.py --times 512 --rounds 3

Float32, causal, 8 query heads over 2 heads of keys and values of 64. Implementations take turns; the tables have the
median of the process's CPU time, forward and with the gradients of q, k and v, and the temporary memory of the latter
by the compiler's account. The cache has 4096 entries a row; of 8 rows the longest holds a quarter of them, or all.
"""

import argparse
import dataclasses
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from gated_delta import KVCache, softmax_attention
from gated_delta.attention import BlockedAttention, DenseAttention, cached_attention

QUERY_HEADS, KV_HEADS, DIM = 8, 2, 64
IMPLEMENTATIONS: dict[str, Callable] = {
    "BlockedAttention()": functools.partial(softmax_attention, backend=BlockedAttention()),
    "DenseAttention()": functools.partial(softmax_attention, backend=DenseAttention()),
    "jax.nn.dot_product_attention": functools.partial(jax.nn.dot_product_attention, is_causal=True),
}


def inputs(rows: int, tokens: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(0)
    heads = (QUERY_HEADS, KV_HEADS, KV_HEADS)
    return tuple(rng.standard_normal((rows, tokens, h, DIM)).astype(np.float32) for h in heads)


def compiled(f: Callable, *arrays: Any) -> Any:
    return jax.jit(f).lower(*arrays).compile()


def medians(programs: dict[Any, Callable], rounds: int) -> dict[Any, float]:
    """Milliseconds of CPU time; the programs take turns, and the first turn does not count."""
    found: dict[Any, list[float]] = {name: [] for name in programs}
    for turn in range(rounds + 1):
        for name, run in programs.items():
            start = time.process_time()
            jax.block_until_ready(run())
            if turn:
                found[name].append(1e3 * (time.process_time() - start))
    return {name: float(np.median(times)) for name, times in found.items()}


def whole_sequences(tokens: int, rounds: int) -> list[tuple[str, ...]]:
    arrays = inputs(1, tokens)
    programs, memory = {}, {}
    for name, attend in IMPLEMENTATIONS.items():

        def loss(q, k, v, attend=attend):
            return jnp.sum(jnp.square(attend(q, k, v)))

        forward, both = compiled(attend, *arrays), compiled(jax.grad(loss, (0, 1, 2)), *arrays)
        programs[name, "forward"] = functools.partial(forward, *arrays)
        programs[name, "both"] = functools.partial(both, *arrays)
        memory[name] = both.memory_analysis().temp_size_in_bytes / 2**20
    found = medians(programs, rounds)
    return [
        (str(tokens), name, f"{found[name, 'forward']:.1f}", f"{found[name, 'both']:.1f}", f"{memory[name]:.1f}")
        for name in IMPLEMENTATIONS
    ]


def single_tokens(capacity: int, rounds: int) -> list[tuple[str, ...]]:
    """The cache is donated, so it is updated in place."""
    q, k, v = inputs(8, 1)
    rows = []
    for longest in (capacity // 4, capacity):
        count = jnp.arange(8, dtype=jnp.int32) * 7 + longest - 50
        programs = {}
        for backend in (BlockedAttention(), DenseAttention()):
            held = [KVCache.empty(8, capacity=capacity, kv_heads=KV_HEADS, key_dim=DIM)]

            @functools.partial(jax.jit, donate_argnums=0)
            def step(cache, q, k, v, count, backend=backend):
                cache = dataclasses.replace(cache, count=count)
                return cached_attention(q, k, v, cache, backend=backend)

            def run(step=step, held=held, count=count):
                out, held[0] = step(held[0], q, k, v, count)
                return out

            programs[str(backend)] = run
        found = medians(programs, 10 * rounds)
        rows += [(str(longest), name, f"{found[name]:.2f}") for name in programs]
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", nargs="+", type=int, default=[256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    console = Console()
    table = Table("tokens", "", "forward, ms", "with gradients, ms", "temporary, MiB", title="one sequence")
    for tokens in options.times:
        for row in whole_sequences(tokens, options.rounds):
            table.add_row(*row)
    console.print(table)
    table = Table("longest row", "", "ms", title="one token of 8 rows over 4096 entries each")
    for row in single_tokens(4096, options.rounds):
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
