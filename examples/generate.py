"""Serve a queue of requests with the demo's language model: they arrive, share one pool of states, and finish.

    python examples/generate.py                # the model of `make demo`, or a small one trained for half a minute
    python examples/generate.py --slots 4 --requests 12

Every tick runs two programs, each compiled once: one reads the next piece of the prompts of up to `ROWS` requests, the
other writes a byte for every request whose prompt is read. Rows that nobody needs are padding: their slot is -1. A
request that ends frees its slot at once, and the next one begins there, whatever the slot still holds.

Afterwards every request is run once more alone, through the same programs, and once more by the model's own
step-by-step path over what was written. The first must give the same bytes and the same logits to the last bit, or to
float32 rounding; the second to rounding. If not, the exit code is 1.
"""

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import language_model as demo
import numpy as np
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gated_delta.serving import StatePool, pooled_step

ROWS = 4  # prompts read at once
PIECE = 32  # bytes of each
TEMPERATURE = 0.7
TOLERANCE = 1e-4  # between logits, as the demo's between its parallel and its step-by-step run
NOBODY = -1
SHOWN = 40  # the one tick whose table is printed where there is no terminal

# ------------------------------------------------------------------------------------------------- the model of a pool


def extend(model: demo.LanguageModel, tokens, state, mask):
    """The next bytes of several requests, [rows, piece]: the logits after the last of each, and the new state."""
    x, state = model.stack(jax.vmap(jax.vmap(model.embedding))(tokens), state, mask=mask)
    last = x[jnp.arange(len(x)), jnp.maximum(jnp.sum(mask, axis=1) - 1, 0)]
    return jax.vmap(model.predict)(last), state


def advance(model: demo.LanguageModel, tokens, pool: StatePool, slots):
    """One byte of several requests, [rows], whose states stay in their slots: the logits after it, and the pool."""
    x, states = pooled_step(model.stack, jax.vmap(model.embedding)(tokens), pool.states, slots)
    return jax.vmap(model.predict)(x), eqx.tree_at(lambda pool: pool.states, pool, states)


def choose(logits, seeds, written):
    """A byte for every row. It depends on the request's seed and on how much it has written, not on its company."""

    def one(logits, seed, written):
        key = jax.random.fold_in(jax.random.key(seed), written)
        return jax.random.categorical(key, logits / TEMPERATURE)

    return jax.vmap(one)(logits, seeds, written)


# ------------------------------------------------------------------------------------------------------------ requests


@dataclasses.dataclass
class Request:
    number: int
    arrives: int  # tick
    prompt: np.ndarray
    length: int  # bytes to write
    slot: int = NOBODY
    read: int = 0  # bytes of the prompt
    written: list[int] = dataclasses.field(default_factory=list)
    logits: list[np.ndarray] = dataclasses.field(default_factory=list)
    ends: int = 0  # tick

    def again(self) -> "Request":
        return Request(self.number, 0, self.prompt, self.length)


