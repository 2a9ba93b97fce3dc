"""The record of a `SoftmaxAttention` layer."""

import dataclasses
import json
from typing import Literal, TypeAlias

from gated_delta._activations import Activation
from gated_delta._options import check_precision
from gated_delta._types import a_type, no_type_check
from gated_delta._variant import (
    Initialisation,
    check_entries,
    check_size,
    check_word,
    make_floats,
    read_record,
)

HeadNorm: TypeAlias = Literal["none", "head", "all"]


@no_type_check
@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Everything that decides the structure and the numbers of a `SoftmaxAttention`, but not its parameters' values.

    `SoftmaxAttention(config, key=key)` builds the layer; `AttentionConfig.from_json(config.to_json()) == config`.

    **Attributes:**

    - `model`: size of the layer's inputs and outputs.
    - `query_heads`, `kv_heads`: `kv_heads` divides `query_heads`; as many as those if `None`.
    - `key_dim`, `value_dim`: `model // query_heads` and `key_dim` if `None`.
    - `window`: a token sees itself and the `window - 1` tokens before it; `None`: all before it.
    - `capacity`: for how many tokens of a document a state has room, where `init_state` is not told. `None`: for
        `window`; without one, `init_state` must be told, and a call without a state returns one that is full.
    - `rotary`: which part of the key channels turns with the position, the first ones; 0 for none, 1 for all.
    - `rotary_base`: pair `i` of `n` turning channels turns by `rotary_base ** (-2 i / n)` per token.
    - `qk_norm`: RMSNorm of queries and keys: `"none"`, of each `"head"`, or of `"all"` heads together.
    - `norm_one_plus`: these norms multiply by `1 + weight`, as Qwen's do.
    - `norm_eps`: of them.
    - `output_gate`: `"sigmoid"`, `"silu"` or `None`: what multiplies the output of every head and channel.
    - `softcap`, `scale`, `precision`: as for `softmax_attention`.
    - `init`: how matrices begin: `"uniform"` within `inputs ** -0.5`, `"normal"` of deviation 0.02, or `"xavier"`,
        uniform with gain `2 ** -2.5`.

    **Raises:** `TypeError` and `ValueError` for values that mean nothing.
    """

    model: int
    query_heads: int
    kv_heads: int | None = None
    key_dim: int | None = None
    value_dim: int | None = None
    window: int | None = None
    capacity: int | None = None
    rotary: float = 0.0
    rotary_base: float = 10000.0
    qk_norm: HeadNorm = "none"
    norm_one_plus: bool = False
    norm_eps: float = 1e-6
    output_gate: Activation | None = None
    softcap: float | None = None
    scale: float | None = None
    init: Initialisation = "uniform"
    precision: str | None = None

    def __post_init__(self):
        check_size("model", self.model)
        check_size("query_heads", self.query_heads)
        if self.key_dim is None and self.model % self.query_heads:
            raise ValueError(
                f"`AttentionConfig` needs `key_dim` where query_heads = {self.query_heads} does not divide model = "
                f"{self.model}."
            )
        key_dim = self.model // self.query_heads if self.key_dim is None else self.key_dim
        for name, default in (("kv_heads", self.query_heads), ("key_dim", key_dim), ("value_dim", key_dim)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
            check_size(name, getattr(self, name))
        for name in ("window", "capacity"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        make_floats(self, "rotary", "rotary_base", "norm_eps", "softcap", "scale")
        if self.query_heads % self.sizes[1]:
            raise ValueError(
                f"`AttentionConfig` needs query_heads to be a multiple of kv_heads, but they are {self.query_heads} "
                f"and {self.kv_heads}."
            )
        if self.window is not None and self.capacity is not None and self.capacity < self.window:
            raise ValueError(
                f"`AttentionConfig(window={self.window}, capacity={self.capacity})`: a state must hold a whole window."
            )
        if not 0 <= self.rotary <= 1 or self.rotary_channels % 2:
            raise ValueError(
                f"`AttentionConfig(rotary={self.rotary})` must lie in 0 to 1 and make an even number of the key_dim = "
                f"{self.key_dim} channels turn, but it is {self.rotary * self.sizes[2]:g}: they turn in pairs."
            )
        if not self.rotary_base > 0:
            raise ValueError(f"`rotary_base={self.rotary_base}` must be above 0.")
        if not self.norm_eps > 0:
            raise ValueError(f"`norm_eps={self.norm_eps}` must be above 0: a zero vector has no direction.")
        if self.softcap is not None and not 0 < self.softcap < float("inf"):
            raise ValueError(f"`softcap={self.softcap}` must be above 0 and finite. `None` is no cap.")
        if not isinstance(self.norm_one_plus, bool):
            raise TypeError(f"`norm_one_plus` must be True or False, but {a_type(self.norm_one_plus)} came.")
        check_word("AttentionConfig", "qk_norm", self.qk_norm, HeadNorm)
        check_word("AttentionConfig", "init", self.init, Initialisation)
        if self.output_gate is not None:
            check_word("AttentionConfig", "output_gate", self.output_gate, Activation)
        check_precision(self.precision)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """`query_heads`, `kv_heads`, `key_dim` and `value_dim`, where none was left out."""
        assert self.kv_heads is not None and self.key_dim is not None and self.value_dim is not None
        return self.query_heads, self.kv_heads, self.key_dim, self.value_dim

    @property
    def rotary_channels(self) -> int:
        """How many channels of a head turn."""
        return int(self.sizes[2] * self.rotary)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    @classmethod
    @no_type_check
    def from_json(cls, text: str) -> "AttentionConfig":
        """The config that `to_json` wrote.

        **Raises:** `ValueError` for what is no JSON, and one that names the entries which are unknown or missing.
        """
        return cls(**check_entries(cls, read_record(cls, text)))
