"""The query of the documentation finds what ``DeltaLog.replay`` finds, in an engine that knows no log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from fsspec.implementations.local import LocalFileSystem as FsspecLocal
from fsspec.implementations.memory import MemoryFileSystem
from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem, SubTreeFileSystem

from tests.delta.test_compact import NOW
from tests.docs.pages import blocks_of
from tests.support.logs import TABLES, LogWriter
from torchrec_ext.delta import DeltaLog, compact, vacuum
from torchrec_ext.delta.places import open_place

GENERAL, FALLBACKS = (b.text for b in blocks_of("docs/format.md", "sql") if "manifest.json" in b.text)
(QUERY,) = (block.text for block in blocks_of("docs/scaling.md", "sql"))


def latest(log: DeltaLog, upto: int | None = None) -> pa.Table:
    """What the query finds, over the views that it wants."""
    files = log.files(upto)
    paths = files.filter(pa.compute.equal(files["content"], "part"))["path"].to_pylist()
    with duckdb.connect() as connection:
        connection.register("files", files)
        parts = connection.read_parquet(paths, filename=True).project("*, filename as path")
        parts.create_view("parts")
        return connection.sql(QUERY).to_arrow_table()


def _restarted(writer: LogWriter) -> None:
    """Several generations, deletes, dumps that are void, steps that come round again."""
    writer.dump(10, {"mc.t0": [*range(12)], "mc.t1": [7, 8], "ebc.rows": [0, 1]})
    writer.dump(20, {"mc.t0": [3, 4], "ebc.rows": [1]}, {"mc.t0": [1]}, world_size=3)
    writer.dump(30, {"mc.t0": [1, 40], "mc.t1": [9]}, {"mc.t0": [2, 4]}, world_size=1)
    writer.resume(20)
    writer.dump(25, {"mc.t0": [5]}, {"mc.t1": [7]})
    writer.dump(30, {"mc.t0": [2]}, {"mc.t0": [6]})
    writer.resume(25)
    writer.dump(28, {"mc.t1": [7]})
    writer.dump(40, {"mc.t0": [6]}, {"mc.t0": [0]})


def _compacted(writer: LogWriter) -> None:
    _restarted(writer)
    compact(writer.directory, 28)


def _vacuumed(writer: LogWriter) -> None:
    _compacted(writer)
    vacuum(writer.directory, **NOW)


def _vacuumed_and_restarted(writer: LogWriter) -> None:
    _vacuumed(writer)
    writer.resume(28)
    writer.dump(30, {"mc.t0": [0, 1]}, {"mc.t0": [3]})


@pytest.mark.parametrize("grow", [_restarted, _compacted, _vacuumed, _vacuumed_and_restarted])
def test_query_finds_what_replay_finds(tmp_path: Path, grow: Callable[[LogWriter], None]) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    grow(writer)
    log = DeltaLog(writer.directory)
    for upto in (None, *(dump.step for dump in log.dumps())):
        found = latest(log, upto)
        states = log.replay(upto)
        assert set(found["table_fqn"].to_pylist()) == {fqn for fqn, state in states.items() if len(state)}
        for fqn, state in states.items():
            rows = found.filter(pa.compute.equal(found["table_fqn"], fqn)).sort_by("key_id")
            assert rows["key_id"].to_pylist() == state.keys.tolist()
            vectors = np.array(rows["embedding"].to_pylist(), np.float32).reshape(len(state), -1)
            assert np.array_equal(vectors.view(np.int32), state.vectors.view(np.int32).reshape(vectors.shape))


@pytest.mark.parametrize("grow", [_restarted, _compacted, _vacuumed, _vacuumed_and_restarted])
def test_queries_that_find_the_files_themselves_find_bases_too(
    tmp_path: Path, grow: Callable[[LogWriter], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    grow(writer)
    monkeypatch.chdir(tmp_path)
    states = DeltaLog(writer.directory).replay()
    with duckdb.connect() as connection:
        rows = connection.sql(GENERAL).to_arrow_table().to_pylist()
        fallbacks = connection.sql(FALLBACKS).to_arrow_table().to_pylist()
    for fqn, state in states.items():
        found = {row["key_id"]: row["embedding"] for row in rows if row["table_fqn"] == fqn}
        assert sorted(found) == state.keys.tolist()
        for key, vector in zip(state.keys.tolist(), state.vectors, strict=True):
            assert np.array_equal(np.array(found[key], np.float32), vector)
        shards = {
            row["shard"]: row["embedding"]
            for row in fallbacks
            if row["table_fqn"] == fqn and row["key_id"] is None
        }
        assert len(shards) == len(state.fallback)
        for shard, vector in enumerate(state.fallback):
            assert np.array_equal(np.array(shards[shard], np.float32), vector)
    assert len(fallbacks) == sum(len(s.fallback) + len(s.exceptions) for s in states.values())


def test_files_are_those_of_the_newest_base_and_the_dumps_that_count_since(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    _compacted(writer)
    log = DeltaLog(writer.directory)
    files = log.files().to_pylist()
    assert [(row["content"], row["chain_order"], row["dump"]) for row in files] == [
        ("part", 0, "base_000000000028.g0002"),
        *[("part", 1, "step_000000000040.g0002")] * 2,
        *[("fallback", 1, "step_000000000040.g0002")] * 2,
    ]
    for row in files:
        assert Path(row["path"]).stat().st_size == row["nbytes"]
    assert {row["dump"] for row in log.files(25).to_pylist()} == {
        "step_000000000010.g0000",
        "step_000000000020.g0000",
        "step_000000000025.g0001",
    }


@pytest.mark.parametrize(
    "filesystem",
    [LocalFileSystem(), PyFileSystem(FSSpecHandler(FsspecLocal()))],
    ids=["pyarrow", "fsspec"],
)
def test_query_reads_a_log_that_is_named_by_a_local_file_system(
    tmp_path: Path, filesystem: FileSystem
) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    _restarted(writer)
    named = DeltaLog(SubTreeFileSystem(str(writer.directory), filesystem))
    assert named.files().equals(DeltaLog(writer.directory).files())
    assert len(latest(named)) > 0


class FsspecS3(MemoryFileSystem):
    protocol = ("s3", "s3a")


def test_file_system_of_fsspec_is_called_by_its_first_protocol() -> None:
    place = open_place(SubTreeFileSystem("bucket/deltas", PyFileSystem(FSSpecHandler(FsspecS3()))))
    assert str(place) == "s3://bucket/deltas"
    assert place.locate("step", "part") == "s3://bucket/deltas/step/part"
