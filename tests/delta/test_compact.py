"""A base takes the place of the dumps before it: what is answered stays bit for bit the same."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.filesystems import watched
from tests.support.logs import TABLES, Event, LogWriter, events, play, zch
from tests.support.seen import must_see
from tests.support.workers import start_process
from torchrec_ext.delta import (
    Compacted,
    DeltaLog,
    DeltaLogError,
    DumpId,
    VacuumedError,
    compact,
    compaction,
    replay,
    vacuum,
    verify_log,
)
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.places import LocalPlace
from torchrec_ext.delta.scan import Scan

NOW = {"keep_seconds": 0.0, "grace_seconds": 0.0}
"""Makes ``vacuum`` remove all that it ever may."""

SEEN: Counter[str] = Counter()


def check(writer: LogWriter) -> None:
    """Compares every answer of the log's last state, bit for bit."""
    states = DeltaLog(writer.directory).replay()
    assert set(states) == set(writer.tables)
    for fqn in writer.tables:
        assert states[fqn].keys.tolist() == sorted(writer.tables[fqn].rows)
        if ids := writer.served(fqn):
            expected = writer.answer(fqn, ids).view(np.int32)
            assert np.array_equal(states[fqn].lookup(ids).view(np.int32), expected), fqn
            SEEN["compared"] += len(ids)


def same(one: DeltaLog, other: DeltaLog, upto: int | None = None) -> None:
    """Compares all that two logs say of a step, bit for bit."""
    states, expected = one.replay(upto), other.replay(upto)
    assert set(states) == set(expected)
    for fqn, state in expected.items():
        assert states[fqn].info == state.info
        assert np.array_equal(states[fqn].keys, state.keys)
        assert np.array_equal(states[fqn].vectors.view(np.int32), state.vectors.view(np.int32))
        assert np.array_equal(states[fqn].fallback.view(np.int32), state.fallback.view(np.int32))
        assert states[fqn].exceptions.keys() == state.exceptions.keys()
        for key, vector in state.exceptions.items():
            assert np.array_equal(states[fqn].exceptions[key].view(np.int32), vector.view(np.int32))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A directory in memory, where there is such a thing: an fsync per file takes most of the time else."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory)


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1, 2, 3], "mc.t1": [7], "ebc.rows": [0, 1]})
    writer.dump(20, {"mc.t0": [3, 4], "ebc.rows": [1]}, {"mc.t0": [1]}, world_size=3)
    writer.dump(30, {"mc.t0": [1]}, {"mc.t0": [2, 4]})
    return writer


@settings(max_examples=30, deadline=None)
@given(
    schedule=events(),
    seed=st.integers(0, 2**32),
    max_memory_bytes=st.sampled_from([300, 1000, 1 << 30]),
    decoded_bytes=st.sampled_from([1, 40, 1 << 19]),
)
def test_answers_stay_the_same_whenever_a_log_is_compacted_and_vacuumed(
    schedule: list[Event], seed: int, max_memory_bytes: int, decoded_bytes: int
) -> None:
    """``event.publish`` says after which dumps it is; dumps that a restart goes back to may be gone.

    However many vectors of a row group are decoded at once.
    """
    rng = random.Random(seed)
    with scratch() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "_READ_BYTES", decoded_bytes)
        writer = LogWriter(directory / "deltas", TABLES)
        log = DeltaLog(writer.directory)
        steps: list[int] = []
        for number, event in enumerate(schedule, 1):
            play(writer, event, number, steps)
            SEEN["void"] += len(log.dumps(superseded=True)) - len(log.dumps())
            if event.publish:
                first = log.dumps()[0]
                upto = rng.choice([None, *(step for step in steps if step >= first.step)])
                compact(log, upto, max_memory_bytes=max_memory_bytes)
                if rng.random() < 0.6:
                    removed = vacuum(log, **NOW, keep_dumps=rng.randint(1, 3))
                    SEEN["removed"] += len(removed.dumps)
                    SEEN["void removed"] += len(removed.superseded)
            check(writer)
        for name in ("step", "base"):
            SEEN[name] += log.dumps()[0].directory.startswith(name)


def test_schedules_showed_what_they_are_for() -> None:
    must_see(SEEN, ["compared"], more_than=5_000)
    must_see(SEEN, ["void", "removed", "void removed", "step", "base"])


@settings(max_examples=6, deadline=None)
@given(schedule=events())
def test_every_step_is_replayed_as_before_while_its_dumps_are_there(schedule: list[Event]) -> None:
    with scratch() as directory, scratch() as copy:
        writers = [LogWriter(path / "deltas", TABLES) for path in (directory, copy)]
        for writer in writers:
            steps: list[int] = []
            for number, event in enumerate(schedule, 1):
                play(writer, event, number, steps)
                if writer is writers[0] and event.publish:
                    compact(writer.directory)
        log, plain = (DeltaLog(writer.directory) for writer in writers)
        assert [dump.dump for dump in log.dumps()] == [dump.dump for dump in plain.dumps()]
        for step in steps:
            same(log, plain, step)


