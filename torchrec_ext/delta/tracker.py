"""Keeps, per table, which rows may have changed since the last dump, and turns them into a delta."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.delta.buffers import Arena
from torchrec_ext.delta.cut import NO_KEYS, ShardAnswers, TableDelta
from torchrec_ext.errors import CorruptTableError
from torchrec_ext.zch import NO_ID, RowBinding, ZchTable


@dataclass(frozen=True)
class BindingDiff:
    """What changed in a table's bindings and rows since the last dump.

    Attributes:
        rows: the local rows that may have changed, int64.
        owners: the id that owns each of them now, int64, ``NO_ID`` for none.
        upsert_rows: those of ``rows`` that an id owns.
        upsert_keys: the ids that own ``upsert_rows``.
        delete_keys: ids that were published and own no row any more.
    """

    rows: torch.Tensor
    owners: NDArray[np.int64]
    upsert_rows: torch.Tensor
    upsert_keys: NDArray[np.int64]
    delete_keys: NDArray[np.int64]


class ZchTracker:
    """Follows one ZCH table for one dumper.

    Holds a flag and an id per row, whatever the number of steps between dumps: whether the row may
    have changed since the last dump, and the id under which it was published then. A delta is the
    difference between that and the ids that own the rows now, for flagged rows only.

    A cut that fails on the way changes nothing: ``compare`` and ``read`` only read, ``advance`` takes
    what they found as published.

    Args:
        table: the table.
        binding: who owns its rows.
        publish_all: whether the first delta holds every owned row (else: those that change from now).
        orphans: ids that a consumer of the log holds already, int64; the first delta deletes those
            that own no row.
    """

    def __init__(
        self,
        table: ZchTable,
        binding: RowBinding,
        *,
        publish_all: bool,
        orphans: NDArray[np.int64] = NO_KEYS,
    ) -> None:
        self.table = table
        self._binding = binding
        self._orphans = orphans
        device = binding.raw_ids.device
        self._touched = torch.full((table.num_rows,), publish_all, dtype=torch.bool, device=device)
        sentinel_shard = table.routing.shard_of(np.array([NO_ID]))[0]
        self._answers_sentinel = sentinel_shard == table.shard
        if publish_all:
            self._published = torch.full_like(binding.raw_ids, NO_ID)
        else:
            owners = self._owners(binding.raw_ids.cpu().numpy())
            self._published = torch.from_numpy(owners).to(device)

    @property
    def device(self) -> torch.device:
        """Where the table is."""
        return self._touched.device

    def touch_all(self) -> None:
        """Flags all rows."""
        self._touched.fill_(True)

    def touch(self, rows: torch.Tensor) -> None:
        """Flags local rows, int64 on the table's device."""
        self._touched.index_fill_(0, rows, True)

    def compare(self) -> BindingDiff:
        """The difference to the last dump that was taken as published.

        Raises:
            CorruptTableError: the collision map does not name each row of the shard exactly once.
        """
        self._binding.check(self.table.fqn, self.table.shard)
        rows = _flagged(self._touched)
        owners = self._owners(self._binding.raw_ids.index_select(0, rows).cpu().numpy())
        published = self._published.index_select(0, rows).cpu().numpy()
        owned = np.flatnonzero(owners != NO_ID)
        left = published[(published != owners) & (published != NO_ID)]
        if len(self._orphans):
            left = np.concatenate([left, self._orphans])
        if len(left):
            # An id that left its row may own another one, which was flagged when it was given it.
            still_here = self._binding.holds(torch.from_numpy(left).to(rows.device))
            left = left[~still_here.cpu().numpy()]
        return BindingDiff(
            rows=rows,
            owners=owners,
            upsert_rows=rows.index_select(0, torch.from_numpy(owned).to(rows.device)),
            upsert_keys=owners.take(owned),
            delete_keys=left,
        )

    @torch.no_grad()
    def read(self, diff: BindingDiff, piece: slice, arena: Arena) -> TableDelta:
        """The rows of a difference with their vectors as they are now.

        Args:
            diff: from ``compare``.
            piece: which of its upserts; the piece that starts at 0 takes the deletes along.
            arena: where the vectors go.

        Raises:
            CorruptTableError: a vector is not finite.
        """
        keys, rows = diff.upsert_keys[piece], diff.upsert_rows[piece]
        weight = self.table.weight()
        vectors = []
        start = 0
        while start < len(rows):
            matrix = arena.take(len(rows) - start, self.table.dim)
            stop = start + len(matrix)
            if weight.device.type == "cpu" and weight.dtype == torch.float32:
                torch.index_select(weight, 0, rows[start:stop], out=matrix)
            else:
                matrix.copy_(weight.index_select(0, rows[start:stop]))
            self.table.as_answered_(matrix)
            self._check_finite(matrix, keys[start:stop])
            vectors.append(matrix.numpy())
            start = stop
        deletes = NO_KEYS if piece.start else diff.delete_keys
        return TableDelta(self.table.fqn, keys, tuple(vectors), deletes)

    @torch.no_grad()
    def answers(self) -> ShardAnswers:
        """What the shard answers for ids that own no row.

        Raises:
            CorruptTableError: the fallback row is not finite.
        """
        exceptions: tuple[int, ...] = ()
        rows = [self.table.fallback_row]
        if self._answers_sentinel:
            exceptions = (NO_ID,)
            rows.append(self._binding.sentinel_row())
        vectors = self.table.weight()[rows].float().cpu()
        self.table.as_answered_(vectors)
        if not torch.isfinite(vectors).all():
            raise CorruptTableError(
                f"{self.table.fqn} on rank {self.table.shard}: 1 vector is not finite: that of the "
                f"fallback row, row {self.table.first_row + self.table.fallback_row}"
            )
        fallback, *others = vectors.numpy()
        return ShardAnswers(
            self.table.fqn, self.table.shard, fallback, dict(zip(exceptions, others, strict=True))
        )

    def advance(self, diff: BindingDiff, *, keep_flags: bool = False) -> None:
        """Takes a difference as published.

        Args:
            diff: from ``compare``.
            keep_flags: whether its rows may have changed since it was read.
        """
        owners = torch.from_numpy(diff.owners).to(self._published.device)
        self._published.index_copy_(0, diff.rows, owners)
        if not keep_flags:
            self._touched.index_fill_(0, diff.rows, False)
        self._orphans = NO_KEYS

    def _owners(self, raw_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """``raw_ids`` with ``NO_ID`` in place of ids that route to another shard: nobody can ask here."""
        routing, shard = self.table.routing, self.table.shard
        # Nearly all ids are in the shard's own block, which is cheap to tell.
        others = np.flatnonzero(~routing.in_block(raw_ids, shard))
        elsewhere = others[routing.shard_of(raw_ids[others]) != shard]
        owners = raw_ids.copy()
        owners[elsewhere] = NO_ID
        return owners

    def _check_finite(self, matrix: torch.Tensor, keys: NDArray[np.int64]) -> None:
        # One pass without a temporary; a sum that overflows is looked at again.
        if torch.isfinite(matrix.sum()):
            return
        bad = (~torch.isfinite(matrix)).any(dim=1).nonzero().flatten().numpy()
        if len(bad):
            raise CorruptTableError(
                f"{self.table.fqn} on rank {self.table.shard}: {len(bad)} of {len(keys)} changed "
                f"vectors are not finite: ids {', '.join(map(str, keys[bad[:3]]))}"
                f"{', ...' if len(bad) > 3 else ''}"
            )


def _flagged(flags: torch.Tensor) -> torch.Tensor:
    """Where a bool tensor is set, int64. NumPy skips runs of zeros, which torch does not on CPU."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().flatten()
