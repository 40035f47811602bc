"""Functions that fill the rows of dense tables: remembered, and called when they have to be filled again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import ismethod
from typing import Any

import torch

from torchrec_ext.errors import CheckpointError
from torchrec_ext.store.places import Place
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.tables import CHUNK_BYTES, ByFunction, DenseTable

_ARRAYS = "initial_rows."  # of a place, during a restore

InitFn = Callable[[torch.Tensor], Any]
"""Fills the rows of a dense table in place, float32 ``[num_rows, dim]``."""


class InitFns:
    """Remembers the functions that tables were made with, as long as somebody else has them.

    No longer, because they may hold rows of their own. That there was one, the table's initializer tells.
    """

    def __init__(self) -> None:
        self._by_table: dict[str, Callable[[], InitFn | None]] = {}

    def remember(self, init_fns: Mapping[str, InitFn]) -> None:
        """Takes functions by name of the table."""
        self._by_table |= {name: _weakly(init_fn) for name, init_fn in init_fns.items()}

    def to_restore(self, snapshot: StoreSnapshot, given: Mapping[str, InitFn]) -> dict[str, InitFn]:
        """The functions that are needed because a snapshot lacks rows of dense tables.

        Args:
            snapshot: one that ``fit_snapshot`` returned.
            given: functions to use instead of those that are remembered.

        Raises:
            CheckpointError: one is needed and gone.
        """
        needed = {}
        for name, part in snapshot.tables.items():
            if not isinstance(part.table, DenseTable) or len(part.keys) == part.table.num_rows:
                continue
            if name in given:
                needed[name] = given[name]
            elif isinstance(part.table.initializer, ByFunction):
                init_fn = self._by_table[name]() if name in self._by_table else None
                if init_fn is None:
                    raise CheckpointError(
                        f"table {name!r}: the snapshot lacks rows, and the function that filled them when "
                        "the table was made is not there; pass it in restore's init_fns"
                    )
                needed[name] = init_fn
        return needed


@contextmanager
def filled_in(
    place: Place, snapshot: StoreSnapshot, init_fns: Mapping[str, InitFn]
) -> Iterator[StoreSnapshot]:
    """Where there is room in a place for what ``with_initial_rows`` makes: tables may not fit into memory."""
    place.drop(_ARRAYS)  # of a process that died
    names = {table: f"{_ARRAYS}{number}" for number, table in enumerate(init_fns)}
    try:
        yield with_initial_rows(
            snapshot,
            init_fns,
            lambda table, shape: place.array(names[table], shape, torch.float32, create=True),
        )
    finally:
        place.drop(_ARRAYS)


@torch.no_grad()
def with_initial_rows(
    snapshot: StoreSnapshot,
    init_fns: Mapping[str, InitFn],
    empty: Callable[[str, tuple[int, int]], torch.Tensor],
) -> StoreSnapshot:
    """A snapshot in which functions filled the rows that it lacks.

    Args:
        snapshot: one that ``fit_snapshot`` returned.
        init_fns: what ``to_restore`` returned.
        empty: makes room for the rows of a table, by its name and their shape, float32.
    """
    parts = dict(snapshot.tables)
    for name, init_fn in init_fns.items():
        part = parts[name]
        assert isinstance(part.table, DenseTable)
        rows = empty(name, (part.table.num_rows, part.table.dim))
        init_fn(rows)
        copy_rows(rows, (part.keys - part.table.first_key).to(rows.device), part.weight)
        keys = torch.arange(len(rows), device=part.keys.device) + part.table.first_key
        parts[name] = replace(
            part,
            keys=keys,
            weight=rows,
            versions=torch.zeros_like(keys),
            slot_keys={slot: part.keys_of(slot) for slot in part.slots},
        )
    return replace(snapshot, tables=parts)


def copy_rows(target: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Copies values to rows piece by piece, as they may have to come from a disk or another device."""
    step = rows_at_once(target)
    for start in range(0, len(rows), step):
        piece = slice(start, start + step)
        target.index_copy_(0, rows[piece], values[piece].to(target.device))


def rows_at_once(target: torch.Tensor) -> int:
    """How many rows to copy, or to make, at a time."""
    return max(1, CHUNK_BYTES // (4 * target.shape[1]))


def _weakly(init_fn: InitFn) -> Callable[[], InitFn | None]:
    try:
        return weakref.WeakMethod(init_fn) if ismethod(init_fn) else weakref.ref(init_fn)
    except TypeError:  # there are no weak references to its kind
        return lambda: None
