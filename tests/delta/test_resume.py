"""A run goes on from a checkpoint, at any world size: its log goes back with it, and is exact from there."""

from __future__ import annotations

import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, given, settings
from pyarrow.fs import LocalFileSystem, PyFileSystem, SubTreeFileSystem
from torch import nn

from tests.support import models
from tests.support.faults import MortalRanks
from tests.support.filesystems import Hiding
from tests.support.recstore_schedules import RecTable, collection, own_answers
from tests.support.restarts import (
    IDS,
    MODEL,
    Checkpoint,
    Life,
    Step,
    build,
    contents,
    live,
    live_until_killed,
    lives,
    restore,
    train,
)
from tests.support.workers import run_on
from torchrec_ext.checkpoint import reshard_zch
from torchrec_ext.delta import DeltaDumper, DeltaLog, DeltaLogError, DumpId, compact
from torchrec_ext.delta.position import LogPosition
from torchrec_ext.store import SharedMemoryStore, Uniform


def _play(run: tuple[Life, ...]) -> Counter[str]:
    counts: Counter[str] = Counter()
    saved: list[Checkpoint] = []
    with tempfile.TemporaryDirectory() as directory:
        for number, life in enumerate(run):
            checkpoint = saved[-1 - life.back] if life.back < len(saved) else None
            told = run_on(life.world_size, live, directory, number, life, checkpoint)
            saved += told[0].saved
            for rank in told:
                counts += rank.counts
    return counts


# Not shrunk: an example takes seconds.
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(run=lives())
def test_log_follows_a_model_through_restarts(run: tuple[Life, ...]) -> None:
    _play(run)


def _steps(number: int, dumps: set[int], saves: set[int], **options: bool) -> tuple[Step, ...]:
    return tuple(Step(step, step in dumps, step in saves, **options) for step in range(1, number + 1))


@pytest.mark.parametrize("with_state", [True, False])
def test_log_goes_back_and_on_at_every_world_size(with_state: bool) -> None:
    run = (
        Life(2, _steps(8, {3, 6, 8}, {2, 4})),  # 4: between two dumps
        Life(1, _steps(4, {1, 3}, {3}), with_state=with_state, probes=False),
        Life(3, _steps(3, {2}, {1}, save_first=True), with_state=with_state),
        Life(2, _steps(3, {3}, {3}, save_first=True), back=1, with_state=with_state, probes=False),
        Life(2, _steps(2, {2}, {2}), with_state=with_state),
        Life(2, _steps(1, {1}, set()), with_state=with_state, closes=True),
    )
    counts = _play(run)
    assert counts["ahead"] > 0 and counts["superseded"] > 0 and counts["not ahead"] > 0


def _save_after_a_dump(directory: str, saved: Checkpoint) -> None:
    model = build(1)
    with DeltaDumper(model, f"{directory}/deltas", interval_steps=saved.step) as dumper:
        for step in range(1, saved.step + 1):
            train(model, step, first=step == 1)
            dumper.step(step)
        dcp.save(contents(model, dumper=dumper), checkpoint_id=saved.path)


def _go_on(directory: str, saved: Checkpoint, with_state: bool) -> tuple[Counter[str], int]:
    model = build(2)
    with DeltaDumper(model, f"{directory}/deltas", interval_steps=10**9) as dumper:
        state = contents(model, dumper=dumper if with_state else None)
        report = reshard_zch(state, saved.path)
        assert dumper.resume(saved.step) is None
        assert len(DeltaLog(dumper._place).dumps()) == 1
        dumper.dump(saved.step)
        dumper.flush()
    rows = DeltaLog(dumper._place).read(saved.step, 1).to_pylist()
    ops = Counter(f"{row['table_fqn']} {row['op']}" for row in rows)
    return ops, sum(table.evicted + table.unreachable for table in report.tables.values())


