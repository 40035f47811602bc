"""Answers from a dump directory itself: for tests, notebooks, and services of one host."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.replay import EmbeddingState
from torchrec_ext.errors import PublishError
from torchrec_ext.publish.changes import Change, position_of
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.publish.sink import Sink


class DirectoryReader(Sink):
    """A dump directory, replayed into memory when first asked and whenever ``refresh`` is called."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._log = DeltaLog(directory)
        self._held: tuple[Position, dict[str, EmbeddingState], dict[str, ServedTable]] | None = None

    def __str__(self) -> str:
        return str(self._log.directory)

    def position(self) -> Position | None:
        """The last dump that was replayed."""
        if self._held is None and not self._log.dumps():
            return None
        return self._states()[0]

    def apply(self, change: Change) -> None:
        """Not possible: only a ``DeltaDumper`` writes here."""
        raise PublishError(f"{self} is a dump directory: it is published from, not to")

    def refresh(self) -> None:
        """Replays the dumps that are committed by now, if there are new ones."""
        dumps = self._log.dumps()
        if not dumps:
            raise PublishError(f"{self} holds no committed dump yet")
        position = position_of(dumps[-1])
        if self._held is not None and self._held[0] == position:
            return
        last = dumps[-1].step
        states = self._log.replay(upto=last)
        tables = {
            fqn: ServedTable.of(state.info, state.fallback, state._exceptions)
            for fqn, state in states.items()
        }
        self._held = position, states, tables

    def tables(self) -> Mapping[str, ServedTable]:
        """The tables that the last dump covers."""
        return self._states()[2]

    def read(
        self, table: str, keys: NDArray[np.int64]
    ) -> tuple[ServedTable, NDArray[np.bool_], NDArray[np.float32]]:
        """See ``Sink.read``."""
        _, states, tables = self._states()
        state = states[table]
        if not len(state):
            return tables[table], np.zeros(len(keys), np.bool_), np.empty((0, state.info.dim), np.float32)
        found = np.minimum(np.searchsorted(state.keys, keys), len(state) - 1)
        owned = state.keys[found] == keys
        return tables[table], owned, state.vectors[found[owned]]

    def _states(self) -> tuple[Position, dict[str, EmbeddingState], dict[str, ServedTable]]:
        if self._held is None:
            self.refresh()
        assert self._held is not None
        return self._held
