"""What a sink must know of a table to answer for any id, and the answer. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torchrec_ext.zch.routing import ShardRouting

if TYPE_CHECKING:
    from torchrec_ext.delta.manifest import TableInfo


@dataclass(frozen=True, order=True)
class Position:
    """The last dump that a sink holds.

    Attributes:
        generation: its run generation.
        step: its training step.
        created_unix: when that training step was over; tells dumps of different logs apart.
    """

    generation: int
    step: int
    created_unix: float

    def __str__(self) -> str:
        if self == UNFINISHED:
            return "a publication from scratch that was cut short"
        return f"step {self.step} of generation {self.generation}"


UNFINISHED = Position(-1, -1, 0.0)
"""Where a sink stands while all it holds is replaced: rows of two logs may be there side by side."""


@dataclass(frozen=True)
class ServedTable:
    """All of a table but the rows that keys own.

    Attributes:
        dim, dtype, key_space, num_embeddings, num_shards, block_size, hash_size: those of its ``TableInfo``.
        fallback: what each shard answers for keys without a row, float32 ``[num_shards, dim]``; no rows if
            the keys are ``row`` ids, which all have one.
        exceptions: vectors float32 ``[dim]`` of keys that get another answer than a row or a fallback row.
    """

    dim: int
    dtype: str
    key_space: str
    num_embeddings: int
    num_shards: int
    block_size: int
    hash_size: int
    fallback: NDArray[np.float32] = field(repr=False)
    exceptions: Mapping[int, NDArray[np.float32]] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        info: TableInfo,
        fallback: NDArray[np.float32],
        exceptions: Mapping[int, NDArray[np.float32]],
    ) -> ServedTable:
        """From what a dump says of it."""
        return cls(**{name: getattr(info, name) for name in _PLAIN}, fallback=fallback, exceptions=exceptions)

    def to_json(self) -> dict[str, Any]:
        """All but the vectors, as JSON-like values."""
        return {**{name: getattr(self, name) for name in _PLAIN}, "exceptions": list(self.exceptions)}

    def vectors(self) -> NDArray[np.float32]:
        """The vectors: fallback rows, then those of the exceptions; float32 ``[n, dim]``."""
        return np.concatenate([self.fallback, *(v[None] for v in self.exceptions.values())])

    @classmethod
    def from_json(cls, plain: Mapping[str, Any], vectors: NDArray[np.float32]) -> ServedTable:
        """The inverse of ``to_json`` and ``vectors``."""
        keys = plain["exceptions"]
        shards = len(vectors) - len(keys)
        exceptions = dict(zip(keys, vectors[shards:], strict=True))
        return cls(**{name: plain[name] for name in _PLAIN}, fallback=vectors[:shards], exceptions=exceptions)

    def absent(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the model answers for keys that own no row, float32 ``[n, dim]``, exceptions aside."""
        return self.fallback[ShardRouting(self.num_shards, self.block_size).shard_of(keys)]

    def answer(
        self, fqn: str, keys: NDArray[np.int64], owned: NDArray[np.bool_], vectors: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """What the model answers for each key, as one bag with weight 1.

        Args:
            fqn: the table, for the error's sake.
            keys: int64 ``[n]``.
            owned: which of them own a row, bool ``[n]``.
            vectors: the rows of those, float32 ``[owned.sum(), dim]``.

        Returns:
            float32 ``[n, dim]``.

        Raises:
            ValueError: the keys are ``row`` ids, and one is outside of the table or was never published.
        """
        if self.key_space == "row" and not owned.all():
            raise ValueError(self._missing(fqn, int(keys[~owned][0])))
        answers = np.empty((len(keys), self.dim), np.float32)
        answers[owned] = vectors
        if not owned.all():
            answers[~owned] = self.absent(keys[~owned])
        for key, vector in self.exceptions.items():
            answers[keys == key] = vector
        return answers

    def _missing(self, fqn: str, row: int) -> str:
        if 0 <= row < self.num_embeddings:
            return f"{fqn}: row {row} was not published; the log holds rows that changed since it began"
        return f"{fqn} has rows 0 to {self.num_embeddings - 1}; got {row}"


_PLAIN = tuple(f.name for f in fields(ServedTable) if f.name not in ("fallback", "exceptions"))


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
