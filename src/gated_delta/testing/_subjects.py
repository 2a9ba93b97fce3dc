"""What `check_variant` is given, as its laws see it: a `Layer` or an `OwnStep`."""

import dataclasses
import inspect
import json
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from gated_delta._layer import GatedDeltaMixer
from gated_delta._variant import MixerConfig, Variant

from ._capabilities import MEMBERS, named_variant
from ._naming import import_of
from ._own_step import OwnStep
from ._random import RandomGates
from .laws import Layer, draw_parameters


def is_variant(subject: Any) -> bool:
    """Whether it is what `check_variant` is for, as far as it is plain to see: a step looks like any function."""
    return isinstance(subject, (Variant, MixerConfig, Layer, OwnStep)) or hasattr(subject, "init_state")


def variant_subject(
    subject: Any,
    *,
    gates: RandomGates | str | None = None,
    chunked: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    initial_state: Callable[[], Any] | None = None,
    model: int | None = None,
) -> Layer | OwnStep:
    """The layer or the step to check: see `check_variant`.

    **Raises:** `TypeError` for anything else.
    """
    if isinstance(subject, (Layer, OwnStep)):
        return subject
    if isinstance(subject, str):
        subject = named_variant(subject)
    if isinstance(subject, Variant):
        layer = _drawn(repr(subject), lambda key: GatedDeltaMixer(_small(subject), key=key), model)
        return dataclasses.replace(layer, imports="from gated_delta import Variant", variant=subject)
    if isinstance(subject, MixerConfig):
        layer = _drawn("MixerConfig(...)", lambda key: GatedDeltaMixer(subject, key=key), model)
        how = f"MixerConfig.from_json({json.dumps(dataclasses.asdict(subject))!r})"
        return dataclasses.replace(
            layer, imports="from gated_delta import MixerConfig", how=how, variant=subject.variant
        )
    if hasattr(subject, "step") and callable(subject):
        layer = _layer(type(subject).__name__, subject, model)
        variant = getattr(getattr(subject, "config", None), "variant", None)
        how = _with_model("layer", model)
        return dataclasses.replace(layer, imports="layer = ...  # the one that was checked", how=how, variant=variant)
    if callable(subject):
        name = getattr(subject, "__name__", None) or getattr(getattr(subject, "func", None), "__name__", "subject")
        parameters = inspect.signature(subject).parameters
        imports = import_of(subject, name)
        if "key" in parameters and gates is None:
            how = _with_model("{name}" if imports else "make", model)
            layer = _drawn(name, lambda key: subject(key=key), model)
            return dataclasses.replace(layer, imports=imports or "make = ...  # what makes the layer", how=how)
        kind = _gates_of_step(name, gates)
        more = {"chunked": chunked, "initial_state": initial_state}
        given = "".join(f", {key}={_name(x)}" for key, x in more.items() if x is not None)
        statements = [imports, *(import_of(x, _name(x)) for x in more.values() if x is not None)]
        step: Any = subject
        return OwnStep(
            name,
            step,
            kind,
            chunked,
            initial_state,
            imports="; ".join(filter(None, statements)),
            how=f"OwnStep({name!r}, {{name}}, {kind!r}{given})",
        )
    raise TypeError(
        f"A `Variant`, a `MixerConfig`, a layer, its constructor or a step can be checked, but {subject!r} came."
    )


def _gates_of_step(name: str, gates: Any) -> RandomGates:
    if isinstance(gates, RandomGates):
        return gates
    if isinstance(gates, str) and gates in MEMBERS:
        return MEMBERS[gates]
    if gates is None:
        raise TypeError(
            f"`check_variant({name})`: a step needs `gates`, the kind of gates that its tokens have, such as "
            '`gates="kda"`; a constructor of a layer needs a parameter `key`.'
        )
    raise TypeError(
        f"`check_variant({name}, gates={gates!r})`: the gates of a step are a `RandomGates`, or the name of one of "
        f"`MEMBERS`, {', '.join(MEMBERS)}."
    )


def _with_model(how: str, model: int | None) -> str:
    return how if model is None else f"{how}, model={model}"


def _name(x: Any) -> str:
    return getattr(x, "__name__", type(x).__name__)


def _small(variant: Variant) -> MixerConfig:
    """A layer of this variant that compiles quickly: all its sizes are different."""
    key_dim = 4 if variant.decay_tiles is None else 2 * variant.decay_tiles
    return MixerConfig(variant, model=12, key_heads=2, value_heads=6, key_dim=key_dim, value_dim=3)


def _drawn(name: str, make: Callable[[Any], Any], model: int | None) -> Layer:
    return _layer(name, draw_parameters(eqx.filter_eval_shape(make, jax.random.key(0)), 0), model)


def _layer(name: str, layer: Any, model: int | None) -> Layer:
    model = model or getattr(getattr(layer, "config", None), "model", None)
    if model is None:
        raise TypeError(f"{name} has no `config.model`: give the size of its inputs, `check_variant(..., model=...)`.")
    return Layer(name, layer, model)
