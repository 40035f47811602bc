"""Replaying part files that hold rows in another order than we write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.cli.faults import reseal
from tests.support.logs import IDS, LogWriter, zch
from tests.support.rounding import STORAGE_DTYPES
from torchrec_ext.delta import DeltaLog, DeltaLogError, compact, replay, verify_log, write_state
from torchrec_ext.publish import publish

TABLES = {"mc.t0": zch(dim=5, num_shards=2), "mc.t1": zch(dim=1, num_shards=1)}


def _mix(directory: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Writes all parts anew, with one row group for each table: upserts and deletes in the keys' order."""
    for path in sorted(directory.glob("*/part_*.parquet")):
        rows = pq.read_table(path)
        with pq.ParquetWriter(path, rows.schema) as file:
            for fqn in rows["table_fqn"].unique().to_pylist():
                file.write_table(change(rows.filter(pc.field("table_fqn") == fqn).sort_by("key_id")))
        reseal(directory, path.parent.name, path.name)


@pytest.fixture(params=STORAGE_DTYPES)
def mixed(request: pytest.FixtureRequest, tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(1, {"mc.t0": IDS, "mc.t1": IDS}, storage_dtype=request.param)
    upserts, deletes = {"mc.t0": IDS[::4], "mc.t1": IDS[:2]}, {"mc.t0": IDS[1::2], "mc.t1": IDS[2:]}
    writer.dump(2, upserts, deletes, storage_dtype=request.param)
    return writer


@pytest.mark.parametrize("decoded_bytes", [1, 50, 1 << 19])
def test_row_groups_of_upserts_and_deletes_answer_the_same(
    mixed: LogWriter, decoded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_READ_BYTES", decoded_bytes)
    _mix(mixed.directory, lambda rows: rows)
    state = DeltaLog(mixed.directory).replay()
    for fqn in TABLES:
        assert np.array_equal(state[fqn].lookup(IDS), mixed.answer(fqn, IDS))


@pytest.mark.parametrize("op", ["upsert", "delete"])
@pytest.mark.parametrize("decoded_bytes", [1, 1 << 19])
def test_row_group_with_more_or_fewer_vectors_than_upserts_is_an_error(
    mixed: LogWriter, op: str, decoded_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "_READ_BYTES", decoded_bytes)

    def change(rows: pa.Table) -> pa.Table:
        vectors = rows["embedding"].to_pylist()
        vector = next(vector for vector in vectors if vector)
        for row, found in enumerate(rows["op"].to_pylist()):
            if found == op:
                vectors[row] = None if op == "upsert" else vector
                break
        place, field = rows.column_names.index("embedding"), rows.schema.field("embedding")
        return rows.set_column(place, field, pa.array(vectors, field.type))

    _mix(mixed.directory, change)
    with pytest.raises(DeltaLogError, match=r"part_.*: row group \d has \d+ upserts and \d+ vectors"):
        DeltaLog(mixed.directory).replay()


def _everybody_says(log: DeltaLog, scratch: Path, said: str, *, of_fallbacks: bool = False) -> None:
    readers: list[Callable[[], object]] = [
        log.replay,
        log.keys,
        lambda: compact(log),
        lambda: publish(log, f"parquet://{scratch}.d"),
    ]
    if not of_fallbacks:
        readers.append(lambda: write_state(log, scratch))
    for read in readers:
        with pytest.raises(DeltaLogError, match=said):
            read()
    assert not verify_log(log).clean


def test_row_group_of_two_tables_is_an_error_that_names_the_file_whoever_reads_it(
    mixed: LogWriter, tmp_path: Path
) -> None:
    for path in sorted(mixed.directory.glob("*/part_*.parquet")):
        pq.write_table(pq.read_table(path), path)
        reseal(mixed.directory, path.parent.name, path.name)
    said = r"part_.*: row group 0 does not hold the rows of one table"
    _everybody_says(DeltaLog(mixed.directory), tmp_path / "state", said)


@pytest.mark.parametrize(
    ("files", "column", "kind"),
    [
        ("part", "key_id", pa.string()),
        ("part", "key_id", pa.int32()),
        ("part", "op", pa.binary()),
        ("part", "embedding", pa.string()),
        ("part", "embedding", pa.list_(pa.float64())),
        ("fallback", "embedding", pa.string()),
        ("fallback", "shard", pa.string()),
    ],
)
def test_column_of_another_type_is_an_error_that_names_the_file_whoever_reads_it(
    mixed: LogWriter, tmp_path: Path, files: str, column: str, kind: pa.DataType
) -> None:
    for path in sorted(mixed.directory.glob(f"*/{files}_*.parquet")):
        rows = pq.read_table(path)
        at = rows.column_names.index(column)
        pq.write_table(rows.set_column(at, column, pa.nulls(len(rows), kind)), path)
        reseal(mixed.directory, path.parent.name, path.name)
    said = rf"{files}_.*: column {column} is .*, not "
    _everybody_says(DeltaLog(mixed.directory), tmp_path / "state", said, of_fallbacks=files == "fallback")
