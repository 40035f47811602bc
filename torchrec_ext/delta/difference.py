"""What became of each id between two dumps of a log."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.answers import find
from torchrec_ext.delta.keys import NO_KEYS, union
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.delta.replay import Replay
from torchrec_ext.delta.scan import Scan
from torchrec_ext.errors import VacuumedError


@dataclass(frozen=True)
class TableDifference:
    """What became of a table's ids.

    Attributes:
        fqn: the table.
        came: ids that own a row after, and did not before; int64 ``[n]``, sorted.
        went: ids that owned a row before, and do not after; int64 ``[n]``, sorted.
        moved: ids that own a row before and after, with another vector; int64 ``[n]``, those that moved
            farthest first.
        distances: how far each of ``moved`` moved: the L2 norm of the difference; float64 ``[n]``.
    """

    fqn: str
    came: NDArray[np.int64]
    went: NDArray[np.int64]
    moved: NDArray[np.int64]
    distances: NDArray[np.float64]


@dataclass(frozen=True)
class LogDifference:
    """What became of a log's tables between two dumps.

    Attributes:
        before: the earlier dump.
        after: the later dump.
        tables: those that the later dump covers, by FQN.
    """

    before: DumpId
    after: DumpId
    tables: dict[str, TableDifference]


def diff_log(
    log: DeltaLog | str | os.PathLike[str],
    before: int,
    after: int,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> LogDifference:
    """Compares a model's tables at two steps, reading only what changed in between.

    Memory: about the keys and vectors of the rows that changed in between.

    Args:
        log: a dump directory.
        before: a step; the newest dump at or before it counts, as in ``DeltaLog.replay``.
        after: a later step, likewise.
        progress: is told how many rows of how many have been read.

    Raises:
        ValueError: ``after`` is not the later step.
        DeltaLogError: nothing is committed up to one of the steps, or a file is missing or damaged.
    """
    log = DeltaLog.of(log)
    if before > after:
        raise ValueError(f"step {before} is later than step {after}: name the earlier one first")
    return log.undisturbed(lambda: _difference(log, before, after, progress))


def _difference(
    log: DeltaLog, before: int, after: int, progress: Callable[[int, int], None] | None
) -> LogDifference:
    earlier = log.history_upto(before)
    between = _between(log, earlier[-1].dump, log.history_upto(after)[-1].dump)
    if not between:
        tables = {
            fqn: TableDifference(fqn, NO_KEYS, NO_KEYS, NO_KEYS, np.empty(0)) for fqn in earlier[-1].tables
        }
        return LogDifference(earlier[-1].dump, earlier[-1].dump, tables)
    scan = Scan(log, between)
    upserted = scan.keys()
    gone = dict.fromkeys(upserted, NO_KEYS)
    for fqn, keys in scan.deletes():
        gone[fqn] = union(gone[fqn], keys)
    said = {fqn: union(keys, gone[fqn]) for fqn, keys in upserted.items()}
    replay = log.history(earlier, keep=lambda fqn, keys: find(said.get(fqn, NO_KEYS), keys)[0])
    total, read = sum(map(len, said.values())), 0
    collected = {
        fqn: _Collected(*_vectors_before(replay, fqn, info.dim)) for fqn, info in between[-1].tables.items()
    }
    for fqn, keys, vectors in scan.upserts():
        collected[fqn].take(keys, vectors)
        read += len(keys)
        if progress is not None:
            progress(read, total)
    tables = {fqn: one.difference(fqn, gone[fqn]) for fqn, one in sorted(collected.items())}
    return LogDifference(earlier[-1].dump, between[-1].dump, tables)


def _between(log: DeltaLog, before: DumpId, after: DumpId) -> list[Manifest]:
    """The dumps after one of them, up to another."""
    dumps = log.dumps()
    places = {dump.dump: place for place, dump in enumerate(dumps)}
    if not {before, after} <= places.keys():
        raise VacuumedError(f"{log.place}: {before.directory} or {after.directory} was removed by vacuum")
    return dumps[places[before] + 1 : places[after] + 1]


def distances(vectors: NDArray[np.float32], others: NDArray[np.float32] | np.float32) -> NDArray[np.float64]:
    """The L2 norm of each row's difference, float64 ``[n]``."""
    difference = vectors.astype(np.float64) - others
    return np.sqrt(np.einsum("nd,nd->n", difference, difference))


def _vectors_before(replay: Replay, fqn: str, dim: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The keys that a replay holds of a table, sorted, and their vectors."""
    pieces = list(replay.latest(fqn))
    keys = np.concatenate([NO_KEYS, *(keys for keys, _, _ in pieces)])
    vectors = np.concatenate([np.empty((0, dim), np.float32), *(vectors for _, vectors, _ in pieces)])
    order = np.argsort(keys)
    return keys[order], vectors[order]


class _Collected:
    """Compares vectors with those before, as they are read."""

    def __init__(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        self._keys = keys
        self._vectors = vectors
        self._came = [NO_KEYS]
        self._moved = [NO_KEYS]
        self._distances = [np.empty(0)]

    def take(self, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
        owned, at = find(self._keys, keys)
        self._came.append(keys[~owned])
        now, before = vectors[owned], self._vectors[at]
        other = (now.view(np.int32) != before.view(np.int32)).any(axis=1)
        self._moved.append(keys[owned][other])
        self._distances.append(distances(now[other], before[other]))

    def difference(self, fqn: str, gone: NDArray[np.int64]) -> TableDifference:
        moved, far = np.concatenate(self._moved), np.concatenate(self._distances)
        order = np.lexsort((moved, -far))
        went = gone[find(self._keys, gone)[0]]
        return TableDifference(fqn, np.sort(np.concatenate(self._came)), went, moved[order], far[order])
