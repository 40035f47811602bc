"""Answers from rows in memory, for places that are read whole."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.answers import find
from torchrec_ext.errors import PublishError
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.publish.sink import Sink


@dataclass(frozen=True)
class LoadedTable:
    """A table whose rows are in memory: keys int64 ``[n]``, sorted, and vectors float32 ``[n, dim]``."""

    served: ServedTable
    keys: NDArray[np.int64]
    vectors: NDArray[np.float32]

    @classmethod
    def of(cls, served: ServedTable, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> LoadedTable:
        """From keys in any order."""
        order = np.argsort(keys)
        return cls(served, keys[order], vectors[order])

    def read(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Which keys own a row, and the rows of those."""
        owned, at = find(self.keys, keys)
        return owned, self.vectors[at]


class LoadedSink(Sink):
    """A sink that is read whole, when first asked and whenever ``refresh`` is called."""

    _nothing = "nothing was published here"
    _held: tuple[Position, dict[str, LoadedTable]] | None = None

    @abstractmethod
    def load(self) -> tuple[Position, dict[str, LoadedTable]]:
        """Reads all tables, and the position at which they stood so."""

    def refresh(self) -> None:
        """Reads what was published by now, if that is something new."""
        position = self.position()
        if position is None:
            raise PublishError(f"{self}: {self._nothing}")
        if self._held is None or self._held[0] != position:
            self._held = self.load()

    def tables(self) -> Mapping[str, ServedTable]:
        """See ``Sink.tables``."""
        return {fqn: table.served for fqn, table in self._tables().items()}

    def read(
        self, table: str, keys: NDArray[np.int64]
    ) -> tuple[ServedTable, NDArray[np.bool_], NDArray[np.float32]]:
        """See ``Sink.read``."""
        tables = self._tables()
        if table not in tables:
            raise KeyError(f"{self} holds no table {table}; it holds {sorted(tables)}")
        return tables[table].served, *tables[table].read(keys)

    def _tables(self) -> dict[str, LoadedTable]:
        if self._held is None:
            self.refresh()
        assert self._held is not None
        return self._held[1]
