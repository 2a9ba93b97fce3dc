"""The shapes and inputs of every benchmark, named once. Imports nothing but NumPy: peers' environments read it too."""

import dataclasses
import re

import numpy as np

BOUND = -5.0
"""The least log decay of Kimi Delta Attention here: what Tokamax's chunked form needs is bounded."""


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


def parse_shape(text: str) -> Shape:
    """A name of `SHAPES`, or sizes as in `b1t2048h4k64v64`."""
    if text in SHAPES:
        return SHAPES[text]
    found = re.fullmatch(r"b(\d+)t(\d+)h(\d+)k(\d+)v(\d+)", text)
    if found is None:
        raise ValueError(f"{text!r} is none of {', '.join(SHAPES)}, and no shape as in b1t2048h4k64v64.")
    return Shape(*map(int, found.groups()))


def inputs_of(op: str, shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 inputs of `op`: unit queries and keys, gates in (0, 1), log decays like freshly initialised ones.

    `q`, `k` are `[batch, time, heads, key_dim]`, `v` `[batch, time, heads, value_dim]`; decays and gates have the last
    axis of the vector that they act on, or none where they are one per head. `kda` has `raw_decay` instead:
    `log_decay = BOUND * sigmoid(raw_decay)`. `sla` has the value width of the others in groups of four heads, keys
    twice as wide for each, and four decays per key.
    """
    rng = np.random.default_rng(seed)
    lead, key_dim = (shape.batch, shape.time, shape.heads), shape.key_dim
    keys = (*lead[:2], shape.heads // 4) if op == "sla" else lead
    key_dim = 2 * key_dim if op == "sla" else key_dim
    q, k = (rng.standard_normal((*keys, key_dim)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    tail = {"gdn": (), "kda": (key_dim,), "gdn2": (key_dim,), "sla": (4,)}[op]

    def gate(*shape):
        return 1 / (1 + np.exp(-rng.standard_normal(shape)))

    steps = np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (*keys, *tail)))
    log_decay = -rng.uniform(1, 16, keys).reshape(*keys, *(1 for _ in tail)) * steps
    arrays = {"q": q, "k": k, "v": rng.standard_normal((*lead, shape.value_dim))}
    if op == "kda":
        share = log_decay / BOUND
        arrays["raw_decay"] = np.log(share / (1 - share))
    else:
        arrays["log_decay"] = log_decay
    if op == "gdn2":
        arrays |= {"erase": gate(*keys, key_dim), "write": gate(*lead, shape.value_dim)}
    else:
        arrays["beta"] = gate(*keys)
    return {name: np.asarray(x, np.float32) for name, x in arrays.items()}
