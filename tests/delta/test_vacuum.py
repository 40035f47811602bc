"""What ``vacuum`` removes, what it keeps, and what that is like for those who read and write meanwhile."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.delta.test_compact import NOW, check
from tests.publish.test_publish import Keeper
from tests.support.filesystems import watched
from tests.support.logs import TABLES, LogWriter, zch
from tests.support.trainers import FQN, Trainer, dump
from torchrec_ext.delta import (
    DeltaLog,
    DeltaLogError,
    DumpId,
    Manifest,
    VacuumedError,
    compact,
    vacuum,
    verify_log,
)
from torchrec_ext.delta.manifest import MANIFEST_NAME
from torchrec_ext.publish import PublishError, publish

HOUR = 3600.0


@pytest.fixture
def writer(tmp_path: Path) -> LogWriter:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    for number in range(1, 7):
        writer.dump(10 * number, {"mc.t0": [number, number + 1]}, {"mc.t0": [number - 1]})
    return writer


def names(writer: LogWriter) -> list[str]:
    """What is in the log: ``base 20``, ``30``."""
    found = []
    for entry in sorted(writer.directory.iterdir(), key=lambda entry: (entry.name[5:], entry.name < "c")):
        kind, step = entry.name.split(".")[0].split("_")
        found.append(f"base {int(step)}" if kind == "base" else str(int(step)))
    return found


def make_older(writer: LogWriter, manifest: Manifest, seconds: float) -> None:
    """As if it had been committed that long before it was."""
    older = dataclasses.replace(manifest, committed_unix=manifest.committed_unix - seconds)
    (writer.directory / manifest.directory / MANIFEST_NAME).write_bytes(older.to_json())


def make_all_older(writer: LogWriter, seconds: float) -> None:
    log = DeltaLog(writer.directory)
    for manifest in [*log.dumps(superseded=True), *log.bases()]:
        make_older(writer, manifest, seconds)


def test_nothing_goes_without_a_base(writer: LogWriter) -> None:
    done = vacuum(writer.directory, **NOW)
    assert (done.dumps, done.superseded, done.files, done.nbytes) == ((), (), 0, 0)
    assert names(writer) == ["10", "20", "30", "40", "50", "60"]


@pytest.mark.parametrize("keep_dumps", [1, 2, 3, 4, 6, 100])
def test_last_dumps_stay_with_all_that_their_states_need(writer: LogWriter, keep_dumps: int) -> None:
    for upto in (20, 40, 60):
        compact(writer.directory, upto)
    log = DeltaLog(writer.directory)
    before = {step: log.replay(step)["mc.t0"] for step in (10, 20, 30, 40, 50, 60)}
    vacuum(log, **NOW, keep_dumps=keep_dumps)
    assert names(writer) == {
        1: ["base 60"],
        2: ["base 40", "50", "60", "base 60"],
        3: ["base 40", "50", "60", "base 60"],
        4: ["base 20", "30", "40", "base 40", "50", "60", "base 60"],
    }.get(keep_dumps, ["10", "20", "base 20", "30", "40", "base 40", "50", "60", "base 60"])
    for step in list(before)[-keep_dumps:]:
        state = DeltaLog(writer.directory).replay(step)["mc.t0"]
        assert np.array_equal(state.keys, before[step].keys)
        assert np.array_equal(state.vectors, before[step].vectors)
    check(writer)


def test_young_dumps_stay_with_all_that_their_states_need(writer: LogWriter) -> None:
    log = DeltaLog(writer.directory)
    for one, hours in zip(log.dumps(), (9, 8, 7, 3, 2, 1), strict=True):
        make_older(writer, one, hours * HOUR)
    for upto in (20, 40, 50):
        compact(log, upto)
    for base, hours in zip(log.bases(), (8, 3, 2), strict=True):
        make_older(writer, base, hours * HOUR)
    assert vacuum(log, keep_seconds=9.5 * HOUR).dumps == ()
    vacuum(log, keep_seconds=7.5 * HOUR)  # the oldest to keep is 30
    assert names(writer)[0] == "base 20"
    vacuum(log, keep_seconds=2.5 * HOUR)  # 50, which has a base of its own, made an hour and more ago
    assert names(writer) == ["base 50", "60"]
    check(writer)


def test_base_that_has_just_been_made_takes_no_place_yet(writer: LogWriter) -> None:
    make_all_older(writer, 100 * HOUR)
    compact(writer.directory)
    assert vacuum(writer.directory).dumps == ()
    assert vacuum(writer.directory, grace_seconds=0).dumps != ()
    check(writer)


def test_dry_run_tells_and_removes_nothing(writer: LogWriter) -> None:
    compact(writer.directory)
    before = sorted(writer.directory.rglob("*"))
    told = vacuum(writer.directory, **NOW, dry_run=True)
    assert told.dry_run and sorted(writer.directory.rglob("*")) == before
    sizes = {file: file.stat().st_size for file in before if file.is_file()}
    seen: list[tuple[int, int]] = []
    done = vacuum(writer.directory, **NOW, progress=lambda done, total: seen.append((done, total)))
    assert dataclasses.replace(told, dry_run=False) == done
    gone = set(before) - set(writer.directory.rglob("*"))
    assert done.nbytes == sum(sizes.get(path, 0) for path in gone)
    assert done.files == len([path for path in gone if path in sizes])
    assert list(done.dumps) == [f"step_{step:012d}.g0000" for step in range(10, 70, 10)]
    assert seen[-1] == (done.nbytes, done.nbytes)


def test_dumps_go_oldest_first(writer: LogWriter) -> None:
    compact(writer.directory, 20)
    compact(writer.directory)
    left: list[list[str]] = []
    vacuum(writer.directory, **NOW, progress=lambda *_: left.append(names(writer)))
    assert left[0] == ["20", "base 20", "30", "40", "50", "60", "base 60"]
    assert [one[0] for one in left] == ["20", "20", "30", "40", "50", "60", "base 60"]


def test_superseded_dumps_lose_their_rows_and_stay_in_the_chain(writer: LogWriter) -> None:
    writer.resume(30)
    writer.dump(35, {"mc.t0": [9]})
    log = DeltaLog(writer.directory)
    void = log.dumps(superseded=True)[3:6]
    assert vacuum(log, grace_seconds=0).superseded == ()  # keep_seconds is a day
    assert vacuum(log, keep_seconds=0).superseded == ()  # grace_seconds is an hour
    done = vacuum(log, **NOW)
    assert list(done.superseded) == [one.directory for one in void] and done.dumps == ()
    for one in void:
        assert [file.name for file in (writer.directory / one.directory).iterdir()] == [MANIFEST_NAME]
        with pytest.raises(VacuumedError, match=f"{one.directory} was superseded, and its rows were"):
            log.read(one.step, one.generation)
    check(writer)
    assert len(DeltaLog(writer.directory).dumps(superseded=True)) == 7
    assert vacuum(log, **NOW).files == 0
    compact(log)
    vacuum(log, **NOW)
    assert names(writer) == ["base 35"]


def test_damaged_base_removes_nothing(writer: LogWriter) -> None:
    base = compact(writer.directory).base
    path = writer.directory / base.directory / base.parts[0].name
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DeltaLogError, match=r"base_000000000060\.g0000: part_00000.* is damaged"):
        vacuum(writer.directory, **NOW)
    assert names(writer) == ["10", "20", "30", "40", "50", "60", "base 60"]


def test_files_of_others_stay(writer: LogWriter) -> None:
    notes = writer.directory / "step_000000000020.g0000" / "notes.txt"
    notes.write_text("mine")
    compact(writer.directory)
    vacuum(writer.directory, **NOW)
    assert notes.read_text() == "mine"
    assert names(writer) == ["20", "base 60"]
    assert [file.name for file in notes.parent.iterdir()] == ["notes.txt"]
    check(writer)


def test_what_died_half_written_goes_with_the_dumps_around_it(writer: LogWriter) -> None:
    (writer.directory / "base_000000000020.g0000").mkdir()
    (writer.directory / "base_000000000020.g0000" / "plan.json").write_text("")
    (writer.directory / "step_000000000035.g0000").mkdir()
    (writer.directory / "step_000000000070.g0000").mkdir()  # being written, for all we know
    compact(writer.directory, 60)
    vacuum(writer.directory, **NOW)
    assert names(writer) == ["base 60", "70"]
    check(writer)


@pytest.mark.parametrize(
    "wrong",
    [{"keep_seconds": -1}, {"keep_seconds": float("nan")}, {"keep_dumps": 0}, {"grace_seconds": -0.5}],
)
def test_wrong_argument_is_an_error_that_names_it(writer: LogWriter, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be at least"):
        vacuum(writer.directory, **wrong)


def test_log_on_a_file_system_of_pyarrow_is_kept_short_alike(writer: LogWriter) -> None:
    removed: list[str] = []

    def look(operation: str, path: str) -> None:
        if "delete" in operation and path.endswith(MANIFEST_NAME):
            removed.append(path.split("/")[-2])

    filesystem = watched(writer.directory, look)
    log = DeltaLog(filesystem)
    compact(log, 20)
    compact(log)
    check(writer)
    done = vacuum(log, **NOW)
    assert set(removed) >= set(done.dumps) - {"base_000000000060.g0000"}
    assert [name for name in names(writer) if name != "generations"] == ["base 60"]
    check(writer)
    assert DeltaLog(filesystem).files().num_rows == 2


def test_gap_that_no_base_explains_is_an_error(writer: LogWriter) -> None:
    compact(writer.directory, 20)
    for file in (writer.directory / "step_000000000040.g0000").iterdir():
        file.unlink()
    with pytest.raises(
        DeltaLogError, match=r"follows step_000000000040\.g0000, whose manifest.json is missing"
    ):
        DeltaLog(writer.directory).dumps()
    with pytest.raises(DeltaLogError, match="the chain has a gap"):
        vacuum(writer.directory, **NOW)
    assert "10" in names(writer)


def test_base_counts_though_a_restart_that_knew_its_dumps_made_its_last_one_void(writer: LogWriter) -> None:
    """The trainer listed the dumps before they went: what it supersedes is not all that the base holds."""
    compact(writer.directory, 60)
    writer.resume(30)
    vacuum(writer.directory, **NOW)
    writer.dump(35, {"mc.t0": [20]})
    check(writer)
    assert [dump.directory for dump in DeltaLog(writer.directory).dumps()] == [
        "base_000000000060.g0000",
        "step_000000000035.g0001",
    ]
    assert verify_log(writer.directory).clean
    with pytest.raises(DeltaLogError, match="no committed dump at or before step 30"):
        DeltaLog(writer.directory).replay(30)
    compact(writer.directory)
    vacuum(writer.directory, **NOW)
    assert names(writer) == ["base 35"]
    check(writer)


def test_who_supersedes_a_base_need_not_say_what_older_dumps_in_it_said(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", TABLES)
    writer.dump(10, {"mc.t0": [1]})
    writer.dump(20, {"mc.t0": [2]})
    compact(writer.directory)
    writer.resume(10)
    vacuum(writer.directory, **NOW)
    writer.dump(15, {"mc.t0": [3]})
    check(writer)
    assert verify_log(writer.directory).clean


def test_nothing_goes_for_a_base_of_dumps_that_are_void(writer: LogWriter) -> None:
    compact(writer.directory, 60)
    writer.resume(30)
    writer.dump(35)
    done = vacuum(writer.directory, **NOW)
    assert done.dumps == ()
    assert {int(name[5:17]) for name in done.superseded} == {40, 50, 60}
    check(writer)
    assert DeltaLog(writer.directory).replay(30)["mc.t0"].keys.tolist() == [3, 4]


def test_readers_never_see_anything_else_than_a_state_that_was(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 1)})
    states: dict[int, dict[int, list[float]]] = {}

    def dump(step: int) -> None:
        rng = np.random.default_rng(step)
        writer.dump(
            step, {"mc.t0": rng.choice(20, 4, replace=False).tolist()}, {"mc.t0": [step % 20]}, world_size=1
        )
        states[step] = {key: row.tolist() for key, row in writer.tables["mc.t0"].rows.items()}

    dump(0)
    over = threading.Event()
    seen: list[dict[int, list[float]]] = []
    wrong: list[BaseException] = []

    def read() -> None:
        try:
            while not over.is_set():
                state = DeltaLog(writer.directory).replay()["mc.t0"]
                seen.append(dict(zip(state.keys.tolist(), state.vectors.tolist(), strict=True)))
        except BaseException as error:
            wrong.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for step in itertools.count(1):
        if wrong or (step >= 40 and len(seen) > 1):
            break
        dump(step)
        if step % 4 == 0:
            compact(writer.directory)
        if step % 8 == 0:
            vacuum(writer.directory, **NOW)
    over.set()
    for reader in readers:
        reader.join()
    assert not wrong, wrong
    assert all(state in states.values() for state in seen)


# Trainers and publishers.


def _first_run(log: Path, *, save: int) -> dict[str, Any]:
    trainer = Trainer(1)
    saved: dict[str, Any] = {}
    with trainer.attach(log) as dumper:
        for step in range(1, 9):
            trainer.train(step)
            if step % 2 == 0:
                dumper.dump(step)
            dumper.step(step)
            if step == save:
                saved = trainer.save(dumper)
            if step == 6:  # under way
                dumper.flush()
                compact(log, 4)
                vacuum(log, **NOW)
                trainer.compare(log)
        dumper.flush()
        compact(log)
        vacuum(log, **NOW)
    trainer.compare(log)
    return saved


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("save", [3, 8])
def test_training_resumes_at_a_step_that_was_compacted_away_and_at_the_base(
    tmp_path: Path, save: int, with_state: bool
) -> None:
    log = tmp_path / "deltas"
    saved = _first_run(log, save=save)
    (base,) = DeltaLog(log).dumps()
    assert base.is_base and base.step == 8
    if not with_state:
        saved = {name: value for name, value in saved.items() if name != "dumper"}
    trainer = Trainer(9)
    dumper = trainer.attach(log)
    trainer.load(saved, dumper)
    result = dumper.resume(save)
    trainer.compare(log)
    if save == 8:
        assert result is None and dump(dumper, 9) == {}
    else:  # the log goes back by one dump that holds all
        assert result is not None
        last = DeltaLog(log).dumps()[-1]
        assert last.supersedes == (DumpId(0, 8),)
        assert set(base.tables) == {FQN} and last.upserts == len(DeltaLog(log).keys()[FQN])
    trainer.train(10)
    dumper.dump(10)
    dumper.step(10)
    dumper.close()
    trainer.compare(log)
    compact(log)
    vacuum(log, **NOW)
    trainer.compare(log)


def test_run_that_does_not_resume_deletes_what_only_the_base_holds(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    _first_run(log, save=8)
    trainer = Trainer(5)
    with trainer.attach(log) as dumper:
        trainer.train(3)
        dumper.step(1)
    trainer.compare(log)


def test_publisher_goes_on_from_the_last_dump_of_a_base_and_is_told_if_it_is_further_behind(
    writer: LogWriter,
) -> None:
    up_to_date, behind, new = Keeper(), Keeper(), Keeper()
    publish(writer.directory, up_to_date)
    publish(writer.directory, behind)
    assert behind.held is not None
    behind.held = dataclasses.replace(behind.held, step=30)
    behind.held = next(
        dataclasses.replace(behind.held, created_unix=dump.created_unix)
        for dump in DeltaLog(writer.directory).dumps()
        if dump.step == 30
    )
    compact(writer.directory)
    vacuum(writer.directory, **NOW)
    publish(writer.directory, up_to_date)
    assert up_to_date.steps == [60]
    writer.dump(70, {"mc.t0": [1]})
    publish(writer.directory, up_to_date)
    assert up_to_date.steps == [60, 70]
    publish(writer.directory, new)
    assert sum(len(keys) for _, keys, _ in new.changes[0].upserts()) == sum(
        len(table.rows) for table in writer.tables.values()
    )
    with pytest.raises(
        PublishError, match=r"step 30 .*compacted into base_000000000060\.g0000.*restart=True"
    ):
        publish(writer.directory, behind)
