"""Answers from a dump directory itself: for tests, notebooks, and services of one host."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pyarrow.fs as pafs

from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.places import Place
from torchrec_ext.errors import PublishError
from torchrec_ext.publish.changes import position_of
from torchrec_ext.publish.loaded import LoadedSink, LoadedTable
from torchrec_ext.publish.served import Position, ServedTable

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change


class DirectoryReader(LoadedSink):
    """A dump directory, replayed into memory."""

    _nothing = "no dump is committed yet"

    def __init__(self, directory: str | os.PathLike[str] | pafs.FileSystem | Place) -> None:
        self._log = DeltaLog(directory)

    def __str__(self) -> str:
        return str(self._log.place)

    def position(self) -> Position | None:
        """The last committed dump."""
        dumps = self._log.dumps()
        return position_of(dumps[-1]) if dumps else None

    def apply(self, change: Change) -> None:
        """Not possible: only a ``DeltaDumper`` writes here."""
        raise PublishError(f"{self} is a dump directory: it is published from, not to")

    def load(self) -> tuple[Position, dict[str, LoadedTable]]:
        """See ``LoadedSink.load``."""
        return self._log.undisturbed(self._load)

    def _load(self) -> tuple[Position, dict[str, LoadedTable]]:
        dumps = self._log.history_upto()
        tables = {
            fqn: LoadedTable(
                ServedTable.of(state.info, state.fallback, state.exceptions), state.keys, state.vectors
            )
            for fqn, state in self._log.states(dumps).items()
        }
        return position_of(dumps[-1]), tables
