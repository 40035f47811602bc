"""The optimizer state of dense tables, saved and loaded whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from torchrec_ext.recstore.whole_tables import read_slots, write_rows
from torchrec_ext.store import DenseTable, Store


def optimizer_state(store: Store, tables: Sequence[DenseTable]) -> dict[str, torch.Tensor]:
    """State by ``<table>.<slot>``, ``[num_rows, 1 or dim]``; of a local store views."""
    return {
        f"{table.name}.{slot}": values
        for table in tables
        for slot, values in read_slots(store, table).items()
    }


def load_optimizer_state(
    store: Store, tables: Sequence[DenseTable], state: Mapping[str, torch.Tensor]
) -> None:
    """Takes what ``optimizer_state`` gave.

    Raises:
        ValueError: it is the state of other tables or another optimizer; nothing was changed.
    """
    expected = {
        f"{table.name}.{slot.name}": (table, slot.name, [table.num_rows, slot.columns(table.dim)])
        for table in tables
        for slot in store.optimizer(table.name).slots
    }
    if set(state) != set(expected):
        raise ValueError(f"optimizer state must be of {sorted(expected)}, not of {sorted(state)}")
    for key, (_, _, shape) in expected.items():
        if list(state[key].shape) != shape:
            raise ValueError(f"optimizer state {key!r} must be {shape}, not {list(state[key].shape)}")
    for key, (table, slot_name, _) in expected.items():
        write_rows(store, table, slots={slot_name: state[key].detach()})
