"""Records: `Variant` says which member of the family a layer is, `MixerConfig` all that rebuilds the layer."""

import dataclasses
import json
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from ._activations import Activation, NormNumerics
from ._types import DecayGranularity, EraseGranularity, Owner, WriteGranularity, a_type, no_type_check

QKNorm: TypeAlias = Literal["l2", "none"]
Initialisation: TypeAlias = Literal["uniform", "normal", "xavier"]
StepInitialisation: TypeAlias = Literal["log_uniform", "ones", "zeros"]
QKVActivation: TypeAlias = Literal["silu", "none"]
Number: TypeAlias = float | int
Rank: TypeAlias = int | Literal["value_dim"] | None


@no_type_check
@dataclasses.dataclass(frozen=True)
class Variant:
    """A member of the gated delta family: how fine its gates are and who owns them. It holds no code.

    **Attributes:**

    - `decay`: `"none"`, `"head"`, `"tile"` (`decay_tiles` equal runs of key channels) or `"channel"`.
    - `decay_owner`: whose heads index decay and erase: `"key"` (shared by a group of value heads) or `"value"`.
    - `erase`: `"none"`, `"head"` or `"channel"` (of the key).
    - `write`: `"one"`, `"head"` or `"channel"` (of the value); per value head, unless `tied`.
    - `tied`: one beta is both erase and write; both are then `"head"`.
    - `erase_max`: the largest erase: 1, or 2 where it is doubled.
    - `log_decay_min`: `None`, or the bound of a bounded decay, in `[-5, 0)`.
    - `qk_norm`: `"l2"`: queries and keys have unit length per head. `"none"`: they are left alone.
    - `scale`: of the query; `None` is `key_dim ** -0.5`.

    **Raises:** `ValueError` for words it does not know and for combinations that mean nothing.
    """

    decay: DecayGranularity = "head"
    decay_tiles: int | None = None
    decay_owner: Owner = "value"
    erase: EraseGranularity = "head"
    write: WriteGranularity = "head"
    tied: bool = True
    erase_max: float = 1.0
    log_decay_min: float | None = None
    qk_norm: QKNorm = "l2"
    scale: float | None = None

    def __post_init__(self):
        make_floats(self, "erase_max", "log_decay_min", "scale")
        words = (("decay", DecayGranularity), ("decay_owner", Owner), ("erase", EraseGranularity))
        for name, allowed in (*words, ("write", WriteGranularity), ("qk_norm", QKNorm)):
            check_word("Variant", name, getattr(self, name), allowed)
        if self.tied and (self.erase, self.write) != ("head", "head"):
            raise ValueError(
                f"`Variant(tied=True)` needs `erase='head'` and `write='head'`, but they are {self.erase!r} and "
                f"{self.write!r}. One number per head is both; set `tied=False` for gates of their own."
            )
        if (self.decay == "tile") != (self.decay_tiles is not None):
            raise ValueError(
                f"`Variant(decay={self.decay!r}, decay_tiles={self.decay_tiles})`: a number of tiles goes with "
                "`decay='tile'`, and only with it."
            )
        if self.decay_tiles is not None and self.decay_tiles < 1:
            raise ValueError(f"`Variant(decay_tiles={self.decay_tiles})` must be at least 1.")
        if self.erase_max not in (1, 2):
            raise ValueError(f"`Variant(erase_max={self.erase_max})` must be 1, or 2 where the erase gate is doubled.")
        if self.log_decay_min is not None and (self.decay == "none" or not -5 <= self.log_decay_min < 0):
            raise ValueError(
                f"`Variant(decay={self.decay!r}, log_decay_min={self.log_decay_min})`: a bounded decay needs a "
                "bound in [-5, 0). Below -5 the kernels that use it could leave the range of float32 within 16 tokens."
            )

    def decay_groups(self, key_dim: int) -> int:
        """How many log decays one head has."""
        return {"none": 0, "head": 1, "tile": self.decay_tiles or 0, "channel": key_dim}[self.decay]


