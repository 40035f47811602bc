"""A store's tables at one moment: copied out, and put back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.init_fns import copy_rows, rows_at_once
from torchrec_ext.store.saved import WEIGHT
from torchrec_ext.store.snapshots import StoreSnapshot, TableSnapshot
from torchrec_ext.store.state import StoreState
from torchrec_ext.store.tables import ByFunction, DenseTable, KeyOf, fill_initial_rows


@torch.no_grad()
def take_snapshot(state: StoreState, names: Iterable[str]) -> StoreSnapshot:
    """Copies tables; the caller holds the store's lock."""
    tables = {name: _snapshot_of(state.group_of(name), name) for name in names}
    return StoreSnapshot(state.clock, state.step, tables)


@torch.no_grad()
def restore_snapshot(
    state: StoreState, snapshot: StoreSnapshot, clock: int, key_of: KeyOf | None = None
) -> None:
    """Puts a snapshot back that ``fit_snapshot`` returned; the caller writes.

    Args:
        state: the store's.
        snapshot: the snapshot. What it lacks gets initial values.
        clock: the store's clock.
        key_of: see ``fill_initial_rows``.
    """
    # Other tables know by the step which keys were not used for long: for them it does not go back.
    is_whole = set(snapshot.tables) == set(state.names)
    state.step = snapshot.step if is_whole else max(state.step, snapshot.step)
    for name, part in snapshot.tables.items():
        group = state.group_of(name)
        known = part.all_keys()
        if name in group.keys:
            part = _as_of(part, snapshot.step, state.step)
            rows = _load_keys(group, name, part, known, state.step, clock)
        else:
            rows = torch.arange(group.tables[name].num_rows, device=group.weight.device)
        for slot, target in {WEIGHT: group.rows_of(name), **group.slots_of(name)}.items():
            keys = part.keys_of(slot)
            if len(keys) < len(rows):
                # All rows, and not those alone that get nothing below: it is rare, and cannot go wrong.
                _initialize(group, name, slot, target, rows, key_of)
            if len(keys):
                found = name in group.keys and keys is known
                at = rows if found else group.local_rows(name, keys.to(target.device))
                copy_rows(target, at, part.weight if slot == WEIGHT else part.slots[slot])
        # Last: of rows whose version is not positive, a process that finds this unfinished knows.
        group.versions_of(name).index_fill_(0, rows, clock)


def _as_of(part: TableSnapshot, saved: int, now: int) -> TableSnapshot:
    """A dynamic table's part of which the keys were last used as long before a step as before another one."""
    return part if part.last_used is None else replace(part, last_used=part.last_used + (now - saved))


def _load_keys(
    group: RowGroup, name: str, part: TableSnapshot, keys: torch.Tensor, step: int, clock: int
) -> torch.Tensor:
    """Gives all keys of a dynamic table's part a row, and takes it away from others; returns the rows."""
    owned = group.keys[name]
    frequencies, candidates, counts = part.frequencies, part.candidates, part.candidate_counts
    # A key that is not known to be unused must not be evicted at once.
    last_used = torch.full_like(part.keys, step) if part.last_used is None else part.last_used
    if keys is not part.keys:
        at = torch.searchsorted(keys, part.keys)
        last_used = torch.full_like(keys, step).index_copy_(0, at, last_used)
        if frequencies is not None:
            frequencies = torch.zeros_like(keys).index_copy_(0, at, frequencies)
        if candidates is not None and counts is not None:
            waiting = torch.isin(candidates, keys, invert=True)
            candidates, counts = candidates[waiting], counts[waiting]
    group.release_rows(name, owned.rows_in_use(), clock)
    return owned.load(keys, frequencies, last_used, candidates, counts)


def _initialize(
    group: RowGroup, name: str, slot: str, target: torch.Tensor, rows: torch.Tensor, key_of: KeyOf | None
) -> None:
    """Gives rows of a table their initial weight, or initial state of a slot."""
    table = group.tables[name]
    if slot != WEIGHT:
        initial = {of.name: group.optimizer.initial(of) for of in group.optimizer.slots}
        target.index_fill_(0, rows, initial[slot])
    elif isinstance(table, DenseTable):
        assert not isinstance(table.initializer, ByFunction)  # the function has filled the snapshot
        fill_initial_rows(table, table.initializer, target, key_of)
    else:
        for piece in rows.split(rows_at_once(target)):
            keys = group.keys[name].keys_of(piece)
            target.index_copy_(0, piece, table.initializer.rows(keys, table.dim))


def _snapshot_of(group: RowGroup, name: str) -> TableSnapshot:
    table = group.tables[name]
    extra: dict[str, Any] = {}
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
