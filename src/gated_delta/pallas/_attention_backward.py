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
    COMPILER_PARAMS,
    LOG2_E,
    Grid,
    Pieces,
    Plan,
    Sizes,
    Stages,
    Tile,
    Turned,
    Walk,
    Work,
    held_bytes,
    load_visits,
    product,
    repeat_lanes,
    slabs,
    visible,
)
from ._layout import like


class _Block:
    """The work of one grid step."""

    def __init__(self, plan: Plan, key_dim: int, value_dim: int, refs):
        self.plan, self.sizes = plan, plan.sizes
        refs = list(refs)
        visits_ref, numbers_ref = refs.pop(0), refs.pop(0)
        self.q, self.k, self.v, self.d_out = (
            Pieces([refs.pop(0) for _ in range(-(-dim // LANES))], dim)
            for dim in (key_dim, key_dim, value_dim, value_dim)
        )
        self.lse_ref, self.delta_ref = (refs.pop(0).at[0, 0] for _ in range(2))
        has_segments = plan.rule.has_segments
        self.query_segments, self.key_segments = (refs.pop(0) if has_segments else None for _ in range(2))
        self.d_q_ref, self.d_k_ref, self.d_v_ref = refs.pop(0).at[0, 0], refs.pop(0), refs.pop(0)
        self.segment_columns = refs.pop() if has_segments else None
        self.kT = Turned(refs.pop()) if is_turned(key_dim) else None
        self.qT, self.d_outT = map(Turned, refs[:2])
        self.lse, self.delta, self.scores, self.d_weights, self.weights, self.d_scores = refs[2:8]
        self.d_q, self.d_kT, self.d_vT, *self.leaving = refs[8:]
        batch, block, blocks = pl.program_id(0), pl.program_id(3), pl.num_programs(3)
        self.visits = load_visits(visits_ref, (batch * blocks if plan.varies else 0) + block)
        self.position = block * self.sizes.block + (numbers_ref[1 + batch] if plan.has_offset else 0)
        self.real_keys = numbers_ref[0]
        self.is_first = (pl.program_id(2) == 0) & (block == 0)
        self.is_last = (pl.program_id(2) == pl.num_programs(2) - 1) & (block == blocks - 1)
        stages = Stages(self.score, self.weigh, self.gather)
        self.walk = Walk(plan, self.visits, block, self.k.length, stages, lambda tiles: None)

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
            self.kT.fill(self.k, self.sizes.tile)

    def begin(self):
        for ref in (self.weights, self.d_scores, self.d_q):
            ref[...] = jnp.zeros_like(ref)
        columns = [(self.lse, self.lse_ref), (self.delta, self.delta_ref)]
        if self.segment_columns is not None and self.query_segments is not None:
            columns.append((self.segment_columns, self.query_segments.at[0]))
        for r in range(self.sizes.row_tiles):
            rows = self.sizes.rows(r)
            self.qT.store(rows, self.q.load(rows))
            self.d_outT.store(rows, self.d_out.load(rows))
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
        rows, keys = self.sizes.rows(tile.queries), pl.ds(tile.first, self.sizes.tile)

        def piece(into, left, right):
            into[tile.slot] = product(left.load(rows), right.load(keys), self.plan, turned=True)

        return [
            functools.partial(piece, self.scores, self.q, self.k),
            functools.partial(piece, self.d_weights, self.d_out, self.v),
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
            for ref, slabs_ in ((self.weights, weights), (self.d_scores, d_scores)):
                ref[tile.slot, c : c + count, :] = jnp.concatenate(slabs_).astype(ref.dtype)

        return [functools.partial(piece, c) for c in range(0, size, count)]

    def gather(self, tile: Tile) -> Work:
        rows, keys = self.sizes.rows(tile.queries), pl.ds(tile.first, self.sizes.tile)
        slot, plan = tile.slot, self.plan

        def values():
            self.d_vT[:, keys] += product(self.d_outT.load(rows), self.weights[slot], plan)

        def keys_():
            self.d_kT[:, keys] += product(self.qT.load(rows), self.d_scores[slot], plan)

        def queries():
            if self.kT is None:
                self.d_q[rows, :] += product(self.d_scores[slot], self.k.load(keys), plan)
            else:
                self.d_q[:, rows] += product(self.kT.load(keys), self.d_scores[slot], plan, turned=True)

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
        real = column < self.real_keys - tile.first if rule.has_padding else None
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


def _body(plan: Plan, key_dim: int, value_dim: int, *refs):
    _Block(plan, key_dim, value_dim, refs).run()


def _scratch(sizes: Sizes, keys: int, key_dim: int, value_dim: int, dtype, has_segments: bool) -> list:
    tile, column = (sizes.slots, sizes.tile, sizes.tile), (sizes.block, LANES)
    turned = is_turned(key_dim)
    scratch = [
        *(Turned.scratch(dim, sizes.block, sizes.tile, dtype) for dim in (key_dim, value_dim)),
        *[pltpu.VMEM(column, jnp.float32)] * 2,
        *[pltpu.VMEM(tile, jnp.float32)] * 2,
        *[pltpu.VMEM(tile, dtype)] * 2,
        pltpu.VMEM((key_dim, sizes.block) if turned else (sizes.block, key_dim), jnp.float32),
        *(pltpu.VMEM((dim, keys), jnp.float32) for dim in (key_dim, value_dim)),
    ]
    for dim in (key_dim, value_dim):
        scratch += [pltpu.VMEM((2, sizes.step, dim), dtype), pltpu.SemaphoreType.DMA((2,))]
    scratch += [Turned.scratch(key_dim, keys, sizes.tile, dtype)] if turned else []
    return scratch + ([pltpu.VMEM(column, jnp.int32)] if has_segments else [])


def backward_bytes(sizes: Sizes, keys: int, key_dim: int, value_dim: int, dtype, has_segments: bool) -> int:
    """Of vector memory, for a call with that many keys."""
    blocks = [pltpu.VMEM((rows, dim), dtype) for rows in (sizes.block, keys) for dim in (key_dim, value_dim)]
    blocks += [pltpu.VMEM((sizes.block, key_dim), jnp.float32)]
    blocks += [pltpu.VMEM((1, n), jnp.int32) for n in (sizes.block, sizes.block, sizes.block, keys)]
    return 2 * held_bytes(blocks) + held_bytes(_scratch(sizes, keys, key_dim, value_dim, dtype, has_segments))


def backward(plan: Plan, visits, numbers, segments, d_q_dtype):
    """A function of `q`, `k`, `v` and `d_out` as they lie for `forward` and of rows `[batch, query_heads, 1, time]`:
    the cotangents of `q`, in `d_q_dtype`, `k` and `v`.

    The rows are log-sum-exps, to base 2 and large where a query sees nothing, and the sums of outputs and their
    cotangents, less the cotangents of log-sum-exps. For the others see `forward`.
    """
    sizes = plan.sizes

    def call(q, k, v, d_out, lse, delta):
        batch, heads, time, key_dim = q.shape
        kv_heads, keys, value_dim = v.shape[1:]
        grid = Grid(batch, kv_heads, heads // kv_heads, time // sizes.block)
        inputs, specs = grid.inputs(plan, q, k, v, d_out, rows=(lse, delta), segments=segments)
        where_it_lies = pl.BlockSpec(memory_space=pl.ANY)
        return pl.pallas_call(
            functools.partial(_body, plan, key_dim, value_dim),
            out_shape=[like(x.shape, dtype, *inputs) for x, dtype in ((q, d_q_dtype), (k, k.dtype), (v, v.dtype))],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=specs,
                out_specs=[grid.queries(sizes, key_dim), where_it_lies, where_it_lies],
                scratch_shapes=_scratch(sizes, keys, key_dim, value_dim, q.dtype, plan.rule.has_segments),
            ),
            compiler_params=COMPILER_PARAMS,
            interpret=pltpu.InterpretParams() if plan.interpret is True else plan.interpret,
            name="softmax_attention_backward",
        )(visits.reshape(-1), numbers, *inputs)

    return call
