"""Meshes of virtual CPU devices."""

import itertools
import math

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

AXES = ("data", "model", "context")
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(shape) == 8]


def make_mesh(shape, names=AXES, kind=AxisType.Auto):
    devices = jax.devices("cpu")[: math.prod(shape)]
    if len(devices) < math.prod(shape):
        pytest.skip(f"needs {math.prod(shape)} devices")
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def place(mesh, tree, specs):
    """Arrays where their specs say."""
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


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
