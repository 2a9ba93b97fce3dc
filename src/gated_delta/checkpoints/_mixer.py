"""`load_mixer` and `export_mixer`: which layer, which family, whether everything fits; and only then the numbers."""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from gated_delta._activations import Activation
from gated_delta._backend import AbstractBackend
from gated_delta._layer import GatedDeltaMixer
from gated_delta._types import a_type, accumulation_dtype, no_type_check
from gated_delta._variant import MixerConfig

from ._config import Config, mixer_config
from ._families import FAMILIES, Family
from ._files import Checkpoint, Stored, open_checkpoint, read_json
from ._layout import Shape, join, joint_shape, same_shape, split

_PREFIX = re.compile(
    r"((?:(?:(?:model\.)?language_model\.(?:model\.)?|model\.)?layers|transformer\.h)\.(\d+)\."
    r"(?:linear_attn|self_attn|attention|attn)\.)"
)
_QUANTISED = re.compile(r"(weight_scale(_inv)?|qweight|qzeros|scales|g_idx|input_scale)$")
_KNOWN = frozenset(name for family in FAMILIES for name in family.tensors)
_FLOATS = ("float64", "float32", "float16", "bfloat16")


@no_type_check
def load_mixer(
    source: str | os.PathLike | Mapping[str, Any],
    *,
    layer: int | None = None,
    config: str | os.PathLike | Mapping[str, Any] | MixerConfig | None = None,
    output_gate: Activation | None = None,
    backend: AbstractBackend | None = None,
) -> GatedDeltaMixer:
    """One gated-delta layer of a checkpoint.

    The family is recognised by `model_type` of the config, or else by the names of the tensors. Files are mapped into
    memory, and of a sharded checkpoint only the shards that hold the layer are opened. Weights keep the dtype they are
    stored in; `A_log` and `dt_bias` become float32 (float64 where they are stored so).

    **Arguments:**

    - `source`: a `.safetensors` file, a `model.safetensors.index.json`, the folder of either, or a mapping of names to
        arrays.
    - `layer`: which decoder layer, counted from 0. `None`: the names are those of one layer, without a prefix.
    - `config`: the checkpoint's `config.json`, or its folder, or what is in it; or a `MixerConfig`. `None` takes
        `config.json` from the folder of the files.
    - `output_gate`: for GDN-2 only, whose files do not say it: `"sigmoid"` for fla's layers, `"silu"` for NVIDIA's.
    - `backend`: as for `GatedDeltaMixer`.

    **Raises:** one `ValueError` that names every tensor which is missing, unexpected or of another shape than the
    config says, with the expected one; `TypeError` for tensors that are no floating-point numbers, as in quantised
    checkpoints; `FileNotFoundError` for a file or shard that is not there. Nothing is read before all of it fits.
    """
    stored, written = _find_layer(source, layer), ""
    if isinstance(config, MixerConfig):
        if output_gate is not None:
            raise ValueError("Give `output_gate` in the `MixerConfig`, not beside it.")
        family = _families_like(stored.names)[0]
    else:
        entries = _read_config(config, stored.checkpoint)
        _check_kind(entries, layer)
        family = _recognise(entries, stored)
        reader = Config(entries, family.name)
        config = mixer_config(reader, family.variant, family.settings, output_gate)
        written = reader.behind(("model", "key_heads", "key_dim", "value_heads", "value_dim", "conv_width"))
    structure = eqx.filter_eval_shape(GatedDeltaMixer, config, backend=backend, key=jax.random.key(0))
    plan = _make_plan(family, structure, stored, written)
    wide = [tensor.name for tensor in plan if tensor.stored.dtype == "float64"]
    if wide and jnp.zeros(()).dtype != np.float64:
        raise TypeError(f"{', '.join(wide)}: float64, which needs `jax.config.update('jax_enable_x64', True)`.")
    arrays = {}
    for tensor in plan:
        for path, array in split(tensor.stored.read(), tensor.shapes, tensor.blocks).items():
            gate = path in ("decay.A_log", "decay.dt_bias")
            arrays[path] = array.astype(accumulation_dtype(array.dtype)) if gate else array
    return jax.tree_util.tree_map_with_path(lambda path, leaf: jnp.array(arrays[_name(path)]), structure)


@no_type_check
def export_mixer(
    mixer: GatedDeltaMixer, like: str | os.PathLike | Mapping[str, Any], *, layer: int | None = None
) -> dict[str, np.ndarray]:
    """The mixer's parameters under the names, in the shapes and in the dtypes of a checkpoint.

    What `load_mixer` loaded comes back byte for byte. A mixer of gradients is exported alike. Save the result with
    `safetensors.numpy.save_file`.

    **Arguments:**

    - `mixer`: of the family and the sizes of `like`.
    - `like`, `layer`: the checkpoint, as for `load_mixer`. Only names, shapes and dtypes are looked at, so a mapping
        may hold `jax.ShapeDtypeStruct`s.

    **Raises:** as `load_mixer`, where mixer and checkpoint do not fit.
    """
    if not isinstance(mixer, GatedDeltaMixer):
        raise TypeError(f"`export_mixer` needs a `GatedDeltaMixer`, but {a_type(mixer)} came.")
    stored = _find_layer(like, layer)
    arrays, exported = _parameters(mixer), {}
    for tensor in _make_plan(_families_like(stored.names)[0], mixer, stored):
        joined = join({path: np.asarray(arrays[path]) for path in tensor.shapes}, tensor.blocks)
        array = joined.astype(jnp.dtype(tensor.stored.dtype)).reshape(tensor.stored.shape)
        exported[tensor.name] = np.ascontiguousarray(array)
    return exported


