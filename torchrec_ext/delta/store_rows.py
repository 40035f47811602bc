"""Rows of RecStore tables, for the tracker: the store itself knows which it wrote, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.delta.tracked import checked_rows
from torchrec_ext.recstore.discovery import RecStoreTable
from torchrec_ext.store import LocalStore
from torchrec_ext.store.group import RowGroup

# Versions compared at a time: their temporary arrays stay in a cache.
_CHUNK = 1 << 17


class StoreFollower:
    """Waits for updates that a store was handed; see ``Follower``.

    Args:
        table: a table of the store.
    """

    def __init__(self, table: RecStoreTable) -> None:
        self._store = table.local_store

    def rows_of(self, table: RecStoreTable) -> StoreRows:
        """The rows of a table of the store."""
        return StoreRows(table, self._store)

    def catch_up(self) -> None:
        """See ``Follower``."""
        self._store.drain()

    def detach(self) -> None:
        """See ``Follower``."""


class StoreRows:
    """The rows of one table of a local store; see ``RowSource``.

    A moment is the store's clock: a row whose version is newer was written since, or lost its key. So
    nothing is kept here, and what other threads and processes write is seen too.

    Args:
        table: the table.
        store: its store.
    """

    def __init__(self, table: RecStoreTable, store: LocalStore) -> None:
        self._table = table
        self._store = store
        self._name = table.name

    @property
    def device(self) -> torch.device:
        """See ``RowSource``."""
        return self._store.device

    def mark(self, rows: torch.Tensor | None) -> None:
        """See ``RowSource``: all who read the store's versions hear of it."""
        if rows is not None:
            rows = rows.to(self.device)
            if self._table.dynamic:
                with self.at_rest():
                    found = self._group.local_rows(self._name, rows)
                rows = found[found != 0]
            else:
                rows = checked_rows(self._table, rows)
        self._store.touch(self._name, rows)

    def at_rest(self) -> AbstractContextManager[None]:
        """See ``RowSource``."""
        return self._store.reading()

    def changed(self, since: int | None) -> tuple[torch.Tensor, int]:
        """See ``RowSource``."""
        clock = self._store.clock
        if since is None:
            if self._table.dynamic:
                return self._group.keys[self._name].rows_in_use(), clock
            return torch.arange(self._table.num_rows, device=self.device), clock
        if since == clock:
            return torch.empty(0, dtype=torch.int64, device=self.device), clock
        versions = self._group.versions_of(self._name)
        pieces = [
            _newer(versions[start : start + _CHUNK], since) + start
            for start in range(0, len(versions), _CHUNK)
        ]
        return torch.cat(pieces) if pieces else versions.new_empty(0), clock

    def settle(self, rows: torch.Tensor) -> None:
        """See ``RowSource``; the moment says it all."""

    def owe(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``: none can be named."""
        return rows

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See ``RowSource``."""
        if not self._table.dynamic:
            keys = rows + self._table.first_row if self._table.first_row else rows
            return keys.cpu().numpy(), np.ones(len(rows), np.bool_)
        group = self._group
        keys = group.keys[self._name].keys_of(rows)
        return keys.numpy(), (group.versions_of(self._name).index_select(0, rows) > 0).numpy()

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``RowSource``."""
        if self._table.dynamic:
            return (self._group.local_rows(self._name, torch.from_numpy(keys)) != 0).numpy()
        first = self._table.first_row
        return (keys >= first) & (keys < first + self._table.num_rows)

    def locate(self, keys: NDArray[np.int64], rows: torch.Tensor, moment: int) -> torch.Tensor:
        """See ``RowSource``."""
        if not self._table.dynamic or self._store.clock == moment:
            return rows
        found = self._group.local_rows(self._name, torch.from_numpy(keys))
        return found.masked_fill_(found == 0, -1)

    def weights(self) -> tuple[torch.Tensor, ...]:
        """See ``RowSource``."""
        return (self._group.rows_of(self._name),)

    def fallback_rows(self) -> dict[int | None, int]:
        """See ``RowSource``: a dynamic table's default row."""
        return {None: 0} if self._table.dynamic else {}

    @property
    def _group(self) -> RowGroup:
        # Asked for each time: another process may have replaced the optimizer, and the group with it.
        return self._store.group_of(self._name)


def _newer(versions: torch.Tensor, since: int) -> torch.Tensor:
    """Where the magnitude of a version is larger than ``since``, int64."""
    if versions.device.type == "cpu":
        array = versions.numpy()
        return torch.from_numpy(np.flatnonzero((array > since) | (array < -since)))
    return ((versions > since) | (versions < -since)).nonzero().flatten()
