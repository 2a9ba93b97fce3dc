"""The backward kernel: `jax.vjp` of `_tile`'s chunk in every chunk, from the last to the first.

It reads the inputs, the state at the start of each chunk and, where they were kept, `_tile.Kept`; it carries the
cotangent of the state in VMEM.
"""

import functools

import jax
from jax.experimental import pallas as pl

from gated_delta._tile import Kept, chunk_factors

from ._layout import (
    Blocks,
    Chunks,
    Operands,
    Plan,
    advance,
    behind_prologue,
    by_decay,
    in_chunks,
    kept_shapes,
    kernel_call,
    like,
    load_operands,
    load_vectors,
    store_cotangents,
    tile_of,
    zero_fixed,
)


def _body(plan: Plan, chunks: int, has_document: bool, *refs):
    scalars, refs = Chunks(*refs[:4]), list(refs[4:])
    tile_refs = Operands(*(refs.pop(0) if here else None for here in plan.used))
    following_ref = refs.pop(0) if plan.chooses else None
    document_ref = refs.pop(0) if has_document else None
    starts_ref, *kept_refs = (refs.pop(0) for _ in kept_shapes(plan))
    d_out_ref, d_final_ref = refs.pop(0), refs.pop(0)
    if plan.has_slots:
        refs.pop(0)  # the cotangents of slots without a chunk: the output's own memory
    d_tile_refs = Operands(*(refs.pop(0) if here else None for here in plan.used))
    d_bank_ref, carry, much_ref = refs
    at = pl.program_id(0) * chunks + chunks - 1 - pl.program_id(2)  # the last chunk first

    @pl.when(scalars.end[at] == 1 if plan.has_slots else pl.program_id(2) == 0)
    def _():
        carry[...] = d_final_ref[0, 0]

    if plan.has_fixed:
        pl.when(pl.program_id(2) == 0)(lambda: zero_fixed(plan, d_tile_refs))

    def run(arithmetic, owners):
        def of_chunks(ref):
            return [ref[0, h, n].astype(carry.dtype) for n in range(plan.sizes.chunks) for h in owners]

        operands = behind_prologue(plan, load_operands(plan, tile_refs, owners))
        starts, kept = of_chunks(starts_ref), Kept(*map(of_chunks, kept_refs))

        def step(state, x: Operands):
            factors, _ = chunk_factors(tile_of(plan, x, document_ref, scalars.entry[at]), arithmetic, kept)
            return advance(plan, state, factors, arithmetic, starts, kept)[:2]

        pull = jax.vjp(step, starts[: len(owners)], operands)[1]
        d_out = load_vectors(d_out_ref, plan.forms.v, plan.sizes.owners, plan.interprets, owners)
        d_out = in_chunks(plan, [x.astype(carry.dtype) for x in d_out])
        d_state, d_operands = pull(([carry[h] for h in owners], d_out))
        if plan.prologue is not None:
            # Done anew: what its derivative needs would lie in memory all the time.
            again = load_operands(plan, tile_refs, owners)
            (d_operands,) = jax.vjp(functools.partial(behind_prologue, plan), again)[1](d_operands)
        store_cotangents(plan, d_tile_refs, d_operands, owners)
        for i, h in enumerate(owners):
            carry[h] = d_state[i]

    by_decay(plan, tile_refs, following_ref, much_ref, run, halves=True)

    @pl.when(scalars.begin[at] == 1 if plan.has_slots else pl.program_id(2) == chunks - 1)
    def _():
        d_bank_ref[0, 0] = carry[...]


def backward(plan: Plan, operands: Operands, chunks: Chunks, document, residuals, d_out, d_final):
    """Cotangents of `operands`, in their dtypes and as they lie, and of the initial states."""
    sizes, form = plan.sizes, plan.forms.v
    time = operands.v.shape[2 if form.blocks else 1]
    blocks_of_owners = d_final.shape[2] // sizes.owners
    count, batch = time // sizes.tokens, d_final.shape[0]
    blocks = Blocks(plan, count, lambda c: count - 1 - c)
    inputs = [x for x in operands if x is not None]
    specs = blocks.operands(operands)
    d_shapes = [like(x.shape, x.dtype, d_out, *inputs) for x in inputs]
    d_specs: list[pl.BlockSpec] = list(specs)
    if plan.chooses:
        inputs, specs = [*inputs, operands.log_decay], [*specs, blocks.following(operands.log_decay)]
    if document is not None:
        inputs, specs = [*inputs, document], [*specs, blocks.document()]
    inputs += [*residuals, d_out, d_final]
    specs += [blocks.per_step(x.shape[2] // count, *x.shape[3:]) for x in residuals]
    specs += [blocks.operand(d_out, form, sizes.owners), blocks.slot()]
    aliases = {}
    if plan.has_slots:
        aliases = {len(chunks) + len(inputs): len(d_shapes)}
        inputs, specs = [*inputs, d_final], [*specs, pl.BlockSpec(memory_space=pl.ANY)]
    d_shapes.append(like(d_final.shape, d_final.dtype, *inputs))
    d_specs.append(blocks.slot())
    body = functools.partial(_body, plan, count, document is not None)
    call = kernel_call("gated_delta_backward", body, plan, (batch, blocks_of_owners, count), specs, d_specs, aliases)
    *d_operands, d_bank = call(d_shapes, chunks, inputs)
    found = iter(d_operands)
    return Operands(*(None if x is None else next(found) for x in operands)), d_bank
