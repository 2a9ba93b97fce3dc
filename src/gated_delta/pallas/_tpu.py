"""`PallasTPU`: a problem brought into the kernels' layout, and the custom derivative that joins the two."""

import functools
from typing import cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gated_delta._backend import AbstractBackend, Problem, Result
from gated_delta._chunk_layout import ChunkLayout, lay_out
from gated_delta._tile import Arithmetic

from ._config import TileConfig, settle
from ._layout import Chunks, Operands, Plan
from ._tpu_backward import backward
from ._tpu_forward import forward


class PallasTPU(AbstractBackend):
    """Runs the operator on a TPU as one fused kernel, and its gradient as a second one.

    - `config`: sizes of the tiles; `None` in it leaves a size to the backend.
    - `interpret`: run in JAX's TPU interpreter, on any machine: slow, for tests.
    """

    config: TileConfig = eqx.field(default_factory=TileConfig)
    interpret: bool = eqx.field(static=True, default=False)

    def why_not(self, problem: Problem) -> str | None:
        if problem.operand == jnp.float64:
            return "float64 has no TPU kernel; Chunked and Recurrent compute it"
        if problem.inverse not in ("exact", "approx"):
            return f"inverse={problem.inverse!r} does not run inside a kernel; 'exact' and 'approx' do"
        if not self.interpret and jax.default_backend() != "tpu":
            return f"it needs a TPU, and the default platform is {jax.default_backend()}"
        return None

    def __call__(self, problem: Problem) -> Result:
        sizes = settle(self.config, problem.k.shape[1], problem.k.shape[2], problem.v.shape[2])
        layout = lay_out(problem, sizes.chunk)
        dtype = problem.accumulation
        scale, q = problem.scale, problem.q
        if not isinstance(scale, float):  # only a number known here goes into the kernel
            q, scale = (q.astype(dtype) * jnp.asarray(scale, dtype)).astype(q.dtype), 1.0
        operands, rows = _operands(problem, q, layout)
        has_slots = layout.slot is not None
        plan = Plan(
            sizes=sizes,
            arithmetic=Arithmetic(problem.operand.name, problem.precision, problem.inverse, problem.erase_max),
            rows=rows,
            tied=problem.tied,
            scale=scale,
            has_bank=problem.initial_state is not None,
            has_slots=has_slots,
            start_dtype=problem.operand.name,
            interpret=self.interpret,
        )
        chunks = _chunks(problem, layout, sizes.chunk)
        document = None if layout.document is None else layout.document[:, None]
        bank = problem.initial_state
        if has_slots:  # chunks without a document have a slot of their own, which nobody reads
            spare = jnp.zeros((problem.state_shape[0], 1, *problem.state_shape[2:]), dtype)
            given = jnp.zeros(problem.state_shape, dtype) if bank is None else bank
            bank = jnp.concatenate([given, spare], axis=1)
            plan = plan._replace(has_bank=True)
        out, final = cast(Result, _run(plan, operands, chunks, document, bank))
        out = layout.gather(jnp.swapaxes(out, 1, 2))
        return out, final[:, : problem.slots]


def _operands(problem: Problem, q, layout: ChunkLayout) -> tuple[Operands, Operands]:
    """Inputs as columns or rows of whole chunks, and which are rows."""
    key_dim, width = problem.k.shape[3], problem.v.shape[3]

    def lay(x, dim):
        if x is None:
            return None, None
        is_row = dim is not None and x.shape[3] != dim
        x = layout.lay(x)
        return jnp.transpose(x, (0, 2, 3, 1) if is_row else (0, 2, 1, 3)), is_row

    write = None if problem.tied else problem.write
    arrays = (q, problem.k, problem.v, problem.log_decay, problem.erase, write)
    dims = (None, None, None, key_dim, key_dim, width)
    pairs = [lay(x, dim) for x, dim in zip(arrays, dims, strict=True)]
    return Operands(*(x for x, _ in pairs)), Operands(*(is_row for _, is_row in pairs))


def _chunks(problem: Problem, layout: ChunkLayout, size: int) -> Chunks:
    batch, count = problem.k.shape[0], layout.chunks
    index = jnp.broadcast_to(jnp.arange(count), (batch, count))
    if layout.slot is not None and layout.begin is not None:
        changes = layout.slot[:, 1:] != layout.slot[:, :-1]
        edge = jnp.ones((batch, 1), bool)
        slot, begin = layout.slot, layout.begin | jnp.concatenate([edge, changes], axis=1)
        end = jnp.concatenate([changes, edge], axis=1)
    else:
        slot, begin, end = 0 * index, index == 0, index == count - 1
    entry = 0 * index
    if layout.document is not None:
        last = layout.document[:, size - 1 :: size]
        entry = jnp.concatenate([jnp.zeros_like(last[:, :1]), last[:, :-1]], axis=1)
    return Chunks(*(x.astype(jnp.int32).reshape(-1) for x in (slot, begin, end, entry)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(plan: Plan, operands: Operands, chunks: Chunks, document, bank):
    out, final, *_ = forward(plan, operands, chunks, document, bank, operands.v.dtype, keep_starts=False)
    return out, final


def _run_fwd(plan, operands, chunks, document, bank):
    out, final, starts = forward(plan, operands, chunks, document, bank, operands.v.dtype, keep_starts=True)
    return (out, final), (operands, chunks, document, checkpoint_name(starts, "gated_delta_states"))


def _run_bwd(plan, residuals, cotangents):
    operands, chunks, document, starts = residuals
    d_operands, d_bank = backward(plan, operands, chunks, document, starts, *cotangents)
    return d_operands, Chunks(None, None, None, None), None, d_bank if plan.has_bank else None


_run.defvjp(_run_fwd, _run_bwd)
