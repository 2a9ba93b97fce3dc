"""`PallasTPU`: a problem brought into the kernels' layout, and the custom derivative that joins the two."""

import functools
from typing import Any, Literal, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu

from gated_delta._backend import AbstractBackend, Problem, Result
from gated_delta._chunk_layout import ChunkLayout, lay_out
from gated_delta._finite import contained
from gated_delta._heads import LANES
from gated_delta._tile import Arithmetic, promised_near
from gated_delta._types import no_type_check

from ._config import LARGEST_STATE, Sizes, TileConfig, settle
from ._layout import (
    Chunks,
    Form,
    Operands,
    Plan,
    lay_columns,
    lay_fixed,
    lay_vector,
    take_vector,
    varying_alike,
    vector_form,
)
from ._tpu_backward import backward
from ._tpu_forward import forward


@no_type_check
class PallasTPU(AbstractBackend):
    """Runs the operator on a TPU as one fused kernel, and its gradient as a second one.

    - `config`: sizes of the tiles; `None` in it leaves a size to the backend.
    - `residuals`: what the forward kernel keeps for the backward one beside the inputs. `"all"`: the state that enters
        each chunk and the inverse of each chunk's solve. `"states"`: the states only, a third less at heads of 128, for
        a backward kernel that forms the inverses again. `"none"`: nothing; the forward kernel runs again. What is kept
        is named `gated_delta_states` and `gated_delta_inverses` for `jax.checkpoint` policies.
    - `interpret`: run in JAX's TPU interpreter, on any machine: slow, for tests. An instance of Pallas'
        `InterpretParams` chooses its options, such as the detection of races.
    - `ahead_of_time`: do not ask for a TPU here, for `jax.export` and compilation on a machine that has none.
    """

    contains = True
    takes_raw = True

    config: TileConfig = TileConfig()
    residuals: Literal["states", "all", "none"] = eqx.field(static=True, default="all")
    interpret: bool | pltpu.InterpretParams = eqx.field(static=True, default=False)
    ahead_of_time: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if self.residuals not in ("states", "all", "none"):
            raise ValueError(f"`PallasTPU(residuals={self.residuals!r})` must be 'states', 'all' or 'none'.")

    def why_not(self, problem: Problem) -> str | None:
        if problem.operand == jnp.float64:
            return "float64 has no TPU kernel; Chunked and Recurrent compute it"
        if problem.inverse not in ("exact", "approx"):
            return f"inverse={problem.inverse!r} does not run inside a kernel; 'exact' and 'approx' do"
        _, key_dim, width = _laid_dims(problem)
        if key_dim * width > LARGEST_STATE:
            return (
                f"a state of {key_dim} x {width} numbers (whole lanes, {problem.group} value heads side by side) "
                f"leaves no room for tiles in a TPU's vector memory; at most {LARGEST_STATE} numbers do"
            )
        if not (self.interpret or self.ahead_of_time) and jax.default_backend() != "tpu":
            return f"it needs a TPU, and the default platform is {jax.default_backend()}"
        return None

    def __call__(self, problem: Problem) -> Result:
        # What crosses a `cond` is a real array: it has the caller's shape, with the heads of a group apart.
        arrays, static = eqx.partition(_with_heads_apart(problem), eqx.is_array)
        floats, integers = eqx.partition(arrays, eqx.is_inexact_array)
        floats = varying_alike(floats)
        out, state = cast(Result, _guarded((self, static), floats, integers))
        return out.reshape(problem.v.shape), state

    def launch(self, problem: Problem) -> tuple[Result, Any]:
        """The kernels' result, and whether anything in it is not finite."""
        batch, slots, owners, key_dim, width = problem.state_shape
        parts, laid_key_dim, laid_width = _laid_dims(problem)
        dim = width // parts
        sizes = settle(
            self.config,
            problem.k.shape[1],
            problem.k.shape[2],
            owners,
            laid_key_dim,
            laid_width,
            problem.packing is not None,
            all(gate is None or gate.shape[3] == 1 for gate in (problem.log_decay, problem.erase)),
        )
        layout = lay_out(problem, sizes.tokens)
        dtype = problem.accumulation
        if not isinstance(problem.scale, float):
            problem = problem.activated()  # the norm comes before the scale
        scale, q = problem.scale, problem.q
        if not isinstance(scale, float):  # only a number known here goes into the kernel
            q, scale = (q.astype(dtype) * jnp.asarray(scale, dtype)).astype(q.dtype), 1.0
        operands, forms = _operands(problem, q, layout, sizes, parts)
        has_slots = layout.slot is not None
        near = promised_near(problem.log_decay_min) if _is_fine(problem) else "safe"
        inverse, erase_max = problem.inverse, problem.erase_max
        arithmetic = Arithmetic(problem.operand.name, problem.precision, inverse, erase_max, near or "safe")
        plan = Plan(
            sizes=sizes,
            arithmetic=arithmetic,
            forms=forms,
            key_dim=laid_key_dim,
            width=laid_width,
            tied=problem.tied,
            prologue=problem.prologue,
            scale=scale,
            has_bank=problem.initial_state is not None or has_slots,
            has_slots=has_slots,
            chooses=near is None,
            keeps_inverse=self.residuals == "all" and problem.erase is not None,
            start_dtype=problem.operand.name,
            interpret=self.interpret,
        )
        chunks = _chunks(problem, layout, sizes)
        document = None if layout.document is None else layout.document[:, None]
        bank = None
        if plan.has_bank:
            bank = problem.initial_state
            bank = jnp.zeros(problem.state_shape, dtype) if bank is None else bank
            bank = bank.reshape(batch, slots, owners, key_dim, parts, dim)
            # Chunks without a document have a slot of their own, which nobody reads.
            tail = ((0, 0), (0, laid_key_dim - key_dim), (0, 0), (0, laid_width // parts - dim))
            bank = jnp.pad(bank, ((0, 0), (0, int(has_slots)), *tail))
            bank = bank.reshape(*bank.shape[:4], laid_width)
        out, final, check = cast(Any, _run(self.residuals == "none", plan, operands, chunks, document, bank))
        out = layout.gather(take_vector(out, forms.v, sizes.owners, dim))
        final = final[:, :slots, :, :key_dim].reshape(batch, slots, owners, key_dim, parts, laid_width // parts)
        result = out.reshape(*out.shape[:2], owners, width), final[..., :dim].reshape(problem.state_shape)
        return result, ~jnp.isfinite(jax.lax.stop_gradient(check)).all()


def _with_heads_apart(problem: Problem) -> Problem:
    def split(x):
        return x.reshape(*x.shape[:2], x.shape[2] * problem.group, x.shape[3] // problem.group)

    write = problem.write
    if write is not None and write.shape[3] == problem.v.shape[3]:
        write = split(write)
    return _with(problem, split(problem.v), write)


def _with_groups(problem: Problem) -> Problem:
    """`_with_heads_apart` undone."""
    group, write = problem.group, problem.write

    def join(x):
        return x.reshape(*x.shape[:2], x.shape[2] // group, x.shape[3] * group)

    if write is not None and write.shape[2:] == problem.v.shape[2:]:
        write = join(write)
    return _with(problem, join(problem.v), write)


def _with(problem: Problem, v, write) -> Problem:
    """Without a check of shapes: with heads apart it is a mere container."""
    where = (lambda x: x.v) if write is None else (lambda x: (x.v, x.write))
    return eqx.tree_at(where, problem, v if write is None else (v, write))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guarded(how, floats, integers):
    """The kernels' result; where it is not finite, that of the kernels for a problem without what is not.

    So a bad token costs a second run when there is one, and otherwise the look at the outputs.
    """
    backend, static = how
    result, bad = _launch(backend, eqx.combine(floats, integers, static))
    return jax.lax.cond(bad, lambda: _contained(how, integers, floats), lambda: result)


def _launch(backend: PallasTPU, problem: Problem):
    (out, state), bad = backend.launch(_with_groups(problem))
    return (out.reshape(problem.v.shape), state), bad


def _contained(how, integers, floats):
    backend, static = how
    floats = jax.lax.optimization_barrier(
        floats
    )  # else XLA moves the reshapes below out of the branch: a copy each time
    problem = eqx.combine(floats, integers, static)
    out, state = contained(lambda clean: backend.launch(clean)[0], _with_groups(problem).activated())
    return out.reshape(problem.v.shape), state


def _guarded_fwd(how, floats, integers):
    backend, static = how
    result, pull, bad = jax.vjp(lambda x: _launch(backend, eqx.combine(x, integers, static)), floats, has_aux=True)
    result = jax.lax.cond(bad, lambda: _contained(how, integers, floats), lambda: result)
    return result, (floats, integers, pull, bad)


def _guarded_bwd(how, residuals, cotangents):
    floats, integers, pull, bad = residuals

    def again():
        return jax.vjp(functools.partial(_contained, how, integers), floats)[1](cotangents)

    return jax.lax.cond(bad, again, lambda: pull(cotangents))[0], None


_guarded.defvjp(_guarded_fwd, _guarded_bwd)


def _whole_lanes(dim: int) -> int:
    return -(-dim // LANES) * LANES


def _is_fine(problem: Problem) -> bool:
    """Whether key channels have decays of their own, or tiles of them whose products no other owner shares."""
    if problem.log_decay is None or problem.operand != jnp.bfloat16:
        return False
    groups, alone = problem.log_decay.shape[3], problem.v.shape[2] == problem.k.shape[2]
    return groups == problem.k.shape[3] or (groups > 1 and alone)


def _laid_dims(problem: Problem) -> tuple[int, int, int]:
    """Values of how many heads lie in an owner's width; key_dim and width in whole lanes."""
    parts = problem.group
    return parts, _whole_lanes(problem.k.shape[3]), parts * _whole_lanes(problem.v.shape[3] // parts)


def _operands(problem: Problem, q, layout: ChunkLayout, sizes: Sizes, parts: int) -> tuple[Operands, Operands]:
    """Inputs as vectors or columns of whole chunks, and the form of each."""
    key_dim, width = problem.k.shape[3], problem.v.shape[3]
    fill = 0.0 if problem.prologue is None else -jnp.inf  # gates of 0
    decay: Any = problem.log_decay, problem.A_log, problem.dt_bias
    if key_dim % LANES and decay[0] is not None and 1 < (groups := decay[0].shape[3]) < key_dim:
        # Tiles would not lie in whole lanes.
        decay = tuple(None if x is None else jnp.repeat(_wide(x, groups), key_dim // groups, axis=-1) for x in decay)

    def vector(x, block_heads, parts=1, fill=0.0):
        batch, time, heads, dim = x.shape
        x = layout.lay(x.reshape(batch, time, heads * parts, dim // parts), fill)
        form = vector_form(x, heads, dim // parts, block_heads)
        return lay_vector(x, form, block_heads), form

    def gate(x, dim, parts=1):
        if x is None:
            return None, None
        if x.shape[3] == dim > 1:
            return vector(x, sizes.owners, parts, fill)
        return lay_columns(layout.lay(x, fill), sizes.owners), Form(0, x.shape[3], True)

    laid_decay, decay_form = gate(decay[0], key_dim)

    def fixed(x):
        if x is None or decay_form is None:
            return None, None
        form = decay_form._replace(blocks=True, is_fixed=True)
        return lay_fixed(_wide(x, decay[0].shape[3]), form, sizes.owners, problem.k.shape[0]), form

    write = None if problem.tied else problem.write
    pairs = [
        vector(q, sizes.key_heads),
        vector(problem.k, sizes.key_heads),
        vector(problem.v, sizes.owners, parts),
        (laid_decay, decay_form),
        gate(problem.erase, key_dim),
        gate(write, width, parts),
        fixed(decay[1]),
        fixed(decay[2]),
    ]
    return Operands(*(x for x, _ in pairs)), Operands(*(form for _, form in pairs))


def _wide(x, groups: int):
    """A number per head for each of its decay groups."""
    return jnp.broadcast_to(x[:, None], (x.shape[0], groups)) if x.ndim == 1 else x


def _chunks(problem: Problem, layout: ChunkLayout, sizes: Sizes) -> Chunks:
    batch, count = problem.k.shape[0], layout.chunks * sizes.chunks // sizes.gradient_chunks
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
        last = layout.document[:, sizes.chunk - 1 :: sizes.chunk]
        entry = jnp.concatenate([jnp.zeros_like(last[:, :1]), last[:, :-1]], axis=1)
    return Chunks(*(x.astype(jnp.int32).reshape(-1) for x in (slot, begin, end, entry)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _run(recomputes: bool, plan: Plan, operands: Operands, chunks: Chunks, document, bank):
    return tuple(forward(plan, operands, chunks, document, bank, operands.v.dtype, keeps=False))


def _run_fwd(recomputes, plan, operands, chunks, document, bank):
    if recomputes:
        return _run(recomputes, plan, operands, chunks, document, bank), (operands, chunks, document, bank, ())
    out, final, check, *kept = _forward_that_keeps(plan, operands, chunks, document, bank)
    names = ("gated_delta_states", "gated_delta_inverses")
    kept = tuple(checkpoint_name(x, name) for x, name in zip(kept, names))
    return (out, final, check), (operands, chunks, document, None, kept)


def _run_bwd(recomputes, plan, residuals, cotangents):
    operands, chunks, document, bank, kept = residuals
    if recomputes:
        kept: Any = _forward_that_keeps(plan, operands, chunks, document, bank)[3:]
    d_operands, d_bank = backward(plan.for_gradient, operands, chunks, document, kept, *cotangents[:2])
    return d_operands, Chunks(None, None, None, None), None, d_bank if plan.has_bank else None


def _forward_that_keeps(plan, operands, chunks, document, bank):
    return forward(plan.for_gradient, operands, chunks, document, bank, operands.v.dtype, keeps=True)


_run.defvjp(_run_fwd, _run_bwd)
