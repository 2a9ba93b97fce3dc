"""A whole hybrid language model from a published checkpoint: gated-delta layers by `load_mixer`, softmax attention by
`SoftmaxAttention`, the rest written here.

    python examples/hybrid_from_checkpoint.py                                    # the tiny checkpoints of tests/goldens
    python examples/hybrid_from_checkpoint.py FOLDER --prompt 5 17 3 --tokens 20  # continue tokens of your own

FOLDER has config.json and model.safetensors, or the index of a sharded checkpoint. Beside the tiny checkpoints lie the
logits and greedy tokens that transformers computed with them; the table says how far ours are off.

The file reads from top to bottom: the parts of a decoder layer, the layer, the model, what differs between families,
loading, generating. Families: Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi Linear (of these models the layers with experts,
and Kimi's latent attention, are not here: `load` says so).
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors import safe_open
from safetensors.numpy import load_file

from gated_delta import AttentionConfig, GatedDeltaMixer, KVCache, MixerState, SoftmaxAttention
from gated_delta.checkpoints import load_mixer

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "tests" / "goldens"
TOLERANCE = 1e-4  # of the largest logit, in float32: transformers' own float32 is off by up to 1.4e-5


# ----------------------------------------------------------------------------------------- the parts of a decoder layer


def linear(x: Array, weight: Array) -> Array:
    """`weight` is [outputs, inputs], as in the files."""
    return x @ weight.T


class RMSNorm(eqx.Module):
    """Over the last axis, in float32 or wider, times `weight` or, in the layers of Qwen, `1 + weight`."""

    weight: Array
    eps: float = eqx.field(static=True)
    one_plus: bool = eqx.field(static=True)

    def __call__(self, x: Array) -> Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        weight = self.weight.astype(wide.dtype) + (1 if self.one_plus else 0)
        return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + self.eps) * weight).astype(x.dtype)


class SwiGLU(eqx.Module):
    gate: Array
    up: Array
    down: Array

    def __call__(self, x: Array) -> Array:
        return linear(jax.nn.silu(linear(x, self.gate)) * linear(x, self.up), self.down)


# --------------------------------------------------------------------------------------------- the layer and the model


class Block(eqx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). OLMo's attention layers have the norms behind: x + norm(mixer(x))."""

    mixer_norm: RMSNorm
    mixer: GatedDeltaMixer | SoftmaxAttention
    mlp_norm: RMSNorm
    mlp: SwiGLU
    norm_behind: bool = eqx.field(static=True)

    def __call__(self, x: Array, state: Any, mask: Array) -> tuple[Array, MixerState | KVCache]:
        def mix(x):
            if x.shape[1] == 1:  # decoding
                out, new = self.mixer.step(x[:, 0], state)
                return out[:, None], new
            return self.mixer(x, state, mask=mask)

        out, state = mix(x if self.norm_behind else self.mixer_norm(x))
        x = x + (self.mixer_norm(out) if self.norm_behind else out)
        return x + (self.mlp_norm(self.mlp(x)) if self.norm_behind else self.mlp(self.mlp_norm(x))), state


class Model(eqx.Module):
    embed: Array
    blocks: list[Block]
    norm: RMSNorm
    head: Array

    def init_state(self, batch: int, capacity: int) -> list[MixerState | KVCache]:
        """Gated-delta states do not grow; `capacity` is for attention."""
        mixers, dtype = [block.mixer for block in self.blocks], self.embed.dtype
        return [
            mixer.init_state(batch, capacity=capacity, dtype=dtype)
            if isinstance(mixer, SoftmaxAttention)
            else mixer.init_state(batch, dtype=dtype)
            for mixer in mixers
        ]

    def __call__(self, tokens: Array, states: list, mask: Array) -> tuple[Array, list]:
        """Tokens `[batch, time]` to logits `[batch, time, vocabulary]`: a prompt, its continuation, or one token."""
        x, new = self.embed[tokens], []
        for block, state in zip(self.blocks, states, strict=True):
            x, state = block(x, state, mask)
            new.append(state)
        return linear(self.norm(x), self.head), new


