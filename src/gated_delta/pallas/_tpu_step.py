"""The decode kernel: one token of many rows, every state read once from where it lies and written back once.

Grid (block of heads, row). States stay where they are; the kernel copies a row's block of them into vector memory while
the row before is computed, and back while the rows behind are. A padding row copies nothing, nor does a row that begins
read. Gates are activated inside. The maths is that of `_recurrent`, on one matrix per head: all heads of a block
advance stage by stage.
"""

import dataclasses
import functools
from typing import Any, NamedTuple, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._backend import Problem, StepResult
from gated_delta._gates import limit_log_decay
from gated_delta._heads import LANES, each, widen
from gated_delta._raw_gates import Prologue
from gated_delta._recurrent import Recurrent, forget, learn
from gated_delta._slots import is_slot

from ._config import TileConfig
from ._layout import VMEM_LIMIT_BYTES, Operands, by_rows, like


class Plan(NamedTuple):
    """Everything static about a call."""

    heads: int  # value heads in a block
    width: int  # value channels of each
    by_channel: Operands  # whether an operand has channels (else it is one number per head), `None` where there is none
    tied: bool
    prologue: Prologue | None
    scale: float
    has_slots: bool
    has_fresh: bool
    interpret: bool | pltpu.InterpretParams


class Copies:
    """The way of every row's block of states into vector memory and back, with two buffers each way."""

    def __init__(self, plan: Plan, slots_ref, fresh_ref, state_ref, new_ref, before, after, semaphores):
        self.plan, self.slots_ref, self.fresh_ref = plan, slots_ref, fresh_ref
        self.state_ref, self.new_ref, self.before, self.after = state_ref, new_ref, before, after
        self.semaphores = semaphores

    def is_real(self, row):
        return is_slot(self.slots_ref[row], self.state_ref.shape[0]) if self.plan.has_slots else row >= 0

    def begins(self, row):
        return self.fresh_ref[row] == 1 if self.plan.has_fresh else row < 0

    def load(self, row):
        buffer = row & 1
        there = self.state_ref.at[self._place(row), pl.program_id(0)]
        return pltpu.make_async_copy(there, self.before.at[buffer], self.semaphores.at[0, buffer])

    def store(self, row):
        buffer = row & 1
        there = self.new_ref.at[self._place(row), pl.program_id(0)]
        return pltpu.make_async_copy(self.after.at[buffer], there, self.semaphores.at[1, buffer])

    def _place(self, row):
        return self.slots_ref[row] if self.plan.has_slots else row

    def begin(self):
        """Before this row's states are needed: the next row's are on their way, and what is written has room."""
        row, rows = pl.program_id(1), pl.num_programs(1)

        def reads(row):
            return self.is_real(row) & ~self.begins(row)

        pl.when((row == 0) & reads(row))(lambda: self.load(row).start())
        following = jnp.minimum(row + 1, rows - 1)
        pl.when((row + 1 < rows) & reads(following))(lambda: self.load(following).start())
        pl.when(reads(row))(lambda: self.load(row).wait())
        self._finish(row - 2)

    def end(self):
        """After the last row's states were written: all of them have arrived."""
        row, rows = pl.program_id(1), pl.num_programs(1)

        @pl.when(row == rows - 1)
        def _():
            self._finish(row - 1)
            self._finish(row)

    def _finish(self, row):
        earlier = jnp.maximum(row, 0)
        pl.when((row >= 0) & self.is_real(earlier))(lambda: self.store(earlier).wait())


def _body(plan: Plan, *refs):
    refs = list(refs)
    slots_ref = refs.pop(0) if plan.has_slots else None
    fresh_ref = refs.pop(0) if plan.has_fresh else None
    operand_refs = Operands(*(None if here is None else refs.pop(0) for here in plan.by_channel))
    state_ref, new_ref, out_ref, outs, before, after, semaphores = refs
    copies = Copies(plan, slots_ref, fresh_ref, state_ref, new_ref, before, after, semaphores)
    row = pl.program_id(1)
    buffer = row & 1
    copies.begin()

    def run():
        x = _behind_prologue(plan, Operands(*(None if ref is None else _load(ref) for ref in operand_refs)))
        q, k, log_decay, erase = (_columns(plan, getattr(x, name), name) for name in ("q", "k", "log_decay", "erase"))
        v, write, queries = (_rows(plan, getattr(x, name), name) for name in ("v", "write", "q"))
        write = erase if plan.tied else write
        if erase is None:  # recalls with 0, so that a state that is not finite shows
            erase = jnp.zeros((1, 1), outs.dtype)
        states = [before[buffer, h].astype(outs.dtype) for h in range(plan.heads)]
        if plan.has_fresh:
            states = [jnp.where(copies.begins(row), 0.0, state) for state in states]
        states, values = each(forget, states, k, v, log_decay, erase, write)
        values = each(_spoil, values, queries)
        states, out = each(learn, states, q, k, values)
        for h in range(plan.heads):
            after[buffer, h] = states[h].astype(after.dtype)
            outs[h : h + 1] = out[h]
        copies.store(row).start()
        out_ref[0, 0] = outs[...].astype(out_ref.dtype)

    real = copies.is_real(row)
    pl.when(real)(run)

    @pl.when(~real)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    copies.end()


