"""Laws about what must not matter: later tokens, other rows, heads and documents, padding, what memory held."""

import dataclasses

import jax
import numpy as np
from hypothesis import strategies as st

from gated_delta.testing._random import RandomKeys

from ._law import (
    agree,
    and_then,
    backward,
    cases,
    cotangents_of,
    cut_up,
    fill,
    law,
    needs,
    run,
    same_bits,
    some_problems,
    tokens,
    wanted,
)

_STATES = ("final_state", "d_initial_state")


def _cut(subject):
    problem = some_problems(
        subject, lambda layout: layout.time > 1, keys=("independent",), log_decays=("mild", "mixed", "bounded")
    )
    return and_then(problem, cut=lambda problem: st.integers(0, problem.time - 1))


@law(
    "What comes later changes nothing, bit for bit: neither outputs nor gradients of what came before.",
    r"x_{\le t} = y_{\le t} \;\Rightarrow\; o(x)_{\le t} = o(y)_{\le t}, \qquad "
    r"\bar o_{>t} = 0 \;\Rightarrow\; \bar x_{>t} = 0",
    _cut,
)
def causality(subject, problem, cut):
    """`cut` is the last token that is the same."""
    strong = "strong" if subject.capabilities.max_decay >= 30 and problem.gates.log_decay_min is None else "mild"
    later = dataclasses.replace(
        problem,
        seed=problem.seed + 1,
        keys=RandomKeys("identical"),
        gates=dataclasses.replace(problem.gates, log_decays=strong),
    )
    one, two = problem.arguments(), later.arguments()
    pieces = {name: (one[name], two[name]) for name in ("q", "k", "v", "gates")}
    joined = {
        name: jax.tree.map(lambda x, y: np.concatenate([x[:, : cut + 1], y[:, cut + 1 :]], axis=1), *pair)
        for name, pair in pieces.items()
    }
    d_out, d_state = cotangents_of(problem)
    d_out[:, cut + 1 :] = 0
    cotangents = d_out, np.zeros_like(d_state)
    first, second = (subject.run(x, cotangents) for x in (one, {**one, **joined}))
    for name, x in first.items():
        if name == "final_state":
            continue
        until = slice(None) if name == "d_initial_state" else (slice(None), slice(cut + 1))
        same_bits(second[name][until], x[until], f"`{name}` until token {cut}, where later tokens differ,")
        if name.startswith("d_") and name != "d_initial_state" and x[:, cut + 1 :].any():
            largest = np.abs(x[:, cut + 1 :]).max()
            raise AssertionError(
                f"`{name}` after token {cut} must be 0, for nothing reads those tokens, but it is up to {largest:.2g}. "
                f"Problem: {problem!r}"
            )
    return 0.0


def _loud(subject):
    return st.sampled_from([1e30, float("nan")] if subject.capabilities.contains else [1e4])


def _loud_names(subject, arguments):
    """Where it is planted. Without containment not in keys: a state that they make explode is bound to overflow."""
    names = ("q", "k", "v", "initial_state") if subject.capabilities.contains else ("q", "v", "initial_state")
    return [name for name in names if name in arguments]


@law(
    "A batch row that holds huge numbers or NaN changes no other row, bit for bit.",
    r"x^{(c)} = y^{(c)} \;\Rightarrow\; (o, S_T, \bar x)^{(c)} = (o, S_T, \bar y)^{(c)} "
    r"\quad \text{for row } c, \text{ whatever the others hold}",
    lambda subject: and_then(
        some_problems(subject, lambda layout: layout.batch > 1),
        value=lambda problem: _loud(subject),
        row=lambda problem: st.integers(0, problem.batch - 1),
    ),
)
def no_leak_between_rows(subject, problem, value, row):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    loud = {name: np.array(arguments[name]) for name in _loud_names(subject, arguments)}
    for x in loud.values():
        x[row] = value
    clean, found = subject.run(arguments, cotangents), subject.run({**arguments, **loud}, cotangents)
    others = np.arange(problem.batch) != row
    for name, x in clean.items():
        same_bits(found[name][others], x[others], f"`{name}` of the rows beside row {row}, which holds {value:g},")
    return 0.0