# --------------------------------------------------------------------------------------- what differs between families


@dataclasses.dataclass(frozen=True)
class Family:
    """Names and conventions around the gated-delta layer, which `load_mixer` knows by itself."""

    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")  # of mixer and MLP
    norms_behind: tuple[str, str] | None = None  # attention layers have these instead, behind mixer and MLP
    one_plus: bool = False
    gated: bool = False
    norm_per_head: bool = True
    latent_attention: bool = False


QWEN = Family(one_plus=True, gated=True)
FAMILIES = {
    "qwen3_next": QWEN,
    "qwen3_5": QWEN,
    "qwen3_5_text": QWEN,
    "olmo_hybrid": Family(  # transformers 5.24.0 saves the norm behind attention as feedforward_layer_norm
        norms=("attention_layer_norm", "feedforward_layer_norm"),
        norms_behind=("post_attention_layernorm|feedforward_layer_norm", "post_feedforward_layernorm"),
        norm_per_head=False,
    ),
    "kimi_linear": Family(latent_attention=True),
}


# -------------------------------------------------------------------------------------------------------------- loading


class Tensors:
    """The tensors of a checkpoint by name, one read at a time, and no others."""

    def __init__(self, folder: pathlib.Path):
        index = folder / "model.safetensors.index.json"
        if index.exists():
            shards = json.loads(index.read_text())["weight_map"]
        else:
            shards = dict.fromkeys(safe_open(folder / "model.safetensors", "np").keys(), "model.safetensors")
        self.files = {name: folder / shard for name, shard in shards.items()}

    def __call__(self, prefix: str, names: str) -> Array:
        """The weight `prefix + name`; `names` is a name, or `one|another`."""
        for name in names.split("|"):
            if (full := f"{prefix}{name}.weight") in self.files:
                return jnp.array(safe_open(self.files[full], "np").get_tensor(full))
        raise SystemExit(f"error: there is no {prefix}{names}.weight; layers with experts are not in this example")


