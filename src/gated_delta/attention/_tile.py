"""The maths of a tile of scores, forward and backward: pure functions of `[..., rows, dim]` and `[..., keys, dim]`.

Rows are queries, those of the heads that share keys below each other. Only ops that also lower inside a Pallas kernel.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float


class Arithmetic(NamedTuple):
    """How products and scores are computed."""

    operand: str
    accumulation: str
    softcap: float | None
    precision: str


class Running(NamedTuple):
    """The softmax over the keys seen so far, of every row.

    `top` is the largest score (`-inf` before the first), `total` and `out` are sums of weights and of weighted values,
    relative to it.
    """

    top: Float[Array, "*lead rows 1"]
    total: Float[Array, "*lead rows 1"]
    out: Float[Array, "*lead rows value_dim"]


def product(
    a: Float[Array, "*lead n m"], b: Float[Array, "*lead p q"], arithmetic: Arithmetic, turned: str = ""
) -> Float[Array, "*lead x y"]:
    """`a @ b` in operands, summed in the accumulation dtype; `turned` names the matrices that are transposed first."""
    lead = tuple(range(a.ndim - 2))
    contract = (a.ndim - 2 if "a" in turned else a.ndim - 1, b.ndim - 1 if "b" in turned else b.ndim - 2)
    operand = jnp.dtype(arithmetic.operand)
    return lax.dot_general(
        a.astype(operand),
        b.astype(operand),
        (((contract[0],), (contract[1],)), (lead, lead)),
        precision=arithmetic.precision if operand.itemsize >= 4 else None,
        preferred_element_type=jnp.dtype(arithmetic.accumulation),
    )


def scores(
    q: Float[Array, "*lead rows key_dim"],
    k: Float[Array, "*lead keys key_dim"],
    scale: float | Float[Array, ""],
    arithmetic: Arithmetic,
) -> Float[Array, "*lead rows keys"]:
    """Scaled and capped products of queries and keys."""
    out = product(q, k, arithmetic, turned="b") * scale
    cap = arithmetic.softcap
    return out if cap is None else cap * jnp.tanh(out / cap)


def masked(scores: Float[Array, "*lead rows keys"], visible: Bool[Array, "..."] | None):
    """`-inf` where a key is not seen: its weight is exactly 0."""
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def begin(
    q: Float[Array, "*lead rows key_dim"],
    k: Float[Array, "*lead_or_1 keys key_dim"],
    v: Float[Array, "*lead_or_1 keys value_dim"],
    arithmetic: Arithmetic,
) -> Running:
    """Before the first key. Made from the inputs, so that it varies over a mesh as they do."""
    nothing = (0 * (q[..., :1] + k[..., :1, :1])).astype(arithmetic.accumulation)
    return Running(nothing - jnp.inf, nothing, nothing + (0 * v[..., :1, :]).astype(arithmetic.accumulation))


def absorb(
    running: Running,
    scores: Float[Array, "*lead rows keys"],
    v: Float[Array, "*lead keys value_dim"],
    arithmetic: Arithmetic,
) -> Running:
    """The softmax with the keys of one more tile, whose `scores` are masked."""
    top = jnp.maximum(running.top, jnp.max(scores, axis=-1, keepdims=True))
    shift = finite_shift(top)
    weights = jnp.exp(scores - shift)
    fade = jnp.exp(running.top - shift)
    total = fade * running.total + jnp.sum(weights, axis=-1, keepdims=True)
    return Running(top, total, fade * running.out + product(weights, v, arithmetic))


def finish(running: Running) -> tuple[Float[Array, "*lead rows value_dim"], Float[Array, "*lead rows 1"]]:
    """Outputs and log-sum-exps: 0 and `-inf` for a row that has seen no key."""
    empty = running.total == 0
    total = jnp.where(empty, jnp.ones_like(running.total), running.total)
    return running.out / total, jnp.where(empty, -jnp.inf, running.top + jnp.log(total))


def finite_shift(x: Float[Array, "..."]):
    """What is subtracted from scores: 0 where there is no score, since `-inf` less `-inf` is NaN."""
    return jnp.where(x == -jnp.inf, jnp.zeros_like(x), x)


def gradients(
    q: Float[Array, "*lead rows key_dim"],
    k: Float[Array, "*lead keys key_dim"],
    v: Float[Array, "*lead keys value_dim"],
    visible: Bool[Array, "..."] | None,
    scale: float | Float[Array, ""],
    log_sum_exp: Float[Array, "*lead rows 1"],
    d_out: Float[Array, "*lead rows value_dim"],
    less: Float[Array, "*lead rows 1"],
    arithmetic: Arithmetic,
):
    """What one tile adds to the gradients of the unscaled products with `q` and `k`, and of `v`.

    `less` is the sum of `out * d_out` over each row, less the cotangent of its log-sum-exp, which is infinite where the
    row overflowed. The first result is still to be multiplied by `scale`.
    """
    s = scores(q, k, scale, arithmetic)
    weights = jnp.exp(masked(s, visible) - finite_shift(log_sum_exp))
    d_scores = weights * (product(d_out, v, arithmetic, turned="b") - less)
    if arithmetic.softcap is not None:
        d_scores = d_scores * (1 - jnp.square(s / arithmetic.softcap))
    if visible is not None:  # 0 times a product that overflowed is NaN
        d_scores = jnp.where(visible, d_scores, jnp.zeros_like(d_scores))
    d_q = product(d_scores, k, arithmetic)
    return d_q, product(d_scores * scale, q, arithmetic, turned="a"), product(weights, d_out, arithmetic, turned="a")
