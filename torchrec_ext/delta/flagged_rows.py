"""What the rows of all ZCH tables have in common, for the tracker: a flag per row."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.delta.tracked import checked_rows
from torchrec_ext.zch import ZchTable


class FlaggedRows:
    """The rows of one ZCH table on this rank, but for how a row's owner is found.

    Holds a flag per row, whatever the number of steps between dumps. Nobody but the training thread
    changes rows, so they are always at rest, and where they were, while it dumps.

    Args:
        table: the table.
        device: where its rows are.
    """

    def __init__(self, table: ZchTable, device: torch.device) -> None:
        self._table = table
        self._touched = torch.zeros(table.num_rows, dtype=torch.bool, device=device)

    @property
    def device(self) -> torch.device:
        """See ``RowSource``."""
        return self._touched.device

    def touch(self, rows: torch.Tensor | None) -> None:
        """Flags local rows, int64 on the table's device; None: all."""
        if rows is None:
            self._touched.fill_(True)
        else:
            self._touched.index_fill_(0, rows, True)

    def mark(self, rows: torch.Tensor | None) -> None:
        """See ``RowSource``."""
        self.touch(None if rows is None else checked_rows(self._table, rows).to(self.device))

    def at_rest(self) -> AbstractContextManager[None]:
        """See ``RowSource``."""
        return nullcontext()

    def settle(self, rows: torch.Tensor) -> None:
        """See ``RowSource``."""
        self._touched.index_fill_(0, rows, False)

    def owe(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``: none can be named."""
        return rows

    def locate(self, keys: NDArray[np.int64], rows: torch.Tensor, moment: int) -> torch.Tensor:
        """See ``RowSource``."""
        return rows

    def weights(self) -> tuple[torch.Tensor, ...]:
        """See ``RowSource``."""
        return (self._table.weight(),)
