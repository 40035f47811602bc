"""A dump is plain Parquet: other readers find in it what ``DeltaLog`` finds."""

from __future__ import annotations

from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from tests.support.training import TABLES, write_log
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaLog
from torchrec_ext.delta import format as fmt

STEPS = (10, 20, 30, 40, 50)

# The newest row of each key, unless it says that the key is gone. Within a generation the dumps are in
# the order of their steps.
LATEST = """
select table_fqn, key_id, embedding
from read_parquet('{directory}/step_*/part_*.parquet')
qualify row_number() over (partition by table_fqn, key_id order by global_step desc) = 1
    and op = 'upsert'
order by table_fqn, key_id
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log") / "deltas"
    run_on(2, write_log, directory, STEPS)
    return directory


@pytest.fixture(scope="module")
def parts(directory: Path) -> list[Path]:
    parts = sorted(directory.glob("step_*/part_*.parquet"))
    assert len(parts) == 2 * len(STEPS)
    return parts


def test_duckdb_finds_with_one_query_over_one_glob_what_replay_finds(directory: Path) -> None:
    found = duckdb.sql(LATEST.format(directory=directory)).to_arrow_table()
    state = DeltaLog(directory).replay()
    for fqn in TABLES:
        rows = found.filter(pc.equal(found["table_fqn"], fqn))
        assert rows["key_id"].to_pylist() == state[fqn].keys.tolist()
        vectors = np.array(rows["embedding"].to_pylist(), np.float32)
        assert vectors.view(np.int32).tolist() == state[fqn].vectors.view(np.int32).tolist()
        assert len(vectors)


def test_each_key_appears_once_in_a_dump_and_deletes_are_among_them(parts: list[Path]) -> None:
    glob = str(parts[0].parent.parent / "step_*/part_*.parquet")
    repeated = duckdb.sql(
        f"select global_step, table_fqn, key_id from read_parquet('{glob}') group by all having count(*) > 1"
    )
    assert repeated.fetchall() == []
    deletes = duckdb.sql(f"select key_id from read_parquet('{glob}') where op = 'delete'").fetchall()
    assert deletes


def test_fallback_files_hold_one_row_per_table_and_shard(directory: Path) -> None:
    rows = duckdb.sql(
        f"select table_fqn, shard, len(embedding) from read_parquet('{directory}/step_*/fallback_*.parquet') "
        "where key_id is null order by all"
    ).fetchall()
    expected = [(fqn, shard, dim) for fqn, dim in (("mc.t0", 8), ("mc.t1", 4)) for shard in (0, 1)]
    assert rows == [row for row in expected for _ in STEPS]


def test_pyarrow_dataset_reads_all_parts_as_one_table(directory: Path, parts: list[Path]) -> None:
    everything = ds.dataset([str(part) for part in parts], format="parquet").to_table()
    log = DeltaLog(directory)
    expected = pa.concat_tables([log.read(dump.step) for dump in log.dumps()])
    order = [(name, "ascending") for name in ("global_step", "table_fqn", "key_id")]
    assert everything.sort_by(order).equals(expected.sort_by(order))


def test_schema_on_disk_is_the_one_that_is_documented(parts: list[Path]) -> None:
    for part in parts:
        assert pq.read_schema(part).equals(fmt.PART_SCHEMA)
        fallback = part.with_name(part.name.replace("part", "fallback"))
        assert pq.read_schema(fallback).equals(fmt.FALLBACK_SCHEMA)


def test_columns_and_types_do_not_change_unnoticed(parts: list[Path]) -> None:
    described = duckdb.sql(f"describe select * from read_parquet('{parts[0]}')").fetchall()
    assert [(name, kind) for name, kind, *_ in described] == [
        ("global_step", "BIGINT"),
        ("rank", "INTEGER"),
        ("world_size", "INTEGER"),
        ("feature_name", "VARCHAR"),
        ("table_fqn", "VARCHAR"),
        ("key_id", "BIGINT"),
        ("op", "VARCHAR"),
        ("embedding", "FLOAT[]"),
        ("source", "VARCHAR"),
    ]
    nullable = [field.name for field in pq.read_schema(parts[0]) if field.nullable]
    assert nullable == ["embedding"]


def test_embedding_is_null_if_and_only_if_the_key_was_deleted(parts: list[Path]) -> None:
    for part in parts:
        rows = pq.read_table(part)
        assert set(rows["op"].to_pylist()) <= {"upsert", "delete"}
        deleted = pc.equal(rows["op"], "delete")
        assert deleted.equals(pc.is_null(rows["embedding"]))
        dims = {fqn: dim for fqn, dim in (("mc.t0", 8), ("mc.t1", 4))}
        lengths = pc.list_value_length(rows["embedding"]).to_pylist()
        for fqn, length in zip(rows["table_fqn"].to_pylist(), lengths, strict=True):
            assert length in (None, dims[fqn])


def test_row_group_holds_one_table_and_its_statistics_say_which(parts: list[Path]) -> None:
    groups = 0
    for part in parts:
        file = pq.ParquetFile(part)
        for index in range(file.num_row_groups):
            names = set(file.read_row_group(index)["table_fqn"].to_pylist())
            column = file.schema_arrow.names.index("table_fqn")
            statistics = file.metadata.row_group(index).column(column).statistics
            assert names == {statistics.min} == {statistics.max}
            groups += 1
    assert groups > len(parts)


def test_rows_name_their_rank_and_carry_the_step_of_their_directory(parts: list[Path]) -> None:
    for part in parts:
        rows = pq.read_table(part)
        assert set(rows["rank"].to_pylist()) <= {int(part.name[5:10])}
        assert set(rows["global_step"].to_pylist()) <= {int(part.parent.name[5:17])}
        assert set(rows["source"].to_pylist()) <= {"zch"}
