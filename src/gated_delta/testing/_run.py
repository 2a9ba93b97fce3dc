"""Calling something with the arguments of `gated_delta`: compiled once for all calls of the same shapes."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._random import enough_bits

Results = dict[str, np.ndarray]
"""Arrays by name: `out`, `final_state`, and `d_x` for the gradient of each argument x that was given."""

GATES = ("log_decay", "erase", "write")
_TRACED = ("q", "k", "v", "gates", "initial_state")


def quick_jit(function):
    """`jax.jit` with little optimisation on a CPU, so that small test problems compile 3 to 8 times faster."""
    options = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}
    return jax.jit(function, compiler_options=options if jax.default_backend() == "cpu" else None)


def bits_for(arguments: Mapping[str, Any]):
    """JAX's 64-bit mode if any array among the arguments is float64."""
    return enough_bits(*(x.dtype for x in jax.tree.leaves(dict(arguments)) if hasattr(x, "dtype")))


def split(arguments: Mapping[str, Any]):
    """What is differentiated, other arrays, and what is static."""
    traced = {name: arguments[name] for name in _TRACED if arguments.get(name) is not None}
    rest = {name: x for name, x in arguments.items() if name not in traced}
    other = {name: x for name, x in rest.items() if hasattr(x, "shape")}
    return traced, other, tuple((name, x) for name, x in rest.items() if name not in other)


def differentiated(call: Callable[..., tuple[Any, Any]]) -> Callable[..., Results]:
    """`run(arguments, cotangents)` with everything that `call(**arguments)` gives and the gradient of every array.

    A state of `None` is left out.
    """

    @functools.cache
    def compiled(static):
        def run(traced, other, cotangents):
            (out, final), pull = jax.vjp(lambda traced: call(**traced, **other, **dict(static)), traced)
            check_results(out, final, cotangents)
            (gradients,) = pull((cotangents[0], None if final is None else cotangents[1]))
            return named(out, final) | named_gradients(gradients)

        return quick_jit(run)

    def run(arguments, cotangents):
        traced, other, static = split(arguments)
        with bits_for(arguments):
            return in_numpy(compiled(static)(jax.tree.map(jnp.asarray, traced), other, cotangents))

    return run


def forward_only(call: Callable[..., tuple[Any, Any]]) -> Callable[..., Results]:
    """The same without gradients; the cotangents are ignored."""

    @functools.cache
    def compiled(static):
        return quick_jit(lambda traced, other: named(*call(**traced, **other, **dict(static))))

    def run(arguments, cotangents):
        del cotangents
        traced, other, static = split(arguments)
        with bits_for(arguments):
            return in_numpy(compiled(static)(jax.tree.map(jnp.asarray, traced), other))

    return run


def check_results(out: Any, final: Any, cotangents: tuple[Any, Any]):
    """Results have the shapes and dtypes of their cotangents, or nothing can be differentiated."""
    for name, x, cotangent, of in (("out", out, cotangents[0], "v"), ("final_state", final, cotangents[1], "states")):
        if x is None:
            continue
        if tuple(x.shape) != tuple(cotangent.shape):
            raise AssertionError(f"`{name}` has shape {tuple(x.shape)}, but must have {tuple(cotangent.shape)}.")
        dtype, promised = str(x.dtype).removeprefix("torch."), str(cotangent.dtype)
        if dtype != promised:
            offer = f"cast it, or offer `Capabilities(dtypes=({dtype!r},))`."
            if name == "final_state":
                offer = "states are float64 where q, k and v are, and float32 beside all others. Cast it."
            raise AssertionError(f"`{name}` is {dtype}, but must have the dtype of {of}, {promised}: {offer}")


def named(out, final) -> dict[str, Any]:
    return {"out": out} | ({} if final is None else {"final_state": final})


def named_gradients(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """`d_x` of every array x, those inside `gates` too."""
    gates = gradients["gates"]
    found = {name: x for name, x in gradients.items() if name != "gates"}
    found |= {name: getattr(gates, name) for name in GATES}
    return {f"d_{name}": x for name, x in found.items() if x is not None}


def in_numpy(found: Mapping[str, Any]) -> Results:
    return {name: np.asarray(x) for name, x in found.items()}
