"""The distributed example: every mesh has the curve of one device; so have two processes, killed and resumed too.

make test-distributed
"""

import importlib.util
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"
STEPS, SAVED = 12, 4
PATIENCE = 20  # seconds: a machine with other work may take some for a step
SIZES = f"--units 1 --width 64 --head 16 --length 32 --batch 8 --seed 3 --learning-rate 1e-2 --steps {STEPS} "
SIZES += "--dtype float32 --log-every 1 --save-every 0"
MESHES = {
    "data": "--data 4",
    "model": "--model 4",
    "data and model": "--data 2 --model 2",
    "context": "--context 4",
    "model and context": "--model 2 --context 2",
}


def load_script():
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("train_distributed", EXAMPLES / "train_distributed.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["train_distributed"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


demo = load_script()
needs_orbax = pytest.mark.skipif(
    importlib.util.find_spec("orbax") is None, reason="needs orbax-checkpoint, which the `distributed` extra has"
)


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an integer power
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    rng = random.Random(0)
    words = ["state", "key", "value", "gate", "decay", "erase", "write", "read", "chunk", "token"]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(rng.choice(words) for _ in range(1000)))
    return path


def curve_of(folder: pathlib.Path) -> list[float]:
    return json.loads((folder / "curve.json").read_text())


class Processes:
    """Processes of the example, and what they print. They are to compile fast, not to run fast."""

    def __init__(self, text, folder, *options: str, count: int = 2, run: tuple[int, ...] | None = None):
        """`count` processes that wait for each other, of which those in `run` are started; devices are 4 in all."""
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        common = [*SIZES.split(), "--text", str(text), "--out", str(folder), *" ".join(options).split()]
        common += ["--cpu-devices", str(4 // count)]
        if count > 1:
            common += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count)]
        self.running, self.logs = {}, {}
        folder.mkdir(exist_ok=True)
        for number in range(count) if run is None else run:
            command = [sys.executable, str(EXAMPLES / "train_distributed.py"), *common, "--process", str(number)]
            self.logs[number] = folder / f"log-{time.monotonic_ns()}-{number}.txt"
            with open(self.logs[number], "w") as log:
                self.running[number] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def said(self, number: int) -> str:
        return self.logs[number].read_text()

    def wait_for(self, number: int, words: str, seconds: float = 600):
        end = time.monotonic() + seconds
        while not re.search(words, self.said(number)):
            assert self.running[number].poll() is None, f"ended before {words!r}:\n{self.said(number)}"
            assert time.monotonic() < end, f"no {words!r} in {seconds} s:\n{self.said(number)}"
            time.sleep(0.05)

    def end(self, number: int, seconds: float = 600) -> int:
        """The exit code."""
        try:
            return self.running[number].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"process {number} goes on after {seconds} s:\n{self.said(number)}") from None

    def assert_all_end_well(self):
        for number in self.running:
            assert self.end(number) == 0, self.said(number)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run(text, folder, *options: str, count: int = 1) -> list[float]:
    """The curve of a whole run."""
    with Processes(text, folder, *options, count=count) as processes:
        processes.assert_all_end_well()
    return curve_of(folder)


@pytest.fixture(scope="module")
def reference(text, tmp_path_factory) -> list[float]:
    """The curve of one device."""
    curve = run(text, tmp_path_factory.mktemp("reference"), "--data 1")
    assert len(curve) == STEPS and curve[-1] < curve[0] - 1
    return curve


def assert_same(curve, reference):
    np.testing.assert_allclose(curve, reference, rtol=2e-5)


# ---- one process -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [*MESHES.values(), "--data 2 --context 2 --fsdp", "--data 2 --accumulate 4"])
def test_every_mesh_has_the_curve_of_one_device(options, text, tmp_path, reference):
    assert_same(run(text, tmp_path, options), reference)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["kda", "gdn2", "sla"])
def test_every_mixer_has_one_curve_over_all_axes(mixer, text, tmp_path):
    sizes = f"--mixer {mixer} --width 128"
    alone = run(text, tmp_path / "alone", sizes, "--data 1")
    assert_same(run(text, tmp_path / "mesh", sizes, "--model 2 --context 2"), alone)


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["all", "none", "mixed,mlp_hidden,gated_delta_solves"])
def test_what_blocks_keep_changes_no_loss(keep, text, tmp_path, reference):
    assert_same(run(text, tmp_path, f"--data 2 --keep {keep}"), reference)


@pytest.mark.slow
def test_bfloat16_products_follow_the_curve(text, tmp_path, reference):
    curve = run(text, tmp_path, "--data 2 --model 2 --dtype bfloat16")
    np.testing.assert_allclose(curve, reference, rtol=0.05)
    assert curve != reference


# ---- what needs no compilation ---------------------------------------------------------------------------------------


def plan(options: str = "", devices: int = 4, **mesh):
    parsed = demo.parse(options.split())
    settings = demo.settings_of(parsed, b"")
    over = demo.make_mesh(mesh.get("data"), mesh.get("model", 1), mesh.get("context", 1), jax.devices()[:devices])
    return demo.Plan(settings, over, parsed.fsdp)


def by_name(tree):
    return demo.by_name(jax.tree.map(lambda x: x, tree, is_leaf=demo.is_spec))


