"""Train a small byte-level language model on real text: in three blocks of four a mixer of the gated-delta family, in
the fourth softmax attention.

    python examples/language_model.py              # gdn on Python's own help topics, about 4 minutes on 2 cores
    python examples/language_model.py --mixer kda --text book.txt
    python examples/language_model.py --resume     # go on after Ctrl-C, on the same curve bit for bit

The model is plain Equinox, the training loop plain Optax. The file reads from top to bottom: settings, model, text,
training step, checkpoints, training loop, report. Everything a run writes lies in `--out` (default runs/<mixer>):
two checkpoints, curve.json, curve.png and sample.txt.
"""

import argparse
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
import signal
import sys
import time
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gated_delta import (
    GDN,
    GDN2,
    KDA,
    AttentionConfig,
    HybridConfig,
    HybridStack,
    SystolicLinearAttention,
    weight_decay_mask,
)

BITS = 1 / math.log(2)  # one nat in bits
BYTES = 256  # the vocabulary
STEP_TOLERANCE = 1e-4  # between the logits of the parallel and the step-by-step run; beyond it we exit with 1


# ------------------------------------------------------------------------------------------------------------ settings


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the curve. A checkpoint holds a copy, and resumes under equal settings only."""

    mixer: str
    width: int
    blocks: int
    length: int  # bytes per window, and how far back attention sees
    batch: int
    steps: int
    learning_rate: float
    seed: int
    text: str  # SHA-256


class Stop(Exception):
    """Ends the program with one line on stderr and an exit code."""

    def __init__(self, message: str, code: int = 1):
        super().__init__(message)
        self.code = code


# --------------------------------------------------------------------------------------------------------------- model


def make_mixer(name: str, width: int, key):
    if name == "sla":  # one wide key head for every four value heads
        heads = max(1, width // 128)
        return SystolicLinearAttention(width, group=4, key_heads=heads, key_dim=64, value_dim=32, key=key)
    constructor = {"gdn": GDN, "kda": KDA, "gdn2": GDN2}[name]
    return constructor(width, key_heads=width // 32, key_dim=32, value_dim=32, key=key)


def make_stack(settings: Settings, key) -> HybridStack:
    """Softmax attention, to the last `length` bytes, in every fourth block. It has no position encoding, because the
    recurrent blocks under it know the order."""
    width, blocks = settings.width, settings.blocks
    pattern, repeats = ("dddA", blocks // 4) if blocks % 4 == 0 else (("dddA" * blocks)[:blocks], 1)
    attention = AttentionConfig(width, query_heads=width // 32, window=settings.length)
    config = HybridConfig(
        pattern,
        hidden=2 * width,
        repeats=repeats,
        delta=make_mixer(settings.mixer, width, key).config,
        attention=attention if "A" in pattern else None,
    )
    return HybridStack(config, key=key)


class LanguageModel(eqx.Module):
    """Bytes to logits of the next byte: `model(bytes)` for a whole window, `model.step(byte, state)` one at a time."""

    embedding: eqx.nn.Embedding
    stack: HybridStack
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, settings: Settings, *, key):
        embedding_key, stack_key, head_key = jax.random.split(key, 3)
        self.embedding = eqx.nn.Embedding(BYTES, settings.width, key=embedding_key)
        self.stack = make_stack(settings, stack_key)
        self.norm = eqx.nn.RMSNorm(settings.width, use_bias=False)
        self.head = eqx.nn.Linear(settings.width, BYTES, use_bias=False, key=head_key)

    def __call__(self, tokens):  # [time] -> [time, 256]
        x, _ = self.stack(jax.vmap(self.embedding)(tokens))
        return jax.vmap(self.predict)(x)

    def predict(self, x):  # [width] -> [256]
        return self.head(self.norm(x))

    def init_state(self):
        return self.stack.init_state()

    def step(self, token, state):  # [] -> [256]
        x, state = self.stack.step(self.embedding(token), state)
        return self.predict(x), state


# ---------------------------------------------------------------------------------------------------------------- text


def read_text(path: pathlib.Path | None) -> bytes:
    """The file's bytes, or Python's help topics, which differ a little between Python versions (hence the hash)."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics)).encode()


