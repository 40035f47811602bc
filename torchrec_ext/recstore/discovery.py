"""Finds the RecStore tables of a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.store import FileStore, LocalStore, SharedMemoryStore, Store
from torchrec_ext.zch import ShardRouting
from torchrec_ext.zch.discovery import find_modules


@dataclass(frozen=True, eq=False)
class RecStoreTable:
    """One table of a RecStore module, as this rank holds it.

    Attributes:
        fqn: the module's path in the model (wrappers left out) and the table's name, ``"ebc.t0"``.
        name: the table's name in its store.
        store: where this rank's rows are; None: nowhere yet.
        features: the features that look it up.
        shard: this rank's shard.
        num_rows: rows of this rank's shard, the default row included.
        first_row: the row at which the shard of a dense table starts: a key is a global row.
        num_embeddings: rows of all shards.
        dim: the embedding dimension.
        dynamic: whether keys come and go; else every one from 0 to ``num_embeddings - 1`` has a row.
        routing: which shard answers for a key.
        divisor: by what a bag of one is divided.
        place: where the rows are, if all ranks see the same ones.
        unsupported: why the table cannot be followed exactly; None if it can.
    """

    fqn: str
    name: str
    store: Store | None
    features: tuple[str, ...]
    shard: int
    num_rows: int
    first_row: int
    num_embeddings: int
    dim: int
    dynamic: bool
    routing: ShardRouting
    divisor: float = 1.0
    place: str | None = None
    unsupported: str | None = None

    @property
    def kind(self) -> str:
        """What kind of table it is."""
        return "recstore"

    @property
    def key_space(self) -> str:
        """What keys are: ``raw`` ids, or global ``row`` numbers."""
        return "raw" if self.dynamic else "row"

    @property
    def hash_size(self) -> int:
        """Ids are not hashed."""
        return 0

    @property
    def dtype(self) -> torch.dtype:
        """The rows' own dtype."""
        return torch.float32

    @property
    def local_store(self) -> LocalStore:
        """The store, of a table that is supported."""
        assert isinstance(self.store, LocalStore)
        return self.store

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows into what a lookup of one id with weight 1 answers, in place.

        Args:
            vectors: rows of the table, float32 ``[n, dim]``.
        """
        vectors.add_(0.0)  # pooling starts from +0.0, so that -0.0 becomes +0.0


def find_recstore_tables(model: nn.Module) -> list[RecStoreTable]:
    """Finds every table of every RecStore module in a model.

    Args:
        model: any module, wrapped in ``DistributedModelParallel`` or not.

    Returns:
        The tables in module order, those that cannot be followed (``unsupported``) too. Every rank
        gets the same tables in the same order.
    """
    return [
        _describe(module, path, config)
        for module, path in find_modules(model, RecStoreEmbeddingBagCollection).items()
        for config in module.embedding_bag_configs()
    ]


def _describe(module: RecStoreEmbeddingBagCollection, path: str, config: EmbeddingBagConfig) -> RecStoreTable:
    store = module.store
    dynamic = config.name not in module.embedding_bags
    return RecStoreTable(
        fqn=f"{path}.{config.name}" if path else config.name,
        name=config.name,
        store=store,
        features=tuple(config.feature_names),
        shard=0,
        num_rows=config.num_embeddings + dynamic,  # the default row
        first_row=0,
        num_embeddings=config.num_embeddings,
        dim=config.embedding_dim,
        dynamic=dynamic,
        routing=ShardRouting(1, 1),
        place=_place(store),
        unsupported=_why_unsupported(store),
    )


def _why_unsupported(store: Store | None) -> str | None:
    if store is None:
        return "its collection is on the meta device and has no rows; shard it, or make it with device=None"
    if not isinstance(store, LocalStore):
        return (
            f"its rows are in a {type(store).__name__}, out of this process's reach; attach the dumper to a "
            "model with a MemoryStore, SharedMemoryStore or FileStore"
        )
    if _place(store) is None and dist.is_initialized() and dist.get_world_size() > 1:
        return (
            f"it is not sharded, and each of the {dist.get_world_size()} ranks has rows of its own; shard "
            "it with RecStoreEmbeddingBagCollectionSharder, or give it one SharedMemoryStore on all ranks"
        )
    return None


def _place(store: Store | None) -> str | None:
    """What identifies a store's files among all hosts; None if it has none."""
    if not isinstance(store, (SharedMemoryStore, FileStore)):
        return None
    # Two hosts, or two containers, may each have a directory of the same path.
    boot, found = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), store.path.stat()
    return f"{boot}:{found.st_dev}:{found.st_ino}"
