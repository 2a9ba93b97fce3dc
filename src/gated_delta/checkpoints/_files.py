"""Where tensors are stored: safetensors files, sharded ones, and mappings, read no further than asked."""

import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gated_delta._types import a_type

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_POINTER = b"version https://git-lfs"
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
    """A tensor that is not read yet. `dtype` is NumPy's name, or the file's word for what NumPy does not have."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


class Checkpoint(NamedTuple):
    """The names of all tensors, and `find`, which looks up some of them.

    `where` is for messages; `folder` is that of the files, or `None`. `lack` is what to add to a message about tensors
    that are not there.
    """

    where: str
    folder: Path | None
    names: frozenset[str]
    find: Callable[[Iterable[str]], dict[str, Stored]]
    lack: str = ""


def open_checkpoint(source: Any) -> Checkpoint:
    """A mapping of names to arrays, a safetensors file, an index of several, or the folder of either.

    **Raises:** `TypeError`, `FileNotFoundError` or `ValueError` that says what is not there or not whole.
    """
    if isinstance(source, Mapping):
        return Checkpoint("the mapping", None, frozenset(source), functools.partial(_find_in_mapping, source))
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            "A checkpoint is the path of a safetensors file, of its index or of their folder, or a mapping of names to "
            f"arrays, but {a_type(source)} came."
        )
    path = _find_file(Path(source))
    if path.suffix == ".json":
        shards, lack = {name: path.parent / shard for name, shard in _read_index(path).items()}, ""
    else:
        shards, lack = dict.fromkeys(_open(path).keys(), path), _what_a_shard_lacks(path)
    return Checkpoint(str(path), path.parent, frozenset(shards), functools.partial(_find_in_files, shards), lack)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    **Raises:** `ValueError` that names the file, where it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"`{path}` is not readable as JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ValueError(f"`{path}` must hold a JSON object, but it holds {a_type(value)}.")
    return value


def _find_file(path: Path) -> Path:
    if not path.is_dir():
        if not path.exists():
            raise FileNotFoundError(f"There is no checkpoint `{path}`.{_if_hub_id(path)}")
        return path
    if (path / INDEX).exists():
        return path / INDEX
    files = sorted(path.glob("*.safetensors"))
    if path / "model.safetensors" in files:
        return path / "model.safetensors"
    if len(files) > 1 and all(map(_is_shard, files)):
        raise FileNotFoundError(
            f"`{path}` has {', '.join(file.name for file in files)}, shards of one checkpoint, but not {INDEX}, which "
            "says what is in which. Fetch it, or give the shard that holds the layer."
        )
    if len(files) != 1:
        raise FileNotFoundError(
            f"`{path}` must have {INDEX}, model.safetensors or one other *.safetensors file, but of these it has "
            f"{', '.join(file.name for file in files) or 'none'}. Give the file itself."
        )
    return files[0]


def _if_hub_id(path: Path) -> str:
    """What to add where a missing path may be the name of a repository on a hub."""
    name = path.as_posix()
    if path.suffix in (".safetensors", ".json") or path.parent.exists() or not _HUB_ID.fullmatch(name):
        return ""
    return f" Only local files and folders are read: if `{name}` is a repository on a hub, give a local copy's folder."


def _is_shard(path: Path) -> bool:
    """Whether the file's name says that it is one of several."""
    match = _SHARD.search(path.name)
    return match is not None and int(match[2]) > 1


def _what_a_shard_lacks(path: Path) -> str:
    if not _is_shard(path):
        return ""
    if (path.parent / INDEX).exists():
        return f" `{path.name}` is one shard of several: give `{path.parent / INDEX}` to look into all of them."
    return f" `{path.name}` is one shard of several: fetch {INDEX} and the other shards, and give their folder."


def _read_index(path: Path) -> dict[str, str]:
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"`{path}` must have an object `weight_map` from the names of tensors to files, but has none.")
    return shards


def _open(path: Path) -> Any:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "Reading safetensors files needs the package safetensors: `pip install 'gated-delta[checkpoints]'`."
        ) from error
    try:
        return safe_open(path, framework="numpy")  # maps the file into memory: nothing but its header is read here
    except SafetensorError as error:
        with path.open("rb") as file:
            pointer = file.read(len(_POINTER)) == _POINTER
        if pointer:
            raise ValueError(
                f"`{path}` must be a safetensors file, but it is the pointer that git-lfs keeps in its place: the "
                "weights were not downloaded. Run `git lfs pull` in its repository."
            ) from error
        raise ValueError(f"`{path}` is not a whole safetensors file ({error}). Fetch or write it again.") from error


def _find_in_files(shards: Mapping[str, Path], names: Iterable[str]) -> dict[str, Stored]:
    names = sorted(names)
    paths = {shards[name] for name in names}
    if lost := sorted(path for path in paths if not path.exists()):
        raise FileNotFoundError(
            f"The index sends {', '.join(name for name in names if shards[name] in lost)} to "
            f"{', '.join(f'`{path}`' for path in lost)}, which is not there. Fetch the missing shard."
        )
    files = {path: _open(path) for path in paths}
    held = {path: frozenset(file.keys()) for path, file in files.items()}
    if lost := [name for name in names if name not in held[shards[name]]]:
        raise ValueError(
            f"The index says that {', '.join(f'{name} is in `{shards[name]}`' for name in lost)}, but it is not. "
            "Index and shards are not of the same checkpoint."
        )
    return {name: _in_file(files[shards[name]], name) for name in names}


def _in_file(file: Any, name: str) -> Stored:
    header = file.get_slice(name)
    dtype = str(header.get_dtype())
    return Stored(tuple(header.get_shape()), _DTYPES.get(dtype, dtype), lambda: file.get_tensor(name))


def _find_in_mapping(arrays: Mapping[str, Any], names: Iterable[str]) -> dict[str, Stored]:
    found = {}
    for name in names:
        array = arrays[name]
        if not hasattr(array, "shape") or not hasattr(array, "dtype"):
            raise TypeError(f"`{name}` must be a NumPy or JAX array, but it is {a_type(array)}.")
        found[name] = Stored(tuple(array.shape), str(array.dtype), functools.partial(np.asarray, array))
    return found
