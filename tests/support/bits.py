"""Vectors are compared bit for bit: 0.0 and -0.0 are two, and so are two NaNs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def assert_same_answers(
    found: NDArray[np.float32], expected: NDArray[np.float32], ids: Sequence[int], what: str
) -> None:
    """Checks answers, float32 ``[n, dim]``, to ``n`` ids."""
    wrong = (expected.view(np.int32) != found.view(np.int32)).any(axis=1)
    assert not wrong.any(), (
        f"{what}: {wrong.sum()} of {len(ids)} answers differ, ids "
        f"{[i for i, w in zip(ids, wrong, strict=True) if w][:10]}"
    )
