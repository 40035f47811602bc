"""What a table without managed collision is, and what one rank holds of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_ext.plain.holders import WeightHolder
from torchrec_ext.plain.layout import Band, Shard
from torchrec_ext.zch import ShardRouting
from torchrec_ext.zch.discovery import answered_


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard that is on this rank, and where its weights are.

    Attributes:
        shard: the rectangle.
        holder: holds its weights.
        index: which of the holder's.
        rows: which rows of those are the shard's.
    """

    shard: Shard
    holder: WeightHolder
    index: int
    rows: slice


@dataclass(frozen=True, eq=False)
class PlainTable:
    """One table without managed collision, as this rank holds it.

    Attributes:
        fqn: the module's path in the model (wrappers left out) and the table's name, ``"ebc.t0"``.
        module: the module that owns it.
        features: the features that look it up.
        num_embeddings: rows of all shards.
        dim: the embedding dimension.
        dtype: the rows' own dtype.
        shard: this rank.
        num_ranks: the ranks that it is dealt out to.
        bands: how it is cut; of a replicated table: who dumps which rows.
        local: this rank's shards.
        pooled: whether a lookup adds up a bag's rows.
        divided: whether pooled vectors are divided by the bag's length (MEAN pooling of sharded rows).
        output_dtype: the dtype to which the model rounds its answers.
        by_lookup: whether training moves no rows but those that a gradient reached.
        unsupported: why the table cannot be followed exactly; None if it can.
    """

    fqn: str
    module: nn.Module
    features: tuple[str, ...]
    num_embeddings: int
    dim: int
    dtype: torch.dtype
    shard: int
    num_ranks: int
    bands: tuple[Band, ...]
    local: tuple[LocalShard, ...]
    pooled: bool
    divided: bool
    output_dtype: torch.dtype
    by_lookup: bool
    unsupported: str | None

    @property
    def part(self) -> str:
        """What deltas call it, unless it is in parts."""
        return self.fqn

    @property
    def columns(self) -> slice | NDArray[np.int64]:
        """All of a vector's columns."""
        return slice(None)

    @property
    def kind(self) -> str:
        """What kind of table it is."""
        return "plain"

    @property
    def num_rows(self) -> int:
        """Rows have their global numbers on every rank."""
        return self.num_embeddings

    @property
    def first_row(self) -> int:
        """Rows have their global numbers on every rank."""
        return 0

    @property
    def key_space(self) -> str:
        """Keys are global row numbers."""
        return "row"

    @property
    def hash_size(self) -> int:
        """Ids are not hashed."""
        return 0

    @property
    def routing(self) -> ShardRouting:
        """Who deletes a key that is no row of the table, as of a larger one that had its name before."""
        return ShardRouting.for_hash_size(self.num_embeddings, self.num_ranks)

    @property
    def place(self) -> None:
        """Where rows are that all ranks see: every rank has its own."""
        return None

    def is_row(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key is a row of the table, on whatever rank."""
        return (keys >= 0) & (keys < self.num_embeddings)

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether it is up to this rank to dump, or delete, each key."""
        kept = np.zeros(len(keys), np.bool_)
        for part in self.parts():
            kept |= part.keeps(keys)
        return kept

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows, or some columns of them, into what a lookup of one id with weight 1 answers, in place.

        Args:
            vectors: float32 ``[n, columns]``.
        """
        answered_(vectors, pooled=self.pooled, output_dtype=self.output_dtype, divided=self.divided)

    def parts(self) -> list[TablePart]:
        """What this rank holds of each band; one part without rows where it holds nothing."""
        held = [
            (band, tuple(local))
            for band in self.bands
            if (local := [found for found in self.local if found.shard in band.shards_of(self.shard)])
        ] or [(Band(0, 0, (Shard(0, 0, 0, self.dim, self.shard),)), ())]
        return [TablePart.of(self, band, local, is_first=not n) for n, (band, local) in enumerate(held)]


@dataclass(frozen=True, eq=False)
class TablePart(PlainTable):
    """What one rank holds of a band of a table: all columns, or some; itself a table to a tracker.

    Attributes:
        band: the band.
        is_first: whether keys that are no rows are deleted with it.
        local: the shards of it that are on this rank, from left to right.
        dim: the columns that are here.
    """

    band: Band
    is_first: bool

    @classmethod
    def of(cls, table: PlainTable, band: Band, local: tuple[LocalShard, ...], *, is_first: bool) -> TablePart:
        """The part of a table that these shards are."""
        dim = sum(found.shard.num_columns for found in local) if local else table.dim
        return cls(**{**vars(table), "local": local, "dim": dim}, band=band, is_first=is_first)

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold columns of the same rows."""
        return len(self.band.ranks) > 1

    @property
    def part(self) -> str:
        """The table's FQN; if columns are elsewhere, a name by which all ranks know the band."""
        return part_name(self.fqn, self.band) if self.is_split else self.fqn

    @property
    def columns(self) -> slice | NDArray[np.int64]:
        """Which of the table's columns are here."""
        if not self.is_split:
            return slice(None)
        shards = [found.shard for found in self.local]
        ranges = [np.arange(s.first_column, s.first_column + s.num_columns) for s in shards]
        return np.concatenate([np.empty(0, np.int64), *ranges])

    @property
    def num_rows(self) -> int:
        """The band's rows."""
        return self.band.num_rows

    @property
    def first_row(self) -> int:
        """The global row at which the band starts."""
        return self.band.first_row

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key is a row of the band, or none of the table and the rank's to delete."""
        kept = (keys >= self.first_row) & (keys < self.first_row + self.num_rows)
        if self.is_first:
            kept |= ~self.is_row(keys) & (self.routing.shard_of(keys) == self.shard)
        return kept


def part_name(fqn: str, band: Band) -> str:
    """What all ranks that hold columns of a band call it."""
    return f"{fqn}[{band.first_row}:{band.first_row + band.num_rows}]"
