"""Where files cannot be renamed a fenced run may still commit, too late: nobody is to be misled by that."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSystem

from tests.delta.test_compact import NOW, check
from tests.docs.pages import blocks_of
from tests.publish.test_publish import Keeper
from tests.support.filesystems import SteppedRun, watched
from tests.support.logs import TABLES, LogWriter
from tests.support.trainers import FQN, IDS, Trainer
from torchrec_ext.delta import DeltaLog, DumpId, Manifest, compact, vacuum, verify_log
from torchrec_ext.delta.generations import FOLDER, generation_name, owner_of
from torchrec_ext.delta.manifest import MANIFEST_NAME
from torchrec_ext.publish import Change, Position, PublishError, Sink, publish

ALL = 10**6


class CutShort(Exception):
    pass


class Table(Sink):
    """Rows in memory, changed by what ``publish`` says and nothing else.

    Attributes:
        is_cut_short: whether a change ends with its upserts.
    """

    def __init__(self, takes: str = "backlog", *, is_cut_short: bool = False) -> None:
        self.takes = takes  # type: ignore[assignment]
        self.is_cut_short = is_cut_short
        self.rows: dict[int, list[float]] = {}
        self.held: Position | None = None

    def __str__(self) -> str:
        return "a table in memory"

    def position(self) -> Position | None:
        return self.held

    def apply(self, change: Change) -> None:
        self.expect(change, {})
        if change.replaces:
            self.rows.clear()
        for _, keys, vectors in change.upserts():
            self.rows.update(zip(keys.tolist(), vectors.tolist(), strict=True))
        if self.is_cut_short and change.base is not None:
            raise CutShort
        for _, keys, _ in change.deletes():
            for key in keys.tolist():
                self.rows.pop(key, None)
        self.held = change.position


def _place(root: Path) -> FileSystem:
    return watched(root, lambda operation, path: None)


class Scene:
    """A log with one dump, runs that open it, and sinks that follow it; all changes of some are cut short."""

    def __init__(self, root: Path, runs: int) -> None:
        first = Trainer(7)
        dumper = first.attach(_place(root))
        first.train(1)
        dumper.dump(1)
        dumper.flush()
        dumper.__exit__(KeyboardInterrupt, None, None)
        self.runs = [SteppedRun(root, seed, [1, 2]) for seed in range(runs)]
        self.log, self.sinks = DeltaLog(_place(root)), [Table(), Table("each")]
        self.torn = [Table(is_cut_short=True), Table("each", is_cut_short=True)]
        for sink in self.torn:
            with contextlib.suppress(CutShort):
                publish(self.log, sink)
        self._committed: frozenset[str] = frozenset()

    def go(self, number: int, count: int = ALL, until: str = "") -> None:
        """Lets a run do so many things, or until it stands before something; the sinks follow."""
        run = self.runs[number]
        for _ in range(count):
            if run.outcome is not None or (until and run.where == until):
                break
            run.go()
            if (now := self.log.committed(self._committed)) != self._committed:
                self._committed = now
                for sink in self.sinks:
                    publish(self.log, sink)
                    _compare(self.log, sink)
                for sink in self.torn:
                    with contextlib.suppress(CutShort):
                        publish(self.log, sink)

    def end(self) -> list[DumpId]:
        """Lets them do the rest and looks what came of it; the dumps that came too late."""
        for number in range(len(self.runs)):
            self.go(number)
        chain, _, strays = self.log.listing()
        outcomes = [run.outcome for run in self.runs if run.outcome is not None]
        told = {
            DumpId(generation, step)
            for generation, dumps, _ in outcomes
            for step, was_committed in dumps.items()
            if was_committed
        }
        assert told <= {dump.dump for dump in chain}, "what was said to be committed counts"
        _, dumps, answers = max(outcomes, key=lambda outcome: outcome[0])
        assert all(dumps.values()), "nobody came after the newest"
        assert np.array_equal(self.log.replay()[FQN].lookup(IDS), np.array(answers, np.float32))
        for sink in self.torn:
            sink.is_cut_short = False
            publish(self.log, sink)
            _compare(self.log, sink)
        return [dump.dump for dump in strays]


def _compare(log: DeltaLog, sink: Table) -> None:
    state = log.replay()[FQN]
    assert sorted(sink.rows) == state.keys.tolist()
    for key, vector in zip(state.keys.tolist(), state.vectors.tolist(), strict=True):
        assert sink.rows[key] == vector


def test_run_may_be_overtaken_before_anything_it_does_to_files(tmp_path: Path) -> None:
    seen = []
    for count in range(1, 100):
        scene = Scene(tmp_path / str(count), 2)
        scene.go(0, count)
        scene.go(1)
        late = scene.end()
        outcome = scene.runs[0].outcome
        assert outcome is not None
        seen.append((outcome[0], *outcome[1].values(), bool(late)))
        if seen[-1][:3] == (1, True, True):
            break
    # Which of the two is the newer is decided while they open the log. It may sleep in a dump, too.
    assert [*dict.fromkeys(seen)] == [
        (2, True, True, False),
        (1, False, False, False),
        (1, False, False, True),
        (1, True, False, False),
        (1, True, False, True),
        (1, True, True, False),
    ]


BEFORE_COMMIT, BEFORE_DUMP = "move manifest.json", "create_dir step_000000000001.g0002"


def test_who_has_taken_in_a_dump_that_a_newer_run_passes_by_is_put_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path / "deltas", 2)
    scene.go(0, until=BEFORE_COMMIT)
    scene.go(1, until=BEFORE_DUMP)  # it has looked where the log ends
    scene.go(0)
    assert [sink.held and sink.held.generation for sink in scene.sinks] == [1, 1]
    assert [(dump.generation, dump.step) for dump in scene.log.dumps()] == [(0, 1), (1, 1)]
    assert scene.end() == [DumpId(1, 1)]
    assert [(dump.generation, dump.step) for dump in scene.log.dumps()] == [(0, 1), (2, 1), (2, 2)]
    # The query for other readers passes it by as well; the one that knows nothing of the chain does not.
    monkeypatch.chdir(tmp_path)
    (query,) = blocks_of("docs/places.md", "sql")
    with duckdb.connect() as connection:
        found = connection.sql(query.text).to_arrow_table().to_pydict()
    assert sorted(found["key_id"]) == scene.log.keys()[FQN].tolist()
    assert scene.log.replay()[FQN].lookup(found["key_id"]).tolist() == found["embedding"]


def test_dump_that_was_passed_by_may_count_again_if_the_newest_run_goes_on_from_it(tmp_path: Path) -> None:
    scene = Scene(tmp_path, 3)
    scene.go(0, until=BEFORE_COMMIT)
    scene.go(1, until=BEFORE_DUMP)
    scene.go(0)  # commits late, and is seen by run 2, not by run 1
    scene.go(1, until=BEFORE_COMMIT)
    scene.go(2, until="create_dir step_000000000001.g0003")
    scene.go(1)
    held = [(dump.generation, dump.step) for dump in scene.log.dumps()]
    assert held == [(0, 1), (2, 1)]
    assert scene.end() == [DumpId(2, 1)]
    assert [(d.generation, d.step) for d in scene.log.dumps()] == [(0, 1), (1, 1), (3, 1), (3, 2)]


@settings(max_examples=10, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=2, max_size=12))
def test_three_runs_never_mislead_a_reader_in_whatever_order_they_touch_files(
    turns: list[tuple[int, int]],
) -> None:
    with tempfile.TemporaryDirectory() as root:
        scene = Scene(Path(root), 3)
        for number, count in turns:
            scene.go(number, count)
        scene.end()


def _late(writer: LogWriter, dump: DumpId, like: DumpId, previous: DumpId | None, **fields: Any) -> None:
    """A fenced run's late commit: what another dump says, after a dump that it saw when it opened the log."""
    shutil.copytree(writer.directory / like.directory, writer.directory / dump.directory)
    path = writer.directory / dump.directory / MANIFEST_NAME
    manifest = Manifest.from_json(path.read_bytes(), like.directory)
    fields = {"dump": dump, "previous": previous, "supersedes": (), **fields}
    path.write_bytes(dataclasses.replace(manifest, **fields).to_json())


