"""The backward attention kernel: cotangents of queries, keys and values, from one more look at every tile of scores.

Here scores stand as `[queries, keys]`: so weights and cotangents of scores are stationary operands as they come, of the
products that sum over queries. What keys and values gain is summed up in vector memory over all queries of all
heads of a group, and written when the last of them is done. The cotangents of queries are `[key_dim, queries]`
too where the width is at most 128: then cotangents of scores are turned on their way into the matrix unit, and the
product fills it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._heads import LANES

from ._attention_layout import (
    LOG2_E,
    Plan,
    Stages,
    Tile,
    Walk,
    Work,
    compiler_params,
    load_visits,
    product,
    repeat_lanes,
    slabs,
    turn,
    visible,
)
from ._layout import like


class _Block:
    """The work of one grid step."""

    def __init__(self, plan: Plan, refs):
        self.plan, self.sizes = plan, plan.sizes
        refs = list(refs)
        visits_ref, offset_ref = refs.pop(0), refs.pop(0) if plan.has_offset else None
        self.q_ref, self.k_ref, self.v_ref, self.d_out_ref = (refs.pop(0).at[0, 0] for _ in range(4))
        self.lse_ref, self.delta_ref = (refs.pop(0).at[0, 0] for _ in range(2))
        has_segments = plan.rule.has_segments
        self.query_segments, self.key_segments = (refs.pop(0) if has_segments else None for _ in range(2))
        self.d_q_ref, self.d_k_ref, self.d_v_ref = refs.pop(0).at[0, 0], refs.pop(0), refs.pop(0)
        self.segment_columns = refs.pop() if has_segments else None
        self.kT = refs.pop() if is_turned(self.k_ref.shape[1]) else None
        (
            self.qT,
            self.d_outT,
            self.lse,
            self.delta,
            self.scores,
            self.d_weights,
            self.weights,
            self.d_scores,
            self.d_q,
            self.d_kT,
            self.d_vT,
            *self.leaving,
        ) = refs
        batch, block, blocks = pl.program_id(0), pl.program_id(3), pl.num_programs(3)
        self.visits = load_visits(visits_ref, (batch * blocks if plan.varies else 0) + block)
        self.position = block * self.sizes.block + (0 if offset_ref is None else offset_ref[batch])
        self.is_first = (pl.program_id(2) == 0) & (block == 0)
        self.is_last = (pl.program_id(2) == pl.num_programs(2) - 1) & (block == blocks - 1)
        self.key_dim = self.k_ref.shape[1]
        stages = Stages(self.score, self.weigh, self.gather)
        self.walk = Walk(plan, self.visits, block, self.k_ref.shape[0], stages, lambda tiles: None)

    def run(self):
        pl.when(self.is_first)(self.begin_head)
        self.begin()
        self.walk.run()
        self.end()
        pl.when(self.is_last)(self.end_head)

    def begin_head(self):
        for ref in (self.d_kT, self.d_vT):
            ref[...] = jnp.zeros_like(ref)
        if self.kT is not None:
            turn(self.kT, self.k_ref, self.sizes.tile)

    def begin(self):
        for ref in (self.weights, self.d_scores, self.d_q):
            ref[...] = jnp.zeros_like(ref)
        columns = [(self.lse, self.lse_ref), (self.delta, self.delta_ref)]
        if self.segment_columns is not None and self.query_segments is not None:
            columns.append((self.segment_columns, self.query_segments.at[0]))
        for r in range(self.sizes.row_tiles):
            rows = self.sizes.rows(r)
            self.qT[:, rows] = self.q_ref[rows, :].T
            self.d_outT[:, rows] = self.d_out_ref[rows, :].T
            for column, row in columns:
                column[rows, :] = jnp.broadcast_to(row[:, rows], (LANES, self.sizes.tile)).T

    def end(self):
        for r in range(self.sizes.row_tiles):
            rows = self.sizes.rows(r)
            d_q = (self.d_q[rows, :] if self.kT is None else self.d_q[:, rows]) * self.plan.scale
            d_q = d_q.astype(self.d_q_ref.dtype)
            self.d_q_ref[rows, :] = d_q if self.kT is None else d_q.T

    def end_head(self):
        """What keys and values gained leaves in pieces, each on its way while the next one is turned."""
        self.leave(self.d_k_ref, self.d_kT, self.plan.scale, *self.leaving[:2])
        self.leave(self.d_v_ref, self.d_vT, 1.0, *self.leaving[2:])

    def leave(self, out_ref, gained, factor: float, pieces, semaphores):
        size = pieces.shape[1]
        count = gained.shape[1] // size

        def copy(i):
            there = out_ref.at[pl.program_id(0), pl.program_id(1), pl.ds(pl.multiple_of(i * size, size), size)]
            return pltpu.make_async_copy(pieces.at[i & 1], there, semaphores.at[i & 1])

        @pl.loop(0, count)
        def _(i):
            pl.when(i >= 2)(lambda: copy(i - 2).wait())
            piece = gained[:, pl.ds(pl.multiple_of(i * size, size), size)] * factor
            pieces[i & 1] = piece.astype(pieces.dtype).T
            copy(i).start()

        for i in range(max(count - 2, 0), count):
            copy(i).wait()

    # ---- the work of a tile

    def score(self, tile: Tile) -> Work:
        size = self.sizes.tile
        keys = pl.ds(tile.first, size)

        def piece(into, left, right):
            into[tile.slot] = product(left[self.sizes.rows(tile.queries), :], right[keys, :], self.plan, turned=True)

        return [
            functools.partial(piece, self.scores, self.q_ref, self.k_ref),
            functools.partial(piece, self.d_weights, self.d_out_ref, self.v_ref),
        ]

    def weigh(self, tile: Tile) -> Work:
        size = self.sizes.tile
        count = min(size, 32)

        def piece(c):
            weights, d_scores = [], []
            x, slopes = self.finished(self.scores[tile.slot, c : c + count, :])
            x = slabs(x)
            if tile.masked:
                x = self.masked(x, tile, c)
            d_weights = slabs(self.d_weights[tile.slot, c : c + count, :])
            for i in range(len(x)):
                begin = tile.queries * size + c + 8 * i
                lse, delta = (repeat_lanes(ref[begin : begin + 8, :], size) for ref in (self.lse, self.delta))
                weights.append(jnp.exp2(x[i] - lse))
                d_score = weights[-1] * (d_weights[i] - delta)
                d_scores.append(d_score if slopes is None else d_score * slopes[8 * i : 8 * i + 8])
            self.weights[tile.slot, c : c + count, :] = jnp.concatenate(weights).astype(self.weights.dtype)
            self.d_scores[tile.slot, c : c + count, :] = jnp.concatenate(d_scores).astype(self.d_scores.dtype)

        return [functools.partial(piece, c) for c in range(0, size, count)]

    def gather(self, tile: Tile) -> Work:
        rows, keys = self.sizes.rows(tile.queries), pl.ds(tile.first, self.sizes.tile)
        slot, plan = tile.slot, self.plan

        def values():
            self.d_vT[:, keys] += product(self.d_outT[:, rows], self.weights[slot], plan)

        def keys_():
            self.d_kT[:, keys] += product(self.qT[:, rows], self.d_scores[slot], plan)

        def queries():
            if self.kT is None:
                self.d_q[rows, :] += product(self.d_scores[slot], self.k_ref[keys, :], plan)
            else:
                self.d_q[:, rows] += product(self.kT[:, keys], self.d_scores[slot], plan, turned=True)

        return [values, keys_, queries]

    # ---- scores

    def finished(self, x):
        """In units of the logarithm to base 2, and the slopes of a cap."""
        plan = self.plan
        if plan.softcap is None:
            return x * (plan.scale * LOG2_E), None
        x = jnp.tanh(x * (plan.scale / plan.softcap))
        return x * (plan.softcap * LOG2_E), 1 - x * x

    def masked(self, x: list, tile: Tile, c: int) -> list:
        """Slabs of eight queries, from the `c`-th of the tile on: `-inf` where a key is not seen."""
        size, rule = self.sizes.tile, self.plan.rule
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (8, size), axis) for axis in (0, 1))
        real = None if rule.real_keys is None else column < rule.real_keys - tile.first
        query_segment = key_segment = None
        if self.key_segments is not None:
            key_segment = self.key_segments[0, :, pl.ds(tile.first, size)]
        out = []
        for i, slab in enumerate(x):
            at = tile.queries * size + c + 8 * i
            if self.segment_columns is not None:
                query_segment = repeat_lanes(self.segment_columns[at : at + 8, :], size)
            key = tile.first - self.position - at
            seen = visible(rule, row - column, key, query_segment, key_segment, real)
            out.append(slab if seen is None else jnp.where(seen, slab, -jnp.inf))
        return out


def is_turned(key_dim: int) -> bool:
    """Whether cotangents of queries are summed up as `[key_dim, queries]`."""
    return key_dim <= LANES


# ---- the call --------------------------------------------------------------------------------------------------------


def _body(plan: Plan, *refs):
    _Block(plan, refs).run()


def backward(plan: Plan, q, k, v, d_out, lse, delta, visits, offset, segments, out_dtype):
    """Cotangents of `q`, `k` and `v`, in `out_dtype`, as these lie.

    - `lse`: `[batch, query_heads, 1, time]`, to base 2; large where a query sees nothing.
    - `delta`: alike, sums of outputs and their cotangents, less the cotangents of log-sum-exps.
    - others: see `forward`.
    """
    batch, heads, time, key_dim = q.shape
    kv_heads, keys, value_dim = v.shape[1:]
    sizes, group = plan.sizes, heads // kv_heads
    scalars = [visits.reshape(-1), *([] if offset is None else [offset])]

    def of_query(b, h, g, i, *_):
        return b, h * group + g, i, 0

    def of_row(b, h, g, i, *_):
        return b, h * group + g, 0, i

    def of_key(b, h, g, i, *_):
        return b, h, 0, 0

    def queries(x):
        return pl.BlockSpec((1, 1, sizes.block, x.shape[3]), of_query)

    inputs = [q, k, v, d_out, lse, delta]
    specs = [queries(q), *(pl.BlockSpec((1, 1, keys, x.shape[3]), of_key) for x in (k, v)), queries(d_out)]
    specs += [pl.BlockSpec((1, 1, 1, sizes.block), of_row)] * 2
    if segments is not None:
        inputs += segments
        specs += [
            pl.BlockSpec((1, 1, sizes.block), lambda b, h, g, i, *_: (b, 0, i)),
            pl.BlockSpec((1, 1, keys), lambda b, h, g, i, *_: (b, 0, 0)),
        ]
    tile = (sizes.slots, sizes.tile, sizes.tile)
    column = (sizes.block, LANES)
    turned = is_turned(key_dim)
    piece = sizes.step
    scratch = [
        pltpu.VMEM((key_dim, sizes.block), q.dtype),
        pltpu.VMEM((value_dim, sizes.block), q.dtype),
        *[pltpu.VMEM(column, jnp.float32)] * 2,
        *[pltpu.VMEM(tile, jnp.float32)] * 2,
        *[pltpu.VMEM(tile, q.dtype)] * 2,
        pltpu.VMEM((key_dim, sizes.block) if turned else (sizes.block, key_dim), jnp.float32),
        pltpu.VMEM((key_dim, keys), jnp.float32),
        pltpu.VMEM((value_dim, keys), jnp.float32),
        *(x for dim in (key_dim, value_dim) for x in (pltpu.VMEM((2, piece, dim), out_dtype), pltpu.SemaphoreType.DMA((2,)))),
        *([pltpu.VMEM((key_dim, keys), k.dtype)] if turned else []),
        *([pltpu.VMEM(column, jnp.int32)] if segments is not None else []),
    ]
    where_it_lies = pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        functools.partial(_body, plan),
        out_shape=[like(x.shape, out_dtype, *inputs) for x in (q, k, v)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, kv_heads, group, time // sizes.block),
            in_specs=specs,
            out_specs=[queries(q), where_it_lies, where_it_lies],
            scratch_shapes=scratch,
        ),
        compiler_params=compiler_params(),
        interpret=pltpu.InterpretParams() if plan.interpret is True else plan.interpret,
        name="softmax_attention_backward",
    )(*scalars, *inputs)
