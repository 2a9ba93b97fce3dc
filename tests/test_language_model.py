"""The demo, on tiny settings: its arithmetic, its checkpoints, Ctrl-C, and what it prints and writes."""

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import math
import os
import pathlib
import random
import signal
import subprocess
import sys
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from gated_delta import SoftmaxAttention

SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "examples" / "language_model.py"
STEPS = 8
MIXERS = ["gdn", "kda", "gdn2", "sla"]


def load_script():
    spec = importlib.util.spec_from_file_location("language_model", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["language_model"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.make_optimizer = functools.cache(module.make_optimizer)  # equal settings then compile once for all tests
    return module


demo = load_script()


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


def tiny(text, folder) -> list[str]:
    options = f"--blocks 1 --width 32 --length 32 --batch 2 --seed 3 --learning-rate 1e-2 --steps {STEPS}"
    return [*options.split(), "--text", str(text), "--out", str(folder)]


@pytest.fixture
def arguments(text, tmp_path) -> list[str]:
    return tiny(text, tmp_path / "run")


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The folder of a whole run of the same settings. Copy it before writing into it."""
    folder = tmp_path_factory.mktemp("finished")
    with jax.numpy_dtype_promotion("standard"):
        assert demo.main(tiny(text, folder)) == 0
    return folder


@pytest.fixture
def run(finished, tmp_path) -> pathlib.Path:
    """A copy of the finished run where `arguments` expects it."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in finished.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def small_settings(**changes):
    settings = demo.Settings(
        "gdn", width=32, blocks=4, length=32, batch=2, steps=8, learning_rate=1e-2, seed=3, text="none"
    )
    return dataclasses.replace(settings, **changes)


# ---------------------------------------------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("length", [8, 9, 32])
@pytest.mark.parametrize("size", [64, 65, 71, 200])
def test_every_validation_byte_is_scored_once_after_enough_context(length, size):
    text = np.random.default_rng(size).integers(1, 256, 600 + size).astype(np.uint8)
    training, validation = text[:600], text[600:]
    windows, counts = demo.validation_windows(training, validation, length)
    assert windows.shape[1] == length + 1 and counts.shape == (len(windows), length)
    np.testing.assert_array_equal(windows[:, 1:][counts], validation)
    position = 600
    for window, count in zip(windows, counts):
        for target in np.flatnonzero(count) + 1:
            assert target > length // 2  # so many bytes stand before it in its window,
            np.testing.assert_array_equal(
                window[:target], text[position - target : position]
            )  # and they are the text's
            position += 1


class BigramModel(eqx.Module):
    logits: jax.Array

    def __call__(self, tokens):
        return self.logits[tokens]


def test_evaluate_agrees_with_the_bigram_counted_directly(text):
    training, validation = np.split(np.frombuffer(text.read_bytes(), np.uint8), [5000])
    counts = np.full((256, 256), 0.1)
    for first, second in itertools.pairwise(training):
        counts[first, second] += 1
    model = BigramModel(jnp.log(jnp.asarray(counts / counts.sum(1, keepdims=True), jnp.float32)))
    evaluated = demo.evaluate(model, *demo.validation_windows(training, validation, 32))
    assert evaluated == pytest.approx(demo.bigram_bits(training, validation), rel=1e-5)


def test_bigram_bits_of_a_text_worked_out_by_hand():
    training, validation = np.frombuffer(b"ababab", np.uint8), np.frombuffer(b"aa", np.uint8)
    after_b = (2 + 0.1) / (2 + 25.6)  # b -> a twice; the first validation byte follows the last training byte
    after_a = 0.1 / (3 + 25.6)  # a -> b three times, a -> a never
    assert demo.bigram_bits(training, validation) == pytest.approx(-(math.log2(after_a) + math.log2(after_b)) / 2)


def test_zlib_bits_are_those_of_level_9_and_a_dictionary_helps(text):
    training, validation = text.read_bytes()[:5000], text.read_bytes()[5000:]
    assert demo.zlib_bits(validation) == 8 * len(zlib.compress(validation, 9)) / len(validation)
    assert demo.zlib_bits(validation, training) < demo.zlib_bits(validation)


def test_training_windows_depend_on_seed_and_step_alone_and_stay_inside_the_text():
    training = np.arange(40, dtype=np.uint8)
    settings = small_settings()
    batches = [demo.training_batch(training, settings, step) for step in range(200)]
    np.testing.assert_array_equal(batches[7], demo.training_batch(training, settings, 7))
    assert (np.diff(batches, axis=-1) == 1).all()
    starts = {int(start) for batch in batches for start in batch[:, 0]}
    assert starts == set(range(8))  # 40 bytes hold 8 windows of 33
    other = [demo.training_batch(training, small_settings(seed=4), step) for step in range(200)]
    assert not np.array_equal(batches, other)


# --------------------------------------------------------------------------------------------------------------- model


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_fits_and_one_block_in_four_is_attention(mixer):
    settings = small_settings(mixer=mixer, blocks=8)
    model = eqx.filter_eval_shape(demo.LanguageModel, settings, key=jax.random.key(0))
    kinds = [isinstance(block.mixer, SoftmaxAttention) for block in model.stack.blocks]
    assert kinds == [False, False, False, True] and model.stack.config.repeats == 2
    assert model.stack.blocks[3].mixer.config.window == settings.length
    tokens = jax.ShapeDtypeStruct((32,), jnp.int32)
    assert eqx.filter_eval_shape(model, tokens).shape == (32, 256)
    logits, _ = eqx.filter_eval_shape(demo.run_steps, model, tokens, model.init_state())
    assert logits.shape == (32, 256)


@pytest.mark.slow
def test_hybrid_is_causal_and_its_steps_agree_with_the_parallel_form():
    model = demo.LanguageModel(small_settings(blocks=4), key=jax.random.key(0))
    tokens = jnp.arange(64)  # twice as far as attention sees
    forward = eqx.filter_jit(model)
    logits, changed = forward(tokens), forward(tokens.at[20].set(200))
    np.testing.assert_array_equal(logits[:20], changed[:20])
    assert not np.array_equal(logits[20], changed[20])
    stepped, _ = demo.run_steps(model, tokens, model.init_state())
    np.testing.assert_allclose(stepped, logits, atol=1e-5)


def test_sample_shows_text_as_it_is_and_no_control_characters():
    assert demo.readable(np.frombuffer("a\n\tß\x1b[31m\r\x00".encode() + b"\xff", np.uint8)) == "a\n\tß?[31m??\ufffd"


# ----------------------------------------------------------------------------------------------------------- whole run


def test_run_writes_curve_plot_sample_and_two_checkpoints(finished):
    names = sorted(path.name for path in finished.iterdir())
    assert names == ["curve.json", "curve.png", "sample.txt", "step-00000007.checkpoint", "step-00000008.checkpoint"]
    curve = json.loads((finished / "curve.json").read_text())
    assert len(curve["training"]) == STEPS
    assert [step for step, _ in curve["validation"]] == list(range(1, STEPS + 1))
    assert curve["validation"][-1][1] < curve["validation"][0][1]
    assert (finished / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert len((finished / "sample.txt").read_text()) > 100


def test_report_names_the_text_and_shows_the_table_without_progress_bars(run, arguments, text, capsys):
    assert demo.main([*arguments, "--resume"]) == 0
    output = capsys.readouterr().out
    content = text.read_bytes()
    assert f"{len(content)} bytes, SHA-256 {hashlib.sha256(content).hexdigest()}\n" in output
    assert "resuming after step 8\n" in output
    assert "parallel against step by step over 64 bytes: logits differ by at most " in output
    validation = content[len(content) * 9 // 10 :]
    assert f"The {len(validation)} validation bytes" in output
    assert f"{8 * len(zlib.compress(validation, 9)) / len(validation):.3f}" in output
    assert "\x1b" not in output and "\r" not in output


@pytest.mark.slow
@pytest.mark.parametrize("mixer", MIXERS)
def test_hybrid_of_every_mixer_runs_and_learns(mixer, arguments, tmp_path):
    assert demo.main([*arguments, "--mixer", mixer, "--blocks", "4"]) == 0
    curve = json.loads((tmp_path / "run" / "curve.json").read_text())
    assert curve["validation"][-1][1] < curve["validation"][0][1]


def test_difference_between_parallel_and_steps_fails_the_run(run, arguments, monkeypatch, capsys):
    run_steps = demo.run_steps

    def off_by_a_little(*inputs):
        logits, states = run_steps(*inputs)
        return logits.at[5, 7].add(2e-4), states

    monkeypatch.setattr(demo, "run_steps", off_by_a_little)
    assert demo.main([*arguments, "--resume"]) == 1
    assert "the parallel and the step-by-step run differ by 2.0e-04, more than 1e-04" in capsys.readouterr().err


def test_loss_that_is_not_finite_stops_the_run_and_is_not_saved(arguments, tmp_path, capsys):
    assert demo.main([*arguments, "--learning-rate", "1e38"]) == 1
    error = capsys.readouterr().err
    assert "not finite" in error and error.count("\n") == 1
    for path in (tmp_path / "run").glob("*.checkpoint"):
        curve = json.loads(path.read_bytes().split(b"\n")[1])["curve"]
        assert all(math.isfinite(bits) for _, bits in curve["validation"])


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_ctrl_c_saves_and_resume_continues_bit_for_bit(finished, arguments, tmp_path, monkeypatch, capsys):
    training_batch = demo.training_batch

    def interrupted_at_3(training, settings, step):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return training_batch(training, settings, step)

    handler = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(demo, "training_batch", interrupted_at_3)
    folder = tmp_path / "run"
    assert demo.main(arguments) == 130
    assert "interrupted: step 3 is saved" in capsys.readouterr().err
    assert max(folder.glob("*.checkpoint")).name == "step-00000003.checkpoint"
    assert signal.getsignal(signal.SIGINT) is handler
    monkeypatch.undo()
    assert demo.main([*arguments, "--resume"]) == 0
    for name in ("curve.json", "sample.txt", "step-00000008.checkpoint"):  # weights and moments too
        assert (folder / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_session_saves_a_whole_checkpoint(arguments, tmp_path):
    command = [sys.executable, "-u", str(SCRIPT), *arguments, "--steps", "1000000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        for line in process.stdout:
            if line.startswith("first step"):
                break
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130, error
    assert error.startswith("language_model: interrupted: step ") and error.count("\n") == 1
    (path,) = (tmp_path / "run").glob("*.checkpoint")
    assert f"step {int(path.name[5:13])} is saved" in error
    settings = demo.Settings(**json.loads(path.read_bytes().split(b"\n")[1])["settings"])
    model = demo.LanguageModel(settings, key=jax.random.key(0))
    state = demo.make_optimizer(settings).init(eqx.filter(model, eqx.is_inexact_array))
    step, model, _, curve = demo.load_newest(path.parent, settings, model, state, rich.console.Console())
    assert len(curve["training"]) == step
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))


def flip_a_byte_of_the_arrays(content: bytes) -> bytes:
    middle = len(content) - 1000
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


damages = {
    "one bit of the arrays": flip_a_byte_of_the_arrays,
    "one digit of the curve": lambda content: content.replace(b'"step": 8', b'"step": 7', 1),
    "cut off": lambda content: content[: len(content) // 2],
    "no last byte": lambda content: content[:-1],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", damages.values(), ids=damages.keys())
def test_damaged_checkpoint_is_refused_and_the_one_before_it_used(damage, run, finished, arguments, capsys):
    newest = run / "step-00000008.checkpoint"
    content = newest.read_bytes()
    assert damage(content) != content
    newest.write_bytes(damage(content))
    assert demo.main([*arguments, "--resume"]) == 0
    output = capsys.readouterr().out.replace("\n", "")
    assert "step-00000008.checkpoint is damaged (its content does not match its SHA-256)" in output
    assert "resuming after step 7" in output
    for name in (
        "curve.json",
        "step-00000008.checkpoint",
    ):  # the damaged file is replaced by the one it should have been
        assert (run / name).read_bytes() == (finished / name).read_bytes()


def test_when_every_checkpoint_is_damaged_nothing_is_trained_or_removed(run, arguments, capsys):
    before = {}
    for path in run.glob("*.checkpoint"):
        path.write_bytes(path.read_bytes()[:-1])
        before[path] = path.read_bytes()
    assert demo.main([*arguments, "--resume"]) == 2
    output, error = capsys.readouterr()
    assert output.count(" is damaged ") == 2
    assert error == f"language_model: nothing to resume: there is no whole checkpoint in {run}\n"
    assert {path: path.read_bytes() for path in run.glob("*.checkpoint")} == before


@pytest.mark.parametrize(
    "change, difference",
    [
        (["--seed", "4"], "seed 3 there, 4 here"),
        (["--steps", "9"], "steps 8 there, 9 here"),
        (["--mixer", "kda", "--batch", "3"], "mixer gdn there, kda here; batch 2 there, 3 here"),
    ],
)
def test_checkpoint_of_other_settings_is_refused_with_what_differs(run, arguments, change, difference, capsys):
    assert demo.main([*arguments, *change, "--resume"]) == 2
    error = capsys.readouterr().err
    assert "belongs to a run with other settings: " + difference in error and error.count("\n") == 1


def test_checkpoint_of_another_text_is_refused(run, arguments, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text("another text " * 500)
    assert demo.main([*arguments, "--text", str(other), "--resume"]) == 2
    assert "other settings: text " in capsys.readouterr().err


def test_new_run_in_a_used_folder_starts_from_its_own_first_step(run, finished, arguments, capsys):
    assert demo.main(arguments) == 0
    assert "a new run: removed" in capsys.readouterr().out
    assert sorted(path.name for path in run.iterdir()) == sorted(path.name for path in finished.iterdir())
    assert (run / "curve.json").read_bytes() == (finished / "curve.json").read_bytes()


def test_file_is_replaced_only_when_its_new_content_is_on_disk(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    calls = []

    def fsync(descriptor):
        (temporary,) = set(tmp_path.iterdir()) - {path}  # in the same folder, hence the same file system
        calls.append(("fsync", path.read_bytes(), temporary.read_bytes()))

    replace = os.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    demo.write_atomically(path, b"new content")
    assert calls == [("fsync", b"old", b"new content"), "replace"]
    assert path.read_bytes() == b"new content" and list(tmp_path.iterdir()) == [path]


def test_file_survives_a_full_disk(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        demo.write_atomically(path, b"new content")
    assert path.read_bytes() == b"old"
    assert demo.checkpoints(tmp_path) == []  # a temporary file left behind is never taken for a checkpoint


# ----------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    "change, message",
    [
        (["--mixer", "lstm"], "invalid choice: 'lstm'"),
        (["--steps", "0"], "--steps is 0; it must be positive"),
        (["--steps", "ten"], "invalid int value: 'ten'"),
        (["--learning-rate", "nan"], "--learning-rate is nan; it must be positive"),
        (["--width", "48"], "--width is 48; it must be a multiple of 32"),
        (["--seed", "-1"], "--seed is -1; it must not be negative"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--text", "no-such-file"], "No such file or directory: 'no-such-file'"),
        (["--length", "400"], "--length 400 needs 8000"),
        (["--resume"], "nothing to resume: there is no whole checkpoint in"),
    ],
)
def test_bad_arguments_are_answered_in_one_line(arguments, change, message, capsys):
    try:
        code = demo.main([*arguments, *change])
    except SystemExit as exit:  # argparse's own way out
        code = exit.code
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("language_model: ") and message in error and error.count("\n") == 1
