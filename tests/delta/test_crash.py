"""Killed processes, full disks and slow ones: a log never shows half a dump, and what failed is said later."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.faults import MortalRanks, full_disk, log_of, replaced_fsync
from tests.support.models import Spec, build, one_table
from tests.support.schedules import compare
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumpError, DeltaDumper, DeltaLog, DumpId

# -- killed ranks


def _spec_of_run(run: int) -> Spec:
    return one_table(rows=4000, dim=32, hash_size=12_000, eviction_interval=1, seed=run)


def _train_and_dump(tell: Callable[..., None], directory: Path, run: int) -> None:
    """A run that starts from scratch, checks its first dump and goes on dumping until it is killed."""
    spec = _spec_of_run(run)
    model = build(spec)
    rng = np.random.default_rng([run, dist.get_rank()])
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        tell("generation", dumper.generation, _uncommitted(directory))
        for step in itertools.count(1):
            if step < 3:
                train(model, spec, rng.integers(0, 12_000, 6000))
            dumper.mark("mc.t0")
            tell("dumping", step)
            began = time.perf_counter()
            try:
                dumper.step(step)
                dumper.flush()
            except DeltaDumpError as error:
                tell("error", str(error))
                return
            tell("dumped", step, time.perf_counter() - began)
            if step == 1:
                compare(model, spec, str(directory), [*range(12_000), -1, 2**62])
                tell("faithful")


def _uncommitted(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("step_*") if not (path / "manifest.json").exists()]


def _kill_in_the_first_dump(ranks: MortalRanks, victim: int, delay: float) -> None:
    assert ranks.hear(victim) == ("dumping", 1)
    time.sleep(delay)  # not to wait for anything: a moment at random
    ranks.kill(victim)


def _kill_in_a_later_dump(ranks: MortalRanks, victim: int, moment: float) -> float:
    """Hears that the first dump is what the model answers, and kills in the second or the third.

    Args:
        ranks: which have just begun.
        victim: the rank to kill.
        moment: when, as a share of a dump's duration.

    Returns:
        The duration of the first dump, seconds.
    """
    for rank in range(ranks.world_size):
        assert ranks.hear(rank) == ("dumping", 1)
        _, step, seconds = ranks.hear(rank)
        assert step == 1
        assert ranks.hear(rank) == ("faithful",)
        assert ranks.hear(rank) == ("dumping", 2)
    time.sleep(moment * seconds)  # as above
    ranks.kill(victim)
    for survivor in set(range(ranks.world_size)) - {victim}:
        while (message := ranks.hear(survivor))[0] != "error":
            assert message[0] in ("dumped", "dumping")
        assert "was not committed" in message[1]
    return seconds


@pytest.mark.parametrize(("world_size", "kills"), [(1, 24), (2, 6)])
def test_killed_run_leaves_complete_dumps_and_the_next_run_continues_them(
    world_size: int, kills: int, tmp_path: Path
) -> None:
    directory = tmp_path / "deltas"
    rng = np.random.default_rng(world_size)
    left_uncommitted = 0
    duration = 0.05
    committed: list[DumpId] = []
    for run in range(kills):
        victim = int(rng.integers(world_size))
        with MortalRanks(world_size, tmp_path / f"meet{run}", _train_and_dump, directory, run) as ranks:
            for rank in range(world_size):
                _, generation, uncommitted = ranks.hear(rank)
                assert generation == (committed[-1].generation + 1 if committed else 0)
                assert not uncommitted
            if run % 4 == 3:
                _kill_in_the_first_dump(ranks, victim, rng.uniform(0, duration))
            else:
                duration = _kill_in_a_later_dump(ranks, victim, rng.uniform(0, 1.2))

            log = DeltaLog(directory)
            dumps = log.dumps()
            assert [dump.dump for dump in dumps[: len(committed)]] == committed
            for dump in dumps[len(committed) :]:
                assert dump.generation == generation
                assert len(log.read(dump.step, generation)) == dump.rows
            committed = [dump.dump for dump in dumps]
            left_uncommitted += len(_uncommitted(directory))

    print(f"{left_uncommitted} of {kills} kills left a dump uncommitted")
    assert left_uncommitted > kills // 4, "hardly a kill hit a dump: the test proves little"
    assert set(DeltaLog(directory).replay()) == {"mc.t0"}
