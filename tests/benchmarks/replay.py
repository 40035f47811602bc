"""How fast ``DeltaLog.replay`` is beside DuckDB's query for the latest row of each key; and ``compact``."""

from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from tests.benchmarks.results import Measurement, Result
from torchrec_ext.delta import DeltaLog, DumpId, Manifest, compact
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.manifest import MANIFEST_NAME, FileEntry, RankStats, TableInfo
from torchrec_ext.delta.places import LocalPlace

TABLE = "mc.t0"
DIM = 64
DUMPS, ROWS, IDS = 50, 100_000, 1_000_000
QUERY = """
    select key_id, arg_max(embedding, global_step) as embedding, arg_max(op, global_step) as op
    from read_parquet('{}/*/part_*.parquet')
    group by table_fqn, key_id
"""


def run(quick: bool) -> Result:
    """Both over the same files, in turns."""
    samples: dict[str, list[float]] = {"replay": [], "duckdb": []}
    cpu: dict[str, list[float]] = {"replay": [], "duckdb": []}
    compacted: list[float] = []
    cpu["compact"] = []
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as temporary:
        directory = Path(temporary) / "deltas"
        written = _write_log(directory)
        nbytes = sum(dump.nbytes for dump in DeltaLog(directory).dumps())
        sides: dict[str, Callable[[], Any]] = {
            "replay": lambda: DeltaLog(directory).replay()[TABLE],
            "duckdb": lambda: _duckdb(directory),
        }
        assert len(sides["replay"]()) == sides["duckdb"]().num_rows  # and warms up
        order = random.Random(0)
        for _ in range(3 if quick else 15):
            for side in order.sample(sorted(sides), 2):
                seconds, of_cpu = _timed(sides[side])
                samples[side].append(DUMPS * ROWS / seconds)
                cpu[side].append(of_cpu)
        for _ in range(1 if quick else 5):
            seconds, of_cpu = _timed(lambda: compact(directory))
            cpu["compact"].append(of_cpu)
            compacted.append(DUMPS * ROWS / seconds)
            shutil.rmtree(directory / DeltaLog(directory).bases()[-1].directory)
    return Result(
        name="replay",
        title="replaying a log, and compacting it",
        measurements=(
            Measurement("DeltaLog.replay", "rows/s", tuple(samples["replay"])),
            Measurement("DuckDB, arg_max", "rows/s", tuple(samples["duckdb"])),
            Measurement.ratio("replay / DuckDB, to reach 2.5", samples["replay"], samples["duckdb"]),
            Measurement("processor time of DeltaLog.replay", "s", tuple(cpu["replay"])),
            Measurement("processor time of DuckDB", "s", tuple(cpu["duckdb"])),
            Measurement("compact", "rows/s", tuple(compacted)),
            Measurement("processor time of compact", "s", tuple(cpu["compact"])),
            Measurement("processor time of writing a dump", "s", tuple(written)),
        ),
        settings={
            "dumps": DUMPS,
            "rows per dump": ROWS,
            "ids": IDS,
            "dim": DIM,
            "bytes per row": round(nbytes / (DUMPS * ROWS)),
            "duckdb": duckdb.__version__,
            "threads": len(os.sched_getaffinity(0)),
        },
        notes=(
            "replay: from opening the directory, checksums of all files included, to arrays in key order",
            "DuckDB: its query's result as an Arrow table; no checksums, any order",
        ),
    )


def _timed(do: Callable[[], Any]) -> tuple[float, float]:
    """Seconds, and seconds of processor time."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    do()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return seconds, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _duckdb(directory: Path) -> Any:
    with duckdb.connect() as connection:
        connection.execute("set enable_progress_bar = false")
        connection.execute(f"set threads = {len(os.sched_getaffinity(0))}")
        return connection.sql(QUERY.format(directory)).to_arrow_table()


def _write_log(directory: Path) -> list[float]:
    """Writes the dumps; the processor time that the part of each took."""
    place = LocalPlace(directory)
    place.make()
    written = []
    random_ = np.random.default_rng(0)
    info = TableInfo(DIM, "float32", "raw", 2 * IDS, 1, 1 << 40, 0, ("f",))
    previous: DumpId | None = None
    for number in range(1, DUMPS + 1):
        dump = DumpId(0, 100 * number)
        place.make_folder(dump.directory)
        keys = random_.choice(IDS, ROWS, replace=False)
        vectors = random_.standard_normal((ROWS, DIM), np.float32) * np.float32(0.05)
        constant = {"rank": 0, "world_size": 1, "feature_name": "f", "table_fqn": TABLE, "source": "zch"}
        part, fallback = fmt.part_name(0, 1), fmt.fallback_name(0, 1)
        batch = fmt.part_batch(global_step=dump.step, op=fmt.UPSERT, keys=keys, vectors=vectors, **constant)
        began = time.process_time()
        with fmt.ParquetFileWriter(place.create(dump.directory, part), fmt.PART_SCHEMA) as parts:
            parts.write(batch)
        written.append(time.process_time() - began)
        file = place.create(dump.directory, fallback)
        with fmt.ParquetFileWriter(file, fmt.FALLBACK_SCHEMA) as fallbacks:
            fallbacks.write(fmt.fallback_batch(TABLE, 0, vectors[0], {}))
        now = time.time()
        manifest = Manifest(
            dump=dump,
            previous=previous,
            world_size=1,
            created_unix=now,
            committed_unix=now,
            tables={TABLE: info},
            parts=(FileEntry(part, 0, parts.rows, parts.nbytes, parts.crc32),),
            fallbacks=(FileEntry(fallback, 0, fallbacks.rows, fallbacks.nbytes, fallbacks.crc32),),
            stats=(RankStats(ROWS, 0, 0.0),),
        )
        place.put(dump.directory, MANIFEST_NAME, manifest.to_json())
        previous = dump
    return written
