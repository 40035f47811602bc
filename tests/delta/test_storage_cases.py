"""Dumps of rounded vectors: what cannot be stored, failures, restarts, and logs whose rounding changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.faults import full_disk
from tests.support.rounding import rounded
from tests.support.trainers import FQN, IDS, Trainer, dump
from torchrec_ext.delta import DeltaDumpError, DeltaLog
from torchrec_ext.delta import format as fmt

ROUNDED = ("float16", "int8")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "deltas"


def _answers(trainer: Trainer, storage_dtype: str | None) -> NDArray[np.float32]:
    return rounded(np.array(trainer.answers(), np.float32), storage_dtype)


def _replayed(log: Path) -> NDArray[np.float32]:
    return DeltaLog(log).replay()[FQN].lookup(IDS)


def _write(trainer: Trainer, key: int, value: float) -> None:
    store = trainer.ebc.store
    row = store.group_of("t").local_rows("t", torch.tensor([key]))
    with torch.no_grad():
        store.group_of("t").rows_of("t")[row] = value
    store.touch("t", row)


def _run(log: Path, storage_dtype: str | None, *, steps: int = 6) -> dict[str, Any]:
    """Trains, dumps the last step and saves a checkpoint of it."""
    trainer = Trainer(1)
    with trainer.attach(log, storage_dtype=storage_dtype) as dumper:
        for step in range(1, steps + 1):
            trainer.train(step)
            dumper.step(step)
        dumper.dump(steps)
        dumper.flush()
        return trainer.save(dumper)


@pytest.mark.parametrize("storage_dtype", ROUNDED)
def test_manifest_and_files_say_how_vectors_are_stored(log: Path, storage_dtype: str) -> None:
    _run(log, storage_dtype)
    dumps = DeltaLog(log).dumps()
    assert {(d.tables[FQN].dtype, d.tables[FQN].storage_dtype) for d in dumps} == {("float32", storage_dtype)}
    rows = DeltaLog(log).read(dumps[-1].step)
    assert rows.schema.equals(fmt.PART_SCHEMA)
    state = DeltaLog(log).replay()[FQN]
    for row in rows.to_pylist():
        assert row["op"] == fmt.DELETE or row["embedding"] == state.lookup([row["key_id"]])[0].tolist()


def test_duckdb_reads_float16_rows_as_replay_does(log: Path) -> None:
    _run(log, "float16")
    (dump_,) = DeltaLog(log).dumps()
    found = duckdb.sql(f"select key_id, embedding from '{log}/step_*/part_*.parquet' where op = 'upsert'")
    rows = dict(found.fetchall())
    state = DeltaLog(log).replay()[FQN]
    assert {key: list(vector) for key, vector in rows.items()} == {
        key: state.lookup([key])[0].tolist() for key in state.keys.tolist()
    }
    assert len(rows) == dump_.upserts > 0


@pytest.mark.parametrize(
    ("storage_dtype", "value", "limit"), [("float16", 65_505.0, "65504"), ("int8", -1.1e38, "1e[+]38")]
)
def test_values_that_cannot_be_stored_are_an_error_and_go_out_once_they_can(
    log: Path, storage_dtype: str, value: float, limit: str
) -> None:
    trainer = Trainer(1)
    with trainer.attach(log, storage_dtype=storage_dtype) as dumper:
        trainer.train(1)
        dump(dumper, 1)
        key = trainer.keys()[0]
        trainer.train(1)
        _write(trainer, key, value)
        with pytest.raises(
            DeltaDumpError,
            match=rf"{FQN} on rank 0: 1 of \d+ changed vectors \(ids {key}\) hold "
            rf"values beyond {limit}, which storage_dtype='{storage_dtype}' cannot store",
        ):
            dumper.dump(2)
        assert [d.step for d in DeltaLog(log).dumps()] == [1]
        _write(trainer, key, value / 2)
        assert key in dump(dumper, 3)
        assert np.array_equal(_replayed(log), _answers(trainer, storage_dtype))


def test_a_fallback_row_that_cannot_be_stored_is_an_error(log: Path) -> None:
    trainer = Trainer(1)
    with trainer.attach(log, storage_dtype="float16") as dumper:
        trainer.train(1)
        group = trainer.ebc.store.group_of("t")
        default = group.rows_of("t")[0].clone()
        group.rows_of("t")[0] = 1e6
        with pytest.raises(DeltaDumpError, match="the fallback row, holds values beyond 65504"):
            dumper.dump(1)
        group.rows_of("t")[0] = default
        dump(dumper, 2)
        assert np.array_equal(_replayed(log), _answers(trainer, "float16"))


@pytest.mark.parametrize("storage_dtype", ROUNDED)
def test_rows_of_dumps_that_failed_are_rounded_once(log: Path, storage_dtype: str) -> None:
    trainer = Trainer(1)
    with trainer.attach(log, storage_dtype=storage_dtype) as dumper:
        trainer.train(1)
        dump(dumper, 1)
        for step in (2, 3):
            trainer.train(step)
            with full_disk(), pytest.raises(DeltaDumpError):
                dumper.dump(step)
                dumper.flush()
        trainer.train(4)
        dump(dumper, 4)
        assert np.array_equal(_replayed(log), _answers(trainer, storage_dtype))


@pytest.mark.parametrize("storage_dtype", ROUNDED)
@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("now", [None, "float16", "int8"])
def test_resume_says_nothing_twice_and_misses_no_change_however_the_log_is_rounded(
    log: Path, storage_dtype: str, now: str | None, with_state: bool
) -> None:
    saved = _run(log, storage_dtype)
    if not with_state:
        del saved["dumper"]
    trainer = Trainer(9)
    with trainer.attach(log, storage_dtype=now) as dumper:
        trainer.load(saved, dumper)
        key = trainer.keys()[0]
        if not with_state:
            _write(trainer, key, 0.1)  # before it resumes: only the comparison can tell
        assert dumper.resume(6) is None
        assert list(dump(dumper, 7)) == ([] if with_state else [key])
        before = _answers(trainer, storage_dtype)
        after = _answers(trainer, now)
        # Fallback rows, and the row that changed, are rounded as they are now; others as they were.
        held = trainer.keys() if with_state else [k for k in trainer.keys() if k != key]  # noqa: SIM118
        is_held = np.isin(IDS, held)
        assert np.array_equal(_replayed(log), np.where(is_held[:, None], before, after))
        dumper.mark(FQN)
        assert len(dump(dumper, 8)) == len(trainer.keys())
        assert np.array_equal(_replayed(log), after)


def test_resume_with_exact_vectors_sees_changes_that_rounding_would_hide(log: Path) -> None:
    saved = _run(log, None)
    del saved["dumper"]
    trainer = Trainer(9)
    with trainer.attach(log, storage_dtype="int8") as dumper:
        trainer.load(saved, dumper)
        key = trainer.keys()[0]
        row = trainer.ebc.store.group_of("t").local_rows("t", torch.tensor([key]))
        vector = trainer.ebc.store.group_of("t").rows_of("t")[row]
        _write(trainer, key, torch.nextafter(vector, torch.tensor(9.0)))  # type: ignore[arg-type]
        dumper.resume(6)
        assert list(dump(dumper, 7)) == [key]
