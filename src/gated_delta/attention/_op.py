"""The operator: check what came, bring it into one form, choose a backend, and give the result its outer form."""

from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from gated_delta._explanation import Explanation
from gated_delta._explicit import is_sharded_explicitly
from gated_delta._options import check_precision, check_scale
from gated_delta._packing import as_int_array, check_ids, check_packing
from gated_delta._types import (
    Scalar,
    a_type,
    accumulation_dtype,
    as_float_array,
    is_concrete,
    no_type_check,
    operand_dtype,
)

from ._backend import AbstractAttentionBackend, AttentionProblem
from ._dispatch import choose, explain_problem
from ._finite import contained


@no_type_check
def softmax_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: Scalar | None = None,
    softcap: float | None = None,
    segment_ids: Any = None,
    key_segment_ids: Any = None,
    cu_seqlens: Any = None,
    query_offset: Any = None,
    precision: str | lax.Precision | None = None,
    backend: AbstractAttentionBackend | None = None,
    return_log_sum_exp: bool = False,
    checked: bool = False,
) -> Any:
    r"""Run softmax attention over a batch of sequences.

    Each query reads the values of the keys that it sees, weighted by the softmax of its scores with them:

    $$s_{ij} = \mathrm{scale}\; q_i^\top k_j, \qquad
      o_i = \sum_j \exp(s_{ij} - L_i)\, v_j, \qquad L_i = \log \sum_j \exp(s_{ij}),$$

    the sums over visible keys only. Query head `h` reads key and value head `h // (query_heads // kv_heads)`: one
    operator for heads of their own, grouped heads and one shared head. The softmax is exact: no score is left out,
    rounded or bounded beyond what you ask for.

    **Arguments:**

    - `q`: `[batch, time, query_heads, key_dim]`, any float dtype, not scaled yet.
    - `k`: `[batch, keys, kv_heads, key_dim]`, `query_heads` a multiple of `kv_heads`.
    - `v`: `[batch, keys, kv_heads, value_dim]`; `value_dim` need not be `key_dim`.
    - `causal`: a query sees keys up to its own position only.
    - `window`: and only the last `window` of them, its own included. Where not `causal`, keys at a distance below
        `window` on both sides. `None`: all.
    - `scale`: multiplies every score; `key_dim ** -0.5` if `None`. A Python number is static under `jit`.
    - `softcap`: scores become `softcap * tanh(score / softcap)`, as in Gemma 2. A Python number. `None`: they stay.
    - `segment_ids`: `[batch, time]` integers, rising along time: tokens with different ids do not see each other;
        negative is padding, anywhere (output 0, seen by nobody). Where traced, so is an id that falls.
    - `key_segment_ids`: `[batch, keys]`, where keys are not the queries' own tokens: a query sees keys of its own id.
        Goes with `segment_ids`.
    - `cu_seqlens`: `[documents + 1]` integer offsets for `batch == 1` instead of ids; as for `gated_delta`.
    - `query_offset`: an integer, or `[batch]` of them: the position of the first query among the keys, for `causal` and
        `window`. Needed, for these two, where there are not as many keys as queries; 0 if `None`.
    - `precision`: of the matrix products of float32 inputs, in the words of `jax.lax.Precision`; `"highest"` if `None`.
    - `backend`: `None` takes the first that can run; `gated_delta.explain_attention` says which and why the others
        cannot. A backend you name is used or raises: it is never replaced.
    - `return_log_sum_exp`: also return $L$, to merge attention over several parts of the keys, or for a loss on it.
    - `checked`: raise at run time, under `jit` too, for ids, offsets and positions that are otherwise limited. It does
        not export.

    **Returns:** outputs `[batch, time, query_heads, value_dim]` in the dtype of `v`; with `return_log_sum_exp` a pair
    of them and `[batch, time, query_heads]` in float32 (float64 if any of `q`, `k`, `v` is), natural logarithms. A
    query that sees no key has the output 0, the log-sum-exp `-inf`, and passes no gradient on.

    Products use bfloat16 operands if `q`, `k` and `v` all are bfloat16, float64 if any is, else float32; scores,
    weights and sums are float32 (float64). New ids and offsets never recompile.

    A query that is not finite spoils its own output, which becomes NaN; a key or value that is not, the outputs of
    those queries of its own heads that see it; and nothing else, in gradients neither.

    **Raises:** `TypeError` for what is no float array, `ValueError` for shapes that do not fit, for values outside the
    promises where they are concrete, and if the named backend cannot run.

    ??? cite "Reference"
        Vaswani et al., *Attention is all you need*, 2017, arXiv:1706.03762; in blocks: Dao et al., *FlashAttention*,
        2022, arXiv:2205.14135; the cap: arXiv:2408.00118.
    """
    _check_flag("return_log_sum_exp", return_log_sum_exp)
    options = Options(causal, window, scale, softcap, precision, checked)
    arrays = (q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset)

    def run(arrays):
        q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset = arrays
        call = prepare(q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset, options)
        if call.problem is None:
            return call.nothing()
        return execute(choose(call.problem, backend), call)

    if is_sharded_explicitly(arrays):
        batch, time, heads, _ = spec_of(q)
        shardings = P(batch, time, heads, spec_of(v)[3]), P(batch, time, heads)
        out, log_sum_exp = cast(tuple[Any, Any], jax.sharding.auto_axes(run, out_sharding=shardings)(arrays))
    else:
        out, log_sum_exp = run(arrays)
    return (out, log_sum_exp) if return_log_sum_exp else out


