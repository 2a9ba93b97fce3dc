"""What laws are asked of: one of our backends, or anybody's function behind an adapter for its signature."""

import dataclasses
import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from gated_delta._backend import AbstractBackend
from gated_delta._chunked import Chunked
from gated_delta._op import gated_delta
from gated_delta._step import gated_delta_step
from gated_delta._variant import MixerConfig, Variant

from ._capabilities import Capabilities
from ._compare import results, why_not
from ._naming import import_of, imports_of_call, keywords_note
from ._random import RandomProblem
from ._run import GATES, Results, check_results, differentiated, forward_only, in_numpy, named, split

Framework = Literal["jax", "numpy", "torch"]


@dataclasses.dataclass(frozen=True)
class Implementation:
    """An implementation of the operator, as laws see it. `implementation(x)` makes one of anything that can be checked.

    - `name`: how a line of Python names it.
    - `capabilities`: what may be asked of it.
    - `run`: `run(arguments, cotangents)` gives `Results` for arguments of `gated_delta` and cotangents of its two
        results, without the gradients and the state that it does not offer.
    - `traceable`: a function of the same arguments to `(out, final_state)` that JAX can trace, or `None`.
    - `step`: `step(arguments, state)` runs one token, whose arrays have no time axis, or `None`.
    - `variations`: other settings that must change nothing, such as chunk sizes, by what they say.
    """

    name: str
    capabilities: Capabilities
    run: Callable[[Mapping[str, Any], tuple[Any, Any]], Results]
    traceable: Callable[..., tuple[Any, Any]] | None = None
    step: Callable[..., tuple[Any, Any]] | None = None
    variations: Mapping[str, "Implementation"] = dataclasses.field(default_factory=dict)
    refusal: Callable[[RandomProblem], str | None] = lambda problem: None
    """`refusal(problem)` says why it declines a problem that its capabilities allow, or `None`."""
    imports: str = ""
    """Python that makes `name` known."""
    how: str = "{name}"
    """Python that makes it again of what has its name, such as `plain({name}, framework="numpy")`."""
    note: str = ""
    """What its report says in a line, whatever comes of it."""
    words: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """What it calls otherwise than we do in messages, such as `d_beta` for `d_erase`."""


def implementation(subject: Any, capabilities: Capabilities | None = None) -> Implementation:
    """`subject` as laws see it: one of our backends, an `Implementation`, or a function with the signature of `plain`.

    **Raises:** `TypeError` for anything else.
    """
    if isinstance(subject, Implementation):
        return subject if capabilities is None else dataclasses.replace(subject, capabilities=capabilities)
    if isinstance(subject, AbstractBackend):
        return _of_backend(subject, capabilities or Capabilities())
    if isinstance(subject, (Variant, MixerConfig)) or hasattr(subject, "init_state"):
        kind = repr(subject) if isinstance(subject, Variant) else f"A `{type(subject).__name__}`"
        raise TypeError(f"{kind} is no implementation of the operator: `check_variant` asks variants and layers.")
    if inspect.isclass(subject) or not callable(subject):
        called = f", such as `{subject.__name__}()`" if inspect.isclass(subject) else ""
        raise TypeError(f"A backend{called}, a function or an `Implementation` can be checked, but {subject!r} came.")
    return plain(subject, capabilities=capabilities)


# ---- our backends ----------------------------------------------------------------------------------------------------


def _of_backend(backend: AbstractBackend, capabilities: Capabilities) -> Implementation:
    others = {}
    if isinstance(backend, Chunked):
        settings = [dataclasses.replace(backend, chunk_size=size) for size in (16, 32, 64, 128)]
        settings += [dataclasses.replace(backend, residuals=kept) for kept in ("states", "none", "all")]
        settings.append(dataclasses.replace(backend, branch=not backend.branches))
        others = {str(other): _of_backend_alone(other, capabilities) for other in settings if other != backend}
    return dataclasses.replace(_of_backend_alone(backend, capabilities), variations=others)


def _of_backend_alone(backend: AbstractBackend, capabilities: Capabilities) -> Implementation:
    traceable = functools.partial(gated_delta, backend=backend)

    @functools.cache
    def refused(layout):
        return why_not(backend, layout)

    def refusal(problem):
        """Asked once for all problems of the same shapes."""
        return refused(problem.shapes)

    run = functools.partial(results, backend) if capabilities.gradients else forward_only(traceable)
    imports = imports_of_call(str(backend), type(backend).__module__)
    return Implementation(str(backend), capabilities, run, traceable, _step, refusal=refusal, imports=imports)


