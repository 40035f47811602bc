"""What brings a sink from one dump to a later one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import Manifest
from torchrec_ext.delta.scan import Scan
from torchrec_ext.publish.served import Position, ServedTable

OnDelete = Literal["delete", "tombstone", "fallback_vector"]


class Change:
    """Rows to write and to take away, and what a sink has to store once it has done so.

    It can be read more than once, and applied more than once with the same outcome.

    Attributes:
        base: the dump a sink must hold, None for an empty one. Means nothing if the change ``replaces``.
        position: the dump it holds afterwards.
        replaces: every row that ``upserts`` does not name has to go, whatever the sink held.
        on_delete: what becomes of a deleted key: its row goes; a mark takes its place that readers see; or
            the fallback row of the moment does, for readers that know nothing of fallback rows. Whichever
            it is, a client answers the key with what the model answers.
        tables: the tables covered, whether rows of them changed or not; others have no answers any more.
    """

    def __init__(
        self,
        log: DeltaLog,
        dumps: Sequence[Manifest],
        base: Position | None,
        on_delete: OnDelete = "delete",
        *,
        replaces: bool = False,
        strays: Sequence[Manifest] = (),
        before: Sequence[Manifest] = (),
    ) -> None:
        self.base = base
        self.position = position_of(dumps[-1])
        self.replaces = replaces
        self.on_delete: OnDelete = on_delete
        self._scan = Scan(log, dumps, strays, before)
        self.tables: Mapping[str, ServedTable] = {
            fqn: ServedTable.of(*told) for fqn, told in self._scan.fallbacks().items()
        }

    def upserts(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32]]]:
        """Tables, keys int64 ``[n]`` and their vectors float32 ``[n, dim]``; each key once, n bounded."""
        return self._scan.upserts()

    def deletes(self) -> Iterator[tuple[str, NDArray[np.int64], NDArray[np.float32] | None]]:
        """Tables, keys int64 ``[n]`` that own no row any more, and what to put in its place; n bounded.

        That is the keys' fallback rows, float32 ``[n, dim]``, if ``on_delete`` asks for them and the table
        has any; else None. Each key comes once, and may never have been in the sink.
        """
        for fqn, keys in self._scan.deletes():
            table = self.tables[fqn]
            has_fallbacks = self.on_delete == "fallback_vector" and len(table.fallback)
            yield fqn, keys, table.absent(keys) if has_fallbacks else None

    def keys(self) -> dict[str, NDArray[np.int64]]:
        """All keys of ``upserts``, sorted, by table."""
        return self._scan.keys()


def position_of(dump: Manifest) -> Position:
    """The position of a sink whose last dump this is."""
    return Position(dump.generation, dump.step, dump.created_unix)
