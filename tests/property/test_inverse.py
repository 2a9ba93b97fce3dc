"""The inverse of a chunk keeps the error that its name promises, whatever the keys."""

import functools
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, target
from hypothesis import strategies as st

from gated_delta._tile import Arithmetic, block_inverses

KEY_DIM = 128
HEADS = 2


def keys_of_cosine(rng, chunk, cosine, signs):
    """Unit keys `[heads, chunk, key_dim]` of one pairwise cosine, with random signs or without."""
    own, shared = (rng.standard_normal((HEADS, n, KEY_DIM)) for n in (chunk, 1))
    own, shared = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (own, shared))
    keys = np.sqrt(cosine) * shared + np.sqrt(1 - cosine) * own
    keys = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    return keys * rng.choice([-1.0, 1.0], (HEADS, chunk, 1)) if signs else keys


ERASE = {
    "uniform": lambda rng, shape: rng.uniform(0, 1, (*shape, 1)),
    "upper_half": lambda rng, shape: rng.uniform(0.5, 1, (*shape, 1)),
    "half": lambda rng, shape: np.full((*shape, 1), 0.5),
    "one": lambda rng, shape: np.ones((*shape, 1)),
    "channel_uniform": lambda rng, shape: rng.uniform(0, 1, (*shape, KEY_DIM)),
    "channel_sigmoid": lambda rng, shape: 1 / (1 + np.exp(-2 * rng.standard_normal((*shape, KEY_DIM)))),
    "channel_binary": lambda rng, shape: rng.choice([0.0, 1.0], (*shape, KEY_DIM)),
}
DOUBLED = {
    "to_two": lambda rng, shape: rng.uniform(0, 2, (*shape, 1)),
    "one_and_a_half": lambda rng, shape: np.full((*shape, 1), 1.5),
    "two": lambda rng, shape: np.full((*shape, 1), 2.0),
    "channel_to_two": lambda rng, shape: rng.uniform(0, 2, (*shape, KEY_DIM)),
}


def pairs_of(rng, chunk, cosine, signs, erase):
    keys = keys_of_cosine(rng, chunk, cosine, signs)
    gates = (ERASE | DOUBLED)[erase](rng, keys.shape[:2])
    return np.tril((gates * keys) @ np.swapaxes(keys, -1, -2), -1)


def inverse_in_float64(pairs):
    """Row by row: `M_i = I_i - P_i M`."""
    inverse = np.zeros_like(pairs)
    for i in range(pairs.shape[-1]):
        inverse[..., i, :] = np.eye(pairs.shape[-1])[i] - (pairs[..., i : i + 1, :i] @ inverse[..., :i, :])[..., 0, :]
    return inverse


@functools.cache
def compiled(arithmetic):
    return jax.jit(lambda pairs: block_inverses(pairs, arithmetic))


def inverse_by(arithmetic, pairs):
    """The whole inverse, in float64 from the diagonal blocks that the solve multiplies with."""
    side = np.asarray(compiled(arithmetic)(pairs), np.float64)
    block, chunk = side.shape[-2:]
    out = np.zeros((*side.shape[:-2], chunk, chunk))
    for start in range(0, chunk, block):
        own = slice(start, start + block)
        out[..., own, own] = side[..., own]
        below = pairs[..., own, :start].astype(np.float64)
        out[..., own, :start] = -side[..., own] @ (below @ out[..., :start, :start])
    return out


COSINES = [0.0, 0.5, 0.9, 0.99, 0.999, 1.0]


@functools.cache
def cases(chunk, doubled):
    """Every key family with every erase gate: what each is, its pairs in float32, and their inverse in float64."""
    rng = np.random.default_rng(chunk)
    labels = list(itertools.product(COSINES, [False, True], DOUBLED if doubled else ERASE))
    pairs = np.stack([pairs_of(rng, chunk, *label) for label in labels]).astype(np.float32)
    return labels, pairs, inverse_in_float64(pairs.astype(np.float64))


def check(labels, pairs, inverse, arithmetic, promise):
    """No element of any inverse is off by more than the promise."""
    errors = np.abs(inverse_by(arithmetic, pairs) - inverse).max((1, 2, 3))
    worst = np.argmax(errors)
    assert errors[worst] <= promise, (labels[worst], errors[worst])
    return errors[worst]