def _load(ref):
    return ref[0, 0].astype(jnp.float32)


def _behind_prologue(plan: Plan, x: Operands) -> Operands:
    prologue = plan.prologue
    if prologue is not None:
        x = x._replace(
            q=prologue.vector(x.q),
            k=prologue.vector(x.k),
            log_decay=None if x.log_decay is None else prologue.log_decay(x.log_decay, x.A_log, x.dt_bias),
            erase=None if x.erase is None else prologue.erase(x.erase),
            write=None if x.write is None else prologue.write(x.write),
        )
    log_decay = None if x.log_decay is None else limit_log_decay(x.log_decay)
    return x._replace(q=plan.scale * x.q, log_decay=log_decay)


def _columns(plan: Plan, x, name: str) -> list | None:
    """`[dim, 1]` of every value head, of an operand of its key head or owner; `[1, 1]` of a gate per head."""
    if x is None:
        return None
    columns = jnp.swapaxes(x, 0, 1) if getattr(plan.by_channel, name) else x
    columns = [columns[:, h : h + 1] for h in range(columns.shape[1])]
    if name == "k":  # stands in two products: copied over lanes once
        columns = [jnp.broadcast_to(column, (column.shape[0], plan.width)) for column in columns]
    return _spread(plan, columns)


def _rows(plan: Plan, x, name: str) -> list | None:
    """`[1, dim]` of every value head."""
    if x is None:
        return None
    if not getattr(plan.by_channel, name):
        return _columns(plan, x, name)
    return _spread(plan, [x[h : h + 1] for h in range(x.shape[0])])


def _spread(plan: Plan, owners: list) -> list:
    return [x for x in owners for _ in range(plan.heads // len(owners))]


def _spoil(value, q):
    """`value`, NaN throughout where it or the query is not finite: then so are the output and the state."""
    return value + jnp.sum(0 * value, axis=1, keepdims=True) + jnp.sum(0 * q, axis=1, keepdims=True)


# ---- the call --------------------------------------------------------------------------------------------------------


def why_not_step(problem: Problem, state) -> str | None:
    """Why the kernel cannot run that on any TPU, or `None` if it can."""
    if problem.operand == jnp.float64:
        return "float64 has no TPU kernel; Recurrent computes it"
    if state.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it keeps states as float32 or bfloat16, not {state.dtype}"
    group = problem.v.shape[2] * problem.group // problem.k.shape[2]
    size = group * _padded_bytes(state)
    if size > _LARGEST_BYTES:
        return (
            f"the states of one key head, {group} of {state.shape[2]} x {state.shape[3]} numbers, take {size} bytes in "
            f"whole lanes, and a step holds them four times in a TPU's vector memory; at most {_LARGEST_BYTES} bytes do"
        )
    return None


def step(
    config: TileConfig, interpret: bool | pltpu.InterpretParams, problem: Problem, state, slots, fresh
) -> StepResult:
    """As `AbstractStepper.step`. Its derivatives are those of the recurrence."""
    scale = problem.scale
    if not isinstance(scale, float):  # only a number known here goes into the kernel
        problem = dataclasses.replace(problem, scale=1.0)
    floats, integers = eqx.partition((problem, state, slots, fresh), eqx.is_inexact_array)
    arrays, static = eqx.partition(integers, eqx.is_array)
    out, new = cast(Any, _step((config, interpret, static, isinstance(scale, float)), floats, arrays))
    return out if isinstance(scale, float) else out * jnp.asarray(scale, out.dtype), new


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(how, floats, integers):
    slots = integers[2]
    return by_rows(_run, how, floats, integers) if slots is None else _by_pools(how, floats, integers)


def _by_pools(how, floats, integers):
    """`_run` with slots: of a mapped axis the rows become rows, and the pools of its members one pool."""
    call = jax.custom_batching.custom_vmap(functools.partial(_run, how))

    @call.def_vmap
    def _(size, is_mapped, *arguments):
        def spread(x, is_mapped):
            return x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))

        floats, integers = jax.tree.map(spread, arguments, tuple(is_mapped))
        count, slots = floats[1].shape[1], integers[2]
        behind = count * jnp.arange(size, dtype=jnp.int32)[:, None]  # the pools of earlier members
        slots = jnp.where(is_slot(slots, count), slots.astype(jnp.int32) + behind, -1)
        arguments = floats, (*integers[:2], slots, *integers[3:])
        merged = jax.tree.map(lambda x: x.reshape(size * x.shape[1], *x.shape[2:]), arguments)
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), _by_pools(how, *merged))
        return out, jax.tree.map(lambda _: True, out)

    return call(floats, integers)


def _run(how, floats, integers):
    config, interpret, static, is_rounded = how
    return _launch(config, interpret, is_rounded, *eqx.combine(floats, integers, static))


def _step_fwd(how, floats, integers):
    return _step(how, floats, integers), (floats, integers)


