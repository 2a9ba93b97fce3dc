"""The operator: check what came, bring it into one form, choose a backend, and give the result its outer form."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from ._backend import AbstractBackend, Problem
from ._dispatch import choose, explain_problem, explain_step
from ._explanation import Explanation
from ._explicit import is_sharded_explicitly, varying_alike, with_automatic_axes
from ._finite import contained
from ._gates import Gates
from ._options import check_precision, check_scale
from ._packing import check_packing
from ._raw_gates import Prologue, RawGates
from ._short_convs import ShortConvs
from ._types import (
    Scalar,
    a_type,
    accumulation_dtype,
    as_float_array,
    is_concrete,
    no_type_check,
    operand_dtype,
    spread_heads,
)
from ._variant import QKNorm

_NORMS = ("l2", "none")


@no_type_check
def gated_delta(
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    *,
    initial_state: Any = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    num_segments: int | None = None,
    scale: Scalar | None = None,
    inverse: str = "exact",
    precision: str | lax.Precision | None = None,
    backend: AbstractBackend | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "batch time value_heads value_dim"], Float[Array, "*states value_heads key_dim value_dim"]]:
    r"""Run the gated delta rule over a batch of sequences.

    Each token decays the state, reads what its key already recalls, writes the difference, and is read by its query:

    $$\bar S_t = \exp(g_t) \odot S_{t-1}, \qquad
      S_t = \bar S_t + k_t (w_t \odot v_t - \bar S_t^\top (e_t \odot k_t))^\top, \qquad o_t = \mathrm{scale}\; S_t^\top
      q_t,$$

    with $g$ = `gates.log_decay`, $e$ = `gates.erase`, $w$ = `gates.write`. Value head `j` uses query and key head
    `j // (value_heads // key_heads)`.

    **Arguments:**

    - `q`, `k`: `[batch, time, key_heads, key_dim]`, any float dtype. Unit-norm keys for the bounds of the numerics page
        to hold. `q` is not scaled yet.
    - `v`: `[batch, time, value_heads, value_dim]`, `value_heads` a multiple of `key_heads`.
    - `gates`: final values; see `Gates`.
    - `initial_state`: `[states, value_heads, key_dim, value_dim]`, key axis first; zeros if `None`. `states` is
        `batch`, or the number of documents with `cu_seqlens`; with `num_segments` the shape is
        `[batch, num_segments, value_heads, key_dim, value_dim]`. Pass the last result back to continue.
    - `segment_ids`: `[batch, time]` integers, rising along time: tokens with different ids do not see each other;
        negative is padding (output 0, state untouched). Without `num_segments` the initial state belongs to the first
        document of each row, and the final state is the one after the last real token.
    - `num_segments`: static. Ids lie in `[0, num_segments)`, and document `i` begins with `initial_state[:, i]` and
        leaves `final_state[:, i]`; a document without tokens leaves what it was given.
    - `cu_seqlens`: `[documents + 1]` integer offsets for `batch == 1`, from 0, rising; document `i` is
        `cu_seqlens[i]:cu_seqlens[i + 1]`. Tokens past the last offset are padding.
    - `scale`: multiplies the query; `key_dim ** -0.5` if `None`. A Python number is static under `jit`.
    - `inverse`: how a chunk is solved: `"exact"`, `"approx"`, `"substitution"` or `"truncated:m"`. The numerics page
        has the error each promises.
    - `precision`: of the matrix products of float32 inputs, in the words of `jax.lax.Precision`; `"highest"` if `None`.
    - `backend`: `None` takes the first that can run; `gated_delta.explain` says which and why the others cannot. A
        backend you name is used or raises: it is never replaced.
    - `checked`: raise at run time, under `jit` too, for values that are otherwise limited (see below). It does not
        export.

    **Returns:** outputs `[batch, time, value_heads, value_dim]` in the dtype of `v`, and the state after the last
    token, float32 (float64 if any of `q`, `k`, `v` is), in the shape of `initial_state`.

    Products use bfloat16 operands if `q`, `k` and `v` all are bfloat16, float64 if any is, else float32; sums, decays
    and states are float32 (float64). New values of `segment_ids` and `cu_seqlens` never recompile.

    Traced values cannot be refused, so they are limited, alike in every backend: a log decay above 0 to 0 with zero
    gradient; falling offsets to the largest before them; ids that fall, and those of `num_segments` or more, are
    padding. A token that is not finite (NaN or infinite; or the squared norm of its key, with or without the erase
    gate, or its value with the write gate overflows) spoils outputs and state of its own document and heads from there
    on, and nothing else. A document that overflows from finite tokens spoils no other; which of its own outputs are
    lost is the backend's matter. (`PallasTPU` looks at outputs only: where a finite token overflows and no output does,
    it shows as huge numbers.)

    **Raises:** `TypeError` for what is no float array, `ValueError` for shapes that do not fit, for values outside the
    promises where they are concrete, and if the named backend cannot run.

    ??? cite "Reference"
        Yang, Kautz and Hatamizadeh, *Gated Delta Networks*, 2024, arXiv:2412.06464; the general gates:
        arXiv:2605.22791.
    """

    arrays = (q, k, v, _check_gates_type(gates), None, initial_state, segment_ids, cu_seqlens)
    return _run(arrays, num_segments, (scale, inverse, precision, checked), None, backend)


@no_type_check
def gated_delta_raw(
    q: Any,
    k: Any,
    v: Any,
    gates: RawGates,
    *,
    qk_norm: QKNorm = "l2",
    convs: ShortConvs | None = None,
    initial_state: Any = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    num_segments: int | None = None,
    scale: Scalar | None = None,
    inverse: str = "exact",
    precision: str | lax.Precision | None = None,
    backend: AbstractBackend | None = None,
    checked: bool = False,
) -> tuple[Float[Array, "batch time value_heads value_dim"], Float[Array, "*states value_heads key_dim value_dim"]]:
    """`gated_delta` from what a layer projects: queries and keys are normalised and gates activated here.

    A backend that can (`PallasTPU`) does so inside its kernels, where it reads the arrays anyway; for any other it is
    done before. The same functions are used, so the results are those of `gated_delta` with `gates.activated()`, to
    rounding.

    **Arguments:** as for `gated_delta`, but for

    - `gates`: raw values and the parameters of the decay; see `RawGates`.
    - `qk_norm`: `"l2"`: queries and keys get unit length per head, `x / sqrt(sum(x ** 2) + 1e-6)`; one whose squared
        norm overflows becomes 0. `"none"`: they are left alone.
    - `convs`: short convolutions of queries, keys and values before all else; see `ShortConvs`. Every row is then one
        document: it does not go with `segment_ids` or `cu_seqlens`. `PallasTPU` convolves inside its forward kernel
        where no gradient is taken.

    **Returns:** what `gated_delta` does.

    Infinite raw values are no error: they are the ends of a gate's range, with a slope of 0. Padding may hold anything.

    **Raises:** as `gated_delta`.
    """
    arrays = (q, k, v, _check_raw(gates, qk_norm), convs, initial_state, segment_ids, cu_seqlens)
    return _run(arrays, num_segments, (scale, inverse, precision, checked), qk_norm, backend)


def _run(arrays, num_segments, options, qk_norm, backend):
    def run(arrays):
        q, k, v, gates, convs, initial_state, segment_ids, cu_seqlens = arrays
        packed = segment_ids, cu_seqlens, num_segments
        call = _prepare(q, k, v, gates, initial_state, *packed, options, qk_norm, convs)
        if call.problem is None:
            return call.nothing()
        return _execute(choose(call.problem, backend), call)

    v, cu_seqlens = arrays[2], arrays[-1]
    if is_sharded_explicitly(arrays):
        return with_automatic_axes(run, arrays, v, _leading_axes(cu_seqlens, num_segments))
    return run(arrays)


@eqx.filter_jit
def _execute(backend: AbstractBackend, call: "_Call"):
    """Under `jit` by itself, because a call outside `jit` would else compile its loop over chunks anew every time."""
    problem = varying_alike(call.problem)
    assert problem is not None
    problem = problem if backend.takes_raw else problem.activated()
    return call.finish(backend(problem) if backend.contains else contained(backend, problem))


@no_type_check
def explain(
    q: Any,
    k: Any,
    v: Any,
    gates: Gates,
    *,
    initial_state: Any = None,
    segment_ids: Any = None,
    cu_seqlens: Any = None,
    num_segments: int | None = None,
    scale: Scalar | None = None,
    inverse: str = "exact",
    precision: str | lax.Precision | None = None,
    backend: AbstractBackend | None = None,
    checked: bool = False,
) -> Explanation:
    """Say which backend `gated_delta` would run for these arguments, and why each other cannot. Computes nothing.

    Takes `gated_delta`'s arguments; any array may be a `jax.ShapeDtypeStruct`. Where they have no time axis it is about
    `gated_delta_step`, from `initial_state`. `print` the result.

    **Raises:** what `gated_delta` would raise for the shapes, dtypes and options given.
    """
    arrays = (q, k, v, _check_gates_type(gates), initial_state, segment_ids, cu_seqlens, scale)
    is_step = all(getattr(x, "ndim", 0) == 3 for x in (q, k, v))

    def prepare(q, k, v, gates, initial_state, segment_ids, cu_seqlens, scale):
        options = scale, inverse, precision, checked
        if is_step:
            q, k, v, gates = q[:, None], k[:, None], v[:, None], with_time(gates)
        return _prepare(q, k, v, gates, initial_state, segment_ids, cu_seqlens, num_segments, options, None).problem

    problem = eqx.filter_eval_shape(prepare, *arrays)
    if problem is None:
        raise ValueError("`explain` needs at least one token and one batch row: an empty call runs no backend.")
    if is_step:
        state = jax.ShapeDtypeStruct((*v.shape[:2], k.shape[2], v.shape[2]), problem.accumulation)
        return explain_step(problem, state, backend)
    return explain_problem(problem, backend)


def with_time(gates: Gates | RawGates) -> Any:
    """The gates of one token with an axis of time. The parameters of a decay have none."""

    def of_tokens(gates):
        if isinstance(gates, RawGates):
            return gates.raw_decay, gates.raw_erase, gates.raw_write
        return gates.log_decay, gates.erase, gates.write

    def expand(x):
        return None if x is None else x[:, None]

    return eqx.tree_at(of_tokens, gates, replace_fn=expand, is_leaf=lambda x: x is None)


# ---- from the outer form to a Problem and back -----------------------------------------------------------------------


class _Call(eqx.Module):
    """A checked call: the problem for a backend, and how to give its result the outer form."""

    problem: Problem | None
    group: int = eqx.field(static=True)  # value heads side by side in one owner's width
    dtype: Any = eqx.field(static=True)
    out_shape: tuple[int, ...] = eqx.field(static=True)
    state_shape: tuple[int, ...] = eqx.field(static=True)
    real: Bool[Array, "batch time"] | None
    initial_state: Float[Array, "..."] | None
    state_dtype: Any = eqx.field(static=True)

    def nothing(self):
        """No token: no output, and every state as it came."""
        state = self.initial_state
        if state is None:
            state = jnp.zeros(self.state_shape, self.state_dtype)
        return jnp.zeros(self.out_shape, self.dtype), state.reshape(self.state_shape)

    def finish(self, result):
        out, state = result
        out = out.reshape(self.out_shape)
        batch, slots, owners, key_dim, width = state.shape
        state = state.reshape(batch, slots, owners, key_dim, self.group, width // self.group)
        state = jnp.swapaxes(state, 3, 4).reshape(batch, slots, owners * self.group, key_dim, width // self.group)
        if self.real is not None:
            out = jnp.where(self.real[..., None, None], out, 0)
        return out.astype(self.dtype), state.reshape(self.state_shape)


def _prepare(
    q,
    k,
    v,
    gates: Gates | RawGates,
    initial_state,
    segment_ids,
    cu_seqlens,
    num_segments,
    options,
    qk_norm,
    convs=None,
) -> _Call:
    """`qk_norm` and the activations of the gates become the problem's prologue where `gates` are raw."""
    scale, inverse, precision, checked = options
    is_raw = isinstance(gates, RawGates)
    q, k, v = (as_float_array(name, value) for name, value in (("q", q), ("k", k), ("v", v)))
    _check_shapes(q, k, v)
    batch, time, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    operand = operand_dtype(q.dtype, k.dtype, v.dtype)
    dtype = accumulation_dtype(operand)
    log_decay, erase, write, owners = _check_gates(gates, k.shape, v.shape)
    log_decay_min = gates.bound if is_raw else gates.log_decay_min
    A_log, dt_bias = _check_parameters(gates, log_decay, batch, dtype) if is_raw else (None, None)
    _check_inverse(inverse, gates.erase_max, None if log_decay is None else log_decay_min, operand)
    precision = check_precision(precision)
    scale = check_scale(scale, key_dim)
    packing, real, states = check_packing(segment_ids, cu_seqlens, num_segments, batch, time, checked)
    _check_convs(convs, k.shape, v.shape, segment_ids is not None or cu_seqlens is not None)
    state_shape = (*states, value_heads, key_dim, value_dim)
    slots = math.prod(states) // max(batch, 1) if cu_seqlens is None else states[0]
    if initial_state is not None:
        initial_state = as_float_array("initial_state", initial_state)
        if initial_state.shape != state_shape:
            raise ValueError(
                f"`initial_state` must be {_state_axes(cu_seqlens, num_segments)} = {state_shape}, key axis first, but "
                f"its shape is {initial_state.shape}."
            )
        initial_state = initial_state.astype(dtype)
    nothing = -jnp.inf if is_raw else 0.0
    log_decay, erase, write = (None if x is None else _keep(x, real, nothing) for x in (log_decay, erase, write))
    if not is_raw:
        log_decay, erase = _check_values(gates, log_decay, erase, checked)

    group = value_heads // owners
    call: dict[str, Any] = dict(
        group=group, dtype=v.dtype, out_shape=v.shape, state_shape=state_shape, real=real, state_dtype=dtype
    )
    if time == 0 or batch == 0 or slots == 0:
        return _Call(None, initial_state=initial_state, **call)

    if log_decay is not None:
        log_decay = log_decay.astype(_at_least(log_decay.dtype, operand) if is_raw else dtype)
    erase, write = (None if x is None else x.astype(_at_least(x.dtype, operand)) for x in (erase, write))
    arrays: dict[str, Any] = {name: _keep(x, real) for name, x in (("q", q), ("k", k), ("v", v))}
    arrays |= {"log_decay": log_decay, "erase": erase, "write": write}
    if initial_state is not None:
        initial_state = initial_state.reshape(batch, slots, *state_shape[-3:])
    if initial_state is not None:
        state = initial_state.reshape(batch, slots, owners, group, key_dim, value_dim)
        initial_state = jnp.swapaxes(state, 3, 4).reshape(batch, slots, owners, key_dim, group * value_dim)
    problem = Problem(
        q=arrays["q"].astype(operand),
        k=arrays["k"].astype(operand),
        v=arrays["v"].astype(operand).reshape(batch, time, owners, group * value_dim),
        log_decay=arrays["log_decay"],
        erase=arrays["erase"],
        write=_group_write(arrays["write"], key_heads, owners, group, value_dim),
        initial_state=initial_state,
        packing=packing,
        scale=scale,
        tied=gates.is_tied,
        group=group,
        slots=slots,
        inverse=inverse,
        precision=precision,
        erase_max=gates.erase_max,
        log_decay_min=log_decay_min,
        A_log=A_log,
        dt_bias=dt_bias,
        convs=None if convs is None else _lay_convs(convs, batch, owners, dtype),
        prologue=Prologue(qk_norm == "l2", log_decay_min, gates.erase_max) if is_raw else None,
    )
    return _Call(problem, initial_state=None, **call)


