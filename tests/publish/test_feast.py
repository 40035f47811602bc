"""Feast with its SQLite online store: deletes that are rows, timestamps that only grow, the same answers."""

from __future__ import annotations

import itertools
import random
import tempfile
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.publish.deaths import at_line, publish_one_by_one
from tests.publish.fidelity import check, follow_schedule
from tests.support.faults import full_disk
from tests.support.logs import TABLES, Event, LogWriter, events, zch
from torchrec_ext.publish import EmbeddingClient, PublishError, open_sink, publish

pytest.importorskip("feast", reason="the extra feast is not installed")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CONFIGURATION = """\
project: shop
registry: registry.db
provider: local
online_store:
  type: sqlite
  path: online.db
entity_key_serialization_version: 3
"""


def repository(directory: Path) -> str:
    directory.mkdir()
    (directory / "feature_store.yaml").write_text(CONFIGURATION)
    return f"feast://{directory}"


@pytest.fixture
def url(tmp_path: Path) -> str:
    return repository(tmp_path / "repo")


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1, 2, 3], "mc.t1": [1, 5], "ebc.rows": [0, 1, 2]})
    return writer


def test_client_answers_what_the_model_answers_after_each_dump() -> None:
    @settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
    @given(events(), st.sampled_from(["tombstone", "fallback_vector"]))
    def every_schedule(schedule: list[Event], on_delete: str) -> None:
        with tempfile.TemporaryDirectory() as directory:
            url = repository(Path(directory) / "repo")
            follow_schedule(schedule, Path(directory) / "deltas", url, on_delete)

    every_schedule()


def test_interrupted_anywhere_it_is_completed_by_the_next(tmp_path: Path, writer: LogWriter) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt() -> None:
        raise Interrupted

    writer.dump(20, {"mc.t0": [4]}, {"mc.t0": [1], "mc.t1": [5]})
    numbers = itertools.count()

    def publish_anew() -> None:
        publish_one_by_one(writer.directory, repository(tmp_path / f"repo{next(numbers)}"))

    lines = at_line(-1, lambda: None, publish_anew)
    for line in random.Random(0).sample(range(1, lines), 8):
        url = repository(tmp_path / f"died{line}")
        with pytest.raises(Interrupted):
            at_line(line, interrupt, partial(publish_one_by_one, writer.directory, url))
        publish_one_by_one(writer.directory, url)
        with EmbeddingClient(url) as client:
            check(client, writer)


def test_timestamps_only_grow(url: str, writer: LogWriter, tmp_path: Path) -> None:
    import feast

    stamps = []
    for step in (20, 30, 40):  # faster than one per second, which is as fine as some stores look
        writer.dump(step, {"mc.t0": [1]})
        publish(writer.directory, url)
        found = feast.FeatureStore(str(tmp_path / "repo")).get_online_features(
            ["mc__t0:written"], [{"key_id": 1}]
        )
        stamps.append(found.to_dict()["written"][0])
    assert stamps[0] < stamps[1] < stamps[2]


def test_restart_replaces_another_log(url: str, writer: LogWriter, tmp_path: Path) -> None:
    publish(writer.directory, url)
    other = LogWriter(tmp_path / "other", {"mc.t0": zch(4, 2), "new": zch(8, 1)}, seed=1)
    other.dump(10, {"mc.t0": [3, 7], "new": [1]})
    with pytest.raises(PublishError, match="which is not in this log"):
        publish(other.directory, url)
    publish(other.directory, url, restart=True)
    with EmbeddingClient(url) as client:
        check(client, other)
        assert set(client.tables) == {"mc.t0", "new"}
        with pytest.raises(KeyError, match=r"holds no table mc\.t1"):
            client.lookup("mc.t1", [1])


def test_empty_repository_says_that_nothing_was_published(url: str) -> None:
    with EmbeddingClient(url) as client:
        assert client.position is None
        with pytest.raises(PublishError, match="nothing was published here"):
            client.lookup("mc.t0", [1])


def test_no_repository_no_right_to_make_views_and_other_views_are_told(
    url: str, writer: LogWriter, tmp_path: Path
) -> None:
    import feast
    from feast.types import Float32

    with pytest.raises(PublishError, match=r"there is no feature_store.yaml; make a repository: feast init"):
        open_sink(f"feast://{tmp_path}/nowhere")
    feast.FeatureStore(str(tmp_path / "repo")).apply([])
    with (
        open_sink(url) as sink,
        full_disk(),
        pytest.raises(PublishError, match="publish once who has the right"),
    ):
        publish(writer.directory, sink)
    entity = feast.Entity(name="user", join_keys=["user"], value_type=feast.ValueType.INT64)
    view = feast.FeatureView(
        name="mc__t0",
        entities=[entity],
        schema=[feast.Field(name="age", dtype=Float32)],
        source=feast.FileSource(name="users", path="users.parquet", timestamp_field="event_timestamp"),
    )
    feast.FeatureStore(str(tmp_path / "repo")).apply([entity, view])
    with pytest.raises(PublishError, match="there is a feature view mc__t0 that was not made by publish"):
        publish(writer.directory, url)
