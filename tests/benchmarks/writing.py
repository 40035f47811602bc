"""What the writer makes of a dump's rows: rows per second, and bytes."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tests.benchmarks.results import Measurement, Result
from tests.support.models import Spec, Table, build, keyed, loss_of
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.places import LocalPlace
from torchrec_ext.files import sync

ROWS = 60_000
DIM = 64
TRAINING_STEPS = 150
BATCH = 2048
IDS_PER_BAG = 4
OURS, SAME, DEFAULTS = "ours", "pyarrow, our options", "pyarrow's defaults"
OPTIONS = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": ["global_step", "rank", "world_size", "feature_name", "table_fqn", "op", "source"],
    "write_statistics": ["table_fqn", "key_id", "op"],
    "use_byte_stream_split": ["embedding.list.element"],
    "store_schema": False,
    "row_group_size": 131_072,
}
"""Written out here, so that a change of the format's options shows."""


def run(quick: bool) -> Result:
    """Writes the same trained rows with our writer, with pyarrow, and with pyarrow's defaults."""
    rounds = 3 if quick else 25
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
        keys, vectors = _trained(Path(directory), 20 if quick else TRAINING_STEPS)
        table = _part(keys, vectors)
        writers: dict[str, Callable[[Path], None]] = {
            OURS: lambda path: _write_ours(path, keys, vectors),
            SAME: lambda path: _write_synced(path, table, **OPTIONS),
            DEFAULTS: lambda path: _write_synced(path, table),
        }
        order = random.Random(0)
        seconds: dict[str, list[float]] = {name: [] for name in writers}
        cpu: dict[str, list[float]] = {name: [] for name in writers}
        size: dict[str, int] = {}
        for number in range(rounds + 2):
            for name in order.sample(list(writers), len(writers)):
                path = Path(directory) / f"{number}.parquet"
                began, used = time.perf_counter(), time.process_time()
                writers[name](path)
                seconds[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
                size[name] = path.stat().st_size
                path.unlink()
        for samples in (*seconds.values(), *cpu.values()):
            del samples[:2]
    return Result(
        name="writing",
        title="the writer against pyarrow writing the same Arrow table",
        measurements=(
            *(
                Measurement(
                    f"rows written, {name}", "Mrows/s", tuple(1e-6 * len(keys) / s for s in seconds[name])
                )
                for name in writers
            ),
            Measurement.ratio(f"rows per second, {OURS} / {SAME}", seconds[SAME], seconds[OURS]),
            Measurement.ratio(f"CPU, {OURS} / {DEFAULTS}", cpu[OURS], cpu[DEFAULTS]),
            Measurement(f"size, {OURS} / {DEFAULTS}", "x", (size[OURS] / size[DEFAULTS],)),
            Measurement(f"size, {OURS}", "MB", (1e-6 * size[OURS],)),
        ),
        settings={"rows": len(keys), "dim": DIM, "training steps": TRAINING_STEPS},
        notes=(
            "all three put the file on the disk (fsync); ours also makes the Arrow table, from keys and "
            "vectors, and the checksum",
        ),
    )


def _write_ours(path: Path, keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> None:
    new = LocalPlace(path.parent).create("", path.name)
    with fmt.ParquetFileWriter(new, fmt.PART_SCHEMA) as file:
        file.write(_part(keys, vectors))


def _write_synced(path: Path, table: pa.Table, **options: object) -> None:
    pq.write_table(table, path, **options)
    sync(path)


def _part(keys: NDArray[np.int64], vectors: NDArray[np.float32]) -> pa.Table:
    return fmt.part_batch(
        global_step=1000,
        rank=0,
        world_size=1,
        feature_name="f0",
        table_fqn="mc.t0",
        source="zch",
        op=fmt.UPSERT,
        keys=keys,
        vectors=vectors,
    )


def _trained(directory: Path, steps: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Ids without order, and vectors that training has moved."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=0, world_size=1)
    try:
        table = Table("t0", ("f0",), rows=ROWS, dim=DIM, hash_size=1 << 40, eviction_interval=4)
        model = build(Spec({"mc": (table,)}, optimizer="adagrad", learning_rate=0.05))
        generator = np.random.default_rng(0)
        ids = generator.integers(0, 1 << 40, ROWS)
        for _ in range(steps):
            drawn = ids[generator.integers(0, ROWS, (BATCH, IDS_PER_BAG))]
            loss_of(model(keyed(["f0"], {"f0": drawn.tolist()}))).backward()
        weight = next(p for name, p in model.named_parameters() if name.endswith("t0.weight"))
        return ids, _local(weight).numpy().copy()
    finally:
        dist.destroy_process_group()


def _local(weight: torch.Tensor) -> torch.Tensor:
    weight = weight.detach()
    return weight.to_local() if hasattr(weight, "to_local") else weight
