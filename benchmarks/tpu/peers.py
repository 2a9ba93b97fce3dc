"""The peers at the work of our cases: one function each, for `tpu_schedule.py` in an environment that has them
installed (`benchmarks/tpu-peers.txt`).

One sequence (or, of a step, one token of every request), no initial state, key and value width 128, bf16 q, k, v,
float32 gates in log space, nothing normalised; a peer that is served only as a fused layer (convolution, activation,
norm and gates inside) says so in its name. Each function returns `(callable, arguments, facts)`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import ShapeDtypeStruct as Shape

WIDTH = 128
bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32


def _with_backward(forward, arguments, out, backward):
    """Forward alone, or forward and then the gradients of every argument, as one program."""
    if not backward:
        return forward, arguments

    def both(cotangent, *arguments):
        result, pull = jax.vjp(forward, *arguments)
        return result, pull(cotangent)

    return both, [out, *arguments]


def tokamax_kda(time=8192, heads=16, backward=False, remat=False, chunk=64):
    from tokamax._src.ops.kda import pallas_mosaic_tpu as tokamax

    config = tokamax.Config(chunk_size=chunk, rematerialize_for_backward=remat)
    op = tokamax.PallasMosaicTpuKimiDeltaAttention(bypass_device_check=True, config=config)
    off = dict.fromkeys(("initial_state", "a_log", "delta_time_bias", "segment_ids", "lower_bound"))
    off |= dict.fromkeys(("context_parallel_metadata", "max_num_segments"))
    off |= dict.fromkeys(("output_final_state", "use_qk_l2norm", "use_gate_in_kernel"), False)

    def forward(q, k, v, gate, beta):
        return op(query=q, key=k, value=v, gate=gate, beta=beta, scale=WIDTH**-0.5, **off)[0]

    x = Shape((heads, 1, time, WIDTH), bf16)
    arguments = [x, x, x, Shape(x.shape, f32), Shape(x.shape[:3], f32)]
    return *_with_backward(forward, arguments, x, backward), {"tokens": time, "heads": heads}


def deltanet_tpu(kind, time=8192, heads=16, key_heads=None, backward=False, chunk=128):
    import deltanet_tpu

    key, value = (Shape((1, time, h, WIDTH), bf16) for h in (key_heads or heads, heads))
    per_head, per_channel = Shape(value.shape[:3], f32), Shape(key.shape, f32)
    gates = {"gdn": [per_head, per_head], "kda": [per_channel, per_head], "gdn2": [per_channel, key, value]}[kind]
    op = {"gdn": deltanet_tpu.chunk_gdn, "kda": deltanet_tpu.chunk_kda, "gdn2": deltanet_tpu.chunk_gdn2}[kind]

    def forward(*arguments):
        return op(*arguments, chunk_size=chunk, precision="bf16")

    return *_with_backward(forward, [key, key, value, *gates], value, backward), {"tokens": time, "heads": heads}


def _layer(time, heads, key_heads, gate_width):
    """What both fused layers take: the joint projections, raw gates, the caches and weights; one sequence."""
    channels = (2 * key_heads + heads) * WIDTH
    arrays = {
        "qkv": Shape((time, channels), bf16),
        "b": Shape((time, heads), bf16),
        "a": Shape((time, gate_width), bf16),
        "conv_state": Shape((2, 3, channels), bf16),
        "recurrent_state": Shape((2, heads, WIDTH, WIDTH), f32),
        "conv_weight": Shape((channels, 1, 4), bf16),
        "conv_bias": Shape((channels,), bf16),
        "a_log": Shape((heads,), f32),
        "dt_bias": Shape((gate_width,), bf16),
    }
    sequence = {
        "query_start_loc": np.array([0, time], np.int32),
        "state_indices": np.array([1], np.int32),
        "distribution": np.array([0, 1, 1], np.int32),
        "seq_lens": np.array([time], np.int32),
        "read_state_indices": np.array([1], np.int32),
    }
    return arrays, sequence, dict(n_kq=key_heads, n_v=heads, d_k=WIDTH, d_v=WIDTH, kernel_size=4)


def _decoding_layer(batch, heads, key_heads, gate_width):
    """The same for one token of each of `batch` requests that go on, in the slots from 1 (0 is for padding)."""
    arrays, _, sizes = _layer(batch, heads, key_heads, gate_width)
    for name in ("conv_state", "recurrent_state"):
        arrays[name] = Shape((batch + 1, *arrays[name].shape[1:]), arrays[name].dtype)
    slots = np.arange(1, batch + 1, dtype=np.int32)
    sequence = {
        "query_start_loc": np.arange(batch + 1, dtype=np.int32),
        "state_indices": slots,
        "distribution": np.full(3, batch, np.int32),
        "seq_lens": np.full(batch, 9, np.int32),
        "read_state_indices": slots,
    }
    return arrays, sequence, sizes


# Whether a donated argument has to be copied after all.
DONATED = ["TLP:2=skip", "TLP:5=skip", "TLP:7=skip"]


def _donating(forward, arrays):
    """Under `jit`, with both states updated in place."""
    names = [*arrays]
    return jax.jit(forward, donate_argnums=(names.index("conv_state"), names.index("recurrent_state")))


def deltanet_tpu_step(kind="gdn", batch=8, heads=32, key_heads=16):
    import deltanet_tpu

    op = {"gdn": deltanet_tpu.gdn_decode_step, "kda": deltanet_tpu.kda_decode_step}[kind]
    key, value = (Shape((batch, h, WIDTH), bf16) for h in (key_heads, heads))
    decay = Shape(value.shape[:2], f32) if kind == "gdn" else Shape(key.shape, f32)
    state = Shape((batch, heads, WIDTH, WIDTH), f32)
    arguments = [state, key, key, value, decay, Shape(value.shape[:2] if kind == "gdn" else key.shape[:2], f32)]

    def forward(state, *arguments):
        return op(*arguments, state)

    return jax.jit(forward, donate_argnums=0), arguments, {"tokens": batch, "heads": heads, "settle": DONATED[:1]}


def flywheel_layer(kind, time=8192, heads=16, key_heads=None):
    from flywheel_tpu import linear_attention

    op = {"gdn": linear_attention.fused_conv1d_gdn, "kda": linear_attention.fused_conv1d_kda}[kind]
    arrays, sequence, sizes = _layer(time, heads, key_heads or heads, heads if kind == "gdn" else heads * WIDTH)

    def forward(*arguments):
        return op(*arguments, *map(jnp.asarray, sequence.values()), **sizes)[1]

    return forward, [*arrays.values()], {"tokens": time, "heads": heads}


def flywheel_layer_step(kind="gdn", batch=8, heads=32, key_heads=16):
    from flywheel_tpu import linear_attention

    op = {"gdn": linear_attention.fused_conv1d_gdn, "kda": linear_attention.fused_conv1d_kda}[kind]
    arrays, sequence, sizes = _decoding_layer(batch, heads, key_heads, heads if kind == "gdn" else heads * WIDTH)

    def forward(*arguments):
        return op(*arguments, *map(jnp.asarray, sequence.values()), **sizes)

    return _donating(forward, arrays), [*arrays.values()], {"tokens": batch, "heads": heads, "settle": DONATED}


def tokamax_layer(time=8192, heads=16, key_heads=None):
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import pallas_mosaic_tpu as tokamax

    op = tokamax.PallasMosaicTpuCausalConv1dGatedDeltaRule(bypass_device_check=True)
    arrays, sequence, sizes = _layer(time, heads, key_heads or heads, heads)

    def forward(*arguments):
        constants = {name: jnp.asarray(x) for name, x in sequence.items()}
        return op(**dict(zip(arrays, arguments)), **constants, **sizes)[1]

    return forward, [*arrays.values()], {"tokens": time, "heads": heads}


def tokamax_layer_step(batch=8, heads=32, key_heads=16):
    from tokamax._src.ops.causal_conv1d_gated_delta_rule import pallas_mosaic_tpu as tokamax

    op = tokamax.PallasMosaicTpuCausalConv1dGatedDeltaRule(bypass_device_check=True)
    arrays, sequence, sizes = _decoding_layer(batch, heads, key_heads, heads)

    def forward(*arguments):
        constants = {name: jnp.asarray(x) for name, x in sequence.items()}
        return op(**dict(zip(arrays, arguments)), **constants, **sizes)

    return _donating(forward, arrays), [*arrays.values()], {"tokens": batch, "heads": heads, "settle": DONATED}
