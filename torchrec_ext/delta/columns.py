"""Puts vectors together whose columns are on several ranks, on the writer's thread.

Each rank reads its own columns of the rows that changed; the ranks have agreed before which those are
(``Followers.pause``). Here they send each other columns, a bounded number of rows at a time, so that each
whole vector is written by one of the ranks that hold columns of it.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_ext.delta.commit import Committer
from torchrec_ext.delta.cut import DeltaSource, TableDelta
from torchrec_ext.delta.keys import NO_KEYS
from torchrec_ext.delta.tracked import TrackedTable
from torchrec_ext.errors import DeltaDumpError
from torchrec_ext.plain import PlainTable
from torchrec_ext.plain.layout import Band
from torchrec_ext.plain.tables import part_name
from torchrec_ext.ranks import gather

_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class SplitBand:
    """Rows of a table whose columns are on several ranks."""

    fqn: str
    band: Band


def split_bands(tables: Sequence[TrackedTable]) -> dict[str, SplitBand]:
    """The bands of tables that several ranks hold columns of, by the name that ``TablePart.part`` gives them.

    Every rank gets the same ones in the same order, which is that in which they are joined.
    """
    return {
        part_name(table.fqn, band): SplitBand(table.fqn, band)
        for table in tables
        if isinstance(table, PlainTable)
        for band in table.bands
        if len(band.ranks) > 1
    }


@dataclass(frozen=True)
class _Vote:
    """What a rank tells the others before columns are sent: the rows it has, or why it has none.

    Attributes:
        rows: per band how many, and a checksum of their keys.
        error: why it has none.
    """

    rows: dict[str, tuple[int, int]]
    error: str | None


class ColumnJoiner:
    """Joins the columns of one dump after another.

    Args:
        committer: has the group, which the writer's thread alone uses while a dump is committed.
        bands: of ``split_bands``.
        lose: takes a band and keys whose columns were read, but could not be joined: they must be
            read again.
    """

    def __init__(
        self,
        committer: Committer,
        bands: Mapping[str, SplitBand],
        lose: Callable[[str, NDArray[np.int64]], None],
    ) -> None:
        self._committer = committer
        self.bands = bands
        self.rank = dist.get_rank(self.group)
        self._ranks = dist.get_process_group_ranks(self.group)
        self._lose = lose
        self._losses = 0

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks; asked for each time, since the committer lets go of it."""
        if self._committer.group is None:
            raise RuntimeError("the dumper is closed")
        return self._committer.group

    @property
    def losses(self) -> int:
        """Grows whenever rows were lost; rows of a cut taken before they were read again are not all."""
        return self._losses

    def join(
        self, deltas: Iterable[TableDelta], keys: Mapping[str, NDArray[np.int64]], losses: int
    ) -> JoinedDeltas:
        """The deltas of a cut with its columns joined, once the writer asks for them.

        Args:
            deltas: of this rank; those of a band have its columns only, and come in the order of the bands.
            keys: all keys of each of this rank's bands, in the order in which the deltas have them.
            losses: what ``losses`` was before the cut was taken.
        """
        return JoinedDeltas(self, deltas, dict(keys), losses)

    def failed(self, error: BaseException) -> JoinedDeltas:
        """What stands for the deltas of a cut that failed on this rank, so that the others hear of it."""
        return JoinedDeltas(self, (), {}, self._losses, error)

    def num_published(self, name: str, keys: NDArray[np.int64]) -> int:
        """How many of a delta's keys this rank writes."""
        if name not in self.bands:
            return len(keys)
        band = self.bands[name].band
        return int(np.count_nonzero(band.publishers(keys) == band.ranks.index(self.rank)))

    def lose(self, name: str, keys: NDArray[np.int64]) -> None:
        """Gives rows back that could not be joined."""
        self._lose(name, keys)
        self._losses += 1

    def exchange(self, split: SplitBand, keys: NDArray[np.int64], columns: NDArray[np.float32]) -> TableDelta:
        """Sends this rank's columns of some rows to where they are written, and joins those that it writes.

        Args:
            split: the band.
            keys: int64 ``[n]``, the same on each of the band's ranks.
            columns: float32 ``[n, columns of this rank]``.
        """
        band, publishers = split.band, split.band.publishers(keys)
        mine = publishers == band.ranks.index(self.rank)
        count = int(np.count_nonzero(mine))
        vectors = np.empty((count, band.dim), np.float32)
        arriving: list[tuple[int, torch.Tensor]] = [(self.rank, torch.from_numpy(columns[mine]))]
        kept, requests = [], []
        for index, peer in enumerate(band.ranks):
            if peer == self.rank:
                continue
            leaving = torch.from_numpy(columns[publishers == index])
            if leaving.numel():
                kept.append(leaving)
                requests.append(dist.isend(leaving, self._ranks[peer], self.group))
            if count:
                width = sum(shard.num_columns for shard in band.shards_of(peer))
                arriving.append((peer, torch.empty(count, width, dtype=torch.float32, device="cpu")))
                requests.append(dist.irecv(arriving[-1][1], self._ranks[peer], self.group))
        for request in requests:
            request.wait()  # type: ignore[union-attr]
        for peer, matrix in arriving:
            start = 0
            for shard in band.shards_of(peer):
                stop = start + shard.num_columns
                at = slice(shard.first_column, shard.first_column + shard.num_columns)
                vectors[:, at] = matrix[:, start:stop].numpy()
                start = stop
        return TableDelta(split.fqn, keys[mine], (vectors,))