@pytest.mark.parametrize("with_state", [True, False])
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_nothing_is_said_again_where_nothing_is_ahead(before: int, after: int, with_state: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved = Checkpoint(f"{directory}/checkpoint", 6, before)
        run_on(before, _save_after_a_dump, directory, saved)
        for ops, evicted in run_on(after, _go_on, directory, saved, with_state):
            # Ids for which the new shards have no room lost their rows; nothing else happened.
            assert set(ops) <= {"mc.t0 delete"}
            assert ops.total() == evicted == 0 or before != after


def _load_on_one_rank(directory: str, saved: Checkpoint) -> None:
    model = build(2)
    with DeltaDumper(model, f"{directory}/deltas", interval_steps=10**9) as dumper:
        restore(model, saved, None)
        state = {"dumper": dumper}
        dcp.load(state, checkpoint_id=saved.path)
        if dist.get_rank() == 1:
            dumper.load_state_dict({"log_position": LogPosition().to_bytes()})
        assert dumper.resume(saved.step) is None
        dumper.dump(saved.step)
        dumper.flush()
    assert DeltaLog(dumper._place).dumps()[-1].rows == 0


def test_state_that_not_all_ranks_have_is_not_used() -> None:
    with tempfile.TemporaryDirectory() as directory:
        saved = Checkpoint(f"{directory}/checkpoint", 6, 2)
        run_on(2, _save_after_a_dump, directory, saved)
        run_on(2, _load_on_one_rank, directory, saved)


def _train_and_dump(directory: str, number: int, steps: list[int], saved: Checkpoint | None) -> None:
    model = build(number)
    with DeltaDumper(model, f"{directory}/deltas", interval_steps=1) as dumper:
        for step in steps:
            train(model, 100 * number + step, first=step == steps[0])
            dumper.step(step)
            if saved is not None and step == saved.step:
                dcp.save(contents(model, dumper=dumper), checkpoint_id=saved.path)


def _resume_with_another_view(directory: str, saved: Checkpoint, who: int, agree: bool) -> None:
    model = build(9)
    hiding = Hiding(LocalFileSystem())
    log = SubTreeFileSystem(f"{directory}/deltas", PyFileSystem(hiding))
    with DeltaDumper(model, log, interval_steps=10**9) as dumper:
        restore(model, saved, dumper)
        if dist.get_rank() == who:
            hiding.names = {DumpId(0, removed).directory for removed in (2, 4, 6, 8)}
            hiding.times = 1 if agree else 100
        if not agree:
            with pytest.raises(DeltaLogError, match=r"ranks see different logs in .*deltas"):
                dumper.resume(5)
            hiding.names = ()
        dumper.resume(5)
        dumper.dump(6)
        dumper.flush()
        states = DeltaLog(f"{directory}/deltas").replay()
        answers = models.answers(model, MODEL, "mc", "t0", IDS).numpy()
        assert np.array_equal(states["mc.t0"].lookup(IDS), answers)
        dist.barrier()


@pytest.mark.parametrize(("who", "agree"), [(0, True), (1, True), (1, False)])
def test_ranks_agree_which_dumps_stand_though_vacuum_comes_when_some_have_listed_them(
    who: int, agree: bool
) -> None:
    """The run in between counted its steps anew: without the checkpoint's dump all of its would stand."""
    with tempfile.TemporaryDirectory() as directory:
        saved = Checkpoint(f"{directory}/checkpoint", 4, 2)
        run_on(2, _train_and_dump, directory, 1, [2, 4, 6, 8], saved)
        compact(f"{directory}/deltas")
        run_on(2, _train_and_dump, directory, 2, [1, 3, 5], None)
        run_on(2, _resume_with_another_view, directory, saved, who, agree)


def _resume_at_different_steps(directory: str) -> None:
    model = build(1)
    with DeltaDumper(model, f"{directory}/deltas", interval_steps=10**9) as dumper:
        with pytest.raises(ValueError, match=r"ranks resume at different steps: \[6, 7\]"):
            dumper.resume(6 + dist.get_rank())
        dumper.resume(7)


def test_ranks_that_resume_at_different_steps_are_told(tmp_path: Path) -> None:
    run_on(2, _resume_at_different_steps, str(tmp_path))


def test_runs_that_are_killed_at_any_moment_are_gone_on_from(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    saved: list[Checkpoint] = []
    stops: Counter[str] = Counter()
    for number in range(6):
        world_size = int(rng.integers(1, 4)) if number % 3 == 2 else 2
        steps = tuple(Step(100 * number + step, True, step % 3 == 1) for step in range(30))
        life = Life(world_size, steps, with_state=bool(rng.random() < 0.6), probes=number % 2 == 1)
        checkpoint = saved[-1] if saved else None
        with MortalRanks(
            world_size, tmp_path / f"meet{number}", live_until_killed, str(tmp_path), number, life, checkpoint
        ) as ranks:
            # Each rank tells the same; a checkpoint is complete when all have told of it.
            heard = [ranks.hear(rank) for rank in range(world_size)]
            assert heard[0][0] == "began"
            for _ in range(int(rng.integers(1, 8))):
                heard = [ranks.hear(rank) for rank in range(world_size)]
                assert len(set(heard)) == 1
                if heard[0][0] == "saved":
                    saved.append(heard[0][1])
            time.sleep(rng.uniform(0, 0.05))  # not to wait for anything: a moment at random
            for rank in rng.permutation(world_size).tolist():
                ranks.kill(rank)
            stops[heard[0][0]] += 1
    generations = [dump.generation for dump in DeltaLog(tmp_path / "deltas").dumps(superseded=True)]
    assert len(set(generations)) > 3
    assert any(dump.supersedes for dump in DeltaLog(tmp_path / "deltas").dumps(superseded=True))
    assert stops["saved"] > 0 and stops["step"] > 0


# -- rows that all ranks share

SHARED = RecTable("t", ("f",), rows=40, dim=4, dynamic={"initializer": Uniform(-1.0, 1.0)})


def _share_rows(directory: str, name: str) -> None:
    store = SharedMemoryStore(name)
    ebc = collection([SHARED], store=store)
    model = nn.ModuleDict({"ebc": ebc})

    def step(number: int) -> None:
        rank = dist.get_rank()
        keys = torch.arange(4) + 3 * number + 4 * rank
        store.write("t", keys, torch.full((4, 4), number + 0.5 * rank))
        dist.barrier()

    def compare() -> None:
        store.drain()
        dist.barrier()
        expected = own_answers(ebc, [SHARED], "t", range(40)).numpy()
        assert np.array_equal(DeltaLog(directory).replay()["ebc.t"].lookup(range(40)), expected)
        dist.barrier()

    with DeltaDumper(model, directory, interval_steps=2) as dumper:
        for number in range(1, 4):
            step(number)
            dumper.step(number)
        saved = {"ebc": ebc.state_dict(), "dumper": dumper.state_dict()}
        saved["ebc"] = {key: tensor.clone() for key, tensor in saved["ebc"].items()}
        step(4)
        dumper.step(4)
    dist.barrier()
    with DeltaDumper(model, directory, interval_steps=2) as dumper:
        if dist.get_rank() == 0:
            ebc.load_state_dict(saved["ebc"])
        dist.barrier()
        dumper.load_state_dict(saved["dumper"])
        result = dumper.resume(3)
        assert result is not None
        assert (result.rows > 0) == (dist.get_rank() == 0)
        compare()
        step(9)
        dumper.step(4)
        dumper.flush()
        compare()
    assert [dump.dump for dump in DeltaLog(directory).dumps()] == [DumpId(0, 2), DumpId(1, 3), DumpId(1, 4)]
    dist.barrier()
    if dist.get_rank() == 0:
        store.unlink()


def test_rows_that_all_ranks_share_go_back_together(tmp_path: Path) -> None:
    run_on(2, _share_rows, str(tmp_path / "deltas"), f"test.{uuid.uuid4().hex}")
