"""A log in figures, dump by dump: for reports and dashboards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.answers import find
from torchrec_ext.delta.chain import without_superseded
from torchrec_ext.delta.difference import distances
from torchrec_ext.delta.keys import NO_KEYS, Keys, difference, union
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest, TableInfo
from torchrec_ext.delta.scan import Scan

SAMPLED_KEYS = 50_000
"""Of a table with more keys, that many are followed from dump to dump, chosen by a hash."""


@dataclass(frozen=True)
class Spread:
    """How values are spread: quantiles, and the largest."""

    p10: float
    p50: float
    p90: float
    max: float

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> Spread | None:
        """Of float64 ``[n]``; None if there are none."""
        if not len(values):
            return None
        p10, p50, p90, largest = np.quantile(values, (0.1, 0.5, 0.9, 1.0)).tolist()
        return cls(p10, p50, p90, largest)


@dataclass(frozen=True)
class TableFigures:
    """What a dump says of a table.

    Attributes:
        updated: upserts of keys that owned a row at the dump before.
        admitted: upserts of keys that did not.
        evicted: deletes of keys that owned a row at the dump before.
        deleted: deletes of keys that did not: what a restart takes back, for one.
        held: keys that own a row after it.
        num_embeddings: rows of the table.
        norms: L2 norms of the vectors upserted.
        moves: how far the vectors of ``updated`` moved, as the L2 norm of the difference; of a sample.
    """

    updated: int
    admitted: int
    evicted: int
    deleted: int
    held: int
    num_embeddings: int
    norms: Spread | None
    moves: Spread | None


@dataclass(frozen=True)
class DumpFigures:
    """A dump, or the base that stands for those before the first dump.

    Attributes:
        dump: its id.
        is_base: whether it is a base: its rows are all of ``admitted``.
        created_unix: when its training step was over, seconds since 1970.
        committed_unix: when it was committed, seconds since 1970.
        nbytes: bytes of its files.
        stall_seconds: how long training stood still for it, by rank.
        tables: by FQN, the tables that it covers.
    """

    dump: DumpId
    is_base: bool
    created_unix: float
    committed_unix: float
    nbytes: int
    stall_seconds: tuple[float, ...]
    tables: dict[str, TableFigures]

    @property
    def lag_seconds(self) -> float | None:
        """From the training step to the commit; None of a base, which is made long after."""
        return None if self.is_base else self.committed_unix - self.created_unix

    @property
    def longest_stall_seconds(self) -> float:
        """On the rank where training stood still longest."""
        return max(self.stall_seconds, default=0.0)


@dataclass(frozen=True)
class LogFigures:
    """A log.

    Attributes:
        directory: where it is.
        dumps: its dumps, oldest first, without superseded ones.
        superseded: how many of those there are.
        tables: its tables, by FQN.
    """

    directory: str
    dumps: tuple[DumpFigures, ...]
    superseded: int
    tables: dict[str, TableInfo]


def figures_of(
    log: DeltaLog | str | os.PathLike[str],
    *,
    sampled_keys: int = SAMPLED_KEYS,
    progress: Callable[[int, int], None] | None = None,
) -> LogFigures:
    """Reads a whole log, one dump after another.

    Memory: the keys of each table, and the vectors of ``sampled_keys`` of them.

    Args:
        log: a dump directory.
        sampled_keys: of how many keys of a table to follow the vectors; 0: of none.
        progress: is told how many rows of how many have been read.

    Raises:
        DeltaLogError: the log is broken, or a file of it is missing or damaged.
    """
    log = DeltaLog.of(log)
    return log.undisturbed(lambda: _figures(log, sampled_keys, progress))


def _figures(log: DeltaLog, sampled_keys: int, progress: Callable[[int, int], None] | None) -> LogFigures:
    chain = log.dumps(superseded=True)
    dumps = without_superseded(chain)
    tables = {fqn: info for dump in dumps for fqn, info in dump.tables.items()}
    total, read = sum(dump.rows for dump in dumps), 0
    followed = {fqn: _Followed(_Sample(info.dim, sampled_keys)) for fqn, info in tables.items()}
    figures = []
    for dump in dumps:
        scan = Scan(log, [dump])
        for fqn, keys, vectors in scan.upserts():
            followed[fqn].upsert(keys, vectors)
            read += len(keys)
            if progress is not None:
                progress(read, total)
        for fqn, keys in scan.deletes():
            followed[fqn].delete(keys)
            read += len(keys)
        here = {fqn: followed[fqn].told(info.num_embeddings) for fqn, info in dump.tables.items()}
        figures.append(_of_dump(dump, here))
    return LogFigures(str(log.place), tuple(figures), len(chain) - len(dumps), tables)


def _of_dump(dump: Manifest, tables: dict[str, TableFigures]) -> DumpFigures:
    stalls = tuple(stats.stall_seconds for stats in dump.stats)
    times = dump.created_unix, dump.committed_unix
    return DumpFigures(dump.dump, dump.is_base, *times, dump.nbytes, stalls, tables)


@dataclass
class _Sample:
    """The latest vectors of some keys of a table.

    A key is in it if its hash is below a limit, which sinks when there are too many.
    """

    dim: int
    size: int
    limit: float = 1.0
    keys: Keys = field(default_factory=lambda: NO_KEYS)
    vectors: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = np.empty((0, self.dim), np.float32)

    def move(self, keys: Keys, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Takes in new vectors, each key once; how far those that were there before moved."""
        chosen = _hashes(keys) < self.limit
        keys, vectors = keys[chosen], vectors[chosen]
        owned, at = find(self.keys, keys)
        moved = distances(vectors[owned], self.vectors[at])
        self.vectors[at] = vectors[owned]
        if not owned.all():
            self._add(keys[~owned], vectors[~owned])
        return moved

    def _add(self, keys: Keys, vectors: NDArray[np.float32]) -> None:
        merged = np.concatenate([self.keys, keys])
        order = np.argsort(merged, kind="stable")
        self.keys, self.vectors = merged[order], np.concatenate([self.vectors, vectors])[order]
        if len(self.keys) > self.size:
            self.limit *= 0.9 * self.size / len(self.keys)
            self._keep(_hashes(self.keys) < self.limit)

    def forget(self, keys: Keys) -> None:
        """Takes keys out."""
        self._keep(~np.isin(self.keys, keys))

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.keys, self.vectors = self.keys[kept], self.vectors[kept]