class JoinedDeltas(DeltaSource):
    """A cut's deltas with whole vectors.

    The first iteration exchanges columns with the other ranks, which do the same; ``discard`` does what is
    left of it, so that no rank waits for another in vain. A second one, after a dump that failed, gives
    what the first one gave; rows that could not be joined are given back to be read again.

    Args:
        joiner: of the dumper.
        deltas: see ``ColumnJoiner.join``.
        keys: see there.
        losses: see there.
        error: why there are no deltas.
    """

    def __init__(
        self,
        joiner: ColumnJoiner,
        deltas: Iterable[TableDelta],
        keys: dict[str, NDArray[np.int64]],
        losses: int,
        error: BaseException | None = None,
    ) -> None:
        self._joiner = joiner
        self._deltas = deltas
        self._keys = keys
        self._losses = losses
        self._error = error
        self._streamed = isinstance(deltas, DeltaSource)
        self._joined: list[TableDelta] = []
        self._is_joined = False
        self._ended = False
        self._join = self._run()

    def __iter__(self) -> Iterator[TableDelta]:
        return self._join if not self._ended else self._again()

    def discard(self) -> None:
        """Joins what is not joined yet."""
        with contextlib.suppress(BaseException):
            for _ in self._join:
                pass
        if isinstance(self._deltas, DeltaSource):
            self._deltas.discard()

    def _run(self) -> Iterator[TableDelta]:
        try:
            self._agree()
            yield from self._exchange_all()
            self._is_joined = True
        finally:
            self._ended = True

    def _again(self) -> Iterator[TableDelta]:
        for delta in self._deltas:
            if delta.fqn not in self._joiner.bands:
                yield delta
        if self._is_joined:
            yield from self._joined
        else:
            for name, keys in self._keys.items():
                self._joiner.lose(name, keys)

    def _agree(self) -> None:
        """Raises on all ranks if one has no columns, or other rows than the others."""
        error = None if self._error is None else f"{type(self._error).__name__}: {self._error}"
        if error is None and self._losses != self._joiner.losses:
            error = "rows of an earlier dump that failed were read after this one"
        rows = {name: (len(keys), zlib.crc32(keys.tobytes())) for name, keys in self._keys.items()}
        votes = gather(self._joiner.group, _Vote(rows, error))
        for rank, vote in enumerate(votes):
            if vote.error is not None:
                raise DeltaDumpError(f"columns of rank {rank} are missing: {vote.error}")
        for name, split in self._joiner.bands.items():
            found = {rank: votes[rank].rows.get(name) for rank in split.band.ranks}
            if len(set(found.values())) > 1:
                raise DeltaDumpError(f"ranks disagree about the changed rows of {name}: {found}")

    def _exchange_all(self) -> Iterator[TableDelta]:
        error: BaseException | None = None
        bands = _Bands(self._joiner, self._keys)
        deltas = iter(self._deltas)
        while True:
            try:
                delta = next(deltas)
            except StopIteration:
                break
            except BaseException as caught:  # a stream that broke: the other ranks still want our columns
                error = caught
                break
            if delta.fqn not in self._joiner.bands:
                yield delta
                continue
            if len(delta.delete_keys):
                fqn = self._joiner.bands[delta.fqn].fqn
                yield self._kept(TableDelta(fqn, delete_keys=delta.delete_keys))
            for vectors in delta.vectors:
                for joined in bands.put(delta.fqn, vectors):
                    yield self._kept(joined)
        for joined in bands.finish():
            yield self._kept(joined)
        if error is not None:
            raise error

    def _kept(self, delta: TableDelta) -> TableDelta:
        if not self._streamed:  # a stream is read anew if the dump fails
            self._joined.append(delta)
        return delta


class _Bands:
    """Gathers a rank's columns into chunks of the same rows on all ranks."""

    def __init__(self, joiner: ColumnJoiner, keys: Mapping[str, NDArray[np.int64]]) -> None:
        self._joiner = joiner
        self._keys = keys
        self._buffers: dict[str, NDArray[np.float32]] = {}
        self._filled = dict.fromkeys(keys, 0)
        self._sent = dict.fromkeys(keys, 0)

    def put(self, name: str, columns: NDArray[np.float32]) -> Iterator[TableDelta]:
        """Takes in the columns of a band's next rows; gives the rows that are whole by that."""
        while len(columns):
            buffer = self._buffer(name, columns.shape[1])
            room = columns[: len(buffer) - self._filled[name]]
            buffer[self._filled[name] : self._filled[name] + len(room)] = room
            self._filled[name] += len(room)
            columns = columns[len(room) :]
            left = len(self._keys[name]) - self._sent[name]
            if self._filled[name] == min(len(buffer), left):
                yield self._exchange(name, buffer[: self._filled[name]])

    def finish(self) -> Iterator[TableDelta]:
        """Sends anything in place of the rows that did not come: the dump has failed by then."""
        for name in self._joiner.bands:
            while self._sent.get(name, 0) < len(self._keys.get(name, NO_KEYS)):
                split = self._joiner.bands[name]
                width = sum(shard.num_columns for shard in split.band.shards_of(self._joiner.rank))
                buffer = self._buffer(name, width)
                yield self._exchange(name, buffer[: len(self._keys[name]) - self._sent[name]])

    def _buffer(self, name: str, width: int) -> NDArray[np.float32]:
        if name not in self._buffers:
            self._buffers.clear()  # bands come one after another
            rows = max(1, _CHUNK_BYTES // (4 * self._joiner.bands[name].band.dim))
            self._buffers[name] = np.zeros((min(rows, len(self._keys[name])), width), np.float32)
        return self._buffers[name]

    def _exchange(self, name: str, columns: NDArray[np.float32]) -> TableDelta:
        start = self._sent[name]
        self._sent[name] += len(columns)
        self._filled[name] = 0
        keys = self._keys[name][start : self._sent[name]]
        return self._joiner.exchange(self._joiner.bands[name], keys, columns)
