"""Dumps are due at the same step on every rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore

from torchrec_ext.delta.schedule import EverySeconds, EverySteps


def test_every_steps_is_due_at_multiples() -> None:
    schedule = EverySteps(3)
    assert [step for step in range(1, 11) if schedule.due(step)] == [3, 6, 9]


def test_every_steps_is_due_when_a_multiple_was_passed() -> None:
    schedule = EverySteps(100)  # the step number counts samples
    assert [step for step in range(64, 500, 64) if schedule.due(step)] == [128, 256, 320, 448]


def test_every_steps_counts_from_the_first_step_it_sees() -> None:
    schedule = EverySteps(1000)
    assert [step for step in range(1501, 3001) if schedule.due(step)] == [2000, 3000]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(
    interval=st.floats(0.5, 50),
    step_seconds=st.lists(st.floats(0.01, 3), min_size=50, max_size=400),
)
def test_every_seconds_agrees_on_all_ranks(interval: float, step_seconds: list[float]) -> None:
    store, clock = HashStore(), Clock()
    first = EverySeconds(interval, 0, store, clock)
    second = EverySeconds(interval, 1, store, lambda: -1e9)  # its own clock is not asked
    for number, seconds in enumerate(step_seconds, 1):
        clock.now += seconds
        assert first.due(number) == second.due(number)


@pytest.mark.parametrize("step_seconds", [0.05, 1.0, 40.0])
def test_every_seconds_keeps_its_interval_to_within_two_steps(step_seconds: float) -> None:
    interval, clock = 10.0, Clock()
    schedule = EverySeconds(interval, 0, None, clock)
    due = []
    for number in range(1, 2001):
        clock.now += step_seconds
        if schedule.due(number):
            due.append(clock.now)
    assert len(due) > 5
    waits = [b - a for a, b in itertools.pairwise(due)]
    assert all(wait <= interval + 2 * step_seconds for wait in waits)
    assert all(wait >= interval - 2 * step_seconds for wait in waits)


def test_every_seconds_seldom_asks_the_store() -> None:
    class CountingStore(HashStore):
        gets = 0

        def get(self, key: str) -> bytes:
            CountingStore.gets += 1
            return super().get(key)

    store, clock = CountingStore(), Clock()
    first = EverySeconds(100.0, 0, store, clock)
    second = EverySeconds(100.0, 1, store, clock)
    for number in range(1, 5001):
        clock.now += 0.1
        first.due(number)
        second.due(number)
    assert CountingStore.gets < 5 * 15, "five intervals of a thousand steps each"