def _opened(writer: LogWriter, generation: int) -> None:
    """A run opens the log, as ``marked.mark`` leaves it."""
    for folder in (FOLDER, f"{FOLDER}/{generation_name(generation)}"):
        writer.place.make_folder(folder)
    writer.place.put(f"{FOLDER}/{generation_name(generation)}", "run.json", owner_of("run"))


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(1, {"mc.t0": [1, 2, 3], "ebc.rows": [0]})
    writer.dump(2, {"mc.t0": [4]}, {"mc.t0": [2]}, storage_dtype="int8")
    return writer


@pytest.mark.parametrize("place", [Path, _place])
def test_log_stays_readable_when_what_a_late_dump_follows_is_compacted_and_removed(
    writer: LogWriter, place: Callable[[Path], Path | FileSystem]
) -> None:
    first, second = (dump.dump for dump in DeltaLog(writer.directory).dumps())
    _late(writer, DumpId(1, 2), first, first)
    holder = Keeper()
    assert publish(writer.directory, holder) is not None  # ends with the late one
    writer.begin_generation(2)
    writer.dump(3, {"mc.t0": [5]}, storage_dtype="float16")
    log = DeltaLog(place(writer.directory))
    assert [dump.dump for dump in log.listing().strays] == [DumpId(1, 2)]
    compact(log, 2)
    assert vacuum(log, **NOW).dumps == (first.directory, second.directory)
    assert [dump.dump for dump in log.listing().strays] == [DumpId(1, 2)]
    check(writer)
    assert verify_log(log).clean
    # What it held was not all said again: it is told, and not brought up to date by half.
    with pytest.raises(PublishError, match=r"compacted into base_000000000002\.g0000.*restart=True"):
        publish(log, holder)
    compact(log)
    vacuum(log, **NOW)
    assert not log.listing().strays
    check(writer)


