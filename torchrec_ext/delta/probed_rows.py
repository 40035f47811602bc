"""Rows of multi-probe ZCH tables, for the tracker: flags per row, and the ids last seen in the slots."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

from torchrec_ext.delta.tracked import NO_ROW, checked_rows, flagged
from torchrec_ext.zch import ZchTable, internals


class ProbedRows:
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
        self._table = table
        self._seen = self._ids().clone()
        self._loaded = self._version()
        self._touched = torch.zeros(table.num_rows, dtype=torch.bool, device=self._seen.device)
        self._repeated = self._repeated_now = _repeated(self._seen)

    @property
    def device(self) -> torch.device:
        """See ``RowSource``."""
        return self._touched.device

    def touch(self, rows: torch.Tensor) -> None:
        """Flags local rows, int64 on the table's device."""
        self._touched.index_fill_(0, rows, True)

    def mark(self, rows: torch.Tensor | None) -> None:
        """See ``RowSource``."""
        if rows is None:
            self._touched.fill_(True)
        else:
            self.touch(checked_rows(self._table, rows).to(self.device))

    def at_rest(self) -> AbstractContextManager[None]:
        """See ``RowSource``: nobody but the training thread changes rows, and it is dumping."""
        return nullcontext()

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
        self._touched.index_fill_(0, rows, False)
        self._seen.index_copy_(0, rows, self._ids().index_select(0, rows))
        self._repeated = self._repeated_now

    def owe(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``: none can be named."""
        return rows

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See ``RowSource``."""
        keys = self._ids().index_select(0, rows).cpu().numpy()
        return keys, self._find(keys) == rows.cpu().numpy()

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``RowSource``."""
        return self._find(keys) >= 0

    def locate(self, keys: NDArray[np.int64], rows: torch.Tensor, moment: int) -> torch.Tensor:
        """See ``RowSource``."""
        return rows

    def weights(self) -> tuple[torch.Tensor, ...]:
        """See ``RowSource``."""
        return (self._table.weight(),)

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
