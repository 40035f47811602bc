"""``RecStoreLookup``: the rows of one rank, behind TorchRec's row-wise input distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torchrec.distributed.embedding_types import BaseEmbeddingLookup, ShardedEmbeddingTable
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.recstore.batch import split_batch
from torchrec_ext.recstore.fused_optimizer import OptimizedTable, StoreFusedOptimizer
from torchrec_ext.recstore.layout import Layout
from torchrec_ext.recstore.lookups import Lookup
from torchrec_ext.recstore.pooling import Record, pool_flat, pool_rows
from torchrec_ext.recstore.prefetch import readers
from torchrec_ext.recstore.reads import BatchRead
from torchrec_ext.recstore.sharding.fused_params import store_optimizer
from torchrec_ext.recstore.sharding.tables import InitFns, ShardedTables
from torchrec_ext.recstore.trace import Trace, TraceEntry
from torchrec_ext.recstore.updates import apply_entries
from torchrec_ext.recstore.whole_tables import create_tables
from torchrec_ext.store import DynamicTable, FileStore, LocalStore, StoreOptimizer


class RecStoreLookup(BaseEmbeddingLookup[KeyedJaggedTensor, torch.Tensor], FusedOptimizerModule):
    """Pools this rank's rows for the examples of all ranks.

    With a fused optimizer, rows are updated as soon as their gradient arrives, as TorchRec's fused
    kernels do; without, gradients go into the trace.

    Args:
        tables: TorchRec's description of this rank's shards, in the order of their features.
        sharded: the tables.
        trace: takes gradients where no optimizer is fused.
        init_fns: what fills the rows of dense tables that are made.

    Attributes:
        new_tables: the names of those that were not in the store before.

    Raises:
        ValueError: the optimizers cannot be had.
    """

    def __init__(
        self,
        tables: Sequence[ShardedEmbeddingTable],
        sharded: ShardedTables,
        trace: Trace,
        init_fns: InitFns,
    ) -> None:
        super().__init__()
        self._sharded, self._trace = sharded, trace
        self._store, self._fused_ids = sharded.store, sharded.fused_ids
        fused = {table.name: store_optimizer(table.fused_params) for table in tables}
        optimizers = list(dict.fromkeys(fused.values()))
        if None in optimizers and len(optimizers) > 1:
            without = [name for name, optimizer in fused.items() if optimizer is None]
            raise ValueError(
                f"all tables of a collection have a fused optimizer or none has; {without} have none"
            )
        self.new_tables = fused.keys() - self._store.tables.keys()
        self._group_of = {name: optimizers.index(optimizer) for name, optimizer in fused.items()}
        for number, optimizer in enumerate(optimizers):
            names = [name for name, group in self._group_of.items() if group == number]
            self._create(names, optimizer or sharded.optimizer, init_fns)
        self._optimizer = StoreFusedOptimizer(
            self._store,
            {
                f"{name}.weight": OptimizedTable(name, sharded.dense_shard(name), sharded.rows[name], group)
                for name, group in self._group_of.items()
            },
            [optimizer.lr for optimizer in optimizers if optimizer is not None],
        )
        self._layout = Layout.of(
            [_summed(table) for table in tables],
            dynamic=[name for name, table in sharded.tables.items() if isinstance(table, DynamicTable)],
            lies_in=self._lies_in,
        )
        self._anchor = torch.empty(0, requires_grad=True)
        self._ahead: WeakKeyDictionary[KeyedJaggedTensor, Callable[[], BatchRead]] = WeakKeyDictionary()
        self._ready: WeakKeyDictionary[KeyedJaggedTensor, BatchRead] = WeakKeyDictionary()

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Pools the rows of each bag that this rank has.

        Args:
            features: what the input distribution gave: ids of this rank's shards, of ``B`` examples.

        Returns:
            ``[B, D]``, ``D`` the sum of the dimensions of all features.
        """
        batch = split_batch(features, self._layout, is_weighted=self._sharded.is_weighted)
        admit = self.training and torch.is_grad_enabled()
        self.refresh(features, admit=admit)
        read = self._ready.pop(features, None)
        flat = isinstance(self._store, LocalStore) and not any(part.group.dynamic for part in batch)
        if read is None and not flat:
            read = BatchRead(self._store, batch, self._fused_ids)
            read.pull(admit=admit)
        if read is not None:
            pooled = [pool_rows(rows, part) for rows, part in zip(read.groups, batch, strict=True)]
        else:
            assert isinstance(self._store, LocalStore)
            pooled = [pool_flat(self._store, part) for part in batch]
        record = self._record()
        return self._layout.assemble([run(self._anchor, record) for run in pooled])

    # Reading ahead

    @property
    def reads_ahead(self) -> bool:
        """Whether reading ahead pays: not if the rows are in memory."""
        return isinstance(self._store, FileStore) or not isinstance(self._store, LocalStore)

    def read_ahead(self, features: KeyedJaggedTensor) -> BatchRead:
        """Reads the rows of a batch that arrived; for any thread."""
        batch = split_batch(features, self._layout, is_weighted=False)
        read = BatchRead(self._store, batch, self._fused_ids)
        read.pull(admit=False, ahead=True)
        return read

    def expect(self, features: KeyedJaggedTensor, read: Callable[[], BatchRead]) -> None:
        """Has the forward pass of a batch use what ``read`` waits for, the outcome of ``read_ahead``."""
        self._ahead[features] = read

    def refresh(self, features: KeyedJaggedTensor, *, admit: bool) -> int:
        """Brings rows that were read ahead up to date, right before the batch's forward pass.

        Returns:
            How many were read again.
        """
        if (ahead := self._ahead.pop(features, None)) is None:
            return 0
        read = self._ready[features] = ahead()
        return read.refresh(admit=admit)

    def prefetch(self, sparse_features: KeyedJaggedTensor, forward_stream: Any = None) -> None:
        """Starts to read the rows of a batch that arrived, as TorchRec's prefetching pipeline asks for."""
        if self.reads_ahead:
            self.expect(sparse_features, readers().submit(self.read_ahead, sparse_features).result)

    # What TorchRec asks of a lookup

    @property
    def fused_optimizer(self) -> StoreFusedOptimizer:
        """The optimizer state of dense tables, and the learning rates."""
        return self._optimizer

    @property
    def is_fused(self) -> bool:
        """Whether rows are updated in the backward pass."""
        return bool(self._optimizer.param_groups)

    def flush(self) -> None:
        """Nothing is kept back."""

    def purge(self) -> None:
        """Nothing is kept back."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """None: they are in the collection's ``embedding_bags``."""
        return iter(())

    def _create(self, names: Sequence[str], optimizer: StoreOptimizer, init_fns: InitFns) -> None:
        create_tables(
            self._store,
            [self._sharded.stored(name) for name in names],
            optimizer,
            {name: fill for name, fill in init_fns.items() if name in names},
        )
        # Tables that were there may have had another.
        for name in names:
            if self._store.optimizer(name) != optimizer:
                self._store.set_optimizer(names, optimizer)
                break

    def _lies_in(self, table: str) -> tuple[int, str | None]:
        local = self._store.group_of(table).name if isinstance(self._store, LocalStore) else None
        return self._group_of[table], local

    def _record(self) -> Record:
        """What takes the gradients of one forward pass."""
        if not self.is_fused:
            number = self._trace.next_batch()

            def record(lookup: Lookup, grad: torch.Tensor) -> None:
                self._trace.record(lookup, grad, number)

            return record

        steps: dict[int, int] = {}

        def update(lookup: Lookup, grad: torch.Tensor) -> None:
            group = self._group_of[lookup.tables[0]]
            if group not in steps:
                steps[group] = self._optimizer.count_step(group)
            apply_entries(
                self._store,
                [TraceEntry(lookup, grad)],
                lr=self._optimizer.learning_rate(group),
                step=steps[group],
            )

        return update


def _summed(table: ShardedEmbeddingTable) -> EmbeddingBagConfig:
    """A table's configuration; the ranks' parts of a bag can be added up, but not averaged."""
    return EmbeddingBagConfig(
        name=table.name,
        num_embeddings=table.num_embeddings,
        embedding_dim=table.embedding_dim,
        feature_names=table.feature_names,
    )