# ---- which layer -----------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """The tensors of one layer. `names` has their full names by what follows the prefix."""

    checkpoint: Checkpoint
    prefix: str
    names: dict[str, str]

    def __str__(self) -> str:
        return "The mapping" if self.checkpoint.folder is None else f"`{self.checkpoint.where}`"


def _find_layer(source: Any, layer: Any) -> _Layer:
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
        raise ValueError(f"`layer={layer!r}` must be the number of a decoder layer, counted from 0, or None.")
    checkpoint = open_checkpoint(source)
    gates = [name for name in checkpoint.names if name.endswith(("A_log", "dt_bias"))]
    found = {match[1]: int(match[2]) for match in map(_PREFIX.match, gates) if match}
    layers = ", ".join(map(str, sorted(set(found.values())))) or "none"
    here = _Layer(checkpoint, "", {name: name for name in checkpoint.names})
    if layer is None:
        if found:
            raise ValueError(f"{here} holds a model with gated-delta layers {layers}: say which by `layer=...`.")
        if _KNOWN.isdisjoint(here.names):
            raise ValueError(
                f"{here} must hold the tensors of a gated-delta layer of a known family, with names such as A_log or "
                f"q_proj.weight, but it has {_some(here.names)}.{checkpoint.lack}"
            )
        return here
    if not found and not here.names.keys().isdisjoint(("A_log", "forget_gate.A_log")):
        raise ValueError(
            f"{here} holds one layer, of names without a prefix, and none of number {layer}: leave out `layer`."
        )
    if not found:
        raise ValueError(
            f"{here} must hold the tensors of gated-delta layer {layer}, with names such as "
            f"model.layers.{layer}.linear_attn.A_log, but it has {_some(here.names)}.{checkpoint.lack}"
        )
    prefixes = sorted(prefix for prefix, number in found.items() if number == layer)
    if len(prefixes) != 1:
        raise ValueError(
            f"{here} must hold the tensors of one gated-delta layer {layer}, but it has "
            f"{' and '.join(prefixes) or 'none of that number'}. Its gated-delta layers: {layers}."
            f"{checkpoint.lack}"
        )
    names = [name for name in checkpoint.names if name.startswith(prefixes[0])]
    return _Layer(checkpoint, prefixes[0], {name.removeprefix(prefixes[0]): name for name in names})


def _some(names: Iterable[str]) -> str:
    """Up to three of the names, and the word that all of them begin with."""
    names = sorted(names)
    if not names:
        return "no tensors"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    word = re.match(r"[^./]*[./]", names[0])  # as in `param/`
    shared = len(names) > 1 and word is not None and all(name.startswith(word[0]) for name in names)
    alike = f" (all begin with `{word[0]}`)" if word is not None and shared else ""
    return f"{', '.join(names[:3])}{more}{alike}"


def _check_kind(entries: Mapping[str, Any], layer: int | None):
    """The config's own list of layers, if it has one, must call this one a gated-delta layer."""
    kinds, linear = entries.get("layer_types"), entries.get("linear_attn_config") or {}
    if kinds is not None:
        layers = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
    else:
        layers = [number - 1 for number in linear.get("kda_layers", ())]  # Kimi counts from 1
    if layer is not None and layers and layer not in layers:
        raise ValueError(
            f"Layer {layer} must be a gated-delta layer, but the config says that these are: "
            f"{', '.join(map(str, layers))} (counted from 0)."
        )


# ---- which family ----------------------------------------------------------------------------------------------------


