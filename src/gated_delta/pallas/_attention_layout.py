"""What both attention kernels share: sizes, which keys a block of queries visits, the order of work in a block.

The grid is (batch, key and value head, head of its group, block of queries). A grid step keeps all keys and values of
its head in vector memory and walks over those its queries may see, in steps of several tiles of scores: first steps
that every query sees whole, without a mask, then the others. Arrays are `[batch, heads, time, dim]`.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from gated_delta._heads import LANES
from gated_delta.attention._backend import is_visible

from ._layout import VMEM_LIMIT_BYTES

LOG2_E = float(np.log2(np.e))
Work = list[Callable[[], None]]
"""Small pieces of a stage for one tile, in order."""


class Rule(NamedTuple):
    """Which keys a query sees, as far as that is static."""

    causal: bool
    window: int | None
    has_segments: bool
    has_padding: bool  # behind the real keys, which no other rule hides


class Sizes(NamedTuple):
    """Queries of a grid step, keys of a loop step, rows and columns of a tile of scores."""

    block: int
    step: int
    tile: int

    @property
    def row_tiles(self) -> int:
        return self.block // self.tile

    @property
    def key_tiles(self) -> int:
        return self.step // self.tile

    def rows(self, r):
        """Of a tile in its block, or in its step."""
        if isinstance(r, int):
            return slice(r * self.tile, (r + 1) * self.tile)
        return pl.ds(pl.multiple_of(r * self.tile, self.tile), self.tile)

    @property
    def tiles(self) -> list[tuple[int, int]]:
        """Of a loop step: (tile of keys, tile of queries), in order."""
        return [(j, r) for j in range(self.key_tiles) for r in range(self.row_tiles)]

    @property
    def lead(self) -> int:
        """How many tiles the scores are ahead of the weights, and these of the products with values."""
        return 2 if len(self.tiles) % 4 == 0 else 0

    @property
    def slots(self) -> int:
        """Tiles of scores, or weights, that are kept."""
        return 4 if self.lead else 1


class Plan(NamedTuple):
    """Everything static about a call."""

    sizes: Sizes
    rule: Rule
    real_queries: int  # behind which queries are padding
    has_offset: bool
    diagonal: bool  # masks are needed on the diagonal only, which begins with the block
    has_whole_steps: bool
    has_masked_steps: bool
    scale: float
    softcap: float | None
    precision: str
    operand: str
    interpret: bool | pltpu.InterpretParams

    @property
    def varies(self) -> bool:
        """Whether rows of the batch visit different keys."""
        return self.has_offset or self.rule.has_segments


# ---- which keys a block visits ---------------------------------------------------------------------------------------


class Visits(NamedTuple):
    """Of one block of queries, in loop steps of keys: `[first, last)`, of which `[whole, masked)` need no mask."""

    first: Any
    whole: Any
    masked: Any
    last: Any

    @property
    def whole_steps(self):
        return self.masked - self.whole

    @property
    def steps(self):
        return self.last - self.first

    def step(self, i):
        """The place among the keys of the `i`-th step of the walk; before the first and behind the last it is near."""
        before = self.whole - self.first
        j = i - self.whole_steps
        masked = jnp.where(j < before, self.first + j, self.masked + j - before)
        return jnp.where(i < self.whole_steps, self.whole + i, masked)


def visits(
    sizes: Sizes, rule: Rule, diagonal: bool, blocks: int, steps: int, real_keys, offset, query_segments, key_segments
):
    """`[batch or 1, blocks, 4]`: `Visits` of every block. A numpy array where nothing is traced."""
    traced = (offset, query_segments, None if isinstance(real_keys, int) else real_keys)
    xp = np if all(x is None for x in traced) else jnp
    begin = sizes.block * xp.arange(blocks, dtype=np.int32)[None, :, None]
    if offset is not None:
        begin = begin + offset[:, None, None]
    end = begin + sizes.block - 1
    key = sizes.step * xp.arange(steps, dtype=np.int32)[None, None]
    key_end = key + sizes.step - 1
    some, whole = begin >= begin + 0 * key, begin >= begin + 0 * key  # true, of the full shape
    if rule.causal:
        some, whole = some & (key <= end), whole & (key_end <= begin)
    if rule.window is not None:
        some, whole = some & (begin - key_end < rule.window), whole & (end - key < rule.window)
        if not rule.causal:
            some, whole = some & (key - end < rule.window), whole & (key_end - begin < rule.window)
    if rule.has_padding:
        some, whole = some & (key < real_keys), whole & (key_end < real_keys)
    if query_segments is not None:
        least, most, pure = _spans(query_segments, blocks)
        key_least, key_most, key_pure = _spans(key_segments, steps)
        least, most, pure = (x[:, :, None] for x in (least, most, pure))
        key_least, key_most, key_pure = (x[:, None] for x in (key_least, key_most, key_pure))
        some = some & (least <= key_most) & (key_least <= most)
        whole = whole & pure & key_pure & (least == key_least) & (most == key_most) & (least == most)
    return _runs(xp, some, whole & some, diagonal)


def _runs(xp, some, whole, ends_whole: bool):
    """Of each block, the steps from the first that it sees some of to the last, and the first run it sees whole."""
    steps = some.shape[2]
    place = xp.arange(steps, dtype=np.int32)[None, None]
    first = xp.where(some, place, steps).min(axis=2)
    last = xp.maximum(xp.where(some, place + 1, 0).max(axis=2), first)
    begin = xp.where(whole, place, steps).min(axis=2)
    end = xp.where(~whole & (place >= begin[:, :, None]), place, steps).min(axis=2)
    has_whole = begin < steps
    begin, end = xp.where(has_whole, begin, first), xp.where(has_whole, end, first)
    return xp.stack([first, begin, end, end if ends_whole else last], axis=-1).astype(np.int32)


def _spans(segments, count: int):
    """Least and largest segment of each of `count` runs, and whether there is no padding in it."""
    runs = segments.reshape(segments.shape[0], count, -1)
    real = runs >= 0
    least = jnp.where(real, runs, np.iinfo(np.int32).max).min(axis=2)
    return least, runs.max(axis=2), real.all(axis=2)


def load_visits(ref, index) -> Visits:
    return Visits(*(ref[4 * index + i] for i in range(4)))


def visible(rule: Rule, query, key, query_segment, key_segment, real):
    """`is_visible`, where `real`."""
    seen = is_visible(query, key, query_segment, key_segment, causal=rule.causal, window=rule.window)
    return seen if real is None else real if seen is None else seen & real


# ---- the order of work -----------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """A tile of scores."""

    slot: int  # where what is computed of it is kept
    first: Any  # its first key
    row: int  # of its step that this key is
    queries: Any  # which tile of queries
    masked: bool
    begins: bool  # the first of its queries in a step that is seen whole, or on the diagonal
    ends: bool  # the last one in such a step
    is_alone: bool  # of a step that is masked


class Stages(NamedTuple):
    """The work of a tile. Each stage needs what the one before it left in the tile's slot."""

    score: Callable[[Tile], Work]
    weigh: Callable[[Tile], Work]
    gather: Callable[[Tile], Work]


