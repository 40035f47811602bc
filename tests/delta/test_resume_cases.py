"""What a restart may find: another log, another step, no state of the dumper, one that does not fit."""

from __future__ import annotations

import io
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.faults import full_disk, log_of
from tests.support.trainers import FQN, Trainer, dump
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog, DumpId, FencedError
from torchrec_ext.delta.position import LogPosition


def _train_and_dump(log: Path, *, steps: int, dumps: set[int], save: int, **options: Any) -> dict[str, Any]:
    """A run that ends without closing its dumper; the checkpoint of one of its steps."""
    trainer = Trainer(1)
    dumper = trainer.attach(log, **options)
    saved = {}
    for step in range(1, steps + 1):
        trainer.train(step)
        if step in dumps:
            dumper.dump(step)
        dumper.step(step)
        if step == save:
            saved = trainer.save(dumper)
    dumper.flush()
    dumper.__exit__(KeyboardInterrupt, None, None)
    return saved


def _without_state(saved: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in saved.items() if name != "dumper"}


@pytest.fixture(params=["with state", "without state"])
def given(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A checkpoint with the dumper's state in it, or without."""
    return (lambda saved: saved) if request.param == "with state" else _without_state


def _restart(log: Path, saved: dict[str, Any], step: int, **options: Any) -> tuple[Trainer, DeltaDumper, Any]:
    trainer = Trainer(9)
    dumper = trainer.attach(log, **options)
    trainer.load(saved, dumper)
    return trainer, dumper, dumper.resume(step)


def test_nothing_is_dumped_when_the_log_ends_where_the_checkpoint_was_saved(
    tmp_path: Path, given: Callable[..., Any]
) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=6, dumps={3, 6}, save=6))
    trainer, dumper, result = _restart(log, saved, 6)
    assert result is None
    assert len(DeltaLog(log).dumps()) == 2
    assert dump(dumper, 7) == {}
    trainer.compare(log)
    dumper.close()


def test_what_was_trained_between_dump_and_checkpoint_goes_out_with_the_next_dump(
    tmp_path: Path, given: Callable[..., Any]
) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=5, dumps={3, 4}, save=5))
    before = set(DeltaLog(log).keys()[FQN].tolist())
    trainer, dumper, result = _restart(log, saved, 5)
    assert result is None
    rows = dump(dumper, 6)
    owned = set(DeltaLog(log).keys()[FQN].tolist())
    assert {key for key, op in rows.items() if op == "delete"} == before - owned
    assert set(rows) < before | owned
    trainer.compare(log)
    dumper.close()


def test_log_that_is_ahead_goes_back_at_once(tmp_path: Path, given: Callable[..., Any]) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=10, dumps={2, 4, 7, 10}, save=5))
    trainer, dumper, result = _restart(log, saved, 5)
    assert result.rows == DeltaLog(log).dumps()[-1].rows > 0
    trainer.compare(log)
    dumps = DeltaLog(log).dumps()
    assert [dump.dump for dump in dumps] == [DumpId(0, 2), DumpId(0, 4), DumpId(1, 5)]
    assert dumps[-1].supersedes == (DumpId(0, 7), DumpId(0, 10))
    assert dumps[-1].previous == DumpId(0, 10)
    said_ahead = {k for s in (7, 10) for k in DeltaLog(log).read(s, 0)["key_id"].to_pylist()}
    assert said_ahead <= set(DeltaLog(log).read(5)["key_id"].to_pylist())
    # The same steps again, with other outcomes: nothing collides.
    for step in range(6, 11):
        trainer.train(2 * step)
        dumper.dump(step)
        dumper.step(step)
    dumper.close()
    trainer.compare(log)
    assert [dump.step for dump in DeltaLog(log).dumps()] == [2, 4, 5, 6, 7, 8, 9, 10]


