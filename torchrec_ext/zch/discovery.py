"""Finds the managed-collision (ZCH) tables of a model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.mc_embedding_modules import (
    BaseShardedManagedCollisionEmbeddingCollection,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_ext.zch import internals
from torchrec_ext.zch.routing import ShardRouting

logger = logging.getLogger(__name__)

ModuleT = TypeVar("ModuleT", bound=nn.Module)

# What wrappers (DistributedDataParallel, torch.compile) call the module they put themselves around.
_DDP = "module"
_COMPILED = "_orig_mod"

# Fused optimizers that move rows which were not looked up: a lookup cannot tell which.
_MOVES_WHOLE_TABLES = {"ENSEMBLE_ROWWISE_ADAGRAD", "EMAINPLACE_ROWWISE_ADAGRAD"}


@dataclass(frozen=True, eq=False)
class ZchTable:
    """One managed-collision table of a sharded module, as this rank holds it.

    Attributes:
        fqn: the module's path in the model (wrappers left out) and the table's name, ``"mc.t0"``.
        name: the table's name in its module.
        module: the sharded module that owns it.
        features: the features that look it up.
        shard: this rank's shard.
        num_rows: rows of this rank's shard, the fallback row included.
        first_row: the global row at which the shard starts.
        num_embeddings: rows of all shards.
        dim: the embedding dimension.
        routing: which shard answers for an id.
        hashed: whether keys are ``input_hash_func(raw id)`` instead of raw ids.
        hash_size: ``input_hash_size`` of the collision module.
        pooled: whether lookups are pooled into bags.
        divided: whether pooled vectors are divided by the bag's length (MEAN pooling in its module).
        output_dtype: the dtype to which the model rounds its answers.
        probed: whether it is multi-probe ZCH, which has no fallback row: it drops ids without a row.
        unsupported: why the table cannot be followed exactly; None if it can.
    """

    fqn: str
    name: str
    module: BaseShardedManagedCollisionEmbeddingCollection
    features: tuple[str, ...]
    shard: int
    num_rows: int
    first_row: int
    num_embeddings: int
    dim: int
    routing: ShardRouting
    hashed: bool
    hash_size: int
    pooled: bool
    divided: bool
    output_dtype: torch.dtype
    probed: bool = False
    unsupported: str | None = None

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
        return "zch"

    @property
    def key_space(self) -> str:
        """What keys are: ``raw`` ids or ``hashed`` ones."""
        return "hashed" if self.hashed else "raw"

    @property
    def dtype(self) -> torch.dtype:
        """The rows' own dtype."""
        return self.weight().dtype

    @property
    def place(self) -> None:
        """Where rows are that all ranks see: every rank has its own."""
        return None

    @property
    def fallback_row(self) -> int:
        """The local row that answers ids without a row of their own: the shard's last, unless ``probed``."""
        return self.num_rows - 1

    def weight(self) -> torch.Tensor:
        """This rank's rows ``[num_rows, dim]``, a view on the live weights; a cache is flushed first."""
        tbe, index = internals.table_batched_embedding(self.module, self.name)
        internals.flush_cache(tbe)
        return internals.local_weight(tbe, index).view(self.num_rows, self.dim)

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key routes to this rank's shard."""
        return self.routing.shard_of(keys) == self.shard

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows into what a lookup of one id with weight 1 answers, in place.

        Args:
            vectors: rows of the table, float32 ``[n, dim]``.
        """
        answered_(vectors, pooled=self.pooled, output_dtype=self.output_dtype, divided=self.divided)


def answered_(vectors: torch.Tensor, *, pooled: bool, output_dtype: torch.dtype, divided: bool) -> None:
    """Turns rows, float32 ``[n, dim]``, into what a lookup of one id with weight 1 answers, in place."""
    if pooled:
        vectors.add_(0.0)  # pooling starts from +0.0, so that -0.0 becomes +0.0
    if output_dtype != torch.float32:
        vectors.copy_(vectors.to(output_dtype))
    if divided:
        vectors.div_(_LENGTH_OF_ONE)


# TorchRec divides by the bag's length and 1e-6, in every table of a collection that has one with MEAN
# pooling (torchrec.distributed.embeddingbag._create_mean_pooling_divisor).
_LENGTH_OF_ONE = torch.ones((), dtype=torch.float32, device="cpu") + 1e-6


def find_zch_tables(model: nn.Module) -> list[ZchTable]:
    """Finds every table of every sharded managed-collision module in a model.

    Args:
        model: any module, wrapped in ``DistributedModelParallel`` or not.

    Returns:
        The tables in module order, those that cannot be followed (``unsupported``) too. Every rank
        gets the same tables in the same order.
    """
    return [
        _describe(module, path, name)
        for module, path in find_modules(model, (BaseShardedManagedCollisionEmbeddingCollection,)).items()
        for name in internals.collision_modules(module)
    ]


def has_unsharded_zch(model: nn.Module) -> bool:
    """Whether the model holds a managed-collision module that was not sharded (yet)."""
    return any(isinstance(m, BaseManagedCollisionEmbeddingCollection) for m in model.modules())


def find_modules(model: nn.Module, kinds: tuple[type[ModuleT], ...]) -> dict[ModuleT, str]:
    """The modules of some kinds in a model, and the path to each, with wrappers left out."""
    paths: dict[ModuleT, str] = {}
    for path, module in _modules(model, kinds, ""):
        paths.setdefault(module, path)  # of several paths to a module, the first counts
    return paths


def _modules(module: nn.Module, kinds: tuple[type[ModuleT], ...], path: str) -> Iterator[tuple[str, ModuleT]]:
    if isinstance(module, kinds):
        yield path, module
        return
    hidden = {_COMPILED}
    if isinstance(module, DistributedModelParallel):
        hidden.add(internals.wrapped_name(module))
    elif isinstance(module, DistributedDataParallel):
        hidden.add(_DDP)
    for name, child in module.named_children():
        child_path = path if name in hidden else f"{path}.{name}" if path else name
        yield from _modules(child, kinds, child_path)


def _describe(module: BaseShardedManagedCollisionEmbeddingCollection, path: str, name: str) -> ZchTable:
    mcm = internals.collision_modules(module)[name]
    tbe, index = internals.table_batched_embedding(module, name)
    shard, num_shards, _ = internals.shard_env(module)
    hash_sizes = internals.routing_hash_sizes(module, name)
    config = internals.table_config(module, name)
    followed = isinstance(mcm, MCHManagedCollisionModule)
    first_row = internals.first_row(mcm) if followed else 0
    routing = ShardRouting.for_hash_size(next(iter(hash_sizes.values())), num_shards)
    if isinstance(mcm, HashZchManagedCollisionModule):
        first_row = internals.first_slot(mcm)
        routing = _routing_of_buckets(mcm, num_shards)
    return ZchTable(
        fqn=f"{path}.{name}" if path else name,
        name=name,
        module=module,
        features=tuple(hash_sizes),
        shard=shard,
        num_rows=internals.local_weight(tbe, index).numel() // config.embedding_dim,
        first_row=first_row,
        num_embeddings=config.num_embeddings,
        dim=config.embedding_dim,
        routing=routing,
        hashed=followed and internals.has_hash_function(mcm),
        hash_size=int(mcm.input_size()),
        pooled=internals.pools(module),
        divided=internals.divides_by_length(module),
        output_dtype=internals.output_dtype(tbe),
        probed=isinstance(mcm, HashZchManagedCollisionModule),
        unsupported=_why_unsupported(module, name, mcm, tbe),
    )


def _why_unsupported(
    module: BaseShardedManagedCollisionEmbeddingCollection, name: str, mcm: nn.Module, tbe: nn.Module
) -> str | None:
    if isinstance(mcm, HashZchManagedCollisionModule):
        if (reason := _why_not_probed(module, mcm)) is not None:
            return reason
    elif not isinstance(mcm, MCHManagedCollisionModule):
        return (
            f"its collision module is a {type(mcm).__name__}; only MCHManagedCollisionModule and "
            "HashZchManagedCollisionModule keep a map of ids to rows that can be inverted"
        )
    if (reason := why_rows_are_not_unique(module, name)) is not None:
        return reason
    if (optimizer := internals.optimizer_name(tbe)) in _MOVES_WHOLE_TABLES:
        return f"{optimizer} moves rows that were not looked up; use EXACT_ROWWISE_ADAGRAD or EXACT_ADAGRAD"
    if internals.divides_by_length(module) and internals.output_dtype(tbe) != torch.float32:
        return "MEAN pooling of rounded outputs; leave output_dtype at FP32"
    return None


def _routing_of_buckets(mcm: HashZchManagedCollisionModule, num_shards: int) -> ShardRouting:
    """As ``TrainInputMapper`` has it, for ids from 0 to below the hash size: others it refuses."""
    ids_per_bucket = -(-int(mcm.input_size()) // mcm.buckets())
    return ShardRouting(num_shards, ids_per_bucket * (mcm.buckets() // num_shards))


def _why_not_probed(
    module: BaseShardedManagedCollisionEmbeddingCollection, mcm: HashZchManagedCollisionModule
) -> str | None:
    if not mcm.disable_fallback:
        return (
            "it answers an id without a slot by the row that the id's hash names, which may be any id's; "
            "give its HashZchManagedCollisionModule disable_fallback=True"
        )
    if not internals.pools(module):
        return (
            "it drops ids without a slot, so that a sequence has no answer for them; use it in a "
            "ManagedCollisionEmbeddingBagCollection"
        )
    if not mcm.input_size():
        return "its input_hash_size is 0; give it an upper bound of the ids"
    if len(set(internals.bucket_sizes(mcm))) > 1:
        return "its buckets differ in size; make zch_size a multiple of total_num_buckets"
    return None


def why_rows_are_not_unique(module: BaseShardedManagedCollisionEmbeddingCollection, name: str) -> str | None:
    """Why an id may have no row, or several, in a table; None if each has one until it is evicted."""
    tbe, _ = internals.table_batched_embedding(module, name)
    hash_sizes = internals.routing_hash_sizes(module, name)
    if not internals.can_reset_rows(tbe):
        return (
            "a dense compute kernel cannot reset the rows of evicted ids; "
            "shard it with compute_kernel='fused'"
        )
    if internals.shard_env(module)[2]:
        return "2D parallel replicas differ until DMPCollection.sync(); use DistributedModelParallel"
    if len(set(hash_sizes.values())) > 1:
        return (
            f"TorchRec routes its features by different hash sizes ({hash_sizes}), so one id can live "
            "on two shards; give tables that share a feature the same input_hash_size"
        )
    return None
