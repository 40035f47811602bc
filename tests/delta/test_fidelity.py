"""The fidelity invariant: replaying the dumps answers what the model answers, for every id, bit for bit.

Where vectors are stored rounded, it answers what the model answers after the same rounding.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, example, given, settings

from tests.support.schedules import Schedule, churn, run_schedule, schedules
from tests.support.seen import must_see
from tests.support.workers import run_on

MUST_SEE = (
    "dumps",
    "compared",
    "admissions",
    "evictions",
    "re-admissions",
    "same-row re-admissions",
    "same-row re-admissions within an interval",
    "stored as float32",
    "stored as float16",
    "stored as int8",
)


@pytest.mark.parametrize(("world_size", "examples"), [(1, 60), (2, 40), (3, 30)])
def test_replay_answers_what_the_model_answers(world_size: int, examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(schedules())
    @example(churn(world_size))
    def every_schedule(schedule: Schedule) -> None:
        for counts in run_on(world_size, run_schedule, schedule):
            seen.update(counts)

    every_schedule()
    print(f"{world_size} ranks: {dict(seen)}")
    must_see(seen, MUST_SEE)