@no_type_check
@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """Everything that decides the structure and the numbers of a `GatedDeltaMixer`, but not its parameters' values.

    `GatedDeltaMixer(config, key=key)` builds the layer; `MixerConfig.from_json(config.to_json()) == config`.

    **Attributes:**

    - `variant`: the rule.
    - `model`: size of the layer's inputs and outputs.
    - `key_heads`, `value_heads`, `key_dim`, `value_dim`: `key_heads` divides `value_heads`.
    - `conv_width`: taps of the short convolutions of q, k and v; `None` for none.
    - `conv_bias`: whether the convolutions have a bias.
    - `qkv_activation`: what follows the convolutions (or, without them, the projections): `"silu"` or `"none"`.
    - `decay_rank`: rank of the decay's input, or `None` for one full matrix.
    - `has_rate`: whether the decay has `A_log`. Only a bounded decay can do without.
    - `decay_rates`: `exp(A_log)` begins uniformly distributed between these two.
    - `step_init`: how `dt_bias` begins: `"log_uniform"`, the inverse softplus of `[0.001, 0.1]`, `"ones"` or
        `"zeros"`.
    - `output_gate`: `"silu"`, `"sigmoid"` or `None`: what multiplies the normalised output.
    - `output_gate_rank`: rank of the output gate's input, or `None` for one full matrix.
    - `output_gate_bias`: whether the output gate's (second) matrix has a bias.
    - `norm_eps`, `norm_numerics`: of the RMSNorm of every value head; see `gated_rms_norm`.
    - `init`: how matrices begin: `"uniform"` within `inputs ** -0.5`, `"normal"` of deviation 0.02, or `"xavier"`,
        uniform with gain `2 ** -2.5`.
    - `inverse`, `precision`: as for `gated_delta`; `inverse="auto"` is `"approx"` where x is bfloat16 and `erase_max`
        is 1, else `"exact"`.
    """

    variant: Variant
    model: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int | None = 4
    conv_bias: bool = False
    qkv_activation: QKVActivation = "silu"
    decay_rank: int | None = None
    has_rate: bool = True
    decay_rates: tuple[float, float] = (1.0, 16.0)
    step_init: StepInitialisation = "log_uniform"
    output_gate: Activation | None = "sigmoid"
    output_gate_rank: int | None = None
    output_gate_bias: bool = False
    norm_eps: float = 1e-5
    norm_numerics: NormNumerics = "float32"
    init: Initialisation = "uniform"
    inverse: str = "exact"
    precision: str | None = None

    def __post_init__(self):
        make_floats(self, "norm_eps")
        if not isinstance(self.variant, Variant):
            raise TypeError(
                f"`MixerConfig(variant=...)` must be a `Variant`, but {a_type(self.variant)} came. Those of the "
                "published members are `gdn`, `kda`, `gdn2`, `sla`, `delta_net` and `gla` of `gated_delta.variants`."
            )
        for name in ("model", "key_heads", "value_heads", "key_dim", "value_dim"):
            check_size(name, getattr(self, name))
        for name in ("conv_width", "decay_rank", "output_gate_rank"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"A mixer needs value_heads to be a multiple of key_heads, but they are {self.value_heads} and "
                f"{self.key_heads}: each key head serves an equal group of value heads."
            )
        if self.variant.decay_tiles is not None and self.key_dim % self.variant.decay_tiles:
            raise ValueError(
                f"A mixer needs key_dim to be a multiple of decay_tiles, but they are {self.key_dim} and "
                f"{self.variant.decay_tiles}: a tile is an equal run of key channels."
            )
        if not self.has_rate and self.variant.log_decay_min is None:
            raise ValueError("`has_rate=False` (no `A_log`) needs a bounded decay: give a bound in [-5, 0).")
        if isinstance(self.decay_rates, list):  # from JSON
            object.__setattr__(self, "decay_rates", tuple(self.decay_rates))
        check_numbers("decay_rates", *self.decay_rates)
        object.__setattr__(self, "decay_rates", tuple(float(rate) for rate in self.decay_rates))
        if len(self.decay_rates) != 2 or not 0 < self.decay_rates[0] <= self.decay_rates[1]:
            raise ValueError(
                f"`decay_rates={self.decay_rates}` must be (low, high) with 0 < low <= high: 0 has no logarithm."
            )
        if self.output_gate is not None:
            check_word("MixerConfig", "output_gate", self.output_gate, Activation)
        for name, allowed in (
            ("norm_numerics", NormNumerics),
            ("init", Initialisation),
            ("step_init", StepInitialisation),
            ("qkv_activation", QKVActivation),
        ):
            check_word("MixerConfig", name, getattr(self, name), allowed)
        if not self.norm_eps > 0:
            raise ValueError(f"`norm_eps={self.norm_eps}` must be above 0: a zero output has no direction.")

    @property
    def owners(self) -> int:
        """How many heads own decay and erase."""
        return self.key_heads if self.variant.decay_owner == "key" else self.value_heads

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    @no_type_check
    def from_json(cls, text: str) -> "MixerConfig":
        """The config that `to_json` wrote.

        **Raises:** `ValueError` for what is no JSON, and one that names the entries which are unknown or missing.
        """
        record = read_record(cls, text, " with an object `variant`")
        if not isinstance(record.get("variant"), dict):
            raise ValueError(
                "`MixerConfig.from_json` needs a JSON object with an object `variant`, as `to_json` writes it."
            )
        variant = Variant(**check_entries(Variant, record["variant"]))
        return cls(**{**check_entries(cls, record), "variant": variant})


def instead_of_a_config(came: Any) -> str:
    """What to do where a `Variant` was given for a `MixerConfig`: a sentence behind a blank, or nothing."""
    if not isinstance(came, Variant):
        return ""
    return " Wrap it: `MixerConfig(variant, model=..., key_heads=..., value_heads=..., key_dim=..., value_dim=...)`."


