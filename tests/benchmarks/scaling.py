"""How long a dump keeps training with 1, 2 and 4 processes, of one model or of as many."""

from __future__ import annotations

import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.results import Measurement, Result
from tests.support.models import Spec, Table, build, loss_of
from tests.support.workers import Workers
from torchrec_ext.delta import DeltaDumper

WORLD_SIZES = (1, 2, 4)
ROWS = 100_000  # of each rank
VOCABULARY = 60_000  # of each rank
DIM = 64
BATCH = 2048
IDS_PER_BAG = 4
STEPS_PER_DUMP = 25
STALL, CPU, CHANGED = "stall", "its CPU", "changed rows"
TOGETHER, APART = "one model", "a model each"

Samples = dict[str, list[float]]


def run(quick: bool) -> Result:
    """Trains on each number of processes in turn; each rank has a shard of the same size."""
    rounds, dumps = (1, 4) if quick else (3, 12)
    sides = [(how, size) for size in WORLD_SIZES for how in (TOGETHER, APART) if (how, size) != (APART, 1)]
    found: dict[tuple[str, int], Samples] = {side: {STALL: [], CPU: [], CHANGED: []} for side in sides}
    for _ in range(rounds):
        for how, size in sides:
            with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
                for rank in _run(how, size, directory, dumps):
                    for name, samples in rank.items():
                        found[how, size][name].extend(samples)
    found[APART, 1] = found[TOGETHER, 1]

    def growth(how: str, size: int) -> Measurement:
        one = float(np.median(found[how, 1][STALL]))
        stalls = tuple(seconds / one for seconds in found[how, size][STALL])
        return Measurement(f"stall, {size} / 1, {how}", "x", stalls)

    def beside(size: int, name: str) -> Measurement:
        apart = float(np.median(found[APART, size][name]))
        samples = tuple(seconds / apart for seconds in found[TOGETHER, size][name])
        return Measurement(f"{name}, {size} processes, {TOGETHER} / {APART}", "x", samples)

    return Result(
        name="scaling",
        title="how long a dump keeps training, by the number of processes",
        measurements=(
            *(
                Measurement(
                    f"{name}, {size} processes, {how}", "ms", tuple(1e3 * s for s in found[how, size][name])
                )
                for name in (STALL, CPU)
                for how, size in sides
            ),
            *(growth(how, size) for how, size in sides if size > 1),
            *(beside(size, name) for name in (STALL, CPU) for size in WORLD_SIZES[1:]),
            Measurement(
                "changed rows per dump and rank",
                "rows",
                tuple(rows for side in sides for rows in found[side][CHANGED]),
            ),
        ),
        settings={
            "rows per rank": ROWS,
            "dim": DIM,
            "batch per rank": BATCH,
            "steps per dump": STEPS_PER_DUMP,
        },
        notes=(
            "every rank has as many rows, and changes as many, whatever the number of processes",
            f"{APART}: as many trainers that know nothing of each other, each with a model, a group and a "
            "log of its own, which dump at the same moment: what the machine itself loses by more processes",
            "CPU: that of the training thread; processes beyond the machine's cores wait for each other, in "
            "the stall as anywhere else",
        ),
    )


def _run(how: str, size: int, directory: str, dumps: int) -> list[Samples]:
    """What each of ``size`` processes measured."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    groups = [Workers(size)] if how == TOGETHER else [Workers(1) for _ in range(size)]
    try:
        with ThreadPoolExecutor(len(groups)) as threads:
            ranks = threads.map(
                lambda n: groups[n].run(_train, f"{directory}/{n}", dumps, store.port, n, size),
                range(len(groups)),
            )
            return [samples for group in ranks for samples in group]
    finally:
        for group in groups:
            group.stop()


def _train(directory: str, dumps: int, port: int, first_rank: int, trainers: int) -> Samples:
    """On each rank: the stalls, the CPU time of the training thread in them, and the rows of its dumps."""
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of torchrec
    world_size, rank = dist.get_world_size(), dist.get_rank()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    table = Table(
        "t0", ("f0",), rows=ROWS * world_size, dim=DIM, hash_size=(1 << 40) * world_size, eviction_interval=8
    )
    model = build(Spec({"mc": (table,)}, optimizer="adagrad", learning_rate=0.01))
    generator = np.random.default_rng(rank)
    found: Samples = {STALL: [], CPU: [], CHANGED: []}
    with DeltaDumper(model, Path(directory) / "deltas", interval_steps=1 << 40) as dumper:
        for number in range(dumps + 2):
            for step in range(STEPS_PER_DUMP):
                loss_of(model(_batch(generator, world_size))).backward()
                dumper.step(number * STEPS_PER_DUMP + step + 1)
            store.set(f"{number}/{first_rank + rank}", "here")
            store.wait([f"{number}/{trainer}" for trainer in range(trainers)])
            began = time.thread_time()
            result = dumper.dump((number + 1) * STEPS_PER_DUMP)
            used = time.thread_time() - began
            dumper.flush()
            if number >= 2:  # the first one is of all rows, and takes memory that the others reuse
                for name, sample in ((STALL, result.stall_seconds), (CPU, used), (CHANGED, result.rows)):
                    found[name].append(sample)
    return found


def _batch(generator: np.random.Generator, world_size: int) -> KeyedJaggedTensor:
    """As many ids for each shard."""
    drawn = generator.integers(0, VOCABULARY, BATCH * IDS_PER_BAG) * 2_654_435_761 % (1 << 40)
    shards = generator.integers(0, world_size, BATCH * IDS_PER_BAG) << 40
    return KeyedJaggedTensor(
        keys=["f0"],
        values=torch.from_numpy(drawn + shards),
        lengths=torch.full((BATCH,), IDS_PER_BAG, dtype=torch.int64),
    )
