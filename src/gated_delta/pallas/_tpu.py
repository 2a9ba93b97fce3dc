"""`PallasTPU`: a problem brought into the kernels' layout, and the custom derivative that joins the two."""

import dataclasses
import functools
from typing import Any, Literal, cast

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas import tpu as pltpu

from gated_delta._backend import AbstractStepper, Problem, Result, StepResult
from gated_delta._chunk_layout import ChunkLayout, lay_out
from gated_delta._explicit import varying_alike
from gated_delta._finite import contained
from gated_delta._heads import LANES
from gated_delta._short_convs import window_before
from gated_delta._tile import Arithmetic, promised_near
from gated_delta._types import no_type_check

from ._config import LARGEST_STATE, Sizes, TileConfig, settle
from ._convolution import BEFORE, for_convolving
from ._layout import (
    Chunks,
    Form,
    Operands,
    Plan,
    by_rows,
    lay_columns,
    lay_fixed,
    lay_vector,
    take_vector,
    vector_form,
)
from ._tpu_backward import backward
from ._tpu_forward import forward
from ._tpu_step import step, why_not_step


@no_type_check
class PallasTPU(AbstractStepper):
    """Runs the operator on a TPU as one fused kernel, its gradient as a second one, and one token of many rows as a
    third.

    - `config`: sizes of the tiles; `None` in it leaves a size to the backend.
    - `residuals`: what the forward kernel keeps for the backward one beside the inputs. `"all"`: the state that enters
        each chunk, the inverse of each chunk's solve, the scores of its keys and queries, what its states recall and
        what it writes. `"states"`: the states only, less than a fifth at heads of 128, for a backward kernel that finds
        the rest again. `"none"`: nothing; the forward kernel runs again. What is kept is named `gated_delta_states`,
        `gated_delta_inverses`, `gated_delta_scores` and `gated_delta_corrections` for `jax.checkpoint` policies.
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
        return self._why_not_here()

    def why_not_step(self, problem: Problem, state: Any) -> str | None:
        return why_not_step(problem, state) or self._why_not_here()

    def _why_not_here(self) -> str | None:
        if not (self.interpret or self.ahead_of_time) and jax.default_backend() != "tpu":
            return f"it needs a TPU, and the default platform is {jax.default_backend()}"
        return None

    def step(self, problem: Problem, state: Any, slots: Any, fresh: Any) -> StepResult:
        return step(self.config, self.interpret, problem, state, slots, fresh)

    def __call__(self, problem: Problem) -> Result:
        if not isinstance(problem.scale, float):  # only a number known here goes into the kernel
            problem = problem.activated()  # convolutions and norm come before the scale
            scale = jnp.asarray(problem.scale, problem.accumulation)
            q = (problem.q.astype(problem.accumulation) * scale).astype(problem.q.dtype)
            problem = dataclasses.replace(problem, q=q, scale=1.0)
        # What crosses a `cond` is a real array: it has the caller's shape, with the heads of a group apart.
        floats, integers, static = _split(_with_heads_apart(problem))
        out, state = cast(Result, _guarded((self, static), varying_alike(floats), integers))
        return out.reshape(problem.v.shape), state


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


def _split(problem: Problem) -> tuple[Any, Any, Any]:
    """Its float arrays, its integer arrays, and what is no array."""
    arrays, static = eqx.partition(problem, eqx.is_array)
    return *eqx.partition(arrays, eqx.is_inexact_array), static


# ---- derivatives -----------------------------------------------------------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _guarded(how, floats, integers):
    """The kernels' result; where it is not finite, that of the kernels for a problem without what is not.

    So a bad token costs a second run when there is one, and otherwise the look at the outputs.
    """
    return by_rows(_guarded_result, how, floats, integers)


def _guarded_fwd(how, floats, integers):
    result, bad, kept = by_rows(_guarded_result_that_keeps, how, floats, integers)
    names = ("states", "inverses", "scores", "scores", "corrections", "corrections")
    kept = tuple(checkpoint_name(x, f"gated_delta_{name}") for x, name in zip(kept, names))
    return result, (floats, integers, kept, bad)


def _guarded_bwd(how, residuals, cotangents):
    return by_rows(_guarded_pull, how, *residuals, cotangents), None


_guarded.defvjp(_guarded_fwd, _guarded_bwd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _unguarded(how, floats, integers):
    """The kernels' result."""
    return _forward(how, floats, integers, keeps=False)[0]