def make_requests(text: np.ndarray, count: int, seed: int) -> list[Request]:
    """Prompts from the text, of 1 to 150 bytes, that come about every third tick."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.poisson(3, count))
    requests = []
    for number, arrives in enumerate(arrivals):
        length = 1 if number % 6 == 5 else int(rng.integers(8, 150))
        start = int(rng.integers(len(text) - length))
        requests.append(Request(number, int(arrives), text[start : start + length], int(rng.integers(24, 97))))
    return requests


class Server:
    """A pool of states and the two programs that run on it. The pool is donated: its arrays are written in place."""

    def __init__(self, model: demo.LanguageModel, slots: int):
        self.arrays, static = eqx.partition(model, eqx.is_array)
        self.pool = StatePool(model.init_state(), slots)
        self.free = list(range(slots))
        self.running: list[Request] = []
        self.traces = 0

        def read(pool, arrays, slots, fresh, tokens, counts, seeds):
            self.traces += 1
            mask = jnp.arange(PIECE) < counts[:, None]
            logits, state = extend(eqx.combine(arrays, static), tokens, pool.gather(slots, fresh), mask)
            return choose(logits, seeds, jnp.zeros_like(seeds)), logits, pool.scatter(slots, state)

        def write(pool, arrays, slots, tokens, seeds, written):
            self.traces += 1
            logits, pool = advance(eqx.combine(arrays, static), tokens, pool, slots)
            return choose(logits, seeds, written), logits, pool

        self._read, self._write = jax.jit(read, donate_argnums=0), jax.jit(write, donate_argnums=0)
        self._read_piece([])  # compiles; rows of nobody touch nothing
        self._write_byte([])

    def admit(self, request: Request) -> None:
        request.slot = self.free.pop(0)
        self.running.append(request)

    def tick(self, now: int) -> int:
        """A piece for up to `ROWS` prompts and a byte for whoever writes; how many tokens went in."""
        reading = [r for r in self.running if r.read < len(r.prompt)][:ROWS]
        writing = [r for r in self.running if r.read == len(r.prompt)]
        tokens = (self._read_piece(reading) if reading else 0) + (self._write_byte(writing) if writing else 0)
        for request in [r for r in self.running if len(r.written) == r.length]:
            request.ends = now
            self.running.remove(request)
            self.free.append(request.slot)
        return tokens

    def _read_piece(self, requests: list[Request]) -> int:
        slots, counts, seeds = _rows(ROWS), _rows(ROWS, 0), _rows(ROWS, 0)
        fresh, tokens = np.zeros(ROWS, bool), np.zeros((ROWS, PIECE), np.int32)
        for row, request in enumerate(requests):
            piece = request.prompt[request.read : request.read + PIECE]
            slots[row], counts[row], seeds[row] = request.slot, len(piece), request.number
            fresh[row], tokens[row, : len(piece)] = request.read == 0, piece
        chosen, logits, self.pool = self._read(self.pool, self.arrays, slots, fresh, tokens, counts, seeds)
        chosen, logits = np.asarray(chosen), np.asarray(logits)
        for row, request in enumerate(requests):
            request.read += int(counts[row])
            if request.read == len(request.prompt):  # the last piece gives the first byte
                request.written.append(int(chosen[row]))
                request.logits.append(logits[row])
        return int(counts.sum())

    def _write_byte(self, requests: list[Request]) -> int:
        size = self.pool.slots
        slots, tokens, seeds, written = _rows(size), _rows(size, 0), _rows(size, 0), _rows(size, 0)
        for row, request in enumerate(requests):
            slots[row], tokens[row] = request.slot, request.written[-1]
            seeds[row], written[row] = request.number, len(request.written)
        chosen, logits, self.pool = self._write(self.pool, self.arrays, slots, tokens, seeds, written)
        chosen, logits = np.asarray(chosen), np.asarray(logits)
        for row, request in enumerate(requests):
            request.written.append(int(chosen[row]))
            request.logits.append(logits[row])
        return len(requests)


def _rows(count: int, value: int = NOBODY) -> np.ndarray:
    return np.full(count, value, np.int32)


def serve(server: Server, requests: list[Request], watch=lambda now, waiting, tokens: None) -> int:
    """Until all are done; how many tokens went through the model."""
    waiting, now, tokens = collections.deque(requests), 0, 0
    while waiting or server.running:
        while waiting and server.free and waiting[0].arrives <= now:
            server.admit(waiting.popleft())
        tokens += server.tick(now)
        watch(now, [r for r in waiting if r.arrives <= now], tokens)
        now += 1
    return tokens


# --------------------------------------------------------------------------------------------------------------- model


def load(folder: pathlib.Path, console: Console) -> demo.LanguageModel:
    """The model of the demo's newest checkpoint in the folder."""
    _, _, body = demo.checkpoints(folder)[-1].read_bytes().partition(b"\n")
    settings = demo.Settings(**json.loads(body.partition(b"\n")[0])["settings"])
    model = demo.LanguageModel(settings, key=jax.random.key(0))
    optimizer_state = demo.make_optimizer(settings).init(eqx.filter(model, eqx.is_inexact_array))
    if settings.length < PIECE:
        raise SystemExit(f"error: prompts are read in pieces of {PIECE}, but {folder} has --length {settings.length}")
    step, model, _, _ = demo.load_newest(folder, settings, model, optimizer_state, console)
    console.print(f"model: {settings.mixer} of {folder} after {step} steps", soft_wrap=True)
    return model