def _at_least(dtype, operand):
    """Gates keep their dtype, float16 becomes float32, and nothing is narrower than bfloat16 or wider than the
    operands."""
    if operand == jnp.float64:
        return operand
    return jnp.dtype(jnp.bfloat16) if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def _keep(x, real, nothing: float = 0.0):
    """Padding holds `nothing`, whatever stood there: no error and no gradient comes from it."""
    return x if real is None else jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x, nothing)


def _lay_convs(convs: ShortConvs, batch: int, owners: int, dtype) -> ShortConvs:
    """Weights for every row, and values as those of a problem."""

    def of_owners(x):
        return None if x is None else x.reshape(*x.shape[:2], owners, x.shape[2] * x.shape[3] // owners)

    q, k, v = (jnp.broadcast_to(x.astype(dtype), (batch, *x.shape)) for x in convs.weights)
    q_window, k_window, v_window = convs.windows
    return ShortConvs(q, k, of_owners(v), q_window=q_window, k_window=k_window, v_window=of_owners(v_window))


def _group_write(write, key_heads, owners, group, value_dim):
    """The write gate per owner: `[..., owners, 1 | group | group * value_dim]`."""
    if write is None:
        return None
    batch, time, heads, dim = write.shape
    if heads == owners * group:
        return write.reshape(batch, time, owners, group * dim)
    if heads != owners:  # one per key head, while the value heads own the states
        return spread_heads(write, owners, axis=2)
    return write if dim == 1 else jnp.tile(write, group)  # one per key head, shared by its group


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_shapes(q, k, v):
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"`{name}` must be [batch, time, heads, dim], but its shape is {x.shape}.")
        if x.shape[2] == 0 or x.shape[3] == 0:
            raise ValueError(f"`{name}` needs at least one head and one channel, but its shape is {x.shape}.")
    if k.shape != q.shape:
        raise ValueError(
            f"`k` must have the shape of `q`, [batch, time, key_heads, key_dim] = {q.shape}, but its shape is "
            f"{k.shape}."
        )
    if v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"`v` must share batch and time with `k`, {k.shape[:2]}, but its shape is {v.shape}. The layout is "
            "[batch, time, heads, dim]."
        )
    key_heads, value_heads = k.shape[2], v.shape[2]
    if value_heads % key_heads:
        raise ValueError(
            f"`gated_delta` needs value_heads to be a multiple of key_heads, but v has {value_heads} and k has "
            f"{key_heads}. Each key head serves an equal group of value heads; if you meant ungrouped heads, project k "
            f"to {value_heads} heads."
        )


