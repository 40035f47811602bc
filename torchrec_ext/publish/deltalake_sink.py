"""Delta Lake: a table for each embedding table, a version for each dump."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.errors import PublishError, SinkUnavailableError
from torchrec_ext.publish.loaded import LoadedSink, LoadedTable
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.publish.sink import missing_extra, name_of, path_of

try:
    from deltalake import CommitProperties, DeltaTable, write_deltalake
    from deltalake.exceptions import DeltaError, TableNotFoundError
except ModuleNotFoundError as error:
    raise missing_extra("deltalake", error) from error

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change

_PUBLISHED = "_published"
_DUMP = "torchrec_ext.dump"
_MAINTENANCE = ("OPTIMIZE", "VACUUM", "SET TBLPROPERTIES")  # operations that change no row
_COMMITS = 100  # to look through for the last dump
_VECTOR = pa.list_(pa.float32())
_ROWS = pa.schema(
    [
        pa.field("key_id", pa.int64(), nullable=False),
        pa.field("embedding", _VECTOR),
        pa.field("deleted", pa.bool_(), nullable=False),
    ]
)
_CHANGES = pa.schema([*_ROWS, pa.field("remove", pa.bool_(), nullable=False)])
_TABLES = pa.schema(
    [
        pa.field("table_fqn", pa.string(), nullable=False),
        pa.field("covered", pa.bool_(), nullable=False),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("served", pa.string(), nullable=False),
        pa.field("fallbacks", _VECTOR, nullable=False),
    ]
)


class DeltaLakeSink(LoadedSink):
    """Delta Lake tables under one path: ``PATH/TABLE_FQN`` with ``key_id``, ``embedding`` and ``deleted``.

    Each dump is one version of each table, made by one ``MERGE``; its id is in the commit's metadata, under
    ``torchrec_ext.dump``. ``PATH/_published`` says which versions belong together: it is written last, has a
    version for each dump too, and holds the routing and the fallback rows.

    Args:
        url: ``deltalake://relative/path``, ``deltalake:///absolute/path``, or ``deltalake://`` before the URI
            of an object store, such as ``deltalake://s3://bucket/path``.
    """

    takes = "each"

    def __init__(self, url: str) -> None:
        rest = url.partition("://")[2]
        self._root = (rest if "://" in rest else path_of(url)).rstrip("/")

    def __str__(self) -> str:
        return f"deltalake://{self._root}"

    def position(self) -> Position | None:
        """See ``Sink.position``."""
        with self._speaking():
            table = self._open(_PUBLISHED)
            return None if table is None else self._last(table)[1]

    def apply(self, change: Change) -> None:
        """See ``Sink.apply``."""
        with self._speaking():
            before = self._published()
            plain = {fqn: json.loads(row["served"]) for fqn, row in before.items()}
            self.expect(change, {fqn: (table["dim"], table["dtype"]) for fqn, table in plain.items()})
            properties = CommitProperties(custom_metadata={_DUMP: json.dumps(asdict(change.position))})
            versions = {
                fqn: self._bring(fqn, change, properties, None if change.replaces else before.get(fqn))
                for fqn in change.tables
            }
            rows = [
                {
                    "table_fqn": fqn,
                    "covered": True,
                    "version": versions[fqn],
                    "served": json.dumps(table.to_json()),
                    "fallbacks": table.vectors().reshape(-1),
                }
                for fqn, table in change.tables.items()
            ]
            if not change.replaces:  # a later dump may cover them again
                rows += [{**row, "covered": False} for fqn, row in before.items() if fqn not in change.tables]
            write_deltalake(
                f"{self._root}/{_PUBLISHED}",
                pa.Table.from_pylist(rows, schema=_TABLES),
                mode="overwrite",
                commit_properties=properties,
            )

    def load(self) -> tuple[Position, dict[str, LoadedTable]]:
        """See ``LoadedSink.load``."""
        tables = {}
        with self._speaking():
            published = DeltaTable(f"{self._root}/{_PUBLISHED}")
            for row in published.to_pyarrow_table().to_pylist():
                if not row["covered"]:
                    continue
                plain = json.loads(row["served"])
                block = np.array(row["fallbacks"], np.float32).reshape(-1, plain["dim"])
                uri = f"{self._root}/{name_of(row['table_fqn'])}"
                rows = DeltaTable(uri, version=row["version"]).to_pyarrow_table()
                rows = rows.filter(pc.invert(rows["deleted"]))
                vectors = fmt.vectors_of(rows["embedding"].chunks, plain["dim"])
                served = ServedTable.from_json(plain, block)
                tables[row["table_fqn"]] = LoadedTable.of(served, rows["key_id"].to_numpy(), vectors)
            return self._last(published)[1], tables

    def _published(self) -> dict[str, dict[str, Any]]:
        """What was published last of each table, and as which version."""
        published = self._open(_PUBLISHED)
        rows = [] if published is None else published.to_pyarrow_table().to_pylist()
        return {row["table_fqn"]: row for row in rows}

    def _bring(
        self, fqn: str, change: Change, properties: CommitProperties, before: dict[str, Any] | None
    ) -> int:
        """Makes the version of one table, on top of what was published before; returns its number."""
        uri = f"{self._root}/{name_of(fqn)}"
        table = self._open(name_of(fqn))
        if table is not None:
            version, dump = self._last(table)
        if table is None or before is None:
            rows = pa.RecordBatchReader.from_batches(_ROWS, _rows(fqn, change))
            write_deltalake(
                uri, rows, mode="overwrite", schema_mode="overwrite", commit_properties=properties
            )
            return DeltaTable(uri).version()
        if version != before["version"]:
            if dump == change.position:
                return version  # made before we were cut short
            table.restore(before["version"], commit_properties=properties)  # of a dump that is void by now
        changes = pa.RecordBatchReader.from_batches(_CHANGES, _changes(fqn, change))
        first = next(changes, None)
        if first is None:  # a merge of nothing makes no version
            write_deltalake(table, _ROWS.empty_table(), mode="append", commit_properties=properties)
            return DeltaTable(uri).version()
        changes = pa.RecordBatchReader.from_batches(_CHANGES, _with(first, changes))
        new = {name: f"s.{name}" for name in _ROWS.names}
        (
            table.merge(changes, "t.key_id = s.key_id", "s", "t", commit_properties=properties)
            .when_matched_delete("s.remove")
            .when_matched_update(new, "not s.remove")
            .when_not_matched_insert(new, "not s.remove")
            .execute()
        )
        return table.version()

    def _open(self, name: str) -> DeltaTable | None:
        try:
            return DeltaTable(f"{self._root}/{name}")
        except TableNotFoundError:
            return None

    def _last(self, table: DeltaTable) -> tuple[int, Position]:
        """The last version that a dump made, and the dump."""
        for commit in table.history(_COMMITS):
            if commit.get(_DUMP) is not None:
                return commit["version"], Position(**json.loads(commit[_DUMP]))
            if not commit["operation"].startswith(_MAINTENANCE):
                break
        raise PublishError(
            f"{self}: the last version of {table.table_uri} was not made by publish. Restore the one "
            "before, or publish to another path"
        )

    @contextlib.contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except DeltaError as error:
            raise PublishError(f"{self}: {error}") from error
        except OSError as error:
            raise SinkUnavailableError(f"{self}: {error}") from error


def _rows(fqn: str, change: Change) -> Iterator[pa.RecordBatch]:
    """What a new table holds."""
    for keys, vectors in _upserts(fqn, change):
        yield _batch(keys, vectors, False)


def _changes(fqn: str, change: Change) -> Iterator[pa.RecordBatch]:
    for keys, vectors in _upserts(fqn, change):
        yield _batch(keys, vectors, False, remove=False)
    for name, keys, substitutes in change.deletes():
        if name == fqn:
            yield _batch(keys, substitutes, True, remove=change.on_delete == "delete")


def _upserts(fqn: str, change: Change) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
    return ((keys, vectors) for name, keys, vectors in change.upserts() if name == fqn)


def _batch(
    keys: NDArray[np.int64], vectors: NDArray[np.float32] | None, deleted: bool, remove: bool | None = None
) -> pa.RecordBatch:
    embeddings = pa.nulls(len(keys), _VECTOR) if vectors is None else fmt.embedding_array(vectors)
    columns: list[Any] = [pa.array(keys), embeddings.cast(_VECTOR), pa.repeat(deleted, len(keys))]
    if remove is None:
        return pa.RecordBatch.from_arrays(columns, schema=_ROWS)
    return pa.RecordBatch.from_arrays([*columns, pa.repeat(remove, len(keys))], schema=_CHANGES)


def _with(first: pa.RecordBatch, rest: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    yield first
    yield from rest
