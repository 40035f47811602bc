"""Ctrl-C on one rank in the middle of a dump: nobody waits in vain, and nothing is lost."""

from __future__ import annotations

import itertools
import linecache
import signal
import sys
import threading
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

from tests.support import plain_models
from tests.support.faults import log_of
from tests.support.models import build, loss_of, one_table
from tests.support.pauses import FileEvents
from tests.support.schedules import compare
from tests.support.trainers import Trainer
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog, buffers, cut, cutter, writer

# A chunk holds 4 MiB: several pieces on each of two ranks.
ZCH = one_table(rows=5000, dim=1024, hash_size=10_000, eviction_interval=1)


class CtrlC:
    """Presses Ctrl-C once the writer's thread comes to a file, and holds the writer up until it was caught.

    Args:
        directory: of the log.
        name: what the file's name holds.
        at_once: whether it is pressed then; else ``press`` does.
    """

    def __init__(self, directory: Path, name: str, *, at_once: bool = True) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.caught = threading.Event()
        self._name = name
        self._at_once = at_once
        self._events = FileEvents(self._before)
        self._events.directory = str(directory)

    def press(self, *_: object) -> None:
        """Presses it. Of a signal to the process any thread may take note, and the main one too late."""
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    def _before(self, event: str, name: str) -> None:
        if self._name in name and threading.current_thread() is not threading.main_thread():
            self._events.directory = None
            if self._at_once:
                self.press()
            assert self.caught.wait(240), "training must come free though the disk is slow"


def _dump(dumper: DeltaDumper, step: int, ctrl_c: CtrlC | None) -> str:
    try:
        dumper.dump(step)
        dumper.flush()
    except KeyboardInterrupt:
        assert ctrl_c is not None
        ctrl_c.caught.set()
        return "interrupted"
    except DeltaDumpError as error:
        return str(error)
    return "committed"


def _train_zch(model: nn.Module, step: int) -> None:
    rng = np.random.default_rng([step, dist.get_rank()])
    train(model, ZCH, rng.permutation(10_000)[:5000] if step == 1 else rng.integers(0, 10_000, 30))


def _interrupt(directory: Path, victim: int, name: str, max_pending_bytes: int | None) -> list[str]:
    model = build(ZCH)
    outcomes = []
    with DeltaDumper(
        model, directory, interval_steps=10**9, max_pending_bytes=max_pending_bytes, max_pending=1
    ) as dumper:
        _train_zch(model, 1)
        ctrl_c = CtrlC(directory, name) if dist.get_rank() == victim else None
        outcomes.append(_dump(dumper, 1, ctrl_c))
        for step in (2, 3):
            _train_zch(model, step)
            outcomes.append(_dump(dumper, step, None))
        compare(model, ZCH, str(directory), [*range(0, 10_000, 7), -1])
    return outcomes


