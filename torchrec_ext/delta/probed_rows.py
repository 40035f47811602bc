"""Rows of multi-probe ZCH tables, for the tracker: flags per row, and the ids last seen in the slots."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from torchrec_ext.delta.flagged_rows import FlaggedRows
from torchrec_ext.delta.tracked import NO_ROW, flagged
from torchrec_ext.zch import ZchTable, internals


class ProbedRows(FlaggedRows):
    """The rows of one multi-probe ZCH table; see ``RowSource``.

    A slot is a row, and the module's identity tensor says which id is in it. A kernel fills slots during
    lookups and reports evictions only, so the tensor is compared with what it was at the last dump. An id
    owns the slot that probing finds it in, as FBGEMM's kernel has it.

    Args:
        table: the table, of a module with ``disable_fallback``: ids without a slot get zeros.
    """

    def __init__(self, table: ZchTable) -> None:
        mcm = internals.collision_modules(table.module)[table.name]
        self._mcm = cast(HashZchManagedCollisionModule, mcm)
        self._seen = self._ids().clone()
        self._loaded = self._version()
        super().__init__(table, self._seen.device)
        self._repeated = self._repeated_now = _repeated(self._seen)

    def changed(self, since: int | None) -> tuple[torch.Tensor, int]:
        """See ``RowSource``; flags know of no moments."""
        if self._version() != self._loaded:  # whatever loads an identity tensor loads the rows too
            self._touched.fill_(True)
            self._loaded = self._version()
        ids = self._ids()
        moved = ids != self._seen
        if moved.any():
            self._repeated_now = _repeated(ids)
        if since is None:
            return torch.arange(self._table.num_rows, device=self.device), 0
        rows = flagged(self._touched | moved)
        if len(self._repeated) or len(self._repeated_now):
            rows = torch.cat([rows, self._repeated, self._repeated_now]).unique()
        return rows, 0

    def settle(self, rows: torch.Tensor) -> None:
        """See ``RowSource``."""
        super().settle(rows)
        self._seen.index_copy_(0, rows, self._ids().index_select(0, rows))
        self._repeated = self._repeated_now

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See ``RowSource``."""
        keys = self._ids().index_select(0, rows).cpu().numpy()
        return keys, self._find(keys) == rows.cpu().numpy()

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``RowSource``."""
        return self._find(keys) >= 0

    def fallback_rows(self) -> dict[int | None, int]:
        """See ``RowSource``: an id without a slot is left out of its bag."""
        return {None: NO_ROW}

    def _ids(self) -> torch.Tensor:
        return internals.identities(self._mcm).data.view(-1)

    def _version(self) -> tuple[int, int]:
        # PyTorch counts in-place writes to a tensor, but not those of FBGEMM's kernel.
        identities = internals.identities(self._mcm)
        return identities.data_ptr(), identities._version

    def _find(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slots in which lookups find keys, int64 ``[n]``, -1 where they do not."""
        slots = np.full(len(keys), -1, np.int64)
        mine = (keys >= 0) & (keys < self._table.hash_size) & self._table.keeps(keys)
        if mine.any():
            found = internals.probe(self._mcm, torch.from_numpy(keys[mine]).to(self.device))
            slots[mine] = found.cpu().numpy()
        return slots


def _repeated(ids: torch.Tensor) -> torch.Tensor:
    """The slots of ids that are in more than one, int64.

    Two threads of the kernel may give one id a slot each. Probing finds the first of them, until that goes to
    another id: then the other one counts, which has not changed.
    """
    known, counts = ids[ids >= 0].unique(return_counts=True)
    return torch.isin(ids, known[counts > 1]).nonzero().flatten()
