"""Our backends and the laws of the toolkit, which are stated there once; and what the toolkit prints and refuses."""

import dataclasses
import functools
import importlib
import json
import runpy
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings

from gated_delta import KDA, Chunked, Gates, MixerConfig, Recurrent, gated_delta, variants
from gated_delta import testing as gated_delta_testing
from gated_delta.testing import (
    LAWS,
    LAYER_LAWS,
    MEMBERS,
    STEP_LAWS,
    Capabilities,
    ConformanceError,
    Implementation,
    RandomGates,
    RandomProblem,
    ask,
    backends,
    check_backend,
    check_law,
    check_variant,
    conformance_suite,
    expected,
    fla_style,
    implementation,
    plain,
    problems,
    tokamax_style,
)
from gated_delta.testing._conformance import Interrupted, ask_law
from gated_delta.testing._smaller import smaller
from gated_delta.testing._subjects import variant_subject

from .plain import Plain

ROOT = Path(__file__).resolve().parents[2]
CHEAP = ["packing", "padding", "zero_length", "new_documents", "resume_documents", "determinism", "partial_losses"]
"""Laws that no other file of ours asks, and that share their compiled programs. All: `make test-slow`."""


@pytest.mark.parametrize("backend", backends(), ids=str)
@pytest.mark.parametrize("law", CHEAP)
def test_the_law_holds(backend, law):
    outcome = ask_law(LAWS[law], implementation(backend), max_examples=settings.default.max_examples)
    assert outcome.status == "passed", f"{outcome.message}\n  {outcome.line}"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("backend", backends(), ids=str)
def test_every_law_holds(backend, seed):
    report = check_backend(backend, max_examples=50, seed=seed)
    assert {o.law for o in report.outcomes if o.status == "not offered"} <= {"chunk_size"}


# ---- laws ------------------------------------------------------------------------------------------------------------


def test_every_law_has_a_claim_and_a_formula():
    for name, law in {**LAWS, **LAYER_LAWS, **STEP_LAWS}.items():
        assert law.name == name and law.claim.endswith(".") and len(law.formula) > 5, name
        assert law.claim[0].isupper() and "\n" not in law.claim


def test_the_page_of_laws_is_up_to_date():
    written = runpy.run_path(str(ROOT / "scripts" / "write_laws.py"))
    assert written["PAGE"].read_text(encoding="utf-8") == written["page"](), "run `python scripts/write_laws.py`"


# ---- adapters: our own operator behind the signatures of others ------------------------------------------------------


def in_plain(q, k, v, *, log_decay, beta, initial_state=None, segment_ids=None, num_segments=None, scale=None):
    gates = Gates.tied(beta, log_decay, erase_max=2.0)
    packing = dict(segment_ids=segment_ids, num_segments=num_segments)
    return gated_delta(q, k, v, gates, initial_state=initial_state, scale=scale, **packing, backend=Recurrent())


def in_fla(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, cu_seqlens=None):
    assert output_final_state and g.ndim == 4 and beta.ndim == 3
    gates = Gates.tied(beta, g, erase_max=2.0)
    packing = dict(cu_seqlens=cu_seqlens, initial_state=initial_state)
    return gated_delta(q, k, v, gates, scale=scale, **packing, backend=Recurrent())


def in_tokamax(query, key, value, gate, beta, *, a_log=None, lower_bound=None, use_gate_in_kernel=False, **options):
    assert options.pop("output_final_state")
    slots, ids = options.pop("max_num_segments", 1), options.pop("segment_ids", None)
    state = options.pop("initial_state", None)
    if use_gate_in_kernel:
        gate = lower_bound / (1 + jnp.exp(-jnp.exp(a_log)[:, None, None, None] * gate))
    q, k, v, gate = (jnp.moveaxis(x, 0, 2) for x in (query, key, value, gate))
    ids = jnp.zeros(q.shape[:2], int) if ids is None else ids - 1
    gates = Gates.tied(jnp.moveaxis(beta, 0, 2), gate)
    packing = dict(segment_ids=ids, num_segments=slots, initial_state=state)
    out, final = gated_delta(q, k, v, gates, **packing, **options, backend=Recurrent())
    return jnp.moveaxis(out, 2, 0), final


KDA_ONLY = dict(packing=("offsets",), padding=False, dtypes=("float32",))
ADAPTED = {
    "plain": plain(in_plain),
    "fla": fla_style(in_fla, framework="jax", capabilities=Capabilities.of(variants.kda, **KDA_ONLY)),
    "tokamax": tokamax_style(in_tokamax),
    "tokamax with raw gates": tokamax_style(in_tokamax, lower_bound=-5.0),
}


@pytest.mark.parametrize("subject", ADAPTED.values(), ids=ADAPTED)
def test_an_adapter_changes_no_number(subject):
    report = ask(subject, only=["gradients", "shapes", "zero_length"], max_examples=2)
    assert {outcome.status for outcome in report.outcomes} == {"passed"}, report


@pytest.mark.slow
def test_a_dtype_that_a_backend_declines_is_not_asked():
    class Narrow(Chunked):
        def why_not(self, problem):
            return "it is for narrow floats" if problem.operand == jnp.float64 else super().why_not(problem)

    outcome = ask(implementation(Narrow(16)), only=["dtypes"], max_examples=12).outcomes[0]
    assert outcome.status == "passed" and outcome.examples == 12


