"""Sizes of a kernel's tiles: they change its speed, never its numbers."""

import dataclasses

import equinox as eqx

from gated_delta._types import CHUNK_SIZES


class TileConfig(eqx.Module):
    """What one grid step works on. `None` leaves a size to the backend.

    - `chunk_size`: tokens solved together: 16, 32, 64 or 128.
    - `owners`: states (key heads, or value heads where they own the gates) that advance side by side; of
        `gated_delta_step` value heads.
    - `chunks`: in a row in one grid step: what needs no state is done for all of them at once. Packed sequences take
        one. By default fewer where a gradient is taken.
    """

    chunk_size: int | None = eqx.field(static=True, default=None)
    owners: int | None = eqx.field(static=True, default=None)
    chunks: int | None = eqx.field(static=True, default=None)

    def __check_init__(self):
        if self.chunk_size is not None and self.chunk_size not in CHUNK_SIZES:
            raise ValueError(f"`TileConfig(chunk_size={self.chunk_size})` must be one of {CHUNK_SIZES}, or None.")
        if self.owners is not None and self.owners < 1:
            raise ValueError(f"`TileConfig(owners={self.owners})` must be at least 1, or None.")
        if self.chunks is not None and self.chunks < 1:
            raise ValueError(f"`TileConfig(chunks={self.chunks})` must be at least 1, or None.")


class Sizes(eqx.Module):
    """A `TileConfig` settled for one problem: static and hashable. `gradient_chunks` divides `chunks`."""

    chunk: int = eqx.field(static=True)
    owners: int = eqx.field(static=True)
    key_heads: int = eqx.field(static=True)
    chunks: int = eqx.field(static=True)
    gradient_chunks: int = eqx.field(static=True)

    @property
    def tokens(self) -> int:
        """Of one grid step."""
        return self.chunk * self.chunks

    @property
    def for_gradient(self) -> "Sizes":
        return dataclasses.replace(self, chunks=self.gradient_chunks)


def settle(
    config: TileConfig,
    time: int,
    key_heads: int,
    owners: int,
    key_dim: int,
    width: int,
    *,
    packed: bool,
    shares: bool,
    rounds: bool,
) -> Sizes:
    """Sizes that divide the problem: owners that hold whole groups, a chunk no longer than the padded sequence.

    A matrix unit is filled by independent heads, until their tiles no longer fit in the memory beside it. Where heads
    are few, chunks in a row do the same, as long as they do not pad the sequence by more than an eighth. `shares`: the
    owners of one key head share its products, so that twice as many need no more memory. `rounds`: operands are
    bfloat16; others take twice the memory.
    """
    chunk = config.chunk_size or 128
    while chunk > CHUNK_SIZES[0] and chunk >= 2 * time:
        chunk //= 2
    group = owners // key_heads
    most = _SIDE_BY_SIDE if rounds else _SIDE_BY_SIDE // 2
    doubles = shares and group > 1 and not packed  # where documents share chunks, their masks take that memory
    wanted = config.owners or max(min(2 * most if doubles else most, _STATES // (key_dim * width)), 1)
    fitting = [heads * group for heads in range(1, key_heads + 1) if key_heads % heads == 0 and heads * group <= wanted]
    chosen = max(fitting, default=group)
    count = -(-time // chunk)
    fill = min(most, _ROWS // (key_dim + width))
    in_a_row = 1 if packed else config.chunks or max(fill // chosen, 1)
    chunks = next(n for n in range(min(in_a_row, count), 0, -1) if n == config.chunks or -count % n <= count // 8)
    back = min(chunks, config.chunks or max(fill // 2 // chosen, 1))
    back = next(n for n in range(back, 0, -1) if chunks % n == 0)
    return Sizes(chunk, chosen, chosen // group, chunks, back)


_SIDE_BY_SIDE = 16  # owners, or chunks of them; half as many chunks where a backward kernel needs the memory
_STATES = 2**20  # numbers in the states of a block's owners
_ROWS = 16 * 768  # numbers in a row of keys and values of all that stands side by side
LARGEST_STATE = 2**19
"""Numbers in the state of one owner, which is not divided among grid steps: 2 MiB in float32, and more than once."""
