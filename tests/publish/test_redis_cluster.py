"""A Redis cluster: rows on all nodes, no command over two slots, and the same answers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.publish.fidelity import check, follow_schedule
from tests.support.logs import TABLES, Event, LogWriter, events
from tests.support.redis_servers import RedisCluster, needs_redis
from torchrec_ext.publish import EmbeddingClient, PublishError, open_sink, publish

pytestmark = needs_redis
pytest.importorskip("redis", reason="the extra redis is not installed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


def test_client_answers_what_the_model_answers_after_each_dump(cluster: RedisCluster) -> None:
    number = 0

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events(), st.sampled_from(["delete", "tombstone", "fallback_vector"]))
    def every_schedule(schedule: list[Event], on_delete: str) -> None:
        nonlocal number
        number += 1
        with tempfile.TemporaryDirectory() as directory:
            url = f"{cluster.url}?prefix=p{number}"
            follow_schedule(schedule, Path(directory) / "deltas", url, on_delete)

    every_schedule()


def test_rows_are_on_all_nodes_and_restart_finds_them_there(cluster: RedisCluster, tmp_path: Path) -> None:
    url = f"{cluster.url}?prefix=spread"
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": list(range(40)), "mc.t1": [1, 5], "ebc.rows": [0, 1, 2]})
    publish(writer.directory, url)
    assert all(len(set(node.scan_iter("spread:*"))) > 5 for node in cluster.nodes)
    other = LogWriter(tmp_path / "other", TABLES)
    other.dump(10, {"mc.t0": [7], "ebc.rows": [3]})
    publish(other.directory, url, restart=True)
    assert sum(len(set(node.scan_iter("spread:*"))) for node in cluster.nodes) == 2
    with EmbeddingClient(url) as client:
        check(client, other)
        before = [node.info("stats")["total_commands_processed"] for node in cluster.nodes]
        assert np.array_equal(client.lookup("mc.t0", [7] * 5), other.answer("mc.t0", [7] * 5))
        after = [node.info("stats")["total_commands_processed"] for node in cluster.nodes]
        assert sum(after) - sum(before) == 6 + 2, "a GET for each, one for the version, and the INFOs"


def test_of_two_publishers_the_later_one_writes_and_the_other_is_told(
    cluster: RedisCluster, tmp_path: Path
) -> None:
    url = f"{cluster.url}?prefix=two"
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1]})
    with open_sink(url) as first, open_sink(url) as second:
        publish(writer.directory, first)
        writer.dump(20, {"mc.t0": [4]})
        publish(writer.directory, second)
        writer.dump(30, {"mc.t0": [5]}, {"mc.t0": [4]})
        with pytest.raises(PublishError, match="another publisher has taken over"):
            publish(writer.directory, first)
        publish(writer.directory, second)
    with EmbeddingClient(url) as client:
        check(client, writer)
