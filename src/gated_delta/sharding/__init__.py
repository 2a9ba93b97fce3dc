"""Layers and the operator over many devices: which parameter lies where, and sequences that are split over devices.

`import gated_delta` does not import this.
"""

from ._context import ContextParallel as ContextParallel
from ._context import context_parallel_gated_delta as context_parallel_gated_delta
from ._mixer import LocalMixer as LocalMixer
from ._mixer import local_mixers as local_mixers
from ._per_device import PerDevice as PerDevice
from ._specs import mixer_specs as mixer_specs
from ._specs import state_specs as state_specs

__all__ = [
    "ContextParallel",
    "LocalMixer",
    "PerDevice",
    "context_parallel_gated_delta",
    "local_mixers",
    "mixer_specs",
    "state_specs",
]