@jax.jit
def _step(q, k, v, gates, state):
    return gated_delta_step(q, k, v, gates, state)


# ---- functions of others ---------------------------------------------------------------------------------------------


_OF_CHECKS = ("final_state", "gradients", "contains", "max_decay")
"""Capabilities on which the check of a case depends; the others say which cases there are."""


def plain(
    function: Callable[..., Any],
    *,
    capabilities: Capabilities | None = None,
    framework: Framework = "jax",
    name: str | None = None,
    step: Callable[..., Any] | None = None,
) -> Implementation:
    """A function of arrays in our layout, called by keywords.

    It may have the parameters `q`, `k`, `v`, `log_decay`, `erase`, `write` (or `beta` for a tied gate), each
    `[batch, time, heads, dim]`; `initial_state`, `segment_ids`, `num_segments`, `cu_seqlens` and `scale` as in
    `gated_delta`. It returns `(out, final_state)`, or `out` where `capabilities` offer no final state. What its
    signature does not have is not asked of it, whatever `capabilities` say.

    - `framework`: whose arrays it takes. A function of `"jax"` is compiled and differentiated by JAX, one of `"torch"`
        by torch; one of `"numpy"` has no gradients.
    - `step`: the same for one token: its arrays have no time axis, and it takes and returns a `state`.
    """
    if capabilities is None:
        offered = Capabilities.from_signature(function, gradients=framework != "numpy")
    else:
        offered = capabilities.within(function)
    adapted = _adapt(function, offered, framework, name, _call_plainly, step and _one_token(step, framework))
    said = [] if framework == "jax" else [f'framework="{framework}"']
    default = Capabilities.from_signature(function, gradients=framework != "numpy")
    less = [x for x in _OF_CHECKS if getattr(offered, x) != getattr(default, x)]
    if less:
        less = [x for x in _OF_CHECKS if getattr(offered, x) != getattr(Capabilities, x)]
        said.append(f"capabilities=Capabilities({', '.join(f'{x}={getattr(offered, x)!r}' for x in less)})")
    how = f"plain({{name}}, {', '.join(said)})" if said and name is None else "{name}"
    return dataclasses.replace(adapted, how=how)


def fla_style(
    function: Callable[..., Any],
    *,
    capabilities: Capabilities | None = None,
    framework: Framework = "torch",
    name: str | None = None,
) -> Implementation:
    """A function with the signature of flash-linear-attention's kernels; of torch, unless `framework="jax"` is said.

    `function(q, k, v, g=..., beta=..., scale=..., initial_state=..., output_final_state=True, cu_seqlens=...)` with
    arrays `[batch, time, heads, dim]`; `g` and `beta` without the last axis where they are per head; `b` and `w` in the
    place of `beta` for erase and write gates of their own. Returns `(out, final_state)`, key axis first.
    """
    names = set(inspect.signature(function).parameters)
    if framework == "torch" and importlib.util.find_spec("torch") is None:
        raise ImportError('torch is not installed: install it, or say `fla_style(..., framework="jax")`.')
    if capabilities is None:
        apart = {"b", "w"} <= names
        capabilities = Capabilities(
            decay=("head", "channel") if "g" in names else ("none",),
            erase=("channel",) if apart else ("head",) if "beta" in names else ("none",),
            write=("channel",) if apart else ("one",),
            tied=(False,) if apart or "beta" not in names else (True,),
            dtypes=("float32", "bfloat16"),
            packing=("offsets",) if "cu_seqlens" in names else (),
            padding=False,
            state="initial_state" in names,
        )
    adapted = _adapt(function, capabilities, framework, name, _call_as_fla, None)
    how = "fla_style({name})" if framework == "torch" else f'fla_style({{name}}, framework="{framework}")'
    return dataclasses.replace(adapted, how=how if name is None else "{name}")


