"""Reading config.json: from a family's words to a `MixerConfig`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from gated_delta._variant import MixerConfig, Variant

ASK: Any = object()
"""In a family's settings: neither the file nor its config says, so the caller has to."""
_REQUIRED: Any = object()


class Config:
    """The config of a checkpoint of a named family; `a.b` is entry b of the object a."""

    def __init__(self, entries: Mapping[str, Any], family: str):
        self.entries = entries
        self.family = family

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
                return entries[last]
        if default is _REQUIRED:
            raise ValueError(
                f"The config of a {self.family} layer needs {' or '.join(f'`{name}`' for name in names)}, but has only "
                f"{', '.join(sorted(self.entries)) or 'nothing'}."
            )
        return default


def entry(*names: str, default: Any = _REQUIRED) -> Callable[[Config], Any]:
    """In a family's settings: the first of these entries of its config."""
    return lambda config: config(*names, default=default)


def mixer_config(config: Config, variant: Variant, settings: Mapping[str, Any], output_gate: str | None) -> MixerConfig:
    """What a family's settings make of its config. Of those, functions are asked, and everything else is taken."""
    fields: dict[str, Any] = {name: value(config) if callable(value) else value for name, value in settings.items()}
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
    variant = dataclasses.replace(variant, erase_max=erase_max, log_decay_min=fields.pop("decay_bound", None))
    return MixerConfig(variant, **fields)
