"""Feast: a feature view for each embedding table, in whatever online store the repository configures."""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.errors import PublishError
from torchrec_ext.publish.served import UNFINISHED, Position, ServedTable
from torchrec_ext.publish.sink import Sink, missing_extra, path_of

try:
    import pandas as pd
    from feast import Entity, FeatureStore, FeatureView, Field, FileSource, ValueType
    from feast.errors import FeastObjectNotFoundException
    from feast.types import Array, Float32, Int64, String
except ModuleNotFoundError as error:
    raise missing_extra("feast", error) from error

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change

_KEY, _NAME = "key_id", "published_name"
_PUBLISHED = "torchrec_ext_published"
_ROWS_AT_ONCE = 10_000
_LIVE, _DELETED = 1, 0
_ROW_FIELDS = {"embedding": Array(Float32), "live": Int64, "written": Int64}
_PUBLISHED_FIELDS = {"document": String}


@dataclass(frozen=True)
class _Served:
    """What is published of a table.

    Attributes:
        version: the timestamp of its change.
        since: rows with an older timestamp are those of a log that this one replaced.
        covered: whether the last dump covers it.
        table: how to answer.
    """

    version: int
    since: int
    covered: bool
    table: ServedTable

    def to_json(self) -> str:
        vectors = base64.b64encode(self.table.vectors().astype("<f4").tobytes()).decode()
        plain = {"version": self.version, "since": self.since, "covered": self.covered}
        return json.dumps({**plain, "table": self.table.to_json(), "vectors": vectors})

    @classmethod
    def from_json(cls, text: str) -> _Served:
        plain = json.loads(text)
        block = np.frombuffer(base64.b64decode(plain["vectors"]), "<f4").astype(np.float32)
        table = ServedTable.from_json(plain["table"], block.reshape(-1, plain["table"]["dim"]))
        return cls(plain["version"], plain["since"], plain["covered"], table)


