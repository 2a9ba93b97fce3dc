"""How our parameters lie in stored tensors: shapes and reshaping, the same for every family.

A stored tensor holds one or several of our parameters, each in its stored form, one after the other along the first
axis (the rows), or in blocks: every key head in turn with its share of each.
"""

from collections.abc import Mapping, Sequence

import numpy as np

Shape = tuple[int, ...]


def stored_shape(path: str, shape: Shape) -> Shape:
    """The stored form of our parameter: a convolution is [channels, 1, width], a bias of the decay flat."""
    if path.endswith("_conv.weight"):
        width, channels = shape
        return channels, 1, width
    if path.endswith("dt_bias"):
        return (shape[0] * shape[1],)
    return shape


def joint_shape(shapes: Mapping[str, Shape]) -> Shape:
    """The shape of the stored tensor that holds parameters of these (our) shapes."""
    stored = [stored_shape(path, shape) for path, shape in shapes.items()]
    return sum(shape[0] for shape in stored), *stored[0][1:]


def same_shape(path: str, stored: Shape, expected: Shape) -> bool:
    """Whether a stored tensor has the expected shape. `A_log` may be [1, 1, heads, 1] as well."""
    return stored == expected or (path.endswith("A_log") and stored == (1, 1, *expected, 1))


def split(stored: np.ndarray, shapes: Mapping[str, Shape], blocks: int) -> dict[str, np.ndarray]:
    """Our parameters, by path, out of the stored tensor that holds them."""
    stored = stored.reshape(joint_shape(shapes))
    rows = [stored_shape(path, shape)[0] // blocks for path, shape in shapes.items()]
    parts = np.split(stored.reshape(blocks, -1, *stored.shape[1:]), np.cumsum(rows)[:-1], axis=1)
    return {path: _ours(path, part, shapes[path]) for path, part in zip(shapes, parts, strict=True)}


def join(arrays: Mapping[str, np.ndarray], blocks: int) -> np.ndarray:
    """The stored tensor that holds these parameters of ours: what `split` undoes."""
    parts = [_stored(path, array, blocks) for path, array in arrays.items()]
    return np.concatenate(parts, axis=1).reshape(joint_shape({path: array.shape for path, array in arrays.items()}))


def _ours(path: str, part: np.ndarray, shape: Shape) -> np.ndarray:
    if path.endswith("_conv.weight"):
        return part.reshape(shape[::-1]).T
    return part.reshape(shape)


def _stored(path: str, array: np.ndarray, blocks: int) -> np.ndarray:
    shape: Sequence[int] = stored_shape(path, array.shape)
    array = array.T if path.endswith("_conv.weight") else array
    return array.reshape(blocks, shape[0] // blocks, *shape[1:])
