"""What a re-sharding did, told once for all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_ext.checkpoint.zch_entries import TableEntries
from torchrec_ext.checkpoint.zch_moves import Moves

EXAMPLES = 10
"""How many ids a report names."""


@dataclass(frozen=True)
class ReshardedTable:
    """What became of one table.

    Attributes:
        fqn: the table, ``"mc.t0"``.
        shards_before: how many shards it had in the checkpoint.
        shards: how many it has now.
        ids: how many ids own a row now.
        evicted: how many ids lost theirs, because their new shard has no room for them.
        evicted_ids: some of them.
        unreachable: how many ids were left out that owned a row on a shard where no lookup found them.
        unreachable_ids: some of them.
        fallback_from: for each shard, the shard of the checkpoint whose fallback row it has now.
        optimizer_state: whether optimizer state moved with the rows; if not, it has its initial value.
    """

    fqn: str
    shards_before: int
    shards: int
    ids: int
    evicted: int
    evicted_ids: tuple[int, ...]
    unreachable: int
    unreachable_ids: tuple[int, ...]
    fallback_from: tuple[int, ...]
    optimizer_state: bool


@dataclass(frozen=True)
class ReshardReport:
    """What ``reshard_zch`` did, the same on every rank.

    Attributes:
        tables: the tables whose shards differ from the checkpoint's, by name.
        unchanged: the names of those that have the same shards, and were loaded as TorchRec does it.
    """

    tables: Mapping[str, ReshardedTable]
    unchanged: tuple[str, ...]


@dataclass(frozen=True)
class Share:
    """One rank's part of what is told of a table."""

    ids: int
    evicted: int
    evicted_ids: list[int]
    unreachable: int
    unreachable_ids: list[int]
    fallback_shard: int

    @staticmethod
    def of(moves: Moves) -> Share:
        """What there is to tell of a shard."""
        return Share(
            moves.ids.numel(),
            moves.evicted.size,
            moves.evicted[:EXAMPLES].tolist(),
            moves.unreachable.size,
            moves.unreachable[:EXAMPLES].tolist(),
            moves.fallback_shard,
        )


def table_report(entries: TableEntries, shards_before: int, shares: Sequence[Share]) -> ReshardedTable:
    """What to tell of a table, from every rank's share."""
    return ReshardedTable(
        fqn=entries.table.fqn,
        shards_before=shards_before,
        shards=len(shares),
        ids=sum(share.ids for share in shares),
        evicted=sum(share.evicted for share in shares),
        evicted_ids=tuple(sorted(i for share in shares for i in share.evicted_ids)[:EXAMPLES]),
        unreachable=sum(share.unreachable for share in shares),
        unreachable_ids=tuple(sorted(i for share in shares for i in share.unreachable_ids)[:EXAMPLES]),
        fallback_from=tuple(share.fallback_shard for share in shares),
        optimizer_state=not entries.not_loaded,
    )


def log_report(report: ReshardReport, logger: logging.Logger) -> None:
    """One line per table; a warning where something was lost."""
    for table in report.tables.values():
        lost = table.evicted or table.unreachable or not table.optimizer_state
        logger.log(
            logging.WARNING if lost else logging.INFO,
            "%s: %d shards became %d, %d ids kept their rows; evicted %d %s, unreachable before %d %s%s",
            table.fqn,
            table.shards_before,
            table.shards,
            table.ids,
            table.evicted,
            list(table.evicted_ids),
            table.unreachable,
            list(table.unreachable_ids),
            "" if table.optimizer_state else "; no optimizer in state_dict: its optimizer state starts anew",
        )