def test_nothing_goes_that_a_run_may_go_on_from_which_has_not_dumped_yet(writer: LogWriter) -> None:
    first, second = (dump.dump for dump in DeltaLog(writer.directory).dumps())
    _opened(writer, 2)
    _late(writer, DumpId(1, 3), first, second, committed_unix=time.time())
    compact(writer.directory)
    done = vacuum(writer.directory, **NOW)
    assert (done.dumps, done.reason) == ((), "run 2 has opened the log, and has not dumped yet")
    writer.begin_generation(2)
    writer.dump(3, {"mc.t0": [5]})
    check(writer)
    compact(writer.directory)
    assert vacuum(writer.directory, **NOW).dumps
    check(writer)


def test_rows_stay_that_a_late_dump_made_void_while_a_run_may_still_go_on_from_them(
    writer: LogWriter,
) -> None:
    first, second = (dump.dump for dump in DeltaLog(writer.directory).dumps())
    _opened(writer, 2)
    # Of a run that went back to the first dump, and that the newest one overtook.
    _late(writer, DumpId(1, 1), second, second, committed_unix=time.time(), supersedes=(second,))
    assert [dump.dump for dump in DeltaLog(writer.directory).dumps()] == [first, DumpId(1, 1)]
    assert vacuum(writer.directory, **NOW).superseded == ()
    writer.begin_generation(2)
    writer.dump(3, {"mc.t0": [5]})
    check(writer)
    assert verify_log(writer.directory).clean


def test_base_of_a_dump_in_doubt_counts_for_the_run_that_says_its_keys_again(writer: LogWriter) -> None:
    writer.dump(3, {"mc.t0": [7, 4]}, {"mc.t0": [3]})  # nobody told the run that it is committed
    compact(writer.directory)
    vacuum(writer.directory, **NOW)
    writer.resume(2)
    writer.begin_generation(0)
    second, third = DumpId(0, 2), DumpId(0, 3)
    writer.dump(4, {"mc.t0": [8]}, previous=second)
    log = DeltaLog(writer.directory)
    assert [dump.directory for dump in log.dumps()] == [third.base_directory, DumpId(0, 4).directory]
    check(writer)
    assert verify_log(log).clean
    compact(log)
    vacuum(log, **NOW)
    check(writer)
