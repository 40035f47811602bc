"""How a dump stores vectors: as they are, or rounded. Reading needs NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

StorageDtype = Literal["float32", "float16", "int8"]

LARGEST: Mapping[StorageDtype, float] = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    # The difference of a row's largest and smallest value, and 255 times its 255th part, stay finite.
    "int8": 1e38,
}
"""The largest magnitude that a value of each may have."""

SCALE_AND_BIAS = 8
"""The bytes behind the elements of an int8 row."""

_DECODED_AT_ONCE = 1 << 16  # values, which stay in a cache


def encode(vectors: NDArray[np.float32], storage_dtype: StorageDtype) -> NDArray[Any]:
    """Vectors as they are stored; the values' magnitudes are at most ``LARGEST``.

    ``int8`` is FBGEMM's row-wise quantisation, by its own operator on CPU: the elements
    ``lrint((x - min) * (255 / (max - min + 1e-8)))``, then ``(max - min) / 255`` and ``min`` as little-endian
    float32.

    Args:
        vectors: float32 ``[n, dim]``.
        storage_dtype: how they are stored.

    Returns:
        ``float32``: the same array; ``float16``: float16 ``[n, dim]``; ``int8``: uint8 ``[n, dim + 8]``.
    """
    if storage_dtype == "float32":
        return vectors
    import torch  # only who writes dumps, or compares with a model, comes here

    rows = torch.from_numpy(np.ascontiguousarray(vectors))
    if storage_dtype == "float16":
        return rows.half().numpy()
    import fbgemm_gpu  # noqa: F401  # registers the operator

    return torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(rows).numpy()


def decode(values: NDArray[Any], rows: int, dim: int) -> NDArray[np.float32]:
    """The inverse of ``encode``: for int8 ``element * scale + bias``, each operation rounded to float32.

    Args:
        values: those of ``rows`` vectors, one after another; their dtype says how they are stored.
        rows: how many vectors there are.
        dim: their dimension.

    Returns:
        float32 ``[rows, dim]``.

    Raises:
        ValueError: there are more or fewer values than that, or they are of another dtype.
    """
    width = dim + (SCALE_AND_BIAS if values.dtype == np.uint8 else 0)
    if values.dtype not in (np.float32, np.float16, np.uint8):
        raise ValueError(f"vectors are stored as {values.dtype}")
    if len(values) != rows * width:
        raise ValueError(
            f"{rows} vectors of dimension {dim} hold {len(values)} values of {values.dtype}, "
            f"not {rows * width}"
        )
    matrix = values.reshape(rows, width)
    if values.dtype != np.uint8:
        return matrix.astype(np.float32, copy=False)
    scale_and_bias = np.ascontiguousarray(matrix[:, dim:]).view("<f4").astype(np.float32, copy=False)
    vectors = np.empty((rows, dim), np.float32)
    step = max(1, _DECODED_AT_ONCE // dim)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        np.multiply(matrix[piece, :dim], scale_and_bias[piece, :1], out=vectors[piece], dtype=np.float32)
        vectors[piece] += scale_and_bias[piece, 1:]
    return vectors


def rounded(vectors: NDArray[np.float32], storage_dtype: StorageDtype) -> NDArray[np.float32]:
    """Vectors, float32 ``[n, dim]``, as they come out of a dump that stores them so."""
    return decode(encode(vectors, storage_dtype).reshape(-1), *vectors.shape)
