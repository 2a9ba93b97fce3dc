"""`PallasTPUAttention`: a problem brought into the kernels' layout, and the custom derivative that joins the two."""

import functools
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from gated_delta._explicit import varying_alike
from gated_delta._heads import LANES
from gated_delta._types import no_type_check
from gated_delta.attention._backend import AbstractAttentionBackend, AttentionProblem, AttentionResult
from gated_delta.attention._finite import contained

from ._attention_backward import backward, backward_bytes
from ._attention_forward import forward, forward_bytes
from ._attention_layout import LOG2_E, Plan, Rule, Sizes, head_major, token_major, visits
from ._layout import by_rows


class AttentionTiles(eqx.Module):
    """What one grid step works on. `None` leaves a size to the backend.

    - `queries`: of a grid step, whole tiles.
    - `keys`: of a step of its loop, whole tiles; where masks are needed on the diagonal only, a divisor of `queries`.
    - `tile`: rows and columns of a tile of scores: 128 or 256 (any multiple of 8 in the interpreter).
    - `resident_keys`: how many keys, with their values and what they gain, lie in vector memory at a time. Longer
        sequences are cut, and their parts merged by their log-sum-exps.
    """

    queries: int | None = eqx.field(static=True, default=None)
    keys: int | None = eqx.field(static=True, default=None)
    tile: int | None = eqx.field(static=True, default=None)
    resident_keys: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.tile is not None and (self.tile < 8 or self.tile % 8):
            raise ValueError(f"`AttentionTiles(tile={self.tile})` must be a multiple of 8, or None.")
        for name in ("queries", "keys", "resident_keys"):
            value = getattr(self, name)
            if value is not None and (value < 1 or value % (self.tile or LANES)):
                raise ValueError(
                    f"`AttentionTiles({name}={value})` must be whole tiles, of {self.tile or LANES}, or None."
                )


@no_type_check
class PallasTPUAttention(AbstractAttentionBackend):
    """Runs softmax attention on a TPU as one fused kernel, its gradient as a second one.

    - `tiles`: sizes; `None` in them leaves a size to the backend.
    - `interpret`: run in JAX's TPU interpreter, on any machine: slow, for tests. An instance of Pallas'
        `InterpretParams` chooses its options.
    - `ahead_of_time`: do not ask for a TPU here, for `jax.export` and compilation on a machine that has none.

    Kept for the backward pass are the inputs, the outputs and one log-sum-exp per query.
    """

    contains = True

    tiles: AttentionTiles = AttentionTiles()
    interpret: bool | pltpu.InterpretParams = eqx.field(static=True, default=False)
    ahead_of_time: bool = eqx.field(static=True, default=False)

    def why_not(self, problem: AttentionProblem) -> str | None:
        if problem.operand == jnp.float64:
            return "float64 has no TPU kernel; BlockedAttention and DenseAttention compute it"
        for gradient in (False, True):
            if _settled(self.tiles, _shape_of(problem), gradient) is None:
                *_, key_dim = problem.k.shape
                return (
                    f"heads of {key_dim} and {problem.v.shape[3]} channels with tiles of {self.tiles} leave no room in "
                    "a TPU's vector memory; smaller `queries` and `keys` may"
                )
        if not (self.interpret or self.ahead_of_time) and jax.default_backend() != "tpu":
            return f"it needs a TPU, and the default platform is {jax.default_backend()}"
        return None

    def __call__(self, problem: AttentionProblem) -> AttentionResult:
        q, scale = problem.q, problem.scale
        if not isinstance(scale, float):  # only a number known here goes into the kernels
            q, scale = (q.astype(problem.accumulation) * scale).astype(q.dtype), 1.0
        how = _How(self, problem.causal, problem.window, scale, problem.softcap, problem.precision)
        integers = _Integers(problem.query_offset, problem.query_segments, problem.key_segments)
        return cast(AttentionResult, _guarded(how, *varying_alike((q, problem.k, problem.v)), integers))


class _How(NamedTuple):
    """Everything static about a call but its shapes."""

    backend: PallasTPUAttention
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    precision: str


class _Integers(NamedTuple):
    offset: Any
    query_segments: Any
    key_segments: Any


# ---- derivatives -----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guarded(how: _How, q, k, v, integers: _Integers):
    """The kernel's result; where it is not finite, that of the kernel for a problem without what is not.

    So a bad token costs a second run when there is one, and otherwise a look at the log-sum-exps.
    """
    return by_rows(_guarded_result, how, q, k, v, integers)[0]


