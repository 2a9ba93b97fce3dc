"""Train the demo's language model on many devices, over a mesh of data x model x context, in one process or in several.

    python examples/train_distributed.py --cpu-devices 8 --data 2 --model 2 --context 2
    python examples/train_distributed.py --resume          # go on, on any other mesh too

    # two processes, each with two devices of a CPU, on one machine (or started by what schedules your cluster):
    for i in 0 1; do python examples/train_distributed.py --cpu-devices 2 --model 2 \\
        --coordinator 127.0.0.1:4242 --processes 2 --process $i & done; wait

Parameters and optimizer states are float32 and lie in shards; products are bfloat16 (`--dtype`), gates and states of
mixers float32. Layers are scanned, so that each kind is compiled once. `--keep` says what a block keeps for its
backward pass. A step whose loss is not there after `--patience` seconds ends the process with an error: a peer that is
gone or hangs would otherwise be waited for without end. Checkpoints are written by every process, its shards only, and
get their name when all are there.

The file reads from top to bottom: settings, model, mesh and shards, training step, checkpoints, processes, loop.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import re
import sys
import threading
import time
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from language_model import (
    BYTES,
    Interrupt,
    Parser,
    Stop,
    make_optimizer,
    read_text,
    training_batch,
    write_atomically,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gated_delta import (
    GDN,
    GDN2,
    KDA,
    AttentionConfig,
    SoftmaxAttention,
    SystolicLinearAttention,
    cast_params,
    softmax_attention,
)
from gated_delta.pallas import PallasTPU
from gated_delta.sharding import local_mixers, mixer_specs

AXES = ("data", "model", "context")
HEARTBEATS = 3  # patiences without a sign of life from a process, until JAX itself ends all others
STALLED = 75  # exit code of a process that waited for a peer in vain: try again (EX_TEMPFAIL)


# ------------------------------------------------------------------------------------------------------------ settings


@dataclasses.dataclass(frozen=True)
class Settings:
    """All that decides the curve, up to rounding. Meshes, remat and processes do not."""

    mixer: str
    width: int
    head: int  # channels of one
    units: int  # of three mixers and one attention
    length: int  # bytes per window, and how far back attention sees
    batch: int  # windows of one step, on all devices together
    accumulate: int  # parts of a batch that are computed one after the other
    steps: int
    learning_rate: float
    dtype: str  # of products
    seed: int
    text: str  # SHA-256


NAMES = ("mixed", "mlp_hidden", "gated_delta_solves")
"""What a block can keep for its backward pass, beside its input: the output of its mixer, the hidden layer of its MLP,
and what the operator would keep by itself (`Chunked(residuals="solves")`)."""


# --------------------------------------------------------------------------------------------------------------- model


def make_mixer(settings: Settings, backend, key):
    """SLA: four value heads for every key head, which is twice as wide."""
    width, head = settings.width, settings.head
    options: dict[str, Any] = dict(value_dim=head, backend=backend, key=key)
    if settings.mixer == "sla":
        return SystolicLinearAttention(width, group=4, key_heads=width // head // 4, key_dim=2 * head, **options)
    constructor = {"gdn": GDN, "kda": KDA, "gdn2": GDN2}[settings.mixer]
    return constructor(width, key_heads=width // head, key_dim=head, **options)


class SwiGLU(eqx.Module):
    gate: jax.Array
    up: jax.Array
    down: jax.Array

    def __init__(self, width: int, hidden: int, *, key):
        keys = jax.random.split(key, 3)
        self.gate, self.up = (matrix(width, hidden, key=key) for key in keys[:2])
        self.down = matrix(hidden, width, key=keys[2])

    def __call__(self, x):
        return checkpoint_name(jax.nn.silu(x @ self.gate) * (x @ self.up), "mlp_hidden") @ self.down


class Block(eqx.Module):
    """Pre-norm: x + mixer(norm(x)), then x + swiglu(norm(x))."""

    mixer_norm: eqx.nn.RMSNorm
    mixer: Any  # GatedDeltaMixer or SoftmaxAttention
    mlp_norm: eqx.nn.RMSNorm
    mlp: SwiGLU

    def __init__(self, mixer, width: int, *, key):
        self.mixer_norm, self.mlp_norm = eqx.nn.RMSNorm(width, use_bias=False), eqx.nn.RMSNorm(width, use_bias=False)
        self.mixer, self.mlp = mixer, SwiGLU(width, 2 * width, key=key)

    def __call__(self, x, mix):  # [batch, time, width]
        x = x + checkpoint_name(mix(self.mixer, normed(self.mixer_norm, x)), "mixed")
        return x + self.mlp(normed(self.mlp_norm, x))


class Model(eqx.Module):
    """The layers are stacked: `mixers` `[units, 3, ...]`, `attentions` `[units, ...]`."""

    embedding: jax.Array
    mixers: Block
    attentions: Block
    norm: eqx.nn.RMSNorm
    head: jax.Array

    def __init__(self, settings: Settings, backend=None, *, key):
        """`backend`: of the mixers."""
        width = settings.width
        attention = AttentionConfig(width, query_heads=width // settings.head, window=settings.length)
        keys = jax.random.split(key, 4)

        def mixer_block(key):
            mixer_key, mlp_key = jax.random.split(key)
            return Block(make_mixer(settings, backend, mixer_key), width, key=mlp_key)

        def attention_block(key):
            attention_key, mlp_key = jax.random.split(key)
            return Block(SoftmaxAttention(attention, key=attention_key), width, key=mlp_key)

        self.embedding = jax.random.normal(keys[0], (BYTES, width))
        self.mixers = eqx.filter_vmap(eqx.filter_vmap(mixer_block))(jax.random.split(keys[1], (settings.units, 3)))
        self.attentions = eqx.filter_vmap(attention_block)(jax.random.split(keys[2], settings.units))
        self.norm = eqx.nn.RMSNorm(width, use_bias=False)
        self.head = matrix(width, BYTES, key=keys[3])


def matrix(inputs: int, outputs: int, *, key):
    return jax.random.uniform(key, (inputs, outputs), minval=-(inputs**-0.5), maxval=inputs**-0.5)


def normed(norm, x):
    return jax.vmap(jax.vmap(norm))(x).astype(x.dtype)


def logits(model: Model, tokens, mix, constrain, keep):
    """[batch, time] to [batch, time, 256], in float32. `mix(mixer, x)` runs a mixer, `constrain` keeps x in shards, and
    `keep(block)` is the block with what it keeps for its backward pass."""

    def run(block, x):
        return constrain(block(x, mix))

    run = keep(run)

    def unit(x, blocks):
        mixers, attention = blocks
        x, _ = jax.lax.scan(lambda x, block: (run(block, x), None), x, mixers)
        return run(attention, x), None

    x = constrain(model.embedding[tokens])
    x, _ = jax.lax.scan(unit, x, (model.mixers, model.attentions))
    return (normed(model.norm, x) @ model.head).astype(jnp.float32)


# ------------------------------------------------------------------------------------------------------ mesh and shards


def make_mesh(data: int | None, model: int, context: int, devices=None) -> Mesh:
    """Devices over three axes. `data` takes what the other two leave; one process may leave devices idle."""
    devices = jax.devices() if devices is None else devices
    data = len(devices) // (model * context) if data is None else data
    if jax.process_count() == 1:
        devices = devices[: data * model * context]
    if data * model * context != len(devices):
        raise Stop(f"a mesh of {data} x {model} x {context} needs as many devices, but there are {len(devices)}", 2)
    # A large slice of TPUs is a torus of few long axes: what is left of one by a short axis goes to another.
    laid_out = create_device_mesh((data, model, context), devices, allow_split_physical_axes=True)
    return Mesh(laid_out, AXES, axis_types=(AxisType.Auto,) * 3)


def check_divisible(settings: Settings, mesh: Mesh) -> None:
    rows = settings.batch // settings.accumulate
    for name, size, axis in (("--batch / --accumulate", rows, "data"), ("--length", settings.length, "context")):
        if size % mesh.shape[axis]:
            raise Stop(f"{name} is {size}; it must be a multiple of --{axis}, which is {mesh.shape[axis]}", 2)
    heads = settings.width // settings.head // (4 if settings.mixer == "sla" else 1)
    if heads % mesh.shape["model"]:
        raise Stop(
            f"there are {heads} key heads; they must be a multiple of --model, which is {mesh.shape['model']}", 2
        )


def parameter_specs(model: Model, mesh: Mesh, fsdp: bool) -> Model:
    """Where every parameter is cut: heads and hidden layers over `model`, and with `fsdp` another axis over `data`.
    Weights of the package's layers are [outputs, inputs], those of this file [inputs, outputs]."""

    def specs(path, x):
        name = jax.tree_util.keystr(path)
        if re.search(r"mlp\.(gate|up)$", name):
            return last_axes(x, None, "model")
        return last_axes(x, "model", None) if re.search(r"mlp\.down$", name) else P()

    tree = jax.tree_util.tree_map_with_path(specs, model)
    mixers = mixer_specs(model.mixers.mixer, mesh), attention_specs(model.attentions.mixer, "model")
    tree = eqx.tree_at(lambda model: (model.mixers.mixer, model.attentions.mixer), tree, mixers)
    return jax.tree.map(lambda spec, x: cut_again(spec, x.shape, mesh), tree, model, is_leaf=is_spec) if fsdp else tree


