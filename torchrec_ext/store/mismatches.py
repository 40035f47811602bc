"""Snapshots in which weight and optimizer state have different keys: found, reported, put right."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

import torch

from torchrec_ext.errors import CheckpointError, TableFullError
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.saved import WEIGHT
from torchrec_ext.store.snapshots import StoreSnapshot, TableSnapshot
from torchrec_ext.store.tables import DenseTable, Table

OnMismatch = Literal["initialize", "drop", "error"]

_EXAMPLES = 5


@dataclass(frozen=True)
class MissingKeys:
    """Keys that the weight, or a slot, of a table does not have.

    Attributes:
        count: how many.
        examples: the smallest of them.
    """

    count: int
    examples: tuple[int, ...]

    def __str__(self) -> str:
        what = "key" if self.count == 1 else "keys"
        more = ", ..." if self.count > len(self.examples) else ""
        return f"{self.count} {what} ({', '.join(map(str, self.examples))}{more})"


@dataclass(frozen=True)
class RestoreReport:
    """What a snapshot did not have.

    Attributes:
        missing: by table and by ``"weight"`` or slot, the keys without it; only where there are some. A
            dense table should have all keys of its range, a dynamic one those that its weight or any slot
            has.
        dropped: by table, how many keys were left out for that; empty unless ``on_mismatch="drop"``.
    """

    missing: dict[str, dict[str, MissingKeys]] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def log(self, logger: logging.Logger) -> None:
        """One warning, if anything was missing."""
        if not self.missing:
            return
        what = "initialized what was missing"
        if self.dropped:
            what = "left out " + ", ".join(
                f"{count} keys of {name!r}" for name, count in self.dropped.items()
            )
        logger.warning(
            "the snapshot did not have weight and state of the same keys, the store %s: %s", what, self
        )

    def __str__(self) -> str:
        return "; ".join(
            f"table {name!r}: no " + ", no ".join(f"{slot} for {missing}" for slot, missing in slots.items())
            for name, slots in self.missing.items()
        )


def fit_snapshot(
    snapshot: StoreSnapshot, tables: Mapping[str, tuple[Table, StoreOptimizer]], on_mismatch: OnMismatch
) -> tuple[StoreSnapshot, RestoreReport]:
    """Makes sure that a store can take a snapshot.

    Args:
        snapshot: what shall be put back.
        tables: the store's tables and their optimizers.
        on_mismatch: see ``Store.restore``.

    Returns:
        What to put back, described by the store's tables and without the keys to drop; and what is missing.

    Raises:
        ValueError: the snapshot is of other tables, or contradicts itself.
        CheckpointError: it does not fit, or has mismatches that are not to be put right.
        TableFullError: it has more keys than a table has rows.
    """
    if on_mismatch not in get_args(OnMismatch):
        raise ValueError(f"on_mismatch must be one of {get_args(OnMismatch)}, not {on_mismatch!r}")
    if not set(snapshot.tables) <= set(tables):
        raise ValueError(
            f"the snapshot is of tables {sorted(snapshot.tables)}, the store has {sorted(tables)}"
        )
    parts = {name: _fit_table(part, *tables[name]) for name, part in snapshot.tables.items()}
    report = RestoreReport({name: missing for name, part in parts.items() if (missing := _missing(part))})
    if on_mismatch == "error" and report.missing:
        raise CheckpointError(
            f"the snapshot does not have weight and state of the same keys: {report}. To restore it all the "
            "same, pass on_mismatch='initialize', or 'drop' to leave out keys without all"
        )
    if on_mismatch == "drop":
        for name in report.missing:
            count = len(parts[name].all_keys())
            parts[name] = _without_mismatches(parts[name])
            report.dropped[name] = count - len(parts[name].keys)
    for part in parts.values():
        check_room(part)
    return replace(snapshot, tables=parts), report


def check_room(part: TableSnapshot) -> None:
    """Checks that a dynamic table has as many rows as keys are to be put back.

    Raises:
        TableFullError: it has fewer.
    """
    if not isinstance(part.table, DenseTable) and len(keys := part.all_keys()) > part.table.max_rows:
        raise TableFullError(
            f"table {part.table.name!r} is full: the snapshot has {len(keys)} keys, max_rows="
            f"{part.table.max_rows}; raise max_rows (a collection's num_embeddings)"
        )


def _fit_table(part: TableSnapshot, table: Table, optimizer: StoreOptimizer) -> TableSnapshot:
    """A part as one of the store's table."""
    name = table.name
    if type(part.table) is not type(table) or (part.table.name, part.table.dim) != (name, table.dim):
        raise ValueError(f"the snapshot's table is {part.table}, the store's {table}")
    if not optimizer.keeps_state_of(part.optimizer):
        raise ValueError(
            f"table {name!r}: the snapshot holds state of {part.optimizer}, the store of {optimizer}; "
            "set the store's optimizer to the snapshot's, restore, and change it then"
        )
    part = replace(part, table=table, optimizer=optimizer)
    part.check()
    for what, keys in [
        ("keys", part.keys),
        *((f"keys of {slot}", keys) for slot, keys in part.slot_keys.items()),
        ("candidates", part.keys[:0] if part.candidates is None else part.candidates),
    ]:
        if (keys[1:] <= keys[:-1]).any() and len(keys.unique()) < len(keys):
            raise ValueError(f"table {name!r}: {what} to load must not repeat")
        if isinstance(table, DenseTable):
            outside = keys[(keys < table.first_key) | (keys >= table.first_key + table.num_rows)]
            if len(outside):
                raise CheckpointError(
                    f"table {name!r} has keys {table.first_key} to {table.first_key + table.num_rows - 1}, "
                    f"but the snapshot {_describe(outside)} more; leave them out, or make the table larger"
                )
    return part