def test_replay_up_to_a_step_means_the_history_that_counts(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=10, dumps={2, 4, 7, 10}, save=5)
    at_four = DeltaLog(log).replay(upto=4)[FQN]
    trainer, dumper, _ = _restart(log, saved, 5)
    for upto in (5, 7, 10, None):
        state = DeltaLog(log).replay(upto=upto)[FQN]
        assert np.array_equal(state.lookup(range(40)), np.array(trainer.answers(), np.float32))
    state = DeltaLog(log).replay(upto=4)[FQN]
    assert state.keys.tolist() == at_four.keys.tolist()
    dumper.close()


def test_checkpoint_of_before_the_first_dump_makes_the_whole_log_void(
    tmp_path: Path, given: Callable[..., Any]
) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=8, dumps={4, 8}, save=2))
    trainer, dumper, result = _restart(log, saved, 2)
    assert result is not None
    trainer.compare(log)
    assert [dump.dump for dump in DeltaLog(log).dumps()] == [DumpId(1, 2)]
    dumper.close()


def test_same_checkpoint_may_be_restored_again_and_again(tmp_path: Path, given: Callable[..., Any]) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=8, dumps={2, 4, 8}, save=5))
    for attempt in range(3):
        trainer, dumper, result = _restart(log, saved, 5)
        assert (result is None) == (attempt == 1), "the second finds the log where the first left it"
        if attempt == 1:
            assert dump(dumper, 6) == {}
        trainer.compare(log)
        dumper.__exit__(KeyboardInterrupt, None, None)


def test_checkpoint_saved_before_the_dump_of_its_own_step_is_at_that_dump(
    tmp_path: Path, given: Callable[..., Any]
) -> None:
    log = tmp_path / "deltas"
    trainer = Trainer(1)
    dumper = trainer.attach(log, interval_steps=3)
    for step in range(1, 7):
        trainer.train(step)
        saved = trainer.save(dumper)
        dumper.step(step)
    dumper.flush()
    dumper.__exit__(KeyboardInterrupt, None, None)
    assert len(LogPosition.from_bytes(saved["dumper"]["log_position"]).unsaid[FQN]) > 0
    trainer, dumper, result = _restart(log, given(saved), 6)
    assert result is None
    assert dump(dumper, 7) == {}
    trainer.compare(log)
    dumper.close()


# -- logs that are not what the state of the dumper says


def test_log_that_lost_the_dump_of_the_state_is_compared(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=9, dumps={3, 6, 9}, save=7)
    for step in (6, 9):
        shutil.rmtree(log / f"step_{step:012d}.g0000")
    trainer, dumper, result = _restart(log, saved, 7)
    assert result is None
    assert dump(dumper, 8)
    trainer.compare(log)
    dumper.close()


def test_state_of_another_log_with_the_same_steps_is_not_believed(tmp_path: Path) -> None:
    saved = _train_and_dump(tmp_path / "one", steps=4, dumps={3}, save=4)
    other = Trainer(2)
    with other.attach(tmp_path / "other") as dumper:
        other.train(1)
        dumper.dump(2)
        dumper.dump(3)  # says nothing by which one could tell
    trainer, dumper, result = _restart(tmp_path / "other", saved, 4)
    assert result is None
    assert dump(dumper, 6)
    trainer.compare(tmp_path / "other")
    dumper.close()


def test_log_in_which_another_model_was_dumped_meanwhile_is_compared(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=9, dumps={8}, save=9)
    other = Trainer(1)
    with other.attach(log) as dumper:  # from scratch, and its steps are counted from 1 again
        for step in (7, 8, 8, 9):
            other.train(step)
        dumper.dump(2)
        dumper.dump(3)
    trainer, dumper, result = _restart(log, saved, 9)
    assert result is None
    dump(dumper, 10)
    trainer.compare(log)
    dumper.close()