def _unguarded_fwd(how, floats, integers):
    result, _, kept = _forward(how, floats, integers)
    return result, (floats, integers, kept)


def _unguarded_bwd(how, residuals, cotangents):
    floats, integers, kept = residuals
    return _backward(how, floats, integers, kept, cotangents), None


_unguarded.defvjp(_unguarded_fwd, _unguarded_bwd)


def _guarded_result(how, floats, integers):
    result, bad, _ = _forward(how, floats, integers, keeps=False)
    return jax.lax.cond(bad.any(), lambda: _contained(how, integers, floats), lambda: result)


def _guarded_result_that_keeps(how, floats, integers):
    result, bad, kept = _forward(how, floats, integers)
    return jax.lax.cond(bad.any(), lambda: _contained(how, integers, floats), lambda: result), bad, kept


def _guarded_pull(how, floats, integers, kept, bad, cotangents):
    def again():
        return jax.vjp(functools.partial(_contained, how, integers), floats)[1](cotangents)[0]

    return jax.lax.cond(bad.any(), again, lambda: _backward(how, floats, integers, kept, cotangents))


def _contained(how, integers, floats):
    backend, static = how
    # Else XLA moves the reshapes below out of the branch: a copy each time.
    floats = jax.lax.optimization_barrier(floats)

    def run(clean):
        floats, integers, static = _split(_with_heads_apart(clean))
        out, state = cast(Result, _unguarded((backend, static), floats, integers))
        return out.reshape(clean.v.shape), state

    problem = eqx.combine(floats, integers, static)
    out, state = contained(run, _with_groups(problem).activated())
    return out.reshape(problem.v.shape), state


def _forward(how, floats, integers, keeps: bool = True):
    """The result, which rows of it are not finite, and what is kept for the backward pass."""
    backend, static = how
    problem = eqx.combine(floats, integers, static)
    launch = _Launch(backend, _with_groups(problem), convolves=not keeps)
    keeps = keeps and backend.residuals != "none"
    out, final, check, *kept = launch.forward(*launch.lay(launch.problem), keeps)
    out, final = launch.take(out, final)
    bad = ~jnp.isfinite(check).all(axis=tuple(range(1, check.ndim)))
    return (out.reshape(problem.v.shape), final), bad, tuple(kept)


def _backward(how, floats, integers, kept, cotangents):
    """Cotangents of `floats`."""
    backend, static = how
    problem = eqx.combine(floats, integers, static)
    launch = _Launch(backend, _with_groups(problem))

    def lay(floats):
        return launch.lay(_with_groups(eqx.combine(floats, integers, static)).convolved())

    laid, pull = jax.vjp(lay, floats)
    if backend.residuals == "none":
        kept = launch.forward(*laid, True)[3:]
    d_out, d_final = cotangents
    grouped = launch.problem.v.shape
    d_laid = launch.lay_cotangents(d_out.reshape(grouped), d_final)
    d_operands, d_bank = backward(launch.plan.for_gradient, laid[0], launch.chunks, launch.document, kept, *d_laid)
    return pull((d_operands, d_bank if launch.plan.has_bank else None))[0]


# ---- layout ----------------------------------------------------------------------------------------------------------


