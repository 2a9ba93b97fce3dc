"""Tokens that are not finite: taken out before any product, and marked on every output that they spoil afterwards."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool

from ._backend import AttentionProblem, AttentionResult


def finite(x):
    return jnp.all(jnp.isfinite(x), axis=-1)


def only(fine, x):
    return jnp.where(fine[..., None], x, jnp.zeros_like(x))


def contained(backend: Callable[[AttentionProblem], AttentionResult], problem: AttentionProblem) -> AttentionResult:
    """`backend(problem)` where a query that is not finite spoils its own output, and a key or a value those of the
    queries that see it: with `nan`, in outputs and log-sum-exps. A select lets nothing through, in gradients neither.
    """
    fine_query, fine_key = finite(problem.q), finite(problem.k) & finite(problem.v)
    clean = dataclasses.replace(
        problem, q=only(fine_query, problem.q), k=only(fine_key, problem.k), v=only(fine_key, problem.v)
    )
    spoiled = sees(problem, ~fine_key)
    return marked(backend(clean), ~fine_query | jnp.repeat(spoiled, problem.group, axis=2))


def marked(result: AttentionResult, spoiled: Bool[Array, "batch_or_1 time query_heads"]) -> AttentionResult:
    out, log_sum_exp = result
    return jnp.where(spoiled[..., None], jnp.nan, out), jnp.where(spoiled, jnp.nan, log_sum_exp)


def sees(problem: AttentionProblem, bad: Bool[Array, "batch keys kv_heads"]) -> Bool[Array, "batch time_or_1 kv_heads"]:
    """Which queries see any of the bad keys. Those a query sees stand in one run, but for padding, which is not bad."""
    keys = bad.shape[1]
    count = jnp.cumsum(bad.astype(jnp.int32), axis=1)
    plain = problem.window is None and problem.query_offset is None and problem.query_segments is None
    if plain and not problem.causal:
        return count[:, -1:] > 0
    if plain and problem.q.shape[1] == keys:
        return count > 0
    position = jnp.arange(problem.q.shape[1], dtype=jnp.int32)[None]
    if problem.query_offset is not None:
        position = position + problem.query_offset[:, None]
    begin, end = jnp.zeros_like(position), jnp.full_like(position, keys)
    if problem.causal:
        end = position + 1
    if problem.window is not None:
        begin = position - problem.window + 1
        end = end if problem.causal else position + problem.window
    if problem.query_segments is not None and problem.key_segments is not None:
        top, own = lax.cummax(problem.key_segments, axis=1), problem.query_segments
        begin = jnp.maximum(begin, _search(top, own, "left"))
        end = jnp.minimum(end, _search(top, own, "right"))
    count = jnp.pad(count, [(0, 0), (1, 0), (0, 0)])
    begin, end = (
        jnp.broadcast_to(jnp.clip(x, 0, keys), (bad.shape[0], position.shape[1]))
        for x in (begin, jnp.maximum(begin, end))
    )

    def at(index):
        return jnp.take_along_axis(count, index[..., None], axis=1)

    return at(end) > at(begin)


def _search(rising, values, side: str):
    find = jax.vmap(functools.partial(jnp.searchsorted, side=side))
    return find(rising, values).astype(jnp.int32)