PROMISES = {
    "approx": (Arithmetic("bfloat16", inverse="approx"), 2e-2),
    "approx, float32 inputs": (Arithmetic("float32", inverse="approx"), 2e-2),
    "exact, bfloat16 inputs": (Arithmetic("bfloat16"), 1e-4),
    "exact, float32 inputs": (Arithmetic("float32"), 1e-5),
    "substitution": (Arithmetic("float32", inverse="substitution"), 1e-5),
}
DOUBLED_PROMISES = {
    "exact, bfloat16 inputs": (Arithmetic("bfloat16", erase_max=2.0), 1e-4),
    "exact, float32 inputs": (Arithmetic("float32", erase_max=2.0), 1e-4),
    "substitution": (Arithmetic("float32", inverse="substitution", erase_max=2.0), 1e-4),
}


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("name", PROMISES)
def test_gates_to_one_keep_the_promise_on_every_key_family(name, chunk):
    check(*cases(chunk, doubled=False), *PROMISES[name])


@pytest.mark.parametrize("chunk", [64, 128])
@pytest.mark.parametrize("name", DOUBLED_PROMISES)
def test_gates_to_two_keep_the_promise_on_every_key_family(name, chunk):
    check(*cases(chunk, doubled=True), *DOUBLED_PROMISES[name])


@given(
    seed=st.integers(0, 999),
    cosine=st.floats(0, 1),
    signs=st.booleans(),
    erase=st.sampled_from(list(ERASE)),
    name=st.sampled_from(list(PROMISES)),
)
def test_any_keys_and_gates_keep_the_promise(seed, cosine, signs, erase, name):
    pairs = pairs_of(np.random.default_rng(seed), 64, cosine, signs, erase)[None].astype(np.float32)
    arithmetic, promise = PROMISES[name]
    found = check([None], pairs, inverse_in_float64(pairs.astype(np.float64)), arithmetic, promise)
    target(float(np.log10(found / promise + 1e-9)), label="log of error over promise")


@pytest.mark.parametrize("chunk", [64, 128])
def test_an_approximate_inverse_is_finite_for_gates_to_two(chunk):
    _, pairs, _ = cases(chunk, doubled=True)
    assert np.isfinite(compiled(Arithmetic("bfloat16", inverse="approx"))(pairs)).all()


@pytest.mark.parametrize("terms", [1, 3, 7])
def test_a_truncated_inverse_is_the_first_powers_of_the_series(terms):
    pairs = 0.2 * pairs_of(np.random.default_rng(0), 64, 0.5, True, "uniform")
    wanted, power = np.broadcast_to(np.eye(64), pairs.shape), np.broadcast_to(np.eye(64), pairs.shape)
    for _ in range(terms):
        power = -power @ pairs
        wanted = wanted + power
    actual = compiled(Arithmetic("float32", inverse=f"truncated:{terms}"))(pairs.astype(np.float32))
    assert np.abs(np.asarray(actual) - wanted).max() <= 1e-5


def test_in_float64_every_promise_is_1e_12():
    with jax.enable_x64(True):
        for erase, erase_max in (("one", 1.0), ("two", 2.0), ("channel_uniform", 1.0)):
            pairs = pairs_of(np.random.default_rng(1), 64, 0.9, True, erase)
            inverse = inverse_by(Arithmetic("float64", erase_max=erase_max), pairs)
            assert np.abs(inverse - inverse_in_float64(pairs)).max() <= 1e-12


@pytest.mark.smoke
def test_a_power_of_the_pairs_is_never_formed():
    """Equal keys at beta 1: the inverse has entries 0, 1 and -1 while powers of the pairs reach 1e37."""
    pairs = np.tril(np.ones((1, 128, 128), np.float32), -1)
    for name in ("exact", "approx", "substitution"):
        inverse = inverse_by(Arithmetic("float32", inverse=name), pairs)
        np.testing.assert_array_equal(inverse[0], np.eye(128) - np.eye(128, k=-1))