@no_type_check
def explain_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: Scalar | None = None,
    softcap: float | None = None,
    segment_ids: Any = None,
    key_segment_ids: Any = None,
    cu_seqlens: Any = None,
    query_offset: Any = None,
    precision: str | lax.Precision | None = None,
    backend: AbstractAttentionBackend | None = None,
    return_log_sum_exp: bool = False,
    checked: bool = False,
) -> Explanation:
    """Say which backend `softmax_attention` would run for these arguments, and why each other cannot. Computes nothing.

    Takes `softmax_attention`'s arguments; any array may be a `jax.ShapeDtypeStruct`. `print` the result.

    **Raises:** what `softmax_attention` would raise for the shapes, dtypes and options given.
    """
    _check_flag("return_log_sum_exp", return_log_sum_exp)
    options = Options(causal, window, None, softcap, precision, checked)

    def problem_of(q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset, scale):
        asked = options._replace(scale=scale)
        return prepare(q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset, asked).problem

    if isinstance(query_offset, int):
        query_offset = np.int32(query_offset)
    problem = eqx.filter_eval_shape(problem_of, q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset, scale)
    if problem is None:
        raise ValueError(
            "`explain_attention` needs at least one row, one query and one key: an empty call runs no backend."
        )
    return explain_problem(problem, backend)


@eqx.filter_jit
def execute(backend: AbstractAttentionBackend, call: "Call"):
    """Under `jit` by itself, because a call outside `jit` would else compile its loops anew every time."""
    assert call.problem is not None
    out, log_sum_exp = backend(call.problem) if backend.contains else contained(backend, call.problem)
    return out.astype(call.dtype), log_sum_exp


# ---- from the outer form to an AttentionProblem ----------------------------------------------------------------------


class Options(NamedTuple):
    """The options of a call, as they came."""

    causal: Any
    window: Any
    scale: Any
    softcap: Any
    precision: Any
    checked: Any


class Call(eqx.Module):
    """A checked call: the problem for a backend (`None`: there is nothing to run), and the form of its result."""

    problem: AttentionProblem | None
    dtype: Any = eqx.field(static=True)
    shape: tuple[int, int, int, int] = eqx.field(static=True)
    accumulation: Any = eqx.field(static=True)

    def nothing(self):
        """No row, no query, or no key to see."""
        return jnp.zeros(self.shape, self.dtype), jnp.full(self.shape[:3], -jnp.inf, self.accumulation)


def prepare(q, k, v, segment_ids, key_segment_ids, cu_seqlens, query_offset, options: Options) -> Call:
    q, k, v = (as_float_array(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    check_shapes(q, k, v)
    (batch, time, heads, key_dim), keys = q.shape, k.shape[1]
    check_options(options)
    causal, window, scale, softcap, precision, checked = options
    operand = operand_dtype(q.dtype, k.dtype, v.dtype)
    scale = check_scale(scale, key_dim)
    query_offset = _check_offset(query_offset, batch, checked)
    if query_offset is None and keys != time and (causal or window is not None):
        raise ValueError(
            f"`softmax_attention` needs `query_offset` where queries and keys are not as many, {time} and {keys}: the "
            "position of the first query among the keys, without which nobody knows which keys are behind it. "
            "`query_offset=keys - time` lets the last query see the last key; `causal=False` without a window needs "
            "none."
        )
    queries, own_keys = _check_segments(segment_ids, key_segment_ids, cu_seqlens, batch, time, keys, checked)
    call: dict[str, Any] = dict(
        dtype=v.dtype, shape=(batch, time, heads, v.shape[3]), accumulation=accumulation_dtype(operand)
    )
    if 0 in (batch, time, keys):
        return Call(None, **call)
    q = _real(queries, q)
    k, v = _real(own_keys, k), _real(own_keys, v)
    problem = AttentionProblem(
        q=q.astype(operand),
        k=k.astype(operand),
        v=v.astype(operand),
        query_offset=query_offset,
        query_segments=queries,
        key_segments=own_keys,
        scale=scale if isinstance(scale, (int, float)) else scale.astype(accumulation_dtype(operand)),
        causal=causal,
        window=None if window is None else min(window, 2**30),
        softcap=None if softcap is None else float(softcap),
        precision=check_precision(precision) or "highest",
    )
    return Call(problem, **call)


def _real(segments, x):
    """Padding holds zeros, whatever stood there: no error and no gradient comes from it."""
    return x if segments is None else jnp.where(segments[..., None, None] >= 0, x, jnp.zeros_like(x))


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_shapes(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"`{name}` must be [batch, time, heads, dim], but its shape is {x.shape}.")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"`{name}` needs at least one head and one channel, but its shape is {x.shape}.")
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"`k` must be [batch, keys, kv_heads, key_dim] with batch {q.shape[0]} and key_dim {q.shape[3]} as in `q`, "
            f"but its shape is {k.shape}."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"`v` must share batch, keys and heads with `k`, {k.shape[:3]}, but its shape is {v.shape}. The layout is "
            "[batch, keys, kv_heads, value_dim]."
        )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"`softmax_attention` needs query_heads to be a multiple of kv_heads, but q has {q.shape[2]} and k has "
            f"{k.shape[2]}. Each key and value head serves an equal group of query heads."
        )


