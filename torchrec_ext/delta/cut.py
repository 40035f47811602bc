"""What the training thread hands to the writer: one rank's changes at one step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.delta.buffers import Arena
from torchrec_ext.delta.keys import NO_KEYS
from torchrec_ext.waits import acquire


@dataclass(frozen=True)
class TableDelta:
    """Changed rows of one table on one rank; a key appears once.

    Attributes:
        fqn: the table; before columns of several ranks are joined, ``TrackedTable.part``.
        upsert_keys: int64 ``[n]``.
        vectors: the vectors of ``upsert_keys``: float32 matrices that together have ``n`` rows.
        delete_keys: ids that own no row any more, int64 ``[m]``.
    """

    fqn: str
    upsert_keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)
    vectors: tuple[NDArray[np.float32], ...] = ()
    delete_keys: NDArray[np.int64] = field(default_factory=lambda: NO_KEYS)

    @property
    def keys(self) -> NDArray[np.int64]:
        """All keys, int64 ``[n + m]``."""
        return np.concatenate([self.upsert_keys, self.delete_keys])

    def without(self, keys: NDArray[np.int64]) -> TableDelta:
        """The delta less these keys; vectors are copied."""
        upserts = ~np.isin(self.upsert_keys, keys)
        deletes = ~np.isin(self.delete_keys, keys)
        vectors = (np.concatenate(self.vectors)[upserts],) if self.vectors else ()
        return TableDelta(self.fqn, self.upsert_keys[upserts], vectors, self.delete_keys[deletes])

    def plus(self, other: TableDelta) -> TableDelta:
        """Both deltas, which must have no key in common."""
        return TableDelta(
            self.fqn,
            np.concatenate([self.upsert_keys, other.upsert_keys]),
            self.vectors + other.vectors,
            np.concatenate([self.delete_keys, other.delete_keys]),
        )


@dataclass(frozen=True)
class ShardAnswers:
    """How a shard answers ids that own no row.

    Attributes:
        fqn: the table.
        shard: the shard.
        fallback: for all ids that route to the shard, float32 ``[dim]``.
        exceptions: ids that get another vector instead.
    """

    fqn: str
    shard: int
    fallback: NDArray[np.float32]
    exceptions: dict[int, NDArray[np.float32]]


@dataclass(frozen=True)
class DumpResult:
    """One rank's share of a dump that was handed to the writer (``flush`` waits until it is committed).

    Attributes:
        step: the training step.
        generation: the run generation.
        upserts: rows upserted.
        deletes: rows deleted.
        vector_bytes: bytes of the vectors, uncompressed.
        stall_seconds: how long the training thread stood still.
    """

    step: int
    generation: int
    upserts: int
    deletes: int
    vector_bytes: int
    stall_seconds: float

    @property
    def rows(self) -> int:
        """Rows upserted and deleted."""
        return self.upserts + self.deletes


class DeltaSource(ABC):
    """Deltas that another thread or rank has a part in: they must be taken, or discarded."""

    @abstractmethod
    def __iter__(self) -> Iterator[TableDelta]:
        """The deltas; valid until the next one is asked for."""

    @abstractmethod
    def discard(self) -> None:
        """Does what is left to do so that nobody waits, if they will not be written."""


class PieceStream(DeltaSource):
    """Pieces of a delta too large to be held at once, written while they are being read.

    The producer (training thread) waits until the consumer (writer) took the piece before. A piece's
    memory is given back when the consumer asks for the next one.
    """

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[tuple[TableDelta, Arena] | BaseException | None]
        self._pieces = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        self._ended = False

    def put(self, delta: TableDelta, arena: Arena) -> None:
        """Hands a piece over."""
        acquire(self._room)
        self._pieces.put((delta, arena))

    def finish(self, error: BaseException | None = None) -> None:
        """Ends the stream, without waiting; an error makes the consumer fail. A second call does nothing."""
        self._pieces.put(error)

    def __iter__(self) -> Iterator[TableDelta]:
        while (piece := self._take()) is not None:
            delta, arena = piece
            try:
                yield delta
            finally:
                arena.release()

    def discard(self) -> None:
        """Takes what is left, so that the producer is not left waiting."""
        while not self._ended:
            with contextlib.suppress(BaseException):
                for _ in self:
                    pass

    def _take(self) -> tuple[TableDelta, Arena] | None:
        piece = self._pieces.get()
        self._room.release()
        self._ended = not isinstance(piece, tuple)
        if isinstance(piece, BaseException):
            raise piece
        return piece


@dataclass(eq=False)
class Cut:
    """One rank's changes at one step.

    Attributes:
        step: the training step.
        created_unix: when it was cut, seconds since 1970.
        metadata: the user's.
        answers: of this rank's shards.
        deltas: changed rows: held in ``arena``, or from ``stream``.
        stream: brings rows that are too many to be held at once; None if they are held.
        arena: the memory of ``deltas``; None if they are streamed.
        began: when the training thread began with it, by ``time.perf_counter``.
        resumed: when training went on, by the same clock; None while it stands still.
        error: why the cut failed; such a cut tells the other ranks not to commit theirs.
        committed: whether the dump was committed; None until the writer is done with it.
    """

    step: int
    created_unix: float
    metadata: dict[str, Any]
    answers: list[ShardAnswers] = field(default_factory=list)
    deltas: Iterable[TableDelta] = ()
    stream: PieceStream | None = None
    arena: Arena | None = None
    began: float = field(default_factory=time.perf_counter)
    resumed: float | None = None
    error: BaseException | None = None
    committed: bool | None = None

    @property
    def streamed(self) -> bool:
        """Whether its rows can be read only once, so that a failed dump must cut them anew."""
        return self.stream is not None

    @property
    def stall_seconds(self) -> float:
        """How long the training thread stood still for it, so far if it still does."""
        return (self.resumed or time.perf_counter()) - self.began

    def discard(self) -> None:
        """Takes what is left of a stream that will not be written, so that nobody waits for it."""
        if isinstance(self.deltas, DeltaSource):
            self.deltas.discard()

    def release(self) -> None:
        """Gives its memory back."""
        if self.arena is not None:
            self.arena.release()
            self.deltas = ()
