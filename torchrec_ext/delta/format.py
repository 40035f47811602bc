"""The Parquet files of a dump: their names, schemas and how they are written and read.

A dump is one directory (``DumpId.directory``) that holds, per rank, a part file with the rows that
changed and a fallback file with the vectors that answer ids without a row. This module and
``manifest`` define the format; ``log`` and ``replay`` read it by the names given here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.delta.places import NewFile
from torchrec_ext.delta.storage import SCALE_AND_BIAS, StorageDtype, decode, encode

FORMAT_VERSION = 1
UPSERT, DELETE = "upsert", "delete"

_ELEMENTS: dict[StorageDtype, pa.DataType] = {
    "float32": pa.float32(),
    "float16": pa.float16(),
    "int8": pa.uint8(),
}


def _embedding(element: pa.DataType) -> pa.ListType:
    return pa.list_(pa.field("element", element, nullable=False))


def part_schema(storage_dtype: StorageDtype) -> pa.Schema:
    """Rows that changed. ``embedding`` is null where ``op`` is ``delete``."""
    return pa.schema(
        [
            pa.field("global_step", pa.int64(), nullable=False),
            pa.field("rank", pa.int32(), nullable=False),
            pa.field("world_size", pa.int32(), nullable=False),
            pa.field("feature_name", pa.string(), nullable=False),
            pa.field("table_fqn", pa.string(), nullable=False),
            pa.field("key_id", pa.int64(), nullable=False),
            pa.field("op", pa.string(), nullable=False),
            pa.field("embedding", _embedding(_ELEMENTS[storage_dtype]), nullable=True),
            pa.field("source", pa.string(), nullable=False),
        ]
    )


def fallback_schema(storage_dtype: StorageDtype) -> pa.Schema:
    """Vectors of ids without a row: of all that route to ``shard`` (``key_id`` null), or of just one id."""
    return pa.schema(
        [
            pa.field("table_fqn", pa.string(), nullable=False),
            pa.field("shard", pa.int32(), nullable=False),
            pa.field("key_id", pa.int64(), nullable=True),
            pa.field("embedding", _embedding(_ELEMENTS[storage_dtype]), nullable=False),
        ]
    )


PART_SCHEMA, FALLBACK_SCHEMA = part_schema("float32"), fallback_schema("float32")

# Constant or nearly constant columns cost a few bytes with a dictionary. Floats never repeat: a
# dictionary of them is wasted work, while splitting their bytes lets zstd see the exponents.
_DICTIONARY = ["global_step", "rank", "world_size", "feature_name", "table_fqn", "op", "source"]
_STATISTICS = ["table_fqn", "key_id", "op"]
_ROW_GROUP_ROWS = 131_072


def part_name(rank: int, world_size: int) -> str:
    """The file of the rows that changed on a rank."""
    return f"part_{rank:05d}_of_{world_size:05d}.parquet"


def fallback_name(rank: int, world_size: int) -> str:
    """The file of the fallback rows of a rank's shards."""
    return f"fallback_{rank:05d}_of_{world_size:05d}.parquet"


def embedding_array(vectors: NDArray[Any]) -> pa.ListArray:
    """An Arrow list column over rows ``[n, width]``, as ``encode`` gives them, without a copy."""
    rows, width = vectors.shape
    values = pa.array(vectors.reshape(-1))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(width))
    return pa.ListArray.from_arrays(offsets, values, type=_embedding(values.type))


def part_batch(
    *,
    global_step: int,
    rank: int,
    world_size: int,
    feature_name: str,
    table_fqn: str,
    source: str,
    op: str,
    keys: NDArray[np.int64],
    vectors: NDArray[np.float32] | None,
    storage_dtype: StorageDtype = "float32",
) -> pa.Table:
    """Rows of one table and one op: ``keys`` int64 ``[n]``, ``vectors`` float32 ``[n, dim]`` or None."""
    n = len(keys)
    schema = part_schema(storage_dtype)
    constants: dict[str, object] = {
        "global_step": global_step,
        "rank": rank,
        "world_size": world_size,
        "feature_name": feature_name,
        "table_fqn": table_fqn,
        "op": op,
        "source": source,
    }
    arrays = []
    for field in schema:
        if field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), n))
        elif field.name == "key_id":
            arrays.append(pa.array(keys))
        else:
            arrays.append(
                pa.nulls(n, field.type)
                if vectors is None
                else embedding_array(encode(vectors, storage_dtype))
            )
    return pa.Table.from_arrays(arrays, schema=schema)


def fallback_batch(
    table_fqn: str,
    shard: int,
    fallback: NDArray[np.float32],
    exceptions: Mapping[int, NDArray[np.float32]],
    storage_dtype: StorageDtype = "float32",
) -> pa.Table:
    """A shard's fallback row, float32 ``[dim]``, and the vectors of ids that get another one."""
    keys = [None, *exceptions]
    return pa.Table.from_arrays(
        [
            pa.repeat(pa.scalar(table_fqn), len(keys)),
            pa.repeat(pa.scalar(shard, pa.int32()), len(keys)),
            pa.array(keys, pa.int64()),
            embedding_array(encode(np.stack([fallback, *exceptions.values()]), storage_dtype)),
        ],
        schema=fallback_schema(storage_dtype),
    )