def check_options(options: Options):
    """All but `scale` and `precision`."""
    for name in ("causal", "checked"):
        _check_flag(name, getattr(options, name))
    window, softcap = options.window, options.softcap
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise TypeError(f"`window` must be a Python int, since it is static, but {a_type(window)} came.")
    if window is not None and window < 1:
        raise ValueError(f"`window={window}` must be at least 1: a query sees itself. `None` is no window.")
    if softcap is not None and (isinstance(softcap, bool) or not isinstance(softcap, (int, float))):
        raise TypeError(f"`softcap` must be a Python number, since it is static, but {a_type(softcap)} came.")
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ValueError(f"`softcap={softcap}` must be above 0 and finite. `None` is no cap.")


def _check_flag(name: str, value):
    if not isinstance(value, bool):
        raise TypeError(f"`{name}` must be True or False, since it is static, but {a_type(value)} came.")


def _check_offset(offset, batch: int, checked: bool):
    """`[batch]` positions of at least 0, or `None`."""
    if offset is None:
        return None
    if isinstance(offset, int) and not isinstance(offset, bool):
        offset = np.full((batch,), offset)
    offset = as_int_array("query_offset", offset)
    if offset.shape not in ((), (batch,)):
        raise ValueError(f"`query_offset` must be one number or [batch] = ({batch},), but its shape is {offset.shape}.")
    rule = "`query_offset` must be at least 0: it is a position among the keys"
    if is_concrete(offset):
        values = np.asarray(offset)
        if values.size and (values.min() < 0 or values.max() > np.iinfo(np.int32).max // 2):
            raise ValueError(f"{rule}, and below 2^30, but it is {np.array2string(values, threshold=12)}.")
    elif checked:
        offset = eqx.error_if(offset, offset < 0, f"{rule}, but that of this call is not.")
    return jnp.broadcast_to(jnp.maximum(jnp.asarray(offset), 0).astype(jnp.int32), (batch,))


def _check_segments(segment_ids, key_segment_ids, cu_seqlens, batch, time, keys, checked):
    """The document of every query and key, -1 for padding, not falling otherwise; or `None` twice."""
    if key_segment_ids is not None:
        if segment_ids is None:
            raise ValueError(
                "`key_segment_ids` needs `segment_ids` beside it: a query sees keys of its own id. "
                "`jnp.zeros((batch, time), int)` are queries of one document."
            )
        if cu_seqlens is not None:
            raise ValueError("`cu_seqlens` is for keys that are the queries' own tokens: leave out `key_segment_ids`.")
        names = (("segment_ids", segment_ids, time), ("key_segment_ids", key_segment_ids, keys))
        return tuple(_normal_ids(name, ids, batch, length, checked) for name, ids, length in names)
    if segment_ids is None and cu_seqlens is None:
        return None, None
    if keys != time:
        raise ValueError(
            f"`{'segment_ids' if cu_seqlens is None else 'cu_seqlens'}` say to which document the tokens belong, but "
            f"there are {time} queries and {keys} keys. Give `segment_ids` and `key_segment_ids`."
        )
    packing, real, _ = check_packing(segment_ids, cu_seqlens, None, batch, time, checked)
    if packing is None or real is None:  # no document, or no token
        empty = jnp.full((batch, time), -1, jnp.int32)
        return empty, empty
    segments = jnp.where(real, packing.document, -1).astype(jnp.int32)
    return segments, segments


def _normal_ids(name: str, ids, batch: int, length: int, checked: bool):
    ids = as_int_array(name, ids)
    if ids.shape != (batch, length):
        raise ValueError(f"`{name}` must be {(batch, length)}, one id for each token, but its shape is {ids.shape}.")
    if isinstance(ids, np.ndarray) and ids.size and ids.max() > np.iinfo(np.int32).max:
        raise ValueError(f"`{name}` must fit into 32 bits, but the largest is {ids.max()}.")
    ids = check_ids(ids, None, checked, name)
    ids = jnp.asarray(np.maximum(ids, -1).astype(np.int32) if isinstance(ids, np.ndarray) else ids)
    real = ids >= 0
    top = lax.cummax(jnp.where(real, ids, jnp.zeros_like(ids)), axis=1) if length else ids
    return jnp.where(real & (ids == top), top.astype(jnp.int32), -1)


def spec_of(x):
    return (*jax.typeof(x).sharding.spec, *(None,) * 4)[:4] if isinstance(x, jax.Array) else (None,) * 4
