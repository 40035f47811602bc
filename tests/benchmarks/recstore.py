"""A step of ``RecStoreEmbeddingBagCollection`` against TorchRec's fused ``EmbeddingBagCollection``."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.results import Measurement, Result
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    RecStoreEmbeddingBagCollectionSharder,
    SparseRowWiseAdagrad,
    SparseSGD,
)

TABLES = 26
ROWS = 100_000
DIM = 64
BATCH = 2048
ZIPF = 1.0
BATCHES = 8  # the rows of one are out of the caches when it comes round again
LEARNING_RATE = 0.01
OPTIMIZERS: dict[str, tuple[EmbOptimType, Any]] = {
    "SGD": (EmbOptimType.EXACT_SGD, SparseSGD),
    "row-wise Adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, SparseRowWiseAdagrad),
}
THEIRS, OURS, OPERATORS, ALONE = "TorchRec", "sharded", "sharded, without numba", "alone"
CPU = torch.device("cpu")
FEATURES = [f"f{number}" for number in range(TABLES)]

Step = Callable[[KeyedJaggedTensor], None]


def run(quick: bool) -> Result:
    """Compares equal embeddings, by optimizer, bag size and number of threads."""
    warm_up, rounds = (1, 3) if quick else (5, 40)
    most = torch.get_num_threads()
    grad = torch.randn(BATCH, TABLES * DIM)
    measurements = []
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        try:
            for optimizer in OPTIMIZERS:
                steps = _steps(optimizer, grad)
                for threads, case in product(sorted({1, most}), CASES):
                    torch.set_num_threads(threads)
                    seconds = _compare(steps, case, warm_up, rounds)
                    prefix = f"{optimizer}, {case}, {threads} thread{'s'[: threads - 1]}"
                    measurements += _measurements(prefix, seconds)
        finally:
            torch.set_num_threads(most)
            dist.destroy_process_group()
    return Result(
        name="recstore",
        title="a step of RecStoreEmbeddingBagCollection and of TorchRec's fused EmbeddingBagCollection",
        measurements=tuple(measurements),
        settings={"tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "zipf exponent": ZIPF},
        notes=(
            "a step: forward, backward and update; the gradient tensor is made once",
            "TorchRec and sharded: under DistributedModelParallel, one rank, gloo, updated in the backward "
            "pass; TorchRec table-wise, which is its fastest on one rank",
            "alone: the collection itself with a Sparse optimizer",
        ),
    )


@dataclass(frozen=True)
class Case:
    """What the bags hold: ``ids`` each, or as many on average."""

    ids: int
    varying: bool

    def __str__(self) -> str:
        return f"{self.ids} id{'s'[: self.ids - 1]} per bag{' on average' if self.varying else ''}"

    def batches(self) -> list[KeyedJaggedTensor]:
        """Ids that are popular like words are; an id's value says nothing of its popularity."""
        popularity = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -ZIPF)
        popularity /= popularity[-1]
        generator = np.random.default_rng(0)
        found = []
        for _ in range(BATCHES):
            bags = TABLES * BATCH
            lengths = np.full(bags, self.ids)
            if self.varying:
                lengths = generator.integers(0, 2 * self.ids, bags, endpoint=True)
            place = np.searchsorted(popularity, generator.random(int(lengths.sum())))
            ids = place * 48_271 % ROWS  # no divisor in common: no two places get the same id
            found.append(
                KeyedJaggedTensor(FEATURES, torch.from_numpy(ids), lengths=torch.from_numpy(lengths))
            )
        return found


CASES = [Case(ids, varying) for ids in (1, 10) for varying in (False, True)]


def _compare(steps: dict[str, Step], case: Case, warm_up: int, rounds: int) -> dict[str, list[float]]:
    order = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for batch in islice(cycle(case.batches()), warm_up + rounds):
        for name in order.sample(list(steps), len(steps)):
            # A new one: it keeps what was derived from its lengths.
            own = KeyedJaggedTensor(FEATURES, batch.values(), lengths=batch.lengths())
            began = time.perf_counter()
            steps[name](own)
            seconds[name].append(time.perf_counter() - began)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def _measurements(prefix: str, seconds: dict[str, list[float]]) -> list[Measurement]:
    ms = {name: [1e3 * second for second in taken] for name, taken in seconds.items()}
    found = [Measurement(f"{prefix}: {name}", "ms", tuple(ms[name])) for name in (THEIRS, OURS)]
    for ours in (OURS, OPERATORS, ALONE):
        found.append(Measurement.ratio(f"{prefix}: {ours} / {THEIRS}", ms[ours], ms[THEIRS]))
    return found


def _steps(optimizer: str, grad: torch.Tensor) -> dict[str, Step]:
    fused, sparse = OPTIMIZERS[optimizer]
    sharded = _sharded(fused)
    return {
        THEIRS: _step(_torchrec(fused), grad),
        OURS: _step(sharded, grad),
        OPERATORS: _step(sharded, grad, numba="0"),
        ALONE: _step(collection := _collection(), grad, sparse([collection], lr=LEARNING_RATE)),
    }


def _step(model: nn.Module, grad: torch.Tensor, optimizer: Any = None, numba: str = "1") -> Step:
    def step(batch: KeyedJaggedTensor) -> None:
        os.environ["TORCHREC_EXT_NUMBA"] = numba
        model(batch).values().backward(grad)
        if optimizer is not None:
            optimizer.step()

    return step


def _configs() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name=f"t{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{f}"])
        for f in range(TABLES)
    ]


def _collection() -> RecStoreEmbeddingBagCollection:
    return RecStoreEmbeddingBagCollection(tables=_configs())


def _sharded(optimizer: EmbOptimType) -> nn.Module:
    sharder = RecStoreEmbeddingBagCollectionSharder(
        fused_params={"optimizer": optimizer, "learning_rate": LEARNING_RATE}
    )
    module = RecStoreEmbeddingBagCollection(tables=_configs(), device="meta")
    return DistributedModelParallel(nn.Sequential(module), device=CPU, sharders=[sharder])


def _torchrec(optimizer: EmbOptimType) -> nn.Module:
    module = EmbeddingBagCollection(tables=_configs(), device=torch.device("meta"))
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": optimizer, "learning_rate": LEARNING_RATE}
    )
    plan = construct_module_sharding_plan(
        module,
        {f"t{f}": table_wise(rank=0, compute_kernel="fused") for f in range(TABLES)},
        sharder=sharder,
        world_size=1,
        local_size=1,
        device_type="cpu",
    )
    return DistributedModelParallel(
        nn.Sequential(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=CPU,
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
    )
