"""Train every variant on associative recall, with its erase gate and without, and show what the erase is for.

    python examples/recall.py                      # all of them, about 2 minutes on 2 cores
    python examples/recall.py --layers gdn,kda     # some of them

A sequence writes pairs of a key and a value, and then asks for the last value of every key. Half of the keys are
*settled*: written once, at the beginning, they have to survive all that follows. The others are *busy*: written six
times each in random order, and only the last value counts. There are twice as many keys as key channels, so that no
layer can give each key a channel of its own. A layer that erases overwrites a busy key and leaves the settled ones
alone. One that only decays has to choose: what fades the old values of busy keys fades the settled keys too.

Every layer of the delta rule must answer 95 % of the questions, and the same layer with `erase="none"` less than 70 %;
else the program exits with 1. GLA has no erase to switch off: it is shown beside them, and held to nothing. The bounds
are for the default seed and steps: how long a layer guesses before it finds out that a value belongs to the key before
it varies with the seed, and 500 steps are not enough for every one.
The file reads from top to bottom: task, model, training, report. `--out` (default runs/recall) gets recall.png.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from gated_delta import GDN, GDN2, GLA, KDA, Chunked, DeltaNet, GatedDeltaMixer, MixerConfig, SystolicLinearAttention

KEYS, VALUES = 32, 16  # the vocabulary: keys come first, values after them
ASKED = 8  # keys of a sequence, the first half of them settled, the second half busy
WRITES = 6  # of every busy key
KEY_DIM = 16
LEARNT, LOST = 0.95, 0.70  # what a layer must reach with an erase, and stay below without


# ---------------------------------------------------------------------------------------------------------------- task


def draw(key) -> tuple[jax.Array, jax.Array]:
    """One sequence: key, value, key, value, ... and then the keys that are asked, in order; and the answers."""
    names_key, order_key, values_key = jax.random.split(key, 3)
    half = ASKED // 2
    busy = jax.random.permutation(order_key, jnp.tile(jnp.arange(half, ASKED), WRITES))
    writes = jnp.concatenate([jnp.arange(half), busy])
    values = jax.random.randint(values_key, writes.shape, 0, VALUES)
    last = jnp.zeros(ASKED, int).at[writes].max(jnp.arange(len(writes)))
    names = jax.random.permutation(names_key, KEYS)[:ASKED]
    pairs = jnp.stack([names[writes], KEYS + values], axis=1)
    return jnp.concatenate([pairs.reshape(-1), names]), values[last]


@functools.partial(jax.jit, static_argnums=1)
def draw_batches(keys, batch: int) -> tuple[jax.Array, jax.Array]:
    """One batch for every key: `[steps, batch, time]` and `[steps, batch, asked]`. Compiled once for all layers."""
    return jax.vmap(lambda key: jax.vmap(draw)(jax.random.split(key, batch)))(keys)


# --------------------------------------------------------------------------------------------------------------- model


def layers(width: int = 32) -> dict[str, MixerConfig]:
    """Every member of the family with a state of 256 numbers, and with no output gate: nothing here but a memory.

    Decays begin slow, so that a new layer forgets within a sequence or so; GLA has the convolutions of the others,
    without which a value would never meet its key.
    """
    size: dict[str, Any] = dict(key_heads=1, key_dim=KEY_DIM, value_dim=KEY_DIM, output_gate=None)
    slow: dict[str, Any] = dict(decay_rates=(0.1, 1.0), init="uniform")
    makers: dict[str, Callable[..., GatedDeltaMixer]] = {
        "DeltaNet": lambda key: DeltaNet(width, **size, key=key),
        "GDN": lambda key: GDN(width, **size, **slow, key=key),
        "KDA": lambda key: KDA(width, **size, **slow, key=key),
        "GDN2": lambda key: GDN2(width, **size, **slow, key=key),
        "SLA": lambda key: SystolicLinearAttention(
            width, group=2, **{**size, "value_dim": KEY_DIM // 2}, **slow, key=key
        ),
        "GLA": lambda key: GLA(width, **size, conv_width=4, key=key),
    }
    return {name: eqx.filter_eval_shape(make, jax.random.key(0)).config for name, make in makers.items()}


def without_erase(config: MixerConfig) -> MixerConfig:
    return dataclasses.replace(config, variant=dataclasses.replace(config.variant, erase="none", tied=False))


class Reader(eqx.Module):
    """Tokens to logits of a value: one mixer, nothing else that could remember."""

    embedding: jax.Array
    mixer: GatedDeltaMixer
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, config: MixerConfig, key):
        embedding_key, mixer_key, head_key = jax.random.split(key, 3)
        self.embedding = jax.random.normal(embedding_key, (KEYS + VALUES, config.model))
        self.mixer = GatedDeltaMixer(config, backend=Chunked(16), key=mixer_key)  # compiles and runs fastest on a CPU
        self.norm = eqx.nn.RMSNorm(config.model, use_bias=False)
        self.head = eqx.nn.Linear(config.model, VALUES, key=head_key)

    def __call__(self, tokens):  # [batch, time] -> [batch, asked, values]
        out, _ = self.mixer(self.embedding[tokens])
        return jax.vmap(jax.vmap(lambda x: self.head(self.norm(x))))(out[:, -ASKED:])


# ------------------------------------------------------------------------------------------------------------ training


def train(
    config: MixerConfig, *, steps: int = 500, batch: int = 32, seed: int = 0, told: Callable[[int], None] | None = None
) -> np.ndarray:
    """Accuracy of every step on the questions of settled and of busy keys: `[steps, 2]`.

    Every sequence is drawn anew and seen once, before the step that learns from it: so this is what the model can do
    with sequences that it has not seen. `told(steps done)` is called now and then.
    """
    model = Reader(config, jax.random.key(seed))
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 20, steps)
    optimizer = optax.adam(rate)

    def loss(parameters, tokens, answers):
        logits = eqx.combine(parameters, static)(tokens)
        right = logits.argmax(-1) == answers
        return optax.softmax_cross_entropy_with_integer_labels(logits, answers).mean(), right

    def step(carry, questions):
        parameters, state = carry
        tokens, answers = questions
        gradients, right = jax.grad(loss, has_aux=True)(parameters, tokens, answers)
        updates, state = optimizer.update(gradients, state, parameters)
        accuracy = right.reshape(batch, 2, ASKED // 2).mean((0, 2))
        return (optax.apply_updates(parameters, updates), state), accuracy

    @jax.jit
    def run(carry, questions):
        return jax.lax.scan(step, carry, questions)

    carry, curve = (parameters, optimizer.init(parameters)), []
    for keys in jnp.split(jax.random.split(jax.random.key(seed + 1), steps), max(1, steps // 50)):
        carry, accuracy = run(carry, draw_batches(keys, batch))
        curve.append(np.asarray(accuracy))
        if told is not None:
            told(sum(map(len, curve)))
    return np.concatenate(curve)


def score(curve: np.ndarray) -> np.ndarray:
    """Accuracy on settled and busy keys after training: the last tenth, where the learning rate is nearly 0."""
    return curve[-max(1, len(curve) // 10) :].mean(0)


def train_all(configs: dict[tuple[str, bool], MixerConfig], steps: int, seed: int, console: Console):
    """Curves of all, on two threads: one compiles while the other one trains."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress, concurrent.futures.ThreadPoolExecutor(2) as pool:
        width = max(len(describe(*name)) for name in configs)
        tasks = {name: progress.add_task(describe(*name).ljust(width), total=steps, start=False) for name in configs}

        def one(name):
            progress.start_task(tasks[name])
            return train(
                configs[name], steps=steps, seed=seed, told=lambda done: progress.update(tasks[name], completed=done)
            )

        return dict(zip(configs, pool.map(one, configs)))


