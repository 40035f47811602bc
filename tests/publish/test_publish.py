"""What ``publish`` does whatever the sink: which dumps, in which order, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from tests.publish.fidelity import check
from tests.support.logs import TABLES, LogWriter
from torchrec_ext.cli import main
from torchrec_ext.delta import DeltaLog, DeltaLogError
from torchrec_ext.publish import (
    Change,
    EmbeddingClient,
    Position,
    PublishError,
    Sink,
    SinkUnavailableError,
    open_sink,
    publish,
)
from torchrec_ext.urls import without_credentials


class Keeper(Sink):
    """Remembers the changes it was given."""

    def __init__(self, url: str = "keep://") -> None:
        self.changes: list[Change] = []
        self.held: Position | None = None
        self.failures: list[Exception] = []

    def __str__(self) -> str:
        return "keep"

    def position(self) -> Position | None:
        return self.held

    def apply(self, change: Change) -> None:
        if self.failures:
            raise self.failures.pop()
        self.changes.append(change)
        self.held = change.position

    @property
    def steps(self) -> list[int]:
        return [change.position.step for change in self.changes]


class OneByOne(Keeper):
    takes = "each"


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1, 2, 3], "ebc.rows": [0, 1]})
    writer.dump(20, {"mc.t0": [3, 4], "ebc.rows": [1]}, {"mc.t0": [1]})
    writer.dump(30, {"mc.t0": [1]}, {"mc.t0": [2, 4]})
    return writer


def rows_of(change: Change) -> tuple[dict[int, list[float]], set[int]]:
    """A change's upserts and deletes of ``mc.t0``."""
    upserts = {
        key: vector.tolist()
        for fqn, keys, vectors in change.upserts()
        if fqn == "mc.t0"
        for key, vector in zip(keys.tolist(), vectors, strict=True)
    }
    deletes = {key for fqn, keys, _ in change.deletes() if fqn == "mc.t0" for key in keys.tolist()}
    return upserts, deletes


def test_a_backlog_comes_as_one_change_in_which_the_last_word_counts(writer: LogWriter) -> None:
    sink = Keeper()
    assert publish(writer.directory, sink) == sink.held
    assert sink.steps == [30]
    upserts, deletes = rows_of(sink.changes[0])
    held = {key: vector.tolist() for key, vector in writer.tables["mc.t0"].rows.items()}
    assert (upserts, deletes) == (held, {2, 4})
    assert sink.changes[0].keys()["mc.t0"].tolist() == sorted(held)


def test_a_sink_that_wants_each_dump_gets_each(writer: LogWriter) -> None:
    sink = OneByOne()
    publish(writer.directory, sink)
    assert sink.steps == [10, 20, 30]
    assert [change.base and change.base.step for change in sink.changes] == [None, 10, 20]
    assert set(rows_of(sink.changes[1])[0]) == {3, 4} and rows_of(sink.changes[1])[1] == {1}


