"""Threads that use one store: whatever another one does before each line of theirs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tests.support.lines import at_lines
from torchrec_ext.store.update_queue import UpdateQueue


def succeed() -> None:
    pass


def fail() -> None:
    raise ValueError("no room")


class Waiting:
    """Two threads that wait for the same updates, the second before a line of the first."""

    def __init__(self, updates: list[Callable[[], None]]) -> None:
        self.told: list[str] = []
        self._queue = UpdateQueue()
        for update in updates:
            self._queue.submit(update)

    def run(self, line: int) -> int:
        """Lets them; returns how many lines the first ran."""
        lines = at_lines(("update_queue.py",), lambda number: number == line, self._other, self._drain)
        self._drain()
        self._queue.close()
        return lines

    def _other(self) -> None:
        thread = threading.Thread(target=self._drain)
        thread.start()
        if not self._queue._starting.locked():  # else it has to wait for this thread
            thread.join()

    def _drain(self) -> None:
        try:
            self._queue.drain()
        except RuntimeError as error:
            self.told.append(str(error))


@pytest.mark.parametrize("updates", [[succeed], [fail], [succeed, fail, succeed]])
def test_of_threads_that_wait_for_updates_each_goes_on_and_one_is_told_what_failed(
    updates: list[Callable[[], None]],
) -> None:
    for line in itertools.count(1):
        waiting = Waiting(updates)
        lines = waiting.run(line)
        assert waiting.told == ["an asynchronous update of the store failed: no room"] * updates.count(fail)
        if lines < line:
            break
    assert line > 5
