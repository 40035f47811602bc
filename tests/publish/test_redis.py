"""Redis: what a client finds is what the model answers, whatever happens on the way."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.publish.deaths import at_lines
from tests.publish.fidelity import (
    SEEN,
    check,
    check_that_nothing_was_published,
    check_that_the_later_publisher_writes,
    follow_schedule,
)
from tests.support.faults import log_of
from tests.support.logs import IDS, TABLES, Event, LogWriter, events, zch
from tests.support.redis_servers import RedisServer, needs_redis
from tests.support.seen import must_see
from torchrec_ext.delta import DeltaLog
from torchrec_ext.publish import EmbeddingClient, PublishError, SinkUnavailableError, open_sink, publish

pytestmark = needs_redis
pytest.importorskip("redis", reason="the extra redis is not installed")

PUBLISHER = "torchrec_ext.publish.publisher"
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def url(server: RedisServer) -> str:
    """A prefix of its own for each test."""
    return f"{server.url}?prefix=p{next(_prefixes)}"


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    """A log with one dump."""
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1, 2, 3], "mc.t1": [1, 5], "ebc.rows": [0, 1, 2]})
    return writer


def large_log(directory: Path, rows: int = 30_000) -> LogWriter:
    """A log whose dumps take several transactions, with as many deletes as upserts in the second."""
    writer = LogWriter(directory, {"mc.t0": zch(dim=8, num_shards=2, hash_size=4 * rows)})
    writer.dump(10, {"mc.t0": list(range(rows))})
    writer.dump(20, {"mc.t0": list(range(rows, 2 * rows))}, {"mc.t0": list(range(rows))})
    return writer


def test_client_answers_what_the_model_answers_after_each_dump(server: RedisServer) -> None:
    SEEN.clear()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events(), st.sampled_from(["delete", "tombstone", "fallback_vector"]))
    def every_schedule(schedule: list[Event], on_delete: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            url = f"{server.url}?prefix=p{next(_prefixes)}"
            follow_schedule(schedule, Path(directory) / "deltas", url, on_delete)

    every_schedule()
    must_see(SEEN, ["compared", "published", "restarts"], more_than=20)


def test_lookup_is_one_round_trip(server: RedisServer, url: str, writer: LogWriter) -> None:
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        client.lookup("mc.t0", IDS)
        redis = server.client()
        before = redis.info("stats")["total_commands_processed"]
        client.lookup("mc.t0", list(range(1000)))
        after = redis.info("stats")["total_commands_processed"]
        assert after - before == 2, "one MGET, and the INFO that counted"


def test_client_sees_a_dump_that_is_published_later(url: str, writer: LogWriter) -> None:
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        check(client, writer)
        writer.dump(20, {"mc.t0": [4]}, {"mc.t0": [1]})
        publish(writer.directory, url)
        check(client, writer)


def test_many_ids_are_looked_up_at_once(url: str, tmp_path: Path) -> None:
    writer = large_log(tmp_path / "deltas", 6000)
    publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        ids = list(range(12_500))
        assert np.array_equal(client.lookup("mc.t0", ids), writer.answer("mc.t0", ids))


def test_deleted_keys_leave_what_was_asked_for(server: RedisServer, url: str, writer: LogWriter) -> None:
    prefix = url.partition("=")[2]
    redis = server.client()
    found = {}
    for step, on_delete in ((20, "delete"), (30, "tombstone"), (40, "fallback_vector")):
        writer.dump(step, {"mc.t0": [step]})
        publish(writer.directory, url)
        writer.dump(step + 5, {}, {"mc.t0": [step]})
        publish(writer.directory, url, on_delete=on_delete)
        (number,) = (
            row["number"]
            for fqn, row in json.loads(redis.get(f"{{{prefix}}}:tables"))["rows"].items()
            if fqn == "mc.t0"
        )
        found[on_delete] = redis.get(f"{prefix}:{number}:{step:016x}")
    fallback = writer.answer("mc.t0", [40])[0].tobytes()
    assert found == {"delete": None, "tombstone": b"", "fallback_vector": fallback + b"\0"}


def test_readers_find_each_id_as_it_was_before_a_dump_or_as_it_is_after(url: str, tmp_path: Path) -> None:
    url += 50 * "x"  # keys so long that deletes alone take several transactions
    writer = large_log(tmp_path / "deltas")
    log = DeltaLog(writer.directory)
    ids = np.arange(0, 70_000, 70)
    before, after = (log.replay(upto=step)["mc.t0"].lookup(ids) for step in (10, 20))
    second = writer.directory / "step_000000000020.g0000"
    hidden = second.rename(tmp_path / second.name)
    publish(writer.directory, url)
    hidden.rename(second)
    wrong: set[int] = set()
    seen: Counter[str] = Counter()
    with EmbeddingClient(url) as kept, EmbeddingClient(url) as rare:
        rare.lookup("mc.t0", ids)

        def look() -> None:
            # One client sees every state, the other one comes back after long.
            for client in (kept, rare) if sum(seen.values()) % 20 == 0 else (kept,):
                answers = client.lookup("mc.t0", ids)
                old, new = ((answers == one).all(axis=1) for one in (before, after))
                wrong.update(ids[~(old | new)].tolist())
                seen["old" if old.all() else "new" if new.all() else "both"] += 1

        at_lines(lambda line: True, look, partial(publish, writer.directory, url))
    assert not wrong
    assert min(seen[kind] for kind in ("old", "both", "new")) > 10, seen


def test_readers_on_another_thread_find_the_same(url: str, tmp_path: Path) -> None:
    writer = large_log(tmp_path / "deltas")
    ids = np.arange(0, 70_000, 70)
    log = DeltaLog(writer.directory)
    before, after = (log.replay(upto=step)["mc.t0"].lookup(ids) for step in (10, 20))
    with open_sink(url) as sink:
        sink.takes = "each"
        began, done = threading.Event(), threading.Event()
        wrong: list[int] = []

        def read() -> None:
            with EmbeddingClient(url) as client:
                began.wait()
                while not done.is_set():
                    answers = client.lookup("mc.t0", ids)
                    old, new = ((answers == one).all(axis=1) for one in (before, after))
                    wrong.extend(ids[~(old | new)].tolist())

        reader = threading.Thread(target=read)
        reader.start()
        try:
            publish(writer.directory, sink, on_published=lambda published: began.set())
        finally:
            began.set()
            done.set()
            reader.join()
    assert not wrong


def test_publishing_twice_writes_nothing_the_second_time(
    server: RedisServer, url: str, writer: LogWriter
) -> None:
    publish(writer.directory, url)
    before = server.client().info("commandstats")["cmdstat_mset"]["calls"]
    told: list[object] = []
    position = publish(writer.directory, url, on_published=told.append)
    assert position is not None and position.step == 10
    assert told == []
    assert server.client().info("commandstats")["cmdstat_mset"]["calls"] == before


def test_another_log_is_refused_and_restart_replaces_what_was_there(
    server: RedisServer, url: str, writer: LogWriter, tmp_path: Path
) -> None:
    publish(writer.directory, url)
    other = LogWriter(tmp_path / "other", {"mc.t0": zch(4, 2), "new": zch(8, 1)}, seed=1)
    other.dump(10, {"mc.t0": [3, 7], "new": [1]})
    other.dump(20, {"mc.t0": [8]}, {"mc.t0": [3]})
    with pytest.raises(
        PublishError, match=r"step 10 of generation 0, which is not in this log.*restart=True"
    ):
        publish(other.directory, url)
    with EmbeddingClient(url) as client:
        check(client, writer)
        publish(other.directory, url, restart=True)
        check(client, other)
        assert set(client.tables) == {"mc.t0", "new"}
        with pytest.raises(KeyError, match=r"holds no table mc\.t1"):
            client.lookup("mc.t1", [1])
    prefix = url.partition("=")[2]
    assert len(set(server.client().scan_iter(f"{prefix}:*"))) == 3, "rows of the first log are left"


def test_two_logs_never_mix_when_a_publication_is_cut_short(
    server: RedisServer, url: str, writer: LogWriter, tmp_path: Path
) -> None:
    redis = server.client()
    prefix = url.partition("=")[2]
    other = large_log(tmp_path / "other", 40_000)

    def publish_a_part(**options: Any) -> None:
        redis.config_set("maxmemory", redis.info("memory")["used_memory"] + 4_500_000)
        try:
            with pytest.raises(PublishError, match="Redis is full"):
                publish(other.directory, url, **options)
        finally:
            redis.config_set("maxmemory", 0)
        assert len(set(redis.scan_iter(f"{prefix}:*", 10_000))) > 1000

    publish_a_part()
    publish(writer.directory, url)  # nothing is published yet: what is there makes way
    with EmbeddingClient(url) as client:
        check(client, writer)
    assert len(set(redis.scan_iter(f"{prefix}:*"))) == 8
    publish_a_part(restart=True)
    for log in (writer, other):
        with pytest.raises(PublishError, match="holds a publication from scratch that was cut short"):
            publish(log.directory, url)
    publish(other.directory, url, restart=True)
    with EmbeddingClient(url) as client:
        check(client, other)
    assert len(set(redis.scan_iter(f"{prefix}:*", 10_000))) == len(other.tables["mc.t0"].rows)


def test_a_dimension_that_changed_is_refused_and_restart_takes_it(
    url: str, writer: LogWriter, tmp_path: Path
) -> None:
    publish(writer.directory, url)
    other = LogWriter(tmp_path / "other", {"mc.t0": zch(16, 2)})
    other.dump(10, {"mc.t0": [3, 7]})
    first = open_sink(url)
    from torchrec_ext.publish.changes import Change

    change = Change(DeltaLog(other.directory), DeltaLog(other.directory).dumps(), first.position())
    with pytest.raises(PublishError, match=r"mc.t0 has dimension 16 .* rows here have 4"):
        first.apply(change)
    with EmbeddingClient(url) as client:
        check(client, writer)
        publish(other.directory, first, restart=True)
        check(client, other)
    first.close()


def test_other_data_under_the_prefix_is_refused_and_left_alone(
    server: RedisServer, url: str, writer: LogWriter
) -> None:
    prefix = url.partition("=")[2]
    redis = server.client()
    redis.set(f"{prefix}:users", "theirs")
    before = sorted(redis.keys())
    for restart in (False, True):
        with pytest.raises(PublishError, match=rf"holds other data.*{prefix}:users.*prefix=NAME"):
            publish(writer.directory, url, restart=restart)
    assert sorted(redis.keys()) == before
    redis.rename(f"{prefix}:users", f"{{{prefix}}}:tables")
    with pytest.raises(PublishError, match=r"is not of this package.*prefix=NAME"):
        publish(writer.directory, url)
    with EmbeddingClient(url) as client, pytest.raises(PublishError, match="is not of this package"):
        client.lookup("mc.t0", [1])


def test_client_of_an_empty_server_says_that_nothing_was_published(url: str) -> None:
    check_that_nothing_was_published(url)


def test_of_two_publishers_the_later_one_writes_and_the_other_is_told(url: str, writer: LogWriter) -> None:
    check_that_the_later_publisher_writes(url, writer)


def test_a_publisher_that_was_replaced_in_the_middle_writes_nothing_more(server: RedisServer) -> None:
    from torchrec_ext.publish.redis_wire import Names, connect

    names = Names(f"p{next(_prefixes)}")
    keys = np.arange(5000)
    values = np.zeros((5000, 400), np.uint8)
    old, new = connect(server.url, names), connect(server.url, names)
    old.take_over(b"old")
    with pytest.raises(PublishError, match="another publisher"), old.writing(b"old") as writer:
        writer.set_rows(0, keys[:1], values[:1])
        new.take_over(b"new")
        writer.set_rows(0, keys, values)
    with pytest.raises(PublishError, match="another publisher"), old.writing(b"old") as writer:
        writer.set_rows(0, keys, values)
    assert list(new.all_keys()) == [b"{%s}:publisher" % names.prefix.encode()]
    old.close()
    new.close()


def test_a_gap_is_refused_and_followers_wait_until_it_is_filled(
    url: str, writer: LogWriter, tmp_path: Path
) -> None:
    publish(writer.directory, url)
    writer.dump(20, {"mc.t0": [4]}, {"mc.t0": [1]})
    writer.dump(30, {"mc.t0": [1]}, {"mc.t0": [2]})
    missing = writer.directory / "step_000000000020.g0000"
    away = missing.rename(tmp_path / missing.name)
    with pytest.raises(RuntimeError, match="the chain has a gap"):
        publish(writer.directory, url)
    with EmbeddingClient(url) as client:
        assert client.position is not None and client.position.step == 10
        stop = threading.Event()

        def heard(message: str) -> None:
            if "the chain has a gap" in message:
                away.rename(missing)

        def published(done: object) -> None:
            if done.position.step == 30:  # type: ignore[attr-defined]
                stop.set()

        with log_of(PUBLISHER, heard):
            publish(writer.directory, url, follow=True, stop=stop, on_published=published)
        check(client, writer)


def test_following_publishes_dumps_as_they_are_committed(url: str, writer: LogWriter) -> None:
    stop = threading.Event()
    steps: list[int] = []

    def published(done: object) -> None:
        steps.append(done.position.step)  # type: ignore[attr-defined]
        if len(steps) == 4:
            stop.set()
        else:
            writer.dump(steps[-1] + 10, {"mc.t0": [steps[-1]]}, {"mc.t1": [1]})

    position = publish(
        writer.directory, url, follow=True, stop=stop, poll_seconds=0.01, on_published=published
    )
    assert steps == [10, 20, 30, 40]
    assert position is not None and position.step == 40
    with EmbeddingClient(url) as client:
        check(client, writer)


def test_redis_that_goes_away_is_waited_for(tmp_path: Path, writer: LogWriter) -> None:
    with RedisServer(None, "--appendonly", "yes", "--appendfsync", "always") as server:
        publish(writer.directory, server.url)
        writer.dump(20, {"mc.t0": [4]}, {"mc.t0": [1]})
        with open_sink(server.url) as sink, EmbeddingClient(server.url) as client:
            check_before = client.lookup("mc.t0", [4])
            server.stop()
            with pytest.raises(SinkUnavailableError, match="Redis does not answer"):
                publish(writer.directory, sink, retry_seconds=0.2)
            with pytest.raises(SinkUnavailableError, match="Redis does not answer"):
                client.lookup("mc.t0", [4])
            with log_of(PUBLISHER, lambda message: "trying again" in message and server.start()):
                publish(writer.directory, sink)
            assert not np.array_equal(client.lookup("mc.t0", [4]), check_before)
            check(client, writer)


def test_redis_that_lost_everything_gets_everything_again(writer: LogWriter) -> None:
    with RedisServer() as server, open_sink(server.url) as sink, EmbeddingClient(server.url) as client:
        publish(writer.directory, sink)
        check(client, writer)
        server.stop()
        server.start()
        publish(writer.directory, sink)
        check(client, writer)


@pytest.mark.parametrize("shown", ["wrong-s3cret", None])
def test_wrong_password_is_told_without_the_password(
    writer: LogWriter, caplog: pytest.LogCaptureFixture, shown: str | None
) -> None:
    with RedisServer(None, "--requirepass", "right-s3cret") as server:
        url = f"{server.url}?password={shown}" if shown else server.url
        for use in (lambda: publish(writer.directory, url), lambda: EmbeddingClient(url).lookup("t", [1])):
            with pytest.raises(PublishError, match="refuses the user or password") as caught:
                use()
            text = "".join(traceback.format_exception(caught.value)) + caplog.text
            assert "s3cret" not in text
            assert "TORCHREC_EXT_REDIS_PASSWORD" in text


def test_password_comes_from_the_url_or_the_environment(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    with RedisServer(None, "--requirepass", "right-s3cret") as server:
        publish(writer.directory, f"{server.url}?password=right-s3cret")
        monkeypatch.setenv("TORCHREC_EXT_REDIS_PASSWORD", "right-s3cret")
        with EmbeddingClient(server.url) as client:
            check(client, writer)
    assert "s3cret" not in caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_is_spoken_and_certificates_are_checked(writer: LogWriter) -> None:
    with RedisServer.with_tls() as server:
        publish(writer.directory, server.url)
        with EmbeddingClient(server.url) as client:
            check(client, writer)
        with pytest.raises(SinkUnavailableError, match="certificate verify failed"):
            publish(writer.directory, server.url.partition("?")[0], retry_seconds=0)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@host:port/0",
        "redis://user:s3/cret@host:6379/0",
        "redis://user:s3cret@[::1/0",
        "redis://user:s3cret@localhost:6379/0?prefix=a b",
        "rdis://user:s3cret@localhost",
        "unix:///nowhere?password=s3cret&prefix=",
    ],
)
def test_wrong_urls_are_told_without_the_password(url: str, writer: LogWriter) -> None:
    with pytest.raises((ValueError, PublishError)) as caught:
        publish(writer.directory, url, retry_seconds=0)
    assert "s3" not in "".join(traceback.format_exception(caught.value))


def test_user_without_rights_and_a_full_server_are_told(
    url: str, server: RedisServer, writer: LogWriter
) -> None:
    redis = server.client()
    redis.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@all", "-mset"])
    with pytest.raises(PublishError, match=r"lacks a right in Redis: .*mset"):
        publish(writer.directory, f"{url}&username=reader&password=pw")
    redis.config_set("maxmemory", 1)
    try:
        with pytest.raises(PublishError, match="Redis is full"):
            publish(writer.directory, url)
    finally:
        redis.config_set("maxmemory", 0)
    publish(writer.directory, url)


def test_a_policy_that_throws_rows_away_is_warned_of(
    url: str, server: RedisServer, writer: LogWriter, caplog: pytest.LogCaptureFixture
) -> None:
    server.client().config_set("maxmemory-policy", "allkeys-lru")
    try:
        publish(writer.directory, url)
    finally:
        server.client().config_set("maxmemory-policy", "noeviction")
    assert "throws rows away" in caplog.text


def test_client_imports_neither_torch_nor_pyarrow(url: str, writer: LogWriter) -> None:
    publish(writer.directory, url)
    code = (
        "import sys; from torchrec_ext.publish import EmbeddingClient; "
        f"EmbeddingClient({url!r}).lookup('mc.t0', [1, 2]); "
        "print([m for m in ('torch', 'pyarrow', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_missing_client_library_is_named(writer: LogWriter) -> None:
    code = (
        "import sys; sys.modules['redis'] = None\n"
        "from torchrec_ext.publish import open_sink, PublishError\n"
        "try: open_sink('redis://localhost')\n"
        "except PublishError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'torchrec-ext[redis]'" in done.stdout