# -------------------------------------------------------------------------------------------------------------- report


def describe(layer: str, erases: bool) -> str:
    return layer if erases or layer == "GLA" else f"{layer}, no erase"


def report(curves: dict[tuple[str, bool], np.ndarray], console: Console) -> bool:
    """Print the table; whether every layer is where it must be."""
    table = Table(title=f"Answers that are right, of {VALUES} possible ones")
    for column in ("layer", "settled keys", "busy keys", "all", "must be", ""):
        table.add_column(column, justify="left" if column == "layer" else "right")
    verdicts = []
    for (layer, erases), curve in curves.items():
        settled, busy = score(curve)
        accuracy = (settled + busy) / 2
        if erases:
            bound, verdict = f"at least {LEARNT:.2f}", bool(accuracy >= LEARNT)
        elif (layer, True) in curves:
            bound, verdict = f"below {LOST:.2f}", bool(accuracy < LOST)
        else:
            bound, verdict = "", None
        verdicts.append(verdict)
        row = describe(layer, erases), f"{settled:.3f}", f"{busy:.3f}", f"{accuracy:.3f}", bound
        table.add_row(*row, {True: "yes", False: "NO", None: ""}[verdict], style="bold red" if verdict is False else "")
    console.print(table)
    return False not in verdicts