def load(folder: pathlib.Path) -> Model:
    """The model in a folder: every gated-delta layer through `load_mixer`, everything else by its name."""
    config = json.loads((folder / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}
    if config["model_type"] not in FAMILIES:
        raise SystemExit(f"error: {config['model_type']} is none of {', '.join(FAMILIES)}")
    family, tensors = FAMILIES[config["model_type"]], Tensors(folder)

    def norm(prefix, names):
        return RMSNorm(tensors(prefix, names), config["rms_norm_eps"], family.one_plus)

    def attention(prefix):
        if family.latent_attention:
            raise SystemExit("error: Kimi's latent attention is not part of this example")
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        dim = config.get("head_dim") or hidden // heads
        rope = config.get("rope_parameters") or config  # older configs have its entries at the top
        record = AttentionConfig(
            hidden,
            query_heads=heads,
            kv_heads=config["num_key_value_heads"],
            key_dim=dim,
            rotary=rope.get("partial_rotary_factor", 1.0) if rope.get("rope_theta") else 0.0,
            rotary_base=rope.get("rope_theta") or 1.0,
            qk_norm="head" if family.norm_per_head else "all",
            norm_one_plus=family.one_plus,
            norm_eps=config["rms_norm_eps"],
            output_gate="sigmoid" if family.gated else None,
        )
        parts = {part: tensors(prefix, part) for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")}
        mixer = SoftmaxAttention(record, key=jax.random.key(0))
        if family.gated:  # every head's queries, and its gates behind them
            both = parts["q_proj"].reshape(heads, 2, dim, hidden)
            parts["q_proj"], gate = (both[:, i].reshape(-1, hidden) for i in (0, 1))
            mixer = eqx.tree_at(lambda m: m.out_gate.project.weight, mixer, gate)
        for name, weight in parts.items():
            mixer = eqx.tree_at(lambda m, name=name: getattr(m, name).weight, mixer, weight)
        return mixer

    def block(layer):
        prefix = f"{stem}layers.{layer}."
        is_attention = not {f"{prefix}linear_attn.A_log", f"{prefix}self_attn.A_log"} & tensors.files.keys()
        behind = family.norms_behind if is_attention else None
        mixer_norm, mlp_norm = behind or family.norms
        return Block(
            norm(prefix, mixer_norm),
            attention(f"{prefix}self_attn.") if is_attention else load_mixer(folder, layer=layer),
            norm(prefix, mlp_norm),
            SwiGLU(*(tensors(f"{prefix}mlp.", f"{part}_proj") for part in ("gate", "up", "down"))),
            norm_behind=behind is not None,
        )

    ending = "embed_tokens.weight"
    stem = next(name for name in tensors.files if name.endswith(ending)).removesuffix(ending)
    embed = tensors(stem, "embed_tokens")
    return Model(
        embed,
        [block(layer) for layer in range(config["num_hidden_layers"])],
        norm(stem, "norm"),
        embed if config.get("tie_word_embeddings") else tensors("", "lm_head"),
    )


# ----------------------------------------------------------------------------------------------------------- generating


@eqx.filter_jit
def run(model: Model, tokens: Array, states: list, mask: Array) -> tuple[Array, list]:
    return model(tokens, states, mask)


def generate(model: Model, prompts: Array, count: int, mask: Array | None = None) -> np.ndarray:
    """The prompts `[batch, time]` and their `count` most likely tokens, one after the other.

    `mask` is true at real tokens; prompts of unequal length are padded on the left.
    """
    mask = jnp.ones(prompts.shape, bool) if mask is None else mask
    logits, states = run(model, prompts, model.init_state(len(prompts), prompts.shape[1] + count), mask)
    tokens = [np.asarray(prompts), np.argmax(logits[:, -1:], axis=-1).astype(np.int32)]
    real = jnp.ones((len(prompts), 1), bool)
    for _ in range(count - 1):
        logits, states = run(model, jnp.asarray(tokens[-1]), states, real)
        tokens.append(np.argmax(logits, axis=-1).astype(np.int32))
    return np.concatenate(tokens, axis=1)


def compare(folder: pathlib.Path) -> bool:
    """One line of the table: our logits and greedy tokens beside those that lie in the folder."""
    start, golden = time.perf_counter(), load_file(folder / "model_io.safetensors")
    model = load(folder)
    prompts, expected = jnp.asarray(golden["in/input_ids"].astype(np.int32)), golden["out/logits"]
    greedy = golden["out/greedy_ids"]  # of the first prompt
    new = greedy.shape[1] - prompts.shape[1]
    logits, _ = run(model, prompts, model.init_state(len(prompts), greedy.shape[1]), jnp.ones(prompts.shape, bool))
    error = np.abs(np.asarray(logits) - expected).max() / np.abs(expected).max()
    equal = np.sum(generate(model, prompts, new)[:1, -new:] == greedy[:, -new:])
    deltas = sum(isinstance(block.mixer, GatedDeltaMixer) for block in model.blocks)
    print(
        f"{folder.name:<20}{deltas:>12}{len(model.blocks) - deltas:>11}{error:>15.1e}{equal:>9} of {new}"
        f"{time.perf_counter() - start:>9.1f}",
        flush=True,
    )
    return bool(error <= TOLERANCE and equal == new)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="*", type=pathlib.Path, help="checkpoints (default: all in tests/goldens)")
    parser.add_argument("--prompt", nargs="+", type=int, help="token ids to continue, instead of the comparison")
    parser.add_argument("--tokens", type=int, default=12, help="how many to generate (default: 12)")
    options = parser.parse_args(arguments)
    folders = options.folder or sorted(path.parent for path in GOLDENS.glob("*/model_io.safetensors"))
    if options.prompt:
        for folder in folders:
            print(folder.name, *generate(load(folder), jnp.array([options.prompt]), options.tokens)[0])
        return 0
    print(
        f"{'checkpoint':<20}{'gated delta':>12}{'attention':>11}{'logits off by':>15}{'greedy equal':>15}{'seconds':>9}"
    )
    fine = [compare(folder) for folder in folders]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
