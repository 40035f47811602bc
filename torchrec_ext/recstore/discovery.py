"""Finds the RecStore tables of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from torchrec_ext.recstore.dist_embedding import DistEmbedding
from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.recstore.sharding.collection import ShardedRecStoreEmbeddingBagCollection
from torchrec_ext.store import (
    DenseTable,
    DynamicTable,
    FileStore,
    LocalStore,
    SharedMemoryStore,
    Store,
    Table,
)
from torchrec_ext.zch import ShardRouting
from torchrec_ext.zch.discovery import find_modules


@dataclass(frozen=True, eq=False)
class RecStoreTable:
    """One table of a RecStore module, as this rank holds it.

    Attributes:
        fqn: the module's path in the model (wrappers left out) and the table's name, ``"ebc.t0"``.
        store: where this rank's rows are; None: nowhere yet.
        table: what the store holds.
        features: the features that look it up.
        num_embeddings: rows of all shards.
        shard: this rank's shard.
        routing: which shard answers for a key.
        pooled: whether lookups are pooled into bags.
        place: where the rows are, if all ranks see the same ones: one shard, which is everybody's.
        unsupported: why the table cannot be followed exactly; None if it can.
    """

    fqn: str
    store: Store | None
    table: Table
    features: tuple[str, ...]
    num_embeddings: int
    shard: int
    routing: ShardRouting
    pooled: bool
    place: str | None
    unsupported: str | None

    @property
    def part(self) -> str:
        """What deltas call it."""
        return self.fqn

    @property
    def columns(self) -> slice:
        """All of a vector's columns."""
        return slice(None)

    @property
    def kind(self) -> str:
        """What kind of table it is."""
        return "recstore"

    @property
    def name(self) -> str:
        """Its name in the store."""
        return self.table.name

    @property
    def dim(self) -> int:
        """The embedding dimension."""
        return self.table.dim

    @property
    def dtype(self) -> torch.dtype:
        """The rows' own dtype."""
        return torch.float32

    @property
    def num_rows(self) -> int:
        """Rows of this rank's shard, a dynamic table's default row included."""
        return self.table.num_rows

    @property
    def first_row(self) -> int:
        """The key of a dense shard's first row; a dynamic table's rows have no order."""
        return self.table.first_key if isinstance(self.table, DenseTable) else 0

    @property
    def dynamic(self) -> bool:
        """Whether keys come and go; else each from 0 to ``num_embeddings - 1`` has its row."""
        return isinstance(self.table, DynamicTable)

    @property
    def key_space(self) -> str:
        """What keys are: ``raw`` ids, or global ``row`` numbers."""
        return "raw" if self.dynamic else "row"

    @property
    def hash_size(self) -> int:
        """Ids are not hashed."""
        return 0

    @property
    def local_store(self) -> LocalStore:
        """The store of a table that is supported."""
        assert isinstance(self.store, LocalStore)
        return self.store

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key routes to this rank's shard."""
        return self.routing.shard_of(keys) == self.shard

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows into what a lookup of one id with weight 1 answers, in place.

        Args:
            vectors: rows of the table, float32 ``[n, dim]``.
        """
        if self.pooled:
            vectors.add_(0.0)  # pooling starts from +0.0, so that -0.0 becomes +0.0


def find_recstore_tables(model: nn.Module) -> list[RecStoreTable]:
    """Finds every table of every RecStore module in a model.

    Args:
        model: any module, wrapped in ``DistributedModelParallel`` or not.

    Returns:
        The tables in module order, those that cannot be followed (``unsupported``) too. Every rank
        gets the same tables in the same order.
    """
    kinds = (ShardedRecStoreEmbeddingBagCollection, RecStoreEmbeddingBagCollection, DistEmbedding)
    tables = []
    for module, path in find_modules(model, kinds).items():
        prefix = f"{path}." if path else ""
        if isinstance(module, ShardedRecStoreEmbeddingBagCollection):
            tables += _of_sharded(module, prefix)
        elif isinstance(module, RecStoreEmbeddingBagCollection):
            tables += [
                _whole(prefix, module.store, module.table(config.name), tuple(config.feature_names))
                for config in module.embedding_bag_configs()
            ]
        elif isinstance(module, DistEmbedding):
            tables.append(_whole(prefix, module.weight.store, module.weight.table, (), pooled=False))
    return tables


def _of_sharded(module: ShardedRecStoreEmbeddingBagCollection, prefix: str) -> list[RecStoreTable]:
    sharded = module.tables
    features = {config.name: tuple(config.feature_names) for config in module.embedding_bag_configs()}
    if sharded.shared:
        return [_whole(prefix, module.store, table, features[name]) for name, table in sharded.tables.items()]
    tables = []
    for name, table in sharded.tables.items():
        rows, dynamic = sharded.rows[name], isinstance(table, DynamicTable)
        num_shards, num_embeddings = len(rows.sizes), sum(rows.sizes)
        tables.append(
            RecStoreTable(
                fqn=f"{prefix}{name}",
                store=module.store,
                table=sharded.stored(name),
                features=features[name],
                num_embeddings=num_embeddings,
                shard=rows.rank,
                # Keys of a dynamic table are dealt out by their remainder: blocks of one.
                routing=ShardRouting.for_hash_size(num_shards if dynamic else num_embeddings, num_shards),
                pooled=True,
                place=None,
                unsupported=_out_of_reach(module.store),
            )
        )
    return tables


def _whole(
    prefix: str, store: Store | None, table: Table, features: tuple[str, ...], *, pooled: bool = True
) -> RecStoreTable:
    """A table whose rows are all in one store, which all ranks have open."""
    num_embeddings = table.max_rows if isinstance(table, DynamicTable) else table.num_rows
    place = _place(store)
    unsupported = _out_of_reach(store)
    if not unsupported and place is None and dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        unsupported = (
            f"each of the {ranks} ranks has its own rows in a {type(store).__name__}; shard the collection "
            "(RecStoreEmbeddingBagCollectionSharder), or give all ranks one SharedMemoryStore"
        )
    return RecStoreTable(
        fqn=f"{prefix}{table.name}",
        store=store,
        table=table,
        features=features,
        num_embeddings=num_embeddings,
        shard=0,
        routing=ShardRouting.for_hash_size(num_embeddings, 1),
        pooled=pooled,
        place=place,
        unsupported=unsupported,
    )


def _out_of_reach(store: Store | None) -> str | None:
    if store is None:
        return "it is on the meta device and has no rows; shard it, or make it with device=None"
    if not isinstance(store, LocalStore):
        return (
            f"its rows are in a {type(store).__name__}, out of this process's reach; use a MemoryStore, "
            "SharedMemoryStore or FileStore"
        )
    return None


def _place(store: Store | None) -> str | None:
    """What tells a store that other processes can open apart from all others, on all hosts."""
    if not isinstance(store, (SharedMemoryStore, FileStore)):
        return None
    # Two hosts, or two containers, may each have a directory of the same path.
    host, directory = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), store.path.stat()
    return f"{host}:{directory.st_dev}:{directory.st_ino}"