def attention_specs(mixer: SoftmaxAttention, heads: str | None) -> SoftmaxAttention:
    """Heads over an axis. The layer has no norms and no gate here."""

    def spec(path, x):
        return last_axes(x, None, heads) if path[0].name == "o_proj" else last_axes(x, heads, None)

    return jax.tree_util.tree_map_with_path(spec, mixer)


def last_axes(x, *axes) -> P:
    return P(*(None,) * (x.ndim - len(axes)), *axes)


def is_spec(x) -> bool:
    return isinstance(x, P)


def cut_again(spec: P, shape: tuple[int, ...], mesh: Mesh) -> P:
    """`spec` with the last axis that is whole and divisible cut over `data`; small arrays stay."""
    whole = [*spec, *(None,) * (len(shape) - len(spec))]
    for axis in reversed(range(len(shape))[-2:]):  # not the axes of a stack, which a loop goes over
        if math.prod(shape[-2:]) >= 1024 and whole[axis] is None and shape[axis] % mesh.shape["data"] == 0:
            whole[axis] = "data"
            break
    return P(*whole)


def state_specs(state, model_specs: Model):
    """Of an optimizer's state: its copies of the parameters lie as these do, all else on every device."""
    flat, _ = jax.tree_util.tree_flatten_with_path(model_specs, is_leaf=is_spec)
    known = {jax.tree_util.keystr(path): spec for path, spec in flat}

    def find(path, _):
        ends = (jax.tree_util.keystr(path[start:]) for start in range(len(path)))
        return next((known[end] for end in ends if end in known), P())

    return jax.tree_util.tree_map_with_path(find, state)


