"""How a log rounds vectors: written down a second time, from FBGEMM's reference and the format's page."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

STORAGE_DTYPES = (None, "float16", "int8")


def rounded(vectors: NDArray[np.float32], storage_dtype: str | None) -> NDArray[np.float32]:
    """Vectors, float32 ``[n, dim]``, as a log with this ``storage_dtype`` answers them."""
    if storage_dtype in (None, "float32"):
        return vectors
    if storage_dtype == "float16":
        return vectors.astype(np.float16).astype(np.float32)
    low = vectors.min(axis=1, keepdims=True)
    range_ = vectors.max(axis=1, keepdims=True) - low
    elements = np.rint((vectors - low) * (np.float32(255) / (range_ + np.float32(1e-8))))
    return elements * (range_ / np.float32(255)) + low


def largest_error(vectors: NDArray[np.float32], storage_dtype: str) -> NDArray[np.float64]:
    """The documented bound of each value's error, ``[n, dim]``."""
    exact = vectors.astype(np.float64)
    if storage_dtype == "float16":
        return np.maximum(np.abs(exact) * 2.0**-11, 2.0**-25)
    range_ = exact.max(axis=1, keepdims=True) - exact.min(axis=1, keepdims=True)
    magnitude = np.abs(exact).max(axis=1, keepdims=True)
    return np.broadcast_to(range_ / 510 + np.minimum(range_, 1e-8) + magnitude * 2.0**-20, exact.shape)
