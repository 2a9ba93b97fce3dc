"""A whole hybrid language model from a published checkpoint: gated-delta layers by `load_mixer`, the rest written here.

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

from gated_delta import GatedDeltaMixer, MixerState
from gated_delta.checkpoints import load_mixer

GOLDENS = pathlib.Path(__file__).resolve().parents[1] / "tests" / "goldens"
TOLERANCE = 1e-4  # of the largest logit, in float32: transformers' own float32 is off by up to 1.4e-5


# ----------------------------------------------------------------------------------------- the parts of a decoder layer


def linear(x: Array, weight: Array) -> Array:
    """`weight` is [outputs, inputs], as in the files."""
    return x @ weight.T


def attend(q: Array, k: Array, v: Array, visible: Array) -> Array:
    """Softmax attention, in float32 or wider. Each head of k and v serves an equal group of q's.

    `q` is [batch, time, heads, dim], `k` and `v` [batch, capacity, kv_heads, dim], `visible` [batch, time, capacity].
    """
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=wide)
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, jnp.finfo(wide).min), axis=-1)
    return jnp.einsum("bkgts,bskd->btkgd", weights.astype(v.dtype), v)


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


class Cache(eqx.Module):
    """What attention remembers: keys and values of every position so far, and which of them are no padding."""

    keys: Array  # [batch, capacity, kv_heads, dim]
    values: Array
    real: Array  # [batch, capacity]
    count: Array  # positions filled, padding included


class Attention(eqx.Module):
    """Causal softmax attention with rotary positions and normalised queries and keys; Qwen's has an output gate.

    Every head of q_proj's rows is a query and, with a gate, the gate behind it.
    """

    q: Array
    k: Array
    v: Array
    out: Array
    q_norm: RMSNorm
    k_norm: RMSNorm
    dim: int = eqx.field(static=True)
    gated: bool = eqx.field(static=True)
    norm_per_head: bool = eqx.field(static=True)  # else over all heads at once
    rotary: tuple[int, float] = eqx.field(static=True)  # how many channels turn, and the base; 0 for none

    def init_state(self, batch: int, capacity: int, dtype) -> Cache:
        cache = jnp.zeros((batch, capacity, self.k.shape[0] // self.dim, self.dim), dtype)
        return Cache(cache, cache, jnp.zeros((batch, capacity), bool), jnp.array(0))

    def __call__(self, x: Array, cache: Cache, mask: Array) -> tuple[Array, Cache]:
        batch, time, _ = x.shape
        q, gate = linear(x, self.q), None
        if self.gated:
            q, gate = jnp.split(q.reshape(batch, time, -1, 2 * self.dim), 2, axis=-1)
            q, gate = q.reshape(batch, time, -1), gate.reshape(batch, time, -1)
        q, k = self.normalise(q, self.q_norm), self.normalise(linear(x, self.k), self.k_norm)
        v = linear(x, self.v).reshape(batch, time, -1, self.dim)
        positions = cache.count + jnp.arange(time)
        q, k = self.rotate(q, positions), self.rotate(k, positions)

        def put(old, new):
            return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), cache.count, axis=1)

        cache = Cache(put(cache.keys, k), put(cache.values, v), put(cache.real, mask), cache.count + time)
        visible = jnp.arange(cache.real.shape[1]) <= positions[:, None]  # [time, capacity]
        out = attend(q, cache.keys, cache.values, visible & cache.real[:, None]).reshape(batch, time, -1)
        return linear(out if gate is None else out * jax.nn.sigmoid(gate), self.out), cache

    def normalise(self, x: Array, norm: RMSNorm) -> Array:
        heads = (*x.shape[:2], -1, self.dim)
        return norm(x.reshape(heads)) if self.norm_per_head else norm(x).reshape(heads)

    def rotate(self, x: Array, positions: Array) -> Array:
        """Turns pairs of the first channels, a half apart, by angles that grow with the position."""
        turning, base = self.rotary
        rates = 1 / base ** (np.arange(0, turning, 2, dtype=np.float32) / turning)  # float32 in the models' code too
        angles = positions[:, None, None] * rates.astype(jnp.promote_types(x.dtype, jnp.float32))
        a, b, rest = jnp.split(x, [turning // 2, turning], axis=-1)
        cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


# --------------------------------------------------------------------------------------------- the layer and the model


class Block(eqx.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)). OLMo's attention layers have the norms behind: x + norm(mixer(x))."""

    mixer_norm: RMSNorm
    mixer: GatedDeltaMixer | Attention
    mlp_norm: RMSNorm
    mlp: SwiGLU
    norm_behind: bool = eqx.field(static=True)

    def __call__(self, x: Array, state: Any, mask: Array) -> tuple[Array, MixerState | Cache]:
        def mix(x):
            if isinstance(self.mixer, Attention):
                return self.mixer(x, state, mask)
            if x.shape[1] == 1:  # decoding: one pass over the state
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

    def init_state(self, batch: int, capacity: int) -> list[MixerState | Cache]:
        """Gated-delta states do not grow; `capacity` is for attention."""
        mixers, dtype = [block.mixer for block in self.blocks], self.embed.dtype
        return [
            mixer.init_state(batch, capacity, dtype)
            if isinstance(mixer, Attention)
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
        dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        rope = config.get("rope_parameters") or config  # older configs have its entries at the top
        turning = int(dim * rope.get("partial_rotary_factor", 1.0)) if rope.get("rope_theta") else 0
        return Attention(
            *(tensors(prefix, f"{part}_proj") for part in "qkvo"),
            q_norm=norm(prefix, "q_norm"),
            k_norm=norm(prefix, "k_norm"),
            dim=dim,
            gated=family.gated,
            norm_per_head=family.norm_per_head,
            rotary=(turning, rope.get("rope_theta") or 1.0),
        )

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