def test_a_plain_functions_signature_says_what_it_offers():
    offered = Capabilities.from_signature(in_plain)
    assert offered.tied == (True,) and offered.erase == ("head",) and offered.write == ("one",)
    assert offered.decay == ("head", "tile", "channel")  # it has no default, so it cannot be left out
    assert offered.packing == ("ids", "slots") and offered.state and offered.scale
    none = Capabilities.from_signature(lambda q, k, v: None)
    assert none.decay == ("none",) and none.erase == ("none",) and none.packing == () and not none.state
    assert implementation(lambda q, k, v: (v, None)).capabilities == none


def test_capabilities_add_nothing_to_what_a_signature_takes():
    subject = implementation(nearly, Capabilities.of("gdn", dtypes=("float32",)))
    assert subject.capabilities == Capabilities.of(
        variants.gdn, dtypes=("float32",), packing=(), scale=False, state=True
    )
    apart = plain(lambda q, k, v, log_decay, erase, write: None, capabilities=Capabilities.of("kda"))
    assert apart.capabilities.tied == (True,)
    anything = plain(lambda **arrays: None, capabilities=Capabilities()).capabilities
    assert anything == Capabilities()
    with pytest.raises(
        ValueError, match=r"offer erase=\('none',\), but a function of `q, k, v, log_decay, beta, initial"
    ):
        plain(nearly, capabilities=Capabilities.of("gla"))


def test_a_signature_of_others_is_refused_with_its_adapter():
    def kda(q, k, v, g, beta, initial_state=None):
        return v

    known = (
        "q, k, v, log_decay, erase, write, beta, initial_state, segment_ids, num_segments, cu_seqlens, scale by name"
    )
    with pytest.raises(TypeError, match=rf"`kda` has the parameter `g`, which no problem gives: .* {known}\. Wrap it"):
        check_backend(kda)
    with pytest.raises(TypeError, match=r"`fla_style\(kda, framework=\"jax\"\)`"):
        check_backend(kda)
    with pytest.raises(TypeError, match="has the parameter `gate`"):
        implementation(lambda q, k, v, *, gate=None: v)
    with pytest.raises(TypeError, match="has the parameter `b`"):
        plain(lambda q, k, v, b: v, capabilities=Capabilities())
    fine = implementation(lambda q, k, v, *, chunk=64, **others: v)  # `chunk` has a default
    assert fine.capabilities.scale


def test_without_torch_an_adapter_for_it_says_what_else_there_is(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'torch is not installed: .* `fla_style\(..., framework="jax"\)`'):
        fla_style(in_fla)


def test_what_cannot_be_called_refuses_nothing():
    def broken(q, k, v, *, initial_state=None):
        raise TypeError("an operand is missing")

    outcome = ask(plain(broken), only=["refusals"], max_examples=2).outcomes[0]
    assert outcome.status == "failed" and outcome.message == "TypeError: an operand is missing"


def test_a_numpy_function_has_no_gradients_and_is_told_so():
    def cumulative(q, k, v):
        states = np.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        return k.shape[-1] ** -0.5 * np.einsum("bthk,bthkv->bthv", q, states), states[:, -1]

    subject = plain(
        cumulative,
        framework="numpy",
        capabilities=Capabilities.from_signature(
            cumulative, gradients=False, grouped=False, dtypes=("float32",), contains=False, refuses=False
        ),
    )
    report = ask(subject, max_examples=3, only=["recurrence", "gradients", "packing", "step", "causality"])
    assert {o.law: o.status for o in report.outcomes} == {
        "recurrence": "passed",
        "gradients": "not offered",
        "packing": "not offered",
        "step": "not offered",
        "causality": "passed",
    }
    assert [o.message for o in report.outcomes if o.status == "not offered"] == [
        "gradients are not offered",
        "packed documents are not offered",
        "initial and final states are not offered",
    ]


# ---- capabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offered",
    [
        Capabilities(),
        Capabilities.of(variants.kda),
        Capabilities.of(variants.gdn, variants.gdn2, packing=("offsets",), padding=False),
        Capabilities(decay=("channel",), erase=("channel",), write=("head",), tied=(False,), packing=()),
        Capabilities(key_dims=(16,), value_dims=(8, 32), time_multiple=16, grouped=False, erase_max=1.0, state=False),
        Capabilities(max_decay=5.0, dtypes=("bfloat16",)),
        Capabilities.of(variants.kda, time_multiple=64, zero_decay=False),
    ],
    ids=repr,
)
def test_only_what_is_offered_is_asked(offered):
    layouts = offered.layouts()
    assert 4 <= len(layouts) <= 21 and all(offered.why_not(layout) is None for layout in layouts)
    assert 4 <= len(offered.first()) <= 12 and all(offered.why_not(layout) is None for layout in offered.first())
    assert any(layout.documents is not None for layout in layouts) == bool(offered.packing)
    subject = plain(lambda **arrays: None, capabilities=offered)
    for law in LAWS.values():
        drawn = law.cases(subject)
        if isinstance(drawn, str):
            continue

        @settings(max_examples=5, database=None, phases=[Phase.generate])
        @given(drawn)
        def is_offered(case):
            problem = case["problem"]
            assert offered.why_not(problem) is None
            assert offered.padding or problem.documents is None or (problem.segment_ids >= 0).all()

        is_offered()