def train(folder: pathlib.Path, text: bytes, console: Console) -> None:
    """A small model, by the demo."""
    options = f"--steps 150 --width 64 --batch 4 --length 128 --learning-rate 8e-3 --out {folder}"
    console.print(f"no model of `make demo`: training a small one into {folder}, about half a minute", soft_wrap=True)
    options = demo.parse(options.split())
    chosen = {name: value for name, value in vars(options).items() if name not in ("text", "out", "resume")}
    settings = demo.Settings(text=hashlib.sha256(text).hexdigest(), **chosen)
    training, validation = np.split(np.frombuffer(text, np.uint8), [len(text) * 9 // 10])
    folder.mkdir(parents=True, exist_ok=True)
    quiet = Console(quiet=True)
    _, curve = demo.train(
        settings, folder, False, training, validation[:4096], console if console.is_terminal else quiet
    )
    console.print(f"trained: {curve['validation'][-1][1]:.2f} bits per byte of validation text")


# -------------------------------------------------------------------------------------------------------------- report


def picture(server: Server, now: int, waiting: list[Request], done: int, rate: float) -> Table:
    """The pool as it is: who has which slot, and what they wrote last."""
    table = Table(title=f"tick {now}: {len(waiting)} waiting, {done} done, {rate:,.0f} tokens/s", width=100)
    for name in ("slot", "request", "prompt", "written"):
        table.add_column(name, justify="right", width=9)
    table.add_column("text", no_wrap=True)
    by_slot = {r.slot: r for r in server.running}
    for slot in range(server.pool.slots):
        if slot not in by_slot:
            table.add_row(str(slot), "", "", "", "")
            continue
        r = by_slot[slot]
        tail = " ".join(demo.readable([*r.prompt[: r.read], *r.written]).split())[-50:]
        table.add_row(str(slot), str(r.number), f"{r.read}/{len(r.prompt)}", f"{len(r.written)}/{r.length}", tail)
    return table


def worst(first: Request, second: Request) -> float:
    """The largest difference of logits up to the first byte that differs, which takes its own logits in."""
    pairs = zip(first.written, second.written)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), first.length - 1) + 1
    return max(float(np.abs(a - b).max()) for a, b in zip(first.logits[:same], second.logits[:same]))


def step_by_step(model: demo.LanguageModel, request: Request, length: int) -> float:
    """The largest difference of the logits from those of the demo's recurrent path over prompt and answer."""
    tokens = np.zeros(length, np.int32)
    text = [*request.prompt, *request.written]
    tokens[: len(text)] = text
    logits, _ = demo.run_steps(model, jnp.asarray(tokens), model.init_state())
    first = len(request.prompt) - 1
    return float(np.abs(np.asarray(logits)[first : first + request.length] - np.stack(request.logits)).max())


def compare(server: Server, model: demo.LanguageModel, requests: list[Request], console: Console) -> bool:
    """The table of requests, each beside itself alone."""
    table = Table(title="Every request alone, in the same programs and step by step")
    for name in ("request", "arrived", "ended", "prompt", "written", "alone", "step by step"):
        table.add_column(name, justify="right")
    length = max(len(r.prompt) + r.length for r in requests)
    fine = True
    for request in requests:
        alone = request.again()
        serve(server, [alone])
        off = worst(request, alone)
        steps = step_by_step(model, request, length)
        same_bits = request.written == alone.written and off == 0
        # Bytes may differ where two were equally likely to within rounding; all logits up to there must agree.
        fine = fine and off <= TOLERANCE and steps <= TOLERANCE
        table.add_row(
            *map(str, (request.number, request.arrives, request.ends, len(request.prompt), request.length)),
            "bit for bit" if same_bits else f"{off:.1e}",
            f"{steps:.1e}",
        )
    console.print(table)
    return fine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("runs/gdn"), metavar="DIR")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if min(options.requests, options.slots) < 1:
        parser.error("--requests and --slots must be at least 1")
    console = Console(highlight=False, markup=False)
    text, folder = demo.read_text(None), options.model
    if not demo.checkpoints(folder):
        folder = pathlib.Path("runs/generate")
        if not demo.checkpoints(folder):
            train(folder, text, console)
    with jax.default_matmul_precision("highest"):
        model = load(folder, console)
        requests = make_requests(np.frombuffer(text, np.uint8)[len(text) * 9 // 10 :], options.requests, options.seed)
        started = time.perf_counter()
        server = Server(model, options.slots)
        console.print(f"two programs compiled in {time.perf_counter() - started:.1f} s, {options.slots} slots")
        started = time.perf_counter()
        with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:

            def watch(now, waiting, tokens):
                if live is not None or now == SHOWN:
                    done = sum(r.ends > 0 for r in requests)
                    table = picture(server, now, waiting, done, tokens / (time.perf_counter() - started))
                    console.print(table) if live is None else live.update(table, refresh=True)

            tokens = serve(server, requests, watch)
        seconds = time.perf_counter() - started
        written = sum(r.length for r in requests)
        console.print(
            f"{len(requests)} requests in {seconds:.1f} s: {sum(len(r.prompt) for r in requests)} bytes read, "
            f"{written} written, {tokens / seconds:,.0f} tokens/s through the model",
            soft_wrap=True,
        )
        fine = compare(server, model, requests, console)
        longest = max(requests, key=lambda r: len("".join(demo.readable(r.written).split())))
        console.rule(f"request {longest.number}: its prompt, and what the model wrote")
        console.print(Text().append(demo.readable(longest.prompt), "dim").append(demo.readable(longest.written)))
    if server.traces != 2:
        print(f"generate: {server.traces} programs were compiled instead of 2", file=sys.stderr)
        return 1
    if not fine:
        print(f"generate: a request differs from itself alone by more than {TOLERANCE:.0e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
