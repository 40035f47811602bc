"""The delta dumper follows RecStore tables: fidelity, and what is refused."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import HealthCheck, example, given, settings

from tests.support.recstore_schedules import Run, Schedule, churn, schedules
from tests.support.seen import must_see

MUST_SEE = (
    "dumps",
    "compared",
    "admissions",
    "evictions",
    "evictions by hand",
    "re-admissions",
    "same-row re-admissions",
    "re-admissions within an interval",
    "full tables",
    "loads",
    "restarts",
)


def test_replay_answers_what_a_collection_answers() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(schedules())
    @example(churn())
    def every_schedule(schedule: Schedule) -> None:
        with tempfile.TemporaryDirectory() as directory:
            seen.update(Run(schedule, Path(directory)).play())

    every_schedule()
    must_see(seen, MUST_SEE)
