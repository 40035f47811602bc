"""Schedules over RecStore modules, drawn by hypothesis and checked against the model itself."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from tests.support.bits import assert_same_answers
from tests.support.models import keyed
from tests.support.schedules import Step
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.errors import TableFullError
from torchrec_ext.recstore import (
    RecStoreEmbeddingBagCollection,
    SparseAdagrad,
    SparseAdam,
    SparseRowWiseAdagrad,
    SparseSGD,
)
from torchrec_ext.store import CounterFilter, FileStore, LocalStore, MemoryStore, Uniform

INT64_MAX = 2**63 - 1
STRANGE_IDS = (INT64_MAX, INT64_MAX - 1, -(2**63), -1, 2**62, 0)
OPTIMIZERS = {
    "sgd": SparseSGD,
    "adagrad": SparseAdagrad,
    "rowwise_adagrad": SparseRowWiseAdagrad,
    "adam": SparseAdam,
}

KINDS = {
    "train": "forward, backward, step in train mode",
    "prefetched": "the same, with rows that were read before the last step",
    "no_grad": "a lookup under no_grad: moves nothing",
    "eval_backward": "eval mode with a backward and a step: trains, admits nothing",
    "async": "updates handed to the store, which may still be under way at a dump",
    "write": "rows written through the store, keys of dynamic tables admitted by it",
    "by_hand": "rows written to the weights themselves, and told to the store or to the dumper",
    "evict": "keys of dynamic tables that were not used for a while lose their rows",
    "save": "the state is taken",
    "load": "the state that was taken is put back",
    "optimizer": "another kind of optimizer",
    "restart": "a new dumper on the same directory, and a model whose rows are others",
}


@dataclass(frozen=True)
class RecTable:
    """One RecStore table; ``dynamic``: options of its ``DynamicTable``."""

    name: str
    features: tuple[str, ...]
    rows: int = 8
    dim: int = 4
    pooling: str = "SUM"
    dynamic: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Schedule:
    """A collection and what is done with it."""

    tables: tuple[RecTable, ...]
    steps: tuple[Step, ...]
    optimizer: str = "sgd"
    fusion: bool = False
    in_a_file: bool = False
    first_dump: str = "full"
    max_pending_bytes: int | None = None

    @property
    def features(self) -> list[str]:
        """All features, each once."""
        return list(dict.fromkeys(f for table in self.tables for f in table.features))


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random collections and schedules."""
    tables = []
    for index in range(draw(st.integers(1, 3))):
        features = [f"f{index}", *draw(st.sampled_from([[], [f"g{index}"], ["shared"]]))]
        dynamic = {
            "initializer": Uniform(-1.0, 1.0, seed=index),
            "filter": CounterFilter(draw(st.sampled_from([1, 1, 2, 3]))),
            "evict_after": draw(st.sampled_from([1, 2, 3])),
            "default_value": draw(st.sampled_from([0.0, -0.0, 0.25])),
        }
        tables.append(
            RecTable(
                f"t{index}",
                tuple(features),
                rows=draw(st.sampled_from([4, 8, 20])),
                dim=draw(st.sampled_from([4, 8])),
                pooling=draw(st.sampled_from(["SUM", "MEAN"])),
                dynamic=dynamic if draw(st.sampled_from([True, True, False])) else None,
            )
        )
    dump_one_in = draw(st.sampled_from([1, 4, 10]))
    steps = draw(
        st.lists(
            st.builds(
                Step,
                kind=st.sampled_from(["train"] * 6 + list(KINDS)),
                dump=st.integers(1, dump_one_in).map(lambda n: n == 1),
                seed=st.integers(0, 2**32 - 1),
            ),
            min_size=10,
            max_size=30,
        )
    )
    return Schedule(
        tuple(tables),
        tuple(steps),
        optimizer=draw(st.sampled_from(list(OPTIMIZERS))),
        fusion=draw(st.booleans()),
        in_a_file=draw(st.booleans()),
        max_pending_bytes=draw(st.sampled_from([None, None, 1])),
    )


def churn() -> Schedule:
    """Few rows that many ids fight for, and each kind of step: each event that must be seen happens in it."""
    dynamic = {"initializer": Uniform(-1.0, 1.0), "evict_after": 1, "default_value": 0.25}
    tables = (RecTable("t0", ("f0",), rows=8, dynamic=dynamic), RecTable("t1", ("f1",), pooling="MEAN"))
    kinds = [*["train"] * 40, *KINDS, *["train", "evict"] * 10]
    return Schedule(tables, tuple(Step(kind, number % 6 == 5, number) for number, kind in enumerate(kinds)))


def collection(
    tables: Sequence[RecTable], *, fusion: bool = False, **options: Any
) -> RecStoreEmbeddingBagCollection:
    """A collection of these tables."""
    return RecStoreEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=table.name,
                embedding_dim=table.dim,
                num_embeddings=table.rows,
                feature_names=list(table.features),
                pooling=PoolingType[table.pooling],
            )
            for table in tables
        ],
        dynamic={table.name: table.dynamic for table in tables if table.dynamic is not None},
        enable_fusion=fusion,
        **options,
    )


