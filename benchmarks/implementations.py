"""Every implementation that the CPU benchmarks time, called as its documentation says.

Each is a function of an op's inputs (`cases.inputs_of`), in their layout; a layout of the implementation's own is made
outside of what is timed. Imported by name in the environment that holds it.
"""

import dataclasses
import functools
from collections.abc import Callable

from cases import BOUND


@dataclasses.dataclass(frozen=True)
class Implementation:
    """- `op`: what it computes.
    - `package`: of PyPI. `environment`: which `.venv-*` holds it; `None` is the one that runs the benchmark.
    - `make`: imports it and returns a function of the op's inputs, by name.
    - `prepare`: an input, by name, in the implementation's own layout.
    - `is_torch`: it takes and returns tensors.
    - `only_128`: it takes heads of 128 only.
    """

    op: str
    package: str
    environment: str | None
    make: Callable
    prepare: Callable = lambda name, x: x
    is_torch: bool = False
    only_128: bool = False


def _bounded(raw):
    import jax

    return BOUND * jax.nn.sigmoid(raw)


def _ours(backend: str):
    import gated_delta as gd

    run = getattr(gd, backend)()

    def call(q, k, v, log_decay=None, raw_decay=None, beta=None, erase=None, write=None):
        log_decay = _bounded(raw_decay) if log_decay is None else log_decay
        gates = gd.Gates(log_decay, erase, write) if beta is None else gd.Gates.tied(beta, log_decay)
        return gd.gated_delta(q, k, v, gates, backend=run)[0]

    return call


def _maxtext():
    import jax.numpy as jnp
    from maxtext.models import qwen3

    def call(q, k, v, log_decay, beta):
        return qwen3.jax_chunk_gated_delta_rule(q, k, v, log_decay, beta, chunk_size=64, compute_dtype=jnp.float32)[0]

    return call


def _tokamax():
    import tokamax._src.ops.kda.api as kda

    fused = dict(use_gate_in_kernel=True, lower_bound=BOUND, implementation="xla_chunked")

    def call(q, k, v, raw_decay, beta):
        return kda.kimi_delta_attention(q, k, v, raw_decay, beta, a_log=0 * beta[:, 0, 0], **fused)[0]

    return call


def _heads_first(name, x):
    return x.transpose(2, 0, 1, *range(3, x.ndim))


def _deltanet_tokens(name: str):
    import deltanet_tpu.reference

    function = getattr(deltanet_tpu.reference, name)

    def call(q, k, v, log_decay=None, raw_decay=None, beta=None, erase=None, write=None):
        log_decay = _bounded(raw_decay) if log_decay is None else log_decay
        return function(q, k, v, log_decay, *((erase, write) if beta is None else (beta,)))

    return call


def _deltanet_chunks(name: str):
    import deltanet_tpu

    function = functools.partial(getattr(deltanet_tpu, name), fallback_scan=True, precision="fp32")

    def call(q, k, v, log_decay=None, raw_decay=None, beta=None, erase=None, write=None):
        log_decay = _bounded(raw_decay) if log_decay is None else log_decay
        return function(q, k, v, log_decay, *((erase, write) if beta is None else (beta,)))

    return call


def _atomic():
    from atomic_ops.reference import gdn2_chunked_wy_reference

    def call(q, k, v, log_decay, erase, write):
        return gdn2_chunked_wy_reference(q, k, v, log_decay, erase, write, k.shape[-1] ** -0.5, 16)[0]

    return call


def _transformers():
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    def call(q, k, v, log_decay, beta):
        return torch_chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]

    return call


def _fla():
    from fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule

    def call(q, k, v, log_decay, beta):
        return naive_chunk_gated_delta_rule(q, k, v, log_decay, beta)[0]

    return call


def _deltanet(op: str, tokens: str, chunks: str) -> dict[str, Implementation]:
    parts = op, "deltanet-tpu", "conformance"
    return {
        f"deltanet-tpu tokens {op}": Implementation(*parts, functools.partial(_deltanet_tokens, tokens)),
        f"deltanet-tpu chunks {op}": Implementation(*parts, functools.partial(_deltanet_chunks, chunks), only_128=True),
    }


OURS = {
    f"ours {backend} {op}": Implementation(op, "gated-delta", None, functools.partial(_ours, backend))
    for op in ("gdn", "kda", "gdn2", "sla")
    for backend in ("Chunked", "Recurrent")
}
PEERS = {
    "maxtext": Implementation("gdn", "maxtext", "conformance", _maxtext),
    "transformers": Implementation("gdn", "transformers", "conformance-torch", _transformers, is_torch=True),
    "fla naive": Implementation("gdn", "fla-core", "conformance-torch", _fla, is_torch=True),
    **_deltanet("gdn", "reference_gdn", "chunk_gdn"),
    "tokamax xla_chunked": Implementation("kda", "tokamax", "conformance", _tokamax, prepare=_heads_first),
    **_deltanet("kda", "reference_kda", "chunk_kda"),
    "atomic-ops chunked": Implementation("gdn2", "atomic-ops", "conformance", _atomic),
    **_deltanet("gdn2", "token_serial_gdn2", "chunk_gdn2"),
}
IMPLEMENTATIONS = {**OURS, **PEERS}
