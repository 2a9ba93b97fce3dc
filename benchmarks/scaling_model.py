"""What a training step of sparse models would take on 2,048 chips of TPU 7x, with SLA and with KDA: a prediction.

    python benchmarks/scaling_model.py                      # the tables of docs/scaling.md
    python benchmarks/scaling_model.py --efficiency 0.6 --no-remat
    python benchmarks/scaling_model.py --compile PYTHON     # our kernels' figures anew; PYTHON has jax and libtpu

Nothing here was run on a TPU. The paper on Systolic Linear Attention (arXiv:2611.06828) says in its abstract that it
studies sparse mixtures of experts of 6.5 to 63.1 billion parameters on 2,048 chips and that steps are 11 % to 24 %
faster; we know no more of it. So the sizes below are ours (only their totals are the paper's), and the question is
which assumptions lead to such figures.

What goes in:

- cycles of the operator per token and value head, by the TPU compiler's own schedule (`benchmarks/tpu_schedule.py`);
- parameters and FLOPs of every layer, those of mixers counted on our own layers;
- the chip: Google Cloud's page on TPU7x, https://docs.cloud.google.com/tpu/docs/tpu7x (per chip: 2 TensorCores,
  2307 TFLOP/s in bfloat16, 192 GiB of HBM at 7380 GB/s, 1200 GB/s of ICI in both directions together);
- and assumptions, all of them fields of `Plan`.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Literal

import equinox as eqx
import jax
from rich.console import Console
from rich.table import Table

from gated_delta import KDA, SystolicLinearAttention

HERE = pathlib.Path(__file__).parent
FIGURES = HERE / "results" / "scaling-schedule.json"
PUBLISHED = (0.11, 0.24)
TOKENS = (16384, 32768, 65536)
BILLION = 1e9


@dataclasses.dataclass(frozen=True)
class Chip:
    """TPU 7x, per chip. The clock is the rate at which full matrix units reach the published peak."""

    cores: int = 2
    flops: float = 2307e12  # bfloat16, a second
    hbm: float = 7380e9  # bytes a second
    ici: float = 600e9  # bytes a second, one way, all links together: half of the published 1200e9
    macs: int = 2 * 256**2 * 2  # of one core, a cycle

    @property
    def clock(self) -> float:
        return self.flops / self.cores / 2 / self.macs


@dataclasses.dataclass(frozen=True)
class Operator:
    """Cycles of one core per token and value head: of the forward pass, and of forward and backward."""

    name: str
    forward: float
    both: float


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder whose layers mix time by a mixer of the family, but every `softmax_every`-th by softmax attention, and
    channels by a mixture of experts, but the first layer by one dense SwiGLU as wide as all experts that a token
    meets. KDA and softmax attention have heads of 128 channels, by default as many as make them as wide as the model.
    """

    width: int
    layers: int
    experts: int
    hidden: int  # of one expert
    active: int = 8
    shared: int = 1
    vocabulary: int = 131072
    softmax_every: int | None = 4
    heads: int | None = None

    @property
    def kda_heads(self) -> int:
        return self.heads or self.width // 128

    @property
    def softmax_layers(self) -> int:
        return self.layers // self.softmax_every if self.softmax_every else 0

    @property
    def mixer_layers(self) -> int:
        return self.layers - self.softmax_layers

    @property
    def attention(self) -> int:
        """Parameters of one softmax layer."""
        return 4 * self.width * 128 * self.kda_heads

    @property
    def expert(self) -> int:
        return 3 * self.width * self.hidden

    @property
    def met(self) -> int:
        """Experts that a token meets."""
        return self.active + self.shared


LADDER = {
    "6.5B": Model(width=1024, layers=24, experts=192, hidden=448),
    "15B": Model(width=2048, layers=24, experts=128, hidden=768),
    "30B": Model(width=2048, layers=28, experts=192, hidden=896),
    "63.1B": Model(width=3072, layers=28, experts=256, hidden=960),
}


