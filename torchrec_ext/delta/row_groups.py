"""The rows of a run of dumps, and which of them no later one overrules; in bounded memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.dump_file import DumpFile
from torchrec_ext.delta.keys import NO_KEYS, last_places
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.delta.replay import reading_threads

Role = Literal["said", "before", "stray"]
SAID: Role = "said"
BEFORE: Role = "before"
STRAY: Role = "stray"

DEFAULT_MEMORY_BYTES = 1 << 30
_BYTES_PER_ROW = 42  # while the keys of a pass are compared: key, place, order and copies of them
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads keys that come in runs


@dataclass(frozen=True)
class RowGroup:
    """One row group: rows of one table.

    Attributes:
        file: it is in.
        index: its number there.
        rows: how many.
        role: ``said``: its rows count. ``before``: those of keys that a stray has do. ``stray``: none do, but
            a key that only strays have is deleted.
        packed: which rows have a key that no later row of these dumps has, a bit per row; None: all.
    """

    file: DumpFile
    index: int
    rows: int
    role: Role = SAID
    packed: NDArray[np.uint8] | None = dataclasses.field(default=None, repr=False)

    @property
    def latest(self) -> NDArray[np.bool_]:
        """Which rows have a key that no later row of these dumps has, bool ``[rows]``."""
        if self.packed is None:
            return np.ones(self.rows, np.bool_)
        return np.unpackbits(self.packed, count=self.rows).view(np.bool_)

    def read_keys(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Keys, and whether they are upserts."""
        with self.file.open() as file:
            return fmt.read_keys(file, self.index)

    def read(self) -> pa.Table:
        """All columns."""
        with self.file.open() as file:
            return file.read_row_group(self.index)


def row_groups_of(log: DeltaLog, dumps: Sequence[Manifest], role: Role = SAID) -> dict[str, list[RowGroup]]:
    """The row groups of dumps, by table, in the order in which the rows were said.

    Raises:
        VacuumedError: some dumps were removed since they were listed.
        DeltaLogError: a file is missing or damaged.
    """
    groups: dict[str, list[RowGroup]] = {}
    with reading_threads() as threads:
        for dump in dumps:
            check = lambda part, dump=dump: log.checked_file(dump, part, fmt.PART_SCHEMA)  # noqa: E731
            for part in threads.map(check, dump.parts):
                with part.open() as file:
                    for index, fqn in part.row_groups(file):
                        rows = file.metadata.row_group(index).num_rows
                        groups.setdefault(fqn, []).append(RowGroup(part, index, rows, role))
    return groups


def mark_latest(
    groups: Sequence[RowGroup],
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES,
    progress: Callable[[int], None] | None = None,
) -> list[RowGroup]:
    """The same groups of one table, with the rows named that no later one overrules.

    All keys are compared at once if there is memory for it; else a share of them at a time, each time
    reading all keys.

    Args:
        groups: in the order in which their rows were said.
        max_memory_bytes: for the keys that are compared; beside it, a bit per row.
        progress: is called with the number of rows whose keys were read.
    """
    passes = num_passes(sum(group.rows for group in groups), max_memory_bytes)
    packed: list[NDArray[np.uint8]] = [np.zeros(-(-group.rows // 8), np.uint8) for group in groups]
    for number in range(passes):
        keys, places = _share(groups, number, passes, progress)
        latest = latest_of(np.concatenate([NO_KEYS, *keys]))
        start = 0
        for place, own, found in zip(places, keys, packed, strict=True):
            bits = latest[start : start + len(own)]
            start += len(own)
            if place is None:
                found[:] = np.packbits(bits)
            else:
                here = place[bits]
                np.bitwise_or.at(found, here >> 3, (128 >> (here & 7)).astype(np.uint8))
    return [dataclasses.replace(group, packed=found) for group, found in zip(groups, packed, strict=True)]


def num_passes(rows: int, max_memory_bytes: int) -> int:
    """In how many shares the keys of so many rows are compared."""
    return max(1, -(-rows * _BYTES_PER_ROW // max_memory_bytes))


def latest_of(keys: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which of keys, int64 ``[n]``, does not come again later; bool ``[n]``."""
    latest = np.zeros(len(keys), np.bool_)
    latest[last_places(keys)] = True
    return latest


def _share(
    groups: Sequence[RowGroup], number: int, passes: int, progress: Callable[[int], None] | None
) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64] | None]]:
    """A share of the keys of each group, and their places in it; None: all are."""
    keys: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64] | None] = []
    for group in groups:
        found, _ = group.read_keys()
        place = None
        if passes > 1:
            spread = (found.view(np.uint64) * _SPREAD) >> np.uint64(32)
            place = np.flatnonzero(spread % np.uint64(passes) == np.uint64(number))
            found = found[place]
        keys.append(found)
        places.append(place)
        if progress is not None:
            progress(group.rows)
    return keys, places
