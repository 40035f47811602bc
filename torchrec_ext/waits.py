"""Waits of a main thread that hear every signal.

Python runs a signal's handler on the main thread, which looks for signals between its instructions. One that
comes after it has looked and before it sleeps, or that the kernel has another thread take note of, does not
wake it: so it does not sleep for long.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_SLEEP_SECONDS = 0.5


def wait_until(changed: threading.Condition, predicate: Callable[[], object]) -> None:
    """``changed.wait_for(predicate)``, which is called with the condition's lock held."""
    while not changed.wait_for(predicate, _SLEEP_SECONDS):
        pass


def wait_until_set(event: threading.Event) -> None:
    """``event.wait()``."""
    while not event.wait(_SLEEP_SECONDS):
        pass


def acquire(semaphore: threading.Semaphore) -> None:
    """``semaphore.acquire()``."""
    while not semaphore.acquire(timeout=_SLEEP_SECONDS):
        pass