def training_batch(training: np.ndarray, settings: Settings, step: int) -> np.ndarray:
    """Random windows, [batch, length + 1]: a function of seed and step alone, so a resumed run sees the same ones."""
    rng = np.random.default_rng((settings.seed, step))
    starts = rng.integers(len(training) - settings.length, size=settings.batch)
    return training[starts[:, None] + np.arange(settings.length + 1)].astype(np.int32)


def validation_windows(training: np.ndarray, validation: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows [windows, length + 1], and which of their predictions count, [windows, length].

    Windows overlap by half. Every validation byte counts once, predicted from more than length / 2 and at most `length`
    bytes before it; before the first validation byte these are the last of the training part.
    """
    context = length // 2
    stride = length - context
    windows = -(-len(validation) // stride)
    text = np.concatenate([training[-context - 1 :], validation, np.zeros(stride, np.uint8)]).astype(np.int32)
    index = stride * np.arange(windows)[:, None] + np.arange(length + 1)
    counts = (np.arange(length) >= context) & (index[:, 1:] <= context + len(validation))
    return text[index], counts


def zlib_bits(text: bytes, dictionary: bytes = b"") -> float:
    """Bits per byte of zlib at level 9, which may have read the last 32 KiB of `dictionary` before."""
    compressor = zlib.compressobj(9, zdict=dictionary[-32768:])
    return 8 * len(compressor.compress(text) + compressor.flush()) / len(text)


def bigram_bits(training: np.ndarray, validation: np.ndarray) -> float:
    """Bits per byte of p(byte | byte before), counted on the training part, 0.1 added to every count."""
    counts = np.full((BYTES, BYTES), 0.1)
    np.add.at(counts, (training[:-1], training[1:]), 1)
    before = np.concatenate([training[-1:], validation[:-1]])
    return float(-np.log2((counts / counts.sum(1, keepdims=True))[before, validation]).mean())


# ------------------------------------------------------------------------------------------------------- training step


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
    rate = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=settings.learning_rate,
        warmup_steps=min(50, settings.steps // 4),
        decay_steps=settings.steps,
        end_value=0.05 * settings.learning_rate,
    )
    adamw = optax.adamw(rate, b2=0.95, weight_decay=0.1, mask=weight_decay_mask)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


def nats(model: LanguageModel, windows):
    """Cross-entropy of every next byte: [batch, length + 1] -> [batch, length]."""
    logits = jax.vmap(model)(windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])


@eqx.filter_jit
def train_step(model: LanguageModel, optimizer_state, windows, optimizer: optax.GradientTransformation):
    loss, gradients = eqx.filter_value_and_grad(lambda model: nats(model, windows).mean())(model)
    updates, optimizer_state = optimizer.update(gradients, optimizer_state, eqx.filter(model, eqx.is_inexact_array))
    healthy = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(updates))
    return eqx.apply_updates(model, updates), optimizer_state, loss, healthy


@eqx.filter_jit
def count_nats(model: LanguageModel, windows, counts):
    return jnp.sum(nats(model, windows), where=counts)


def evaluate(model: LanguageModel, windows: np.ndarray, counts: np.ndarray, batch: int = 8) -> float:
    """Bits per byte over the counted predictions."""
    spare = -len(windows) % batch
    windows = np.pad(windows, ((0, spare), (0, 0)))
    counts = np.pad(counts, ((0, spare), (0, 0)))
    total = sum(
        float(count_nats(model, windows[start : start + batch], counts[start : start + batch]))
        for start in range(0, len(windows), batch)
    )
    return BITS * total / int(counts.sum())


# --------------------------------------------------------------------------------------------------------- checkpoints


def write_atomically(path: pathlib.Path, content: bytes) -> None:
    """After a crash at any moment `path` holds either what it held before or all of `content`."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(folder.glob("step-*.checkpoint"))


def save(folder: pathlib.Path, settings: Settings, step: int, model, optimizer_state, curve: dict) -> None:
    """SHA-256 of the rest, newline, one line of JSON, the arrays. The last two are kept."""
    leaves = io.BytesIO()
    eqx.tree_serialise_leaves(leaves, (model, optimizer_state))
    header = json.dumps({"settings": dataclasses.asdict(settings), "step": step, "curve": curve})
    body = header.encode() + b"\n" + leaves.getvalue()
    path = folder / f"step-{step:08d}.checkpoint"
    older = [other for other in checkpoints(folder) if other != path]
    write_atomically(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    for other in older[:-1]:
        other.unlink()


def load_newest(folder: pathlib.Path, settings: Settings, model, optimizer_state, console: Console):
    """Step, model, optimizer state and curve of the newest whole checkpoint; damaged ones are named and passed over."""
    for path in reversed(checkpoints(folder)):
        digest, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != digest:
            console.print(
                f"{path} is damaged (its content does not match its SHA-256): passing it over", soft_wrap=True
            )
            continue
        header, _, leaves = body.partition(b"\n")
        header, mine = json.loads(header), dataclasses.asdict(settings)
        theirs = header["settings"]
        if differing := [name for name in mine if mine[name] != theirs.get(name)]:
            differences = "; ".join(f"{name} {theirs.get(name)} there, {mine[name]} here" for name in differing)
            raise Stop(f"{path} belongs to a run with other settings: {differences}", 2)
        model, optimizer_state = eqx.tree_deserialise_leaves(io.BytesIO(leaves), (model, optimizer_state))
        return header["step"], model, optimizer_state, header["curve"]
    raise Stop(f"nothing to resume: there is no whole checkpoint in {folder}", 2)


# ------------------------------------------------------------------------------------------------------- training loop


class Interrupt:
    """Within it, Ctrl-C only sets `asked`, so that the step at hand can end; a second Ctrl-C acts as usual."""

    def __enter__(self):
        self.asked = False
        self.usual = signal.signal(signal.SIGINT, self._ask)
        return self

    def _ask(self, number, frame):
        self.asked = True
        signal.signal(signal.SIGINT, self.usual)

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self.usual)


def train(settings: Settings, folder: pathlib.Path, resume: bool, training, validation, console: Console):
    """Returns the trained model and its curve: bits per byte of every step, and (step, bits per byte) of validation."""
    model = LanguageModel(settings, key=jax.random.key(settings.seed))
    optimizer = make_optimizer(settings)
    optimizer_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    first, curve = 0, {"training": [], "validation": []}
    if resume:
        first, model, optimizer_state, curve = load_newest(folder, settings, model, optimizer_state, console)
        console.print(f"resuming after step {first}")
    else:
        for path in checkpoints(folder):
            path.unlink()
            console.print(f"a new run: removed {path}", soft_wrap=True)
    parameters = sum(leaf.size for leaf in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)))
    size = f"{settings.steps} steps of {settings.batch} x {settings.length} bytes"
    console.print(f"{settings.mixer}: {parameters / 1e6:.2f} M parameters, {size}")

    windows, counts = validation_windows(training, validation, settings.length)
    pause = max(1, settings.steps // 8)  # steps between validations, each with a checkpoint
    columns = (
        BarColumn(bar_width=10),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(),
    )
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    with progress, Interrupt() as interrupt:
        task = progress.add_task(settings.mixer, total=settings.steps, completed=first, status="compiling")
        seconds = 0.0  # in training steps after the first, which compiles
        for step in range(first + 1, settings.steps + 1):
            started = time.perf_counter()
            batch = training_batch(training, settings, step)
            model, optimizer_state, loss, healthy = train_step(model, optimizer_state, batch, optimizer)
            if not healthy:
                raise Stop(
                    f"step {step}: the loss is {float(loss)} or its update is not finite. Nothing of this step was "
                    f"saved; {folder} has the checkpoints before it. A lower --learning-rate may help"
                )
            bits = BITS * float(loss)
            curve["training"].append(bits)
            status = f"loss {float(loss):.3f}  {bits:.3f} bits/byte"
            if step == first + 1:
                console.print(f"first step after {time.perf_counter() - started:.1f} s, most of them compilation")
            else:
                seconds += time.perf_counter() - started
                status += f"  {(step - first - 1) * settings.batch * settings.length / seconds:,.0f} tokens/s"
            progress.update(task, completed=step, status=status)
            if step % pause == 0 or step == settings.steps:
                validated = evaluate(model, windows, counts)
                curve["validation"].append((step, validated))
                console.print(f"step {step:5d}  {status}  validation {validated:.3f}", soft_wrap=True)
                save(folder, settings, step, model, optimizer_state, curve)
            elif interrupt.asked:
                save(folder, settings, step, model, optimizer_state, curve)
            elif not console.is_terminal and step % max(1, pause // 4) == 0:
                console.print(f"step {step:5d}  {status}", soft_wrap=True)
            if interrupt.asked:
                raise Stop(f"interrupted: step {step} is saved in {folder}; go on with --resume", 130)
    return model, curve


# -------------------------------------------------------------------------------------------------------------- report


@eqx.filter_jit
def run_steps(model: LanguageModel, tokens, state):
    """The recurrent path over known bytes: [time] -> logits [time, 256], and the state after them."""

    def body(state, token):
        logits, state = model.step(token, state)
        return state, logits

    state, logits = jax.lax.scan(body, state, tokens)
    return logits, state


@eqx.filter_jit
def write_bytes(model: LanguageModel, logits, state, key, length: int, temperature: float):
    def body(carry, key):
        logits, state = carry
        token = jax.random.categorical(key, logits / temperature)
        return model.step(token, state), token

    _, tokens = jax.lax.scan(body, (logits, state), jax.random.split(key, length))
    return tokens


def readable(tokens) -> str:
    """As text, in which nothing can upset a terminal."""
    text = np.asarray(tokens).astype(np.uint8).tobytes().decode(errors="replace")
    return "".join(character if character.isprintable() or character in "\n\t" else "?" for character in text)


def draw_curve(path: pathlib.Path, settings: Settings, curve: dict, baselines: dict) -> None:
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    training = np.array(curve["training"])
    run = max(1, len(training) // 40)
    smooth = np.convolve(training, np.ones(run) / run, "valid")
    steps = np.arange(1, len(training) + 1)
    axes.plot(steps, training, color="tab:blue", alpha=0.2, linewidth=0.8)
    axes.plot(steps[run - 1 :], smooth, color="tab:blue", label=f"training, mean of the last {run} steps")
    axes.plot(*zip(*curve["validation"]), "o-", color="tab:orange", label="validation")
    for (name, bits), style in zip(baselines.items(), ("--", "-.", ":")):
        axes.axhline(bits, color="gray", linestyle=style, linewidth=1, label=f"{name}: {bits:.2f}")
    lowest = min(smooth.min(), min(bits for _, bits in curve["validation"]), min(baselines.values()))
    axes.set(
        xlabel=f"step, {settings.batch * settings.length} bytes each", ylabel="bits per byte", title=settings.mixer
    )
    axes.set(xlim=(0, settings.steps), ylim=(0.8 * lowest, max(4.5, 1.1 * baselines["bigram"])))
    axes.legend()
    axes.grid(alpha=0.3)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=150)
    write_atomically(path, content.getvalue())


def report(model, curve: dict, settings: Settings, folder: pathlib.Path, training, validation, console: Console) -> int:
    baselines = {
        "zlib -9": zlib_bits(validation.tobytes()),
        "zlib -9, primed": zlib_bits(validation.tobytes(), training.tobytes()),
        "bigram": bigram_bits(training, validation),
    }
    seen = {
        settings.mixer: f"{settings.length // 2 + 1} to {settings.length} bytes, and the training part",
        "zlib -9": "32 KiB, from the validation part",
        "zlib -9, primed": "32 KiB, from the training part too",
        "bigram": "1 byte, and the training part",
    }
    table = Table(title=f"The {len(validation)} validation bytes, each predicted or packed once")
    table.add_column("model")
    table.add_column("sees before a byte")
    table.add_column("bits per byte", justify="right")
    scores = {settings.mixer: curve["validation"][-1][1], **baselines}
    for name, bits in sorted(scores.items(), key=lambda item: item[1]):
        table.add_row(name, seen[name], f"{bits:.3f}", style="bold" if name == settings.mixer else None)
    console.print(table)

    write_atomically(folder / "curve.json", json.dumps(curve).encode())
    draw_curve(folder / "curve.png", settings, curve, baselines)

    prompt = validation[: settings.length // 2]
    logits, state = run_steps(model, jnp.asarray(prompt, jnp.int32), model.init_state())
    written = write_bytes(model, logits[-1], state, jax.random.key(settings.seed), 600, 0.7)
    sample = readable(written)
    write_atomically(folder / "sample.txt", sample.encode())
    console.rule(f"{len(prompt)} bytes of validation text, then {len(written)} bytes written by the model")
    console.print(Text().append(readable(prompt), "dim").append(sample))
    console.rule()

    window = jnp.asarray(validation[: 2 * settings.length], jnp.int32)  # twice as far as attention sees
    stepped, _ = run_steps(model, window, model.init_state())
    difference = float(jnp.max(jnp.abs(stepped - eqx.filter_jit(model)(window))))
    console.print(f"parallel against step by step over {len(window)} bytes: logits differ by at most {difference:.1e}")
    console.print(f"written to {folder}: curve.png, curve.json, sample.txt, checkpoints", soft_wrap=True)
    if not difference <= STEP_TOLERANCE:
        raise Stop(f"the parallel and the step-by-step run differ by {difference:.1e}, more than {STEP_TOLERANCE:.0e}")
    return 0


# ---------------------------------------------------------------------------------------------------------------- main


class Parser(argparse.ArgumentParser):
    def error(self, message):  # one line, where argparse would print the usage too
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="language_model", description="Train a small byte-level language model on real text.")
    parser.add_argument("--mixer", choices=("gdn", "kda", "gdn2", "sla"), default="gdn")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="default: Python's help topics")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: runs/<mixer>")
    parser.add_argument("--resume", action="store_true", help="go on from the newest whole checkpoint in DIR")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--blocks", type=int, default=4, help="every fourth one is softmax attention")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256, help="bytes per window")
    options = parser.parse_args(arguments)
    options.out = options.out or pathlib.Path("runs") / options.mixer
    for name in ("steps", "learning_rate", "width", "blocks", "batch", "length"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    if options.width % 32:
        parser.error(f"--width is {options.width}; it must be a multiple of 32, the width of a head")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; it must not be negative")
    return options


def run(options: argparse.Namespace, console: Console) -> int:
    try:
        text = read_text(options.text)
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Stop(str(error), 2) from error
    digest = hashlib.sha256(text).hexdigest()
    chosen = {name: value for name, value in vars(options).items() if name not in ("text", "out", "resume")}
    settings = Settings(text=digest, **chosen)
    training, validation = np.split(np.frombuffer(text, np.uint8), [len(text) * 9 // 10])
    if len(validation) < 2 * options.length:
        raise Stop(f"the text has {len(text)} bytes; --length {options.length} needs {20 * options.length}", 2)
    console.print(f"text: {options.text or 'Python help topics'}, {len(text)} bytes, SHA-256 {digest}", soft_wrap=True)
    console.print(f"      first {len(training)} for training, last {len(validation)} for validation")
    model, curve = train(settings, options.out, options.resume, training, validation, console)
    return report(model, curve, settings, options.out, training, validation, console)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        with jax.default_matmul_precision("highest"):  # on a GPU or TPU too, so that the report's 1e-4 means the same
            return run(options, Console(highlight=False, markup=False))
    except Stop as stop:
        message, code = stop, stop.code
    except OSError as error:  # a full disk, say
        message, code = error, 1
    except KeyboardInterrupt:
        message, code = "interrupted", 130
    print(f"language_model: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
