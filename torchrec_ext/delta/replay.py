"""Rebuilds a model's tables from its dumps."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from torchrec_ext.answers import HashFunction, answers, as_keys, check_rows, find, hashed
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.dump_file import DumpFile
from torchrec_ext.delta.keys import last_places, union
from torchrec_ext.delta.manifest import Manifest, TableInfo
from torchrec_ext.delta.places import Place
from torchrec_ext.delta.storage import StorageDtype
from torchrec_ext.errors import DeltaLogError

_THREADS = 8
_READ_BYTES = 1 << 19

KeyFilter = Callable[[str, NDArray[np.int64]], NDArray[np.bool_]]
"""Which keys of a table (its FQN, int64 ``[n]``) to take in, bool ``[n]``; called on several threads."""


class EmbeddingState:
    """One table as the model held it at a dump's step.

    Attributes:
        fqn: the table.
        info: the table's dimension, key space and routing.
        keys: the ids that own a row, int64 ``[n]``, sorted.
        vectors: their vectors, float32 ``[n, dim]``.
        fallback: what each shard answers for ids without a row, float32 ``[num_shards, dim]``; empty if
            the keys are ``row`` ids, which all have one.
        exceptions: the vectors of ids that get another one than their shard's.
    """

    def __init__(
        self,
        fqn: str,
        info: TableInfo,
        keys: NDArray[np.int64],
        vectors: NDArray[np.float32],
        fallback: NDArray[np.float32],
        exceptions: Mapping[int, NDArray[np.float32]],
        hash_function: HashFunction | None = None,
    ) -> None:
        self.fqn = fqn
        self.info = info
        self.keys = keys
        self.vectors = vectors
        self.fallback = fallback
        self.exceptions = dict(exceptions)
        self._hash_function = hash_function

    def __len__(self) -> int:
        """How many ids own a row."""
        return len(self.keys)

    def lookup(self, ids: ArrayLike) -> NDArray[np.float32]:
        """What the model answers for each id, as one bag with weight 1.

        Args:
            ids: integers ``[n]``, in any order, repeats allowed; raw ids, or what the table's key space
                says.

        Returns:
            float32 ``[n, dim]``; an id without a row gets its shard's fallback row.

        Raises:
            TypeError: ``ids`` are not integers.
            ValueError: the keys are ``row`` ids, and one is outside of the table, as it would be for the
                model, or not in the log, which then began with ``first_dump="delta"``.
        """
        keys = as_keys(ids)
        if self._hash_function is not None and len(keys):
            keys = hashed(self._hash_function, keys, self.info.hash_size)
        owned, at = find(self.keys, keys)
        if self.info.key_space == "row":
            missing = "is not in the log, which holds rows that changed since it began"
            check_rows(self.fqn, keys, owned, self.info.num_embeddings, missing)
        return answers(keys, owned, self.vectors[at], self.fallback, self.info.routing, self.exceptions)


@dataclass
class _Group:
    """One row group: rows of one table in the order in which they were written.

    Attributes:
        keys: of the rows that were taken in.
        upsert: whether they are upserts.
        num_vectors: of all its rows.
        storage_dtype: how its vectors are stored.
        vectors: which of the group's vectors is theirs, as far as they have one; None: to be counted.
    """

    file: DumpFile
    index: int
    keys: NDArray[np.int64]
    upsert: NDArray[np.bool_]
    num_vectors: int
    storage_dtype: StorageDtype
    vectors: NDArray[np.int32] | None = None

    def vectors_of(self, rows: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Which of the group's vectors are those of rows, by their numbers among those taken in."""
        return (_nth_vector(self.upsert) if self.vectors is None else self.vectors)[rows]


Part = Iterable[tuple[str, _Group]]
"""One rank's part of a dump: the tables and their row groups."""


@dataclass
class _TableHistory:
    info: TableInfo
    groups: list[_Group] = field(default_factory=list)


_NOTHING = _TableHistory(TableInfo(0, "", "", 0, 0, 0, 0, ()))