@pytest.mark.parametrize("mixer", ["gdn", "kda", "gdn2", "sla"])
def test_every_array_of_a_plan_can_be_cut_as_it_says(mixer):
    made = plan(f"--mixer {mixer} --width 256 --fsdp", data=2, model=2)
    for shape, sharding in zip(jax.tree.leaves(made.shapes), jax.tree.leaves(made.shardings), strict=True):
        assert sharding.shard_shape(shape.shape) is not None  # raises where an axis cannot be cut


def test_the_optimizer_has_its_copies_where_the_parameters_are():
    made = plan(data=2, model=2)
    model, state = made.specs
    parameters = {jax.tree_util.keystr(path): spec for path, spec in _leaves(model)}
    copies = [(jax.tree_util.keystr(path), spec) for path, spec in _leaves(state)]
    for name, spec in parameters.items():
        own = [copy for path, copy in copies if path.endswith(name)]
        assert len(own) >= 2 and all(copy == spec for copy in own), name  # Adam's two moments


def _leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=demo.is_spec)[0]


def test_fsdp_leaves_no_large_array_whole():
    made = plan("--fsdp", data=4)
    for path, spec in _leaves(made.specs[0]):
        name, shape = jax.tree_util.keystr(path), demo.by_name(made.shapes[0])[jax.tree_util.keystr(path)].shape
        assert "data" in tuple(spec) or np.prod(shape[-2:]) < 1024, (name, shape, spec)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--width 100", "must be a multiple of 32"),
        ("--batch 6 --accumulate 4", "multiple of --accumulate 4"),
        ("--processes 2", "needs --coordinator"),
        ("--keep everything", "'everything' is not all, none, or one of mixed"),
        ("--resume --save-every 0", "--save-every must not be 0"),
        ("--steps 0", "must be positive"),
    ],
)
def test_options_that_do_not_fit_are_one_line(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        demo.parse(options.split())
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "options, message",
    [
        ("--data 9 --model 7", "9 x 7 x 1 needs as many devices"),
        ("--data 4 --batch 6", "--batch / --accumulate is 6; it must be a multiple of --data, which is 4"),
        ("--context 4 --length 30", "--length is 30; it must be a multiple of --context, which is 4"),
        ("--model 4 --width 64", "there are 2 key heads; they must be a multiple of --model, which is 4"),
    ],
)
def test_meshes_that_do_not_fit_are_one_line(options, message, text, tmp_path, capsys):
    assert demo.main([*options.split(), "--text", str(text), "--out", str(tmp_path), "--save-every", "0"]) == 2
    assert message in capsys.readouterr().err


def test_a_spec_is_cut_again_where_it_is_whole():
    mesh = demo.make_mesh(4, 1, 1, jax.devices()[:4])
    assert demo.cut_again(P(None, "model"), (64, 32), mesh) == P("data", "model")
    assert demo.cut_again(P("model"), (64, 32), mesh) == P("model", "data")
    assert demo.cut_again(P(None), (64,), mesh) == P(None)  # small


# ---- two processes ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_two_processes_have_the_curve_of_one_device(mesh, text, tmp_path, reference):
    assert_same(run(text, tmp_path, mesh, count=2), reference)


@needs_orbax
@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_run_resumes_on_the_same_curve(victim, text, tmp_path, reference):
    """The survivor ends by itself and says why. What goes on reads the last checkpoint that is whole."""
    options = f"--data 2 --model 2 --save-every {SAVED} --patience {PATIENCE}"
    with Processes(text, tmp_path, options) as both:
        both.wait_for(0, rf"step +{SAVED + 2} ")
        both.running[victim].kill()
        survivor = 1 - victim
        assert both.end(survivor, 6 * PATIENCE) != 0
        assert re.search(GONE, both.said(survivor)), both.said(survivor)
    assert not (tmp_path / "curve.json").exists()
    (tmp_path / "checkpoints" / f"{SAVED + 3}.orbax-checkpoint-tmp-1").mkdir()  # as if it had died while it saved
    with Processes(text, tmp_path, options, "--resume") as both:
        both.assert_all_end_well()
        assert f"resuming after step {SAVED}" in both.said(0)
    assert_same(curve_of(tmp_path), reference)


GONE = "another process is gone|distributed service detected fatal errors"


@needs_orbax
@pytest.mark.slow
def test_a_run_of_two_processes_goes_on_over_another_mesh_in_one(text, tmp_path, reference):
    with Processes(text, tmp_path, f"--model 4 --save-every {SAVED} --patience {PATIENCE}") as both:
        both.wait_for(0, rf"step +{SAVED + 1} ")
        both.running[1].kill()
        both.end(0, 6 * PATIENCE)
    assert_same(run(text, tmp_path, f"--data 2 --context 2 --save-every {SAVED} --resume"), reference)


@pytest.mark.slow
def test_a_peer_that_hangs_is_an_error_in_time(text, tmp_path):
    with Processes(text, tmp_path, f"--data 2 --model 2 --steps 100000 --patience {PATIENCE}") as both:
        both.wait_for(0, r"step +3 ")
        both.running[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        assert both.end(0, 6 * PATIENCE) == demo.STALLED
        assert time.monotonic() - stopped < 3 * PATIENCE
        assert f"did not end within {PATIENCE} s: another process is gone or hangs" in both.said(0)


@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1])
def test_a_peer_that_never_comes_is_an_error_in_time(present, text, tmp_path):
    with Processes(text, tmp_path, "--patience 5", run=(present,)) as one:
        assert one.end(present, 60) == demo.STALLED
        assert "the meeting of 2 processes at 127.0.0.1" in one.said(present)
        assert "did not end within 5 s: another process is gone or hangs" in one.said(present)
