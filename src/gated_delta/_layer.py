"""The trainable layer: project, convolve, normalise, gate, run the operator, gate the output."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._activations import l2_normalize
from ._backend import AbstractBackend, AbstractStepper, check_named
from ._conv import ShortConv
from ._explicit import automatically, explicit_spec, is_sharded_explicitly
from ._gate_modules import AbstractDecay, BoundedDecay, OutputGate, SigmoidGate, SoftplusDecay
from ._gates import Gates
from ._linear import Linear, spoiled_rows
from ._norm import RMSNorm
from ._op import _check_inverse, gated_delta, gated_delta_raw
from ._options import check_batch, check_key, check_precision, instead_of_a_state, one_token_only
from ._raw_gates import RawGates
from ._rows import Rows, make_rows
from ._short_convs import ShortConvs
from ._step import gated_delta_raw_step, gated_delta_step
from ._types import a_type, accumulation_dtype, as_float_array, operand_dtype
from ._variant import MixerConfig, instead_of_a_config, no_type_check


class MixerState(eqx.Module):
    """What a mixer carries from call to call: a plain pytree of arrays, all with the same leading axes.

    `*states` is nothing (an unbatched mixer), the batch, or the number of documents of `cu_seqlens`.

    **Attributes:**

    - `q_window`, `k_window`, `v_window`: the last `conv_width - 1` inputs of each convolution, oldest first, before it
        is applied; channels are heads side by side. `None` without convolutions.
    - `recurrent`: the state of every value head, key axis first; float32, or float64 where x is.
    """

    q_window: Float[Array, "*states taps key_channels"] | None
    k_window: Float[Array, "*states taps key_channels"] | None
    v_window: Float[Array, "*states taps value_channels"] | None
    recurrent: Float[Array, "*states value_heads key_dim value_dim"]


class GatedDeltaMixer(eqx.Module):
    r"""A sequence-mixing layer of the gated delta family.

    Queries, keys and values are projected from x, each through a short causal convolution and SiLU; queries and keys
    get unit length per head; the gated delta rule runs; every value head is normalised and multiplied by the activated
    output gate; all are projected back. `GDN`, `KDA`, `GDN2`, `SystolicLinearAttention`, `DeltaNet` and `GLA` build the
    published members, and `GatedDeltaMixer(config, key=key)` any `MixerConfig`.

    Products are computed in the dtype of `x`, to which weights are cast, with sums, gates, norms and states in float32
    (float64 where x is). `out` has the dtype of `x`.

    **Attributes:**

    - `config`: what the layer is.
    - `backend`: how the operator runs; `None`: the first backend that can. It is part of the tree's structure: change
        it with `eqx.tree_at(lambda m: m.backend, mixer, Recurrent(), is_leaf=lambda x: x is None)`.
    - `q_proj`, `k_proj`, `v_proj`, `o_proj`, `q_conv`, `k_conv`, `v_conv`, `decay`, `erase`, `write`, `out_gate`,
        `out_norm`: the parts, `None` where the config has none. A tied beta is `erase`. Any part may be replaced by a
        module that is called alike.
    """

    config: MixerConfig = eqx.field(static=True)
    backend: AbstractBackend | None
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    q_conv: ShortConv | None
    k_conv: ShortConv | None
    v_conv: ShortConv | None
    decay: AbstractDecay | None
    erase: SigmoidGate | None
    write: SigmoidGate | None
    out_gate: OutputGate | None
    out_norm: RMSNorm
    o_proj: Linear

    @no_type_check
    def __init__(self, config: MixerConfig, *, backend: AbstractBackend | None = None, key: PRNGKeyArray):
        if not isinstance(config, MixerConfig):
            to_do = instead_of_a_config(config) or " `GDN(model, key=key)` and its like build the published members."
            raise TypeError(f"`GatedDeltaMixer` needs a `MixerConfig`, but {a_type(config)} came.{to_do}")
        check_named(backend)
        check_key(key)
        _check_operator_options(config)
        keys = jax.random.split(key, 11)
        c, init = config, config.init
        key_channels, value_channels = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        self.config = config
        self.backend = backend
        self.q_proj = Linear(c.model, key_channels, init=init, key=keys[0])
        self.k_proj = Linear(c.model, key_channels, init=init, key=keys[1])
        self.v_proj = Linear(c.model, value_channels, init=init, key=keys[2])
        self.q_conv = self.k_conv = self.v_conv = None
        if c.conv_width is not None:
            self.q_conv = ShortConv(key_channels, c.conv_width, bias=c.conv_bias, key=keys[3])
            self.k_conv = ShortConv(key_channels, c.conv_width, bias=c.conv_bias, key=keys[4])
            self.v_conv = ShortConv(value_channels, c.conv_width, bias=c.conv_bias, key=keys[5])
        self.decay = _make_decay(c, keys[6])
        self.erase = _make_erase(c, keys[7])
        self.write = _make_write(c, keys[8])
        self.out_gate = None
        if c.output_gate is not None:
            self.out_gate = OutputGate(
                c.model,
                c.value_heads,
                c.value_dim,
                activation=c.output_gate,
                rank=c.output_gate_rank,
                bias=c.output_gate_bias,
                init=init,
                key=keys[9],
            )
        self.out_norm = RMSNorm(jnp.ones((c.value_dim,)), c.norm_eps, c.norm_numerics)
        self.o_proj = Linear(value_channels, c.model, init=init, key=keys[10])

    @no_type_check
    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch time model"],
        state: MixerState | None = None,
        *,
        mask: Bool[Array | np.ndarray, "*batch time"] | None = None,
        segment_ids: Int[Array | np.ndarray, "*batch time"] | None = None,
        cu_seqlens: Int[Array | np.ndarray, " documents_and_1"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch time model"], MixerState]:
        """Mix a sequence, or a batch of them.

        **Arguments:**

        - `x`: `[time, model]` or `[batch, time, model]`, any float dtype.
        - `state`: what the call before returned, to continue; zeros if `None`. Unbatched for an unbatched `x`.
        - `mask`: `[time]` or `[batch, time]` booleans, true at real tokens. Padding may be anywhere: its output is 0,
            and it leaves no trace in any state or in any other token.
        - `segment_ids`: `[time]` or `[batch, time]` integers that rise along time; tokens of different ids do not see
            each other, in the convolution neither. Negative is padding. Ids where 0 is padding: pass
            `jnp.where(ids == 0, -1, ids)`; an id that falls raises, and is padding under jit. A given state continues
            the first document of each row, and the state returned is that of the last.
        - `cu_seqlens`: `[documents + 1]` offsets of packed documents, for one row. States have one entry per document:
            each continues its own, and a document without tokens keeps its states bit for bit.
        - `key`: ignored; here so that the layer fits where a key is passed to every layer.

        A mask beside `cu_seqlens` that takes a token out of a document raises where both are concrete; where traced,
        the token is padding. An all-true mask changes nothing.

        **Returns:** `(out, state)`: out in the shape and dtype of `x`, and the state after the last real token, in the
        dtypes of the state that came.

        A token that is not finite spoils outputs and state of its own document from there on, and nothing else.

        **Raises:** `TypeError` and `ValueError` for arguments that do not fit; see also `gated_delta`.
        """
        del key
        x = as_float_array("x", x)
        self._check_x(x, (2, 3), "[time, model] or [batch, time, model]")
        arrays = (self, x, state, mask, segment_ids, cu_seqlens)
        if is_sharded_explicitly(arrays):

            def run(mixer, x, state, mask, segment_ids, cu_seqlens):
                return mixer(x, state, mask=mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens)

            return self._with_automatic_axes(run, arrays, explicit_spec(x)[:-2] if cu_seqlens is None else (None,))
        single, packed = x.ndim == 2, any(a is not None for a in (mask, segment_ids, cu_seqlens))
        states, rows = x.shape[:-2], None
        if packed:  # rows have a batch axis; without them a single sequence stays without it, which vmap rewards
            if single:
                x, mask, segment_ids = x[None], add_axis("mask", mask), add_axis("segment_ids", segment_ids)
            rows = make_rows(mask, segment_ids, cu_seqlens, *x.shape[:2])
            if cu_seqlens is not None:
                states = (cu_seqlens.shape[0] - 1,)
        self._check_state(state, states)
        lifted = packed and states == ()
        out, state = self._run(x, jax.tree.map(lambda a: a[None], state) if lifted else state, rows, self.backend)
        return out[0] if single and packed else out, jax.tree.map(lambda a: a[0], state) if lifted else state

    @no_type_check
    def step(
        self, x: Float[Array | np.ndarray, "*batch model"], state: MixerState
    ) -> tuple[Float[Array, "*batch model"], MixerState]:
        """One token of a sequence, `x` `[model]`, or of a batch of them, `[batch, model]`: the decoding form.

        Feeding tokens one by one equals one call. The new state has the shapes and dtypes of the old, so `step` can be
        the body of a `lax.scan`. `init_state` makes the first one. It runs by XLA, or by `backend` where that is a
        `PallasTPU`. For states in the slots of a pool there is `gated_delta.serving.pooled_step`.
        """
        x = as_float_array("x", x)
        self._check_x(x, (1, 2), "one token, [model] or [batch, model],")
        if is_sharded_explicitly((self, x, state)):
            return self._with_automatic_axes(GatedDeltaMixer.step, (self, x, state), explicit_spec(x)[:-1])
        if state is None:
            raise TypeError("`step` needs a state: begin with `mixer.init_state()`, or with what a call returned.")
        self._check_state(state, x.shape[:-1], one_token_only(x, "mixer"))
        single = x.ndim == 1
        if single:
            x, state = x[None], jax.tree.map(lambda a: a[None], state)
        windows = (state.q_window, state.k_window, state.v_window)
        out, windows, recurrent = self._run_token(x, windows, state.recurrent, None, None)
        state = MixerState(windows[0], windows[1], windows[2], recurrent)
        return (out[0], jax.tree.map(lambda a: a[0], state)) if single else (out, state)

    @no_type_check
    def init_state(self, batch: int | None = None, *, dtype: Any = None) -> MixerState:
        """The state before the first token, all zeros: for one sequence, or for `batch` sequences (or documents).

        `dtype` is that of the convolutions' windows, by default that of the weights: give the dtype of `x` where it
        differs. `recurrent` is float32, or float64 if `dtype` is.
        """
        check_batch(batch)
        lead = () if batch is None else (batch,)
        dtype = self.q_proj.weight.dtype if dtype is None else jnp.dtype(dtype)
        shapes = self._state_shapes(lead)
        q, k, v = (None if shape is None else jnp.zeros(shape, dtype) for shape in shapes[:3])
        return MixerState(q, k, v, jnp.zeros(shapes[3], accumulation_dtype(dtype)))

    # ---- the computation
    # -----------------------------------------------------------------------------------------------

    def _run(
        self, x: Float[Array, "*batch time model"], state: MixerState | None, rows: Rows | None, backend: Any
    ) -> tuple[Float[Array, "*batch time model"], MixerState]:
        documents = None if rows is None else rows.documents
        if rows is not None:
            x = rows.gather(x)
        x, inputs, fine = self._project(x)
        windows = (None, None, None) if state is None else (state.q_window, state.k_window, state.v_window)
        before, convs = windows, self._convs
        if is_left := self._leaves_convs(backend, documents):
            q, k, v = inputs
            windows = [conv.next_window(*a) for conv, *a in zip(convs, inputs, before, strict=True)]
        else:
            convolved = [self._convolve(*a, documents) for a in zip(convs, inputs, before, strict=True)]
            (q, k, v), windows = zip(*convolved, strict=True)
        q, k, v = self._split_heads(q, k, v, fine, x.dtype)
        recurrent = None if state is None else state.recurrent
        out, recurrent = self._operator(x, q, k, v, recurrent, documents, backend, before if is_left else None)
        out = self._finish(x, out)
        if rows is not None:
            out = rows.scatter(out)
        return out, MixerState(windows[0], windows[1], windows[2], recurrent)

    def _run_token(self, x, windows, recurrent, slots, fresh):
        """Output, windows and recurrent states of one token of every row, `x` `[batch, model]`.

        `windows` are those of the rows; `recurrent` has a state for each row too, or those of a pool with their
        `slots`.
        """
        x, inputs, fine = self._project(x[:, None])
        convolved = [
            self._convolve(conv, a, window, None) for conv, a, window in zip(self._convs, inputs, windows, strict=True)
        ]
        (q, k, v), windows = zip(*convolved, strict=True)
        x, q, k, v, fine = (a[:, 0] for a in (x, q, k, v, fine))
        q, k, v = self._split_heads(q, k, v, fine, x.dtype)
        backend = self.backend if isinstance(self.backend, AbstractStepper) else None
        is_raw = self._is_raw(backend)
        q, k = self._raw_vectors(q, k, x.dtype) if is_raw else self._normalise(q, k, x.dtype)
        gates: Any = self._raw_gates(x) if is_raw else self._gates(x)
        options: dict[str, Any] = dict(slots=slots, fresh=fresh, scale=self.config.variant.scale, backend=backend)
        if is_raw:
            out, final = gated_delta_raw_step(q, k, v, gates, recurrent, qk_norm=self.config.variant.qk_norm, **options)
        else:
            out, final = gated_delta_step(q, k, v, gates, recurrent, **options)
        return self._finish(x, out), windows, final.astype(recurrent.dtype)

    def _project(self, x):
        """`x` and the inputs of the three convolutions without the tokens that are not finite, and which are, for each
        key head: `[*batch, time, key_heads]`.

        What is not finite is taken out here and put back behind the operator, which knows what it spoils: a select lets
        no NaN through in the backward pass, the products of the layer would.
        """
        lead, key_heads = x.shape[:-1], self.config.key_heads
        fine = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
        x = jnp.where(fine, x, jnp.zeros_like(x))
        # By key head and its group, not over all of them: where heads are split over devices, none asks the others.
        inputs = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        heads = [a.reshape(*lead, key_heads, a.shape[-1] // key_heads) for a in inputs]
        for a in heads:
            fine = fine & jnp.all(jnp.isfinite(a), axis=-1)
        heads = [jnp.where(fine[..., None], a, jnp.zeros_like(a)) for a in heads]
        return x, tuple(a.reshape(like.shape) for a, like in zip(heads, inputs, strict=True)), fine

    def _split_heads(self, q, k, v, fine, dtype):
        """Convolved channels by heads, and a NaN for the operator at what was taken out."""
        c, lead = self.config, q.shape[:-1]
        q, k = (a.reshape(*lead, c.key_heads, c.key_dim) for a in (q, k))
        v = jnp.where(fine[..., None], v.reshape(*lead, c.key_heads, v.shape[-1] // c.key_heads), jnp.nan)
        return q, k, v.reshape(*lead, c.value_heads, c.value_dim).astype(dtype)

    def _finish(self, x, out):
        """What follows the operator: norm, output gate, projection."""
        fine = jnp.all(jnp.isfinite(out), axis=-1, keepdims=True)
        out = jnp.where(fine, out, jnp.zeros_like(out))
        if self.out_gate is None:
            out = self.out_norm(out)
        else:
            out = self.out_norm(out, self.out_gate(x), self.out_gate.activation)
        out = jnp.where(fine, out, jnp.nan)
        return spoiled_rows(self.o_proj, out.reshape(*x.shape[:-1], self.config.value_heads * self.config.value_dim))

    def _operator(self, x, q, k, v, state, documents, backend, windows):
        """`gated_delta`, or `gated_delta_raw` where `backend` gains by it, with what this layer chose; and the state in
        the dtype it came in. `windows` before the convolutions that are left to it, if they are."""
        is_raw = self._is_raw(backend)
        if is_raw:
            q, k = self._raw_vectors(q, k, x.dtype)
        else:
            q, k = self._normalise(q, k, x.dtype)
        gates: Any = None if is_raw else self._gates(x)
        single = q.ndim == 3
        if single:
            x, q, k, v, gates, state, windows = jax.tree.map(lambda a: a[None], (x, q, k, v, gates, state, windows))
        options: dict[str, Any] = self._operator_options(v.dtype) | dict(
            initial_state=state,
            segment_ids=None if documents is None else documents.segment_ids,
            cu_seqlens=None if documents is None else documents.offsets,
            backend=backend,
        )
        if is_raw:
            norm = self.config.variant.qk_norm
            convs = None if windows is None else self._short_convs(windows)
            out, final = gated_delta_raw(q, k, v, self._raw_gates(x), qk_norm=norm, convs=convs, **options)
        else:
            out, final = gated_delta(q, k, v, gates, **options)
        final = final if state is None else final.astype(state.dtype)
        return (out[0], final[0]) if single else (out, final)

    def _raw_vectors(self, q, k, dtype):
        """In what the operator computes: float16 may not hold them before their norm."""
        return q.astype(operand_dtype(dtype)), k.astype(operand_dtype(dtype))

    def _normalise(self, q, k, dtype):
        if self.config.variant.qk_norm == "l2":
            q, k = l2_normalize(q), l2_normalize(k)
        return q.astype(dtype), k.astype(dtype)

    def _operator_options(self, dtype) -> dict[str, Any]:
        c = self.config
        return dict(scale=c.variant.scale, inverse=self._inverse(dtype), precision=c.precision)

    def _is_raw(self, backend) -> bool:
        """Whether `backend` activates gates itself, and knows what this layer's parts do."""
        return (
            isinstance(backend, AbstractBackend)
            and backend.takes_raw
            and type(self.decay) in (SoftplusDecay, BoundedDecay, type(None))
            and all(type(gate) in (SigmoidGate, type(None)) for gate in (self.erase, self.write))
            and (self.write is None or self.write.maximum == 1)
        )

    def _leaves_convs(self, backend, documents) -> bool:
        """Whether convolutions are left to `backend`, which knows what they and their activation do."""
        return (
            documents is None
            and self.config.qkv_activation == "silu"
            and self._is_raw(backend)
            and all(type(conv) is ShortConv and conv.bias is None for conv in self._convs)
        )

    @property
    def _convs(self) -> Any:
        return self.q_conv, self.k_conv, self.v_conv

    def _short_convs(self, windows) -> ShortConvs:
        """The convolutions as the operator takes them, by heads."""
        c = self.config
        heads = (c.key_heads, c.key_dim), (c.key_heads, c.key_dim), (c.value_heads, c.value_dim)

        def by_head(x, heads):
            return None if x is None else x.reshape(*x.shape[:-1], *heads)

        weights = (by_head(conv.weight, dims) for conv, dims in zip(self._convs, heads, strict=True))
        q, k, v = (by_head(*x) for x in zip(windows, heads, strict=True))
        return ShortConvs(*weights, q_window=q, k_window=k, v_window=v)

    def _convolve(self, conv, x, window, documents):
        """Convolution and activation, if any, in the accumulation dtype; and the new window."""
        if conv is None:
            out, window = x.astype(accumulation_dtype(x.dtype)), None
        else:
            out, window = conv(x, window, documents)
        return jax.nn.silu(out) if self.config.qkv_activation == "silu" else out, window

    def _gates(self, x) -> Gates:
        variant = self.config.variant
        return Gates(
            None if self.decay is None else self.decay(x),
            None if self.erase is None else self.erase(x),
            None if self.write is None else self.write(x),
            is_tied=variant.tied,
            erase_max=1.0 if self.erase is None else self.erase.maximum,
            log_decay_min=None if self.decay is None else self.decay.log_decay_min,
        )

    def _raw_gates(self, x) -> RawGates:
        decay: Any = self.decay
        return RawGates(
            None if decay is None else decay.raw(x),
            None if self.erase is None else self.erase.raw(x),
            None if self.write is None else self.write.raw(x),
            A_log=None if decay is None else decay.A_log,
            dt_bias=None if decay is None else decay.dt_bias,
            bound=None if decay is None else decay.log_decay_min,
            erase_max=1.0 if self.erase is None else self.erase.maximum,
            is_tied=self.config.variant.tied,
        )

    def _inverse(self, dtype) -> str:
        if self.config.inverse != "auto":
            return self.config.inverse
        return "approx" if dtype == jnp.bfloat16 and self.config.variant.erase_max == 1 else "exact"

    def _with_automatic_axes(self, run, arrays, rows):
        """`run(*arrays)` with every explicit axis of the mesh left to the compiler inside; `rows`: how the leading axes
        of the states are sharded. Heads are as those of the weights."""
        heads = explicit_spec(self.v_proj.weight)[0]

        def spec(path, _):
            return P(*rows, heads, None, None) if path[-1].name == "recurrent" else P(*rows, None, heads)

        state = jax.tree_util.tree_map_with_path(spec, eqx.filter_eval_shape(self.init_state))
        dynamic, static = eqx.partition(arrays, lambda a: isinstance(a, jax.Array))
        specs = P(*explicit_spec(arrays[1])), state
        return automatically(lambda dynamic: run(*eqx.combine(dynamic, static)), dynamic, specs)

    # ---- checks
    # --------------------------------------------------------------------------------------------------------

    def _check_x(self, x, ndims, layout):
        if x.ndim not in ndims or x.shape[-1] != self.config.model:
            raise ValueError(f"`x` must be {layout} with model = {self.config.model}, but its shape is {x.shape}.")

    def _state_shapes(self, lead):
        c = self.config
        key_channels, value_channels = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        windows = [
            None if c.conv_width is None else (*lead, c.conv_width - 1, channels)
            for channels in (key_channels, key_channels, value_channels)
        ]
        return *windows, (*lead, c.value_heads, c.key_dim, c.value_dim)

    def _check_state(self, state, lead, more: str = ""):
        if state is None:
            return
        if not isinstance(state, MixerState):
            raise TypeError(
                f"`state` must be a `MixerState`, but {a_type(state)} came.{instead_of_a_state(state, 'mixer')}"
            )
        names = ("q_window", "k_window", "v_window", "recurrent")
        for name, shape in zip(names, self._state_shapes(lead), strict=True):
            came = getattr(state, name)
            came = None if came is None else tuple(came.shape)
            if came != shape:
                layout = "Its axes are [..., value_heads, key_dim, value_dim], key axis first. "
                raise ValueError(
                    f"`state.{name}` must have the shape {shape} for this call, but it is {came}. "
                    f"{layout if name == 'recurrent' else ''}{more}"
                    "`mixer.init_state(batch)` makes a state for a batch or for the documents of `cu_seqlens`, "
                    "`mixer.init_state()` one for a single sequence."
                )