class Replay:
    """Collects the keys of dumps, oldest first, then reads only the vectors that were not replaced.

    Args:
        place: of the log.
        keep: the keys to take in; by default all.
    """

    def __init__(self, place: Place, keep: KeyFilter | None = None) -> None:
        self._place = place
        self._keep = keep
        self._tables: dict[str, _TableHistory] = {}

    def read_part(self, part: DumpFile) -> Part:
        """Reads the keys of one rank's part, on any thread. Leaves no file open: a log may have thousands.

        Raises:
            VacuumedError: it was removed, and something else holds its rows.
            DeltaLogError: it is missing, or is not as the format says.
        """
        with part.open() as file:
            return [*self._groups(part, file)]

    def add(self, dump: Manifest, parts: Iterable[Part]) -> None:
        """Takes in the parts of the next dump."""
        for fqn, info in dump.tables.items():
            history = self._tables.setdefault(fqn, _TableHistory(info))
            before = history.info
            if before.dim != info.dim or before.key_space != info.key_space:
                where = f"{self._place}: {dump.directory}"
                raise DeltaLogError(
                    f"{where}: {fqn} has {info.key_space} keys and dimension {info.dim}, "
                    f"before it had {before.key_space} keys and dimension {before.dim}"
                )
            history.info = info
        for fqn, group in itertools.chain.from_iterable(parts):
            self._tables[fqn].groups.append(group)

    def _groups(self, part: DumpFile, file: pq.ParquetFile) -> Part:
        stored = fmt.storage_of(file)
        for index, fqn in part.row_groups(file):
            keys, upsert = fmt.read_keys(file, index)
            num_vectors, vectors = int(np.count_nonzero(upsert)), None
            if self._keep is not None:
                kept = np.flatnonzero(self._keep(fqn, keys))
                keys, vectors, upsert = keys[kept], _nth_vector(upsert)[kept], upsert[kept]
            yield fqn, _Group(part, index, keys, upsert, num_vectors, stored, vectors)

    def states(
        self, dump: Manifest, fallbacks: pa.Table, hash_fns: Mapping[str, HashFunction]
    ) -> dict[str, EmbeddingState]:
        """The tables that the last dump taken in covers, as they stand after it.

        Args:
            dump: the last dump.
            fallbacks: its fallback rows, of all ranks.
            hash_fns: see ``DeltaLog.replay``.

        Raises:
            VacuumedError: a file was removed, and something else holds its rows.
            DeltaLogError: a file is damaged, fallback rows are not as the manifest says, or a table named in
                ``hash_fns`` is not covered.
        """
        covered = {fqn: info for fqn, info in dump.tables.items() if fqn not in dump.retired}
        if unknown := set(hash_fns) - set(covered):
            raise DeltaLogError(f"hash_fns names {sorted(unknown)}; the dump covers {sorted(covered)}")
        states = {}
        for fqn, info in covered.items():
            keys, winners = _latest_upserts(self._tables[fqn])
            vectors = _gather(self._tables[fqn], winners)
            fallback, exceptions = fallback_of(self._place, dump, fqn, fallbacks)
            states[fqn] = EmbeddingState(fqn, info, keys, vectors, fallback, exceptions, hash_fns.get(fqn))
        return states

    def keys(self) -> dict[str, NDArray[np.int64]]:
        """The ids that own a row after the last dump taken in, sorted, by table."""
        return {fqn: _latest_upserts(history)[0] for fqn, history in self._tables.items()}

    def keys_of(self, fqn: str) -> NDArray[np.int64]:
        """The ids of a table that own a row after the last dump taken in, sorted."""
        return _latest_upserts(self._history(fqn))[0]

    def by_age(self, fqn: str) -> NDArray[np.int64]:
        """The same, those first whose vectors were dumped first."""
        keys, winners = _latest_upserts(self._history(fqn))
        return keys[np.argsort(winners)]

    def said_of(self, fqn: str) -> NDArray[np.int64]:
        """The ids of a table that the dumps say anything of, sorted."""
        return union(*(group.keys for group in self._history(fqn).groups))

    def latest(
        self, fqn: str, among: NDArray[np.int64] | None = None
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32], StorageDtype]]:
        """The vectors of a table after the last dump taken in, some of a row group at a time.

        Args:
            fqn: the table.
            among: the ids that are asked for; by default all.

        Yields:
            Ids, their vectors, and how these are stored, in any order; each id once.
        """
        history = self._history(fqn)
        keys, winners = _latest_upserts(history)
        if among is not None:
            asked = np.isin(keys, among)
            keys, winners = keys[asked], winners[asked]
        for which, vectors, stored in _vectors_at(history, winners):
            yield keys[which], vectors, stored

    def _history(self, fqn: str) -> _TableHistory:
        return self._tables.get(fqn, _NOTHING)


def _latest_upserts(history: _TableHistory) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys that own a row, sorted, and where in the history each one's vector stands."""
    keys = _concatenate([group.keys for group in history.groups], np.int64)
    upsert = _concatenate([group.upsert for group in history.groups], np.bool_)
    winners = last_places(keys)
    winners = winners[upsert[winners]]
    return keys[winners], winners


