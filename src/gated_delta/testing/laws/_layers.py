"""Laws of layers: shapes, states, padding, packing, files, dtypes, stacks, and the gradient of every parameter."""

import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from gated_delta._chunked import Chunked
from gated_delta._params import cast_params
from gated_delta._recurrent import Recurrent
from gated_delta._variant import Variant
from gated_delta.testing._strategies import segment_ids

from ._law import Law, cases, law, same_bits

LAYER_LAWS: dict[str, Law] = {}
"""Every law of layers by its name, in the order in which they are asked."""
BATCH, TIME, DOCUMENTS = 2, 21, 3
BUDGET = 1e-5
"""Relative RMS: that of the operator in float32."""

_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer to check: `layer(x, state)` gives `(out, state)`, and so does `layer.step` for one token.

    `imports` and `how`: as those of an `Implementation`. `variant`: where it has one, what its gates are.
    """

    name: str
    layer: Any
    model: int
    imports: str = ""
    how: str = "{name}"
    variant: Variant | None = None

    @staticmethod
    def refusal(problem) -> None:
        return None


def fast_jit(function: Callable) -> Callable:
    """`eqx.filter_jit` that compiles several times faster on a CPU; no device is looked for before the first call."""

    @functools.cache
    def compiled() -> Any:
        options: Any = {"compiler_options": _OPTIONS} if jax.default_backend() == "cpu" else {}
        return eqx.filter_jit(function, **options)

    return lambda *arguments: compiled()(*arguments)


@fast_jit
def run(layer, x, state=None, mask=None, ids=None, offsets=None):
    return layer(x, state, mask=mask, segment_ids=ids, cu_seqlens=offsets)


@fast_jit
def run_steps(layer, tokens, state):
    """Outputs and states after every token."""

    def body(state, token):
        out, state = layer.step(token, state)
        return state, (out, state)

    return jax.lax.scan(body, state, tokens)[1]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def draw_state(layer, seed: int, *batch: int):
    leaves, structure = jax.tree.flatten(eqx.filter_eval_shape(layer.init_state, *batch))
    return jax.tree.unflatten(structure, [draw(seed + i, *leaf.shape) for i, leaf in enumerate(leaves)])


def draw_parameters(shapes: Any, seed: int) -> Any:
    """Parameters for a layer of `jax.ShapeDtypeStruct`s: of sizes as after some training, without compiling."""
    rng = np.random.default_rng(seed)

    def drawn(path, leaf):
        name = jax.tree_util.keystr(path)
        if name.endswith(("A_log", "dt_bias")):
            return rng.uniform(*((0, 2.5) if name.endswith("A_log") else (-5, -1)), leaf.shape).astype(np.float32)
        if name.endswith("bias"):
            return 0.1 * rng.standard_normal(leaf.shape).astype(np.float32)
        size = 0.5 if "conv" in name else leaf.shape[-1] ** -0.5
        return (size * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)).astype(np.float32)  # a norm's is near 1

    return jax.tree.map(jnp.asarray, jax.tree_util.tree_map_with_path(drawn, shapes))


def index(state, place):
    return jax.tree.map(lambda a: np.asarray(a)[place], state)


def alone(layer, tokens, state):
    """What a document should give: by itself, token by token, without any mask; and the same for tokens one rounding
    off."""
    rounded = np.nextafter(tokens, np.where(draw(len(tokens), *tokens.shape) > 0, np.inf, -np.inf).astype(np.float32))
    wanted = []
    for some in (tokens, rounded):
        padded = np.zeros((TIME, tokens.shape[-1]), np.float32)
        padded[: len(tokens)] = some
        out, states = run_steps(layer, padded, state)
        wanted.append((np.asarray(out)[: len(tokens)], index(states, len(tokens) - 1) if len(tokens) else state))
    return wanted


def close(actual, wanted, what: str, budget: float = BUDGET, rounded: Any = None) -> float:
    """The worst relative RMS of any array, in budgets, if that is at most 1.

    `rounded`: what is wanted, for inputs one rounding off. Twice what it differs by is added to the budget: where query
    and key of a document's only token are nearly orthogonal, the norm of the heads magnifies the rounding of their
    product. Of 500 documents one had an output that one rounding of its token moves by 0.8e-5 to 3.6e-5 in float64.
    """
    worst = 0.0
    rounded = wanted if rounded is None else rounded
    for a, e, r in zip(*map(jax.tree.leaves, (actual, wanted, rounded)), strict=True):
        a, e, r = (np.asarray(x, np.float64) for x in (a, e, r))
        if a.shape != e.shape:
            raise AssertionError(f"{what}: a shape is {a.shape} instead of {e.shape}.")
        if a.size:
            off, moved = (np.sqrt(np.mean((x - e) ** 2)) / (np.sqrt(np.mean(e**2)) + 1e-30) for x in (a, r))
            error = float(off / (budget + 2 * moved))
            if not error <= 1:
                raise AssertionError(f"{what}: off by {error:.3g} times the budget of {budget + 2 * moved:.2g}.")
            worst = max(worst, error)
    return worst


_SEEDS = st.integers(0, 99)
layer_law = functools.partial(law, registry=LAYER_LAWS)


@layer_law(
    "Results have the shape and dtype of x; one sequence, a batch of them and `vmap` give the same.",
    r"f(x)_b = f(x_b), \quad \mathrm{vmap}(f)(x) = f(x)",
    lambda subject: cases(seed=_SEEDS),
)
def layer_batches(subject, seed):
    layer = subject.layer
    x, state = draw(seed, BATCH, TIME, subject.model), draw_state(layer, seed + 1, BATCH)
    batched = run(layer, x, state)
    if batched[0].shape != x.shape or batched[0].dtype != x.dtype:
        raise AssertionError(f"The output must be {x.dtype}{x.shape}, but it is {batched[0].dtype}{batched[0].shape}.")
    worst = close(_vmapped(layer, x, state), batched, "`vmap` of one sequence")
    return max(worst, close(run(layer, x[0], index(state, 0)), index(batched, 0), "a sequence without a batch axis"))


@fast_jit
def _vmapped(layer, x, state):
    return jax.vmap(lambda x, state: layer(x, state))(x, state)


@layer_law(
    "Documents and padding anywhere give what each document gives alone, token by token.",
    r"(o, S)^{(d)} = \mathrm{step}(\dots \mathrm{step}(x^{(d)}_1, S_0) \dots), \quad o_t = 0 \text{ at padding}",
    lambda subject: cases(
        seed=_SEEDS,
        ids=segment_ids(batch=BATCH, time=TIME).map(lambda ids: ids.tolist()),
        masked=st.lists(st.tuples(st.integers(0, BATCH - 1), st.integers(0, TIME - 1)), max_size=8),
    ),
)
def layer_documents(subject, seed, ids, masked):
    """`ids` number the documents, -1 for padding; `masked` are further padding tokens, as (row, token)."""
    layer, mask = subject.layer, np.ones((BATCH, TIME), bool)
    for place in masked:
        mask[place] = False
    x, state = draw(seed, BATCH, TIME, subject.model), draw_state(layer, seed + 1, BATCH)
    out, new = run(layer, x, state, mask, np.array(ids, np.int32))
    ids, worst = np.where(mask, ids, -1), 0.0
    for row in range(BATCH):
        last = last_rounded = index(state, row)
        for rank, document in enumerate(np.unique(ids[row][ids[row] >= 0])):
            last = last if rank == 0 else jax.tree.map(np.zeros_like, last)
            tokens = ids[row] == document
            (wanted, last), (rounded, last_rounded) = alone(layer, x[row, tokens], last)
            what = f"document {document} of row {row}"
            worst = max(worst, close(np.asarray(out)[row, tokens], wanted, what, rounded=rounded))
        worst = max(worst, close(index(new, row), last, f"the state of row {row}", rounded=last_rounded))
    if np.any(np.asarray(out)[ids < 0]):
        raise AssertionError("The output at padding must be 0.")
    return worst


@layer_law(
    "Offsets give every document states of its own; one without tokens keeps them bit for bit.",
    r"(o, S)^{(d)} = f(x^{(d)}, S_0^{(d)}), \quad T_d = 0 \Rightarrow S^{(d)} = S_0^{(d)}",
    lambda subject: cases(
        seed=_SEEDS, cuts=st.lists(st.integers(0, TIME), min_size=DOCUMENTS, max_size=DOCUMENTS).map(sorted)
    ),
)
def layer_offsets(subject, seed, cuts):
    layer, offsets = subject.layer, np.array([0, *cuts], np.int32)
    x, state = draw(seed, TIME, subject.model), draw_state(layer, seed + 1, DOCUMENTS)
    out, new = run(layer, x, state, None, None, offsets)
    worst = 0.0
    for document in range(DOCUMENTS):
        tokens = slice(offsets[document], offsets[document + 1])
        before, after = index(state, document), index(new, document)
        if tokens.start == tokens.stop:
            for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(before)):
                same_bits(a, b, f"the state of the empty document {document}")
        else:
            wanted, rounded = alone(layer, x[tokens], before)
            found = np.asarray(out)[tokens], after
            worst = max(worst, close(found, wanted, f"document {document}", rounded=rounded))
    if np.any(np.asarray(out)[offsets[-1] :]):
        raise AssertionError("The output past the last offset must be 0.")
    return worst


@layer_law(
    "A sequence cut in two, its state handed on, is the whole.",
    r"f(x_{1:T}, S_0) = (o_{1:t} \,\|\, o_{t+1:T}, S_T)",
    lambda subject: cases(seed=_SEEDS, cut=st.sampled_from([1, 3, 16, 20])),
)
def layer_resume(subject, seed, cut):
    layer, x = subject.layer, draw(seed, BATCH, TIME, subject.model)
    state = draw_state(layer, seed + 1, BATCH)
    first, middle = run(layer, x[:, :cut], state)
    second, last = run(layer, x[:, cut:], middle)
    return close((np.concatenate([first, second], axis=1), last), run(layer, x, state), f"cut after {cut} tokens")


@layer_law(
    "Later tokens change no earlier output, bit for bit.",
    r"x_{\le t} = y_{\le t} \Rightarrow f(x)_{\le t} = f(y)_{\le t}",
    lambda subject: cases(seed=_SEEDS, cut=st.integers(1, TIME - 1)),
)
def layer_causality(subject, seed, cut):
    layer, x = subject.layer, draw(seed, BATCH, TIME, subject.model)
    state = draw_state(layer, 7, BATCH)
    later = np.where(np.arange(TIME)[:, None] < cut, x, 10 * draw(seed + 1, BATCH, TIME, subject.model))
    one, two = run(layer, x, state)[0], run(layer, later, state)[0]
    same_bits(np.asarray(two)[:, :cut], np.asarray(one)[:, :cut], f"outputs of the first {cut} tokens")
    return 0.0


def _has_backends(subject):
    return cases(seed=_SEEDS) if hasattr(subject.layer, "backend") else "it has no attribute `backend`"


@layer_law("Every backend gives the same.", r"f_{\mathrm{chunked}} = f_{\mathrm{recurrent}}", _has_backends)
def layer_backends(subject, seed):
    x, state = draw(seed, BATCH, TIME, subject.model), draw_state(subject.layer, seed + 1, BATCH)
    chunked, recurrent = (
        run(eqx.tree_at(lambda m: m.backend, subject.layer, backend, is_leaf=lambda a: a is None), x, state)
        for backend in (Chunked(16), Recurrent())
    )
    return close(chunked, recurrent, "Chunked(16) beside Recurrent()")


@layer_law(
    "What is written to a file and read again is the same layer, bit for bit.",
    r"\mathrm{read}(\mathrm{write}(f)) = f",
    lambda subject: cases(seed=_SEEDS),
)
def layer_serialisation(subject, seed):
    layer, file = subject.layer, io.BytesIO()
    eqx.tree_serialise_leaves(file, layer)
    file.seek(0)
    blank = jax.tree.map(lambda x: jnp.zeros_like(x) if eqx.is_array(x) else x, layer)
    read = eqx.tree_deserialise_leaves(file, blank)
    x = draw(seed, BATCH, TIME, subject.model)
    for a, b in zip(jax.tree.leaves(run(read, x)), jax.tree.leaves(run(layer, x))):
        same_bits(a, b, "a result of the layer that was read")
    config: Any = getattr(layer, "config", None)
    if hasattr(config, "to_json") and type(config).from_json(config.to_json()) != config:
        raise AssertionError("`from_json(to_json())` gives another configuration.")
    return 0.0


@layer_law(
    "With parameters and inputs in bfloat16 it gives what float32 gives for the same rounded numbers.",
    r"\| f_{\mathrm{bf16}}(x) - f_{\mathrm{f32}}(x) \| \le 0.1\, \| f_{\mathrm{f32}}(x) \| \quad "
    r"\text{(heads of fewer than 32 channels)}, \quad S \text{ in float32}",
    lambda subject: cases(seed=_SEEDS),
)
def layer_bfloat16(subject, seed):
    x = draw(seed, BATCH, TIME, subject.model).astype(jnp.bfloat16)
    layer = cast_params(subject.layer, jnp.bfloat16)
    out, state = run(layer, x)
    if out.dtype != jnp.bfloat16:
        raise AssertionError(f"The output must be bfloat16, but it is {out.dtype}.")
    recurrent = getattr(state, "recurrent", None)
    if recurrent is not None and recurrent.dtype != jnp.float32:
        raise AssertionError(f"The recurrent state must be float32, but it is {recurrent.dtype}.")
    rounded = jax.tree.map(lambda a: a.astype(jnp.float32) if eqx.is_inexact_array(a) else a, layer)
    return close(out, run(rounded, x.astype(np.float32))[0], "bfloat16 beside float32", 1e-1)


@layer_law(
    "Stacked layers in a `scan`, rematerialised, give what a loop over them gives.",
    r"\mathrm{scan}(f_{1:3})(x) = f_3(f_2(f_1(x)))",
    lambda subject: cases(seed=_SEEDS),
)
def layer_stacked(subject, seed):
    arrays, rest = eqx.partition(subject.layer, eqx.is_array)
    layers = [jax.tree.map(lambda a, i=i: a * (1 + 0.1 * i), arrays) for i in range(3)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *layers)
    x = draw(seed, BATCH, TIME, subject.model)
    looped = x
    for layer in layers:
        looped = looped + run(eqx.combine(layer, rest), looped)[0]
    return close(_scanned(stacked, rest, x), looped, "a scan over stacked layers")


@fast_jit
def _scanned(stacked, rest, x):
    body = jax.checkpoint(lambda x, layer: (x + eqx.combine(layer, rest)(x)[0], None))
    return jax.lax.scan(body, x, stacked)[0]


@layer_law(
    "Every parameter has a gradient that is not zero, and it is the slope of the results in float64.",
    r"0 \ne \langle \nabla_\theta L, u \rangle = \tfrac43 D_{h/2} - \tfrac13 D_h + O(h^4), \quad "
    r"D_h = \frac{L(\theta + h u) - L(\theta - h u)}{2h}",
    lambda subject: cases(seed=_SEEDS),
)
def layer_gradients(subject, seed):
    step, promise, worst = 1e-5, 1e-6, 0.0
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        arrays, rest = eqx.partition(jax.tree.map(_as_float64, subject.layer), eqx.is_inexact_array)
        x = jnp.asarray(draw(seed, BATCH, TIME, subject.model), jnp.float64)
        weight = jnp.asarray(rng.standard_normal(x.shape))
        gradients = _slope(arrays, rest, x, weight)
        leaves, structure = jax.tree.flatten(arrays)
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arrays)]
        for place, (name, gradient) in enumerate(zip(paths, jax.tree.leaves(gradients))):
            gradient = np.asarray(gradient)
            name = name.lstrip(".")
            if not np.isfinite(gradient).all() or not gradient.any():
                raise AssertionError(f"The gradient of `{name}` is {'0' if not gradient.any() else 'not finite'}.")
            direction = rng.standard_normal(gradient.shape)

            def loss(change, place=place):
                moved = [leaf + change if i == place else leaf for i, leaf in enumerate(leaves)]
                return float(_loss(structure.unflatten(moved), rest, x, weight))

            def difference(step, loss=loss, direction=direction):
                return (loss(step * direction) - loss(-step * direction)) / (2 * step)

            # Extrapolated: a normalised query that is nearly zero bends the loss within one step.
            slope = (4 * difference(step / 2) - difference(step)) / 3
            size = np.linalg.norm(gradient) * np.linalg.norm(direction)
            error = abs(slope - np.sum(gradient * direction)) / size / promise
            if not error <= 1:
                raise AssertionError(
                    f"The gradient of `{name}` is {np.sum(gradient * direction):.8g} along a random "
                    f"direction, but the slope is {slope:.8g}: {error:.3g} times the budget of {promise:g}."
                )
            worst = max(worst, float(error))
    return worst


def _as_float64(x):
    return x.astype(jnp.float64) if eqx.is_inexact_array(x) else x


@fast_jit
def _loss(arrays, rest, x, weight):
    out, _ = eqx.combine(arrays, rest)(x)
    return jnp.sum(weight * out)


@fast_jit
def _slope(arrays, rest, x, weight):
    return jax.grad(lambda arrays: jnp.sum(weight * eqx.combine(arrays, rest)(x)[0]))(arrays)
