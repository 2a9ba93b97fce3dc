"""The backward kernel: `jax.vjp` of `_tile.chunk_step` in every chunk, from the last to the first.

It reads the inputs and the state at the start of each chunk, and carries the cotangent of the state in VMEM.
"""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._tile import Tile, chunk_step

from ._layout import Blocks, Chunks, Operands, Plan, compiler_params, like, load_tile, store_cotangents, used


def _body(plan: Plan, chunks: int, has_document: bool, *refs):
    scalars, refs = Chunks(*refs[:4]), list(refs[4:])
    tile_refs = Operands(*(refs.pop(0) if here else None for here in used(plan)))
    document_ref = refs.pop(0) if has_document else None
    starts_ref, d_out_ref, d_final_ref = refs.pop(0), refs.pop(0), refs.pop(0)
    if plan.has_slots:
        refs.pop(0)  # the cotangents of slots without a chunk: the output's own memory
    d_tile_refs = Operands(*(refs.pop(0) if here else None for here in used(plan)))
    d_bank_ref, carry = refs
    at = pl.program_id(0) * chunks + chunks - 1 - pl.program_id(2)  # the last chunk first

    @pl.when(scalars.end[at] == 1 if plan.has_slots else pl.program_id(2) == 0)
    def _():
        carry[...] = d_final_ref[0, 0]

    tile = load_tile(plan, tile_refs, document_ref, scalars.entry[at])
    differentiable = Operands(tile.q, tile.k, tile.v, tile.log_decay, tile.erase, None if plan.tied else tile.write)

    def step(state, x: Operands):
        write = x.erase if plan.tied else x.write
        tile_x = Tile(x.q, x.k, x.v, x.log_decay, x.erase, write, tile.document, tile.entry)
        return chunk_step(state, tile_x, plan.arithmetic)

    state = starts_ref[0, :, 0].astype(carry.dtype)
    pull = jax.vjp(step, state, differentiable)[1]
    d_state, d_operands = pull((carry[...], plan.scale * d_out_ref[0].astype(carry.dtype)))
    store_cotangents(plan, d_tile_refs, d_operands)
    carry[...] = d_state
    d_bank_ref[0, 0] = d_state


def backward(plan: Plan, operands: Operands, chunks: Chunks, document, starts, d_out, d_final):
    """Cotangents of `operands`, in their dtypes, and of the initial states."""
    batch, owners, time, width = operands.v.shape
    key_dim, count = operands.k.shape[3], time // plan.sizes.chunk
    blocks = Blocks(plan, count, lambda c: count - 1 - c)
    inputs = [x for x in operands if x is not None]
    specs = [x for x in blocks.operands(operands) if x is not None]
    d_shapes = [like(x.shape, x.dtype, d_out, *inputs) for x in inputs]
    d_specs: list[pl.BlockSpec] = list(specs)
    if document is not None:
        inputs, specs = [*inputs, document], [*specs, blocks.document()]
    inputs += [starts, d_out, d_final]
    specs += [blocks.start(key_dim, width), blocks.column(width), blocks.slot(key_dim, width)]
    aliases = {}
    if plan.has_slots:
        aliases = {len(chunks) + len(inputs): len(d_shapes)}
        inputs, specs = [*inputs, d_final], [*specs, pl.BlockSpec(memory_space=pl.ANY)]
    d_shapes.append(like(d_final.shape, d_final.dtype, *inputs))
    d_specs.append(blocks.slot(key_dim, width))
    *d_operands, d_bank = pl.pallas_call(
        functools.partial(_body, plan, count, document is not None),
        out_shape=d_shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(chunks),
            grid=(batch, owners // plan.sizes.owners, count),
            in_specs=specs,
            out_specs=d_specs,
            scratch_shapes=[pltpu.VMEM((plan.sizes.owners, key_dim, width), plan.arithmetic.accumulation)],
        ),
        input_output_aliases=aliases,
        compiler_params=compiler_params(),
        interpret=pltpu.InterpretParams() if plan.interpret else False,
        name="gated_delta_backward",
    )(*chunks, *inputs)
    found = iter(d_operands)
    return Operands(*(None if x is None else next(found) for x in operands)), d_bank
