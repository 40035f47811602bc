"""Real gloo processes for tests, started once and reused."""

from __future__ import annotations

import atexit
import multiprocessing as mp
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

TIMEOUT_SECONDS = 240

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

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Calls ``function(*args)`` on every rank."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            outcomes = [self._receive(rank) for rank in range(self.world_size)]
        except BaseException:
            self.stop()
            raise
        failed = [f"rank {rank}:\n{text}" for rank, (ok, text) in enumerate(outcomes) if not ok]
        if failed:
            self.stop()  # its ranks may be out of step
            raise WorkerError("\n".join(failed))
        return [result for _, result in outcomes]

    def stop(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        rendezvous = Path(tempfile.mkdtemp(prefix="torchrec-ext-")) / "rendezvous"
        for rank in range(self.world_size):
            ours, theirs = _context.Pipe()
            process = _context.Process(
                target=_serve, args=(theirs, rank, self.world_size, str(rendezvous)), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _receive(self, rank: int) -> tuple[bool, Any]:
        if not self._pipes[rank].poll(TIMEOUT_SECONDS):
            raise WorkerError(f"rank {rank} did not answer within {TIMEOUT_SECONDS} s")
        try:
            return self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            raise WorkerError(f"rank {rank} died with exit code {self._processes[rank].exitcode}") from None


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


_workers: dict[int, Workers] = {}


def run_on(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(*args)`` on every rank of a gloo group of this size; see ``Workers.run``."""
    workers = _workers.setdefault(world_size, Workers(world_size))
    return workers.run(function, *args)


@atexit.register
def _stop_all() -> None:
    for workers in _workers.values():
        workers.stop()
