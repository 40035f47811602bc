"""Rebuilds a model's tables from its dumps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from torchrec_ext.answers import HashFunction, answers, as_keys, check_rows, find, hashed
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.keys import union
from torchrec_ext.delta.manifest import Manifest, TableInfo
from torchrec_ext.delta.places import PlacedFile
from torchrec_ext.errors import DeltaLogError

KeyFilter = Callable[[str, NDArray[np.int64]], NDArray[np.bool_]]
"""Which keys of a table (its FQN, int64 ``[n]``) to take in, bool ``[n]``."""


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
        vectors: which of the group's vectors is theirs, as far as they have one; None: to be counted.
    """

    file: PlacedFile
    index: int
    keys: NDArray[np.int64]
    upsert: NDArray[np.bool_]
    vectors: NDArray[np.int32] | None = None

    def vectors_of(self, rows: NDArray[np.int64]) -> NDArray[np.integer[Any]]:
        """Which of the group's vectors are those of rows, by their numbers among those taken in."""
        return (_nth_vector(self.upsert) if self.vectors is None else self.vectors)[rows]


@dataclass
class _TableHistory:
    info: TableInfo
    groups: list[_Group] = field(default_factory=list)


_NOTHING = _TableHistory(TableInfo(0, "", "", 0, 0, 0, 0, ()))


class Replay:
    """Collects the keys of dumps, oldest first, then reads only the vectors that were not replaced.

    Args:
        keep: the keys to take in; by default all.
    """

    def __init__(self, keep: KeyFilter | None = None) -> None:
        self._keep = keep
        self._tables: dict[str, _TableHistory] = {}

    def add_part(self, dump: Manifest, part: PlacedFile) -> None:
        """Takes in one rank's part of the next dump. Leaves no file open: a log may have thousands."""
        self._add_tables(dump)
        try:
            with part.open() as file:
                self._add_groups(part, file)
        except ValueError as error:
            raise DeltaLogError(f"{part}: {error}") from error

    def _add_groups(self, part: PlacedFile, file: pq.ParquetFile) -> None:
        for index, fqn in fmt.row_groups(file):
            if fqn not in self._tables:
                raise DeltaLogError(f"{part}: rows of {fqn}, which its manifest does not list")
            columns = file.read_row_group(index, columns=["key_id", "op"])
            upsert = pc.equal(columns["op"], fmt.UPSERT).to_numpy()
            keys = columns["key_id"].to_numpy()
            group = _Group(part, index, keys, upsert)
            if self._keep is not None:
                kept = np.flatnonzero(self._keep(fqn, keys))
                group = _Group(part, index, keys[kept], upsert[kept], _nth_vector(upsert)[kept])
            self._tables[fqn].groups.append(group)

    def states(
        self, dump: Manifest, fallbacks: pa.Table, hash_fns: Mapping[str, HashFunction]
    ) -> dict[str, EmbeddingState]:
        """The tables that the last dump taken in covers, as they stand after it.

        Args:
            dump: the last dump.
            fallbacks: its fallback rows, of all ranks.
            hash_fns: see ``DeltaLog.replay``.
        """
        if unknown := set(hash_fns) - set(dump.tables):
            raise DeltaLogError(f"hash_fns names {sorted(unknown)}; the dump covers {sorted(dump.tables)}")
        states = {}
        for fqn, info in dump.tables.items():
            keys, winners = _latest_upserts(self._tables[fqn])
            vectors = _gather(self._tables[fqn], winners)
            try:
                fallback, exceptions = fallback_of(info, fallbacks.filter(pc.field("table_fqn") == fqn))
            except ValueError as error:
                raise DeltaLogError(f"{dump.dump.directory}: fallback rows of {fqn}: {error}") from error
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
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """The vectors of a table after the last dump taken in, a row group at a time.

        Args:
            fqn: the table.
            among: the ids that are asked for; by default all.

        Yields:
            Ids and their vectors, in any order; each id once.
        """
        history = self._history(fqn)
        keys, winners = _latest_upserts(history)
        if among is not None:
            asked = np.isin(keys, among)
            keys, winners = keys[asked], winners[asked]
        for which, vectors in _vectors_at(history, winners):
            yield keys[which], vectors

    def _history(self, fqn: str) -> _TableHistory:
        return self._tables.get(fqn, _NOTHING)

    def _add_tables(self, dump: Manifest) -> None:
        for fqn, info in dump.tables.items():
            history = self._tables.setdefault(fqn, _TableHistory(info))
            if history.info.dim != info.dim or history.info.key_space != info.key_space:
                raise DeltaLogError(
                    f"{dump.dump.directory}: {fqn} has {info.key_space} keys and dimension {info.dim}, "
                    f"before it had {history.info.key_space} keys and dimension {history.info.dim}"
                )
            history.info = info


