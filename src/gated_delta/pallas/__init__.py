"""Kernels: `PallasTPU` runs the operator as one fused TPU kernel forward and one backward, `PallasTPUAttention` softmax
attention."""

from ._attention import AttentionTiles as AttentionTiles
from ._attention import PallasTPUAttention as PallasTPUAttention
from ._config import TileConfig as TileConfig
from ._tpu import PallasTPU as PallasTPU

__all__ = [
    "AttentionTiles",
    "PallasTPU",
    "PallasTPUAttention",
    "TileConfig",
]
