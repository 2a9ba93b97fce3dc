"""The recurrence, token by token: the oracle that everything else is tested against, and the decoding step."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._backend import AbstractStepper, Problem, Result, StepResult, entry_state, has_own_states
from ._gates import limit_log_decay
from ._heads import widen
from ._slots import is_slot, put, take
from ._types import no_type_check, spread_heads


class Token(eqx.Module):
    """One token of every row, or any number of tokens behind further leading axes."""

    q: Float[Array, "*batch key_heads key_dim"]
    k: Float[Array, "*batch key_heads key_dim"]
    v: Float[Array, "*batch owners width"]
    log_decay: Float[Array, "*batch owners groups"] | None
    erase: Float[Array, "*batch owners erase_dim"] | None
    write: Float[Array, "*batch owners write_dim"] | None


def forget(
    state: Float[Array, "*axes key_dim width"],
    k: Float[Array, "*axes key_dim _"],
    v: Float[Array, "*axes 1 width"],
    log_decay: Float[Array, "*axes decay_dim 1"] | None,
    erase: Float[Array, "*axes erase_dim 1"] | None,
    write: Float[Array, "*axes 1 write_dim"] | None,
) -> tuple[Float[Array, "*axes key_dim width"], Float[Array, "*axes 1 width"]]:
    """The decayed state, and the value that is new to it: the gated one without what the erased key recalls.

    Equation 1 of docs: The family, up to its product. Key channels are rows of the state, value channels its columns.
    """
    if log_decay is not None:
        state = jnp.exp(log_decay) * state
    value = v if write is None else write * v
    if erase is not None:
        value = value - jnp.sum(state * (erase * k), axis=-2, keepdims=True)
    return state, value


def learn(
    state: Float[Array, "*axes key_dim width"],
    q: Float[Array, "*axes key_dim _"],
    k: Float[Array, "*axes key_dim _"],
    value: Float[Array, "*axes 1 width"],
) -> tuple[Float[Array, "*axes key_dim width"], Float[Array, "*axes 1 width"]]:
    """The state with the value under the key, and what the query reads from it: the rest of equation 1."""
    state = state + k * value
    return state, jnp.sum(state * q, axis=-2, keepdims=True)


def delta_step(
    state: Float[Array, "batch owners key_dim width"], token: Token
) -> tuple[Float[Array, "batch owners key_dim width"], Float[Array, "batch owners width"]]:
    """Decay, erase and write, read: the definition of the family (docs: The family, equation 1)."""
    q, k, v, log_decay, erase, write = _for_states(token, *state.shape[1:])
    state, value = forget(state, k, v, log_decay, erase, write)
    state, out = learn(state, q, k, value)
    return state, out[..., 0, :]


def _for_states(token: Token, owners: int, key_dim: int, width: int):
    """What stands beside the states: columns of key channels and rows of value channels."""

    def column(x) -> Any:
        return None if x is None else widen(spread_heads(x, owners, axis=1), key_dim)[..., None]

    write = None if token.write is None else widen(token.write, width)[..., None, :]
    v = token.v[..., None, :]
    return column(token.q), column(token.k), v, column(token.log_decay), column(token.erase), write


@no_type_check
class Recurrent(AbstractStepper):
    """Runs the recurrence as a scan over tokens, in the accumulation dtype throughout.

    The oracle of all tests, the form for decoding, and the only backend with forward-mode derivatives for every input.

    - `checkpoint_every`: tokens between the states that are kept for the backward pass; the others are recomputed.
    """

    checkpoint_every: int = eqx.field(static=True, default=64)

    def __check_init__(self):
        if self.checkpoint_every < 1:
            raise ValueError(f"`Recurrent(checkpoint_every={self.checkpoint_every})` must be at least 1 token.")

    def why_not(self, problem: Problem) -> str | None:
        return None

    def why_not_step(self, problem: Problem, state: Any) -> str | None:
        return None

    def step(self, problem: Problem, state: Any, slots: Any, fresh: Any) -> StepResult:
        token = _by_value_head(problem)
        large = math.prod(state.shape[1:]) * token.v.shape[0] * token.v.dtype.itemsize > _CACHE_BYTES
        cpu = _step_by_heads if large else _step_at_once
        out, new = jax.lax.platform_dependent(token, state, slots, fresh, cpu=cpu, default=_step_at_once)
        return out * jnp.asarray(problem.scale, out.dtype), new

    def __call__(self, problem: Problem) -> Result:
        dtype = problem.accumulation
        write = problem.erase if problem.tied else problem.write
        tokens = Token(problem.q, problem.k, problem.v, problem.log_decay, problem.erase, write)
        tokens = jax.tree.map(lambda x: x.astype(dtype), tokens)
        packing = problem.packing
        slot = None if packing is None else packing.slot
        start = None if packing is None else packing.start
        rows = jnp.arange(problem.k.shape[0])
        bank = problem.initial_state if has_own_states(problem) else None

        def one_token(carry, xs):
            state, final = carry
            token, start, slot = xs
            if start is not None:
                begin = jnp.zeros_like(state) if bank is None else bank.at[rows, slot].get(mode="fill", fill_value=0)
                state = jnp.where(start[:, None, None, None], begin, state)
            state, out = delta_step(state, token)
            if slot is not None:
                final = final.at[rows, slot].set(state, mode="drop", unique_indices=True)
            return (state, final), out

        state = entry_state(problem)
        final = None
        if slot is not None:
            final = jnp.broadcast_to(state[:, None], problem.state_shape) if bank is None else bank
        xs = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (tokens, start, slot))
        (state, final), out = _checkpointed_scan(one_token, (state, final), xs, self.checkpoint_every)
        out = jnp.moveaxis(out, 0, 1) * jnp.asarray(problem.scale, dtype)
        return out, state[:, None] if final is None else final


def delta_step_at_once(
    state: Float[Array, "batch owners key_dim width"], token: Token
) -> tuple[Float[Array, "batch owners key_dim width"], Float[Array, "batch owners width"]]:
    r"""`delta_step` that goes through the state twice, not three times, and marks what is not finite.

    What the key recalls and what the query reads are one product with the state as it came. Of what is written the
    query reads as much as it has of the key: $S_t^\top q = \bar S_t^\top q + (k \cdot q)\, \mathrm{value}$.

    A token or a state that is not finite shows in the value that is written or in the output, so nobody has to look at
    more than these: then that head's output and state are NaN.
    """
    owners, key_dim, width = state.shape[1:]
    q, k = (spread_heads(x, owners, axis=1) for x in (token.q, token.k))
    kept = None if token.log_decay is None else widen(jnp.exp(token.log_decay), key_dim)
    value = token.v if token.write is None else widen(token.write, width) * token.v
    vectors = jnp.stack([(0 if token.erase is None else token.erase) * k, q], axis=2)
    vectors = vectors if kept is None else kept[:, :, None] * vectors
    both = jnp.einsum("bhnk,bhkv->bhnv", vectors, state, precision="highest")
    value = value - both[:, :, 0]
    out = both[:, :, 1] + jnp.sum(k * q, axis=-1, keepdims=True) * value
    fine = jnp.all(jnp.isfinite(value) & jnp.isfinite(out), axis=-1, keepdims=True)
    value, out = (jnp.where(fine, x, jnp.nan) for x in (value, out))
    value = jax.lax.optimization_barrier(value)  # else it is formed anew for every row of the state
    state = state if kept is None else kept[..., None] * state
    return state + k[..., None] * value[:, :, None], out


_CACHE_BYTES = 2**25
"""States of more bytes do not stay in a CPU's caches between their two ways through it."""

