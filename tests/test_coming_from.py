"""docs/coming-from.md: every argument of every table, by the functions of the page against definitions in NumPy."""

import importlib.util
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
FAST = {"xla_backend_optimization_level": 0}
BATCH, TIME, HEADS, GROUP, KEY_DIM, VALUE_DIM = 1, 11, 2, 2, 4, 3


def load_reference():
    spec = importlib.util.spec_from_file_location("coming_from_reference", ROOT / "tests" / "cases" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()
page = {"__name__": "__docs__"}
for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
    exec(code, page)


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def unit(x, epsilon=0.0):
    return x / np.sqrt(np.sum(x**2, axis=-1, keepdims=True) + epsilon)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softplus(x):
    return np.log1p(np.exp(x))


def heads_of(channels):
    return HEADS * GROUP, *(() if channels is None else (channels,))


# ---- arguments in each library's layout, and what they mean ----------------------------------------------------------


def arrays(decay=None, raw=False):
    """`q`, `k`, `v`, `g`, `beta` in fla's layout. Raw: keys of any length, gates before their activation."""
    shape = BATCH, TIME
    q, k = draw(0, *shape, HEADS, KEY_DIM), draw(1, *shape, HEADS, KEY_DIM)
    v, g, beta = draw(2, *shape, HEADS * GROUP, VALUE_DIM), draw(3, *shape, *heads_of(decay)), draw(4, *shape, 4)
    return (
        dict(q=q, k=k, v=v, g=g, beta=beta)
        if raw
        else dict(q=unit(q), k=unit(k), v=v, g=-softplus(g), beta=sigmoid(beta))
    )


def defined(given):
    """What fla's documentation says that these arguments mean: outputs and states, in float64."""
    q, k, v, g = (given.get(name) for name in "qkvg")
    if given.get("use_qk_l2norm_in_kernel"):
        q, k = unit(q, 1e-6), unit(k, 1e-6)
    if given.get("use_gate_in_kernel"):
        A_log, dt_bias = given.get("A_log"), given.get("dt_bias", np.zeros(g.shape[2:]))
        rate = 1.0 if A_log is None else np.exp(A_log).reshape(-1, *(1,) * (g.ndim - 3))
        raw = g + dt_bias.reshape(g.shape[2:])
        bound = given.get("lower_bound")
        g = -rate * softplus(raw) if bound is None else bound * sigmoid(rate * raw)
    expected = dict(q=q, k=k, v=v)
    if g is not None:
        expected["log_decay"] = g if g.ndim == 4 else g[..., None]
    if "beta" in given:
        beta = given["beta"]
        if given.get("use_beta_sigmoid_in_kernel"):
            beta = (2 if given.get("allow_neg_eigval") else 1) * sigmoid(beta)
        expected["beta"] = beta[..., None]
    if "b" in given:
        expected |= {"erase": given["b"], "write": given["w"]}
    if "initial_state" in given:
        state = given["initial_state"]
        expected["initial_state"] = np.swapaxes(state, -1, -2) if given.get("state_v_first") else state
    return whole(expected, given.get("scale"), given.get("cu_seqlens"))


def whole(expected, scale, offsets):
    """The recurrence of one row, document by document."""
    offsets = [0, TIME] if offsets is None else list(offsets)
    parts = []
    for i, (start, stop) in enumerate(itertools.pairwise(offsets)):
        parts.append(reference.recurrence(reference.cut(expected, start, stop, state=slice(i, i + 1)), scale=scale))
    return [np.concatenate([part[name] for part in parts], axis) for name, axis in (("out", 1), ("final_state", 0))]


def low(x):
    return jnp.asarray(x, jnp.float32) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x


def call(name, given):
    """The page's function, compiled, with float32 arrays."""
    traced = {key: low(x) for key, x in given.items() if isinstance(x, np.ndarray)}
    static = {key: x for key, x in given.items() if key not in traced}
    return jax.jit(lambda traced: page[name](**traced, **static), compiler_options=FAST)(traced)


def assert_equal(actual, expected):
    error = np.sqrt(np.mean((np.asarray(actual, np.float64) - expected) ** 2))
    assert actual.shape == expected.shape and error <= 1e-5 * np.sqrt(np.mean(expected**2))


# ---- fla -------------------------------------------------------------------------------------------------------------


def state(count, v_first=False):
    shape = (VALUE_DIM, KEY_DIM) if v_first else (KEY_DIM, VALUE_DIM)
    return draw(5, count, HEADS * GROUP, *shape)


def without(given, *names):
    return {name: x for name, x in given.items() if name not in names}


VECTORS = dict(b=sigmoid(draw(6, 1, TIME, HEADS * GROUP, KEY_DIM)), w=sigmoid(draw(7, 1, TIME, 4, VALUE_DIM)))
RAW_GATE = dict(use_gate_in_kernel=True, A_log=0.3 * draw(8, 4), dt_bias=draw(9, 4))
FLA = {
    "q k v g beta": arrays(),
    "g per channel": arrays(KEY_DIM),
    "beta alone": without(arrays(), "g"),
    "g alone": without(arrays(KEY_DIM), "beta"),
    "b w": without(arrays(KEY_DIM), "beta") | VECTORS,
    "scale": arrays() | dict(scale=0.3),
    "initial_state output_final_state": arrays() | dict(initial_state=state(1)),
    "use_qk_l2norm_in_kernel": arrays() | dict(use_qk_l2norm_in_kernel=True, k=arrays(raw=True)["k"]),
    "use_gate_in_kernel A_log dt_bias": arrays() | dict(g=arrays(raw=True)["g"]) | RAW_GATE,
    "lower_bound": arrays(KEY_DIM)
    | dict(g=arrays(KEY_DIM, raw=True)["g"], lower_bound=-5.0, dt_bias=draw(9, 4 * KEY_DIM))
    | without(RAW_GATE, "dt_bias"),
    "use_beta_sigmoid_in_kernel": arrays() | dict(beta=arrays(raw=True)["beta"], use_beta_sigmoid_in_kernel=True),
    "allow_neg_eigval": arrays()
    | dict(beta=arrays(raw=True)["beta"], use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    "state_v_first": arrays() | dict(initial_state=state(1, True), state_v_first=True),
    "cu_seqlens": arrays() | dict(cu_seqlens=np.array([0, 3, 11]), initial_state=state(2)),
}


@pytest.mark.parametrize("given", FLA.values(), ids=FLA.keys())
def test_arguments_of_fla(given):
    out, final = call("fla", given | dict(output_final_state=True))
    expected = defined(given)
    assert_equal(out, expected[0])
    assert_equal(jnp.swapaxes(final, -1, -2) if given.get("state_v_first") else final, expected[1])


# ---- Tokamax ---------------------------------------------------------------------------------------------------------


def tokamax_arrays(raw=False):
    """Head first, as many query heads as value heads, a decay per channel."""
    given = arrays(KEY_DIM, raw)
    given |= {name: np.repeat(given[name], GROUP, axis=2) for name in "qk"}
    renamed = zip(("query", "key", "value", "gate", "beta"), ("q", "k", "v", "g", "beta"))
    return {theirs: np.moveaxis(given[ours], 2, 0) for theirs, ours in renamed}


TO_FLA = {
    "query": "q",
    "key": "k",
    "value": "v",
    "gate": "g",
    "a_log": "A_log",
    "delta_time_bias": "dt_bias",
    "use_qk_l2norm": "use_qk_l2norm_in_kernel",
}
IDS = np.array([[1] * 4 + [2] * 5 + [0] * 2])
TOKAMAX = {
    "query key value gate beta": tokamax_arrays(),
    "scale": tokamax_arrays() | dict(scale=0.3),
    "initial_state output_final_state": tokamax_arrays() | dict(initial_state=state(1)[:, None]),
    "use_qk_l2norm": tokamax_arrays() | dict(use_qk_l2norm=True, key=tokamax_arrays(raw=True)["key"]),
    "use_gate_in_kernel a_log delta_time_bias": tokamax_arrays()
    | dict(gate=tokamax_arrays(raw=True)["gate"], use_gate_in_kernel=True)
    | dict(a_log=RAW_GATE["A_log"], delta_time_bias=draw(9, 4 * KEY_DIM)),
    "lower_bound": tokamax_arrays()
    | dict(gate=tokamax_arrays(raw=True)["gate"], use_gate_in_kernel=True, lower_bound=-5.0, a_log=RAW_GATE["A_log"]),
    "segment_ids max_num_segments": tokamax_arrays() | dict(segment_ids=IDS, max_num_segments=2),
    "segment_ids initial_state": tokamax_arrays() | dict(segment_ids=IDS, initial_state=state(2)[None]),
}


@pytest.mark.parametrize("given", TOKAMAX.values(), ids=TOKAMAX.keys())
def test_arguments_of_tokamax(given):
    out, final = call("tokamax", given | dict(output_final_state=True))
    meant = {TO_FLA.get(name, name): x for name, x in given.items()}
    meant |= {name: np.moveaxis(meant[name], 0, 2) for name in ("q", "k", "v", "g", "beta")}
    real = TIME
    if "segment_ids" in given:
        real, meant["cu_seqlens"] = 9, np.array([0, 4, 9])
        meant["initial_state"] = given.get("initial_state", np.zeros((1, 2, 4, KEY_DIM, VALUE_DIM)))[0]
    elif "initial_state" in given:
        meant["initial_state"] = given["initial_state"][:, 0]
    expected = defined(meant)
    assert_equal(jnp.moveaxis(out, 0, 2)[:, :real], expected[0])
    assert not np.any(out[:, :, real:])
    assert_equal(final[0], expected[1])


# ---- MaxText ---------------------------------------------------------------------------------------------------------


def maxtext_arrays(raw=False):
    given = arrays(raw=raw)
    renamed = zip(("query", "key", "value", "g", "beta"), ("q", "k", "v", "g", "beta"))
    return {theirs: given[ours] for theirs, ours in renamed} | dict(compute_dtype=jnp.float32)


MAXTEXT = {
    "query key value g beta compute_dtype": maxtext_arrays(),
    "chunk_size": maxtext_arrays() | dict(chunk_size=16),
    "initial_state": maxtext_arrays() | dict(initial_state=state(1)),
    "use_qk_norm_in_gdn": maxtext_arrays() | dict(use_qk_norm_in_gdn=True, key=maxtext_arrays(raw=True)["key"]),
}


@pytest.mark.parametrize("given", MAXTEXT.values(), ids=MAXTEXT.keys())
def test_arguments_of_maxtext(given):
    out, final = call("maxtext", given)
    meant = {TO_FLA.get(name, name): x for name, x in given.items()}
    expected = defined(meant | dict(use_qk_l2norm_in_kernel=given.get("use_qk_norm_in_gdn")))
    assert_equal(out, expected[0])
    assert_equal(final, expected[1])


def test_products_of_maxtext_are_bfloat16_unless_told_otherwise():
    given = maxtext_arrays()
    del given["compute_dtype"]
    out, _ = call("maxtext", given)
    expected, _ = defined({TO_FLA.get(name, name): x for name, x in given.items()})
    error = np.sqrt(np.mean((np.asarray(out) - expected) ** 2) / np.mean(expected**2))
    assert out.dtype == jnp.float32 and 1e-4 < error < 1e-2


# ---- the tables ------------------------------------------------------------------------------------------------------

OFFERED_ELSEWHERE = "nothing to give"
NOT_OFFERED = "not offered yet"


@pytest.mark.parametrize(
    "library, function, cases",
    [("flash-linear-attention", "fla", FLA), ("Tokamax", "tokamax", TOKAMAX), ("MaxText", "maxtext", MAXTEXT)],
    ids=["fla", "tokamax", "maxtext"],
)
def test_every_argument_of_a_table_is_tried(library, function, cases):
    section = PAGE.split(f"## {library}\n")[1].split("\n## ")[0]
    tried = {name for given in cases.values() for name in given} | {"output_final_state"}
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", section, re.MULTILINE)
    named = set()
    for theirs, here in rows:
        names = set(re.findall(r"`(\w+)`", theirs.split(", with")[0]))
        if not here.startswith((OFFERED_ELSEWHERE, NOT_OFFERED)) and theirs != "`implementation`":
            named |= names
    assert len(rows) >= 7 and named <= tried, f"no case for {sorted(named - tried)}"
    code = page[function].__code__
    parameters = set(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
    assert parameters == named, f"the table and the function differ: {sorted(parameters ^ named)}"
