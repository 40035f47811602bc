"""Training goes on from a checkpoint, with tables without managed collision, at any world size."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.models import loss_of
from tests.support.plain_models import Collection, Spec, Table, Trainer, answers, build, keyed
from tests.support.rounding import rounded
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog


def _spec(world_size: int) -> Spec:
    last = world_size - 1
    tables = (
        Table("t0", ("f0",)),
        Table("t1", ("f1",), sharding="table_wise", ranks=(last,)),
        Table("t2", ("f2",), sharding="column_wise", ranks=(last, 0)),
        Table("t3", ("f3",), sharding="data_parallel"),
        Table("t4", ("f4",), sharding="column_wise", ranks=(0, last), kernel="dense"),
    )
    return Spec({"ebc": Collection(tables)}, dense_optimizer="weight_decay")


def _train(model: torch.nn.Module, spec: Spec, step: int) -> None:
    ids = [[step % 11], [(step + 3 * dist.get_rank()) % 11]]
    trainer = Trainer(model, spec)
    trainer.finish(loss_of(model(keyed(spec.features, {feature: ids for feature in spec.features}))))


def _compare(model: torch.nn.Module, spec: Spec, directory: Path, storage_dtype: str | None = None) -> None:
    state = DeltaLog(directory).replay()
    for table in spec.collections["ebc"].tables:
        expected = rounded(answers(model, spec, "ebc", table, range(table.rows)).numpy(), storage_dtype)
        assert (state[f"ebc.{table.name}"].lookup(range(table.rows)) == expected).all(), table
    dist.barrier()


def _first_run(directory: Path, stop: int, saved_at: int, storage_dtype: str | None = None) -> dict[str, Any]:
    spec = _spec(dist.get_world_size())
    model = build(spec)
    checkpoint: dict[str, Any] = {}
    with DeltaDumper(model, directory, interval_steps=2, storage_dtype=storage_dtype) as dumper:
        for step in range(1, stop + 1):
            _train(model, spec, step)
            dumper.step(step)
            if step == saved_at:
                for table in spec.collections["ebc"].tables:
                    whole = answers(model, spec, "ebc", table, range(table.rows))
                    checkpoint[f"ebc.embedding_bags.{table.name}.weight"] = whole.numpy()
                checkpoint["dumper"] = dumper.state_dict()
    return checkpoint


def _second_run(
    directory: Path,
    checkpoint: dict[str, Any],
    step: int,
    with_state: bool,
    storage_dtype: str | None = None,
) -> int:
    spec = _spec(dist.get_world_size())
    model = build(spec)
    weights = {key: torch.from_numpy(value) for key, value in checkpoint.items() if key != "dumper"}
    model.load_state_dict(weights)
    with DeltaDumper(model, directory, interval_steps=10**9, storage_dtype=storage_dtype) as dumper:
        if with_state:
            dumper.load_state_dict(checkpoint["dumper"])
        dumper.resume(step)
        if DeltaLog(directory).dumps()[-1].step == step:
            _compare(model, spec, directory, storage_dtype)
        _train(model, spec, 7)
        rows = dumper.dump(step + 1).rows
        dumper.flush()
        _compare(model, spec, directory, storage_dtype)
    return rows


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 3), (3, 1), (1, 2)])
@pytest.mark.parametrize(("stop", "saved_at"), [(4, 4), (8, 5)])
def test_log_says_what_the_model_does_after_a_restart(
    before: int, after: int, stop: int, saved_at: int, with_state: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "deltas"
    checkpoint, *_ = run_on(before, _first_run, directory, stop, saved_at)
    rows = sum(run_on(after, _second_run, directory, checkpoint, saved_at, with_state))
    # What was trained since, and the tables that decay as a whole; t0, t1 and t2 were dumped before.
    assert rows <= 3 * (after + 1) + 2 * 11 + (3 * 11 if saved_at % 2 else 0)


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize("storage_dtype", ["float16", "int8"])
def test_rounded_log_is_compared_with_the_model_rounded_alike(
    storage_dtype: str, with_state: bool, tmp_path: Path
) -> None:
    directory = tmp_path / "deltas"
    checkpoint, *_ = run_on(2, _first_run, directory, 4, 4, storage_dtype)
    rows = sum(run_on(2, _second_run, directory, checkpoint, 4, with_state, storage_dtype))
    # A rank that has some of the columns only cannot tell what int8 makes of the vector: t2 goes out whole.
    assert rows <= 3 * 3 + 2 * 11 + (11 if storage_dtype == "int8" and not with_state else 0)


def _through_dcp(directory: Path, checkpoint: Path, *, save: bool) -> None:
    spec = _spec(dist.get_world_size())
    model = build(spec)
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        contents = {"model": model, "dumper": dumper}
        if not save:
            dcp.load(contents, checkpoint_id=checkpoint)
            dumper.resume(1)
        _train(model, spec, 2)
        rows = dumper.dump(2 if not save else 1).rows
        dumper.flush()
        assert save or rows < 11 * 5, "the state was loaded: not all rows go out again"
        if save:
            dcp.save(contents, checkpoint_id=checkpoint)
    _compare(model, spec, directory)


def test_state_goes_through_dcp_where_a_rank_lacks_a_table(tmp_path: Path) -> None:
    for save in (True, False):
        run_on(2, functools.partial(_through_dcp, save=save), tmp_path / "deltas", tmp_path / "checkpoint")


def _one_table(rows: int, **options: Any) -> Spec:
    return Spec({"ebc": Collection((Table("t0", ("f0",), rows=rows, **options),))}, sharded=False)


def _save_a_table(directory: Path, spec: Spec) -> dict[str, Any]:
    model = build(spec)
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        for step in (1, 2):
            _train(model, spec, step)
            dumper.step(step)
        dumper.step(3)  # says nothing by which one could tell
        return {"weights": model.state_dict(), "dumper": dumper.state_dict()}


def _load_into_another(directory: Path, checkpoint: dict[str, Any], spec: Spec) -> None:
    model = build(spec)
    ((name, weight),) = model.state_dict().items()
    rows = min(len(weight), len(checkpoint["weights"][name]))
    with torch.no_grad():
        weight[:rows] = checkpoint["weights"][name][:rows]
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        dumper.load_state_dict(checkpoint["dumper"])
        dumper.resume(3)
        dumper.dump(4)
        dumper.flush()
        _compare(model, spec, directory)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_one_table(11), _one_table(20)),
        (_one_table(20), _one_table(11)),
        (_one_table(11), _one_table(11, dtype="FP16")),
        (_one_table(11, dtype="FP16"), _one_table(11)),
    ],
    ids=["more rows", "fewer rows", "rounded", "no longer rounded"],
)
def test_checkpoint_of_a_table_that_was_built_otherwise_is_compared(
    before: Spec, after: Spec, tmp_path: Path
) -> None:
    (checkpoint,) = run_on(1, _save_a_table, tmp_path / "deltas", before)
    run_on(1, _load_into_another, tmp_path / "deltas", checkpoint, after)


def _add_a_table(directory: Path) -> None:
    spec = Spec({"ebc": Collection((Table("t0", ("f0",)), Table("t1", ("f1",))))}, sharded=False)
    model = build(spec)
    with DeltaDumper(model, directory, interval_steps=1, tables=["ebc.t0"]) as dumper:
        _train(model, spec, 1)
        dumper.step(1)
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        dumper.resume(1)
        _train(model, spec, 2)
        state = dumper.state_dict()
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        dumper.load_state_dict(state)
        dumper.resume(2)
        dumper.dump(3)
        dumper.flush()
        _compare(model, spec, directory)


def test_table_that_is_dumped_from_now_on_comes_in_whole(tmp_path: Path) -> None:
    run_on(1, _add_a_table, tmp_path / "deltas")
