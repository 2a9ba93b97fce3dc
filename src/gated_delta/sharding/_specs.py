"""Which axis of which parameter is split over which axis of a mesh."""

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from gated_delta._conv import ShortConv
from gated_delta._gate_modules import BoundedDecay, OutputGate, SigmoidGate, SoftplusDecay
from gated_delta._layer import GatedDeltaMixer, MixerState
from gated_delta._linear import Linear
from gated_delta._types import no_type_check

AnyMesh = Mesh | AbstractMesh
Rows = str | tuple[str, ...] | None


@no_type_check
def mixer_specs(tree: PyTree, mesh: AnyMesh, *, heads: str | None = "model") -> PyTree:
    """A `PartitionSpec` for every array of a mixer, or of a model: a tree of the same structure.

    Heads are split over `heads`, and with them everything that is theirs: rows of the projections, gates, `A_log` and
    `dt_bias`, channels of the convolutions, columns of the last projection. A key head stays together with the value
    heads that it serves. What belongs to no head is on every device: the norm's weight, which all heads share, the
    first matrix of a projection of low rank, parts of a mixer that are not the package's own, and everything in the
    model that is no `GatedDeltaMixer`.

    - `tree`: arrays or `jax.ShapeDtypeStruct`s. Layers may be stacked behind leading axes.
    - `mesh`: a `jax.sharding.Mesh` or an abstract one.
    - `heads`: the axis of `mesh`; `None`: every device has all heads.

    `jax.device_put(mixer, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))` places it.

    **Raises:** `ValueError` where `mesh` has no such axis, or its size does not divide a mixer's key heads.
    """
    size = _axis_size("mixer_specs", mesh, heads)

    def specs(x):
        if not isinstance(x, GatedDeltaMixer):
            return P() if isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)) else None
        _check_divides("key_heads", x.config.key_heads, heads, size)
        return jax.tree_util.tree_map_with_path(lambda path, leaf: _spec(x, path, leaf, heads), x)

    return jax.tree.map(specs, tree, is_leaf=lambda x: isinstance(x, GatedDeltaMixer))


@no_type_check
def state_specs(
    tree: PyTree, mesh: AnyMesh, *, rows: Rows = "data", heads: str | None = "model", axis: int = -1
) -> PyTree:
    """A `PartitionSpec` for every array of a `MixerState`, or of a tree that holds some: a tree of the same structure.

    - `tree`: arrays or shapes, such as `jax.eval_shape(lambda: mixer.init_state(8))`. What is no `MixerState` in it
        gets `P()`.
    - `rows`: the axis or axes of `mesh` that the batch is split over, `None` for none.
    - `heads`: as of `mixer_specs`.
    - `axis`: which of the axes before those of heads and windows is the batch: the last, or 0 for the states of a
        `HybridStack`.

    **Raises:** `ValueError` where `mesh` has no such axis, its size does not divide the heads, or a state has no batch.
    """
    size = _axis_size("state_specs", mesh, heads)
    for name in (rows,) if isinstance(rows, str) else rows or ():
        _axis_size("state_specs", mesh, name)

    def specs(x):
        if not isinstance(x, MixerState):
            return P()
        lead = x.recurrent.ndim - 3
        if lead == 0 and rows is not None:
            raise ValueError(
                f"`state_specs(rows={rows!r})` splits the batch of states, but a state of one sequence has none. Give "
                "`rows=None`, or make the state with `mixer.init_state(batch)`."
            )
        _check_divides("value_heads", x.recurrent.shape[-3], heads, size)
        before = [rows if i == axis % lead else None for i in range(lead)]

        def spec(path, _):
            return P(*before, heads, None, None) if path[-1].name == "recurrent" else P(*before, None, heads)

        return jax.tree_util.tree_map_with_path(spec, x)

    return jax.tree.map(specs, tree, is_leaf=lambda x: isinstance(x, MixerState))


def _axis_size(function: str, mesh: AnyMesh, axis: str | None) -> int:
    if axis is None:
        return 1
    if axis not in mesh.axis_names:
        raise ValueError(
            f"`{function}` splits over an axis {axis!r}, but the axes of the mesh are {mesh.axis_names}. Name one of "
            "them, or None for none."
        )
    return mesh.shape[axis]


def _check_divides(name: str, count: int, axis: str | None, size: int):
    if count % size:
        raise ValueError(
            f"The mesh axis {axis!r} must divide {name}, but its size is {size} and {name} is {count}: a key head and "
            "the value heads that it serves are never split. Use fewer devices along this axis and more along others, "
            "or `heads=None`."
        )


_PARTS = (Linear, ShortConv, SoftplusDecay, BoundedDecay, SigmoidGate, OutputGate)


def _spec(mixer: GatedDeltaMixer, path, leaf: Any, heads: str | None) -> P:
    axis = _axis_of_heads(mixer, path)
    if axis is None:
        return P()
    return P(*(heads if axis == i - leaf.ndim else None for i in range(leaf.ndim)))


def _axis_of_heads(mixer: GatedDeltaMixer, path) -> int | None:
    """Which axis of an array, counted from the last, has the heads one after the other; `None`: it is nobody's."""
    if type(getattr(mixer, path[0].name)) not in _PARTS:
        return None
    part, *inside, name = (key.name for key in path)
    owner = functools.reduce(getattr, [part, *inside], mixer)
    if type(owner) not in _PARTS or "down" in inside:
        return None
    if part == "o_proj":
        return -1 if name == "weight" else None
    return -2 if name == "dt_bias" or (name == "weight" and type(owner) is Linear) else -1