@law(
    "A head that holds huge numbers or NaN changes no other head, bit for bit.",
    r"x^{(h)} = y^{(h)} \;\Rightarrow\; (o, S_T, \bar x)^{(h)} = (o, S_T, \bar y)^{(h)} "
    r"\quad \text{for head } h, \text{ whatever the others hold}",
    lambda subject: and_then(
        some_problems(subject, lambda layout: layout.value_heads > 1),
        value=lambda problem: _loud(subject),
        head=lambda problem: st.integers(0, problem.value_heads - 1),
    ),
)
def no_leak_between_heads(subject, problem, value, head):
    """`head` is a value head; its key head too, where no other value head reads that."""
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    loud = {name: np.array(arguments[name]) for name in _loud_names(subject, arguments)}
    for name, x in loud.items():
        if name == "initial_state":
            x[:, head] = value
        elif name == "v" or problem.group == 1:
            x[:, :, head] = value
    clean, found = subject.run(arguments, cotangents), subject.run({**arguments, **loud}, cotangents)
    others = np.arange(problem.value_heads) != head
    key_heads = np.arange(problem.key_heads) != head // problem.group
    for name, x in clean.items():
        axis = 1 if name in _STATES else 2
        kept = np.flatnonzero(others if x.shape[axis] == problem.value_heads else key_heads)
        same_bits(
            np.take(found[name], kept, axis),
            np.take(x, kept, axis),
            f"`{name}` of the heads beside value head {head}, which holds {value:g},",
        )
    return 0.0


@law(
    "A packed document that holds huge numbers or NaN changes no other document, bit for bit.",
    r"x^{(d)} = y^{(d)} \;\Rightarrow\; (o, S, \bar x)^{(d)} = (o, S, \bar y)^{(d)} "
    r"\quad \text{for document } d, \text{ whatever the others hold}",
    lambda subject: and_then(
        some_problems(subject, packed=True),
        value=lambda problem: _loud(subject),
        token=lambda problem: st.integers(0, problem.time - 1),
        row=lambda problem: st.integers(0, problem.batch - 1),
    ),
)
def no_leak_between_documents(subject, problem, value, token, row):
    """The document that holds `token` of `row` holds `value` at that token and after it."""
    ids = problem.segment_ids
    document = ids[row, token]
    needs(document >= 0 and (ids != document).any())
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    hit = np.zeros(ids.shape, bool)
    hit[row, token:] = ids[row, token:] == document
    mine = np.zeros(ids.shape, bool)
    mine[row] = ids[row] == document
    names = [name for name in _loud_names(subject, arguments) if name != "initial_state"]
    loud = {name: fill(arguments[name], hit, value) for name in names}
    clean, found = subject.run(arguments, cotangents), subject.run({**arguments, **loud}, cotangents)
    states = np.ones(problem.state_shape[:-3], bool)
    states[{"ids": (row,), "slots": (row, document), "offsets": (document,)}[problem.packing]] = False
    for name, x in clean.items():
        kept = states if name in _STATES else ~mine
        what = f"`{name}` outside of document {document} of row {row}, which holds {value:g} from token {token} on,"
        same_bits(found[name][kept], x[kept], what)
    return 0.0


def _several_documents(subject):
    """Documents as they are drawn, and rows that are cut into as many with tokens as may be."""
    problem = some_problems(subject, packed=True)
    return problem if isinstance(problem, str) else cases(problem=st.one_of(problem, problem.map(cut_up)))


@law(
    "Packed documents are separate runs: outputs, states and gradients, wherever they begin and end.",
    r"(o, S, \bar x)^{(d)} \text{ are those of document } d \text{ alone}",
    _several_documents,
)
def packing(subject, problem):
    return agree(run(subject, problem), wanted(subject, problem), problem)


