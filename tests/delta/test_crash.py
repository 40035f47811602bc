"""Killed ranks, full disks and slow ones: a log never shows half a dump; what failed is said later."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.faults import MortalRanks, full_disk, log_of, replaced_fsync
from tests.support.models import Spec, build, one_table
from tests.support.schedules import compare
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import CorruptTableError, DeltaDumper, DeltaDumpError, DeltaLog, DumpId
from torchrec_ext.zch import find_zch_tables

# -- killed ranks


def _spec_of_run(run: int) -> Spec:
    return one_table(rows=4000, dim=32, hash_size=12_000, eviction_interval=1, seed=run)


def _train_and_dump(tell: Callable[..., None], directory: Path, run: int) -> None:
    """A run that starts from scratch, checks its first dump and goes on dumping until it is killed."""
    spec = _spec_of_run(run)
    model = build(spec)
    rng = np.random.default_rng([run, dist.get_rank()])
    dumper = DeltaDumper(model, directory, interval_steps=1)
    tell("generation", dumper.generation, _uncommitted(directory))
    try:
        for step in itertools.count(1):
            if step < 3:
                train(model, spec, rng.integers(0, 12_000, 6000))
            dumper.mark("mc.t0")
            tell("dumping", step)
            began = time.perf_counter()
            dumper.step(step)
            dumper.flush()
            tell("dumped", step, time.perf_counter() - began)
            if step == 1:
                compare(model, spec, str(directory), [*range(12_000), -1, 2**62])
                tell("faithful")
    except DeltaDumpError as error:
        # The dump may be committed or not: to dump once more must not touch its files.
        tell("error", str(error), str(_error_of(dumper.close)))


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
    time.sleep(moment * min(seconds, 0.5))  # as above
    ranks.kill(victim)
    for survivor in set(range(ranks.world_size)) - {victim}:
        while (message := ranks.hear(survivor))[0] != "error":
            assert message[0] in ("dumped", "dumping")
        assert all("another rank is gone" in text for text in message[1:])
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
    for run in range(3 * kills):  # more than ``kills`` where hardly one of them hits a dump
        victim = int(rng.integers(world_size))
        with MortalRanks(world_size, tmp_path / f"meet{run}", _train_and_dump, directory, run) as ranks:
            for rank in range(world_size):
                _, generation, uncommitted = ranks.hear(rank)
                assert generation == run
                assert not uncommitted
            if run % 4 == 3:
                _kill_in_the_first_dump(ranks, victim, rng.uniform(0, duration))
            else:
                duration = _kill_in_a_later_dump(ranks, victim, rng.uniform(0, 1.2))

        # Only now are all of them gone: a survivor may have committed a dump until then.
        log = DeltaLog(directory)
        dumps = log.dumps()
        assert [dump.dump for dump in dumps[: len(committed)]] == committed
        for dump in dumps[len(committed) :]:
            assert dump.generation == generation
            assert len(log.read(dump.step, generation)) == dump.rows
        committed = [dump.dump for dump in dumps]
        left_uncommitted += len(_uncommitted(directory))
        if run + 1 >= kills and left_uncommitted > kills // 4:
            break

    print(f"{left_uncommitted} of {run + 1} kills left a dump uncommitted")
    assert left_uncommitted > kills // 4, "hardly a kill hit a dump: the test proves little"
    assert set(DeltaLog(directory).replay()) == {"mc.t0"}


# -- full disks

SPEC = one_table(rows=12, hash_size=60, eviction_interval=1)
IDS = [*range(60), 61, -1, 2**63 - 2]


def _train_some(model: nn.Module, step: int) -> None:
    """The popular ids move on, so that rows change hands between dumps."""
    rng = np.random.default_rng([step, dist.get_rank()])
    train(model, SPEC, (5 * step + rng.integers(0, 60, 40) ** 2 // 60) % 60)


def _dump_and_flush(dumper: DeltaDumper, step: int) -> None:
    # A manifest larger than all else, so that a disk may have room for everything but it.
    dumper.dump(step, {"note": 20_000 * "x"})
    dumper.flush()


def _error_of(what: Callable[[], object]) -> DeltaDumpError:
    with pytest.raises(DeltaDumpError) as caught:
        what()
    return caught.value


def _dump_to_a_full_disk(
    directory: Path, full_on: list[int], free_bytes: int, failures: int, goes_on: bool
) -> None:
    rank = dist.get_rank()
    model = build(SPEC)
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        _train_some(model, 1)
        dumper.step(1)
        dumper.flush()
        with full_disk(free_bytes) if rank in full_on else contextlib.nullcontext():
            for step in range(2, 2 + failures):
                _train_some(model, step)
                error = _error_of(partial(_dump_and_flush, dumper, step))
                for full in full_on:
                    assert f"rank {full}: OSError: " in str(error) or "rank 0 could not write" in str(error)
                assert str(error).startswith(f"{directory}: the dump of step {step} was not committed")
                assert os.strerror(errno.EFBIG) in str(error)
                if rank in full_on:
                    assert isinstance(error.__cause__, OSError)
                    assert error.__cause__.errno == errno.EFBIG
                else:
                    assert error.__cause__ is None
                assert [dump.step for dump in DeltaLog(directory).dumps()] == [1]
        dist.barrier()
        assert {path.parent.name for path in directory.glob("step_*/*")} == {"step_000000000001.g0000"}
        dist.barrier()
        if goes_on:  # else all that the next dump holds is what those before failed to say
            _train_some(model, 2 + failures)
        dumper.step(2 + failures)
        dumper.flush()
        compare(model, SPEC, str(directory), IDS)


@pytest.mark.parametrize(
    ("world_size", "full_on"), [(1, [0]), (2, [0]), (2, [1]), (2, [0, 1])], ids=lambda value: str(value)
)
@pytest.mark.parametrize("free_bytes", [0, 1000])
@pytest.mark.parametrize(("failures", "goes_on"), [(1, False), (1, True), (5, True)])
def test_rows_that_a_full_disk_refused_go_out_once_there_is_room(
    world_size: int, full_on: list[int], free_bytes: int, failures: int, goes_on: bool, tmp_path: Path
) -> None:
    run_on(world_size, _dump_to_a_full_disk, tmp_path / "deltas", full_on, free_bytes, failures, goes_on)
    log = DeltaLog(tmp_path / "deltas")
    assert [dump.step for dump in log.dumps()] == [1, 2 + failures]
    # However many dumps failed, a key is said once: what is kept does not pile up.
    keys = log.read(2 + failures)["key_id"].to_pylist()
    assert len(keys) == len(set(keys)) > 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_dump_whose_manifest_does_not_fit_on_the_disk_is_not_committed(
    world_size: int, tmp_path: Path
) -> None:
    free_bytes = 15_000  # enough for a part, not for the manifest
    run_on(world_size, _dump_to_a_full_disk, tmp_path / "deltas", [0], free_bytes, 2, True)
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [1, 4]


def _step_until_told(directory: Path) -> int:
    model = build(SPEC)
    with DeltaDumper(model, directory, interval_steps=10**12) as dumper:
        _train_some(model, 1)
        step = 1
        with full_disk():
            # When the writer's thread comes to it is its own affair.
            with pytest.raises(DeltaDumpError, match="step 1 was not committed") as caught:
                dumper.dump(step)
                while True:
                    step += 1
                    dumper.step(step)
            assert isinstance(caught.value.__cause__, OSError)
        dumper.step(step + 1)  # said once
    return step


def test_failed_writer_surfaces_at_a_later_step(tmp_path: Path) -> None:
    (step,) = run_on(1, _step_until_told, tmp_path / "deltas")
    # Leaving the block said what the first dump could not.
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [step + 1]


def _fail_the_last_dump(directory: Path) -> None:
    model = build(SPEC)
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        _train_some(model, 1)
        with full_disk() if dist.get_rank() == dist.get_world_size() - 1 else contextlib.nullcontext():
            _error_of(partial(_dump_and_flush, dumper, 1))
        dist.barrier()
    compare(model, SPEC, str(directory), IDS)


@pytest.mark.parametrize("world_size", [1, 2])
def test_leaving_the_block_says_what_the_last_dump_could_not(world_size: int, tmp_path: Path) -> None:
    run_on(world_size, _fail_the_last_dump, tmp_path / "deltas")
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [1]


def _leave_a_full_disk(directory: Path) -> None:
    model = build(SPEC)
    dumper = DeltaDumper(model, directory, interval_steps=1)
    _train_some(model, 1)
    with full_disk():
        with contextlib.suppress(DeltaDumpError):
            dumper.step(1)
        _error_of(dumper.close)
    dumper.close()
    _train_some(model, 2)


def test_closing_over_a_full_disk_raises_and_leaves_the_model_alone(tmp_path: Path) -> None:
    run_on(2, _leave_a_full_disk, tmp_path / "deltas")
    assert DeltaLog(tmp_path / "deltas").dumps() == []


# -- a rank that leaves


def _leave_by_an_exception(directory: Path, leaver: int, has_pending: bool) -> None:
    model = build(SPEC)
    try:
        with DeltaDumper(model, directory, interval_steps=1) as dumper:
            _train_some(model, 1)
            dumper.step(1)
            dumper.flush()
            if dist.get_rank() == leaver:
                if has_pending:
                    dumper.dump(2)
                raise RuntimeError("training failed")
            if has_pending:
                dumper.close()  # nothing is left to say
            else:
                for fails in (partial(_dump_and_flush, dumper, 2), dumper.close):
                    assert "another rank is gone" in str(_error_of(fails))
    except RuntimeError as error:
        assert "training failed" in str(error)
    # Its process lives on, and so does the other: together they go on from what was committed.
    dist.barrier()
    assert [dump.step for dump in DeltaLog(directory).dumps()] == [1]
    dist.barrier()
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        _train_some(model, 2)
        dumper.step(2)
    compare(model, SPEC, str(directory), IDS)
    for thread in threading.enumerate():
        if thread.name == "torchrec-ext-delta":
            thread.join()


@pytest.mark.parametrize("has_pending", [False, True])
@pytest.mark.parametrize("leaver", [0, 1])
def test_rank_that_leaves_by_an_exception_makes_the_others_fail_instead_of_hang(
    leaver: int, has_pending: bool, tmp_path: Path
) -> None:
    run_on(2, _leave_by_an_exception, tmp_path / "deltas", leaver, has_pending)
    assert [dump.dump for dump in DeltaLog(tmp_path / "deltas").dumps()] == [DumpId(0, 1), DumpId(1, 2)]


# -- slow disks


def _dump_faster_than_the_disk(directory: Path, limits: dict[str, int], dumps: int) -> list[str]:
    happened: list[str] = []
    disk_goes_on = threading.Event()

    def fsync(descriptor: int, fsync: Callable[[int], None] = os.fsync) -> None:
        assert disk_goes_on.wait(240)
        fsync(descriptor)

    def heard(message: str) -> None:
        if "training waits" in message:
            happened.append(message)
            disk_goes_on.set()  # had training not waited and said so, this would never be

    model = build(SPEC)
    with DeltaDumper(model, directory, interval_steps=1, **limits) as dumper:
        with log_of("torchrec_ext.delta", heard), replaced_fsync(fsync):
            for step in range(1, dumps + 1):
                _train_some(model, step)
                happened.append(f"step {step}")
                dumper.step(step)
                happened.append(f"went on after {step}")
            dumper.flush()
        compare(model, SPEC, str(directory), IDS)
    return happened


@pytest.mark.parametrize(
    ("limits", "fit", "reason"),
    [
        ({"max_pending": 1}, 1, "(max_pending=1)"),
        ({"max_pending": 3}, 3, "(max_pending=3)"),
        ({"max_pending": 3, "max_pending_bytes": 1}, 1, "(max_pending_bytes)"),
    ],
)
def test_training_waits_for_a_disk_that_falls_behind_and_says_so(
    limits: dict[str, int], fit: int, reason: str, tmp_path: Path
) -> None:
    (happened,) = run_on(1, _dump_faster_than_the_disk, tmp_path / "deltas", limits, fit + 1)
    *before, said, _ = happened
    assert reason in said
    assert before[-2:] == [f"went on after {fit}", f"step {fit + 1}"]
    assert len(DeltaLog(tmp_path / "deltas").dumps()) == fit + 1


# -- dumps larger than the memory they may take

# A chunk holds 4 MiB: two pieces and a bit on each of two ranks.
LARGE = one_table(rows=20_000, dim=256, hash_size=40_000, eviction_interval=1)


def _train_large(model: nn.Module, step: int) -> None:
    rng = np.random.default_rng([step, dist.get_rank()])
    train(model, LARGE, rng.permutation(40_000)[:20_000])


def _dump_streamed_and_buffered(directory: Path) -> None:
    model = build(LARGE)
    streamed = DeltaDumper(model, directory / "streamed", interval_steps=1, max_pending_bytes=1)
    buffered = DeltaDumper(model, directory / "buffered", interval_steps=1)
    for step in (1, 2):
        _train_large(model, step)
        one, other = streamed.step(step), buffered.step(step)
        assert one and other
        assert (one.upserts, one.deletes, one.vector_bytes) == (
            other.upserts,
            other.deletes,
            other.vector_bytes,
        )
        assert one.vector_bytes > 8 << 20
    streamed.close()
    buffered.close()
    compare(model, LARGE, str(directory / "streamed"), [*range(40_000), -1])


def test_dump_written_in_pieces_holds_the_rows_of_one_written_at_once(tmp_path: Path) -> None:
    directory = tmp_path / "deltas"
    directory.mkdir()
    run_on(2, _dump_streamed_and_buffered, directory)
    streamed, buffered = DeltaLog(directory / "streamed"), DeltaLog(directory / "buffered")
    assert [dump.step for dump in streamed.dumps()] == [1, 2]
    for one, other in zip(streamed.dumps(), buffered.dumps(), strict=True):
        assert (one.upserts, one.deletes) == (other.upserts, other.deletes)
        rows = [log.read(one.step).sort_by("key_id") for log in (streamed, buffered)]
        assert rows[0].equals(rows[1])
    assert streamed.dumps()[1].deletes > 0


def _stream_to_a_full_disk(directory: Path, full_on: list[int], free_bytes: int) -> None:
    model = build(LARGE)
    with DeltaDumper(model, directory, interval_steps=1, max_pending_bytes=1) as dumper:
        _train_large(model, 1)
        with full_disk(free_bytes) if dist.get_rank() in full_on else contextlib.nullcontext():
            error = _error_of(partial(_dump_and_flush, dumper, 1))
            assert os.strerror(errno.EFBIG) in str(error)
            _train_large(model, 2)
            _error_of(partial(_dump_and_flush, dumper, 2))
        dist.barrier()
        _train_some(model, 3)  # what is new fits into memory; what was refused does not
        dumper.step(3)
        dumper.flush()
        compare(model, LARGE, str(directory), [*range(40_000), -1])
        _train_some(model, 4)
        dumper.step(4)
        dumper.flush()
        compare(model, LARGE, str(directory), [*range(40_000), -1])


@pytest.mark.parametrize(("world_size", "full_on"), [(1, [0]), (2, [0]), (2, [1])])
@pytest.mark.parametrize("free_bytes", [0, 5 << 20])
def test_dump_written_in_pieces_to_a_full_disk_loses_nothing(
    world_size: int, full_on: list[int], free_bytes: int, tmp_path: Path
) -> None:
    run_on(world_size, _stream_to_a_full_disk, tmp_path / "deltas", full_on, free_bytes)
    log = DeltaLog(tmp_path / "deltas")
    assert [dump.step for dump in log.dumps()] == [3, 4]
    keys = log.read(3)["key_id"].to_pylist()
    assert len(keys) == len(set(keys)) > 10_000


def _stream_a_corrupt_table(directory: Path, bad_rank: int) -> None:
    model = build(LARGE)
    with DeltaDumper(model, directory, interval_steps=1, max_pending_bytes=1) as dumper:
        _train_large(model, 1)
        (table,) = find_zch_tables(model)
        intact = table.weight()[:-1].clone()
        corrupt = dist.get_rank() == bad_rank
        with torch.no_grad():
            if corrupt:
                table.weight()[:-1] = torch.nan
            with pytest.raises(
                CorruptTableError if corrupt else DeltaDumpError,
                match=rf"mc\.t0 on rank {bad_rank}: \d+ of \d+ changed vectors are not finite: ids",
            ):
                _dump_and_flush(dumper, 1)
            assert DeltaLog(directory).dumps() == []
            dist.barrier()
            table.weight()[:-1] = intact
        dumper.step(2)
        dumper.flush()
        compare(model, LARGE, str(directory), [*range(40_000), -1])


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_corrupt_vector_in_a_dump_written_in_pieces_is_reported_on_every_rank(
    bad_rank: int, tmp_path: Path
) -> None:
    run_on(2, _stream_a_corrupt_table, tmp_path / "deltas", bad_rank)
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [2]


_SCRIPT = """
import os, sys, tempfile
import torch.distributed as dist
from tests.support.models import build, keyed, loss_of, one_table
from tests.support.workers import join_ranks
from torchrec_ext.delta import DeltaDumper

how, meeting = sys.argv[1:]
join_ranks(0, 1, meeting)
model = build(one_table())
dumper = DeltaDumper(model, tempfile.mkdtemp(), interval_steps=1)
loss_of(model(keyed(["f0"], {"f0": [[1, 2]]}))).backward()
if how == "exception":
    with dumper:
        dumper.step(1)
        raise ValueError("mine")
dumper.step(1)
if how == "closed":
    dumper.close()
"""


@pytest.mark.parametrize(("how", "code"), [("closed", 0), ("never closed", 0), ("exception", 1)])
def test_a_process_ends_as_it_would_without_a_dumper(tmp_path: Path, how: str, code: int) -> None:
    for attempt in range(3):
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _SCRIPT, how, str(tmp_path / f"meeting{attempt}")],
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == code, done.stderr
        assert ("ValueError: mine" in done.stderr) == (how == "exception")
        assert ("was not closed" in done.stderr) == (how == "never closed")