def _check_gates_type(gates) -> Gates:
    if not isinstance(gates, Gates):
        raise TypeError(
            f"`gates` must be a `gated_delta.Gates`, but {a_type(gates)} came. Build it with "
            "`Gates(log_decay, erase, write)`, or with `Gates.tied(beta, log_decay)` where beta both erases and writes."
        )
    return gates


def _check_raw(gates, qk_norm) -> RawGates:
    if not isinstance(gates, RawGates):
        raise TypeError(
            f"`gates` must be a `gated_delta.RawGates`, but {a_type(gates)} came. For final gates use `gated_delta`."
        )
    if qk_norm not in _NORMS:
        raise ValueError(f"`qk_norm={qk_norm!r}` must be one of {_NORMS}.")
    return gates


def _check_gates(gates: Gates | RawGates, k_shape, v_shape):
    """Decay, erase and write with a last axis, and the number of heads that own a state."""
    raw = "raw_" if isinstance(gates, RawGates) else ""
    names = {"log_decay": "raw_decay" if raw else "log_decay", "erase": f"{raw}erase", "write": f"{raw}write"}
    batch, time, key_heads, key_dim = k_shape
    value_heads, value_dim = v_shape[2:]
    heads = (key_heads, value_heads)
    out = {}
    for name, dims, dim_words in (
        ("log_decay", None, f"1, a number of decay tiles that divides key_dim = {key_dim}, or key_dim"),
        ("erase", (1, key_dim), f"1 or key_dim = {key_dim}"),
        ("write", (1, value_dim), f"1 or value_dim = {value_dim}"),
    ):
        came = getattr(gates, names[name])
        if came is None:
            out[name] = None
            continue
        gate = as_float_array(names[name], came)
        gate = gate[..., None] if gate.ndim == 3 else gate
        head_words = f"{key_heads}" if key_heads == value_heads else f"{key_heads} (key) or {value_heads} (value)"
        if gate.ndim != 4 or gate.shape[:2] != (batch, time) or gate.shape[2] not in heads:
            raise ValueError(
                f"`gates.{names[name]}` must be [batch, time, heads] or [batch, time, heads, dim] with batch {batch}, "
                f"time {time} and {head_words} heads, but its shape is {tuple(came.shape)}."
            )
        dim = gate.shape[3]
        if (dim not in dims) if dims else (dim < 1 or key_dim % dim):
            raise ValueError(
                f"The last axis of `gates.{names[name]}` must be {dim_words}, but its shape is {gate.shape}."
            )
        out[name] = gate
    if gates.is_tied and out["erase"].shape[-1] != 1:
        raise ValueError(
            f"A tied beta must be one number per head and token, but its shape is {out['erase'].shape}. Give "
            f"`{names['erase']}` and `{names['write']}` separately for gates per channel."
        )
    owning = {name: out[name].shape[2] for name in ("log_decay", "erase") if out[name] is not None}
    if len(set(owning.values())) > 1:
        raise ValueError(
            f"`gates.{names['log_decay']}` and `gates.{names['erase']}` must have one owner, but their head counts are "
            f"{owning['log_decay']} and {owning['erase']}. Repeat the one of the key heads to all {value_heads} value "
            "heads, or give both per key head."
        )
    owners = next(iter(owning.values()), key_heads)
    return out["log_decay"], out["erase"], out["write"], owners


