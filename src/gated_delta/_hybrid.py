"""A stack of blocks in which gated delta mixers and softmax attention alternate: the body of a hybrid model."""

import dataclasses
import json
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ._backend import AbstractBackend
from ._layer import GatedDeltaMixer, MixerState
from ._linear import Linear
from ._norm import RMSNorm
from ._options import check_batch, check_key, instead_of_a_state, one_token_only
from ._pooled import pooled_token
from ._slots import is_slot
from ._types import a_type, as_float_array, no_type_check
from ._variant import (
    Initialisation,
    MixerConfig,
    check_entries,
    check_size,
    check_word,
    instead_of_a_config,
    make_floats,
    read_record,
)
from .attention import AbstractAttentionBackend, AttentionConfig, KVCache, SoftmaxAttention


@no_type_check
@dataclasses.dataclass(frozen=True)
class HybridConfig:
    """Everything that decides the structure and the numbers of a `HybridStack`, but not its parameters' values.

    `HybridStack(config, key=key)` builds it; `HybridConfig.from_json(config.to_json()) == config`.

    **Attributes:**

    - `pattern`: one letter for each block: `d` a gated delta mixer, `A` softmax attention.
    - `repeats`: how often the pattern comes, one after the other.
    - `delta`, `attention`: what those mixers are; `None` where the pattern has none. Their `model` is the stack's.
    - `hidden`: width of the MLP of every block.
    - `norm_eps`, `norm_one_plus`: of the RMSNorms before mixers and MLPs; with `norm_one_plus` they multiply by
        `1 + weight`.
    - `init`: how the matrices of the MLPs begin; see `MixerConfig`.
    - `remat`: keep only what enters each repeat of the pattern for the backward pass, and compute the rest again.

    **Raises:** `TypeError` and `ValueError` for values that mean nothing.
    """

    pattern: str
    hidden: int
    repeats: int = 1
    delta: MixerConfig | None = None
    attention: AttentionConfig | None = None
    norm_eps: float = 1e-6
    norm_one_plus: bool = False
    init: Initialisation = "uniform"
    remat: bool = False

    def __post_init__(self):
        if not isinstance(self.pattern, str) or not self.pattern or set(self.pattern) - set("dA"):
            raise ValueError(
                f"`HybridConfig(pattern={self.pattern!r})` must be a string of the letters d (a gated delta mixer) and "
                "A (softmax attention), such as 'dddA'."
            )
        check_size("hidden", self.hidden)
        check_size("repeats", self.repeats)
        make_floats(self, "norm_eps")
        for letter, name, kind in (("d", "delta", MixerConfig), ("A", "attention", AttentionConfig)):
            config = getattr(self, name)
            if (letter in self.pattern) != (config is not None):
                raise ValueError(
                    f"`HybridConfig(pattern={self.pattern!r}, {name}={'...' if config else None})`: `{name}` goes with "
                    f"the letter {letter}, and only with it."
                )
            if config is not None and not isinstance(config, kind):
                to_do = instead_of_a_config(config)
                raise TypeError(f"`{name}` must be a `{kind.__name__}`, but {a_type(config)} came.{to_do}")
        if self.delta is not None and self.attention is not None and self.delta.model != self.attention.model:
            raise ValueError(
                f"All mixers of a stack have one `model`, but `delta` has {self.delta.model} and `attention` "
                f"{self.attention.model}."
            )
        if not self.norm_eps > 0:
            raise ValueError(f"`norm_eps={self.norm_eps}` must be above 0: a zero vector has no direction.")
        for name in ("norm_one_plus", "remat"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False, but {a_type(getattr(self, name))} came.")
        check_word("HybridConfig", "init", self.init, Initialisation)

    @property
    def model(self) -> int:
        """Size of the stack's inputs and outputs."""
        config = self.delta or self.attention
        assert config is not None
        return config.model

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    @no_type_check
    def from_json(cls, text: str) -> "HybridConfig":
        """The config that `to_json` wrote.

        **Raises:** `ValueError` for what is no JSON, and one that names the entries which are unknown or missing.
        """
        record = check_entries(cls, read_record(cls, text))
        for name, kind in (("delta", MixerConfig), ("attention", AttentionConfig)):
            if record.get(name) is not None:
                record = {**record, name: kind.from_json(json.dumps(record[name]))}
        return cls(**record)


class SwiGLU(eqx.Module):
    """`down(silu(gate) * up)`, gate and up the halves of one matrix's outputs."""

    gate_up: Linear
    down: Linear

    def __init__(self, model: int, hidden: int, *, init: str = "uniform", key: PRNGKeyArray):
        up_key, down_key = jax.random.split(key)
        self.gate_up = Linear(model, 2 * hidden, init=init, key=up_key)
        self.down = Linear(hidden, model, init=init, key=down_key)

    def __call__(self, x: Float[Array, "*batch model"]) -> Float[Array, "*batch model"]:
        gate, up = jnp.split(self.gate_up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * up)


class HybridBlock(eqx.Module):
    """`x + mixer(mixer_norm(x))`, then `x + mlp(mlp_norm(x))`."""

    mixer_norm: RMSNorm
    mixer: GatedDeltaMixer | SoftmaxAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU

    def __init__(
        self,
        config: HybridConfig,
        letter: str,
        *,
        backend: AbstractBackend | None = None,
        attention_backend: AbstractAttentionBackend | None = None,
        key: PRNGKeyArray,
    ):
        mixer_key, mlp_key = jax.random.split(key)
        weight = jnp.zeros((config.model,)) if config.norm_one_plus else jnp.ones((config.model,))
        self.mixer_norm = self.mlp_norm = RMSNorm(weight, config.norm_eps, one_plus=config.norm_one_plus)
        if letter == "d":
            assert config.delta is not None
            self.mixer = GatedDeltaMixer(config.delta, backend=backend, key=mixer_key)
        else:
            assert config.attention is not None
            self.mixer = SoftmaxAttention(config.attention, backend=attention_backend, key=mixer_key)
        self.mlp = SwiGLU(config.model, config.hidden, init=config.init, key=mlp_key)

    def __call__(self, x, state=None, **packing):
        out, state = self.mixer(self.mixer_norm(x), state, **packing)
        return self._behind(x, out), state

    def pooled(self, x, states, slots, fresh):
        """One token of every row, from and to its slot; without slots row after row."""
        normed = self.mixer_norm(x)
        if slots is None:
            out, states = self.mixer.step(normed, states)
            return self._behind(x, out), states
        if isinstance(self.mixer, SoftmaxAttention):
            out, states = self.mixer.extend(normed[:, None], states, slots, fresh=fresh)
            return self._behind(x, out[:, 0]), states
        out, states = pooled_token(self.mixer, normed, states, slots, fresh)
        return self._behind(x, out), states

    def _behind(self, x, out):
        x = x + out
        return x + self.mlp(self.mlp_norm(x))


HybridState = tuple[MixerState | KVCache, ...]


class HybridStack(eqx.Module):
    """Blocks of gated delta mixers and softmax attention, called as one mixer is: the body of a hybrid model.

    Every block is pre-norm, `x + mixer(norm(x))`, then `x + swiglu(norm(x))`. The pattern is traced once and repeated
    by `lax.scan`, however many repeats there are: the parameters of its blocks are stacked over them.

    **Attributes:**

    - `config`: what the stack is.
    - `blocks`: one `HybridBlock` for each letter of the pattern; every array has a leading axis of repeats. `block(i)`
        is block `i` of the stack without that axis.

    A state is a tuple of the states of the pattern's mixers, `MixerState` or `KVCache`, whose arrays have an axis of
    repeats behind the batch: so it goes into a `gated_delta.serving.StatePool` as it is.
    """

    config: HybridConfig = eqx.field(static=True)
    blocks: tuple[HybridBlock, ...]

    @no_type_check
    def __init__(
        self,
        config: HybridConfig,
        *,
        backend: AbstractBackend | None = None,
        attention_backend: AbstractAttentionBackend | None = None,
        key: PRNGKeyArray,
    ):
        """`backend` is that of the gated delta mixers, `attention_backend` that of softmax attention; `None`: the first
        that can run."""
        if not isinstance(config, HybridConfig):
            pattern = repr(config) if isinstance(config, str) else "'dddA'"
            raise TypeError(
                f"`HybridStack` needs a `HybridConfig`, but {a_type(config)} came. Give "
                f"`HybridConfig({pattern}, hidden=..., delta=MixerConfig(...), attention=AttentionConfig(...))`."
            )
        check_key(key)
        self.config = config
        options: dict[str, Any] = dict(backend=backend, attention_backend=attention_backend)
        keys = jax.random.split(key, (len(config.pattern), config.repeats))
        self.blocks = tuple(
            eqx.filter_vmap(lambda key, letter=letter: HybridBlock(config, letter, **options, key=key))(repeats)
            for letter, repeats in zip(config.pattern, keys, strict=True)
        )

    def block(self, index: int) -> HybridBlock:
        """Block `index` of `repeats * len(pattern)`."""
        size = len(self.config.pattern)
        if not 0 <= index < size * self.config.repeats:
            raise IndexError(f"There is no block {index}: the stack has {size * self.config.repeats}.")
        return _slice(self.blocks[index % size], index // size)

    @no_type_check
    def __call__(
        self,
        x: Float[Array | np.ndarray, "*batch time model"],
        state: HybridState | None = None,
        *,
        mask: Bool[Array | np.ndarray, "*batch time"] | None = None,
        segment_ids: Int[Array | np.ndarray, "*batch time"] | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "*batch time model"], HybridState]:
        """Run a sequence, or a batch of them, through all blocks.

        **Arguments:** as for `GatedDeltaMixer` and `SoftmaxAttention`, with the state of the whole stack.

        **Returns:** `(out, state)`: out in the shape and dtype of `x`, 0 at padding, and the state after the last real
        token.

        **Raises:** `TypeError` and `ValueError` for arguments that do not fit.
        """
        del key
        x = as_float_array("x", x)
        self._check_x(x, (2, 3), "[time, model] or [batch, time, model]")
        lead = x.ndim - 2
        self._check_state(state, x.shape[:-2])
        x = _without_padding(x, mask, segment_ids)
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def one_repeat(x, layers):
            arrays, states = layers
            new = []
            for block, state in zip(eqx.combine(arrays, static), states, strict=True):
                x, state = block(x, state, mask=mask, segment_ids=segment_ids)
                new.append(state)
            return x, tuple(new)

        states = (None,) * len(self.blocks)
        if state is not None:
            states = jax.tree.map(lambda a: jnp.moveaxis(a, lead, 0), state)
        if self.config.remat:
            one_repeat = jax.checkpoint(one_repeat, prevent_cse=self.config.repeats == 1)
        out, states = self._repeated(one_repeat, x, (arrays, states))
        return out, jax.tree.map(lambda a: jnp.moveaxis(a, 0, lead), states)

    @no_type_check
    def step(
        self, x: Float[Array | np.ndarray, "*batch model"], state: HybridState
    ) -> tuple[Float[Array, "*batch model"], HybridState]:
        """One token of a sequence, `x` `[model]`, or of a batch of them, `[batch, model]`: the decoding form.

        Feeding tokens one by one equals one call. The new state has the shapes and dtypes of the old. Under `jit` with
        the state donated it is updated in place.
        """
        x = as_float_array("x", x)
        self._check_x(x, (1, 2), "one token, [model] or [batch, model],")
        if state is None:
            raise TypeError("`step` needs a state: begin with `stack.init_state()`, or with what a call returned.")
        self._check_state(state, x.shape[:-1], one_token_only(x, "stack"))
        if x.ndim == 1:
            out, state = self.step(x[None], jax.tree.map(lambda a: a[None], state))
            return out[0], jax.tree.map(lambda a: a[0], state)
        slots = jnp.arange(x.shape[0], dtype=jnp.int32) if self.config.repeats > 1 else None
        return self.pooled(x, state, slots, None)

    def pooled(self, x, states: HybridState, slots, fresh):
        """One token of every row, from and to its slot of `states`: what `gated_delta.serving.pooled_step` checks."""
        repeats = self.config.repeats
        count = jax.tree.leaves(states)[0].shape[0]
        arrays, static = eqx.partition(self.blocks, eqx.is_array)
        states = jax.tree.map(lambda a: a.reshape(count * repeats, *a.shape[2:]), states)  # every layer has slots

        def one_repeat(carry, layers):
            x, states = carry
            arrays, index = layers
            own = None if slots is None else jnp.where(is_slot(slots, count), slots * repeats + index, -1)
            new = []
            for block, state in zip(eqx.combine(arrays, static), states, strict=True):
                x, state = block.pooled(x, state, own, fresh)
                new.append(state)
            return (x, tuple(new)), None

        (x, states), _ = self._repeated(one_repeat, (x, states), (arrays, jnp.arange(repeats, dtype=jnp.int32)))
        return x, jax.tree.map(lambda a: a.reshape(count, repeats, *a.shape[1:]), states)

    @no_type_check
    def init_state(self, batch: int | None = None, *, capacity: int | None = None, dtype: Any = None) -> HybridState:
        """The state before the first token: for one sequence, or for `batch` sequences.

        `capacity` is for how many tokens of a document attention has room, as in `SoftmaxAttention.init_state`; gated
        delta states do not grow. `dtype` as in the mixers' `init_state`.
        """
        check_batch(batch)
        lead = 0 if batch is None else 1
        states = tuple(
            block.mixer.init_state(batch, capacity=capacity, dtype=dtype)
            if isinstance(block.mixer, SoftmaxAttention)
            else block.mixer.init_state(batch, dtype=dtype)
            for block in self.blocks
        )

        def spread(a):
            shape = (*a.shape[:lead], self.config.repeats, *a.shape[lead:])
            return jnp.broadcast_to(jnp.expand_dims(a, lead), shape)

        return jax.tree.map(spread, states)

    def _repeated(self, body, carry: Any, xs: Any) -> tuple[Any, Any]:
        if self.config.repeats > 1:
            return jax.lax.scan(body, carry, xs)
        carry, ys = body(carry, jax.tree.map(lambda a: a[0], xs))
        return carry, jax.tree.map(lambda a: a[None], ys)

    def _check_x(self, x, ndims, layout):
        if x.ndim not in ndims or x.shape[-1] != self.config.model:
            raise ValueError(f"`x` must be {layout} with model = {self.config.model}, but its shape is {x.shape}.")

    def _check_state(self, state, lead=None, more: str = ""):
        """`lead`: the leading axes of `x`, which those of the states have to be; `None`: they are not checked."""
        if state is None:
            return
        kinds = tuple(MixerState if letter == "d" else KVCache for letter in self.config.pattern)
        fits = isinstance(state, tuple) and len(state) == len(kinds)
        if not fits or not all(isinstance(part, kind) for part, kind in zip(state, kinds, strict=True)):
            names = ", ".join(f"`{kind.__name__}`" for kind in kinds)
            raise TypeError(
                f"`state` must be a tuple of the states of {len(kinds)} mixers ({names}), as `stack.init_state` makes "
                f"it, but {a_type(state)} came.{instead_of_a_state(state, 'stack')}"
            )
        if lead is None:
            return
        lead = (*lead, self.config.repeats)
        for index, part in enumerate(state):
            came = part.recurrent.shape[:-3] if isinstance(part, MixerState) else part.count.shape
            if came != lead:
                raise ValueError(
                    f"`state[{index}]` must have the leading axes {lead} for this call, those of `x` and the repeats "
                    f"of the pattern, but they are {came}. {more}`stack.init_state(batch)` makes a state for a batch, "
                    "`stack.init_state()` one for a single sequence."
                )


def _without_padding(x, mask, segment_ids):
    """Zeros at padding, which pass through every block, whatever stood there. The mixers check the two."""
    is_given = [isinstance(a, (jax.Array, np.ndarray)) and a.shape == x.shape[:-1] for a in (mask, segment_ids)]
    is_given = [is_given[0] and mask.dtype == bool, is_given[1] and jnp.issubdtype(segment_ids.dtype, jnp.integer)]
    if not any(is_given):
        return x
    real = mask
    if is_given[1]:
        ids = jnp.where(mask, segment_ids, -1) if is_given[0] else segment_ids
        real = ids >= 0
        if isinstance(ids, jax.Array):  # those that fall are padding; of NumPy's the mixers refuse them
            real = real & (ids == jax.lax.cummax(ids, axis=ids.ndim - 1))
    return jnp.where(real[..., None], x, jnp.zeros_like(x))


def _slice(block: HybridBlock, index: int) -> HybridBlock:
    return jax.tree.map(lambda a: a[index] if eqx.is_array(a) else a, block)
