"""Runs that dump, save checkpoints and end; and the runs that go on from them, drawn by hypothesis."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from hypothesis import strategies as st
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests.support import models
from tests.support.recstore_schedules import RecTable, collection
from tests.support.rounding import STORAGE_DTYPES, rounded
from torchrec_ext.checkpoint import reshard_zch
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.recstore import RecStoreEmbeddingBagCollectionSharder
from torchrec_ext.store import Uniform
from torchrec_ext.zch import ZchEmbeddingBagCollectionSharder

REC = (
    RecTable("t0", ("a",), rows=11),
    RecTable("t1", ("d",), rows=30, dynamic={"initializer": Uniform(-1, 1), "evict_after": 1}),
)
ZCH = models.one_table(rows=12, dim=4, hash_size=60, policy="lru", eviction_interval=1)
MODEL = SimpleNamespace(
    modules={"rec": REC, "mc": ZCH.modules["mc"]},
    features=["a", "d", *ZCH.features],
)
TABLES = ("mc.t0", "rec.t0", "rec.t1")
IDS = [*range(-2, 62), 1000, 2**62, -(2**63), 2**63 - 1]
"""All ids that are trained, and some that never are."""


@dataclass(frozen=True)
class Step:
    """One training step; ids are drawn per rank from ``seed``."""

    seed: int
    dump: bool
    save: bool
    save_first: bool = False


@dataclass(frozen=True)
class Life:
    """One run, from its start to its end.

    Attributes:
        world_size: its ranks.
        steps: what it trains.
        back: how many of the checkpoints that there are it passes over, from the last on.
        with_state: whether it loads the dumper's state as well.
        probes: whether it dumps before it trains.
        closes: whether it ends by closing the dumper; else by an exception.
        storage_dtype: how its dumper stores vectors.
    """

    world_size: int
    steps: tuple[Step, ...]
    back: int = 0
    with_state: bool = True
    probes: bool = True
    closes: bool = False
    storage_dtype: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is complete."""

    path: str
    step: int
    world_size: int


@dataclass
class Told:
    """What a rank tells of its life."""

    saved: list[Checkpoint] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