def _make_decay(c: MixerConfig, key) -> AbstractDecay | None:
    if c.variant.decay == "none":
        return None
    groups, bound = c.variant.decay_groups(c.key_dim), c.variant.log_decay_min
    options: dict[str, Any] = dict(rank=c.decay_rank, rates=c.decay_rates, step_init=c.step_init, init=c.init, key=key)
    if bound is None:
        return SoftplusDecay(c.model, c.owners, groups, **options)
    return BoundedDecay(c.model, c.owners, groups, bound=bound, has_rate=c.has_rate, **options)


def _make_erase(c: MixerConfig, key) -> SigmoidGate | None:
    if c.variant.erase == "none":
        return None
    dim = 1 if c.variant.erase == "head" else c.key_dim
    return SigmoidGate(c.model, c.owners, dim, maximum=c.variant.erase_max, init=c.init, key=key)


def _make_write(c: MixerConfig, key) -> SigmoidGate | None:
    if c.variant.tied or c.variant.write == "one":
        return None
    dim = 1 if c.variant.write == "head" else c.value_dim
    return SigmoidGate(c.model, c.value_heads, dim, init=c.init, key=key)


def _check_operator_options(c: MixerConfig):
    """`inverse` and `precision` as the operator checks them, when the layer is made rather than when it runs."""
    check_precision(c.precision)
    if c.inverse != "auto":
        _check_inverse(c.inverse, c.variant.erase_max, c.variant.log_decay_min, np.dtype("float32"))


def add_axis(name, x):
    if x is None or not isinstance(x, (jax.Array, np.ndarray)):
        return x
    if x.ndim != 1:
        raise ValueError(f"`{name}` must be [time] where `x` is [time, model], but its shape is {x.shape}.")
    return x[None]
