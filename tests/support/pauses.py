"""Trainers that stand still before each thing they do to the files of a log, until they are let go on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from pyarrow.fs import FileSystem

from tests.support.faults import wait_until_stopped
from tests.support.trainers import Trainer
from tests.support.workers import start_process
from torchrec_ext.delta import DeltaDumper, FencedError

Outcome = tuple[int, dict[int, bool], list[list[float]]]


class FileEvents:
    """Calls ``before`` ahead of whatever this process's Python does to files in a directory.

    Python announces it to audit hooks: what is opened, listed, made, renamed and removed. A hook cannot be
    taken off again; this one is asleep while ``directory`` is None.
    """

    def __init__(self, before: Callable[[str, str], None]) -> None:
        self.directory: str | None = None
        self._before = before
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.directory is None or not (event == "open" or event.startswith("os.")):
            return
        path = arguments[0] if arguments else None
        with suppress(TypeError):
            name = os.fspath(path)  # type: ignore[arg-type]
            if isinstance(name, str) and name.startswith(self.directory):
                self._before(event, name.removeprefix(self.directory))


class Stepped:
    """A process that opens a log and dumps to it, a file operation at a time.

    ``begin`` sets it to work; each ``go`` lets it do one more thing, and returns None, or what came of it
    all once it is done: the generation (-1: it was fenced off while it opened the log), what became of
    each dump (its step: committed or not), and what the model answers at the end.
    """

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = start_process(_serve_stepped, theirs)
        theirs.close()

    def begin(self, log: Path, seed: int, steps: list[int]) -> None:
        """Sets it to work: it stands before its first deed when this returns."""
        self._pipe.send((log, seed, steps))
        self.where = self._pipe.recv()

    def go(self) -> Outcome | None:
        """Lets it do what it stands before."""
        self._pipe.send("go")
        message = self._pipe.recv()
        if message[0] == "done":
            return message[1]
        assert message[0] == "before", message[1]
        self.where = message
        return None

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def leave(dumper: DeltaDumper) -> None:
    """Leaves a dumper as an exception would, and waits until it has left the log's files alone."""
    dumper.__exit__(KeyboardInterrupt, None, None)
    for thread in threading.enumerate():
        if thread.name == "torchrec-ext-delta":
            thread.join()


def dump_steps(
    trainer: Trainer,
    log: Path | FileSystem,
    steps: list[int],
    leave: Callable[[DeltaDumper], None] = leave,
) -> Outcome:
    """Opens a log and dumps; see ``Stepped``."""
    outcome: dict[int, bool] = {}
    try:
        dumper = trainer.attach(log)
    except FencedError:
        return -1, outcome, trainer.answers()
    for step in steps:
        trainer.train(step)
        try:
            dumper.dump(step)
            dumper.flush()
            outcome[step] = True
        except FencedError:
            outcome[step] = False
    leave(dumper)
    return dumper.generation, outcome, trainer.answers()


def _serve_stepped(pipe: Connection) -> None:
    torch.set_num_threads(1)

    one_at_a_time = threading.Lock()  # a log is read on several threads

    def wait(event: str, name: str) -> None:
        with one_at_a_time:
            pipe.send(("before", event, name))
            pipe.recv()

    events = FileEvents(wait)
    with suppress(EOFError):
        while True:
            log, seed, steps = pipe.recv()
            trainer = Trainer(seed)
            events.directory = str(log)
            result: Any
            try:
                result = ("done", dump_steps(trainer, log, steps))
            except BaseException as error:
                result = ("failed", repr(error))
            events.directory = None
            pipe.send(result)


class Sleeper:
    """A process that falls asleep (SIGSTOP) before the n-th thing that a dump does to files."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        self._process = start_process(_serve_sleeper, theirs)
        theirs.close()

    def open_and_dump(self, log: Path, seed: int) -> None:
        """Opens a log and dumps step 1."""
        self._pipe.send(("open", log, seed))
        assert self._pipe.recv() == ("opened",)

    def dump_asleep(self, step: int, nth: int) -> tuple[str, str] | None:
        """Sets it to dump, and waits until it is asleep; what it is about to do. None: it is done."""
        self._pipe.send(("dump", step, nth))
        message = self._pipe.recv()
        if message[0] != "asleep":
            self.outcome = message
            return None
        wait_until_stopped(self._pid)
        return message[1:]

    def wake(self) -> tuple[str, str]:
        """Wakes it up; what became of its dump."""
        os.kill(self._pid, signal.SIGCONT)
        return self._pipe.recv()

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid


def _serve_sleeper(pipe: Connection) -> None:
    torch.set_num_threads(1)
    countdown = [-1]

    def fall_asleep(event: str, name: str) -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            pipe.send(("asleep", event, name))
            os.kill(os.getpid(), signal.SIGSTOP)

    events = FileEvents(fall_asleep)
    dumper: DeltaDumper | None = None
    with suppress(EOFError):
        while True:
            command, *arguments = pipe.recv()
            if command == "open":
                log, seed = arguments
                trainer = Trainer(seed)
                if dumper is not None:
                    leave(dumper)
                dumper = trainer.attach(log)
                events.directory = str(log)
                trainer.train(1)
                dumper.dump(1)
                dumper.flush()
                pipe.send(("opened",))
                continue
            step, countdown[0] = arguments
            assert dumper is not None
            trainer.train(step)
            try:
                dumper.dump(step)
                dumper.flush()
                pipe.send(("committed", ""))
            except Exception as error:
                pipe.send((type(error).__name__, str(error)))
            countdown[0] = -1
