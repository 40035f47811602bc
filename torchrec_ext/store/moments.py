"""A store's tables at one moment: copied out, and put back."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.state import StoreState
from torchrec_ext.store.store import StoreSnapshot, TableSnapshot
from torchrec_ext.store.tables import DenseTable


@torch.no_grad()
def take_snapshot(state: StoreState, names: Iterable[str]) -> StoreSnapshot:
    """Copies tables; the caller holds the store's lock."""
    tables = {name: _snapshot_of(state.group_of(name), name) for name in names}
    return StoreSnapshot(state.clock, state.step, tables)


def check_snapshot(state: StoreState, snapshot: StoreSnapshot) -> None:
    """Checks that a snapshot is one of these tables.

    Raises:
        ValueError: it is not; names the table.
    """
    if not set(snapshot.tables) <= set(state.names):
        raise ValueError(
            f"the snapshot is of tables {sorted(snapshot.tables)}, the store has {sorted(state.names)}"
        )
    for name, part in snapshot.tables.items():
        group = state.group_of(name)
        if group.tables[name] != part.table:
            raise ValueError(f"the snapshot's table is {part.table}, the store's {group.tables[name]}")
        if not part.optimizer.keeps_state_of(group.optimizer):
            raise ValueError(
                f"table {name!r}: the snapshot holds state of {part.optimizer}, "
                f"the store of {group.optimizer}"
            )


@torch.no_grad()
def restore_snapshot(state: StoreState, snapshot: StoreSnapshot, clock: int) -> None:
    """Puts a snapshot that was checked back; the caller writes."""
    state.step = snapshot.step
    for name, part in snapshot.tables.items():
        group = state.group_of(name)
        if name in group.keys:
            keys = group.keys[name]
            group.release_rows(name, keys.rows_in_use(), clock)
            rows = keys.load(
                part.keys, part.frequencies, part.last_used, part.candidates, part.candidate_counts
            )
        else:
            rows = group.local_rows(name, part.keys)
        group.rows_of(name).index_copy_(0, rows, part.weight)
        for slot, values in part.slots.items():
            group.slots_of(name)[slot].index_copy_(0, rows, values)
        group.versions_of(name).index_fill_(0, rows, clock)


def _snapshot_of(group: RowGroup, name: str) -> TableSnapshot:
    table = group.tables[name]
    extra: dict[str, torch.Tensor] = {}
    if isinstance(table, DenseTable):
        rows = torch.arange(table.num_rows, device=group.weight.device)
        keys = rows + table.first_key
    else:
        owned = group.keys[name]
        rows = owned.rows_in_use()
        keys, order = owned.keys_of(rows).sort()
        rows = rows[order]
        candidates, candidate_counts = owned.candidates()
        extra = {
            "frequencies": owned.frequencies(rows),
            "last_used": owned.last_used(rows),
            "candidates": candidates,
            "candidate_counts": candidate_counts,
        }
    return TableSnapshot(
        table=table,
        optimizer=group.optimizer,
        keys=keys,
        weight=group.rows_of(name).index_select(0, rows),
        slots={slot: values.index_select(0, rows) for slot, values in group.slots_of(name).items()},
        versions=group.versions_of(name).index_select(0, rows),
        **extra,
    )
