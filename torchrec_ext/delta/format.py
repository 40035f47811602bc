"""The Parquet files of a dump: their names, schemas and how they are written and read.

A dump is one directory (``DumpId.directory``) that holds, per rank, a part file with the rows that
changed and a fallback file with the vectors that answer ids without a row. This module and
``manifest`` define the format; ``log`` and ``replay`` read it by the names given here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.delta.places import NewFile

FORMAT_VERSION = 1
UPSERT, DELETE = "upsert", "delete"

_EMBEDDING = pa.list_(pa.field("element", pa.float32(), nullable=False))

PART_SCHEMA = pa.schema(
    [
        pa.field("global_step", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("world_size", pa.int32(), nullable=False),
        pa.field("feature_name", pa.string(), nullable=False),
        pa.field("table_fqn", pa.string(), nullable=False),
        pa.field("key_id", pa.int64(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("embedding", _EMBEDDING, nullable=True),
        pa.field("source", pa.string(), nullable=False),
    ]
)
"""Rows that changed. ``embedding`` is null where ``op`` is ``delete``."""

FALLBACK_SCHEMA = pa.schema(
    [
        pa.field("table_fqn", pa.string(), nullable=False),
        pa.field("shard", pa.int32(), nullable=False),
        pa.field("key_id", pa.int64(), nullable=True),
        pa.field("embedding", _EMBEDDING, nullable=False),
    ]
)
"""Vectors of ids without a row: of all that route to ``shard`` (``key_id`` null), or of just one id."""

# Constant or nearly constant columns cost a few bytes with a dictionary. Floats never repeat: a
# dictionary of them is wasted work, while splitting their bytes lets zstd see the exponents.
_DICTIONARY = ["global_step", "rank", "world_size", "feature_name", "table_fqn", "op", "source"]
_STATISTICS = ["table_fqn", "key_id", "op"]
_BYTE_STREAM_SPLIT = ["embedding.list.element"]
_ROW_GROUP_ROWS = 131_072


def part_name(rank: int, world_size: int) -> str:
    """The file of the rows that changed on a rank."""
    return f"part_{rank:05d}_of_{world_size:05d}.parquet"


def fallback_name(rank: int, world_size: int) -> str:
    """The file of the fallback rows of a rank's shards."""
    return f"fallback_{rank:05d}_of_{world_size:05d}.parquet"


def embedding_array(vectors: NDArray[np.float32]) -> pa.ListArray:
    """An Arrow list column over the rows of ``vectors`` (float32 ``[n, dim]``), without a copy."""
    rows, dim = vectors.shape
    values = pa.array(vectors.reshape(-1))
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(dim))
    return pa.ListArray.from_arrays(offsets, values, type=_EMBEDDING)


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
) -> pa.Table:
    """Rows of one table and one op: ``keys`` int64 ``[n]``, ``vectors`` float32 ``[n, dim]`` or None."""
    n = len(keys)
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
    for field in PART_SCHEMA:
        if field.name in constants:
            arrays.append(pa.repeat(pa.scalar(constants[field.name], field.type), n))
        elif field.name == "key_id":
            arrays.append(pa.array(keys))
        else:
            arrays.append(pa.nulls(n, _EMBEDDING) if vectors is None else embedding_array(vectors))
    return pa.Table.from_arrays(arrays, schema=PART_SCHEMA)


def fallback_batch(
    table_fqn: str,
    shard: int,
    fallback: NDArray[np.float32],
    exceptions: Mapping[int, NDArray[np.float32]],
) -> pa.Table:
    """A shard's fallback row, float32 ``[dim]``, and the vectors of ids that get another one."""
    keys = [None, *exceptions]
    return pa.Table.from_arrays(
        [
            pa.repeat(pa.scalar(table_fqn), len(keys)),
            pa.repeat(pa.scalar(shard, pa.int32()), len(keys)),
            pa.array(keys, pa.int64()),
            embedding_array(np.stack([fallback, *exceptions.values()])),
        ],
        schema=FALLBACK_SCHEMA,
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
                use_byte_stream_split=_BYTE_STREAM_SPLIT,
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


def row_groups(file: pq.ParquetFile) -> Iterator[tuple[int, str]]:
    """The row groups of a part file: index, and the table that all its rows belong to."""
    column = file.schema_arrow.names.index("table_fqn")
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        statistics = group.column(column).statistics
        if statistics is not None and statistics.has_min_max and statistics.min == statistics.max:
            yield index, statistics.min
        elif group.num_rows:
            raise ValueError(f"row group {index} does not hold the rows of one table")


def vectors_of(columns: Iterable[pa.Array], dim: int) -> NDArray[np.float32]:
    """The vectors of an embedding column's chunks, float32 ``[non-null rows, dim]``.

    Raises:
        ValueError: a vector has another length than ``dim``.
    """
    pieces = []
    for chunk in columns:
        values = chunk.flatten()
        rows = len(chunk) - chunk.null_count
        if len(values) != rows * dim:
            raise ValueError(f"{rows} vectors of dimension {dim} hold {len(values)} values")
        pieces.append(values.to_numpy(zero_copy_only=False).reshape(rows, dim))
    return np.concatenate(pieces) if pieces else np.empty((0, dim), np.float32)