class Plan:
    """Model and optimizer state as shapes, with the sharding of every array."""

    def __init__(self, settings: Settings, mesh: Mesh, fsdp: bool = False, backend=None):
        self.settings, self.mesh, self.backend = settings, mesh, backend
        self.optimizer = make_optimizer(cast(Any, settings))
        self.shapes = jax.eval_shape(self._make, jax.random.key(0))
        specs = parameter_specs(self.shapes[0], mesh, fsdp)
        self.specs = specs, state_specs(self.shapes[1], specs)
        self.shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), self.specs, is_leaf=is_spec)
        self.batch = NamedSharding(mesh, P(None, "data"))  # [accumulate, windows, length + 1]

    def _make(self, key):
        model = Model(self.settings, self.backend, key=key)
        return model, self.optimizer.init(cast(Any, model))

    def begin(self):
        """Model and optimizer state at the beginning: every device makes its own shards."""
        return jax.jit(self._make, out_shardings=self.shardings)(jax.random.key(self.settings.seed))

    def targets(self):
        """Shapes with shardings: what a checkpoint is read into, and a step compiled for."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), self.shapes, self.shardings
        )

    def place(self, windows: np.ndarray):
        """`[batch, length + 1]` in the parts of a step; every process keeps what its devices need."""
        windows = windows.reshape(self.settings.accumulate, -1, windows.shape[-1])
        return jax.make_array_from_callback(windows.shape, self.batch, lambda index: windows[index])


# ------------------------------------------------------------------------------------------------------- training step


def mix_over(mesh: Mesh):
    """How a block's mixer is run: by every device on its own rows, heads and tokens."""
    own = P("data", "context", None)
    heads, context = (axis if mesh.shape[axis] > 1 else None for axis in ("model", "context"))

    def local(mixer, x):
        if isinstance(mixer, SoftmaxAttention):
            return attend(mixer, x, heads, context)
        return local_mixers(mixer, heads=heads, context=context)(x)[0]

    def mix(mixer, x):
        is_attention = isinstance(mixer, SoftmaxAttention)
        specs = attention_specs(mixer, heads) if is_attention else mixer_specs(mixer, mesh, heads=heads)
        return jax.shard_map(local, mesh=mesh, in_specs=(specs, own), out_specs=own)(mixer, x)

    return mix


