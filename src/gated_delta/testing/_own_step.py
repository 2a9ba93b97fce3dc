"""Somebody's own one-token update: the gates that express it as a member of the family, or where it departs."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._random import RandomGates, RandomProblem, enough_bits

_EXACT = 1e-8  # relative, in float64: what is less is rounding


class Token(NamedTuple):
    """One token of one head, as an own step gets it.

    `q`, `k`: `[key_dim]`. `v`: `[value_dim]`. `log_decay`, `erase`, `write`: `[1 | groups]`, or `None` where the gates
    that are drawn have none; a tied beta is `erase`.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    erase: Any
    write: Any


Step = Callable[[Any, Token], tuple[Any, Any]]


class FoundGates(NamedTuple):
    """What one token of the family does: `[key_dim]`, `[key_dim]`, `[value_dim]`, and the scale of the query."""

    log_decay: np.ndarray
    erase: np.ndarray
    write: np.ndarray
    scale: float


class Departure(AssertionError):
    """An own step that no gates express; the message says in what."""


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step to check: see `check_variant`."""

    name: str
    step: Step
    gates: RandomGates
    chunked: Callable[[Any, Token], tuple[Any, Any]] | None = None
    initial_state: Callable[[], Any] | None = None
    key_dim: int = 6
    value_dim: int = 5
    imports: str = ""
    how: str = "{name}"

    @staticmethod
    def refusal(problem: RandomProblem) -> None:
        return None

    def problem(self, time: int, seed: int, dtype: str, log_decays: str = "mild") -> RandomProblem:
        gates = dataclasses.replace(self.gates, log_decays=log_decays)
        return RandomProblem(
            seed, time=time, key_dim=self.key_dim, value_dim=self.value_dim, gates=gates, state=True, dtype=dtype
        )

    def begin(self, problem: RandomProblem) -> Any:
        """A state to begin with: random, or what the user's `initial_state` makes."""
        if self.initial_state is not None:
            return self.initial_state()
        return jnp.asarray(problem.arguments()["initial_state"][0, 0])


def tokens_of(problem: RandomProblem) -> Token:
    """The tokens of a problem with one row and one head, time first."""
    arguments = problem.arguments()
    gates = arguments["gates"]
    arrays = [arguments["q"], arguments["k"], arguments["v"], gates.log_decay, gates.erase, gates.write]
    with enough_bits(problem.dtype):
        return Token(*(None if x is None else jnp.asarray(np.asarray(x)[0, :, 0]) for x in arrays))


def token_at(tokens: Token, t: int) -> Token:
    return jax.tree.map(lambda x: x[t], tokens)


def find_gates(step: Step, token: Token) -> FoundGates:
    """The decay, erase, write and scale with which `step` does to every state what the family does, in float64.

    **Raises:** `Departure` if there are none.
    """
    k, v, q = (np.asarray(x, np.float64) for x in (token.k, token.v, token.q))
    key_dim, value_dim = len(k), len(v)
    rng = np.random.default_rng(0)
    two = rng.standard_normal((2, key_dim, value_dim))
    basis = np.repeat(np.eye(key_dim)[:, :, None], value_dim, axis=2)
    probes = np.concatenate([np.zeros((1, key_dim, value_dim)), basis, two, two.sum(0, keepdims=True)])
    with enough_bits("float64"):
        after, outs = jax.vmap(step, in_axes=(0, None))(jnp.asarray(probes), token)
        after, outs = _as_state(after, probes.shape), np.asarray(outs)
    if outs.shape != (len(probes), value_dim):
        raise Departure(f"its output must be [value_dim] = ({value_dim},), but it is {outs.shape[1:]}")
    written, columns, (one, other, both) = after[0], after[1:-3] - after[0], after[-3:]
    if not _same(one + other, both + written):
        raise Departure("the new state is no affine function of the old: it is not decayed, erased and written to")
    transition = columns[:, :, 0].T
    if not _same(transition @ two + written, after[-3:-1]):
        raise Departure("value channels mix: one of them changes what happens to another")

    write = np.where(v == 0, 1.0, (k @ written) / np.where(v == 0, 1, v) / max(k @ k, 1e-300))
    if not _same(np.outer(k, write * v), written):
        raise Departure("what it writes is not along the key: the state from zeros is no multiple of k")
    others = k[:, None] * (1 - np.eye(key_dim))
    taken = -np.sum(others * transition, axis=0) / np.maximum(np.sum(others**2, axis=0), 1e-300)
    decay = np.diag(transition) + k * taken
    product = np.where(np.abs(k * decay) > 1e-300, k * decay, 1)
    erase = np.where(np.abs(k * decay) > 1e-300, taken / product, 0)
    if not _same(np.diag(decay) - np.outer(k, taken), transition):
        raise Departure("it changes the old state other than by a decay of key channels and an erase along the key")
    if decay.min() < -_EXACT or decay.max() > 1 + _EXACT:
        worst = decay[np.argmax(np.abs(decay - 0.5))]
        raise Departure(f"a key channel is multiplied by {worst:.4g}: a decay lies in [0, 1]")
    if erase.min() < -_EXACT or erase.max() > 2 + _EXACT:
        worst = erase[np.argmax(np.abs(erase - 1))]
        raise Departure(f"the erase is {worst:.4g}: it lies in [0, 2]")

    read = np.einsum("pkv,k->pv", after, q)
    scale = float(np.sum(read * outs) / max(np.sum(read**2), 1e-300))
    if not _same(scale * read, outs):
        raise Departure("its output is no multiple of the new state read by q (the read comes after the write)")
    with np.errstate(divide="ignore"):
        return FoundGates(np.log(np.clip(decay, 0, 1)), np.clip(erase, 0, 2), write, scale)


def describe_gates(found: list[FoundGates]) -> str:
    """What the gates of several tokens have in common, in the words of `Variant`."""
    decay, erase, write = (np.stack([getattr(x, name) for x in found]) for name in ("log_decay", "erase", "write"))
    scale = np.mean([x.scale for x in found])

    def fine(x, absent, none):
        if np.allclose(x, absent, atol=_EXACT):
            return none
        for groups in range(1, x.shape[1]):
            if x.shape[1] % groups == 0 and _same(np.repeat(x[:, :: x.shape[1] // groups], x.shape[1] // groups, 1), x):
                return "head" if groups == 1 else f"tile ({groups})"
        return "channel"

    words = [fine(decay, 0, "none"), fine(erase, 0, "none"), fine(write, 1, "one")]
    tied = words[1] == words[2] == "head" and _same(erase[:, :1], write[:, :1])
    said = f"decay={words[0]!r}, erase={words[1]!r}, write={words[2]!r}, tied={tied}, scale={scale:.6g}"
    return f"in the family: {said}"


def _as_state(after: Any, shape: tuple[int, ...]) -> np.ndarray:
    if not hasattr(after, "shape"):
        raise Departure(
            f"its state is a {type(after).__name__} and not one array [key_dim, value_dim]: more than that is carried"
        )
    if after.shape != shape:
        raise Departure(f"its state must stay [key_dim, value_dim] = {shape[1:]}, but it becomes {after.shape[1:]}")
    return np.asarray(after)


def _same(actual: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(actual - wanted).max(initial=0) <= _EXACT * max(1.0, np.abs(wanted).max(initial=0)))
