"""``InitFns``: what fills the rows of new dense tables, for when they have to be filled again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from inspect import ismethod
from typing import Any

import torch

from torchrec_ext.errors import CheckpointError
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.tables import DenseTable

InitFn = Callable[[torch.Tensor], Any]
"""Fills the rows of a dense table in place, float32 ``[num_rows, dim]``."""


class InitFns:
    """Remembers the functions that tables were made with, as long as somebody else has them.

    No longer, because they may hold rows of their own. That there was one is not forgotten: the table's
    initializer does not say what its rows held at first.
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
            if name not in given and name not in self._by_table:
                continue
            init_fn = given[name] if name in given else self._by_table[name]()
            if init_fn is None:
                raise CheckpointError(
                    f"table {name!r}: the snapshot lacks rows, and the function that filled them when the "
                    "table was made is gone; pass it in restore's init_fns"
                )
            needed[name] = init_fn
        return needed


def _weakly(init_fn: InitFn) -> Callable[[], InitFn | None]:
    try:
        return weakref.WeakMethod(init_fn) if ismethod(init_fn) else weakref.ref(init_fn)
    except TypeError:  # there are no weak references to its kind
        return lambda: None
