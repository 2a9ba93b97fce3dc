"""Problems that are a seed and a few words: they print on one line, and the line rebuilds them."""

import contextlib
import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from gated_delta._gates import Gates
from gated_delta._types import DecayGranularity, EraseGranularity, Owner, WriteGranularity

KEY_FAMILIES = ("independent", "some_zero", "correlated", "near", "identical", "repeating", "flipped")
"""Unit keys of one head: drawn apart; the same with zero vectors among them; with cosine 0.9 between any two; with
cosine 0.999; all the same; three keys in turn; one key with random signs."""

DECAY_FAMILIES = (
    "zero",
    "tiny",
    "mild",
    "bounded",
    "strong",
    "huge",
    "vast",
    "full",
    "one_fast",
    "resets",
    "mixed",
)
"""Log decays: 0; -1e-6; in (-0.2, 0); in (-5, 0); -30; -1e4; -1e9; -inf; -60 in the first channel (or head) and -0.01
elsewhere; mild with a token of -inf now and then; every number drawn from all of these."""

STRENGTH_FAMILIES = ("uniform", "zero", "one", "max", "binary", "mixed")
"""Erase and write gates: uniform; 0; 1; the largest promised; 0 or the largest; every number drawn from these."""

Packing = Literal["ids", "slots", "offsets"]


class Readable:
    """Prints as the call that rebuilds it, without the fields that have their default."""

    def __repr__(self) -> str:
        fields = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
            if getattr(self, field.name) != field.default
        ]
        return f"{type(self).__name__}({', '.join(fields)})"

    def _repr_pretty_(self, printer, cycle):  # what hypothesis prints
        printer.text(repr(self))


_GATE_WORDS = {
    "decay": DecayGranularity,
    "erase": EraseGranularity,
    "write": WriteGranularity,
    "owner": Owner,
    "write_owner": Owner,
}


def _check_word(record: str, name: str, word: str, words: tuple[str, ...]):
    if word not in words:
        raise ValueError(f"`{record}({name}={word!r})` must be one of {', '.join(words)}.")


@dataclasses.dataclass(frozen=True, repr=False)
class RandomKeys(Readable):
    """Unit keys of one of the `KEY_FAMILIES`.

    `build(rng, batch, time, heads, key_dim)` makes them, float64.
    """

    family: str = "independent"

    def __post_init__(self):
        _check_word("RandomKeys", "family", self.family, KEY_FAMILIES)

    def build(self, rng: np.random.Generator, batch: int, time: int, heads: int, key_dim: int) -> np.ndarray:
        shape = (batch, time, heads, key_dim)
        keys = _unit(rng.standard_normal(shape))
        shared = _unit(rng.standard_normal((batch, 1, heads, key_dim)))
        one = (batch, time, heads, 1)
        match self.family:
            case "some_zero":
                return np.where(rng.uniform(size=one) < 0.3, 0, keys)
            case "correlated":
                return _unit(np.sqrt(0.9) * shared + np.sqrt(0.1) * keys)
            case "near":
                return _unit(np.sqrt(0.999) * shared + np.sqrt(0.001) * keys)
            case "identical":
                return np.broadcast_to(shared, shape)
            case "repeating":
                return keys[:, np.arange(time) % min(3, max(time, 1))]
            case "flipped":
                return shared * rng.choice([-1.0, 1.0], size=one)
        return keys


