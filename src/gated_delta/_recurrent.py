"""The recurrence, token by token: the oracle that everything else is tested against, and the decoding step."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._backend import AbstractBackend, Problem, Result, entry_state, has_own_states
from ._heads import widen
from ._types import no_type_check, spread_heads


class Token(eqx.Module):
    """One token of every row, or any number of tokens behind further leading axes."""

    q: Float[Array, "*batch key_heads key_dim"]
    k: Float[Array, "*batch key_heads key_dim"]
    v: Float[Array, "*batch owners width"]
    log_decay: Float[Array, "*batch owners groups"] | None
    erase: Float[Array, "*batch owners erase_dim"] | None
    write: Float[Array, "*batch owners write_dim"] | None


def delta_step(
    state: Float[Array, "batch owners key_dim width"], token: Token
) -> tuple[Float[Array, "batch owners key_dim width"], Float[Array, "batch owners width"]]:
    """Decay, erase and write, read: the definition of the family (docs: The family, equation 1)."""
    owners, key_dim, width = state.shape[1:]
    q, k = (spread_heads(x, owners, axis=1) for x in (token.q, token.k))
    if token.log_decay is not None:
        state = widen(jnp.exp(token.log_decay), key_dim)[..., None] * state
    value = token.v if token.write is None else widen(token.write, width) * token.v
    if token.erase is not None:
        value = value - jnp.sum(state * (token.erase * k)[..., None], axis=-2)
    state = state + k[..., None] * value[..., None, :]
    return state, jnp.sum(state * q[..., None], axis=-2)


@no_type_check
class Recurrent(AbstractBackend):
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
