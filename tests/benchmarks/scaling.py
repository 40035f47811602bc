"""How long a dump keeps training with 1, 2 and 4 processes."""

from __future__ import annotations

import tempfile
import time
import warnings
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
ROWS = 50_000  # of each rank
VOCABULARY = 25_000  # of each rank
DIM = 64
BATCH = 1024
IDS_PER_BAG = 4
STEPS_PER_DUMP = 25


def run(quick: bool) -> Result:
    """Trains on each number of processes in turn; each rank has a shard of the same size."""
    rounds, dumps = (1, 4) if quick else (3, 12)
    workers = {size: Workers(size) for size in WORLD_SIZES}
    stalls: dict[int, list[float]] = {size: [] for size in WORLD_SIZES}
    cpu: dict[int, list[float]] = {size: [] for size in WORLD_SIZES}
    rows: dict[int, list[int]] = {size: [] for size in WORLD_SIZES}
    try:
        for _ in range(rounds):
            for size in WORLD_SIZES:
                with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
                    for rank in workers[size].run(_train, directory, dumps):
                        for samples, found in zip((stalls, cpu, rows), rank, strict=True):
                            samples[size].extend(found)
                workers[size].stop()
    finally:
        for group in workers.values():
            group.stop()
    one = float(np.median(stalls[1]))
    return Result(
        name="scaling",
        title="how long a dump keeps training, by the number of processes",
        measurements=(
            *(
                Measurement(f"stall, {n} processes", "ms", tuple(1e3 * s for s in stalls[n]))
                for n in WORLD_SIZES
            ),
            *(
                Measurement(f"CPU of the training thread in it, {n}", "ms", tuple(1e3 * s for s in cpu[n]))
                for n in WORLD_SIZES
            ),
            *(
                Measurement(f"stall, {n} / 1", "x", tuple(s / one for s in stalls[n]))
                for n in WORLD_SIZES[1:]
            ),
            Measurement(
                "changed rows per dump and rank", "rows", tuple(r for n in WORLD_SIZES for r in rows[n])
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
            "processes beyond the machine's cores wait for each other, in the stall as anywhere else",
        ),
    )


def _train(directory: str, dumps: int) -> tuple[list[float], list[float], list[int]]:
    """On each rank: the stalls, the CPU time of the training thread in them, and the rows of its dumps."""
    warnings.simplefilter("ignore", FutureWarning)  # torch's, of torchrec
    world_size, rank = dist.get_world_size(), dist.get_rank()
    table = Table(
        "t0", ("f0",), rows=ROWS * world_size, dim=DIM, hash_size=(1 << 40) * world_size, eviction_interval=8
    )
    model = build(Spec({"mc": (table,)}, optimizer="adagrad", learning_rate=0.01))
    generator = np.random.default_rng(rank)
    stalls, cpu, rows = [], [], []
    with DeltaDumper(model, Path(directory) / "deltas", interval_steps=1 << 40) as dumper:
        for number in range(dumps + 2):
            for step in range(STEPS_PER_DUMP):
                loss_of(model(_batch(generator, world_size))).backward()
                dumper.step(number * STEPS_PER_DUMP + step + 1)
            dist.barrier()
            began = time.thread_time()
            result = dumper.dump((number + 1) * STEPS_PER_DUMP)
            used = time.thread_time() - began
            dumper.flush()
            if number >= 2:  # the first one is of all rows, and takes memory that the others reuse
                stalls.append(result.stall_seconds)
                cpu.append(used)
                rows.append(result.rows)
    return stalls, cpu, rows


def _batch(generator: np.random.Generator, world_size: int) -> KeyedJaggedTensor:
    """As many ids for each shard."""
    drawn = generator.integers(0, VOCABULARY, BATCH * IDS_PER_BAG) * 2_654_435_761 % (1 << 40)
    shards = generator.integers(0, world_size, BATCH * IDS_PER_BAG) << 40
    return KeyedJaggedTensor(
        keys=["f0"],
        values=torch.from_numpy(drawn + shards),
        lengths=torch.full((BATCH,), IDS_PER_BAG, dtype=torch.int64),
    )