def read_record(cls, text: Any, having: str = "") -> dict[str, Any]:
    """The JSON object that is written in `text`.

    **Raises:** `TypeError` and `ValueError` for anything else.
    """
    name, rule = cls.__name__, f"`{cls.__name__}.from_json` needs a JSON object{having}, as `to_json` writes it"
    if not isinstance(text, (str, bytes, bytearray)):
        raise TypeError(f"{rule}, but {a_type(text)} came. For a file give `{name}.from_json(path.read_text())`.")
    try:
        record = json.loads(text)
    except ValueError as error:
        start = repr(text if len(text) < 40 else text[:40])
        raise ValueError(
            f"{rule}, but what came is no JSON ({error}). It begins with {start}; for a file give its text, "
            f"`{name}.from_json(path.read_text())`."
        ) from error
    if not isinstance(record, dict):
        raise ValueError(f"{rule}, but {a_type(record)} came.")
    return record


def check_entries(cls, record: dict[str, Any]) -> dict[str, Any]:
    fields = dataclasses.fields(cls)
    unknown = sorted(set(record) - {field.name for field in fields})
    missing = sorted(f.name for f in fields if f.default is dataclasses.MISSING and f.name not in record)
    if unknown or missing:
        raise ValueError(
            f"This JSON is no `{cls.__name__}`: unknown entries {unknown}, missing entries {missing}. It may come from "
            "another version of gated_delta."
        )
    return record


def make_floats(record, *names: str):
    """Numbers of a frozen record as Python floats, so that 1 and 1.0 are one configuration."""
    for name in names:
        value = getattr(record, name)
        if value is not None:
            check_numbers(name, value)
            object.__setattr__(record, name, float(value))


def check_numbers(name: str, *values):
    for value in values:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"`{name}` must be a Python number, since it is static, but {a_type(value)} came.")


def check_word(owner: str, name: str, value, allowed):
    if value not in get_args(allowed):
        words = ", ".join(repr(word) for word in get_args(allowed))
        raise ValueError(f"`{owner}({name}={value!r})` is not known: use one of {words}.")


def check_size(name: str, value):
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"`{name}` must be a Python int, since it is a shape, but {a_type(value)} came.")
    if value < 1:
        raise ValueError(f"`{name}={value}` must be at least 1.")


class Sizes(TypedDict):
    """The sizes of a `MixerConfig`."""

    model: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@no_type_check
def choose_rank(rank: Rank, value_dim: int) -> int | None:
    """The rank of a constructor's argument: `"value_dim"` is that size, `None` full rank."""
    if isinstance(rank, str) and rank != "value_dim":
        raise ValueError(f"A rank of {rank!r} is not known: use a number, 'value_dim', or None for full rank.")
    return value_dim if isinstance(rank, str) else rank


@no_type_check
def choose_rates(rates: Any, bound: Number | None, low: float, high: float = 16.0) -> Any:
    """Where `exp(A_log)` begins: as given, or at 1 for a bounded decay, or within `(low, high)`."""
    if rates is not None:
        return rates
    return (low, high) if bound is None else (1.0, 1.0)


@no_type_check
def choose_sizes(
    model: int,
    key_heads: int | None,
    value_heads: int | None,
    key_dim: int | None,
    value_dim: int | None,
    *,
    expansion: int = 1,
) -> Sizes:
    """Keys of 128 (or of `model`, where that is smaller), values `expansion` times as wide, and no groups: as many
    heads as make such values as wide as the model."""
    check_size("model", model)
    key_dim = min(128, model) if key_dim is None else key_dim
    check_size("key_dim", key_dim)
    key_heads = max(1, model // (expansion * key_dim)) if key_heads is None else key_heads
    value_heads = key_heads if value_heads is None else value_heads
    value_dim = expansion * key_dim if value_dim is None else value_dim
    return Sizes(model=model, key_heads=key_heads, value_heads=value_heads, key_dim=key_dim, value_dim=value_dim)


@no_type_check
def choose_group_sizes(
    model: int, group: int, tiles: int, key_heads: int | None, key_dim: int | None, value_dim: int | None
) -> Sizes:
    """Keys of 256, values of 128 (less in a small model), and groups for a state of 128 * model numbers."""
    for name, value in (("model", model), ("group", group), ("decay_tiles", tiles)):
        check_size(name, value)
    key_dim = max(1, min(256, model) // tiles) * tiles if key_dim is None else key_dim
    value_dim = min(128, model) if value_dim is None else value_dim
    check_size("key_dim", key_dim)
    check_size("value_dim", value_dim)
    key_heads = max(1, round(128 * model / (key_dim * value_dim * group))) if key_heads is None else key_heads
    check_size("key_heads", key_heads)
    return Sizes(model=model, key_heads=key_heads, value_heads=group * key_heads, key_dim=key_dim, value_dim=value_dim)
