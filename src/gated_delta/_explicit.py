"""Meshes: arrays whose type says how they are sharded (explicit axes), or over which devices they differ (manual)."""

from collections.abc import Callable
from typing import Any, cast

import equinox as eqx
import jax
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P


def is_sharded_explicitly(arrays: Any) -> bool:
    """Whether any of the arrays lies on a mesh with explicit axes."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays) if isinstance(x, jax.Array))
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes)


def with_automatic_axes(run: Callable, arrays: Any, v: Any, states: tuple[str, ...]) -> tuple[Any, Any]:
    """`run(arrays)`, an output and a state, with every explicit axis left to the compiler inside.

    The output is sharded as `v`, `[batch, time, heads, dim]`, is; the state by its heads and value channels, and by its
    rows too where `states`, the names of its first axes, begins with "batch".
    """
    spec = (*jax.typeof(v).sharding.spec, *(None,) * 4)[:4] if isinstance(v, jax.Array) else (None,) * 4
    rows, _, heads, dim = spec
    leading = (rows if name == "batch" else None for name in states)
    sharding = (P(*spec), P(*leading, heads, None, dim))
    return automatically(run, arrays, sharding)


def automatically(run: Callable, arrays: Any, specs: Any) -> tuple[Any, Any]:
    """`run(arrays)` with every explicit axis left to the compiler inside, and two results of the given `specs`."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit)
    run = jax.sharding.auto_axes(run, axes=axes or None, out_sharding=specs)
    return cast(tuple[Any, Any], run(arrays))


def explicit_spec(x: Any) -> tuple:
    """How each axis of an array is sharded."""
    spec = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
    return (*spec, *(None,) * x.ndim)[: x.ndim]


def varying_alike(arrays: Any) -> Any:
    """All arrays of a tree varying over the manual mesh axes that any of them varies over.

    So their cotangents are, and what is summed over devices (those of parameters) is summed outside of any branch. And
    a state that is the same on all devices can be the carry of a loop over what is not.
    """
    arrays, rest = eqx.partition(arrays, eqx.is_array)
    axes = frozenset().union(*(manual_axes(x) for x in jax.tree.leaves(arrays)))
    return eqx.combine(jax.tree.map(lambda x: varying(x, axes), arrays), rest)


def varying(x: jax.Array, axes: frozenset) -> jax.Array:
    """`x` as an array that varies over manual mesh axes."""
    missing = tuple(sorted(axes - manual_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def manual_axes(x: jax.Array) -> frozenset:
    """The manual mesh axes over which an array differs from device to device, as far as its type knows."""
    return jax.typeof(x).manual_axis_type.varying
