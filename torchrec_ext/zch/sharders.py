"""Sharders with which TorchRec's planner can place ZCH modules, on CPU too.

TorchRec's own sharders of managed-collision modules leave its planner nothing to choose on CPU,
although the sharded modules train there. The two classes here offer what works and leave out what
does not; everything else is TorchRec's. Checked against TorchRec 1.8 and 1.9.
"""

from __future__ import annotations

from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embedding_modules import BaseManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingType
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import MCHManagedCollisionModule

__all__ = ["ZchEmbeddingBagCollectionSharder", "ZchEmbeddingCollectionSharder"]

ModuleT = TypeVar("ModuleT", bound=BaseManagedCollisionEmbeddingCollection)

# An eviction breaks these. The key-value kernel has no `reset_embedding_weight_momentum`. With the
# caching kernel a reset row gets its fresh value in host memory, where the cached row hides it and
# later overwrites it.
_KERNELS_WITHOUT_EVICTION = frozenset(
    {EmbeddingComputeKernel.KEY_VALUE.value, EmbeddingComputeKernel.FUSED_UVM_CACHING.value}
)


class _ZchSharder(BaseManagedCollisionEmbeddingCollectionSharder[ModuleT]):
    """What both sharders add: placements that survive evictions, and a check of the buckets."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types the planner may choose from.

        Args:
            compute_device_type: ``"cpu"`` or ``"cuda"``, the ``compute_device`` of the planner's
                ``Topology``.

        Returns:
            Row-wise alone on CPU, elsewhere what TorchRec offers.
        """
        if compute_device_type == "cpu":
            return [ShardingType.ROW_WISE.value]
        return super().sharding_types(compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernels the planner may choose from.

        Args:
            sharding_type: one of ``sharding_types``.
            compute_device_type: as in ``sharding_types``.

        Returns:
            The fused kernel alone on CPU, elsewhere what TorchRec offers less what evictions break.
        """
        if compute_device_type == "cpu":
            return [EmbeddingComputeKernel.FUSED.value]
        offered = super().compute_kernels(sharding_type, compute_device_type)
        return [kernel for kernel in offered if kernel not in _KERNELS_WITHOUT_EVICTION]

    def shardable_parameters(
        self, module: BaseManagedCollisionEmbeddingCollection
    ) -> dict[str, nn.Parameter]:
        """Returns the module's tables, by name.

        Args:
            module: the unsharded module.

        Raises:
            ValueError: if a table's ``buckets`` is not a multiple of the world size. Without a
                process group there is no world size, and the check is left to the planner.
        """
        # The planner refuses such buckets too, right after it has asked for the parameters, but
        # its error advises to enable a switch that the open-source TorchRec does not have.
        if dist.is_available() and dist.is_initialized():
            _check_buckets(module, dist.get_world_size())
        return super().shardable_parameters(module)


class ZchEmbeddingBagCollectionSharder(
    _ZchSharder[ManagedCollisionEmbeddingBagCollection],
    ManagedCollisionEmbeddingBagCollectionSharder,
):
    """TorchRec's sharder of ``ManagedCollisionEmbeddingBagCollection``, for CPU as well.

    It takes the arguments of its base class. With it ``DistributedModelParallel`` plans by itself
    on CPU, where a table is placed row-wise with the fused kernel.

    Example::

        >>> sharder = ZchEmbeddingBagCollectionSharder()
        >>> sharder.sharding_types("cpu"), sharder.compute_kernels("row_wise", "cpu")
        (['row_wise'], ['fused'])
    """


class ZchEmbeddingCollectionSharder(
    _ZchSharder[ManagedCollisionEmbeddingCollection], ManagedCollisionEmbeddingCollectionSharder
):
    """TorchRec's sharder of ``ManagedCollisionEmbeddingCollection``, for CPU as well.

    It takes the arguments of its base class. With it ``DistributedModelParallel`` plans by itself
    on CPU, where a table is placed row-wise with the fused kernel.

    Example::

        >>> sharder = ZchEmbeddingCollectionSharder()
        >>> sharder.sharding_types("cpu"), sharder.compute_kernels("row_wise", "cpu")
        (['row_wise'], ['fused'])
    """


def _check_buckets(module: nn.Module, world_size: int) -> None:
    for name, collision_module in module.named_modules():
        if not isinstance(collision_module, MCHManagedCollisionModule):
            continue
        if collision_module.buckets() % world_size:
            table = name.rpartition(".")[2]
            raise ValueError(
                f"table {table!r}: {collision_module.buckets()} buckets do not spread evenly over "
                f"{world_size} ranks; give its MCHManagedCollisionModule buckets={world_size} "
                "or another multiple of the world size"
            )