@dataclasses.dataclass(frozen=True, repr=False)
class RandomGates(Readable):
    """Gates of one granularity, owner and tie, with values of the named families.

    `owner` says whose heads decay and erase have, `write_owner` whose heads write has. With a finite `max_decay` there
    is one more family of log decays, `"limit"`: three quarters are 0.95 times that (a bound may be open), the others a
    thousandth of it, but 0.01 at most. `arrays(rng, ...)` makes float64 arrays, `build(rng, ...)` a `Gates`.
    """

    decay: DecayGranularity = "none"
    decay_tiles: int = 2
    erase: EraseGranularity = "none"
    write: WriteGranularity = "one"
    owner: Owner = "key"
    write_owner: Owner = "value"
    tied: bool = False
    erase_max: float = 1.0
    log_decay_min: float | None = None
    log_decays: str = "mild"
    strengths: str = "uniform"
    max_decay: float = float("inf")

    def __post_init__(self):
        for name, kind in _GATE_WORDS.items():
            _check_word("RandomGates", name, getattr(self, name), get_args(kind))
        words = DECAY_FAMILIES if self.max_decay == float("inf") else (*DECAY_FAMILIES, "limit")
        _check_word("RandomGates", "log_decays", self.log_decays, words)
        _check_word("RandomGates", "strengths", self.strengths, STRENGTH_FAMILIES)
        if self.tied and (self.erase != "head" or self.write != "one"):
            raise ValueError(
                f"`{self!r}` is tied, so it needs erase='head' and write='one': beta is one number per head and token."
            )

    def arrays(
        self,
        rng: np.random.Generator,
        *,
        batch: int,
        time: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
    ) -> dict[str, np.ndarray | None]:
        heads = {"key": key_heads, "value": value_heads}
        owners, writers = (batch, time, heads[self.owner]), (batch, time, heads[self.write_owner])
        decays = {"none": None, "head": 1, "tile": self.decay_tiles, "channel": key_dim}[self.decay]
        erases = {"none": None, "head": 1, "channel": key_dim}[self.erase]
        writes = {"one": None, "head": 1, "channel": value_dim}[self.write]
        log_decay = None if decays is None else _log_decays(rng, (*owners, decays), self.log_decays, self.max_decay)
        if log_decay is not None and self.log_decay_min is not None:
            log_decay = np.maximum(log_decay, self.log_decay_min)
        return {
            "log_decay": log_decay,
            "erase": None if erases is None else _strengths(rng, (*owners, erases), self.strengths, self.erase_max),
            "write": None if writes is None else _strengths(rng, (*writers, writes), self.strengths, 1.0),
        }

    def build(self, rng: np.random.Generator, dtype: Any = "float32", **sizes: int) -> Gates:
        with np.errstate(over="ignore"):  # -1e9 is -inf in float16
            arrays = self.arrays(rng, **sizes)
            return self.promise({name: x if x is None else x.astype(jnp.dtype(dtype)) for name, x in arrays.items()})

    def promise(self, arrays: dict[str, Any]) -> Gates:
        """A `Gates` of these arrays, with this record's tie and promises."""
        return Gates(**arrays, is_tied=self.tied, erase_max=self.erase_max, log_decay_min=self.log_decay_min)


@dataclasses.dataclass(frozen=True, repr=False)
class RandomProblem(Readable):
    """A call of `gated_delta`: sizes, words for what its arrays hold, and the seed they are drawn from.

    `arguments()` are the keyword arguments of `gated_delta`, as NumPy arrays; `cotangents()` are random ones for its
    two results. Queries and values are standard normal.

    - `documents`: of every row, the lengths of its packed documents in order (0 is an empty one); a negative number is
        a run of padding tokens. What is left of `time` is padding. `None`: one document per row.
    - `packing`: how `documents` are given: as `segment_ids` (`"ids"`), with `num_segments=slots` too (`"slots"`), or as
        `cu_seqlens` (`"offsets"`: batch 1, padding at the end only).
    - `state`: whether initial states are given.
    - `dtype`: of queries, keys and values; `value_dtype`, `gate_dtype` and `state_dtype` where others differ from it.
    """

    seed: int = 0
    batch: int = 1
    time: int = 1
    key_heads: int = 1
    group: int = 1
    key_dim: int = 2
    value_dim: int = 2
    keys: RandomKeys = RandomKeys()
    gates: RandomGates = RandomGates()
    state: bool = False
    documents: tuple[tuple[int, ...], ...] | None = None
    packing: Packing = "ids"
    slots: int | None = None
    dtype: str = "float32"
    value_dtype: str | None = None
    gate_dtype: str | None = None
    state_dtype: str | None = None
    scale: float | None = None
    inverse: str = "exact"

    def __post_init__(self):
        if self.documents is None:
            return
        if len(self.documents) != self.batch or any(sum(map(abs, row)) > self.time for row in self.documents):
            raise ValueError(
                f"`documents={self.documents}` must hold one tuple of lengths for each of {self.batch} rows, and each "
                f"must sum to at most time = {self.time}."
            )
        documents = max(sum(length >= 0 for length in row) for row in self.documents)
        if self.packing == "slots" and (self.slots is None or documents > self.slots):
            raise ValueError(f"`slots={self.slots}` must be at least the {documents} documents of {self.documents}.")
        if self.packing == "offsets" and (self.batch != 1 or min(self.documents[0], default=0) < 0):
            raise ValueError(f"Offsets need one row and no padding before or between documents: {self.documents}.")

    @property
    def value_heads(self) -> int:
        return self.key_heads * self.group

    @property
    def numbers(self) -> int:
        """How many numbers its queries, keys, values and states hold."""
        tokens = self.batch * self.time * (2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim)
        return tokens + self.state * math.prod(self.state_shape)

    @property
    def shapes(self) -> "RandomProblem":
        """The problem that stands for all of the same shapes, dtypes and promises: with default values."""
        documents = self.documents
        if documents is not None:
            documents = tuple((0,) * (len(row) if self.packing == "offsets" else 0) for row in documents)
        gates = dataclasses.replace(self.gates, log_decays="mild", strengths="uniform", max_decay=float("inf"))
        return dataclasses.replace(self, seed=0, keys=RandomKeys(), gates=gates, documents=documents)

    @property
    def state_shape(self) -> tuple[int, ...]:
        """Of initial and final states, as `gated_delta` has it."""
        states: tuple[int, ...] = (self.batch,)
        if self.documents is not None and self.packing == "slots":
            assert self.slots is not None
            states = (self.batch, self.slots)
        elif self.documents is not None and self.packing == "offsets":
            states = (len(self.documents[0]),)
        return (*states, self.value_heads, self.key_dim, self.value_dim)

    @property
    def segment_ids(self) -> np.ndarray:
        """`[batch, time]`: which document of its row each token belongs to, -1 for padding."""
        ids = np.zeros((self.batch, self.time), np.int32)
        if self.documents is None:
            return ids
        for row, lengths in enumerate(self.documents):
            position, document = 0, 0
            ids[row] = -1
            for length in lengths:
                if length >= 0:
                    ids[row, position : position + length] = document
                    document += 1
                position += abs(length)
        return ids

    def arguments(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        sizes = dict(
            batch=self.batch,
            time=self.time,
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
        )
        dtype = jnp.dtype(self.dtype)
        values = (self.batch, self.time, self.value_heads, self.value_dim)
        arguments: dict[str, Any] = {
            "q": rng.standard_normal((self.batch, self.time, self.key_heads, self.key_dim)).astype(dtype),
            "k": self.keys.build(rng, self.batch, self.time, self.key_heads, self.key_dim).astype(dtype),
            "v": rng.standard_normal(values).astype(jnp.dtype(self.value_dtype or dtype)),
        }
        gate_dtype = jnp.dtype(self.gate_dtype or dtype)
        with enough_bits(gate_dtype):
            arguments["gates"] = self.gates.build(rng, gate_dtype, **sizes)
        if self.state:
            state = rng.standard_normal(self.state_shape)
            arguments["initial_state"] = state.astype(jnp.dtype(self.state_dtype or dtype))
        if self.documents is not None and self.packing == "offsets":
            arguments["cu_seqlens"] = np.cumsum((0, *self.documents[0])).astype(np.int32)
        elif self.documents is not None:
            arguments["segment_ids"] = self.segment_ids
            if self.packing == "slots":
                arguments["num_segments"] = self.slots
        if self.scale is not None:
            arguments["scale"] = self.scale
        if self.inverse != "exact":
            arguments["inverse"] = self.inverse
        return arguments

    def cotangents(self, out_dtype: Any, state_dtype: Any) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self.seed, 1))
        out = rng.standard_normal((self.batch, self.time, self.value_heads, self.value_dim))
        return out.astype(jnp.dtype(out_dtype)), rng.standard_normal(self.state_shape).astype(jnp.dtype(state_dtype))


