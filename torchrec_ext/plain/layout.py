"""How a table's rows and columns are dealt out to the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, order=True)
class Shard:
    """A rectangle of a table on one rank; a table of one rank, or a row-wise shard, has all columns."""

    first_row: int
    num_rows: int
    first_column: int
    num_columns: int
    rank: int


@dataclass(frozen=True)
class Band:
    """Rows of a table that are cut at the same columns.

    Attributes:
        first_row: where it starts.
        num_rows: how many.
        shards: what it is cut into, from left to right.
    """

    first_row: int
    num_rows: int
    shards: tuple[Shard, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that hold columns of it, each once."""
        return tuple(dict.fromkeys(shard.rank for shard in self.shards))

    @property
    def dim(self) -> int:
        """The columns of all shards."""
        return sum(shard.num_columns for shard in self.shards)

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """A rank's shards of it, from left to right."""
        return tuple(shard for shard in self.shards if shard.rank == rank)

    def publishers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which of ``ranks`` puts a row's columns together, as an index into it.

        By the row's number alone: a row that is dumped again is dumped by the same rank.
        """
        return rows % len(self.ranks)


def bands_of(shards: Iterable[Shard]) -> tuple[Band, ...] | None:
    """The bands of a table, from top to bottom; None if its column shards are not cut at the same rows."""
    by_rows: dict[tuple[int, int], list[Shard]] = defaultdict(list)
    for shard in sorted(shards):
        if shard.num_rows:
            by_rows[shard.first_row, shard.num_rows].append(shard)
    bands = tuple(Band(first, rows, tuple(cut)) for (first, rows), cut in sorted(by_rows.items()))
    row = 0
    for band in bands:
        column = 0
        for shard in band.shards:
            if shard.first_column != column:
                return None
            column += shard.num_columns
        if band.first_row != row or column != bands[0].dim:
            return None
        row += band.num_rows
    return bands


def row_blocks(num_rows: int, dim: int, num_ranks: int) -> tuple[Band, ...]:
    """One band for each rank: who dumps which rows of a table that every rank holds."""
    size = -(-num_rows // num_ranks)
    starts = range(0, num_rows, size)
    bands = []
    for rank, start in enumerate(starts):
        rows = min(size, num_rows - start)
        bands.append(Band(start, rows, (Shard(start, rows, 0, dim, rank),)))
    return tuple(bands)
