"""Rows of ZCH tables, for the tracker: flags per row, and owners from the collision map."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.delta.flagged_rows import FlaggedRows
from torchrec_ext.delta.probed_rows import ProbedRows
from torchrec_ext.delta.tracked import flagged
from torchrec_ext.zch import NO_ID, RowBinding, ZchTable, ZchWatch, internals


class ZchFollower:
    """Listens to one managed-collision module; see ``Follower``.

    Args:
        table: a table of the module.
    """

    def __init__(self, table: ZchTable) -> None:
        self._rows: dict[str, ZchRows | ProbedRows] = {}
        self._watch = ZchWatch.attach(table.module, self)
        # PyTorch's count of writes to the weights does not help: evictions reset rows by such writes.
        collection = internals.inner_collection(table.module)
        self._loading = collection.register_load_state_dict_post_hook(self._weights_loaded)

    def rows_of(self, table: ZchTable) -> ZchRows | ProbedRows:
        """The rows of a table of the module."""
        rows = ProbedRows(table) if table.probed else ZchRows(table, self._watch.bindings[table.name], self)
        self._rows[table.name] = rows
        return rows

    def catch_up(self, *, force: bool = False) -> None:
        """See ``Follower``.

        Args:
            force: look also at maps that PyTorch counts no write to.
        """
        self._watch.catch_up(force=force)

    def detach(self) -> None:
        """See ``Follower``."""
        self._watch.detach(self)
        self._loading.remove()

    def rows_touched(self, table: str, rows: torch.Tensor) -> None:
        """What the watch reports; see ``ZchListener``."""
        if table in self._rows:
            self._rows[table].touch(rows)

    def _weights_loaded(self, _collection: object, _incompatible: object) -> None:
        for rows in self._rows.values():
            rows.touch(None)


class ZchRows(FlaggedRows):
    """The rows of one ZCH table; see ``RowSource``.

    Args:
        table: the table.
        binding: who owns its rows.
        follower: its module's.
    """

    def __init__(self, table: ZchTable, binding: RowBinding, follower: ZchFollower) -> None:
        super().__init__(table, binding.raw_ids.device)
        self._binding = binding
        self._follower = follower
        sentinel_shard = table.routing.shard_of(np.array([NO_ID]))[0]
        self._answers_sentinel = sentinel_shard == table.shard

    def mark(self, rows: torch.Tensor | None) -> None:
        """See ``RowSource``; the map may have been written as well."""
        if rows is None:
            self._follower.catch_up(force=True)
        super().mark(rows)

    def changed(self, since: int | None) -> tuple[torch.Tensor, int]:
        """See ``RowSource``; flags know of no moments."""
        self._binding.check(self._table.fqn, self._table.shard)
        if since is None:
            return torch.arange(self._table.num_rows, device=self.device), 0
        return flagged(self._touched), 0

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See ``RowSource``."""
        raw_ids = self._binding.raw_ids.index_select(0, rows).cpu().numpy()
        return raw_ids, raw_ids != NO_ID

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``RowSource``."""
        return self._binding.holds(torch.from_numpy(keys).to(self.device)).cpu().numpy()

    def fallback_rows(self) -> dict[int | None, int]:
        """See ``RowSource``."""
        rows: dict[int | None, int] = {None: self._table.fallback_row}
        if self._answers_sentinel:
            rows[NO_ID] = self._binding.sentinel_row()
        return rows
