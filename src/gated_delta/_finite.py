"""Tokens that are not finite: taken out before any product, and marked on everything they spoil afterwards."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ._backend import Problem, Result
from ._gates import limit_log_decay
from ._packing import Packing
from ._types import spread_heads


def contained(run: Callable[[Problem], Result], problem: Problem) -> Result:
    """`run(problem)` where every token that is not finite spoils its own document and heads only.

    Marking the followers of what was taken out is a select, so nothing leaks, in gradients neither. Log decays come
    limited to `run`.
    """
    clean, bad, lost = take_out(problem)
    out, state = run(clean)
    spoiled, spoiled_state = spread_damage(bad, lost, problem.packing)
    state = mark_states(state, spoiled_state)
    slot = None if problem.packing is None else problem.packing.slot
    if slot is not None and problem.initial_state is not None:  # a document without tokens leaves what it was given
        rows = jnp.arange(slot.shape[0])[:, None]
        begins = jnp.zeros(state.shape[:2], bool).at[rows, slot].set(True, mode="drop")
        state = jnp.where(begins[:, :, None, None, None], state, problem.initial_state)
    return mark_outputs(out, spoiled), state


def take_out(
    problem: Problem,
) -> tuple[Problem, Bool[Array, "batch time owners group"], Bool[Array, "batch slots owners group"]]:
    """`problem` without what is not finite, which tokens of which heads that were, and which initial states.

    A token with a bad query, key or key-owned gate becomes zero vectors and zero gates for its whole group; a value, or
    a value times its write gate, for its own head. Log decays are limited.
    """
    batch, _, owners, _ = problem.v.shape
    key_heads, group = problem.k.shape[2], problem.group
    dtype = problem.accumulation

    def finite(x):
        return jnp.all(jnp.isfinite(x), axis=-1)

    def has_finite_norm(x):
        return jnp.isfinite(jnp.sum(jnp.square(x.astype(dtype)), axis=-1))

    by_key = has_finite_norm(problem.k) & finite(problem.q)
    by_owner = spread_heads(by_key, owners, axis=2)
    if problem.log_decay is not None:
        by_owner = by_owner & finite(jnp.where(problem.log_decay == -jnp.inf, 0, problem.log_decay))
    if problem.erase is not None:
        keys = spread_heads(problem.k, owners, axis=2).astype(dtype)
        by_owner = by_owner & has_finite_norm(problem.erase.astype(dtype) * keys)
    if key_heads == owners:
        by_key = by_owner
    values = _by_head(problem.v, group)
    by_head = by_owner[..., None] & finite(values)
    write = problem.erase if problem.tied else problem.write
    if write is not None:
        gate = write[..., None] if write.shape[-1] == 1 else _by_head(write, group)
        by_head = by_head & finite(gate.astype(dtype) * values.astype(dtype))

    def keep(x, fine):
        return None if x is None else jnp.where(fine[..., None], x, 0)

    log_decay = keep(problem.log_decay, by_owner)
    log_decay = None if log_decay is None else limit_log_decay(log_decay)
    clean = dataclasses.replace(
        problem,
        q=keep(problem.q, by_key),
        k=keep(problem.k, by_key),
        v=jnp.where(by_head[..., None], values, 0).reshape(problem.v.shape),
        log_decay=log_decay,
        erase=keep(problem.erase, by_owner),
        write=problem.write if problem.write is None else _keep_write(problem.write, by_owner, by_head),
    )
    lost = jnp.zeros((batch, problem.slots, owners, group), bool)
    if problem.initial_state is not None:
        state = _by_head(problem.initial_state, group)
        lost = ~jnp.all(jnp.isfinite(state), axis=(-3, -1))
        state = jnp.where(lost[..., None, :, None], 0, state).reshape(problem.initial_state.shape)
        clean = dataclasses.replace(clean, initial_state=state)
    return clean, ~by_head, lost


def mark_outputs(out: Float[Array, "batch time owners width"], spoiled: Bool[Array, "batch time owners group"]):
    return jnp.where(spoiled[..., None], jnp.nan, _by_head(out, spoiled.shape[-1])).reshape(out.shape)


def mark_states(
    states: Float[Array, "*batch owners key_dim width"], spoiled: Bool[Array, "*batch owners group"]
) -> Float[Array, "*batch owners key_dim width"]:
    marked = jnp.where(spoiled[..., None, :, None], jnp.nan, _by_head(states, spoiled.shape[-1]))
    return marked.reshape(states.shape)


def _by_head(x, group: int):
    """The last axis by the heads whose values stand side by side in it."""
    return x.reshape(*x.shape[:-1], group, x.shape[-1] // group)


def _keep_write(write, by_owner, by_head):
    if write.shape[-1] == 1:
        return jnp.where(by_owner[..., None], write, 0)
    return jnp.where(by_head[..., None], _by_head(write, by_head.shape[-1]), 0).reshape(write.shape)


def spread_damage(bad, lost, packing: Packing | None):
    """Bad tokens `[batch, time, owners, group]` and lost initial states `[batch, slots, owners, group]` to all that
    they spoil."""
    time = jnp.arange(bad.shape[1], dtype=jnp.int32)[None, :, None, None]
    latest = lax.cummax(jnp.where(bad, time, -1), axis=1)
    if packing is None or packing.slot is None:
        begins = jnp.zeros((1, 1), jnp.int32) if packing is None else packing.first_token
        entered = begins == 0 if packing is None else packing.document == 0
        spoiled = (latest >= begins[..., None, None]) | (entered[..., None, None] & lost)
        return spoiled, spoiled[:, -1:]
    rows = jnp.arange(bad.shape[0])[:, None]
    begun = lost.at[rows, packing.slot].get(mode="fill", fill_value=False)
    spoiled = (latest >= packing.first_token[..., None, None]) | begun
    return spoiled, lost.at[rows, packing.slot].max(spoiled, mode="drop")
