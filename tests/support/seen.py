"""Whether random schedules showed what they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypothesis import settings


def must_see(seen: Mapping[str, int], events: Iterable[str], more_than: int = 0) -> None:
    """Fails if the examples hardly showed an event: then the test proves nothing about it.

    That holds for the examples that are the same in every run; new ones may miss what is rare.
    """
    missing = [event for event in events if seen.get(event, 0) <= more_than]
    if settings().derandomize:
        assert not missing, f"the schedules hardly showed {missing}: {dict(seen)}"