@pytest.mark.parametrize(("world_size", "victim"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("name", [".part_", ".fallback_"])
def test_dump_in_pieces_that_is_interrupted_on_one_rank_is_committed_by_none(
    world_size: int, victim: int, name: str, tmp_path: Path
) -> None:
    log = tmp_path / "deltas"
    for rank, outcomes in enumerate(run_on(world_size, _interrupt, log, victim, name, 1)):
        if rank == victim:
            assert outcomes[0] == "interrupted"
        elif name == ".part_":
            assert f"rank {victim}: KeyboardInterrupt" in outcomes[0]
        assert outcomes[1:] == ["committed", "committed"]
    steps = [dump.step for dump in DeltaLog(log).dumps()]
    assert steps == ([2, 3] if name == ".part_" else [1, 2, 3]), "the last piece was read: nothing is amiss"
    assert len([*log.glob("step_*")]) == len(steps)


@pytest.mark.parametrize("victim", [0, 1])
def test_dump_in_memory_is_committed_though_one_rank_was_interrupted(victim: int, tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    for rank, outcomes in enumerate(run_on(2, _interrupt, log, victim, ".part_", None)):
        assert outcomes == ["interrupted" if rank == victim else "committed", "committed", "committed"]
    assert [dump.step for dump in DeltaLog(log).dumps()] == [1, 2, 3]


def _interrupt_before_it_is_handed_over(directory: Path, victim: int) -> list[str]:
    """The writer is behind, so that training waits to hand over its dump."""
    model = build(ZCH)
    outcomes = []
    with DeltaDumper(model, directory, interval_steps=10**9, max_pending=1) as dumper:
        _train_zch(model, 1)
        ctrl_c = CtrlC(directory, ".part_", at_once=False) if dist.get_rank() == victim else None
        dumper.dump(1)
        for step in (2, 3):
            _train_zch(model, step)
            with log_of("torchrec_ext.delta.writer", ctrl_c.press) if ctrl_c and step == 2 else nullcontext():
                outcomes.append(_dump(dumper, step, ctrl_c))
        compare(model, ZCH, str(directory), [*range(0, 10_000, 7), -1])
    return outcomes


def test_dump_that_waited_for_the_writer_when_it_was_interrupted_is_handed_over_all_the_same(
    tmp_path: Path,
) -> None:
    log = tmp_path / "deltas"
    outcomes = run_on(2, _interrupt_before_it_is_handed_over, log, 1)
    assert outcomes == [["committed", "committed"], ["interrupted", "committed"]]
    assert [dump.step for dump in DeltaLog(log).dumps()] == [1, 2, 3]


# -- columns of one vector on several ranks

COLUMNS = plain_models.one_table(rows=6000, dim=512, sharding="column_wise", ranks=(0, 1))


def _interrupt_columns(directory: Path, victim: int, max_pending_bytes: int | None) -> list[str]:
    model = plain_models.build(COLUMNS)
    (table,) = COLUMNS.collections["ebc"].tables

    def step(number: int) -> None:
        loss_of(model(plain_models.keyed(["f0"], {"f0": [[number, 7 * number]]}))).backward()

    with DeltaDumper(model, directory, interval_steps=10**9, max_pending_bytes=max_pending_bytes) as dumper:
        step(1)
        ctrl_c = CtrlC(directory, ".part_") if dist.get_rank() == victim else None
        outcomes = [_dump(dumper, 1, ctrl_c)]
        for number in (2, 3):
            step(number)
            outcomes.append(_dump(dumper, number, None))
        expected = plain_models.answers(model, COLUMNS, "ebc", table, range(6000)).numpy()
        assert np.array_equal(DeltaLog(directory).replay()["ebc.t0"].lookup(range(6000)), expected)
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("max_pending_bytes", [1, None])
def test_columns_of_a_dump_that_was_interrupted_come_together_later(
    victim: int, max_pending_bytes: int | None, tmp_path: Path
) -> None:
    log = tmp_path / "deltas"
    for rank, outcomes in enumerate(run_on(2, _interrupt_columns, log, victim, max_pending_bytes)):
        assert outcomes[1:] == ["committed", "committed"]
        assert (outcomes[0] == "interrupted") == (rank == victim)


# -- at any line

_FILES = {module.__file__ for module in (buffers, cut, cutter, writer)}


class CtrlCAtLine:
    """Raises ``KeyboardInterrupt`` before a line of ``_FILES`` when the calling thread comes to it again.

    Args:
        line: the file and the line; None: it does not.
        times: how many times the thread has come to it by then.

    Attributes:
        lines: how many times it has come to which.
    """

    def __init__(self, line: tuple[str, int] | None, times: int) -> None:
        self.lines: Counter[tuple[str, int]] = Counter()
        self._line, self._times = line, times

    def __enter__(self) -> CtrlCAtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        path, line = frame.f_code.co_filename, frame.f_lineno
        if path not in _FILES:
            return None
        # Tracing comes to these where no signal can: between leaving a block and releasing its lock, for one.
        if event == "line" and not linecache.getline(path, line).lstrip().startswith(("with ", "try:")):
            self.lines[path, line] += 1
            if (path, line) == self._line and self.lines[path, line] == self._times:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._trace


def _interrupted_at(
    line: tuple[str, int] | None, times: int, log: Path, max_pending_bytes: int | None
) -> Counter[tuple[str, int]]:
    trainer, steps = Trainer(0), iter(range(1, 100))

    def train() -> int:
        for step in itertools.islice(steps, 3):
            trainer.train(step)
        return step

    with trainer.attach(log, max_pending_bytes=max_pending_bytes) as dumper:
        dumper.dump(train())
        dumper.flush()
        step = train()
        with suppress(KeyboardInterrupt), CtrlCAtLine(line, times) as ctrl_c:
            dumper.dump(step)
        with suppress(DeltaDumpError):  # of the dump that was interrupted
            dumper.dump(train())
        dumper.dump(train())
        dumper.flush()
        trainer.compare(log)
        pool = dumper._cutter._pool
        assert pool.handed_out == 0
        assert len({chunk.data_ptr() for chunk in pool._free}) == len(pool._free), "given back once"
    return ctrl_c.lines


@pytest.mark.parametrize("max_pending_bytes", [None, 1])
def test_wherever_a_dump_is_interrupted_nothing_is_lost_and_no_memory_is_given_back_twice(
    max_pending_bytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "CHUNK_BYTES", 64)  # four vectors: in pieces, there are several
    whole = _interrupted_at(None, 0, tmp_path / "whole", max_pending_bytes)
    missed = 0
    for number, line in enumerate(whole):
        times = min(whole[line], 2)
        lines = _interrupted_at(line, times, tmp_path / str(number), max_pending_bytes)
        missed += lines[line] < times
    assert missed < 3, "but for lines that wait: there may be nothing to wait for"
