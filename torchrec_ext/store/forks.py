"""What a process made by ``fork`` must not take over: locks that nobody gives back, threads left behind."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    """What has such things."""

    def after_fork(self) -> None:
        """Replaces them; called in the child, before anything else runs there."""


_all: weakref.WeakSet[Forked] = weakref.WeakSet()


def when_forked(one: Forked) -> None:
    """Has ``after_fork`` called in processes that are made by ``fork`` from now on."""
    _all.add(one)


def _in_child() -> None:
    for one in list(_all):
        one.after_fork()


os.register_at_fork(after_in_child=_in_child)
