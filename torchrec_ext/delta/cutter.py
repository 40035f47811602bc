"""Takes cuts on the training thread: what changed since the last one, read and handed to the writer."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from torchrec_ext.delta.buffers import Arena, BufferPool
from torchrec_ext.delta.columns import ColumnJoiner
from torchrec_ext.delta.cut import Cut, DumpResult, PieceStream
from torchrec_ext.delta.following import Followers
from torchrec_ext.delta.tracker import Diff, Tracker
from torchrec_ext.delta.writer import DumpWriter

logger = logging.getLogger(__name__)

Diffs = dict[str, Diff]
"""By the tracker's name."""


class Cutter:
    """Turns what the trackers noted into cuts.

    Args:
        trackers: of this rank: one for each table, or for each part of one, by any name.
        followers: of the tables' modules and stores.
        pool: host memory for vectors.
        writer: takes the cuts.
        generation: the run generation.
        joiner: of columns that several ranks hold; None where there are none.
    """

    def __init__(
        self,
        trackers: dict[str, Tracker],
        followers: Followers,
        pool: BufferPool,
        writer: DumpWriter,
        generation: int,
        joiner: ColumnJoiner | None,
    ) -> None:
        self._generation = generation
        self._trackers = trackers
        self._followers = followers
        self._pool = pool
        self._writer = writer
        self._joiner = joiner
        self._unsettled: tuple[Cut, Diffs | None] | None = None

    @torch.no_grad()
    def cut(self, global_step: int, metadata: dict[str, Any]) -> DumpResult:
        """Reads what changed and hands it to the writer.

        A dump that fits in memory is read at once and written while training goes on; a larger one is
        written while it is read, and has been committed, or not, when this returns.

        Raises:
            CorruptTableError: a table of this rank contradicts itself; the other ranks are told.
        """
        self.settle()
        cut = Cut(global_step, time.time(), metadata)
        self._unsettled = cut, None
        try:
            diffs = self._compare(cut)
            self._unsettled = cut, diffs
            if cut.stream is not None:
                self._stream(cut, cut.stream, diffs)
            else:
                self._writer.submit(cut)
        finally:
            self._followers.resume()
        self._advance(cut, diffs)
        return DumpResult(
            step=cut.step,
            generation=self._generation,
            upserts=sum(self._num_published(name, diff) for name, diff in diffs.items()),
            deletes=sum(len(diff.delete_keys) for diff in diffs.values()),
            vector_bytes=self._vector_bytes(diffs),
            stall_seconds=cut.stall_seconds,
        )

    def settle(self) -> None:
        """Finishes a cut that an exception, such as a Ctrl-C that was caught, left half taken.

        The other ranks have a cut of the same step, so this one's must not be missing.
        """
        if self._unsettled is None:
            return
        cut, diffs = self._unsettled
        if not self._writer.has(cut):
            if cut.streamed or diffs is None:
                self._fail(cut, cut.error or RuntimeError("interrupted"))
            else:
                self._writer.submit(cut)
        elif cut.stream is not None:
            cut.stream.finish(RuntimeError("interrupted"))
        if cut.streamed:
            self._writer.wait_until_written()
        self._advance(cut, diffs or {}, keep_marks=True)

    def _compare(self, cut: Cut) -> Diffs:
        """Finds out what changed, and reads it into memory if it fits."""
        losses = 0 if self._joiner is None else self._joiner.losses
        try:
            self._followers.pause()
            diffs = {name: tracker.compare() for name, tracker in self._trackers.items()}
            answers = [tracker.answers() for tracker in self._trackers.values()]
            cut.answers = [answer for answer in answers if answer is not None]
            if self._chunks_needed(diffs) <= self._pool.max_chunks:
                self._read_at_once(cut, diffs)
            else:
                cut.deltas = cut.stream = PieceStream()
            if self._joiner is not None:
                keys = {self._trackers[name].table.part: diff.upsert_keys for name, diff in diffs.items()}
                split = {part: keys[part] for part in self._joiner.bands if part in keys}
                cut.deltas = self._joiner.join(cut.deltas, split, losses)
        except BaseException as error:
            self._fail(cut, error)
            raise
        return diffs

    def _fail(self, cut: Cut, error: BaseException) -> None:
        """Tells the other ranks that this one has nothing to commit."""
        cut.release()
        cut.error = error
        cut.deltas = () if self._joiner is None else self._joiner.failed(error)
        self._writer.submit(cut)

    def _advance(self, cut: Cut, diffs: Diffs, *, keep_marks: bool = False) -> None:
        # What the writer has in memory goes out sooner or later; a stream goes out now or is read anew.
        if cut.committed if cut.streamed else self._writer.has(cut):
            for name, diff in diffs.items():
                self._trackers[name].advance(diff, keep_marks=keep_marks)
        self._unsettled = None

    def _read_at_once(self, cut: Cut, diffs: Diffs) -> None:
        if self._chunks_needed(diffs) > self._pool.max_chunks - self._pool.handed_out:
            logger.warning(
                "training waits: dumps not written yet take the memory that the dump of step %d needs "
                "(max_pending_bytes), dumps take longer to write than the interval between them",
                cut.step,
            )
        cut.arena = Arena(self._pool)
        cut.deltas = [
            self._trackers[name].read(diff, slice(0, None), cut.arena) for name, diff in diffs.items()
        ]

    def _stream(self, cut: Cut, stream: PieceStream, diffs: Diffs) -> None:
        """Hands a cut over piece by piece, and waits until the writer is done with it."""
        logger.info(
            "the dump of step %d holds %d bytes of vectors, more than max_pending_bytes: "
            "training stands still while it is written",
            cut.step,
            self._vector_bytes(diffs),
        )
        try:
            self._writer.submit(cut)
            for name, diff in diffs.items():
                tracker = self._trackers[name]
                rows = self._pool.chunk_bytes // (4 * tracker.table.dim)
                for start in range(0, max(1, len(diff.upsert_keys)), rows):
                    arena = Arena(self._pool)
                    try:
                        stream.put(tracker.read(diff, slice(start, start + rows), arena), arena)
                    except BaseException:
                        arena.release()
                        raise
        except BaseException as error:
            cut.error = error
            stream.finish(error)
            raise
        stream.finish()
        self._writer.wait_until_written()
        cut.resumed = time.perf_counter()

    def _num_published(self, name: str, diff: Diff) -> int:
        if self._joiner is None:
            return len(diff.upsert_keys)
        return self._joiner.num_published(self._trackers[name].table.part, diff.upsert_keys)

    def _vector_bytes(self, diffs: Diffs) -> int:
        return sum(4 * self._trackers[name].table.dim * len(diff.upsert_keys) for name, diff in diffs.items())

    def _chunks_needed(self, diffs: Diffs) -> int:
        # A chunk's end stays unused where a vector does not fit any more.
        longest = max((tracker.table.dim for tracker in self._trackers.values()), default=0)
        usable = self._pool.chunk_bytes - 4 * longest
        return -(-self._vector_bytes(diffs) // usable)
