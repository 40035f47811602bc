"""One Parquet file of all rows that keys own after a dump."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.delta.scan import Scan
from torchrec_ext.files import sync

STATE_SCHEMA = pa.schema([fmt.PART_SCHEMA.field(name) for name in ("table_fqn", "key_id", "embedding")])
"""A key of a table, and its vector."""


@dataclass(frozen=True)
class StateFile:
    """What ``write_state`` wrote.

    Attributes:
        path: the file.
        step: the step of the last dump taken in.
        generation: its run generation.
        rows: rows by table FQN.
        nbytes: bytes of the file.
    """

    path: str
    step: int
    generation: int
    rows: dict[str, int]
    nbytes: int


def write_state(
    log: DeltaLog | str | os.PathLike[str],
    path: str | os.PathLike[str],
    upto: int | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> StateFile:
    """Writes the rows that keys own after a dump into one Parquet file (``STATE_SCHEMA``).

    Rows are streamed: no vectors are in memory but those just read. The file has a hidden name until it is
    whole. The rows of a table follow one another, in any order. It holds no fallback rows: what ids without
    a row get, ``DeltaLog.replay`` knows, or a snapshot of ``publish`` to ``parquet://``.

    Args:
        log: a dump directory.
        path: the file, which must not be there.
        upto: as in ``DeltaLog.replay``.
        progress: is told how many rows of how many have been looked at.

    Raises:
        DeltaLogError: nothing is committed up to there, or a file is missing or damaged.
        FileExistsError: the file is there already.
    """
    log = DeltaLog.of(log)
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} is there already: remove it, or name another file")
    hidden = path.with_name(f".{path.name}.tmp")
    try:
        last, rows = log.undisturbed(lambda: _write(log, log.history_upto(upto), hidden, progress))
        sync(hidden)
        hidden.rename(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
    return StateFile(str(path), last.step, last.generation, rows, path.stat().st_size)


def _write(
    log: DeltaLog, dumps: list[Manifest], path: Path, progress: Callable[[int, int], None] | None
) -> tuple[Manifest, dict[str, int]]:
    """Writes the rows after the last of these dumps; that dump, and how many rows of each table."""
    last, total = dumps[-1], sum(dump.rows for dump in dumps)
    rows = {fqn: 0 for fqn in last.tables if fqn not in last.retired}
    with _writer(path) as file:
        for fqn, keys, vectors in Scan(log, dumps).upserts():
            if fqn not in rows:
                continue
            names = pa.repeat(pa.scalar(fqn), len(keys))
            columns = [names, pa.array(keys), fmt.embedding_array(vectors)]
            file.write_table(pa.Table.from_arrays(columns, schema=STATE_SCHEMA))
            rows[fqn] += len(keys)
            if progress is not None:
                progress(sum(rows.values()), total)
    return last, rows


def _writer(path: Path) -> pq.ParquetWriter:
    return pq.ParquetWriter(
        path,
        STATE_SCHEMA,
        compression="zstd",
        compression_level=1,
        use_dictionary=["table_fqn"],
        use_byte_stream_split=["embedding.list.element"],
        store_schema=False,
    )
