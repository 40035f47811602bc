"""Finds the tables of a model that have no managed collision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding_tower_sharding import (
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
)
from torchrec.distributed.embedding_types import ShardedEmbeddingModule, ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.itep_embeddingbag import (
    ShardedITEPEmbeddingBagCollection,
    ShardedITEPEmbeddingCollection,
)
from torchrec.distributed.mc_embedding_modules import BaseShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection, FusedEmbeddingCollection
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_ext.plain.holders import KernelHolder, ModuleHolder
from torchrec_ext.plain.layout import Band, Shard, bands_of, row_blocks
from torchrec_ext.plain.support import (
    FLOATS,
    adds_up,
    moves_looked_up_rows_only,
    output_dtype,
    why_unsupported,
)
from torchrec_ext.plain.tables import LocalShard, PlainTable
from torchrec_ext.zch import internals
from torchrec_ext.zch.discovery import find_modules

# Modules that are looked into by themselves, or whose tables are not ours: what they hold is not found.
_CLOSED = (
    ShardedEmbeddingModule,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
    BaseManagedCollisionEmbeddingCollection,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    SplitTableBatchedEmbeddingBagsCodegen,
    DenseTableBatchedEmbeddingBagsCodegen,
)
_MANAGED_COLLISION = (
    BaseShardedManagedCollisionEmbeddingCollection,
    BaseManagedCollisionEmbeddingCollection,
)
_UNSHARDED = (EmbeddingBagCollection, EmbeddingCollection, nn.EmbeddingBag)


def find_plain_tables(model: nn.Module, but: tuple[type[nn.Module], ...] = ()) -> list[PlainTable]:
    """Finds every table of a model that has no managed collision.

    Args:
        model: any module, wrapped in ``DistributedModelParallel`` or not.
        but: modules that are left out.

    Returns:
        The tables in module order, those that cannot be followed (``unsupported``) too. Every rank
        gets the same tables in the same order.
    """
    kinds: tuple[type[nn.Module], ...] = (*_CLOSED, *_UNSHARDED)
    tables: list[PlainTable] = []
    for module, path in find_modules(model, kinds).items():
        if not isinstance(module, but):
            tables += _tables_of(module, path)
    return tables


def _tables_of(module: nn.Module, path: str) -> Iterator[PlainTable]:
    if isinstance(module, internals.PlainModule):
        yield from _of_sharded(module, path, None)
    elif isinstance(module, ShardedFeatureProcessedEmbeddingBagCollection):
        yield from _of_sharded(*_inner(module, path), None)
    elif isinstance(module, (ShardedITEPEmbeddingBagCollection, ShardedITEPEmbeddingCollection)):
        yield from _of_sharded(
            *_inner(module, path), "in-training pruning gives ids other rows; train without"
        )
    elif isinstance(module, EmbeddingBagCollection):
        for config in module.embedding_bag_configs():
            yield _of_unsharded(f"{path}.{config.name}", module.embedding_bags[config.name], config)
    elif isinstance(module, EmbeddingCollection):
        for config in module.embedding_configs():
            yield _of_unsharded(f"{path}.{config.name}", module.embeddings[config.name], config)
    elif isinstance(module, nn.EmbeddingBag):
        yield _of_unsharded(path or "weight", module, None)
    elif not isinstance(module, _MANAGED_COLLISION):
        yield _unknown(path, module)


def _inner(module: nn.Module, path: str) -> tuple[internals.PlainModule, str]:
    name, inner = internals.wrapped_collection(module)
    return inner, f"{path}.{name}" if path else name


def _of_sharded(module: internals.PlainModule, path: str, reason: str | None) -> Iterator[PlainTable]:
    rank, num_ranks, is_2d = internals.shard_env(module)
    if is_2d:
        reason = "2D parallel replicas differ until DMPCollection.sync(); use DistributedModelParallel"
    everywhere: dict[str, list[tuple[int, ShardedEmbeddingTable]]] = defaultdict(list)
    for owner, tables in enumerate(internals.shards_per_rank(module)):
        for table in tables:
            everywhere[table.name].append((owner, table))
    here: dict[str, list[tuple[ShardedEmbeddingTable, KernelHolder, int]]] = defaultdict(list)
    for kernel in internals.embedding_kernels(module):
        holder = KernelHolder(kernel)
        for index, table in enumerate(kernel.config.embedding_tables):
            here[table.name].append((table, holder, index))
    pooled = isinstance(module, ShardedEmbeddingBagCollection)
    divided = pooled and internals.collection_divides_by_length(module)
    for config in internals.table_configs(module):
        rows, dim = config.num_embeddings, config.embedding_dim
        _, one = everywhere[config.name][0]
        fused_params = one.fused_params or {}
        bands: tuple[Band, ...] | None
        if module.module_sharding_plan[config.name].sharding_type == ShardingType.DATA_PARALLEL.value:
            bands = row_blocks(rows, dim, num_ranks)
            ((_, holder, index),) = here[config.name]
            local = [
                LocalShard(shard, holder, index, slice(shard.first_row, shard.first_row + shard.num_rows))
                for band in bands
                for shard in band.shards_of(rank)
            ]
        else:
            bands = bands_of(_shard(table, owner) for owner, table in everywhere[config.name])
            local = [
                LocalShard(_shard(table, rank), holder, index, slice(None))
                for table, holder, index in here[config.name]
            ]
        kernel, device = one.compute_kernel, internals.device_of(module)
        why = reason or why_unsupported(kernel, config.data_type, fused_params, device, divided=divided)
        if why is None and bands is None:
            why = "its column shards are cut at different rows; give all columns the same row-wise sharding"
        yield PlainTable(
            fqn=f"{path}.{config.name}" if path else config.name,
            module=module,
            features=tuple(config.feature_names),
            num_embeddings=rows,
            dim=dim,
            dtype=FLOATS.get(config.data_type, torch.float32),
            shard=rank,
            num_ranks=num_ranks,
            bands=bands or (),
            local=tuple(sorted(local, key=lambda found: found.shard)),
            pooled=adds_up(kernel, device, pooled=pooled),
            divided=divided,
            output_dtype=torch.float32 if why else output_dtype(kernel, fused_params, device),
            by_lookup=moves_looked_up_rows_only(kernel, fused_params),
            unsupported=why,
        )


def _shard(table: ShardedEmbeddingTable, rank: int) -> Shard:
    assert table.local_metadata is not None
    row, column = table.local_metadata.shard_offsets
    return Shard(row, table.local_rows, column, table.local_cols, rank)


def _of_unsharded(
    fqn: str, module: nn.Embedding | nn.EmbeddingBag, config: BaseEmbeddingConfig | None
) -> PlainTable:
    """A table in one process, trained by any optimizer."""
    rows, dim = module.weight.shape
    (band,) = bands = row_blocks(rows, dim, 1)
    return PlainTable(
        fqn=fqn.removeprefix("."),
        module=module,
        features=tuple(config.feature_names) if config else (),
        num_embeddings=rows,
        dim=dim,
        dtype=module.weight.dtype,
        shard=0,
        num_ranks=1,
        bands=bands,
        local=(LocalShard(band.shards[0], ModuleHolder(module), 0, slice(None)),),
        pooled=isinstance(module, nn.EmbeddingBag) and module.mode != "max",  # which adds nothing up
        divided=False,
        output_dtype=torch.float32 if config else module.weight.dtype,
        by_lookup=False,
        unsupported=_why_unsharded_unsupported(module),
    )


def _unknown(path: str, module: nn.Module) -> PlainTable:
    """Stands for the tables of a module that nobody here looks into."""
    kind = type(module).__name__
    return PlainTable(
        fqn=path or kind,
        module=module,
        features=(),
        num_embeddings=0,
        dim=0,
        dtype=torch.float32,
        shard=0,
        num_ranks=1,
        bands=(),
        local=(),
        pooled=False,
        divided=False,
        output_dtype=torch.float32,
        by_lookup=False,
        unsupported=f"a {kind} is not looked into; use an EmbeddingBagCollection or EmbeddingCollection",
    )


def _why_unsharded_unsupported(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    if dist.is_initialized() and (ranks := dist.get_world_size()) > 1:
        return (
            f"it is not sharded, so each of the {ranks} ranks has its own; wrap the model in "
            "DistributedModelParallel (sharding type data_parallel keeps it whole on every rank)"
        )
    if module.weight.is_meta:
        return "it is on the meta device and has no rows; shard it, or make it on another device"
    if module.weight.dtype not in FLOATS.values():
        return f"its rows are {module.weight.dtype}; use float32, float16 or bfloat16"
    if module.max_norm is not None:
        return "max_norm rescales rows when they are looked up; normalise outside of the module"
    if module.padding_idx is not None and isinstance(module, nn.EmbeddingBag):
        return "a bag leaves padding_idx out, so that its row answers nothing; leave padding_idx out"
    return None