def attend(mixer: SoftmaxAttention, x, heads: str | None, context: str | None):
    """The layer inside of a `shard_map`. From all heads of its own tokens a device changes to all tokens of some heads,
    and back: one `all_to_all` each way."""

    def change(x, cut: int, joined: int):
        return x if context is None else jax.lax.all_to_all(x, context, cut, joined, tiled=True)

    if heads is not None:  # so that the cotangent of x is summed once, not for each projection
        x = jax.lax.pcast(x, heads, to="varying")
    projected = mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)
    q, k, v = (change(a.reshape(*a.shape[:2], -1, mixer.config.key_dim), 2, 1) for a in projected)
    out = change(softmax_attention(q, k, v, window=mixer.config.window), 1, 2)
    out = mixer.o_proj(out.reshape(*x.shape[:2], -1))
    return out if heads is None else jax.lax.psum(out, heads)


def make_step(plan: Plan, keep: tuple[str, ...] | str):
    """The jitted step: model, optimizer state and windows `[accumulate, rows, length + 1]` to the new ones, the mean
    loss in nats, and whether all is finite. `keep`: names of `NAMES`, `"all"` or `"none"`."""
    settings, mesh = plan.settings, plan.mesh
    of_blocks = NamedSharding(mesh, P("data", "context", None))
    policies = jax.checkpoint_policies

    def constrain(x):
        return jax.lax.with_sharding_constraint(x, of_blocks)

    def keeping(block):
        if keep == "all":
            return block
        policy = policies.nothing_saveable if keep == "none" else policies.save_only_these_names(*keep)
        return jax.checkpoint(block, prevent_cse=False, policy=policy)

    def loss(model, windows):
        x = logits(cast_params(model, settings.dtype), windows[:, :-1], mix_over(mesh), constrain, keeping)
        return optax.softmax_cross_entropy_with_integer_labels(x, windows[:, 1:]).mean()

    def step(model, optimizer_state, windows):
        def part(total, windows):
            one = jax.value_and_grad(loss)(model, windows)
            return jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, total, one), of_sums), None

        of_sums = NamedSharding(mesh, P()), plan.shardings[0]
        zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, model)
        total, _ = jax.lax.scan(part, zeros, windows)
        value, gradients = jax.tree.map(lambda x: x / settings.accumulate, total)
        updates, optimizer_state = plan.optimizer.update(gradients, optimizer_state, model)
        healthy = jnp.isfinite(value) & jnp.isfinite(optax.tree.norm(updates))
        return optax.apply_updates(model, updates), optimizer_state, value, healthy

    everywhere = NamedSharding(mesh, P())
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=(*plan.shardings, everywhere, everywhere))


def flops_per_token(model: Model, settings: Settings) -> float:
    """Of a training step, by the usual count: 6 for every parameter of a product, 18 for every number of a state (what
    the key reads, what is written, what the query reads), 6 for every channel and key of attention; no recomputation.
    """
    config = model.mixers.mixer.config
    states = config.value_heads * config.key_dim * config.value_dim
    parameters = sum(x.size for x in jax.tree.leaves((model.mixers, model.attentions, model.head)))
    return 6 * parameters + settings.units * (3 * 18 * states + 6 * settings.width * settings.length)


PEAKS = {  # bfloat16 TFLOP/s of one JAX device, as their makers publish them
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5": 459.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
    "TPU7x": 1153.5,
    "NVIDIA A100-SXM4-80GB": 312.0,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200": 989.4,
}


# --------------------------------------------------------------------------------------------------------- checkpoints


