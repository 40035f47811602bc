"""Every private TorchRec attribute this package reads, each behind a function.

Checked against TorchRec 1.8 and 1.9. A missing attribute raises ``TorchRecVersionError``, which names
it: nearly always when tables are looked for, at the latest in the first step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import Shard, ShardedTensor, ShardedTensorMetadata
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import (
    ManagedCollisionModule,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.errors import TorchRecVersionError

_CHECKED = "1.8 and 1.9"


def _private(owner: object, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _unknown(owner, repr(name)) from error


def _unknown(owner: object, what: str) -> TorchRecVersionError:
    return TorchRecVersionError(
        f"{type(owner).__name__} of torchrec {torchrec.__version__} has no {what}; "
        f"torchrec_ext was checked against torchrec {_CHECKED}"
    )


def require(owner: type, name: str) -> None:
    """Checks that a class has a private method that a subclass of ours replaces."""
    _private(owner, name)


OPTIMIZED_ELSEWHERE = "_in_backward_optimizers"
"""The attribute by which torch and TorchRec tell parameters that other optimizers leave alone."""


def sharded_tensor(
    local: list[Shard], metadata: ShardedTensorMetadata, process_group: dist.ProcessGroup
) -> ShardedTensor:
    """A tensor over all ranks, made as TorchRec does; torch's public ways talk to the other ranks."""
    make = _private(ShardedTensor, "_init_from_local_shards_and_global_metadata")
    return make(local, metadata, process_group=process_group)


def wrapped_name(model: DistributedModelParallel) -> str:
    """The attribute under which ``DistributedModelParallel`` keeps the model it wraps."""
    name = "_dmp_wrapped_module"
    _private(model, name)
    return name


def collision_modules(
    module: BaseShardedManagedCollisionEmbeddingCollection,
) -> dict[str, ManagedCollisionModule]:
    """This rank's managed-collision module of each table."""
    collection = _private(module, "_managed_collision_collection")
    return dict(_private(collection, "_managed_collision_modules").items())


def tables_per_lookup(module: BaseShardedManagedCollisionEmbeddingCollection) -> list[list[str]]:
    """The table names of each lookup, in the order in which their ids stand in its input."""
    return _private(_private(module, "_managed_collision_collection"), "_sharding_tables")


def features_per_table(
    module: BaseShardedManagedCollisionEmbeddingCollection,
) -> list[list[int]]:
    """How many features each table of each lookup has, parallel to ``tables_per_lookup``."""
    collection = _private(module, "_managed_collision_collection")
    return _private(collection, "_sharding_per_table_feature_splits")


def table_config(module: BaseShardedManagedCollisionEmbeddingCollection, table: str) -> BaseEmbeddingConfig:
    """The table's configuration, of all shards."""
    collection = _private(module, "_managed_collision_collection")
    return _private(collection, "_table_name_to_config")[table]


def routing_hash_sizes(module: BaseShardedManagedCollisionEmbeddingCollection, table: str) -> dict[str, int]:
    """The hash size by which each feature of a table is routed to a shard.

    TorchRec routes a feature by one table's ``input_hash_size``: for a feature that two tables share,
    by that of the table named last.
    """
    collection = _private(module, "_managed_collision_collection")
    table_of_feature = _private(collection, "_feature_to_table")
    modules = collision_modules(module)
    return {
        feature: int(modules[table_of_feature[feature]].input_size())
        for feature in _private(collection, "_table_to_features")[table]
    }


def shard_env(module: nn.Module) -> tuple[int, int, bool]:
    """This rank's shard, the number of shards, and whether the table is replicated (2D parallel)."""
    env = _private(module, "_env")
    return int(env.rank), int(env.world_size), hasattr(env, "sharding_pg")


def table_batched_embedding(
    module: BaseShardedManagedCollisionEmbeddingCollection, table: str
) -> tuple[nn.Module, int]:
    """FBGEMM's table-batched embedding (TBE) that holds a table, and the table's place in it."""
    tbe, index = _private(module, "_table_to_tbe_and_index")[table]
    return tbe, int(index)


def local_weight(tbe: nn.Module, index: int) -> torch.Tensor:
    """This rank's rows of a table, a view ``[rows, dim]`` on the TBE's own storage."""
    return _private(tbe, "split_embedding_weights")()[index]


def optimizer_states(tbe: nn.Module) -> list[list[torch.Tensor]]:
    """The optimizer state tensors of each table of a TBE, views with one entry or row per table row."""
    states = _private(tbe, "split_optimizer_states")()
    return states or [[] for _ in _private(tbe, "split_embedding_weights")()]  # SGD has none


