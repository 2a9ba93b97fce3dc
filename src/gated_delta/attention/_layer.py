"""The trainable layer: project, normalise, turn, attend, gate the output, project back."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from gated_delta._activations import raise_dtype
from gated_delta._gate_modules import OutputGate
from gated_delta._linear import Linear
from gated_delta._norm import RMSNorm
from gated_delta._options import check_batch, check_key, check_precision, instead_of_a_state, one_token_only
from gated_delta._rows import Rows, make_rows
from gated_delta._slots import check_distinct, check_fresh, check_slots
from gated_delta._types import a_type, as_float_array, no_type_check

from ._backend import AbstractAttentionBackend, check_named
from ._cache import KVCache, PagedKVCache, check_lengths
from ._cached import Rules, Tokens, advance, check_cache, check_room, filled, held
from ._config import AttentionConfig
from ._finite import finite, only
from ._op import softmax_attention
from ._rotary import rotate


class SoftmaxAttention(eqx.Module):
    """A causal softmax attention layer, called as a `GatedDeltaMixer` is: the other half of hybrid models.

    Queries, keys and values are projected from x; queries and keys are normalised and turned to their positions, where
    the config says so; attention runs; its output is multiplied by an activated gate, where there is one, and projected
    back.

    Products are computed in the dtype of `x`, to which weights are cast, with scores, weights, norms and sums in
    float32 (float64 where x is). `out` has the dtype of `x`.

    **Attributes:**

    - `config`: what the layer is.
    - `backend`: how attention runs; `None`: the first backend that can. It is part of the tree's structure.
    - `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`, `out_gate`: the parts, `None` where the config has
        none. Any part may be replaced by a module that is called alike.
    """

    config: AttentionConfig = eqx.field(static=True)
    backend: AbstractAttentionBackend | None
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    out_gate: OutputGate | None
    o_proj: Linear

    @no_type_check
    def __init__(self, config: AttentionConfig, *, backend: AbstractAttentionBackend | None = None, key: PRNGKeyArray):
        if not isinstance(config, AttentionConfig):
            raise TypeError(
                f"`SoftmaxAttention` needs an `AttentionConfig`, but {a_type(config)} came. Give "
                "`AttentionConfig(model, query_heads=...)`."
            )
        check_named(backend)
        check_key(key)
        query_heads, kv_heads, key_dim, value_dim = config.sizes
        keys = jax.random.split(key, 5)
        model, init = config.model, config.init
        self.config = config
        self.backend = backend
        self.q_proj = Linear(model, query_heads * key_dim, init=init, key=keys[0])
        self.k_proj = Linear(model, kv_heads * key_dim, init=init, key=keys[1])
        self.v_proj = Linear(model, kv_heads * value_dim, init=init, key=keys[2])
        self.q_norm = _make_norm(config, query_heads)
        self.k_norm = _make_norm(config, kv_heads)
        self.out_gate = None
        if config.output_gate is not None:
            gate = OutputGate(model, query_heads, value_dim, activation=config.output_gate, init=init, key=keys[3])
            self.out_gate = gate
        self.o_proj = Linear(query_heads * value_dim, model, init=init, key=keys[4])

    @no_type_check
    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch time model"],
        state: KVCache | None = None,
        *,
        mask: Bool[Array | np.ndarray, "*batch time"] | None = None,
        segment_ids: Int[Array | np.ndarray, "*batch time"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch time model"], KVCache]:
        """Mix a sequence, or a batch of them.

        **Arguments:**

        - `x`: `[time, model]` or `[batch, time, model]`, any float dtype.
        - `state`: what the call before returned, to continue; nothing before if `None`. Unbatched for an unbatched `x`.
        - `mask`: `[time]` or `[batch, time]` booleans, true at real tokens. Padding may be anywhere: its output is 0,
            and it leaves no trace in any state or in any other token.
        - `segment_ids`: `[time]` or `[batch, time]` integers that rise along time; tokens of different ids do not see
            each other, and each document has positions from 0. Negative is padding, and under jit so is an id that
            falls. A given state continues the first document of each row, and the state returned is that of the last.
        - `key`: ignored; here so that the layer fits where a key is passed to every layer.

        **Returns:** `(out, state)`: out in the shape and dtype of `x`, and the state after the last real token, in the
        dtypes and the capacity of the state that came; without one, in the dtype of `x`, and with the config's
        capacity, that of its window, or of exactly these tokens.

        A token that is not finite spoils the outputs that see it, and its document's state, and nothing else. So does a
        token for which the state has no room.

        **Raises:** `TypeError` and `ValueError` for arguments that do not fit; see also `softmax_attention`.
        """
        del key
        x = as_float_array("x", x)
        self._check_x(x, (2, 3), "[time, model] or [batch, time, model]")
        self._check_state(state, x.shape[:-2])
        single = x.ndim == 2
        if single:
            x, state = _add_axis(x), _add_axis(state)
            mask, segment_ids = _add_row("mask", mask), _add_row("segment_ids", segment_ids)
        rows = None
        if mask is not None or segment_ids is not None:
            rows = make_rows(mask, segment_ids, None, *x.shape[:2])
            assert rows is not None
            x = rows.gather(jnp.asarray(x))
        out, new = self._run(x, state, rows, segment_ids is not None)
        out = out if rows is None else rows.scatter(out)
        return (out[0], jax.tree.map(lambda a: a[0], new)) if single else (out, new)

    @no_type_check
    def step(
        self, x: Float[Array | np.ndarray, "*batch model"], state: KVCache
    ) -> tuple[Float[Array, "*batch model"], KVCache]:
        """One token of a sequence, `x` `[model]`, or of a batch of them, `[batch, model]`: the decoding form.

        Feeding tokens one by one equals one call. The new state has the shapes and dtypes of the old, so `step` can be
        the body of a `lax.scan`. `init_state` makes the first one. For states in the slots of a pool there are
        `extend`, and `gated_delta.serving.pooled_step`.
        """
        x = as_float_array("x", x)
        self._check_x(x, (1, 2), "one token, [model] or [batch, model],")
        if state is None:
            raise TypeError("`step` needs a state: begin with `mixer.init_state()`, or with what a call returned.")
        self._check_state(state, x.shape[:-1], one_token_only(x, "mixer"))
        single = x.ndim == 1
        if single:
            x, state = _add_axis(x), _add_axis(state)
        out, state = self._run(x[:, None], state, None, False)
        return (out[0, 0], jax.tree.map(lambda a: a[0], state)) if single else (out[:, 0], state)

    @no_type_check
    def extend(
        self,
        x: Float[Array | np.ndarray, "rows time model"],
        cache: KVCache | PagedKVCache,
        slots: Int[Array | np.ndarray, " rows"] | None = None,
        *,
        lengths: Int[Array | np.ndarray, " rows"] | None = None,
        fresh: Bool[Array | np.ndarray, " rows"] | None = None,
        checked: bool = False,
    ) -> tuple[Float[Array, "rows time model"], KVCache | PagedKVCache]:
        """The next tokens of some rows, whose keys and values lie in the slots of a cache, which is updated there.

        A prompt, a piece of one, or one token of every row. The cache is a `PagedKVCache`, or the `states` of a
        `StatePool` of `mixer.init_state()`.

        **Arguments:** `slots`, `lengths`, `fresh`, `checked` as for `cached_attention`.

        **Returns:** the outputs, 0 at padding, and the new cache.

        **Raises:** as `cached_attention`.
        """
        x = as_float_array("x", x)
        self._check_x(x, (3,), "[rows, time, model]")
        rows, time = x.shape[:2]
        _, kv_heads, key_dim, value_dim = self.config.sizes
        check_cache(cache, (rows, time, kv_heads, key_dim), (rows, time, kv_heads, value_dim), slots is not None)
        check_room(cache, self.config.window)
        if slots is not None:
            count = cache.count.shape[0]
            slots = check_distinct("extend", check_slots(slots, count, rows), count, checked)
        lengths, fresh = check_lengths(lengths, rows, time), check_fresh(fresh, rows)
        return self._mix(x, cache, slots, fresh, Tokens.of_lengths(lengths, time))

    @no_type_check
    def init_state(self, batch: int | None = None, *, capacity: int | None = None, dtype: Any = None) -> KVCache:
        """The state before the first token: for one sequence, or for `batch` sequences.

        `capacity` is for how many tokens of a document it has room; that of the config if `None`. `dtype` is by default
        that of the weights: give the dtype of `x` where it differs.
        """
        check_batch(batch)
        c = self.config
        capacity = capacity or c.capacity or c.window
        if capacity is None:
            raise ValueError(
                "`init_state` needs `capacity`, for how many tokens a state has room, since the config has neither a "
                "`capacity` nor a `window`."
            )
        if c.window is not None and capacity < c.window:
            raise ValueError(f"`capacity={capacity}` must be at least the window of {c.window} tokens.")
        _, kv_heads, key_dim, value_dim = c.sizes
        lead = () if batch is None else (batch,)
        dtype = self.k_proj.weight.dtype if dtype is None else jnp.dtype(dtype)
        return KVCache.empty(
            *lead, capacity=capacity, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype
        )

    # ---- the computation ---------------------------------------------------------------------------------------------

    def _run(self, x, state, rows: Rows | None, has_several: bool) -> tuple[Any, Any]:
        if rows is None:
            return self._mix(x, state, None, None, None)
        return self._mix(x, state, None, None, Tokens.of_documents(rows.documents, has_several))

    def _mix(self, x, cache, slots, fresh, tokens: Tokens | None):
        """Outputs and the new cache; a new one where none came. `tokens` is `None` where all are real."""
        x, q, k, v, fine = self._project(x)
        if tokens is None:
            tokens = Tokens.of_lengths(jnp.full((x.shape[0],), x.shape[1], jnp.int32), x.shape[1])
            segments = None
        else:
            segments = tokens.segments
        count = None if cache is None else held(cache, slots, fresh)[0]
        position = tokens.position if count is None else tokens.positions(count)
        q, k = self._turned(self._heads(q, self.q_norm), position), self._turned(self._heads(k, self.k_norm), position)
        v = v.reshape(*v.shape[:-1], *self._value_heads)
        v = jnp.where(fine[..., None, None], v, jnp.nan)
        c = self.config
        if cache is None:
            options: dict[str, Any] = dict(window=c.window, scale=c.scale, softcap=c.softcap, precision=c.precision)
            out = softmax_attention(q, k, v, segment_ids=segments, backend=self.backend, **options)
            cache = filled(k, v, tokens, c.capacity or c.window or max(x.shape[1], 1), c.window is not None)
        else:
            scale = c.sizes[2] ** -0.5 if c.scale is None else c.scale
            rules = Rules(c.window, scale, c.softcap, check_precision(c.precision) or "highest")
            out, _, cache = advance(self.backend, rules, q, k, v, cache, slots, fresh, tokens)
        return self._finish(x, out), cache

    def _project(self, x):
        """`x` and its projections without the tokens that are not finite, and which are.

        What is not finite is taken out here and put back as a value, for the operator, which knows what it spoils: a
        select lets no NaN through in the backward pass, the products of the layer would.
        """
        fine = finite(x)
        x = only(fine, x)
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        fine = fine & finite(q) & finite(k) & finite(v)
        return x, only(fine, q), only(fine, k), only(fine, v), fine

    def _heads(self, x, norm: RMSNorm | None):
        heads = (*x.shape[:-1], x.shape[-1] // self.config.sizes[2], self.config.sizes[2])
        if norm is None:
            return x.reshape(heads)
        return norm(x.reshape(heads)) if self.config.qk_norm == "head" else norm(x).reshape(heads)

    def _turned(self, x, position):
        return rotate(x, position, self.config.rotary_channels, self.config.rotary_base)

    @property
    def _value_heads(self) -> tuple[int, int]:
        return self.config.sizes[1], self.config.sizes[3]

    def _finish(self, x, out):
        """What follows attention: output gate and projection."""
        fine = jnp.all(jnp.isfinite(out), axis=(-2, -1))
        out = jnp.where(fine[..., None, None], out, jnp.zeros_like(out))
        if self.out_gate is not None:
            wide, gate = raise_dtype(out, self.out_gate(x))
            activate = jax.nn.silu if self.out_gate.activation == "silu" else jax.nn.sigmoid
            out = (wide * activate(gate)).astype(out.dtype)
        out = self.o_proj(out.reshape(*out.shape[:-2], -1))
        return jnp.where(fine[..., None], out, jnp.nan)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def _check_x(self, x, ndims, layout):
        if x.ndim not in ndims or x.shape[-1] != self.config.model:
            raise ValueError(f"`x` must be {layout} with model = {self.config.model}, but its shape is {x.shape}.")

    def _check_state(self, state, lead, more: str = ""):
        if state is None:
            return
        if not isinstance(state, KVCache):
            pages = isinstance(state, PagedKVCache)
            to_do = " Slots and pages are for `extend`." if pages else instead_of_a_state(state, "mixer")
            raise TypeError(f"`state` must be a `KVCache`, but {a_type(state)} came.{to_do}")
        _, kv_heads, key_dim, value_dim = self.config.sizes
        came = state.keys.shape
        wanted = (*lead, came[-3] if len(came) > 2 else 1, kv_heads)
        shapes = (state.values.shape, state.count.shape, state.lost.shape)
        if came != (*wanted, key_dim) or shapes != ((*wanted, value_dim), lead, (*lead, kv_heads)):
            raise ValueError(
                f"`state` must have keys [..., capacity, {kv_heads}, {key_dim}] and values [..., capacity, {kv_heads}, "
                f"{value_dim}] behind the leading axes {lead} for this call, but they are {came} and "
                f"{state.values.shape}. {more}`mixer.init_state(batch)` makes a state for a batch, "
                "`mixer.init_state()` one for a single sequence."
            )
        check_room(state, self.config.window)


def _make_norm(config: AttentionConfig, heads: int) -> RMSNorm | None:
    if config.qk_norm == "none":
        return None
    dim = config.sizes[2] * (heads if config.qk_norm == "all" else 1)
    weight = jnp.zeros((dim,)) if config.norm_one_plus else jnp.ones((dim,))
    return RMSNorm(weight, config.norm_eps, one_plus=config.norm_one_plus)


def _add_row(name: str, x: Any) -> Any:
    if not isinstance(x, (jax.Array, np.ndarray)):
        return x
    if x.ndim != 1:
        raise ValueError(f"`{name}` must be [time] where `x` is [time, model], but its shape is {x.shape}.")
    return x[None]


def _add_axis(tree):
    return jax.tree.map(lambda a: a[None] if isinstance(a, (jax.Array, np.ndarray)) else a, tree)
