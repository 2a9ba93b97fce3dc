"""The shapes and inputs of every benchmark, named once. Imports nothing but NumPy: peers' environments read it too."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    batch: int
    time: int
    heads: int
    key_dim: int
    value_dim: int


SHAPES = {
    "s": Shape(1, 2048, 4, 64, 64),
    "m": Shape(1, 4096, 8, 128, 128),
    "b": Shape(2, 1024, 16, 128, 128),
}


def gdn_inputs(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 inputs of Gated DeltaNet: unit queries and keys, beta in (0, 1), log decays like freshly initialised
    ones.

    `q`, `k` are `[batch, time, heads, key_dim]`, `v` `[batch, time, heads, value_dim]`, the gates `[batch, time,
    heads]`.
    """
    rng = np.random.default_rng(seed)
    lead = (shape.batch, shape.time, shape.heads)
    q, k = (rng.standard_normal((*lead, shape.key_dim)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays = {
        "q": q,
        "k": k,
        "v": rng.standard_normal((*lead, shape.value_dim)),
        "log_decay": -rng.uniform(1, 16, lead) * np.exp(rng.uniform(np.log(1e-3), np.log(0.1), lead)),
        "beta": 1 / (1 + np.exp(-rng.standard_normal(lead))),
    }
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}
