"""The arrays of a kernel call, the blocks that a grid step sees of them, and the heads in a block.

The grid is (batch, owner block, chunk), the last in order. Nothing is transposed on the way in or out: a vector's block
is `[chunk, heads, 128]`, as the caller's array lies in memory, and a head is read and written with a stride over the
others. Vectors wider than 128 are `[chunk, tiles * heads, 128]`, the order in which a TPU keeps them. Gates of a few
numbers per token are `[chunk, owners * groups]`.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from gated_delta._explicit import manual_axes
from gated_delta._gates import limit_log_decay
from gated_delta._heads import LANES, Columns, each
from gated_delta._raw_gates import Prologue
from gated_delta._tile import (
    NOTHING_KEPT,
    SOLVED,
    Arithmetic,
    Factors,
    Kept,
    Tile,
    chunk_advance,
    forgets_much,
    known,
)

from ._config import Sizes

VMEM_LIMIT_BYTES = 62 * 2**20  # of the 64 MiB of TPU v5p and 7x; v5e and v6e have 128
KEPT_BYTES = 28 * 2**20  # of these, what residuals and states may take in the forward kernel


class Operands(NamedTuple):
    """Differentiable inputs, padded to whole chunks and whole lanes, or something for each. `None`: no such gate."""

    q: Any
    k: Any
    v: Any
    log_decay: Any
    erase: Any
    write: Any
    A_log: Any
    dt_bias: Any


NOTHING = Operands(*(None for _ in Operands._fields))


class Chunks(NamedTuple):
    """Integers in scalar memory, `[batch * chunks]` each.

    - `slot`: which state of its row a chunk belongs to.
    - `begin`, `end`: 1 where the chunk is its document's first, last. A chunk that begins loads the state of its slot.
    - `entry`: number of the document that the entering state belongs to, where documents share chunks.
    """

    slot: Any
    begin: Any
    end: Any
    entry: Any


class Form(NamedTuple):
    """How one operand lies: static.

    - `heads`: vectors side by side for every owner or key head of the block (the values of a group); 0 for columns.
    - `tiles`: of 128 lanes in a vector; of columns: how many belong to an owner.
    - `blocks`: whether owner blocks have an axis of their own, `[batch, blocks, time, ...]`.
    - `is_fixed`: the same for every token: vectors are `[batch, blocks, heads, tiles * 128]`, columns
        `[batch, blocks, 1, columns]`.
    """

    heads: int
    tiles: int
    blocks: bool
    is_fixed: bool = False

    @property
    def is_vector(self) -> bool:
        return self.heads > 0


class Plan(NamedTuple):
    """Everything static about a call."""

    sizes: Sizes
    arithmetic: Arithmetic
    forms: Operands  # of Form | None
    key_dim: int
    width: int
    tied: bool
    prologue: Prologue | None
    scale: float
    has_bank: bool  # initial states are given
    has_slots: bool  # every document has states of its own
    chooses: bool  # per chunk, how decays of key channels are treated
    keeps_all: bool
    kept_dtype: str  # of what is kept for the backward pass
    interpret: bool | pltpu.InterpretParams

    @property
    def interprets(self) -> bool:
        return self.interpret is not False

    @property
    def used(self) -> tuple[bool, ...]:
        """Which of the operands there are."""
        return tuple(form is not None for form in self.forms)

    @property
    def has_fixed(self) -> bool:
        return any(form is not None and form.is_fixed for form in self.forms)

    def owners_of(self, index: int) -> int:
        """How many of a block's heads operand `index` has: key heads for queries and keys."""
        return self.sizes.key_heads if index < 2 else self.sizes.owners

    def part_of(self, index: int, owners: range) -> range:
        """The heads of operand `index` that belong to some of the block's owners."""
        group = self.sizes.owners // self.owners_of(index)
        return range(owners.start // group, owners.stop // group)

    @property
    def for_gradient(self) -> "Plan":
        return self._replace(sizes=self.sizes.for_gradient)

    @property
    def for_keeping(self) -> "Plan":
        """Of a forward kernel that keeps residuals: fewer chunks in a row where these, in two buffers, and the states
        would leave too little memory."""
        sizes = self.sizes
        kept = 2 * sizes.chunks * sum(rows * columns for rows, columns in kept_shapes(self))
        states = (2 + self.has_bank) * self.key_dim * self.width
        size = kept * jnp.dtype(self.kept_dtype).itemsize + states * self.arithmetic.accumulation.itemsize
        return self if sizes.owners * size <= KEPT_BYTES else self.for_gradient

    @property
    def all_owners(self) -> range:
        return range(self.sizes.owners)

    @property
    def halves(self) -> list[range]:
        """The owners in two parts, where both have whole groups and whole pairs of rows."""
        owners = self.sizes.owners
        if self.sizes.key_heads % 4:
            return [self.all_owners]
        return [range(owners // 2), range(owners // 2, owners)]


def kernel_call(
    name: str,
    body,
    plan: Plan,
    grid: tuple[int, int, int],
    in_specs,
    out_specs,
    aliases: dict[int, int],
    scratch: Sequence = (),
):
    """A function of the outputs' shapes, the chunks' integers and the inputs: one kernel over `grid`.

    Its scratch is what a block of owners carries from step to step, the states and the choice for the next chunk, and
    then what else is asked for.
    """
    state = pltpu.VMEM((plan.sizes.owners, plan.key_dim, plan.width), plan.arithmetic.accumulation)

    def call(shapes, chunks: Chunks, inputs):
        return pl.pallas_call(
            body,
            out_shape=shapes,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(chunks),
                grid=grid,
                in_specs=in_specs,
                out_specs=out_specs,
                scratch_shapes=[state, pltpu.SMEM((1,), jnp.int32), *scratch],
            ),
            input_output_aliases=aliases,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
            ),
            interpret=pltpu.InterpretParams() if plan.interpret is True else plan.interpret,
            name=name,
        )(*chunks, *inputs)

    return call


# ---- from the outer layout and back ----------------------------------------------------------------------------------


def vector_form(heads: int, dim: int, block_heads: int, parts: int = 1) -> Form:
    """Of `heads` with `parts` vectors of `dim` each, `block_heads` of them in a block."""
    tiles = -(-dim // LANES)
    rows = block_heads * parts
    whole = block_heads == heads
    return Form(parts, tiles, blocks=not (whole or (tiles == 1 and rows % 16 == 0)))


def lay_vector(x, form: Form, block_heads: int):
    """`[batch, time, heads, dim]` as `[batch, time, tiles * heads, 128]`, or with an axis of owner blocks after batch.

    The first has the order of a TPU's memory: no copy is made.
    """
    batch, time, heads, dim = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, form.tiles * LANES - dim)))
    rows = block_heads * form.heads
    if x.dtype == jnp.bfloat16 and form.tiles * rows % 2:
        x = x.astype(jnp.float32)  # two rows of bfloat16 share a register's row
    if not form.blocks:
        x = jnp.swapaxes(x.reshape(batch, time, heads, form.tiles, LANES), 2, 3)
        return x.reshape(batch, time, form.tiles * heads, LANES)
    x = x.reshape(batch, time, heads // rows, rows, form.tiles, LANES)
    return jnp.transpose(x, (0, 2, 1, 4, 3, 5)).reshape(batch, heads // rows, time, form.tiles * rows, LANES)


def take_vector(x, form: Form, block_heads: int, dim: int):
    """`lay_vector` undone."""
    if form.blocks:
        batch, blocks, time, _, _ = x.shape
        rows = block_heads * form.heads
        x = x.reshape(batch, blocks, time, form.tiles, rows, LANES)
        x = jnp.transpose(x, (0, 2, 1, 4, 3, 5)).reshape(batch, time, blocks * rows, form.tiles * LANES)
    else:
        batch, time, rows, _ = x.shape
        x = jnp.swapaxes(x.reshape(batch, time, form.tiles, rows // form.tiles, LANES), 2, 3)
        x = x.reshape(batch, time, rows // form.tiles, form.tiles * LANES)
    return x[..., :dim]


def lay_columns(x, block_heads: int):
    """`[batch, time, owners, groups]` as `[batch, blocks, time, columns]`."""
    batch, time, owners, groups = x.shape
    x = x.reshape(batch, time, owners // block_heads, block_heads * groups)
    return jnp.swapaxes(x, 1, 2)


def lay_fixed(x, form: Form, block_heads: int):
    """`[batch, owners, groups]` as one row of every block."""
    batch, owners, groups = x.shape
    if form.is_vector:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, form.tiles * LANES - groups)))
        return x.reshape(batch, owners // block_heads, block_heads, form.tiles * LANES)
    return x.reshape(batch, owners // block_heads, 1, block_heads * groups)


# ---- blocks ----------------------------------------------------------------------------------------------------------


class Blocks:
    """Block specs of one call; `chunk_of` maps the last grid index to a chunk (the backward pass runs them in
    reverse)."""

    def __init__(self, plan: Plan, chunks: int, chunk_of):
        self.plan, self.chunks, self.chunk_of = plan, chunks, chunk_of

    def operands(self, operands: Operands) -> list[pl.BlockSpec]:
        forms = self.plan.forms
        return [self.operand(x, forms[i], self.plan.owners_of(i)) for i, x in enumerate(operands) if x is not None]

    def operand(self, array, form: Form, block_heads: int) -> pl.BlockSpec:
        chunk, chunk_of = self.plan.sizes.tokens, self.chunk_of
        if form.is_fixed:
            return pl.BlockSpec((1, 1, *array.shape[2:]), lambda b, h, c, *_: (b, h, 0, 0))
        if not form.is_vector:
            return pl.BlockSpec((1, 1, chunk, array.shape[3]), lambda b, h, c, *_: (b, h, chunk_of(c), 0))
        return _vectors(array, form, block_heads, chunk, chunk_of)

    def before(self, array, form: Form, block_heads: int, rows: int) -> pl.BlockSpec:
        """The `rows` tokens before a step's own, which they divide; at the first step those are some of its own."""
        per_step = self.plan.sizes.tokens // rows
        return _vectors(array, form, block_heads, rows, lambda c: jnp.maximum(self.chunk_of(c) * per_step - 1, 0))

    def throughout(self, array, form: Form, block_heads: int) -> pl.BlockSpec:
        """All that stands where others have time, at every step."""
        return _vectors(array, form, block_heads, array.shape[2 if form.blocks else 1], lambda c: 0)

    def following(self, array) -> pl.BlockSpec:
        """The log decays of the chunk that the next grid step works on."""
        last, chunk_of = self.chunks - 1, self.chunk_of
        then = Blocks(self.plan, self.chunks, lambda c: chunk_of(jnp.minimum(c + 1, last)))
        return then.operand(array, self.plan.forms.log_decay, self.plan.sizes.owners)

    def document(self):
        """`[batch, chunks, 1, chunk]`: a block has whole lanes or all of them, so chunks are an axis of their own."""
        chunk_of = self.chunk_of
        return pl.BlockSpec((1, 1, 1, self.plan.sizes.chunk), lambda b, h, c, *_: (b, chunk_of(c), 0, 0))

    def per_step(self, number: int, rows: int, columns: int):
        """`[batch, owners, steps * number, rows, columns]`: matrices for every owner and grid step."""
        chunk_of = self.chunk_of
        shape = (1, self.plan.sizes.owners, number, rows, columns)
        return pl.BlockSpec(shape, lambda b, h, c, *_: (b, h, chunk_of(c), 0, 0))

    def slot(self):
        """`[batch, slots, owners, key_dim, width]`: the block of the slot that the chunk belongs to.

        With one buffer: it changes seldom, and two of these are a quarter of the memory.
        """
        chunk_of, chunks = self.chunk_of, self.chunks
        shape = (1, 1, self.plan.sizes.owners, self.plan.key_dim, self.plan.width)
        return pl.BlockSpec(
            shape,
            lambda b, h, c, slot, *_: (b, slot[b * chunks + chunk_of(c)], h, 0, 0),
            pipeline_mode=pl.Buffered(1),
        )


def _vectors(array, form: Form, block_heads: int, rows: int, block_of) -> pl.BlockSpec:
    """`rows` tokens of a block's vectors; `block_of` maps the last grid index to which."""
    if form.blocks:
        return pl.BlockSpec((1, 1, rows, *array.shape[3:]), lambda b, h, c, *_: (b, h, block_of(c), 0, 0))
    shape = (1, rows, form.tiles * block_heads * form.heads, LANES)
    return pl.BlockSpec(shape, lambda b, h, c, *_: (b, block_of(c), h, 0))


# ---- heads in a block ------------------------------------------------------------------------------------------------


def load_vectors(ref, form: Form, heads: int, interpret: bool, which: range | None = None, read=None) -> list:
    """`[chunk, dim]` of every head, or of those asked for; float32 where two heads share registers."""
    rows, read = heads * form.heads, read or load_row
    ref = ref.at[(0,) * (len(ref.shape) - 3)]

    def head(h):
        tiles = [
            read(ref, t * rows + h * form.heads + part, interpret)
            for part in range(form.heads)
            for t in range(form.tiles)
        ]
        return tiles[0] if len(tiles) == 1 else jnp.concatenate(tiles, axis=-1)

    return [head(h) for h in which or range(heads)]


def store_vectors(ref, values: list, form: Form, heads: int, interpret: bool, which: range | None = None):
    """The inverse of `load_vectors`. Heads that are asked for come in pairs of rows."""
    which = which or range(heads)
    ref = ref.at[(0,) * (len(ref.shape) - 3)]
    chunk, count, _ = ref.shape

    def value(tile, h, part):
        lane = (part * form.tiles + tile) * LANES
        return values[h - which.start][:, lane : lane + LANES]

    rows = {
        (tile * heads + h) * form.heads + part: value(tile, h, part)
        for tile in range(form.tiles)
        for h in which
        for part in range(form.heads)
    }
    if interpret or ref.dtype.itemsize == 4:
        for index, x in rows.items():
            _store_row(ref, index, x, interpret)
        return
    pairs = ref.bitcast(jnp.uint32).reshape(chunk * count // 2, LANES)
    for index in sorted(rows)[::2]:
        both = pltpu.pack_elementwise([rows[index], rows[index + 1]], packed_dtype=ref.dtype)
        both = lax.bitcast_convert_type(both, jnp.uint32)
        pairs[pl.ds(index // 2, chunk, stride=count // 2), :] = both


def load_row(ref, index: int, interpret: bool):
    """`[chunk, 128]`. The TPU interpreter knows neither strides nor bitcasts of references: it indexes."""
    if interpret:
        return ref[:, index, :]
    chunk, count, _ = ref.shape
    if ref.dtype.itemsize == 4:
        return ref.reshape(chunk * count, LANES)[pl.ds(index, chunk, stride=count), :]
    pairs = ref.bitcast(jnp.uint32).reshape(chunk * count // 2, LANES)
    both = pairs[pl.ds(index // 2, chunk, stride=count // 2), :]
    bits = both & jnp.uint32(0xFFFF0000) if index % 2 else both << 16
    return lax.bitcast_convert_type(bits, jnp.float32)


def _store_row(ref, index: int, value, interpret: bool):
    if interpret:
        ref[:, index, :] = value.astype(ref.dtype)
        return
    chunk, count, _ = ref.shape
    ref.reshape(chunk * count, LANES)[pl.ds(index, chunk, stride=count), :] = value.astype(ref.dtype)


def load_operands(plan: Plan, refs: Operands, owners: range, readers: Sequence = ()) -> Operands:
    """The inputs of some of the block's owners. Chunks in a row follow each other like further heads.

    `readers`: of the first operands, instead of `load_row`.
    """

    def load(i, ref, form):
        if ref is None:
            return None
        which = plan.part_of(i, owners)
        if form.is_fixed:
            return _load_fixed(plan, ref, form, which)
        if form.is_vector:
            read = readers[i] if i < len(readers) else None
            return in_chunks(plan, load_vectors(ref, form, plan.owners_of(i), plan.interprets, which, read))
        columns = [ref[0, 0][:, which.start * form.tiles : which.stop * form.tiles]]
        return Columns(jnp.concatenate(in_chunks(plan, columns), axis=-1), form.tiles)

    return Operands(*(load(i, *x) for i, x in enumerate(zip(refs, plan.forms, strict=True))))


def _load_fixed(plan: Plan, ref, form: Form, which: range) -> list | Columns:
    if form.is_vector:
        return [ref[0, 0, h : h + 1] for h in which]
    return Columns(ref[0, 0, :, which.start * form.tiles : which.stop * form.tiles], form.tiles)


def in_chunks(plan: Plan, heads: list) -> list:
    """Matrices of all tokens of a step cut into chunks: every head of the first chunk, then of the next."""
    if plan.sizes.chunks == 1:
        return heads
    size = plan.sizes.chunk
    return [x[start : start + size] for start in range(0, plan.sizes.tokens, size) for x in heads]


def in_a_row(plan: Plan, heads: list) -> list:
    """`in_chunks` undone."""
    if plan.sizes.chunks == 1:
        return heads
    count = len(heads) // plan.sizes.chunks
    return [jnp.concatenate(heads[i::count], axis=0) for i in range(count)]


def advance(
    plan: Plan,
    state: list,
    factors: Factors,
    arithmetic: Arithmetic,
    starts: list | None = None,
    kept: Kept = NOTHING_KEPT,
) -> tuple[list, list, list, Kept]:
    """`_tile.chunk_advance` from chunk to chunk of the step: the state, the outputs, the states at chunks' starts, and
    what is found of `Kept`. The last two may be given, where they are known: then no chunk waits for another."""
    count, outs, begun, found = len(state), [], [], []
    for n in range(plan.sizes.chunks):

        def of_chunk(tree, n=n):
            def own(x):
                return x[n * count : (n + 1) * count] if isinstance(x, list) else x

            return jax.tree.map(own, tree, is_leaf=lambda x: isinstance(x, list))

        if n and starts is not None:
            state = known(state, of_chunk(starts))
        begun += state
        state, out, new = chunk_advance(state, of_chunk(factors), arithmetic, kept=of_chunk(kept))
        outs += out
        found.append(new)
    together = (None if x[0] is None else [*itertools.chain(*x)] for x in zip(*found, strict=True))
    return state, outs, begun, Kept(*together)


def kept_shapes(plan: Plan) -> list[tuple[int, int]]:
    """Of the matrices that a forward kernel may keep for every owner and chunk: the state at its start, and `Kept`."""
    chunk, width = plan.sizes.chunk, plan.width
    shapes = [(plan.key_dim, width)]
    if plan.keeps_all:
        shapes += [(min(SOLVED, chunk), chunk), (chunk, chunk), (chunk, chunk), (chunk, width), (chunk, width)]
    return shapes


def tile_of(plan: Plan, x: Operands, document_ref, entry) -> Tile:
    """The chunk as `_tile` takes it, its queries scaled; `x` is behind the prologue."""
    document = None if document_ref is None else document_ref[0, 0]
    entry = None if document_ref is None else jnp.full((1, 1), entry, jnp.int32)
    log_decay = jax.tree.map(limit_log_decay, x.log_decay)
    q = [plan.scale * q.astype(plan.arithmetic.accumulation) for q in x.q]
    return Tile(q, x.k, x.v, log_decay, x.erase, x.erase if plan.tied else x.write, document, entry)


def behind_prologue(plan: Plan, x: Operands) -> Operands:
    """The operands as they are without one. Vectors are widened first, so they are rounded once."""
    prologue = plan.prologue
    if prologue is None:
        return x
    q, k = ([prologue.vector(y.astype(plan.arithmetic.accumulation)) for y in heads] for heads in (x.q, x.k))
    return x._replace(
        q=q,
        k=k,
        log_decay=_of_decay(prologue.log_decay, x.log_decay, x.A_log, x.dt_bias),
        erase=jax.tree.map(prologue.erase, x.erase),
        write=jax.tree.map(prologue.write, x.write),
        A_log=None,
        dt_bias=None,
    )


def _of_decay(function, raw: list | Columns | None, A_log, dt_bias) -> list | Columns | None:
    """`function` of raw decays, which may be there for every chunk of a step, and of their owners' parameters."""
    if raw is None:
        return None
    if isinstance(raw, Columns):
        values = raw.values

        def repeat(x):
            times = values.shape[1] // x.values.shape[1]
            return x.values if times == 1 else jnp.concatenate([x.values] * times, axis=1)

        fixed = (None if x is None else repeat(x) for x in (A_log, dt_bias))
        return Columns(function(values, *fixed), raw.groups)
    fixed = (None if x is None else x * (len(raw) // len(x)) for x in (A_log, dt_bias))
    return each(function, raw, *fixed)


def by_decay(plan: Plan, refs: Operands, following_ref, much_ref, run, *, halves: bool):
    """`run(arithmetic, owners)` with the arithmetic that the chunk's decays allow, the larger one in two `halves` if it
    needs as much memory.

    The choice for the following chunk is made beside this one's work, so that nothing waits for it.
    """
    if not plan.chooses:
        run(plan.arithmetic, plan.all_owners)
        return

    def much(ref):
        decay = NOTHING._replace(log_decay=ref, A_log=refs.A_log, dt_bias=refs.dt_bias)
        log_decay, _, _, A_log, dt_bias = load_operands(plan, decay, plan.all_owners)[3:]
        if plan.prologue is not None:
            log_decay = _of_decay(plan.prologue.least_log_decay, log_decay, A_log, dt_bias)
        return forgets_much(log_decay.values if isinstance(log_decay, Columns) else log_decay).astype(jnp.int32)

    @pl.when(pl.program_id(2) == 0)
    def _():
        much_ref[0] = much(refs.log_decay)

    forgets = much_ref[0] == 1

    def either(near, parts):
        for owners in parts:
            run(plan.arithmetic._replace(near=near), owners)
        much_ref[0] = much(following_ref)

    pl.when(forgets)(lambda: either("selected", plan.halves if halves else [plan.all_owners]))
    pl.when(~forgets)(lambda: either("cheap", [plan.all_owners]))


def store_cotangents(plan: Plan, refs: Operands, cotangents: Operands, owners: range):
    for i, (ref, value, form) in enumerate(zip(refs, cotangents, plan.forms, strict=True)):
        if ref is None:
            continue
        which = plan.part_of(i, owners)
        if form.is_fixed:
            _add_fixed(ref, value, form, which)
        elif form.is_vector:
            store_vectors(ref, in_a_row(plan, value), form, plan.owners_of(i), plan.interprets, which)
        else:
            width = value.values.shape[1] // plan.sizes.chunks
            parts = [value.values[:, n * width : (n + 1) * width] for n in range(plan.sizes.chunks)]
            columns = jnp.concatenate(parts, axis=0).astype(ref.dtype)
            ref[0, 0, :, which.start * form.tiles : which.stop * form.tiles] = columns


def _add_fixed(ref, value, form: Form, which: range):
    if form.is_vector:
        for h, x in zip(which, value, strict=True):
            ref[0, 0, h : h + 1] += x
    else:
        ref[0, 0, :, which.start * form.tiles : which.stop * form.tiles] += value.values


def zero_fixed(plan: Plan, refs: Operands):
    """Before the first chunk: what all chunks add to."""
    for ref, form in zip(refs, plan.forms, strict=True):
        if ref is not None and form.is_fixed:
            ref[...] = jnp.zeros_like(ref)


def like(shape, dtype, *arrays) -> jax.ShapeDtypeStruct:
    """An output's shape, varying over the manual mesh axes that any of `arrays` varies over."""
    axes = frozenset().union(*(manual_axes(x) for x in arrays if x is not None))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=ManualAxisType(varying=axes))


def by_rows(run, how, *arguments):
    """`run(how, *arguments)`, all of whose arrays have an axis of rows before all others: a mapped axis becomes rows.

    So `vmap` costs what the batched call costs, and none of the branches becomes a choice between two results.
    """
    call = jax.custom_batching.custom_vmap(functools.partial(run, how))

    @call.def_vmap
    def _(size, is_mapped, *arguments):
        def merge(x, is_mapped):
            x = x if is_mapped else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        out = by_rows(run, how, *jax.tree.map(merge, arguments, tuple(is_mapped)))
        out = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call(*arguments)
