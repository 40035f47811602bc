"""From TorchRec's table configurations to the tables of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, TypeAlias

import torch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType

from torchrec_ext.store import ByFunction, DenseTable, DynamicTable, Table, Uniform

ConfigLike: TypeAlias = EmbeddingBagConfig | Mapping[str, Any]


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
        else DenseTable(config.name, config.embedding_dim, config.num_embeddings, initializer=ByFunction())
        for config in configs
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
