"""Ranks that hold columns of the same rows agree which of them changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_ext.delta.plain_rows import PartRows
from torchrec_ext.ranks import gather


@dataclass(frozen=True)
class Marks:
    """Marked rows of a band, as they are sent: their numbers, or a bit for each row if that is less."""

    first_row: int
    num_rows: int
    rows: NDArray[np.int64] | None
    bits: NDArray[np.uint8] | None

    @classmethod
    def of(cls, keys: NDArray[np.int64], first_row: int, num_rows: int) -> Marks:
        """The marks of some rows of a band, by their keys."""
        if 64 * len(keys) < num_rows:
            return cls(first_row, num_rows, keys, None)
        flags = np.zeros(num_rows, np.bool_)
        flags[keys - first_row] = True
        return cls(first_row, num_rows, None, np.packbits(flags))

    @property
    def keys(self) -> NDArray[np.int64]:
        """The rows, by their keys."""
        if self.rows is not None:
            return self.rows
        assert self.bits is not None
        return np.flatnonzero(np.unpackbits(self.bits, count=self.num_rows)) + self.first_row


def share_marks(group: dist.ProcessGroup, parts: dict[str, PartRows], *, failed: bool) -> None:
    """Marks what any rank has marked, on all ranks that hold columns of the same rows; all ranks call it.

    Args:
        group: of the calling thread alone.
        parts: this rank's parts of such rows, by the name that all ranks have for them.
        failed: whether this rank has an error of its own to tell; it takes part all the same.
    """
    marks = {}
    if not failed:
        marks = {
            name: Marks.of(rows.marked(), rows.part.first_row, rows.part.num_rows)
            for name, rows in parts.items()
        }
    for rank, theirs in enumerate(gather(group, marks)):
        if rank != dist.get_rank(group):
            for name in theirs.keys() & parts.keys():
                parts[name].mark(torch.from_numpy(theirs[name].keys))
