"""Real gloo processes for tests, started once and reused."""

from __future__ import annotations

import atexit
import logging
import multiprocessing as mp
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 600
GRACE_SECONDS = 5

# Children fork from a server that has imported the slow packages already.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.support.preload"])


class WorkerError(AssertionError):
    """A rank failed; the message holds every failed rank's traceback."""


class Workers:
    """``world_size`` processes joined by gloo.

    ``run`` calls a function on every rank and returns what each returned. Workers outlive a failed
    call, unless a rank hangs or dies: then they are replaced.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[mp.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._meeting = ""

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(*args)`` on every rank."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            outcomes = self._collect()
        except BaseException:
            self.stop()
            raise
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in sorted(outcomes.items()) if not ok]
        if failed or len(outcomes) < self.world_size:
            self.stop()  # its ranks may be out of step
            silent = sorted(set(range(self.world_size)) - set(outcomes))
            if silent:
                failed.append(f"ranks {silent} did not answer")
            raise WorkerError("\n".join(failed))
        return [outcomes[rank][1] for rank in range(self.world_size)]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._meeting, ignore_errors=True)

    def _start(self) -> None:
        self._meeting = tempfile.mkdtemp(prefix="torchrec-ext-")
        rendezvous = Path(self._meeting) / "rendezvous"
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, self.world_size, str(rendezvous)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self) -> dict[int, tuple[bool, Any]]:
        """The ranks' outcomes; once one has failed, the others get little time to follow."""
        outcomes: dict[int, tuple[bool, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type, call-overload]
                try:
                    outcomes[rank] = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self._processes[rank].join()
                    code = self._processes[rank].exitcode
                    outcomes[rank] = (False, f"died with exit code {code}")
                if not outcomes[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return outcomes


def start_process(function: Callable[..., Any], *args: Any) -> mp.process.BaseProcess:
    """A process of its own, for tests that kill it."""
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def join_ranks(rank: int, world_size: int, rendezvous: str) -> None:
    """Makes this process a rank of a gloo group that meets at a file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)


def _serve(pipe: Connection, rank: int, world_size: int, rendezvous: str) -> None:
    join_ranks(rank, world_size, rendezvous)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, function(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
        finally:  # no test sees what another one has set
            logging.getLogger("torchrec_ext").setLevel(logging.NOTSET)


_workers: dict[int, Workers] = {}


def run_on(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(*args)`` on every rank of a gloo group of this size; see ``Workers.run``."""
    workers = _workers.setdefault(world_size, Workers(world_size))
    return workers.run(function, *args)


@atexit.register
def _stop_all() -> None:
    for workers in _workers.values():
        workers.stop()
