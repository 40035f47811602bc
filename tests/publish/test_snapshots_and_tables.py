"""Parquet snapshots and Delta Lake tables: whole at any moment, and what others can read of them."""

from __future__ import annotations

import json
import random
import tempfile
from functools import partial
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.publish.deaths import at_line, publish_one_by_one
from tests.publish.fidelity import (
    check,
    check_that_nothing_was_published,
    check_that_restart_replaces_another_log,
    follow_schedule,
)
from tests.support.filesystems import Striker
from tests.support.logs import TABLES, Event, LogWriter, events, zch
from torchrec_ext.publish import EmbeddingClient, PublishError, open_sink, publish


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1, 2, 3], "mc.t1": [1, 5], "ebc.rows": [0, 1, 2]})
    writer.dump(20, {"mc.t0": [3, 4], "ebc.rows": [1]}, {"mc.t0": [1]})
    writer.dump(30, {"mc.t0": [1]}, {"mc.t0": [2, 4]})
    return writer


@pytest.fixture(params=["parquet", "deltalake"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "deltalake":
        pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    return f"{request.param}://{tmp_path}/published"


@pytest.mark.parametrize(("scheme", "examples"), [("parquet", 15), ("deltalake", 6)])
def test_client_answers_what_the_model_answers_after_each_dump(scheme: str, examples: int) -> None:
    if scheme == "deltalake":
        pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    policies = ["delete"] if scheme == "parquet" else ["delete", "tombstone", "fallback_vector"]

    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events(), st.sampled_from(policies))
    def every_schedule(schedule: list[Event], on_delete: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            url = f"{scheme}://{directory}/published"
            follow_schedule(schedule, Path(directory) / "deltas", url, on_delete)

    every_schedule()


@pytest.mark.parametrize("fqn", ["mc.a/b", "../../above", "..", ".", "mc.50%", "mc.a b#c?d", "mc.ü"])
def test_name_of_a_table_leads_nowhere_else(url: str, tmp_path: Path, fqn: str) -> None:
    before = sorted(tmp_path.parent.iterdir())
    writer = LogWriter(tmp_path / "deltas", {fqn: zch(4, 1)})
    for step in (10, 20):
        writer.dump(step, {fqn: [1, step]})
        publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        assert client.lookup(fqn, [1, 10, 20]).tolist() == writer.answer(fqn, [1, 10, 20]).tolist()
    assert sorted(tmp_path.parent.iterdir()) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"deltas", Path(url.partition("://")[2]).name}


class Interrupted(BaseException):
    pass


def interrupt() -> None:
    raise Interrupted


def test_interrupted_anywhere_it_is_completed_by_the_next(url: str, writer: LogWriter) -> None:
    open_sink(url)  # imports what it needs: those lines do not count
    lines = at_line(-1, lambda: None, partial(publish_one_by_one, writer.directory, f"{url}-whole"))
    for line in random.Random(0).sample(range(1, lines), 8):
        died = f"{url}-died{line}"
        with pytest.raises(Interrupted):
            at_line(line, interrupt, partial(publish_one_by_one, writer.directory, died))
        publish_one_by_one(writer.directory, died)
        with EmbeddingClient(died) as client:
            check(client, writer)


def test_what_a_void_dump_half_wrote_is_undone(url: str, writer: LogWriter) -> None:
    for where in (url, f"{url}-whole"):
        publish(writer.directory, where)
    writer.dump(40, {"mc.t0": [7, 8], "mc.t1": [9]}, {"mc.t0": [3]})
    lines = at_line(-1, lambda: None, partial(publish, writer.directory, f"{url}-whole"))
    with pytest.raises(Interrupted):
        at_line(3 * lines // 4, interrupt, partial(publish, writer.directory, url))
    writer.resume(30)
    writer.dump(35)
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        check(client, writer)


def test_what_an_interrupted_restart_from_another_log_wrote_is_undone(
    url: str, writer: LogWriter, tmp_path: Path
) -> None:
    other = LogWriter(tmp_path / "other", TABLES, seed=1)
    other.dump(10, {"mc.t0": [20, 21], "mc.t1": [22], "ebc.rows": [5]})
    for where in (url, f"{url}-whole"):
        publish(writer.directory, where)
    lines = at_line(-1, lambda: None, partial(publish, other.directory, f"{url}-whole", restart=True))
    undone = 0
    for line in range(lines // 10, lines, lines // 10):
        before = EmbeddingClient(url).position
        with pytest.raises(Interrupted):
            at_line(line, interrupt, partial(publish, other.directory, url, restart=True))
        if EmbeddingClient(url).position != before:
            break
        undone += 1
        writer.dump(30 + undone, {"mc.t0": [7]})
        publish(writer.directory, url)
        with EmbeddingClient(url) as client:
            check(client, writer)
    assert undone > 2


def test_restart_replaces_another_log(url: str, writer: LogWriter, tmp_path: Path) -> None:
    check_that_restart_replaces_another_log(url, writer, tmp_path / "other", 16)


def test_tables_that_later_dumps_do_not_cover_are_gone_until_one_does(url: str, writer: LogWriter) -> None:
    publish(writer.directory, url)
    away = writer.tables.pop("mc.t1")
    writer.dump(40, {"mc.t0": [5]})
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        check(client, writer)
        with pytest.raises(KeyError, match=r"holds no table mc\.t1"):
            client.lookup("mc.t1", [1])
        writer.tables["mc.t1"] = away
        writer.dump(50, {"mc.t1": [40]})
        publish(writer.directory, url)
        client.refresh()
        check(client, writer)


def test_empty_places_say_that_nothing_was_published(url: str) -> None:
    check_that_nothing_was_published(url)


def test_duckdb_reads_a_snapshot(writer: LogWriter, tmp_path: Path) -> None:
    publish(writer.directory, f"parquet://{tmp_path}/snap")
    found = duckdb.sql(f"select key_id, embedding from '{tmp_path}/snap/current/mc.t0.parquet' order by 1")
    rows = writer.tables["mc.t0"].rows
    assert found.fetchall() == [(key, rows[key].tolist()) for key in sorted(rows)]


def test_the_snapshot_before_stays_and_older_ones_go(writer: LogWriter, tmp_path: Path) -> None:
    url = f"parquet://{tmp_path}/snap"
    names = []
    for step in (40, 50, 60):
        writer.dump(step, {"mc.t0": [step % 40]})
        publish(writer.directory, url)
        names.append((tmp_path / "snap" / "current").resolve().name)
    publish(writer.directory, url, restart=True)  # the same dump once more
    names.append((tmp_path / "snap" / "current").resolve().name)
    assert len(set(names)) == 4
    assert {path.name for path in (tmp_path / "snap").iterdir()} == {"current", *names[-2:]}
    with EmbeddingClient(url) as client:
        check(client, writer)


@pytest.mark.parametrize("number", range(6))
def test_a_snapshot_that_goes_while_it_is_read_is_the_next_one(
    writer: LogWriter, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"parquet://{tmp_path}/snap"
    publish(writer.directory, url)

    def strike() -> None:
        for step in (40, 50):
            writer.dump(step, {"mc.t0": [step % 40]})
            publish(writer.directory, url)

    striker, read_table = Striker(strike, [number]), pq.read_table

    def read(path: Path) -> pa.Table:
        striker()
        return read_table(path)

    monkeypatch.setattr(pq, "read_table", read)
    with EmbeddingClient(url) as client:
        assert client.tables
        assert striker.struck == 1
        client.refresh()
        check(client, writer)


@pytest.mark.parametrize("name", ["mc.t0.parquet", "mc.t0.fallback.parquet", "snapshot.json"])
@pytest.mark.parametrize("left", [None, 0, 20])
def test_a_damaged_snapshot_is_an_error_that_names_it(
    writer: LogWriter, tmp_path: Path, name: str, left: int | None
) -> None:
    url = f"parquet://{tmp_path}/snap"
    publish(writer.directory, url)
    path = tmp_path / "snap" / "current" / name
    path.write_bytes(path.read_bytes()[:left])
    if left is None:
        path.unlink()
    said = r"cannot be read: .*Remove it, and publish again|nothing was published"
    with EmbeddingClient(url) as client, pytest.raises(PublishError, match=said):
        client.lookup("mc.t0", [1])
    path.unlink(missing_ok=True)
    publish(writer.directory, url, restart=True)
    with EmbeddingClient(url) as client:
        check(client, writer)


def test_snapshots_refuse_what_they_cannot_do(writer: LogWriter, tmp_path: Path) -> None:
    with pytest.raises(PublishError, match="no deleted keys: on_delete='delete'"):
        publish(writer.directory, f"parquet://{tmp_path}/snap", on_delete="tombstone")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "letters.txt").write_text("dear")
    with pytest.raises(PublishError, match=r"holds other files, such as letters\.txt"):
        publish(writer.directory, f"parquet://{tmp_path}/theirs")
    with pytest.raises(ValueError, match="names no path"):
        open_sink("parquet://")
    (tmp_path / "file").write_text("")
    with pytest.raises(PublishError, match=r"file/below.* cannot be"):
        publish(writer.directory, f"parquet://{tmp_path}/file/below")


def test_each_dump_is_a_version_that_names_it_and_can_be_travelled_to(
    writer: LogWriter, tmp_path: Path
) -> None:
    deltalake = pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    publish(writer.directory, f"deltalake://{tmp_path}/lake", on_delete="tombstone")
    for name in (*TABLES, "_published"):
        history = deltalake.DeltaTable(f"{tmp_path}/lake/{name}").history()
        told = [json.loads(one["torchrec_ext.dump"])["step"] for one in reversed(history)]
        assert told == [10, 20, 30], name
    first = deltalake.DeltaTable(f"{tmp_path}/lake/mc.t0", version=0).to_pyarrow_table()
    assert sorted(first["key_id"].to_pylist()) == [1, 2, 3]
    last = deltalake.DeltaTable(f"{tmp_path}/lake/mc.t0").to_pyarrow_table().sort_by("key_id").to_pylist()
    assert [(row["key_id"], row["deleted"]) for row in last] == [(1, False), (2, True), (3, False), (4, True)]
    assert last[1]["embedding"] is None
    rows = writer.tables["mc.t0"].rows
    assert np.array_equal(np.array(last[0]["embedding"], np.float32), rows[1])


def test_tables_may_be_optimized_and_vacuumed(writer: LogWriter, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    url = f"deltalake://{tmp_path}/lake"
    publish(writer.directory, url)
    for name in ("mc.t0", "_published"):
        table = deltalake.DeltaTable(f"{tmp_path}/lake/{name}")
        table.optimize.z_order(["key_id" if name == "mc.t0" else "table_fqn"])
        table.vacuum(0, enforce_retention_duration=False, dry_run=False)
        assert "OPTIMIZE" in {commit["operation"] for commit in table.history()}
    writer.dump(40, {"mc.t0": [9]}, {"mc.t0": [1]})
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        check(client, writer)


def test_tables_of_others_are_refused(writer: LogWriter, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    import pyarrow as pa

    for name in ("mc.t0", "_published"):
        root = tmp_path / f"lake-{name}"
        deltalake.write_deltalake(f"{root}/{name}", pa.table({"x": [1]}))
        with pytest.raises(PublishError, match="was not made by publish"):
            publish(writer.directory, f"deltalake://{root}")


def test_delta_lake_refuses_a_dimension_that_changed(writer: LogWriter, tmp_path: Path) -> None:
    pytest.importorskip("deltalake", reason="the extra deltalake is not installed")
    from torchrec_ext.delta import DeltaLog
    from torchrec_ext.publish import Change

    with open_sink(f"deltalake://{tmp_path}/lake") as sink:
        publish(writer.directory, sink)
        other = LogWriter(tmp_path / "other", {"mc.t0": zch(16, 2)})
        other.dump(10, {"mc.t0": [3]})
        log = DeltaLog(other.directory)
        with pytest.raises(PublishError, match=r"mc\.t0 has dimension 16 .* rows here have 4"):
            sink.apply(Change(log, log.dumps(), sink.position()))
