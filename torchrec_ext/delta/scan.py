"""Reads what a run of dumps changed, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest, TableInfo
from torchrec_ext.delta.places import PlacedFile
from torchrec_ext.delta.replay import fallback_of
from torchrec_ext.errors import DeltaLogError

T = TypeVar("T")
_ROWS = 1 << 15  # in a piece


@dataclass(frozen=True)
class _Group:
    """One row group.

    Attributes:
        file: it is in.
        index: its number there.
        rows: in it.
        role: ``said``: its rows count. ``before``: those of keys that a stray speaks of do. ``stray``: no row
            does, but a key of which nothing else speaks has none any more.
        latest: where no later row speaks of the same key; None: everywhere.
    """

    file: PlacedFile
    index: int
    rows: int
    role: Literal["said", "before", "stray"] = "said"
    latest: NDArray[np.bool_] | None = None

    @property
    def matters(self) -> bool:
        """Whether a row of it is the latest of its key."""
        return self.latest is None or bool(self.latest.any())


class Scan:
    """What became of each key in a run of dumps, as if they were one dump.

    Of one dump nothing but a piece is ever in memory. Of several, their keys are: about 26 bytes per row
    while they are compared, one after.

    Args:
        log: the log.
        dumps: committed dumps that follow one another, none of them void.
        strays: dumps beside the chain that the reader of these has taken in. So what became of their keys is
            told as well.
        before: with strays, all dumps before these, none of them void.

    Raises:
        DeltaLogError: a file is missing or damaged.
    """

    def __init__(
        self,
        log: DeltaLog,
        dumps: Sequence[Manifest],
        strays: Sequence[Manifest] = (),
        before: Sequence[Manifest] = (),
    ) -> None:
        self._log = log
        self._last = dumps[-1]
        self._groups: dict[str, list[_Group]] = {}
        for dump in strays:
            self._add(dump, "stray")
        for dump in before if strays else ():
            self._add(dump, "before")
        for dump in dumps:
            self._add(dump, "said")
        # A table that the last dump does not cover any more is left as it is.
        self._groups = {fqn: self._groups.get(fqn, []) for fqn in self._last.tables}
        if len(dumps) > 1 or strays:
            self._groups = {fqn: _marked(groups) for fqn, groups in self._groups.items()}

    def _add(self, dump: Manifest, role: Literal["said", "before", "stray"]) -> None:
        for part in self._log.checked_files(dump, dump.parts, fmt.PART_SCHEMA):
            with part.open() as file:
                for index, fqn in fmt.row_groups(file):
                    if fqn not in dump.tables:
                        raise DeltaLogError(f"{part}: rows of {fqn}, which its manifest does not list")
                    rows = file.metadata.row_group(index).num_rows
                    self._groups.setdefault(fqn, []).append(_Group(part, index, rows, role))

    def upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """Tables, keys int64 ``[n]`` and vectors float32 ``[n, dim]``; each key once.

        The next rows are read on a thread of its own while the caller works on one.
        """
        return _ahead(self._upserts())

    def _upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                if group.role == "stray" or not group.matters:
                    continue
                begin = 0
                with group.file.open() as file:
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
            raise DeltaLogError(f"{group.file}: {error}") from error

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
                where = self._last.dump.directory
                raise DeltaLogError(f"{where}: fallback rows of {fqn}: {error}") from error
        return found

    def _keys(self) -> Iterator[tuple[str, _Group, NDArray[np.int64], NDArray[np.bool_]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                if not group.matters:
                    continue
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
    with group.file.open() as file:
        rows = file.read_row_group(group.index, columns=["key_id", "op"])
    upsert = pc.equal(rows["op"], fmt.UPSERT).to_numpy()
    return rows["key_id"].to_numpy(), upsert & (group.role != "stray")


def _marked(groups: list[_Group]) -> list[_Group]:
    """The same groups, with the rows named that no later one overrules."""
    if not groups:
        return []
    strays = [_read_keys(group)[0] for group in groups if group.role == "stray"]
    of_strays = np.concatenate(strays) if strays else np.empty(0, np.int64)
    pieces, chosen = [], []
    for group in groups:
        keys = _read_keys(group)[0]
        # Of all that came before only keys that a stray speaks of matter.
        which = None if group.role != "before" else np.flatnonzero(np.isin(keys, of_strays))
        pieces.append(keys if which is None else keys[which])
        chosen.append(which)
    sizes = [len(piece) for piece in pieces]
    told = np.concatenate(pieces)
    del pieces
    # Stable: among equal keys the latest stays last.
    order = np.argsort(told, kind="stable")
    ordered = told[order]
    latest = np.zeros(len(told), np.bool_)
    latest[order[np.append(ordered[1:] != ordered[:-1], True)]] = True
    marked = []
    for group, which, piece in zip(groups, chosen, np.split(latest, np.cumsum(sizes)[:-1]), strict=True):
        if which is not None:
            whole = np.zeros(group.rows, np.bool_)
            whole[which] = piece
            piece = whole
        marked.append(replace(group, latest=piece))
    return marked
