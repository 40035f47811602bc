"""``ShardedRecStoreEmbeddingBagCollection``: a collection whose rows are dealt out to the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionContext, ShardedEmbeddingBagCollection
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torchrec_ext.recstore.batch import split_batch
from torchrec_ext.recstore.embeddingbag import RecStoreEmbeddingBagCollection
from torchrec_ext.recstore.layout import Feature, Group, Layout
from torchrec_ext.recstore.prefetch import PrefetchHandle, PrefetchingModule
from torchrec_ext.recstore.sharding.dense import DenseShard
from torchrec_ext.recstore.sharding.dynamic import DynamicShards
from torchrec_ext.recstore.sharding.lookup import RecStoreLookup
from torchrec_ext.recstore.sharding.row_wise import ReadAhead, RecStoreSharding
from torchrec_ext.recstore.sharding.tables import ShardedTables, StoreOfRank
from torchrec_ext.recstore.trace import Trace, TracedModule
from torchrec_ext.recstore.updates import apply_entries
from torchrec_ext.recstore.whole_tables import load_optimizer_state, optimizer_state, write_rows
from torchrec_ext.store import DenseTable, DynamicTable, Store, StoreOptimizer
from torchrec_ext.zch import internals


class ShardedRecStoreEmbeddingBagCollection(
    ShardedEmbeddingBagCollection, TracedModule, PrefetchingModule["_SentBatch"]
):
    """A ``RecStoreEmbeddingBagCollection`` whose rows are dealt out to the ranks, row-wise.

    The way of ids to the ranks that have their rows, and of pooled rows back, is TorchRec's.

    Made by ``RecStoreEmbeddingBagCollectionSharder``; see there.
    """

    def __init__(
        self,
        module: RecStoreEmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        *,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
        store: Store | StoreOfRank | None = None,
    ) -> None:
        internals.require(ShardedEmbeddingBagCollection, "_initialize_torch_state")
        self.lr = module.lr
        self._configs = module.embedding_bag_configs()
        names = [config.name for config in self._configs]
        self._trace = Trace(f"{type(self).__name__} of tables {names}")
        self._tables = ShardedTables.of(module, table_name_to_parameter_sharding, env, device, store)
        self._init_fns = self._tables.init_fns(module)
        super().__init__(
            _as_torchrec_sees_it(module),
            dict(table_name_to_parameter_sharding),
            env,
            fused_params=fused_params,
            device=device,
            qcomm_codecs_registry=qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        del self._init_fns  # it holds the unsharded rows
        self._weighted = module.is_weighted()
        self._features = _features(module, self._sharding)
        self._input_layout = Layout((Group(0, False, tuple(self._features.values())),), ())
        self._create_modules()
        dynamic = [name for name in self._tables.tables if self._tables.dense_shard(name) is None]
        if module.store is not None and not self._tables.shared and set(dynamic) <= self.lookup.new_tables:
            self._take_keys_of(module, dynamic)
        if self._tables.shared:  # until whoever made the tables has initialised their rows
            dist.barrier(env.process_group)

    def _create_modules(self) -> None:
        tables = self._tables
        self.embedding_bags = nn.ModuleDict(
            {
                shard.name: DenseShard(tables.store, shard, tables.rows[shard.name])
                for shard in self._dense_shards()
            }
        )
        self.dynamic_tables = DynamicShards(
            tables.store,
            tables.shared,
            {
                name: rows
                for name, rows in tables.rows.items()
                if isinstance(tables.tables[name], DynamicTable)
            },
            self.lookup.fused_optimizer,
        )

    def _take_keys_of(self, module: RecStoreEmbeddingBagCollection, tables: list[str]) -> None:
        """Takes over what the collection's dynamic tables hold, with fresh optimizer state."""
        state = {"step": torch.tensor(0)}
        for key, values in module.dynamic_tables.state_dict().items():
            if key.endswith(".last_used"):
                values = torch.zeros_like(values)
            if ".slots." not in key:
                state.setdefault(key, values)
        for table in tables:
            optimizer, count = self.store.optimizer(table), len(state[f"{table}.keys"])
            for slot in optimizer.slots:
                shape = (count, slot.columns(self._tables.tables[table].dim))
                state[f"{table}.slots.{slot.name}"] = torch.full(shape, optimizer.initial(slot))
        self.dynamic_tables.load_state_dict(state)

    def create_embedding_bag_sharding(  # a class method of TorchRec, which calls it on the instance
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
    ) -> RecStoreSharding:
        """See ``ShardedEmbeddingBagCollection``."""
        self._sharding = RecStoreSharding(
            sharding_infos, env, device, qcomm_codecs_registry, self._tables, self._trace, self._init_fns
        )
        return self._sharding

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        """Instead of TorchRec's, which registers its own kernels' weights."""

    # A forward pass

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pools the rows of each bag.

        Args:
            features: this rank's batch of ``B`` examples; ids int32 or int64.

        Returns:
            Of ``[B, D]``, ``D`` the sum of the dimensions of all features.

        Raises:
            KeyError: a feature is missing.
            ValueError: an id is not in its table; nothing was sent to other ranks.
            RuntimeError: the prefetch handle that was set is of another batch.
        """
        handle = self._take_handle()
        if handle is None:
            return super().forward(features)
        features = maybe_td_to_kjt(features, None)
        sent = handle.use(self, features, admit=self.training and torch.is_grad_enabled())
        return self.compute_and_output_dist(sent.ctx, sent.features)

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Sends each id to the rank that has its row; see ``forward``.

        If the rows are out of reach, they are read as soon as the ids have arrived.
        """
        sent = super().input_dist(ctx, self._prepared(features))
        if self.lookup.reads_ahead:
            sent.awaitables[:] = [ReadAhead(one, ctx, self.lookup) for one in sent.awaitables]
        return sent

    def _prepared(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with exactly the features that are sent, one for each table, and all weights."""
        features = maybe_td_to_kjt(features, None)
        (batch,) = split_batch(features, self._input_layout, is_weighted=self._weighted)
        self._tables.fused_ids.check([batch])
        values, in_order = features.values(), [feature.name for feature in batch.group.features]
        if features.keys() != in_order or features.variable_stride_per_key() or values.dtype != torch.int64:
            values = torch.cat(batch.ids)
        return KeyedJaggedTensor(
            keys=list(self._features),
            values=values,
            weights=batch.scale,
            lengths=batch.lengths,
            stride=batch.batch_size,
            length_per_key=[len(ids) for ids in batch.ids],
        )

    # Prefetch

    def issue_fused_prefetch(self, features: KeyedJaggedTensor) -> PrefetchHandle[_SentBatch]:
        """Sends a batch's ids to the ranks that have their rows, which start to read them.

        All ranks have to do this at the same time, as a forward pass.

        Args:
            features: this rank's batch.

        Returns:
            For ``set_fused_prefetch_handle``, right before the batch's forward pass.

        Raises:
            KeyError: a feature is missing.
            ValueError: an id is not in its table; nothing was sent to other ranks.
        """
        features = maybe_td_to_kjt(features, None)
        ctx = self.create_context()
        sent = _SentBatch(ctx, self.input_dist(ctx, features).wait(), self.lookup)
        return PrefetchHandle(self, features, sent, with_weights=self._weighted)

    # What is in it

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configurations of the whole tables."""
        return self._configs

    @property
    def lookup(self) -> RecStoreLookup:
        """Pools this rank's rows, and updates them."""
        return self._sharding.lookup

    @property
    def tables(self) -> ShardedTables:
        """The tables, and how they are dealt out."""
        return self._tables

    @property
    def store(self) -> Store:
        """Where this rank's rows are."""
        return self._tables.store

    # What its optimizers need

    def use_optimizer(self, optimizer: StoreOptimizer) -> None:
        """See ``TracedModule``.

        Raises:
            ValueError: the rows have a fused optimizer.
        """
        if self.lookup.is_fused:
            raise ValueError(
                f"the rows of tables {list(self._tables.tables)} are trained in the backward pass, by the "
                "optimizer in fused_params or of apply_optimizer_in_backward; use that or a Sparse* optimizer"
            )
        self.store.set_optimizer(list(self._tables.tables), optimizer)

    def apply_trace(self, *, lr: float, step: int) -> None:
        """See ``TracedModule``."""
        with self._trace.applied() as entries:
            apply_entries(self.store, entries, lr=lr, step=step)

    def optimizer_state(self) -> dict[str, Any]:
        """See ``TracedModule``; tensors over all ranks."""
        rows = self._tables.rows
        return {
            name: rows[name.rpartition(".")[0]].sharded(values)
            for name, values in optimizer_state(self.store, self._dense_shards()).items()
        }

    def load_optimizer_state(self, state: Mapping[str, Any]) -> None:
        """See ``TracedModule``; tensors over all ranks, or whole ones."""
        rows = self._tables.rows
        local = {}
        for name, value in state.items():
            table = name.rpartition(".")[0]
            local[name] = rows[table].local(value) if table in rows else value
        load_optimizer_state(self.store, self._dense_shards(), local)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises this rank's rows of dense tables anew."""
        init_fns = {config.name: config.init_fn for config in self._configs}
        for shard in self._dense_shards():
            rows = torch.empty(shard.num_rows, shard.dim, device=self.store.device)
            init_fns[shard.name](rows)
            write_rows(self.store, shard, rows)

    def _dense_shards(self) -> list[DenseTable]:
        shards = map(self._tables.dense_shard, self._tables.tables)
        return [shard for shard in shards if shard is not None]

    @property
    def unsharded_module_type(self) -> type[RecStoreEmbeddingBagCollection]:
        """See ``ShardedEmbeddingModule``."""
        return RecStoreEmbeddingBagCollection


class _SentBatch:
    """A batch whose ids are on their way, and then the rows that are read for it; see ``BatchRead``."""

    def __init__(
        self, ctx: EmbeddingBagCollectionContext, arriving: Awaitable[KJTList], lookup: RecStoreLookup
    ) -> None:
        self.ctx = ctx
        self.features: KJTList | None = None
        self._arriving, self._lookup = arriving, lookup

    def pull(self, *, admit: bool, ahead: bool = False) -> None:
        """Waits for the ids, and for the rows if they are read ahead."""
        self.features = self._arriving.wait()

    def refresh(self, *, admit: bool) -> int:
        """Brings the rows up to date; see ``BatchRead``."""
        assert self.features is not None
        return self._lookup.refresh(self.features[0], admit=admit)


def _as_torchrec_sees_it(module: RecStoreEmbeddingBagCollection) -> EmbeddingBagCollection:
    """A collection without rows whose features are sent as they are prepared."""
    names = module.embedding_names_by_table()
    seen = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=config.name,
                num_embeddings=config.num_embeddings,
                embedding_dim=config.embedding_dim,
                feature_names=names_of_table,
            )
            for config, names_of_table in zip(module.embedding_bag_configs(), names, strict=True)
        ],
        is_weighted=module.is_weighted(),
        device=torch.device("meta"),
    )
    # apply_optimizer_in_backward leaves its optimizer on the parameters.
    for name, rows in module.embedding_bags.items():
        for parameter in rows.parameters():
            seen.embedding_bags[name].weight = parameter
    return seen


def _features(module: RecStoreEmbeddingBagCollection, sharding: RecStoreSharding) -> dict[str, Feature]:
    """The batch's features by the names under which they are sent, in their order."""
    features = {}
    for index, (config, names) in enumerate(
        zip(module.embedding_bag_configs(), module.embedding_names_by_table(), strict=True)
    ):
        for name, sent_as in zip(config.feature_names, names, strict=True):
            features[sent_as] = Feature(name, config.name, index, config.pooling == PoolingType.MEAN)
    return {sent_as: features[sent_as] for sent_as in sharding.feature_names()}