def draw_curves(path: pathlib.Path, curves: dict[tuple[str, bool], np.ndarray]) -> None:
    names = list(dict.fromkeys(layer for layer, _ in curves))
    rows = -(-len(names) // 3)
    figure = Figure(figsize=(11, 0.8 + 3 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, min(3, len(names)), sharex=True, sharey=True)).ravel()
    for panel in panels[len(names) :]:
        panel.set_visible(False)
    styles = {True: ("tab:blue", "with erase"), False: ("tab:red", "without erase")}
    for panel, name in zip(panels, names):
        for (layer, erases), curve in curves.items():
            if layer == name:
                color, label = styles[erases]
                mean = np.convolve(curve.mean(1), np.ones(10) / 10, "valid") if len(curve) >= 10 else curve.mean(1)
                panel.plot(np.arange(len(mean)) + len(curve) - len(mean) + 1, mean, color=color, label=label)
        panel.axhline(LEARNT, color="tab:blue", linestyle=":", linewidth=1)
        panel.axhline(LOST, color="tab:red", linestyle=":", linewidth=1)
        panel.axhline(1 / VALUES, color="gray", linestyle=":", linewidth=1)
        panel.set(title=name, ylim=(0, 1.02))
        panel.grid(alpha=0.3)
    panels[0].legend(loc="lower right")
    figure.supxlabel("step (mean of ten)")
    figure.supylabel("accuracy")
    figure.suptitle(f"Recall of {ASKED // 2} settled and {ASKED // 2} busy keys. Dotted: the two bounds, and guessing")
    figure.savefig(path, dpi=150)


# ---------------------------------------------------------------------------------------------------------------- main


def parse(arguments: list[str] | None) -> argparse.Namespace:
    known = list(layers())
    parser = argparse.ArgumentParser(prog="recall", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--layers", default=",".join(known), help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", default=pathlib.Path("runs/recall"))
    options = parser.parse_args(arguments)
    spelt = {name.lower(): name for name in known}
    asked: list[str] = options.layers.split(",")
    options.layers = [spelt.get(name.strip().lower(), name) for name in asked]
    if unknown := [name for name in options.layers if name not in known]:
        parser.error(f"--layers does not know {', '.join(unknown)}: use some of {', '.join(known)}")
    if options.steps < 50 or options.steps % 50:
        parser.error(f"--steps is {options.steps}; it must be a multiple of 50")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(highlight=False)
    start = time.monotonic()
    configs = {}
    for name, config in layers().items():
        if name in options.layers:
            erases = config.variant.erase != "none"
            if erases:
                configs[name, True] = config
            configs[name, False] = without_erase(config)
    curves = train_all(configs, options.steps, options.seed, console)
    good = report(curves, console)
    options.out.mkdir(parents=True, exist_ok=True)
    draw_curves(options.out / "recall.png", curves)
    took = time.monotonic() - start
    console.print(f"{took:.0f} s on {os.cpu_count()} cores; written to {options.out / 'recall.png'}", soft_wrap=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
