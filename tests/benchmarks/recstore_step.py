"""A step of the store's kernels against a step of TorchRec's fused ``EmbeddingBagCollection``."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.results import Measurement, Result
from torchrec_ext.store import kernels
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.optimizers import SGD, RowWiseAdaGrad, StoreOptimizer
from torchrec_ext.store.places import ProcessMemory

TABLES = 26
ROWS = 100_000
DIM = 64
BATCH = 2048
ZIPF = 1.0
BATCHES = 8  # the rows of one are out of the caches when it comes round again
LEARNING_RATE = 0.01
OPTIMIZERS: dict[str, tuple[EmbOptimType, StoreOptimizer]] = {
    "SGD": (EmbOptimType.EXACT_SGD, SGD()),
    "row-wise Adagrad": (EmbOptimType.EXACT_ROWWISE_ADAGRAD, RowWiseAdaGrad()),
}
TABLE_WISE, ROW_WISE = "TorchRec table-wise", "TorchRec row-wise"
NUMBA, OPERATORS = "kernels", "kernels without numba"
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
        name="recstore_step",
        title="embedding step of the store's kernels and of TorchRec's fused EmbeddingBagCollection",
        measurements=tuple(measurements),
        settings={"tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "zipf exponent": ZIPF},
        notes=(
            "step: forward, backward and update; the gradient tensor is made once",
            "TorchRec: fused kernels under DistributedModelParallel, one rank, gloo",
            "kernels: an autograd function over one flat weight, from the KeyedJaggedTensor on; no "
            "collectives, which are most of what row-wise TorchRec takes longer than table-wise",
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
    found = [Measurement(f"{prefix}: {name}", "ms", tuple(taken)) for name, taken in ms.items()]
    for ours, theirs in ((NUMBA, TABLE_WISE), (NUMBA, ROW_WISE), (OPERATORS, TABLE_WISE)):
        found.append(Measurement.ratio(f"{prefix}: {ours} / {theirs}", ms[ours], ms[theirs]))
    return found


def _steps(optimizer: str, grad: torch.Tensor) -> dict[str, Step]:
    theirs, ours = OPTIMIZERS[optimizer]
    steps: dict[str, Step] = {}
    for name, sharding in ((TABLE_WISE, table_wise), (ROW_WISE, row_wise)):
        steps[name] = _torchrec_step(theirs, sharding, grad)
    for name, numba in ((NUMBA, "1"), (OPERATORS, "0")):
        steps[name] = _kernels_step(ours, numba, grad)
    return steps


def _torchrec_step(optimizer: EmbOptimType, sharding: Any, grad: torch.Tensor) -> Step:
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{f}"])
            for f in range(TABLES)
        ],
        device=torch.device("meta"),
    )
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": optimizer, "learning_rate": LEARNING_RATE}
    )
    placed = {} if sharding is row_wise else {"rank": 0}
    plan = construct_module_sharding_plan(
        module,
        {f"t{f}": sharding(**placed, compute_kernel="fused") for f in range(TABLES)},
        sharder=sharder,
        world_size=1,
        local_size=1,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        nn.Sequential(module),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"0": plan}),
        sharders=[sharder],
    )

    def step(batch: KeyedJaggedTensor) -> None:
        model(batch).values().backward(grad)

    return step


def _kernels_step(optimizer: StoreOptimizer, numba: str, grad: torch.Tensor) -> Step:
    embeddings = Embeddings(optimizer)
    anchor = torch.zeros((), requires_grad=True)

    def step(batch: KeyedJaggedTensor) -> None:
        os.environ["TORCHREC_EXT_NUMBA"] = numba
        _Pooled.apply(anchor, embeddings, batch).backward(grad)

    return step


class Embeddings:
    """All tables one below the other, and their optimizer's state, in memory as a store has it."""

    def __init__(self, optimizer: StoreOptimizer) -> None:
        array = partial(ProcessMemory().array, create=True)
        rows = TABLES * ROWS
        self.weight = array("weight", (rows, DIM), torch.float32).uniform_()
        self.slots = {
            slot.name: array(slot.name, (rows, slot.columns(DIM)), torch.float32).zero_()
            for slot in optimizer.slots
        }
        self.versions = array("versions", (rows,), torch.int64).zero_()
        self.optimizer = optimizer
        self.clock = 0

    def rows(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        """Where the rows of the ids are, feature by feature."""
        rows = torch.empty_like(batch.values())
        counts = batch.length_per_key()
        for table, (ids, found) in enumerate(
            zip(batch.values().split(counts), rows.split(counts), strict=True)
        ):
            torch.add(ids, table * ROWS, out=found)
        return rows

    def update(self, bags: Bags, grad: torch.Tensor) -> None:
        self.clock += 1
        kernels.update_(
            self.weight,
            self.slots,
            self.versions,
            bags,
            grad,
            self.optimizer,
            lr=LEARNING_RATE,
            step=self.clock,
            version=self.clock,
        )


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, embeddings: Embeddings, batch: KeyedJaggedTensor
    ) -> torch.Tensor:
        ctx.embeddings = embeddings
        ctx.bags = kernels.batch_major(embeddings.rows(batch), batch.lengths(), batch.stride())
        return kernels.pool(embeddings.weight, ctx.bags)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        ctx.embeddings.update(ctx.bags, grad)
        return None, None, None
