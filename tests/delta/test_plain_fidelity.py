"""The fidelity invariant for tables without managed collision, in every way they can be sharded."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.support.plain_schedules import KINDS, Schedule, run_schedule, schedules
from tests.support.seen import must_see
from tests.support.workers import run_on

MUST_SEE = (*KINDS, "row_wise", "table_wise", "column_wise", "dumps of some rows")


@pytest.mark.parametrize(("world_size", "examples"), [(1, 50), (2, 30), (3, 20)])
def test_replay_answers_what_the_model_answers(world_size: int, examples: int) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        # Without shrinking: ranks that failed are started anew, which takes long.
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(schedules(world_size))
    def every_schedule(schedule: Schedule) -> None:
        for counts in run_on(world_size, run_schedule, schedule):
            seen.update(counts)

    every_schedule()
    print(f"{world_size} ranks: {dict(seen)}")
    must_see(seen, MUST_SEE)
