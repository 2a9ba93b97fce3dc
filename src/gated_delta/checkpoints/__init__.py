"""Weights of published checkpoints: one layer's tensors to a `GatedDeltaMixer` and back.

`import gated_delta` does not import this, and only reading a file needs the package safetensors.
"""

from ._mixer import export_mixer as export_mixer
from ._mixer import load_mixer as load_mixer

__all__ = [
    "export_mixer",
    "load_mixer",
]
