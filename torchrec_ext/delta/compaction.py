"""``compact``: many dumps into one base, which takes their place."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import void_dumps
from torchrec_ext.delta.dump_file import check_listed
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, FileEntry, Manifest, RankStats, TableInfo
from torchrec_ext.delta.own_files import own_files, remove_own_files
from torchrec_ext.delta.places import Place, PlacedFile
from torchrec_ext.delta.row_groups import (
    DEFAULT_MEMORY_BYTES,
    RowGroup,
    mark_latest,
    num_passes,
    row_groups_of,
)
from torchrec_ext.errors import DeltaLogError

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

PLAN_NAME, LOCK_NAME = "plan.json", ".lock"
"""In the directory of a base that is being written: what it is made from, and what keeps others from it."""

_PART_BYTES = 256 << 20  # of vectors, in memory; a file of a base is about as large
_ROW_GROUP_ROWS, _ROW_GROUP_BYTES = 131_072, 64 << 20
_THREADS = 4


@dataclass(frozen=True)
class Compacted:
    """What ``compact`` did.

    Attributes:
        base: the newest base at or before the step asked for.
        written: whether it was written now; else it was there already.
        dumps: how many dumps were taken together, the base before them counted as one.
        rows_read: their rows.
        rows: the rows of the base.
        nbytes: the bytes of its files.
        nbytes_read: the bytes of the files it takes the place of.
        resumed_parts: files that a run which was interrupted had finished, and that were kept.
    """

    base: Manifest
    written: bool
    dumps: int = 0
    rows_read: int = 0
    rows: int = 0
    nbytes: int = 0
    nbytes_read: int = 0
    resumed_parts: int = 0


def compact(
    log: DeltaLog | str | os.PathLike[str],
    upto: int | None = None,
    *,
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Progress | None = None,
) -> Compacted:
    """Writes a base: the rows that keys own after a dump, in a few files instead of many.

    Readers start from the newest base, so that replaying takes as long as the table is large, not as long as
    the log is. The dumps stay until ``vacuum`` removes them. It reads and writes while trainers dump and
    readers read, and disturbs none of them.

    A run that is interrupted is gone on with by the next, at the dump that it was for if ``upto`` is left
    out: files that are whole are kept. Beside ``max_memory_bytes`` it needs a bit per row of the dumps, and
    for each of up to four threads a few row groups.

    Args:
        log: a dump directory.
        upto: the last step to take in, as in ``DeltaLog.replay``; by default all dumps.
        max_memory_bytes: for keys that are compared, 42 bytes each; they are read in several passes if
            they need more.
        progress: is called with how many rows were looked at, and how many will be.

    Raises:
        ValueError: ``max_memory_bytes`` is not positive.
        DeltaLogError: nothing is committed up to there, a file is missing or damaged, or another process
            is writing this base.
        OSError: the base cannot be written.
    """
    if max_memory_bytes < 1:
        raise ValueError(f"max_memory_bytes must be at least 1, not {max_memory_bytes}")
    log = DeltaLog.of(log)
    return log.undisturbed(lambda: _compact(log, upto, max_memory_bytes, progress))


def _compact(log: DeltaLog, upto: int | None, max_memory_bytes: int, progress: Progress | None) -> Compacted:
    dumps = (_interrupted(log) if upto is None else None) or log.history_upto(upto)
    if len(dumps) == 1 and dumps[0].is_base:
        return Compacted(dumps[0], written=False)
    folder = dumps[-1].dump.base_directory
    log.place.make_folder(folder)
    with _locked(log.place, folder):
        try:
            if not log.place.has(folder, MANIFEST_NAME):
                return _Compaction(log, dumps, folder, max_memory_bytes, progress).run()
        except (DeltaLogError, OSError):
            if not log.place.has(folder, MANIFEST_NAME):
                check_listed(log.place, dumps[-1], log.listing())
                raise
        # Another process was faster, and may have removed the dumps as well by now.
        return Compacted(log.history_upto(dumps[-1].step)[0], written=False)


def remove_unfinished(place: Place, folder: str) -> None:
    """Removes a base that was not committed, unless it is being written."""
    with contextlib.suppress(DeltaLogError, FileNotFoundError), _locked(place, folder):
        if not place.has(folder, MANIFEST_NAME):
            remove_own_files(place, folder)


@dataclass(frozen=True)
class _Part:
    """Row groups whose latest rows go into one file of a base."""

    groups: tuple[tuple[str, RowGroup], ...]
    rows: int


class _Compaction:
    def __init__(
        self,
        log: DeltaLog,
        dumps: Sequence[Manifest],
        folder: str,
        max_memory_bytes: int,
        progress: Progress | None,
    ) -> None:
        self._log = log
        self._dumps = dumps
        self._place = log.place
        self._folder = folder
        self._max_memory_bytes = max_memory_bytes
        self._progress = progress
        self._seen = 0
        self._total = 0
        self._lock = threading.Lock()

    def run(self) -> Compacted:
        tables = {fqn: info for dump in self._dumps for fqn, info in dump.tables.items()}
        parts = self._plan(tables)
        resumed = self._keep_finished(parts)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "torchrec-ext-compact") as threads:
            entries = list(threads.map(lambda number: self._part(number, parts), range(len(parts))))
        fallback = self._fallbacks(tables)
        base = self._commit(tables, entries, fallback)
        logger.info(
            "%s: dumps=%d, %d rows of %d, %d bytes of %d",
            base.directory,
            base.compacted,
            base.rows,
            sum(dump.rows for dump in self._dumps),
            base.nbytes,
            sum(dump.nbytes for dump in self._dumps),
        )
        return Compacted(
            base,
            written=True,
            dumps=len(self._dumps),
            rows_read=sum(dump.rows for dump in self._dumps),
            rows=base.rows,
            nbytes=base.nbytes,
            nbytes_read=sum(dump.nbytes for dump in self._dumps),
            resumed_parts=resumed,
        )

    def _plan(self, tables: dict[str, TableInfo]) -> list[_Part]:
        """Which rows go where; the same for the same dumps, so that another run can go on."""
        found = row_groups_of(self._log, self._dumps)
        limit = self._max_memory_bytes
        rows = {fqn: sum(group.rows for group in groups) for fqn, groups in found.items()}
        self._total = sum(count * (1 + num_passes(count, limit)) for count in rows.values())
        parts: list[_Part] = []
        groups: list[tuple[str, RowGroup]] = []
        schema, count, nbytes = None, 0, 0
        for fqn in sorted(found):
            for group in mark_latest(found[fqn], limit, self._advance):
                _, upsert = group.read_keys()
                kept = int((upsert & group.latest).sum())
                if not kept:
                    self._advance(group.rows)
                    continue
                own = _schema_of(group)
                if groups and (nbytes >= _PART_BYTES or own != schema):
                    parts.append(_Part(tuple(groups), count))
                    groups, count, nbytes = [], 0, 0
                groups.append((fqn, group))
                schema, count = own, count + kept
                nbytes += kept * tables[fqn].dim * 4
        parts.append(_Part(tuple(groups), count))
        return parts

    def _keep_finished(self, parts: Sequence[_Part]) -> int:
        """Removes what an earlier run left, but for the files that this one would write again.

        Returns:
            How many are kept.
        """
        plan = {
            "parts": [part.rows for part in parts],
            "dumps": [[dump.directory, dump.run_id, dump.committed_unix] for dump in self._dumps],
        }
        whole = {fmt.part_name(number, len(parts)) for number in range(len(parts))}
        try:
            kept = whole if json.loads(self._place.read(self._folder, PLAN_NAME)) == plan else set()
        except (FileNotFoundError, ValueError):
            kept = set()
        present = own_files(self._place, self._folder)
        if MANIFEST_NAME in present:  # where nothing can be locked another process may have been faster
            raise DeltaLogError(f"{self._folder} was committed by another process meanwhile")
        # With the same plan another process that is at it writes the same: nothing is taken from it.
        spared = {LOCK_NAME, *kept, *([fmt.fallback_name(0, 1)] if kept else [])}
        for name in present:
            if name not in spared:
                self._place.remove(self._folder, name)
        self._place.put(self._folder, PLAN_NAME, json.dumps(plan).encode())
        self._place.sync(self._folder)
        return len(kept.intersection(present))

    def _part(self, number: int, parts: Sequence[_Part]) -> FileEntry:
        """Writes a file of the base, unless it is there already."""
        part, name = parts[number], fmt.part_name(number, len(parts))
        if (there := self._finished(name, number, part.rows)) is not None:
            self._advance(sum(group.rows for _, group in part.groups))
            return there
        schema = _schema_of(part.groups[0][1]) if part.groups else fmt.PART_SCHEMA
        return self._write(name, number, schema, self._rows(part))

    def _finished(self, name: str, number: int, rows: int) -> FileEntry | None:
        """A file of so many rows that an earlier run has written; one that is something else goes."""
        place, folder = self._place, self._folder
        if not place.has(folder, name):
            return None
        with contextlib.suppress(DeltaLogError), PlacedFile(place, folder, name).open() as file:
            if file.metadata.num_rows == rows:
                return FileEntry(name, number, rows, place.size(folder, name), place.crc32(folder, name))
        place.remove(folder, name)
        return None

    def _write(self, name: str, number: int, schema: pa.Schema, tables: Iterable[pa.Table]) -> FileEntry:
        with fmt.ParquetFileWriter(self._place.create(self._folder, name), schema) as writer:
            for rows in tables:
                writer.write(rows)
        return FileEntry(name, number, writer.rows, writer.nbytes, writer.crc32)

    def _rows(self, part: _Part) -> Iterator[pa.Table]:
        """The rows of a part, in row groups of one table each."""
        waiting: list[pa.Table] = []
        table, count, nbytes = None, 0, 0
        for fqn, group in part.groups:
            rows = group.read()
            rows = rows.filter(pc.and_(pa.array(group.latest), pc.equal(rows["op"], fmt.UPSERT)))
            if waiting and (fqn != table or count >= _ROW_GROUP_ROWS or nbytes >= _ROW_GROUP_BYTES):
                yield pa.concat_tables(waiting)
                waiting, count, nbytes = [], 0, 0
            waiting.append(rows)
            table, count, nbytes = fqn, count + rows.num_rows, nbytes + rows.nbytes
            self._advance(group.rows)
        if waiting:
            yield pa.concat_tables(waiting)

    def _fallbacks(self, tables: dict[str, TableInfo]) -> FileEntry:
        """Writes the fallback rows of each table, as the last dump that covers it has them."""
        found = [*self._fallback_rows(tables)]
        name, schema = fmt.fallback_name(0, 1), fmt.FALLBACK_SCHEMA
        there = self._finished(name, 0, sum(rows.num_rows for rows in found))
        return there or self._write(name, 0, schema, found)

    def _fallback_rows(self, tables: dict[str, TableInfo]) -> Iterator[pa.Table]:
        for dump in self._dumps:
            covered = [fqn for fqn in dump.tables if self._last_to_cover(fqn) is dump]
            if not covered:
                continue
            rows = self._log.rows_of(dump, dump.fallbacks, fmt.FALLBACK_SCHEMA)
            for fqn in covered:
                own = rows.filter(pc.equal(rows["table_fqn"], fqn))
                # Dumps may store vectors in several ways, and this is one file.
                vectors = fmt.vectors_of(own["embedding"].chunks, tables[fqn].dim)
                columns = [own[column] for column in fmt.FALLBACK_SCHEMA.names[:-1]]
                yield pa.Table.from_arrays(
                    [*columns, fmt.embedding_array(vectors)], schema=fmt.FALLBACK_SCHEMA
                )

    def _last_to_cover(self, fqn: str) -> Manifest:
        return next(dump for dump in reversed(self._dumps) if fqn in dump.tables)

    def _commit(
        self, tables: dict[str, TableInfo], parts: Sequence[FileEntry], fallback: FileEntry
    ) -> Manifest:
        last = self._dumps[-1]
        self._check_still_counts(last)
        base = dataclasses.replace(
            last,
            previous=None,
            committed_unix=time.time(),
            tables=tables,
            parts=tuple(parts),
            fallbacks=(fallback,),
            stats=(RankStats(sum(part.rows for part in parts), 0, 0.0),),
            supersedes=(),
            compacted=sum(max(1, dump.compacted) for dump in self._dumps),
            retired=tuple(sorted(set(tables) - set(last.tables))),
        )
        self._place.sync(self._folder)
        self._place.put(self._folder, MANIFEST_NAME, base.to_json())
        for folder in (self._folder, ""):
            self._place.sync(folder)
        return base

    def _check_still_counts(self, last: Manifest) -> None:
        """Checks that the dump which the base would stand for counts.

        If not, what was written is left to ``vacuum``: where nothing can be locked another process may be
        about to commit the same files.
        """
        listing = self._log.listing()
        check_listed(self._place, last, listing)
        if last.dump in void_dumps(listing.chain) or last not in listing.chain:
            raise DeltaLogError(
                f"{self._folder} was given up: a run went back to a step before {last.step} meanwhile. "
                "Compact again"
            )

    def _advance(self, rows: int) -> None:
        if self._progress is not None:
            with self._lock:
                self._seen += rows
                self._progress(self._seen, self._total)


def _interrupted(log: DeltaLog) -> list[Manifest] | None:
    """What the newest base that was begun and not finished is made from, if it is still of use."""
    begun = [
        dump
        for name in log.place.entries()
        if (dump := DumpId.from_base_directory(name)) and not log.place.has(name, MANIFEST_NAME)
    ]
    for dump in sorted(begun, reverse=True):
        with contextlib.suppress(DeltaLogError):
            dumps = log.history_upto(dump.step)
            if dumps[-1].dump == dump and not dumps[-1].is_base:
                return dumps
    return None


def _schema_of(group: RowGroup) -> pa.Schema:
    """The columns of a part file: vectors may be stored in several ways."""
    with group.file.open() as file:
        return file.schema_arrow


@contextlib.contextmanager
def _locked(place: Place, folder: str) -> Iterator[None]:
    """Keeps other processes from writing the same base; ends with the process, however it ends."""
    with contextlib.ExitStack() as lock:
        try:
            lock.enter_context(place.locked(folder, LOCK_NAME))
        except BlockingIOError as error:
            raise DeltaLogError(
                f"{place.locate(folder, '')} is being written by another process; let it finish"
            ) from error
        try:
            yield
        finally:
            if place.has(folder, MANIFEST_NAME):
                for name in (PLAN_NAME, LOCK_NAME):
                    place.remove(folder, name)
