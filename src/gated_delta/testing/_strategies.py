"""What to draw: problems of few shapes that hold what breaks kernels, and shrink to one token and one head."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from gated_delta._types import DecayGranularity, EraseGranularity, Owner, WriteGranularity
from gated_delta._variant import Variant

from ._random import (
    DECAY_FAMILIES,
    KEY_FAMILIES,
    STRENGTH_FAMILIES,
    RandomGates,
    RandomKeys,
    RandomProblem,
)

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError(
        "`gated_delta.testing` needs hypothesis, which only tests need: pip install 'gated-delta[test]'."
    ) from error

_GDN = RandomGates(decay="head", erase="head", owner="value", tied=True)
_KDA = RandomGates(decay="channel", erase="head", owner="value", tied=True)
_GDN2 = RandomGates(decay="channel", erase="channel", write="channel", owner="key")
_SLA = RandomGates(decay="tile", decay_tiles=4, erase="head", owner="key", tied=True)


def _with(record, **changes):
    return dataclasses.replace(record, **changes)


_GROUPED = RandomProblem(key_heads=2, group=3, key_dim=8, value_dim=5, state=True)

LAYOUTS: tuple[RandomProblem, ...] = (
    RandomProblem(),
    RandomProblem(batch=2, time=2, key_dim=4, value_dim=3, gates=_GDN, state=True),
    RandomProblem(time=17, group=2, key_dim=4, value_dim=6, gates=_with(_GDN, erase_max=2.0), state=True),
    RandomProblem(batch=2, time=33, key_heads=2, key_dim=8, value_dim=4, gates=_KDA),
    RandomProblem(time=65, key_heads=2, key_dim=4, value_dim=6, gates=_GDN2, state=True),
    _with(_GROUPED, time=63, gates=_SLA),
    RandomProblem(batch=3, time=16, key_dim=4, value_dim=4, state=True),
    RandomProblem(time=31, key_dim=6, value_dim=3, gates=RandomGates(decay="channel")),
    RandomProblem(time=64, key_dim=5, value_dim=7, gates=RandomGates(erase="head", tied=True, erase_max=2.0)),
    RandomProblem(time=15, group=3, key_dim=4, value_dim=2, gates=RandomGates("head", write="head", owner="value")),
    _with(_GROUPED, time=17, gates=RandomGates("tile", 2, "channel", "head", "value", erase_max=2.0)),
    _with(_GROUPED, time=40, batch=2, gates=_with(_KDA, owner="key")),
    RandomProblem(time=130, key_dim=4, value_dim=4, gates=_with(_KDA, log_decay_min=-5.0), state=True),
    _with(_GROUPED, gates=_with(_GDN2, write="head", write_owner="key", owner="value")),
    _with(_GROUPED, time=17, gates=_with(_GDN, owner="key")),
)
"""Sizes, granularities, owners, ties, promises and states that problems are drawn from: few, as each must compile."""

PACKED_LAYOUTS: tuple[RandomProblem, ...] = (
    RandomProblem(time=8, gates=_GDN, documents=((),)),
    _with(_GROUPED, time=70, batch=2, gates=_with(_KDA, owner="key"), documents=((), ())),
    RandomProblem(batch=2, time=70, key_dim=4, value_dim=3, gates=_GDN2, documents=((), ()), packing="slots", slots=5),
    _with(_GROUPED, time=70, batch=2, gates=_with(_GDN, erase_max=2.0), documents=((), ()), packing="slots", slots=5),
    _with(_GROUPED, time=70, key_heads=1, gates=_SLA, documents=((0,) * 5,), packing="offsets"),
    RandomProblem(time=40, key_dim=6, value_dim=3, gates=RandomGates("tile", write="head"), documents=((),)),
)
"""The same for packed documents, whose lengths are drawn: `slots`, and the number of offsets, are part of a shape."""

FIRST_LAYOUTS: tuple[RandomProblem, ...] = (
    _with(_GROUPED, time=33),
    RandomProblem(time=20, key_heads=2, group=2, key_dim=128, value_dim=64, state=True),
    RandomProblem(time=300, key_heads=2, group=2, key_dim=8, value_dim=4, state=True),
    RandomProblem(time=20, key_heads=2, group=2, key_dim=64, value_dim=128, state=True),
)
"""Sizes that are asked first, whatever is drawn, with the gates that an implementation takes: heads in groups; the
dimensions of real heads; more tokens than any chunk, and no multiple of one."""


def keys(*, families: Sequence[str] = KEY_FAMILIES) -> st.SearchStrategy[RandomKeys]:
    """Keys of one family; shrinks to the first."""
    return st.builds(RandomKeys, family=st.sampled_from(families))


def gates(
    *,
    decay: Sequence[DecayGranularity] = ("none", "head", "tile", "channel"),
    erase: Sequence[EraseGranularity] = ("none", "head", "channel"),
    write: Sequence[WriteGranularity] = ("one", "head", "channel"),
    owner: Sequence[Owner] = ("key", "value"),
    write_owner: Sequence[Owner] = ("value", "key"),
    tied: Sequence[bool] = (False, True),
    erase_max: Sequence[float] = (1.0, 2.0),
    log_decays: Sequence[str] = DECAY_FAMILIES,
    strengths: Sequence[str] = STRENGTH_FAMILIES,
) -> st.SearchStrategy[RandomGates]:
    """Gates of any of the granularities, owners, ties, promises and families given; shrinks to the first of each.

    A tie is drawn only where erase is per head and write may be one.
    """

    @st.composite
    def draw_gates(draw):
        erasing = draw(st.sampled_from(erase))
        tie = erasing == "head" and "one" in write and draw(st.sampled_from(tied))
        return RandomGates(
            decay=draw(st.sampled_from(decay)),
            erase=erasing,
            write="one" if tie else draw(st.sampled_from(write)),
            tied=tie,
            owner=draw(st.sampled_from(owner)),
            write_owner=draw(st.sampled_from(write_owner)),
            erase_max=draw(st.sampled_from(erase_max)),
            log_decays=draw(st.sampled_from(log_decays)),
            strengths=draw(st.sampled_from(strengths)),
        )

    return draw_gates()


def variants(
    *,
    decay: Sequence[DecayGranularity] = ("none", "head", "tile", "channel"),
    erase: Sequence[EraseGranularity] = ("none", "head", "channel"),
    write: Sequence[WriteGranularity] = ("one", "head", "channel"),
    owner: Sequence[Owner] = ("key", "value"),
    tied: Sequence[bool] = (False, True),
    erase_max: Sequence[float] = (1.0, 2.0),
) -> st.SearchStrategy[Variant]:
    """A record of any of the granularities, owners, ties and promises given; shrinks to the first of each."""

    @st.composite
    def draw_variant(draw):
        made = draw(gates(decay=decay, erase=erase, write=write, owner=owner, tied=tied, erase_max=erase_max))
        return Variant(
            decay=made.decay,
            decay_tiles=made.decay_tiles if made.decay == "tile" else None,
            decay_owner=made.owner,
            erase=made.erase,
            write="head" if made.tied else made.write,
            tied=made.tied,
            erase_max=made.erase_max,
        )

    return draw_variant()


def lengths(
    *, time: int, documents: int | None = None, padding: bool = True, chunk_sizes: Sequence[int] = (16, 64)
) -> st.SearchStrategy[tuple[int, ...]]:
    """Lengths of documents packed into one row of `time` tokens; a negative number is that many tokens of padding.

    Empty documents, documents of one token, and of a chunk and one more or less, are common. Shrinks to no document.

    - `documents`: how many there are, and then padding is at the end only; `None`: any number up to 5.
    - `padding`: whether there may be padding other than at the end.
    """
    edges = sorted({0, 1, 2, *(size + more for size in chunk_sizes for more in (-1, 0, 1) if size + more <= time)})
    length = st.one_of(st.sampled_from(edges), st.integers(0, time))
    if documents is not None:
        drawn = st.lists(length, min_size=documents, max_size=documents)
    elif padding:
        drawn = st.lists(st.one_of(length, st.integers(-3, -1)), max_size=5)
    else:
        drawn = st.lists(length, max_size=5)

    def fit(row: list[int]) -> tuple[int, ...]:
        """As many of the tokens as there is room for, document by document."""
        out, room = [], time
        for n in row:
            used = min(abs(n), room)
            room -= used
            if n >= 0 or used:
                out.append(used if n >= 0 else -used)
        return tuple(out)

    return drawn.map(fit)


def segment_ids(*, batch: int = 1, time: int, padding: bool = True) -> st.SearchStrategy[np.ndarray]:
    """`[batch, time]` int32: which of its row's documents each token belongs to, in rising order, -1 for padding."""
    rows = st.tuples(*(lengths(time=time, padding=padding) for _ in range(batch)))
    return rows.map(lambda rows: RandomProblem(batch=batch, time=time, documents=rows).segment_ids)