class Checkpoints:
    """Sharded checkpoints by Orbax: every process writes its shards into a folder that gets its final name when all
    have, so what has a name is whole. The last two are kept. They can be read over any mesh."""

    def __init__(self, folder: pathlib.Path, settings: Settings, console: Console):
        try:
            import orbax.checkpoint as orbax  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            message = "checkpoints need orbax-checkpoint: pip install 'gated-delta[distributed]', or --save-every 0"
            raise Stop(message, 2) from error
        self.orbax, self.settings, self.console = orbax, settings, console
        options = orbax.CheckpointManagerOptions(
            max_to_keep=2, cleanup_tmp_directories=True, enable_async_checkpointing=False
        )
        self.folder = folder.absolute() / "checkpoints"
        self.manager = orbax.CheckpointManager(self.folder, options=options)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.close()

    def save(self, step: int, state, curve: list[float]) -> None:
        about = {"settings": dataclasses.asdict(self.settings), "curve": curve}
        args = self.orbax.args
        both = args.Composite(arrays=args.StandardSave(by_name(state)), about=args.JsonSave(about))
        self.manager.save(step, args=both, force=True)

    def load_newest(self, targets):
        """Step, state and curve of the newest checkpoint, in the shards of `targets`."""
        step, args = self.manager.latest_step(), self.orbax.args
        if step is None:
            raise Stop(f"nothing to resume: there is no whole checkpoint in {self.folder}", 2)
        about = self.manager.restore(step, args=args.Composite(about=args.JsonRestore()))["about"]
        mine, theirs = dataclasses.asdict(self.settings), about["settings"]
        if differing := [name for name in mine if mine[name] != theirs.get(name)]:
            differences = "; ".join(f"{name} {theirs.get(name)} there, {mine[name]} here" for name in differing)
            raise Stop(f"{self.folder} belongs to a run with other settings: {differences}", 2)
        wanted = args.Composite(arrays=args.StandardRestore(by_name(targets)))
        arrays = self.manager.restore(step, args=wanted)["arrays"]
        _, structure = jax.tree.flatten(targets)
        return step, jax.tree.unflatten(structure, [arrays[name] for name in by_name(targets)]), about["curve"]

    def remove_all(self) -> None:
        for step in self.manager.all_steps():
            self.manager.delete(step)
            self.console.print(f"a new run: removed the checkpoint of step {step}")


