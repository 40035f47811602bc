"""What a model answers: from the rows that keys own, and those that answer for the rest. NumPy only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrec_ext.zch.routing import ShardRouting

HashFunction = Callable[[Any, int], Any]
"""TorchRec's ``input_hash_func``: int64 ids (a tensor) and the hash size to hashed ids (a tensor)."""


def as_keys(ids: ArrayLike) -> NDArray[np.int64]:
    """Ids as int64 ``[n]``.

    Raises:
        TypeError: they are not integers of 64 bits, signed.
    """
    keys = np.atleast_1d(np.asarray(ids))
    if keys.size == 0:
        return np.empty(0, np.int64)
    if keys.dtype.kind not in "iu" or keys.dtype == np.uint64:
        raise TypeError(f"ids must be signed 64-bit integers, not {keys.dtype}")
    return keys.astype(np.int64).reshape(-1)


def hashed(function: HashFunction, ids: NDArray[np.int64], hash_size: int) -> NDArray[np.int64]:
    """The keys of raw ids, of a table with an ``input_hash_func``."""
    import torch  # the function is the model's own and takes a tensor

    return function(torch.from_numpy(ids), hash_size).cpu().numpy()


def find(held: NDArray[np.int64], keys: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """Which keys are among those held, bool ``[n]``, and where these are, int64 ``[m]``; ``held`` ascends."""
    if not len(held):
        return np.zeros(len(keys), np.bool_), np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(held, keys), len(held) - 1)
    owned = held[at] == keys
    return owned, at[owned]


def check_rows(
    fqn: str, keys: NDArray[np.int64], owned: NDArray[np.bool_], num_embeddings: int, missing: str
) -> None:
    """Checks keys that are ``row`` ids, which all have a row.

    Args:
        fqn: the table.
        keys: int64 ``[n]``.
        owned: of which of them there is one, bool ``[n]``.
        num_embeddings: rows of the table.
        missing: what to say of a row of the table that is not there.

    Raises:
        ValueError: one is outside of the table, or not there.
    """
    if owned.all():
        return
    row = int(keys[~owned][0])
    if 0 <= row < num_embeddings:
        raise ValueError(f"{fqn}: row {row} {missing}")
    raise ValueError(f"{fqn} has rows 0 to {num_embeddings - 1}; got {row}")


def answers(
    keys: NDArray[np.int64],
    owned: NDArray[np.bool_],
    vectors: NDArray[np.float32],
    fallback: NDArray[np.float32],
    routing: ShardRouting,
    exceptions: Mapping[int, NDArray[np.float32]],
) -> NDArray[np.float32]:
    """What the model answers for each key, as one bag with weight 1.

    Args:
        keys: int64 ``[n]``.
        owned: which of them own a row, bool ``[n]``.
        vectors: the rows of those, float32 ``[owned.sum(), dim]``.
        fallback: what each shard answers for keys without a row, float32 ``[num_shards, dim]``.
        routing: which shard answers for a key.
        exceptions: vectors float32 ``[dim]`` of keys that get another answer than a row or a fallback row.

    Returns:
        float32 ``[n, dim]``.
    """
    found = np.empty((len(keys), vectors.shape[1]), np.float32)
    found[owned] = vectors
    if not owned.all():
        found[~owned] = fallback[routing.shard_of(keys[~owned])]
    for key, vector in exceptions.items():
        found[keys == key] = vector
    return found