def _step_bwd(how, residuals, cotangents):
    floats, integers = residuals
    *_, static, _ = how

    def reference(floats):
        problem, state, slots, fresh = eqx.combine(floats, integers, static)
        out, new = Recurrent().step(problem.activated(), state, slots, fresh)
        return out.astype(cotangents[0].dtype), new

    pull = cast(Any, jax.vjp(reference, floats)[1])
    return *pull(cotangents), None


_step.defvjp(_step_fwd, _step_bwd)


def _launch(config: TileConfig, interpret, is_rounded: bool, problem: Problem, state, slots, fresh):
    batch, _, key_heads, key_dim = problem.k.shape
    group = problem.group
    heads, value_dim = problem.v.shape[2] * group, problem.v.shape[3] // group
    width = _block_heads(config, key_heads, state)
    blocks = heads // width

    def vector(x, dim):
        """`[batch, blocks, heads, dim]`."""
        return x.reshape(batch, blocks, -1, dim), True

    def gate(x, dim):
        """The same, if it is per channel; of one number per head `[batch, blocks, 1, heads]`."""
        if x is None:
            return None, None
        x = x.reshape(batch, -1, x.shape[-1])
        return (x.reshape(batch, blocks, 1, -1), False) if x.shape[-1] == 1 else vector(widen(x, dim), dim)

    log_decay = gate(problem.log_decay, key_dim)
    A_log: Any = problem.A_log
    if A_log is not None:
        A_log = A_log.reshape(batch, blocks, *((-1, 1) if log_decay[1] else (1, -1)))
    pairs = Operands(
        q=vector(problem.q, key_dim),
        k=vector(problem.k, key_dim),
        v=vector(problem.v, value_dim),
        log_decay=log_decay,
        erase=gate(problem.erase, key_dim),
        write=gate(None if problem.tied else _write_by_head(problem), value_dim),
        A_log=(A_log, None if A_log is None else False),
        dt_bias=gate(problem.dt_bias, key_dim),
    )
    operands, by_channel = (Operands(*half) for half in zip(*pairs))
    integers = [None if x is None else jnp.asarray(x).astype(jnp.int32) for x in (slots, fresh)]
    scale = problem.scale
    assert isinstance(scale, float)
    plan = Plan(
        heads=width,
        width=value_dim,
        by_channel=by_channel,
        tied=problem.tied,
        prologue=problem.prologue,
        scale=scale,
        has_slots=slots is not None,
        has_fresh=fresh is not None,
        interpret=interpret,
    )
    dtype = problem.v.dtype if is_rounded else jnp.float32
    state_blocks = state.reshape(-1, blocks, width, key_dim, value_dim)
    out, new = _call(plan, [x for x in integers if x is not None], operands, state_blocks, dtype)
    return out.reshape(batch, heads, value_dim), new.reshape(state.shape)


def _call(plan: Plan, integers: list, operands: Operands, state, out_dtype):
    batch, blocks = operands.q.shape[:2]
    inputs = [x for x in operands if x is not None]

    def of_row(block, row, *_):
        return row, block, 0, 0

    where_it_lies = pl.BlockSpec(memory_space=pl.ANY)
    out = like((batch, blocks, plan.heads, plan.width), out_dtype, *inputs, state)
    buffers = pltpu.VMEM((2, *state.shape[2:]), state.dtype)
    new, out = pl.pallas_call(
        functools.partial(_body, plan),
        out_shape=(like(state.shape, state.dtype, *inputs, state), out),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(integers),
            grid=(blocks, batch),
            in_specs=[*(pl.BlockSpec((1, 1, *x.shape[2:]), of_row) for x in inputs), where_it_lies],
            out_specs=[where_it_lies, pl.BlockSpec((1, 1, *out.shape[2:]), of_row)],
            scratch_shapes=[
                pltpu.VMEM(out.shape[2:], jnp.float32),
                buffers,
                buffers,
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        input_output_aliases={len(integers) + len(inputs): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
        ),
        interpret=pltpu.InterpretParams() if plan.interpret is True else plan.interpret,
        name="gated_delta_step",
    )(*integers, *inputs, state)
    return out, new


def _write_by_head(problem: Problem):
    """`[batch, 1, key or value heads, 1 | value_dim]`: apart what lies side by side in an owner's width."""
    write, group = problem.write, problem.group
    if write is None or write.shape[3] == 1:
        return write
    return write.reshape(*write.shape[:2], write.shape[2] * group, write.shape[3] // group)


_BLOCK_BYTES = 2 * 2**20
_LARGEST_BYTES = 8 * 2**20


def _block_heads(config: TileConfig, key_heads: int, state) -> int:
    """Value heads in a block: whole groups that divide the heads, `config.owners` of them if it says so."""
    heads = state.shape[1]
    group = heads // key_heads
    wanted = config.owners or _BLOCK_BYTES // _padded_bytes(state)
    fitting = [n * group for n in range(1, key_heads + 1) if key_heads % n == 0 and n * group <= wanted]
    return max(fitting, default=group)


def _padded_bytes(state) -> int:
    """Of one head's state in a TPU's memory."""
    key_dim, value_dim = state.shape[2:]
    return -(-key_dim // 16) * 16 * -(-value_dim // LANES) * LANES * state.dtype.itemsize
