"""The recall example: its task, its verdicts, and that the layers it trains are the ones it names."""

import importlib.util
import pathlib
import sys

import jax
import numpy as np
import pytest
from rich.console import Console

FAST = {"xla_backend_optimization_level": 0}
SCRIPT = pathlib.Path(__file__).resolve().parents[1] / "examples" / "recall.py"


def load_script():
    spec = importlib.util.spec_from_file_location("recall", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["recall"] = module
    spec.loader.exec_module(module)
    return module


recall = load_script()


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an integer power
        yield


def test_the_answer_is_the_value_written_last():
    tokens, answers = jax.jit(jax.vmap(recall.draw), compiler_options=FAST)(jax.random.split(jax.random.key(0), 20))
    for sequence, answer in zip(np.asarray(tokens), np.asarray(answers)):
        pairs, asked = sequence[: -recall.ASKED].reshape(-1, 2), sequence[-recall.ASKED :]
        written = {}
        for key, value in pairs:
            assert 0 <= key < recall.KEYS <= value < recall.KEYS + recall.VALUES
            written[key] = value - recall.KEYS
        assert [written[key] for key in asked] == answer.tolist()
        times = [np.count_nonzero(pairs[:, 0] == key) for key in asked]
        half = recall.ASKED // 2
        assert times == [1] * half + [recall.WRITES] * half and set(pairs[:half, 0]) == set(asked[:half])


def test_layers_hold_as_much_and_differ_in_the_erase_alone():
    configs = recall.layers()
    assert len(configs) == 6 and max(config.key_dim for config in configs.values()) < recall.KEYS
    for name, config in configs.items():
        assert config.value_heads * config.key_dim * config.value_dim == recall.KEY_DIM**2
        without = recall.without_erase(config)
        assert without.variant.erase == "none" and without.variant.write == config.variant.write
        assert without.variant.decay == config.variant.decay and (without == config) == (name == "GLA")


def curve(accuracy):
    return np.full((50, 2), accuracy)


@pytest.mark.parametrize(
    "accuracies, good",
    [((0.96, 0.69), True), ((0.94, 0.69), False), ((0.96, 0.71), False), ((np.nan, 0.5), False)],
)
def test_the_verdict_is_on_both_bounds(accuracies, good, monkeypatch, tmp_path, capsys):
    learnt, lost = accuracies
    curves = {("GDN", True): curve(learnt), ("GDN", False): curve(lost), ("GLA", False): curve(0.99)}
    monkeypatch.setattr(recall, "train_all", lambda configs, steps, seed, console: curves)
    assert recall.main(["--layers", "gdn,gla", "--out", str(tmp_path)]) == (0 if good else 1)
    printed = capsys.readouterr().out
    assert ("NO" in printed) == (not good) and "at least 0.95" in printed and "below 0.70" in printed
    assert (tmp_path / "recall.png").read_bytes().startswith(b"\x89PNG")


def test_every_layer_is_trained_under_its_own_name(monkeypatch):
    monkeypatch.setattr(recall, "train", lambda config, **options: config)
    configs = {(name, False): config for name, config in recall.layers().items()}
    assert recall.train_all(configs, 50, 0, Console(quiet=True)) == configs


@pytest.mark.parametrize(
    "arguments, message",
    [(["--layers", "gdn,lstm"], "--layers does not know lstm"), (["--steps", "120"], "must be a multiple of 50")],
)
def test_bad_arguments_are_answered(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        recall.main(arguments)
    assert exit.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_an_erase_is_what_recall_needs(tmp_path):
    assert recall.main(["--out", str(tmp_path)]) == 0
