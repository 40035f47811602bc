"""Whole dense tables of a store: made, read, written, a piece at a time where they are far away."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from torchrec_ext.store import DenseTable, LocalStore, MemoryStore, Store, StoreOptimizer, Table

# Rows that go to or come from a store in one call.
ROWS_PER_CALL = 1 << 16

# A multiple of 16: torch draws normal values in blocks of that.
_DRAWN_AT_ONCE = 1 << 20


def create_tables(
    store: Store,
    tables: Sequence[Table],
    optimizer: StoreOptimizer,
    init_fns: Mapping[str, Callable[[torch.Tensor], Any]],
) -> list[Table]:
    """Makes tables in a store, or finds them there; rows that were there stay as they are.

    Other processes see a local store's new tables when they are initialised; in other stores they may
    see the tables' own initial rows for a moment.

    Args:
        store: the store.
        tables: the tables, in the order in which new ones are initialised.
        optimizer: of tables that are made.
        init_fns: by name of a dense table, what fills its rows in place when it is made.

    Returns:
        The tables as the store has them: what initial rows held there may differ.

    Raises:
        ValueError: a table of the name is there, but another one.
    """
    there = store.tables
    wanted: list[Table] = []
    for table in tables:
        found = there.get(table.name)
        if isinstance(table, DenseTable) and isinstance(found, DenseTable):
            table = replace(table, initializer=found.initializer)
        wanted.append(table)
    if isinstance(store, LocalStore):
        store.create_tables(wanted, optimizer, init_fns=init_fns)
        return wanted
    made = store.create_tables(wanted, optimizer)
    for table in wanted:
        if isinstance(table, DenseTable) and table.name in made and table.name in init_fns:
            rows = torch.empty(table.num_rows, table.dim, device=store.device)
            with torch.no_grad():
                init_fns[table.name](rows)
            write_rows(store, table, rows)
    return wanted


def draw_like_embedding_bags(tables: Sequence[DenseTable], device: torch.device) -> None:
    """Takes as many random numbers as making the tables' ``nn.EmbeddingBag`` does.

    It draws normal values for its weight, which the configuration's ``init_fn`` overwrites. Drawing them
    here too makes this module's rows, and whatever is initialised after it, those of a model with an
    ``EmbeddingBagCollection`` instead.
    """
    for table in tables:
        left = table.num_rows * table.dim
        scratch = torch.empty(min(left, 2 * _DRAWN_AT_ONCE), device=device)
        while left:
            piece = scratch[: left if left <= len(scratch) else _DRAWN_AT_ONCE].normal_()
            left -= len(piece)


def read_table(store: Store, table: DenseTable) -> torch.Tensor:
    """All rows of a dense table, float32 ``[num_rows, dim]``; of a local store a view of them.

    Args:
        store: the store.
        table: its table, or a part of it, as a table of its own: a shard.
    """
    if isinstance(store, LocalStore):
        store.drain()
        return store.weight(table.name).narrow(0, *_span(store, table))
    pieces = [store.pull(table.name, keys) for keys in _pieces(store, table)]
    return torch.cat(pieces) if pieces else torch.empty(0, table.dim)


def read_slots(store: Store, table: DenseTable) -> dict[str, torch.Tensor]:
    """A dense table's optimizer state by slot name, ``[num_rows, 1 or dim]``; of a local store views."""
    if isinstance(store, LocalStore):
        store.drain()
        span, slots_of_all = _span(store, table), store.group_of(table.name).slots_of(table.name)
        return {name: values.narrow(0, *span) for name, values in slots_of_all.items()}
    slots = store.optimizer(table.name).slots
    if not slots:
        return {}
    pieces = [store.read(table.name, keys)[1] for keys in _pieces(store, table)]
    return {
        slot.name: torch.cat([piece[slot.name] for piece in pieces])
        if pieces
        else torch.empty(0, slot.columns(table.dim))
        for slot in slots
    }


def write_rows(
    store: Store,
    table: DenseTable,
    rows: torch.Tensor | None = None,
    slots: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> None:
    """Overwrites all rows of a dense table, their optimizer state, or both.

    Args:
        store: the store.
        table: the table.
        rows: ``[num_rows, dim]``.
        slots: by slot name, ``[num_rows, 1 or dim]``.
    """
    for keys in _pieces(store, table):
        piece = slice(int(keys[0]) - table.first_key, int(keys[-1]) - table.first_key + 1)
        # Copied, as they may be views of what is written to.
        store.write(
            table.name,
            keys,
            None if rows is None else rows[piece].to(keys.device, torch.float32, copy=True),
            {name: part[piece].to(keys.device, torch.float32, copy=True) for name, part in slots.items()},
        )


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


def warn_of_replicas(store: Store, tables: Sequence[str]) -> None:
    """Warns if each rank would train its own copy of tables that are meant to be one model's."""
    if isinstance(store, MemoryStore) and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        warnings.warn(
            f"each of the {ranks} ranks trains its own rows of tables {list(tables)}, which drift apart: "
            "shard the collection (DistributedModelParallel needs a RecStoreEmbeddingBagCollectionSharder), "
            "or give all ranks one SharedMemoryStore or RemoteStore",
            stacklevel=3,
        )


def _span(store: LocalStore, table: DenseTable) -> tuple[int, int]:
    """Where a table's rows are among those that the store has of it: the first, and how many."""
    there = store.group_of(table.name).tables[table.name]
    assert isinstance(there, DenseTable)
    return table.first_key - there.first_key, table.num_rows


def _pieces(store: Store, table: DenseTable) -> list[torch.Tensor]:
    first, stop = table.first_key, table.first_key + table.num_rows
    return [
        torch.arange(start, min(start + ROWS_PER_CALL, stop), device=store.device)
        for start in range(first, stop, ROWS_PER_CALL)
    ]
