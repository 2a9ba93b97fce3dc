"""The command line, called as the shell calls it: what it prints, what it refuses, and its exit codes."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gated_delta._cli import main
from gated_delta.testing import Outcome, Report
from gated_delta.testing._conformance import Interrupted


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a kernel in it, as the current one."""
    (tmp_path / "my_kernel.py").write_text(
        textwrap.dedent("""
        import jax.numpy as jnp
        import numpy as np
        from gated_delta import AbstractBackend, Gates, Recurrent, Variant, gated_delta
        from gated_delta.testing import Capabilities, plain

        def right(q, k, v, *, log_decay, beta, initial_state=None):
            return gated_delta(q, k, v, Gates.tied(beta, log_decay), initial_state=initial_state, backend=Recurrent())

        def wrong(q, k, v, *, log_decay, beta):
            return right(q, k, v, log_decay=2 * log_decay, beta=beta)

        class Backend(AbstractBackend):
            def why_not(self, problem):
                return None

            def __call__(self, problem):
                return Recurrent()(problem)

        class Sized(Backend):
            tile: int

        def step(state, token):
            state = jnp.exp(token.log_decay)[:, None] * state
            state = state + jnp.outer(token.k, token.erase * (token.v - token.k @ state))
            return state, token.q @ state

        number = 3
        deltanet = Variant(decay="none")

        calls = []

        def stops(q, k, v):
            calls.append(None)
            if len(calls) > 7:
                raise KeyboardInterrupt  # what Ctrl-C is
            states = np.cumsum(k[..., :, None] * v[..., None, :], axis=1)
            return k.shape[-1] ** -0.5 * np.einsum("bthk,bthkv->bthv", q, states), states[:, -1]

        offered = Capabilities.from_signature(stops, gradients=False, grouped=False, dtypes=("float32",))
        stopped = plain(stops, framework="numpy", capabilities=offered)
        """)
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_kernel", None)


FEW = ["--only", "scale", "--only", "causality", "--max-examples", "2"]


def test_a_function_that_is_right_passes(project, capsys):
    laws = ["--only", "recurrence", "--only", "packing"]
    assert main(["check", "my_kernel:right", *laws, "--max-examples", "3"]) == 0
    said = capsys.readouterr()
    assert "right: 1 passed, 1 not offered; 3 examples" in said.out and "packed documents are not offered" in said.out
    assert said.err == "" and "\x1b" not in said.out


def test_a_function_that_is_wrong_fails_and_its_reports_say_how(project, capsys):
    files = ["--json", "report.json", "--junit", "report.xml"]
    assert main(["check", "my_kernel:wrong", "--only", "recurrence", "--max-examples", "9", *files]) == 1
    said = capsys.readouterr().out
    assert 'check_law("recurrence", wrong, problem=RandomProblem(' in said
    assert any(line.startswith("Sizes asked: key_dim ") and line.endswith("2 and 6.") for line in said.splitlines())
    (report,) = json.loads(Path("report.json").read_text())
    assert report["name"] == "wrong" and not report["passed"] and report["outcomes"][0]["status"] == "failed"
    suites = ElementTree.parse("report.xml").getroot()
    assert suites.find("testsuite").attrib["failures"] == "1"
    assert main(["check", "my_kernel:wrong", "--only", "recurrence", "--expected-failure", "recurrence"]) == 0


def test_a_class_and_a_variant_are_checked_too(project, capsys):
    assert main(["check", "my_kernel:Backend", "--only", "dtypes", "--max-examples", "1", "--x64"]) == 0
    assert "Backend(): 1 passed" in capsys.readouterr().out
    assert main(["check", "my_kernel:deltanet", "--only", "layer_serialisation", "--max-examples", "1"]) == 0
    assert "layer_serialisation" in capsys.readouterr().out


def test_a_step_is_checked_with_the_gates_of_its_tokens(project, capsys):
    assert main(["check", "my_kernel:step", "--gates", "kda", "--max-examples", "1"]) == 0
    assert "in the family: decay='channel'" in capsys.readouterr().out


def test_what_a_kernel_does_not_offer_is_not_asked(project, capsys):
    laws = ["recurrence", "dtypes", "refusals", "padding", "extreme_gates", "gradients"]
    only = [word for law in laws for word in ("--only", law)]
    limits = ["--dtypes", "float32", "--without", "refuses", "--without", "gradients", "--key-dims", "8,16"]
    limits += ["--value-dims", "8", "--time-multiple", "16", "--max-decay", "2.5"]
    for target in ("my_kernel:right", "my_kernel:Backend"):
        assert main(["check", target, *only, *limits, "--max-examples", "2", "--json", "report.json"]) == 0
        (report,) = json.loads(Path("report.json").read_text())
        outcomes = {o["law"]: o for o in report["outcomes"]}
        assert {law for law, o in outcomes.items() if o["status"] == "passed"} == {
            *("recurrence", "dtypes", "extreme_gates"),
            *(["padding"] if target.endswith("Backend") else []),
        }
        sizes = report["sizes"]
        assert set(sizes["key_dim"]) <= {8, 16} and sizes["value_dim"] == [8]
        assert all(time % 16 == 0 for time in sizes["time"])
    capsys.readouterr()
    assert (
        main(["check", "my_kernel:stopped", "--dtypes", "float32", "--only", "refusals", "--without", "refuses"]) == 1
    )
    assert "refusing is not offered" in capsys.readouterr().out
    assert main(["check", "my_kernel:wrong", "--only", "recurrence", "--max-examples", "1", "--max-decay", "2.5"]) == 1
    said = capsys.readouterr().out
    assert 'check_law("recurrence", plain(wrong, capabilities=Capabilities(max_decay=2.5)), problem=' in said
    assert "check_law, plain; from my_kernel import wrong" in said


def test_an_interruption_prints_what_was_found_and_writes_it(project, capsys):
    laws = ["--only", "recurrence", "--only", "causality", "--only", "shapes"]
    assert main(["check", "my_kernel:stopped", *laws, "--max-examples", "4", "--json", "report.json"]) == 130
    said = capsys.readouterr()
    assert "stopped: 1 passed, 2 interrupted; 5 examples" in said.out and said.err == "interrupted\n"
    (report,) = json.loads(Path("report.json").read_text())
    outcomes = {o["law"]: (o["status"], o["examples"], o["message"]) for o in report["outcomes"]}
    assert outcomes == {
        "recurrence": ("passed", 4, ""),
        "causality": ("interrupted", 1, "after 1 of 4 examples"),
        "shapes": ("interrupted", 0, "not asked"),
    }


def test_backends_that_an_interruption_left_out_are_named(monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise Interrupted(Report("Chunked()", (Outcome("scale", "interrupted"),), 0))

    monkeypatch.setattr("gated_delta.testing._terminal.ask", interrupted)
    assert main(["check", "--only", "scale"]) == 130
    assert capsys.readouterr().err == "interrupted; not asked: Recurrent()\n"


def test_our_own_backends_are_checked_without_a_target(capsys):
    few = ["--only", "determinism", "--max-examples", "1", "--variant", "gdn"]
    assert main(["check", *few]) == 0
    said = capsys.readouterr().out
    assert "Chunked(): 1 passed" in said and "Recurrent(): 1 passed" in said
    assert main(["check", *few, "--backend", "recurrent", "--seed", "7", "--time-budget", "1m"]) == 0
    said = capsys.readouterr().out
    assert "Chunked()" not in said and "seed 7" in said


def test_the_laws_are_listed(capsys):
    assert main(["check", "--list"]) == 0
    said = capsys.readouterr().out
    assert "causality" in said and "layer_documents" in said and "own_chunks" in said


MISTAKES = {
    "no module": (["check", "nothing"], "'nothing' must be module:object, as in my_kernels.gdn:backend"),
    "module": (["check", "no_such:thing"], "'no_such' cannot be imported: No module named 'no_such'"),
    "ending": (["check", "my_kernel.py:right"], "a module has no ending: my_kernel:right"),
    "object": (["check", "my_kernel:thing"], "my_kernel has nothing named 'thing'"),
    "class": (["check", "my_kernel:Sized"], "my_kernel:Sized is a class that needs arguments"),
    "number": (["check", "my_kernel:number"], "can be checked, but 3 came"),
    "law": (["check", "my_kernel:right", "--only", "x"], "There is no law 'x'. The laws are: recurrence"),
    "backend": (
        ["check", "--backend", "x"],
        "there is no backend 'x': the backends are chunked, recurrent, pallas-tpu",
    ),
    "variant": (["check", "--variant", "x"], "there is no variant 'x': the variants are delta_net, gdn, gdn2, gla"),
    "a dtype": (["check", "my_kernel:right", "--dtypes", "fp32"], "must be some of float32, bfloat16"),
    "step": (
        ["check", "my_kernel:step"],
        "`step(state, token)` takes no arrays `q`, `k` and `v`. An update of one token",
    ),
    "gates": (["check", "my_kernel:step", "--gates", "x"], "the name of one of `MEMBERS`, linear_attention, retnet"),
    "limits": (["check", "my_kernel:deltanet", "--dtypes", "float32"], "limit a kernel: a layer or a step is asked"),
    "made": (["check", "my_kernel:stopped", "--without", "gradients"], "says so where its adapter is called"),
    "both": (["check", "my_kernel:right", "--backend", "chunked"], "give a target or --backend, not both"),
    "file": (["check", "my_kernel:right", *FEW, "--json", "no/r.json"], "no/r.json cannot be written: No such file"),
    "heads": (["explain", "--key-heads", "2", "--value-heads", "3"], "needs value_heads to be a multiple of key_heads"),
    "dtype": (["explain", "--dtype", "float31"], "float31"),
}


@pytest.mark.parametrize("arguments, words", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_in_one_line(project, capsys, arguments, words):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1 and said.startswith(f"gated-delta {arguments[0]}: ")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["check", "--max-examples", "0"], "'0' must be a whole number of at least 1"),
        (["check", "--time-budget", "soon"], "'soon' must be a time such as 60s or 5m"),
        (["explain", "--key-dim", "wide"], "'wide' must be a whole number"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_what_cannot_be_parsed_exits_with_2_and_says_why(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["check"], ["explain"], ["info"]])
def test_help_says_what_there_is(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([*command, "--help"])
    assert stop.value.code == 0 and "usage: gated-delta" in capsys.readouterr().out


def test_explain_says_which_backend_would_run(capsys):
    assert main(["explain", "--key-dim", "256", "--value-heads", "32", "--variant", "sla", "--packed"]) == 0
    said = capsys.readouterr().out
    assert "16 states of 256 x 512" in said and "decay: 4 groups" in said and "Chunked(): runs" in said
    assert main(["explain", "--decay", "channel", "--erase", "channel", "--write", "channel"]) == 0
    assert "decay: channel, erase: channel, write: channel" in capsys.readouterr().out


def test_info_lists_versions_devices_and_backends(capsys):
    assert main(["info"]) == 0
    said = capsys.readouterr().out
    for word in ("Python ", "jax ", "devices: ", "Chunked(): runs", "Recurrent(): could run"):
        assert word in said


def in_a_shell(*arguments, code="", **environment):
    program = f"{code}\nimport sys\nfrom gated_delta._cli import main\nsys.exit(main({list(arguments)!r}))"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)


@pytest.mark.parametrize("name", ["rich", "hypothesis"])
def test_an_extra_that_is_missing_is_named_in_one_line(name):
    done = in_a_shell("check", code=f"import sys; sys.modules[{name!r}] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"gated-delta check: it needs {name}, which is an extra: pip install 'gated-delta[check]'\n"


def test_colours_need_a_terminal_and_may_be_switched_off():
    plain = in_a_shell("check", "--list", FORCE_COLOR="1", NO_COLOR="1")
    coloured = in_a_shell("check", "--list", FORCE_COLOR="1", TERM="xterm")
    piped = in_a_shell("check", "--list")
    assert "\x1b[1m" in coloured.stdout and "\x1b[3" not in plain.stdout and "\x1b" not in piped.stdout
