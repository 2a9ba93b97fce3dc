"""Softmax attention, the other half of hybrid models: see `softmax_attention`."""

from ._backend import AbstractAttentionBackend as AbstractAttentionBackend
from ._backend import AttentionProblem as AttentionProblem
from ._backend import is_visible as is_visible
from ._blocked import BlockedAttention as BlockedAttention
from ._cache import KVCache as KVCache
from ._cache import PagedKVCache as PagedKVCache
from ._cached import cached_attention as cached_attention
from ._config import AttentionConfig as AttentionConfig
from ._dense import DenseAttention as DenseAttention
from ._layer import SoftmaxAttention as SoftmaxAttention
from ._op import explain_attention as explain_attention
from ._op import softmax_attention as softmax_attention

__all__ = [
    "AbstractAttentionBackend",
    "AttentionConfig",
    "AttentionProblem",
    "BlockedAttention",
    "DenseAttention",
    "KVCache",
    "PagedKVCache",
    "SoftmaxAttention",
    "cached_attention",
    "explain_attention",
    "is_visible",
    "softmax_attention",
]
