"""What was pooled in one lookup, so that its gradient finds the rows again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from torchrec_ext.store import Bags, DenseTable, kernels
from torchrec_ext.store.group import RowGroup

Triple = tuple[str, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Lookup(ABC):
    """Bags of ids that were pooled.

    Attributes:
        bags: the bags; what their rows mean is up to the kind of lookup.
        dim: the embedding dimension.
        tables: the tables' names.
    """

    bags: Bags
    dim: int
    tables: tuple[str, ...]

    @abstractmethod
    def _find(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the bags' ids are a table's, int64 ``[n]``, and these ids, int64 ``[n]``."""

    def triples(self, grad: torch.Tensor) -> Iterator[Triple]:
        """The gradient of each row that was pooled.

        Args:
            grad: the gradient of what was pooled, ``[batch_size, num_features * dim]``.

        Yields:
            A table's name, the ids in it, int64 ``[n]`` with repeats, and their gradients, ``[n, dim]``.
        """
        per_bag = grad.reshape(self.bags.num_bags, self.dim)
        bag_of = self.bags.bag_of_each()
        for table in self.tables:
            which, ids = self._find(table)
            grads = per_bag[bag_of[which]]
            if self.bags.scale is not None:
                grads *= self.bags.scale[which].unsqueeze(1)
            yield table, ids, grads


@dataclass(frozen=True)
class FlatLookup(Lookup):
    """A lookup in dense tables of a local store, by rows of its flat arrays.

    Attributes:
        group: where the tables are.
    """

    group: RowGroup

    def _find(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        first, rows = self.group.first_row[table], self.bags.rows
        mine = (rows >= first) & (rows < first + self.group.tables[table].num_rows)
        which = mine.nonzero().flatten()
        return which, rows[which] - first_key_row(self.group, table)


@dataclass(frozen=True)
class KeyedLookup(Lookup):
    """A lookup by keys, in any tables of any store.

    Rows are found by key again when the gradient is applied: in between, a dynamic table may have given
    a row to another key.

    Attributes:
        keys: of each table, int64; the bags' rows are positions in all of them, one after the other.
        has_row: which of these had a row of their own when they were looked up, bool; None: all.
    """

    keys: tuple[torch.Tensor, ...]
    has_row: torch.Tensor | None = None

    def in_flat_rows(self, group: RowGroup) -> FlatLookup:
        """The same lookup, of dense tables of a local store, by rows of its flat arrays."""
        rows = [
            keys + first_key_row(group, table) for table, keys in zip(self.tables, self.keys, strict=True)
        ]
        bags = replace(self.bags, rows=torch.cat(rows)[self.bags.rows])
        return FlatLookup(bags, self.dim, self.tables, group)

    def gradients(self, grad: torch.Tensor) -> Iterator[Triple]:
        """As ``triples``, but each key once, and only those that had a row."""
        positions, grads = kernels.aggregate(self.bags, grad)
        if self.has_row is not None:
            kept = self.has_row[positions].nonzero().flatten()
            positions, grads = positions[kept], grads[kept]
        ends = positions.new_tensor([len(keys) for keys in self.keys]).cumsum(0)
        stops = torch.searchsorted(positions, ends).tolist()
        every_key = torch.cat(self.keys)[positions]
        for table, start, stop in zip(self.tables, [0, *stops], stops, strict=False):
            yield table, every_key[start:stop], grads[start:stop]

    def _find(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        number = self.tables.index(table)
        start, keys = sum(map(len, self.keys[:number])), self.keys[number]
        positions = self.bags.rows
        mine = (positions >= start) & (positions < start + len(keys))
        if self.has_row is not None:
            mine &= self.has_row[positions]
        which = mine.nonzero().flatten()
        return which, keys[positions[which] - start]


def first_key_row(group: RowGroup, table: str) -> int:
    """What to add to a dense table's key for its row in the flat arrays."""
    described = group.tables[table]
    assert isinstance(described, DenseTable)
    return group.first_row[table] - described.first_key
