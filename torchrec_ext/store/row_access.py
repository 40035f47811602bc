"""What is done to rows of a store, read or written. The caller holds the store's lock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from torchrec_ext.store.bags import Bags
from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.state import StoreState
from torchrec_ext.store.store import NO_ROW, Rows


def check_keys(state: StoreState, requests: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Checks keys of tables; see ``Store`` for what is raised."""
    for table, keys in requests:
        state.group_of(table).check_keys(table, keys)


def flat_rows(
    state: StoreState, table: str, keys: torch.Tensor, *, admit: bool = False
) -> tuple[RowGroup, torch.Tensor]:
    """The group that keys of a table are in, and their rows there, int64 ``[n]``.

    With ``admit``, for which the lock is exclusive, a dynamic table's keys are counted first.
    """
    group = state.group_of(table)
    group.check_keys(table, keys)
    if admit and table in group.keys:
        rows = _admit(state, group, table, keys)
    else:
        rows = group.local_rows(table, keys)
    first = group.first_row[table]
    return group, rows + first if first else rows


@torch.no_grad()
def refresh(state: StoreState, table: str, held: Rows, *, admit: bool, counts: torch.Tensor | None) -> int:
    """Brings rows up to date, with an exclusive lock if ``admit``; see ``Store.refresh_many``."""
    group = state.group_of(table)
    if admit and table in group.keys:
        _admit(state, group, table, held.keys, counts)
    _, rows = flat_rows(state, table, held.keys)
    versions = group.versions.index_select(0, rows)
    if table in group.keys:
        versions[rows == group.first_row[table]] = NO_ROW
    changed = (versions != held.versions).nonzero().flatten()
    if len(changed) == len(rows):
        torch.index_select(group.weight, 0, rows, out=held.rows)
    elif len(changed):
        held.rows.index_copy_(0, changed, group.weight.index_select(0, rows[changed]))
    held.versions.copy_(versions)
    return len(changed)


@torch.no_grad()
def update(
    state: StoreState,
    requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
    *,
    step: int,
    lr: float | None,
) -> None:
    """Applies gradients, with an exclusive lock; see ``Store.update_many``."""
    check_keys(state, ((table, keys) for table, keys, _ in requests))
    for table, keys, grads in requests:
        expected = [len(keys), state.group_of(table).dim]
        if list(grads.shape) != expected:
            raise ValueError(f"table {table!r}: gradients must be {expected}, not {list(grads.shape)}")
    with state.writing(step) as clock:
        for table, keys, grads in requests:
            group, rows = flat_rows(state, table, keys)
            group.update(Bags.of_one(rows), grads, step=step, lr=lr, clock=clock)


@torch.no_grad()
def write(
    state: StoreState,
    table: str,
    keys: torch.Tensor,
    rows: torch.Tensor | None,
    slots: Mapping[str, torch.Tensor],
) -> None:
    """Overwrites rows, their optimizer state, or both, with an exclusive lock; see ``Store.write``."""
    group = state.group_of(table)
    group.check_keys(table, keys)
    if len(torch.unique(keys)) < len(keys):
        raise ValueError(f"table {table!r}: keys to write must not repeat")
    targets = [("rows", group.weight, rows)] if rows is not None else []
    for name, values in slots.items():
        if name not in group.slots:
            raise ValueError(f"table {table!r} has no slot {name!r}, it has {sorted(group.slots)}")
        targets.append((f"slot {name!r}", group.slots[name], values))
    for what, array, values in targets:
        if values.shape != (expected := (len(keys), array.shape[1])):
            raise ValueError(f"table {table!r}: {what} must be {list(expected)}, not {list(values.shape)}")
    with state.writing() as clock:
        if table in group.keys:
            release = partial(group.release_rows, table, clock=clock)
            local, new = group.keys[table].admit(keys, release)
            group.initialize_rows(table, new, clock)
        else:
            local = group.local_rows(table, keys)
        flat = local + group.first_row[table]
        for _, array, values in targets:
            array.index_copy_(0, flat, values.to(array.dtype))
        group.versions.index_fill_(0, flat, clock)


def evict_unused(state: StoreState, table: str, steps: int) -> int:
    """Evicts keys, with an exclusive lock; see ``LocalStore.evict_unused``."""
    group = state.group_of(table)
    if table not in group.keys:
        raise ValueError(f"table {table!r} is dense: every key has a row")
    keys = group.keys[table]
    rows = keys.unused_since(state.step + 1 - steps)
    with state.writing() as clock:
        group.release_rows(table, rows, clock)
        keys.evict(rows)
    return len(rows)


def touch(state: StoreState, table: str, rows: torch.Tensor | None) -> None:
    """Stamps rows as written, with an exclusive lock; see ``LocalStore.touch``."""
    group = state.group_of(table)
    versions = group.versions_of(table)
    if table in group.keys:
        # Not those that lost their key, or its loss would be forgotten.
        rows = group.keys[table].rows_in_use() if rows is None else rows[versions[rows] > 0]
    with state.writing() as clock:
        if rows is None:
            versions.fill_(clock)
        else:
            versions.index_fill_(0, rows, clock)


def _admit(
    state: StoreState, group: RowGroup, table: str, keys: torch.Tensor, counts: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows of a dynamic table's keys after they were counted, and some perhaps admitted."""
    with state.writing() as clock:
        release = partial(group.release_rows, table, clock=clock)
        rows, new = group.keys[table].look_up(keys, state.step + 1, release, counts)
        group.initialize_rows(table, new, clock)
        return rows
