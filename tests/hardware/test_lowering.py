"""Every kernel lowers for a TPU on a machine that has none (C42, C43): by Pallas' own passes."""

import jax
import jax.numpy as jnp
import pytest

from gated_delta import Gates, RawGates, ShortConvs, gated_delta, gated_delta_raw, gated_delta_step
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import RandomGates, RandomProblem

SIZES = dict(batch=1, key_heads=2, group=2, state=True)
GATES = {
    "gdn": RandomGates("head", erase="head", owner="value", tied=True),
    "kda": RandomGates("channel", erase="head", tied=True),
    "kda, bounded": RandomGates("channel", erase="head", tied=True, log_decay_min=-5.0),
    "gdn2": RandomGates("channel", erase="channel", write="channel"),
    "sla": RandomGates("tile", decay_tiles=4, erase="head", tied=True),
    "gla": RandomGates("channel"),
    "linear attention": RandomGates(write="head"),
}
PACKINGS = {
    "ids": dict(documents=((20, 0, -3, 41),)),
    "slots": dict(documents=((20, 0, -3, 41),), slots=5),
    "offsets": dict(documents=((20, 0, 44),)),
}


def export(problem, backend, gradients=True):
    """The StableHLO module, for a TPU, of outputs and every gradient."""
    arguments = problem.arguments()
    static = {name: arguments.pop(name) for name in ("num_segments", "inverse", "scale") if name in arguments}
    integers = {name: arguments.pop(name) for name in ("segment_ids", "cu_seqlens") if name in arguments}

    def run(arguments, integers):
        def forward(arguments):
            return gated_delta(**arguments, **integers, **static, backend=backend)

        if not gradients:
            return forward(arguments)
        out, pull = jax.vjp(forward, arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(arguments, integers)
    assert exported.mlir_module().count("tpu_custom_call") >= 1 + gradients
    return exported


KERNEL = PallasTPU(ahead_of_time=True)


def test_the_widest_kernel_lowers():
    sizes = dict(dtype="bfloat16", key_dim=128, value_dim=128, time=65)
    export(RandomProblem(**SIZES, **sizes, gates=GATES["kda"]), KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, key_dim, value_dim, time", [("bfloat16", 128, 128, 65), ("float32", 60, 100, 64)])
@pytest.mark.parametrize("gates", GATES)
def test_every_family_lowers(gates, dtype, key_dim, value_dim, time):
    sizes = dict(dtype=dtype, key_dim=key_dim, value_dim=value_dim, time=time)
    export(RandomProblem(**SIZES, **sizes, gates=GATES[gates]), KERNEL)


@pytest.mark.slow
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_documents_lower(packing):
    sizes = dict(dtype="bfloat16", key_dim=64, value_dim=64, time=64)
    problem = RandomProblem(**SIZES, **sizes, gates=GATES["gdn"], packing=packing, **PACKINGS[packing])
    export(problem, KERNEL)


@pytest.mark.parametrize("chunk_size", [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 64, 128))])
def test_every_chunk_size_lowers_where_documents_share_chunks(chunk_size):
    """A row has several chunks, none of the smaller ones as wide as a register of a TPU."""
    sizes = dict(dtype="bfloat16", key_dim=64, value_dim=64, time=130)
    problem = RandomProblem(**SIZES, **sizes, gates=GATES["gdn"], documents=((20, 0, -3, 100),))
    export(problem, PallasTPU(TileConfig(chunk_size=chunk_size), ahead_of_time=True))


@pytest.mark.slow
@pytest.mark.parametrize("residuals", ["states", "all", "none"])
def test_every_choice_of_residuals_lowers(residuals):
    problem = RandomProblem(**SIZES, dtype="bfloat16", key_dim=128, value_dim=128, time=64, gates=GATES["gdn"])
    export(problem, PallasTPU(TileConfig(owners=2), residuals=residuals, ahead_of_time=True))


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 128])
def test_a_prologue_lowers(groups):
    batch, time, heads, dim = 1, 65, 2, 128
    vector = jax.ShapeDtypeStruct((batch, time, heads, dim), jnp.bfloat16)
    decay, beta, rates, bias = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((batch, time, heads, groups), (batch, time, heads), (heads,), (heads, groups))
    )
    gates = RawGates.tied(beta, decay, A_log=rates, dt_bias=bias)

    def run(*arguments):
        out, pull = jax.vjp(lambda *x: gated_delta_raw(*x, backend=KERNEL), *arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(vector, vector, vector, gates)
    assert exported.mlir_module().count("tpu_custom_call") >= 2


@pytest.mark.parametrize("dtype, heads", [(jnp.bfloat16, 2), pytest.param(jnp.float32, 3, marks=pytest.mark.slow)])
def test_convolutions_lower_inside_of_the_forward_kernel(dtype, heads):
    batch, time, width, dim = 2, 300, 4, 128
    vector, window = (jax.ShapeDtypeStruct((batch, length, heads, dim), dtype) for length in (time, width - 1))
    weight = jax.ShapeDtypeStruct((width, heads, dim), jnp.float32)
    scalar = jax.ShapeDtypeStruct((batch, time, heads), jnp.float32)

    def run(q, k, v, weight, window, raw_decay, raw_beta):
        convs = ShortConvs(weight, weight, weight, q_window=window, k_window=window)
        return gated_delta_raw(q, k, v, RawGates.tied(raw_beta, raw_decay), convs=convs, backend=KERNEL)

    arguments = vector, vector, vector, weight, window, scalar, scalar
    exported = jax.export.export(jax.jit(run), platforms=["tpu"])(*arguments)
    assert exported.mlir_module().count("tpu_custom_call") >= 2


def test_float16_is_computed_in_float32():
    problem = RandomProblem(**SIZES, dtype="float16", key_dim=64, value_dim=64, time=64, gates=GATES["gdn"])
    export(problem, KERNEL, gradients=False)


@pytest.mark.parametrize(
    "dims, dtype", [((128, 128), jnp.float32), pytest.param((96, 192), jnp.bfloat16, marks=pytest.mark.slow)], ids=str
)
def test_the_decode_kernel_lowers_and_writes_its_pool_in_place(dims, dtype):
    batch, key_heads, value_heads, (key_dim, value_dim) = 4, 2, 4, dims
    key, value = (
        jax.ShapeDtypeStruct((batch, heads, dim), jnp.bfloat16)
        for heads, dim in ((key_heads, key_dim), (value_heads, value_dim))
    )
    decay, beta = (jax.ShapeDtypeStruct((batch, value_heads, 1), jnp.float32) for _ in range(2))
    pool = jax.ShapeDtypeStruct((9, value_heads, key_dim, value_dim), dtype)

    def run(pool, slots, q, k, v, decay, beta):
        return gated_delta_step(q, k, v, Gates.tied(beta, decay), pool, slots=slots, backend=KERNEL)

    step = jax.jit(run, donate_argnums=0)
    slots = jax.ShapeDtypeStruct((batch,), jnp.int32)
    module = jax.export.export(step, platforms=["tpu"])(pool, slots, key, key, value, decay, beta).mlir_module()
    assert module.count("tpu_custom_call") == 1 and "output_operand_alias" in module
