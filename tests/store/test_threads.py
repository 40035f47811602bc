"""Threads that use one store: whatever another one does before each line of theirs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from tests.support.lines import at_lines
from tests.support.ports import Port
from torchrec_ext.errors import StoreError
from torchrec_ext.store import MemoryStore, RemoteStore, StoreServer
from torchrec_ext.store.update_queue import UpdateQueue


def on_another_thread(do: Callable[[], object], *, waits: bool = True) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    if waits:
        thread.join()


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
        # Who has the lock is waited for by the other thread.
        on_another_thread(self._drain, waits=not self._queue._starting.locked())

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


def test_who_comes_while_a_server_starts_finds_it_ready_or_not_at_all() -> None:
    port = Port()
    url = f"grpc://127.0.0.1:{port.number}"
    found: list[object] = []

    def come() -> None:
        try:
            with RemoteStore([url]) as store:
                found.append(dict(store.tables))
        except StoreError as error:
            found.append("no" if "cannot be reached" in str(error) else str(error))

    def start() -> None:
        StoreServer(MemoryStore(), url).close()

    at_lines(("flight/server.py",), lambda number: True, lambda: on_another_thread(come), start)
    port.release()
    started = found.index({})
    assert found[:started] == ["no"] * started and started > 5
    assert {} in found[started + 1 :] and all(one in ({}, "no") for one in found)
