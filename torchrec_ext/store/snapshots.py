"""``StoreSnapshot``: a store's tables at one moment, taken from a store, from files, or from elsewhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from torchrec_ext.errors import CheckpointError
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.saved import (
    WEIGHT,
    SavedSnapshot,
    SavedTable,
    check_arrays,
    slot_keys_name,
    slot_name,
)
from torchrec_ext.store.saving import SnapshotWriter
from torchrec_ext.store.tables import Table

_OF_KEYS = ("keys", WEIGHT, "versions")
_OF_DYNAMIC_TABLES = ("frequencies", "last_used", "candidates", "candidate_counts")


@dataclass(frozen=True)
class TableSnapshot:
    """One table at one moment.

    A store's own snapshots have weight and state of the same keys. Another system's may not: then the keys
    of a slot are in ``slot_keys``, and a slot may be missing altogether.

    Attributes:
        table: what it is.
        optimizer: the optimizer whose state ``slots`` holds.
        keys: int64 ``[n]``, in a store's own snapshots ascending.
        weight: float32 ``[n, dim]``.
        slots: the optimizer state by slot name, float32 ``[n, 1]`` or ``[n, dim]``.
        versions: the store's clock when each row was written last, int64 ``[n]``.
        frequencies: how often each key of a dynamic table was looked up in training, int64 ``[n]``.
        last_used: the step at which it was last, int64 ``[n]``; None: it is not known.
        candidates: keys that wait to be admitted, int64 ``[m]``.
        candidate_counts: how often each of them was seen, int64 ``[m]``.
        slot_keys: by slot name, the keys of slots that have others than ``keys``, int64 ``[k]``; the slot is
            ``[k, ...]`` then.
    """

    table: Table
    optimizer: StoreOptimizer
    keys: torch.Tensor
    weight: torch.Tensor
    slots: dict[str, torch.Tensor]
    versions: torch.Tensor
    frequencies: torch.Tensor | None = None
    last_used: torch.Tensor | None = None
    candidates: torch.Tensor | None = None
    candidate_counts: torch.Tensor | None = None
    slot_keys: dict[str, torch.Tensor] = field(default_factory=dict)

    def keys_of(self, slot: str) -> torch.Tensor:
        """The keys of ``weight``, or of a slot: int64 ``[k]``, none of a slot that is missing."""
        if slot == WEIGHT:
            return self.keys
        return self.slot_keys.get(slot, self.keys) if slot in self.slots else self.keys[:0]

    def all_keys(self) -> torch.Tensor:
        """The keys of the weight and of all slots: int64 ``[k]``; ``keys`` itself if they do not differ."""
        if not self.slot_keys:
            return self.keys
        return torch.cat([self.keys, *self.slot_keys.values()]).unique()

    def arrays(self) -> dict[str, torch.Tensor]:
        """Its tensors by the names that they have in files; see ``saved``."""
        arrays = {name: getattr(self, name) for name in (*_OF_KEYS, *_OF_DYNAMIC_TABLES)}
        arrays |= {slot_name(slot): values for slot, values in self.slots.items()}
        arrays |= {slot_keys_name(slot): keys for slot, keys in self.slot_keys.items()}
        return {name: tensor for name, tensor in arrays.items() if tensor is not None}

    def check(self) -> None:
        """Checks that its tensors fit together.

        Raises:
            ValueError: they do not; names the table and the tensor.
        """
        check_arrays(
            self.table,
            self.optimizer,
            {
                name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
                for name, tensor in self.arrays().items()
            },
        )


@dataclass(frozen=True)
class StoreSnapshot:
    """All tables at one moment.

    Attributes:
        clock: the store's clock, which counts its updates.
        step: the largest step number that an update brought.
        tables: by name, in no order.
    """

    clock: int
    step: int
    tables: dict[str, TableSnapshot] = field(default_factory=dict)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Saves it as a directory; see ``saved`` for the format.

        It is there as a whole or not at all, and takes the place of one that was there, which stays if this
        fails or the process dies. Nothing of it is copied in memory.

        Args:
            path: the directory; made if it is not there.

        Raises:
            CheckpointError: the directory holds something else, another process is saving there, or the
                disk is full or fails.
        """
        with SnapshotWriter(path, clock=self.clock, step=self.step) as writer:
            for part in self.tables.values():
                writer.add(part.table, part.optimizer, part.arrays())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """A snapshot that was saved.

        All files are read, to compare their checksums. If another snapshot takes its place meanwhile, it is
        that one, or this. The tensors are mapped: they take no memory but what
        the system can take back, until they are written to, which does not change the files.

        Raises:
            CheckpointError: there is none, or it is damaged; names the file and the table.
        """
        saved = SavedSnapshot(path)
        while True:
            try:
                return cls(saved.clock, saved.step, _mapped(saved))
            except CheckpointError:
                there = SavedSnapshot(path)
                if there.is_same(saved):
                    raise
                saved = there

    @classmethod
    def from_arrays(
        cls,
        arrays: Mapping[str, Mapping[str, tuple[Any, Any]]],
        tables: Iterable[Table],
        optimizer: StoreOptimizer,
        *,
        step: int = 0,
    ) -> Self:
        """A snapshot of what another system saved.

        Weight and optimizer state may have different keys, and a slot may be left out: what to do about it
        is up to ``Store.restore``.

        Args:
            arrays: by table and by ``"weight"`` or slot name: keys, int64 ``[n]``, in any order, and their
                values, float32 ``[n, dim]``, or ``[n, 1]`` of a slot with one value per row; tensors or
                NumPy arrays. They are not copied if the keys ascend, so must not change any more.
            tables: what the tables are, as for ``Store.create_tables``.
            optimizer: whose state the slots are.
            step: how many steps were trained.

        Raises:
            ValueError: a table is not described or has no weight, the optimizer has no such slot, an array
                has another dtype or shape, or keys repeat; names the table and the array.
        """
        described = {table.name: table for table in tables}
        if unknown := sorted(set(arrays) - set(described)):
            raise ValueError(f"no table describes the arrays of {unknown}; there are {sorted(described)}")
        return cls(
            0, step, {name: _from_arrays(described[name], optimizer, of) for name, of in arrays.items()}
        )


