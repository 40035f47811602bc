"""Sharded multi-probe ZCH models that train on CPU.

There FBGEMM looks ids up in an identity tensor, but has no kernel that puts ids into it: that is done here in
Python. Everything else is TorchRec's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from numpy.typing import NDArray
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.mc_modules import ManagedCollisionCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from tests.support.models import keyed, loss_of

HASH_SIZE = 101  # no multiple of the buckets
BUCKETS = 6
ROWS = 4 * BUCKETS
EMPTY = -1
MASK = 2**64 - 1

TABLES = ("a", "b")
FEATURES = {"a": ["fa", "ga"], "b": ["fb"]}
ALL_FEATURES = ["fa", "ga", "fb"]


class TrainedOnCpu(HashZchManagedCollisionModule):
    """Gives ids slots as the kernel for GPU does: an empty one, else, at times, that of another id."""

    _calls = 0

    def _zero_collision_hash(  # type: ignore[override]
        self, *, readonly: bool, **arguments: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if readonly:
            return super()._zero_collision_hash(readonly=readonly, **arguments)
        arguments.update(metadata=None, input_metadata=None, eviction_threshold=-1, opt_in_rands=None)
        evicted: list[int] = []
        for one in arguments["input"].tolist():
            evicted += self._admit(one)
        slots, _ = super()._zero_collision_hash(readonly=True, **arguments)
        return slots, torch.tensor(evicted, dtype=torch.int64)

    def _admit(self, one: int) -> list[int]:
        # Written past PyTorch's counting, as the kernel writes.
        ids = self._hash_zch_identities.data.view(-1)
        slots = window(self, one)
        if one in ids[slots].tolist():
            return []
        self._calls += 1
        empty = [slot for slot in slots if ids[slot] == EMPTY]
        if empty:
            ids[empty[0]] = one
            return []
        if self._calls % 3 == 0:
            return []
        slot = slots[self._calls % len(slots)]
        ids[slot] = one
        return [slot]


def build(
    *,
    pooling: Sequence[str] = ("SUM", "SUM"),
    device: str = "cpu",
    **collision: Any,
) -> DistributedModelParallel:
    """Two tables in one module ``mc``, row-wise over all ranks."""
    torch.manual_seed(0)
    where = torch.device(device)
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=4,
            num_embeddings=ROWS,
            feature_names=FEATURES[name],
            pooling=PoolingType[pooling[index]],
            init_fn=lambda weight: nn.init.uniform_(weight, -1.0, 1.0),
        )
        for index, name in enumerate(TABLES)
    ]
    options = {"input_hash_size": HASH_SIZE, "disable_fallback": True, "max_probe": 3, **collision}
    kind = HashZchManagedCollisionModule if device == "cuda" else TrainedOnCpu
    modules = {
        name: kind(zch_size=ROWS, device=where, total_num_buckets=BUCKETS, **options) for name in TABLES
    }
    model = nn.Sequential()
    model.mc = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs, device=where), ManagedCollisionCollection(modules, configs)
    )
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.5}
    sharder = ManagedCollisionEmbeddingBagCollectionSharder(
        EmbeddingBagCollectionSharder(fused), ManagedCollisionCollectionSharder()
    )
    plan = construct_module_sharding_plan(
        model.mc,
        {name: row_wise(compute_kernel="fused") for name in TABLES},
        sharder=sharder,
        world_size=dist.get_world_size(),
        local_size=dist.get_world_size(),
        device_type=where.type,
    )
    return DistributedModelParallel(model, device=where, plan=ShardingPlan({"mc": plan}), sharders=[sharder])


def collision(model: nn.Module, table: str) -> HashZchManagedCollisionModule:
    """This rank's collision module of a table."""
    return model.module.mc._managed_collision_collection._managed_collision_modules[table]


def lookup(model: nn.Module, bags: Mapping[str, Sequence[int]]) -> torch.Tensor:
    """Looks ids up, a bag for each; the loss of it.

    In a single process TorchRec takes ids without a slot only if each bag of each feature has one id.
    """
    device = next(model.parameters()).device
    batch = keyed(ALL_FEATURES, {name: [[i] for i in ids] for name, ids in bags.items()}).to(device)
    return loss_of({"mc": model.module.mc(batch)[0].wait()})


def answers(model: nn.Module, table: str, ids: Sequence[int]) -> NDArray[np.float32]:
    """The oracle: what the model answers for each id, float32 ``[n, dim]``; all ranks ask for the same."""
    feature = FEATURES[table][0]
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.no_grad():
        bags = {name: [[i] for i in ids] for name in ALL_FEATURES}
        found = model.module.mc(keyed(ALL_FEATURES, bags).to(device))[0].wait()
    model.train(training)
    return found[feature].cpu().numpy()


def murmur(x: int) -> int:
    """FBGEMM's hash of an id: MurmurHash3 of the two words ``x`` and 0, its halves combined by xor."""

    def rotated(value: int, by: int) -> int:
        return (value << by | value >> (64 - by)) & MASK

    def mixed(h: int) -> int:
        h ^= h >> 33
        h = h * 0xFF51AFD7ED558CCD & MASK
        h ^= h >> 33
        h = h * 0xC4CEB9FE1A85EC53 & MASK
        return h ^ h >> 33

    k = rotated((x & MASK) * 0x87C37B91114253D5 & MASK, 31) * 0x4CF5AD432745937F & MASK
    h1 = (rotated(k, 27) * 5 + 0x52DCE729) & MASK
    h2 = ((rotated(0, 31) + h1) * 5 + 0x38495AB5) & MASK
    h1 ^= 16
    h2 ^= 16
    h1 = (h1 + h2) & MASK
    h2 = (h2 + h1) & MASK
    h1, h2 = mixed(h1), mixed(h2)
    h1 = (h1 + h2) & MASK
    return h1 ^ (h2 + h1) & MASK


def window(mcm: HashZchManagedCollisionModule, one: int) -> list[int]:
    """The local slots that a lookup of one of this rank's ids probes, in order."""
    bucket = one // -(-HASH_SIZE // BUCKETS)
    assert mcm._start_bucket <= bucket < mcm._end_bucket, "TorchRec sent an id to another rank"
    first = (bucket - mcm._start_bucket) * (ROWS // BUCKETS)
    size = ROWS // BUCKETS - max(0, mcm.get_reserved_slots_per_bucket())
    return [first + (murmur(one) + step) % size for step in range(mcm.max_probe)]