@law(
    "Padding is nothing: whatever it holds, its outputs and gradients are 0 and it changes nothing else, bit for bit.",
    r"t \text{ padding} \;\Rightarrow\; o_t = 0, \; \bar x_t = 0, \; \frac{\partial (o, S)}{\partial x_t} = 0",
    lambda subject: cases(
        problem="padding is not offered" if not subject.capabilities.padding else some_problems(subject, packed=True),
        rubbish=st.sampled_from([1e3, 1e30, float("nan"), float("-inf")] if subject.capabilities.contains else [1e3]),
    ),
)
def padding(subject, problem, rubbish):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    empty = problem.segment_ids < 0
    needs(bool(empty.any()))
    if subject.capabilities.contains:
        held = tokens({name: arguments[name] for name in ("q", "k", "v", "gates")}, lambda x: fill(x, empty, rubbish))
    else:  # numbers that a token may hold
        held = {name: fill(arguments[name], empty, rubbish) for name in ("q", "v")}
    clean, found = subject.run(arguments, cotangents), subject.run({**arguments, **held}, cotangents)
    for name, x in found.items():
        same_bits(x, clean[name], f"`{name}`, where padding holds {rubbish:g},")
        if name not in _STATES and x[empty].any():
            raise AssertionError(f"`{name}` must be 0 at padding, but it is not. Problem: {problem!r}")
    return agree(clean, wanted(subject, problem), problem)


@law(
    "A token with a zero key and zero gates does nothing: a row of fixed size may be filled up with them.",
    r"k_t = 0, \; g_t = e_t = w_t = 0 \;\Rightarrow\; S_t = S_{t-1}, \; \bar v_t = 0",
    lambda subject: and_then(
        "a log decay of 0 is not offered"
        if not subject.capabilities.zero_decay
        else some_problems(subject, lambda layout: layout.state and is_cut(subject, layout), at_most=1),
        real=lambda problem: st.sampled_from(shorter(subject, problem)),
    ),
)
def neutral_tokens(subject, problem, real):
    """Only the first `real` tokens of each row are not neutral."""
    arguments, (d_out, d_state) = problem.arguments(), cotangents_of(problem)
    rest = np.broadcast_to(np.arange(problem.time) >= real, (problem.batch, problem.time))
    gates = jax.tree.map(lambda x: fill(x, rest, 0), arguments["gates"])
    padded = {**arguments, "k": fill(arguments["k"], rest, 0), "gates": gates}
    found = subject.run(padded, (fill(d_out, rest, 0), d_state))
    short = tokens(arguments, lambda x: x[:, :real])
    alone = subject.run(short, (d_out[:, :real], d_state))
    found = {name: x if name in _STATES else x[:, :real] for name, x in found.items()}
    return agree(found, alone, problem, short)


def is_cut(subject, layout):
    """Whether a layout has more than 32 tokens, and more than a chunk, but few more."""
    multiple = subject.capabilities.time_multiple
    return max(32, multiple) < layout.time < max(70, 3 * multiple + 1)


def shorter(subject, problem):
    """Few lengths that are less than `time`, and what is left then: each is one more shape."""
    multiple = subject.capabilities.time_multiple
    wanted = (1, 16, problem.time - 16, problem.time - 1) if multiple == 1 else (multiple,)
    return sorted({n for n in wanted if 0 < n < problem.time})


@law(
    "What memory held before changes nothing: a call between two equal ones, full of NaN, leaves no trace.",
    r"f(x), f(\mathrm{NaN}), f(x): \quad \text{the first and the third are equal, bit for bit}",
    lambda subject: cases(problem=some_problems(subject, packed=None), value=st.sampled_from([float("nan"), 1e30])),
)
def unwritten_memory(subject, problem, value):
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    names = ("q", "k", "v", "initial_state")
    poison = {name: np.full_like(arguments[name], value) for name in names if name in arguments}
    before = subject.run(arguments, cotangents)
    subject.run({**arguments, **poison}, cotangents)
    after = subject.run(arguments, cotangents)
    for name, x in before.items():
        same_bits(after[name], x, f"`{name}`, after a call on {value:g},")
    empty = problem.segment_ids < 0
    if empty.any():
        for name, x in before.items():
            if name not in _STATES and x[empty].any():
                raise AssertionError(f"`{name}` must be 0 at padding, but memory shows there. Problem: {problem!r}")
    return agree(backward(before), backward(wanted(subject, problem)), problem) if backward(before) else 0.0