def by_name(tree) -> dict:
    """Leaves by their path, in the tree's order."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


# ----------------------------------------------------------------------------------------------------------- processes


def connect(options: argparse.Namespace) -> None:
    """Before JAX looks at its devices: how many a CPU shall have, and where the other processes are."""
    if options.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.cpu_devices)
    patience = options.patience
    if options.cluster:
        jax.distributed.initialize(heartbeat_timeout_seconds=HEARTBEATS * patience)
    elif options.coordinator:
        # JAX gives up later than we do, and by an abort that says less.
        with Watch(f"the meeting of {options.processes} processes at {options.coordinator}", patience):
            jax.distributed.initialize(
                options.coordinator,
                options.processes,
                options.process,
                initialization_timeout=HEARTBEATS * patience,
                heartbeat_timeout_seconds=HEARTBEATS * patience,
            )


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def end_now(message: str, code: int) -> None:
    """Without the usual good-byes, in which JAX would wait for the other processes."""
    print(f"train_distributed: {message}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


class Watch:
    """Within it, more than `patience` seconds end the process: something that other processes take part in hangs."""

    def __init__(self, what: str, patience: float):
        message = f"{what} did not end within {patience:g} s: another process is gone or hangs. Start all again, with "
        self.timer = threading.Timer(patience, end_now, (message + "--resume", STALLED))
        self.timer.daemon = True

    def __enter__(self):
        self.timer.start()

    def __exit__(self, *error):
        self.timer.cancel()


def anybody(asked: bool) -> bool:
    """Whether any process was asked to stop: all have to stop after the same step."""
    if jax.process_count() == 1:
        return asked
    from jax.experimental.multihost_utils import process_allgather

    return bool(process_allgather(np.array(asked)).any())


# ---------------------------------------------------------------------------------------------------------------- loop


def train(settings: Settings, options: argparse.Namespace, training: np.ndarray, console: Console) -> list[float]:
    """The loss of every step, in nats per byte."""
    mesh = make_mesh(options.data, options.model, options.context)
    check_divisible(settings, mesh)
    plan = Plan(settings, mesh, options.fsdp, PallasTPU() if options.backend == "pallas" else None)
    parameters = sum(x.size for x in jax.tree.leaves(plan.shapes[0]))
    over = " x ".join(f"{size} {name}" for name, size in mesh.shape.items())
    console.print(f"{settings.mixer}: {parameters / 1e6:.2f} M parameters over {over}, {jax.process_count()} processes")

    with Checkpoints(options.out, settings, console) if options.save_every else contextlib.nullcontext() as checkpoints:
        first, curve = 0, []
        if options.resume and checkpoints:
            with Watch("reading the checkpoint", options.patience):
                first, state, curve = checkpoints.load_newest(plan.targets())
            console.print(f"resuming after step {first}")
        else:
            if checkpoints:
                checkpoints.remove_all()
            state = plan.begin()
        started = time.perf_counter()
        windows = plan.place(windows_of(training, settings, 1))
        step_function = make_step(plan, options.keep).lower(*plan.targets(), windows).compile()
        console.print(f"compiled in {time.perf_counter() - started:.1f} s")
        return run_steps(step_function, plan, state, first, curve, checkpoints, options, training, console)


def windows_of(training: np.ndarray, settings: Settings, step: int) -> np.ndarray:
    return training_batch(training, cast(Any, settings), step)  # by its seed, batch and length


def run_steps(step_function, plan: Plan, state, first: int, curve, checkpoints, options, training, console):
    settings = plan.settings
    columns = BarColumn(bar_width=10), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn()
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    speed = Speed(plan, options.peak)
    with progress, Interrupt() as interrupt:
        task = progress.add_task(settings.mixer, total=settings.steps, completed=first, status="")
        for step in range(first + 1, settings.steps + 1):
            started = time.perf_counter()
            with Watch(f"step {step}", options.patience):
                windows = plan.place(windows_of(training, settings, step))
                *state, loss, healthy = step_function(*state, windows)
                loss, healthy = float(loss), bool(healthy)
                stop = anybody(interrupt.asked)
            if not healthy:
                raise Stop(
                    f"step {step}: the loss is {loss} or its update is not finite. A lower --learning-rate may help"
                )
            curve.append(loss)
            status = f"loss {loss:.4f}  {speed.after_a_step(time.perf_counter() - started)}"
            progress.update(task, completed=step, status=status)
            saves = bool(checkpoints) and (step == settings.steps or step % options.save_every == 0 or stop)
            if saves:
                with Watch(f"saving step {step}", options.patience):
                    checkpoints.save(step, tuple(state), curve)
            if step in (first + 1, settings.steps) or step % options.log_every == 0:
                console.print(f"step {step:5d}  {status}{'  saved' if saves else ''}", soft_wrap=True)
            if stop:
                raise Stop(
                    f"interrupted after step {step}{', which is saved; go on with --resume' if saves else ''}", 130
                )
    return curve


class Speed:
    """Bytes per second and the part of the peak that the model's products are, over all steps but the first."""

    def __init__(self, plan: Plan, peak: float | None):
        kind = jax.devices()[0].device_kind
        self.tokens = plan.settings.batch * plan.settings.length
        self.flops = flops_per_token(plan.shapes[0], plan.settings)
        self.peak = (peak or PEAKS.get(kind, 0)) * 1e12 * plan.mesh.size
        self.steps, self.seconds = -1, 0.0

    def after_a_step(self, seconds: float) -> str:
        self.steps += 1
        if self.steps == 0:
            return ""
        self.seconds += seconds
        rate = self.steps * self.tokens / self.seconds
        words = f"{rate:,.0f} bytes/s  {rate * self.flops / 1e12:.3g} TFLOP/s"
        return words + (f"  MFU {rate * self.flops / self.peak:.1%}" if self.peak else "")


