"""The tables that servers have together, and checks of what is asked about them.

Checks come before anything is sent: one server must not do its part when another one would refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from torchrec_ext.store.flight.connection import Servers
from torchrec_ext.store.flight.shares import whole_table
from torchrec_ext.store.optimizers import StoreOptimizer, optimizer_from_json
from torchrec_ext.store.tables import Table, check_keys, table_from_json


class KnownTables:
    """Tables of servers; those that were seen once are not asked for again.

    Args:
        servers: the servers.
    """

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._known: dict[str, Table] = {}

    def add(self, tables: Iterable[Table]) -> None:
        """Takes note of tables that were made, or found."""
        self._known |= {table.name: table for table in tables}

    def described(self) -> dict[str, tuple[Table, StoreOptimizer]]:
        """The tables that all servers have now, and their optimizers."""
        answers = self._servers.ask("describe", ({}, ()), retry=True)
        shares: dict[str, list[Table]] = {}
        for answer in answers:
            for content in answer.content["tables"]:
                table = table_from_json(content)
                shares.setdefault(table.name, []).append(table)
        names = [content["name"] for content in answers[0].content["tables"]]
        optimizers = map(optimizer_from_json, answers[0].content["optimizers"])
        return {
            name: (whole_table(shares[name]), optimizer)
            for name, optimizer in zip(names, optimizers, strict=True)
            if len(shares[name]) == len(self._servers)
        }

    def optimizer(self, table: str) -> StoreOptimizer:
        """A table's optimizer now.

        Raises:
            KeyError: there is no such table.
        """
        described = self.described()
        if table not in described:
            raise _no_table(table, described)
        return described[table][1]

    def checked(self, requests: Sequence[tuple[str, torch.Tensor]]) -> list[Table]:
        """The tables of requests, by name and keys.

        Raises:
            KeyError: there is no such table.
            ValueError: a key cannot be one of the table's.
        """
        tables = [self._table(name) for name, _ in requests]
        for table, (_, keys) in zip(tables, requests, strict=True):
            check_keys(table, keys)
        return tables

    def checked_update(self, requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> list[Table]:
        """The tables of requests with gradients.

        Raises:
            KeyError: there is no such table.
            ValueError: a key cannot be one of the table's, or gradients have another shape than its rows.
        """
        tables = self.checked([(name, keys) for name, keys, _ in requests])
        for table, (name, keys, grads) in zip(tables, requests, strict=True):
            if list(grads.shape) != (expected := [len(keys), table.dim]):
                raise ValueError(f"table {name!r}: gradients must be {expected}, not {list(grads.shape)}")
        return tables

    def _table(self, name: str) -> Table:
        if name not in self._known:
            self._known = {known: table for known, (table, _) in self.described().items()}
            if name not in self._known:
                raise _no_table(name, self._known)
        return self._known[name]


def _no_table(name: str, tables: Iterable[str]) -> KeyError:
    return KeyError(f"the store has no table {name!r}; it has {sorted(tables)}")