def _guarded_forward(how, q, k, v, integers):
    result, bad = by_rows(_guarded_result, how, q, k, v, integers)
    return result, (q, k, v, integers, bad, *result)


def _guarded_backward(how, residuals, cotangents):
    return *by_rows(_guarded_pull, how, *residuals, cotangents), None


_guarded.defvjp(_guarded_forward, _guarded_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unguarded(how: _How, q, k, v, integers: _Integers):
    """The kernel's result."""
    return _forward(how, q, k, v, integers)


def _unguarded_forward(how, q, k, v, integers):
    result = _forward(how, q, k, v, integers)
    return result, (q, k, v, integers, *result)


def _unguarded_backward(how, residuals, cotangents):
    return *_backward(how, *residuals, *cotangents), None


_unguarded.defvjp(_unguarded_forward, _unguarded_backward)


def _guarded_result(how, q, k, v, integers):
    result = _forward(how, q, k, v, integers)
    bad = jnp.isnan(result[1]).any(axis=(1, 2))
    return lax.cond(bad.any(), lambda: _contained(how, integers, q, k, v), lambda: result), bad


def _guarded_pull(how, q, k, v, integers, bad, out, log_sum_exp, cotangents):
    def again():
        return jax.vjp(functools.partial(_contained, how, integers), q, k, v)[1](cotangents)

    return lax.cond(bad.any(), again, lambda: _backward(how, q, k, v, integers, out, log_sum_exp, *cotangents))


def _contained(how: _How, integers: _Integers, q, k, v):
    q, k, v = lax.optimization_barrier((q, k, v))  # else XLA moves what follows out of the branch

    def run(clean: AttentionProblem):
        return cast(AttentionResult, _unguarded(how, clean.q, clean.k, clean.v, integers))

    static: dict[str, Any] = dict(causal=how.causal, window=how.window, softcap=how.softcap, precision=how.precision)
    return contained(run, AttentionProblem(q, k, v, *integers, how.scale, **static))


# ---- the kernels -----------------------------------------------------------------------------------------------------


def _forward(how: _How, q, k, v, integers: _Integers):
    launch = _Launch(how, q, k, v, integers, gradient=False)
    laid_q, parts = launch.lay_queries(q), launch.lay_parts(k, v)
    if launch.parts == 1:
        out, log_sum_exp = launch.forward(laid_q, parts.at(0), q.dtype)
    else:

        def merge(so_far, part):
            return _merged(so_far, launch.forward(laid_q, part, jnp.float32)), None

        zero = 0 * laid_q[:, :, :, :1].astype(jnp.float32)  # varies over a mesh as the queries do
        out = jnp.broadcast_to(zero, (*laid_q.shape[:3], parts.v.shape[-1]))
        (out, log_sum_exp), _ = lax.scan(merge, (out, jnp.swapaxes(zero, 2, 3) - jnp.inf), parts)
    out = token_major(out, q.shape[1], v.shape[3]).astype(q.dtype)
    return out, jnp.swapaxes(log_sum_exp[:, :, 0, : q.shape[1]], 1, 2)


def _merged(one, other):
    """The softmax over the keys of both."""
    (out, lse), (other_out, other_lse) = one, other
    both = jnp.logaddexp(lse, other_lse)
    shares = [jnp.where(x == -jnp.inf, 0.0, jnp.exp(x - both))[:, :, 0, :, None] for x in (lse, other_lse)]
    return shares[0] * out + shares[1] * other_out, both


def _backward(how: _How, q, k, v, integers: _Integers, out, log_sum_exp, d_out, d_log_sum_exp):
    launch = _Launch(how, q, k, v, integers, gradient=True)
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    sees = log_sum_exp > -jnp.inf
    delta = jnp.where(sees, delta - d_log_sum_exp, 0.0)
    base_2 = jnp.where(sees, log_sum_exp * LOG2_E, _NEVER)
    laid = launch.lay_queries(q), launch.lay_queries(d_out.astype(q.dtype))
    rows = launch.lay_rows(base_2, _NEVER), launch.lay_rows(delta, 0.0)
    parts = launch.lay_parts(k, v)
    if launch.parts == 1:
        d_q, *d_parts = launch.backward(*laid, *rows, parts.at(0), q.dtype)
        d_k, d_v = (x[None] for x in d_parts)
    else:

        def add(so_far, part):
            d_q, d_k, d_v = launch.backward(*laid, *rows, part, jnp.float32)
            return so_far + d_q, (d_k, d_v)

        d_q, (d_k, d_v) = lax.scan(add, 0 * laid[0].astype(jnp.float32), parts)
    d_q = token_major(d_q, *q.shape[1::2]).astype(q.dtype)
    return d_q, launch.take_parts(d_k, k), launch.take_parts(d_v, v)


_NEVER = 1e30
"""A log-sum-exp that no score comes near: weights relative to it are 0."""


# ---- layout ----------------------------------------------------------------------------------------------------------


class _Parts(NamedTuple):
    """Keys and values of a part of the sequence, or of all parts, with an axis of parts before the others."""

    k: Any  # [batch, kv_heads, resident, key_dim]
    v: Any
    begin: Any  # number of its first key
    segments: Any  # [batch, 1, resident], or None

    def at(self, i: int) -> "_Parts":
        return jax.tree.map(lambda x: x[i], self)


class _Launch:
    """One of the two kernels, for one problem: its sizes, and the way into its layout and out of it."""

    def __init__(self, how: _How, q, k, v, integers: _Integers, gradient: bool):
        self.how, self.integers = how, integers
        self.time, self.keys = q.shape[1], k.shape[1]
        has_offset, has_segments = integers.offset is not None, integers.query_segments is not None
        self.shape = _Shape(
            self.time, self.keys, k.shape[3], v.shape[3], q.dtype, how.causal, how.window, has_offset, has_segments
        )
        settled = _settled(how.backend.tiles, self.shape, gradient)
        assert settled is not None
        self.settled, self.sizes, self.parts = settled, settled.sizes, settled.parts
        self.queries = _whole(self.time, self.sizes.block)

    def lay_queries(self, x):
        return head_major(x, self.queries, _whole(x.shape[3], _CHANNELS))

    def lay_rows(self, x, fill: float):
        """`[batch, time, heads]` as `[batch, heads, 1, time]`."""
        x = jnp.pad(x, [(0, 0), (0, self.queries - self.time), (0, 0)], constant_values=fill)
        return jnp.swapaxes(x, 1, 2)[:, :, None]

    def lay_parts(self, k, v) -> _Parts:
        count, resident = self.parts, self.settled.resident

        def cut(x):
            x = head_major(x, count * resident, _whole(x.shape[3], _CHANNELS))
            return jnp.moveaxis(x.reshape(*x.shape[:2], count, resident, x.shape[3]), 2, 0)

        segments = self.integers.key_segments
        if segments is not None:
            segments = jnp.pad(segments, [(0, 0), (0, count * resident - self.keys)], constant_values=-1)
            segments = jnp.moveaxis(segments.reshape(segments.shape[0], 1, count, resident), 2, 0)
        begin = resident * np.arange(count, dtype=np.int32)
        return _Parts(cut(k), cut(v), begin if count == 1 else jnp.asarray(begin), segments)

    def take_parts(self, x, like):
        """`lay_parts` undone, of what has the shape of `like`."""
        x = jnp.moveaxis(x, 0, 2)
        x = x.reshape(*x.shape[:2], -1, x.shape[4])
        return token_major(x, *like.shape[1::2]).astype(like.dtype)

    def forward(self, q, part: _Parts, dtype):
        return forward(*self.plan(part), dtype)(q, part.k, part.v)

    def backward(self, q, d_out, log_sum_exp, delta, part: _Parts, dtype):
        return backward(*self.plan(part), dtype)(q, part.k, part.v, d_out, log_sum_exp, delta)

    def plan(self, part: _Parts):
        """What a kernel is told about `part`, but its arrays: `Plan`, visits, numbers and segments."""
        how, shape, settled, sizes = self.how, self.shape, self.settled, self.sizes
        is_cut = self.parts > 1
        offset, query_segments, real_keys = self.integers.offset, self.integers.query_segments, self.keys
        if is_cut:
            offset = (jnp.zeros((part.k.shape[0],), jnp.int32) if offset is None else offset) - part.begin
            real_keys = jnp.clip(real_keys - part.begin, 0, settled.resident)
        segments = []
        if query_segments is not None:
            pad = [(0, 0), (0, self.queries - self.time)]
            segments = [jnp.pad(query_segments, pad, constant_values=-1)[:, None], part.segments]
        rule = Rule(how.causal, shape.window_within, shape.has_segments, settled.has_padding)
        of = visits(
            sizes,
            rule,
            settled.diagonal,
            self.queries // sizes.block,
            settled.resident // sizes.step,
            real_keys,
            offset,
            *(x[:, 0] for x in segments),
            *([] if segments else [None, None]),
        )
        first, whole, masked, last = np.moveaxis(of, 2, 0) if isinstance(of, np.ndarray) else (0, 0, 1, 2)
        plan = Plan(
            sizes=sizes,
            rule=rule,
            real_queries=self.time,
            has_offset=offset is not None,
            diagonal=settled.diagonal,
            has_whole_steps=bool(np.any(masked > whole)),
            has_masked_steps=bool(np.any(last - first > masked - whole)),
            scale=how.scale,
            softcap=how.softcap,
            precision=how.precision,
            operand=jnp.dtype(part.k.dtype).name,
            interpret=how.backend.interpret,
        )
        numbers = jnp.asarray(real_keys, jnp.int32).reshape(1)
        return plan, jnp.asarray(of), numbers if offset is None else jnp.concatenate([numbers, offset]), segments


# ---- sizes -----------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """What sizes hang on."""

    time: int
    keys: int
    key_dim: int
    value_dim: int
    dtype: Any
    causal: bool
    window: int | None
    has_offset: bool
    has_segments: bool

    @property
    def window_within(self) -> int | None:
        """`None` if a window holds everything."""
        reach = max(self.time, self.keys)
        return None if self.window is None or (self.window >= reach and not self.has_offset) else self.window

    @property
    def is_plain(self) -> bool:
        """Causal from the first key on, and nothing else."""
        return self.causal and self.window_within is None and not (self.has_offset or self.has_segments)


def _shape_of(problem: AttentionProblem) -> _Shape:
    return _Shape(
        problem.q.shape[1],
        problem.keys,
        problem.k.shape[3],
        problem.v.shape[3],
        problem.operand,
        problem.causal,
        problem.window,
        problem.query_offset is not None,
        problem.query_segments is not None,
    )


class _Settled(NamedTuple):
    sizes: Sizes
    resident: int  # keys of a part
    parts: int
    diagonal: bool
    has_padding: bool


def _settled(tiles: AttentionTiles, shape: _Shape, gradient: bool) -> _Settled | None:
    """Sizes for a kernel, or `None` where none fit into vector memory.

    A block of queries is long, because what begins and ends it costs as much as several tiles, unless it would pad
    the sequence by more than an eighth. Where masks are more than the diagonal it is shorter: all of a step is masked.
    """
    tile = tiles.tile or (2 * LANES if max(shape.time, shape.keys) > LANES else LANES)
    longest = _QUERIES[gradient] if shape.is_plain else _MASKED_QUERIES
    if shape.window_within is not None:
        longest = min(longest, max(_whole(shape.window_within, tile), tile))
    block = tiles.queries or _fitting(shape.time, longest, tile)
    step = tiles.keys or _fitting(shape.keys, min(_KEYS, block) if shape.is_plain else _MASKED_KEYS, tile)
    diagonal = shape.is_plain and block % step == 0
    keys = _whole(shape.keys, block if diagonal else step)
    dims = (_whole(dim, _CHANNELS) for dim in (shape.key_dim, shape.value_dim))
    count = functools.partial(backward_bytes if gradient else forward_bytes, Sizes(block, step, tile))
    fitting = functools.partial(count, key_dim=next(dims), value_dim=next(dims), dtype=shape.dtype, has_segments=True)
    most = min(keys, tiles.resident_keys or keys) // step * step
    while most > 0 and fitting(most) > _BYTES:
        most -= step
    if most <= 0:
        return None
    parts = -(-keys // most)
    resident = _whole(-(-keys // parts), step)
    has_padding = parts * resident > shape.keys and not (shape.has_segments or (shape.causal and not shape.has_offset))
    return _Settled(Sizes(block, step, tile), resident, parts, diagonal and parts == 1, has_padding)


def _fitting(length: int, longest: int, tile: int) -> int:
    """Of `longest` and its halves, the longest that pads `length` by no more than an eighth, or else the least."""
    sizes = [size for size in (longest >> i for i in range(longest.bit_length())) if size >= tile and size % tile == 0]
    return next((size for size in sizes if -length % size <= length // 8), sizes[-1] if sizes else tile)


def _whole(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


_CHANNELS = 64  # heads are padded to a multiple of
_QUERIES = {False: 2048, True: 1024}  # of a block, forward and backward
_KEYS = 1024  # of a step
_MASKED_QUERIES, _MASKED_KEYS = 1024, 512
_BYTES = 54 * 2**20  # of vector memory: what the compiler itself needs comes on top
