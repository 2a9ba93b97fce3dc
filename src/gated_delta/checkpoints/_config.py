"""Reading config.json: from a family's words to a `MixerConfig`."""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gated_delta._variant import MixerConfig, Variant

ASK: Any = object()
"""In a family's settings: neither the file nor its config says, so the caller has to."""
_REQUIRED: Any = object()
_CALLED = {"doubled_beta": "erase_max", "decay_bound": "log_decay_min"}  # settings that the variant calls otherwise


class Config:
    """The config of a checkpoint of a named family; `a.b` is entry b of the object a."""

    def __init__(self, entries: Mapping[str, Any], family: str):
        self.entries = entries
        self.family = family
        self.used: dict[str, Any] = {}  # the entries that were asked for and are there
        self.sources: dict[str, dict[str, Any]] = {}  # those behind every field of a `MixerConfig`

    def __call__(self, *names: str, default: Any = _REQUIRED) -> Any:
        """The first of the named entries that is there.

        **Raises:** `ValueError` that names them where none is and there is no default.
        """
        for name in names:
            *outer, last = name.split(".")
            entries: Any = self.entries
            for key in outer:
                entries = entries.get(key) if isinstance(entries, Mapping) else None
            if isinstance(entries, Mapping) and last in entries:
                self.used[name] = entries[last]
                return entries[last]
        if default is _REQUIRED:
            like = ", ".join(f"`{name}`" for name in self._like(names))
            raise ValueError(
                f"The config of a {self.family} layer needs {' or '.join(f'`{name}`' for name in names)}, but has "
                f"{f'none: of similar names only {like}' if like else 'none, and nothing of a similar name'}. Give "
                "the whole config.json of the checkpoint."
            )
        return default

    def behind(self, fields: Iterable[str]) -> str:
        """The entries, as they are written, that these fields of a `MixerConfig` come from."""
        written = {name: value for field in fields for name, value in self.sources.get(field, {}).items()}
        return ", ".join(f"{name}={value!r}" for name, value in written.items())

    def _like(self, names: tuple[str, ...]) -> list[str]:
        """Up to five entries whose names are near these, nearest first; the linear layers' share a prefix."""
        inner = {key: value for key, value in self.entries.items() if isinstance(value, Mapping)}
        held = [*self.entries, *(f"{key}.{name}" for key, entries in inner.items() for name in entries)]
        held = sorted(name for name in held if name not in inner)
        near = [close for name in names for close in difflib.get_close_matches(name, held)]
        if any(name.startswith("linear_") for name in names):
            near += [name for name in held if name.startswith("linear_")]
        return list(dict.fromkeys(near))[:5]


def entry(*names: str, default: Any = _REQUIRED) -> Callable[[Config], Any]:
    """In a family's settings: the first of these entries of its config."""
    return lambda config: config(*names, default=default)


def mixer_config(config: Config, variant: Variant, settings: Mapping[str, Any], output_gate: str | None) -> MixerConfig:
    """What a family's settings make of its config. Of those, functions are asked, and everything else is taken."""
    fields: dict[str, Any] = {}
    for name, value in settings.items():
        config.used = {}
        fields[name] = value(config) if callable(value) else value
        config.sources[_CALLED.get(name, name)] = config.used
    if fields.get("output_gate") is ASK:
        if output_gate is None:
            raise ValueError(
                f"A {config.family} layer needs `output_gate='silu'` (NVIDIA's code) or `output_gate='sigmoid'` "
                "(fla's): both store the same names and shapes, and nothing in the file says which it is."
            )
        fields["output_gate"] = output_gate
    elif output_gate is not None:
        raise ValueError(
            f"`output_gate={output_gate!r}` is for GDN-2 checkpoints, which do not say theirs; a {config.family} "
            f"layer's is {fields['output_gate']!r}. Leave it out."
        )
    erase_max = 2.0 if fields.pop("doubled_beta", False) else 1.0
    try:
        variant = dataclasses.replace(variant, erase_max=erase_max, log_decay_min=fields.pop("decay_bound", None))
        return MixerConfig(variant, **fields)
    except (TypeError, ValueError) as error:
        blamed = [field for field in config.sources if re.search(rf"\b{field}\b", str(error))]
        written = config.behind(blamed) or config.behind(config.sources)
        message = f"The config of this {config.family} layer, with {written}, does not make a mixer. {error}"
        raise (TypeError if isinstance(error, TypeError) else ValueError)(message) from error
