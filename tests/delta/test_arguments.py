"""Wrong arguments and misuse raise at once, on every rank, and say what to do instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import build, build_unsharded, one_table
from tests.support.schedules import compare
from tests.support.training import IDS, TABLES, TWO_TABLES, train
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog

EVERY_STEP = {"interval_steps": 1}

WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({}, "exactly one of interval_steps and interval_seconds, not neither"),
    ({"interval_steps": 1, "interval_seconds": 1.0}, "exactly one of .*, not both"),
    ({"interval_steps": 0}, "interval_steps must be .*positive.*, not 0"),
    ({"interval_steps": -5}, "interval_steps must be .*positive.*, not -5"),
    ({"interval_steps": 2.5}, "interval_steps must be an? .*integer, not 2.5"),
    ({"interval_steps": "10"}, "interval_steps must be an? .*integer, not '10'"),
    ({"interval_steps": True}, "interval_steps must be an? .*integer, not True"),
    ({"interval_steps": float("inf")}, "interval_steps must be an? .*integer, not inf"),
    ({"interval_seconds": 0}, "interval_seconds must be .*positive.*, not 0"),
    ({"interval_seconds": -1.5}, "interval_seconds must be .*positive.*, not -1.5"),
    ({"interval_seconds": float("nan")}, "interval_seconds must be .*, not nan"),
    ({"interval_seconds": float("inf")}, "interval_seconds must be .*, not inf"),
    ({"interval_seconds": "60"}, "interval_seconds must be .*, not '60'"),
    (EVERY_STEP | {"tables": "mc.t0"}, r"tables must be a sequence of patterns: tables=\['mc.t0'\]"),
    (EVERY_STEP | {"tables": []}, "tables is empty; leave it out to dump all tables"),
    (
        EVERY_STEP | {"tables": ["mc.*", "ebc.*"]},
        r"'ebc.\*' matches no table; the model has \['mc.t0', 'mc.t1'\]",
    ),
    (EVERY_STEP | {"tables": ["MC.t0"]}, "'MC.t0' matches no table"),
    (EVERY_STEP | {"first_dump": "none"}, "first_dump must be 'full' or 'delta', not 'none'"),
    (EVERY_STEP | {"storage_dtype": "float32"}, "storage_dtype must be 'float16', 'int8', or None .*, not"),
    (EVERY_STEP | {"storage_dtype": torch.int8}, "storage_dtype must be 'float16', 'int8', or None .*, not"),
    (EVERY_STEP | {"max_pending": 0}, "max_pending must be an integer, at least 1, not 0"),
    (EVERY_STEP | {"max_pending_bytes": 0}, "max_pending_bytes must be a positive integer, not 0"),
    (EVERY_STEP | {"max_pending_bytes": -1}, "max_pending_bytes must be a positive integer, not -1"),
]


def _message_of(error: type[Exception], what: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        what(*args, **kwargs)
    return str(caught.value)


def _construct_wrongly(directory: Path) -> list[str]:
    model = build(TWO_TABLES)
    return [
        _message_of(ValueError, DeltaDumper, model, directory, **arguments)
        for arguments, _ in WRONG_ARGUMENTS
    ]


def test_wrong_argument_is_named_with_what_is_right(tmp_path: Path) -> None:
    (messages,) = run_on(1, _construct_wrongly, tmp_path / "deltas")
    for (arguments, expected), message in zip(WRONG_ARGUMENTS, messages, strict=True):
        assert re.search(expected, message), f"{arguments}: {message}"
    assert not (tmp_path / "deltas").exists()


def _models_without_tables(directory: Path) -> list[str]:
    return [
        _message_of(ValueError, DeltaDumper, model, directory, **EVERY_STEP)
        for model in (nn.Linear(2, 2), build_unsharded(one_table()))
    ]


def test_model_without_a_sharded_zch_table_is_refused_with_what_it_needs(tmp_path: Path) -> None:
    ((without, unsharded),) = run_on(1, _models_without_tables, tmp_path / "deltas")
    assert "it needs a sharded ManagedCollisionEmbeddingBagCollection" in without
    assert "wrap it in DistributedModelParallel first" in unsharded


def _dump_a_selection(directory: Path) -> None:
    model = build(TWO_TABLES)
    with DeltaDumper(model, directory, interval_steps=1, tables=["*.t1"]) as dumper:
        assert dumper.tables == ("mc.t1",)
        train(model, TWO_TABLES, range(20))
        dumper.step(1)
    with DeltaDumper(model, directory.with_name("all"), interval_steps=1) as dumper:
        assert dumper.tables == TABLES


def test_patterns_select_tables(tmp_path: Path) -> None:
    run_on(1, _dump_a_selection, tmp_path / "deltas")
    assert list(DeltaLog(tmp_path / "deltas").replay()) == ["mc.t1"]


def _wrong_steps(directory: Path) -> None:
    model = build(TWO_TABLES)
    with DeltaDumper(model, directory, interval_steps=3) as dumper:
        assert dumper.step(4) is None
        for step in (4, 3, 0):
            text = _message_of(ValueError, dumper.step, step)
            assert f"global_step must grow: got {step} after 4" in text
        assert "construct a new DeltaDumper on the same directory" in text
        assert dumper.dump(4)  # the same step, after step() did not dump it
        assert "got 4 after 4" in _message_of(ValueError, dumper.dump, 4)
        assert "got 3 after 4" in _message_of(ValueError, dumper.dump, 3)
        for call in (dumper.step, dumper.dump):
            for wrong in (True, -1, 5.0, "5", None):
                assert f"an integer >= 0, not {wrong!r}" in _message_of(ValueError, call, wrong)
        assert dumper.step(6)
        assert dumper.step(7) is None
    assert [dump.step for dump in DeltaLog(directory).dumps()] == [4, 6, 7]


def test_steps_must_be_integers_that_grow(tmp_path: Path) -> None:
    run_on(1, _wrong_steps, tmp_path / "deltas")


def _wrong_metadata(directory: Path) -> None:
    model = build(TWO_TABLES)
    with DeltaDumper(model, directory, interval_steps=10) as dumper:
        train(model, TWO_TABLES, range(20))
        for metadata in ({"at": Path("x")}, {"loss": float("nan")}, {(1, 2): "x"}, {"ids": {1, 2}}):
            assert "metadata must be a JSON object" in _message_of(ValueError, dumper.dump, 1, metadata)
        # The step was not used up.
        dumper.dump(1, {"path": "ckpt/1", "nested": {"list": [1, 2.5, None, True]}})


def test_metadata_must_be_json(tmp_path: Path) -> None:
    run_on(1, _wrong_metadata, tmp_path / "deltas")
    (dump,) = DeltaLog(tmp_path / "deltas").dumps()
    assert dump.metadata == {"path": "ckpt/1", "nested": {"list": [1, 2.5, None, True]}}


def _wrong_marks(directory: Path) -> None:
    model = build(TWO_TABLES)
    with DeltaDumper(model, directory, interval_steps=10, tables=["mc.t0"]) as dumper:
        assert r"dumped are ['mc.t0']" in _message_of(ValueError, dumper.mark, "mc.t1")
        for rows in ([12], [-1], [3, 12]):
            assert "rows of mc.t0 are 0 to 11" in _message_of(
                ValueError, dumper.mark, "mc.t0", torch.tensor(rows)
            )
        for wrong in (torch.tensor([1.0]), torch.ones(12, dtype=torch.bool)):
            assert "integer" in _message_of(ValueError, dumper.mark, "mc.t0", wrong)
        train(model, TWO_TABLES, range(60))
        dumper.dump(1)
        assert dumper.dump(2).rows == 0
        dumper.mark("mc.t0", torch.empty(0, dtype=torch.int64))
        assert dumper.dump(3).rows == 0
        dumper.mark("mc.t0", torch.arange(12, dtype=torch.int32))
        marked = dumper.dump(4).rows
        dumper.mark("mc.t0")
        assert dumper.dump(5).rows == marked > 0


def test_only_rows_of_a_dumped_table_can_be_marked(tmp_path: Path) -> None:
    run_on(2, _wrong_marks, tmp_path / "deltas")


def _use_after_close(directory: Path) -> None:
    model = build(TWO_TABLES)
    dumper = DeltaDumper(model, directory, interval_steps=1)
    train(model, TWO_TABLES, range(20))
    dumper.step(1)
    dumper.close()
    dumper.close()
    dumper.flush()
    for call, args in ((dumper.step, (2,)), (dumper.dump, (2,)), (dumper.mark, ("mc.t0",))):
        assert "is closed; construct a new one" in _message_of(ValueError, call, *args)
    with DeltaDumper(model, directory, interval_steps=1) as again:
        again.close()
    dist.barrier()
    assert [dump.step for dump in DeltaLog(directory).dumps()] == [1]


def test_closed_dumper_refuses_to_go_on_and_closes_twice_without_ado(tmp_path: Path) -> None:
    run_on(2, _use_after_close, tmp_path / "deltas")


def _open(directory: Path, error: type[Exception]) -> str:
    model = build(TWO_TABLES)
    text = _message_of(error, DeltaDumper, model, directory, **EVERY_STEP)
    assert "compute" not in vars(model.module.mc), "a hook was left on the model"
    return text


def test_directory_that_holds_something_else_is_refused_on_every_rank_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.pt").touch()
    (tmp_path / "step_000000000001.g0000").mkdir()
    first, second = run_on(2, _open, tmp_path, ValueError)
    assert f"output_dir {tmp_path} holds something else than dumps (model.pt)" in first
    assert "use a directory of its own" in first
    assert second == f"rank 0: {first}"
    assert len(list(tmp_path.iterdir())) == 2


def test_output_directory_that_is_a_file_is_refused_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "deltas").write_text("mine")
    messages = run_on(2, _open, tmp_path / "deltas", ValueError)
    assert all(f"output_dir {tmp_path}/deltas is not a directory" in text for text in messages)
    messages = run_on(2, _open, tmp_path / "deltas" / "below", OSError)
    assert all("Not a directory" in text for text in messages)


def test_directory_that_holds_a_broken_log_is_refused_on_every_rank_and_left_alone(tmp_path: Path) -> None:
    broken, uncommitted = tmp_path / "step_000000000001.g0000", tmp_path / "step_000000000002.g0000"
    broken.mkdir()
    uncommitted.mkdir()
    (broken / "manifest.json").write_text("{")
    messages = run_on(2, _open, tmp_path, RuntimeError)
    assert all("step_000000000001.g0000: manifest.json is not a manifest" in text for text in messages)
    assert uncommitted.exists()


def _dump_different_steps(directory: Path) -> None:
    model = build(TWO_TABLES)
    rank = dist.get_rank()
    with DeltaDumper(model, directory, interval_steps=10) as dumper:
        train(model, TWO_TABLES, range(20))
        with pytest.raises(DeltaDumpError, match=r"dumped step 5 on rank 0, 6 on rank 1"):
            dumper.dump(5 + rank)
            dumper.flush()
        dist.barrier()
        assert DeltaLog(directory).dumps() == []
        dist.barrier()
        dumper.dump(7)
        dumper.flush()
        compare(model, TWO_TABLES, str(directory), IDS)


def test_ranks_that_dump_different_steps_are_told_so(tmp_path: Path) -> None:
    run_on(2, _dump_different_steps, tmp_path / "deltas")
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [7]


def _numpy_steps(directory: Path) -> None:
    model = build(TWO_TABLES)
    with DeltaDumper(model, directory, interval_steps=np.int64(2)) as dumper:
        train(model, TWO_TABLES, range(20))
        dumper.step(np.int64(4))


def test_numpy_integers_are_integers(tmp_path: Path) -> None:
    run_on(1, _numpy_steps, tmp_path / "deltas")
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [4]
