"""Where files cannot be renamed a fenced run may still commit, too late: nobody is to be misled by that."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyarrow.fs import FileSystem

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


def _take_turns(seeds: int, turns: Sequence[tuple[int, int]]) -> list[SteppedRun]:
    """Lets runs do so many things each, turn by turn, and then each the rest, while a sink follows."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        first = Trainer(7)
        dumper = first.attach(_place(root))
        first.train(1)
        dumper.dump(1)
        dumper.flush()
        dumper.__exit__(KeyboardInterrupt, None, None)
        runs = [SteppedRun(root, seed, [1, 2]) for seed in range(seeds)]
        log, sinks = DeltaLog(_place(root)), [Table(), Table("each")]
        committed: frozenset[str] = frozenset()
        for number, count in [*turns, *((number, ALL) for number in range(seeds))]:
            for _ in range(count):
                if runs[number].outcome is not None:
                    break
                runs[number].go()
                if (now := log.committed(committed)) != committed:
                    committed = now
                    log.dumps()
                    for sink in sinks:
                        publish(log, sink)
                        _compare(log, sink)
        chain, strays = log.chain_and_strays()
        told = {
            DumpId(run.outcome[0], step)
            for run in runs
            for step, was_committed in run.outcome[1].items()
            if was_committed
        }
        assert told <= {dump.dump for dump in chain}, "what was said to be committed counts"
        newest = max(runs, key=lambda run: run.outcome[0])
        _, dumps, answers = newest.outcome
        assert all(dumps.values()), "nobody came after the newest"
        state = log.replay()[FQN]
        assert np.array_equal(state.lookup(IDS), np.array(answers, np.float32))
        SEEN["strays"] += len(strays)
        return runs


SEEN = {"strays": 0}


def _compare(log: DeltaLog, sink: Table) -> None:
    state = log.replay()[FQN]
    assert sorted(sink.rows) == state.keys.tolist()
    for key, vector in zip(state.keys.tolist(), state.vectors.tolist(), strict=True):
        assert sink.rows[key] == vector


def test_run_may_be_overtaken_before_anything_it_does_to_files() -> None:
    seen, places = [], []
    SEEN["strays"] = 0
    for count in range(1, 100):
        runs = _take_turns(2, [(0, count), (1, ALL)])
        generation, dumps, _ = runs[0].outcome
        seen.append((generation, *dumps.values()))
        places.append(runs[0].where)
        if seen[-1] == (1, True, True):
            break
    assert list(dict.fromkeys(seen))[0][0] == 2 and seen[-1] == (1, True, True)
    assert SEEN["strays"] > 0, "one must have committed late"
    assert len(seen) > 20


@settings(max_examples=25, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(turns=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 30)), min_size=2, max_size=12))
def test_three_runs_never_mislead_a_reader_in_whatever_order_they_touch_files(
    turns: list[tuple[int, int]],
) -> None:
    _take_turns(3, turns)
