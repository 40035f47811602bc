"""``RecStoreEmbeddingBagCollection``: TorchRec's ``EmbeddingBagCollection`` with its rows in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, get_embedding_names_by_table
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_ext.recstore.batch import GroupBatch, split_batch
from torchrec_ext.recstore.configs import ConfigLike, checked_configs, store_tables
from torchrec_ext.recstore.fused_ids import FusedIds
from torchrec_ext.recstore.fused_optimizer import OptimizedTable, StoreFusedOptimizer
from torchrec_ext.recstore.layout import Layout
from torchrec_ext.recstore.lookups import Lookup
from torchrec_ext.recstore.pooling import Pooling, pool_flat, pool_rows, wants_scale_gradient
from torchrec_ext.recstore.prefetch import PrefetchHandle, PrefetchingModule
from torchrec_ext.recstore.reads import BatchRead
from torchrec_ext.recstore.table_modules import DenseRows, DynamicRows
from torchrec_ext.recstore.trace import Trace, TracedModule
from torchrec_ext.recstore.updates import apply_entries
from torchrec_ext.recstore.whole_tables import (
    create_tables,
    draw_like_embedding_bags,
    load_optimizer_state,
    optimizer_state,
    warn_of_replicas,
    write_rows,
)
from torchrec_ext.store import (
    SGD,
    DenseTable,
    DynamicTable,
    LocalStore,
    MemoryStore,
    Store,
    StoreOptimizer,
    Table,
)


class RecStoreEmbeddingBagCollection(
    EmbeddingBagCollectionInterface, TracedModule, PrefetchingModule[BatchRead], FusedOptimizerModule
):
    """Pooled embeddings of a batch of sparse features, from rows that live in a store.

    It takes the place of TorchRec's ``EmbeddingBagCollection``: the same configurations, batches, outputs
    and ``state_dict`` keys. The rows are trained by a ``Sparse*`` optimizer, which hands the gradients that
    backward passes leave in the module to the store's optimizer.

    Tables in ``dynamic`` take any int64 id (with fusion: from 0 to ``2^fusion_k - 1``). A forward pass in
    training mode with gradients counts their ids, and admits those that were seen often enough; every
    other id is answered by the table's default row. Their ``num_embeddings`` is the most ids that can
    have a row.

    Args:
        tables: the tables' configurations, or mappings of their fields. Rows are FP32.
        is_weighted: whether batches have weights.
        device: where the rows and outputs are, by default the store's device; ``"meta"`` makes no store and
            no rows, as TorchRec wants it before sharding.
        embedding_bag_configs: another name for ``tables``.
        lr: the learning rate for optimizers that bring none.
        enable_fusion: whether repeats are found among ``raw_id + (table_index << fusion_k)`` of all tables
            together, rather than table by table. Results are the same.
        fusion_k: the number of bits of a raw id in a fused one.
        store: where the rows live, by default a new ``MemoryStore``. Tables that it has already keep
            their rows.
        optimizer: the store's optimizer until a ``Sparse*`` optimizer brings another, by default SGD.
        dynamic: options of ``DynamicTable`` for each table that is dynamic, by name.

    Raises:
        ValueError: the configurations contradict each other, or what the store has.

    Example::

        ebc = RecStoreEmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t1", embedding_dim=8, num_embeddings=10, feature_names=["f1"])]
        )
        optimizer = SparseAdagrad([ebc], lr=0.1)
        features = KeyedJaggedTensor.from_lengths_sync(
            keys=["f1"], values=torch.tensor([0, 1, 2]), lengths=torch.tensor([2, 0, 1])
        )
        pooled = ebc(features)  # KeyedTensor of [3, 8]
        pooled.values().sum().backward()
        optimizer.step()
    """

    def __init__(
        self,
        tables: Sequence[ConfigLike] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        embedding_bag_configs: Sequence[ConfigLike] | None = None,
        lr: float = 0.01,
        enable_fusion: bool = True,
        fusion_k: int = 30,
        store: Store | None = None,
        optimizer: StoreOptimizer | None = None,
        dynamic: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__()
        if (tables is None) == (embedding_bag_configs is None):
            raise ValueError("give the tables once, as tables or as embedding_bag_configs")
        self._configs = checked_configs(tables or embedding_bag_configs or ())
        self._is_weighted = is_weighted
        self.lr = lr
        wanted = store_tables(self._configs, dynamic or {})
        self._fused_ids = FusedIds(wanted, fusion_k if enable_fusion else None)
        self._device, self._store = _device_and_store(device, store)
        if self._store is not None:
            there = self._store.tables
            draw_like_embedding_bags(
                [table for table in wanted if isinstance(table, DenseTable) and table.name not in there],
                self._device,
            )
            init_fns = {config.name: config.init_fn for config in self._configs}
            wanted = create_tables(self._store, wanted, optimizer or SGD(lr), init_fns)
        self._tables = {table.name: table for table in wanted}
        self._layout = Layout.of(
            self._configs,
            dynamic=dynamic or {},
            lies_in=self._lies_in,
        )
        self.embedding_bags = nn.ModuleDict(
            {table.name: DenseRows(self._store, table) for table in wanted if isinstance(table, DenseTable)}
        )
        self.dynamic_tables = DynamicRows(
            self._store, [table for table in wanted if isinstance(table, DynamicTable)]
        )
        self._embedding_names = [name for names in self.embedding_names_by_table() for name in names]
        self._lengths_per_embedding = [
            config.embedding_dim for config in self._configs for _ in config.feature_names
        ]
        self._trace = Trace(f"{type(self).__name__} of tables {list(self._tables)}")
        self._anchor = torch.empty(0, requires_grad=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pools the rows of each bag.

        Args:
            features: a batch of ``B`` examples; ids int32 or int64. Features that no table has are ignored.

        Returns:
            ``[B, D]``, ``D`` the sum of the dimensions of all features.

        Raises:
            KeyError: a feature is missing.
            ValueError: an id is not in its table.
            RuntimeError: the prefetch handle that was set is of another batch.
        """
        features = maybe_td_to_kjt(features, None)
        store = self._require_store()
        handle = self._take_handle()
        batch = split_batch(features, self._layout, is_weighted=self._is_weighted)
        admit = self.training and torch.is_grad_enabled()
        if handle is not None:
            read = handle.use(self, features, admit=admit)
            pooled = [pool_rows(rows, part) for rows, part in zip(read.groups, batch, strict=True)]
        else:
            self._fused_ids.check(batch)
            pooled = self._read_now(store, batch, admit=admit)
        number = self._trace.next_batch()

        def record(lookup: Lookup, grad: torch.Tensor) -> None:
            self._trace.record(lookup, grad, number)

        return KeyedTensor(
            keys=self._embedding_names,
            values=self._layout.assemble([run(self._anchor, record) for run in pooled]),
            length_per_key=self._lengths_per_embedding,
        )

    def _read_now(self, store: Store, batch: Sequence[GroupBatch], *, admit: bool) -> list[Pooling]:
        local = store if isinstance(store, LocalStore) else None
        pooled: list[Pooling | None] = [
            None
            if local is None or part.group.dynamic or wants_scale_gradient(part)
            else pool_flat(local, part)
            for part in batch
        ]
        rest = [part for part, done in zip(batch, pooled, strict=True) if done is None]
        if not rest:
            return [done for done in pooled if done is not None]
        read = BatchRead(store, rest, self._fused_ids)
        read.pull(admit=admit)
        found = map(pool_rows, read.groups, rest)
        return [next(found) if done is None else done for done in pooled]

    # Prefetch

    def issue_fused_prefetch(self, features: KeyedJaggedTensor) -> PrefetchHandle[BatchRead]:
        """Starts to read a batch's rows in the background, each once.

        Args:
            features: the batch.

        Returns:
            For ``set_fused_prefetch_handle``, right before the batch's forward pass. A handle that is not
            used is released when it is dropped.

        Raises:
            KeyError: a feature is missing.
            ValueError: an id is not in its table.
        """
        features = maybe_td_to_kjt(features, None)
        store = self._require_store()
        batch = split_batch(features, self._layout, is_weighted=False)
        self._fused_ids.check(batch)
        return PrefetchHandle(self, features, BatchRead(store, batch, self._fused_ids))

    # What an EmbeddingBagCollection has

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches have weights."""
        return self._is_weighted

    def embedding_names_by_table(self) -> list[list[str]]:
        """The output's keys, table by table; ``feature@table`` for a feature that several tables have."""
        names: list[list[str]] = get_embedding_names_by_table(self._configs)
        return names

    @property
    def device(self) -> torch.device:
        """Where the rows and outputs are."""
        return self._device

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the rows of dense tables anew, in the order of the tables."""
        if self._store is None:
            return
        for config in self._configs:
            table = self._tables[config.name]
            if isinstance(table, DenseTable):
                rows = torch.empty(table.num_rows, table.dim, device=self._device)
                config.init_fn(rows)
                write_rows(self._store, table, rows)

    # What its optimizers need

    @property
    def store(self) -> Store | None:
        """Where the rows live; None on the meta device."""
        return self._store

    @property
    def fused_optimizer(self) -> StoreFusedOptimizer:
        """The optimizer state of dense tables, for TorchRec's way of saving it."""
        tables = {
            f"embedding_bags.{table.name}.weight": OptimizedTable(table.name, table)
            for table in self._dense_tables()
        }
        return StoreFusedOptimizer(self._require_store(), tables)

    @property
    def fused_ids(self) -> FusedIds:
        """How ids are fused and checked."""
        return self._fused_ids

    def table(self, name: str) -> Table:
        """A table as the store has it."""
        return self._tables[name]

    def use_optimizer(self, optimizer: StoreOptimizer) -> None:
        """See ``TracedModule``."""
        store = self._require_store()
        warn_of_replicas(store, list(self._tables))
        store.set_optimizer(list(self._tables), optimizer)

    def apply_trace(self, *, lr: float, step: int) -> None:
        """See ``TracedModule``."""
        with self._trace.applied() as entries:
            apply_entries(self._require_store(), entries, lr=lr, step=step)

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """See ``TracedModule``."""
        return optimizer_state(self._require_store(), self._dense_tables())

    def load_optimizer_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """See ``TracedModule``."""
        load_optimizer_state(self._require_store(), self._dense_tables(), state)

    def _dense_tables(self) -> list[DenseTable]:
        return [table for table in self._tables.values() if isinstance(table, DenseTable)]

    def _lies_in(self, table: str) -> str | None:
        return self._store.group_of(table).name if isinstance(self._store, LocalStore) else None

    def _require_store(self) -> Store:
        if self._store is None:
            raise RuntimeError(
                f"{type(self).__name__} was made on the meta device and has no rows; "
                "shard it, or make it with device=None"
            )
        return self._store


def _device_and_store(
    device: torch.device | str | None, store: Store | None
) -> tuple[torch.device, Store | None]:
    if device is not None and torch.device(device).type == "meta":
        if store is not None:
            raise ValueError("a collection on the meta device has no store")
        return torch.device("meta"), None
    if store is None:
        store = MemoryStore(device)
    at = store.device
    if device is not None and torch.device(device).type != at.type:
        raise ValueError(f"device is {torch.device(device)}, but the store gives rows on {at}")
    return at, store