def tokamax_style(
    function: Callable[..., Any],
    *,
    capabilities: Capabilities | None = None,
    lower_bound: float | None = None,
    framework: Framework = "jax",
    name: str | None = None,
) -> Implementation:
    """A function with the signature of tokamax's `kimi_delta_attention`.

    `function(query, key, value, gate, beta, *, a_log, lower_bound, scale, initial_state, segment_ids, ...)` with arrays
    `[heads, batch, time, dim]`, states `[batch, documents, heads, key_dim, value_dim]`, and ids from 1, 0 for padding.

    - `lower_bound`: `None` gives it log decays. A bound in `[-5, 0)` gives it raw gates, with `a_log` of zeros:
        `log_decay = lower_bound * sigmoid(raw)`, so that only log decays inside `(lower_bound, 0)` can be asked for.
    """
    if capabilities is None:
        capabilities = Capabilities(
            decay=("channel",),
            erase=("head",),
            write=("one",),
            tied=(True,),
            grouped=False,
            dtypes=("float32", "bfloat16"),
            packing=("slots",),
            erase_max=1.0,
            max_decay=float("inf") if lower_bound is None else -lower_bound,
            zero_decay=lower_bound is None,
        )
    translate = functools.partial(_call_as_tokamax, lower_bound=lower_bound)
    adapted = _adapt(function, capabilities, framework, name, translate, None)
    said = [] if lower_bound is None else [f"lower_bound={lower_bound}"]
    said += [] if framework == "jax" else [f'framework="{framework}"']
    how = f"tokamax_style({', '.join(('{name}', *said))})"
    return dataclasses.replace(adapted, how=how if name is None else "{name}")


def _call_plainly(function, arrays, options):
    given = dict(arrays)
    if "beta" in inspect.signature(function).parameters and options.pop("tied", False):
        given["beta"] = given.pop("erase")
    elif options.pop("tied", False):
        given["write"] = given["erase"]
    return function(**given, **options)


def _one_token(step, framework):
    """`Implementation.step` from a step whose gates are arrays of their own."""

    def call(q, k, v, gates, state):
        given = {name: getattr(gates, name) for name in GATES}
        arrays = {"q": q, "k": k, "v": v, "state": state, **{name: x for name, x in given.items() if x is not None}}
        if framework == "torch":
            arrays = {name: _tensor(x) for name, x in arrays.items()}
        return _call_plainly(step, arrays, {"tied": True} if gates.is_tied else {})

    return call


def _call_as_fla(function, arrays, options):
    tied = options.pop("tied", False)
    key_dim, value_dim = arrays["k"].shape[-1], arrays["v"].shape[-1]
    names = {"log_decay": "g", "erase": "beta" if tied else "b", "write": "w"}
    full = {"log_decay": key_dim, "erase": key_dim, "write": value_dim}
    given = {}
    for key, x in arrays.items():
        if key in names and x.shape[-1] == 1 and full[key] != 1:
            x = x[..., 0]
        given[names.get(key, key)] = x
    return function(**given, **options, output_final_state=True)


def _call_as_tokamax(function, arrays, options, *, lower_bound):
    options.pop("tied", None)

    def head_first(x):
        return jnp.moveaxis(x, 2, 0)

    slots = options.pop("num_segments", None)
    state = arrays.get("initial_state")
    own = state is not None and state.ndim == 5
    gate = head_first(arrays["log_decay"])
    more: dict[str, Any] = {}
    if lower_bound is not None:
        share = jnp.clip(gate / lower_bound, 1e-30, 1 - 1e-7)
        gate = jnp.log(share) - jnp.log1p(-share)
        more = {"a_log": jnp.zeros(gate.shape[0]), "use_gate_in_kernel": True, "lower_bound": lower_bound}
    if state is not None:
        more["initial_state"] = state if own else state[:, None]
    if options.get("segment_ids") is not None:
        ids = options.pop("segment_ids")
        more |= {"segment_ids": jnp.where(ids < 0, 0, ids + 1), "max_num_segments": slots}
    out, final = function(
        head_first(arrays["q"]),
        head_first(arrays["k"]),
        head_first(arrays["v"]),
        gate,
        head_first(arrays["erase"])[..., 0],
        output_final_state=True,
        **more,
        **options,
    )
    return jnp.moveaxis(out, 0, 2), final if slots is not None else final[:, 0]


# ---- running them ----------------------------------------------------------------------------------------------------


