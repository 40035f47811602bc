"""Parquet: a snapshot of all rows, for jobs that score in batches."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.manifest import DumpId
from torchrec_ext.errors import PublishError
from torchrec_ext.files import sync
from torchrec_ext.publish.loaded import LoadedSink, LoadedTable
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.publish.sink import name_of, path_of

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change

_FORMAT = {"format": "torchrec-ext snapshot", "version": 1}
_CURRENT, _DESCRIPTION = "current", "snapshot.json"
_ROWS = pa.schema(
    [
        pa.field("key_id", pa.int64(), nullable=False),
        pa.field("embedding", fmt.PART_SCHEMA.field("embedding").type, nullable=False),
    ]
)


class ParquetSink(LoadedSink):
    """A directory with one snapshot that is complete at any moment, and the one before it.

    ::

        current -> step_000000002000.g0000      replaced atomically
        step_000000002000.g0000/
            mc.user_table.parquet               key_id, embedding: the rows that keys own
            mc.user_table.fallback.parquet      shard, key_id, embedding: as in a dump
            snapshot.json                       which dump it shows, and the routing

    The snapshot before stays for jobs that are reading it.

    Args:
        url: ``parquet://relative/path`` or ``parquet:///absolute/path``; the directory is made.
    """

    takes = "everything"

    def __init__(self, url: str) -> None:
        self._root = Path(path_of(url))

    def __str__(self) -> str:
        return f"parquet://{self._root}"

    def position(self) -> Position | None:
        """See ``Sink.position``."""
        described = self._describe()
        return None if described is None else Position(**described["position"])

    def apply(self, change: Change) -> None:
        """See ``Sink.apply``."""
        if change.on_delete != "delete":
            raise PublishError(
                f"{self} holds the rows that keys own, and no deleted keys: on_delete='delete'"
            )
        self._own_root()
        position = change.position
        name = DumpId(position.generation, position.step).directory
        hidden = self._root / f".{name}.tmp"
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.mkdir()
        self._write_rows(hidden, change)
        for fqn, table in change.tables.items():
            _write_fallbacks(hidden / f"{name_of(fqn)}.fallback.parquet", fqn, table)
        tables = {fqn: table.to_json() for fqn, table in change.tables.items()}
        described = {**_FORMAT, "position": asdict(position), "tables": tables}
        (hidden / _DESCRIPTION).write_text(json.dumps(described, indent=1))
        for file in hidden.iterdir():
            sync(file)
        self._show(hidden, name)

    def load(self) -> tuple[Position, dict[str, LoadedTable]]:
        """See ``LoadedSink.load``."""
        while True:
            # Resolved once: a snapshot that is replaced meanwhile stays until the next one comes.
            directory = (self._root / _CURRENT).resolve()
            try:
                return self._read(directory)
            except (OSError, ValueError, KeyError, TypeError) as error:
                if (self._root / _CURRENT).resolve() == directory:
                    raise _unreadable(directory, error) from error

    def _read(self, directory: Path) -> tuple[Position, dict[str, LoadedTable]]:
        described = json.loads((directory / _DESCRIPTION).read_text())
        tables = {}
        for fqn, plain in described["tables"].items():
            dim = plain["dim"]
            fallbacks = pq.read_table(directory / f"{name_of(fqn)}.fallback.parquet")
            rows = pq.read_table(directory / f"{name_of(fqn)}.parquet")
            served = ServedTable.from_json(plain, fmt.vectors_of(fallbacks["embedding"].chunks, dim))
            vectors = fmt.vectors_of(rows["embedding"].chunks, dim)
            tables[fqn] = LoadedTable.of(served, rows["key_id"].to_numpy(), vectors)
        return Position(**described["position"]), tables

    def _describe(self) -> dict[str, Any] | None:
        path = self._root / _CURRENT / _DESCRIPTION
        try:
            described = json.loads(path.read_text())
            mine = {name: described[name] for name in _FORMAT}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise _unreadable(path, error) from error
        if mine != _FORMAT:
            raise PublishError(f"{path} is {mine}; this torchrec_ext reads {_FORMAT}")
        return described

    def _own_root(self) -> None:
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            others = [p.name for p in self._root.iterdir() if not _is_ours(p.name)]
        except OSError as error:
            raise PublishError(f"{self} cannot be written to: {error}") from error
        if others:
            raise PublishError(
                f"{self} holds other files, such as {others[0]}: give it a directory of its own"
            )

    def _write_rows(self, directory: Path, change: Change) -> None:
        with contextlib.ExitStack() as stack:
            writers = {
                fqn: stack.enter_context(_writer(directory / f"{name_of(fqn)}.parquet", _ROWS))
                for fqn in change.tables
            }
            for fqn, keys, vectors in change.upserts():
                batch = pa.Table.from_arrays([pa.array(keys), fmt.embedding_array(vectors)], schema=_ROWS)
                writers[fqn].write_table(batch)

    def _show(self, hidden: Path, name: str) -> None:
        """Gives a snapshot its name, points ``current`` to it, and removes all but the one before."""
        shown = self._root / _CURRENT
        before = os.readlink(shown) if shown.is_symlink() else None
        if before == name:  # a publication from scratch of the same dump
            name = f"{name}.again" if not before.endswith(".again") else name.removesuffix(".again")
        shutil.rmtree(self._root / name, ignore_errors=True)
        hidden.rename(self._root / name)
        link = self._root / f".{_CURRENT}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(shown)
        sync(self._root)
        for path in self._root.iterdir():
            if path.name not in (_CURRENT, name, before):
                shutil.rmtree(path, ignore_errors=True)


def _unreadable(path: Path, error: Exception) -> PublishError:
    return PublishError(f"{path} cannot be read: {error}. Remove it, and publish again")


def _is_ours(name: str) -> bool:
    return name == _CURRENT or name.startswith(("step_", ".step_", f".{_CURRENT}"))


@contextlib.contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
    with pq.ParquetWriter(
        path, schema, compression="zstd", compression_level=1, use_dictionary=False
    ) as writer:
        yield writer


def _write_fallbacks(path: Path, fqn: str, table: ServedTable) -> None:
    shards = len(table.fallback)
    keys = [*[None] * shards, *table.exceptions]
    rows = pa.table(
        {
            "shard": pa.array([*range(shards), *[None] * len(table.exceptions)], pa.int32()),
            "key_id": pa.array(keys, pa.int64()),
            "embedding": fmt.embedding_array(np.ascontiguousarray(table.vectors())),
        }
    )
    pq.write_table(rows, path)
