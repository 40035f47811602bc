"""When a dump is due. Every rank must come to the same answer at the same step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store


class Schedule(Protocol):
    """Answers, once per step on every rank, whether to dump now."""

    def due(self, global_step: int) -> bool:
        """Whether a dump is due after this step."""

    def go_on_after(self, global_step: int) -> None:
        """Takes note that training goes on from this step."""


class EverySteps:
    """Due whenever the step number reaches or passes a multiple of ``interval``."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._last: int | None = None

    def due(self, global_step: int) -> bool:
        """See ``Schedule.due``."""
        last = global_step - 1 if self._last is None else self._last
        self._last = global_step
        return global_step // self._interval > last // self._interval

    def go_on_after(self, global_step: int) -> None:
        """See ``Schedule.go_on_after``."""
        self._last = global_step


class EverySeconds:
    """Due every ``interval`` seconds of rank 0's clock.

    Rank 0 decides ahead of time: "at call number n, dump or not, and decide again for call number m".
    It writes its decision to a store, and the others read it when they come to call n, so the calls in
    between talk to nobody. m is set halfway to the expected end of the interval, which makes a handful
    of reads per interval and ends within about a step of it.

    Args:
        interval: seconds.
        rank: this process's rank in the group.
        store: shared by the group, for this schedule alone; None in a single process.
        clock: seconds, monotonic.
    """

    # Rank 0 cannot be further ahead of the others than this: each dump needs them all to commit.
    _KEEP_DECISIONS = 10_000

    def __init__(
        self,
        interval: float,
        rank: int,
        store: Store | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._interval = interval
        self._rank = rank
        self._store = store
        self._clock = clock
        self._calls = 0
        self._decisions = 0
        self._next_call = 2
        self._dump_then = False
        self._last_call = 0
        self._last_time = self._interval_start = clock()

    def due(self, global_step: int) -> bool:
        """See ``Schedule.due``. The step number itself does not matter."""
        self._calls += 1
        if self._calls < self._next_call:
            return False
        due = self._dump_then
        if self._rank == 0:
            self._decide(interval_ends=due)
        if self._store is not None:
            self._share(self._store)
        return due

    def go_on_after(self, global_step: int) -> None:
        """See ``Schedule.go_on_after``. The clock does not mind."""

    def _decide(self, *, interval_ends: bool) -> None:
        now = self._clock()
        if interval_ends:
            self._interval_start = now
        per_call = (now - self._last_time) / (self._calls - self._last_call)
        remaining = self._interval - (now - self._interval_start)
        calls_left = remaining / per_call if per_call > 0 else 2.0
        self._dump_then = calls_left < 2
        self._last_call, self._last_time = self._calls, now
        self._next_call = self._calls + max(1, int(calls_left / 2))

    def _share(self, store: Store) -> None:
        key = f"torchrec_ext/decision/{self._decisions}"
        if self._rank == 0:
            store.set(key, f"{self._next_call} {int(self._dump_then)}")
            if self._decisions >= self._KEEP_DECISIONS:
                store.delete_key(f"torchrec_ext/decision/{self._decisions - self._KEEP_DECISIONS}")
        else:
            call, dump = store.get(key).decode().split()
            self._next_call, self._dump_then = int(call), dump == "1"
        self._decisions += 1


def schedule_of(
    interval_steps: int | None, interval_seconds: float | None, group: dist.ProcessGroup | None
) -> Schedule:
    """The schedule of an interval in steps or in seconds, of all ranks of a group."""
    if interval_steps is not None:
        return EverySteps(interval_steps)
    assert interval_seconds is not None
    if group is None:
        return EverySeconds(interval_seconds, 0, None)
    return EverySeconds(interval_seconds, dist.get_rank(group), group.get_group_store())
