"""Reads what a run of dumps changed, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest, TableInfo
from torchrec_ext.delta.replay import fallback_of
from torchrec_ext.errors import DeltaLogError

T = TypeVar("T")
_ROWS = 1 << 15  # in a piece


@dataclass(frozen=True)
class _Group:
    """One row group.

    ``latest`` is where no later row of these dumps speaks of the same key; None: everywhere.
    """

    path: Path
    index: int
    where: str
    rows: int
    latest: NDArray[np.bool_] | None = None


class Scan:
    """What became of each key in a run of dumps, as if they were one dump.

    Of one dump nothing but a piece is ever in memory. Of several, their keys are: about 26 bytes per row
    while they are compared, one after.

    Args:
        log: the log.
        dumps: committed dumps that follow one another, none of them void.

    Raises:
        DeltaLogError: a file is missing or damaged.
    """

    def __init__(self, log: DeltaLog, dumps: Sequence[Manifest]) -> None:
        self._log = log
        self._last = dumps[-1]
        self._groups: dict[str, list[_Group]] = {}
        for dump in dumps:
            for part in dump.parts:
                path = log.checked_path(dump, part, fmt.PART_SCHEMA)
                where = f"{dump.directory}: {path.name}"
                with pq.ParquetFile(path, memory_map=True) as file:
                    for index, fqn in fmt.row_groups(file):
                        if fqn not in dump.tables:
                            raise DeltaLogError(f"{where}: rows of {fqn}, which its manifest does not list")
                        rows = file.metadata.row_group(index).num_rows
                        self._groups.setdefault(fqn, []).append(_Group(path, index, where, rows))
        # A table that the last dump does not cover any more is left as it is.
        self._groups = {fqn: self._groups.get(fqn, []) for fqn in self._last.tables}
        if len(dumps) > 1:
            self._groups = {fqn: _marked(groups) for fqn, groups in self._groups.items()}

    def upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """Tables, keys int64 ``[n]`` and vectors float32 ``[n, dim]``; each key once.

        The next rows are read on a thread of its own while the caller works on one.
        """
        return _ahead(self._upserts())

    def _upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                begin = 0
                with pq.ParquetFile(group.path, memory_map=True) as file:
                    columns = ["key_id", "op", "embedding"]
                    for rows in file.iter_batches(_ROWS, row_groups=[group.index], columns=columns):
                        latest = group.latest if group.latest is None else group.latest[begin:][: len(rows)]
                        begin += len(rows)
                        upsert = pc.equal(rows["op"], fmt.UPSERT).to_numpy(zero_copy_only=False)
                        keep = upsert if latest is None else upsert & latest
                        if keep.any():
                            vectors = self._vectors(fqn, group, rows)
                            yield fqn, rows["key_id"].to_numpy()[keep], vectors[keep[upsert]]

    def _vectors(self, fqn: str, group: _Group, rows: pa.RecordBatch) -> NDArray[np.float32]:
        """The vectors of the upserts among some rows, and of nothing else."""
        try:
            return fmt.vectors_of([rows["embedding"]], self._last.tables[fqn].dim)
        except ValueError as error:
            raise DeltaLogError(f"{group.where}: {error}") from error

    def deletes(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Tables and keys int64 ``[n]`` that own no row any more; each key once."""
        for fqn, _, keys, upsert in self._keys():
            if len(gone := keys[~upsert]):
                yield fqn, gone

    def keys(self) -> dict[str, NDArray[np.int64]]:
        """The keys that are upserted, sorted, by table."""
        found: dict[str, list[NDArray[np.int64]]] = {fqn: [] for fqn in self._groups}
        for fqn, _, keys, upsert in self._keys():
            found[fqn].append(keys[upsert])
        return {fqn: np.sort(np.concatenate(k)) if k else np.empty(0, np.int64) for fqn, k in found.items()}

    def fallbacks(self) -> dict[str, tuple[TableInfo, NDArray[np.float32], dict[int, NDArray[np.float32]]]]:
        """Of each table the last dump covers: what it says of it, its fallback rows, its exceptions."""
        rows = self._log.rows_of(self._last, self._last.fallbacks, fmt.FALLBACK_SCHEMA)
        found = {}
        for fqn, info in self._last.tables.items():
            try:
                found[fqn] = (info, *fallback_of(info, rows.filter(pc.equal(rows["table_fqn"], fqn))))
            except ValueError as error:
                where = self._last.directory
                raise DeltaLogError(f"{where}: fallback rows of {fqn}: {error}") from error
        return found

    def _keys(self) -> Iterator[tuple[str, _Group, NDArray[np.int64], NDArray[np.bool_]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                keys, upsert = _read_keys(group)
                if group.latest is not None:
                    keys, upsert = keys[group.latest], upsert[group.latest]
                yield fqn, group, keys, upsert


def _ahead(items: Iterator[T]) -> Iterator[T]:
    with ThreadPoolExecutor(1, "torchrec-ext-scan") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def _read_keys(group: _Group) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    with pq.ParquetFile(group.path, memory_map=True) as file:
        rows = file.read_row_group(group.index, columns=["key_id", "op"])
    return rows["key_id"].to_numpy(), pc.equal(rows["op"], fmt.UPSERT).to_numpy()


def _marked(groups: list[_Group]) -> list[_Group]:
    """The same groups, with the rows named that no later one overrules."""
    if not groups:
        return []
    keys = np.concatenate([_read_keys(group)[0] for group in groups])
    # Stable: among equal keys the latest stays last.
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    latest = np.zeros(len(keys), np.bool_)
    latest[order[np.append(ordered[1:] != ordered[:-1], True)]] = True
    pieces = np.split(latest, np.cumsum([group.rows for group in groups])[:-1])
    return [
        _Group(group.path, group.index, group.where, group.rows, piece)
        for group, piece in zip(groups, pieces, strict=True)
    ]
