"""Our operator at the cases of the table: one function each, for `tpu_schedule.py`.

    python benchmarks/tpu_schedule.py "benchmarks/tpu/ours.py:kda(backward=True, config={'owners': 16})"

bf16 q, k, v, float32 gates in log space, no initial state. Options of all: `time`, `batch`, `backward` (forward and
then the gradients of every input, as one program), `inverse`, `config` (of `TileConfig`), `backend` (`PallasTPU`'s
other fields), `far` (every chunk forgets much), `chunked` (the XLA backend instead), `raw` (`True`: `gated_delta_raw`,
with bf16 q and k before their norm and float32 gates before their activations; `"outside"`: norm and activations by
XLA, then `gated_delta`), `conv` (with `raw`: the width of short convolutions before all that, windows included),
`documents` (packed by segment ids). Each function returns `(callable, arguments, facts)`.

`softmax` is attention. `step` is one token of `batch` requests, whose float32 states are the slots of a donated pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Shape

from gated_delta import (
    Chunked,
    Gates,
    RawGates,
    Recurrent,
    ShortConvs,
    gated_delta,
    gated_delta_raw,
    gated_delta_raw_step,
    gated_delta_step,
    softmax_attention,
)
from gated_delta._activations import l2_normalize
from gated_delta.pallas import AttentionTiles, PallasTPU, PallasTPUAttention, TileConfig

bf16, f32 = jnp.bfloat16, jnp.float32


# The choices at run time. At the top: whether an output is not finite, and all is done again without what is not.
# In a kernel with decays per channel: whether a chunk forgets much (`far`), and takes the larger path.
FINITE = ["TLP:2=run", "TLP:3=skip", "TLP:4=run", "TLP:5=skip"]
KERNELS = ("gated_delta_forward*", "gated_delta_backward*")


@dataclasses.dataclass(frozen=True)
class Heads:
    """How many heads, how wide, and who owns the gates."""

    key: int
    value: int
    key_dim: int = 128
    value_dim: int = 128
    owners: int | None = None  # key heads if None


def sla(heads=Heads(4, 16, key_dim=256), **options):
    """One decay per tile of 64 channels and one beta, shared by the four value heads of a key head."""
    return _case(heads, options, decay=heads.key_dim // 64, tied=True)


def sla_8(**options):
    return sla(Heads(8, 32, key_dim=256), **options)


def sla_2(**options):
    return sla(Heads(2, 8, key_dim=256), **options)


def sla_r8(**options):
    """Eight value heads for each key head: a width of 1024."""
    return sla(Heads(2, 16, key_dim=256), **options)


def kda(heads=16, log_decay_min=None, **options):
    """One decay per channel and one beta."""
    return _case(Heads(heads, heads), options, decay=128, tied=True, log_decay_min=log_decay_min)


def gdn(heads=16, **options):
    """One decay and one beta per head."""
    return _case(Heads(heads, heads), options, decay=1, tied=True)


def gdn_grouped(key_heads=16, value_heads=32, **options):
    """One decay and one beta per value head, two value heads for each key head."""
    return _case(Heads(key_heads, value_heads, owners=value_heads), options, decay=1, tied=True)


def gdn2(heads=16, **options):
    """Decay and erase per key channel, write per value channel."""
    return _case(Heads(heads, heads), options, decay=128, tied=False)


def olmo(**options):
    """30 heads of width 96 and 192."""
    return _case(Heads(30, 30, 96, 192), options, decay=1, tied=True, erase_max=2)


STEPS = {
    "gdn": (Heads(16, 32, owners=32), 1),
    "kda": (Heads(32, 32), 128),
    "gdn2": (Heads(16, 16), 128),
    "sla": (Heads(4, 16, key_dim=256), 4),
    "olmo": (Heads(30, 30, 96, 192), 1),
}


def step(
    kind="gdn", batch=8, heads=None, raw=False, state="float32", config=None, plain=False, xla=False, backend=None
):
    """`heads`: of `Heads`, if not those of `kind`; `state`: what the pool is stored in; `plain`: a state for each row,
    no pool; `xla`: by `Recurrent`."""
    usual, decay = STEPS[kind]
    heads = usual if heads is None else Heads(**heads)
    runs = Recurrent() if xla else PallasTPU(config=TileConfig(**(config or {})), **(backend or {}))
    owners = heads.owners or heads.key
    key, value = Shape((batch, heads.key, heads.key_dim), bf16), Shape((batch, heads.value, heads.value_dim), bf16)
    gates = [Shape((batch, owners, decay), f32)]
    gates += [Shape(key.shape, f32), Shape(value.shape, f32)] if kind == "gdn2" else [Shape((batch, owners, 1), f32)]
    if raw:
        gates += [Shape((owners,), f32), Shape((owners, decay), f32)]
    pool = Shape((batch, heads.value, heads.key_dim, heads.value_dim), state)

    def run(pool, slots, q, k, v, *gates):
        options = dict(slots=None if plain else slots, backend=runs)
        tied = kind != "gdn2"
        if raw:
            *gates, A_log, dt_bias = gates
            made = RawGates(*gates, A_log=A_log, dt_bias=dt_bias, is_tied=tied)
            return gated_delta_raw_step(q, k, v, made, pool, **options)
        return gated_delta_step(q, k, v, Gates(*gates, is_tied=tied), pool, **options)

    # Every row is a request that goes on, in the slot of its number.
    settled = {} if plain else {"gated_delta_step": {0: list(range(batch))}}
    arguments = [pool, Shape((batch,), jnp.int32), key, key, value, *gates]
    # At the top: whether the pool, which is donated, has to be copied after all.
    facts = {"tokens": batch, "heads": heads.value, "operands": settled, "settle": ["TLP:2=skip"]}
    return jax.jit(run, donate_argnums=0), arguments, facts


def softmax(
    query_heads=32, kv_heads=32, dim=128, value_dim=None, time=16384, batch=1, window=None, backward=False, tiles=None
):
    """Causal softmax attention in bfloat16; `tiles` of `AttentionTiles`."""
    runs = PallasTPUAttention(AttentionTiles(**(tiles or {})), ahead_of_time=True)
    query, key = (Shape((batch, time, heads, dim), bf16) for heads in (query_heads, kv_heads))
    value, out = (Shape((batch, time, heads, value_dim or dim), bf16) for heads in (kv_heads, query_heads))

    def forward(q, k, v):
        return softmax_attention(q, k, v, window=window, backend=runs)

    def both(cotangent, *arguments):
        out, pull = jax.vjp(forward, *arguments)
        return out, pull(cotangent)

    # In the kernel: whether a score was far above its anchor, and its queries are done again.
    facts = {"tokens": batch * time, "heads": query_heads, "settle": [*FINITE, "softmax_attention_forward*:5=skip"]}
    return (both, [out, query, key, value], facts) if backward else (forward, [query, key, value], facts)


def _case(heads: Heads, options: dict, *, decay: int, tied: bool, **promises):
    return _build(heads, decay, tied, promises, **options)


def _build(
    heads: Heads,
    decay: int,
    tied: bool,
    promises: dict,
    time=8192,
    batch=1,
    backward=False,
    inverse="exact",
    config=None,
    backend=None,
    chunked=False,
    far=False,
    raw=False,
    conv=None,
    documents=False,
):
    config, backend = config or {}, backend or {}
    runs = Chunked(**backend) if chunked else PallasTPU(config=TileConfig(**config), **backend)
    owners = heads.owners or heads.key
    lead = (batch, time)
    key, value = Shape((*lead, heads.key, heads.key_dim), bf16), Shape((*lead, heads.value, heads.value_dim), bf16)
    gates = [Shape((*lead, owners, decay), f32)]
    gates += [Shape((*lead, owners, 1), f32)] if tied else [Shape(key.shape, f32), Shape(value.shape, f32)]
    if raw:
        gates += [Shape((owners,), f32), Shape((owners, decay), f32)]

    def raw_gates(*gates):
        *gates, A_log, dt_bias = gates
        bound = promises.get("log_decay_min")
        options = dict(A_log=A_log, dt_bias=dt_bias, bound=bound, erase_max=promises.get("erase_max", 1.0))
        return RawGates(*gates, **options, is_tied=tied)

    def forward(q, k, v, *gates):
        ids = convs = None
        if documents:
            *gates, ids = gates
        if conv:
            *gates, convs = gates
        if raw == "outside":
            activated = raw_gates(*gates).activated()
            return gated_delta(l2_normalize(q), l2_normalize(k), v, activated, inverse=inverse, backend=runs)[0]
        if raw:
            return gated_delta_raw(q, k, v, raw_gates(*gates), convs=convs, inverse=inverse, backend=runs)[0]
        made = Gates.tied(gates[1], gates[0], **promises) if tied else Gates(*gates, **promises)
        return gated_delta(q, k, v, made, inverse=inverse, backend=runs, segment_ids=ids)[0]

    def both(cotangent, *arguments):
        out, pull = jax.vjp(forward, *arguments)
        return out, pull(cotangent)

    much, little = ("run", "skip") if far else ("skip", "run")
    settle = [*FINITE, *(f"{kernel}:3={much}" for kernel in KERNELS), *(f"{kernel}:4={little}" for kernel in KERNELS)]
    facts = {"tokens": batch * time, "heads": heads.value, "settle": settle}
    arguments = [key, key, value, *gates, *([Shape(lead, jnp.int32)] if documents else [])]
    if conv:
        dims = {"q": key.shape[2:], "k": key.shape[2:], "v": value.shape[2:]}
        shapes = {name: Shape((conv, *dim), f32) for name, dim in dims.items()}
        shapes |= {f"{name}_window": Shape((batch, conv - 1, *dim), bf16) for name, dim in dims.items()}
        arguments.append(jax.eval_shape(lambda shapes: ShortConvs(**shapes), shapes))
    return (both, [value, *arguments], facts) if backward else (forward, arguments, facts)
