"""New members of the family: records and layers, and one-token updates of somebody's own."""

import dataclasses
import subprocess
import sys
import textwrap

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from gated_delta import KDA, GatedDeltaMixer, Variant, variants
from gated_delta.testing import (
    LAYER_LAWS,
    MEMBERS,
    STEP_LAWS,
    ConformanceError,
    Departure,
    Token,
    check_law,
    check_variant,
    conformance_suite,
    find_gates,
)
from gated_delta.testing._conformance import ask_law
from gated_delta.testing._subjects import variant_subject

# ---- one-token updates -----------------------------------------------------------------------------------------------


def decayed(state, token):
    return state if token.log_decay is None else jnp.exp(token.log_decay)[:, None] * state


def kda(state, token):
    state = decayed(state, token)
    state = state + jnp.outer(token.k, token.erase * (token.v - token.k @ state))
    return state, 0.5 * token.q @ state


def gdn2(state, token):
    state = decayed(state, token)
    state = state + jnp.outer(token.k, token.write * token.v - (token.erase * token.k) @ state)
    return state, token.q @ state


def linear_attention(state, token):
    state = state + jnp.outer(token.k, token.v)
    return state, token.q @ state


def in_tiles(state, token):
    return kda(state, token._replace(log_decay=jnp.repeat(token.log_decay[:3], 2)))


FOUND = {
    "kda": (kda, "kda", "decay='channel', erase='head', write='head', tied=True, scale=0.5"),
    "gdn": (kda, "gdn", "decay='head', erase='head', write='head', tied=True, scale=0.5"),
    "gdn2": (gdn2, "gdn2", "decay='channel', erase='channel', write='channel', tied=False, scale=1"),
    "tiles": (in_tiles, "kda", "decay='tile (3)', erase='head', write='head', tied=True, scale=0.5"),
    "none": (linear_attention, "linear_attention", "decay='none', erase='none', write='one', tied=False, scale=1"),
}


@pytest.mark.parametrize("step, gates, words", FOUND.values(), ids=FOUND)
def test_the_gates_that_express_a_step_are_found(step, gates, words):
    report = check_variant(step, gates=MEMBERS[gates], only=["family"], max_examples=5)
    assert report.outcomes[0].message == f"in the family: {words}"


def test_the_gates_of_a_step_and_a_variant_have_names():
    named, member = (check_variant(kda, gates=gates, max_examples=2) for gates in ("kda", MEMBERS["kda"]))
    assert named.outcomes[0].message == member.outcomes[0].message and named.name == "kda"
    assert check_variant("kda", only=["layer_serialisation", "recurrence"], max_examples=1).examples == 2
    seen = []

    def tied(state, token):
        seen.append((token.erase is None, token.write is None))
        return kda(state, token)

    check_variant(tied, gates="kda", only=["family"], max_examples=1)
    assert set(seen) == {(False, True)}


def grows(state, token):
    return kda(1.1 * state, token)


def negates(state, token):
    return kda(-state, token)


def squares(state, token):
    state, out = kda(state, token)
    return state + 0.01 * state**2, out


def mixes_values(state, token):
    state, out = kda(state, token)
    return state + 0.1 * state[:, ::-1], out


def writes_along_the_query(state, token):
    state, out = kda(state, token)
    return state + jnp.outer(token.q, token.v), out


def erases_along_the_query(state, token):
    new, out = kda(state, token)
    return new - 0.1 * jnp.outer(token.q, token.k @ state), out


def erases_too_much(state, token):
    return gdn2(state, token._replace(erase=3 * jnp.ones(6), write=token.erase))


def reads_before_the_write(state, token):
    return kda(state, token)[0], token.q @ state


def transposes(state, token):
    return kda(state, token)[0].T, token.v


def sums_outputs(state, token):
    state, out = kda(state, token)
    return state, out.sum()


OUTSIDE = {
    grows: r"a key channel is multiplied by 1\.\d+: a decay lies in \[0, 1\]",
    negates: r"a key channel is multiplied by -\d.\d+: a decay lies in \[0, 1\]",
    squares: r"the new state is no affine function of the old",
    mixes_values: r"value channels mix",
    writes_along_the_query: r"what it writes is not along the key",
    erases_along_the_query: r"other than by a decay of key channels and an erase along the key",
    erases_too_much: r"the erase is 3: it lies in \[0, 2\]",
    reads_before_the_write: r"no multiple of the new state read by q",
    transposes: r"its state must stay \[key_dim, value_dim\] = \(6, 5\), but it becomes \(5, 6\)",
    sums_outputs: r"its output must be \[value_dim\] = \(5,\), but it is \(\)",
}


