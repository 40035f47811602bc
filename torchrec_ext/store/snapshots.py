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
    """Checks that a snapshot is one of these tables, and whole.

    Raises:
        ValueError: it is not; names the table.
        TableFullError: it has more keys than the table has rows.
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
        _check_tensors(group, part)
        if name in group.keys:
            group.keys[name].check_load(part.keys)
        else:
            group.check_keys(name, part.keys)


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


def _check_tensors(group: RowGroup, part: TableSnapshot) -> None:
    if part.slots.keys() != group.slots.keys():
        raise ValueError(
            f"table {part.table.name!r}: the snapshot holds state {sorted(part.slots)}, "
            f"the store {sorted(group.slots)}"
        )
    count, waiting = len(part.keys), 0 if part.candidates is None else len(part.candidates)
    tensors = [
        ("weight", part.weight, [count, group.dim]),
        ("frequencies", part.frequencies, [count]),
        ("last_used", part.last_used, [count]),
        ("candidate_counts", part.candidate_counts, [waiting]),
        *((f"slot {name!r}", part.slots[name], [count, slot.shape[1]]) for name, slot in group.slots.items()),
    ]
    for what, tensor, expected in tensors:
        if tensor is not None and list(tensor.shape) != expected:
            raise ValueError(
                f"table {part.table.name!r}: {what} of {count} keys must be {expected}, "
                f"not {list(tensor.shape)}"
            )


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
