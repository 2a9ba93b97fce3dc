"""All scores at once and plain automatic differentiation: the attention that the others are compared with."""

import jax
import jax.numpy as jnp

from ._backend import AbstractAttentionBackend, AttentionProblem, AttentionResult, is_visible


class DenseAttention(AbstractAttentionBackend):
    """Writes out all scores, `[batch, query_heads, time, keys]`, in the accumulation dtype.

    Derivatives of every order and in both directions. Weights and values are multiplied in the accumulation dtype, so
    nothing but the inputs is rounded.
    """

    def why_not(self, problem: AttentionProblem) -> str | None:
        return None

    def __call__(self, problem: AttentionProblem) -> AttentionResult:
        q, k, v = (x.astype(problem.accumulation) for x in (problem.q, problem.k, problem.v))
        batch, time, heads, key_dim = q.shape
        q = q.reshape(batch, time, k.shape[2], problem.group, key_dim)
        scores = problem.scale * jnp.einsum("btkgd,bskd->bkgts", q, k, precision=problem.precision)
        if problem.softcap is not None:
            scores = problem.softcap * jnp.tanh(scores / problem.softcap)
        visible = _visible(problem)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
        top = jnp.where(top == -jnp.inf, jnp.zeros_like(top), top)  # -inf less -inf is NaN
        weights = jnp.exp(scores - top)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        empty, lost = total == 0, ~jnp.isfinite(total)  # a row that overflowed is NaN, and multiplies no other
        total = jnp.where(empty | lost, jnp.ones_like(total), total)
        weights = jnp.where(lost, jnp.zeros_like(weights), weights) / total
        out = jnp.einsum("bkgts,bskd->btkgd", weights, v, precision=problem.precision)
        log_sum_exp = jnp.where(empty, -jnp.inf, top + jnp.log(total))
        lost, log_sum_exp = (jnp.moveaxis(x[..., 0], 3, 1) for x in (lost, jnp.where(lost, jnp.nan, log_sum_exp)))
        out = jnp.where(lost[..., None], jnp.nan, out)
        return out.reshape(batch, time, heads, v.shape[3]), log_sum_exp.reshape(batch, time, heads)


def _visible(problem: AttentionProblem):
    """`[batch or 1, 1, 1, time, keys]`, or `None`."""
    query = jnp.arange(problem.q.shape[1], dtype=jnp.int32)[None, None, None, :, None]
    key = jnp.arange(problem.k.shape[1], dtype=jnp.int32)[None, None, None, None, :]
    if problem.query_offset is not None:
        query = query + problem.query_offset[:, None, None, None, None]
    segments = (None, None)
    if problem.query_segments is not None and problem.key_segments is not None:
        segments = (problem.query_segments[:, None, None, :, None], problem.key_segments[:, None, None, None, :])
    return is_visible(query, key, *segments, causal=problem.causal, window=problem.window)