def enough_bits(*dtypes: Any):
    """JAX's 64-bit mode if any of the dtypes is float64."""
    return jax.enable_x64(True) if "float64" in map(str, dtypes) else contextlib.nullcontext()


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def _log_decays(rng: np.random.Generator, shape: tuple[int, ...], family: str, limit: float) -> np.ndarray:
    if family == "limit":
        return -np.where(rng.uniform(size=shape) < 0.75, 0.95 * limit, min(1e-3 * limit, 0.01))
    constants = {"zero": 0.0, "tiny": -1e-6, "strong": -30.0, "huge": -1e4, "vast": -1e9, "full": -np.inf}
    mild = rng.uniform(-0.2, 0, shape)
    if family in constants:
        return np.full(shape, constants[family])
    if family == "bounded":
        return rng.uniform(-5, 0, shape)
    if family == "one_fast":
        out = np.full(shape, -0.01)
        out[..., 0, 0] = -60
        return out
    if family == "resets":
        return np.where(rng.uniform(size=(*shape[:2], 1, 1)) < 0.2, -np.inf, mild)
    if family == "mixed":
        choices = np.stack([mild, 20 * mild, *(np.full(shape, x) for x in constants.values())])
        return np.take_along_axis(choices, rng.integers(len(choices), size=(1, *shape)), axis=0)[0]
    return mild


def _strengths(rng: np.random.Generator, shape: tuple[int, ...], family: str, largest: float) -> np.ndarray:
    uniform = rng.uniform(0, largest, shape)
    match family:
        case "zero":
            return np.zeros(shape)
        case "one":
            return np.ones(shape)
        case "max":
            return np.full(shape, largest)
        case "binary":
            return rng.choice([0.0, largest], size=shape)
        case "mixed":
            return np.where(rng.uniform(size=shape) < 0.5, rng.choice([0.0, 1.0, largest], size=shape), uniform)
    return uniform
