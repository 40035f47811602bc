"""``WrittenRows``: what a process that is the only one to write its rows knows about them."""

from __future__ import annotations

import threading

import numpy as np
import torch

from torchrec_ext.store.tables import DenseTable

_UNDER_WAY = torch.iinfo(torch.int64).max


class WrittenRows:
    """When each row of dense tables was written last by this process.

    That is eight bytes for each row of a table, of which the system provides those that are
    touched, page by page. Writes have to come one after the other; who asks may come at any time.
    """

    def __init__(self) -> None:
        self._versions: dict[DenseTable, torch.Tensor] = {}
        self._lock = threading.Lock()

    def begin(self, table: DenseTable, keys: torch.Tensor) -> None:
        """Takes note that rows are about to be written. Until ``end``, they count as changed.

        Args:
            table: the table.
            keys: int64 ``[n]``.
        """
        self._of(table)[keys - table.first_key] = _UNDER_WAY

    def end(self, table: DenseTable, keys: torch.Tensor, version: int) -> None:
        """Takes note that rows were written.

        Args:
            table: the table.
            keys: int64 ``[n]``.
            version: theirs now.
        """
        self._of(table)[keys - table.first_key] = version

    def versions(self, table: DenseTable, keys: torch.Tensor) -> torch.Tensor:
        """The versions that this process's writes gave to rows.

        Args:
            table: the table.
            keys: int64 ``[n]``.

        Returns:
            int64 ``[n]``; 0: it wrote none. A row that is being written has the largest of all.
        """
        return self._of(table)[keys - table.first_key]

    def _of(self, table: DenseTable) -> torch.Tensor:
        with self._lock:
            if table not in self._versions:
                # Unlike torch's, NumPy's zeros take memory only when they are touched.
                self._versions[table] = torch.from_numpy(np.zeros(table.num_rows, np.int64))
            return self._versions[table]
