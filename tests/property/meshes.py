"""Meshes of virtual CPU devices, and what compiled programs send over them."""

import dataclasses
import itertools
import math
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

AXES = ("data", "model", "context")
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(shape) == 8]
ids_of_shapes = "x".join


def make_mesh(shape, names=AXES, kind=AxisType.Auto):
    devices = jax.devices("cpu")[: math.prod(shape)]
    if len(devices) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def place(mesh, tree, specs):
    """Arrays where their specs say."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


# ---- what is sent ----------------------------------------------------------------------------------------------------

KINDS = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast")
ITEM = re.compile(r"(pred|[bfsu]\w*?(\d+))\[([\d,]*)\]")
CALL = re.compile(rf"= (?P<type>.*?) (?P<kind>{'|'.join(KINDS)})(?:-start)?\(")
PAIRS = re.compile(r"source_target_pairs=\{(.*?)\}\}")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective operation of a compiled program: the bytes that a device hands to it, and who hands them to whom.

    `pairs`: of a permutation, how many devices send.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    bytes: int
    pairs: int


def collectives(compiled) -> list[Collective]:
    """All of them, in the order of the program's text."""
    found = []
    for line in compiled.as_text().splitlines():
        call = CALL.search(line)
        if call is None:
            continue
        shapes, size = [], 0
        for name, bits, dims in ITEM.findall(call["type"]):
            shape = tuple(int(n) for n in dims.split(",") if n)
            shapes.append(shape)
            size += math.prod(shape) * (1 if name == "pred" else int(bits) // 8)
        pairs = PAIRS.search(line)
        found.append(Collective(call["kind"], tuple(shapes), size, pairs[1].count("},{") + 1 if pairs else 0))
    return found


def assert_same(actual, expected, budget=1e-5):
    """Every array of a tree within `budget` of what it should be, in relative RMS."""
    actual, expected = (jax.tree_util.tree_flatten_with_path(tree) for tree in (actual, expected))
    assert [path for path, _ in actual[0]] == [path for path, _ in expected[0]]
    for (path, a), (_, e) in zip(actual[0], expected[0], strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape, jax.tree_util.keystr(path)
        if a.size:
            error = np.sqrt(np.mean((a - e) ** 2)) / (np.sqrt(np.mean(e**2)) + 1e-30)
            assert error <= budget, f"{jax.tree_util.keystr(path)} is off by {error:.2g} in relative RMS"
