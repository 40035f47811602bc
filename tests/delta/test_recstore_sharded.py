"""The delta dumper follows RecStore tables that are sharded, beside ZCH tables in one model."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.support import models
from tests.support.bits import assert_same_answers
from tests.support.recstore_schedules import (
    INT64_MAX,
    OPTIMIZERS,
    STRANGE_IDS,
    KeyObserver,
    RecTable,
    collection,
)
from tests.support.schedules import gather_ids, shared_directory
from tests.support.seen import must_see
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.recstore.sharding.sharder import RecStoreEmbeddingBagCollectionSharder
from torchrec_ext.store import FileStore, SharedMemoryStore, Uniform
from torchrec_ext.zch import ZchEmbeddingBagCollectionSharder

WINDOW = 3
TABLES = (
    RecTable("t0", ("a", "b"), rows=11),
    RecTable("t1", ("c",), rows=7, dim=8, pooling="MEAN"),
    RecTable("t2", ("d", "shared"), rows=24, dynamic={"initializer": Uniform(-1, 1), "evict_after": 1}),
    RecTable(
        "t3",
        ("e",),
        rows=24,
        pooling="MEAN",
        dynamic={"initializer": Uniform(-1, 1), "evict_after": 1, "default_value": 0.25},
    ),
)
ZCH = models.one_table(rows=12, dim=4, hash_size=60, policy="lru", eviction_interval=1, optimizer="adagrad")
MODEL = SimpleNamespace(
    modules={"rec": TABLES, "mc": ZCH.modules["mc"]},
    features=[*ZCH.features, *(f for table in TABLES for f in table.features)],
)
FUSED = {
    "sgd": EmbOptimType.EXACT_SGD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
KINDS = ["train"] * 12 + ["no_grad", "eval_backward", "write", "async", "evict", "save", "restore", "mark"]
MUST_SEE = ("admissions", "evictions", "re-admissions", "re-admissions within an interval", "rows restored")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rec = collection(TABLES, device="meta")
        self.mc = models.build_unsharded(ZCH).mc

    def forward(self, features: Any) -> dict[str, Any]:
        return {"rec": self.rec(features).wait(), "mc": self.mc(features)[0].wait()}


class Run:
    """One rank's run: a model with RecStore and ZCH tables under training, with a dumper attached."""

    def __init__(self, directory: str, seed: int, optimizer: str, fused: bool, where: str) -> None:
        self.directory = Path(directory)
        self.seed, self.where, self.number = seed, where, 0
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.counts: Counter[str] = Counter()
        torch.manual_seed(seed)
        self.model = DistributedModelParallel(
            Model(),
            device=torch.device("cpu"),
            sharders=[
                RecStoreEmbeddingBagCollectionSharder(
                    {"optimizer": FUSED[optimizer], "learning_rate": 0.5} if fused else None,
                    store=self._place(),
                ),
                ZchEmbeddingBagCollectionSharder(
                    EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD})
                ),
            ],
        )
        self.rec = self.model.module.rec
        self.store = self.rec.store
        self.optimizer = None if fused else OPTIMIZERS[optimizer]([self.rec], lr=0.5)
        self.observers = [KeyObserver(self.store, table.name) for table in TABLES if table.dynamic]
        self.seen: set[int] = {*range(-3, 61), *STRANGE_IDS, 10**6}
        self.saved: Any = None

    def _place(self) -> Any:
        if self.where == "shared memory":
            return SharedMemoryStore(f"test.{self.directory.name}")
        if self.where == "files":
            return lambda rank: FileStore(self.directory / f"store_{self.world_size}_{rank}_{uuid.uuid4()}")
        return None

    @property
    def shared(self) -> bool:
        return self.where == "shared memory"

    def play(self, steps: int, **options: Any) -> Counter[str]:
        log = self.directory / "deltas"
        everyone = np.random.default_rng(self.seed)
        with DeltaDumper(self.model, log, interval_steps=10**9, **options) as self.dumper:
            assert sorted(self.dumper.tables) == ["mc.t0", "rec.t0", "rec.t1", "rec.t2", "rec.t3"]
            for self.number in range(1, steps + 1):
                kind = "train" if self.number == 1 else str(everyone.choice(KINDS))
                self.start = WINDOW * int(everyone.integers(0, 12))
                self.rng = np.random.default_rng([self.seed, self.number, self.rank])
                getattr(self, f"_{kind}")()
                for observer in self.observers:
                    observer.look(self.counts)
                self.dumper.step(self.number)
                if everyone.random() < 0.3:
                    self.dumper.dump(self.number)
                    self.dumper.flush()
                    self.compare()
        self.compare()
        return self.counts

    # Steps

    def _train(self) -> None:
        models.loss_of(self.model(self._batch())).backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def _no_grad(self) -> None:
        with torch.no_grad():
            self.model(self._batch())

    def _eval_backward(self) -> None:
        self.model.eval()
        self._train()
        self.model.train()

    def _write(self) -> None:
        for table in TABLES:
            keys = self._own_keys(table).unique()
            rows = self._vectors(len(keys), table.dim)
            rows[rows < 0] = -0.0
            self.store.write(table.name, keys, rows)

    def _async(self) -> None:
        for table in TABLES:
            keys = self._own_keys(table)
            self.store.update_async(table.name, keys, self._vectors(len(keys), table.dim), step=self.number)

    def _evict(self) -> None:
        for table in TABLES:
            if table.dynamic and (not self.shared or self.rank == 0):
                self.store.evict_unused(table.name, 1)

    def _save(self) -> None:
        self.saved = self.store.snapshot()
        dist.barrier()

    def _restore(self) -> None:
        dist.barrier()
        if self.saved is not None and (not self.shared or self.rank == 0):
            self.store.restore(self.saved)
            self.counts["rows restored"] += 1
        dist.barrier()

    def _mark(self) -> None:
        for table in TABLES:
            rows = torch.from_numpy(self.rng.integers(0, table.rows, 3))
            if not table.dynamic and not self.shared:
                weight = self.rec.embedding_bags[table.name].weight
                own = rows[(rows >= self._first(table)) & (rows < self._first(table) + len(weight))]
                weight.data[own - self._first(table)] += 1.0
            self.dumper.mark(f"rec.{table.name}", rows)

    # What a step is made of

    def _first(self, table: RecTable) -> int:
        return -(-table.rows // self.world_size) * self.rank

    def _own_keys(self, table: RecTable) -> torch.Tensor:
        keys = np.array(self._ids(table, 4), np.int64)
        if table.dynamic is not None:
            keys = keys[keys.view(np.uint64) % np.uint64(self.world_size) == self.rank]
        else:
            block = -(-table.rows // self.world_size)
            keys = keys[keys // block == self.rank]
        return torch.from_numpy(keys)

    def _batch(self) -> Any:
        bags = {
            feature: [self._ids(table, int(self.rng.integers(0, 4))) for _ in range(2)]
            for table in TABLES
            for feature in table.features
        }
        start = 3 * int(self.rng.integers(0, 18))
        bags["f0"] = [[start, start + 1], [start + 2]]
        if self.number == 1:  # a ZCH shard that sees no id in its first batch never admits any
            bags["f0"] = [list(range(0, 60, 7)), []]
        self.seen.update(i for feature in bags.values() for bag in feature for i in bag)
        return models.keyed(MODEL.features, bags)

    def _ids(self, table: RecTable, count: int) -> list[int]:
        if table.dynamic is None:
            return self.rng.integers(0, table.rows, count).tolist()
        # So few at a time that no rank's shard is ever full of ids that are in use.
        ids = self.start + self.rng.integers(0, WINDOW, count)
        self.seen.update(ids.tolist())
        return np.where((ids % 11 == 0) & (table.name == "t2"), INT64_MAX, ids).tolist()

    def _vectors(self, count: int, dim: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((count, dim), np.float32))

    def compare(self) -> None:
        state = DeltaLog(self.directory / "deltas").replay()
        seen = gather_ids(self.seen)
        for module, tables in MODEL.modules.items():
            for table in tables:
                dense = module == "rec" and table.dynamic is None
                ids = list(range(table.rows)) if dense else seen
                expected = models.answers(self.model, MODEL, module, table.name, ids).numpy()
                replayed = state[f"{module}.{table.name}"].lookup(ids)
                what = f"step {self.number}, {module}.{table.name}"
                assert_same_answers(replayed, expected, ids, what)
        for observer in self.observers:
            observer.interval_ends()
        dist.barrier()


def _play(seed: int, optimizer: str, fused: bool, where: str) -> Counter[str]:
    with shared_directory() as directory:
        run = Run(directory, seed, optimizer, fused, where)
        try:
            return run.play(40)
        finally:
            if isinstance(run.store, SharedMemoryStore):
                run.store.unlink()


@pytest.mark.parametrize(
    ("where", "optimizer", "fused"),
    [
        ("memory", "sgd", True),
        ("memory", "adagrad", False),
        ("files", "rowwise_adagrad", True),
        ("shared memory", "adam", False),
        ("shared memory", "adagrad", True),
    ],
)
def test_replay_answers_what_a_sharded_model_answers(where: str, optimizer: str, fused: bool) -> None:
    seen: Counter[str] = Counter()
    for counts in run_on(2, _play, 0, optimizer, fused, where):
        seen.update(counts)
    must_see(seen, MUST_SEE)


def _continue(directory: str, seed: int) -> None:
    Run(directory, seed, "adagrad", True, "memory").play(6)


def test_a_log_goes_on_at_another_world_size() -> None:
    directory = tempfile.mkdtemp()
    for generation, world_size in enumerate([2, 3, 1, 2]):
        run_on(world_size, _continue, directory, generation)
    shards = [dump.tables["rec.t2"].num_shards for dump in DeltaLog(f"{directory}/deltas").dumps()]
    assert list(dict.fromkeys(shards)) == [2, 3, 1]
    shutil.rmtree(directory)
