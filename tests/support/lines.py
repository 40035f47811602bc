"""Lets something happen before a line of the code under test."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def at_lines(
    files: tuple[str, ...],
    chosen: Callable[[int], bool],
    then: Callable[[], object],
    do: Callable[[], object],
) -> int:
    """Does something, and ``then`` before each chosen line of it that this thread runs.

    Args:
        files: how the names of the files end whose lines are counted, from 1 on.
        chosen: whether a line is, by its number.
        then: what happens before; its own lines do not count.
        do: what is done.

    Returns:
        How many lines there were.
    """
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event == "line":
            count += 1
            if chosen(count):
                then()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
    return count
