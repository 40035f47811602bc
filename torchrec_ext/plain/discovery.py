"""Finds the tables of a model that have no managed collision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
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
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection

from torchrec_ext.plain.holders import KernelHolder, ModuleHolder, WeightHolder
from torchrec_ext.plain.layout import Band, Shard, bands_of, row_blocks
from torchrec_ext.plain.support import (
    FLOATS,
    moves_looked_up_rows_only,
    output_dtype,
    why_unsupported,
)
from torchrec_ext.zch import ShardRouting, internals
from torchrec_ext.zch.discovery import answered_, find_modules

# Modules that are looked into by themselves, or whose tables are not ours: what they hold is not found.
_CLOSED = (
    ShardedEmbeddingModule,
    ShardedEmbeddingTower,
    ShardedEmbeddingTowerCollection,
    BaseManagedCollisionEmbeddingCollection,
    ITEPEmbeddingBagCollection,
    ITEPEmbeddingCollection,
)
_UNSHARDED = (EmbeddingBagCollection, EmbeddingCollection, nn.EmbeddingBag)


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A shard that is on this rank, and where its weights are.

    Attributes:
        shard: the rectangle.
        holder: holds its weights.
        index: which of the holder's.
        rows: which rows of those are the shard's.
    """

    shard: Shard
    holder: WeightHolder
    index: int
    rows: slice


