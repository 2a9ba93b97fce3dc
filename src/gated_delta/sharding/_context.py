"""The operator over a sequence that is split over devices: contiguous shards along a mesh axis.

What a shard does to the state that enters it is affine, `leaving = matrix @ entering + offset`, and so is what its
tokens read: `out = base + read @ entering`. All four come of one run of the shard with `key_dim` value channels more,
to which nothing is written and which begin as the identity: what they hold in the end is `matrix`, what is read from
them `read`. So any backend finds them, and no backend has to know. `prefix` then says what enters each shard.

The gradient is that of the shard's own run with the state that entered it, and with the cotangent of the state that
left it: which comes from the shards behind it by the same scan, reversed, of the transposed maps.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from gated_delta._backend import AbstractBackend, Problem, Result, entry_state
from gated_delta._dispatch import choose
from gated_delta._explicit import varying_alike
from gated_delta._finite import contained, mark_outputs, mark_states, spread_damage, take_out
from gated_delta._gates import Gates
from gated_delta._op import gated_delta
from gated_delta._packing import Packing
from gated_delta._tile import Arithmetic, matmul, matmul_tn
from gated_delta._types import Scalar, no_type_check, spread_heads

from ._exchange import Exchange, StateMap, broadcast_last, prefix
from ._ids import across_shards


@no_type_check
class ContextParallel(AbstractBackend):
    """Runs one shard of sequences that are split over a mesh axis, inside a `jax.shard_map` over that axis.

    Device `i` of the axis has the tokens between those of devices `i - 1` and `i + 1`, as many as each of them has.
    Every device gets the outputs of its own tokens, and all get the state after the last one.
    `context_parallel_gated_delta` and `local_mixers` use it, and see to documents.

    - `axis_name`: the mesh axis.
    - `inner`: what runs a shard; `None`: the first backend that can.
    - `exchange`: how states get from shard to shard. `"ring"`: each device waits for the one before it and sends one
        state. `"steps"`: maps of states are composed in as many steps as the number of devices has bits. `None`: what
        makes the last device wait for fewer bytes.
    - `continues`: of packed documents, whether the first one of each row is the last one of the shard before.

    The state that entered a shard and the matrix of its map are named `gated_delta_shard` for policies of
    `jax.checkpoint`: where they are kept, what is computed anew for the backward pass sends nothing again.
    """

    contains = True

    axis_name: str = eqx.field(static=True)
    inner: AbstractBackend | None = None
    exchange: Exchange | None = eqx.field(static=True, default=None)
    continues: Bool[Array, " batch"] | None = None

    def __check_init__(self):
        if self.exchange is not None and self.exchange not in get_args(Exchange):
            raise ValueError(
                f"`ContextParallel(exchange={self.exchange!r})` must be one of {get_args(Exchange)}, or None."
            )

    def why_not(self, problem: Problem) -> str | None:
        try:
            lax.axis_size(self.axis_name)
        except NameError:
            return (
                f"there is no mesh axis {self.axis_name!r} here; it is for the inside of a `jax.shard_map` over an "
                "axis of that name"
            )
        packing = problem.packing
        if packing is not None and packing.slot is not None:
            return (
                "documents with states of their own (`num_segments`, `cu_seqlens`) cannot be split over devices; "
                "`segment_ids` alone, with one state for each row, can"
            )
        if packing is not None and self.continues is None:
            return (
                "nothing says whether a shard's first document is the last one of the shard before; "
                "`context_parallel_gated_delta` and `local_mixers` find it out"
            )
        if self.inner is None:
            return None

        def both(problem):
            return problem.activated(), _with_identity(problem.activated())

        own, wide = eqx.filter_eval_shape(both, problem)
        return self.inner.why_not(own) or self.inner.why_not(wide)

    def __call__(self, problem: Problem) -> Result:
        inner = choose(problem, None) if self.inner is None else self.inner
        if lax.axis_size(self.axis_name) == 1:
            out, state = inner(problem) if inner.contains else contained(inner, problem)
            return out, broadcast_last(state, self.axis_name)
        if problem.packing is not None:
            assert self.continues is not None
            begins = problem.packing.start.at[:, 0].max(~self.continues)
            problem = dataclasses.replace(problem, packing=Packing(begins, None))
        problem, bad, lost = take_out(problem)
        how = _How(inner, self.axis_name, self.exchange)
        arrays, how = _split(problem, how)
        spoiled = spread_damage(bad, jnp.zeros_like(lost), problem.packing)[1][:, 0]
        rest = arrays.others, lost[:, 0], spoiled
        out, state, lost = cast(Any, _shard(how, varying_alike(arrays.floats), rest))
        spoiled, spoiled_state = spread_damage(bad, lost[:, None], problem.packing)
        state = broadcast_last(mark_states(state, spoiled_state[:, 0]), self.axis_name)
        return mark_outputs(out, spoiled), state[:, None]


@no_type_check
def context_parallel_gated_delta(
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    *,
    axis_name: str,
    initial_state: Any = None,
    segment_ids: Any = None,
    scale: Scalar | None = None,
    inverse: str = "exact",
    precision: str | lax.Precision | None = None,
    backend: AbstractBackend | None = None,
    exchange: Exchange | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "batch time value_heads value_dim"], Float[Array, "batch value_heads key_dim value_dim"]]:
    """`gated_delta` of sequences that are split over the mesh axis `axis_name`: for the inside of a `jax.shard_map`.

    Device `i` of the axis holds the `i`-th run of tokens, all of the same length; pad the end of a sequence with
    tokens of a negative segment id. Other axes of the mesh may split the batch and the heads.

    **Arguments:** as for `gated_delta`, of this device's tokens, but for

    - `initial_state`: of the whole sequence: the same on every device of the axis.
    - `segment_ids`: `[batch, time]`, of this device's tokens. A document may reach over any number of devices.
    - `backend`: what runs a shard.
    - `exchange`: as of `ContextParallel`.

    **Returns:** the outputs of this device's tokens, and the state after the last token of all, the same on every
    device of the axis.

    What devices send each other is one state (`exchange="ring"`), or a state's map to those 1, 2, 4, ... places on
    (`"steps"`), for each pass; none of it depends on the number of tokens.

    **Raises:** as `gated_delta`; `ValueError` outside of a `jax.shard_map` over `axis_name`.
    """
    run = ContextParallel(axis_name, backend, exchange)
    options: dict[str, Any] = dict(scale=scale, inverse=inverse, precision=precision, checked=checked)
    if segment_ids is not None:
        segment_ids, continues = across_shards(segment_ids, q.shape[:2], axis_name)
        run = dataclasses.replace(run, continues=continues)
    return gated_delta(q, k, v, gates, initial_state=initial_state, segment_ids=segment_ids, backend=run, **options)


# ---- a shard ---------------------------------------------------------------------------------------------------------


class _How(NamedTuple):
    """What is static about a shard: hashable."""

    inner: AbstractBackend
    axis_name: str
    exchange: Exchange | None
    static: Any = None


class _Arrays(NamedTuple):
    floats: Any
    others: Any


def _split(problem: Problem, how: _How) -> tuple[_Arrays, _How]:
    arrays, static = eqx.partition(problem, eqx.is_array)
    return _Arrays(*eqx.partition(arrays, eqx.is_inexact_array)), how._replace(static=static)


def _join(how: _How, floats: Any, others: Any) -> Problem:
    return eqx.combine(floats, others, how.static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shard(how: _How, floats: Any, rest: Any):
    """Outputs, the state that leaves, and which heads of the state that enters are lost, of a clean problem.

    `rest`: its arrays of integers; which heads of the initial state are lost; which of the state that leaves, where
    what enters is not.
    """
    return _shard_fwd(how, floats, rest)[0]


def _shard_fwd(how: _How, floats, rest):
    others, lost, spoiled = rest
    problem = _join(how, floats, others)
    (base, read), (matrix, offset) = _affine(how.inner, problem)
    enters, carries = _entering(problem.packing)
    # What is lost goes on as NaN, from shard to shard.
    own = StateMap(matrix, mark_states(offset, spoiled), carries)
    first = mark_states(entry_state(problem), lost)
    entering = prefix(own, first, how.axis_name, how.exchange)
    lost = ~jnp.all(jnp.isfinite(_by_head(entering, problem.group)), axis=(-3, -1))
    entering = jnp.where(lost[..., None, :, None], 0, _by_head(entering, problem.group)).reshape(entering.shape)
    entering, matrix, lost = (checkpoint_name(x, "gated_delta_shard") for x in (entering, matrix, lost))

    arithmetic = Arithmetic(problem.operand.name, problem.precision)
    carried = jnp.swapaxes(matmul(jnp.swapaxes(read, 1, 2), entering, arithmetic), 1, 2)
    out = base + (carried if enters is None else jnp.where(enters, carried, 0))
    leaving = StateMap(matrix, offset, carries)(entering)
    kept = read.astype(problem.operand)  # as the products of the backward pass take it
    return (out, leaving, lost), (floats, others, entering, matrix, kept)


def _shard_bwd(how: _How, residuals, cotangents):
    floats, others, entering, matrix, read = residuals
    d_out, d_leaving, _ = cotangents
    problem = _join(how, floats, others)
    enters, carries = _entering(problem.packing)
    arithmetic = Arithmetic(problem.operand.name, problem.precision)
    d_read = d_out if enters is None else jnp.where(enters, d_out, 0)
    offset = matmul_tn(jnp.swapaxes(read, 1, 2), jnp.swapaxes(d_read, 1, 2), arithmetic)
    back = StateMap(jnp.swapaxes(matrix, -1, -2), jnp.zeros_like(offset), carries)
    back = dataclasses.replace(back, offset=back(d_leaving) + offset)
    d_later = prefix(back, jnp.zeros_like(offset), how.axis_name, how.exchange, backwards=True)

    def run(floats):
        problem = _join(how, floats, others)
        return how.inner(dataclasses.replace(problem, initial_state=entering[:, None]))

    (out, _), pull = jax.vjp(run, floats)
    (d_floats,) = pull((d_out.astype(out.dtype), (d_leaving + d_later)[:, None]))  # kernels have outputs like `v`
    if problem.initial_state is not None:
        is_first = lax.axis_index(how.axis_name) == 0
        d_first = jnp.where(is_first, back(d_later), 0)[:, None]
        d_floats = eqx.tree_at(lambda x: x.initial_state, d_floats, d_first)
    return d_floats, None


_shard.defvjp(_shard_fwd, _shard_bwd)


def _affine(inner: AbstractBackend, problem: Problem):
    """`base` and `read`, `[batch, time, owners, width | key_dim]`; `matrix` and `offset`, `[batch, owners, key_dim,
    key_dim | width]`: see above."""
    width = problem.v.shape[3]
    out, state = inner(_with_identity(problem))
    base, read = out[..., :width], out[..., width:]
    offset, matrix = state[:, 0, ..., :width], state[:, 0, ..., width:]
    return (base, read), (matrix, offset)


def _with_identity(problem: Problem) -> Problem:
    """`problem` from zeros, and key_dim value channels more: nothing is written to them, and they begin as the
    identity."""
    owners, width = problem.v.shape[2:]
    key_dim = problem.k.shape[3]
    nothing = spread_heads(0 * problem.k, owners, axis=2)
    write = problem.write
    if write is not None and write.shape[3] > 1:
        wide = jnp.repeat(write, width // write.shape[3], axis=3)
        write = jnp.concatenate([wide, nothing.astype(write.dtype)], axis=3)
    zeros = entry_state(dataclasses.replace(problem, initial_state=None))
    identity = jnp.broadcast_to(jnp.eye(key_dim, dtype=zeros.dtype), (*zeros.shape[:-1], key_dim))
    return dataclasses.replace(
        problem,
        v=jnp.concatenate([problem.v, nothing], axis=3),
        write=write,
        initial_state=jnp.concatenate([zeros, identity], axis=3)[:, None],
        group=1,
    )


def _entering(packing: Packing | None):
    """Which tokens belong to the document that enters, `[batch, time, 1, 1]`, and whether that leaves, `[batch, 1, 1,
    1]`. `None`: all do."""
    if packing is None:
        return None, None
    document = packing.document
    return (document == 0)[..., None, None], (document[:, -1] == 0)[:, None, None, None]


def _by_head(x, group: int):
    return x.reshape(*x.shape[:-1], group, x.shape[-1] // group)