@pytest.mark.parametrize("law", ["resume", "neutral_tokens"])
def test_whole_chunks_that_are_long_are_cut_too(law):
    subject = dataclasses.replace(PLAIN, capabilities=Capabilities.of("kda", time_multiple=64))
    assert ask_law(LAWS[law], subject, max_examples=3).status == "passed"


def test_a_capability_that_is_no_tuple_of_known_words_is_refused():
    with pytest.raises(TypeError, match=r"`Capabilities\(dtypes='float32'\)` must be a tuple of some of"):
        Capabilities(dtypes="float32")
    with pytest.raises(ValueError, match=r"`Capabilities\(decay=\('heads',\)\)` must be some of none, head, tile"):
        Capabilities(decay=("heads",))
    with pytest.raises(ValueError, match=r"needs at least one `Variant`"):
        Capabilities.of()


def test_what_is_left_out_is_said_of_a_problem():
    problem = RandomProblem(group=2, gates=MEMBERS["kda"])
    assert Capabilities().why_not(problem) is None
    assert Capabilities(grouped=False).why_not(problem) == "grouped heads is not offered"
    assert "gates of RandomGates(" in Capabilities.of(variants.gdn).why_not(problem)


# ---- reports ---------------------------------------------------------------------------------------------------------


def nearly(q, k, v, *, log_decay, beta, initial_state=None):
    out, state = gated_delta(q, k, v, Gates.tied(beta, log_decay, erase_max=2.0), initial_state=initial_state)
    return out * 1.001, state


def test_a_failure_is_reported_with_the_line_that_repeats_it():
    asked = dict(only=["recurrence", "state_layout", "packing"], max_examples=3)
    with pytest.raises(ConformanceError, match=r"recurrence: `out` is off by .* times its budget") as error:
        check_backend(nearly, **asked)
    report = error.value.report
    assert [o.status for o in report.outcomes] == ["failed", "failed", "not offered"] and not report.passed
    line = report.outcomes[0].line
    assert line.startswith('check_law("recurrence", nearly, problem=RandomProblem(')
    names = {"check_law": check_law, "nearly": nearly, "RandomProblem": RandomProblem, "RandomGates": RandomGates}
    with pytest.raises(AssertionError, match="`out` is off by"):
        eval(line, names)
    assert line in str(report) and "packed documents are not offered" in str(report)

    read = json.loads(report.to_json())
    assert read["name"] == "nearly" and read["passed"] is False and read["seed"] == 0
    assert [o["law"] for o in read["outcomes"]] == asked["only"] and read["outcomes"][0]["line"] == line
    suite = ElementTree.fromstring(report.to_junit())
    assert suite.attrib["tests"] == "3" and suite.attrib["failures"] == "2" and suite.attrib["skipped"] == "1"
    assert line in suite.find("testcase/failure").text

    known = check_backend(nearly, **asked, expected_failures={"recurrence", "state_layout"})
    assert known.passed and [o.status for o in known.outcomes][:2] == ["expected failure"] * 2


def test_an_expected_failure_that_passes_is_a_failure():
    with pytest.raises(ConformanceError, match=r"determinism: this law passes: take it out of `expected_failures`"):
        check_backend(nearly, only=["determinism"], max_examples=2, expected_failures={"determinism"})


def test_nothing_asked_is_nothing_passed():
    with pytest.raises(ConformanceError, match="packed documents are not offered"):
        check_backend(nearly, only=["packing"])


def test_results_of_another_kind_are_said_in_words_of_the_kernel():
    def said(function, law="recurrence", **offered):
        subject = plain(function, capabilities=Capabilities.from_signature(function, **offered))
        outcome = ask(subject, only=[law], max_examples=5).outcomes[0]
        assert outcome.status == "failed"
        return outcome.message

    def alone(q, k, v):
        return v

    assert "alone returned no final state: return `(out, final_state)`, or offer none" in said(alone)
    assert "`capabilities=Capabilities.from_signature(alone, final_state=False)`" in said(alone)
    assert "`out` is off by" in said(alone, final_state=False, gradients=False)
    assert "function returned NoneType, but `out` or `(out, final_state)` is expected" in said(lambda q, k, v: None)

    def in_float32(q, k, v, *, log_decay, beta):
        gates = Gates.tied(beta, log_decay, erase_max=2.0)
        out, state = gated_delta(q, k, v, gates)
        return out.astype(jnp.float32), state

    assert 'function needs NumPy arrays, but JAX traces it: say `plain(function, framework="numpy")`' in said(
        lambda q, k, v: (np.asarray(v), None)
    )
    message = said(in_float32, "dtypes", dtypes=("bfloat16",))
    assert message.startswith("`out` is float32, but must have the dtype of v, bfloat16: cast it, or offer `Capab")
    assert "`final_state` has shape (1, 1), but must have (1, 1, 2, 2)." in said(lambda q, k, v: (v, v[:, 0, :, 0]))