@dataclass(frozen=True, eq=False)
class PlainTable:
    """One table without managed collision, as this rank holds it.

    Attributes:
        fqn: the module's path in the model (wrappers left out) and the table's name, ``"ebc.t0"``.
        module: the module that owns it.
        features: the features that look it up.
        num_embeddings: rows of all shards.
        dim: the embedding dimension.
        dtype: the rows' own dtype.
        shard: this rank.
        num_ranks: the ranks that it is dealt out to.
        bands: how it is cut; of a replicated table: who dumps which rows.
        local: this rank's shards.
        pooled: whether lookups are pooled into bags.
        divided: whether pooled vectors are divided by the bag's length (MEAN pooling of sharded rows).
        output_dtype: the dtype to which the model rounds its answers.
        by_lookup: whether training moves no rows but those that a gradient reached.
        unsupported: why the table cannot be followed exactly; None if it can.
    """

    fqn: str
    module: nn.Module
    features: tuple[str, ...]
    num_embeddings: int
    dim: int
    dtype: torch.dtype
    shard: int
    num_ranks: int
    bands: tuple[Band, ...]
    local: tuple[LocalShard, ...]
    pooled: bool
    divided: bool
    output_dtype: torch.dtype
    by_lookup: bool
    unsupported: str | None

    @property
    def part(self) -> str:
        """What deltas call it, unless it is in parts."""
        return self.fqn

    @property
    def columns(self) -> slice:
        """All of a vector's columns."""
        return slice(None)

    @property
    def kind(self) -> str:
        """What kind of table it is."""
        return "plain"

    @property
    def num_rows(self) -> int:
        """Rows have their global numbers on every rank."""
        return self.num_embeddings

    @property
    def first_row(self) -> int:
        """Rows have their global numbers on every rank."""
        return 0

    @property
    def key_space(self) -> str:
        """Keys are global row numbers."""
        return "row"

    @property
    def hash_size(self) -> int:
        """Ids are not hashed."""
        return 0

    @property
    def routing(self) -> ShardRouting:
        """Who deletes a key that is no row of the table, as of a larger one that had its name before."""
        return ShardRouting.for_hash_size(self.num_embeddings, self.num_ranks)

    @property
    def place(self) -> None:
        """Where rows are that all ranks see: every rank has its own."""
        return None

    def is_row(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key is a row of the table, on whatever rank."""
        return (keys >= 0) & (keys < self.num_embeddings)

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether it is up to this rank to dump, or delete, each key."""
        kept = np.zeros(len(keys), np.bool_)
        for part in self.parts():
            kept |= part.keeps(keys)
        return kept

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows, or some columns of them, into what a lookup of one id with weight 1 answers, in place.

        Args:
            vectors: float32 ``[n, columns]``.
        """
        answered_(vectors, pooled=self.pooled, output_dtype=self.output_dtype, divided=self.divided)

    def parts(self) -> list[TablePart]:
        """What this rank holds of each band; one part without rows where it holds nothing."""
        held = [
            (band, tuple(local))
            for band in self.bands
            if (local := [found for found in self.local if found.shard in band.shards_of(self.shard)])
        ] or [(Band(0, 0, (Shard(0, 0, 0, self.dim, self.shard),)), ())]
        return [TablePart(self, band, local, is_first=index == 0) for index, (band, local) in enumerate(held)]


@dataclass(frozen=True, eq=False)
class TablePart:
    """What one rank holds of a band of a table: all columns, or some; itself a table to a tracker.

    Attributes:
        table: the table.
        band: the band.
        local: the shards of it that are on this rank, from left to right.
        is_first: whether keys that are no rows are deleted with it.
    """

    table: PlainTable
    band: Band
    local: tuple[LocalShard, ...]
    is_first: bool

    @property
    def fqn(self) -> str:
        """The table's."""
        return self.table.fqn

    @property
    def part(self) -> str:
        """The table's FQN; if columns are elsewhere, a name by which all ranks know the band."""
        return part_name(self.fqn, self.band) if self.is_split else self.fqn

    @property
    def columns(self) -> slice | NDArray[np.int64]:
        """Which of the table's columns are here."""
        if not self.is_split:
            return slice(None)
        shards = [found.shard for found in self.local]
        ranges = [np.arange(s.first_column, s.first_column + s.num_columns) for s in shards]
        return np.concatenate([np.empty(0, np.int64), *ranges])

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key is a row of the band, or none of the table and the rank's to delete."""
        kept = (keys >= self.first_row) & (keys < self.first_row + self.num_rows)
        if self.is_first:
            kept |= ~self.table.is_row(keys) & (self.routing.shard_of(keys) == self.shard)
        return kept

    @property
    def is_split(self) -> bool:
        """Whether other ranks hold columns of the same rows."""
        return len(self.band.ranks) > 1

    @property
    def dim(self) -> int:
        """The columns that are here."""
        return sum(found.shard.num_columns for found in self.local) if self.local else self.table.dim

    @property
    def num_rows(self) -> int:
        """The band's rows."""
        return self.band.num_rows

    @property
    def first_row(self) -> int:
        """The global row at which the band starts."""
        return self.band.first_row

    @property
    def kind(self) -> str:
        """See ``PlainTable``."""
        return self.table.kind

    @property
    def features(self) -> tuple[str, ...]:
        """See ``PlainTable``."""
        return self.table.features

    @property
    def shard(self) -> int:
        """See ``PlainTable``."""
        return self.table.shard

    @property
    def num_embeddings(self) -> int:
        """See ``PlainTable``."""
        return self.table.num_embeddings

    @property
    def dtype(self) -> torch.dtype:
        """See ``PlainTable``."""
        return self.table.dtype

    @property
    def key_space(self) -> str:
        """See ``PlainTable``."""
        return self.table.key_space

    @property
    def hash_size(self) -> int:
        """See ``PlainTable``."""
        return self.table.hash_size

    @property
    def routing(self) -> ShardRouting:
        """See ``PlainTable``."""
        return self.table.routing

    @property
    def place(self) -> None:
        """See ``PlainTable``."""
        return None

    @property
    def unsupported(self) -> str | None:
        """See ``PlainTable``."""
        return self.table.unsupported

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """See ``PlainTable``."""
        self.table.as_answered_(vectors)


def part_name(fqn: str, band: Band) -> str:
    """What all ranks that hold columns of a band call it."""
    return f"{fqn}[{band.first_row}:{band.first_row + band.num_rows}]"


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
            pooled=pooled,
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
        pooled=isinstance(module, nn.EmbeddingBag),
        divided=False,
        output_dtype=torch.float32 if config else module.weight.dtype,
        by_lookup=False,
        unsupported=_why_unsharded_unsupported(module),
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
