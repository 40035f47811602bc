"""``RecStoreEmbeddingBagCollectionSharder``: how ``DistributedModelParallel`` shards RecStore collections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import BaseEmbeddingSharder, EmbeddingComputeKernel
from torchrec.distributed.types import ParameterSharding, QuantizedCommCodecs, ShardingEnv, ShardingType

from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.recstore.sharding.collection import ShardedRecStoreEmbeddingBagCollection
from torchrec_ext.recstore.sharding.fused_params import store_optimizer
from torchrec_ext.recstore.sharding.tables import StoreOfRank
from torchrec_ext.store import Store


class RecStoreEmbeddingBagCollectionSharder(BaseEmbeddingSharder[RecStoreEmbeddingBagCollection]):
    """Shards ``RecStoreEmbeddingBagCollection`` row-wise, over TorchRec's own collectives.

    Each rank has the rows of one range of a table's keys; of a dynamic table, those of the keys whose
    remainder, divided by the number of ranks, is the rank. Rows that the collection
    has before go along, their optimizer state does not.

    The ranks' batches must be of one size where the process group is gloo: TorchRec's way back of pooled
    rows needs it there.

    Rows are trained as TorchRec's are: in the backward pass, by the optimizer of ``fused_params`` or of
    ``apply_optimizer_in_backward``. Where neither names one, backward passes fill the trace, and a
    ``Sparse*`` optimizer of the sharded collection trains the rows.

    Args:
        fused_params: the optimizer and its hyperparameters, as for TorchRec's sharders.
        qcomm_codecs_registry: TorchRec's codecs for what is sent between ranks.
        store: a function from rank to the store of that rank alone; or one store that all ranks have
            open, which holds whole tables, of which a rank touches its own keys only. By default,
            the collection's own store if others can have it open, else a ``MemoryStore`` for each rank.

    Raises:
        ValueError: a store has no such optimizer.

    Example::

        model = DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            sharders=[
                RecStoreEmbeddingBagCollectionSharder(
                    {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
                )
            ],
        )
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        *,
        store: Store | StoreOfRank | None = None,
    ) -> None:
        store_optimizer(fused_params)
        super().__init__(fused_params=fused_params, qcomm_codecs_registry=qcomm_codecs_registry)
        self._store = store

    def shard(
        self,
        module: RecStoreEmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedRecStoreEmbeddingBagCollection:
        """See ``ModuleSharder``."""
        return ShardedRecStoreEmbeddingBagCollection(
            module,
            params,
            env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            store=self._store,
        )

    def shardable_parameters(self, module: RecStoreEmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """See ``ModuleSharder``; parameters without memory, for their shapes."""
        return {
            config.name: nn.Parameter(
                torch.empty(config.num_embeddings, config.embedding_dim, device="meta"), requires_grad=False
            )
            for config in module.embedding_bag_configs()
        }

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """See ``ModuleSharder``."""
        return [ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """See ``ModuleSharder``."""
        return [EmbeddingComputeKernel.FUSED.value]

    @property
    def module_type(self) -> type[RecStoreEmbeddingBagCollection]:
        """See ``ModuleSharder``."""
        return RecStoreEmbeddingBagCollection

    @property
    def sharded_module_type(self) -> type[ShardedRecStoreEmbeddingBagCollection]:
        """See ``ModuleSharder``."""
        return ShardedRecStoreEmbeddingBagCollection
