"""Publishers that die, or are interrupted, before a given line of theirs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support import lines
from torchrec_ext.publish import open_sink, publish

_TRACED = (
    *("publisher.py", "scan.py", "redis_sink.py", "redis_wire.py"),
    *("parquet_sink.py", "deltalake_sink.py", "feast_sink.py"),
)


def at_line(number: int, then: Callable[[], None], do: Callable[[], Any]) -> int:
    """Does something, and ``then`` before the publisher's ``number``-th line; returns how many it has."""
    return at_lines(lambda count: count == number, then, do)


def at_lines(chosen: Callable[[int], bool], then: Callable[[], None], do: Callable[[], Any]) -> int:
    """The same before each line whose number is chosen; what ``then`` runs does not count."""
    return lines.at_lines(_TRACED, chosen, then, do)


def kill_this_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def publish_one_by_one(directory: Path | str, url: str, **options: Any) -> None:
    with open_sink(url) as sink:
        if sink.takes == "backlog":
            sink.takes = "each"  # all kinds of dumps, not the one that they come to together
        publish(directory, sink, **options)