def _latest_upserts(history: _TableHistory) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The keys that own a row, sorted, and where in the history each one's vector stands."""
    keys = _concatenate([group.keys for group in history.groups], np.int64)
    upsert = _concatenate([group.upsert for group in history.groups], np.bool_)
    # Stable: among equal keys the latest stays last, and only the last of each run counts.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    last = np.append(ordered[1:] != ordered[:-1], True) if len(ordered) else np.empty(0, bool)
    winners = order[last]
    winners = winners[upsert[winners]]
    return keys[winners], winners


def _gather(history: _TableHistory, winners: NDArray[np.int64]) -> NDArray[np.float32]:
    """The vectors at these positions of the table's history, in their order."""
    vectors = np.empty((len(winners), history.info.dim), np.float32)
    for which, found in _vectors_at(history, winners):
        vectors[which] = found
    return vectors


def _vectors_at(
    history: _TableHistory, winners: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    """Reads the vectors at positions of the table's history: which of the positions, and theirs."""
    by_position = np.argsort(winners)
    positions = winners[by_position]
    start = 0
    for part, groups in itertools.groupby(history.groups, key=lambda group: group.file):
        with part.open() as file:
            for group in groups:
                stop = start + len(group.keys)
                low, high = np.searchsorted(positions, (start, stop))
                if high > low:
                    column = file.read_row_group(group.index, columns=["embedding"])["embedding"]
                    try:
                        found = fmt.vectors_of(column.chunks, history.info.dim)
                    except ValueError as error:
                        raise DeltaLogError(f"{part}: {error}") from error
                    yield by_position[low:high], found[group.vectors_of(positions[low:high] - start)]
                start = stop


def _nth_vector(upsert: NDArray[np.bool_]) -> NDArray[np.int32]:
    # Vectors stand for upserts only: a row's is found by counting those before it.
    return np.cumsum(upsert, dtype=np.int32) - np.int32(1)


def fallback_of(
    info: TableInfo, rows: pa.Table
) -> tuple[NDArray[np.float32], dict[int, NDArray[np.float32]]]:
    """The fallback row of each shard, and the vectors of ids that get another one.

    Raises:
        ValueError: a shard has none, or more than one; or there is one where every key has its own row.
    """
    vectors = fmt.vectors_of(rows["embedding"].chunks, info.dim)
    special = rows["key_id"].is_valid().to_numpy()
    shards = rows["shard"].to_numpy()[~special]
    wanted = 0 if info.key_space == "row" else info.num_shards
    if sorted(shards.tolist()) != list(range(wanted)):
        raise ValueError(f"of shards {sorted(shards.tolist())}, not of {wanted} shards from 0 on")
    exceptions = zip(rows["key_id"].drop_null().to_pylist(), vectors[special], strict=True)
    return vectors[~special][np.argsort(shards)], dict(exceptions)


def _concatenate(pieces: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
    return np.concatenate(pieces) if pieces else np.empty(0, dtype)
