"""Softmax attention, the other half of hybrid models: see `softmax_attention`."""

from ._backend import AbstractAttentionBackend as AbstractAttentionBackend
from ._backend import AttentionProblem as AttentionProblem
from ._backend import is_visible as is_visible
