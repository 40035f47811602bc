"""Which of several servers has which keys, and what each of them stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from torchrec_ext.store.snapshots import StoreSnapshot, TableSnapshot
from torchrec_ext.store.tables import DenseTable, DynamicTable, Table

# What a snapshot has for every key, but the slots.
_OF_KEYS = ("keys", "weight", "versions", "frequencies", "last_used")


@dataclass(frozen=True)
class Share:
    """What one of several servers has of every table.

    A server keeps its keys of a dense table without gaps: what it stores is a dense table of every
    ``count``-th key of the whole one.

    Attributes:
        index: the server's position.
        count: how many servers there are.
    """

    index: int = 0
    count: int = 1

    def table(self, whole: Table) -> Table:
        """The table that the server stores."""
        if isinstance(whole, DenseTable):
            return replace(whole, num_rows=self._of(whole.num_rows))
        return replace(whole, max_rows=max(1, self._of(whole.max_rows)))

    def local_keys(self, table: Table, keys: torch.Tensor) -> torch.Tensor:
        """What the server stores the keys of a table as, int64 ``[n]``."""
        if self.count == 1 or isinstance(table, DynamicTable):
            return keys
        return (keys - table.first_key) // self.count + table.first_key

    def keys(self, table: Table, local_keys: torch.Tensor) -> torch.Tensor:
        """The keys of what the server stores, int64 ``[n]``."""
        if self.count == 1 or isinstance(table, DynamicTable):
            return local_keys
        return (local_keys - table.first_key) * self.count + self.index + table.first_key

    def _of(self, rows: int) -> int:
        return max(0, rows - self.index + self.count - 1) // self.count


def other_share(there: Share, expected: Share) -> str:
    """What is wrong with a server that has another share than its client expects."""
    return (
        f"the server holds share {there.index + 1} of {there.count}, not {expected.index + 1} of "
        f"{expected.count}: name all servers, in the order of when their tables were made"
    )


def whole_table(shares: Sequence[Table]) -> Table:
    """The table of which servers store these."""
    first = shares[0]
    if isinstance(first, DenseTable):
        return replace(first, num_rows=sum(table.num_rows for table in shares))
    return replace(first, max_rows=sum(table.max_rows for table in shares if isinstance(table, DynamicTable)))


def server_of(table: Table, keys: torch.Tensor, count: int) -> torch.Tensor:
    """Which of ``count`` servers has each key, int64 ``[n]``.

    The keys of a dense table are dealt out in turn; those of a dynamic one by a multiplicative hash
    (Knuth, The Art of Computer Programming, 6.4), as they may have a common divisor.
    """
    if isinstance(table, DenseTable):
        return (keys - table.first_key) % count
    return ((keys * -0x61C8864680B583EB) >> 33 & 0x7FFFFFFF) % count


Place = torch.Tensor | slice
"""Positions within a tensor: int64 ``[n]``, or all."""


def divide(tables: Sequence[Table], keys: Sequence[torch.Tensor], count: int) -> list[list[Place]]:
    """For each server, and each table, where its keys are among the table's ``keys``, int64 ``[n]`` each."""
    if count == 1:
        return [[slice(None)] * len(tables)]
    servers = [server_of(table, part, count) for table, part in zip(tables, keys, strict=True)]
    return [[(server == index).nonzero().flatten() for server in servers] for index in range(count)]


def take(tensors: Sequence[torch.Tensor], places: Sequence[Place]) -> list[torch.Tensor]:
    """A server's part of what there is for each table."""
    return [tensor[place] for tensor, place in zip(tensors, places, strict=True)]


def join(parts: Sequence[torch.Tensor], places: Sequence[Place], length: int) -> torch.Tensor:
    """What there is for one table, ``[length, ...]``, from the servers' parts."""
    if len(parts) == 1:
        return parts[0]
    whole = parts[0].new_empty(length, *parts[0].shape[1:])
    for part, place in zip(parts, places, strict=True):
        whole[place] = part
    return whole


def split_snapshot(snapshot: StoreSnapshot, count: int) -> list[StoreSnapshot]:
    """What each of ``count`` servers has of a snapshot."""
    if count == 1:
        return [snapshot]
    return [
        replace(
            snapshot,
            tables={name: _share_of(part, Share(index, count)) for name, part in snapshot.tables.items()},
        )
        for index in range(count)
    ]


def join_snapshots(shares: Sequence[StoreSnapshot]) -> StoreSnapshot:
    """The snapshot of which servers have these."""
    if len(shares) == 1:
        return shares[0]
    return StoreSnapshot(
        clock=sum(share.clock for share in shares),
        step=max(share.step for share in shares),
        tables={name: _joined([share.tables[name] for share in shares]) for name in shares[0].tables},
    )


def _share_of(part: TableSnapshot, share: Share) -> TableSnapshot:
    def mine_of(keys: torch.Tensor) -> torch.Tensor:
        return (server_of(part.table, keys, share.count) == share.index).nonzero().flatten()

    mine = mine_of(part.keys)
    of_slots = {name: mine_of(keys) for name, keys in part.slot_keys.items()}
    fields: dict[str, Any] = {
        name: None if (values := getattr(part, name)) is None else values[mine] for name in _OF_KEYS
    }
    if part.candidates is not None and part.candidate_counts is not None:
        waiting = mine_of(part.candidates)
        fields |= {
            "candidates": part.candidates[waiting],
            "candidate_counts": part.candidate_counts[waiting],
        }
    return replace(
        part,
        table=share.table(part.table),
        slots={name: values[of_slots.get(name, mine)] for name, values in part.slots.items()},
        slot_keys={name: keys[of_slots[name]] for name, keys in part.slot_keys.items()},
        **fields,
    )


def _joined(parts: Sequence[TableSnapshot]) -> TableSnapshot:
    def together(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)

    keys, order = torch.cat([part.keys for part in parts]).sort()
    fields: dict[str, Any] = {
        name: None if (values := together(name)) is None else values[order] for name in _OF_KEYS
    }
    return replace(
        parts[0],
        table=whole_table([part.table for part in parts]),
        slots={name: torch.cat([part.slots[name] for part in parts])[order] for name in parts[0].slots},
        candidates=together("candidates"),
        candidate_counts=together("candidate_counts"),
        **{**fields, "keys": keys},
    )