def test_an_exception_is_a_failure_and_an_unimplemented_case_is_not():
    def raises(q, k, v):
        raise RuntimeError("no such tile")

    def declines(q, k, v):
        raise NotImplementedError("not on a Sunday")

    crashed = ask(plain(raises), only=["recurrence"], max_examples=2).outcomes[0]
    assert crashed.status == "failed" and crashed.message == "RuntimeError: no such tile"
    declined = ask(plain(declines), only=["recurrence"], max_examples=2).outcomes[0]
    assert declined.status == "not offered" and declined.message == "not on a Sunday"


def one(state, token):
    raise AssertionError


def make(key):
    raise AssertionError


def test_what_cannot_be_checked_is_refused():
    with pytest.raises(TypeError, match=r"A backend, such as `Recurrent\(\)`, a function or an `Implementation`"):
        check_backend(Recurrent)
    with pytest.raises(TypeError, match=r"can be checked, but 3 came"):
        check_backend(3)
    with pytest.raises(ValueError, match=r"There is no law 'recurence'\. The laws are: recurrence, gradients"):
        check_backend(Recurrent(), only=["recurence"])
    with pytest.raises(TypeError, match=r"Laws are named in a list, \['scale'\], but the word 'scale' came"):
        check_backend(Recurrent(), only="scale")
    with pytest.raises(
        ValueError, match=r"'layer_batches' is no law of what is checked here: `check_variant` asks for"
    ):
        check_backend(Recurrent(), only=["layer_batches"])
    with pytest.raises(ValueError, match=r"`RandomGates\(decay='channels'\)` must be one of none, head, tile, channel"):
        RandomGates(decay="channels")
    with pytest.raises(ValueError, match=r"`Capabilities\(max_decay=-5.0\)` must be positive"):
        Capabilities(max_decay=-5.0)
    with pytest.raises(TypeError, match=r"'gdm' is no variant: give a `Variant`, or the name of one, delta_net, gdn, "):
        check_backend(Recurrent(), variants=["gdm"])
    with pytest.raises(TypeError, match=r"Variants are given in a list, \['gdn'\], but 'gdn' came"):
        check_backend(Recurrent(), variants="gdn")
    with pytest.raises(TypeError, match=r"Variants are given in a list, \[Variant\(...\)\], but Variant\(...\) came"):
        check_backend(Recurrent(), variants=variants.gdn)
    with pytest.raises(TypeError, match=r"Variant\(.*\) is no implementation of the operator: `check_variant` asks"):
        check_backend(variants.gdn)
    with pytest.raises(TypeError, match=r"A `MixerConfig` is no implementation of the operator: `check_variant` asks"):
        check_backend(MixerConfig(variants.gdn, model=8, key_heads=1, value_heads=1, key_dim=4, value_dim=4))
    step = r"`one\(state, token\)` takes no arrays `q`, `k` and `v`\. .* `check_variant\(one, gates=\"kda\"\)`"
    for asks in (check_backend, conformance_suite):
        with pytest.raises(TypeError, match=step):
            asks(one)
    with pytest.raises(
        TypeError, match=r"`make` takes no arrays .*: a constructor is asked by `check_variant\(make\)`"
    ):
        check_backend(make)
    with pytest.raises(ValueError, match=r"in_tokamax offers no gate of these variants: nothing is left of decay"):
        check_backend(tokamax_style(in_tokamax), variants=[variants.gdn])


def test_a_budget_of_time_is_kept_and_said():
    report = ask(implementation(Recurrent()), only=["recurrence", "gradients"], max_examples=10_000, time_budget=3)
    assert report.seconds < 30 and all(o.status == "passed" and 0 < o.examples < 10_000 for o in report.outcomes)


def test_a_report_says_what_was_asked_once_and_that_nothing_was():
    report = ask(implementation(Recurrent()), only=["scale"], max_examples=5, time_budget=0.0)
    assert report.summary.endswith("1 of the laws that passed had one example only.")
    assert report.summary.splitlines()[1] == (
        "Sizes asked: key_dim 4; value_dim 3; time 2; key and value heads 1 and 1."
    )
    report = ask(plain(in_plain), variants=["gdn"], only=["gradients", "determinism"], max_examples=4)
    sizes = report.sizes()
    assert {8, 64, 128} <= set(sizes["key_dim"]) and 300 in sizes["time"] and "2 and 4" in sizes["key and value heads"]
    assert json.loads(report.to_json())["sizes"] == sizes
    (line,) = [line for line in str(report).splitlines() if line.startswith("Sizes asked: key_dim ")]
    assert "; value_dim 2, 4, " in line and ", 300; key and value heads " in line
    nothing = ask(implementation(nearly), only=["packing"])
    assert "Nothing that was asked for is offered" in str(nothing) and not nothing.passed


