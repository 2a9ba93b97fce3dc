"""Any backend, run by every device on its own rows and heads: for kernels that the compiler cannot take apart."""

import math
from typing import Any

import equinox as eqx
import jax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from gated_delta._backend import AbstractBackend, Problem, Result
from gated_delta._dispatch import choose
from gated_delta._finite import contained
from gated_delta._types import no_type_check

Rows = str | tuple[str, ...] | None


@no_type_check
class PerDevice(AbstractBackend):
    """Runs `inner` on every device's own rows and heads: a `jax.shard_map` inside of a program under `jax.jit`.

    What XLA compiles it also takes apart, but not a kernel: `PallasTPU` needs this where arrays are sharded, unless the
    call is inside of a `jax.shard_map` already.

    - `inner`: the backend; `None`: the first that can run the whole call.
    - `rows`: the axis or axes of the mesh that the batch is split over; `None` for none.
    - `heads`: the axis that key heads are split over, each with its value heads; `None` for none.
    - `mesh`: `None` takes the mesh of `jax.set_mesh`.
    """

    contains = True
    takes_raw = True

    inner: AbstractBackend | None = None
    rows: Rows = eqx.field(static=True, default="data")
    heads: str | None = eqx.field(static=True, default="model")
    mesh: Mesh | AbstractMesh | None = eqx.field(static=True, default=None)

    def why_not(self, problem: Problem) -> str | None:
        mesh = jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        for axis in self._axes:
            if axis not in kinds:
                return f"the axes of the mesh here are {mesh.axis_names}, and {axis!r} is none of them"
            if kinds[axis] == AxisType.Manual:
                return f"the call is inside of a `jax.shard_map` over {axis!r} already, where the inner backend will do"
        batch, _, key_heads, _ = problem.k.shape
        for name, count, axes in (("batch", batch, self._rows), ("key_heads", key_heads, (self.heads,))):
            size = math.prod(mesh.shape[axis] for axis in axes if axis is not None)
            if count % size:
                return f"{name} is {count}, and it needs a multiple of the {size} devices that share it"
        return None if self.inner is None else self.inner.why_not(problem)

    def __call__(self, problem: Problem) -> Result:
        inner = choose(problem, None) if self.inner is None else self.inner
        arrays, static = eqx.partition(problem, eqx.is_array)

        def run(arrays):
            own: Problem = eqx.combine(arrays, static)
            own = own if inner.takes_raw else own.activated()
            return inner(own) if inner.contains else contained(inner, own)

        result = P(self.rows, None, self.heads)  # of outputs and of states
        in_specs, axes = (self._specs(arrays),), set(self._axes)
        run = jax.shard_map(run, mesh=self.mesh, in_specs=in_specs, out_specs=(result, result), axis_names=axes)
        return run(arrays)

    @property
    def _rows(self) -> tuple[str, ...]:
        return (self.rows,) if isinstance(self.rows, str) else self.rows or ()

    @property
    def _axes(self) -> tuple[str, ...]:
        return self._rows if self.heads is None else (*self._rows, self.heads)

    def _specs(self, arrays: Any) -> Any:
        """Every array of a problem has rows first, and heads third, but these."""
        others = {"scale": P(), "start": P(self.rows), "slot": P(self.rows)}
        others |= dict.fromkeys(("A_log", "dt_bias"), P(self.rows, self.heads))

        def spec(path, _):
            return others.get(path[-1].name, P(self.rows, None, self.heads))

        return jax.tree_util.tree_map_with_path(spec, arrays)
