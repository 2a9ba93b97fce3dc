"""Laws about numbers: every result is that of the recurrence, at any gate and any key."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from gated_delta.testing._compare import widened
from gated_delta.testing._random import DECAY_FAMILIES, KEY_FAMILIES

from ._law import (
    agree,
    backward,
    cases,
    cotangents_of,
    first_problems,
    forward,
    gate_names,
    law,
    only_problems,
    run,
    some_problems,
    wanted,
    with_gates,
)

_EXTREMES = tuple(family for family in DECAY_FAMILIES if family not in ("zero", "tiny", "mild"))


@law(
    "Outputs and final states are those of the recurrence, token by token in float64.",
    r"S_t = \bar S_t + k_t (w_t \odot v_t - \bar S_t^\top (e_t \odot k_t))^\top, \quad "
    r"\bar S_t = e^{g_t} \odot S_{t-1}, \quad o_t = c\, S_t^\top q_t",
    only_problems(first=True),
    first=first_problems,
)
def recurrence(subject, problem):
    return agree(forward(run(subject, problem)), forward(wanted(subject, problem)), problem)


def _with_gradients(subject):
    if not subject.capabilities.gradients:
        return "gradients are not offered"
    return cases(problem=some_problems(subject, first=True))


@law(
    "The gradient of every array is that of the recurrence.",
    r"\bar x = \Big(\frac{\partial (o, S_T)}{\partial x}\Big)^{\!\top} (\bar o, \bar S_T), \quad "
    r"x \in \{q, k, v, g, e, w, S_0\}",
    _with_gradients,
    first=first_problems,
)
def gradients(subject, problem):
    return agree(backward(run(subject, problem)), backward(wanted(subject, problem)), problem)


def _in_float64(subject):
    if not subject.capabilities.gradients or "float64" not in subject.capabilities.dtypes:
        return "gradients in float64 are not offered"
    problem = some_problems(
        subject,
        lambda layout: layout.time <= 17,
        log_decays=("mild", "bounded"),
        strengths=("uniform",),
        dtype="float64",
        at_most=3,
    )
    return cases(problem=problem)


@law(
    "In float64 every gradient is the slope of the implementation's own results.",
    r"\langle \bar x, u \rangle = \frac{L(x + h u) - L(x - h u)}{2 h} + O(h^2), \quad "
    r"L = \langle \bar o, o \rangle + \langle \bar S_T, S_T \rangle",
    _in_float64,
)
def finite_differences(subject, problem):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    if arguments["gates"].log_decay is not None:
        decays = np.asarray(arguments["gates"].log_decay) - 1e-3  # so that no step passes 0
        arguments = with_gates(arguments, log_decay=decays)
    found, rng, worst = subject.run(arguments, cotangents), np.random.default_rng(problem.seed), 0.0
    step, promise = 1e-5, 1e-7  # errors of step**2 times a third derivative, and of 1e-16 / step: both about 1e-10

    def loss(name, change):
        if name in gate_names(arguments):
            moved = with_gates(arguments, **{name: np.asarray(getattr(arguments["gates"], name)) + change})
        else:
            moved = {**arguments, name: arguments[name] + change}
        results = subject.run(moved, cotangents)
        return sum(np.sum(x * results[key]) for x, key in zip(cotangents, ("out", "final_state")) if key in results)

    for key, gradient in backward(found).items():
        name = key.removeprefix("d_")
        direction = rng.standard_normal(gradient.shape)
        slope = (loss(name, step * direction) - loss(name, -step * direction)) / (2 * step)
        size = np.linalg.norm(gradient) * np.linalg.norm(direction) + 1e-30
        error = abs(slope - np.sum(gradient * direction)) / size / promise
        if not error <= 1:
            raise AssertionError(
                f"`{key}` is {np.sum(gradient * direction):.8g} along a random direction, but the slope of the results "
                f"is {slope:.8g}: {error:.3g} times the budget of {promise:g}. Problem: {problem!r}"
            )
        worst = max(worst, float(error))
    return worst


@law(
    "Without decay a sequence is one triangular system, solved as exactly as its numbers allow, whatever the keys.",
    r"U = (I + \mathrm{tril}_{-1}(E K^\top))^{-1} (W \odot V - E S_0), \quad "
    r"O = c\,(Q S_0 + \mathrm{tril}(Q K^\top)\, U), \quad S_T = S_0 + K^\top U, \quad E_t = e_t \odot k_t",
    only_problems(lambda layout: layout.gates.erase != "none", keys=KEY_FAMILIES, log_decays=("zero",)),
)
def chunk_inverse(subject, problem):
    wide = widened(problem)
    q, k, v, erase, write = (np.swapaxes(wide[name], 1, 2) for name in ("q", "k", "v", "erase", "write"))
    state, left = wide["initial_state"], erase * k
    pairs = np.tril(left @ np.swapaxes(k, -1, -2), -1)
    update = np.linalg.solve(np.eye(problem.time) + pairs, write * v - left @ state)
    scale = problem.key_dim**-0.5 if problem.scale is None else problem.scale
    out = scale * (q @ state + np.tril(q @ np.swapaxes(k, -1, -2)) @ update)
    exact = {"out": np.swapaxes(out, 1, 2), "final_state": state + np.swapaxes(k, -1, -2) @ update}
    found = forward(run(subject, problem))
    return agree(found, {name: exact[name] for name in exact if name in wanted(subject, problem)}, problem)


def _extreme(subject):
    """The families that are offered, and decays about the strongest one that is offered, where that is finite."""
    where, limit = lambda layout: layout.gates.decay != "none", subject.capabilities.max_decay
    extreme = some_problems(subject, where, log_decays=_EXTREMES)
    mild = some_problems(subject, where)
    if limit == np.inf or isinstance(mild, str):
        return cases(problem=extreme)

    def at_limit(problem):
        gates = dataclasses.replace(problem.gates, log_decay_min=None, log_decays="limit", max_decay=limit)
        return dataclasses.replace(problem, gates=gates)

    limits = mild.map(at_limit)
    return cases(problem=limits if isinstance(extreme, str) else st.one_of(extreme, limits))


@law(
    "No log decay on offer is too strong: 0 to minus infinity, mixed over channels and tokens, resets, slow decay.",
    r"g_t \in \{0, -10^{-6}, -0.2, -5, -30, -10^4, -10^9, -\infty\}: \quad "
    r"(o, S_T, \bar x) \text{ finite and within budget}",
    _extreme,
)
def extreme_gates(subject, problem):
    return agree(run(subject, problem), wanted(subject, problem), problem)


@law(
    "Keys may be identical, nearly so, repeating, sign-flipped or zero, with erase up to the largest it takes.",
    r"\|k_t\| \in \{0, 1\}, \quad \cos(k_s, k_t) \in \{-1, 0.9, 0.999, 1\}, \quad e_t \in [0, e_{\max}]",
    only_problems(
        lambda layout: layout.gates.erase != "none", keys=KEY_FAMILIES[1:], log_decays=("zero", "tiny", "mild")
    ),
)
def ill_conditioned_keys(subject, problem):
    return agree(run(subject, problem), wanted(subject, problem), problem)


def _long(subject):
    offered = subject.capabilities
    if not offered.state or not offered.final_state:
        return "initial and final states are not offered"
    return cases(
        problem=some_problems(subject, lambda layout: layout.state and layout.gates.decay != "none", at_most=1),
        decay=st.sampled_from([-0.011, -0.003, -1e-4]),
        dtype=st.sampled_from([x for x in ("float32", "bfloat16") if x in offered.dtypes] or offered.dtypes[:1]),
    )


@law(
    "Small log decays add up in full precision over a long sequence, whatever dtype they come in.",
    r"k_t = 0: \quad S_T = \exp\Big(\sum_t g_t\Big)\, S_0",
    _long,
)
def long_memory(subject, problem, decay, dtype):
    problem = dataclasses.replace(problem, time=256, dtype=dtype, gate_dtype=dtype, state_dtype="float32", seed=0)
    arguments = problem.arguments()
    log_decay = np.full_like(np.asarray(arguments["gates"].log_decay), decay)
    arguments = with_gates({**arguments, "k": 0 * arguments["k"]}, log_decay=log_decay)
    arguments["initial_state"] = np.ones_like(arguments["initial_state"])
    state = subject.run(arguments, cotangents_of(problem))["final_state"].astype(np.float64)
    decay = float(log_decay.ravel()[0])
    exact = np.exp(256 * decay)
    error = float(np.abs(state / exact - 1).max()) / 1e-5
    if not error <= 1:
        farthest = state.ravel()[np.abs(state.ravel() / exact - 1).argmax()]
        raise AssertionError(
            f"After 256 tokens with a log decay of {decay:.6g} a state of 1 must be {exact:.8g}, but `final_state` "
            f"holds {farthest:.8g}: {error:.3g} times the budget of 1e-05. Problem: {problem!r}"
        )
    return error