def test_laws_that_fail_alike_are_one_failure_and_its_line_can_be_pasted():
    def other(q, k, v, *, log_decay, beta):
        raise RuntimeError("no such tile")

    report = ask(plain(other), only=["recurrence", "gradients"], max_examples=2)
    imports, failure = report.failures()
    assert failure.startswith("recurrence, gradients: RuntimeError: no such tile\n  raised at tests/property/test_conf")
    assert (
        ".py:" in failure and " in other, given q float32[" in failure and 'check_law("recurrence", other,' in failure
    )
    assert imports == (
        "To repeat a failure: from gated_delta.testing import RandomGates, RandomKeys, RandomProblem, check_law"
    )
    failed = ask(implementation(functools.partial(nearly)), only=["gradients"], max_examples=9)
    assert "d_beta" in failed.outcomes[0].message and "d_erase" not in failed.outcomes[0].message
    assert failed.outcomes[0].line.startswith('check_law("gradients", nearly, problem=')
    report = ask(implementation(nearly), only=["recurrence"], max_examples=3)
    names = {}
    exec(report.failures()[0].partition(": ")[2], names)
    with pytest.raises(AssertionError, match="`out` is off by"):
        eval(report.outcomes[0].line, names)


def test_an_exception_is_shown_with_its_place_in_the_kernel_and_the_arrays_that_it_was_given():
    """Also where a kernel asserts, and where what it says depends on the shapes: that is one failure."""

    def asserts(q, k, v, *, log_decay, beta):
        raise AssertionError

    def says_shapes(q, k, v, *, log_decay, beta):
        raise ValueError(f"no {q.shape}")

    laws = ["recurrence", "gradients", "shapes", "determinism"]
    for function, said in ((asserts, "AssertionError: raise AssertionError"), (says_shapes, "ValueError: no (")):
        report = ask(plain(function), only=laws, max_examples=2)
        assert [o.status for o in report.outcomes] == ["failed"] * 4
        _, failure = report.failures()
        assert (
            failure.startswith(f"{', '.join(laws)}: {said}") and f" in {function.__name__}, given q float32[" in failure
        )
        assert "log_decay float32[1, 1, 1, 1], beta float32[1, 1, 1, 1]" in failure
        assert f"{function.__name__} raises for every kind of gates that it was asked for" in report.summary
        assert f" in {function.__name__}, given q float32[" in report.to_junit()
    wrong = ask(implementation(nearly), only=["recurrence"], max_examples=1)
    assert "raises for" not in str(wrong) and "raised at" not in str(wrong)


def gdn_of_value_heads(q, k, v, *, log_decay, beta, initial_state=None):
    """An ordinary kernel: one decay per value head."""
    log_decay, beta = (jnp.reshape(x, v.shape[:3])[..., None] for x in (log_decay, beta))
    return nearly(q, k, v, log_decay=log_decay, beta=beta, initial_state=initial_state)


def test_gates_that_a_kernel_raises_for_are_named_with_the_way_to_ask_for_the_others():
    report = ask(implementation(gdn_of_value_heads), only=["shapes"], max_examples=2)
    assert report.notes == (
        "gdn_of_value_heads raises for 5 of the 6 kinds of gates that it was asked for (those with decay='channel', "
        "decay='tile', owner='key'), and runs for the others. If it need not take those, ask for less: "
        "variants=['gdn'], which is `--variant gdn` on the command line, or "
        "capabilities=Capabilities(decay=('head',), owner=('value',)).",
    )
    for less in (dict(variants=["gdn"]), {}):
        offered = Capabilities() if less else Capabilities(decay=("head",), owner=("value",))
        report = ask(implementation(gdn_of_value_heads, offered), only=["shapes"], max_examples=2, **less)
        assert "`out` is off by" in report.outcomes[0].message and not report.notes


def test_keywords_that_count_as_every_argument_are_said():
    def loose(q, k, v, log_decay, beta, **others):
        return gated_delta(q, k, v, Gates.tied(beta, log_decay))

    report = ask(plain(loose), variants=["gdn"], only=["recurrence"], max_examples=1)
    assert report.notes == (
        "`**` among the parameters of loose counts as taking every argument (initial_state, scale, segment_ids, "
        "num_segments, cu_seqlens here): where it ignores one, name what it takes, or limit `capabilities`.",
    )
    assert report.notes[0] in str(report) and report.outcomes[0].status == "failed"


KERNELS = """
    import numpy as np
    from gated_delta import KDA, AbstractBackend, Gates, MixerConfig, Recurrent, Variant, gated_delta
    from gated_delta.testing import fla_style

    def kernel(q, k, v, *, log_decay, beta, initial_state=None):
        return gated_delta(q, k, v, Gates.tied(beta, log_decay), initial_state=initial_state, backend=Recurrent())

    def stateless(q, k, v, *, log_decay, beta):
        return kernel(q, k, v, log_decay=log_decay, beta=beta)[0]

    def in_numpy(q, k, v):
        group = v.shape[2] // k.shape[2]
        q, k = (np.repeat(x, group, axis=2) for x in (q, k))
        states = np.cumsum(k[..., :, None] * v[..., None, :], axis=1)
        return k.shape[-1] ** -0.5 * np.einsum("bthk,bthkv->bthv", q, states), states[:, -1]

    def in_fla(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=True):
        g = g if g.ndim == 4 else g[..., None]
        return gated_delta(q, k, v, Gates.tied(beta[..., None], g), initial_state=initial_state, scale=scale)

    class Backend(AbstractBackend):
        def why_not(self, problem):
            return None

        def __call__(self, problem):
            return Recurrent()(problem)

    def step(state, token):
        state = np.exp(1) ** token.log_decay[:, None] * state
        state = state + token.k[:, None] * token.erase * (token.v - token.k @ state)
        return state, token.q @ state

    def chunked(state, tokens):
        import jax
        return jax.lax.scan(step, state, tokens)

    variant = Variant(decay="none")
    config = MixerConfig(variant, model=12, key_heads=1, value_heads=2, key_dim=4, value_dim=3)

    def make(key):
        return KDA(12, key_heads=1, key_dim=4, value_dim=3, key=key)
    """