def own_answers(
    module: nn.Module, tables: Sequence[RecTable], table: str, ids: Sequence[int]
) -> torch.Tensor:
    """The oracle: what a collection answers for each id as a bag of its own, float32 ``[n, dim]``."""
    feature = next(t.features[0] for t in tables if t.name == table)  # no other table's
    features = list(dict.fromkeys(f for t in tables for f in t.features))
    training = module.training
    module.eval()
    with torch.no_grad():
        output = module(keyed(features, {feature: [[i] for i in ids]}))
    module.train(training)
    return output[feature]


class Run:
    """One process's run of a schedule: a collection under training, with a dumper attached."""

    def __init__(self, schedule: Schedule, directory: Path) -> None:
        self.schedule = schedule
        self.counts: Counter[str] = Counter()
        self._directory = directory
        self._log = directory / "deltas"
        self._number = 0
        self._models = 0
        self._seen: set[int] = set()
        self._observers: dict[str, KeyObserver] = {}
        self._make_model(schedule.optimizer)

    def play(self) -> Counter[str]:
        """Runs the schedule, comparing log and model after each dump."""
        with contextlib.ExitStack() as stack:
            stack.callback(lambda: self.dumper.__exit__(KeyboardInterrupt, None, None))
            self.dumper = self._attach(self.schedule.first_dump)
            for number, step in enumerate(self.schedule.steps, 1):
                self._number = 2 * number
                self._rng = np.random.default_rng(step.seed)
                try:
                    getattr(self, f"_{step.kind}")()
                except TableFullError:
                    self.counts["full tables"] += 1
                self._look()
                self.dumper.step(self._number)
                if step.dump:
                    self.dumper.dump(self._number)
                    self.dumper.flush()
                    self._compare()
            self.dumper.close()
            self._compare()
        return self.counts

    # Steps

    def _train(self) -> None:
        self._loss(self._batch()).backward()
        self.optimizer.step()

    def _prefetched(self) -> None:
        batch = self._batch()
        handle = self.ebc.issue_fused_prefetch(batch)
        self._train()
        self.ebc.set_fused_prefetch_handle(handle)
        self._loss(batch).backward()
        self.optimizer.step()

    def _no_grad(self) -> None:
        with torch.no_grad():
            self.ebc(self._batch())

    def _eval_backward(self) -> None:
        self.ebc.eval()
        self._train()
        self.ebc.train()

    def _async(self) -> None:
        for table in self.schedule.tables:
            for _ in range(3):
                keys = torch.tensor(self._ids(table, 4), dtype=torch.int64)
                self.store.update_async(table.name, keys, self._rows(len(keys), table.dim), step=self._number)

    def _write(self) -> None:
        for table in self.schedule.tables:
            keys = torch.tensor(self._ids(table, 4), dtype=torch.int64).unique()
            rows = self._rows(len(keys), table.dim)
            rows[rows < 0] = -0.0
            self.store.write(table.name, keys, rows)

    def _by_hand(self) -> None:
        for table in self.schedule.tables:
            if table.dynamic is None:
                rows = torch.tensor(self._ids(table, 2), dtype=torch.int64)
                self.ebc.embedding_bags[table.name].weight.data[rows] = self._rows(len(rows), table.dim)
                if self._rng.random() < 0.5:
                    self.store.touch(table.name, rows)
                else:
                    self.dumper.mark(f"ebc.{table.name}", rows)
            else:
                self.dumper.mark(f"ebc.{table.name}", torch.tensor(self._ids(table, 4)))

    def _evict(self) -> None:
        for table in self.schedule.tables:
            if table.dynamic is not None:
                self.counts["evictions by hand"] += self.store.evict_unused(table.name, 1)

    def _save(self) -> None:
        self._saved = {name: tensor.clone() for name, tensor in self.ebc.state_dict().items()}

    def _load(self) -> None:
        if self._saved is not None:
            self.ebc.load_state_dict(self._saved)
            self.counts["loads"] += 1

    def _optimizer(self) -> None:
        self._use_optimizer(str(self._rng.choice(list(OPTIMIZERS))))

    def _restart(self) -> None:
        self.dumper.close()
        # Where there is a log already, the first dump is full, whatever is asked for.
        begun = bool(DeltaLog(self._log).dumps())
        if begun:
            self._compare()
        self._make_model(self.schedule.optimizer)
        self.dumper = self._attach(str(self._rng.choice(["full", "delta"])) if begun else "full")
        self.dumper.dump(self._number - 1)
        self.dumper.flush()
        self._look()
        self._compare()
        self.counts["restarts"] += 1

    # The pieces of a step

    def _make_model(self, optimizer: str) -> None:
        self._models += 1
        in_a_file = self.schedule.in_a_file
        self.store: LocalStore = (
            FileStore(self._directory / f"store_{self._models}") if in_a_file else MemoryStore()
        )
        torch.manual_seed(self._models)
        self.ebc = collection(self.schedule.tables, fusion=self.schedule.fusion, store=self.store)
        self.model = nn.ModuleDict({"ebc": self.ebc})
        self._use_optimizer(optimizer)
        self._observers = {
            table.name: KeyObserver(self.store, table.name)
            for table in self.schedule.tables
            if table.dynamic is not None
        }

    def _use_optimizer(self, name: str) -> None:
        self.optimizer = OPTIMIZERS[name]([self.ebc], lr=0.5)
        self._saved: dict[str, torch.Tensor] | None = None  # what was saved holds another one's state

    def _attach(self, first_dump: str) -> DeltaDumper:
        return DeltaDumper(
            self.model,
            self._log,
            interval_steps=10**9,
            first_dump=first_dump,  # type: ignore[arg-type]
            max_pending_bytes=self.schedule.max_pending_bytes,
        )

    def _batch(self) -> KeyedJaggedTensor:
        bags: dict[str, list[list[int]]] = {}
        for feature in self.schedule.features:
            tables = [table for table in self.schedule.tables if feature in table.features]
            # Of two tables that share a feature, the dense and the smaller one says which ids there are.
            table = min(tables, key=lambda t: (t.dynamic is not None, t.rows))
            bags[feature] = [self._ids(table, int(self._rng.integers(0, 4))) for _ in range(2)]
        return keyed(self.schedule.features, bags)

    def _ids(self, table: RecTable, count: int) -> list[int]:
        if table.dynamic is None:
            return self._rng.integers(0, table.rows, count).tolist()
        # Which ids are popular changes to and fro: what was admitted gets evicted, and comes back.
        start = table.rows * int(self._rng.integers(0, 3))
        ids = start + self._rng.integers(0, table.rows, count)
        if not self.schedule.fusion:
            strange = self._rng.random(count) < 0.2
            ids[strange] = self._rng.choice(np.array(STRANGE_IDS, np.int64), strange.sum())
        self._seen.update(ids.tolist())
        return ids.tolist()

    def _rows(self, count: int, dim: int) -> torch.Tensor:
        return torch.from_numpy(self._rng.standard_normal((count, dim), np.float32))

    def _loss(self, batch: KeyedJaggedTensor) -> torch.Tensor:
        values = self.ebc(batch).values()
        return (values * torch.linspace(0.5, 1.5, values.shape[1])).sum() + 0.1 * (values * values).sum()

    # Looking

    def _look(self) -> None:
        for observer in self._observers.values():
            observer.look(self.counts)

    def _compare(self) -> None:
        state = DeltaLog(self._log).replay()
        for table in self.schedule.tables:
            ids = list(range(table.rows)) if table.dynamic is None else self._askable()
            expected = own_answers(self.ebc, self.schedule.tables, table.name, ids).numpy()
            replayed = state[f"ebc.{table.name}"].lookup(ids)
            assert_same_answers(replayed, expected, ids, f"step {self._number}, {table}")
            self.counts["compared"] += len(ids)
            if table.dynamic is not None:
                owned = set(state[f"ebc.{table.name}"].keys.tolist())
                assert owned == set(self._observers[table.name].bound)
        self.counts["dumps"] = self.counts["dumps"] + 1
        for observer in self._observers.values():
            observer.interval_ends()

    def _askable(self) -> list[int]:
        never_seen = (10**6, 10**7 + 1) if self.schedule.fusion else (10**6, -(10**6), 5 * 2**59)
        return sorted({*range(24), *self._seen, *never_seen})


