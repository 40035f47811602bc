"""Copies of a store's saved snapshot in which some rows start anew, and no slot lacks keys."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.checkpoint.audit.restore import Restored
from torchrec_ext.store.saved import (
    MANIFEST_NAME,
    WEIGHT,
    SavedSnapshot,
    SavedTable,
    slot_keys_name,
    slot_name,
)
from torchrec_ext.store.saving import Pieces, SnapshotWriter
from torchrec_ext.store.tables import ByFunction, DenseTable

Array = NDArray[Any]

_KEYS_AT_ONCE = 1 << 15


def write_snapshot(
    snapshot: SavedSnapshot,
    path: Path,
    anew: Mapping[str, Mapping[str, torch.Tensor]],
    restored: Sequence[Restored],
) -> None:
    """Writes the copy.

    Args:
        snapshot: what to copy.
        path: where to, an empty directory.
        anew: by table and slot, the keys that start anew, int64 ``[n]``.
        restored: values that are put back.

    Raises:
        CheckpointError: it cannot be read or written.
    """
    with SnapshotWriter(path, clock=snapshot.clock, step=snapshot.step) as writer:
        for name, table in snapshot.tables.items():
            arrays = {array: table.array(array, copy_on_write=True) for array in table.files}
            for slot, keys in anew.get(name, {}).items():
                if (values := arrays.get(WEIGHT if slot == WEIGHT else slot_name(slot))) is not None:
                    own = table.keys(slot)
                    rows = np.flatnonzero(np.isin(own, keys.numpy()))
                    values[rows] = _initial(table, slot, own[rows])
            for one in restored:
                if one.slot.table == name:
                    array = arrays[WEIGHT if one.slot.name == WEIGHT else slot_name(one.slot.name)]
                    array.reshape(-1)[one.element] = one.value
            writer.add(table.table, table.optimizer, _with_all_keys(table, arrays, snapshot.step))
    for file in path.iterdir():
        shutil.copymode(snapshot.path / MANIFEST_NAME, file)


def _initial(table: SavedTable, slot: str, keys: Array) -> Array:
    """The initial rows of keys, float32 ``[n, columns]``; zeros where they are not known."""
    dim, initializer = table.table.dim, table.table.initializer
    if slot == WEIGHT:
        if isinstance(initializer, ByFunction):
            return np.zeros((len(keys), dim), np.float32)
        rows: Array = initializer.rows(torch.from_numpy(keys), dim).numpy()
        return rows
    (kind,) = [one for one in table.optimizer.slots if one.name == slot]
    columns = kind.columns(dim)
    return np.full((len(keys), columns), table.optimizer.initial(kind), np.float32)


def _with_all_keys(table: SavedTable, arrays: dict[str, Array], step: int) -> dict[str, Array | Pieces]:
    """A table's arrays, in which the weight and all slots have the same keys."""
    slots = [WEIGHT, *(slot.name for slot in table.optimizer.slots)]
    own = {slot: _own_keys(slot, arrays) for slot in slots}
    described = table.table
    if isinstance(described, DenseTable):
        keys = np.arange(described.first_key, described.first_key + described.num_rows)
    else:
        keys = reduce(np.union1d, own.values())
    if all(len(one) == len(keys) for one in own.values()) and not any(
        slot_keys_name(slot) in arrays for slot in slots
    ):
        return dict(arrays)
    filled: dict[str, Array | Pieces] = {"keys": keys}
    for slot in slots:
        name = WEIGHT if slot == WEIGHT else slot_name(slot)

        def initial(some: Array, slot: str = slot) -> Array:
            return _initial(table, slot, some)

        filled[name] = _spread(keys, own[slot], arrays.get(name), initial)
    # A key that is not known to be unused must not be evicted at once.
    for name, value in (("versions", 0), ("frequencies", 0), ("last_used", step)):
        if name in arrays:

            def constant(some: Array, value: int = value) -> Array:
                return np.full(len(some), value)

            filled[name] = _spread(keys, own[WEIGHT], arrays[name], constant)
    if "candidates" in arrays:
        waiting = np.isin(arrays["candidates"], keys, invert=True)
        filled["candidates"] = arrays["candidates"][waiting]
        filled["candidate_counts"] = arrays["candidate_counts"][waiting]
    return filled


def _own_keys(slot: str, arrays: Mapping[str, Array]) -> Array:
    if slot != WEIGHT and slot_name(slot) not in arrays:
        return np.empty(0, np.int64)
    return arrays.get(slot_keys_name(slot), arrays["keys"])


def _spread(keys: Array, own: Array, values: Array | None, initial: Callable[[Array], Array]) -> Pieces:
    """Values of all keys, ascending: those that there are, and initial ones."""
    order = np.argsort(own, kind="stable")
    ascending = own[order]
    first = initial(keys[:1])

    def pieces() -> Iterator[Array]:
        for start in range(0, len(keys), _KEYS_AT_ONCE):
            some = keys[start : start + _KEYS_AT_ONCE]
            piece = initial(some)
            if values is not None and len(own):
                at = np.searchsorted(ascending, some).clip(max=len(own) - 1)
                there = ascending[at] == some
                piece[there] = values[order[at[there]]]
            yield piece

    return Pieces((len(keys), *first.shape[1:]), first.dtype.name, pieces())
