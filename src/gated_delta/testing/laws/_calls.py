"""Laws about calls: dtypes, defaults, cotangents, equal calls, JAX's transformations, input that is refused."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from gated_delta.testing._run import bits_for, named, named_gradients, quick_jit, split

from ._law import (
    agree,
    and_then,
    backward,
    cases,
    cotangents_of,
    cut_up,
    law,
    run,
    same_bits,
    some_problems,
    wanted,
)


def _any_dtype(subject):
    names = subject.capabilities.dtypes
    problem = some_problems(subject, lambda layout: layout.time > 1 and layout.key_dim > 4, at_most=1)
    if isinstance(problem, str):
        problem = some_problems(subject, at_most=1)
    return cases(problem=problem, dtype=st.sampled_from(names))


@law(
    "Outputs have the dtype of values, states are float32 (float64 for float64), gradients that of their array.",
    r"\mathrm{dtype}(o) = \mathrm{dtype}(v), \quad \mathrm{dtype}(\bar x) = \mathrm{dtype}(x), \quad "
    r"S_T \in \mathbb{R}^{H_v \times K \times V} \text{ in float32}",
    _any_dtype,
)
def dtypes(subject, problem, dtype):
    problem = dataclasses.replace(problem, dtype=dtype)
    if refused := subject.refusal(problem):
        raise NotImplementedError(refused)
    arguments, found, right = problem.arguments(), run(subject, problem), wanted(subject, problem)
    given = {**arguments, **{name: getattr(arguments["gates"], name) for name in ("log_decay", "erase", "write")}}
    for name, x in found.items():
        if name == "final_state":
            promised = "float64" if dtype == "float64" else "float32"
        else:
            promised = str(np.asarray(given[name.removeprefix("d_")] if name != "out" else given["v"]).dtype)
        if str(x.dtype) != promised:
            raise AssertionError(f"`{name}` must be {promised} for inputs in {dtype}, but it is {x.dtype}. {problem!r}")
    return agree(found, right, problem)


@law(
    "An argument that is left out has its documented default: a state of zeros, a scale of the root of key_dim.",
    r"f(x) = f(x, S_0 = 0), \quad f(x) = f(x, c = K^{-1/2})",
    lambda subject: cases(
        problem=some_problems(subject, lambda layout: layout.time > 1, at_most=1),
        argument=st.sampled_from(
            [
                name
                for name, has in (("initial_state", subject.capabilities.state), ("scale", subject.capabilities.scale))
                if has
            ]
        )
        if subject.capabilities.state or subject.capabilities.scale
        else "neither states nor scales are offered",
    ),
)
def defaults(subject, problem, argument):
    """The problem has no initial state of its own."""
    problem = dataclasses.replace(problem, state=False)
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    state_dtype = arguments["v"].dtype
    default = {"initial_state": np.zeros(problem.state_shape, state_dtype), "scale": problem.key_dim**-0.5}[argument]
    one = subject.run(arguments, cotangents)
    two = subject.run({**arguments, argument: default}, cotangents)
    return agree(one, {name: two[name] for name in one}, problem)


@law(
    "The scale multiplies outputs and nothing else.",
    r"o(c) = c\, o(1), \quad S_T(c) = S_T(1)",
    lambda subject: cases(
        problem=some_problems(subject, lambda layout: layout.time > 1, at_most=1)
        if subject.capabilities.scale
        else "a scale is not offered",
        scale=st.just(0.3),
    ),
)
def scale(subject, problem, scale):
    problem = dataclasses.replace(problem, scale=scale)
    return agree(run(subject, problem), wanted(subject, problem), problem)


@law(
    "A loss on outputs alone and one on the final state alone have gradients that add up to those of both.",
    r"\bar x(\bar o, \bar S_T) = \bar x(\bar o, 0) + \bar x(0, \bar S_T)",
    lambda subject: cases(
        problem=some_problems(subject, packed=None)
        if subject.capabilities.gradients and subject.capabilities.final_state
        else "gradients of a final state are not offered"
    ),
)
def partial_losses(subject, problem):
    arguments, (d_out, d_state) = problem.arguments(), cotangents_of(problem)
    outs, states = (
        backward(subject.run(arguments, cotangents))
        for cotangents in ((d_out, np.zeros_like(d_state)), (np.zeros_like(d_out), d_state))
    )
    both = backward(subject.run(arguments, (d_out, d_state)))
    added = {name: (x.astype(np.float64) + states[name].astype(np.float64)).astype(x.dtype) for name, x in outs.items()}
    agree(added, both, problem)
    return agree(added, backward(wanted(subject, problem)), problem)


@law(
    "The same call gives the same bits, and the caller's arrays are as they were.",
    r"f(x) = f(x) \text{ bit for bit}",
    lambda subject: cases(problem=some_problems(subject, packed=None)),
)
def determinism(subject, problem):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    untouched = copy.deepcopy({name: x for name, x in arguments.items() if isinstance(x, np.ndarray)})
    one, two = (subject.run(arguments, cotangents) for _ in range(2))
    for name, x in untouched.items():
        same_bits(arguments[name], x, f"the caller's `{name}`")
    for name, x in one.items():
        same_bits(two[name], x, f"`{name}` of a second equal call")
    return 0.0


def _several(subject):
    problem = some_problems(subject, packed=True, at_most=2)
    if isinstance(problem, str):
        return problem
    return and_then(problem, seeds=lambda problem: st.just((1, 2)))


@law(
    "New documents are taken from the call and not from the one before; a traced function is not traced again.",
    r"f(x, d_1), f(x, d_2), f(x, d_3): \quad \text{three right results of one program}",
    _several,
)
def new_documents(subject, problem, seeds):
    """`seeds` shuffle the lengths of documents for the second and the third call."""
    worst, traces = 0.0, []
    _, _, static = split(problem.arguments())

    def call(traced, other):
        traces.append(None)
        assert subject.traceable is not None
        return named(*subject.traceable(**traced, **other, **dict(static)))

    compiled = _compiled(subject, problem.shapes, "documents", call)
    for seed in (None, *seeds):
        again = problem if seed is None else cut_up(problem, seed)
        worst = max(worst, agree(run(subject, again), wanted(subject, again), again))
        if subject.traceable is not None:
            traced, other, _ = split(again.arguments())
            with bits_for(again.arguments()):
                compiled(jax.tree.map(jnp.asarray, traced), jax.tree.map(jnp.asarray, other))
    if len(traces) > 1:  # none if an example before had the same shapes
        raise AssertionError(f"New documents traced the function {len(traces)} times instead of once. {problem!r}")
    return worst


_TRANSFORMS = ("eager", "vmap", "remat", "scan", "grad")


@law(
    "Under jit, vmap, grad, remat and scan it is the same function.",
    r"\mathrm{jit}(f)(x) = f(x), \quad \mathrm{vmap}(f)(x)_i = f(x_i), \quad \nabla \mathrm{remat}(f) = \nabla f",
    lambda subject: cases(
        problem=some_problems(subject, lambda layout: 1 < layout.time < 20, at_most=1)
        if subject.traceable is not None
        else "it is no function that JAX can trace",
        transform=st.sampled_from(
            [name for name in _TRANSFORMS if subject.capabilities.gradients or name not in ("remat", "grad")]
        ),
    ),
)
def transforms(subject, problem, transform):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    traced, _, static = split(arguments)
    right = wanted(subject, problem)

    def call(traced):
        out, final = subject.traceable(**traced, **dict(static))
        return named(out, final)

    def pulled(call):
        def pull(traced):
            found, pull = jax.vjp(call, traced)
            weights = {name: x for name, x in zip(("out", "final_state"), cotangents) if name in found}
            return found | named_gradients(pull({name: x.astype(found[name].dtype) for name, x in weights.items()})[0])

        return pull

    with bits_for(arguments):
        traced = jax.tree.map(jnp.asarray, traced)
        if transform == "eager":
            found = call(traced)
        elif transform == "vmap":
            twice = jax.tree.map(lambda x: jnp.stack([0 * x, x]), traced)
            found = jax.tree.map(lambda x: x[1], _compiled(subject, static, transform, jax.vmap(call))(twice))
        elif transform == "scan":
            thrice = jax.tree.map(lambda x: jnp.stack([x, 0 * x, x]), traced)
            body = lambda carry, x: (carry, call(x))  # noqa: E731
            looped = _compiled(subject, static, transform, lambda xs: jax.lax.scan(body, 0, xs)[1])(thrice)
            found = jax.tree.map(lambda x: x[2], looped)
        elif transform == "remat":
            found = pulled(jax.checkpoint(call))(traced)
        else:

            def loss(traced):
                found = call(traced)
                weights = zip(("out", "final_state"), cotangents)
                return sum(jnp.sum(found[name] * x.astype(found[name].dtype)) for name, x in weights if name in found)

            found = named_gradients(jax.grad(loss)(traced))
    found = {name: np.asarray(x) for name, x in found.items()}
    return agree(found, {name: right[name] for name in found}, problem)


def _compiled(subject, static, transform, function):
    """The transformed function of a subject, compiled once."""
    return _programs.setdefault((id(subject), static, transform), (subject, quick_jit(function)))[1]


_programs: dict = {}

_REFUSED = ("heads that do not divide", "a state of another shape", "values of another length")


@law(
    "Input that fits no definition raises an error; it is never computed by halves.",
    r"H_k \nmid H_v, \quad S_0 \notin \mathbb{R}^{B \times H_v \times K \times V}, \quad T_v \ne T_k",
    lambda subject: cases(
        problem=some_problems(subject, lambda layout: layout.time > 1, at_most=2)
        if subject.capabilities.refuses
        else "refusing is not offered",
        mistake=st.sampled_from([name for name in _REFUSED if subject.capabilities.state or "state" not in name]),
    ),
)
def refusals(subject, problem, mistake):
    problem = dataclasses.replace(problem, state=subject.capabilities.state, batch=2)
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    subject.run(arguments, cotangents)  # what raises here refuses nothing
    if mistake == "heads that do not divide":
        heads = 2 * problem.value_heads + 1
        wrong = dataclasses.replace(problem, key_heads=heads, group=1).arguments()
        arguments = {**wrong, "q": wrong["q"][:, :, :2], "k": wrong["k"][:, :, :2]}
        gates = {name: getattr(wrong["gates"], name) for name in ("log_decay", "erase", "write")}
        arguments["gates"] = dataclasses.replace(wrong["gates"], **gates)
        cotangents = cotangents_of(dataclasses.replace(problem, key_heads=heads, group=1))
    elif mistake == "a state of another shape":
        state = np.asarray(arguments["initial_state"])
        arguments = {**arguments, "initial_state": np.concatenate([state, state], axis=-1)}
    else:
        arguments = {**arguments, "v": arguments["v"][:, :-1]}
    try:
        subject.run(arguments, cotangents)
    except Exception:
        return 0.0
    shapes = {name: x.shape for name, x in arguments.items() if hasattr(x, "shape")}
    raise AssertionError(f"A call with {mistake} must raise, but it returned. Its shapes: {shapes}. {problem!r}")