def _hashes(keys: Keys) -> NDArray[np.float64]:
    """A number in [0, 1) for each key, as good as random (the finalizer of splitmix64)."""
    mixed = keys.view(np.uint64).copy()
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return (mixed >> np.uint64(11)) / 2.0**53


class _Followed:
    """A table, from dump to dump: first a dump's upserts come, then its deletes, then ``told`` sums up."""

    def __init__(self, sample: _Sample) -> None:
        self._sample = sample
        self._held = NO_KEYS
        self._begin()

    def _begin(self) -> None:
        self._upserts: list[Keys] = []
        self._deletes: list[Keys] = []
        self._norms = [np.empty(0)]
        self._moves = [np.empty(0)]

    def upsert(self, keys: Keys, vectors: NDArray[np.float32]) -> None:
        self._upserts.append(keys)
        self._norms.append(distances(vectors, np.float32(0)))
        self._moves.append(self._sample.move(keys, vectors))

    def delete(self, keys: Keys) -> None:
        self._deletes.append(keys)
        self._sample.forget(keys)

    def told(self, num_embeddings: int) -> TableFigures:
        upserts, deletes = union(*self._upserts), union(*self._deletes)
        updated, evicted = (int(find(self._held, keys)[0].sum()) for keys in (upserts, deletes))
        self._held = union(difference(self._held, deletes), upserts)
        norms, moves = (Spread.of(np.concatenate(values)) for values in (self._norms, self._moves))
        self._begin()
        return TableFigures(
            updated=updated,
            admitted=len(upserts) - updated,
            evicted=evicted,
            deleted=len(deletes) - evicted,
            held=len(self._held),
            num_embeddings=num_embeddings,
            norms=norms,
            moves=moves,
        )
