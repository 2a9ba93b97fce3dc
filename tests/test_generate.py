"""The serving example: that it sees when requests are mixed up."""

import importlib.util
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

pytestmark = pytest.mark.inference
EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


before = sys.modules.get("language_model")
demo, generate = load_script("language_model"), load_script("generate")
if before is not None:
    sys.modules["language_model"] = before


@pytest.fixture(autouse=True)
def _promotion():
    with jax.numpy_dtype_promotion("standard"):  # optax raises a Python float to an integer power
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that two steps have trained, whose attention sees 32 bytes."""
    folder = tmp_path_factory.mktemp("model")
    options = "--blocks 4 --width 32 --length 32 --batch 2 --steps 2 --learning-rate 1e-2"
    with jax.numpy_dtype_promotion("standard"):
        assert demo.main([*options.split(), "--out", str(folder)]) == 0
    return folder


@pytest.mark.slow
def test_every_request_is_what_it_would_be_alone(folder, capsys):
    assert generate.main(["--model", str(folder), "--requests", "7", "--slots", "3"]) == 0
    shown = capsys.readouterr().out
    assert "7 requests in" in shown and "bit for bit" in shown


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["a request goes on where the last one stopped", "a byte of padding is read"])
def test_it_exits_with_1_where_requests_are_mixed_up(folder, bug, monkeypatch, capsys):
    if bug == "a byte of padding is read":
        extend = generate.extend

        def one_more(model, tokens, states, mask):
            return extend(model, tokens, states, jnp.roll(mask, 1, axis=1).at[:, 0].set(True))

        monkeypatch.setattr(generate, "extend", one_more)
    else:
        gather = generate.StatePool.gather
        monkeypatch.setattr(generate.StatePool, "gather", lambda pool, slots, fresh=None: gather(pool, slots))
    assert generate.main(["--model", str(folder), "--requests", "5", "--slots", "2"]) == 1
    assert "a request differs from itself alone" in capsys.readouterr().err
