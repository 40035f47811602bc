"""What is told of a log, of any schedule of dumps and restarts, is what its replays say."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from tests.support.logs import TABLES, Event, LogWriter, events, play, zch
from torchrec_ext.delta import DeltaLog, EmbeddingState, Manifest
from torchrec_ext.delta.cut import DumpResult
from torchrec_ext.delta.difference import diff_log
from torchrec_ext.delta.figures import figures_of
from torchrec_ext.delta.state_file import write_state
from torchrec_ext.delta.tensorboard import write, write_figures
from torchrec_ext.delta.verification import verify_log

States = dict[str, EmbeddingState]


def played(directory: Path, schedule: list[Event]) -> DeltaLog:
    writer = LogWriter(directory, TABLES)
    steps: list[int] = []
    for number, event in enumerate(schedule, 1):
        play(writer, event, number, steps)
    return DeltaLog(directory)


@settings(max_examples=10, deadline=None)
@given(schedule=events())
def test_figures_and_differences_are_those_of_the_replays(schedule: list[Event]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        log = played(Path(scratch) / "deltas", schedule)
        assert verify_log(log).findings == ()
        dumps = log.dumps()
        states = [log.replay(dump.step) for dump in dumps if dump.step not in _dumped_twice(dumps)]
        figures = [dump for dump in figures_of(log).dumps if dump.dump.step not in _dumped_twice(dumps)]
        for told, state in zip(figures, states, strict=True):
            for fqn, table in told.tables.items():
                assert table.held == len(state[fqn])
        if len(states) > 1:
            _check_difference(log, figures[0].dump.step, figures[-1].dump.step, states[0], states[-1])
        _check_state_file(log, Path(scratch) / "state.parquet")


def _dumped_twice(dumps: list[Manifest]) -> set[int]:
    steps = [dump.step for dump in dumps]
    return {step for step in steps if steps.count(step) > 1}


def _check_difference(log: DeltaLog, before: int, after: int, old: States, new: States) -> None:
    for fqn, told in diff_log(log, before, after).tables.items():
        held, holds = set(old[fqn].keys.tolist()), set(new[fqn].keys.tolist())
        assert set(told.came.tolist()) == holds - held and set(told.went.tolist()) == held - holds
        both = sorted(held & holds)
        was, now = (state[fqn].vectors[np.searchsorted(state[fqn].keys, both)] for state in (old, new))
        moved = {
            k: np.linalg.norm(n.astype(float) - w)
            for k, w, n in zip(both, was, now, strict=True)
            if (n != w).any()
        }
        assert set(told.moved.tolist()) == set(moved)
        assert np.allclose(told.distances, [moved[key] for key in told.moved.tolist()])
        assert (np.diff(told.distances) <= 0).all(), "those that moved farthest come first"


def _check_state_file(log: DeltaLog, path: Path) -> None:
    written = write_state(log, path)
    rows = pq.read_table(path).to_pylist()
    for fqn, state in log.replay().items():
        found = {row["key_id"]: row["embedding"] for row in rows if row["table_fqn"] == fqn}
        assert sorted(found) == state.keys.tolist() and written.rows[fqn] == len(state)
        for key, vector in zip(state.keys.tolist(), state.vectors.tolist(), strict=True):
            assert found[key] == vector


def test_a_row_moves_from_the_vector_dumped_before(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 2)})
    vectors = []
    for step in (10, 20, 30):
        writer.dump(step, {"mc.t0": [1, 2]} if step != 20 else {"mc.t0": [1]})
        vectors.append({key: row.astype(float) for key, row in writer.tables["mc.t0"].rows.items()})
    writer.dump(40, {}, {"mc.t0": [1]})
    writer.dump(50, {"mc.t0": [1]})
    told = [dump.tables["mc.t0"] for dump in figures_of(DeltaLog(tmp_path / "deltas")).dumps]
    assert told[0].moves is None and told[3].norms is None
    distances = [np.linalg.norm(vectors[2][key] - vectors[1][key]) for key in (1, 2)]
    assert told[2].moves is not None and told[2].moves.max == pytest.approx(max(distances))
    norms = [np.linalg.norm(row) for row in vectors[0].values()]
    assert told[0].norms is not None and told[0].norms.p50 == pytest.approx(np.median(norms))
    assert told[4].moves is None, "an id that comes back did not move"
    assert [(t.admitted, t.updated, t.evicted, t.held) for t in told] == [
        (2, 0, 0, 2), (0, 1, 0, 2), (0, 2, 0, 2), (0, 0, 1, 1), (1, 0, 0, 2),
    ]  # fmt: skip


def test_of_a_large_table_a_sample_is_followed_that_tells_much_the_same(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 2, hash_size=4000)})
    ids = list(range(2000))
    for step in (10, 20):
        writer.dump(step, {"mc.t0": ids})
    log = DeltaLog(tmp_path / "deltas")
    every, sampled, none = (
        figures_of(log, sampled_keys=count).dumps[1].tables["mc.t0"].moves for count in (5000, 500, 0)
    )
    assert every is not None and sampled is not None and none is None
    assert sampled.p50 == pytest.approx(every.p50, rel=0.1) and sampled.max <= every.max


class Scalars:
    """Takes what ``torch.utils.tensorboard.SummaryWriter.add_scalar`` takes."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.values[tag, global_step] = scalar_value


def test_a_dumps_result_goes_to_tensorboard() -> None:
    writer = Scalars()
    write(None, writer)
    write(DumpResult(40, 0, upserts=3, deletes=1, vector_bytes=48, stall_seconds=0.002), writer)
    assert writer.values == {
        ("delta/upserts", 40): 3,
        ("delta/deletes", 40): 1,
        ("delta/vector_bytes", 40): 48,
        ("delta/stall_ms", 40): 2.0,
    }


def test_figures_of_a_log_go_to_tensorboard(tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 2)}, lag_seconds=0.25)
    log.dump(10, {"mc.t0": [1, 2]})
    log.dump(20, {"mc.t0": [2]}, {"mc.t0": [1]})
    writer = Scalars()
    write_figures(figures_of(DeltaLog(tmp_path / "deltas")).dumps, writer, prefix="log")
    values = writer.values
    assert values["log/admitted", 10] == 2 and values["log/evicted", 20] == 1
    assert values["log/lag_to_commit_ms", 20] == pytest.approx(250)
    assert values["log/occupancy/mc.t0", 20] == 1 / 128
    assert values["log/move_max/mc.t0", 20] > 0 and ("log/move_max/mc.t0", 10) not in values
