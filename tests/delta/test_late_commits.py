"""Where files cannot be renamed a fenced run may still commit, too late: nobody is to be misled by that."""

from __future__ import annotations

import tempfile
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSystem

from tests.docs.pages import blocks_of
from tests.support.filesystems import SteppedRun, watched
from tests.support.trainers import FQN, IDS, Trainer
from torchrec_ext.delta import DeltaLog, DumpId
from torchrec_ext.publish import Change, Position, Sink, publish

ALL = 10**6


class Table(Sink):
    """Rows in memory, changed by what ``publish`` says and nothing else."""

    def __init__(self, takes: str = "backlog") -> None:
        self.takes = takes  # type: ignore[assignment]
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
        for _, keys, _ in change.deletes():
            for key in keys.tolist():
                self.rows.pop(key, None)
        self.held = change.position


def _place(root: Path) -> FileSystem:
    return watched(root, lambda operation, path: None)


class Scene:
    """A log with one dump, runs that open it, and sinks that follow it."""

    def __init__(self, root: Path, runs: int) -> None:
        first = Trainer(7)
        dumper = first.attach(_place(root))
        first.train(1)
        dumper.dump(1)
        dumper.flush()
        dumper.__exit__(KeyboardInterrupt, None, None)
        self.runs = [SteppedRun(root, seed, [1, 2]) for seed in range(runs)]
        self.log, self.sinks = DeltaLog(_place(root)), [Table(), Table("each")]
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

    def end(self) -> list[DumpId]:
        """Lets them do the rest and looks what came of it; the dumps that came too late."""
        for number in range(len(self.runs)):
            self.go(number)
        chain, strays = self.log.chain_and_strays()
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
