"""TorchRec's row-wise sharding, with the rows of each rank in a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_sharding import (
    BaseSparseFeaturesDist,
    EmbeddingShardingInfo,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.sharding.dp_sharding import DpSparseFeaturesDist
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding, RwSparseFeaturesDist
from torchrec.distributed.types import Awaitable, QuantizedCommCodecs, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.recstore.prefetch import readers
from torchrec_ext.recstore.reads import BatchRead
from torchrec_ext.recstore.sharding.lookup import RecStoreLookup
from torchrec_ext.recstore.sharding.tables import InitFns, ShardedTables
from torchrec_ext.recstore.trace import Trace
from torchrec_ext.store import DynamicTable


class RecStoreSharding(RwPooledEmbeddingSharding):
    """Ids travel to the ranks that have their rows, pooled rows travel back, as TorchRec does it.

    Ids keep their values on the way. Those of dynamic tables, which have no range, are dealt out by
    their remainder.

    Args:
        infos: the tables.
        env: the ranks.
        device: where batches are.
        codecs: for what is pooled, on the way back.
        tables: what the ranks' stores have.
        trace: see ``RecStoreLookup``.
        init_fns: see ``RecStoreLookup``.
    """

    def __init__(
        self,
        infos: Sequence[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None,
        codecs: dict[str, QuantizedCommCodecs] | None,
        tables: ShardedTables,
        trace: Trace,
        init_fns: InitFns,
    ) -> None:
        super().__init__(list(infos), env, device, qcomm_codecs_registry=codecs)
        self._process_group, self._tables = env.process_group, tables
        self.lookup = RecStoreLookup(self.embedding_tables(), tables, trace, init_fns)

    def create_lookup(
        self, device: torch.device | None = None, fused_params: Any = None, feature_processor: Any = None
    ) -> RecStoreLookup:
        """See ``EmbeddingSharding``."""
        return self.lookup

    def create_input_dist(self, device: torch.device | None = None) -> nn.Module:
        """See ``EmbeddingSharding``."""
        world_size = self._process_group.size()
        if world_size == 1:
            return DpSparseFeaturesDist()
        hash_sizes = [
            # Blocks of one id, so that FBGEMM takes the remainder.
            world_size if isinstance(self._tables.tables[table.name], DynamicTable) else table.num_embeddings
            for table in self.embedding_tables()
            for _ in table.feature_names
        ]
        to_ranks = RwSparseFeaturesDist(
            pg=self._process_group,
            num_features=len(hash_sizes),
            feature_hash_sizes=hash_sizes,
            device=device,
            keep_original_indices=True,
        )
        return _OwnSplits(to_ranks) if self.lookup.reads_ahead else to_ranks


class _OwnSplits(BaseSparseFeaturesDist[KeyedJaggedTensor]):
    """An input distribution that TorchRec's pipelines do not merge with those of other modules.

    The merged one would not tell when ids have arrived.
    """

    def __init__(self, to_ranks: RwSparseFeaturesDist) -> None:
        super().__init__()
        self.to_ranks = to_ranks

    def forward(self, sparse_features: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
        return self.to_ranks(sparse_features)


class ReadAhead(Awaitable[Awaitable[KeyedJaggedTensor]]):
    """An input distribution after which the rows are read at once, in the background.

    Args:
        sent: the distribution of a batch.
        ctx: the batch's context.
        lookup: reads.
    """

    def __init__(
        self, sent: Awaitable[Awaitable[KeyedJaggedTensor]], ctx: Any, lookup: RecStoreLookup
    ) -> None:
        super().__init__()
        self._sent, self._ctx, self._lookup = sent, ctx, lookup

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        arriving = KJTListSplitsAwaitable([self._sent], self._ctx).wait()
        return _Arriving(arriving, self._lookup)


class _Arriving(Awaitable[KeyedJaggedTensor]):
    def __init__(self, arriving: Awaitable[KJTList], lookup: RecStoreLookup) -> None:
        super().__init__()
        self._lookup = lookup
        self._read = readers().submit(_read_when_arrived, arriving, lookup)

    def _wait_impl(self) -> KeyedJaggedTensor:
        features, read = self._read.result()
        self._lookup.expect(features, lambda: read)
        return features


def _read_when_arrived(
    arriving: Awaitable[KJTList], lookup: RecStoreLookup
) -> tuple[KeyedJaggedTensor, BatchRead]:
    features = arriving.wait()[0]
    return features, lookup.read_ahead(features)
