"""Builds models of tables without managed collision, sharded in every way TorchRec has, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    LazyAwaitable,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    # Every second step moves whole tables, looked up or not.
    "ema": EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD,
}
DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.5),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "weight_decay": partial(torch.optim.SGD, lr=0.5, weight_decay=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.5),
    "adam": partial(torch.optim.Adam, lr=0.1),
}
DTYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        ranks: which rank has each shard: of a table-wise table one, of a column-wise one as many as there
            are column shards; of a grid the hosts; else without meaning.
    """

    name: str
    features: tuple[str, ...]
    rows: int = 11
    dim: int = 8
    sharding: str = "row_wise"
    kernel: str = "fused"
    pooling: str = "SUM"
    dtype: str = "FP32"
    ranks: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Collection:
    """One module of tables."""

    tables: tuple[Table, ...]
    sequence: bool = False
    weighted: bool = False


@dataclass(frozen=True)
class Spec:
    """A model: collections by the attribute name.

    Attributes:
        variable: whether its batches have a number of bags for each feature; a model takes one kind only.
    """

    collections: Mapping[str, Collection]
    optimizer: str = "sgd"
    dense_optimizer: str = "sgd"
    output_dtype: str = "FP32"
    sharded: bool = True
    output_dtensor: bool = False
    local_size: int | None = None
    device: str = "cpu"
    index_dedup: bool = False
    variable: bool = False
    seed: int = 0

    @property
    def features(self) -> list[str]:
        """All features, each once."""
        return list(
            dict.fromkeys(f for c in self.collections.values() for table in c.tables for f in table.features)
        )


def one_table(**changes: Any) -> Spec:
    """A model with one table ``ebc.t0`` that feature ``f0`` looks up."""
    spec = {key: changes.pop(key) for key in list(changes) if key in Spec.__dataclass_fields__}
    module = {key: changes.pop(key) for key in list(changes) if key in Collection.__dataclass_fields__}
    table = Table(**{"name": "t0", "features": ("f0",), **changes})
    return Spec({"ebc": Collection((table,), **module)}, **spec)


class Model(nn.Module):
    """Collections side by side; ``forward`` gives each one's output by name."""

    def __init__(self, modules: Mapping[str, nn.Module], weighted: Sequence[str]) -> None:
        super().__init__()
        self.names = list(modules)
        self.weighted = set(weighted)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        features = features.to(next(self.parameters()).device)
        plain = KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=features.lengths(),
            stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
            inverse_indices=features.inverse_indices_or_none(),
        )
        outputs = {n: getattr(self, n)(features if n in self.weighted else plain) for n in self.names}
        return {n: o.wait() if isinstance(o, LazyAwaitable) else o for n, o in outputs.items()}


def build_unsharded(spec: Spec) -> Model:
    """The model before sharding, on the CPU."""
    torch.manual_seed(spec.seed)
    return Model(
        {name: _module(collection) for name, collection in spec.collections.items()},
        [name for name, collection in spec.collections.items() if collection.weighted],
    )


def build(spec: Spec) -> nn.Module:
    """The model, sharded over all ranks; as it is if the spec says so."""
    model = build_unsharded(spec)
    if not spec.sharded:
        for weight in model.parameters():
            nn.init.uniform_(weight, -1.0, 1.0)  # TorchRec leaves this to the sharding
        return model
    world_size = dist.get_world_size()
    local_size = spec.local_size or world_size
    if spec.local_size:
        os.environ["LOCAL_WORLD_SIZE"] = str(local_size)  # TorchRec asks for it once in a process's life
    plan = {
        name: EmbeddingModuleShardingPlan(
            {table.name: _sharding(table, world_size, local_size, spec.device) for table in collection.tables}
        )
        for name, collection in spec.collections.items()
    }
    fused = {
        "optimizer": FUSED_OPTIMIZERS[spec.optimizer],
        "learning_rate": 0.5,
        "output_dtype": DataType[spec.output_dtype],
    }
    if spec.optimizer == "ema":
        fused["emainplace_mode"] = EmainplaceModeDefinition(step_ema=2, step_start=1, step_ema_coef=0.5)
    return DistributedModelParallel(
        model,
        env=ShardingEnv(world_size, dist.get_rank(), dist.group.WORLD, spec.output_dtensor),
        device=torch.device(spec.device),
        plan=ShardingPlan(dict(plan)),
        sharders=[
            EmbeddingBagCollectionSharder(fused),
            EmbeddingCollectionSharder(fused, use_index_dedup=spec.index_dedup),
        ],
    )


def sharding_of(spec: Spec, collection: str, table: str, world_size: int) -> ParameterSharding:
    """How a table of a spec is sharded over some ranks."""
    (found,) = (t for t in spec.collections[collection].tables if t.name == table)
    return _sharding(found, world_size, world_size, spec.device)


