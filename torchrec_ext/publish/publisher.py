"""``publish``: brings a sink up to the last committed dump, and keeps it there."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import get_args

import pyarrow.fs as pafs

from torchrec_ext.delta.chain import branch_of, without_superseded
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.delta.places import Place
from torchrec_ext.errors import DeltaLogError, PublishError, SinkUnavailableError
from torchrec_ext.publish.changes import Change, OnDelete, position_of
from torchrec_ext.publish.served import Position
from torchrec_ext.publish.sink import Sink, open_sink

logger = logging.getLogger(__name__)

_ROWS_AT_ONCE = 50_000_000  # of a backlog; their keys are compared in memory, at about 26 bytes each
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0  # seconds between tries


@dataclass(frozen=True)
class Published:
    """One change that a sink has made.

    Attributes:
        position: the dump it holds now.
        dumps: how many dumps this brought.
        rows: rows of those dumps, upserts and deletes.
        seconds: how long it took.
        lag_seconds: from the training step of the last of them until now.
    """

    position: Position
    dumps: int
    rows: int
    seconds: float
    lag_seconds: float


def publish(
    log: DeltaLog | str | os.PathLike[str] | pafs.FileSystem | Place,
    sink: Sink | str,
    *,
    follow: bool = False,
    on_delete: OnDelete = "delete",
    restart: bool = False,
    stop: threading.Event | None = None,
    poll_seconds: float = 1.0,
    retry_seconds: float = 60.0,
    on_published: Callable[[Published], None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Position | None:
    """Brings a sink up to the last committed dump of a log.

    It goes on where the sink stands, whoever published there before. Dumps that a trainer's restart made
    void are left out; a sink that holds one goes on with the dump that made it void, which says anew what
    it said of any key. One that holds a dump which a fenced run committed too late, on an object store, is
    told what the log says of the keys in it. A process that is killed on the way leaves a sink that the next
    one completes.

    Args:
        log: a dump directory: a path, a URI, or a log of one.
        sink: a sink or its URL.
        follow: go on with new dumps as they are committed, until ``stop`` is set.
        on_delete: ``delete``: a deleted key's row goes. ``tombstone``: a mark takes its place.
            ``fallback_vector``: so does the fallback row of that moment, for consumers of the sink that
            know no fallback rows. ``EmbeddingClient`` answers alike in all cases.
        restart: write everything anew and take away what the log does not hold, wherever the sink stands.
        stop: ends it between two dumps; following, also while it waits.
        poll_seconds: how often to look for new dumps.
        retry_seconds: how long to try again when the sink does not answer or, following, when the log
            cannot be read as it is (a copy of it that is under way may have gaps).
        on_published: is called after each change.
        on_progress: is told, while a change is made, how many of how many rows have been read for it; a
            sink may read them more than once.

    Returns:
        The last dump that the sink holds; None if there was nothing to publish.

    Raises:
        PublishError: the sink holds what this log does not know, or refuses; the message says what to do.
        SinkUnavailableError: it did not answer for ``retry_seconds``. Publish again later: nothing is lost.
        DeltaLogError: the log is damaged or has a gap.
    """
    if on_delete not in get_args(OnDelete):
        raise ValueError(f"on_delete is {on_delete!r}; it takes one of {', '.join(get_args(OnDelete))}")
    log = DeltaLog.of(log)
    with open_sink(sink) if isinstance(sink, str) else contextlib.nullcontext(sink) as opened:
        return _Publisher(log, opened, on_delete, on_published, on_progress).run(
            follow, restart, stop or threading.Event(), poll_seconds, retry_seconds
        )


class _Publisher:
    def __init__(
        self,
        log: DeltaLog,
        sink: Sink,
        on_delete: OnDelete,
        on_published: Callable[[Published], None] | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        self._log = log
        self._sink = sink
        self._on_delete = on_delete
        self._on_published = on_published
        self._on_progress = on_progress
        self._committed: frozenset[str] | None = None
        self._position: Position | None = None

    def run(
        self, follow: bool, restart: bool, stop: threading.Event, poll_seconds: float, retry_seconds: float
    ) -> Position | None:
        position = None
        waits = _waits()
        failing_since: float | None = None
        self._restart = restart
        while True:
            try:
                position, progress = self._log.undisturbed(self._publish_next)
            except (SinkUnavailableError, DeltaLogError) as error:
                now = time.monotonic()
                failing_since = failing_since if failing_since is not None else now
                may_pass = follow or isinstance(error, SinkUnavailableError)
                if not may_pass or now - failing_since >= retry_seconds:
                    raise
                wait = next(waits)
                logger.warning("%s; trying again in %.1f s", error, wait)
                self._committed = None
            else:
                if failing_since is not None:
                    failing_since, waits = None, _waits()
                if progress and not stop.is_set():
                    continue
                if not follow:
                    return position
                wait = poll_seconds
            if stop.wait(wait):
                return position

    def _publish_next(self) -> tuple[Position | None, bool]:
        """Makes the next change; returns where the sink stands now, and whether there may be more to do."""
        committed = self._log.committed(self._committed or ())
        # Asked each time: another publisher may have been here, or the sink may have lost its memory.
        base = self._sink.position()
        if committed == self._committed and base == self._position:
            return base, False
        dumps, _, beside = self._log.listing()
        start, strays = (0, []) if self._restart else _standing(dumps, beside, base, self._sink)
        pending = without_superseded(dumps[start:])  # a dump is made void by later ones only
        if not pending:
            self._committed, self._position = committed, base
            return base, False
        replaces = self._restart
        if self._sink.takes == "everything":
            replaces, strays, pending = True, [], without_superseded(dumps)
        elif replaces:
            pending = _of_the_same_tables(pending)
        elif self._sink.takes == "each":
            pending = pending[:1]
        else:
            pending = _of_the_same_tables(_not_too_many(pending))
        began = time.monotonic()
        counts = without_superseded(dumps)
        before = [dump for dump in counts if dump.dump < pending[0].dump] if strays else []
        change = Change(
            self._log,
            pending,
            base,
            self._on_delete,
            replaces=replaces,
            strays=strays,
            before=before,
            on_progress=self._on_progress,
        )
        self._sink.apply(change)
        self._restart = False
        self._told(change, pending, time.monotonic() - began)
        return change.position, True

    def _told(self, change: Change, dumps: list[Manifest], seconds: float) -> None:
        rows = sum(dump.rows for dump in dumps)
        done = Published(
            change.position, len(dumps), rows, seconds, time.time() - change.position.created_unix
        )
        logger.info(
            "published step=%d generation=%d to %s: dumps=%d rows=%d in %.2f s, %.1f s after the step",
            done.position.step,
            done.position.generation,
            self._sink,
            done.dumps,
            done.rows,
            done.seconds,
            done.lag_seconds,
        )
        if self._on_published is not None:
            self._on_published(done)


def _standing(
    dumps: list[Manifest], beside: list[Manifest], position: Position | None, sink: Sink
) -> tuple[int, list[Manifest]]:
    """How many of a log's dumps a sink has taken in, and which of those beside them.

    If its own last dump is void, the first one after it that is not made it so, or made void what did: it
    speaks of every key of those it replaced. Of the keys of dumps beside the log no dump need speak.
    """
    if position is None:
        return 0, []
    for number, dump in enumerate(dumps, 1):
        if position_of(dump) == position:
            return number, []
    for dump in beside:
        if position_of(dump) == position:
            strays, start = branch_of(dump, dumps, beside)
            if start is not None:
                return start, strays
    base = dumps[0].directory if dumps and dumps[0].is_base else ""
    gone = f"compacted into {base} and vacuumed" if base else "removed"
    raise PublishError(
        f"{sink} holds {position}, which is not in this log: it was published from another log, or "
        f"its dump was {gone}. Publish this log to another place, or publish it with restart=True "
        "(torchrec-ext publish --restart): that writes everything anew and takes away the rest"
    )


def _not_too_many(pending: list[Manifest]) -> list[Manifest]:
    rows = itertools.accumulate(dump.rows for dump in pending)
    return pending[: max(1, sum(total <= _ROWS_AT_ONCE for total in rows))]


def _of_the_same_tables(pending: list[Manifest]) -> list[Manifest]:
    """The first dumps, as far as they cover the same tables.

    A change says nothing of a table that its last dump does not cover, and that a later one may cover again.
    """
    return list(itertools.takewhile(lambda dump: dump.tables.keys() == pending[0].tables.keys(), pending))


def _waits() -> Iterator[float]:
    """Seconds, growing; drawn anew for each publisher, so that many do not come back at once."""
    longest = _FIRST_WAIT
    while True:
        yield longest * random.uniform(0.5, 1.0)
        longest = min(_LONGEST_WAIT, 2 * longest)
