"""Finds the tables of a model that can be tracked, and follows what happens to them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from torchrec_ext.delta.store_rows import StoreFollower
from torchrec_ext.delta.tracked import Follower, RowSource, TrackedTable
from torchrec_ext.delta.zch_rows import ZchFollower
from torchrec_ext.recstore.discovery import RecStoreTable, find_recstore_tables
from torchrec_ext.store import LocalStore
from torchrec_ext.zch import ZchTable, find_zch_tables


def find_tables(model: nn.Module) -> list[TrackedTable]:
    """All tables of a model that a dump may hold, those that cannot be followed (``unsupported``) too."""
    return [*find_zch_tables(model), *find_recstore_tables(model)]


class Followers:
    """Those of a dumper: one for each module, or store, that its tables are in."""

    def __init__(self) -> None:
        self._modules: dict[nn.Module, ZchFollower] = {}
        self._stores: dict[LocalStore, StoreFollower] = {}

    def rows_of(self, table: TrackedTable) -> RowSource:
        """A table's rows; what happens to them from now on is seen."""
        if isinstance(table, ZchTable):
            if table.module not in self._modules:
                self._modules[table.module] = ZchFollower(table)
            return self._modules[table.module].rows_of(table)
        assert isinstance(table, RecStoreTable)
        store = table.local_store
        if store not in self._stores:
            self._stores[store] = StoreFollower(table)
        return self._stores[store].rows_of(table)

    def catch_up(self) -> None:
        """See ``Follower``."""
        for follower in self._all():
            follower.catch_up()

    def detach(self) -> None:
        """See ``Follower``; what is detached already stays so."""
        for follower in self._all():
            follower.detach()
        self._modules.clear()
        self._stores.clear()

    def _all(self) -> Iterator[Follower]:
        yield from self._modules.values()
        yield from self._stores.values()
