"""The forward kernel: one grid step per block of owners and chunk, states kept in VMEM. The maths is
`_tile.chunk_step`.

Residual: the state at the start of every chunk.
"""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._tile import chunk_step

from ._layout import Blocks, Chunks, Operands, Plan, compiler_params, like, load_tile, used


def _body(plan: Plan, chunks: int, has_document: bool, *refs):
    scalars, refs = Chunks(*refs[:4]), list(refs[4:])
    tile_refs = Operands(*(refs.pop(0) if here else None for here in used(plan)))
    document_ref = refs.pop(0) if has_document else None
    bank_ref = refs.pop(0) if plan.has_bank else None
    if plan.has_slots:
        refs.pop(0)  # the final states' own memory, which begins as the initial states: what slots without a chunk keep
    out_ref, final_ref, *starts_ref, carry = refs
    at = pl.program_id(0) * chunks + pl.program_id(2)

    @pl.when(scalars.begin[at] == 1 if plan.has_slots else pl.program_id(2) == 0)
    def _():
        carry[...] = jnp.zeros_like(carry) if bank_ref is None else bank_ref[0, 0]

    for ref in starts_ref:
        ref[0, :, 0] = carry[...].astype(ref.dtype)
    state, out = chunk_step(carry[...], load_tile(plan, tile_refs, document_ref, scalars.entry[at]), plan.arithmetic)
    carry[...] = state
    out_ref[0] = (plan.scale * out).astype(out_ref.dtype)
    final_ref[0, 0] = state


def forward(plan: Plan, operands: Operands, chunks: Chunks, document, bank, out_dtype, keep_starts: bool):
    """Outputs `[batch, owners, time, width]`, final states like `bank`, and the states at chunk starts if
    `keep_starts`."""
    batch, owners, time, width = operands.v.shape
    key_dim, count = operands.k.shape[3], time // plan.sizes.chunk
    blocks = Blocks(plan, count, lambda c: c)
    inputs = [x for x in operands if x is not None]
    specs = [x for x in blocks.operands(operands) if x is not None]
    if document is not None:
        inputs, specs = [*inputs, document], [*specs, blocks.document()]
    if bank is not None:
        inputs, specs = [*inputs, bank], [*specs, blocks.slot(key_dim, width)]
    aliases = {}
    if plan.has_slots:
        aliases = {len(chunks) + len(inputs): 1}
        inputs, specs = [*inputs, bank], [*specs, pl.BlockSpec(memory_space=pl.ANY)]
    slots = 1 if bank is None else bank.shape[1]
    shapes = [
        like((batch, owners, time, width), out_dtype, *inputs),
        like((batch, slots, owners, key_dim, width), plan.arithmetic.accumulation, *inputs),
    ]
    out_specs = [blocks.column(width), blocks.slot(key_dim, width)]
    if keep_starts:
        shapes.append(like((batch, owners, count, key_dim, width), plan.start_dtype, *inputs))
        out_specs.append(blocks.start(key_dim, width))
    return pl.pallas_call(
        functools.partial(_body, plan, count, document is not None),
        out_shape=shapes,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(chunks),
            grid=(batch, owners // plan.sizes.owners, count),
            in_specs=specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((plan.sizes.owners, key_dim, width), plan.arithmetic.accumulation)],
        ),
        input_output_aliases=aliases,
        compiler_params=compiler_params(),
        interpret=pltpu.InterpretParams() if plan.interpret else False,
        name="gated_delta_forward",
    )(*chunks, *inputs)
