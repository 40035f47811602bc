"""Fused ids: one id space over the tables of a collection."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_ext.recstore.batch import GroupBatch
from torchrec_ext.store import DenseTable
from torchrec_ext.store.tables import Table


@dataclass(frozen=True)
class UniqueIds:
    """The ids of a group's bags, each once per table.

    Attributes:
        tables: the tables' names.
        keys: of each table, its ids, int64, ascending.
        counts: how often each occurs, int64.
        positions: for every id of the bags, where it is in the keys of all tables, int64 ``[n]``.
    """

    tables: tuple[str, ...]
    keys: tuple[torch.Tensor, ...]
    counts: tuple[torch.Tensor, ...]
    positions: torch.Tensor


class FusedIds:
    """``fused_id = raw_id + (table_index << fusion_k)``, and what an id must be for it.

    So the ids of many tables are one vector, of which repeats are dropped in one go.

    Args:
        tables: the collection's tables; their order gives the prefixes.
        fusion_k: how many bits the raw id has; None: ids are not fused, and a dynamic table's may be
            any int64.

    Raises:
        ValueError: ``fusion_k`` leaves no room for the ids, or for so many tables.
    """

    def __init__(self, tables: Sequence[Table], fusion_k: int | None) -> None:
        self._fusion_k = fusion_k
        self._ranges = {
            table.name: (table.first_key, table.first_key + table.num_rows)
            for table in tables
            if isinstance(table, DenseTable)
        }
        if fusion_k is None:
            return
        if not 1 <= fusion_k <= 62:
            raise ValueError(f"fusion_k must be from 1 to 62, not {fusion_k}")
        if len(tables) > (room := 1 << (63 - fusion_k)):
            raise ValueError(
                f"fused ids with fusion_k={fusion_k} have room for {room} tables; table "
                f"{tables[room].name!r} is number {room} from 0, so its id 0 would not fit into an int64; "
                "use a smaller fusion_k, or enable_fusion=False"
            )

    def check(self, batch: Sequence[GroupBatch]) -> None:
        """Checks all ids of a batch.

        Raises:
            ValueError: an id is negative, too large to be fused, or not in its table; names feature,
                table and id.
        """
        features = [
            (feature, ids)
            for part in batch
            for feature, ids in zip(part.group.features, part.ids, strict=True)
            if len(ids)
        ]
        if not features:
            return
        lows, highs = zip(*(torch.aminmax(ids) for _, ids in features), strict=True)
        extremes = torch.stack([*lows, *highs]).tolist()
        for (feature, _), extreme in zip(features * 2, extremes, strict=True):
            if reason := self._refusal(feature.table, extreme):
                raise ValueError(f"feature {feature.name!r}, table {feature.table!r}: id {extreme} {reason}")

    def unique(self, batch: GroupBatch) -> UniqueIds:
        """A group's ids without repeats; they were checked."""
        return self._unique_per_table(batch) if self._fusion_k is None else self._unique_fused(batch)

    def _refusal(self, table: str, extreme: int) -> str | None:
        known = self._ranges.get(table)
        if extreme < 0 and (known or self._fusion_k is not None):
            return "is negative"
        if known and not known[0] <= extreme < known[1]:
            return f"is not in the table, which has {known[0]} to {known[1] - 1}"
        if self._fusion_k is not None and extreme >> self._fusion_k:
            return f"does not fit into fusion_k={self._fusion_k} bits; use a larger fusion_k"
        return None

    def _unique_fused(self, batch: GroupBatch) -> UniqueIds:
        assert self._fusion_k is not None
        prefix = {feature.table: feature.table_index << self._fusion_k for feature in batch.group.features}
        fused = concatenate(batch, prefix)
        found, positions, counts = torch.unique(fused, return_inverse=True, return_counts=True)
        starts = torch.searchsorted(found, torch.tensor(list(prefix.values()), device=found.device))
        sizes = torch.diff(starts, append=starts.new_tensor([len(found)])).tolist()
        keys = [
            fused_keys - shift for fused_keys, shift in zip(found.split(sizes), prefix.values(), strict=True)
        ]
        return UniqueIds(tuple(prefix), tuple(keys), counts.split(sizes), positions)

    def _unique_per_table(self, batch: GroupBatch) -> UniqueIds:
        tables = batch.group.tables
        of_table: dict[str, list[torch.Tensor]] = {table: [] for table in tables}
        for feature, ids in zip(batch.group.features, batch.ids, strict=True):
            of_table[feature.table].append(ids)
        keys, counts, positions = [], [], []
        before = 0
        for table in tables:
            found, inverse, count = torch.unique(
                torch.cat(of_table[table]), return_inverse=True, return_counts=True
            )
            keys.append(found)
            counts.append(count)
            positions.append(inverse + before)
            before += len(found)
        return UniqueIds(tables, tuple(keys), tuple(counts), torch.cat(positions))


def concatenate(batch: GroupBatch, shift: dict[str, int]) -> torch.Tensor:
    """The ids of all features of a group, each table's shifted by a number, int64 ``[n]``."""
    shifted = torch.empty(batch.num_ids, dtype=torch.int64, device=batch.lengths.device)
    end = 0
    for feature, ids in zip(batch.group.features, batch.ids, strict=True):
        start, end = end, end + len(ids)
        torch.add(ids, shift[feature.table], out=shifted[start:end])
    return shifted
