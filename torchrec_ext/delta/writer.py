"""The thread that writes dumps while training goes on."""

from __future__ import annotations

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

logger = logging.getLogger(__name__)


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
        self._thread = threading.Thread(target=self._run, name="torchrec-ext-delta", daemon=True)
        self._thread.start()

    def submit(self, cut: Cut) -> None:
        """Queues a cut; waits while ``max_pending`` are pending, and says so in the log."""
        with self._changed:
            if len(self._pending) >= self._max_pending:
                logger.warning(
                    "training waits: %d dumps are not written yet (max_pending=%d), "
                    "dumps take longer to write than the interval between them",
                    len(self._pending),
                    self._max_pending,
                )
                self._changed.wait_for(lambda: len(self._pending) < self._max_pending)
            self._pending.append(cut)
            cut.submitted = True
            if not cut.streamed:
                cut.resumed = time.perf_counter()
            self._changed.notify_all()

    def wait_until_written(self) -> None:
        """Waits until nothing is pending."""
        with self._changed:
            self._changed.wait_for(lambda: not self._pending)

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
            raise DeltaDumpError(f"{len(errors)} dumps failed, the last one: {errors[-1]}") from errors[0]
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
            self._thread.join()

    def _run(self) -> None:
        _yield_to_training()
        while (cut := self._next()) is not None:
            error = self._commit(cut)
            with self._changed:
                cut.committed = error is None
                self._last_failed = error is not None
                if error is not None and cut.error is None:
                    self._errors.append(error)
                cut.release()
                self._pending.popleft()
                self._changed.notify_all()

        self._committer.close()

    def _next(self) -> Cut | None:
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._closing)
            self._committing = self._pending[0] if self._pending else None
            return self._committing

    def _commit(self, cut: Cut) -> DeltaDumpError | None:
        try:
            manifest = self._committer.commit(cut)
        except DeltaDumpError as error:
            logger.warning("%s", error)
            return error
        except BaseException as error:
            failure = DeltaDumpError(f"the dump of step {cut.step} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            logger.warning("%s", failure)
            return failure
        if manifest is not None:
            _log(manifest)
        return None


def _yield_to_training() -> None:
    # Linux has a niceness per thread: encoding must not take a core from the training threads.
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _log(manifest: Manifest) -> None:
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