@functools.cache
def mixer_sizes(kind: str, width: int, value_heads: int) -> tuple[int, int, int]:
    """Of one layer of ours: its parameters, those of its products, and the channels that pass its convolutions."""

    def build(key):
        if kind == "sla":
            return SystolicLinearAttention(width, key_heads=value_heads // 4, key_dim=256, value_dim=128, key=key)
        return KDA(width, key_heads=value_heads, key_dim=128, value_dim=128, key=key)

    mixer = eqx.filter_eval_shape(build, jax.random.key(0))
    c = mixer.config
    shapes = [(path, x.size) for path, x in jax.tree_util.tree_leaves_with_path(mixer) if hasattr(x, "size")]
    products = sum(
        size for path, size in shapes if getattr(path[-1], "name", None) == "weight" and "conv" not in str(path)
    )
    return sum(size for _, size in shapes), products, 2 * c.key_heads * c.key_dim + c.value_heads * c.value_dim


@dataclasses.dataclass(frozen=True)
class Mixer:
    """A kind of mixer, its share of KDA's value heads, and what runs its operator."""

    name: str
    kind: Literal["kda", "sla"]
    operator: Operator
    share: float = 1.0

    def value_heads(self, model: Model) -> int:
        """Whole groups of four for SLA."""
        return model.kda_heads if self.kind == "kda" else max(4, 4 * round(self.share * model.kda_heads / 4))

    def sizes(self, model: Model) -> tuple[int, int, int]:
        return mixer_sizes(self.kind, model.width, self.value_heads(model))


@dataclasses.dataclass(frozen=True)
class Plan:
    """Assumptions. None of them is published for the study; the defaults are what we would expect.

    - `tokens`: per chip and step. `length`: of a sequence.
    - `efficiency`: the part of the peak that dense products reach.
    - `slowdown`: of a kernel on the chip over its schedule, which is a floor. Against six published times on v6e it was
        1.09 to 1.12.
    - `remat`: the forward pass of every layer is computed again in the backward pass.
    - `expert_chips`: over how many chips the experts of a layer are laid out, a cube. Tokens travel among these, all
        to all, over links that are not wrapped. What chips share lies in shards on all of them and is gathered for
        each pass; 1: so are the experts, and no token travels.
    - `hidden_share`: the part of communication that is hidden behind computation, if there is enough of that.
    - `accesses`: how often an activation is read or written outside of products and kernels in a pass over a layer: by
        norms, sums, convolutions, gates, and on its way to experts and back.
    """

    chips: int = 2048
    tokens: int = 32768
    length: int = 8192
    efficiency: float = 0.5
    slowdown: float = 1.1
    remat: bool = True
    expert_chips: int = 1
    hidden_share: float = 0.9
    accesses: int = 4
    chip: Chip = Chip()


def parameters(model: Model, mixer: Mixer) -> dict[str, int]:
    """Of the whole model, `total`; of what a token meets, `active`; of what every token meets, and of the rest."""
    mixing = model.mixer_layers * mixer.sizes(model)[0] + model.softmax_layers * model.attention
    experts = (model.layers - 1) * model.expert
    router = (model.layers - 1) * model.width * model.experts
    table = model.vocabulary * model.width
    common = mixing + router + model.met * model.expert + experts * model.shared + 2 * table
    return {
        "total": common + experts * model.experts,
        "active": common + experts * model.active - table,
        "common": common,
        "routed": experts * model.experts,
    }


def step(model: Model, mixer: Mixer, plan: Plan) -> dict[str, float]:
    """Seconds of a training step on every chip, by part, and their sum as `total`."""
    chip, passes = plan.chip, 4 if plan.remat else 3  # forward, twice that for the gradients, and forward again
    heads, (_, matrices, channels) = mixer.value_heads(model), mixer.sizes(model)

    def products(weights: float, passes: int = passes) -> float:
        return passes * 2 * weights * plan.tokens / (chip.flops * plan.efficiency)

    cycles = mixer.operator.both + (mixer.operator.forward if plan.remat else 0)
    scores = 128 * model.kda_heads * plan.length  # products with half of a square, queries and weights, per token
    branches = 2 * model.width + model.met * model.hidden + model.active * model.width
    activations = model.layers * branches + model.mixer_layers * channels
    parts = {
        "projections": products(model.mixer_layers * matrices),
        "operator": model.mixer_layers * heads * plan.tokens * cycles * plan.slowdown / (chip.cores * chip.clock),
        "softmax": products(model.softmax_layers * (model.attention + scores)),
        "experts": products(model.layers * (model.met * model.expert + model.width * model.experts)),
        "logits": products(model.vocabulary * model.width, passes=3),
        "elementwise": passes * plan.accesses * 2 * activations * plan.tokens / chip.hbm,
    }
    computing, travel = sum(parts.values()), communication(model, mixer, plan)
    parts["waiting"] = travel - min(travel * plan.hidden_share, computing)
    return parts | {"total": computing + parts["waiting"]}


def communication(model: Model, mixer: Mixer, plan: Plan) -> float:
    """Seconds that the links of a chip are busy: parameters gathered in bfloat16 for both passes and gradients
    scattered in float32; tokens to their experts and back in bfloat16, and their gradients likewise."""
    count = parameters(model, mixer)
    weights = (count["common"] + count["routed"] / plan.expert_chips) * (2 + 2 + 4)
    edge = round(plan.expert_chips ** (1 / 3))
    hops = (edge**2 - 1) / edge  # mean distance in a cube without wrapped links: on every axis a third of this
    trips = 2 * (3 if plan.remat else 2)  # there and back: forward, backward, and forward again
    tokens = trips * plan.tokens * model.active * model.width * 2 * (model.layers - 1) * hops
    return (weights + tokens) / plan.chip.ici


def gain(model: Model, ours: Mixer, theirs: Mixer, plan: Plan) -> float:
    """How many more steps a second `ours` makes: 0.1 is a tenth more."""
    return step(model, theirs, plan)["total"] / step(model, ours, plan)["total"] - 1


def needed_share(gain: float, ratio: float) -> float:
    """The share of a step that an operator must take for this gain, if one `ratio` times as fast replaces it and
    nothing else changes."""
    return gain / (1 + gain) / (1 - 1 / ratio)


# ---- figures of the schedule -----------------------------------------------------------------------------------------

CASES = {
    "SLA-R4, ours": "sla_8(inverse='approx')",
    "KDA, ours": "kda(inverse='approx')",
}


def compile_figures(python: str) -> dict:
    """Cycles per token and value head of our operators, compiled now by the jax and libtpu of `python`."""
    from tpu.report import schedule
    from tpu_schedule import parse_function

    found = {}
    for name, call in CASES.items():
        function, keywords = parse_function(f"{HERE / 'tpu' / 'ours.py'}:{call}")
        for pass_name, extra in (("forward", {}), ("both", {"backward": True})):
            record = schedule(function, "tpu7x", keywords=keywords | extra, python=python)
            entry = found.setdefault(name, {"call": call, "versions": record["versions"]})
            entry[pass_name] = record["all"]["cycles_per_token_and_head"]
    return found


def read_figures() -> dict[str, Operator]:
    """Ours, as they were compiled last, and Tokamax's KDA, of `make tpu-schedule`."""
    kept = json.loads(FIGURES.read_text())
    found = {name: Operator(name, one["forward"], one["both"]) for name, one in kept.items()}
    peers = json.loads((HERE / "results" / "tpu-schedule.json").read_text())
    cycles = [
        peers[f"tpu7x, peers.py:tokamax_kda({call})"]["all"]["cycles_per_token_and_head"]
        for call in ("heads=32", "backward=True, heads=32")
    ]
    return found | {"KDA, Tokamax 0.0.17": Operator("KDA, Tokamax 0.0.17", *cycles)}


# ---- tables ----------------------------------------------------------------------------------------------------------


def mixers(operators: dict[str, Operator]) -> dict[str, Mixer]:
    sla = operators["SLA-R4, ours"]
    return {
        "theirs": Mixer("KDA, Tokamax's kernel", "kda", operators["KDA, Tokamax 0.0.17"]),
        "kda": Mixer("KDA, our kernel", "kda", operators["KDA, ours"]),
        "heads": Mixer("SLA-R4, as many value heads", "sla", sla),
        "state": Mixer("SLA-R4, as large a state", "sla", sla, share=0.5),
    }


def percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def inputs_table(operators: dict[str, Operator]) -> Table:
    table = new_table("Cycles of one core per token and value head, by the compiler's schedule (TPU 7x)", "operator")
    for column in ("forward", "forward + backward", "with the forward pass again"):
        table.add_column(column, justify="right")
    for one in operators.values():
        table.add_row(one.name, f"{one.forward:.2f}", f"{one.both:.2f}", f"{one.forward + one.both:.2f}")
    return table


def step_table(chosen: dict[str, Mixer], plan: Plan) -> Table:
    parts = list(step(LADDER["6.5B"], chosen["theirs"], plan))
    title = f"Predicted milliseconds of a step: {plan.tokens} tokens a chip, {plan.chips} chips"
    table = new_table(title, "mixer", "parameters, a token meets (B)", *parts, "gain")
    for model in LADDER.values():
        for mixer in chosen.values():
            count, seconds = parameters(model, mixer), step(model, mixer, plan)
            table.add_row(
                mixer.name,
                f"{count['total'] / BILLION:.1f}, {count['active'] / BILLION:.2f}",
                *(f"{1e3 * seconds[name]:.0f}" for name in parts),
                percent(gain(model, mixer, chosen["theirs"], plan)),
            )
        table.add_section()
    return table


def assumptions_table(chosen: dict[str, Mixer], plan: Plan) -> Table:
    """Gains for many assumptions, from the smallest model of the ladder to the largest."""
    table = new_table(
        "Gain of SLA-R4 over KDA by Tokamax's kernel in %, smallest to largest model (* all in the published range)",
        "softmax, forward again, efficiency",
        *(
            f"{title}, {tokens} tokens a chip"
            for title in ("as many value heads", "as large a state")
            for tokens in TOKENS
        ),
    )
    for softmax in (4, None):
        for remat in (False, True):
            for efficiency in (0.4, 0.5, 0.6, 0.7):
                cells = []
                for key in ("heads", "state"):
                    for tokens in TOKENS:
                        changed = dataclasses.replace(plan, remat=remat, efficiency=efficiency, tokens=tokens)
                        models = [dataclasses.replace(model, softmax_every=softmax) for model in LADDER.values()]
                        gains = [gain(model, chosen[key], chosen["theirs"], changed) for model in models]
                        inside = all(PUBLISHED[0] <= round(x, 2) <= PUBLISHED[1] for x in gains)
                        cells.append(" ".join(f"{100 * x:.0f}" for x in gains) + (" *" if inside else "  "))
                words = f"{'1 layer of 4' if softmax else 'none'}, {'yes' if remat else 'no'}, {efficiency}"
                table.add_row(words, *cells)
        table.add_section()
    return table


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=Plan.tokens, help="per chip and step")
    parser.add_argument("--efficiency", type=float, default=Plan.efficiency, help="of dense products")
    parser.add_argument("--slowdown", type=float, default=Plan.slowdown, help="of a kernel over its schedule")
    parser.add_argument("--expert-chips", type=int, default=Plan.expert_chips, help="a cube of them holds all experts")
    parser.add_argument("--no-remat", action="store_true", help="no forward pass is computed again")
    parser.add_argument("--compile", metavar="PYTHON", help="compile our kernels first, by its jax and libtpu")
    options = parser.parse_args()
    if options.compile:
        FIGURES.write_text(json.dumps(compile_figures(options.compile), indent=1, sort_keys=True) + "\n")
    operators = read_figures()
    plan = Plan(
        tokens=options.tokens,
        efficiency=options.efficiency,
        slowdown=options.slowdown,
        expert_chips=options.expert_chips,
        remat=not options.no_remat,
    )
    chosen = mixers(operators)
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print("A prediction. None of it was run on a TPU.", style="bold")
    console.print(inputs_table(operators))
    console.print(step_table(chosen, plan))
    console.print(assumptions_table(chosen, plan))
    theirs, ours = chosen["theirs"].operator, chosen["heads"].operator
    ratio = (theirs.both + theirs.forward * plan.remat) / (ours.both + ours.forward * plan.remat)
    shares = " and ".join(percent(needed_share(x, ratio)) for x in PUBLISHED)
    console.print(
        f"Our operator is {ratio:.1f} times as fast as Tokamax's at as many value heads. If nothing else changes, "
        f"11 % and 24 % mean that KDA's operator took {shares} of a step."
    )


if __name__ == "__main__":
    main()