def _check_parameters(gates: RawGates, raw_decay, batch: int, dtype):
    """`A_log` `[batch, owners]` and `dt_bias` `[batch, owners, groups]` in `dtype`, or `None`."""
    A_log, dt_bias = (
        None if x is None else as_float_array(name, x).astype(dtype)
        for name, x in (("A_log", gates.A_log), ("dt_bias", gates.dt_bias))
    )
    if raw_decay is None:
        return None, None
    owners, groups = raw_decay.shape[2:]
    if A_log is not None and A_log.shape != (owners,):
        raise ValueError(
            f"`gates.A_log` must be one number for each of the {owners} heads of `gates.raw_decay`, [{owners}], but "
            f"its shape is {A_log.shape}."
        )
    if dt_bias is not None and dt_bias.shape not in ((owners, groups), (owners,) * (groups == 1)):
        raise ValueError(
            f"`gates.dt_bias` must be [{owners}, {groups}], heads and groups as in `gates.raw_decay`, but its shape is "
            f"{dt_bias.shape}."
        )
    if dt_bias is not None:
        dt_bias = jnp.broadcast_to(dt_bias.reshape(owners, groups), (batch, owners, groups))
    return None if A_log is None else jnp.broadcast_to(A_log, (batch, owners)), dt_bias