def _read_config(config: Any, checkpoint: Checkpoint) -> dict[str, Any]:
    """The entries of a config, those of a multimodal model's text part if it is one."""
    if config is None and checkpoint.folder is not None:
        config = checkpoint.folder
    if config is None:
        raise ValueError("A mapping of arrays needs `config=...`: what is in the checkpoint's config.json.")
    if isinstance(config, (str, os.PathLike)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            raise FileNotFoundError(f"There is no `{path}`: give the checkpoint's config.json as `config=...`.")
        config = read_json(path)
    if not isinstance(config, Mapping):
        raise TypeError(
            f"`config` must be a path, what is in a config.json, or a `MixerConfig`, but {a_type(config)} came."
        )
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else dict(config)


def _recognise(entries: Mapping[str, Any], stored: _Layer) -> Family:
    model_type = entries.get("model_type")
    if model_type is not None:
        families = [family for family in FAMILIES if model_type in family.model_types]
        if not families:
            known = ", ".join(repr(name) for family in FAMILIES for name in family.model_types)
            raise ValueError(f"The config's `model_type` is {model_type!r}, and this library knows {known}.")
        return families[0]
    families = _families_like(stored.names)
    if len(families) > 1:
        names = " and of ".join(family.name for family in families)
        types = " or ".join(repr(family.model_types[0]) for family in families)
        raise ValueError(
            f"The names in {stored.checkpoint.where} are those of {names} alike: put `model_type` into the config, "
            f"{types}."
        )
    return families[0]


def _families_like(tensors: Iterable[str]) -> list[Family]:
    """The families that know most of these names, and among them those that miss the fewest parameters."""

    def fit(family):
        held = [name for name in tensors if name in family.tensors]
        paths = {path for paths in family.tensors.values() for path in paths.split()}
        return len(held), -len(paths - {path for name in held for path in family.parts(name)})

    best = max(map(fit, FAMILIES))
    if best[0] == 0:
        raise ValueError(f"None of these is the name of a gated-delta layer's tensor: {_some(tensors)}.")
    return [family for family in FAMILIES if fit(family) == best]


# ---- whether it fits -------------------------------------------------------------------------------------------------


class _Tensor(NamedTuple):
    """A stored tensor, and the shapes of our parameters in it."""

    name: str
    stored: Stored
    shapes: dict[str, Shape]
    blocks: int


def _make_plan(family: Family, mixer: GatedDeltaMixer, layer: _Layer, written: str = "") -> list[_Tensor]:
    """Which stored tensor holds which parameters of the mixer: all of both, each once, of the right shape.

    `written`: the config's entries that the sizes come from, for the message.
    """
    _refuse_quantised(layer)
    shapes = {path: tuple(leaf.shape) for path, leaf in _parameters(mixer).items()}
    blocks: dict[str, int] = dict.fromkeys(family.grouped, mixer.config.key_heads)
    found = layer.checkpoint.find(layer.names.values())
    plan, filled = {}, set()
    for name in family.tensors:
        parts = {path: shapes[path] for path in family.parts(name) if path in shapes}
        if name in layer.names and len(parts) == len(family.parts(name)) and filled.isdisjoint(parts):
            full = layer.names[name]
            plan[full] = _Tensor(full, found[full], parts, blocks.get(name, 1))
            filled |= parts.keys()
    missing = _published(family, [path for path in shapes if path not in filled], shapes)
    unexpected = sorted(found.keys() - plan.keys())
    expected = {name: joint_shape(tensor.shapes) for name, tensor in plan.items()}
    problems = {
        "missing": [f"{layer.prefix}{name} {list(shape)}" for name, shape in missing.items()],
        "unexpected": [f"{name} {list(found[name].shape)}" for name in unexpected],
        "of another shape": [
            f"{name} is {list(found[name].shape)} and should be {list(shape)}"
            for name, shape in expected.items()
            if not same_shape(name, found[name].shape, shape)
        ],
    }
    if any(problems.values()):
        c = mixer.config
        source = f" (the config has {written})" if written else ""
        lines = [f"\n  {kind}: {', '.join(names)}" for kind, names in problems.items() if names]
        raise ValueError(
            f"{layer} does not hold a {family.name} layer with model = {c.model}, {c.key_heads} key heads of "
            f"{c.key_dim} and {c.value_heads} value heads of {c.value_dim}{source}.{''.join(lines)}"
            + (f"\n {layer.checkpoint.lack}" if missing and layer.checkpoint.lack else "")
        )
    if strange := [f"{name} ({found[name].dtype})" for name in plan if found[name].dtype not in _FLOATS]:
        raise TypeError(
            f"A layer needs tensors of float32, bfloat16, float16 or float64, but these came: {', '.join(strange)}."
        )
    return list(plan.values())


def _refuse_quantised(layer: _Layer):
    if names := sorted(full for name, full in layer.names.items() if _QUANTISED.search(name)):
        raise TypeError(
            f"{', '.join(names)} in {layer.checkpoint.where}: a quantised checkpoint, which is not read. Take one in "
            "bfloat16 or float32."
        )


def _published(family: Family, paths: Iterable[str], shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """The stored tensors, by their published names, that hold these parameters of ours, and their shapes."""
    published = {}
    for path in paths:
        name = next((name for name in family.tensors if path in family.parts(name)), f"(our parameter {path})")
        parts = family.parts(name) if name in family.tensors else (path,)
        published[name] = joint_shape({part: shapes[part] for part in parts if part in shapes})
    return published


def _parameters(mixer: Any) -> dict[str, Any]:
    """The arrays of a mixer by their paths, as `Family.tensors` writes them."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(mixer, lambda x: hasattr(x, "shape")))
    return {_name(path): leaf for path, leaf in leaves}


def _name(path: tuple) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")
