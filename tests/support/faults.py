"""What goes wrong around a dumper: disks that are full or slow, ranks that are killed."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing as mp
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.support.workers import join_ranks, start_process


@contextlib.contextmanager
def full_disk(free_bytes: int = 0) -> Iterator[None]:
    """Lets no file of this process grow beyond ``free_bytes``: writes fail as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def replaced_fsync(fsync: Callable[[int], None]) -> Iterator[None]:
    """Puts a disk of our own making in place of the machine's."""
    original, os.fsync = os.fsync, fsync
    try:
        yield
    finally:
        os.fsync = original


@contextlib.contextmanager
def log_of(name: str, heard: Callable[[str], None]) -> Iterator[None]:
    """Calls ``heard`` with each message of a logger, on the thread that logs it."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard(record.getMessage())

    handler = Handler()
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def wait_until_stopped(pid: int) -> None:
    """Returns once SIGSTOP has come to all threads of a process: one may be in a system call."""
    while not all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        os.sched_yield()


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return "T"


class MortalRanks:
    """Processes joined by gloo that tell us what they do until they are killed.

    Each runs ``function(tell, *args)`` after it joined the others; ``tell(*message)`` sends a message here.

    Args:
        world_size: how many.
        rendezvous: a path that is not there yet.
        function: a module's function.
        args: its further arguments.
    """

    def __init__(self, world_size: int, rendezvous: Path, function: Callable[..., None], *args: Any) -> None:
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes: list[mp.process.BaseProcess] = []
        for rank in range(world_size):
            ours, theirs = mp.Pipe(duplex=False)
            self._processes.append(
                start_process(_run_rank, theirs, rank, world_size, str(rendezvous), function, args)
            )
            theirs.close()
            self._pipes.append(ours)

    def hear(self, rank: int) -> tuple[Any, ...]:
        """The next message of a rank."""
        if not self._pipes[rank].poll(240):
            raise AssertionError(f"rank {rank} is silent")
        try:
            message = self._pipes[rank].recv()
        except EOFError:
            self._processes[rank].join()
            raise AssertionError(
                f"rank {rank} ended by itself, exit code {self._processes[rank].exitcode}"
            ) from None
        assert message[0] != "failed", message[1]
        return message

    def kill(self, rank: int) -> None:
        """Ends a rank by SIGKILL."""
        self._processes[rank].kill()
        self._processes[rank].join()

    def pause(self) -> None:
        """Makes all ranks stand still (SIGSTOP), wherever they are."""
        for process in self._processes:
            os.kill(process.pid, signal.SIGSTOP)  # type: ignore[arg-type]
        for process in self._processes:
            wait_until_stopped(process.pid)  # type: ignore[arg-type]

    def wake(self) -> None:
        """Lets all ranks go on."""
        for process in self._processes:
            os.kill(process.pid, signal.SIGCONT)  # type: ignore[arg-type]

    def __enter__(self) -> MortalRanks:
        return self

    def __exit__(self, *error: object) -> None:
        for rank, pipe in enumerate(self._pipes):
            self.kill(rank)
            pipe.close()


def _run_rank(
    pipe: Connection,
    rank: int,
    world_size: int,
    rendezvous: str,
    function: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    try:
        join_ranks(rank, world_size, rendezvous)
        function(lambda *message: pipe.send(message), *args)
    except BaseException:
        pipe.send(("failed", traceback.format_exc()))