def _check_inverse(inverse, erase_max: float, log_decay_min: float | None, operand):
    """`log_decay_min`: `None` where there is no bound, or no decay."""
    if not isinstance(inverse, str):
        raise TypeError(f"`inverse` must be a string, but {a_type(inverse)} came.")
    name, _, terms = inverse.partition(":")
    good = inverse in ("exact", "approx", "substitution") or (
        name == "truncated" and terms.isdecimal() and int(terms) > 0
    )
    if not good:
        raise ValueError(
            f"`inverse={inverse!r}` is not known: use 'exact', 'approx', 'substitution' or 'truncated:m' with a number "
            "of terms m."
        )
    if name == "approx" and erase_max > 1:
        raise ValueError(
            f"`inverse='approx'` needs gates with `erase_max` of at most 1, but it is {erase_max}: with a "
            "doubled beta its error reaches 0.7. Use `inverse='exact'`."
        )
    if name == "approx" and operand == jnp.float64:
        raise ValueError("`inverse='approx'` rounds to bfloat16: not for float64 inputs. Use `inverse='exact'`.")
    if name == "truncated" and log_decay_min is None:
        raise ValueError(
            f"`inverse={inverse!r}` is right only where decay is strong, and needs gates with a decay and a declared "
            "bound, `log_decay_min`. Use `inverse='exact'`."
        )