def problems(
    *,
    packed: bool | None = None,
    max_time: int | None = None,
    layouts: Sequence[RandomProblem] | None = None,
    dtypes: Sequence[str] = ("float32",),
    keys: Sequence[str] = KEY_FAMILIES,
    log_decays: Sequence[str] = DECAY_FAMILIES,
    strengths: Sequence[str] = STRENGTH_FAMILIES,
) -> st.SearchStrategy[RandomProblem]:
    """A problem of one of the `layouts`, whose seed, documents, keys and gate values are drawn.

    - `packed`: only problems with several documents in a row, or only others; `None`: both.
    - `max_time`: the most tokens of a row.
    - `layouts`: `LAYOUTS` and `PACKED_LAYOUTS` if `None`.
    - `dtypes`: of queries, keys, values, gates and states alike.
    - `keys`, `log_decays`, `strengths`: families of values.

    Shrinks to the layout with the fewest numbers, in `LAYOUTS` one token and one head without gates, and to seed 0.
    """
    every = [*LAYOUTS, *PACKED_LAYOUTS] if layouts is None else layouts
    pool = [layout for layout in every if packed is None or packed == (layout.documents is not None)]
    pool = [layout for layout in pool if max_time is None or layout.time <= max_time]
    pool.sort(key=lambda layout: layout.numbers)

    @st.composite
    def draw_problem(draw):
        layout = draw(st.sampled_from(pool))
        values = {"log_decays": draw(st.sampled_from(log_decays)), "strengths": draw(st.sampled_from(strengths))}
        changes = {
            "seed": draw(st.integers(0, 999)),
            "dtype": draw(st.sampled_from(dtypes)),
            "keys": RandomKeys(draw(st.sampled_from(keys))),
            "gates": _with(layout.gates, **values),
        }
        if layout.documents is not None:
            changes["documents"] = draw(_documents(layout))
        return _with(layout, **changes)

    return draw_problem()


def _documents(layout: RandomProblem) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    assert layout.documents is not None
    if layout.packing == "offsets":
        return st.tuples(lengths(time=layout.time, documents=len(layout.documents[0])))
    return st.tuples(*(lengths(time=layout.time) for _ in range(layout.batch)))