# ---------------------------------------------------------------------------------------------------------------- main


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="train_distributed", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mixer", choices=("gdn", "kda", "gdn2", "sla"), default="gdn")
    parser.add_argument("--text", type=pathlib.Path, metavar="FILE", help="default: Python's help topics")
    parser.add_argument("--out", type=pathlib.Path, metavar="DIR", help="default: runs/distributed-<mixer>")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--width", type=int, default=128, help="a multiple of --head, and for sla of four times that")
    parser.add_argument("--head", type=int, default=32, help="channels of a head")
    parser.add_argument("--units", type=int, default=2, help="of three mixers and one attention")
    parser.add_argument("--batch", type=int, default=8, help="windows of a step, on all devices together")
    parser.add_argument("--length", type=int, default=256, help="bytes per window")
    parser.add_argument("--accumulate", type=int, default=1, help="parts of a batch, one after the other")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of products")
    mesh = parser.add_argument_group("mesh")
    mesh.add_argument("--data", type=int, help="default: what the others leave")
    mesh.add_argument("--model", type=int, default=1)
    mesh.add_argument("--context", type=int, default=1)
    mesh.add_argument("--fsdp", action="store_true", help="cut parameters and optimizer states over the data axis too")
    mesh.add_argument("--cpu-devices", type=int, default=0, metavar="N", help="as many devices on this CPU")
    memory = "what a block keeps for its backward pass: all, none, or some of " + ", ".join(NAMES)
    parser.add_argument("--keep", type=parse_keep, default=("mixed",), metavar="NAMES", help=memory)
    parser.add_argument(
        "--backend", choices=("xla", "pallas"), default="xla", help="of the mixers; pallas: TPU kernels"
    )
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="0: never")
    parser.add_argument("--log-every", type=int, default=10, metavar="STEPS")
    parser.add_argument("--peak", type=float, metavar="TFLOPS", help="of a device, where its kind is not known")
    others = parser.add_argument_group("several processes")
    others.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0")
    others.add_argument("--processes", type=int, default=1)
    others.add_argument("--process", type=int, default=0)
    others.add_argument(
        "--cluster", action="store_true", help="let JAX ask the cluster (TPU pods, Slurm, ...) for those"
    )
    others.add_argument("--patience", type=int, default=600, metavar="SECONDS", help="before a silent peer is given up")
    options = parser.parse_args(arguments)
    options.out = options.out or pathlib.Path("runs") / f"distributed-{options.mixer}"
    positive = "steps learning_rate width head units batch length accumulate model context log_every patience processes"
    for name in positive.split():
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be positive")
    least = options.head * (4 if options.mixer == "sla" else 1)
    if options.width % least:
        parser.error(f"--width is {options.width}; for --mixer {options.mixer} it must be a multiple of {least}")
    if options.batch % options.accumulate:
        parser.error(f"--batch is {options.batch}; it must be a multiple of --accumulate {options.accumulate}")
    if options.resume and not options.save_every:
        parser.error("--resume needs checkpoints: --save-every must not be 0")
    if options.processes > 1 and not options.coordinator:
        parser.error("--processes needs --coordinator HOST:PORT, where process 0 listens")
    return options


def parse_keep(text: str) -> tuple[str, ...] | str:
    if text in ("all", "none"):
        return text
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in NAMES]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not all, none, or one of {', '.join(NAMES)}")
    return names


def settings_of(options: argparse.Namespace, text: bytes) -> Settings:
    names = [field.name for field in dataclasses.fields(Settings) if field.name != "text"]
    return Settings(**{name: getattr(options, name) for name in names}, text=hashlib.sha256(text).hexdigest())


def run(options: argparse.Namespace) -> int:
    connect(options)
    console = Console(highlight=False, markup=False, quiet=jax.process_index() > 0)
    text = read_text(options.text)
    options.out.mkdir(parents=True, exist_ok=True)
    settings = settings_of(options, text)
    training = np.frombuffer(text, np.uint8)
    if len(training) <= settings.length:
        raise Stop(f"the text has {len(text)} bytes; --length {settings.length} needs more", 2)
    curve = train(settings, options, training, console)
    if jax.process_index() == 0:
        write_atomically(options.out / "curve.json", json.dumps(curve).encode())
    console.print(f"loss {curve[-1]:.4f} after {len(curve)} steps; written to {options.out}", soft_wrap=True)
    return 0


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    try:
        return run(options)
    except Stop as stop:
        message, code = str(stop), stop.code
    except OSError as error:
        message, code = str(error), 1
    except jax.errors.JaxRuntimeError as error:
        message, code = f"a step failed, as it does where another process is gone: {first_line(error)}", STALLED
    if options.processes > 1 or options.cluster:
        end_now(message, code)
    print(f"train_distributed: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
