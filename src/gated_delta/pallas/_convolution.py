"""Short convolutions on the way into the forward kernel: a row of a block behind its convolution."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._activations import add_taps
from gated_delta._heads import LANES

from ._layout import Blocks, Form, Plan, load_row

BEFORE = 4
"""Tokens before its own that a grid step reads: taps reach back no further."""


_MOST = 2**13
"""Rows of 128 channels, token by token, that a step convolves: with twice as many the compiler takes minutes."""


def for_convolving(plan: Plan, width: int) -> Plan | None:
    """With fewer chunks in a row where a step would have too many rows; `None`: XLA convolves before the kernel."""
    vectors = list(enumerate(plan.forms[:3]))
    rows = sum(plan.owners_of(i) * form.heads * form.tiles for i, form in vectors)
    fits = (each for each in (plan, plan.for_gradient) if width <= BEFORE + 1 and rows * each.sizes.tokens <= _MOST)
    return next(fits, None)


class Conv(NamedTuple):
    """What a vector operand needs beside it, laid like it: arrays, their blocks, or references.

    - `weight`: `[batch, width, ...]`.
    - `before`: the operand once more, of which a step sees the tokens before its own.
    - `window`: `[batch, BEFORE, ...]`, those before the first.
    """

    weight: Any
    before: Any
    window: Any


def conv_blocks(blocks: Blocks, conv: Conv, form: Form, block_heads: int) -> Conv:
    return Conv(
        blocks.throughout(conv.weight, form, block_heads),
        blocks.before(conv.before, form, block_heads, BEFORE),
        blocks.throughout(conv.window, form, block_heads),
    )


def conv_scratch(tokens: int, form: Form, block_heads: int, dtype) -> Any:
    """A step's inputs and those before, of every row of a block, with a gap after each: a read with a stride may begin
    anywhere, one without it at whole registers."""
    return pltpu.VMEM((block_heads * form.heads * form.tiles, 2 * (BEFORE + tokens), LANES), dtype)


def make_readers(plan: Plan, convs: list[Conv], scratch: list, length: int | None) -> list:
    """Of the references of queries, keys and values; `length`: of a row, where values beyond have to be zeros."""
    step = pl.program_id(2)
    left = None if length is None else length - step * plan.sizes.tokens
    return [_Reader(*x, step == 0) for x in zip(convs, scratch, (None, None, left))]


class _Reader(NamedTuple):
    """`load_row` with a convolution and SiLU behind it."""

    conv: Conv  # of references
    scratch: Any
    left: Any  # tokens before the row's end, where all behind it have to be zeros; else `None`
    is_first: Any  # whether no token of the row stands before the step

    def __call__(self, ref, index: int, interpret: bool):
        def row(ref):
            return load_row(ref.at[(0,) * (len(ref.shape) - 3)], index, interpret).astype(self.scratch.dtype)

        own = load_row(ref, index, interpret).astype(self.scratch.dtype)
        before = jnp.where(self.is_first, row(self.conv.window), row(self.conv.before))
        weight = row(self.conv.weight)
        inputs = self._inputs(own, before, self.scratch.at[index], interpret)
        taps = [weight[i : i + 1] for i in range(weight.shape[0])]
        out = jax.nn.silu(add_taps(inputs, taps))
        if self.left is None:
            return out
        return jnp.where(lax.broadcasted_iota(jnp.int32, out.shape, 0) < self.left, out, jnp.zeros_like(out))

    def _inputs(self, own, before, scratch, interpret):
        tokens = own.shape[0]
        if interpret:
            joined = jnp.concatenate([before, own], axis=0)
            return lambda back: joined[BEFORE - back :][:tokens]
        scratch[pl.ds(0, BEFORE, stride=2), :] = before
        scratch[pl.ds(2 * BEFORE, tokens, stride=2), :] = own
        return lambda back: scratch[pl.ds(2 * (BEFORE - back), tokens, stride=2), :] if back else own
