"""``ShardedTables``: what a rank has to know of a collection's tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingEnv2D
from torchrec.modules.embedding_configs import PoolingType

from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.recstore.fused_ids import FusedIds
from torchrec_ext.recstore.row_shards import RowShards
from torchrec_ext.recstore.whole_tables import read_table
from torchrec_ext.store import SGD, DenseTable, MemoryStore, Store, StoreOptimizer, Table

InitFns = Mapping[str, Callable[[torch.Tensor], Any]]
"""By the name of a table, what fills its rows in place."""

StoreOfRank = Callable[[int], Store]
"""Makes a rank's own store."""


@dataclass(frozen=True)
class ShardedTables:
    """The tables of a collection and how they are sharded.

    Attributes:
        store: where this rank's rows are.
        shared: whether all ranks have the same store, which then holds whole tables; else this
            rank's holds its shards.
        tables: the whole tables by name.
        rows: the rows of each rank, by table.
        fused_ids: of the collection.
        is_weighted: whether the batches that arrive have weights.
        optimizer: the store's optimizer where no fused one is asked for.
    """

    store: Store
    shared: bool
    tables: Mapping[str, Table]
    rows: Mapping[str, RowShards]
    fused_ids: FusedIds
    is_weighted: bool
    optimizer: StoreOptimizer

    @classmethod
    def of(
        cls,
        module: RecStoreEmbeddingBagCollection,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None,
        store: Store | StoreOfRank | None,
    ) -> ShardedTables:
        """The tables of a collection that is to be sharded.

        Args:
            module: the collection.
            plan: how each table is sharded.
            env: the ranks.
            device: where the model is trained.
            store: see ``RecStoreEmbeddingBagCollectionSharder``.

        Raises:
            ValueError: the collection cannot be sharded so.
        """
        _check_environment(env, device)
        own = module.store
        if store is None and own is not None and not isinstance(own, MemoryStore):
            store = own  # which the other ranks see too
        if shared := isinstance(store, Store):
            of_rank = store
        else:
            of_rank = MemoryStore(device) if store is None else store(env.rank)
        if device is not None and device.type != (at := of_rank.device).type:
            raise ValueError(f"the model is sharded on {device}, but the store gives rows on {at}")
        configs = module.embedding_bag_configs()
        tables = {config.name: module.table(config.name) for config in configs}
        rows = {name: RowShards.of(name, plan[name], env.rank, env.process_group) for name in tables}
        return cls(
            store=of_rank,
            shared=shared,
            tables=tables,
            rows=rows,
            fused_ids=module.fused_ids,
            # An average is a weight: of the bag's ids, a rank sees only its own.
            is_weighted=module.is_weighted() or any(config.pooling == PoolingType.MEAN for config in configs),
            optimizer=SGD(module.lr) if own is None else own.optimizer(configs[0].name),
        )

    def init_fns(self, module: RecStoreEmbeddingBagCollection) -> InitFns:
        """What fills the rows of dense tables that are made: those that the collection has, if any."""
        fills: dict[str, Callable[[torch.Tensor], Any]] = {}
        for config in module.embedding_bag_configs():
            table = self.tables[config.name]
            if module.store is None:
                fills[config.name] = config.init_fn
            elif isinstance(table, DenseTable):
                stored = table if self.shared else self.rows[config.name].shard_of(table)
                fills[config.name] = partial(_copy_rows, module.store, stored)
        return fills

    def dense_shard(self, name: str) -> DenseTable | None:
        """This rank's shard as a table of its own; None if the table is dynamic."""
        table = self.tables[name]
        return self.rows[name].shard_of(table) if isinstance(table, DenseTable) else None

    def stored(self, name: str) -> Table:
        """The table as this rank's store has to have it.

        Raises:
            ValueError: a rank's shard of a dynamic table has no rows.
        """
        table, rows = self.tables[name], self.rows[name]
        if self.shared:
            return table
        if isinstance(table, DenseTable):
            return rows.shard_of(table)
        if not all(rows.sizes):
            raise ValueError(
                f"dynamic table {name!r}: num_embeddings={table.max_rows} leave rank {rows.sizes.index(0)} "
                f"of {len(rows.sizes)} without rows; use more"
            )
        return replace(table, max_rows=rows.count)


def _check_environment(env: ShardingEnv, device: torch.device | None) -> None:
    if isinstance(env, ShardingEnv2D):
        raise ValueError("RecStore tables cannot be replicated (2D parallel); use DistributedModelParallel")
    if env.process_group is None:
        raise ValueError("RecStore tables are sharded over a process group")
    if env.output_dtensor:
        raise ValueError("RecStore tables are saved as ShardedTensor, not DTensor (output_dtensor)")
    if device is not None and device.type == "meta":
        raise ValueError("RecStore tables cannot be sharded on the meta device")


def _copy_rows(store: Store, table: DenseTable, to: torch.Tensor) -> None:
    to.copy_(read_table(store, table))
