"""Sets of keys, as sorted arrays."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.int64]


def union(*sets: Keys) -> Keys:
    """The keys of all, sorted, each once; they need be neither sorted nor unique before."""
    keys = np.concatenate([np.empty(0, np.int64), *sets])
    keys.sort(kind="stable")
    # Not np.unique, which hashes integers from NumPy 2.3 on: that takes fifty times as long.
    return keys[np.append(True, keys[1:] != keys[:-1])] if len(keys) else keys


def difference(keys: Keys, others: Keys) -> Keys:
    """The keys that are not among others, in their order."""
    return keys[~np.isin(keys, others)]