@st.composite
def lives(draw: st.DrawFn) -> tuple[Life, ...]:
    """Several runs, one after another."""
    steps = st.lists(
        st.builds(
            Step,
            seed=st.integers(0, 2**32 - 1),
            dump=st.sampled_from([True, False, False]),
            save=st.sampled_from([True, False, False]),
            save_first=st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ).map(tuple)
    life = st.builds(
        Life,
        world_size=st.sampled_from([1, 2, 3]),
        steps=steps,
        back=st.sampled_from([0, 0, 1, 2]),
        with_state=st.sampled_from([True, True, False]),
        probes=st.booleans(),
        closes=st.booleans(),
        storage_dtype=st.sampled_from([None, *STORAGE_DTYPES]),
    )
    return tuple(draw(st.lists(life, min_size=2, max_size=4)))


class Model(nn.Module):
    """A ZCH table, a dense and a dynamic RecStore table, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.rec = collection(REC, device="meta")
        self.mc = models.build_unsharded(ZCH).mc

    def forward(self, features: Any) -> dict[str, Any]:
        return {"rec": self.rec(features).wait(), "mc": self.mc(features)[0].wait()}


def build(seed: int) -> DistributedModelParallel:
    """The model, sharded over all ranks."""
    torch.manual_seed(seed)
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.5}
    return DistributedModelParallel(
        Model(),
        device=torch.device("cpu"),
        sharders=[
            RecStoreEmbeddingBagCollectionSharder(fused),
            ZchEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder(fused)),
        ],
    )


def train(model: nn.Module, seed: int, first: bool) -> None:
    """One step. Which ids are popular depends on the seed, so that rows change hands."""
    rng = np.random.default_rng([seed, dist.get_rank()])
    everyone = np.random.default_rng(seed)
    bags = {"a": [rng.integers(0, 11, 2).tolist()], "f0": [(7 * rng.integers(0, 9, 3)).tolist()]}
    start = int(everyone.integers(0, 55))
    bags["d"] = [(start + rng.integers(0, 4, 3)).tolist()]
    bags["f0"][0] += [start, start + 1]
    if first:  # a ZCH shard that sees no id in its first batch never admits any
        bags["f0"][0] += list(range(0, 60, 7))
    models.loss_of(model(models.keyed(MODEL.features, bags))).backward()


def contents(model: nn.Module, *, dumper: DeltaDumper | None = None) -> dict[str, Any]:
    """What a checkpoint holds."""
    more = {} if dumper is None else {"dumper": dumper}
    return {"model": model, "optimizer": model.fused_optimizer, **more}


def restore(model: nn.Module, checkpoint: Checkpoint, dumper: DeltaDumper | None) -> None:
    """Loads a checkpoint, whatever its world size."""
    state = contents(model, dumper=dumper)
    if checkpoint.world_size == dist.get_world_size():
        dcp.load(state, checkpoint_id=checkpoint.path)
    else:
        reshard_zch(state, checkpoint.path)


class Run:
    """One rank's part of a life."""

    def __init__(self, directory: str, number: int, life: Life) -> None:
        logging.getLogger("torchrec_ext").setLevel(logging.ERROR)
        self.log = Path(directory) / "deltas"
        self._directory = Path(directory)
        self._number, self._life = number, life
        self._told = Told()
        self.model = build(number)
        self._step = 0

    def play(self, checkpoint: Checkpoint | None, tell: Callable[..., None]) -> Told:
        """Lives it to its end, comparing log and model whenever both show the same step."""
        before = DeltaLog(self.log).dumps() if self.log.exists() else []
        dist.barrier()
        stored = self._life.storage_dtype
        self.dumper = DeltaDumper(self.model, self.log, interval_steps=10**9, storage_dtype=stored)
        try:
            if checkpoint is not None:
                self._resume(checkpoint, before)
            tell("began", self._step)
            for index, step in enumerate(self._life.steps):
                self._step += 1
                train(self.model, step.seed, first=index == 0)
                if step.save and step.save_first:
                    self._save(tell)
                if step.dump:
                    self.dumper.dump(self._step)
                    self.dumper.flush()
                    self._told.counts["dumps"] += 1
                    self.compare()
                self.dumper.step(self._step)
                if step.save and not step.save_first:
                    self._save(tell)
                tell("step", self._step)
            if self._life.closes:
                self.dumper.close()
                if self._life.steps:
                    self.compare()
        finally:
            self.dumper.__exit__(KeyboardInterrupt, None, None)
        return self._told

    def _resume(self, checkpoint: Checkpoint, before: Sequence[Any]) -> None:
        counts = self._told.counts
        restore(self.model, checkpoint, self.dumper if self._life.with_state else None)
        self._step = checkpoint.step
        result = self.dumper.resume(checkpoint.step)
        stands = [place for place, dump in enumerate(before) if dump.step <= checkpoint.step]
        ahead = [dump.dump for dump in before[stands[-1] + 1 if stands else 0 :]]
        if ahead:
            assert result is not None
        log = DeltaLog(self.log)
        dumps = log.dumps()
        if result is None:
            assert dumps == before
            counts["not ahead"] += 1
        else:
            counts["ahead"] += 1
            counts["superseded"] += len(ahead)
            superseded = dumps[-1].supersedes
            assert set(ahead) <= set(superseded)
            assert not set(superseded) & {dump.dump for dump in dumps}
            assert dumps[:-1] == before[: len(before) - len(superseded)]
            self._check_said_again(log)
            self.compare()
        counts["with state" if self._life.with_state else "without state"] += 1
        if self._life.probes:
            self._check_nothing_is_said_twice(before if result is None else dumps)
            self.compare()

    def _check_said_again(self, log: DeltaLog) -> None:
        """Whoever took in all dumps one after another is as right as who leaves the superseded out."""
        latest: dict[tuple[str, int], tuple[str, list[float] | None]] = {}
        for dump in log.dumps(superseded=True):
            for row in log.read(dump.step, dump.generation).to_pylist():
                latest[row["table_fqn"], row["key_id"]] = row["op"], row["embedding"]
        states = log.replay()
        for fqn, state in states.items():
            held = {key: row[1] for (name, key), row in latest.items() if name == fqn and row[0] == "upsert"}
            assert sorted(held) == state.keys.tolist(), fqn
            for key, vector in held.items():
                assert np.array_equal(state.lookup([key])[0], np.array(vector, np.float32)), (fqn, key)

    def _check_nothing_is_said_twice(self, dumps: Sequence[Any]) -> None:
        """The next dump says what is not in the log as it is in the model, and nothing else."""
        states = DeltaLog(self.log).replay() if dumps else {}
        is_exact = self._kinds() == {"float32"}
        self._step += 1
        self.dumper.dump(self._step)
        self.dumper.flush()
        log = DeltaLog(self.log)
        for row in log.read(self._step, self.dumper.generation).to_pylist():
            self._told.counts["rows after a restart"] += 1
            state = states.get(row["table_fqn"])
            if state is None:
                continue
            held = row["key_id"] in state.keys
            if row["op"] == "delete":
                assert held, row
            elif is_exact:  # what changed may be the same after rounding
                vector = np.array(row["embedding"], np.float32)
                assert not held or not np.array_equal(state.lookup([row["key_id"]])[0], vector), row
        dist.barrier()

    def _kinds(self) -> set[str]:
        """The ways in which vectors of the log are stored."""
        return {info.storage_dtype for dump in DeltaLog(self.log).dumps() for info in dump.tables.values()}

    def _save(self, tell: Callable[..., None]) -> None:
        path = str(self._directory / f"checkpoint_{self._number}_{self._step}")
        dcp.save(contents(self.model, dumper=self.dumper), checkpoint_id=path)
        self._told.saved.append(Checkpoint(path, self._step, dist.get_world_size()))
        tell("saved", self._told.saved[-1])

    def compare(self) -> None:
        """Compares what the log replays with what the model answers, bit for bit.

        A vector is rounded as by the run that wrote it last, which may be any; the fallback rows as by the
        last.
        """
        states = DeltaLog(self.log).replay()
        for fqn in TABLES:
            module, table = fqn.split(".")
            ids = list(range(11)) if fqn == "rec.t0" else IDS
            expected = models.answers(self.model, MODEL, module, table, ids).numpy()
            found = states[fqn].lookup(ids)
            last = states[fqn].info.storage_dtype
            wrong = np.ones(len(ids), np.bool_)
            for kind in self._kinds():
                same = (rounded(expected, kind).view(np.int32) == found.view(np.int32)).all(axis=1)
                wrong &= ~(same & (np.isin(ids, states[fqn].keys) | (kind == last)))
            assert not wrong.any(), (
                f"life {self._number}, step {self._step}: {fqn}: {wrong.sum()} of {len(ids)} answers differ, "
                f"ids {[i for i, w in zip(ids, wrong, strict=True) if w][:10]}"
            )
            self._told.counts["compared"] += len(ids)
        dist.barrier()


def live(directory: str, number: int, life: Life, checkpoint: Checkpoint | None) -> Told:
    """One rank's part of a life."""
    return Run(directory, number, life).play(checkpoint, lambda *message: None)


def live_until_killed(
    tell: Callable[..., None], directory: str, number: int, life: Life, checkpoint: Checkpoint | None
) -> None:
    """The same, for ``MortalRanks``."""
    Run(directory, number, life).play(checkpoint, tell)
    tell("ended")