@pytest.mark.parametrize("step", OUTSIDE, ids=lambda step: step.__name__)
def test_a_step_outside_the_family_is_shown_the_token_where_it_departs(step):
    with pytest.raises(ConformanceError, match=r"token \d departs from the family: .*" + OUTSIDE[step]) as error:
        check_variant(step, gates=MEMBERS["kda"], only=["family"], max_examples=3)
    assert "The token: q=[" in str(error.value)


def test_a_step_that_raises_is_shown_where_and_with_what():
    def writes_by_itself(state, token):
        return state + jnp.outer(token.k, token.write * token.v), token.q @ state

    with pytest.raises(
        ConformanceError, match=r"unsupported operand type.*, at tests/property/test_check_variant\.py:\d+ "
    ) as error:
        check_variant(writes_by_itself, gates="kda", only=["family"], max_examples=1)
    shapes = "where the token is {'q': (6,), 'k': (6,), 'v': (5,), 'log_decay': (6,), 'erase': (1,)}"
    assert "in writes_by_itself" in str(error.value) and shapes in str(error.value)


def test_a_token_alone_can_be_asked_for_its_gates():
    with jax.enable_x64(True):
        vectors = jax.random.normal(jax.random.key(0), (3, 4), jnp.float64)
        token = Token(*vectors, log_decay=-jnp.ones(1), erase=jnp.full(1, 0.25), write=None)
        found = find_gates(kda, token)
    assert abs(found.log_decay + 1).max() < 1e-9 and abs(found.erase - 0.25).max() < 1e-9
    assert abs(found.write - 0.25).max() < 1e-9 and abs(found.scale - 0.5) < 1e-9
    with pytest.raises(Departure, match="value channels mix"):
        find_gates(mixes_values, token)


def momentum(carry, token):
    """Outside: a second state, the momentum of the writes."""
    state, speed = carry
    state = decayed(state, token)
    speed = 0.9 * speed + jnp.outer(token.k, token.erase * (token.v - token.k @ state))
    return (state + speed, speed), token.q @ (state + speed)


def begin():
    return jnp.zeros((6, 5)), jnp.zeros((6, 5))


def in_a_scan(carry, tokens):
    return jax.lax.scan(momentum, carry, tokens)


def forgets_its_speed(carry, tokens):
    """Wrong between chunks of 16 only."""
    outs = []
    for start in range(0, tokens.q.shape[0], 16):
        carry, out = in_a_scan((carry[0], 0 * carry[1]), jax.tree.map(lambda x: x[start : start + 16], tokens))  # noqa: B023
        outs.append(out)
    return carry, jnp.concatenate(outs)


def test_outside_the_family_a_chunked_function_is_tested_against_its_own_step():
    given = dict(gates=MEMBERS["kda"], initial_state=begin, expected_failures={"family"}, max_examples=4)
    report = check_variant(momentum, chunked=in_a_scan, **given)
    assert {o.law: o.status for o in report.outcomes} == {
        name: "expected failure" if name == "family" else "passed" for name in STEP_LAWS
    }
    with pytest.raises(ConformanceError, match=r"own_chunks: .*`result \d` is off by"):
        check_variant(momentum, chunked=forgets_its_speed, **given)


# ---- records and layers ----------------------------------------------------------------------------------------------

ODD = Variant(decay="tile", decay_tiles=2, decay_owner="key", erase="channel", write="head", tied=False)


def test_a_record_that_is_not_in_the_package_is_checked_as_a_layer_and_as_gates():
    report = check_variant(ODD, only=["layer_serialisation", "recurrence"], max_examples=2)
    assert {o.law: o.status for o in report.outcomes} == {"layer_serialisation": "passed", "recurrence": "passed"}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [ODD, *(x for x in vars(variants).values() if isinstance(x, Variant))], ids=repr)
def test_every_law_of_layers_holds_for_every_variant(variant):
    report = check_variant(variant, max_examples=25)
    assert [o.law for o in report.outcomes][: len(LAYER_LAWS)] == list(LAYER_LAWS)
    # Without a decay there are no gates to be extreme, and without an erase no solve to be ill-conditioned.
    unasked = {
        law
        for law, gate in (("extreme_gates", variant.decay), ("ill_conditioned_keys", variant.erase))
        if gate == "none"
    }
    assert {o.law for o in report.outcomes if o.status == "not offered"} - {"reductions"} == unasked
    assert {o.status for o in report.outcomes} <= {"passed", "not offered"}


