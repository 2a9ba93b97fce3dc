"""The forward kernel: one grid step per block of owners and chunk, states kept in VMEM. The maths is `_tile`'s.

Residuals: the state at the start of every chunk and, where the plan says so, `_tile.Kept`.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from gated_delta._heads import LANES
from gated_delta._tile import chunk_factors

from ._convolution import Conv, conv_blocks, conv_scratch, make_readers
from ._layout import (
    Blocks,
    Chunks,
    Form,
    Operands,
    Plan,
    advance,
    behind_prologue,
    by_decay,
    in_a_row,
    kept_shapes,
    kernel_call,
    like,
    load_operands,
    store_vectors,
    tile_of,
)


def _body(
    plan: Plan,
    chunks: int,
    has_document: bool,
    out_form: Form,
    keeps: bool,
    convolves: bool,
    length: int | None,
    *refs,
):
    scalars, refs = Chunks(*refs[:4]), list(refs[4:])
    tile_refs = Operands(*(refs.pop(0) if here else None for here in plan.used))
    following_ref = refs.pop(0) if plan.chooses else None
    document_ref = refs.pop(0) if has_document else None
    bank_ref = refs.pop(0) if plan.has_bank else None
    convs = [Conv(refs.pop(0), refs.pop(0), refs.pop(0)) for _ in range(3)] if convolves else []
    if plan.has_slots:
        refs.pop(0)  # the final states' own memory, which begins as the initial states: what slots without a chunk keep
    out_ref, final_ref, check_ref = refs.pop(0), refs.pop(0), refs.pop(0)
    kept_refs = [refs.pop(0) for _ in kept_shapes(plan)] if keeps else []
    carry, much_ref, *scratch = refs
    readers = make_readers(plan, convs, scratch, length)
    at = pl.program_id(0) * chunks + pl.program_id(2)

    @pl.when(scalars.begin[at] == 1 if plan.has_slots else pl.program_id(2) == 0)
    def _():
        carry[...] = jnp.zeros_like(carry) if bank_ref is None else bank_ref[0, 0]

    check_ref[...] = jnp.zeros_like(check_ref)

    def run(arithmetic, owners):
        operands = behind_prologue(plan, load_operands(plan, tile_refs, owners, readers))
        state = [carry[h] for h in owners]
        factors, found = chunk_factors(tile_of(plan, operands, document_ref, scalars.entry[at]), arithmetic)
        state, out, starts, more = advance(plan, state, factors, arithmetic)
        found = found._replace(recalled=more.recalled, written=more.written)
        for ref, values in zip(kept_refs, [starts, *found]):
            for i, x in enumerate(values or ()):
                n, h = divmod(i, len(owners))
                ref[0, owners[h], n] = x.astype(ref.dtype)
        store_vectors(out_ref, in_a_row(plan, out), out_form, plan.sizes.owners, plan.interprets, owners)
        check_ref[0, 0, 0] += _sum_of_all(out)
        for i, h in enumerate(owners):
            carry[h] = state[i]

    by_decay(plan, tile_refs, following_ref, much_ref, run, halves=False)

    @pl.when(scalars.end[at] == 1 if plan.has_slots else pl.program_id(2) == chunks - 1)
    def _():
        final_ref[0, 0] = carry[...]


def _sum_of_all(out):
    """`[8, 128]` sums: not finite if anything in `out` is not, and a bad token spoils at least its own output."""
    rows, columns = out[0].shape
    parts = (x[i : i + 8, j : j + LANES] for x in out for i in range(0, rows, 8) for j in range(0, columns, LANES))
    return functools.reduce(jnp.add, parts)


def forward(
    plan: Plan, operands: Operands, chunks: Chunks, document, bank, out_dtype, keeps: bool, convs=(), length=None
):
    """Outputs laid as the values are, final states like `bank`, sums `[batch, blocks, chunks, 8, 128]` that are not
    finite where an output is not, and the residuals if `keeps`.

    `convs`: weights and windows of q, k and v, if any; `length`: of a row, where values beyond have to be zeros.
    """
    sizes, form = plan.sizes, plan.forms.v
    values = operands.v
    time = values.shape[2 if form.blocks else 1]
    rows = sizes.owners * form.heads * form.tiles
    blocks_of_owners = values.shape[1] if form.blocks else values.shape[2] // rows
    owners, count, batch = blocks_of_owners * sizes.owners, time // sizes.tokens, values.shape[0]
    blocks = Blocks(plan, count, lambda c: c)
    inputs = [x for x in operands if x is not None]
    specs = blocks.operands(operands)
    if plan.chooses:
        inputs, specs = [*inputs, operands.log_decay], [*specs, blocks.following(operands.log_decay)]
    if document is not None:
        inputs, specs = [*inputs, document], [*specs, blocks.document()]
    if bank is not None:
        inputs, specs = [*inputs, bank], [*specs, blocks.slot()]
    scratch = []
    for i, (weight, window) in enumerate(convs):
        vectors, conv = (plan.forms[i], plan.owners_of(i)), Conv(weight, operands[i], window)
        inputs, specs = [*inputs, *conv], [*specs, *conv_blocks(blocks, conv, *vectors)]
        scratch.append(conv_scratch(sizes.tokens, *vectors, plan.arithmetic.accumulation))
    aliases = {}
    if plan.has_slots:
        aliases = {len(chunks) + len(inputs): 1}
        inputs, specs = [*inputs, bank], [*specs, pl.BlockSpec(memory_space=pl.ANY)]
    slots = 1 if bank is None else bank.shape[1]
    shapes = [
        like(values.shape, out_dtype, *inputs),
        like((batch, slots, owners, plan.key_dim, plan.width), plan.arithmetic.accumulation, *inputs),
    ]
    shapes.append(like((batch, blocks_of_owners, count, 8, LANES), plan.arithmetic.accumulation, *inputs))
    check_spec = pl.BlockSpec((1, 1, 1, 8, LANES), lambda b, h, c, *_: (b, h, c, 0, 0))
    out_specs = [blocks.operand(values, form, sizes.owners), blocks.slot(), check_spec]
    for matrix in kept_shapes(plan) if keeps else ():
        shapes.append(like((batch, owners, count * sizes.chunks, *matrix), plan.kept_dtype, *inputs))
        out_specs.append(blocks.per_step(sizes.chunks, *matrix))
    body = functools.partial(_body, plan, count, document is not None, form, keeps, bool(convs), length)
    grid = batch, blocks_of_owners, count
    call = kernel_call("gated_delta_forward", body, plan, grid, specs, out_specs, aliases, scratch)
    return call(shapes, chunks, inputs)
