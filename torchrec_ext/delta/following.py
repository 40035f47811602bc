"""Finds the tables of a model that can be tracked, and follows what happens to them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from torchrec_ext.delta.marks import share_marks
from torchrec_ext.delta.plain_rows import PartRows, PlainFollower
from torchrec_ext.delta.ranks import leave, meet, private_group
from torchrec_ext.delta.store_rows import StoreFollower
from torchrec_ext.delta.tracked import Follower, RowSource, TrackedTable
from torchrec_ext.delta.zch_rows import ZchFollower
from torchrec_ext.plain import PlainTable, find_plain_tables
from torchrec_ext.recstore.discovery import RecStoreTable, find_recstore_tables
from torchrec_ext.recstore.sharding.collection import ShardedRecStoreEmbeddingBagCollection
from torchrec_ext.store import LocalStore
from torchrec_ext.zch import ZchTable, find_zch_tables


def find_tables(model: nn.Module) -> list[TrackedTable]:
    """All tables of a model that a dump may hold, those that cannot be followed (``unsupported``) too."""
    recstore = (ShardedRecStoreEmbeddingBagCollection,)
    return [*find_zch_tables(model), *find_recstore_tables(model), *find_plain_tables(model, but=recstore)]


def followers_of(
    tables: Sequence[TrackedTable], process_group: dist.ProcessGroup | None, split: Collection[str]
) -> Followers:
    """Followers of these tables, with a group of the training thread's own if ranks must talk.

    Args:
        tables: the tables that are dumped.
        process_group: of the ranks that dump; None: all.
        split: names of the parts of tables whose other columns are on other ranks.

    Raises:
        ValueError: as ``private_group``.
    """
    # Ranks that write to the same rows must stand still together for a cut of one moment; those that
    # hold columns of the same rows must agree which rows it holds.
    stand_still = any(table.place is not None for table in tables)
    meeting = private_group(process_group, tables) if stand_still or split else None
    return Followers(meeting, stand_still=stand_still, split=split)


class Followers:
    """Those of a dumper: one for each module, or store, that its tables are in.

    Args:
        meeting: a group of this thread's own, if ranks must talk before they dump; else None.
        stand_still: whether they write to each other's tables, and must not until all have read them.
        split: names of the parts of tables whose other columns are on other ranks.
    """

    def __init__(
        self, meeting: dist.ProcessGroup | None, *, stand_still: bool, split: Collection[str]
    ) -> None:
        self._meeting = meeting
        self._stand_still = stand_still
        self._split = frozenset(split)
        self._parts: dict[str, PartRows] = {}
        self._modules: dict[nn.Module, ZchFollower] = {}
        self._stores: dict[LocalStore, StoreFollower] = {}
        self._plain: dict[nn.Module, PlainFollower] = {}

    def rows_of(self, table: TrackedTable, *, all_changed: bool) -> Sequence[tuple[TrackedTable, RowSource]]:
        """A table's rows, by its parts on this rank; what happens to them from now on is seen.

        Args:
            table: the table.
            all_changed: whether a dump of all rows comes first.
        """
        if isinstance(table, ZchTable):
            if table.module not in self._modules:
                self._modules[table.module] = ZchFollower(table)
            return [(table, self._modules[table.module].rows_of(table))]
        if isinstance(table, PlainTable):
            if table.module not in self._plain:
                self._plain[table.module] = PlainFollower(table, all_changed=all_changed)
            parts = self._plain[table.module].rows_of(table)
            self._parts.update((part.part, rows) for part, rows in parts if part.part in self._split)
            return parts
        assert isinstance(table, RecStoreTable)
        store = table.local_store
        if store not in self._stores:
            self._stores[store] = StoreFollower(table)
        return [(table, self._stores[store].rows_of(table))]

    def pause(self) -> None:
        """Takes in what was done to the tables.

        Until ``resume``, no rank writes to tables that others write to, too.

        Raises:
            RuntimeError: an update that a store was handed failed, or another rank is gone.
        """
        failed = True
        try:
            for follower in self._all():
                follower.catch_up()
            failed = False
        finally:
            if self._stand_still:
                meet(self._meeting)
            if self._split and self._meeting is not None:
                share_marks(self._meeting, self._parts, failed=failed)

    def resume(self) -> None:
        """Lets the other ranks go on."""
        if self._stand_still:
            meet(self._meeting)

    def lose(self, part: str, keys: NDArray[np.int64]) -> None:
        """Takes note, on any thread, that rows of a part were read, but did not get into a dump."""
        self._parts[part].lose(keys)

    def detach(self) -> None:
        """Lets go of modules, stores and the meeting; a second call does nothing."""
        for follower in self._all():
            follower.detach()
        self._modules.clear()
        self._stores.clear()
        self._plain.clear()
        leave(self._meeting)
        self._meeting = None

    def _all(self) -> Iterator[Follower]:
        yield from self._modules.values()
        yield from self._stores.values()
        yield from self._plain.values()
