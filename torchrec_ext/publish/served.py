"""What a sink must know of a table to answer for any id, and the answer. NumPy only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.answers import answers, check_rows
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
        storage_dtype: how the last dump stores vectors; rows of earlier ones may be stored in other ways.
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
    storage_dtype: str = "float32"

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
        known = {name: plain[name] for name in _PLAIN if name in plain}
        return cls(**known, fallback=vectors[:shards], exceptions=exceptions)

    def absent(self, keys: NDArray[np.int64]) -> NDArray[np.float32]:
        """What the model answers for keys that own no row, float32 ``[n, dim]``, exceptions aside."""
        return self.fallback[self._routing.shard_of(keys)]

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
        if self.key_space == "row":
            missing = "was not published; the log holds rows that changed since it began"
            check_rows(fqn, keys, owned, self.num_embeddings, missing)
        return answers(keys, owned, vectors, self.fallback, self._routing, self.exceptions)

    @property
    def _routing(self) -> ShardRouting:
        return ShardRouting(self.num_shards, self.block_size)


_PLAIN = tuple(f.name for f in fields(ServedTable) if f.name not in ("fallback", "exceptions"))