def _mapped(saved: SavedSnapshot) -> dict[str, TableSnapshot]:
    # All of them first, which is quick: from then on no other snapshot can take their place.
    content = {
        name: {array: table.mapped(array, copy_on_write=True) for array in table.files}
        for name, table in saved.tables.items()
    }
    tables = {name: _mapped_table(table, content[name]) for name, table in saved.tables.items()}
    for name, table in saved.tables.items():
        for array, of_file in content[name].items():
            table.compare(array, of_file)
    return tables


def _mapped_table(saved: SavedTable, content: Mapping[str, NDArray[np.uint8]]) -> TableSnapshot:
    tensors = {name: torch.from_numpy(saved.parsed(name, of_file)) for name, of_file in content.items()}
    return TableSnapshot(
        table=saved.table,
        optimizer=saved.optimizer,
        keys=tensors["keys"],
        weight=tensors[WEIGHT],
        slots={slot: tensors[slot_name(slot)] for slot in saved.slots},
        versions=tensors["versions"] if "versions" in tensors else torch.zeros_like(tensors["keys"]),
        slot_keys={
            slot: tensors[slot_keys_name(slot)] for slot in saved.slots if slot_keys_name(slot) in tensors
        },
        **{name: tensors.get(name) for name in _OF_DYNAMIC_TABLES},
    )


def _from_arrays(
    table: Table, optimizer: StoreOptimizer, arrays: Mapping[str, tuple[Any, Any]]
) -> TableSnapshot:
    if WEIGHT not in arrays:
        raise ValueError(f"table {table.name!r}: there is no {WEIGHT!r} among {sorted(arrays)}")
    names = [slot.name for slot in optimizer.slots]
    if unknown := sorted(set(arrays) - {WEIGHT, *names}):
        raise ValueError(f"table {table.name!r}: {optimizer} has no slots {unknown}; it has {names}")
    in_order = {name: _in_order(table, name, *of) for name, of in arrays.items()}
    keys, weight = in_order.pop(WEIGHT)
    part = TableSnapshot(
        table=table,
        optimizer=optimizer,
        keys=keys,
        weight=weight,
        slots={slot: values for slot, (_, values) in in_order.items()},
        versions=torch.zeros_like(keys),
        slot_keys={slot: own for slot, (own, _) in in_order.items() if not torch.equal(own, keys)},
    )
    part.check()
    return part


def _in_order(table: Table, name: str, keys: Any, values: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys, ascending, and their values."""
    where = f"table {table.name!r}, {name}"
    keys, values = _tensor(keys, where), _tensor(values, where)
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"{where}: keys must be int64 [n], not {keys.dtype} {list(keys.shape)}")
    if values.dim() == 0 or len(values) != len(keys):
        raise ValueError(f"{where}: there are {len(keys)} keys, but values {list(values.shape)}")
    if (keys[1:] <= keys[:-1]).any():
        keys, order = keys.sort()
        values = values[order]
        if len(repeated := keys[1:][keys[1:] == keys[:-1]]):
            raise ValueError(f"{where}: {len(repeated)} keys repeat, for instance {int(repeated[0])}")
    return keys, values


def _tensor(array: Any, where: str) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array.detach()
    array = np.asarray(array)
    if any(stride < 0 for stride in array.strides):  # which a tensor cannot have
        array = array.copy()
    with warnings.catch_warnings():
        # That an array is read-only, as mapped ones are: nothing here writes to it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: {error}") from error