RESET_ROWS = "reset_embedding_weight_momentum"
"""The method of a TBE that TorchRec calls at each eviction, with ``pruned_indices`` (local rows),
``pruned_indices_offsets`` (where each table's begin), ``logical_table_ids`` and ``buffer_ids``."""


def can_reset_rows(tbe: nn.Module) -> bool:
    """Whether the TBE can reset evicted rows: fused kernels can, dense ones cannot."""
    return hasattr(tbe, RESET_ROWS)


def optimizer_name(tbe: nn.Module) -> str:
    """The fused optimizer's name, such as ``EXACT_ADAGRAD``."""
    return str(getattr(_private(tbe, "optimizer"), "name", tbe.optimizer))


def flush_cache(tbe: nn.Module) -> None:
    """Writes rows that sit in a UVM cache back to the weights; does nothing where there is no cache."""
    if hasattr(tbe, "flush"):
        tbe.flush()  # type: ignore[operator]


def drop_cache(tbe: nn.Module) -> None:
    """Forgets rows that sit in a UVM cache, after the weights were written by other means than training."""
    if hasattr(tbe, "reset_cache_states"):
        tbe.reset_cache_states()  # type: ignore[operator]


PlainModule: TypeAlias = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection
"""The sharded modules whose tables have no managed collision."""


def embedding_kernels(module: PlainModule) -> list[BaseEmbedding]:
    """The modules that look tables up on this rank, each by one TBE."""
    kernels = []
    for lookup in _private(module, "_lookups"):
        if isinstance(lookup, DistributedDataParallel):
            lookup = lookup.module
        kernels += list(_private(lookup, "_emb_modules"))
    return kernels


def kernel_weights(kernel: BaseEmbedding) -> list[torch.Tensor]:
    """The live weights of a kernel's shards, views ``[rows, columns]`` on the TBE's own storage."""
    return _private(kernel, "split_embedding_weights")()


def flush_kernel(kernel: BaseEmbedding) -> None:
    """Writes rows that sit in a UVM cache back to the weights."""
    _private(kernel, "flush")()


def shards_per_rank(module: PlainModule) -> list[list[ShardedEmbeddingTable]]:
    """The shards of every rank, those of one table too."""
    if isinstance(module, ShardedEmbeddingCollection):
        shardings = list(_private(module, "_sharding_type_to_sharding").values())
    else:
        shardings = list(_private(module, "_embedding_shardings"))
    _, world_size, _ = shard_env(module)
    ranks: list[list[ShardedEmbeddingTable]] = [[] for _ in range(world_size)]
    for sharding in shardings:
        groups_per_rank = _private(sharding, "_grouped_embedding_configs_per_rank")
        for shards, groups in zip(ranks, groups_per_rank, strict=True):
            shards += [table for group in groups for table in group.embedding_tables]
    return ranks


def device_of(module: PlainModule) -> torch.device:
    """The device on which tables are looked up."""
    return torch.device(_private(module, "_device"))


def table_configs(module: PlainModule) -> list[BaseEmbeddingConfig]:
    """The configuration of each table of a module, of all shards."""
    return list(_private(module, "_table_name_to_config").values())


def wrapped_collection(module: nn.Module) -> tuple[str, PlainModule]:
    """The attribute in which a sharded module keeps the collection that it wraps, and that."""
    for name in ("_embedding_bag_collection", "_embedding_collection"):
        if hasattr(module, name):
            return name, getattr(module, name)
    raise _unknown(module, "collection inside")


def pools(module: BaseShardedManagedCollisionEmbeddingCollection) -> bool:
    """Whether lookups are pooled into bags."""
    return bool(_private(module, "bagged"))


def inner_collection(module: BaseShardedManagedCollisionEmbeddingCollection) -> nn.Module:
    """The sharded collection that holds the tables."""
    return _private(module, "_embedding_module")


def divides_by_length(module: BaseShardedManagedCollisionEmbeddingCollection) -> bool:
    """Whether the pooled output is divided by bag lengths, as it is if any table pools by MEAN."""
    return pools(module) and collection_divides_by_length(inner_collection(module))


def collection_divides_by_length(module: ShardedEmbeddingBagCollection) -> bool:
    """The same of a collection that has no managed collision: any table whose rows are sharded counts."""
    return bool(_private(module, "_has_mean_pooling_callback"))