def test_base_is_a_directory_of_one_file_per_so_many_rows_and_has_the_id_of_its_last_dump(
    writer: LogWriter,
) -> None:
    done = compact(writer.directory, upto=25)
    (base,) = DeltaLog(writer.directory).bases()
    last = DeltaLog(writer.directory).dumps()[1]
    assert done.base == base and done.written and done.dumps == base.compacted == 2
    assert base.dump == DumpId(0, 20) and base.directory == "base_000000000020.g0000"
    assert (base.previous, base.created_unix, base.run_id) == (None, last.created_unix, last.run_id)
    path = writer.directory / base.directory
    assert sorted(file.name for file in path.iterdir()) == [
        "fallback_00000_of_00001.parquet",
        "manifest.json",
        "part_00000_of_00001.parquet",
    ]
    rows = pq.read_table(path / base.parts[0].name)
    assert rows.schema.equals(fmt.PART_SCHEMA)
    assert sorted(zip(rows["table_fqn"].to_pylist(), rows["key_id"].to_pylist(), strict=True)) == [
        *(("ebc.rows", key) for key in (0, 1)),
        *(("mc.t0", key) for key in (2, 3, 4)),
        ("mc.t1", 7),
    ]
    assert set(rows["op"].to_pylist()) == {"upsert"}
    # What a row says of itself stays: when it was written, and by whom.
    of_two = rows.filter(pc.equal(rows["key_id"], 2)).to_pylist()[0]
    assert (of_two["global_step"], of_two["rank"], of_two["world_size"]) == (10, 0, 2)
    assert (done.rows, done.rows_read, base.rows) == (6, 10, 6)
    assert done.nbytes == base.nbytes == sum(file.stat().st_size for file in path.glob("*.parquet"))


def test_what_has_a_base_is_not_compacted_again(writer: LogWriter) -> None:
    first = compact(writer.directory)
    again = compact(writer.directory)
    assert first.written and not again.written
    assert again.base == first.base and again.rows_read == 0


def test_base_is_made_of_the_base_before_it_and_the_dumps_since(writer: LogWriter) -> None:
    compact(writer.directory, upto=20)
    vacuum(writer.directory, **NOW)
    done = compact(writer.directory)
    assert done.dumps == 2 and done.base.compacted == 3 and done.rows_read == 6 + 3
    check(writer)
    vacuum(writer.directory, **NOW)
    check(writer)
    assert [entry.name for entry in writer.directory.iterdir()] == ["base_000000000030.g0000"]


def test_table_that_is_not_covered_for_a_while_keeps_its_rows(tmp_path: Path) -> None:
    """As when a run that dumps some tables only is followed by one that dumps all, and resumes."""
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 2), "mc.t1": zch(8, 2)})
    writer.dump(10, {"mc.t0": [1, 2], "mc.t1": [1, 2]})
    other = writer.tables.pop("mc.t1")
    writer.dump(20, {"mc.t0": [2, 3]})
    compact(writer.directory)
    assert DeltaLog(writer.directory).bases()[0].retired == ("mc.t1",)
    vacuum(writer.directory, **NOW)
    check(writer)
    assert set(DeltaLog(writer.directory).replay()) == {"mc.t0"}
    assert set(DeltaLog(writer.directory).keys()) == {"mc.t0", "mc.t1"}
    writer.tables["mc.t1"] = other
    writer.dump(30, {"mc.t1": [2, 5]}, {"mc.t1": []})
    check(writer)
    compact(writer.directory)
    assert DeltaLog(writer.directory).bases()[-1].retired == ()
    vacuum(writer.directory, **NOW)
    check(writer)


def test_log_may_hold_no_row_at_all(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10)
    writer.dump(20, {"mc.t0": [1]})
    writer.dump(30, {}, {"mc.t0": [1]})
    assert compact(writer.directory).rows == 0
    vacuum(writer.directory, **NOW)
    check(writer)
    writer.dump(40, {"mc.t0": [1]})
    check(writer)


def test_progress_counts_rows_up_to_their_number(writer: LogWriter) -> None:
    told: list[tuple[int, int]] = []
    compact(writer.directory, max_memory_bytes=100, progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1]
    assert len({total for _, total in told}) == 1


@pytest.mark.parametrize("max_memory_bytes", [0, -1])
def test_no_memory_is_an_error_that_names_it(writer: LogWriter, max_memory_bytes: int) -> None:
    with pytest.raises(ValueError, match="max_memory_bytes must be at least 1"):
        compact(writer.directory, max_memory_bytes=max_memory_bytes)


