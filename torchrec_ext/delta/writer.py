"""The thread that writes dumps while training goes on."""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import sys
import threading
import time

from torchrec_ext.delta.commit import Committer
from torchrec_ext.delta.cut import Cut
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.errors import DeltaDumpError
from torchrec_ext.waits import wait_until

logger = logging.getLogger(__name__)

_EXIT_SECONDS = 10.0


class DumpWriter:
    """Commits cuts in the order in which they were submitted, on a thread of its own.

    Args:
        committer: used by the writer's thread only.
        max_pending: cuts that may wait or be written; ``submit`` waits while there are as many.
    """

    def __init__(self, committer: Committer, max_pending: int) -> None:
        self._committer = committer
        self._max_pending = max_pending
        self._changed = threading.Condition()
        self._pending: collections.deque[Cut] = collections.deque()
        self._errors: list[DeltaDumpError] = []
        self._last_failed = False
        self._closing = False
        self._committing: Cut | None = None
        self._gave_up: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="torchrec-ext-delta", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def submit(self, cut: Cut) -> None:
        """Queues a cut; waits while ``max_pending`` are pending, and says so in the log."""
        with self._changed:
            try:
                if len(self._pending) >= self._max_pending:
                    logger.warning(
                        "training waits: %s not written yet (max_pending=%d). Writing one takes longer than "
                        "the interval between them: dump less often, or to a faster disk",
                        "a dump is" if self._max_pending == 1 else f"{self._max_pending} dumps are",
                        self._max_pending,
                    )
                    wait_until(self._changed, lambda: len(self._pending) < self._max_pending)
            finally:
                # Also if a Ctrl-C ends the waiting: the other ranks wait for this one's dump.
                self._append(cut)

    def _append(self, cut: Cut) -> None:
        if self._gave_up is not None:
            raise DeltaDumpError("the writer's thread has ended") from self._gave_up
        if not cut.streamed:
            cut.resumed = time.perf_counter()
        # Last of all the cut is there or not: a Ctrl-C may come in between. Who is woken waits for the lock.
        self._changed.notify_all()
        self._pending.append(cut)

    def has(self, cut: Cut) -> bool:
        """Whether a cut was submitted."""
        with self._changed:
            return cut in self._pending or cut.committed is not None

    def wait_until_written(self) -> None:
        """Waits until nothing is pending."""
        with self._changed:
            wait_until(self._changed, lambda: not self._pending)

    def last_dump_failed(self) -> bool:
        """Waits until nothing is pending; whether the last cut was not committed, on every rank alike."""
        self.wait_until_written()
        return self._last_failed

    def raise_errors(self) -> None:
        """Raises what went wrong since the last call."""
        if not self._errors:  # in every step: without the lock
            return
        with self._changed:
            errors, self._errors = self._errors, []
        if len(errors) > 1:
            kind = type(errors[-1])
            raise kind(f"{len(errors)} dumps failed, the last one: {errors[-1]}") from errors[0]
        raise errors[0]

    def close(self, *, wait: bool) -> None:
        """Ends the thread: after all pending cuts, or as soon as it can, dropping them."""
        with self._changed:
            self._closing = True
            if not wait:
                while self._pending and self._pending[-1] is not self._committing:
                    self._pending.pop().release()
            self._changed.notify_all()
            if wait:
                wait_until(self._changed, lambda: self._ended)
        if wait:
            self._thread.join()  # it has nothing left to do

    def _run(self) -> None:
        _yield_to_training()
        try:
            while (cut := self._next()) is not None:
                self._finish(cut, self._commit(cut))
        except BaseException as error:
            # Nobody may be left waiting for a thread that is gone.
            self._give_up(error)
        finally:
            self._committer.close()
            atexit.unregister(self._at_exit)
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _finish(self, cut: Cut, error: DeltaDumpError | None) -> None:
        with self._changed:
            cut.committed = error is None
            self._last_failed = error is not None
            if error is not None and cut.error is None:
                self._errors.append(error)
            cut.release()
            self._pending.popleft()
            self._changed.notify_all()

    def _give_up(self, error: BaseException) -> None:
        with self._changed:
            self._gave_up = error
            self._last_failed = True
            self._errors.append(DeltaDumpError(f"the writer's thread ended: {error!r}"))
            self._errors[-1].__cause__ = error
            while self._pending:
                self._pending.pop().release()
            self._changed.notify_all()

    def _at_exit(self) -> None:
        # A daemon thread inside native code when the interpreter ends would abort the process.
        self.close(wait=False)
        self._thread.join(_EXIT_SECONDS)

    def _next(self) -> Cut | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            self._committing = self._pending[0] if self._pending else None
            return self._committing

    def _commit(self, cut: Cut) -> DeltaDumpError | None:
        try:
            manifest = self._committer.commit(cut)
        except DeltaDumpError as error:
            failure = error
        except BaseException as error:
            failure = DeltaDumpError(f"the dump of step {cut.step} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        else:
            # Committed on all ranks, whatever a log handler makes of it.
            with contextlib.suppress(Exception):
                _log(manifest)
            return None
        with contextlib.suppress(Exception):
            logger.warning("%s", failure)
        return failure


def _yield_to_training() -> None:
    # Linux has a niceness per thread: encoding must not take a core from the training threads.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def _log(manifest: Manifest | None) -> None:
    if manifest is None:  # rank 0 has it
        return
    logger.info(
        "dump step=%d generation=%d: %d upserts, %d deletes, %d bytes; training stood still for "
        "%.1f ms, committed %.0f ms after the step",
        manifest.step,
        manifest.generation,
        manifest.upserts,
        manifest.deletes,
        manifest.nbytes,
        1e3 * max(stats.stall_seconds for stats in manifest.stats),
        1e3 * (manifest.committed_unix - manifest.created_unix),
    )