def _missing(part: TableSnapshot) -> dict[str, MissingKeys]:
    """By slot, the keys that it should have and does not."""
    slots = [WEIGHT, *(slot.name for slot in part.optimizer.slots)]
    table, wanted = part.table, part.all_keys()
    if isinstance(table, DenseTable):
        short = [slot for slot in slots if len(part.keys_of(slot)) < table.num_rows]
        if short:
            wanted = torch.arange(table.num_rows, device=wanted.device) + table.first_key
    else:
        short = [slot for slot in slots if len(part.keys_of(slot)) < len(wanted)]
    return {slot: _describe(wanted[torch.isin(wanted, part.keys_of(slot), invert=True)]) for slot in short}


def _describe(keys: torch.Tensor) -> MissingKeys:
    smallest = keys.topk(min(_EXAMPLES, len(keys)), largest=False).values
    return MissingKeys(len(keys), tuple(smallest.tolist()))


def _without_mismatches(part: TableSnapshot) -> TableSnapshot:
    """Its keys that have a weight and all slots."""
    kept = part.all_keys()
    was_empty = not len(kept)
    for slot in part.optimizer.slots:
        kept = kept[torch.isin(kept, part.keys_of(slot.name))]
    kept = kept[torch.isin(kept, part.keys)].sort().values
    if not len(kept) and not was_empty:
        raise CheckpointError(
            f"table {part.table.name!r}: no key of the snapshot has a weight and all of "
            f"{[slot.name for slot in part.optimizer.slots]}, so on_mismatch='drop' would leave nothing"
        )

    def of_kept(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        ascending, order = keys.sort()
        return values.index_select(0, order[torch.searchsorted(ascending, kept)])

    return replace(
        part,
        keys=kept,
        weight=of_kept(part.keys, part.weight),
        slots={slot: of_kept(part.keys_of(slot), values) for slot, values in part.slots.items()},
        versions=of_kept(part.keys, part.versions),
        frequencies=None if part.frequencies is None else of_kept(part.keys, part.frequencies),
        last_used=None if part.last_used is None else of_kept(part.keys, part.last_used),
        slot_keys={},
    )