def test_nothing_to_compact_is_an_error(writer: LogWriter) -> None:
    with pytest.raises(DeltaLogError, match="no committed dump at or before step 9"):
        compact(writer.directory, upto=9)


def test_damaged_dump_is_not_compacted(writer: LogWriter) -> None:
    path = writer.directory / "step_000000000020.g0000" / fmt.part_name(0, 3)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DeltaLogError, match=r"step_000000000020\.g0000: part_00000.* is damaged"):
        compact(writer.directory)
    assert DeltaLog(writer.directory).bases() == []


def test_base_that_is_being_written_is_left_to_its_writer(writer: LogWriter) -> None:
    path = writer.directory / "base_000000000030.g0000"
    path.mkdir()
    with compaction._locked(LocalPlace(writer.directory), path.name):
        with pytest.raises(DeltaLogError, match=r"base_000000000030\.g0000 is being written by another"):
            compact(writer.directory)
        check(writer)
    assert compact(writer.directory).written


@pytest.mark.parametrize(("vacuums", "apart"), [(False, 6), (True, 1)])
def test_slower_of_two_that_nothing_keeps_apart_takes_no_base_away(
    tmp_path: Path, vacuums: bool, apart: int
) -> None:
    """On an object store: wherever the slower one is when the other commits, and removes the dumps."""
    seen: list[bool] = []
    for number in itertools.count(0, apart):
        writer = LogWriter(tmp_path / str(number), TABLES)
        writer.dump(10, {"mc.t0": [1, 2], "ebc.rows": [0]})
        writer.dump(20, {"mc.t0": [3]}, {"mc.t0": [1]}, storage_dtype="int8")
        touched = itertools.count()

        def look(
            operation: str, path: str, writer: LogWriter = writer, touched: Iterator[int] = touched
        ) -> None:
            if next(touched) == number:  # noqa: B023
                faster = DeltaLog(watched(writer.directory, lambda operation, path: None))
                seen.append(compact(faster).written)
                if vacuums:
                    vacuum(faster, **NOW)
            elif len(seen) * apart > number and operation == "delete_file":  # noqa: B023
                assert not path.endswith("manifest.json"), "a committed base goes"

        compact(DeltaLog(watched(writer.directory, look)))
        check(writer)
        assert [base.step for base in DeltaLog(writer.directory).bases()] == [20]
        assert verify_log(writer.directory).clean
        if next(touched) <= number:
            break
    assert sum(seen) > 5


def test_base_of_dumps_that_a_restart_made_void_meanwhile_is_given_up(writer: LogWriter) -> None:
    def restart(done: int, total: int) -> None:
        if done == total:
            writer.resume(10)
            writer.dump(12)

    with pytest.raises(DeltaLogError, match="given up: a run went back to a step before 30 meanwhile"):
        compact(writer.directory, progress=restart)
    assert DeltaLog(writer.directory).bases() == []
    check(writer)
    compact(writer.directory)
    vacuum(writer.directory, **NOW)
    assert not (writer.directory / "base_000000000030.g0000").exists()
    check(writer)


def test_dump_that_comes_meanwhile_is_not_in_the_base_and_counts(writer: LogWriter) -> None:
    def dump(done: int, total: int) -> None:
        if done == total:
            writer.dump(40, {"mc.t0": [2]}, {"mc.t0": [1]})

    assert compact(writer.directory, progress=dump).base.dump == DumpId(0, 30)
    check(writer)
    vacuum(writer.directory, **NOW)
    check(writer)


def test_vectors_are_copied_as_they_are_stored(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 1)})
    writer.dump(10, {"mc.t0": [1, 2, 3]})
    path = writer.directory / "step_000000000010.g0000" / fmt.part_name(0, 2)
    stored = pq.read_table(path).select(["key_id", "embedding"]).to_pylist()
    compact(writer.directory)
    (base,) = DeltaLog(writer.directory).bases()
    rows = pq.read_table(writer.directory / base.directory / base.parts[0].name)
    assert rows.select(["key_id", "embedding"]).to_pylist() == stored


def test_row_groups_hold_rows_of_one_table_and_files_are_split(
    writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "_PART_BYTES", 20)
    monkeypatch.setattr(compaction, "_ROW_GROUP_ROWS", 1)
    done = compact(writer.directory)
    assert len(done.base.parts) > 1
    for part in done.base.parts:
        with pq.ParquetFile(writer.directory / done.base.directory / part.name) as file:
            assert len(list(fmt.row_groups(file))) == file.num_row_groups
    check(writer)
    scan = Scan(DeltaLog(writer.directory), [done.base])
    assert {fqn: keys.tolist() for fqn, keys in scan.keys().items()} == {
        fqn: sorted(table.rows) for fqn, table in writer.tables.items()
    }


