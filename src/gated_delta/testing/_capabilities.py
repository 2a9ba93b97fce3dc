"""What an implementation offers, as a record: it limits what is asked, and what it leaves out is reported."""

import dataclasses
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from gated_delta import variants as _variants
from gated_delta._types import DecayGranularity, EraseGranularity, Owner, WriteGranularity
from gated_delta._variant import Variant

from ._random import DECAY_FAMILIES, Packing, RandomGates, RandomProblem, Readable
from ._strategies import FIRST_LAYOUTS, LAYOUTS, PACKED_LAYOUTS

_GIVEN = (
    *("q", "k", "v", "log_decay", "erase", "write"),
    *("initial_state", "segment_ids", "num_segments", "cu_seqlens", "scale"),
)
_OF_OTHERS = ("g", "gate", "a_log", "query")  # which say that the signature is another one, with a default or without
_SMALLEST = {"zero": 0, "tiny": 1e-6, "mild": 0.2, "bounded": 5, "strong": 30, "one_fast": 60, "huge": 1e4, "vast": 1e9}
_SIZES = (1, 2, 4, 5, 11, 12)  # of `LAYOUTS`, lent to an implementation whose gates few layouts have


@dataclasses.dataclass(frozen=True, repr=False)
class Capabilities(Readable):
    """What an implementation takes and returns. The default is everything that `gated_delta` does.

    - `decay`, `erase`, `write`, `owner`, `write_owner`, `tied`: the granularities, owners and ties of gates it takes,
        in the words of `RandomGates`.
    - `dtypes`: of queries, keys and values; the first is what most laws use.
    - `key_dims`, `value_dims`: the only sizes it takes, or `None` for any. `time_multiple`: what time must divide by.
    - `grouped`: more value heads than key heads.
    - `packing`: the ways to give packed documents: `"ids"`, `"slots"`, `"offsets"`. `padding`: negative ids.
    - `state`, `final_state`: whether it takes initial states and returns final ones.
    - `scale`: whether it takes a scale; without, queries are multiplied by `key_dim ** -0.5`.
    - `gradients`: whether it has them: for every array it is given.
    - `max_decay`: the largest `-log_decay` of one token, in nats; infinite for a full forget.
    - `zero_decay`: whether a log decay may be exactly 0.
    - `erase_max`: 1, or 2 for a doubled beta.
    - `contains`: whether a NaN or an overflow stays within its own document.
    - `refuses`: whether input that fits no definition raises.
    """

    decay: tuple[DecayGranularity, ...] = ("none", "head", "tile", "channel")
    erase: tuple[EraseGranularity, ...] = ("none", "head", "channel")
    write: tuple[WriteGranularity, ...] = ("one", "head", "channel")
    owner: tuple[Owner, ...] = ("key", "value")
    write_owner: tuple[Owner, ...] = ("value", "key")
    tied: tuple[bool, ...] = (False, True)
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16", "float64")
    key_dims: tuple[int, ...] | None = None
    value_dims: tuple[int, ...] | None = None
    time_multiple: int = 1
    grouped: bool = True
    packing: tuple[Packing, ...] = ("ids", "slots", "offsets")
    padding: bool = True
    state: bool = True
    final_state: bool = True
    scale: bool = True
    gradients: bool = True
    max_decay: float = float("inf")
    zero_decay: bool = True
    erase_max: float = 2.0
    contains: bool = True
    refuses: bool = True

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "max_decay" and not value > 0:
                raise ValueError(f"`Capabilities(max_decay={value!r})` must be positive: it is the largest -log_decay.")
            if isinstance(field.default, tuple):
                if isinstance(value, str) or not isinstance(value, (tuple, list)):
                    raise TypeError(
                        f"`Capabilities({field.name}={value!r})` must be a tuple of some of {field.default}."
                    )
                unknown = [word for word in value if word not in field.default]
                if unknown or (not value and field.name != "packing"):
                    known = ", ".join(map(str, field.default))
                    raise ValueError(f"`Capabilities({field.name}={tuple(value)})` must be some of {known}.")
                object.__setattr__(self, field.name, tuple(value))

    @classmethod
    def of(cls, *variants: Variant | str, **others: Any) -> "Capabilities":
        """Only the gates of these variants; `others` are further fields.

        A variant is a record or the name of one, `"kda"`. Owners are those of the variants: a key-owned gate and a
        value-owned one have one shape without groups. A kernel that takes both says `owner=("key", "value")`.
        """
        if not variants:
            raise ValueError("`Capabilities.of` needs at least one `Variant`, such as `gated_delta.variants.kda`.")
        gates = [gates_of(named_variant(variant)) for variant in variants]
        words = ("decay", "erase", "write", "owner", "tied")
        given = {name: tuple(dict.fromkeys(getattr(gate, name) for gate in gates)) for name in words}
        return cls(**{**given, "erase_max": max(gate.erase_max for gate in gates), **others})

    @classmethod
    def from_signature(cls, function: Callable, **others: Any) -> "Capabilities":
        """What the parameters of a plain function say: see `plain`.

        **Raises:** `TypeError` if it needs a parameter that no problem has.
        """
        parameters, names = inspect.signature(function).parameters, _parameters(function)
        ways = {"ids": {"segment_ids"}, "slots": {"segment_ids", "num_segments"}, "offsets": {"cu_seqlens"}}

        def words(name, absent, *fine):
            """Without the word for no gate where the function cannot do without it."""
            is_needed = name in parameters and parameters[name].default is inspect.Parameter.empty
            return fine if is_needed else (absent, *fine) if name in names else (absent,)

        erase = words("erase", "none", "head", "channel")
        tied: tuple[bool, ...] = (False,)
        if "beta" in names:
            tied = (True,) if words("beta", "none", "head") == ("head",) else (False, True)
            erase = tuple(dict.fromkeys((*(erase if False in tied else ()), "head")))
        said: dict[str, Any] = {
            "decay": words("log_decay", "none", "head", "tile", "channel"),
            "erase": erase,
            "write": words("write", "one", "head", "channel"),
            "tied": tied,
            "packing": tuple(way for way, needed in ways.items() if needed <= names),
            "state": "initial_state" in names,
            "scale": "scale" in names,
        }
        return cls(**{**said, **others})

    def within(self, function: Callable) -> "Capabilities":
        """What of this the parameters of a plain function can be given.

        **Raises:** `ValueError` if no gates are left.
        """
        said = Capabilities.from_signature(function)
        is_tied_by_two = {"erase", "write"} <= _parameters(function)  # a tied gate is given as both
        kept: dict[str, Any] = {
            "packing": tuple(way for way in self.packing if way in said.packing),
            "state": self.state and said.state,
            "scale": self.scale and said.scale,
        }
        for name in ("decay", "erase", "write", "tied"):
            offered = (*getattr(said, name), *((True,) if name == "tied" and is_tied_by_two else ()))
            kept[name] = tuple(word for word in getattr(self, name) if word in offered)
        if kept["tied"] == (True,):
            kept["write"] = self.write
        missing = next((name for name in ("decay", "erase", "write", "tied") if not kept[name]), None)
        if missing is not None:
            raise ValueError(
                f"The capabilities offer {missing}={getattr(self, missing)}, but a function of "
                f"`{', '.join(inspect.signature(function).parameters)}` takes {missing}={getattr(said, missing)}: "
                "no gates are left."
            )
        return dataclasses.replace(self, **kept)

    # ---- what may be asked

    def takes(self, gates: RandomGates) -> bool:
        """Whether gates of this granularity, owner and tie may be asked for."""
        words = ("decay", "erase", "tied") + (() if gates.tied else ("write",))
        if not all(getattr(gates, name) in getattr(self, name) for name in words):
            return False
        return all(getattr(gates, name) in getattr(self, name) for name, owned in _owned(gates).items() if owned)

    def why_not(self, problem: RandomProblem) -> str | None:
        """Why this problem is not asked for, or `None`."""
        checks = {
            f"gates of {problem.gates!r}": self.takes(problem.gates),
            f"dtype {problem.dtype}": problem.dtype in self.dtypes,
            f"key_dim {problem.key_dim}": self.key_dims is None or problem.key_dim in self.key_dims,
            f"value_dim {problem.value_dim}": self.value_dims is None or problem.value_dim in self.value_dims,
            f"time {problem.time}": problem.time % self.time_multiple == 0,
            "grouped heads": problem.group == 1 or self.grouped,
            "an initial state": not problem.state or self.state,
            "a scale": problem.scale is None or self.scale,
            f"packing by {problem.packing}": problem.documents is None or problem.packing in self.packing,
            f"erase up to {problem.gates.erase_max:g}": problem.gates.erase_max <= self.erase_max,
            f"log decays that are {problem.gates.log_decays}": self._reaches(problem.gates.log_decays)
            or problem.gates.max_decay <= self.max_decay < np.inf,
        }
        return next((f"{what} is not offered" for what, offered in checks.items() if not offered), None)

    def gates(self) -> tuple[RandomGates, ...]:
        """One of every kind of gates it takes, those of the named members first, and then theirs of other owners."""
        found = [gates for gates in MEMBERS.values() if self.takes(gates)]
        if not found:
            words = itertools.product(self.decay, self.erase, self.write, self.owner, self.tied)
            for decay, erase, write, owner, tied in words:
                if tied and erase != "head":
                    continue
                gates = RandomGates(decay, 2, erase, "one" if tied else write, owner, self.write_owner[0], tied)
                found += [gates] if self.takes(gates) else []
        swapped = {"key": "value", "value": "key"}
        for name in ("owner", "write_owner"):
            others = [dataclasses.replace(gates, **{name: swapped[getattr(gates, name)]}) for gates in found]
            found += [gates for gates in others if self.takes(gates) and _owned(gates)[name]]
        return tuple(dict.fromkeys(found))

    def first(self) -> tuple[RandomProblem, ...]:
        """What is asked before anything is drawn: every granularity with every owner, groups of heads, large sizes.

        Gates matter to the last token: they forget little, erase some and write some.
        """
        families = self.decays(("mild", "tiny", "zero"))
        kinds = sorted(self.gates(), key=lambda gates: (gates.erase == "none", gates.decay == "none"))
        seen: set[tuple[str, ...]] = set()
        chosen = []
        for gates in kinds:
            words = [("decay", gates.decay, gates.owner), ("erase", gates.erase, gates.owner)]
            words += [("write", gates.write, gates.write_owner)]
            new = {word for word in words if word[1] not in ("none", "one")} - seen
            if new or not chosen:
                seen |= new
                chosen.append(gates)
        problems = []
        for layout, gates in itertools.zip_longest(FIRST_LAYOUTS, chosen):
            layout, gates = layout or FIRST_LAYOUTS[0], gates or chosen[len(problems) % len(chosen)]
            if families:
                problems.append(
                    self.fit(dataclasses.replace(layout, gates=dataclasses.replace(gates, log_decays=families[0])))
                )
        return tuple(problem for problem in problems if problem is not None and self.why_not(problem) is None)

    def layouts(self) -> tuple[RandomProblem, ...]:
        """The pool of problems to draw from: few, as each shape compiles. Packed ones come last."""
        fitted = [self.fit(layout) for layout in (*LAYOUTS, *PACKED_LAYOUTS)]
        pool = [layout for layout in fitted if layout is not None and self.takes(layout.gates)]
        kinds = itertools.cycle(self.gates())
        if sum(layout.documents is None for layout in pool) < 5:
            lent = [self.fit(dataclasses.replace(LAYOUTS[i], gates=next(kinds))) for i in _SIZES]
            pool += [layout for layout in lent if layout is not None]
        for owner in self.owner if self.grouped else ():  # groups of heads need gates of every owner
            if not any(layout.documents is None and is_grouped(layout, owner) for layout in pool):
                kind = next((gates for gates in self.gates() if gates.owner == owner and _owned(gates)["owner"]), None)
                lent = kind and self.fit(dataclasses.replace(LAYOUTS[-1], gates=kind))
                pool += [lent] if lent else []
        for hard in filter(self._is_hard, PACKED_LAYOUTS):  # every way of packing needs one
            found = any(self._is_hard(layout) and layout.packing == hard.packing for layout in pool)
            lent = None if found else self.fit(dataclasses.replace(hard, gates=next(kinds)))
            pool += [] if lent is None else [lent]
        pool.sort(key=lambda layout: layout.documents is not None)
        return tuple(dict.fromkeys(pool))

    def _is_hard(self, layout: RandomProblem) -> bool:
        """Whether packed documents of it cross chunks of 64 tokens, in several rows and with a state if they may."""
        rows = layout.batch > 1 or layout.packing == "offsets"
        return layout.documents is not None and layout.time > 64 and rows and (layout.state or not self.state)

    def decays(self, families: tuple[str, ...] = DECAY_FAMILIES) -> list[str]:
        """Those families of log decays that stay within `max_decay`."""
        return [family for family in families if self._reaches(family)]

    def _reaches(self, family: str) -> bool:
        if self.decay == ("none",):
            return True
        return (self.zero_decay or family != "zero") and _SMALLEST.get(family, np.inf) <= self.max_decay

    def fit(self, layout: RandomProblem) -> RandomProblem | None:
        """The layout with what this implementation cannot take left out, or `None`."""
        if layout.documents is not None and layout.packing not in self.packing:
            return None
        gates = dataclasses.replace(layout.gates, erase_max=min(layout.gates.erase_max, self.erase_max))
        if gates.log_decay_min is not None and -gates.log_decay_min > self.max_decay:
            gates = dataclasses.replace(gates, log_decay_min=None)

        def size(dims, wanted):
            return wanted if dims is None or wanted in dims else dims[wanted % len(dims)]

        key_dim = size(self.key_dims, layout.key_dim)
        if gates.decay == "tile" and key_dim % gates.decay_tiles:
            key_dim *= gates.decay_tiles
        return dataclasses.replace(
            layout,
            gates=gates,
            dtype=self.dtypes[0],
            key_dim=key_dim,
            value_dim=size(self.value_dims, layout.value_dim),
            time=-(-layout.time // self.time_multiple) * self.time_multiple,
            group=layout.group if self.grouped else 1,
            state=layout.state and self.state,
        )


def is_grouped(layout: RandomProblem, owner: Owner) -> bool:
    """Whether several value heads share each of several key heads, and gates have this owner."""
    gates = layout.gates
    return layout.group > 1 and layout.key_heads > 1 and gates.owner == owner and _owned(gates)["owner"]


def _owned(gates: RandomGates) -> dict[str, bool]:
    """Whether there is a gate that has the owner."""
    return {
        "owner": gates.decay != "none" or gates.erase != "none",
        "write_owner": gates.write != "one" and not gates.tied,
    }


def _parameters(function: Callable) -> set[str]:
    """Names of problems' arrays and options that a plain function may be given.

    **Raises:** `TypeError` if it needs a parameter that is none of them.
    """
    parameters = inspect.signature(function).parameters
    unknown = [
        name
        for name, p in parameters.items()
        if name not in (*_GIVEN, "beta")
        and (name in _OF_OTHERS or p.default is p.empty)
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        name = getattr(function, "__name__", type(function).__name__)
        needed = [x for x, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if "k" not in parameters and len(needed) == 2:
            raise TypeError(
                f"`{name}({', '.join(needed)})` takes no arrays `q`, `k` and `v`. An update of one token, "
                f'`step(state, token)`, is asked by `check_variant({name}, gates="kda")`, on the command line with '
                "`--gates kda`, with the gates that its tokens have."
            )
        if "k" not in parameters and "key" in parameters:
            raise TypeError(
                f"`{name}` takes no arrays `q`, `k` and `v`: a constructor is asked by `check_variant({name})`."
            )
        raise TypeError(
            f"`{name}` has the parameter `{unknown[0]}`, which no problem gives: a plain function takes "
            f"{', '.join((*_GIVEN[:6], 'beta', *_GIVEN[6:]))} by name. Wrap it, or give "
            f'`fla_style({name}, framework="jax")` for `g` and `beta` of flash-linear-attention, '
            f"`tokamax_style({name})` for `query, key, value, gate, beta`."
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return set(parameters) | (set(_GIVEN) if takes_any else set())


def named_variant(named: Variant | str) -> Variant:
    """A record, or the one of `gated_delta.variants` that has the name.

    **Raises:** `TypeError` for anything else.
    """
    known = {name: found for name, found in vars(_variants).items() if isinstance(found, Variant)}
    if isinstance(named, str) and named in known:
        return known[named]
    if not isinstance(named, Variant):
        raise TypeError(f"{named!r} is no variant: give a `Variant`, or the name of one, {', '.join(sorted(known))}.")
    return named


def gates_of(variant: Variant) -> RandomGates:
    """Gates to draw for a variant."""
    return RandomGates(
        decay=variant.decay,
        decay_tiles=variant.decay_tiles or 2,
        erase=variant.erase,
        write="one" if variant.tied else variant.write,
        owner=variant.decay_owner,
        tied=variant.tied,
        erase_max=variant.erase_max,
        log_decay_min=variant.log_decay_min,
    )


MEMBERS = {
    "linear_attention": RandomGates(),
    "retnet": RandomGates(decay="head"),
    "mamba2": RandomGates(decay="head", write="head", owner="value"),
    "gla": RandomGates(decay="channel"),
    "delta_net": RandomGates(erase="head", tied=True),
    "gdn": RandomGates(decay="head", erase="head", owner="value", tied=True),
    "kda": RandomGates(decay="channel", erase="head", owner="value", tied=True),
    "gdn2": RandomGates(decay="channel", erase="channel", write="channel"),
    "sla": RandomGates(decay="tile", decay_tiles=4, erase="head", tied=True),
}
"""The gates of the members of the family that have a name."""
