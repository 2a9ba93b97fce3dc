"""Laws about the state: handed on, laid out, cut at any token, of documents without tokens."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from ._isolation import is_cut, shorter
from ._law import (
    agree,
    and_then,
    cases,
    cotangents_of,
    forward,
    law,
    run,
    same_bits,
    some_problems,
    tokens,
    wanted,
)


def _with_states(subject, *conditions, **options):
    offered = subject.capabilities
    if not offered.state or not offered.final_state:
        return "initial and final states are not offered"
    return some_problems(subject, lambda layout: layout.state and all(c(layout) for c in conditions), **options)


def _own_states(subject, *ways):
    """Packed documents that each have a state, given in one of these ways."""
    if not set(ways) & set(subject.capabilities.packing):
        arguments = {"slots": "`segment_ids` with `num_segments`", "offsets": "`cu_seqlens`"}
        given = " or ".join(arguments[way] for way in ways)
        return f"packed documents with a state each ({given}) are not offered"
    return _with_states(subject, lambda layout: layout.packing in ways, packed=True)


@law(
    "A sequence cut anywhere, its state handed on, is the whole sequence; gradients come back through the state.",
    r"f(x_{1:T}, S_0) = \big(o_{1:t} \,\|\, o_{t+1:T},\; S_T\big), \quad "
    r"(o_{1:t}, S_t) = f(x_{1:t}, S_0), \; (o_{t+1:T}, S_T) = f(x_{t+1:T}, S_t)",
    lambda subject: and_then(
        _with_states(
            subject, lambda layout: is_cut(subject, layout), at_most=1, log_decays=("mild", "bounded", "zero")
        ),
        cut=lambda problem: st.sampled_from(shorter(subject, problem)),
    ),
)
def resume(subject, problem, cut):
    """`cut` is the number of tokens of the first call."""
    arguments, (d_out, d_state) = problem.arguments(), cotangents_of(problem)
    first, second = (tokens(arguments, lambda x, part=part: x[:, part]) for part in (slice(cut), slice(cut, None)))
    one = subject.run(first, (d_out[:, :cut], np.zeros_like(d_state)))
    two = subject.run({**second, "initial_state": one["final_state"]}, (d_out[:, cut:], d_state))
    if "d_initial_state" in two:
        one = subject.run(first, (d_out[:, :cut], two["d_initial_state"]))
    joined = {}
    for name, x in one.items():
        if name == "final_state":
            joined[name] = two[name]
        else:
            joined[name] = x if name == "d_initial_state" else np.concatenate([x, two[name]], axis=1)
    return agree(joined, wanted(subject, problem), problem)


@law(
    "Packed documents with states of their own may be cut anywhere too; others are padding meanwhile.",
    r"(o, S, \bar x)^{(d)} \text{ in two calls are those of one, for every document } d",
    lambda subject: and_then(
        "padding is not offered" if not subject.capabilities.padding else _own_states(subject, "slots"),
        cut=lambda problem: st.integers(0, problem.time),
    ),
)
def resume_documents(subject, problem, cut):
    arguments, (d_out, d_state) = problem.arguments(), cotangents_of(problem)
    before = np.arange(problem.time) < cut
    ids = arguments["segment_ids"]
    first = {**arguments, "segment_ids": np.where(before, ids, -1)}
    state = subject.run(first, (d_out, d_state))["final_state"]
    second = {**arguments, "segment_ids": np.where(before, -1, ids), "initial_state": state}
    two = subject.run(second, (d_out, d_state))
    if "d_initial_state" in two:
        one = subject.run(first, (d_out, two["d_initial_state"]))
    else:
        one = subject.run(first, (d_out, d_state))
    joined = {name: one[name] + two[name] for name in one if name not in ("final_state", "d_initial_state")}
    joined["final_state"] = two["final_state"]
    if "d_initial_state" in one:
        joined["d_initial_state"] = one["d_initial_state"]
    return agree(joined, wanted(subject, problem), problem)


@law(
    "Tokens one by one, each with the state that the one before left, are the whole sequence at once.",
    r"(o_t, S_t) = \mathrm{step}(x_t, S_{t-1}) \;\Rightarrow\; (o_{1:T}, S_T) = f(x_{1:T}, S_0)",
    lambda subject: cases(
        problem="only whole chunks are offered"
        if subject.capabilities.time_multiple > 1
        else _with_states(subject, lambda layout: 1 < layout.time <= 33, at_most=2, log_decays=("mild", "mixed"))
    ),
)
def step(subject, problem):
    arguments, (d_out, d_state) = problem.arguments(), cotangents_of(problem)
    state, outs = arguments["initial_state"], []
    for t in range(problem.time):
        token = tokens(arguments, lambda x: x[:, t : t + 1])  # noqa: B023
        if subject.step is None:
            found = subject.run({**token, "initial_state": state}, (d_out[:, t : t + 1], d_state))
            out, state = found["out"], found["final_state"]
        else:
            token = {name: x for name, x in tokens(token, lambda x: x[:, 0]).items() if name != "initial_state"}
            out, state = (np.asarray(x) for x in subject.step(**token, state=state))
            out = out[:, None]
        outs.append(out)
    whole = forward(run(subject, problem))
    return agree({"out": np.concatenate(outs, axis=1), "final_state": np.asarray(state)}, whole, problem)


def _square_or_not(subject):
    """Half of them have as many value channels as key channels, where a transposed state has the same shape."""
    square = _with_states(subject, lambda layout: layout.key_dim == layout.value_dim, log_decays=("mild",))
    several = _with_states(subject, lambda layout: layout.batch > 1 or layout.value_heads > 1, log_decays=("mild",))
    found = [problem for problem in (square, several) if not isinstance(problem, str)]
    return st.one_of(found) if found else several


@law(
    "The state's rows are key channels and its columns value channels: one entry of it is read where it stands.",
    r"S_0 = a_i b_j^\top, \; k_t = 0: \quad S_T = e^{\sum_t g_{t,i}} a_i b_j^\top, \quad o_{t,j} = c\, q_{t,i}\, "
    r"e^{\sum_{s \le t} g_{s,i}}",
    lambda subject: and_then(
        _square_or_not(subject),
        row=lambda problem: st.integers(0, problem.key_dim - 1),
        column=lambda problem: st.integers(0, problem.value_dim - 1),
    ),
)
def state_layout(subject, problem, row, column):
    arguments = problem.arguments()
    state = np.zeros_like(arguments["initial_state"])
    state[..., row, column] = 1
    found = subject.run({**arguments, "k": 0 * arguments["k"], "initial_state": state}, cotangents_of(problem))
    decay = arguments["gates"].log_decay
    shape = (problem.batch, problem.time, problem.value_heads)
    if decay is None:
        kept = np.ones(shape)
    else:
        decay = np.asarray(decay).astype(np.float64)
        decay = np.repeat(decay, problem.value_heads // decay.shape[2], axis=2)
        kept = np.exp(np.cumsum(decay[..., row * decay.shape[3] // problem.key_dim], axis=1))
    scale = problem.key_dim**-0.5 if problem.scale is None else problem.scale
    q = np.repeat(np.asarray(arguments["q"]).astype(np.float64), problem.group, axis=2)[..., row]
    out, final = np.zeros((*shape, problem.value_dim)), np.zeros(problem.state_shape)
    out[..., column], final[..., row, column] = scale * q * kept, kept[:, -1]
    return agree(forward(found), {"out": out, "final_state": final}, problem)


def _empty_documents(subject):
    offered = subject.capabilities
    problem = _own_states(subject, "slots", "offsets")

    def emptied(problem):
        count = problem.slots if problem.packing == "slots" else len(problem.documents[0])
        full = tuple(st.integers(1, max(1, problem.time // count)) for _ in range(count // 2))
        rows = st.tuples(*(st.tuples(*full) for _ in range(problem.batch)))

        def interleave(rows):
            filled = [tuple(n for m in row for n in (0, m)) + (0,) * (count - 2 * len(row)) for row in rows]
            return fill_last(dataclasses.replace(problem, documents=tuple(filled)), offered)

        return rows.map(interleave)

    return problem if isinstance(problem, str) else cases(problem=problem.flatmap(emptied))


def fill_last(problem, offered):
    """The longest document of each row takes what is left, where padding is not offered."""
    if offered.padding:
        return problem
    rows = []
    for row in problem.documents:
        longest = max(range(len(row)), key=lambda i: row[i])
        rows.append(tuple(n + (i == longest) * (problem.time - sum(row)) for i, n in enumerate(row)))
    return dataclasses.replace(problem, documents=tuple(rows))


@law(
    "A document without tokens leaves the state it was given, bit for bit, and its gradient passes.",
    r"T_d = 0 \;\Rightarrow\; S^{(d)} = S_0^{(d)}, \quad \bar S_0^{(d)} = \bar S^{(d)}",
    _empty_documents,
)
def zero_length(subject, problem):
    found, begin, (_, d_state) = run(subject, problem), problem.arguments()["initial_state"], cotangents_of(problem)
    for row, lengths in enumerate(problem.documents):
        for document in [i for i, n in enumerate(lengths) if n == 0]:
            index = (row, document) if problem.packing == "slots" else (document,)
            same_bits(found["final_state"][index], begin[index], f"`final_state` of the empty document {document}")
            if "d_initial_state" in found:
                what = f"`d_initial_state` of the empty document {document}"
                same_bits(found["d_initial_state"][index], d_state[index].astype(begin.dtype), what)
    return agree(found, wanted(subject, problem), problem)