# Killed at a line.

_TRACED = ("compaction.py", "retention.py", "format.py", "files.py", "pathlib.py")


def _die_at(number: int, directory: str, part_bytes: int) -> None:
    """Compacts and vacuums, and is killed before the ``number``-th line of what does it, on any thread."""
    lock, count = threading.Lock(), 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(_TRACED):
            return None
        if event == "line":
            with lock:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
        return trace

    compaction._PART_BYTES = part_bytes
    threading.settrace(trace)
    sys.settrace(trace)
    compact(directory)
    vacuum(directory, **NOW)
    sys.settrace(None)
    Path(directory).with_name("lines").write_text(str(count))


def _grown(directory: Path) -> LogWriter:
    writer = LogWriter(directory, TABLES)
    writer.dump(10, {"mc.t0": [*range(20)], "mc.t1": [7, 8], "ebc.rows": [0, 1]})
    writer.dump(20, {"mc.t0": [3, 4], "ebc.rows": [1]}, {"mc.t0": [1]})
    compact(directory)
    writer.dump(30, {"mc.t0": [1], "ebc.rows": [2]}, {"mc.t0": [2, 4]})
    writer.dump(40, {"mc.t0": [9]}, {"mc.t0": [8]})
    writer.resume(30)
    writer.dump(35, {"mc.t1": [8]}, {"mc.t0": [7]})
    return writer


def test_log_is_whole_wherever_it_dies_and_another_run_finishes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "_PART_BYTES", 60)

    def run(directory: Path, number: int) -> int | None:
        process = start_process(_die_at, number, str(directory), 60)
        process.join()
        return process.exitcode

    rng = random.Random(0)
    resumed = 0
    with scratch() as directory:
        (directory / "whole").mkdir()
        whole = _grown(directory / "whole" / "deltas")
        assert run(whole.directory, -1) == 0
        check(whole)
        lines = int((directory / "whole" / "lines").read_text())
        expected = sorted(entry.name for entry in whole.directory.iterdir())
        for number in range(rng.randrange(lines // 8), lines, lines // 8):
            path = directory / str(number)
            path.mkdir()
            writer = _grown(path / "deltas")
            assert run(writer.directory, number) == -signal.SIGKILL
            check(writer)
            if goes_on := rng.random() < 0.3:
                writer.dump(50, {"mc.t0": [9, 4]}, {"mc.t0": [0]})
                check(writer)
            resumed += compact(writer.directory).resumed_parts
            compact(writer.directory)
            vacuum(writer.directory, **NOW)
            check(writer)
            left = sorted(entry.name for entry in writer.directory.iterdir())
            assert left == (["base_000000000050.g0001"] if goes_on else expected)
    assert resumed > 0


def test_files_of_an_interrupted_run_that_do_not_fit_are_written_again(writer: LogWriter) -> None:
    path = writer.directory / "base_000000000030.g0000"
    path.mkdir()
    (path / compaction.PLAN_NAME).write_text(json.dumps({"parts": [5], "dumps": []}))
    (path / fmt.part_name(0, 1)).write_bytes(b"PAR1")
    (path / f".{fmt.part_name(0, 1)}.tmp").write_bytes(b"PAR1")
    done: Compacted = compact(writer.directory)
    assert done.written and done.resumed_parts == 0
    check(writer)


def test_interrupted_run_is_gone_on_with_though_dumps_have_come(writer: LogWriter) -> None:
    (writer.directory / "base_000000000020.g0000").mkdir()
    assert compact(writer.directory).base.step == 20
    assert compact(writer.directory).base.step == 30
    check(writer)


def test_reader_of_compacted_dumps_is_told(writer: LogWriter) -> None:
    log = DeltaLog(writer.directory)
    in_hand = log.dumps()
    compact(log, upto=20)
    assert log.read(10).num_rows == 6
    vacuum(log, **NOW, keep_dumps=1)
    with pytest.raises(
        VacuumedError, match=r"no rows of a dump of step 10; the dumps up to step 20 were .*base"
    ):
        log.read(10)
    with pytest.raises(VacuumedError, match=r"no rows of a dump of step 20; the dumps up to step 20"):
        log.read(20)
    with pytest.raises(
        DeltaLogError, match=r"at or before step 15; the dumps up to step 20 were compacted into"
    ):
        log.replay(15)
    with pytest.raises(
        VacuumedError, match=r"step_000000000010\.g0000 is gone: the dumps up to step 20 were"
    ):
        log.history(in_hand)
    with pytest.raises(DeltaLogError, match="no committed dump of step 25"):
        log.read(25)
    assert log.read(30).num_rows == 3
