"""The one place where tests build sharded ZCH models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import LazyAwaitable, ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingConfig, PoolingType
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

POLICIES = {
    "lfu": LFU_EvictionPolicy,
    "lru": partial(LRU_EvictionPolicy, decay_exponent=1.0),
    "distance_lfu": partial(DistanceLFU_EvictionPolicy, decay_exponent=1.0),
}
OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    # On CPU only under reset_evicted_optimizer_state: without it, evictions fail.
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


@dataclass(frozen=True)
class Table:
    """One ZCH table. ``rows`` is of all shards; ``hash_size`` decides which shard an id goes to."""

    name: str
    features: tuple[str, ...]
    rows: int = 12
    dim: int = 8
    hash_size: int = 60
    policy: str = "lfu"
    threshold: bool = False
    eviction_interval: int = 2
    hash_func: Any = None
    mch_class: Any = None
    pooling: str = "SUM"


@dataclass(frozen=True)
class Spec:
    """A model: tables per managed-collision module, by the module's attribute name."""

    modules: Mapping[str, tuple[Table, ...]]
    optimizer: str = "sgd"
    sequence: bool = False
    in_place: bool = True
    dtype: str = "FP32"
    output_dtype: str = "FP32"
    kernel: str = "fused"
    learning_rate: float = 0.5
    seed: int = 0

    @property
    def features(self) -> list[str]:
        """All features, each once."""
        tables = [t for tables in self.modules.values() for t in tables]
        return list(dict.fromkeys(f for table in tables for f in table.features))


def one_table(**changes: Any) -> Spec:
    """A model with one ZCH table ``mc.t0`` that feature ``f0`` looks up."""
    spec_fields = {k: changes.pop(k) for k in list(changes) if k in Spec.__dataclass_fields__}
    return Spec({"mc": (Table("t0", ("f0",), **changes),)}, **spec_fields)


class Model(nn.Module):
    """Managed-collision modules side by side; ``forward`` gives each one's output by name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.names = list(modules)
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        outputs = {name: getattr(self, name)(features)[0] for name in self.names}
        return {n: o.wait() if isinstance(o, LazyAwaitable) else o for n, o in outputs.items()}


def build_unsharded(spec: Spec) -> Model:
    """The model before sharding."""
    world_size = dist.get_world_size()
    return Model({name: _module(tables, spec, world_size) for name, tables in spec.modules.items()})


def build(spec: Spec) -> DistributedModelParallel:
    """The model, sharded row-wise over all ranks."""
    torch.manual_seed(spec.seed)
    model = build_unsharded(spec)
    sharder = _sharder(spec)
    plan = ShardingPlan(
        {
            name: construct_module_sharding_plan(
                getattr(model, name),
                {t.name: row_wise(compute_kernel=spec.kernel) for t in tables},
                sharder=sharder,
                world_size=dist.get_world_size(),
                local_size=dist.get_world_size(),
                device_type="cpu",
            )
            for name, tables in spec.modules.items()
        }
    )
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=plan,
        sharders=[sharder],
    )


def keyed(features: Sequence[str], bags: Mapping[str, Sequence[Sequence[int]]]) -> KeyedJaggedTensor:
    """A batch: for each feature a list of bags of ids; features left out are empty."""
    size = max((len(b) for b in bags.values()), default=1)
    rows = [bags.get(feature, [[]] * size) for feature in features]
    lengths = [len(bag) for feature in rows for bag in feature]
    ids = [i for feature in rows for bag in feature for i in bag]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor(ids, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def loss_of(output: Mapping[str, Any]) -> torch.Tensor:
    """A loss that moves every row that was looked up, each dimension differently, and none ever faster."""
    total = torch.zeros(())
    for one in output.values():
        if isinstance(one, KeyedTensor):
            values = [one.values()]
        else:
            values = [jagged.values() for jagged in one.values()]
        for value in values:
            scale = torch.linspace(0.5, 1.5, value.shape[-1])
            total = total + (value * scale).sum() + 0.1 * value.sin().sum()
    return total


def answers(model: nn.Module, spec: Spec, module: str, table: str, ids: Sequence[int]) -> torch.Tensor:
    """The oracle: what the model itself answers for each id as a bag of its own, float32 ``[n, dim]``.

    All ranks must ask for the same ids. Knows nothing of ``torchrec_ext``.
    """
    training = model.training
    model.eval()
    tables = spec.modules[module]
    feature = next(t.features[0] for t in tables if t.name == table)
    shared = sum(feature in t.features for t in tables) > 1
    with torch.no_grad():
        output = model(keyed(spec.features, {feature: [[i] for i in ids]}))[module]
    model.train(training)
    key = f"{feature}@{table}" if shared else feature
    answer = output[key]
    return (answer.values() if isinstance(answer, JaggedTensor) else answer).float()


def _module(tables: Sequence[Table], spec: Spec, world_size: int) -> nn.Module:
    device = torch.device("cpu")
    config = EmbeddingConfig if spec.sequence else EmbeddingBagConfig
    configs = [
        config(
            name=t.name,
            embedding_dim=t.dim,
            num_embeddings=t.rows,
            feature_names=list(t.features),
            init_fn=partial(nn.init.uniform_, a=-1.0, b=1.0),
            data_type=DataType[spec.dtype],
            **({} if spec.sequence else {"pooling": PoolingType[t.pooling]}),
        )
        for t in tables
    ]
    collisions = ManagedCollisionCollection(
        managed_collision_modules={t.name: _collision(t, world_size, device) for t in tables},
        embedding_configs=configs,
    )
    if spec.sequence:
        return ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=configs, device=device),
            collisions,
            allow_in_place_embed_weight_update=spec.in_place,
        )
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs, device=device),
        collisions,
        allow_in_place_embed_weight_update=spec.in_place,
    )


def _collision(table: Table, world_size: int, device: torch.device) -> nn.Module:
    threshold = {"threshold_filtering_func": average_threshold_filter} if table.threshold else {}
    return (table.mch_class or MCHManagedCollisionModule)(
        zch_size=table.rows,
        device=device,
        input_hash_size=table.hash_size,
        input_hash_func=table.hash_func,
        eviction_interval=table.eviction_interval,
        eviction_policy=POLICIES[table.policy](**threshold),
        buckets=world_size,
    )


def _sharder(spec: Spec) -> Any:
    fused = {
        "optimizer": OPTIMIZERS[spec.optimizer],
        "learning_rate": spec.learning_rate,
        "output_dtype": DataType[spec.output_dtype],
    }
    if spec.sequence:
        return ManagedCollisionEmbeddingCollectionSharder(
            EmbeddingCollectionSharder(fused_params=fused), ManagedCollisionCollectionSharder()
        )
    return ManagedCollisionEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(fused_params=fused), ManagedCollisionCollectionSharder()
    )
