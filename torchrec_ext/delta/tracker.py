"""Keeps, per table, what was published of it, and turns what changed since into a delta."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_ext.delta.buffers import Arena
from torchrec_ext.delta.cut import ShardAnswers, TableDelta
from torchrec_ext.delta.keys import NO_KEYS, difference
from torchrec_ext.delta.standing import Standing
from torchrec_ext.delta.storage import LARGEST, StorageDtype
from torchrec_ext.delta.tracked import NO_ROW, RowSource, TrackedTable, copy_rows
from torchrec_ext.errors import CorruptTableError, DeltaDumpError

_NO_DUMP_UNTIL_REPAIRED = "restart from a checkpoint, or repair it: until then no dump succeeds"


@dataclass(frozen=True)
class Diff:
    """What changed in a table's owners and rows since the last dump.

    Attributes:
        moment: when it was taken; see ``RowSource.changed``.
        rows: the local rows that may have changed, int64.
        rebound: those of ``rows`` that are not owned as they were published; None: all keys are row numbers.
        upsert_rows: those of ``rows`` that a key owns.
        upsert_keys: the keys that own ``upsert_rows``.
        delete_keys: keys that were published and own no row any more.
    """

    moment: int
    rows: torch.Tensor
    rebound: _Bindings | None
    upsert_rows: torch.Tensor
    upsert_keys: NDArray[np.int64]
    delete_keys: NDArray[np.int64]


class _Bindings(NamedTuple):
    """Which keys own rows.

    Attributes:
        rows: local rows, int64.
        owners: the key that owns each, int64; anything for a row without one.
        owned: whether a key does, bool.
    """

    rows: torch.Tensor
    owners: NDArray[np.int64]
    owned: NDArray[np.bool_]


class Tracker:
    """Follows one table for one dumper.

    Holds, for each row, the key under which it was published last, whatever the number of steps between
    dumps. A delta is the difference between that and the keys that own the rows now, for rows that may
    have changed only.

    A cut that fails on the way changes nothing: ``compare`` and ``read`` only read, ``advance`` takes
    what they found as published.

    Args:
        table: the table.
        rows: its rows on this rank.
        publish_all: whether the first delta holds every owned row (else: those that change from now).
        orphans: keys that a consumer of the log holds already, int64; the first delta deletes those
            that own no row.
        storage_dtype: how the log stores vectors, which must be able to hold them.
    """

    def __init__(
        self,
        table: TrackedTable,
        rows: RowSource,
        *,
        publish_all: bool,
        orphans: NDArray[np.int64] = NO_KEYS,
        storage_dtype: StorageDtype = "float32",
    ) -> None:
        self.table = table
        self._storage_dtype = storage_dtype
        self._rows = rows
        self._orphans = orphans
        self._unsaid = torch.empty(0, dtype=torch.int64, device=rows.device)
        self._published = None if table.key_space == "row" else _PublishedKeys(table.num_rows, rows.device)
        self._moment: int | None = None
        if not publish_all:
            with rows.at_rest():
                present, self._moment = rows.changed(None)
                if self._published is not None:
                    self._published.put(_Bindings(present, *self._owners(present)))

    def compare(self) -> Diff:
        """The difference to the last dump that was taken as published.

        Raises:
            CorruptTableError: the collision map does not name each row of the shard exactly once.
        """
        with self._rows.at_rest():
            rows, moment = self._rows.changed(self._moment)
            if len(self._unsaid):
                rows = torch.cat([rows, self._unsaid]).unique()
            owners, owned = self._owners(rows)
            left, rebound = self._orphans, None
            if self._published is not None:
                replaced, rebound = self._published.compare(_Bindings(rows, owners, owned))
                left = np.concatenate([replaced, left])
            if len(left):
                # A key that left its row may own another one, which changed when it was given it; and an
                # orphan may own one that goes out with this delta.
                left = left[~self._rows.holds(left)]
        if owned.all():
            return Diff(moment, rows, rebound, rows, owners, left)
        places = np.flatnonzero(owned)
        upsert_rows = rows.index_select(0, torch.from_numpy(places).to(rows.device))
        return Diff(moment, rows, rebound, upsert_rows, owners.take(places), left)

    @torch.no_grad()
    def read(self, diff: Diff, piece: slice, arena: Arena) -> TableDelta:
        """The rows of a difference with their vectors as they are now.

        Args:
            diff: from ``compare``.
            piece: which of its upserts; the piece that starts at 0 takes the deletes along.
            arena: where the vectors go.

        Raises:
            CorruptTableError: a vector is not finite.
            DeltaDumpError: a vector cannot be stored as ``storage_dtype``.
        """
        keys, rows = diff.upsert_keys[piece], diff.upsert_rows[piece]
        weights = self._rows.weights()
        upserts, vectors, deletes = [], [], [NO_KEYS if piece.start else diff.delete_keys]
        start = 0
        while start < len(rows):
            matrix = arena.take(len(rows) - start, self.table.dim)
            stop = start + len(matrix)
            found, there, gone = self._copy(weights, keys[start:stop], rows[start:stop], diff.moment, matrix)
            self.table.as_answered_(there)
            self._check_storable(there, found)
            upserts.append(found)
            vectors.append(there.numpy())
            deletes.append(gone)
            start = stop
        return TableDelta(
            self.table.part, np.concatenate([NO_KEYS, *upserts]), tuple(vectors), np.concatenate(deletes)
        )

    @torch.no_grad()
    def answers(self) -> ShardAnswers | None:
        """What the shard answers for keys that own no row; None if all keys own one.

        Raises:
            CorruptTableError: the fallback row is not finite.
            DeltaDumpError: it cannot be stored as ``storage_dtype``.
        """
        with self._rows.at_rest():
            rows = dict(self._rows.fallback_rows())
            if not rows:
                return None
            (weight,) = self._rows.weights()
            chosen = torch.tensor(list(rows.values()), device=weight.device)
            vectors = weight[chosen.clamp(min=0)].float().cpu()
            vectors[chosen.cpu() == NO_ROW] = 0.0
        self.table.as_answered_(vectors)
        if not torch.isfinite(vectors).all():
            raise CorruptTableError(
                f"{self.table.fqn} on rank {self.table.shard}: 1 vector is not finite: that of the "
                f"fallback row, row {self.table.first_row + rows[None]}; {_NO_DUMP_UNTIL_REPAIRED}"
            )
        if (vectors.abs() > LARGEST[self._storage_dtype]).any():
            raise self._too_large(f"row {self.table.first_row + rows[None]}, the fallback row, holds")
        answers = dict(zip(rows, vectors.numpy(), strict=True))
        return ShardAnswers(
            self.table.fqn,
            self.table.shard,
            answers[None],
            {key: vector for key, vector in answers.items() if key is not None},
        )

    def advance(self, diff: Diff, *, keep_marks: bool = False) -> None:
        """Takes a difference as published.

        Args:
            diff: from ``compare``.
            keep_marks: whether its rows may have changed since it was read.
        """
        if self._published is not None and diff.rebound is not None:
            self._published.put(diff.rebound)
        if not keep_marks:
            self._rows.settle(diff.rows)
        self._moment = diff.moment
        self._orphans = NO_KEYS
        self._unsaid = self._unsaid[:0]

    def stand(self) -> Standing:
        """How the table's rows stand to a log of which nothing is known yet.

        Raises:
            CorruptTableError: the collision map does not name each row of the shard exactly once.
        """
        with self._rows.at_rest():
            rows, moment = self._rows.changed(None)
            owners, owned = self._owners(rows)
        return Standing(self.table, self._rows, moment, rows, owners, owned)

    def adopt(self, standing: Standing, held: NDArray[np.int64]) -> None:
        """Goes on from what a log says: the next delta holds what it does not, and deletes the rest.

        Args:
            standing: from ``stand``.
            held: the keys that a consumer of the log may hold, int64.
        """
        said = standing.said
        if self._published is not None:
            self._published = _PublishedKeys(self.table.num_rows, self._rows.device)
            self._published.put(_Bindings(standing.rows, standing.owners, said))
        unsaid = torch.from_numpy(np.flatnonzero(standing.owned & ~said))
        unsaid = standing.rows.index_select(0, unsaid.to(standing.rows.device))
        self._orphans = difference(held, standing.owners[said])
        self._moment = standing.moment
        self._rows.settle(standing.rows)
        self._unsaid = self._rows.owe(unsaid)

    def _owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """As ``RowSource.owners``; a key that routes to another shard owns nothing: nobody asks here."""
        keys, owned = self._rows.owners(rows)
        routing, shard = self.table.routing, self.table.shard
        if self._published is not None and routing.num_shards > 1:
            # Nearly all ids of a ZCH table are in the shard's own block, which is cheap to tell.
            others = np.flatnonzero(~routing.in_block(keys, shard))
            owned[others[routing.shard_of(keys[others]) != shard]] = False
        return keys, owned

    def _copy(
        self,
        weights: tuple[torch.Tensor, ...],
        keys: NDArray[np.int64],
        rows: torch.Tensor,
        moment: int,
        matrix: torch.Tensor,
    ) -> tuple[NDArray[np.int64], torch.Tensor, NDArray[np.int64]]:
        """Copies keys' rows into ``matrix``.

        Returns:
            The keys that own a row, their rows (the head of ``matrix``), and the keys that own none any
            more: others than training may have changed the table since ``moment``.
        """
        gone = NO_KEYS
        with self._rows.at_rest():
            found = self._rows.locate(keys, rows, moment)
            if found is not rows:
                is_gone = (found < 0).cpu().numpy()
                keys, gone, found = keys[~is_gone], keys[is_gone], found[found >= 0]
                matrix = matrix[: len(keys)]
            copy_rows(weights, found, matrix)
        return keys, matrix, gone

    def _check_storable(self, matrix: torch.Tensor, keys: NDArray[np.int64]) -> None:
        largest = LARGEST[self._storage_dtype]
        # One pass without a temporary; a sum that overflows is looked at again.
        if self._storage_dtype == "float32" or not len(matrix):
            if torch.isfinite(matrix.sum()):
                return
        else:
            low, high = torch.aminmax(matrix)
            if low >= -largest and high <= largest:
                return
        bad = (~torch.isfinite(matrix)).any(dim=1).nonzero().flatten().numpy()
        if len(bad):
            raise CorruptTableError(
                f"{self.table.fqn} on rank {self.table.shard}: {len(bad)} of {len(keys)} changed "
                f"vectors are not finite: {_examples(keys[bad])}; {_NO_DUMP_UNTIL_REPAIRED}"
            )
        large = (matrix.abs() > largest).any(dim=1).nonzero().flatten().numpy()
        if len(large):
            raise self._too_large(
                f"{len(large)} of {len(keys)} changed vectors ({_examples(keys[large])}) hold"
            )

    def _too_large(self, what: str) -> DeltaDumpError:
        return DeltaDumpError(
            f"{self.table.fqn} on rank {self.table.shard}: {what} values beyond "
            f"{LARGEST[self._storage_dtype]:g}, which storage_dtype={self._storage_dtype!r} cannot store; "
            "the rows go out with the next dump that can. Leave storage_dtype out, or keep them smaller"
        )


def trackers_of(
    parts: Mapping[TrackedTable, Sequence[tuple[TrackedTable, RowSource]]],
    held: Mapping[str, NDArray[np.int64]],
    group: dist.ProcessGroup | None,
    publish_all: bool,
    storage_dtype: StorageDtype,
) -> dict[str, Tracker]:
    """A tracker for each part of a table that is up to this rank, by a name of its own.

    Args:
        parts: by table, its parts on this rank and their rows.
        held: by table FQN, the keys that a consumer of the log holds, of those that route to this rank.
        group: the ranks that dump; None in a single process.
        publish_all: see ``Tracker``.
        storage_dtype: see ``Tracker``.
    """
    rank = dist.get_rank(group) if group is not None else 0
    trackers = {}
    for table, its_parts in parts.items():
        if table.place is None or rank == 0:
            orphans = held.get(table.fqn, NO_KEYS)
            for number, (part, rows) in enumerate(its_parts):
                trackers[f"{table.fqn}/{number}"] = Tracker(
                    part,
                    rows,
                    publish_all=publish_all,
                    orphans=orphans[part.keeps(orphans)],
                    storage_dtype=storage_dtype,
                )
    return trackers


def _examples(keys: NDArray[np.int64]) -> str:
    return f"ids {', '.join(map(str, keys[:3]))}{', ...' if len(keys) > 3 else ''}"


class _PublishedKeys:
    """Under which key each row was published last, if it was."""

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._keys = _zeros(num_rows, np.int64, device)
        self._is_published = _zeros(num_rows, np.bool_, device)

    def compare(self, now: _Bindings) -> tuple[NDArray[np.int64], _Bindings]:
        """The keys under which rows were published that are not theirs now; and what is not as published."""
        keys = self._keys.index_select(0, now.rows).cpu().numpy()
        was_owned = self._is_published.index_select(0, now.rows).cpu().numpy()
        changed = np.flatnonzero((keys != now.owners) | (was_owned != now.owned))
        rows = now.rows.index_select(0, torch.from_numpy(changed).to(now.rows.device))
        rebound = _Bindings(rows, now.owners[changed], now.owned[changed])
        return keys[changed[was_owned[changed]]], rebound

    def put(self, bindings: _Bindings) -> None:
        """Takes rows as published for their owners."""
        device = self._keys.device
        self._keys.index_copy_(0, bindings.rows, torch.from_numpy(bindings.owners).to(device))
        self._is_published.index_copy_(0, bindings.rows, torch.from_numpy(bindings.owned).to(device))


def _zeros(size: int, dtype: type[np.generic], device: torch.device) -> torch.Tensor:
    # NumPy's zeros take memory only as they are written to, and a store may reserve rows in plenty.
    return torch.from_numpy(np.zeros(size, dtype)).to(device)