class ParquetFileWriter:
    """Writes one Parquet file of a dump, counting its bytes and their CRC-32 on the way.

    The file has its name once the ``with`` block is left without an exception: then it is whole and on the
    disk. So a reader that globs ``part_*.parquet`` meets whole files only.

    Args:
        file: of ``Place.create``; is gone if writing fails.
        schema: of the rows.

    Raises:
        FileExistsError: there is such a file already.
    """

    def __init__(self, file: NewFile, schema: pa.Schema) -> None:
        self.rows = 0
        self._file = file
        named = set(schema.names)
        try:
            self._writer = pq.ParquetWriter(
                self._file,
                schema,
                compression="zstd",
                compression_level=1,
                use_dictionary=[name for name in _DICTIONARY if name in named],
                write_statistics=[name for name in _STATISTICS if name in named],
                use_byte_stream_split=_byte_stream_split(schema),
                store_schema=False,
            )
        except BaseException:
            file.discard()
            raise

    @property
    def nbytes(self) -> int:
        """Bytes written so far."""
        return self._file.nbytes

    @property
    def crc32(self) -> int:
        """CRC-32 of the bytes written so far."""
        return self._file.crc32

    def write(self, table: pa.Table) -> None:
        """Appends rows; a row group never spans two calls."""
        self._writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self.rows += table.num_rows

    def __enter__(self) -> ParquetFileWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is not None:
            with contextlib.suppress(Exception):
                self._writer.close()
            self._file.discard()
            return
        try:
            self._writer.close()
            self._file.finish()
        except BaseException:
            self._file.discard()
            raise


def _byte_stream_split(schema: pa.Schema) -> list[str]:
    # Of float16 it would take 8 % off, but DuckDB cannot read that.
    is_half = schema.field("embedding").type.value_type == pa.float16()
    return [] if is_half else ["embedding.list.element"]


def row_groups(file: pq.ParquetFile) -> Iterator[tuple[int, str]]:
    """The row groups of a part file: index, and the table that all its rows belong to.

    Raises:
        ValueError: one holds rows of several tables, or does not say whose.
    """
    column = file.schema_arrow.names.index("table_fqn")
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        statistics = group.column(column).statistics
        if statistics is not None and statistics.has_min_max and statistics.min == statistics.max:
            yield index, statistics.min
        elif group.num_rows:
            raise ValueError(f"row group {index} does not hold the rows of one table")


def read_keys(file: pq.ParquetFile, index: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The keys of a row group, int64 ``[n]``, and which of them are upserts, bool ``[n]``."""
    group = file.metadata.row_group(index)
    statistics = group.column(file.schema_arrow.names.index("op")).statistics
    if statistics is not None and statistics.has_min_max and statistics.min == statistics.max:
        # As we write them. To decode a column of strings takes six times as long as one of keys.
        upsert = np.full(group.num_rows, statistics.min == UPSERT)
        return file.read_row_group(index, columns=["key_id"])["key_id"].to_numpy(), upsert
    rows = file.read_row_group(index, columns=["key_id", "op"])
    return rows["key_id"].to_numpy(), pc.equal(rows["op"], UPSERT).to_numpy()


def vectors_of(columns: Iterable[pa.Array], dim: int) -> NDArray[np.float32]:
    """The vectors of an embedding column's chunks, decoded: float32 ``[non-null rows, dim]``.

    They must not be written to.

    Raises:
        ValueError: a vector has another length than ``dim``.
    """
    pieces = [
        decode(chunk.flatten().to_numpy(zero_copy_only=False), len(chunk) - chunk.null_count, dim)
        for chunk in columns
    ]
    if len(pieces) == 1:  # a copy would take as long as what it is for
        return pieces[0]
    return np.concatenate(pieces) if pieces else np.empty((0, dim), np.float32)


def decoded(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """An embedding column with lists of float32, in whatever way its vectors are stored.

    Raises:
        ValueError: in a way that this version does not know.
    """
    element, kind = column.type.value_type, _embedding(pa.float32())
    if element != pa.uint8():
        return column.cast(kind)
    stored = column.combine_chunks()
    is_null = stored.is_null().to_numpy(zero_copy_only=False)
    widths = np.where(is_null, 0, pc.list_value_length(stored).fill_null(0).to_numpy())
    values, starts = stored.flatten().to_numpy(), np.cumsum(widths) - widths
    dims = np.maximum(widths - SCALE_AND_BIAS, 0)
    ends = np.cumsum(dims)
    vectors = np.empty(int(dims.sum()), np.float32)
    for dim in np.unique(dims[dims > 0]).tolist():
        rows = np.flatnonzero(dims == dim)
        bytes_of_rows = values[starts[rows, None] + np.arange(dim + SCALE_AND_BIAS)]
        at = ends[rows, None] - dim + np.arange(dim)
        vectors[at] = decode(bytes_of_rows.reshape(-1), len(rows), dim)
    offsets = pa.array(np.append(0, ends), pa.int32(), mask=np.append(is_null, False))
    return pa.chunked_array([pa.ListArray.from_arrays(offsets, pa.array(vectors), type=kind)])


def storage_of(file: pq.ParquetFile) -> StorageDtype:
    """How the vectors of a file are stored.

    Raises:
        ValueError: in a way that this version does not know.
    """
    kind = file.schema_arrow.field("embedding").type
    for storage_dtype, element in _ELEMENTS.items():
        if pa.types.is_list(kind) and kind.value_type == element:
            return storage_dtype
    raise ValueError(f"embedding is {kind}")


def schema_faults(file: pq.ParquetFile, schema: pa.Schema) -> list[str]:
    """What is wrong with a file's columns; vectors may be stored in any way that is known."""
    found = file.schema_arrow
    faults = []
    with contextlib.suppress(KeyError, ValueError):
        embedding = schema.get_field_index("embedding")
        stored = part_schema(storage_of(file)).field("embedding").type
        schema = schema.set(embedding, schema.field("embedding").with_type(stored))
    for field in schema:
        place = found.get_field_index(field.name)
        if place < 0:
            faults.append(f"column {field.name} is missing")
        elif found.field(place).type != field.type:
            faults.append(f"column {field.name} is {found.field(place).type}, not {field.type}")
    return faults