PASTED = {
    "function": (lambda m: implementation(m.kernel), "recurrence"),
    "function with less": (
        lambda m: plain(
            m.stateless,
            capabilities=Capabilities(
                decay=("head",), owner=("value",), final_state=False, gradients=False, max_decay=9
            ),
        ),
        "recurrence",
    ),
    "function of NumPy": (lambda m: plain(m.in_numpy, framework="numpy"), "recurrence"),
    "function of fla": (lambda m: fla_style(m.in_fla, framework="jax"), "recurrence"),
    "backend": (lambda m: implementation(m.Backend()), "recurrence"),
    "NaN": (lambda m: implementation(m.Backend()), "unwritten_memory"),
    "our backend": (lambda m: implementation(Chunked(32)), "recurrence"),
    "step": (lambda m: variant_subject(m.step, gates="kda"), "family"),
    "step with a chunked function": (lambda m: variant_subject(m.step, gates="kda", chunked=m.chunked), "own_chunks"),
    "variant": (lambda m: variant_subject(m.variant), "layer_causality"),
    "name of a variant": (lambda m: variant_subject("gdn"), "layer_causality"),
    "config": (lambda m: variant_subject(m.config), "layer_causality"),
    "constructor": (lambda m: variant_subject(m.make, model=12), "layer_causality"),
}


@pytest.mark.parametrize("subject, name", PASTED.values(), ids=PASTED)
def test_the_line_of_any_failure_runs_as_it_is_pasted(tmp_path, monkeypatch, subject, name):
    """The law, which is made to fail here, holds, so that the line passes where it runs at all."""
    (tmp_path / "my_pasted_kernels.py").write_text(textwrap.dedent(KERNELS))
    monkeypatch.syspath_prepend(tmp_path)
    law, _ = failing_law(name, lambda **case: True)
    try:
        outcome = ask_law(law, subject(importlib.import_module("my_pasted_kernels")), max_examples=1, shrink=False)
        assert outcome.repeat.startswith("To repeat a failure: from gated_delta.testing import ")
        names = {}
        exec(outcome.repeat.partition(": ")[2], names)
        assert eval(outcome.line, names) <= 1
    finally:
        sys.modules.pop("my_pasted_kernels", None)


def test_a_name_that_is_python_is_the_subject_of_its_lines():
    """As in `scripts/conformance_peers.py`, whose `peer("maxtext")` makes an implementation."""
    law, _ = failing_law("recurrence", lambda **case: True)
    for made in (fla_style(in_fla, framework="jax"), plain(in_plain, capabilities=Capabilities(contains=False))):
        outcome = ask_law(law, dataclasses.replace(made, name='peer("one")'), max_examples=1, shrink=False)
        assert outcome.line.startswith('check_law("recurrence", peer("one"), problem=')


def test_the_line_of_a_layer_that_has_no_name_says_what_to_put_there():
    layer = KDA(12, key_heads=1, key_dim=4, value_dim=3, key=jax.random.key(0))
    law, _ = failing_law("layer_causality", lambda **case: True)
    outcome = ask_law(law, variant_subject(layer, model=12), max_examples=1, shrink=False)
    assert outcome.line.startswith('check_law("layer_causality", layer, model=12, seed=')
    assert outcome.repeat.endswith("; layer = ...  # the one that was checked")
    names = {}
    exec(outcome.repeat.partition(": ")[2], names)
    assert eval(outcome.line, {**names, "layer": layer}) == 0


def test_a_law_that_takes_long_says_so_before_it_ends(monkeypatch, capsys):
    monkeypatch.setattr("gated_delta.testing._conformance._PATIENCE", 0.01)
    told = []
    ask(implementation(Recurrent()), only=["zero_length"], max_examples=1, progress=lambda *now: told.append(now))
    assert told[0] == ("zero_length", 0.0)
    assert "gated-delta: Recurrent() is asked for `zero_length` for more than 0 s." in capsys.readouterr().err


# ---- making a failing case small -------------------------------------------------------------------------------------

PLAIN = Implementation("Plain()", Capabilities(), Plain())


def failing_law(name, fails):
    """A law of these cases that fails where `fails(**case)` says, and the cases that did."""
    failed = []

    def check(subject, **case):
        if fails(**case):
            failed.append(case)
            raise AssertionError("it fails")
        return 0.0

    return dataclasses.replace({**LAWS, **LAYER_LAWS, **STEP_LAWS}[name], check=check), failed


def reported(outcome):
    """The case in the line of a failure."""
    assert outcome.status == "failed"
    names = {"check_law": lambda law, subject, **case: case, "Plain": lambda: None}
    return eval(outcome.line, {**vars(gated_delta_testing), **names})


