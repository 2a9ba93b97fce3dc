"""Error of the chunk solve on families of keys: the table of docs/numerics.md.

    python benchmarks/inverse_error.py

For each method and chunk length: the largest absolute error of the diagonal blocks of (I + P)^-1 against a float64
solve, over eight draws of each family of unit keys, without decay (which only helps).
"""

import jax
import jax.numpy as jnp
import numpy as np

from gated_delta._tile import SOLVED, Arithmetic, block_inverses

KEY_DIM = 128
METHODS = {
    "exact, float32": Arithmetic("float32", erase_max=2.0),
    "exact, bfloat16, erase_max 1": Arithmetic("bfloat16"),
    "exact, bfloat16, erase_max 2": Arithmetic("bfloat16", erase_max=2.0),
    "approx": Arithmetic("bfloat16", inverse="approx"),
    "substitution": Arithmetic("float32", inverse="substitution"),
}


def keys(rng, chunk: int, cosine: float, signs: bool) -> np.ndarray:
    """Unit keys with the given pairwise cosine, each with a random sign if `signs`."""
    common = rng.standard_normal((1, KEY_DIM))
    own = rng.standard_normal((chunk, KEY_DIM))
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    x = unit(np.sqrt(cosine) * unit(common) + np.sqrt(1 - cosine) * unit(own))
    return x * (rng.choice([-1, 1], (chunk, 1)) if signs else 1)


FAMILIES = {f"cosine {c:g}{' +-' if s else ''}": (c, s) for c in (0, 0.5, 0.9, 0.999, 1) for s in (False, True)}
GATES = {
    "scalar in [0, 1]": lambda rng, n: rng.uniform(0, 1, (n, 1)),
    "1": lambda rng, n: np.ones((n, 1)),
    "vector in [0, 1]": lambda rng, n: rng.uniform(0, 1, (n, KEY_DIM)),
    "binary vector": lambda rng, n: rng.integers(0, 2, (n, KEY_DIM)).astype(float),
    "scalar in [0, 2]": lambda rng, n: rng.uniform(0, 2, (n, 1)),
    "2": lambda rng, n: np.full((n, 1), 2.0),
}


def pairs(rng, chunk, family, gate) -> np.ndarray:
    k = keys(rng, chunk, *FAMILIES[family])
    return np.tril((GATES[gate](rng, chunk) * k) @ k.T, -1)


def diagonal_blocks(inverse: np.ndarray) -> np.ndarray:
    """Of the rows that are inverted together, side by side: the solve goes on from block to block."""
    blocks = [inverse[:, i : i + SOLVED, i : i + SOLVED] for i in range(0, inverse.shape[-1], SOLVED)]
    return np.concatenate(blocks, axis=-1)


def main():
    print(
        f"jax {jax.__version__}, {jax.devices()[0].device_kind}; largest |error| over {len(FAMILIES)} key families x 8"
    )
    for chunk in (64, 128):
        for gate in GATES:
            for method, arithmetic in METHODS.items():
                if method in ("approx", "exact, bfloat16, erase_max 1") and gate in ("scalar in [0, 2]", "2"):
                    note = " (outside its promise)"
                else:
                    note = ""
                rng = np.random.default_rng(chunk)
                stack = np.stack([pairs(rng, chunk, family, gate) for family in FAMILIES for _ in range(8)])
                stack = stack.astype(np.float32).astype(np.float64)
                exact = diagonal_blocks(np.linalg.inv(np.eye(chunk) + stack))
                solve = jax.jit(block_inverses, static_argnums=1)
                found = np.asarray(solve(jnp.asarray(stack, jnp.float32), arithmetic), np.float64)
                if method == "substitution":  # which forms the whole
                    found = diagonal_blocks(found)
                print(f"chunk {chunk:3}  erase {gate:18} {method:30} {np.abs(found - exact).max():.1e}{note}")


if __name__ == "__main__":
    main()
