"""TorchRec's own planner places ZCH modules on CPU with our sharders, and they train there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, ShardingType
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from tests.support.workers import run_on
from torchrec_ext.zch import ZchEmbeddingBagCollectionSharder, ZchEmbeddingCollectionSharder

WORLD_SIZE = 2
NUM_ROWS = 16
NUM_IDS = 200
DIM = 8
CPU = torch.device("cpu")

SHARDERS = {"bag": ZchEmbeddingBagCollectionSharder, "sequence": ZchEmbeddingCollectionSharder}
TORCHREC_SHARDERS = {
    "bag": ManagedCollisionEmbeddingBagCollectionSharder,
    "sequence": ManagedCollisionEmbeddingCollectionSharder,
}
kinds = pytest.mark.parametrize("kind", ["bag", "sequence"])


class Model(nn.Module):
    """Two ZCH tables, one with two features, and a dense layer over their vectors."""

    def __init__(self, kind: str, buckets: int = WORLD_SIZE) -> None:
        super().__init__()
        self.pooled = kind == "bag"
        tables = [("t0", ["f0"]), ("t1", ["f1", "f2"])]
        collisions = {
            name: MCHManagedCollisionModule(
                zch_size=NUM_ROWS,
                device=CPU,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=2,
                input_hash_size=NUM_IDS,
                buckets=buckets,
            )
            for name, _ in tables
        }
        if self.pooled:
            bag_configs = [
                EmbeddingBagConfig(name=n, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=f)
                for n, f in tables
            ]
            self.mc: nn.Module = ManagedCollisionEmbeddingBagCollection(
                EmbeddingBagCollection(tables=bag_configs),
                ManagedCollisionCollection(collisions, bag_configs),
            )
        else:
            configs = [
                EmbeddingConfig(name=n, embedding_dim=DIM, num_embeddings=NUM_ROWS, feature_names=f)
                for n, f in tables
            ]
            self.mc = ManagedCollisionEmbeddingCollection(
                EmbeddingCollection(tables=configs),
                ManagedCollisionCollection(collisions, configs),
            )
        apply_optimizer_in_backward(torch.optim.Adagrad, self.mc.parameters(), {"lr": 0.1})
        self.dense = nn.Linear(DIM, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        embeddings, _ = self.mc(features)
        vectors = [embeddings[feature] for feature in ("f0", "f1", "f2")]
        if not self.pooled:
            vectors = [jagged.values() for jagged in vectors]
        return self.dense(torch.cat(vectors)).sum()


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    """Three features of four bags; every step brings ids the tables have no row for."""
    ids = torch.Generator().manual_seed(WORLD_SIZE * step + rank)
    return KeyedJaggedTensor(
        keys=["f0", "f1", "f2"],
        values=torch.randint(NUM_IDS, (36,), generator=ids),
        lengths=torch.full((12,), 3),
    )


def planner() -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD_SIZE, local_world_size=WORLD_SIZE, compute_device="cpu")
    )


def evicted_rows(model: nn.Module) -> list[torch.Tensor]:
    """Gathers, from now on, the rows that evictions reset on this rank."""
    (collisions,) = [m for m in model.modules() if isinstance(m, ShardedManagedCollisionCollection)]
    evict, rows = collisions.evict, []

    def evict_and_note() -> dict[str, torch.Tensor | None]:
        evicted = evict()
        rows.extend(r for r in evicted.values() if r is not None)
        return evicted

    collisions.evict = evict_and_note
    return rows


def plan_and_train(kind: str, given_plan: bool) -> None:
    model = Model(kind)
    sharders = [SHARDERS[kind]()]
    plan = planner().collective_plan(model, sharders, dist.group.WORLD) if given_plan else None
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    for placed in sharded.plan.plan["mc"].values():
        assert placed.sharding_type == ShardingType.ROW_WISE.value
        assert placed.compute_kernel == EmbeddingComputeKernel.FUSED.value

    (weight,) = [p for n, p in sharded.named_parameters() if n.endswith("t0.weight")]
    before = weight.detach().clone()
    evicted = evicted_rows(sharded)
    for step in range(12):
        sharded(batch(step, dist.get_rank())).backward()

    # The tables are full after a few steps: what comes later can only take the rows of others.
    assert sum(rows.numel() for rows in evicted) > WORLD_SIZE * NUM_ROWS
    assert weight.shape[0] == NUM_ROWS // WORLD_SIZE
    assert not torch.equal(weight, before)
    assert weight.isfinite().all()


@pytest.mark.parametrize(("kind", "given_plan"), [("bag", True), ("bag", False), ("sequence", True)])
def test_planner_places_zch_modules_on_cpu_and_they_train_through_evictions(
    kind: str, given_plan: bool
) -> None:
    run_on(WORLD_SIZE, plan_and_train, kind, given_plan)


def plan_uneven_buckets() -> None:
    for kind, sharder in SHARDERS.items():
        with pytest.raises(ValueError, match=r"'t0'.* 3 buckets .* 2 ranks.*buckets=2"):
            planner().plan(Model(kind, buckets=3), [sharder()])


def test_uneven_buckets_raise_an_error_that_says_what_to_pass() -> None:
    run_on(WORLD_SIZE, plan_uneven_buckets)


@kinds
def test_parameters_are_found_without_a_process_group(kind: str) -> None:
    assert list(SHARDERS[kind]().shardable_parameters(Model(kind, buckets=3).mc)) == ["t0", "t1"]


@kinds
def test_cpu_is_offered_row_wise_fused_alone(kind: str) -> None:
    sharder = SHARDERS[kind]()
    assert sharder.sharding_types("cpu") == [ShardingType.ROW_WISE.value]
    assert sharder.compute_kernels(ShardingType.ROW_WISE.value, "cpu") == [EmbeddingComputeKernel.FUSED.value]


@kinds
def test_cuda_is_offered_what_torchrec_offers_less_the_kernels_an_eviction_breaks(
    kind: str,
) -> None:
    ours, theirs = SHARDERS[kind](), TORCHREC_SHARDERS[kind]()
    assert set(ours.sharding_types("cuda")) == set(theirs.sharding_types("cuda"))
    row_wise = ShardingType.ROW_WISE.value
    assert set(theirs.compute_kernels(row_wise, "cuda")) - set(ours.compute_kernels(row_wise, "cuda")) == {
        EmbeddingComputeKernel.KEY_VALUE.value,
        EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
    }


@kinds
def test_sharder_takes_the_arguments_of_its_base_class(kind: str) -> None:
    assert SHARDERS[kind](fused_params={"learning_rate": 0.5}).fused_params == {"learning_rate": 0.5}
