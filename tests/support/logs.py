"""Logs as a trainer would leave them, written in milliseconds and without one; and what they answer."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.support.rounding import STORAGE_DTYPES, rounded
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, FileEntry, Manifest, RankStats, TableInfo
from torchrec_ext.delta.places import open_place

INT64_MAX = 2**63 - 1
IDS = [*range(-2, 44), 61, 99, 1000, 2**40, -(2**63), INT64_MAX - 1, INT64_MAX]
"""Ids that logs speak of, and some that they never do."""


Rows = dict[int, NDArray[np.float32]]


@dataclass
class Table:
    """A table as a model would hold it: what each id owns, and what others get."""

    info: TableInfo
    rows: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    fallback: NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 0), np.float32))
    exceptions: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def answer(self, key: int) -> NDArray[np.float32]:
        """The oracle: written down a second time, from what the format says."""
        if key in self.exceptions:
            return self.exceptions[key]
        if key in self.rows:
            return self.rows[key]
        return self.fallback[self.shard_of(key)]

    def shard_of(self, key: int) -> int:
        unsigned = key % 2**64
        block = unsigned // self.info.block_size if self.info.block_size else self.info.num_shards
        return block if block < self.info.num_shards else unsigned % self.info.num_shards


def zch(dim: int, num_shards: int, hash_size: int = 40, dtype: str = "float32") -> TableInfo:
    """A ZCH table with raw ids as keys."""
    return TableInfo(
        dim, dtype, "raw", 64 * num_shards, num_shards, -(-hash_size // num_shards), hash_size, ("f",), "zch"
    )


def dense(dim: int, rows: int) -> TableInfo:
    """A dense RecStore table: its keys are its rows, and each has one."""
    return TableInfo(dim, "float32", "row", rows, 1, 0, 0, ("g",), "recstore")


class LogWriter:
    """Writes dumps into a directory: what it is told changed, and the fallback rows.

    Args:
        directory: is made.
        tables: by FQN.
        seed: of all vectors.
        lag_seconds: from the training step to the commit.
    """

    def __init__(
        self, directory: Path, tables: Mapping[str, TableInfo], seed: int = 0, *, lag_seconds: float = 0.0
    ) -> None:
        self.place = open_place(directory)
        self.place.make()
        self.directory = directory
        self.tables = {fqn: Table(info) for fqn, info in tables.items()}
        self._lag_seconds = lag_seconds
        self._rng = np.random.default_rng(seed)
        self._generation = 0
        self._previous: DumpId | None = None
        self._history: list[tuple[DumpId, dict[str, Rows], dict[str, set[int]]]] = []
        self._supersedes: tuple[DumpId, ...] = ()
        self._said: dict[str, set[int]] = {}

    def vectors(self, fqn: str, n: int) -> NDArray[np.float32]:
        """Random vectors that the table's dtype can hold."""
        info = self.tables[fqn].info
        drawn = self._rng.standard_normal((n, info.dim)).astype(np.float32)
        return drawn.astype(np.float16).astype(np.float32) if info.dtype == "float16" else drawn

    def dump(
        self,
        step: int,
        upserts: Mapping[str, list[int]] | None = None,
        deletes: Mapping[str, list[int]] | None = None,
        *,
        world_size: int = 2,
        storage_dtype: str | None = None,
        previous: DumpId | None = None,
    ) -> DumpId:
        """Commits a dump in which these keys get new vectors, and these lose theirs.

        It follows the last one that was written, or that which is named.
        """
        self._previous = previous or self._previous
        upserts, deletes = dict(upserts or {}), dict(deletes or {})
        touched: dict[str, set[int]] = {}
        for fqn, table in self.tables.items():
            for key, vector in zip(
                upserts.get(fqn, []), self.vectors(fqn, len(upserts.get(fqn, []))), strict=True
            ):
                table.rows[key] = vector
            for key in deletes.get(fqn, []):
                table.rows.pop(key, None)
            touched[fqn] = {*upserts.get(fqn, []), *deletes.get(fqn, []), *self._said.get(fqn, set())}
            if table.info.key_space != "row":
                table.fallback = self.vectors(fqn, table.info.num_shards)
                if table.info.source == "zch":
                    table.exceptions = {INT64_MAX: self.vectors(fqn, 1)[0]}
        dump = DumpId(self._generation, step)
        self._write(dump, touched, world_size, storage_dtype or "float32")
        self._round(touched, storage_dtype)
        rows = {fqn: dict(table.rows) for fqn, table in self.tables.items()}
        self._history.append((dump, rows, touched))
        self._previous, self._supersedes, self._said = dump, (), {}
        return dump

    def begin_generation(self, number: int) -> None:
        """The next dumps are of this generation."""
        self._generation = number

    def resume(self, step: int) -> None:
        """A trainer's restart from its checkpoint of this step: the next dump makes the later ones void."""
        self._generation += 1
        keep = [entry for entry in self._history if entry[0].step <= step]
        void = [entry for entry in self._history if entry[0].step > step]
        self._supersedes = tuple(dump for dump, _, _ in void)
        for fqn, table in self.tables.items():
            table.rows = dict(keep[-1][1][fqn]) if keep else {}
            self._said[fqn] = set().union(*(touched[fqn] for _, _, touched in void))
        self._history = keep

    def answer(self, fqn: str, keys: list[int]) -> NDArray[np.float32]:
        """What the model answers now, float32 ``[n, dim]``."""
        return np.stack([self.tables[fqn].answer(key) for key in keys])

    def served(self, fqn: str) -> list[int]:
        """Ids to ask for: a ``row`` table has answers for its rows only."""
        table = self.tables[fqn]
        return sorted(table.rows) if table.info.key_space == "row" else IDS

    def _round(self, touched: Mapping[str, set[int]], storage_dtype: str | None) -> None:
        """Rounds what a dump wrote, as readers find it."""
        for fqn, table in self.tables.items():
            for key in touched[fqn] & table.rows.keys():
                table.rows[key] = rounded(table.rows[key][None], storage_dtype)[0]
            if len(table.fallback):
                table.fallback = rounded(table.fallback, storage_dtype)
            table.exceptions = {
                key: rounded(vector[None], storage_dtype)[0] for key, vector in table.exceptions.items()
            }

    def _write(
        self, dump: DumpId, touched: Mapping[str, set[int]], world_size: int, storage_dtype: str
    ) -> None:
        self.place.make_folder(dump.directory)
        parts, fallbacks, stats = [], [], []
        for rank in range(world_size):
            name = fmt.part_name(rank, world_size)
            counts = {fmt.UPSERT: 0, fmt.DELETE: 0}
            schema = fmt.part_schema(storage_dtype)
            with fmt.ParquetFileWriter(self.place.create(dump.directory, name), schema) as file:
                for fqn, table in self.tables.items():
                    keys = sorted(key for key in touched[fqn] if table.shard_of(key) % world_size == rank)
                    kept = [key for key in keys if key in table.rows]
                    gone = [key for key in keys if key not in table.rows]
                    for op, chosen in ((fmt.UPSERT, kept), (fmt.DELETE, gone)):
                        counts[op] += len(chosen)
                        if chosen:
                            file.write(
                                fmt.part_batch(
                                    global_step=dump.step,
                                    rank=rank,
                                    world_size=world_size,
                                    feature_name=",".join(table.info.features),
                                    table_fqn=fqn,
                                    source=table.info.source,
                                    op=op,
                                    keys=np.array(chosen, np.int64),
                                    vectors=np.stack([table.rows[key] for key in chosen])
                                    if op == fmt.UPSERT
                                    else None,
                                    storage_dtype=storage_dtype,
                                )
                            )
            parts.append(FileEntry(name, rank, file.rows, file.nbytes, file.crc32))
            stats.append(RankStats(counts[fmt.UPSERT], counts[fmt.DELETE], 0.0))
            name = fmt.fallback_name(rank, world_size)
            schema = fmt.fallback_schema(storage_dtype)
            with fmt.ParquetFileWriter(self.place.create(dump.directory, name), schema) as file:
                for fqn, table in self.tables.items():
                    for shard, vector in enumerate(table.fallback):
                        if shard % world_size == rank:
                            last = shard == len(table.fallback) - 1
                            exceptions = table.exceptions if last else {}
                            file.write(fmt.fallback_batch(fqn, shard, vector, exceptions, storage_dtype))
            fallbacks.append(FileEntry(name, rank, file.rows, file.nbytes, file.crc32))
        now = time.time()
        manifest = Manifest(
            dump=dump,
            previous=self._previous,
            world_size=world_size,
            created_unix=now,
            committed_unix=now + self._lag_seconds,
            tables={
                fqn: dataclasses.replace(table.info, storage_dtype=storage_dtype)
                for fqn, table in self.tables.items()
            },
            parts=tuple(parts),
            fallbacks=tuple(fallbacks),
            stats=tuple(stats),
            supersedes=self._supersedes,
        )
        self.place.put(dump.directory, MANIFEST_NAME, manifest.to_json())


