"""Problems of softmax attention that print on one line, and what they should give: dense matrices in NumPy, float64."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from gated_delta import softmax_attention
from gated_delta.testing import quick_jit

NAMES = ("out", "log_sum_exp", "d_q", "d_k", "d_v")
BUDGETS = {"float64": 1e-12, "float32": 1e-5, "bfloat16": 1.5e-2, "float16": 2e-3}


@dataclasses.dataclass(frozen=True)
class RandomAttention:
    """Documents are lengths, negative ones are padding; they and `offset` need not fill all keys."""

    batch: int = 2
    time: int = 21
    keys: int | None = None
    query_heads: int = 4
    kv_heads: int = 2
    key_dim: int = 4
    value_dim: int = 3
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    key_documents: tuple[tuple[int, ...], ...] | None = None
    offset: tuple[int, ...] | None = None
    size: float = 1.0
    dtype: str = "float32"
    seed: int = 0

    def arrays(self) -> dict[str, Any]:
        rng = np.random.default_rng(self.seed)
        keys = self.time if self.keys is None else self.keys
        dtype = jnp.dtype(self.dtype)
        shapes = {
            "q": (self.batch, self.time, self.query_heads, self.key_dim),
            "k": (self.batch, keys, self.kv_heads, self.key_dim),
            "v": (self.batch, keys, self.kv_heads, self.value_dim),
        }
        return {name: (self.size * rng.standard_normal(shape)).astype(dtype) for name, shape in shapes.items()}

    def options(self) -> dict[str, Any]:
        """The static ones."""
        names = ("causal", "window", "softcap", "scale")
        return {name: getattr(self, name) for name in names}

    def integers(self) -> dict[str, Any]:
        found: dict[str, np.ndarray] = {}
        if self.documents is not None:
            found["segment_ids"] = _ids(self.documents, self.batch, self.time)
        if self.key_documents is not None:
            found["key_segment_ids"] = _ids(self.key_documents, self.batch, self.keys or self.time)
        if self.offset is not None:
            found["query_offset"] = np.resize(np.array(self.offset, np.int32), self.batch)
        return found

    def cotangents(self) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng((self.seed, 1))
        shape = (self.batch, self.time, self.query_heads)
        wide = "float64" if self.dtype == "float64" else "float32"
        d_out = rng.standard_normal((*shape, self.value_dim)).astype(jnp.dtype(self.dtype))
        return d_out, rng.standard_normal(shape).astype(wide)

    def visible(self) -> np.ndarray:
        """`[batch, time, keys]`, entry by entry as the docstring has it."""
        keys = self.time if self.keys is None else self.keys
        integers = self.integers()
        offset = integers.get("query_offset", np.zeros(self.batch, int))
        ids = integers.get("segment_ids", np.zeros((self.batch, self.time), int))
        key_ids = integers.get(
            "key_segment_ids", ids if "segment_ids" in integers else np.zeros((self.batch, keys), int)
        )
        seen = np.zeros((self.batch, self.time, keys), bool)
        for b, i, j in np.ndindex(seen.shape):
            distance = offset[b] + i - j
            seen[b, i, j] = (
                ids[b, i] == key_ids[b, j] >= 0
                and (distance >= 0 or not self.causal)
                and (self.window is None or abs(distance) < self.window)
            )
        return seen

    def expected(self) -> dict[str, np.ndarray]:
        return dict(_expected(self))


def _ids(documents, batch: int, length: int) -> np.ndarray:
    ids = np.full((batch, length), -1, np.int32)
    for row in range(batch):
        start, number = 0, 0
        for run in documents[row % len(documents)]:
            if run > 0:
                ids[row, start : start + run] = 2 * number  # ids need not be ranks
                number += 1
            start += abs(run)
    return ids


def dense(q, k, v, visible, *, scale, softcap, d_out, d_log_sum_exp) -> dict[str, np.ndarray]:
    """Outputs and gradients in float64, `[batch, tokens, heads, dim]`, by the derivatives written out."""
    q, k, v, d_out = (np.asarray(x).astype(np.float64) for x in (q, k, v, d_out))
    group = q.shape[2] // k.shape[2]
    k_wide, v_wide = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scores = scale * np.einsum("bthd,bshd->bhts", q, k_wide)
    capped = scores if softcap is None else softcap * np.tanh(scores / softcap)
    seen = visible[:, None]
    some = seen.any(-1, keepdims=True)
    top = np.max(np.where(seen, capped, -np.inf), axis=-1, keepdims=True, initial=-np.inf)
    top = np.where(some, top, 0)
    weights = np.where(seen, np.exp(np.where(seen, capped, 0) - top), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(some, total, 1)
    with np.errstate(divide="ignore"):
        log_sum_exp = (top + np.log(total))[..., 0]
    d_weights = np.einsum("bthd,bshd->bhts", d_out, v_wide)
    d_lse = np.moveaxis(np.asarray(d_log_sum_exp).astype(np.float64), 2, 1)[..., None]
    d_scores = weights * (d_weights - np.sum(weights * d_weights, axis=-1, keepdims=True) + d_lse)
    if softcap is not None:
        d_scores = d_scores * (1 - np.square(capped / softcap))
    d_k = scale * np.einsum("bhts,bthd->bshd", d_scores, q)
    d_v = np.einsum("bhts,bthd->bshd", weights, d_out)

    def by_group(x):
        return x.reshape(*x.shape[:2], k.shape[2], group, x.shape[3]).sum(3)

    return {
        "out": np.einsum("bhts,bshd->bthd", weights, v_wide),
        "log_sum_exp": np.moveaxis(log_sum_exp, 1, 2),
        "d_q": scale * np.einsum("bhts,bshd->bthd", d_scores, k_wide),
        "d_k": by_group(d_k),
        "d_v": by_group(d_v),
    }


@functools.lru_cache(maxsize=256)
def _expected(problem: RandomAttention) -> Mapping[str, np.ndarray]:
    d_out, d_log_sum_exp = problem.cotangents()
    visible = problem.visible()
    d_log_sum_exp = np.where(visible.any(-1)[..., None], d_log_sum_exp, 0)  # -inf has no slope
    scale = problem.key_dim**-0.5 if problem.scale is None else problem.scale
    return dense(
        **problem.arrays(),
        visible=visible,
        scale=scale,
        softcap=problem.softcap,
        d_out=d_out,
        d_log_sum_exp=d_log_sum_exp,
    )


def pullback(backend, problem: RandomAttention) -> dict[str, np.ndarray]:
    """Outputs, log-sum-exps and all gradients."""
    return results(backend, problem, problem.arrays(), problem.cotangents())


def results(backend, problem: RandomAttention, arrays, cotangents) -> dict[str, np.ndarray]:
    with jax.enable_x64(problem.dtype == "float64"):
        run = _runner(backend, tuple(problem.options().items()))
        return dict(zip(NAMES, map(np.asarray, run(arrays, problem.integers(), cotangents))))


@functools.cache
def _runner(backend, options):
    def run(arrays, integers, cotangents):
        def call(arrays):
            return softmax_attention(**arrays, **integers, **dict(options), backend=backend, return_log_sum_exp=True)

        (out, log_sum_exp), pull = jax.vjp(call, arrays)
        d_out, d_log_sum_exp = cotangents
        (gradients,) = pull((d_out, jnp.where(log_sum_exp == -jnp.inf, 0, d_log_sum_exp)))
        return out, log_sum_exp, *(gradients[name] for name in "qkv")

    return quick_jit(run)


def relative_error(actual: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], dtype: str) -> float:
    """The worst of all arrays, in budgets: root mean squares, where both are finite; 1e12 where they differ in that."""
    worst = 0.0
    for name, wanted in expected.items():
        got = np.asarray(actual[name]).astype(np.float64)
        if not np.array_equal(np.isfinite(got), np.isfinite(wanted)):
            return 1e12
        got, wanted = got[np.isfinite(wanted)], wanted[np.isfinite(wanted)]
        off, size = (np.sqrt(np.mean(np.square(x))) if x.size else 0.0 for x in (got - wanted, wanted))
        worst = max(worst, off / (BUDGETS[dtype] * (size + 1e-3)))
    return float(worst)


def assert_close(actual, expected, problem: RandomAttention, dtype: str | None = None):
    for name in expected:
        error = relative_error({name: actual[name]}, {name: expected[name]}, dtype or problem.dtype)
        assert error <= 1, f"`{name}` is off by {error:.3g} budgets. Problem: {problem!r}"


PACKED = ((5, -3, 1, 12), (-2, 16, 3))
RULES: tuple[dict[str, Any], ...] = (
    dict(causal=True),
    dict(causal=True, window=6, documents=PACKED),
    dict(causal=False, softcap=2.0, documents=PACKED),
    dict(causal=False, window=4),
    dict(causal=True, window=5, softcap=3.0, offset=(17, 3), keys=37, scale=0.7),
    dict(causal=True, keys=30, offset=(0, 30), documents=((21,), (10, 11)), key_documents=((20,), (-4, 20, 6))),
    dict(causal=False, keys=9, softcap=1.5),
    dict(causal=True, window=1, keys=40, offset=(50, 19)),
)
HEADS: tuple[dict[str, Any], ...] = (
    dict(query_heads=4, kv_heads=2, key_dim=4, value_dim=3),
    dict(query_heads=3, kv_heads=3, key_dim=5, value_dim=8),
    dict(query_heads=4, kv_heads=1, key_dim=8, value_dim=8),
)


@st.composite
def attentions(draw, *, rules=RULES, heads=HEADS, times=(21,), dtypes=("float32",)):
    """From a small pool of programs: values are drawn freely, shapes are not."""
    problem = RandomAttention(
        **draw(st.sampled_from(heads)),
        **draw(st.sampled_from(rules)),
        time=draw(st.sampled_from(times)),
        size=draw(st.sampled_from([1.0, 0.0, 5.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    return of_dtype(problem, draw(st.sampled_from(dtypes)))


def of_dtype(problem: RandomAttention, dtype: str) -> RandomAttention:
    """No larger than the budget is for: rounded inputs move peaked weights, and a saturated cap has no slope."""
    most = 1.0 if dtype == "bfloat16" or problem.softcap is not None else 5.0
    return dataclasses.replace(problem, dtype=dtype, size=min(problem.size, most))


# ---- laws of every backend -------------------------------------------------------------------------------------------


def check_causality(backend, seed, cut):
    """What comes after token `cut` changes nothing up to it, bit for bit."""
    problem = RandomAttention(seed=seed)
    arrays, (d_out, d_lse) = problem.arrays(), problem.cotangents()
    d_out, d_lse = d_out.copy(), d_lse.copy()
    d_out[:, cut + 1 :], d_lse[:, cut + 1 :] = 0, 0
    other = RandomAttention(seed=seed + 1).arrays()
    changed = {name: np.concatenate([arrays[name][:, : cut + 1], other[name][:, cut + 1 :]], axis=1) for name in arrays}
    first, second = (results(backend, problem, x, (d_out, d_lse)) for x in (arrays, changed))
    for name in NAMES:
        np.testing.assert_array_equal(first[name][:, : cut + 1], second[name][:, : cut + 1], err_msg=name)


def check_isolation(backend, seed, value):
    """Whatever the other documents and the padding hold, bit for bit; and padding has an output and gradients of 0."""
    problem = RandomAttention(documents=PACKED, window=6, seed=seed)
    ids, arrays = problem.integers()["segment_ids"], problem.arrays()
    mine = np.zeros_like(ids, bool)
    mine[0] = ids[0] == ids[0, -1]
    loud = {name: np.where(mine[..., None, None], x, np.float32(value)) for name, x in arrays.items()}
    clean, actual = (results(backend, problem, x, problem.cotangents()) for x in (arrays, loud))
    for name in NAMES:
        np.testing.assert_array_equal(actual[name][mine], clean[name][mine], err_msg=name)
        if name != "log_sum_exp":
            assert not np.any(actual[name][ids < 0]), name
    assert (actual["log_sum_exp"][ids < 0] == -np.inf).all()
