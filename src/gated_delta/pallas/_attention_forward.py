"""The forward attention kernel: the softmax of a block of queries over the keys it sees, tile by tile.

Scores stand as `[keys, queries]`: maxima and sums are taken over rows, a number per query is a row that needs no copies
over lanes, and the weights are the stationary operand of their product with the values, which fills a matrix unit of
256 x 256 at a width of 128 too.

**The anchor.** Weights are `2^(score - anchor)`. Any anchor gives the exact softmax as long as nothing overflows, so it
need not be the maximum. In steps that every query of the block sees whole it begins as the largest score of a query
with a few of the keys, and once in a step it is raised to the largest score of the tile before. So no weight waits for
a maximum, and most tiles have none. Where masks are needed it is raised to the maximum of every tile. At the end the
sums are looked at: the queries of which one exceeds `2^60` are done again with true maxima throughout. Nothing that a
query does not see has a say in its anchor: its result hangs on its own keys only, bit for bit.
"""

import functools
from typing import Any

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
    fold,
    held_bytes,
    load_visits,
    one_after_another,
    product,
    repeat_lanes,
    slabs,
    visible,
)
from ._layout import like

SCORE, WEIGH = None, 32
_LEAST = -1e30  # an anchor before there is one


class _Block:
    """The work of one grid step."""

    def __init__(self, plan: Plan, key_dim: int, value_dim: int, refs):
        self.plan, self.sizes = plan, plan.sizes
        refs = list(refs)
        visits_ref, numbers_ref = refs.pop(0), refs.pop(0)
        self.q, self.k, self.v = (
            Pieces([refs.pop(0) for _ in range(-(-dim // LANES))], dim) for dim in (key_dim, key_dim, value_dim)
        )
        has_segments = plan.rule.has_segments
        self.query_segments, self.key_segments = (refs.pop(0) if has_segments else None for _ in range(2))
        self.out_ref, self.lse_ref = refs.pop(0).at[0, 0], refs.pop(0).at[0, 0]
        self.segment_columns = refs.pop() if has_segments else None
        vT, self.qT, self.scores, self.weights, self.acc, self.anchor, self.most, self.total, self.fade = refs
        self.vT = Turned(vT)
        batch, block, blocks = pl.program_id(0), pl.program_id(3), pl.num_programs(3)
        self.visits = load_visits(visits_ref, (batch * blocks if plan.varies else 0) + block)
        self.block = block
        self.position = block * self.sizes.block + (numbers_ref[1 + batch] if plan.has_offset else 0)
        self.real_keys = numbers_ref[0]
        self.key_dim = key_dim
        stages = Stages(self.score, self.weigh, self.gather)
        self.walk = Walk(plan, self.visits, block, self.k.length, stages, self.prepare_masks)

    def run(self):
        self.begin()
        self.walk.run()
        fine = self.is_fine()
        self.end(fine)

        @pl.when(jnp.min(jnp.where(fine, 1.0, 0.0)) == 0)
        def _():
            self.exactly()
            self.end(self.is_fine(), kept=fine)

    # ---- before and after

    def begin(self):
        tile = self.sizes.tile
        pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0))(lambda: self.vT.fill(self.v, tile))
        self.reset()
        for r in range(self.sizes.row_tiles):
            rows = self.sizes.rows(r)
            q = self.q.load(rows)
            if self.is_scaled_late:
                self.qT[:, rows] = q.T
            else:
                scaled = q.astype(jnp.float32) * self.factor
                high = scaled.astype(q.dtype)
                self.qT[: self.key_dim, rows] = high.T
                if self.is_split:
                    self.qT[self.key_dim :, rows] = (scaled - high.astype(scaled.dtype)).astype(q.dtype).T
            few = slabs(self.raw_scores(self.walk.key(0), min(64, tile), rows))
            few = [self.finished(slab) for slab in few]
            if self.plan.diagonal:
                few = self.masked(few, self.walk.tiles(0)[r], 0)
            anchor = jnp.max(fold(jnp.maximum, few), axis=0, keepdims=True)
            if not self.plan.diagonal:
                anchor = jnp.where(self.visits.whole_steps > 0, anchor, _LEAST)
            self.anchor[:, rows] = self.most[:, rows] = jnp.broadcast_to(anchor, (8, tile))

    def reset(self):
        for ref in (self.weights, self.acc, self.total):
            ref[...] = jnp.zeros_like(ref)
        self.fade[...] = jnp.ones_like(self.fade)

    def is_fine(self):
        """`[1, block]`: no score of the query was far above its anchor, and no sum of values overflowed."""
        total = jnp.sum(self.total[...], axis=0, keepdims=True)
        overflow = jnp.sum(0 * fold(jnp.add, slabs(self.acc[...])), axis=0, keepdims=True)
        return (total <= 2.0**60) & (overflow == 0)

    def end(self, fine, kept=None):
        """Outputs and log-sum-exps, these NaN where a query is not fine; but not of those that are `kept`."""
        total = jnp.sum(self.total[...], axis=0, keepdims=True)
        has_any = total > 0
        total = jnp.where(has_any, total, 1.0)
        lse = jnp.where(has_any, (self.anchor[0:1] + jnp.log2(total)) * (1 / LOG2_E), -jnp.inf)
        lse = jnp.where(fine, lse, jnp.nan)
        self.lse_ref[...] = lse if kept is None else jnp.where(kept, self.lse_ref[...], lse)
        share = jnp.where(has_any, 1 / total, 0.0)
        for r in range(self.sizes.row_tiles):
            rows = self.sizes.rows(r)
            out = (self.acc[:, rows] * share[:, rows]).astype(self.out_ref.dtype).T
            if kept is not None:
                column = jnp.broadcast_to(jnp.where(kept[:, rows], 1.0, 0.0), self.acc[:, rows].shape).T
                out = jnp.where(column > 0, self.out_ref[rows, :], out)
            self.out_ref[rows, :] = out

    # ---- the work of a tile

    def score(self, tile: Tile) -> Work:
        count = min(self.sizes.tile, SCORE or (128 if self.key_dim <= 128 else 256))

        def piece(c):
            rows = self.sizes.rows(tile.queries)
            self.scores[tile.slot, c : c + count, :] = self.raw_scores(tile.first + c, count, rows)

        return [functools.partial(piece, c) for c in range(0, self.sizes.tile, count)]

    def weigh(self, tile: Tile) -> Work:
        size, rows, slot = self.sizes.tile, self.sizes.rows(tile.queries), tile.slot
        count = min(size, WEIGH)
        now = {}

        def load(c):
            x = [self.finished(slab) for slab in slabs(self.scores[slot, c : c + count, :])]
            return self.masked(x, tile, c) if tile.masked else x

        def look(c):
            x = load(c)
            self.scores[slot, c : c + count, :] = jnp.concatenate(x)
            now["most"] = fold(jnp.maximum, x if c == 0 else [*x, now["most"]])

        def begin():
            now["anchor"], now["total"] = self.anchor[:, rows], self.total[:, rows]
            if tile.begins or tile.is_alone:
                most = now["most"] if tile.is_alone else self.most[:, rows]
                raised = jnp.maximum(now["anchor"], jnp.max(most, axis=0, keepdims=True))
                fade = jnp.exp2(now["anchor"] - raised)
                self.anchor[:, rows], self.fade[slot] = raised, fade
                now["anchor"], now["total"] = raised, now["total"] * fade
            elif self.plan.has_masked_steps:
                self.fade[slot] = jnp.ones_like(self.fade[slot])

        def piece(c):
            x = slabs(self.scores[slot, c : c + count, :]) if tile.is_alone else load(c)
            weights = [jnp.exp2(slab - now["anchor"]) for slab in x]
            now["total"] = now["total"] + fold(jnp.add, weights)
            self.weights[slot, c : c + count, :] = jnp.concatenate(weights).astype(self.weights.dtype)
            if tile.ends:
                now["most"] = fold(jnp.maximum, x if c == 0 else [*x, now["most"]])

        def end():
            self.total[:, rows] = now["total"]
            if tile.ends:
                self.most[:, rows] = now["most"]

        pieces = range(0, size, count)
        looks = [functools.partial(look, c) for c in pieces] if tile.is_alone else []
        return [*looks, begin, *(functools.partial(piece, c) for c in pieces), end]

    def gather(self, tile: Tile) -> Work:
        rows, value_dim = self.sizes.rows(tile.queries), self.acc.shape[0]
        count = value_dim if value_dim <= 256 else 128

        def piece(c):
            values = self.vT.load(pl.ds(tile.first, self.sizes.tile))[c : c + count]
            old = self.acc[c : c + count, rows]
            if tile.begins or tile.is_alone:
                old = jnp.concatenate([slab * self.fade[tile.slot] for slab in slabs(old)])
            self.acc[c : c + count, rows] = old + product(values, self.weights[tile.slot], self.plan)

        return [functools.partial(piece, c) for c in range(0, value_dim, count)]

    def exactly(self):
        """All of it again, with the maximum of every tile."""
        sizes, plan = self.sizes, self.plan
        self.reset()
        self.anchor[...] = jnp.full_like(self.anchor, _LEAST)
        first, last = (x * sizes.key_tiles for x in (self.visits.first, self.visits.last))
        if plan.diagonal:
            first, last = 0, (self.block + 1) * sizes.row_tiles

        @pl.loop(first, last)
        def _(j):
            key = pl.multiple_of(j * sizes.tile, sizes.tile)

            @pl.loop(0, sizes.row_tiles)
            def _(r):
                tile = Tile(0, key, 0, r, masked=True, begins=False, ends=False, is_alone=True)
                self.prepare_masks([tile])
                one_after_another(self.score(tile), self.weigh(tile), self.gather(tile))

    # ---- scores

    @property
    def is_split(self) -> bool:
        return is_split(self.plan.operand, self.key_dim)

    @property
    def is_scaled_late(self) -> bool:
        return self.plan.operand == "bfloat16" and not self.is_split

    @property
    def factor(self) -> float:
        """Of scores: then, or behind the cap, they are in units of the logarithm to base 2."""
        plan = self.plan
        return plan.scale * LOG2_E if plan.softcap is None else plan.scale / plan.softcap

    def raw_scores(self, first, count: int, rows: Any):
        keys = self.k.load(pl.ds(first, count))
        if self.is_split:
            keys = jnp.concatenate([keys, keys], axis=1)
        return product(keys, self.qT[:, rows], self.plan)

    def finished(self, x):
        if self.is_scaled_late:
            x = x * self.factor
        return x if self.plan.softcap is None else jnp.tanh(x) * (self.plan.softcap * LOG2_E)

    def prepare_masks(self, tiles: list[Tile]):
        """The segments of the tiles' keys, down the rows."""
        if self.key_segments is None or self.segment_columns is None:
            return
        size = self.sizes.tile
        for tile in tiles:
            row = self.key_segments[0, :, pl.ds(tile.first, size)]
            self.segment_columns[tile.row : tile.row + size, :] = jnp.broadcast_to(row, (LANES, size)).T

    def masked(self, x: list, tile: Tile, c: int) -> list:
        """Slabs of eight keys, from the `c`-th of the tile on: `-inf` where they are not seen."""
        size, rows = self.sizes.tile, self.sizes.rows(tile.queries)
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (8, size), axis) for axis in (0, 1))
        query_segment = key_segment = None
        if self.query_segments is not None:
            query_segment = self.query_segments[0, :, rows]
        out = []
        for i, slab in enumerate(x):
            at = c + 8 * i
            if self.segment_columns is not None:
                begin = tile.row + at
                key_segment = repeat_lanes(self.segment_columns[begin : begin + 8, :], size)
            query = self.position + tile.queries * size - tile.first - at
            real = row < self.real_keys - tile.first - at if self.plan.rule.has_padding else None
            seen = visible(self.plan.rule, query, row - column, query_segment, key_segment, real)
            out.append(slab if seen is None else jnp.where(seen, slab, -jnp.inf))
        return out


