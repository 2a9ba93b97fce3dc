"""The only file that knows every attention backend: which one runs a problem, and why the others cannot."""

from gated_delta._explanation import Explanation, refusal
from gated_delta._types import no_type_check

from ._backend import AbstractAttentionBackend, AttentionProblem, check_named
from ._blocked import BlockedAttention
from ._dense import DenseAttention


def backends() -> tuple[AbstractAttentionBackend, ...]:
    """The backends that need not be named, with their default options, in the order in which they are tried."""
    return (BlockedAttention(), DenseAttention())


def named_only() -> tuple[AbstractAttentionBackend, ...]:
    """Those that a call has to name: no chip has run `PallasTPUAttention` yet."""
    from gated_delta.pallas import PallasTPUAttention  # takes longer than to import the rest of the package

    return (PallasTPUAttention(),)


@no_type_check
def choose(problem: AttentionProblem, named: AbstractAttentionBackend | None) -> AbstractAttentionBackend:
    """The backend named, or else the first that can run.

    **Raises:** `TypeError` if `named` is no attention backend, `ValueError` if it cannot run `problem`.
    """
    if named is None:
        return next(backend for backend in backends() if backend.why_not(problem) is None)
    check_named(named)
    reason = named.why_not(problem)
    if reason is not None:
        raise refusal(named, reason, "explain_attention")
    return named


@no_type_check
def explain_problem(problem: AttentionProblem, named: AbstractAttentionBackend | None) -> Explanation:
    known = (*backends(), *named_only())
    tried = known if named is None else (named, *(b for b in known if b != named))
    check_named(named)
    reasons = {str(backend): backend.why_not(problem) for backend in tried}
    return Explanation(choose(problem, named), reasons, describe(problem), tuple(map(str, named_only())))


def describe(problem: AttentionProblem) -> str:
    """Shapes, dtype and mask of a problem in one line."""
    batch, time, query_heads, key_dim = problem.q.shape
    kv_heads, value_dim = problem.v.shape[2:]
    seen = "causal" if problem.causal else "not causal"
    parts = [seen, f"window {problem.window}" if problem.window is not None else "no window"]
    parts += ["documents"] if problem.query_segments is not None else []
    parts += [f"pages of {problem.k.shape[1]}"] if problem.pages is not None else []
    parts += [f"softcap {problem.softcap:g}"] if problem.softcap is not None else []
    return (
        f"batch {batch}, time {time}, keys {problem.keys}, {query_heads} query heads over {kv_heads}, "
        f"key_dim {key_dim}, value_dim {value_dim}, {problem.operand.name} operands; {', '.join(parts)}"
    )
