"""Models train with the interpreted kernels as they do with XLA's chunks."""

import importlib.util
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gated_delta import GDN, Chunked, GatedDeltaMixer, cast_params
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import quick_jit

KERNEL = PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an integer power
        yield


def demo():
    path = Path(__file__).resolve().parents[2] / "examples" / "language_model.py"
    spec = importlib.util.spec_from_file_location("language_model_for_kernels", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def with_backend(model, backend):
    def mixers(model):
        return [block.mixer.backend for block in model.stack.blocks if isinstance(block.mixer, GatedDeltaMixer)]

    return eqx.tree_at(mixers, model, [backend] * len(mixers(model)), is_leaf=lambda x: x is None)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gdn", "kda", "gdn2", "sla"])
def test_a_step_of_the_demos_layers_is_the_same(mixer):
    language_model = demo()
    settings = language_model.Settings(
        mixer=mixer, width=32, blocks=4, length=40, batch=1, steps=1, learning_rate=0.0, seed=0, text=""
    )
    model = language_model.LanguageModel(settings, key=jax.random.key(0))
    window = np.random.default_rng(0).integers(256, size=41).astype(np.int32)

    def nats(model):
        return optax.softmax_cross_entropy_with_integer_labels(model(window[:-1]), window[1:]).mean()

    found = {}
    for name, backend in (("kernels", KERNEL), ("chunks", Chunked(16))):
        arrays, static = eqx.partition(with_backend(model, backend), eqx.is_inexact_array)
        run = quick_jit(jax.value_and_grad(lambda arrays: nats(eqx.combine(arrays, static))))  # noqa: B023
        found[name] = run(arrays)
    (loss, gradients), (wanted, wanted_gradients) = found["kernels"], found["chunks"]
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for (path, x), y in zip(jax.tree.leaves_with_path(gradients), jax.tree.leaves(wanted_gradients), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * np.abs(y).max(), err_msg=jax.tree_util.keystr(path))


class Small(eqx.Module):
    embedding: jax.Array
    mixer: eqx.Module
    head: jax.Array

    def __init__(self, backend, *, key):
        first, second, third = jax.random.split(key, 3)
        self.embedding = jax.random.normal(first, (16, 16)) / 4
        self.mixer = GDN(16, key_heads=1, value_heads=2, key_dim=8, value_dim=8, backend=backend, key=second)
        self.head = jax.random.normal(third, (16, 16)) / 4

    def __call__(self, tokens):
        x = self.embedding[tokens]
        return jnp.matmul(x + self.mixer(x)[0], self.head).astype(jnp.float32)


@pytest.mark.slow
def test_two_hundred_steps_in_bfloat16_lose_what_float32_does():
    """The next token is the one before, moved by one in three: a task that no model does without error."""
    steps = 200
    rng = np.random.default_rng(0)
    batches = rng.integers(16, size=(steps, 4, 1)) + np.cumsum(rng.uniform(size=(steps, 4, 33)) < 1 / 3, axis=-1)
    batches = (batches % 16).astype(np.int32)
    optimizer = optax.adam(3e-3)

    def train(backend, dtype):
        model = Small(backend, key=jax.random.key(1))
        arrays, static = eqx.partition(model, eqx.is_inexact_array)

        def loss(arrays, windows):
            logits = cast_params(eqx.combine(arrays, static), dtype)(windows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

        @quick_jit
        def step(arrays, state, windows):
            value, gradients = jax.value_and_grad(loss)(arrays, windows)
            updates, state = optimizer.update(gradients, state)
            return optax.apply_updates(arrays, updates), state, value

        state, losses = optimizer.init(arrays), []
        for windows in batches:
            arrays, state, value = step(arrays, state, windows)
            losses.append(float(value))
        return np.array(losses)

    actual, wanted = train(KERNEL, jnp.bfloat16), train(Chunked(16), jnp.float32)
    assert wanted[-20:].mean() < 0.5 * wanted[:5].mean()
    means = (np.mean(losses.reshape(-1, 20), axis=1) for losses in (actual, wanted))  # of one batch: 2 % apart at most
    np.testing.assert_allclose(*means, rtol=0.01)
