"""Tokens that are not finite: taken out before any product, and marked on everything they spoil afterwards."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from ._packing import Packing
from ._types import accumulation_dtype, operand_dtype, spread_heads


def contain(
    arrays: dict, initial_state, packing: Packing | None, slots: int, tied: bool
) -> tuple[dict, Any, Array, Array]:
    """Take every token that is not finite out of the problem, and say which outputs and states it spoils.

    A token with a non-finite query, key or key-owned gate becomes zero vectors and zero gates for its whole group; a
    value, a value times its write gate or a value-owned gate for its own head. Marking the followers is then a select,
    so nothing leaks, in gradients neither.
    """
    k, v = arrays["k"], arrays["v"]
    key_heads, value_heads = k.shape[2], v.shape[2]

    def finite(x, axis=-1):
        return jnp.all(jnp.isfinite(x), axis=axis)

    dtype = accumulation_dtype(operand_dtype(*(arrays[name].dtype for name in ("q", "k", "v"))))
    by_key = _has_finite_norm(k.astype(dtype)) & finite(arrays["q"])
    by_value = finite(v)
    write = arrays["erase"] if tied else arrays["write"]
    if write is not None:
        by_value = by_value & finite(spread_heads(write, value_heads, axis=2).astype(dtype) * v.astype(dtype))
    for name in ("log_decay", "erase", "write"):
        gate = arrays[name]
        if gate is None:
            continue
        if name == "erase":
            fine = _has_finite_norm(gate.astype(dtype) * spread_heads(k, gate.shape[2], axis=2).astype(dtype))
        else:
            fine = finite(jnp.where(gate == -jnp.inf, 0, gate) if name == "log_decay" else gate)
        if gate.shape[2] == key_heads:
            by_key = by_key & fine
        else:
            by_value = by_value & fine
    fine = {key_heads: by_key, value_heads: by_value & spread_heads(by_key, value_heads, axis=2)}
    bad = ~fine[value_heads]
    if key_heads == value_heads:
        fine = {value_heads: ~bad}
    clean = {name: None if x is None else jnp.where(fine[x.shape[2]][..., None], x, 0) for name, x in arrays.items()}

    bad_state = jnp.zeros((k.shape[0], slots, value_heads), bool)
    if initial_state is not None:
        bad_state = ~jnp.all(jnp.isfinite(initial_state), axis=(-2, -1))
        initial_state = jnp.where(bad_state[..., None, None], 0, initial_state)
    spoiled, spoiled_state = _spread_damage(bad, bad_state, packing)
    return clean, initial_state, spoiled, spoiled_state


def _has_finite_norm(x):
    return jnp.isfinite(jnp.sum(jnp.square(x), axis=-1))


def _spread_damage(bad, bad_state, packing):
    """Bad tokens `[batch, time, heads]` and bad initial states `[batch, slots, heads]` to all that they spoil."""
    time = jnp.arange(bad.shape[1], dtype=jnp.int32)[None, :, None]
    latest = lax.cummax(jnp.where(bad, time, -1), axis=1)
    if packing is None or packing.slot is None:
        begins = jnp.zeros((1, 1), jnp.int32) if packing is None else packing.first_token
        entered = begins == 0 if packing is None else packing.document == 0
        spoiled = (latest >= begins[..., None]) | (entered[..., None] & bad_state)
        return spoiled, spoiled[:, -1:]
    rows = jnp.arange(bad.shape[0])[:, None]
    begun = bad_state.at[rows, packing.slot].get(mode="fill", fill_value=False)
    spoiled = (latest >= packing.first_token[..., None]) | begun
    return spoiled, bad_state.at[rows, packing.slot].max(spoiled, mode="drop")