@pytest.mark.parametrize("shrinking", [0.0, 20.0], ids=["without time", "with time"])
def test_the_smallest_case_that_failed_is_reported(monkeypatch, shrinking):
    monkeypatch.setattr("gated_delta.testing._conformance._SHRINKING", shrinking)
    law, failed = failing_law("packing", lambda problem: problem.time > 2 and problem.gates.log_decays != "zero")
    problem = reported(ask_law(law, PLAIN))["problem"]
    assert problem.numbers == min(case["problem"].numbers for case in failed)


def test_a_failing_case_is_smaller_than_the_shapes_that_are_drawn():
    """These need three tokens and a decay per channel: no layout has fewer than 31."""
    law, _ = failing_law("recurrence", lambda problem: problem.time > 2 and problem.gates.decay == "channel")
    (problem,) = reported(ask_law(law, PLAIN)).values()
    assert problem == RandomProblem(time=3, gates=dataclasses.replace(problem.gates, log_decays="mild"))
    offered = Capabilities(key_dims=(128,), value_dims=(64, 128), time_multiple=16)
    (problem,) = reported(ask_law(law, dataclasses.replace(PLAIN, capabilities=offered))).values()
    assert (problem.time, problem.key_dim, problem.value_dim, problem.batch, problem.value_heads) == (16, 128, 64, 1, 1)


def test_a_place_stays_inside_the_problem_that_is_made_small():
    law, _ = failing_law("causality", lambda problem, cut: problem.time > 4)
    case = reported(ask_law(law, PLAIN))
    assert case["problem"].time == 5 and case["cut"] < 5
    law, _ = failing_law("no_leak_between_heads", lambda problem, value, head: problem.value_heads > 1)
    case = reported(ask_law(law, PLAIN))
    assert case["problem"].value_heads == 2 and case["head"] < 2


@settings(max_examples=200)
@given(problems())
def test_smaller_cases_are_on_offer_and_hold_less(problem):
    offered = Capabilities(key_dims=(4, 8), time_multiple=4, packing=("ids", "slots"))
    for case in smaller({"problem": problem, "token": problem.time - 1}, offered):
        small = case["problem"]
        assert offered.why_not(small) is None and small.numbers < problem.numbers
        assert case["token"] < small.time and small.segment_ids.shape == (small.batch, small.time)


def test_a_case_that_fails_elsewhere_is_not_taken_for_the_same_failure():
    def check(subject, problem):
        if problem.time == 3:
            raise IndexError("another one")
        if problem.time > 3:
            raise AssertionError("it fails")
        return 0.0

    law = dataclasses.replace(LAWS["recurrence"], check=check)
    outcome = ask_law(law, dataclasses.replace(PLAIN, capabilities=Capabilities(decay=("channel",), grouped=False)))
    assert outcome.message == "it fails" and reported(outcome)["problem"].time == 4


def test_making_a_case_small_ends_in_time_and_is_not_called_flaky(monkeypatch):
    law, failed = failing_law("recurrence", lambda problem: not time.sleep(0.05) and problem.time > 1)
    monkeypatch.setattr("gated_delta.testing._conformance._SHRINKING", 0.5)
    outcome = ask_law(law, PLAIN)
    assert outcome.message == "it fails" and len(failed) < 20
    monkeypatch.setattr("gated_delta.testing._conformance._SHRINKING", 1000)
    assert ask_law(law, PLAIN, seconds=0.0).seconds < 5  # no more than the law was given, but a second


