"""No array of the size time x key_dim x value_dim is ever alive, forward or backward."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gated_delta import GDN, Chunked, Gates, Recurrent, gated_delta
from gated_delta.testing import equations, quick_jit

TIME, HEADS, KEY_DIM, VALUE_DIM, DOCUMENTS = 1024, 2, 64, 64, 24
WAYS = [Recurrent(), Recurrent(checkpoint_every=32), Chunked(), Chunked(64, residuals="all"), Chunked(residuals="none")]
GATES = ["head", "channel", "none"]


def shapes(time, packing, gates, key_dim=KEY_DIM, value_dim=VALUE_DIM, heads=HEADS):
    """Arguments as shapes only."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    width = {"head": 1, "channel": key_dim, "none": None}[gates]
    decay = None if width is None else array(1, time, heads, width)
    arguments = {
        "q": array(1, time, heads, key_dim),
        "k": array(1, time, heads, key_dim),
        "v": array(1, time, heads, value_dim),
        "gates": Gates(decay, array(1, time, heads, 1), array(1, time, heads, value_dim)),
    }
    states = {"none": (1,), "ids": (1,), "slots": (1, DOCUMENTS), "offsets": (DOCUMENTS,)}[packing]
    arguments["initial_state"] = array(*states, heads, key_dim, value_dim)
    if packing == "offsets":
        arguments["cu_seqlens"] = array(DOCUMENTS + 1, dtype=jnp.int32)
    elif packing != "none":
        arguments["segment_ids"] = array(1, time, dtype=jnp.int32)
    return arguments


def forward_and_backward(backend, packing):
    options = {"num_segments": DOCUMENTS} if packing == "slots" else {}

    def run(arguments):
        integers = {name: arguments.pop(name) for name in ("segment_ids", "cu_seqlens") if name in arguments}

        def call(arguments):
            return gated_delta(**arguments, **integers, **options, backend=backend)

        out, pull = jax.vjp(call, arguments)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return run


def largest(backend, packing, gates, time=TIME):
    """Elements of the largest array of a forward and backward pass, and what it is."""
    jaxpr = jax.make_jaxpr(forward_and_backward(backend, packing))(shapes(time, packing, gates))
    found = ((math.prod(x.aval.shape), f"{e.primitive}: {x.aval}") for e in equations(jaxpr) for x in e.outvars)
    return max(found)


def allowed(backend, packing, gates, time=TIME):
    """Kept states, or rows of a chunk's two matrices for every token, whichever is more."""
    chosen = 16 if gates == "channel" else 32
    kept = (backend.chunk_size or chosen) if isinstance(backend, Chunked) else backend.checkpoint_every
    # one state per chunk, one chunk more for every document with a state of its own, and the states handed in and out
    documents = DOCUMENTS if packing in ("slots", "offsets") else 1
    chunks = time // kept + 2 * documents + 2  # before the first document there may be padding
    if isinstance(backend, Recurrent):
        chunks += kept  # the states of one block of tokens, while it is differentiated
    rows = time if documents == 1 else time + (documents + 1) * kept
    return HEADS * max(chunks * KEY_DIM * VALUE_DIM, rows * max(2 * kept, KEY_DIM + VALUE_DIM))


@pytest.mark.parametrize("backend", WAYS, ids=str)
@pytest.mark.parametrize(
    "packing, gates", [*(("none", gates) for gates in GATES), ("ids", "head"), ("slots", "head"), ("offsets", "head")]
)
def test_no_array_holds_a_state_for_every_token(backend, packing, gates):
    size, equation = largest(backend, packing, gates)
    assert allowed(backend, packing, gates) < TIME * HEADS * KEY_DIM * VALUE_DIM / 4
    assert size <= allowed(backend, packing, gates), equation


@pytest.mark.parametrize(
    "backend, share",
    [
        (Recurrent(), 1 / 8),
        (Chunked(64, residuals="states"), 1 / 8),
        # Beside what is kept, six vectors of 64 numbers for each token and its gates: 389 numbers, under 1/10 (325 with
        # the tests' compiler flag of jax 0.10; from 0.11 on there is none).
        (Chunked(residuals="none"), 1 / 10 + 1 / 256),
        # A state for every 32 tokens, 1/32; for each token its two products with it, 1/32, and its part of an inverse.
        (Chunked(), 1 / 10 + 1 / 32 + 1 / 32 + 1 / 128),
    ],
    ids=str,
)
def test_each_token_costs_a_small_part_of_a_state(backend, share):
    """What the compiled program holds at once grows by a small share of a state per token."""
    sizes = dict(key_dim=64, value_dim=64, heads=1)
    run = quick_jit(forward_and_backward(backend, "none"))
    held = []
    for time in (1024, 2048):
        memory = run.lower(shapes(time, "none", "head", **sizes)).compile().memory_analysis()
        held.append(memory.temp_size_in_bytes)
    per_token = (held[1] - held[0]) / 1024 / np.float32(0).nbytes
    assert 0 < per_token < share * 64 * 64


# ---- long sequences --------------------------------------------------------------------------------------------------

LONG, SEGMENT = 1 << 17, 1024


@pytest.mark.parametrize("backend", [Chunked(residuals=kept) for kept in ("solves", "states", "none", "all")], ids=str)
@pytest.mark.parametrize("gates", ["head", "channel"])
def test_nor_does_one_of_128k_tokens(backend, gates):
    size, equation = largest(backend, "none", gates, LONG)
    assert size <= allowed(backend, "none", gates, LONG) < LONG * HEADS * KEY_DIM * VALUE_DIM / 4, equation


def in_segments(mixer, x):
    """The sum of a layer's outputs over a long sequence, `[time, model]`, and nothing kept but the state before each
    segment."""

    @jax.checkpoint
    def body(state, segment):
        out, state = mixer(segment, state)
        return state, jnp.sum(out**2)

    _, sums = jax.lax.scan(body, mixer.init_state(), x.reshape(-1, min(SEGMENT, x.shape[0]), x.shape[1]))
    return jnp.sum(sums)


def layer():
    return GDN(32, key_heads=1, key_dim=32, value_dim=32, key=jax.random.key(0))


def held_in_segments(function, time: int) -> int:
    """Bytes of what the compiled program holds beside arguments and results."""
    mixer = eqx.filter_eval_shape(layer)
    x = jax.ShapeDtypeStruct((time, 32), jnp.float32)
    return quick_jit(function).lower(mixer, x).compile().memory_analysis().temp_size_in_bytes


def test_a_million_tokens_forward_in_segments_hold_what_a_few_thousand_do():
    few, many = (held_in_segments(in_segments, time) for time in (4 * SEGMENT, 1 << 20))
    assert many <= few + 16 * (1 << 20) / SEGMENT  # one number for each segment


def test_training_in_segments_holds_one_state_for_each():
    few, many = (held_in_segments(jax.grad(in_segments), time) for time in (4 * SEGMENT, LONG))
    state = sum(x.nbytes for x in jax.tree.leaves(layer().init_state()))
    assert many - few <= 1.25 * state * (LONG // SEGMENT - 4)
    assert many < LONG * 32 * 32 * 4 / 50


def test_segments_have_the_loss_and_the_gradient_of_one_call():
    mixer, x = layer(), jax.random.normal(jax.random.key(1), (3 * SEGMENT, 32))
    whole = jax.value_and_grad(lambda mixer, x: jnp.sum(mixer(x)[0] ** 2), argnums=(0, 1))
    expected = quick_jit(whole)(mixer, x)
    actual = quick_jit(jax.value_and_grad(in_segments, argnums=(0, 1)))(mixer, x)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())
