"""What dumping costs altogether: CPU of trainer and writer, with the size of the table, and in memory."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.append_and_unique import AppendAndUnique
from tests.benchmarks.memory import kept_bytes
from tests.benchmarks.results import Measurement, Result
from tests.support.models import Spec, Table, build, loss_of
from torchrec_ext.delta import DeltaDumper

DIM = 64
BATCH = 2048
IDS_PER_BAG = 4
STEPS, DUMPS = 100, 5
CHANGED = 60_000
SMALL, LARGE, SAME_CHANGES = 100_000, 4_000_000, 10_000
NARROW = 16  # a table of 4M rows, and its optimizer's state, must fit
WARM_UP_STEPS, GROWTH_STEPS = 100, 300
NONE, OURS = "no dumper", "ours"
AT_DUMP, AT_STEP = "baseline, unique at the dump", "baseline, unique at every step"
LEAST = "plain Parquet alone"


def run(quick: bool) -> Result:
    """Measures the three one after another."""
    torch.set_num_threads(1)  # as torchrun does; else threads that wait for work count as CPU
    large = SMALL * 4 if quick else LARGE
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
        dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
        try:
            measurements = [
                *_cpu_added(Path(directory), 2 if quick else 7),
                *_size_of_table(Path(directory), large, 3 if quick else 15),
                *_memory(Path(directory), large),
            ]
        finally:
            dist.destroy_process_group()
    return Result(
        name="delta_cost",
        title="what dumping costs altogether",
        measurements=tuple(measurements),
        settings={
            "batch": BATCH,
            "ids per bag": IDS_PER_BAG,
            "dim": f"{DIM} ({NARROW} where tables differ in size)",
            "optimizer": "Adagrad",
            "torch threads": 1,
        },
        notes=(
            f"CPU added: trainer and writer together over {STEPS} steps and {DUMPS} dumps of about "
            f"{CHANGED:,} rows, less what the same steps cost without a dumper",
            f"{LEAST}: pyarrow writes as many vectors, uncompressed, without dictionaries or statistics, and "
            "nothing is tracked or gathered",
            f"whole dump: trainer and writer until it is committed, of the same {SAME_CHANGES:,} changed "
            "rows",
            f"memory: all that the dumper of a ZCH table of {large:,} rows keeps alive and the model alone "
            "does not, buffers for the writer among it; and how much more after "
            f"{GROWTH_STEPS} steps without a dump",
        ),
    )


def _cpu_added(directory: Path, rounds: int) -> list[Measurement]:
    """CPU seconds of the same steps on three equal models."""
    tables = tuple(
        Table(f"t{n}", (f"f{n}",), rows=SMALL, dim=DIM, hash_size=1 << 40, eviction_interval=8)
        for n in range(2)
    )
    names = (NONE, OURS, AT_DUMP, AT_STEP)
    models = {name: build(Spec({"mc": tables}, optimizer="adagrad", learning_rate=0.01)) for name in names}
    # As many different ids as there are rows in a dump: each of its steps draws some of them.
    batches = _batches(CHANGED // len(tables), len(tables))
    for _ in range(16):  # until all have a row
        batch = next(batches)
        for model in models.values():
            loss_of(model(batch)).backward()
    dumper = DeltaDumper(models[OURS], directory / "cpu", interval_steps=STEPS // DUMPS)
    baselines = {name: AppendAndUnique(models[name], every_step=name == AT_STEP) for name in names[2:]}
    rows = []

    def work(name: str, step: int, batch: KeyedJaggedTensor) -> None:
        loss_of(models[name](batch)).backward()
        if name == OURS and (result := dumper.step(step)) is not None:
            rows.append(result.rows)
        elif name in baselines and step % (STEPS // DUMPS) == 0:
            baselines[name].dump(directory / "baseline.parquet")

    order = random.Random(0)
    cpu: dict[str, list[float]] = {name: [] for name in names}
    step = 0
    for number in range(rounds + 1):
        drawn = [next(batches) for _ in range(STEPS)]
        for name in order.sample(names, len(names)):
            began = time.process_time()
            for place, batch in enumerate(drawn, step + 1):
                work(name, place, batch)
            if name == OURS:
                dumper.flush()
            if number:  # the first dump is of all rows
                cpu[name].append(time.process_time() - began)
        step += STEPS
    dumper.close()
    added = {name: [a - b for a, b in zip(cpu[name], cpu[NONE], strict=True)] for name in names[1:]}
    least = [_write_plain(directory / "plain.parquet", sum(rows[-DUMPS:]) // DUMPS) for _ in range(rounds)]
    return [
        *(Measurement(f"CPU of {STEPS} steps, {name}", "s", tuple(cpu[name])) for name in names),
        Measurement("rows per dump", "rows", tuple(rows[DUMPS:])),
        *(Measurement.ratio(f"CPU added, {OURS} / {name}", added[OURS], added[name]) for name in baselines),
        *(Measurement.ratio(f"CPU, {LEAST} / {name}", least, added[name]) for name in baselines),
    ]


def _write_plain(path: Path, rows: int) -> float:
    """CPU seconds of writing as many vectors as the dumps hold, as simply as Parquet can be written."""
    vectors = torch.randn(rows * DIM).numpy()
    offsets = pa.array(np.arange(0, len(vectors) + 1, DIM, dtype=np.int32))
    table = pa.table({"embedding": pa.ListArray.from_arrays(offsets, pa.array(vectors))})
    began = time.process_time()
    for _ in range(DUMPS):
        pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)
    return time.process_time() - began


def _size_of_table(directory: Path, large: int, rounds: int) -> list[Measurement]:
    """The cost of a dump of the same number of changed rows, of a small and of a large table."""
    sizes = (SMALL, large)
    models = {size: _narrow(size) for size in sizes}
    dumpers = {}
    for size, model in models.items():
        _admit(model, size)
        dumpers[size] = DeltaDumper(model, directory / str(size), interval_steps=1 << 40, first_dump="delta")
    order = random.Random(0)
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    cpu: dict[int, list[float]] = {size: [] for size in sizes}
    batches = _batches(SAME_CHANGES, 1)
    for number in range(1, rounds + 3):
        drawn = [next(batches) for _ in range(8)]
        for size in order.sample(sizes, len(sizes)):
            for batch in drawn:
                loss_of(models[size](batch)).backward()
            began, used = time.perf_counter(), time.process_time()
            dumpers[size].dump(number)
            dumpers[size].flush()
            if number > 2:
                seconds[size].append(time.perf_counter() - began)
                cpu[size].append(time.process_time() - used)
    for dumper in dumpers.values():
        dumper.close()
    return [
        *(
            Measurement(f"whole dump, table of {size:,}", "ms", tuple(1e3 * s for s in seconds[size]))
            for size in sizes
        ),
        Measurement.ratio(f"whole dump, table of {large:,} / {SMALL:,}", seconds[large], seconds[SMALL]),
        Measurement.ratio(f"its CPU, table of {large:,} / {SMALL:,}", cpu[large], cpu[SMALL]),
    ]


def _memory(directory: Path, size: int) -> list[Measurement]:
    """Bytes that a dumper keeps alive per row of a table, and per step."""
    model = _narrow(size)
    _admit(model, size)
    without = kept_bytes(model)
    dumper = DeltaDumper(model, directory / "memory", interval_steps=1 << 40, first_dump="delta")
    _steps(model, dumper, 0, WARM_UP_STEPS)
    dumper.dump(WARM_UP_STEPS)
    dumper.flush()
    _steps(model, dumper, WARM_UP_STEPS, WARM_UP_STEPS)
    kept = sum(size for address, size in kept_bytes(dumper).items() if address not in without)
    before = kept_bytes(dumper)
    _steps(model, dumper, 2 * WARM_UP_STEPS, GROWTH_STEPS)
    grown = sum(kept_bytes(dumper).values()) - sum(before.values())
    dumper.close()
    return [
        Measurement("memory of a dumper per row", "bytes", (kept / size,)),
        Measurement("its growth per step", "bytes", (grown / GROWTH_STEPS,)),
    ]


def _steps(model: nn.Module, dumper: DeltaDumper, step: int, count: int) -> None:
    batches = _batches(SAME_CHANGES, 1)
    for number in range(step + 1, step + count + 1):
        loss_of(model(next(batches))).backward()
        dumper.step(number)


def _narrow(rows: int) -> nn.Module:
    table = Table("t0", ("f0",), rows=rows, dim=NARROW, hash_size=1 << 40, eviction_interval=50)
    return build(Spec({"mc": (table,)}, optimizer="adagrad", learning_rate=0.01))


def _admit(model: nn.Module, rows: int) -> None:
    """Gives every row but the fallback row an id, those that are looked up among them."""
    ids = np.unique(np.concatenate([_ids(SAME_CHANGES, 0), np.arange(1, rows) * 1_000_003]))[: rows - 1]
    buffers = dict(model.named_buffers())
    sorted_ids = next(tensor for name, tensor in buffers.items() if name.endswith("_mch_sorted_raw_ids"))
    sorted_ids[: len(ids)] = torch.from_numpy(ids)


def _batches(vocabulary: int, tables: int) -> Iterator[KeyedJaggedTensor]:
    ids = [_ids(vocabulary, table) for table in range(tables)]
    generator = np.random.default_rng(1)
    lengths = torch.full((tables * BATCH,), IDS_PER_BAG, dtype=torch.int64)
    while True:
        drawn = [one[generator.integers(0, vocabulary, BATCH * IDS_PER_BAG)] for one in ids]
        yield KeyedJaggedTensor(
            keys=[f"f{table}" for table in range(tables)],
            values=torch.from_numpy(np.concatenate(drawn)),
            lengths=lengths,
        )


def _ids(count: int, table: int) -> NDArray[np.int64]:
    return (np.arange(count) + table * count) * 2_654_435_761 % (1 << 40)
