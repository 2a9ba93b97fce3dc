"""What `check_variant` is given, as its laws see it: a `Layer` or an `OwnStep`."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from gated_delta._layer import GatedDeltaMixer
from gated_delta._variant import MixerConfig, Variant

from ._own_step import OwnStep
from ._random import RandomGates
from .laws import Layer, draw_parameters


def variant_subject(
    subject: Any,
    *,
    gates: RandomGates | None = None,
    chunked: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    initial_state: Callable[[], Any] | None = None,
    model: int | None = None,
) -> Layer | OwnStep:
    """The layer or the step to check: see `check_variant`.

    **Raises:** `TypeError` for anything else.
    """
    if isinstance(subject, (Layer, OwnStep)):
        return subject
    if isinstance(subject, Variant):
        return _drawn(repr(subject), lambda key: GatedDeltaMixer(_small(subject), key=key), model)
    if isinstance(subject, MixerConfig):
        return _drawn("MixerConfig(...)", lambda key: GatedDeltaMixer(subject, key=key), model)
    if hasattr(subject, "step") and callable(subject):
        return _layer(type(subject).__name__, subject, model)
    if callable(subject):
        name = getattr(subject, "__name__", None) or getattr(getattr(subject, "func", None), "__name__", "subject")
        parameters = inspect.signature(subject).parameters
        if "key" in parameters and gates is None:
            return _drawn(name, lambda key: subject(key=key), model)
        if gates is None:
            raise TypeError(
                f"`check_variant({name})`: a step needs `gates`, the kind of gates that its tokens have, such as "
                "`gates=MEMBERS['kda']`; a constructor of a layer needs a parameter `key`."
            )
        more = {"chunked": chunked, "initial_state": initial_state}
        given = "".join(f", {key}={x.__name__}" for key, x in more.items() if x is not None)
        step: Any = subject
        return OwnStep(f"OwnStep({name!r}, {name}, {gates!r}{given})", step, gates, chunked, initial_state)
    raise TypeError(
        f"A `Variant`, a `MixerConfig`, a layer, its constructor or a step can be checked, but {subject!r} came."
    )


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
