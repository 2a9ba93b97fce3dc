"""Meshes with explicit axes, where the type of every array says how it is sharded."""

from collections.abc import Callable
from typing import Any, cast

import jax
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
    return cast(tuple[Any, Any], jax.sharding.auto_axes(run, out_sharding=sharding)(arrays))