def _check_convs(convs, k_shape, v_shape, is_packed: bool):
    if convs is None:
        return
    if not isinstance(convs, ShortConvs):
        raise TypeError(f"`convs` must be a `gated_delta.ShortConvs` or None, but {a_type(convs)} came.")
    if is_packed:
        raise ValueError(
            "`convs` needs rows of one document each, but `segment_ids` or `cu_seqlens` came: a convolution would "
            "reach over their borders. Convolve before the call, as a layer does."
        )
    batch = k_shape[0]
    width = convs.q.shape[0] if convs.q.ndim else 0
    for name, shape in (("q", k_shape), ("k", k_shape), ("v", v_shape)):
        weight, window = getattr(convs, name), getattr(convs, f"{name}_window")
        if weight.shape != (width, *shape[2:]) or width == 0:
            raise ValueError(
                f"`convs.{name}` must be [width, heads, dim] with the {shape[2]} heads x {shape[3]} of `{name}` and "
                f"one width for all three, but its shape is {weight.shape}."
            )
        if window is not None and window.shape != (batch, width - 1, *shape[2:]):
            raise ValueError(
                f"`convs.{name}_window` must be [batch, width - 1, heads, dim] = {(batch, width - 1, *shape[2:])}, but "
                f"its shape is {window.shape}."
            )