class KeyObserver:
    """Counts what happens to a dynamic table's keys, by looking at them after each step."""

    def __init__(self, store: LocalStore, table: str) -> None:
        self._store, self._table = store, table
        self.bound: dict[int, int] = {}
        self._last_row: dict[int, int] = {}
        self._evicted_now: set[int] = set()

    def look(self, counts: Counter[str]) -> None:
        """Takes note of what changed since the last look."""
        before, self.bound = self.bound, dict(self._pairs())
        for key in set(before) - set(self.bound):
            counts["evictions"] += 1
            self._last_row[key] = before[key]
            self._evicted_now.add(key)
        for key in set(self.bound) - set(before):
            counts["admissions"] += 1
            last = self._last_row.get(key)
            counts["re-admissions"] += last is not None
            counts["same-row re-admissions"] += last == self.bound[key]
            counts["re-admissions within an interval"] += key in self._evicted_now

    def interval_ends(self) -> None:
        """Takes note of a dump."""
        self._evicted_now.clear()

    def _pairs(self) -> Iterator[tuple[int, int]]:
        self._store.drain()
        keys = self._store.group_of(self._table).keys[self._table]
        rows = keys.rows_in_use()
        return zip(keys.keys_of(rows).tolist(), rows.tolist(), strict=True)