class _Launch:
    """The kernels of one problem: how they are built, and the way into their layout and out of it."""

    def __init__(self, backend: PallasTPU, problem: Problem, convolves: bool = False):
        """`convolves`: inside of the kernel, if it can."""
        self.problem = problem
        self.parts, key_dim, width = _laid_dims(problem)
        self.sizes = settle(
            backend.config,
            problem.k.shape[1],
            problem.k.shape[2],
            problem.v.shape[2],
            key_dim,
            width,
            packed=problem.packing is not None,
            shares=all(gate is None or gate.shape[3] == 1 for gate in (problem.log_decay, problem.erase)),
            rounds=problem.operand == jnp.bfloat16,
        )
        self.layout = lay_out(problem, self.sizes.tokens)
        near = promised_near(problem.log_decay_min) if _is_fine(problem) else "safe"
        inverse, erase_max = problem.inverse, problem.erase_max
        arithmetic = Arithmetic(problem.operand.name, problem.precision, inverse, erase_max, near or "safe")
        has_slots = self.layout.slot is not None
        assert isinstance(problem.scale, float)
        self.plan = Plan(
            sizes=self.sizes,
            arithmetic=arithmetic,
            forms=_forms(_with_whole_tiles(problem), self.sizes, self.parts),
            key_dim=key_dim,
            width=width,
            tied=problem.tied,
            prologue=problem.prologue,
            scale=problem.scale,
            has_bank=problem.initial_state is not None or has_slots,
            has_slots=has_slots,
            chooses=near is None,
            keeps_all=backend.residuals == "all" and problem.erase is not None,
            kept_dtype=problem.operand.name,
            interpret=backend.interpret,
        )
        self.chunks = _chunks(problem, self.layout, self.sizes)
        document = self.layout.document
        self.document = None if document is None else document.reshape(len(document), -1, 1, self.sizes.chunk)
        width = problem.convs.q.shape[1] if problem.convs is not None and convolves else None
        self.convolving = None if width is None else for_convolving(self.plan, width)
        self.problem = problem if self.convolving else problem.convolved()

    def forward(self, operands: Operands, bank, keeps: bool):
        """Outputs, final states, sums that are not finite where an output is not, and the residuals if it `keeps`."""
        plan = self.plan.for_keeping if keeps else self.convolving or self.plan
        problem, convs = self.problem, self._lay_convs()
        # A token behind the end sees real ones; its gates are 0, but for one that is not there.
        length = problem.k.shape[1] if convs and problem.write is None and not problem.tied else None
        return forward(plan, operands, self.chunks, self.document, bank, operands.v.dtype, keeps, convs, length)

    def _lay_convs(self) -> list[tuple[Any, Any]]:
        """Weights and windows of queries, keys and values, laid as these are."""
        convs = self.problem.convs
        if convs is None:
            return []
        vectors, laid = (self.problem.q, self.problem.k, self.problem.v), []
        for i, given in enumerate(zip(vectors, convs.weights, convs.windows, strict=True)):
            weight, window = given[1], window_before(*given)
            form, block_heads = self.plan.forms[i], self.plan.owners_of(i)
            width, heads, dim = weight.shape[1:]
            window = jnp.pad(window, ((0, 0), (BEFORE + 1 - width, 0), (0, 0), (0, 0)))
            apart = (heads * form.heads, dim // form.heads)
            weight, window = (lay_vector(a.reshape(*a.shape[:2], *apart), form, block_heads) for a in (weight, window))
            laid.append((weight, window))
        return laid

    def lay(self, problem: Problem) -> tuple[Operands, Any]:
        """Operands and initial states in the kernels' layout: padded to whole chunks and whole lanes."""
        operands = _lay_operands(_with_whole_tiles(problem), self.layout, self.plan.forms, self.sizes)
        if not self.plan.has_bank:
            return operands, None
        bank = problem.initial_state
        bank = jnp.zeros(problem.state_shape, problem.accumulation) if bank is None else bank
        return operands, self._lay_states(bank)

    def _lay_states(self, states):
        _, _, _, key_dim, width = self.problem.state_shape
        states = states.reshape(*states.shape[:4], self.parts, width // self.parts)
        # Chunks without a document have a slot of their own, which nobody reads.
        slots = (0, int(self.plan.has_slots))
        tail = ((0, 0), (0, self.plan.key_dim - key_dim), (0, 0), (0, (self.plan.width - width) // self.parts))
        states = jnp.pad(states, ((0, 0), slots, *tail))
        return states.reshape(*states.shape[:4], self.plan.width)

    def take(self, out, final) -> Result:
        """Outputs and final states as a backend returns them."""
        batch, slots, owners, key_dim, width = self.problem.state_shape
        dim = width // self.parts
        out = self.layout.gather(take_vector(out, self.plan.forms.v, self.sizes.owners, dim))
        final = final[:, :slots, :, :key_dim].reshape(batch, slots, owners, key_dim, self.parts, -1)
        return out.reshape(*out.shape[:2], owners, width), final[..., :dim].reshape(self.problem.state_shape)

    def lay_cotangents(self, d_out, d_final):
        """Of what the kernels return: `take` transposed, which is to lay them like values and states."""
        form = self.plan.forms.v
        return _lay(d_out, form, self.layout, self.sizes.owners), self._lay_states(d_final)


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


def _with_whole_tiles(problem: Problem) -> Problem:
    """Decay tiles that would not lie in whole lanes become decays of channels."""
    key_dim, log_decay = problem.k.shape[3], problem.log_decay
    if log_decay is None or not key_dim % LANES or not 1 < log_decay.shape[3] < key_dim:
        return problem
    run = key_dim // log_decay.shape[3]
    log_decay, dt_bias = (None if x is None else jnp.repeat(x, run, axis=-1) for x in (log_decay, problem.dt_bias))
    return dataclasses.replace(problem, log_decay=log_decay, dt_bias=dt_bias)


def _forms(problem: Problem, sizes: Sizes, parts: int) -> Operands:
    """How each operand lies: as vectors or columns."""
    key_heads, key_dim = problem.k.shape[2:]
    owners, width = problem.v.shape[2:]

    def gate(x, dim, parts=1):
        if x is None:
            return None
        heads, groups = x.shape[2:]
        return vector_form(heads, dim // parts, sizes.owners, parts) if groups == dim > 1 else Form(0, groups, True)

    keys, decay = vector_form(key_heads, key_dim, sizes.key_heads), gate(problem.log_decay, key_dim)
    fixed = None if decay is None else decay._replace(blocks=True, is_fixed=True)
    return Operands(
        q=keys,
        k=keys,
        v=vector_form(owners, width // parts, sizes.owners, parts),
        log_decay=decay,
        erase=gate(problem.erase, key_dim),
        write=None if problem.tied else gate(problem.write, width, parts),
        A_log=None if problem.A_log is None else fixed,
        dt_bias=None if problem.dt_bias is None else fixed,
    )


def _lay_operands(problem: Problem, layout: ChunkLayout, forms: Operands, sizes: Sizes) -> Operands:
    fill = 0.0 if problem.prologue is None else -jnp.inf  # gates of 0

    def vector(x, form, block_heads):
        return _lay(x, form, layout, block_heads)

    def gate(x, form):
        return None if x is None else _lay(x, form, layout, sizes.owners, fill)

    def fixed(x, form):
        return None if x is None else lay_fixed(_wide(x, groups), form, sizes.owners)

    groups = 1 if problem.log_decay is None else problem.log_decay.shape[3]
    return Operands(
        q=vector(problem.q, forms.q, sizes.key_heads),
        k=vector(problem.k, forms.k, sizes.key_heads),
        v=vector(problem.v, forms.v, sizes.owners),
        log_decay=gate(problem.log_decay, forms.log_decay),
        erase=gate(problem.erase, forms.erase),
        write=None if problem.tied else gate(problem.write, forms.write),
        A_log=fixed(problem.A_log, forms.A_log),
        dt_bias=fixed(problem.dt_bias, forms.dt_bias),
    )


def _lay(x, form: Form, layout: ChunkLayout, block_heads: int, fill: float = 0.0):
    """`[batch, time, heads, dim]` as vectors or columns of whole chunks."""
    if not form.is_vector:
        return lay_columns(layout.lay(x, fill), block_heads)
    batch, time, heads, dim = x.shape
    x = layout.lay(x.reshape(batch, time, heads * form.heads, dim // form.heads), fill)
    return lay_vector(x, form, block_heads)


def _wide(x, groups: int):
    """`[batch, owners, groups]`: a number per head for each of its decay groups."""
    return jnp.broadcast_to(x[..., None], (*x.shape, groups)) if x.ndim == 2 else x


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
