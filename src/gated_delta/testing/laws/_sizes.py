"""Laws about sizes and forms: chunks, groups, granularities, equal and unequal dimensions, many rows and documents."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

from gated_delta._gates import Gates
from gated_delta.testing._capabilities import MEMBERS
from gated_delta.testing._random import RandomProblem

from ._law import (
    agree,
    cases,
    cotangents_of,
    gate_names,
    law,
    run,
    some_problems,
    wanted,
    with_gates,
)


def _variations(subject):
    if not subject.variations:
        return "no variation of chunk sizes is given"
    return cases(
        problem=some_problems(
            subject, lambda layout: layout.time > 64, at_most=1, log_decays=("mild", "mixed", "resets")
        ),
        variation=st.sampled_from(sorted(subject.variations)),
    )


@law(
    "How many tokens are solved together, and what is kept for the backward pass, changes nothing beyond rounding.",
    r"f_C(x) = f_{C'}(x) \quad \text{for all chunk sizes } C, C'",
    _variations,
)
def chunk_size(subject, problem, variation):
    return agree(run(subject.variations[variation], problem), wanted(subject, problem), problem)


def _grouped(subject):
    if not subject.capabilities.grouped:
        return "grouped heads are not offered"
    few = [layout for layout in subject.capabilities.layouts() if layout.group > 1 and layout.time < 70]
    few = [layout for layout in few if layout.documents is None]
    several = [layout for layout in few if layout.key_heads > 1] or few
    chosen = {layout.gates.owner: layout for layout in reversed(several)}  # the first of each owner
    return cases(problem=some_problems(subject, lambda layout: layout in chosen.values()))


@law(
    "Value heads that share a key are those heads with the key repeated; what is shared gets the sum of gradients.",
    r"\text{value head } j \text{ reads key head } \lfloor j / (H_v / H_k) \rfloor: \quad "
    r"f(q, k, v) = f(\mathrm{repeat}(q), \mathrm{repeat}(k), v), \quad \bar k_i = \sum_{j \in \text{group}} \bar k_j",
    _grouped,
)
def grouping(subject, problem):
    arguments, cotangents, heads = problem.arguments(), cotangents_of(problem), problem.value_heads

    def repeat(x):
        return np.repeat(np.asarray(x), heads // x.shape[2], axis=2)

    gates = {name: repeat(getattr(arguments["gates"], name)) for name in gate_names(arguments)}
    repeated = with_gates({**arguments, "q": repeat(arguments["q"]), "k": repeat(arguments["k"])}, **gates)
    shared, apart = subject.run(arguments, cotangents), subject.run(repeated, cotangents)
    for name, x in shared.items():
        if name.startswith("d_") and name != "d_initial_state":
            whole = apart[name].astype(np.float64)
            apart[name] = whole.reshape(*x.shape[:3], -1, x.shape[3]).sum(3)
    return agree(shared, apart, problem)


_FORMS = {
    "a decay per channel with equal channels is one per head": ("decay", "channel", "head"),
    "a decay per tile with equal tiles is one per head": ("decay", "tile", "head"),
    "an erase per channel with equal channels is one per head": ("erase", "channel", "head"),
    "a write per channel with equal channels is one per head": ("write", "channel", "head"),
    "no decay is a log decay of 0": ("decay", "head", "none"),
    "no erase is an erase of 0": ("erase", "head", "none"),
    "no write is a write of 1": ("write", "head", "one"),
    "a tie is an erase and a write that are equal": ("tied", False, True),
}


def _reductions(subject):
    """For each pair of forms of which both are offered: gates of the coarser one."""
    found, offered = [], subject.capabilities
    for form, (word, finer, coarser) in _FORMS.items():
        for gates in offered.gates():
            if word == "tied":
                fits = not gates.tied and gates.erase == "head" and gates.write == "head"
                one = dataclasses.replace(gates, tied=True, write="one") if fits else None
                two = gates
            else:
                fits = not gates.tied or word == "decay"
                one = dataclasses.replace(gates, **{word: coarser}) if fits else None
                two = dataclasses.replace(gates, **{word: finer}) if fits else None
            if one is not None and offered.takes(one) and offered.takes(two):
                found.append((form, one))
                break
    if not found:
        return "no two forms of one gate are offered"
    problem = some_problems(subject, lambda layout: 1 < layout.time < 20, at_most=1)
    if isinstance(problem, str):
        return problem
    return problem.flatmap(
        lambda problem: st.sampled_from(found).map(
            lambda pair: {
                "problem": dataclasses.replace(
                    problem, gates=dataclasses.replace(pair[1], log_decays=problem.gates.log_decays)
                ),
                "form": pair[0],
            }
        )
    )


@law(
    "Members of the family become each other where their gates say the same.",
    r"\text{GDN-2 with } e = w = \beta \text{ is KDA; KDA with equal channels is GDN; GDN with } g = 0 \text{ is "
    r"DeltaNet; with } e = 0 \text{ it is linear attention with decay}",
    _reductions,
)
def reductions(subject, problem, form):
    word, finer, _ = _FORMS[form]
    arguments, cotangents = problem.arguments(), cotangents_of(problem)
    gates, shape = arguments["gates"], (problem.batch, problem.time)
    widths = {"decay": problem.key_dim, "erase": problem.key_dim, "write": problem.value_dim}
    if word == "tied":
        fine, names = Gates(gates.log_decay, gates.erase, gates.erase, erase_max=gates.erase_max), ["erase", "write"]
    else:
        name = "log_decay" if word == "decay" else word
        names = [name]
        width = {"channel": widths[word], "tile": 2, "head": 1}[finer]
        x = getattr(gates, name)
        if x is None:
            heads = problem.key_heads if word != "write" and problem.gates.owner == "key" else problem.value_heads
            x = np.full((*shape, heads, 1), 1.0 if word == "write" else 0.0, problem.gate_dtype or problem.dtype)
        fine = dataclasses.replace(gates, **{name: np.repeat(x, width // x.shape[3], axis=3)})
    coarse, found = subject.run(arguments, cotangents), subject.run({**arguments, "gates": fine}, cotangents)
    if word == "tied":
        found["d_erase"] = found["d_erase"] + found.pop("d_write") if "d_erase" in found else 0
    for name in names:
        key = f"d_{name}"
        if key in found and key not in coarse:
            found.pop(key)
        elif key in found:
            x = coarse[key]
            found[key] = found[key].reshape(*x.shape[:3], x.shape[3], -1).sum(4)
    return agree({key: found[key] for key in coarse}, coarse, problem)


def _last_members(offered, count):
    members = [gates for gates in offered.gates() if gates in MEMBERS.values()]
    return (members or list(offered.gates()))[-count:]


_DIFFERENT = RandomProblem(batch=3, time=5, key_heads=2, group=2, key_dim=6, value_dim=7)
_EQUAL = RandomProblem(batch=4, time=4, key_heads=4, key_dim=4, value_dim=4)


def _shapes(subject):
    """Both layouts with the last two members of the family on offer, and gates of an owner that these have not."""
    offered, found = subject.capabilities, []
    kinds = _last_members(offered, 2)
    kinds += [gates for gates in offered.gates() if gates.owner not in {kind.owner for kind in kinds}][:1]
    for shape in (_DIFFERENT, _EQUAL):
        for gates in kinds:
            layout = offered.fit(dataclasses.replace(shape, gates=gates, state=offered.state))
            found += [layout] if layout is not None else []
    from gated_delta.testing._strategies import problems

    families = offered.decays(("mild", "bounded"))
    return cases(
        problem=problems(layouts=found, dtypes=[offered.dtypes[0]], keys=("independent",), log_decays=families)
    )


@law(
    "Axes are told apart by their place and not by their size: all sizes may be different, and all may be equal.",
    r"(B, T, H_k, H_v, K, V) = (3, 5, 2, 4, 6, 7) \quad \text{and} \quad (4, 4, 4, 4, 4, 4)",
    _shapes,
)
def shapes(subject, problem):
    return agree(run(subject, problem), wanted(subject, problem), problem)


def _large(subject):
    offered = subject.capabilities
    (gates,) = _last_members(offered, 1)
    cells = RandomProblem(batch=34, time=3, key_heads=32, key_dim=2, value_dim=2, gates=gates, state=offered.state)
    if offered.time_multiple > 1:
        cells = dataclasses.replace(cells, time=2 * offered.time_multiple)
    found = [offered.fit(cells)]
    documents = RandomProblem(time=300, key_dim=2, value_dim=2, gates=gates, state=offered.state)
    for packing, more in (("slots", {"slots": 300}), ("offsets", {})):
        if packing in offered.packing:
            found.append(offered.fit(dataclasses.replace(documents, documents=((1,) * 300,), packing=packing, **more)))
            break
    return cases(problem=st.sampled_from([layout for layout in found if layout is not None]), seed=st.integers(0, 9))


@law(
    "Two thousand rows and heads, or three hundred documents of one token, are as right as one.",
    r"B H \lceil T / C \rceil > 1024, \quad \text{documents} > 256",
    _large,
)
def large_launch(subject, problem, seed):
    problem = dataclasses.replace(problem, seed=seed)
    return agree(run(subject, problem), wanted(subject, problem), problem)
