"""Reading the rows of a batch from a store, each once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_ext.recstore.batch import GroupBatch
from torchrec_ext.recstore.fused_ids import FusedIds, UniqueIds
from torchrec_ext.store import Rows, Store


@dataclass(frozen=True)
class GroupRows:
    """The rows that the bags of one group need, as they were read last.

    Attributes:
        ids: whose rows they are.
        buffer: the rows of all tables, one after the other, float32 ``[u, dim]``.
        held: views of the buffer for each table, to be brought up to date.
        dynamic: whether the tables are dynamic.
    """

    ids: UniqueIds
    buffer: torch.Tensor
    held: tuple[Rows, ...]
    dynamic: bool

    @property
    def has_row(self) -> torch.Tensor | None:
        """Which keys have a row of their own, bool ``[u]``; None: all, the tables are dense."""
        if not self.dynamic:
            return None
        return torch.cat([rows.versions for rows in self.held]) >= 0


class BatchRead:
    """The rows of one batch: read now, brought up to date later.

    Args:
        store: where they are.
        batch: the bags; their ids were checked.
        fused_ids: how repeats are found.
    """

    def __init__(self, store: Store, batch: Sequence[GroupBatch], fused_ids: FusedIds) -> None:
        self._store = store
        self._batch: Sequence[GroupBatch] | None = batch
        self._fused_ids = fused_ids
        self.groups: list[GroupRows] = []

    def pull(self, *, admit: bool, ahead: bool = False) -> None:
        """Reads all rows.

        Args:
            admit: whether this is a lookup in training; see ``Store.pull``.
            ahead: whether ``refresh`` comes before they are used.
        """
        assert self._batch is not None
        unique = [self._fused_ids.unique(batch) for batch in self._batch]
        requests = [pair for ids in unique for pair in zip(ids.tables, ids.keys, strict=True)]
        pulled = iter(
            self._store.pull_many(
                requests, admit=admit, counts=self._counts(unique) if admit else None, ahead=ahead
            )
        )
        for batch, ids in zip(self._batch, unique, strict=True):
            of_group = [next(pulled) for _ in ids.tables]
            # One buffer, so that one lookup pools from all tables.
            buffer = torch.cat([rows.rows for rows in of_group]) if len(of_group) > 1 else of_group[0].rows
            views = buffer.split([len(keys) for keys in ids.keys])
            held = [Rows(rows.keys, view, rows.versions) for rows, view in zip(of_group, views, strict=True)]
            self.groups.append(GroupRows(ids, buffer, tuple(held), batch.group.dynamic))
        self._batch = None

    def refresh(self, *, admit: bool) -> int:
        """Brings the rows up to date.

        Args:
            admit: whether this is a lookup in training.

        Returns:
            How many rows were read again.
        """
        held = [pair for group in self.groups for pair in zip(group.ids.tables, group.held, strict=True)]
        counts = self._counts([group.ids for group in self.groups]) if admit else None
        return self._store.refresh_many(held, admit=admit, counts=counts)

    def _counts(self, unique: Sequence[UniqueIds]) -> list[torch.Tensor]:
        return [counts for ids in unique for counts in ids.counts]
