"""Processes that are killed at a line of their code."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def die_before_line(number: int, files: tuple[str, ...], do: Callable[[], Any]) -> bool:
    """Does something in a fork, which is killed before its ``number``-th line of some files.

    To be called in a process that has no other threads.

    Args:
        number: how many lines are executed.
        files: how the names of the files end.
        do: what to do.

    Returns:
        Whether it was killed; if not, it is done.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _trace(number, files)
            do()
            sys.settrace(None)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def _trace(number: int, files: tuple[str, ...]) -> None:
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