class Walk:
    """One block's way over the keys it sees.

    Weights are made tile by tile; beside those of one tile stand the products of a tile `lead` before and the scores of
    one as many ahead, also over the ends of steps. Slots that were never used hold weights of zero.
    """

    def __init__(self, plan: Plan, visits: Visits, block, keys: int, stages: Stages, prepare_masks: Callable):
        self.plan, self.visits, self.block, self.keys = plan, visits, block, keys
        self.stages, self.prepare_masks = stages, prepare_masks

    def run(self):
        plan, whole, steps = self.plan, self.visits.whole_steps, self.visits.steps
        for tile in self.tiles(0)[: plan.sizes.lead]:
            one_after_another(self.stages.score(tile))
        if plan.has_whole_steps:
            pl.loop(0, whole)(functools.partial(self.step, masked=False))
        if plan.has_masked_steps:
            pl.loop(whole, steps)(functools.partial(self.step, masked=True))
        left = self.behind(steps, plan.has_masked_steps)
        if plan.diagonal:
            left = self.in_order(left, self.diagonal(), [])
        for tile in left:
            one_after_another(self.stages.gather(tile))

    def step(self, i, masked: bool):
        tiles = self.tiles(i, masked)
        if masked:
            self.prepare_masks([tile for tile in tiles if tile.queries == 0])
        self.in_order(self.behind(i, masked), tiles, self.tiles(i + 1)[: self.plan.sizes.lead])

    def in_order(self, before: list[Tile], tiles: list[Tile], ahead: list[Tile]) -> list[Tile]:
        """All of `tiles`; those whose products are left."""
        lead, stages = self.plan.sizes.lead, self.stages
        row = [*before, *tiles, *ahead]
        for t, tile in enumerate(tiles):
            if lead == 0:
                one_after_another(stages.score(tile), stages.weigh(tile), stages.gather(tile))
            else:
                weave(stages.gather(row[t]), *map(stages.score, row[t + 2 * lead :][:1]), stages.weigh(tile))
        return row[len(tiles) :][:lead]

    def behind(self, i, masked: bool) -> list[Tile]:
        """Of the step before, those whose products are left when the `i`-th begins."""
        tiles = self.tiles(i - 1, masked)
        return tiles[len(tiles) - self.plan.sizes.lead :]

    def tiles(self, i, masked: bool = False) -> list[Tile]:
        sizes, last = self.plan.sizes, self.plan.sizes.key_tiles - 1
        return [
            Tile(
                slot=t % sizes.slots,
                first=self.key(i, j),
                row=j * sizes.tile,
                queries=r,
                masked=masked,
                begins=j == 0 and not masked,
                ends=j == last and not masked,
                is_alone=masked,
            )
            for t, (j, r) in enumerate(sizes.tiles)
        ]

    def diagonal(self) -> list[Tile]:
        """The tiles of the keys that the block itself is."""
        sizes = self.plan.sizes
        pairs = [(j, r) for j in range(sizes.row_tiles) for r in range(j, sizes.row_tiles)]
        first = self.block * sizes.block
        return [
            Tile(
                slot=t % sizes.slots,
                first=pl.multiple_of(first + j * sizes.tile, sizes.tile),
                row=0,
                queries=r,
                masked=j == r,
                begins=j == 0,
                ends=False,
                is_alone=False,
            )
            for t, (j, r) in enumerate(pairs)
        ]

    def key(self, i, j: int = 0):
        """The first key of tile `j` of the `i`-th step."""
        sizes = self.plan.sizes
        step = jnp.clip(self.visits.step(i), 0, self.keys // sizes.step - 1)
        return pl.multiple_of(step * sizes.step + j * sizes.tile, sizes.tile)


def weave(*streams: Work):
    """Do all of it, the pieces of every stream spread evenly over the whole: what stands side by side in the program
    runs side by side."""
    places = [((i + 0.5) / len(stream), s, piece) for s, stream in enumerate(streams) for i, piece in enumerate(stream)]
    for *_, piece in sorted(places, key=lambda place: place[:2]):
        piece()


def one_after_another(*streams: Work):
    for stream in streams:
        for piece in stream:
            piece()


def product(a, b, plan: Plan, turned: bool = False):
    """`a @ b`, or `a @ b.T`, in float32."""
    return lax.dot_general(
        a,
        b,
        (((1,), (1 if turned else 0,)), ((), ())),
        precision=lax.Precision.HIGHEST if plan.operand == "float32" and plan.precision != "default" else None,
        preferred_element_type=jnp.float32,
    )


def slabs(x) -> list:
    """Its rows, eight at a time: whole registers."""
    return [x[i : i + 8] for i in range(0, x.shape[0], 8)]


def repeat_lanes(x, width: int):
    """`[rows, 128]`, equal over lanes, as `[rows, width]`."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def fold(operation, parts: Sequence):
    """A tree of `operation` over all parts."""
    parts = list(parts)
    while len(parts) > 1:
        odd = parts[-1:] if len(parts) % 2 else []
        parts = [operation(a, b) for a, b in zip(parts[::2], parts[1::2])] + odd
    return parts[0]


# Memory keeps bfloat16 arrays that are wider than a register so that a load brings eight rows of 256 lanes. That suits
# a stationary operand; a moving one is wanted as sixteen rows of 128, and is kept in pieces of 128 lanes.


def piece_specs(x, rows: int, index) -> list[pl.BlockSpec]:
    """Of `[batch, heads, time, dim]`, one for each 128 lanes: blocks of `rows` where `index` says."""

    def spec(lane):
        return pl.BlockSpec((1, 1, rows, min(x.shape[3], LANES)), lambda *at: (*index(*at), lane))

    return [spec(lane) for lane in range(-(-x.shape[3] // LANES))]


class Pieces:
    """References to the pieces of a block `[rows, dim]`."""

    def __init__(self, refs: Sequence, dim: int):
        self.refs, self.dim, self.length = [ref.at[0, 0] for ref in refs], dim, refs[0].shape[2]

    def load(self, rows):
        return jnp.concatenate([x[rows, : self.dim - i * LANES] for i, x in enumerate(self.refs)], axis=1)


class Turned:
    """A block `[dim, rows]` in `[rows / 128, dim, 128]`."""

    def __init__(self, ref):
        self.ref, self.width = ref, ref.shape[2]

    @staticmethod
    def scratch(dim: int, rows: int, tile: int, dtype):
        width = min(tile, LANES)
        return pltpu.VMEM((rows // width, dim, width), dtype)

    def load(self, rows):
        """`[dim, rows]` of a slice."""
        first = _shrunk(rows.start, self.width)
        count = (rows.stop - rows.start if isinstance(rows, slice) else rows.size) // self.width
        return jnp.concatenate([self.ref[first + i] for i in range(count)], axis=1)

    def store(self, rows, x, begin: int = 0):
        """`x.T` from row `begin` on, of `x` `[rows, dim]`."""
        first = _shrunk(rows.start, self.width)
        for i in range(x.shape[0] // self.width):
            self.ref[first + i, begin : begin + x.shape[1], :] = x[i * self.width : (i + 1) * self.width].T

    def fill(self, pieces: Pieces, chunk: int):
        """With all of `pieces`, in chunks of rows."""
        count = pieces.length // chunk
        together = next(n for n in (4, 2, 1) if count % n == 0)

        @pl.loop(0, count // together)
        def _(i):
            for j in range(together):
                rows = pl.ds(pl.multiple_of((i * together + j) * chunk, chunk), chunk)
                self.store(rows, pieces.load(rows))


def _shrunk(start, width: int):
    """`start / width`, which is whole."""
    return start // width if isinstance(start, int) else lax.div(start, jnp.int32(width))


# ---- the call --------------------------------------------------------------------------------------------------------


COMPILER_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT_BYTES
)


class Grid(NamedTuple):
    batch: int
    kv_heads: int
    group: int
    blocks: int

    def head(self, h, g):
        return h * self.group + g

    def inputs(self, plan: Plan, q, k, v, d_out=None, *, rows=(), segments=()) -> tuple[list, list[pl.BlockSpec]]:
        """The arrays, in pieces where they are wide, and their blocks."""
        block, keys = plan.sizes.block, k.shape[2]

        def of_query(b, h, g, i, *_):
            return b, self.head(h, g), i

        def of_key(b, h, g, i, *_):
            return b, h, 0

        wide = [(q, block, of_query), (k, keys, of_key), (v, keys, of_key)]
        wide += [] if d_out is None else [(d_out, block, of_query)]
        inputs, specs = [], []
        for x, count, index in wide:
            pieces = piece_specs(x, count, index)
            inputs, specs = [*inputs, *[x] * len(pieces)], [*specs, *pieces]
        inputs += [*rows, *segments]
        specs += [self.row(plan.sizes)] * len(rows)
        if segments:
            specs.append(pl.BlockSpec((1, 1, block), lambda b, h, g, i, *_: (b, 0, i)))
            specs.append(pl.BlockSpec((1, 1, keys), lambda b, h, g, i, *_: (b, 0, 0)))
        return inputs, specs

    def queries(self, sizes: Sizes, dim: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, 1, sizes.block, dim), lambda b, h, g, i, *_: (b, self.head(h, g), i, 0))

    def row(self, sizes: Sizes) -> pl.BlockSpec:
        """A number per query."""
        return pl.BlockSpec((1, 1, 1, sizes.block), lambda b, h, g, i, *_: (b, self.head(h, g), 0, i))


# ---- from the outer layout -------------------------------------------------------------------------------------------


def head_major(x, length: int, dim: int):
    """`[batch, time, heads, dim]` as `[batch, heads, length, dim]`, padded with zeros."""
    x = jnp.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0), (0, dim - x.shape[3])])
    return jnp.swapaxes(x, 1, 2)


def token_major(x, time: int, dim: int):
    """`head_major` undone."""
    return jnp.swapaxes(x[:, :, :time, :dim], 1, 2)


def held_bytes(scratch: Sequence) -> int:
    """Of vector memory, in whole registers."""
    total = 0
    for one in scratch:
        if one.memory_space == pltpu.VMEM:
            *lead, rows, lanes = one.shape
            size = jnp.dtype(one.dtype).itemsize
            total += math.prod(lead) * (-(-rows // 16) * 16) * (-(-lanes // LANES) * LANES) * size
    return total
