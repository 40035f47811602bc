"""Reads what a run of dumps changed, in pieces of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.keys import NO_KEYS
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest, TableInfo
from torchrec_ext.delta.replay import fallback_of
from torchrec_ext.delta.row_groups import BEFORE, SAID, STRAY, RowGroup, mark_latest, row_groups_of

T = TypeVar("T")
_ROWS = 1 << 15  # in a piece


class Scan:
    """What became of each key in a run of dumps, as if they were one dump.

    Of one dump nothing but a piece is ever in memory. Of several, a share of their keys is, a GiB at most,
    while they are compared, and a bit per row after.

    Args:
        log: the log.
        dumps: committed dumps that follow one another, none of them void.
        strays: dumps beside the chain that the reader of these has taken in. So what became of their keys is
            told as well.
        before: with strays, all dumps before these, none of them void.

    Raises:
        VacuumedError: some dumps were removed since they were listed; also from its methods.
        DeltaLogError: a file is missing or damaged; also from its methods.
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
        groups: dict[str, list[RowGroup]] = {}
        for told, role in ((strays, STRAY), (before if strays else (), BEFORE), (dumps, SAID)):
            for fqn, found in row_groups_of(log, told, role).items():
                groups.setdefault(fqn, []).extend(found)
        # A table that the last dump does not cover any more is left as it is.
        self._groups = {fqn: groups.get(fqn, []) for fqn in self._last.tables}
        if len(dumps) > 1 or strays:
            self._groups = {fqn: _of_interest(mark_latest(found)) for fqn, found in self._groups.items()}

    def upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """Tables, keys int64 ``[n]`` and vectors float32 ``[n, dim]``; each key once.

        The next rows are read on a thread of its own while the caller works on one.
        """
        return _ahead(self._upserts())

    def _upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                if group.role == STRAY:
                    continue
                begin, everywhere = 0, group.latest
                if not everywhere.any():
                    continue
                with group.file.open() as file:
                    columns = ["key_id", "op", "embedding"]
                    for rows in file.iter_batches(_ROWS, row_groups=[group.index], columns=columns):
                        latest = everywhere[begin : begin + len(rows)]
                        begin += len(rows)
                        upsert = pc.equal(rows["op"], fmt.UPSERT).to_numpy(zero_copy_only=False)
                        keep = upsert & latest
                        if keep.any():
                            vectors = fmt.vectors_of([rows["embedding"]], self._last.tables[fqn].dim)
                            yield fqn, rows["key_id"].to_numpy()[keep], vectors[keep[upsert]]

    def deletes(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Tables and keys int64 ``[n]`` that own no row any more; each key once."""
        for fqn, keys, upsert in self._keys():
            if len(gone := keys[~upsert]):
                yield fqn, gone

    def keys(self) -> dict[str, NDArray[np.int64]]:
        """The keys that are upserted, sorted, by table."""
        found: dict[str, list[NDArray[np.int64]]] = {fqn: [] for fqn in self._groups}
        for fqn, keys, upsert in self._keys():
            found[fqn].append(keys[upsert])
        return {fqn: np.sort(np.concatenate([NO_KEYS, *k])) for fqn, k in found.items()}

    def fallbacks(self) -> dict[str, tuple[TableInfo, NDArray[np.float32], dict[int, NDArray[np.float32]]]]:
        """Of each table the last dump covers: what it says of it, its fallback rows, its exceptions."""
        rows = self._log.rows_of(self._last, self._last.fallbacks, fmt.FALLBACK_SCHEMA)
        return {
            fqn: (info, *fallback_of(self._log.place, self._last, fqn, rows))
            for fqn, info in self._last.tables.items()
        }

    def _keys(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.bool_]]]:
        for fqn, groups in self._groups.items():
            for group in groups:
                keys, upsert = group.read_keys()
                latest = group.latest
                yield fqn, keys[latest], upsert[latest] & (group.role != STRAY)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    with ThreadPoolExecutor(1, "torchrec-ext-scan") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item


def _of_interest(groups: list[RowGroup]) -> list[RowGroup]:
    """The same groups; of all that came before strays, only what is said of the keys that they speak of."""
    strays = [group.read_keys()[0] for group in groups if group.role == STRAY]
    if not strays:
        return groups
    asked = np.concatenate(strays)
    return [
        replace(group, packed=np.packbits(group.latest & np.isin(group.read_keys()[0], asked)))
        if group.role == BEFORE
        else group
        for group in groups
    ]