def test_rows_that_no_dump_said_are_in_the_state(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    trainer = Trainer(1)
    dumper = trainer.attach(log)
    trainer.train(1)
    dump(dumper, 1)
    trainer.train(5)
    saved = trainer.save(dumper)
    dumper.__exit__(KeyboardInterrupt, None, None)
    trainer, dumper, _ = _restart(log, saved, 5)
    assert (
        sorted(dump(dumper, 6))
        == LogPosition.from_bytes(saved["dumper"]["log_position"]).unsaid[FQN].tolist()
    )
    trainer.compare(log)
    dumper.close()


def test_state_with_the_rows_of_another_checkpoint_is_found_out(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    early = _train_and_dump(tmp_path / "early", steps=3, dumps={3}, save=3)
    late = _train_and_dump(log, steps=6, dumps={3, 6}, save=6)
    heard: list[str] = []
    with log_of("torchrec_ext.delta.resuming", heard.append):
        trainer, dumper, _ = _restart(log, {**early, "dumper": late["dumper"]}, 6)
    assert [text for text in heard if "comparing all with the log" in text]
    dump(dumper, 7)
    trainer.compare(log)
    dumper.close()


def test_rows_of_another_checkpoint_are_found_out_though_the_last_dump_said_nothing(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    early = _train_and_dump(tmp_path / "early", steps=3, dumps={3}, save=3)
    trainer = Trainer(1)
    dumper = trainer.attach(log)
    for step in range(1, 7):
        trainer.train(step)
        dump(dumper, step)
    assert dump(dumper, 7) == {}
    late = trainer.save(dumper)
    dumper.__exit__(KeyboardInterrupt, None, None)
    trainer, dumper, _ = _restart(log, {**early, "dumper": late["dumper"]}, 7)
    dump(dumper, 8)
    trainer.compare(log)
    dumper.close()


def test_checkpoint_of_a_run_that_was_fenced_off_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    old = Trainer(1)
    dumper = old.attach(log)
    for step in (1, 2):
        old.train(1)
        dump(dumper, step)
    newer = Trainer(2).attach(log)
    old.train(9)  # what it cannot say any more
    for step in (3, 4):
        with pytest.raises(FencedError):
            dump(dumper, step)
    saved = old.save(dumper)
    for one in (dumper, newer):
        one.__exit__(KeyboardInterrupt, None, None)
    assert len(LogPosition.from_bytes(saved["dumper"]["log_position"]).unsaid[FQN]) > 0
    trainer, dumper, result = _restart(log, saved, 4)
    assert result is None
    dump(dumper, 5)
    trainer.compare(log)
    dumper.close()


@pytest.mark.parametrize("first_dump", ["full", "delta"])
def test_empty_directory_begins_as_first_dump_says(tmp_path: Path, first_dump: str) -> None:
    saved = _train_and_dump(tmp_path / "one", steps=5, dumps={3}, save=5)
    log = tmp_path / "other"
    trainer, dumper, result = _restart(log, saved, 5, first_dump=first_dump)
    assert result is None
    trainer.train(6)
    rows = dump(dumper, 6)
    if first_dump == "full":
        trainer.compare(log)
    upserts = {key for key, op in rows.items() if op == "upsert"}
    assert (len(upserts) == 4) == (first_dump == "delta"), "those that step 6 trained, or all"
    dumper.close()


def test_log_of_changes_only_goes_on_with_changes_only(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    trainer = Trainer(1)
    for step in range(1, 4):
        trainer.train(step)
    dumper = trainer.attach(log, first_dump="delta")
    trainer.train(4)
    dumper.dump(4)
    saved = trainer.save(dumper)
    trainer.train(5)
    dumper.dump(5)
    dumper.flush()
    dumper.__exit__(KeyboardInterrupt, None, None)
    ahead = set(DeltaLog(log).read(5)["key_id"].to_pylist())
    _, dumper, result = _restart(log, saved, 4)
    assert result is not None
    assert set(DeltaLog(log).read(4, 1)["key_id"].to_pylist()) == ahead
    dumper.close()


def test_keys_that_a_log_of_changes_only_never_held_are_deleted_all_the_same(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    trainer = Trainer(1)
    trainer.train(1)
    dumper = trainer.attach(log, first_dump="delta")
    owned = set(trainer.keys())
    dumper.dump(1)
    for step in (5, 6, 7):
        trainer.train(step)
    saved = trainer.save(dumper)
    dumper.__exit__(KeyboardInterrupt, None, None)
    _, dumper, _ = _restart(log, saved, 7)
    # Who began with a checkpoint of step 1 holds them.
    assert {key for key, op in dump(dumper, 8).items() if op == "delete"} == owned
    dumper.close()


def test_rows_that_were_marked_before_it_resumes_are_compared(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=6, dumps={3, 6}, save=6)
    trainer = Trainer(9)
    dumper = trainer.attach(log)
    trainer.load(saved, dumper)
    key = int(DeltaLog(log).keys()[FQN][0])
    trainer.ebc.store.write("t", torch.tensor([key]), torch.ones(1, 4))
    dumper.mark(FQN, torch.tensor([key]))
    assert dumper.resume(6) is None
    assert dump(dumper, 7) == {key: "upsert"}
    trainer.compare(log)
    dumper.close()


def test_rows_that_were_marked_before_an_empty_log_of_changes_begins_are_in_it(tmp_path: Path) -> None:
    saved = _train_and_dump(tmp_path / "one", steps=5, dumps={3}, save=5)
    trainer = Trainer(9)
    dumper = trainer.attach(tmp_path / "other", first_dump="delta")
    trainer.load(saved)
    key = trainer.keys()[0]
    trainer.ebc.store.write("t", torch.tensor([key]), torch.ones(1, 4))
    dumper.mark(FQN, torch.tensor([key]))
    dumper.resume(5)
    assert dump(dumper, 6)[key] == "upsert"
    dumper.close()


# -- disks that are full


def test_log_goes_back_with_the_next_dump_if_the_disk_is_full(
    tmp_path: Path, given: Callable[..., Any]
) -> None:
    log = tmp_path / "deltas"
    saved = given(_train_and_dump(log, steps=10, dumps={2, 4, 7, 10}, save=5))
    trainer = Trainer(9)
    dumper = trainer.attach(log)
    trainer.load(saved, dumper)
    with full_disk(), pytest.raises(DeltaDumpError, match="step 5 was not committed"):
        dumper.resume(5)
    again = trainer.save(dumper)
    trainer.train(6)
    dumper.dump(6)
    dumper.flush()
    trainer.compare(log)
    assert DeltaLog(log).dumps()[-1].supersedes == (DumpId(0, 7), DumpId(0, 10))
    dumper.close()
    # And a checkpoint that was saved while nothing could be written is none the worse.
    trainer, dumper, result = _restart(log, again, 5)
    assert result is not None
    trainer.compare(log)
    dumper.close()


def test_checkpoint_of_a_dumper_whose_last_dump_failed_loses_nothing(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    trainer = Trainer(1)
    dumper = trainer.attach(log)
    trainer.train(1)
    dump(dumper, 1)
    trainer.train(2)
    with full_disk(), pytest.raises(DeltaDumpError):
        dump(dumper, 2)
    trainer.train(3)
    saved = trainer.save(dumper)
    dumper.__exit__(KeyboardInterrupt, None, None)
    position = LogPosition.from_bytes(saved["dumper"]["log_position"])
    assert position.dump == DumpId(0, 1)
    trainer, dumper, result = _restart(log, saved, 3)
    assert result is None
    assert set(dump(dumper, 4)) == set(position.unsaid[FQN].tolist())
    trainer.compare(log)
    dumper.close()


# -- steps, intervals, arguments


def test_dumps_are_due_as_if_training_had_never_stopped(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=5, dumps={3}, save=5)
    _, dumper, _ = _restart(log, saved, 5, interval_steps=4)
    for wrong in (5, 3):
        with pytest.raises(ValueError, match=f"global_step must grow: got {wrong} after 5"):
            dumper.step(wrong)
    with pytest.raises(ValueError, match="global_step must grow"):
        dumper.dump(4)
    due = [step for step in (7, 9, 11, 12) if dumper.step(step)]
    assert due == [9, 12]
    dumper.close()


def test_step_of_the_checkpoint_itself_may_be_dumped(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=5, dumps={3}, save=5)
    trainer, dumper, _ = _restart(log, saved, 5)
    dump(dumper, 5)
    trainer.compare(log)
    with pytest.raises(ValueError, match="global_step must grow: got 5 after 5"):
        dumper.dump(5)
    dumper.close()
    assert [dump.dump for dump in DeltaLog(log).dumps()] == [DumpId(0, 3), DumpId(1, 5)]


def test_run_that_trains_no_step_after_it_resumed_dumps_nothing(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=6, dumps={3}, save=6)
    _, dumper, _ = _restart(log, saved, 6)
    dumper.close()
    assert len(DeltaLog(log).dumps()) == 1


def test_resume_comes_first_and_once(tmp_path: Path) -> None:
    trainer = Trainer(1)
    with trainer.attach(tmp_path / "deltas") as dumper:
        for wrong in (-1, 2.5, "3", None, True):
            with pytest.raises(ValueError, match="an integer >= 0"):
                dumper.resume(wrong)  # type: ignore[arg-type]
        state = dumper.state_dict()
        dumper.resume(0)
        for again in (lambda: dumper.resume(1), lambda: dumper.load_state_dict(state)):
            with pytest.raises(ValueError, match="before any step or dump"):
                again()
    with trainer.attach(tmp_path / "deltas") as dumper:
        dumper.step(1)
        for late in (lambda: dumper.resume(1), lambda: dumper.load_state_dict(state)):
            with pytest.raises(ValueError, match="before any step or dump"):
                late()
    with pytest.raises(ValueError, match="closed"):
        dumper.resume(2)


def test_state_of_a_later_step_than_the_one_to_resume_at_is_an_error(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=8, dumps={3, 8}, save=8)
    trainer = Trainer(9)
    dumper = trainer.attach(log)
    trainer.load(saved, dumper)
    with pytest.raises(ValueError, match=r"of step 8 or later, .* from step 5 .*: pass the step of the"):
        dumper.resume(5)
    assert dumper.resume(8) is None, "nothing is lost by asking wrongly"
    dumper.close()


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"log_position": 3},
        {"log_position": b""},
        {"log_position": b"{}\n"},
        {"log_position": b'{"version": 2}\n'},
        {"log_position": b'{"version": 1, "dump": [0, 3], "run_id": "x", "unsaid": {"ebc.t": 9}}\n1234'},
    ],
)
def test_what_is_no_state_of_a_dumper_is_refused(tmp_path: Path, state: dict[str, Any]) -> None:
    with (
        Trainer(1).attach(tmp_path / "deltas") as dumper,
        pytest.raises(ValueError, match=r"not one of a DeltaDumper"),
    ):
        dumper.load_state_dict(state)


def test_state_survives_a_file_that_is_read_without_unpickling_objects(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=6, dumps={3, 4}, save=6)
    file = io.BytesIO()
    torch.save(saved["dumper"], file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded == saved["dumper"]
    position = LogPosition.from_bytes(loaded["log_position"])
    assert position.dump == DumpId(0, 4)
    assert position.run_id == DeltaLog(log).dumps()[-1].run_id != ""
    assert 0 < len(position.unsaid[FQN]) <= 16


def test_state_that_was_loaded_for_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = tmp_path / "deltas"
    saved = _train_and_dump(log, steps=6, dumps={3}, save=6)
    trainer = Trainer(9)
    with trainer.attach(log) as dumper, caplog.at_level(logging.WARNING):
        trainer.load(saved, dumper)
        trainer.train(7)
        dumper.dump(7)
    assert "call resume() after loading a checkpoint" in caplog.text
    trainer.compare(log)


def test_state_is_empty_where_nothing_is_known(tmp_path: Path) -> None:
    trainer = Trainer(1)
    dumper = trainer.attach(tmp_path / "deltas")
    fresh = dumper.state_dict()
    trainer.train(1)
    dumper.step(1)
    dumper.close()
    for state in (fresh, dumper.state_dict()):
        assert LogPosition.from_bytes(state["log_position"]) == LogPosition()