TABLES = {
    "mc.t0": zch(dim=4, num_shards=2),
    "mc.t1": zch(dim=8, num_shards=3, hash_size=INT64_MAX, dtype="float16"),
    "ebc.rows": dense(dim=4, rows=40),
}

_keys = st.lists(st.sampled_from([*range(40), 99, -7, INT64_MAX - 1, -(2**63)]), unique=True, max_size=12)


@dataclass(frozen=True)
class Event:
    """A dump, or a restart from the checkpoint of an earlier one (``back`` dumps ago) and then a dump."""

    upserts: dict[str, list[int]]
    deletes: dict[str, list[int]]
    back: int | None
    world_size: int
    publish: bool
    storage_dtype: str | None


# Rounding takes torch, which is not everywhere where logs are read.
_STORED = STORAGE_DTYPES if importlib.util.find_spec("torch") else STORAGE_DTYPES[:1]


def events() -> st.SearchStrategy[list[Event]]:
    """Schedules of dumps and restarts, and after which of them to publish."""
    zch_keys = st.fixed_dictionaries({"mc.t0": _keys, "mc.t1": _keys})
    rows = st.lists(st.integers(0, 39), unique=True, max_size=8)
    upserts = st.fixed_dictionaries({"mc.t0": _keys, "mc.t1": _keys, "ebc.rows": rows})
    event = st.builds(
        Event,
        upserts=upserts,
        deletes=zch_keys,
        back=st.sampled_from([None, 1, 2, None, 0, 1, 3]),
        world_size=st.integers(1, 3),
        publish=st.booleans(),
        storage_dtype=st.sampled_from(_STORED),
    )
    return st.lists(event, min_size=1, max_size=8)


def play(writer: LogWriter, event: Event, number: int, steps: list[int]) -> None:
    """Lets an event happen; ``steps`` are those dumped and not void."""
    if event.back is not None and event.back < len(steps):
        del steps[len(steps) - event.back :]
        writer.resume(steps[-1])
        number = steps[-1] // 10 + 1
    step = max(10 * number, steps[-1] + 1 if steps else 0)
    writer.dump(
        step,
        event.upserts,
        event.deletes,
        world_size=event.world_size,
        storage_dtype=event.storage_dtype,
    )
    steps.append(step)