def _gather(history: _TableHistory, winners: NDArray[np.int64]) -> NDArray[np.float32]:
    """The vectors at these positions of the table's history, in their order."""
    vectors = np.empty((len(winners), history.info.dim), np.float32)

    def read(wanted: _Wanted) -> None:
        for _, which, found in _read(wanted, history.info.dim):
            vectors[which] = found

    with reading_threads() as threads:  # Arrow decodes, and NumPy copies, without the GIL
        for _ in threads.map(read, _wanted(history, winners)):
            pass
    return vectors


def _vectors_at(
    history: _TableHistory, winners: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.integer[Any]], NDArray[np.float32], StorageDtype]]:
    """Reads the vectors at positions of the table's history: which of the positions, theirs, how stored."""
    for wanted in _wanted(history, winners):
        for group, which, found in _read(wanted, history.info.dim):
            yield which, found, group.storage_dtype


_Wanted = list[tuple[_Group, NDArray[np.integer[Any]], NDArray[np.int64]]]
"""Of one file: row groups, which of the positions asked for are theirs, and the rows at these."""


def _wanted(history: _TableHistory, winners: NDArray[np.int64]) -> Iterator[_Wanted]:
    starts = np.cumsum([0, *(len(group.keys) for group in history.groups)])
    # By position, without a sort: which of the winners stands there, counted from 1.
    standing = np.zeros(starts[-1], np.min_scalar_type(len(winners)))
    standing[winners] = np.arange(1, len(winners) + 1)
    positions = np.flatnonzero(standing)
    by_position = standing[positions] - 1
    bounds = np.searchsorted(positions, starts)
    needed = [n for n in range(len(history.groups)) if bounds[n + 1] > bounds[n]]
    for _, of_file in itertools.groupby(needed, key=lambda n: history.groups[n].file):
        yield [
            (
                history.groups[n],
                by_position[bounds[n] : bounds[n + 1]],
                positions[bounds[n] : bounds[n + 1]] - starts[n],
            )
            for n in of_file
        ]


def _read(
    wanted: _Wanted, dim: int
) -> Iterator[tuple[_Group, NDArray[np.integer[Any]], NDArray[np.float32]]]:
    """Some rows of a row group at a time: which of the positions asked for are among them, their vectors."""
    part = wanted[0][0].file
    # What is decoded, and copied from, stays in the cache, and in memory that was used before.
    at_once = max(1, _READ_BYTES // (4 * dim))
    with part.open() as file:
        for group, which, rows in wanted:
            asked, begin, taken = group.vectors_of(rows), 0, 0
            for batch in file.iter_batches(
                at_once, row_groups=[group.index], columns=["embedding"], use_threads=False
            ):
                found = fmt.vectors_of([batch["embedding"]], dim)
                last = int(np.searchsorted(asked, begin + len(found)))
                if last > taken:
                    yield group, which[taken:last], found[asked[taken:last] - begin]
                begin, taken = begin + len(found), last
            if begin != group.num_vectors:
                raise ValueError(
                    f"row group {group.index} has {group.num_vectors} upserts and {begin} vectors"
                )


def reading_threads() -> ThreadPoolExecutor:
    """Threads to read files with: for each, a row group is in memory."""
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "torchrec-ext-read")


def _nth_vector(upsert: NDArray[np.bool_]) -> NDArray[np.int32]:
    # Vectors stand for upserts only: a row's is found by counting those before it.
    return np.cumsum(upsert, dtype=np.int32) - np.int32(1)


def fallback_of(
    place: Place, dump: Manifest, fqn: str, rows: pa.Table
) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]]]:
    """The fallback row of each shard of a table, and the vectors of ids that get another one.

    Args:
        place: of the log.
        dump: one that covers the table.
        fqn: the table.
        rows: the dump's fallback rows, of all tables and ranks.

    Raises:
        DeltaLogError: a shard has none, or more than one; or there is one where every key has its own row.
    """
    info, rows = dump.tables[fqn], rows.filter(pc.equal(rows["table_fqn"], fqn))
    where = f"{place}: {dump.directory}: fallback rows of {fqn}"
    try:
        vectors = fmt.vectors_of(rows["embedding"].chunks, info.dim)
    except ValueError as error:
        raise DeltaLogError(f"{where}: {error}") from error
    special = rows["key_id"].is_valid().to_numpy()
    shards = rows["shard"].to_numpy()[~special]
    wanted = 0 if info.key_space == "row" else info.num_shards
    if sorted(shards.tolist()) != list(range(wanted)):
        raise DeltaLogError(f"{where}: of shards {sorted(shards.tolist())}, not of {wanted} shards from 0 on")
    exceptions = zip(rows["key_id"].drop_null().to_pylist(), vectors[special], strict=True)
    return vectors[~special][np.argsort(shards)], dict(exceptions)


def _concatenate(pieces: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