class Trainer:
    """Trains a model: the fused tables in the backward, all others by a torch optimizer."""

    def __init__(self, model: nn.Module, spec: Spec) -> None:
        self.model = model
        parameters = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
        self.optimizer = DENSE_OPTIMIZERS[spec.dense_optimizer](parameters) if parameters else None

    def finish(self, loss: torch.Tensor) -> None:
        """The backward and the update of a step."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()


def keyed(
    features: Sequence[str],
    bags: Mapping[str, Sequence[Sequence[int]]],
    weight: Callable[[int], float] = lambda _: 1.0,
) -> KeyedJaggedTensor:
    """A batch: for each feature a list of bags of ids; features left out are empty."""
    size = max((len(b) for b in bags.values()), default=1)
    rows = [bags.get(feature, [[]] * size) for feature in features]
    ids = [i for feature in rows for bag in feature for i in bag]
    lengths = [len(bag) for feature in rows for bag in feature]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor(ids, dtype=torch.int64),
        weights=torch.tensor([weight(position) for position in range(len(ids))], dtype=torch.float32),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def variable_keyed(features: Sequence[str], bags: Mapping[str, Sequence[Sequence[int]]]) -> KeyedJaggedTensor:
    """A batch in which features have different numbers of bags, which repeat to the longest.

    The numbers must be the same on all ranks.
    """
    rows = [bags[feature] for feature in features]
    size = max(len(feature) for feature in rows)
    ids = [i for feature in rows for bag in feature for i in bag]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor(ids, dtype=torch.int64),
        weights=torch.ones(len(ids)),
        lengths=torch.tensor([len(bag) for feature in rows for bag in feature], dtype=torch.int64),
        stride_per_key_per_rank=[[len(feature)] for feature in rows],
        inverse_indices=(
            list(features),
            torch.tensor([[i % len(feature) for i in range(size)] for feature in rows]),
        ),
    )


def answers(model: nn.Module, spec: Spec, module: str, table: Table, ids: Sequence[int]) -> torch.Tensor:
    """The oracle: what the model itself answers for each id as a bag of its own, float32 ``[n, dim]``.

    All ranks must ask for the same ids. Knows nothing of ``torchrec_ext``.
    """
    training = model.training
    model.eval()
    feature = table.features[0]
    with torch.no_grad():
        # One id for each feature: TorchRec's dense kernel of sequences does not take empty ones on CPU.
        others = dict.fromkeys(spec.features, [[0]] * len(ids))
        make = variable_keyed if spec.variable else keyed
        output = model(make(spec.features, others | {feature: [[i] for i in ids]}))[module]
    model.train(training)
    shared = sum(feature in other.features for other in spec.collections[module].tables) > 1
    answer = output[f"{feature}@{table.name}" if shared else feature]
    return (answer.values() if isinstance(answer, JaggedTensor) else answer).float().cpu()


def _module(collection: Collection) -> nn.Module:
    config = EmbeddingConfig if collection.sequence else EmbeddingBagConfig
    configs = [
        config(
            name=t.name,
            embedding_dim=t.dim,
            num_embeddings=t.rows,
            feature_names=list(t.features),
            init_fn=partial(nn.init.uniform_, a=-1.0, b=1.0),
            data_type=DataType[t.dtype],
            **({} if collection.sequence else {"pooling": PoolingType[t.pooling]}),
        )
        for t in collection.tables
    ]
    device = torch.device("cpu")
    if collection.sequence:
        return EmbeddingCollection(tables=configs, device=device)
    return EmbeddingBagCollection(tables=configs, device=device, is_weighted=collection.weighted)


def _sharding(table: Table, world_size: int, local_size: int, device: str) -> ParameterSharding:
    if table.sharding == "data_parallel":
        return ParameterSharding("data_parallel", "dense", list(range(world_size)), None)
    cut = {
        "row_wise": lambda: _grid(table, [(0, table.dim, range(world_size))]),
        "table_wise": lambda: _grid(table, [(0, table.dim, table.ranks[:1])]),
        "column_wise": lambda: _grid(table, [(c, w, [r]) for c, w, r in _columns(table)]),
        "table_column_wise": lambda: _grid(table, [(c, w, [r]) for c, w, r in _columns(table)]),
        "table_row_wise": lambda: _grid(table, [(0, table.dim, _host(table.ranks[0], local_size))]),
        "grid_shard": lambda: _grid(table, [(c, w, _host(h, local_size)) for c, w, h in _columns(table)]),
    }[table.sharding]()
    shards = [
        ShardMetadata([row, column], [rows, columns], f"rank:{rank}/{device}")
        for row, rows, column, columns, rank in cut
    ]
    ranks = [rank for *_, rank in cut]
    return ParameterSharding(table.sharding, table.kernel, ranks, EnumerableShardingSpec(shards))


def _columns(table: Table) -> list[tuple[int, int, int]]:
    width = table.dim // len(table.ranks)
    return [(index * width, width, rank) for index, rank in enumerate(table.ranks)]


def _host(host: int, local_size: int) -> range:
    return range(host * local_size, (host + 1) * local_size)


def _grid(
    table: Table, columns: Sequence[tuple[int, int, Sequence[int]]]
) -> list[tuple[int, int, int, int, int]]:
    cut = []
    for column, width, ranks in columns:
        block = -(-table.rows // len(ranks))
        for index, rank in enumerate(ranks):
            start = min(index * block, table.rows)
            cut.append((start, min(block, table.rows - start), column, width, rank))
    return cut
