"""What every attention backend receives (`AttentionProblem`) and what one is (`AbstractAttentionBackend`)."""

import abc

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gated_delta._types import accumulation_dtype


class AttentionProblem(eqx.Module):
    """One call of `softmax_attention`, validated and normalised: what a backend gets.

    There is at least one row, one query and one key. All arrays are finite: what was not is zero, and the outputs it
    spoils are marked behind the backend. Padding holds zero vectors.

    Query `i` of a row stands at position `i + query_offset` among the keys, whose positions are 0, 1, ... It sees key
    `j` if all of this holds (`gated_delta.attention.is_visible` writes it out for a tile):

    - where `causal`: `j <= position`;
    - with a `window`: `position - j < window`, and, where not `causal`, `j - position < window`;
    - with segments: both have the same one, and it is not negative.

    A query that sees no key has the output 0 and the log-sum-exp `-inf`, and no gradient.

    **Attributes:**

    - `q`, `k`, `v`: in the dtype of matrix operands, `operand`. Query head `h` reads key and value head `h // group`.
        `q` is not scaled.
    - `query_offset`: one for each row; `None`: 0 for all. Keys before and behind all queries are allowed.
    - `query_segments`, `key_segments`: both, or `None`. The document of every token, not falling along time, or -1 for
        padding, which may stand anywhere.
    - `scale`: multiplies every product of a query and a key. A Python number, or a scalar in the accumulation dtype.
    - `softcap`: `None`, or scores become `softcap * tanh(score / softcap)` behind the scale and before the mask.
    - `precision`: of the matrix products of float32 operands, in the words of `jax.lax.Precision`.
    """

    q: Float[Array, "batch time query_heads key_dim"]
    k: Float[Array, "batch keys kv_heads key_dim"]
    v: Float[Array, "batch keys kv_heads value_dim"]
    query_offset: Int[Array, " batch"] | None
    query_segments: Int[Array, "batch time"] | None
    key_segments: Int[Array, "batch keys"] | None
    scale: float | Float[Array, ""]
    causal: bool = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    precision: str = eqx.field(static=True)

    @property
    def operand(self) -> jnp.dtype:
        return self.k.dtype

    @property
    def accumulation(self) -> jnp.dtype:
        return accumulation_dtype(self.k.dtype)

    @property
    def group(self) -> int:
        """Query heads for each key and value head."""
        return self.q.shape[2] // self.k.shape[2]


AttentionResult = tuple[Float[Array, "batch time query_heads value_dim"], Float[Array, "batch time query_heads"]]


class AbstractAttentionBackend(eqx.Module):
    """A way to run `softmax_attention`. What it changes is speed and memory, never the numbers beyond rounding."""

    @abc.abstractmethod
    def __call__(self, problem: AttentionProblem) -> AttentionResult:
        """Outputs, in `problem.operand` or wider, and log-sum-exps of the scores, in the accumulation dtype.

        Both have gradients with respect to `q`, `k` and `v`. Sums are in the accumulation dtype: float32, or float64
        for float64 operands.
        """

    @abc.abstractmethod
    def why_not(self, problem: AttentionProblem) -> str | None:
        """Why this backend cannot run `problem` (whose arrays may be shapes only), or `None` if it can."""


def is_visible(
    query: Int[Array, "..."],
    key: Int[Array, "..."],
    query_segment: Int[Array, "..."] | None,
    key_segment: Int[Array, "..."] | None,
    *,
    causal: bool,
    window: int | None,
):
    """Which key a query sees, from the position and segment of each: arrays that broadcast against each other.

    `None` where every query sees every key.
    """
    parts = []
    if causal:
        parts.append(key <= query)
    if window is not None:
        parts.append(query - key < window)
        if not causal:
            parts.append(key - query < window)
    if query_segment is not None and key_segment is not None:
        parts.append((query_segment == key_segment) & (key_segment >= 0))
    visible = None
    for part in parts:
        visible = part if visible is None else visible & part
    return visible