_BLOCK_BYTES = 2**18
"""States of so many do, in those of one core."""


def _step_at_once(token: Token, state, slots, fresh) -> StepResult:
    if slots is None:
        rows = state.astype(token.v.dtype)
        rows = rows if fresh is None else jnp.where(fresh[:, None, None, None], 0, rows)
        new, out = delta_step_at_once(rows, token)
        return out, new.astype(state.dtype)
    first = jnp.zeros(state.shape[1:], token.v.dtype)
    new, out = delta_step_at_once(take(state, first, slots, fresh), token)
    real = is_slot(slots, state.shape[0])
    return jnp.where(real[:, None, None], out, 0), put(state, new, slots)


def _step_by_heads(token: Token, state, slots, fresh) -> StepResult:
    """The same, a few heads of a row at a time, in place: so they are in the cache when they are gone through again."""
    batch, heads, width = token.v.shape
    key_dim = state.shape[2]
    at_once = max(1, _BLOCK_BYTES // (key_dim * width * token.v.dtype.itemsize))
    at_once = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= at_once)
    token = eqx.tree_at(lambda t: (t.q, t.k), token, replace_fn=lambda x: spread_heads(x, heads, axis=1))

    def one_block(block, carry):
        out, states = carry
        row, head = block // (heads // at_once), block % (heads // at_once) * at_once
        place = row if slots is None else jnp.where(is_slot(slots[row], state.shape[0]), slots[row], 0)
        old = jax.lax.dynamic_slice(states, (place, head, 0, 0), (1, at_once, key_dim, width))
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice(x, (row, head, 0), (1, at_once, x.shape[2])), token)
        real, begins = (None if x is None else jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (slots, fresh))
        slot = None if real is None else jnp.where(is_slot(real, state.shape[0]), 0, -1)
        new_out, new = _step_at_once(own, old, slot, begins)
        states = jax.lax.dynamic_update_slice(states, new, (place, head, 0, 0))
        return jax.lax.dynamic_update_slice(out, new_out, (row, head, 0)), states

    return jax.lax.fori_loop(0, batch * heads // at_once, one_block, (jnp.zeros_like(token.v), state))


def _by_value_head(problem: Problem) -> Token:
    """The only token of every row, in the accumulation dtype, with the owners' gates given to all their value heads."""
    dtype, group = problem.accumulation, problem.group
    batch, _, owners, width = problem.v.shape
    heads = owners * group

    def apart(x):
        """`[batch, value_heads, dim]` of what owners have side by side, or share."""
        if x is None:
            return None
        if x.shape[-1] > 1 or group == 1:
            return x.reshape(batch, heads, -1)
        return spread_heads(x[:, 0], heads, axis=1)

    def shared(x):
        return None if x is None else spread_heads(x[:, 0], heads, axis=1)

    write = shared(problem.erase) if problem.tied else apart(problem.write)
    vectors = problem.q[:, 0], problem.k[:, 0], problem.v.reshape(batch, heads, width // group)
    token = Token(*vectors, shared(problem.log_decay), shared(problem.erase), write)
    token = jax.tree.map(lambda x: x.astype(dtype), token)
    return (
        eqx.tree_at(lambda t: t.log_decay, token, replace_fn=limit_log_decay) if token.log_decay is not None else token
    )


def _checkpointed_scan(body, carry, xs, every):
    """`lax.scan(body, carry, xs)` that keeps one carry in `every` for the backward pass and recomputes the rest."""
    length = jax.tree.leaves(xs)[0].shape[0]
    if length <= every:
        return jax.lax.scan(body, carry, xs)
    whole = length - length % every
    block = jax.checkpoint(lambda carry, xs: jax.lax.scan(body, carry, xs))
    blocks = jax.tree.map(lambda x: x[:whole].reshape(-1, every, *x.shape[1:]), xs)
    carry, out = jax.lax.scan(block, carry, blocks)
    out = jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:]), out)
    if whole == length:
        return carry, out
    carry, rest = block(carry, jax.tree.map(lambda x: x[whole:], xs))
    return carry, jax.tree.map(lambda x, y: jnp.concatenate([x, y]), out, rest)
