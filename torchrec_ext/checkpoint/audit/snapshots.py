"""Store snapshots, saved or in memory, as an audit sees them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce

import numpy as np
import torch

from torchrec_ext.checkpoint.audit.arrange import SQUARES, Arrangement, Slot
from torchrec_ext.checkpoint.audit.ids import Ints, values_of
from torchrec_ext.checkpoint.audit.reading.tensors import (
    LiveTensor,
    Part,
    Record,
    StoredTensor,
    TensorEntry,
)
from torchrec_ext.checkpoint.audit.report import EXAMPLES, Finding, Kind
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.saved import WEIGHT, SavedSnapshot, SavedTable, slot_keys_name, slot_name
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.tables import DenseTable, Table


def arrange_saved(snapshot: SavedSnapshot) -> Arrangement:
    """The tables of a saved snapshot."""
    found = Arrangement()
    for table in snapshot.tables.values():
        arrays = {array: _stored(table, array) for array in table.files}
        found.slots += _slots(table.table, table.optimizer, arrays)
    return found


def arrange_live(snapshot: StoreSnapshot) -> Arrangement:
    """The tables of a snapshot in memory."""
    found = Arrangement()
    for name, table in snapshot.tables.items():
        arrays = {array: _live(name, array, tensor) for array, tensor in table.arrays().items()}
        found.slots += _slots(table.table, table.optimizer, arrays)
    return found


def key_findings(slots: Sequence[Slot]) -> Iterator[Finding]:
    """Which keys slots should have and have not, and which they cannot have.

    A dense table should have all keys of its range, another one those that any of its slots has. Where all
    slots of such a one have the same keys, nothing is read. Otherwise those of all slots of a table are held.
    """
    tables: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot.keys is not None:
            tables.setdefault(slot.table, []).append(slot)
    for name, those in tables.items():
        dense = next((slot.dense for slot in those if slot.dense is not None), None)
        alike = len({slot.keys.key for slot in those if slot.keys}) == 1
        if alike and dense is None:
            continue
        read = {slot.keys.key: np.unique(values_of(slot.keys.parts)) for slot in those if slot.keys}
        keys = {slot.name: read[slot.keys.key] for slot in those if slot.keys}
        if dense is None:
            wanted = reduce(np.union1d, keys.values())
        else:
            wanted = np.arange(dense.first_key, dense.first_key + dense.num_rows)
        for of_slot, own in keys.items():
            kinds: dict[Kind, Ints] = {
                "missing_keys": np.setdiff1d(wanted, own, assume_unique=True),
                "extra_keys": np.setdiff1d(own, wanted, assume_unique=True),
            }
            for kind, those_keys in kinds.items():
                if those_keys.size:
                    examples = tuple(those_keys[:EXAMPLES].tolist())
                    yield Finding(name, of_slot, kind, int(those_keys.size), examples, keyed=True)


def _slots(table: Table, optimizer: StoreOptimizer, arrays: Mapping[str, TensorEntry]) -> Iterator[Slot]:
    dense = table if isinstance(table, DenseTable) else None
    yield Slot(table.name, WEIGHT, arrays[WEIGHT], "weight", keys=arrays["keys"], dense=dense)
    rest = dict(arrays)
    del rest[WEIGHT]
    for slot in optimizer.slots:
        keys = arrays.get(slot_keys_name(slot.name), arrays["keys"])
        values = rest.pop(slot_name(slot.name), None)
        if values is None:  # it was not saved at all
            values = TensorEntry(f"{table.name}.{slot.name}", (0, slot.columns(table.dim)), torch.float32, [])
            keys = TensorEntry(f"{table.name}.no_keys", (0,), torch.int64, [])
        squares = slot.name in SQUARES
        yield Slot(
            table.name,
            slot.name,
            values,
            "state",
            squares=squares,
            not_negative=squares,
            keys=keys,
            initial=optimizer.initial(slot),
        )
    for name, entry in rest.items():
        is_keys = name in ("keys", "candidates") or name.startswith("slot_keys.")
        yield Slot(table.name, name, entry, "keys" if is_keys else "other")


def _stored(table: SavedTable, name: str) -> TensorEntry:
    file = table.files[name]
    dtype = getattr(torch, file.dtype)
    # Its header is not parsed: the checksum is of it, too.
    stride = torch.empty(file.shape, device="meta").stride()
    offset = file.nbytes - math.prod(file.shape) * dtype.itemsize
    record = Record(table.directory / file.file, 0, file.nbytes, file.crc32, follow=False)
    source = StoredTensor(record, dtype, file.shape, stride, offset)
    part = Part((0,) * len(file.shape), file.shape, source)
    return TensorEntry(f"{table.table.name}.{name}", file.shape, dtype, [part])


def _live(table: str, name: str, tensor: torch.Tensor) -> TensorEntry:
    size = tuple(tensor.shape)
    part = Part((0,) * len(size), size, LiveTensor(tensor))
    return TensorEntry(f"{table}.{name}", size, tensor.dtype, [part])
