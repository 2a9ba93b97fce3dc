"""A long prompt piece by piece: memory for one piece, however long the prompt is."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from gated_delta._types import is_concrete, no_type_check

S = TypeVar("S")


class Snapshots(eqx.Module, Generic[S]):
    """States at the boundaries of pieces, for a prefix cache.

    Entry `i` is the state after `i` pieces, the first one before any token; a row that ends earlier repeats its last.

    **Attributes:**

    - `states`: every array with the leading axes `[pieces + 1, batch]`.
    - `tokens`: how many tokens of its row each has seen.
    """

    states: S
    tokens: Int[Array, "pieces_and_1 batch"]


class Prefilled(eqx.Module, Generic[S]):
    """What `prefill` returns.

    **Attributes:**

    - `out`: the output at the last token of every row; zeros for a row without tokens.
    - `state`: after the last token of every row.
    - `snapshots`: or `None`, if they were not asked for.
    """

    out: Shaped[Array, "batch ..."]
    state: S
    snapshots: Snapshots[S] | None


@no_type_check
def prefill(
    run: Callable[[Shaped[Array, "batch piece ..."], S, Bool[Array, "batch piece"]], tuple[Any, S]],
    inputs: Shaped[Array | np.ndarray, "batch time ..."],
    state: S,
    *,
    piece: int,
    lengths: Int[Array | np.ndarray, " batch"] | None = None,
    snapshots: bool = False,
) -> Prefilled[S]:
    """Run a prompt in pieces of the same length, the state of each the beginning of the next.

    **Arguments:**

    - `run`: `run(piece, state, mask) -> (out, state)` with `piece` and `mask` `[batch, piece, ...]`, `mask` true at
        tokens: `lambda x, state, mask: mixer(x, state, mask=mask)`, or a whole model, embedding and all. Only the last
        entry of `out` along time is kept.
    - `inputs`: `[batch, time, ...]`: token ids, or what a layer takes.
    - `state`: to begin with, `mixer.init_state(batch)` for a layer; `run` returns one of the same shapes and dtypes.
    - `piece`: static. Tokens per piece; make it a multiple of the backend's chunk (64).
    - `lengths`: tokens of each row, the rest is padding; all of `time` if `None`. New lengths do not recompile.
    - `snapshots`: keep the state at every boundary.

    Beside inputs, states and snapshots it holds what `run` needs for one piece. Call it under `jit`.

    **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
    """
    if isinstance(piece, bool) or not isinstance(piece, int) or piece < 1:
        raise ValueError(f"`prefill` needs `piece`, the tokens run at once, to be an int of at least 1, not {piece!r}.")
    if not isinstance(inputs, (jax.Array, np.ndarray)) or inputs.ndim < 2:
        came = inputs.shape if isinstance(inputs, (jax.Array, np.ndarray)) else type(inputs).__name__
        raise ValueError(f"`inputs` must be an array [batch, time, ...], but {came} came.")
    batch, time = inputs.shape[:2]
    if state is None:
        raise TypeError("`prefill` needs a state to begin with: `mixer.init_state(batch)` makes one for a layer.")
    lengths = jnp.full((batch,), time, jnp.int32) if lengths is None else _check_lengths(lengths, batch, time)
    pieces = -(-time // piece)
    inputs = jnp.asarray(inputs)
    if pieces * piece != time:
        inputs = jnp.pad(inputs, [(0, 0), (0, pieces * piece - time), *[(0, 0)] * (inputs.ndim - 2)])
    state = jax.tree.map(jnp.asarray, state)

    def one_piece(carry, index):
        state, last = carry
        tokens = lax.dynamic_slice_in_dim(inputs, index * piece, piece, axis=1)
        left = lengths - index * piece
        out, state = run(tokens, state, jnp.arange(piece, dtype=jnp.int32) < left[:, None])
        end = jnp.clip(left, 1, piece) - 1
        end = out[jnp.arange(batch), end]
        last = jnp.where((left > 0).reshape(-1, *(1,) * (last.ndim - 1)), end, last)
        return (state, last), state if snapshots else None

    sample = inputs[:, :1] if time == 0 else inputs[:, :piece]
    out, _ = jax.eval_shape(run, sample, state, jax.ShapeDtypeStruct(sample.shape[:2], bool))
    first = state
    last = jnp.zeros((batch, *out.shape[2:]), out.dtype)
    (state, last), kept = lax.scan(one_piece, (state, last), jnp.arange(pieces, dtype=jnp.int32))
    if not snapshots:
        return Prefilled(last, state, None)
    states: PyTree = jax.tree.map(lambda a, rest: jnp.concatenate([a[None], rest]), first, kept)
    seen = jnp.minimum(piece * jnp.arange(pieces + 1, dtype=jnp.int32)[:, None], lengths)
    return Prefilled(last, state, Snapshots(states, seen))


def _check_lengths(lengths, batch, time):
    if not isinstance(lengths, (jax.Array, np.ndarray)) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        came = getattr(lengths, "dtype", type(lengths).__name__)
        raise TypeError(f"`lengths` must be a JAX or NumPy array of integers, but {came} came.")
    if lengths.shape != (batch,):
        raise ValueError(f"`lengths` must have one entry for each of {batch} rows, but its shape is {lengths.shape}.")
    if is_concrete(lengths):
        values = np.asarray(lengths)
        if values.size and (values.min() < 0 or values.max() > time):
            raise ValueError(f"`lengths` must lie in 0 to time = {time}, but they are {values}.")
    return jnp.clip(jnp.asarray(lengths).astype(jnp.int32), 0, time)
