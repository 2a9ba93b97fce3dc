"""What the package exports, what it imports, and what importing it costs."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gated_delta
import gated_delta.testing

PACKAGE = Path(gated_delta.__file__).parent

OPERATOR = {
    "AbstractBackend",
    "AbstractStepper",
    "Chunked",
    "Explanation",
    "Gates",
    "Problem",
    "RawGates",
    "Recurrent",
    "explain",
    "gated_delta",
    "gated_delta_raw",
    "gated_delta_raw_step",
    "gated_delta_step",
}
TOOLKIT = {
    "assert_close",
    "backends",
    "budget",
    "expected",
    "gates",
    "keys",
    "lengths",
    "problems",
    "pullback",
    "relative_error",
    "segment_ids",
    "variants",
}
LEVELS = {
    0: ["_types"],
    1: [
        "_gates",
        "_slots",
        "_raw_gates",
        "_short_convs",
        "_heads",
        "_tile",
        "_activations",
        "_backend",
        "_packing",
        "_finite",
        "_explicit",
        "_explanation",
        "_options",
        "_chunk_layout",
        "_variant",
        "_rows",
    ],
    2: ["_recurrent", "_chunked", "_gate_modules", "_conv", "_linear", "_norm", "pallas", "attention"],
    3: ["_dispatch"],
    4: ["_op", "_step"],
    5: ["_layer", "_params", "_pooled"],
    6: ["variants", "_hybrid"],
    7: ["checkpoints", "sharding", "serving"],
    8: ["testing"],
    9: ["_cli"],
}
LEVEL_OF = {room: level for level, rooms in LEVELS.items() for room in rooms}


def room_of(path):
    """The module, or the folder, of a source file directly under the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path):
    """Rooms of ours that a file imports, wherever the import stands, other than its own."""
    inside = path.relative_to(PACKAGE).parts[:-1]
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                module = ["gated_delta", *inside[: len(inside) - node.level + 1], *module]
            names = [[*module, alias.name] for alias in node.names]
        rooms |= {name[1] for name in names if name[0] == "gated_delta" and len(name) > 1}
    return rooms - {room_of(path)}


SOURCES = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]


def test_every_file_has_a_level():
    assert {room_of(path) for path in SOURCES} <= set(LEVEL_OF), "a new room: give it a level here and in its docstring"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_to_a_lower_level_or_sideways(path):
    above = {room: LEVEL_OF.get(room) for room in rooms_imported(path)}
    assert None not in above.values(), f"imports what has no level: {above}"
    assert all(level <= LEVEL_OF[room_of(path)] for level in above.values()), above


def test_only_the_dispatch_knows_every_backend():
    knowing = {room_of(path) for path in SOURCES if {"_chunked", "_recurrent"} <= rooms_imported(path)}
    assert knowing <= {"_dispatch", "testing"}


def test_kernel_bodies_and_backends_share_one_mathematics():
    """No backend has a formula of its own: exponentials, products and cumulative sums are in `_tile`."""
    for room in ("_chunked", "_chunk_layout"):
        source = (PACKAGE / f"{room}.py").read_text(encoding="utf-8")
        assert not [
            word for word in ("jnp.exp", "einsum", "dot_general", "matmul", "cumprod", " @ ") if word in source
        ], room


def test_the_operator_is_exported_and_documented():
    assert set(dir(gated_delta)) >= OPERATOR
    for name in OPERATOR:
        assert inspect.getdoc(getattr(gated_delta, name)), name


def test_every_public_name_is_exported_in_one_way():
    """`from ._x import Name as Name`, and nothing else in the top file."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body[1:]:
        assert isinstance(node, ast.ImportFrom) and node.level == 1, ast.unparse(node)
        assert all(alias.asname == alias.name and not alias.name.startswith("_") for alias in node.names)


ROOMS = sorted(path.parent.name for path in PACKAGE.glob("[a-z]*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_lists_what_it_exports(room):
    """So that `help` has the names, which `from ._x import Name as Name` alone hides from it."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8"))
    exported = [alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert sorted(ast.literal_eval(values["__all__"])) == sorted(filter(None, exported))


def test_the_toolkit_is_exported_and_documented():
    assert set(dir(gated_delta.testing)) >= TOOLKIT
    for name in TOOLKIT:
        value = getattr(gated_delta.testing, name)
        assert inspect.getdoc(value), name
        if name in ("gates", "keys", "lengths", "problems", "segment_ids", "variants"):
            kinds = {parameter.kind for parameter in inspect.signature(value).parameters.values()}
            assert kinds == {inspect.Parameter.KEYWORD_ONLY}, f"{name} takes keywords only"


def test_the_operators_signature_is_the_documented_one():
    parameters = inspect.signature(gated_delta.gated_delta).parameters
    assert [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == ["q", "k", "v", "gates"]
    assert {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY} == {
        "initial_state": None,
        "segment_ids": None,
        "cu_seqlens": None,
        "num_segments": None,
        "scale": None,
        "inverse": "exact",
        "precision": None,
        "backend": None,
        "checked": False,
    }
    assert inspect.signature(gated_delta.explain).parameters.keys() == parameters.keys()
    raw = inspect.signature(gated_delta.gated_delta_raw).parameters
    assert raw["qk_norm"].default == "l2" and raw["convs"].default is None
    assert [*raw] == ["q", "k", "v", "gates", "qk_norm", "convs", *list(parameters)[4:]]
    assert all(raw[name].default == parameters[name].default for name in parameters)
    hints = inspect.get_annotations(gated_delta.gated_delta)
    assert hints.keys() == {*parameters, "return"} and not any(isinstance(hint, str) for hint in hints.values())


def run(program, **environment):
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )
    return done.stdout.strip()


def test_importing_initialises_no_device_and_needs_no_test_package():
    program = """
import sys, gated_delta
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not {"gated_delta.checkpoints", "gated_delta.serving", "gated_delta.sharding"} & set(sys.modules)
import gated_delta.checkpoints, gated_delta.serving, gated_delta.sharding
others = {"hypothesis", "beartype", "pytest", "optax", "rich", "matplotlib", "safetensors"}
print(sorted(others & set(sys.modules)))
"""
    assert run(program) == "[]"


def test_importing_adds_less_than_three_tenths_of_a_second_to_equinox():
    program = """
import time, equinox, jax.numpy
start = time.process_time()
import gated_delta
print(time.process_time() - start)
"""
    assert min(float(run(program)) for _ in range(3)) < 0.3