def is_split(dtype, key_dim: int) -> bool:
    """Whether scaled queries are two bfloat16 numbers that sum up: where the matrix unit has room for both."""
    return jnp.dtype(dtype) == jnp.bfloat16 and key_dim == LANES


# ---- the call --------------------------------------------------------------------------------------------------------


def _body(plan: Plan, key_dim: int, value_dim: int, *refs):
    _Block(plan, key_dim, value_dim, refs).run()


def _scratch(sizes: Sizes, keys: int, key_dim: int, value_dim: int, dtype, has_segments: bool) -> list:
    parts = 2 if is_split(dtype, key_dim) else 1
    tile = (sizes.slots, sizes.tile, sizes.tile)
    return [
        Turned.scratch(value_dim, keys, sizes.tile, dtype),
        pltpu.VMEM((parts * key_dim, sizes.block), dtype),
        pltpu.VMEM(tile, jnp.float32),
        pltpu.VMEM(tile, dtype),
        pltpu.VMEM((value_dim, sizes.block), jnp.float32),
        *[pltpu.VMEM((8, sizes.block), jnp.float32)] * 3,
        pltpu.VMEM((sizes.slots, 8, sizes.tile), jnp.float32),
        *([pltpu.VMEM((sizes.step, LANES), jnp.int32)] if has_segments else []),
    ]