class FeastSink(Sink):
    """Feature views named after the tables (``mc.user_table`` is ``mc__user_table``), keyed by ``key_id``.

    A row has ``embedding``, ``live`` (0: the key is deleted) and ``written``, the timestamp of the change
    that wrote it. Feast has no delete, and some of its stores drop a write that is not later than what is
    there, in whole seconds: so deletes are rows too, and each change has a later timestamp than the one
    before, whatever the clock says. ``torchrec_ext_published`` holds what else it takes to answer, and the
    position.

    Args:
        url: ``feast://relative/path/to/repo`` or ``feast:///absolute/path/to/repo``.

    Raises:
        PublishError: Feast is not installed, or there is no repository.
    """

    def __init__(self, url: str) -> None:
        path = path_of(url)
        if not (Path(path) / "feature_store.yaml").is_file():
            raise PublishError(
                f"feast://{path}: there is no feature_store.yaml; make a repository: feast init"
            )
        self._name = f"feast://{path}"
        with self._speaking("open the repository"):
            self._store = FeatureStore(repo_path=path)
        self._cached: dict[str, _Served] = {}

    def __str__(self) -> str:
        return self._name

    def position(self) -> Position | None:
        """See ``Sink.position``."""
        text = self._documents("position").get("position")
        return None if text is None else Position(**json.loads(text))

    def apply(self, change: Change) -> None:
        """See ``Sink.apply``."""
        self._own_views(change)
        told = self._documents("clock", *change.tables, "tables")
        before = {fqn: _Served.from_json(told[fqn]) for fqn in change.tables if fqn in told}
        self.expect(change, {fqn: (one.table.dim, one.table.dtype) for fqn, one in before.items()})
        now = max(int(time.time()), int(told.get("clock", 0)) + 1)
        self._publish(now, {"clock": str(now)})  # taken, also if we are cut short
        afresh = change.replaces or change.base is None
        if change.replaces:
            self._publish(now, {"position": json.dumps(asdict(UNFINISHED))})
            now += 1  # the position is to be written once more
            self._publish(now, {"clock": str(now)})
        for fqn, keys, vectors in change.upserts():
            self._write(now, fqn, keys, vectors, _LIVE)
        known = set(json.loads(told.get("tables", "[]")))
        others = known - change.tables.keys()
        self._publish(
            now,
            {
                **(dict.fromkeys(others, "") if afresh else self._uncovered(now, others)),
                **{
                    fqn: _Served(
                        now, now if afresh or fqn not in before else before[fqn].since, True, table
                    ).to_json()
                    for fqn, table in change.tables.items()
                },
                "tables": json.dumps(sorted(change.tables if afresh else known | change.tables.keys())),
            },
        )
        for fqn, keys, substitutes in change.deletes():
            nothing = np.empty((len(keys), 0), np.float32)
            self._write(now, fqn, keys, nothing if substitutes is None else substitutes, _DELETED)
        self._publish(now, {"position": json.dumps(asdict(change.position))})

    def tables(self) -> Mapping[str, ServedTable]:
        """See ``Sink.tables``."""
        names = json.loads(self._documents("tables").get("tables", "[]"))
        served = {fqn: _Served.from_json(text) for fqn, text in self._documents(*names).items()}
        return {fqn: one.table for fqn, one in served.items() if one.covered}

    def read(
        self, table: str, keys: NDArray[np.int64]
    ) -> tuple[ServedTable, NDArray[np.bool_], NDArray[np.float32]]:
        """See ``Sink.read``."""
        served = self._cached.get(table) or self._served(table)
        while True:
            rows = self._read(table, keys)
            # Read after the rows: nothing is deleted before the document says what answers instead.
            after = self._served(table)
            if after.version == served.version:
                break
            served = after
        self._cached[table] = served
        live = np.array([value or 0 for value in rows["live"]], np.int64)
        written = np.array([value or 0 for value in rows["written"]], np.int64)
        owned = (live == _LIVE) & (written >= served.since)
        vectors = [rows["embedding"][at] for at in np.flatnonzero(owned)]
        return served.table, owned, np.array(vectors, np.float32).reshape(-1, served.table.dim)

    def _served(self, fqn: str) -> _Served:
        text = self._documents(fqn).get(fqn)
        served = _Served.from_json(text) if text is not None else None
        if served is None or not served.covered:
            if self.position() is None:
                raise PublishError(f"{self}: nothing was published here")
            raise KeyError(f"{self} holds no table {fqn}; it holds {sorted(self.tables())}")
        return served

    def _uncovered(self, now: int, names: set[str]) -> dict[str, str]:
        served = {fqn: _Served.from_json(text) for fqn, text in self._documents(*names).items()}
        return {fqn: _Served(now, one.since, False, one.table).to_json() for fqn, one in served.items()}

    def _documents(self, *names: str) -> dict[str, str]:
        """What is published under these names; those that are not there are left out."""
        if not names or not self._has_view(_PUBLISHED):
            return {}
        with self._speaking("read"):
            found = self._store.get_online_features(
                [f"{_PUBLISHED}:document"], [{_NAME: name} for name in names]
            ).to_dict()
        return {name: text for name, text in zip(names, found["document"], strict=True) if text}

    def _read(self, fqn: str, keys: NDArray[np.int64]) -> dict[str, list[Any]]:
        if not len(keys):
            return {name: [] for name in _ROW_FIELDS}
        view = _view_name(fqn)
        with self._speaking("read"):
            return self._store.get_online_features(
                [f"{view}:{name}" for name in _ROW_FIELDS], [{_KEY: key} for key in keys.tolist()]
            ).to_dict()

    def _write(
        self, now: int, fqn: str, keys: NDArray[np.int64], vectors: NDArray[np.float32], live: int
    ) -> None:
        for at in range(0, len(keys), _ROWS_AT_ONCE):
            piece = slice(at, at + _ROWS_AT_ONCE)
            rows = pd.DataFrame(
                {
                    _KEY: keys[piece],
                    "embedding": list(vectors[piece]),
                    "live": np.int64(live),
                    "written": np.int64(now),
                    "event_timestamp": datetime.fromtimestamp(now, timezone.utc),
                }
            )
            with self._speaking("write"):
                self._store.write_to_online_store(_view_name(fqn), df=rows)

    def _publish(self, now: int, documents: Mapping[str, str]) -> None:
        rows = pd.DataFrame(
            {
                _NAME: list(documents),
                "document": list(documents.values()),
                "event_timestamp": datetime.fromtimestamp(now, timezone.utc),
            }
        )
        with self._speaking("write"):
            self._store.write_to_online_store(_PUBLISHED, df=rows)

    def _has_view(self, name: str) -> bool:
        with self._speaking("read the registry"):
            try:
                self._store.get_feature_view(name)
            except FeastObjectNotFoundException:
                return False
        return True

    def _own_views(self, change: Change) -> None:
        """Makes the views that are missing, and checks those that are there."""
        wanted = {_PUBLISHED: (_NAME, _PUBLISHED_FIELDS)}
        wanted.update({_view_name(fqn): (_KEY, _ROW_FIELDS) for fqn in change.tables})
        missing = {}
        for name, (key, features) in wanted.items():
            try:
                with self._speaking("read the registry"):
                    view = self._store.get_feature_view(name)
            except PublishError as error:
                if not isinstance(error.__cause__, FeastObjectNotFoundException):
                    raise
                missing[name] = (key, features)
                continue
            found = {field.name: field.dtype for field in view.features}
            if found != features or view.join_keys != [key]:
                raise PublishError(
                    f"{self}: there is a feature view {name} that was not made by publish: it has {found} by "
                    f"{view.join_keys}, not {features} by {key}. Rename it, or use another project"
                )
        if missing:
            doing = (
                f"make the feature views {sorted(missing)}, which this repository lacks; let somebody "
                "publish once who has the right to"
            )
            with self._speaking(doing):
                self._store.apply(_definitions(missing))

    @contextlib.contextmanager
    def _speaking(self, doing: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the online store and the registry are made of
            raise PublishError(f"{self}: Feast cannot {doing} ({type(error).__name__}: {error})") from error


def _definitions(views: Mapping[str, tuple[str, Mapping[str, Any]]]) -> list[Any]:
    types = {_KEY: ValueType.INT64, _NAME: ValueType.STRING}
    entities = {key: Entity(name=key, join_keys=[key], value_type=kind) for key, kind in types.items()}
    source = FileSource(
        name="torchrec_ext_nowhere", path="nowhere.parquet", timestamp_field="event_timestamp"
    )
    keys = {_KEY: Field(name=_KEY, dtype=Int64), _NAME: Field(name=_NAME, dtype=String)}
    made: list[Any] = list(entities.values())
    for name, (key, features) in views.items():
        fields = [keys[key], *(Field(name=field, dtype=dtype) for field, dtype in features.items())]
        made.append(
            FeatureView(
                name=name,
                entities=[entities[key]],
                schema=fields,
                source=source,
                ttl=timedelta(0),
                online=True,
            )
        )
    return made


def _view_name(fqn: str) -> str:
    return fqn.replace(".", "__")
