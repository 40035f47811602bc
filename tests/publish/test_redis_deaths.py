"""A publisher that is killed anywhere, and Redis killed under it: the next one ends in the same state."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.publish.deaths import at_line, kill_this_process, publish_one_by_one
from tests.publish.fidelity import check
from tests.support.logs import LogWriter, zch
from tests.support.redis_servers import RedisServer, needs_redis
from torchrec_ext.publish import EmbeddingClient, SinkUnavailableError, open_sink, publish

pytestmark = needs_redis
pytest.importorskip("redis", reason="the extra redis is not installed")

DEATHS = 30


def publish_and_die(directory: str, urls: list[str]) -> None:
    """Publishes to each URL in a fork of its own, which is killed before one of its lines; prints which."""
    publish_one_by_one(directory, f"{urls[0]}i")  # what it imports is then there in each fork
    # Counted here: in a process that logs other things, or nothing, there are others.
    lines = at_line(-1, lambda: None, partial(publish_one_by_one, directory, f"{urls[0]}n"))
    deaths = random.Random(0).sample(range(1, lines), len(urls))
    for url, line in zip(urls, deaths, strict=True):
        pid = os.fork()
        if pid == 0:
            at_line(line, kill_this_process, partial(publish_one_by_one, directory, url))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, url
    print(json.dumps(deaths))


def state(server: RedisServer, prefix: str) -> dict[bytes, Any]:
    """All that Redis holds under a prefix, without what is drawn at random."""
    redis = server.client()
    keys = [key for p in (f"{prefix}:*", f"{{{prefix}}}:*") for key in redis.scan_iter(p, 10_000)]
    found = dict(zip(keys, redis.mget(keys), strict=True))
    named: dict[bytes, Any] = {key.replace(prefix.encode(), b"P"): value for key, value in found.items()}
    assert named.pop(b"{P}:publisher")
    tables = json.loads(named.pop(b"{P}:tables"))
    assert named.pop(b"{P}:version").decode() == tables.pop("catalog")
    return {**named, b"tables": tables}


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> LogWriter:
    """Dumps of several transactions, deletes, and a restart of the trainer."""
    directory = tmp_path_factory.mktemp("log") / "deltas"
    writer = LogWriter(directory, {"mc.t0": zch(dim=256, num_shards=2, hash_size=5000), "mc.t1": zch(8, 1)})
    writer.dump(10, {"mc.t0": list(range(2500)), "mc.t1": [1, 2]})
    writer.dump(20, {"mc.t0": list(range(0, 2500, 2))}, {"mc.t0": list(range(1, 2500, 2)), "mc.t1": [1]})
    writer.dump(30, {"mc.t0": list(range(2500, 4000))})
    writer.resume(20)
    writer.dump(30, {"mc.t0": [1, 3], "mc.t1": [1]})
    return writer


def test_publisher_killed_anywhere_is_completed_by_the_next(server: RedisServer, writer: LogWriter) -> None:
    publish_one_by_one(writer.directory, f"{server.url}?prefix=whole")
    expected = state(server, "whole")
    positions = set()
    urls = [f"{server.url}?prefix=died{number}" for number in range(DEATHS)]
    # Of a process without torch, which forks in milliseconds.
    code = f"from {__name__} import publish_and_die; publish_and_die({str(writer.directory)!r}, {urls})"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    for number, (url, line) in enumerate(zip(urls, json.loads(done.stdout), strict=True)):
        with open_sink(url) as sink:
            positions.add(sink.position())
        publish_one_by_one(writer.directory, url)
        assert state(server, f"died{number}") == expected, f"killed before line {line}"
        with EmbeddingClient(url) as client:
            check(client, writer)
    assert len(positions) > 2, "it always died in the same dump"


def test_redis_killed_anywhere_under_the_publisher(tmp_path: Path, writer: LogWriter) -> None:
    for seed in range(6):
        with RedisServer(None, "--appendonly", "yes", "--appendfsync", "always") as server:
            lines = at_line(
                -1, lambda: None, lambda: publish_one_by_one(writer.directory, f"{server.url}?prefix=whole")
            )
            url = f"{server.url}?prefix=died"
            with pytest.raises(SinkUnavailableError, match="Redis does not answer"):
                at_line(
                    random.Random(seed).randrange(lines // 8, lines),
                    server.stop,
                    partial(publish_one_by_one, writer.directory, url, retry_seconds=0),
                )
            server.start()
            publish(writer.directory, url)
            with EmbeddingClient(url) as client:
                check(client, writer)
