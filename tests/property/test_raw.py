"""The operator from raw projections: wherever norm and activations are done, it is `gated_delta` behind them."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from gated_delta import (
    GDN,
    GDN2,
    KDA,
    SLA,
    Chunked,
    Gates,
    RawGates,
    Recurrent,
    SigmoidGate,
    gated_delta,
    gated_delta_raw,
)
from gated_delta.pallas import PallasTPU, TileConfig
from gated_delta.testing import quick_jit
from gated_delta.testing._compare import UNDERFLOW

KERNEL = PallasTPU(TileConfig(chunk_size=16, chunks=1), interpret=True)
OTHERS = [Recurrent(), Chunked(16)]
BATCH, TIME, KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 21, 2, 4, 8, 6
BUDGET = {"float32": 2e-5, "bfloat16": 1e-1}
"""Relative RMS, as `gated_delta.testing.budget` has them for keys of few channels."""
IDS = np.repeat([[0, 0, -1, 2], [-1, 1, 1, 3]], [5, 9, 3, 4], axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """Granularities and owner of raw gates; `decays` scales the raw decay."""

    groups: int | None = 1
    owners: int = VALUE_HEADS
    tied: bool = True
    bound: float | None = None
    has_rate: bool = True
    has_bias: bool = True
    erase_max: float = 1.0
    dtype: str = "float32"
    packed: bool = False
    decays: float = 2.0
    norm: str = "l2"

    def arguments(self):
        """Those of `gated_delta_raw`, and cotangents of its results."""
        rng = np.random.default_rng(0)

        def draw(*shape, dtype="float32"):
            return jnp.asarray(rng.standard_normal(shape), dtype)

        def gate(heads, dim):
            return draw(BATCH, TIME, heads, dim)

        q, k = (draw(BATCH, TIME, KEY_HEADS, KEY_DIM, dtype=self.dtype) for _ in range(2))
        if self.norm == "none":
            q, k = q / 3, k / 3
        v = draw(BATCH, TIME, VALUE_HEADS, VALUE_DIM, dtype=self.dtype)
        gates = RawGates(
            None if self.groups is None else self.decays * gate(self.owners, self.groups),
            gate(self.owners, 1 if self.tied else KEY_DIM),
            None if self.tied else gate(VALUE_HEADS, VALUE_DIM),
            A_log=draw(self.owners) if self.groups and self.has_rate else None,
            dt_bias=draw(self.owners, self.groups) if self.groups and self.has_bias else None,
            bound=self.bound,
            erase_max=self.erase_max,
            is_tied=self.tied,
        )
        state = draw(BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM)
        cotangents = draw(*v.shape, dtype=self.dtype), draw(*state.shape)
        return {"q": q, "k": k, "v": v, "gates": gates, "initial_state": state}, cotangents


def differentiated(backend, case):
    ids = {"segment_ids": jnp.asarray(IDS)} if case.packed else {}
    run = functools.partial(gated_delta_raw, backend=backend, qk_norm=case.norm, **ids)

    def both(arguments, cotangents):
        out, pull = jax.vjp(lambda arguments: run(**arguments), arguments)
        return out, pull(cotangents)[0]

    return both


def named(result):
    (out, state), gradients = result
    gates = gradients.pop("gates")
    found = {"out": out, "final_state": state} | {f"d_{name}": x for name, x in gradients.items()}
    for field in dataclasses.fields(gates):
        x = getattr(gates, field.name)
        if isinstance(x, jax.Array):
            found[f"d_{field.name}"] = x
    return {name: np.asarray(x).astype(np.float64) for name, x in found.items()}


@functools.cache
def compiled(backend, case):
    return quick_jit(differentiated(backend, case))


def run_raw(backend, case, arguments, cotangents):
    return named(compiled(backend, case)(arguments, cotangents))


def expected(case, arguments, cotangents):
    """Activated in float64, by formulas of this file."""

    def activated(gates):
        rate = 1.0 if gates.A_log is None else jnp.exp(gates.A_log)[:, None]
        decay = None
        if gates.raw_decay is not None:
            y = gates.raw_decay + (0.0 if gates.dt_bias is None else gates.dt_bias)
            decay = -rate * jnp.logaddexp(y, 0.0) if gates.bound is None else gates.bound / (1 + jnp.exp(-rate * y))
        erase = gates.erase_max / (1 + jnp.exp(-gates.raw_erase))
        write = None if gates.raw_write is None else 1 / (1 + jnp.exp(-gates.raw_write))
        return Gates(decay, erase, write, erase_max=gates.erase_max, log_decay_min=gates.bound, is_tied=gates.is_tied)

    def run(q, k, v, gates, initial_state):
        if case.norm == "l2":
            q, k = (x / jnp.sqrt(jnp.sum(x**2, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
        ids = {"segment_ids": IDS} if case.packed else {}
        return gated_delta(q, k, v, activated(gates), initial_state=initial_state, backend=Recurrent(), **ids)

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x).astype(np.float64)), (arguments, cotangents))
        out, pull = jax.vjp(lambda a: run(**a), wide[0])
        return named((out, pull(wide[1])[0]))


def assert_near(actual, wanted, dtype, budget=None):
    assert set(actual) == set(wanted)
    for name, want in wanted.items():
        assert np.isfinite(actual[name]).all(), name
        error = np.sqrt(np.mean((actual[name] - want) ** 2)) / (np.sqrt(np.mean(want**2)) + UNDERFLOW["float32"])
        assert error <= (budget or BUDGET[dtype]), f"{name} is off by {error:.2g}"


CASES = {
    "gdn": Case(),
    "gdn2, bounded": Case(groups=KEY_DIM, tied=False, bound=-5.0),
}
MORE = {
    "kda": Case(groups=KEY_DIM, owners=KEY_HEADS),
    "sla in bfloat16": Case(groups=4, owners=KEY_HEADS, dtype="bfloat16"),
    "packed": Case(groups=KEY_DIM, packed=True),
    "gdn2": Case(groups=KEY_DIM, owners=KEY_HEADS, tied=False),
    "sla": Case(groups=4, owners=KEY_HEADS),
    "bounded": Case(groups=4, bound=-3.0, packed=True),
    "bounded without a rate": Case(groups=KEY_DIM, bound=-5.0, has_rate=False),
    "without parameters": Case(groups=4, has_rate=False, has_bias=False),
    "no decay": Case(groups=None, owners=KEY_HEADS),
    "doubled": Case(groups=1, erase_max=2.0),
    "doubled, per channel": Case(groups=KEY_DIM, tied=False, erase_max=2.0, owners=KEY_HEADS),
    "without a norm": Case(groups=1, norm="none"),
    "kda in bfloat16": Case(groups=KEY_DIM, dtype="bfloat16", packed=True),
    "kda that forgets much, in bfloat16": Case(groups=KEY_DIM, dtype="bfloat16", decays=40.0),
    "bounded, in bfloat16": Case(groups=KEY_DIM, dtype="bfloat16", bound=-5.0),
    "packed columns": Case(groups=1, packed=True),
}
EVERY = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in MORE.items()),
]


@pytest.mark.parametrize("backend", OTHERS, ids=str)
@pytest.mark.parametrize("case", EVERY)
def test_backends_that_take_final_gates_get_them(backend, case):
    arguments, cotangents = case.arguments()
    actual = run_raw(backend, case, arguments, cotangents)
    assert_near(actual, expected(case, arguments, cotangents), case.dtype)


@pytest.mark.parametrize(
    "case", [EVERY[0], *(pytest.param(*p.values, id=p.id, marks=pytest.mark.slow) for p in EVERY[1:])]
)
def test_kernels_normalise_and_activate(case):
    arguments, cotangents = case.arguments()
    actual = run_raw(KERNEL, case, arguments, cotangents)
    assert_near(actual, expected(case, arguments, cotangents), case.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, KEY_DIM])
def test_two_chunks_in_a_step_share_the_parameters(groups):
    case = Case(groups=groups)
    arguments, cotangents = case.arguments()
    kernel = PallasTPU(TileConfig(chunk_size=16, chunks=2), interpret=True)
    assert_near(run_raw(kernel, case, arguments, cotangents), expected(case, arguments, cotangents), case.dtype)


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
def test_padding_may_hold_anything(backend):
    """Bit for bit, the gradients of the parameters too."""
    case = Case(groups=KEY_DIM, packed=True, owners=KEY_HEADS)
    arguments, cotangents = case.arguments()
    padding = (IDS < 0)[..., None, None]
    clean = run_raw(backend, case, arguments, cotangents)

    def filled(value):
        def fill(x):
            return jnp.where(padding, jnp.asarray(value, x.dtype), x) if x.ndim == 4 and x.shape[1] == TIME else x

        return jax.tree.map(fill, arguments)

    for value in (np.nan, np.inf, 1e30):
        actual = run_raw(backend, case, filled(value), cotangents)
        for name, x in clean.items():
            np.testing.assert_array_equal(actual[name], x, err_msg=f"{name}, padding of {value}")
            assert x.shape[:2] != (BATCH, TIME) or not x[IDS < 0].any(), name


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("name", ["k", "raw_decay", "raw_write"])
def test_a_bad_token_spoils_its_own_document_and_no_parameter(backend, name):
    case = Case(groups=KEY_DIM, tied=False, packed=True, owners=KEY_HEADS)
    arguments, cotangents = case.arguments()
    clean = run_raw(backend, case, arguments, cotangents)
    index = (0, 9, 1, 2)

    def spoil(x):
        return x.at[index].set(jnp.nan)

    if name == "k":
        arguments["k"] = spoil(arguments["k"])
    else:
        arguments["gates"] = eqx.tree_at(lambda g: getattr(g, name), arguments["gates"], replace_fn=spoil)
    actual = run_raw(backend, case, arguments, cotangents)
    heads = slice(1, 2) if name == "raw_write" else slice(2, 4)
    lost = np.zeros((BATCH, TIME, VALUE_HEADS), bool)
    lost[0, 9:14, heads] = True  # to the end of the document
    np.testing.assert_array_equal(np.isnan(actual["out"]).all(-1), lost)
    np.testing.assert_allclose(actual["out"][~lost], clean["out"][~lost], rtol=0, atol=2e-5)
    assert np.isfinite(actual["final_state"]).all()  # of the rows' last documents
    for gradient in (name for name in actual if name.startswith("d_")):
        assert np.isfinite(actual[gradient]).all(), gradient
    np.testing.assert_allclose(actual["d_q"][1], clean["d_q"][1], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    "backend, bound",
    [
        (Chunked(16), None),
        (Chunked(16), -5.0),
        *(pytest.param(KERNEL, bound, marks=pytest.mark.slow) for bound in (None, -5.0)),
    ],
    ids=str,
)
def test_infinite_raw_values_are_the_ends_of_the_gates(backend, bound):
    """Even at rates beyond float32, and with finite gradients of everything."""
    case = Case(groups=1, bound=bound)
    arguments, cotangents = case.arguments()
    rates = jnp.array([-jnp.inf, -100.0, 0.0, 200.0])
    gates = eqx.tree_at(lambda g: g.A_log, arguments["gates"], rates)
    ends = jnp.where(jnp.arange(TIME) % 2 == 0, jnp.inf, -jnp.inf)[None, :, None, None]
    some = (jnp.arange(TIME) % 5 < 2)[None, :, None, None]
    gates = eqx.tree_at(lambda g: g.raw_decay, gates, jnp.where(some, ends, gates.raw_decay))
    gates = eqx.tree_at(lambda g: g.raw_erase, gates, jnp.where(some, -ends, gates.raw_erase))
    made = gates.activated()
    at = np.flatnonzero(np.asarray(some).ravel())
    np.testing.assert_array_equal(np.asarray(made.log_decay)[:, at[at % 2 == 1]], 0)
    np.testing.assert_array_equal(np.asarray(made.erase)[:, at[at % 2 == 0]], 0)
    np.testing.assert_array_equal(np.asarray(made.erase)[:, at[at % 2 == 1]], 1)
    actual = run_raw(backend, case, {**arguments, "gates": gates}, cotangents)
    plain = functools.partial(gated_delta_raw, qk_norm="l2", backend=Recurrent())
    out, state = plain(**{**arguments, "gates": gates})
    assert all(np.isfinite(x).all() for x in actual.values())
    np.testing.assert_allclose(actual["out"], out, rtol=0, atol=2e-5)
    np.testing.assert_allclose(actual["final_state"], state, rtol=0, atol=2e-5)


def test_a_traced_scale_multiplies_what_is_normalised():
    case = Case()
    arguments, _ = case.arguments()

    @quick_jit
    def run(scale):
        return gated_delta_raw(**arguments, scale=scale, backend=KERNEL)

    out, _ = gated_delta_raw(**arguments, scale=0.25, backend=Chunked(16))
    np.testing.assert_allclose(run(jnp.float32(0.25))[0], out, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_devices_that_share_parameters_add_up_their_gradients():
    """Rows apart in a `shard_map`, with the replication checks that it does by default."""
    case = Case(groups=KEY_DIM, owners=KEY_HEADS)
    arguments, cotangents = case.arguments()
    if len(jax.devices("cpu")) < BATCH:
        pytest.skip("needs two devices")
    here = jax.make_mesh((BATCH,), ("rows",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:BATCH])
    specs = jax.tree.map(lambda x: P("rows") if x.ndim == 4 else P(), arguments)
    rows = P("rows"), P("rows")
    local = jax.shard_map(differentiated(KERNEL, case), mesh=here, in_specs=(specs, rows), out_specs=(rows, specs))
    assert_near(named(quick_jit(local)(arguments, cotangents)), expected(case, arguments, cotangents), case.dtype)


@pytest.mark.parametrize("backend", [Chunked(16), pytest.param(KERNEL, marks=pytest.mark.slow)], ids=str)
def test_a_mapped_axis_of_the_parameters_is_an_ensemble(backend):
    """Parameters of each member, one set of inputs for all: their cotangents are added up, documents stay apart."""
    case = Case(groups=KEY_DIM, owners=KEY_HEADS, packed=True)
    arguments, cotangents = case.arguments()
    gates = arguments["gates"]
    members = [
        dataclasses.replace(gates, A_log=gates.A_log + shift, dt_bias=(1 - shift) * gates.dt_bias)
        for shift in (0.0, 0.5, -1.0)
    ]
    stacked = jnp.stack([m.A_log for m in members]), jnp.stack([m.dt_bias for m in members])

    def all_at_once(parameters, arguments, cotangents):
        def run(parameters, arguments):
            def member(A_log, dt_bias):
                gates = dataclasses.replace(arguments["gates"], A_log=A_log, dt_bias=dt_bias)
                given = {**arguments, "gates": gates}
                return gated_delta_raw(**given, backend=backend, segment_ids=jnp.asarray(IDS))

            out, state = jax.vmap(member)(*parameters)
            return jnp.sum(out, axis=0), state

        out, pull = jax.vjp(run, parameters, arguments)
        return out, pull((cotangents[0], jnp.broadcast_to(cotangents[1], out[1].shape)))

    (out, states), ((d_rates, d_biases), d_arguments) = quick_jit(all_at_once)(stacked, arguments, cotangents)
    wanted = [expected(case, {**arguments, "gates": member}, cotangents) for member in members]
    for n, member in enumerate(wanted):
        found = {"final_state": states[n], "d_A_log": d_rates[n], "d_dt_bias": d_biases[n]}
        assert_near({k: np.asarray(x, np.float64) for k, x in found.items()}, {k: member[k] for k in found}, case.dtype)
    shared = ["out", "d_q", "d_k", "d_v", "d_initial_state", "d_raw_decay", "d_raw_erase"]
    found = named(((out, states), d_arguments))
    assert_near({k: found[k] for k in shared}, {k: sum(m[k] for m in wanted) for k in shared}, case.dtype)


# ---- layers ----------------------------------------------------------------------------------------------------------

MODEL = 12
LAYERS = {
    "gdn": functools.partial(GDN, MODEL, key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    "kda": functools.partial(KDA, MODEL, key_heads=2, key_dim=8, value_dim=6, decay_bound=-5, has_rate=False),
    "gdn2": functools.partial(GDN2, MODEL, key_heads=2, value_heads=4, key_dim=8, value_dim=6),
    "sla": functools.partial(SLA, MODEL, group=2, key_heads=2, key_dim=8, value_dim=6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_hand_raw_projections_to_kernels(name, monkeypatch):
    """With the outputs, states and gradients of every parameter that they have elsewhere."""
    raw_calls = []
    monkeypatch.setattr("gated_delta._layer.gated_delta_raw", spy(raw_calls))
    mixer = LAYERS[name](key=jax.random.key(0))
    x, cotangent = (jax.random.normal(jax.random.key(i), (TIME, MODEL)) for i in (1, 2))

    def run(backend):
        given = eqx.tree_at(lambda m: m.backend, mixer, backend, is_leaf=lambda x: x is None)
        arrays, static = eqx.partition(given, eqx.is_array)

        @quick_jit
        def both(arrays, x):
            (out, state), pull = jax.vjp(lambda arrays, x: eqx.combine(arrays, static)(x), arrays, x)
            return out, state, pull((cotangent, jax.tree.map(jnp.ones_like, state)))

        return jax.tree.leaves(both(arrays, x))

    wanted = run(Chunked(16))
    assert not raw_calls
    actual = run(KERNEL)
    assert raw_calls and len(actual) == len(wanted)
    for i, (x, y) in enumerate(zip(actual, wanted, strict=True)):
        error = np.sqrt(np.mean((np.asarray(x) - y) ** 2)) / np.sqrt(np.mean(np.square(y)))
        assert error <= BUDGET["float32"], (i, x.shape, error)


def spy(calls):
    def run(*arguments, **options):
        calls.append(options)
        return gated_delta_raw(*arguments, **options)

    return run


def test_a_layer_with_a_part_of_its_own_activates_it_itself():
    class Harder(SigmoidGate):
        def __call__(self, x):
            return super().__call__(x) ** 2

    mixer = LAYERS["gdn"](key=jax.random.key(0), backend=KERNEL)
    assert mixer._is_raw(KERNEL) and not mixer._is_raw(Chunked()) and not mixer._is_raw(None)
    own = eqx.tree_at(lambda m: m.erase, mixer, Harder(MODEL, 4, key=jax.random.key(1)))
    assert not own._is_raw(KERNEL)


# ---- errors ----------------------------------------------------------------------------------------------------------


def changed(**changes):
    arguments, _ = Case(groups=4).arguments()
    return {**arguments, **changes}


def with_gates(**changes):
    gates = Case(groups=4).arguments()[0]["gates"]
    return changed(gates=dataclasses.replace(gates, **changes))


ERRORS = {
    "final gates": (lambda: changed(gates=Gates()), TypeError, "must be a `gated_delta.RawGates`, but a Gates came"),
    "norm": (lambda: changed(qk_norm="l1"), ValueError, r"`qk_norm='l1'` must be one of \('l2', 'none'\)"),
    "A_log": (
        lambda: with_gates(A_log=jnp.zeros(3)),
        ValueError,
        r"`gates.A_log` must be .* \[4\], but its shape is \(3",
    ),
    "dt_bias": (
        lambda: with_gates(dt_bias=jnp.zeros((4, 3))),
        ValueError,
        r"`gates.dt_bias` must be \[4, 4\], .* but its shape is \(4, 3\)",
    ),
    "raw_decay": (
        lambda: with_gates(raw_decay=jnp.zeros((BATCH, TIME, 3, 4))),
        ValueError,
        r"`gates.raw_decay` must be \[batch, time, heads\] .* 2 \(key\) or 4 \(value\) heads, but its shape is",
    ),
    "groups": (
        lambda: with_gates(raw_decay=jnp.zeros((BATCH, TIME, 4, 3))),
        ValueError,
        "The last axis of `gates.raw_decay` must be 1, a number of decay tiles",
    ),
    "tie": (lambda: RawGates(is_tied=True), ValueError, r"needs `raw_erase` .* and no `raw_write`"),
    "parameters": (lambda: RawGates(A_log=jnp.zeros(4)), ValueError, "needs `raw_decay` where it has `A_log`"),
    "bound": (
        lambda: RawGates(jnp.zeros((1, 1, 1)), bound=1.0),
        ValueError,
        r"`RawGates\(bound=1.0\)` must be negative",
    ),
    "erase_max": (lambda: RawGates(erase_max=3), ValueError, r"`RawGates\(erase_max=3\)` must lie in \(0, 2\]"),
}


@pytest.mark.parametrize("cause, error, message", ERRORS.values(), ids=ERRORS)
def test_an_error_says_what_is_needed_and_what_came(cause, error, message):
    with pytest.raises(error, match=message):
        gated_delta_raw(**cause())
