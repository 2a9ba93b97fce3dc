"""Laws of somebody's own step: it is a member of the family, and the chunked function beside it is that step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from gated_delta._gates import Gates
from gated_delta._op import gated_delta
from gated_delta._recurrent import Recurrent
from gated_delta.testing._failures import place_of
from gated_delta.testing._own_step import Departure, FoundGates, find_gates, token_at, tokens_of
from gated_delta.testing._random import enough_bits
from gated_delta.testing._run import GATES, quick_jit

from ._law import Law, agree, cases, law, same_bits

STEP_LAWS: dict[str, Law] = {}
"""Every law of an own step by its name, in the order in which they are asked."""
_SEEDS = st.integers(0, 999)
_DECAYS = st.sampled_from(["mild", "bounded", "zero"])


def found_gates(subject, problem) -> list[FoundGates]:
    """The gates that express every token of a problem.

    **Raises:** `Departure` that shows the first token which none express.
    """
    tokens = tokens_of(problem)
    found = []
    for t in range(problem.time):
        token = token_at(tokens, t)
        try:
            found.append(find_gates(subject.step, token))
        except Departure as departure:
            given = {name: x for name, x in token._asdict().items() if x is not None}
            shown = ", ".join(f"{name}={np.round(np.asarray(x), 4).tolist()}" for name, x in given.items())
            raise Departure(f"token {t} departs from the family: {departure}. The token: {shown}") from None
        except (TypeError, ValueError) as error:
            said = f"a state [key_dim, value_dim] raises {type(error).__name__}: {error}"
            place, shapes = place_of(error), {name: np.shape(x) for name, x in token._asdict().items() if x is not None}
            said += f", at {place}, where the token is {shapes}" if place else ""
            raise Departure(f"token {t} departs from the family: {said}") from error
    return found


@law(
    "The step is a member of the family: some gates express every token of it.",
    r"\exists\, g, e, w, c: \quad \mathrm{step}(S, x) = \big(\bar S + k (w \odot v - \bar S^\top (e \odot k))^\top,\; "
    r"c\, S'^\top q\big), \quad \bar S = e^g \odot S",
    lambda subject: cases(seed=_SEEDS, log_decays=_DECAYS),
    registry=STEP_LAWS,
)
def family(subject, seed, log_decays):
    if subject.initial_state is not None:
        state = subject.initial_state()
        if not hasattr(state, "shape"):
            raise Departure(f"its state is a {type(state).__name__} and not one array: something else is carried too")
    problem = subject.problem(5, seed, "float64", log_decays)
    found = found_gates(subject, problem)
    arguments, tokens = problem.arguments(), tokens_of(problem)
    with enough_bits("float64"):
        begin = jnp.asarray(arguments["initial_state"][0, 0])
        final, outs = jax.lax.scan(subject.step, begin, tokens)
        log_decay, erase, write = (np.stack([getattr(x, name) for x in found])[None, :, None] for name in GATES)
        gates = Gates(log_decay, erase, write, erase_max=2.0)
        arrays = {name: arguments[name] for name in ("q", "k", "v", "initial_state")}
        out, state = gated_delta(**arrays, gates=gates, scale=found[0].scale, backend=Recurrent())
        actual = {"out": np.asarray(outs)[None, :, None], "final_state": np.asarray(final)[None, None]}
        return agree(actual, {"out": np.asarray(out), "final_state": np.asarray(state)}, problem)


def _chunked(subject, **more):
    if subject.chunked is None:
        return "no chunked function is given"
    return cases(seed=_SEEDS, log_decays=_DECAYS, time=st.sampled_from([1, 16, 37]), **more)


def _stepwise(subject):
    return lambda state, tokens: jax.lax.scan(subject.step, state, tokens)


def _pair(subject, time, seed, log_decays):
    problem = subject.problem(time, seed, "float32", log_decays)
    return problem, subject.begin(problem), tokens_of(problem)


def _close(actual, wanted, problem):
    """Every leaf within the budget of `problem`."""
    actual, wanted = (
        {f"result {i}": np.asarray(leaf) for i, leaf in enumerate(jax.tree.leaves(tree))} for tree in (actual, wanted)
    )
    return agree(actual, wanted, problem)


@law(
    "The chunked function is the step, token by token: outputs and the last state.",
    r"\mathrm{chunked}(S_0, x_{1:T}) = (S_T, o_{1:T}), \quad (S_t, o_t) = \mathrm{step}(S_{t-1}, x_t)",
    _chunked,
    registry=STEP_LAWS,
)
def own_chunks(subject, seed, log_decays, time):
    problem, state, tokens = _pair(subject, time, seed, log_decays)
    return _close(_program(subject, "chunked")(state, tokens), _program(subject, "stepwise")(state, tokens), problem)


@law(
    "The gradients of the chunked function are those of the step.",
    r"\nabla \mathrm{chunked} = \nabla (\mathrm{step} \circ \dots \circ \mathrm{step})",
    _chunked,
    registry=STEP_LAWS,
)
def own_gradients(subject, seed, log_decays, time):
    problem, state, tokens = _pair(subject, time, seed, log_decays)
    actual, wanted = (_program(subject, f"gradient of {kind}")(state, tokens, seed) for kind in ("chunked", "stepwise"))
    worst = 0.0
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        size = np.sqrt(np.mean(y**2)) + 1e-3 * max(np.abs(leaf).max() for leaf in jax.tree.leaves(wanted))
        error = float(np.sqrt(np.mean((x - y) ** 2)) / size) / 1e-4 if np.isfinite(x).all() else np.inf
        if not error <= 1:
            raise AssertionError(
                f"A gradient of shape {x.shape} is off by {error:.3g} times its budget of 1e-4. Problem: {problem!r}"
            )
        worst = max(worst, error)
    return worst


@law(
    "The chunked function may be cut anywhere, its state handed on.",
    r"\mathrm{chunked}(S_0, x_{1:T}) = \mathrm{chunked}(\mathrm{chunked}(S_0, x_{1:t}), x_{t+1:T})",
    _chunked,
    registry=STEP_LAWS,
)
def own_resume(subject, seed, log_decays, time):
    problem, state, tokens = _pair(subject, time, seed, log_decays)
    cut, run = time // 2, _program(subject, "chunked")
    whole, outs = run(state, tokens)
    middle, first = run(state, jax.tree.map(lambda x: x[:cut], tokens)) if cut else (state, outs[:0])
    last, second = run(middle, jax.tree.map(lambda x: x[cut:], tokens))
    return _close((last, np.concatenate([first, second])), (whole, outs), problem)


@law(
    "Outputs of the chunked function do not depend on later tokens, bit for bit.",
    r"x_{\le t} = y_{\le t} \;\Rightarrow\; o(x)_{\le t} = o(y)_{\le t}",
    _chunked,
    registry=STEP_LAWS,
)
def own_causality(subject, seed, log_decays, time):
    _, state, tokens = _pair(subject, time, seed, log_decays)
    _, _, others = _pair(subject, time, seed + 1, log_decays)
    cut, run = time // 2, _program(subject, "chunked")
    mixed = jax.tree.map(lambda x, y: jnp.concatenate([x[: cut + 1], y[cut + 1 :]]), tokens, others)
    same_bits(run(state, mixed)[1][: cut + 1], run(state, tokens)[1][: cut + 1], f"outputs until token {cut}")
    return 0.0


def _program(subject, kind: str) -> Callable:
    """One compiled function of a subject."""
    if (id(subject), kind) not in _programs:
        function = subject.chunked if kind.endswith("chunked") else _stepwise(subject)
        program = _gradient(function) if kind.startswith("gradient") else function
        _programs[id(subject), kind] = subject, quick_jit(program)
    return _programs[id(subject), kind][1]


def _gradient(function: Callable) -> Callable:
    """Of random sums of its results, for the state and every token."""

    def loss(state, tokens, seed):
        leaves = jax.tree.leaves(function(state, tokens))
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        return sum(jnp.sum(jax.random.normal(key, x.shape) * x) for key, x in zip(keys, leaves))

    return jax.grad(loss, argnums=(0, 1))


_programs: dict = {}