def _check_values(gates: Gates, log_decay, erase, checked):
    """Gates inside their ranges: by an error where values are concrete, at run time where `checked`."""
    ranges = []
    if log_decay is not None:
        ranges.append(("log_decay", "log_decay", log_decay, gates.log_decay_min, 0.0))
    if erase is not None:
        ranges.append(("erase", "erase (beta)" if gates.is_tied else "erase", erase, 0.0, gates.erase_max))
    out = {"log_decay": log_decay, "erase": erase}
    for key, name, gate, low, high in ranges:
        slack = 0.0 if low is None else abs(low) * float(jnp.finfo(gate.dtype).eps)  # a bound rounded to its own dtype
        below = None if low is None else low - slack
        above = max(high, float(np.asarray(high).astype(gate.dtype)))
        if is_concrete(gate):
            _check_concrete_range(name, np.asarray(gate), below, above)
        elif checked:
            bad = gate > above if below is None else (gate > above) | (gate < below)
            rule = _range_message(name, low, high)
            out[key] = eqx.error_if(gate, bad, f"{rule}, but not all values of this call are.")
    return out["log_decay"], out["erase"]


def _range_message(name, low, high) -> str:
    if name != "log_decay":
        return f"`gates.{name}` must be in [{low:g}, {high:g}] (`erase_max` promises the upper end)"
    if low is not None:
        return f"`gates.log_decay` must be in [{low:g}, 0] (`log_decay_min` promises the lower end)"
    return "`gates.log_decay` must be at most 0 (the natural logarithm of what is kept, so that 0 keeps everything)"


def _check_concrete_range(name, gate, low, high):
    gate = gate.astype(np.float64) if gate.dtype.itemsize < 8 else gate
    is_decay = name == "log_decay"
    for bad, extreme, word in (
        (gate > high, np.nanargmax, "largest"),
        (gate < low if low is not None else np.zeros(gate.shape, bool), np.nanargmin, "smallest"),
    ):
        if not bad.any():
            continue
        index = np.unravel_index(extreme(gate), gate.shape)
        # No word of a promise that is kept. The decay itself, exp(log_decay), lies in 0 to 1.
        rule = _range_message(name, None if is_decay and word == "largest" else low, high)
        is_kept = is_decay and bool(np.all((gate >= 0) & (gate <= 1)))
        to_do = " Did you pass what is kept, exp(log_decay), which lies in 0 to 1? Then use `jnp.log` of it."
        raise ValueError(
            f"{rule}, but its {word} value is {gate[index]:g}, at index {tuple(int(i) for i in index)}."
            f"{to_do if is_kept else ''}"
        )


def _state_axes(cu_seqlens, num_segments) -> str:
    return f"[{', '.join((*_leading_axes(cu_seqlens, num_segments), 'value_heads', 'key_dim', 'value_dim'))}]"


def _leading_axes(cu_seqlens, num_segments) -> tuple[str, ...]:
    if cu_seqlens is not None:
        return ("documents",)
    return ("batch",) if num_segments is None else ("batch", "num_segments")
