"""From TorchRec's table configurations to the tables of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, Union

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from torchrec_ext.store import Constant, DenseTable, DynamicTable, LocalStore, Store, StoreOptimizer, Uniform
from torchrec_ext.store.tables import Table

# Rows that go to or come from a store in one call, when all of a table's do.
ROWS_PER_CALL = 1 << 16

ConfigLike = Union[EmbeddingBagConfig, Mapping[str, Any]]


def checked_configs(tables: Sequence[ConfigLike]) -> list[EmbeddingBagConfig]:
    """The configurations of a collection's tables.

    Args:
        tables: configurations, or mappings of their fields, in which ``pooling`` may be a name.

    Raises:
        ValueError: there is none, a field is unknown, a name comes twice, or a table asks for
            something that a store does not do.
    """
    configs = [table if isinstance(table, EmbeddingBagConfig) else _from_mapping(table) for table in tables]
    if not configs:
        raise ValueError("a collection needs at least one table")
    names = set()
    for config in configs:
        if config.name in names:
            raise ValueError(f"Duplicate table name {config.name}")
        names.add(config.name)
        if config.pooling not in (PoolingType.SUM, PoolingType.MEAN):
            raise ValueError(f"table {config.name!r}: pooling must be SUM or MEAN, not {config.pooling}")
        if config.data_type != DataType.FP32:
            raise ValueError(f"table {config.name!r}: a store's rows are FP32, not {config.data_type.value}")
        if not config.feature_names:
            config.feature_names = [config.name]  # as EmbeddingBagCollection does
    return configs


def store_tables(
    configs: Sequence[EmbeddingBagConfig], dynamic: Mapping[str, Mapping[str, Any]]
) -> list[Table]:
    """What a store must hold for a collection.

    Args:
        configs: the tables.
        dynamic: the dynamic ones among them, and options of ``DynamicTable``; ``name``, ``dim`` and
            ``max_rows`` are the configuration's.

    Raises:
        ValueError: ``dynamic`` names an unknown table or option, or its rows have no initializer.
    """
    names = [config.name for config in configs]
    if unknown := set(dynamic) - set(names):
        raise ValueError(f"dynamic names tables {sorted(unknown)}, the collection has {names}")
    return [
        _dynamic_table(config, dynamic[config.name])
        if config.name in dynamic
        else DenseTable(config.name, config.embedding_dim, config.num_embeddings, initializer=Constant(0.0))
        for config in configs
    ]


def create_tables(
    store: Store,
    tables: Sequence[Table],
    optimizer: StoreOptimizer,
    init_fns: Mapping[str, Callable[[torch.Tensor], Any]],
) -> list[Table]:
    """Makes tables in a store, or finds them there; rows that were there stay as they are.

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
            rows = torch.empty(table.num_rows, table.dim, device=device_of(store))
            with torch.no_grad():
                init_fns[table.name](rows)
            write_rows(store, table, rows)
    return wanted


def read_table(store: Store, table: DenseTable) -> torch.Tensor:
    """All rows of a dense table, float32 ``[num_rows, dim]``; of a local store a view of them."""
    if isinstance(store, LocalStore):
        return store.weight(table.name)
    pieces = [store.pull(table.name, keys) for keys in _pieces(store, table)]
    return torch.cat(pieces) if pieces else torch.empty(0, table.dim)


def read_slots(store: Store, table: DenseTable) -> dict[str, torch.Tensor]:
    """A dense table's optimizer state by slot name, ``[num_rows, 1 or dim]``; of a local store views."""
    if isinstance(store, LocalStore):
        return store.group_of(table.name).slots_of(table.name)
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
    slots: Mapping[str, torch.Tensor] | None = None,
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
        store.write(
            table.name,
            keys,
            None if rows is None else rows[piece].to(keys.device, torch.float32),
            {name: values[piece].to(keys.device, torch.float32) for name, values in (slots or {}).items()},
        )


def device_of(store: Store) -> torch.device:
    """Where a store takes keys and gives rows."""
    return store.device if isinstance(store, LocalStore) else torch.device("cpu")


def _pieces(store: Store, table: DenseTable) -> list[torch.Tensor]:
    first, stop = table.first_key, table.first_key + table.num_rows
    return [
        torch.arange(start, min(start + ROWS_PER_CALL, stop), device=device_of(store))
        for start in range(first, stop, ROWS_PER_CALL)
    ]


def _from_mapping(table: Mapping[str, Any]) -> EmbeddingBagConfig:
    known = {field.name for field in fields(EmbeddingBagConfig)}
    if unknown := set(table) - known:
        raise ValueError(f"EmbeddingBagConfig has no fields {sorted(unknown)}; it has {sorted(known)}")
    content = dict(table)
    if isinstance(pooling := content.get("pooling"), str):
        try:
            content["pooling"] = PoolingType[pooling.upper()]
        except KeyError:
            raise ValueError(
                f"table {content.get('name')!r}: pooling must be SUM or MEAN, not {pooling!r}"
            ) from None
    try:
        return EmbeddingBagConfig(**content)
    except TypeError as error:
        raise ValueError(f"table {content.get('name')!r} is incomplete: {error}") from error


def _dynamic_table(config: EmbeddingBagConfig, options: Mapping[str, Any]) -> DynamicTable:
    known = {field.name for field in fields(DynamicTable)} - {"name", "dim", "max_rows"}
    if unknown := set(options) - known:
        raise ValueError(
            f"dynamic table {config.name!r} has no options {sorted(unknown)}; there are {sorted(known)}"
        )
    content = dict(options)
    if "initializer" not in content:
        init_fn = config.init_fn
        if not (isinstance(init_fn, partial) and init_fn.func is torch.nn.init.uniform_):
            raise ValueError(
                f"dynamic table {config.name!r}: its init_fn cannot give the row of one key; "
                "pass an initializer in its options"
            )
        content["initializer"] = Uniform(config.get_weight_init_min(), config.get_weight_init_max())
    return DynamicTable(config.name, config.embedding_dim, config.num_embeddings, **content)