def output_dtype(tbe: nn.Module) -> torch.dtype:
    """The dtype to which the TBE rounds what it answers (``output_dtype`` of ``fused_params``)."""
    return SparseType.from_int(_private(tbe, "output_dtype")).as_dtype()


def slots(mcm: MCHManagedCollisionModule) -> tuple[torch.Tensor, torch.Tensor]:
    """The collision map of a shard of ``n`` rows.

    Returns:
        The sorted raw ids, int64 ``[n]`` (empty slots hold int64 max), and each slot's global row,
        int64 ``[n]``.
    """
    # Straight from the buffers: this is read in every step.
    buffers = mcm._buffers
    try:
        return buffers["_mch_sorted_raw_ids"], buffers["_mch_remapped_ids_mapping"]
    except KeyError as error:
        raise _unknown(mcm, str(error)) from error


def first_row(mcm: MCHManagedCollisionModule) -> int:
    """The global row at which this rank's shard starts."""
    return int(_private(mcm, "_output_global_offset"))


def eviction_policy(mcm: MCHManagedCollisionModule) -> MCHEvictionPolicy:
    """The policy that decides which ids keep their rows."""
    return _private(mcm, "_eviction_policy")


def eviction_metadata(mcm: MCHManagedCollisionModule) -> dict[str, torch.Tensor]:
    """What the eviction policy knows of each slot, by its own names, int64 ``[n]`` each."""
    return dict(_private(mcm, "_mch_metadata"))


def shard_bounds(mcm: MCHManagedCollisionModule) -> torch.Tensor:
    """The global rows at which the shards start, then the number of rows, then -1s; int64 ``[1025]``."""
    return _private(mcm, "_output_segments_tensor")


def iteration(mcm: MCHManagedCollisionModule) -> torch.Tensor:
    """The number of training batches seen, int64 ``[1]``, the same on all ranks."""
    return _private(mcm, "_current_iter_tensor")


def has_hash_function(mcm: MCHManagedCollisionModule) -> bool:
    """Whether ids are hashed (``input_hash_func``) before they reach the collision map."""
    return _private(mcm, "_input_hash_func") is not None


def drops_ids(mcm: ManagedCollisionModule) -> bool:
    """Whether ids without a slot are left out of bags (``disable_fallback`` of multi-probe ZCH)."""
    return isinstance(mcm, HashZchManagedCollisionModule) and mcm.disable_fallback


def identities(mcm: HashZchManagedCollisionModule) -> nn.Parameter:
    """The id in each slot of a shard of ``n`` rows, int64 ``[n, 1]``, -1 in empty ones; slots are rows."""
    return _private(mcm, "_hash_zch_identities")


def first_slot(mcm: HashZchManagedCollisionModule) -> int:
    """The global row at which this rank's slots start."""
    return int(_private(mcm, "_output_segments")[_private(mcm, "_start_bucket")])


def bucket_sizes(mcm: HashZchManagedCollisionModule) -> list[int]:
    """The slots of each bucket, of all ranks."""
    segments = _private(mcm, "_output_segments")
    return [stop - start for start, stop in itertools.pairwise(segments)]


def probe(mcm: HashZchManagedCollisionModule, ids: torch.Tensor) -> torch.Tensor:
    """The slot in which a lookup finds each id, int64 ``[n]``, -1 where it finds none.

    Asks FBGEMM's kernel, as the module does in eval mode. Changes nothing.

    Args:
        mcm: this rank's module.
        ids: int64 ``[n]`` on the module's device, of this rank's buckets: the kernel does not check.
    """
    offset = _private(mcm, "_output_global_offset_tensor")
    ids, sizes, offsets = mcm.input_mapper(ids, None if offset is None else offset.to(ids.device))
    slots, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=identities(mcm),
        max_probe=mcm.max_probe,
        circular_probe=True,
        readonly=True,
        local_sizes=sizes,
        offsets=offsets,
        disable_fallback=True,
        eviction_policy=mcm.eviction_flag,
        opt_in_prob=_private(mcm, "_opt_in_prob"),
        num_reserved_slots=mcm.get_reserved_slots_per_bucket(),
    )
    return slots


def remapped_features(ctx: object) -> Sequence[KeyedJaggedTensor]:
    """The local rows each lookup of a finished ``compute(ctx, ...)`` read, int64."""
    return _private(ctx, "remapped_kjt")


def evicted_rows(ctx: object) -> dict[str, torch.Tensor | None]:
    """The local rows, per table, that a finished ``compute(ctx, ...)`` reset for other ids."""
    return _private(ctx, "evictions_per_table")
