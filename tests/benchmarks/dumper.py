"""What ``DeltaDumper`` costs training: per step, and while a dump is cut."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.append_and_unique import AppendAndUnique
from tests.benchmarks.results import Measurement, Result
from tests.support.models import Spec, Table, build, loss_of
from torchrec_ext.delta import DeltaDumper, DeltaLog

TABLES = 2
ROWS = 100_000
DIM = 64
BATCH = 2048
IDS_PER_BAG = 4
VOCABULARY = 1_000_000
ZIPF = 0.97
HASH_SIZE = 1 << 40
EVICTION_INTERVAL = 60  # steps; up to 1 % of the rows go to another id each time
STEPS_PER_DUMP = 60  # about 60,000 changed rows
TURN = 5  # steps in a row on one model
NONE, OURS, BASELINE = "no dumper", "ours", "baseline"
VARIANTS = (NONE, OURS, BASELINE)


def run(quick: bool) -> Result:
    """Compares three equal models: without a dumper, with ours, with ``AppendAndUnique``."""
    warm_up, rounds = (2, 3) if quick else (8, 25)
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        try:
            comparison = Comparison(Path(directory))
            for _ in range(warm_up):
                comparison.round()
            measured = [comparison.round() for _ in range(rounds)]
            comparison.close()
        finally:
            dist.destroy_process_group()
    return Result(
        name="dumper",
        title="what DeltaDumper costs training",
        measurements=_measurements(measured),
        settings={
            "ZCH tables": TABLES,
            "rows": ROWS,
            "dim": DIM,
            "batch": BATCH,
            "ids per bag": IDS_PER_BAG,
            "vocabulary": VOCABULARY,
            "zipf exponent": ZIPF,
            "eviction interval": EVICTION_INTERVAL,
            "optimizer": "Adagrad",
            "steps per dump": STEPS_PER_DUMP,
            "torch threads": torch.get_num_threads(),
        },
        notes=(
            "step: forward, backward and fused update of the embeddings alone, nothing dense",
            "baseline: append rows at every lookup, make them unique at the dump, write with pyarrow's "
            "defaults",
            "stall: how long one dump keeps the training thread; steps after a dump: ours is writing it",
            "OMP_NUM_THREADS=1, which torchrun sets for several ranks, makes a busy machine's numbers calmer",
        ),
    )


@dataclass
class Round:
    """The steps up to a dump, the dump, and the steps right after it: seconds and bytes, by variant."""

    steps: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    evictions: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in VARIANTS})
    stall: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    committed: float = 0.0
    rows: int = 0
    size: dict[str, int] = field(default_factory=dict)

    def total(self, variant: str) -> float:
        """The steps up to the dump together."""
        return sum(self.steps[variant]) + sum(self.evictions[variant])


class Comparison:
    """Three equal models that make the same steps in turns."""

    def __init__(self, directory: Path) -> None:
        self._log = directory / "deltas"
        self._file = directory / "baseline.parquet"
        self._models = {name: build(_spec()) for name in VARIANTS}
        # Never due: dumps are asked for, between two steps that are measured.
        self._dumper = DeltaDumper(self._models[OURS], self._log, interval_steps=1 << 40)
        self._baseline = AppendAndUnique(self._models[BASELINE])
        self._batches = _batches()
        self._order = random.Random(0)
        self._step = 0
        # Dumps come halfway between two evictions.
        self._train(Round(), EVICTION_INTERVAL // 2)

    def round(self) -> Round:
        """Trains for a while, dumps, and makes a few steps while ours is written."""
        done = Round()
        self._train(done, STEPS_PER_DUMP - TURN)
        batches = self._take_turn()
        for name in self._shuffled():
            if name == OURS:
                self._dump_ours(done, batches)
            else:
                if name == BASELINE:
                    self._dump_baseline(done)
                done.after[name] = sum(self._steps(name, batches))
        self._step += TURN
        return done

    def close(self) -> None:
        self._dumper.close()

    def _train(self, done: Round, steps: int) -> None:
        for _ in range(steps // TURN):
            batches = self._take_turn()
            for name in self._shuffled():
                for step, seconds in enumerate(self._steps(name, batches), self._step + 1):
                    evicts = step % EVICTION_INTERVAL == 0
                    (done.evictions if evicts else done.steps)[name].append(seconds)
            self._step += TURN

    def _dump_ours(self, done: Round, batches: list[KeyedJaggedTensor]) -> None:
        began = time.perf_counter()
        result = self._dumper.dump(self._step)
        done.stall[OURS] = time.perf_counter() - began
        done.after[OURS] = sum(self._steps(OURS, batches))
        self._dumper.flush()
        done.committed = time.perf_counter() - began
        done.rows = result.rows
        done.size[OURS] = DeltaLog(self._log).dumps()[-1].nbytes

    def _dump_baseline(self, done: Round) -> None:
        began = time.perf_counter()
        self._baseline.dump(self._file)
        done.stall[BASELINE] = time.perf_counter() - began
        done.size[BASELINE] = self._file.stat().st_size

    def _steps(self, name: str, batches: list[KeyedJaggedTensor]) -> list[float]:
        """Makes the next steps on one model; returns the seconds each took."""
        seconds = []
        for step, batch in enumerate(batches, self._step + 1):
            began = time.perf_counter()
            loss_of(self._models[name](batch)).backward()  # the fused optimizer updates in the backward
            if name == OURS:
                self._dumper.step(step)
            seconds.append(time.perf_counter() - began)
        return seconds

    def _take_turn(self) -> list[KeyedJaggedTensor]:
        return [next(self._batches) for _ in range(TURN)]

    def _shuffled(self) -> list[str]:
        return self._order.sample(VARIANTS, len(VARIANTS))


def _measurements(rounds: list[Round]) -> tuple[Measurement, ...]:
    found: list[Measurement] = []

    def compare(title: str, names: tuple[str, ...], to: str, of: Callable[[Round, str], list[float]]) -> None:
        ms = {name: [1e3 * seconds for r in rounds for seconds in of(r, name)] for name in names}
        found.extend(Measurement(f"{title}, {name}", "ms", tuple(ms[name])) for name in names)
        found.extend(
            Measurement.ratio(f"{title}, {name} / {to}", ms[name], ms[to]) for name in names if name != to
        )

    compare("step", VARIANTS, NONE, lambda r, name: r.steps[name])
    compare("step with an eviction", VARIANTS, NONE, lambda r, name: r.evictions[name])
    compare(f"{STEPS_PER_DUMP - TURN} steps", VARIANTS, NONE, lambda r, name: [r.total(name)])
    compare(f"{TURN} steps after a dump", (NONE, OURS), NONE, lambda r, name: [r.after[name]])
    compare("stall", (OURS, BASELINE), BASELINE, lambda r, name: [r.stall[name]])
    found.append(Measurement(f"until committed, {OURS}", "ms", tuple(1e3 * r.committed for r in rounds)))
    found.append(Measurement("changed rows per dump", "rows", tuple(r.rows for r in rounds)))
    for name in (OURS, BASELINE):
        megabytes = tuple(1e-6 * r.size[name] for r in rounds)
        found.append(Measurement(f"size of a dump, {name}", "MB", megabytes))
    return tuple(found)


def _spec() -> Spec:
    tables = tuple(
        Table(
            name=f"t{number}",
            features=(f"f{number}",),
            rows=ROWS,
            dim=DIM,
            hash_size=HASH_SIZE,
            policy="distance_lfu",
            threshold=True,
            eviction_interval=EVICTION_INTERVAL,
        )
        for number in range(TABLES)
    )
    return Spec({"mc": tables}, optimizer="adagrad", learning_rate=0.01)


def _batches() -> Iterator[KeyedJaggedTensor]:
    """Ids that are popular like words are; an id's value says nothing of its popularity."""
    popularity = np.cumsum(np.arange(1, VOCABULARY + 1, dtype=np.float64) ** -ZIPF)
    popularity /= popularity[-1]
    generator = np.random.default_rng(0)
    lengths = torch.full((TABLES * BATCH,), IDS_PER_BAG, dtype=torch.int64)
    while True:
        place = np.searchsorted(popularity, generator.random(TABLES * BATCH * IDS_PER_BAG))
        ids = place * 2_654_435_761 % HASH_SIZE  # an odd factor: no two places get the same id
        yield KeyedJaggedTensor(
            keys=[f"f{number}" for number in range(TABLES)],
            values=torch.from_numpy(ids),
            lengths=lengths,
        )
