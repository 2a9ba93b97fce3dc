"""Kernels: `PallasTPU` runs the operator as one fused TPU kernel forward and one backward."""

from ._config import TileConfig as TileConfig
from ._tpu import PallasTPU as PallasTPU

__all__ = [
    "PallasTPU",
    "TileConfig",
]