def forward_bytes(sizes: Sizes, keys: int, key_dim: int, value_dim: int, dtype, has_segments: bool) -> int:
    """Of vector memory, for a call with that many keys."""
    blocks = [pltpu.VMEM((rows, dim), dtype) for rows in (sizes.block, keys) for dim in (key_dim, value_dim)]
    blocks += [pltpu.VMEM((1, n), jnp.int32) for n in (sizes.block, keys)]
    return 2 * held_bytes(blocks) + held_bytes(_scratch(sizes, keys, key_dim, value_dim, dtype, has_segments))


def forward(plan: Plan, visits, numbers, segments, out_dtype):
    """A function of `q`, `k` and `v`, `[batch, heads, time, dim]` each, in whole blocks and steps: outputs, and
    log-sum-exps `[batch, query_heads, 1, time]`.

    - `visits`: `[batch or 1, blocks, 4]`, of `_attention_layout.visits`.
    - `numbers`: of real keys, and, if the plan has offsets, the offset of every row.
    - `segments`: of queries and of keys, `[batch, 1, time]` each, or nothing.
    """
    sizes = plan.sizes

    def call(q, k, v):
        batch, heads, time, key_dim = q.shape
        kv_heads, keys, value_dim = v.shape[1:]
        grid = Grid(batch, kv_heads, heads // kv_heads, time // sizes.block)
        inputs, specs = grid.inputs(plan, q, k, v, segments=segments)
        return pl.pallas_call(
            functools.partial(_body, plan, key_dim, value_dim),
            out_shape=(
                like((batch, heads, time, value_dim), out_dtype, *inputs),
                like((batch, heads, 1, time), jnp.float32, *inputs),
            ),
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=2,
                grid=grid,
                in_specs=specs,
                out_specs=[grid.queries(sizes, value_dim), grid.row(sizes)],
                scratch_shapes=_scratch(sizes, keys, key_dim, value_dim, v.dtype, plan.rule.has_segments),
            ),
            compiler_params=COMPILER_PARAMS,
            interpret=pltpu.InterpretParams() if plan.interpret is True else plan.interpret,
            name="softmax_attention_forward",
        )(visits.reshape(-1), numbers, *inputs)

    return call
