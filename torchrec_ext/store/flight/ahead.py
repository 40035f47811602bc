"""``RowsAhead``: rows that were read before they are needed, and what this process's updates made of them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from torchrec_ext.store.store import Rows
from torchrec_ext.store.tables import DenseTable

# Updates whose news are kept; a row whose news are gone is asked for.
_NEWS_KEPT = 64


@dataclass(frozen=True)
class _News:
    """Rows of a table as an update left them: keys int64 ``[n]``, rows ``[n, dim]``, and their version."""

    table: str
    keys: torch.Tensor
    rows: torch.Tensor
    version: int


class RowsAhead:
    """Has updates bring back the rows that are wanted next, which saves a request for them.

    All tables are dense ones that nobody but this process writes. Rows are wanted from when they were
    pulled ahead until they are used, or nobody has them any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pulled: list[tuple[weakref.ReferenceType[torch.Tensor], str, torch.Tensor]] = []
        self._news: deque[_News] = deque(maxlen=_NEWS_KEPT)
        self._marks: dict[DenseTable, torch.Tensor] = {}

    def expect(self, table: DenseTable, rows: Rows) -> None:
        """Takes note of rows that were pulled ahead; their versions tell them from others."""
        with self._lock:
            self._forget_dropped()
            self._pulled.append((weakref.ref(rows.versions), table.name, rows.keys))

    def wanted(self, table: DenseTable, keys: torch.Tensor) -> torch.Tensor:
        """Where among ``keys``, int64 ``[n]``, those stand whose rows are wanted; each once."""
        with self._lock:
            self._forget_dropped()
            pulled = [of for _, name, of in self._pulled if name == table.name]
            if not pulled:
                return torch.empty(0, dtype=torch.int64)
            marks = self._marks.get(table)
            if marks is None:
                # NumPy's zeros take memory only where they are touched.
                marks = self._marks[table] = torch.from_numpy(np.zeros(table.num_rows, np.bool_))
            for of in pulled:
                marks[of - table.first_key] = True
            positions = marks[keys - table.first_key].nonzero().flatten()
            for of in pulled:
                marks[of - table.first_key] = False
        if len(positions):  # of a key that repeats, one is enough
            _, first = np.unique(keys[positions].numpy(), return_index=True)
            positions = positions[torch.from_numpy(first)]
        return positions

    def learn(self, table: str, keys: torch.Tensor, rows: torch.Tensor, version: int) -> None:
        """Takes rows as an update left them; ``keys`` ascend."""
        with self._lock:
            self._news.append(_News(table, keys, rows, version))

    def bring(self, table: str, held: Rows, changed: torch.Tensor, versions: torch.Tensor) -> bool:
        """Brings rows up to date from what updates brought back.

        Args:
            table: the table's name.
            held: what was pulled.
            changed: which of them were written since, int64 ``[m]``.
            versions: the versions of these now, int64 ``[m]``.

        Returns:
            Whether all are; if not, none is.
        """
        oldest = int(versions.min())
        with self._lock:
            news = [one for one in self._news if one.table == table and one.version >= oldest]
        keys = held.keys[changed]
        rows = held.rows.new_empty(len(changed), held.rows.shape[1])
        missing = len(changed)
        for one in reversed(news):
            # A row is what the update left that wrote it last.
            mine = (versions == one.version).nonzero().flatten()
            if not len(mine) or not len(one.keys):
                continue
            wanted = keys[mine]
            at = torch.searchsorted(one.keys, wanted).clamp_(max=len(one.keys) - 1)
            found = (one.keys[at] == wanted).nonzero().flatten()  # another server may count the same
            rows.index_copy_(0, mine[found], one.rows.index_select(0, at[found]))
            missing -= len(found)
        if missing:
            return False
        held.rows.index_copy_(0, changed, rows)
        held.versions.index_copy_(0, changed, versions)
        return True

    def use(self, held: Rows) -> None:
        """Takes note that rows are used now, and not wanted any more."""
        with self._lock:
            self._pulled = [entry for entry in self._pulled if entry[0]() is not held.versions]
            self._forget_dropped()

    def _forget_dropped(self) -> None:
        self._pulled = [entry for entry in self._pulled if entry[0]() is not None]
        if not self._pulled:
            self._news.clear()
