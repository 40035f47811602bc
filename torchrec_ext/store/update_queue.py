"""Updates that are applied in the background, in the order in which they were issued."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torchrec_ext.store.forks import when_forked


class UpdateQueue:
    """One background thread, started when it is needed first."""

    def __init__(self) -> None:
        self.after_fork()
        when_forked(self)

    def after_fork(self) -> None:
        """See ``Forked``: what was handed over before is done by the parent."""
        self._worker: ThreadPoolExecutor | None = None
        self._pending: deque[Future[None]] = deque()
        self._starting = threading.Lock()

    def submit(self, update: Callable[[], None]) -> Future[None]:
        """Hands an update over."""
        with self._starting:
            if self._worker is None:
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="store-update")
            future = self._worker.submit(update)
            self._pending.append(future)
        return future

    def drain(self) -> None:
        """Waits for what was handed over.

        Raises:
            RuntimeError: an update failed; the cause is chained.
        """
        while (future := self._first()) is not None:
            # Left in the queue until it is done: another thread's read must wait for it too.
            wait([future])
            error = None if future.cancelled() else future.exception()
            with self._starting:
                first = bool(self._pending) and self._pending[0] is future
                if first:
                    self._pending.popleft()
            if first and error is not None:
                raise RuntimeError(f"an asynchronous update of the store failed: {error}") from error

    def _first(self) -> Future[None] | None:
        try:
            return self._pending[0]
        except IndexError:  # not asked before: another thread may be done with the last one since
            return None

    def close(self) -> None:
        """Ends the thread, once it is done."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