def test_large_backlogs_come_in_parts(writer: LogWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_ext.publish.publisher._ROWS_AT_ONCE", 9)
    sink = Keeper()
    publish(writer.directory, sink)
    assert sink.steps == [20, 30]


def test_a_change_covers_the_tables_of_all_its_dumps(writer: LogWriter) -> None:
    away = writer.tables.pop("mc.t1")
    writer.dump(40, {"mc.t0": [5]})
    writer.dump(50, {"mc.t0": [6]})
    writer.tables["mc.t1"] = away
    writer.dump(60, {"mc.t1": [40]})
    for restart in (False, True):
        sink = Keeper()
        publish(writer.directory, sink, restart=restart)
        assert sink.steps == [30, 50, 60]
        assert [change.replaces for change in sink.changes] == [restart, False, False]
        assert [set(change.tables) ^ set(TABLES) for change in sink.changes] == [set(), {"mc.t1"}, set()]


@pytest.mark.parametrize("stands_at", [10, 20, 30])
def test_void_dumps_are_never_applied_and_a_sink_that_holds_one_goes_on_with_what_replaced_it(
    writer: LogWriter, stands_at: int
) -> None:
    sink = OneByOne()
    stop = threading.Event()
    publish(
        writer.directory,
        sink,
        stop=stop,
        on_published=lambda done: stop.set() if done.position.step == stands_at else None,
    )
    assert sink.steps[-1] == stands_at
    writer.resume(10)
    writer.dump(15, {"mc.t0": [7]})
    sink.changes.clear()
    publish(writer.directory, sink)
    assert [(c.position.generation, c.position.step) for c in sink.changes] == [(1, 15)]
    upserts, deletes = rows_of(sink.changes[0])
    assert set(upserts) == {1, 2, 3, 7} and deletes == {4}, "all that the void dumps said is said anew"

    writer.resume(10)
    writer.dump(12)
    sink.changes.clear()
    publish(writer.directory, sink)
    assert [(c.position.generation, c.position.step) for c in sink.changes] == [(2, 12)]


def test_what_another_log_published_is_refused_whatever_its_numbers(
    writer: LogWriter, tmp_path: Path
) -> None:
    other = LogWriter(tmp_path / "other", TABLES)
    other.dump(10, {"mc.t0": [1]})
    sink = Keeper()
    publish(other.directory, sink)
    with pytest.raises(PublishError, match=r"keep holds step 10 of generation 0, which is not in this log"):
        publish(writer.directory, sink)
    assert sink.steps == [10]
    publish(writer.directory, sink, restart=True)
    assert sink.changes[-1].replaces and sink.steps == [10, 30]


def test_a_log_that_ends_before_the_sink_is_refused(writer: LogWriter) -> None:
    sink = Keeper()
    publish(writer.directory, sink)
    (writer.directory / "step_000000000030.g0000" / "manifest.json").unlink()
    with pytest.raises(PublishError, match="step 30 of generation 0, which is not in this log"):
        publish(writer.directory, sink)


def test_damage_is_found_before_anything_is_applied(writer: LogWriter) -> None:
    part = next((writer.directory / "step_000000000030.g0000").glob("part_*"))
    part.write_bytes(part.read_bytes()[:-1])
    sink = Keeper()
    with pytest.raises(DeltaLogError, match="step_000000000030"):
        publish(writer.directory, sink)
    assert sink.changes == []


def test_a_sink_that_does_not_answer_is_asked_again_for_a_while(
    writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    sink = Keeper()
    sink.failures = [SinkUnavailableError("keep is away")] * 2
    publish(writer.directory, sink, retry_seconds=600)
    assert sink.steps == [30]
    assert caplog.text.count("keep is away; trying again in") == 2
    sink.held, sink.failures = None, [SinkUnavailableError("keep is away")] * 100
    with pytest.raises(SinkUnavailableError, match="keep is away"):
        publish(writer.directory, sink, retry_seconds=0.1)
    sink.failures = [PublishError("keep is full")]
    with pytest.raises(PublishError, match="keep is full"):
        publish(writer.directory, sink)


def test_nothing_to_publish(tmp_path: Path) -> None:
    (tmp_path / "deltas").mkdir()
    assert publish(tmp_path / "deltas", Keeper()) is None
    with pytest.raises(DeltaLogError, match="no such directory"):
        publish(tmp_path / "nowhere", Keeper())
    with pytest.raises(ValueError, match="on_delete is 'forget'; it takes one of delete, tombstone"):
        publish(tmp_path / "deltas", Keeper(), on_delete="forget")  # type: ignore[arg-type]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that adds a sink."""
    information = tmp_path / "site" / "keeper-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: keeper\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[torchrec_ext.sinks]\nkeep = {__name__}:Keeper\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield


@pytest.mark.usefixtures("installed")
def test_sinks_of_other_packages_are_found_by_their_scheme(writer: LogWriter) -> None:
    sink = open_sink("keep://anything")
    assert isinstance(sink, Keeper)
    publish(writer.directory, sink)
    assert sink.steps == [30]
    with (
        EmbeddingClient("keep://anything") as client,
        pytest.raises(PublishError, match="nothing can be looked up here"),
    ):
        client.lookup("mc.t0", [1])


@pytest.mark.usefixtures("installed")
def test_unknown_schemes_are_told_what_there_is(writer: LogWriter) -> None:
    for url in ("s3://bucket", "deltas", "kep://user:s3cret@host"):
        with pytest.raises(
            ValueError, match=r"is not a sink: its URL begins with one of deltalake://.* keep://"
        ):
            open_sink(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:p@ss/w?s3cret@host:1/0?x=y", "redis://..."),
        ("redis://user:p@ss/w#s3cret@host:1/0?x=y", "redis://host:1/0"),
        ("unix:///path?password=a@s3cret", "unix://..."),
        ("redis://:s3cret@host", "redis://host"),
        ("unix://user@/path?password=s3cret", "unix:///path"),
        ("redis://host", "redis://host"),
        ("deltas", "deltas"),
    ],
)
def test_credentials_are_never_shown(url: str, shown: str) -> None:
    assert without_credentials(url) == shown


def test_client_reads_a_directory_and_later_dumps_when_told(writer: LogWriter) -> None:
    for where in (writer.directory, str(writer.directory), f"file://{writer.directory}"):
        with EmbeddingClient(where) as client:
            check(client, writer)
            before = client.lookup("mc.t0", [9])
            assert client.position is not None and client.position.step >= 30
            assert set(client.tables) == set(TABLES)
    with EmbeddingClient(writer.directory) as client:
        client.lookup("mc.t0", [9])
        writer.dump(40, {"mc.t0": [9]})
        assert np.array_equal(client.lookup("mc.t0", [9]), before)
        client.refresh()
        check(client, writer)


def test_client_answers_like_replay_when_asked_for_what_has_no_answer(writer: LogWriter) -> None:
    with EmbeddingClient(writer.directory) as client:
        assert client.lookup("mc.t0", []).shape == (0, 4)
        assert client.lookup("mc.t0", 7).shape == (1, 4)
        with pytest.raises(KeyError, match="holds no table nowhere"):
            client.lookup("nowhere", [1])
        with pytest.raises(TypeError, match="ids must be signed 64-bit integers"):
            client.lookup("mc.t0", [1.5])
        with pytest.raises(ValueError, match=r"ebc\.rows has rows 0 to 39; got 40"):
            client.lookup("ebc.rows", [0, 40])
        with pytest.raises(ValueError, match=r"ebc\.rows: row 7 was not published"):
            client.lookup("ebc.rows", [7])


def test_client_takes_raw_ids_with_the_tables_hash_function(writer: LogWriter) -> None:
    def hashed(ids: Any, size: int) -> Any:
        assert size == 40
        return ids % 5

    with EmbeddingClient(writer.directory, hash_fns={"mc.t0": hashed}) as client:
        assert np.array_equal(client.lookup("mc.t0", [6, 13]), writer.answer("mc.t0", [1, 3]))
        assert client.lookup("mc.t0", []).shape == (0, 4)


def test_commands_publish_and_look_up(writer: LogWriter, tmp_path: Path) -> None:
    url = f"parquet://{tmp_path}/snapshots"
    runner = CliRunner()
    done = runner.invoke(main, ["publish", str(writer.directory), url, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["step"] == 30 and json.loads(done.stdout)["dumps"] == 3
    done = runner.invoke(main, ["publish", str(writer.directory), url])
    assert done.output == "it holds step 30 of generation 0\n"
    for where in (str(writer.directory), url):
        done = runner.invoke(main, ["lookup", where, "mc.t0", "3", "--json", "--", "-3"])
        assert done.exit_code == 0, done.output
        found = [json.loads(line) for line in done.output.splitlines()]
        assert [one["id"] for one in found] == [3, -3]
        assert np.array_equal([one["embedding"] for one in found], writer.answer("mc.t0", [3, -3]))
    assert runner.invoke(main, ["lookup", url, "mc.t0", "3"]).output.startswith("3\t[")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere", "parquet://x"], 2, "nowhere: no such directory"),
        (["{log}", "rdis://user:s3cret@host"], 2, "'rdis://host' is not a sink"),
        (["{log}"], 2, "Missing argument 'URL'"),
        (["{log}", "unix:///nowhere.sock", "--retry", "0"], 3, "Redis does not answer"),
    ],
)
def test_a_users_mistake_is_one_line_and_an_exit_code(
    writer: LogWriter, arguments: list[str], code: int, message: str
) -> None:
    if code == 3:
        pytest.importorskip("redis")
    arguments = [argument.format(log=writer.directory) for argument in arguments]
    done = CliRunner().invoke(main, ["publish", *arguments])
    assert done.exit_code == code
    assert message in done.output and "Traceback" not in done.output and "s3cret" not in done.output
    done = CliRunner().invoke(main, ["lookup", str(writer.directory), "nothing", "1"])
    assert done.exit_code == 2 and "holds no table nothing; it holds" in done.output


def test_following_command_ends_with_sigterm(writer: LogWriter, tmp_path: Path) -> None:
    arguments = [str(writer.directory), f"parquet://{tmp_path}/snapshots", "--follow", "--json"]
    command = [sys.executable, "-m", "torchrec_ext.cli", "publish", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["step"] == 30
    writer.dump(40)
    assert json.loads(process.stdout.readline())["step"] == 40
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 0


def test_publishing_and_reading_a_directory_import_no_torch(writer: LogWriter, tmp_path: Path) -> None:
    code = (
        "import sys; from torchrec_ext.publish import EmbeddingClient, publish; "
        f"publish({str(writer.directory)!r}, 'parquet://{tmp_path}/snapshots'); "
        f"EmbeddingClient({str(writer.directory)!r}).lookup('mc.t0', [1]); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_log_may_be_given_as_one(writer: LogWriter) -> None:
    sink = Keeper()
    publish(DeltaLog(writer.directory), sink)
    assert sink.steps == [30]
