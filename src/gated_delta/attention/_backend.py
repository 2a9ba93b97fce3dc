"""What every attention backend receives (`AttentionProblem`) and what one is (`AbstractAttentionBackend`)."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from gated_delta._options import class_to_call
from gated_delta._types import accumulation_dtype


class AttentionProblem(eqx.Module):
    """One call of `softmax_attention`, validated and normalised: what a backend gets.

    There is at least one row, one query and one key. Unless the backend `contains` what is not finite, all arrays are
    finite: what was not is zero, and the outputs it spoils are marked behind the backend. Padding holds zero vectors.

    Query `i` of a row stands at position `i + query_offset` among the keys, whose positions are 0, 1, ... It sees key
    `j` if all of this holds (`gated_delta.attention.is_visible` writes it out for a tile):

    - where `causal`: `j <= position`;
    - with a `window`: `position - j < window`, and, where not `causal`, `j - position < window`;
    - with segments: both have the same one, and it is not negative.

    A query that sees no key has the output 0 and the log-sum-exp `-inf`, and no gradient.

    **Attributes:**

    - `q`, `k`, `v`: in the dtype of matrix operands, `operand`. Query head `h` reads key and value head `h // group`.
        `q` is not scaled. Without `pages` there is one row of keys and values for each row of queries.
    - `query_offset`: one for each row; `None`: 0 for all. Keys before and behind all queries are allowed.
    - `query_segments`, `key_segments`: both, or `None`. The document of every token, not falling along time, or -1 for
        padding, which may stand anywhere.
    - `scale`: multiplies every product of a query and a key. A Python number, or a scalar in the accumulation dtype.
    - `softcap`: `None`, or scores become `softcap * tanh(score / softcap)` behind the scale and before the mask.
    - `precision`: of the matrix products of float32 operands, in the words of `jax.lax.Precision`.
    - `pages`: `None`, but for a backend that `takes_pages`: then `k` and `v` are pages of a cache, and these are the
        pages of each row, in the order of its keys.
    """

    q: Float[Array, "batch time query_heads key_dim"]
    k: Float[Array, "key_rows keys kv_heads key_dim"]
    v: Float[Array, "key_rows keys kv_heads value_dim"]
    query_offset: Int[Array, " batch"] | None
    query_segments: Int[Array, "batch time"] | None
    key_segments: Int[Array, "batch all_keys"] | None
    scale: float | Float[Array, ""]
    causal: bool = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    softcap: float | None = eqx.field(static=True)
    precision: str = eqx.field(static=True)
    pages: Int[Array, "batch pages"] | None = None

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

    @property
    def keys(self) -> int:
        """For each row."""
        return self.k.shape[1] * (1 if self.pages is None else self.pages.shape[1])

    def gathered(self) -> "AttentionProblem":
        """The same problem without `pages`: each row's keys and values side by side."""
        if self.pages is None:
            return self
        pages = self.pages

        def rows(x):
            return x.at[pages].get(mode="promise_in_bounds").reshape(pages.shape[0], -1, *x.shape[2:])

        return dataclasses.replace(self, k=rows(self.k), v=rows(self.v), pages=None)


AttentionResult = tuple[Float[Array, "batch time query_heads value_dim"], Float[Array, "batch time query_heads"]]


class AbstractAttentionBackend(eqx.Module):
    """A way to run `softmax_attention`. What it changes is speed and memory, never the numbers beyond rounding.

    - `takes_pages`: whether it takes problems with `pages`. Else each row's keys are gathered for it.
    - `contains`: whether the backend itself keeps what is not finite to the queries that see it. Else it is given
        problems without, and what was spoiled is marked afterwards.
    """

    takes_pages: ClassVar[bool] = False
    contains: ClassVar[bool] = False

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


def check_named(named: Any):
    """A `backend` argument is an attention backend or `None`.

    **Raises:** `TypeError` if it is not.
    """
    if named is not None and not isinstance(named, AbstractAttentionBackend):
        raise TypeError(
            "`backend` must be an attention backend such as `gated_delta.attention.BlockedAttention()`, or None, but "
            f"{class_to_call(named, AbstractAttentionBackend)}."
        )