class Planted(GatedDeltaMixer):
    """A layer with a bug in its call."""

    bug: str = eqx.field(static=True, default="")

    def __init__(self, bug, config, key):
        super().__init__(config, key=key)
        self.bug = bug

    def __call__(self, x, state=None, *, mask=None, segment_ids=None, cu_seqlens=None):
        if self.bug == "mask ignored":
            mask = None
        if self.bug == "documents not kept apart" and segment_ids is not None:
            segment_ids = jnp.where(segment_ids > 0, 0, segment_ids)
        if self.bug == "state ignored" and state is not None and cu_seqlens is None and segment_ids is None:
            state = jax.tree.map(jnp.zeros_like, state)
        if self.bug == "normalised over time":
            x = x / (1 + jnp.abs(x).mean(-2, keepdims=True))
        if self.bug == "rate frozen":
            frozen = jax.lax.stop_gradient(self.decay.A_log)
            return GatedDeltaMixer.__call__(eqx.tree_at(lambda m: m.decay.A_log, self, frozen), x, state)
        out, state = super().__call__(x, state, mask=mask, segment_ids=segment_ids, cu_seqlens=cu_seqlens)
        if self.bug == "output in float32":
            out = out.astype(jnp.float32)
        return out, state


BUGS = {
    "mask ignored": "layer_documents",
    "documents not kept apart": "layer_documents",
    "state ignored": "layer_resume",
    "normalised over time": "layer_causality",
    "rate frozen": "layer_gradients",
    "output in float32": "layer_bfloat16",
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_planted_in_a_layer_is_found_by_the_law_that_names_it(bug):
    config = eqx.filter_eval_shape(KDA, 12, key_heads=2, key_dim=4, value_dim=3, key=jax.random.key(0)).config
    subject = variant_subject(lambda key: Planted(bug, dataclasses.replace(config, conv_width=None), key))
    outcome = ask_law(LAYER_LAWS[BUGS[bug]], subject, max_examples=10, shrink=False)
    assert outcome.status == "failed", outcome


VARIANTS = """
    import jax.numpy as jnp
    from gated_delta import Variant, variants
    from gated_delta.testing import conformance_suite

    few = dict(max_examples=1, only=["layer_serialisation", "recurrence"])
    test_record = conformance_suite(Variant(decay="tile", decay_tiles=2), **few)

    def after_the_write(state, token):
        state = state + jnp.outer(token.k, token.erase * (token.v - token.k @ state))
        return jnp.exp(token.log_decay)[:, None] * state, token.q @ state

    test_step = conformance_suite(after_the_write, gates="kda", max_examples=1)
    known = dict(expected_failures={"family"}, only=["family"])
    test_known = conformance_suite(after_the_write, gates="kda", max_examples=1, **known)
    """


def test_one_line_gives_a_test_for_each_law_of_a_variant_and_of_a_step(tmp_path):
    (tmp_path / "test_my_variant.py").write_text(textwrap.dedent(VARIANTS))
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "1 failed, 2 passed, 4 skipped, 1 xfailed" in done.stdout, done.stdout + done.stderr
    assert "PASSED test_my_variant.py::test_record[recurrence]" in done.stdout
    assert "token 0 departs from the family" in done.stdout and "no chunked function is given" in done.stdout
    assert "check_law(\"family\", OwnStep('after_the_write', after_the_write, RandomGates(" in done.stdout
    assert "RandomProblem, check_law; from test_my_variant import after_the_write" in done.stdout


def test_what_can_be_no_variant_is_refused():
    with pytest.raises(TypeError, match=r"a step needs `gates`, the kind of gates that its tokens have"):
        check_variant(kda)
    names = r"the gates of a step are a `RandomGates`, or the name of one of `MEMBERS`, linear_attention, retnet,"
    for gates in ("kdaa", variants.kda, 3):
        with pytest.raises(TypeError, match=names):
            check_variant(kda, gates=gates)
    with pytest.raises(TypeError, match=r"'kdaa' is no variant: give a `Variant`, or the name of one, delta_net, gdn"):
        check_variant("kdaa")
    with pytest.raises(TypeError, match=r"`capabilities`, `variants` and `x64` limit a kernel: a layer or a step is"):
        conformance_suite(ODD, x64=True)
    with pytest.raises(TypeError, match=r"A `Variant`, a `MixerConfig`, a layer, its constructor or a step"):
        check_variant(3)
    with pytest.raises(ValueError, match=r"There is no law 'recurence'\. The laws are: layer_batches"):
        check_variant(ODD, only=["recurence"])
    with pytest.raises(ValueError, match=r"There is no law 'x'"):
        check_law("x", ODD)