def _adapt(function, capabilities, framework, name, translate, step) -> Implementation:
    if framework not in ("jax", "numpy", "torch"):
        raise ValueError(f"`framework={framework!r}` must be 'jax', 'numpy' or 'torch'.")
    name = name or _name(function)

    def call(q, k, v, gates, **options):
        arrays = {"q": q, "k": k, "v": v, **_gate_arrays(gates)}
        if options.get("initial_state") is not None:
            arrays["initial_state"] = options["initial_state"]
        options = {name: x for name, x in options.items() if x is not None and name != "initial_state"}
        try:
            result = translate(function, arrays, {**options, **({"tied": True} if gates.is_tied else {})})
        except jax.errors.TracerArrayConversionError as error:
            raise TypeError(
                f'{name} needs NumPy arrays, but JAX traces it: say `plain({name}, framework="numpy")`.'
            ) from error
        out, final = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not hasattr(out, "shape"):
            raise TypeError(f"{name} returned {type(out).__name__}, but `out` or `(out, final_state)` is expected.")
        if final is None and capabilities.final_state:
            raise TypeError(
                f"{name} returned no final state: return `(out, final_state)`, or offer none, "
                f"`capabilities=Capabilities.from_signature({name}, final_state=False)`."
            )
        return out, final

    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    more: dict[str, Any] = {
        "step": step,
        "imports": import_of(function, name),
        "words": {"d_erase": "d_beta"} if "beta" in parameters else {},
        "note": keywords_note(name, capabilities) if takes_any and translate is _call_plainly else "",
    }
    if framework == "jax":
        run = differentiated(call) if capabilities.gradients else forward_only(call)
        return Implementation(name, capabilities, run, call, **more)
    run = _in_torch(call) if framework == "torch" else _in_numpy(call)
    return Implementation(name, capabilities, run, **more)


def _name(function: Any) -> str:
    """What a line of Python may call it."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return name.rpartition("<locals>.")[2].replace("<lambda>", "function")


def _gate_arrays(gates) -> dict[str, Any]:
    arrays = {name: getattr(gates, name) for name in GATES}
    return {name: x if x.ndim == 4 else x[..., None] for name, x in arrays.items() if x is not None}


def _in_numpy(call):
    def run(arguments, cotangents):
        del cotangents
        plain = {name: np.array(x) if hasattr(x, "shape") else x for name, x in arguments.items() if name != "gates"}
        gates = arguments["gates"]
        given = {name: None if getattr(gates, name) is None else np.array(getattr(gates, name)) for name in GATES}
        out, final = call(**plain, gates=_ForeignGates(**given, is_tied=gates.is_tied))
        return in_numpy(named(out, final))

    return run


def _in_torch(call):
    def run(arguments, cotangents):
        import torch  # pyright: ignore[reportMissingImports]

        traced, other, static = split(arguments)
        gates = traced.pop("gates")
        arrays = {name: _tensor(x).requires_grad_() for name, x in (traced | _gate_arrays(gates)).items()}
        state = {name: arrays[name] for name in ("initial_state",) if name in arrays}
        stand_in = _ForeignGates(**{name: arrays.get(name) for name in GATES}, is_tied=gates.is_tied)
        out, final = call(
            *(arrays[name] for name in "qkv"),
            gates=stand_in,
            **state,
            **{name: _tensor(x) for name, x in other.items()},
            **dict(static),
        )
        check_results(out, final, cotangents)
        loss = (out * _tensor(cotangents[0])).sum()
        if final is not None:
            loss = loss + (final * _tensor(cotangents[1])).sum()
        loss.backward()

        def array(x):
            x = x.detach()
            return x.float().numpy().astype(jnp.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()

        found = {"out": array(out), "final_state": None if final is None else array(final)}
        zeros = {name: torch.zeros_like(x) for name, x in arrays.items()}
        return found | {f"d_{name}": array(zeros[name] if x.grad is None else x.grad) for name, x in arrays.items()}

    return run


def _tensor(x):
    import torch  # pyright: ignore[reportMissingImports]

    x = np.array(x)
    if x.dtype == jnp.bfloat16:
        return torch.from_numpy(x.astype(np.float32)).to(torch.bfloat16)
    return torch.from_numpy(x)


@dataclasses.dataclass(frozen=True)
class _ForeignGates:
    """`Gates` whose arrays JAX does not know."""

    log_decay: Any
    erase: Any
    write: Any
    is_tied: bool
