"""Embeddings whose rows and optimizer state live in a store: modules, prefetch, and their optimizers."""

from __future__ import annotations

from torchrec_ext.recstore.dist_embedding import DistEmbedding
from torchrec_ext.recstore.dist_tensor import DistTensor
from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.recstore.optimizers import SparseAdagrad, SparseAdam, SparseRowWiseAdagrad, SparseSGD
from torchrec_ext.recstore.prefetch import PrefetchHandle, prefetched
from torchrec_ext.recstore.sharding.collection import ShardedRecStoreEmbeddingBagCollection
from torchrec_ext.recstore.sharding.sharder import RecStoreEmbeddingBagCollectionSharder
from torchrec_ext.recstore.trace import TracedModule

__all__ = [
    "DistEmbedding",
    "DistTensor",
    "PrefetchHandle",
    "RecStoreEmbeddingBagCollection",
    "RecStoreEmbeddingBagCollectionSharder",
    "ShardedRecStoreEmbeddingBagCollection",
    "SparseAdagrad",
    "SparseAdam",
    "SparseRowWiseAdagrad",
    "SparseSGD",
    "TracedModule",
    "prefetched",
]