def test_an_error_of_the_toolkit_is_not_taken_for_a_pass():
    broken = dataclasses.replace(LAWS["recurrence"], cases=lambda subject: problems().map(lambda problem: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        ask_law(broken, PLAIN)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_what_was_found_before_it_was_interrupted_is_in_its_report():
    """Ctrl-C comes while the third law is asked, which had failed, or while the second was."""

    def interrupting(law, after):
        left = iter(range(after))

        def progress(name, share):
            if name == law and next(left, None) is None:
                raise KeyboardInterrupt

        return progress

    asked = dict(only=["determinism", "scale", "recurrence", "padding"], max_examples=4)
    with pytest.raises(KeyboardInterrupt) as stop:
        check_backend(PLAIN, **asked, progress=interrupting("scale", 3))
    first, second, *rest = stop.value.report.outcomes
    assert (first.status, first.examples) == ("passed", 4)
    assert (second.status, second.examples, second.message) == ("interrupted", 3, "after 3 of 4 examples")
    assert [(o.law, o.status, o.message) for o in rest] == [
        ("recurrence", "interrupted", "not asked"),
        ("padding", "interrupted", "not asked"),
    ]
    assert not stop.value.report.passed and not stop.value.report.failures()
    assert "1 passed, 3 interrupted" in str(stop.value) and "after 3 of 4 examples" in str(stop.value)
    suite = ElementTree.fromstring(stop.value.report.to_junit())
    assert suite.attrib["failures"] == "3"


def test_a_failure_is_not_lost_when_it_is_interrupted_while_it_is_made_small():
    calls = []

    def run(arguments, cotangents):
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return {name: 2 * x for name, x in Plain()(arguments, cotangents).items()}

    with pytest.raises(Interrupted) as stop:
        ask(Implementation("Plain()", Capabilities(), run), only=["recurrence", "scale"], max_examples=9)
    failed, rest = stop.value.report.outcomes
    assert failed.status == "failed" and "`out` is off by" in failed.message and rest.status == "interrupted"
    assert isinstance(reported(failed)["problem"], RandomProblem)


def test_laws_of_gates_are_among_those_of_a_variant_that_is_interrupted():
    def progress(law, share):
        if law == "layer_causality":
            raise KeyboardInterrupt

    laws = ["layer_causality", "layer_resume", "recurrence"]
    with pytest.raises(Interrupted) as stop:
        check_variant(variants.gdn, only=laws, progress=progress)
    assert {o.law: o.status for o in stop.value.report.outcomes} == {
        "layer_resume": "passed",
        "layer_causality": "interrupted",
        "recurrence": "interrupted",
    }


def test_a_step_of_ones_own_takes_the_gates_that_its_function_takes():
    def one_token(q, k, v, *, log_decay, beta, state):
        gates = Gates.tied(*(jnp.asarray(x)[:, None] for x in (beta, log_decay)), erase_max=2.0)
        out, state = in_plain_of(*(jnp.asarray(x)[:, None] for x in (q, k, v)), gates, state)
        return out[:, 0], state

    def in_plain_of(q, k, v, gates, state):
        return gated_delta(q, k, v, gates, initial_state=state, backend=Recurrent())

    def scaled(q, k, v, *, log_decay, beta, state):
        out, state = one_token(q, k, v, log_decay=log_decay, beta=beta, state=state)
        return 1.01 * out, state

    for step, status in ((one_token, "passed"), (scaled, "failed")):
        outcome = ask(plain(in_plain, step=step), only=["step"], max_examples=2).outcomes[0]
        assert outcome.status == status, outcome


def test_a_seed_decides_what_is_drawn():
    seen = []

    def spy(arguments, cotangents):
        seen.append(arguments["q"].tobytes())
        return Plain()(arguments, cotangents)

    runs = []
    for seed in (1, 1, 2):
        ask_law(LAWS["determinism"], Implementation("spy", Capabilities(), spy), max_examples=5, seed=seed)
        runs.append(seen.copy())
        seen.clear()
    assert runs[0] == runs[1] != runs[2]


def test_another_chunk_size_is_a_variation_of_the_chunked_backend():
    assert set(implementation(Chunked(32)).variations) == {
        *(str(Chunked(size)) for size in (16, 64, 128)),
        *(str(Chunked(32, residuals=kept)) for kept in ("states", "none", "all")),
        str(Chunked(32, branch=True)),
    }


# ---- in somebody's own project ---------------------------------------------------------------------------------------

PROJECT = {
    "my_kernel.py": """
        import numpy as np

        def run(q, k, v, *, beta):
            "DeltaNet, token by token."
            q, k, beta = (np.repeat(x, v.shape[2] // x.shape[2], axis=2) for x in (q, k, beta))
            state, out = np.zeros((v.shape[0], v.shape[2], k.shape[-1], v.shape[-1])), np.zeros(v.shape)
            for t in range(v.shape[1]):
                error = beta[:, t] * (v[:, t] - np.einsum("bhkv,bhk->bhv", state, k[:, t]))
                state = state + k[:, t][..., None] * error[..., None, :]
                out[:, t] = np.einsum("bhkv,bhk->bhv", state, q[:, t])
            return out.astype(v.dtype), state.astype(np.float32)
        """,
    "test_my_kernel.py": """
        from gated_delta.testing import Capabilities, conformance_suite, plain
        import my_kernel

        offered = Capabilities.from_signature(my_kernel.run, gradients=False, dtypes=("float32",), refuses=False)
        subject = plain(my_kernel.run, framework="numpy", capabilities=offered)
        laws = ["recurrence", "causality", "packing", "defaults", "state_layout", "determinism"]
        test_mine = conformance_suite(subject, only=laws, max_examples=5, expected_failures={"recurrence"})
        both = dict(only=["recurrence", "causality"], max_examples=5)
        test_strict = conformance_suite(subject, **both, expected_failures={"causality"})
        """,
}


def test_one_line_gives_a_test_for_each_law_in_a_project_of_ones_own(tmp_path):
    """The kernel forgets the scale of the query."""
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    options = ["-q", "-rA", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "2 failed, 2 passed, 3 skipped, 1 xfailed" in done.stdout, done.stdout
    assert "PASSED test_my_kernel.py::test_mine[causality]" in done.stdout
    assert "packed documents are not offered" in done.stdout
    assert 'check_law("recurrence", plain(run, framework="numpy"), problem=RandomProblem(' in done.stdout
    imports = "RandomGates, RandomKeys, RandomProblem, check_law, plain; from my_kernel import run"
    assert f"To repeat a failure: from gated_delta.testing import {imports}" in done.stdout
    assert "this law passes: take it out of `expected_failures`" in done.stdout


def test_expected_is_what_the_laws_compare_with():
    problem = RandomProblem(time=3, gates=MEMBERS["kda"], state=True)
    assert check_law("recurrence", Recurrent(), problem=problem) <= 1
    assert set(expected(problem)) >= {"out", "final_state", "d_q"}
