"""The backends that most files of laws go through: the interpreted kernels take minutes."""

import pytest

from gated_delta import Chunked, Recurrent
from gated_delta.pallas import PallasTPU, TileConfig

INTERPRETED = PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)
BACKENDS = [Recurrent(), Chunked(16), pytest.param(INTERPRETED, marks=pytest.mark.slow)]
