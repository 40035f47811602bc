"""How fast ``publish`` fills Redis, and how long a lookup takes, beside Redis's own benchmark."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.benchmarks.results import Measurement, Result
from tests.support.logs import LogWriter, zch
from tests.support.redis_servers import RedisServer
from torchrec_ext.publish import EmbeddingClient, publish

ROWS = 500_000
DIM = 64
PIPELINE = 100
IDS = 1000
LOOKUPS = 200
TABLE = "mc.t0"


def run(quick: bool) -> Result:
    """Publishes a dump into an empty server, and lets ``redis-benchmark`` set as many values, in turns."""
    benchmark = shutil.which("redis-benchmark")
    if benchmark is None:
        raise RuntimeError("redis-benchmark is not installed: apt-get install redis-server")
    ours, theirs, lookups, plain, memory = [], [], [], [], []
    with tempfile.TemporaryDirectory(prefix="torchrec-ext-bench-") as directory:
        log = LogWriter(Path(directory) / "deltas", {TABLE: zch(DIM, num_shards=2, hash_size=4 * ROWS)})
        log.dump(1, {TABLE: np.random.default_rng(0).permutation(4 * ROWS)[:ROWS].tolist()})
        nbytes = sum(file.stat().st_size for file in log.directory.rglob("*.parquet"))
        order = random.Random(0)
        for _ in range(1 + (3 if quick else 15)):
            for side in order.sample(("ours", "theirs"), 2):
                with RedisServer() as server:
                    if side == "theirs":
                        theirs.append(_redis_benchmark(benchmark, server))
                        continue
                    empty = server.client().info("memory")["used_memory"]
                    began = time.perf_counter()
                    publish(log.directory, server.url)
                    ours.append(ROWS / (time.perf_counter() - began))
                    memory.append((server.client().info("memory")["used_memory"] - empty) / ROWS)
                    client_ms, plain_ms = _lookups(server)
                    lookups.extend(client_ms)
                    plain.extend(plain_ms)
    ours, theirs = ours[1:], theirs[1:]  # the first round imports and warms up
    return Result(
        name="publish",
        title="publishing to Redis, and looking up",
        measurements=(
            Measurement("publish", "rows/s", tuple(ours)),
            Measurement(f"redis-benchmark -t set -P {PIPELINE}", "rows/s", tuple(theirs)),
            Measurement.ratio("publish / redis-benchmark", ours, theirs),
            Measurement(f"EmbeddingClient.lookup of {IDS} ids", "ms", tuple(lookups)),
            Measurement(f"redis-py mget of {IDS} keys", "ms", tuple(plain)),
            Measurement("memory of Redis per row", "bytes", tuple(memory)),
        ),
        settings={
            "rows": ROWS,
            "dim": DIM,
            "bytes per value": 4 * DIM,
            "bytes of Parquet": nbytes,
            "redis": _version(benchmark),
        },
        notes=(
            "publish: from the first look at the directory until the position is written: reads and checks "
            "Parquet, connects, writes, over a unix socket; one thread reads, another writes",
            "redis-benchmark: as many SETs of as many bytes, random keys, 50 connections, the same socket",
        ),
    )


def _redis_benchmark(benchmark: str, server: RedisServer) -> float:
    arguments = ["-s", str(server.socket), "-t", "set", "-P", str(PIPELINE), "-n", str(ROWS), "-r", str(ROWS)]
    done = subprocess.run(
        [benchmark, *arguments, "-d", str(4 * DIM), "--csv"], capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1].split(",")[1].strip('"'))


def _lookups(server: RedisServer) -> tuple[list[float], list[float]]:
    """Milliseconds of our lookups, and of redis-py's own of as many keys, in turns."""
    ids = np.random.default_rng(1).integers(0, 4 * ROWS, IDS)
    keys = list(server.client().scan_iter("torchrec:*", count=IDS))[:IDS]
    redis = server.client()
    ours, theirs = [], []
    with EmbeddingClient(server.url) as client:
        client.lookup(TABLE, ids)
        for _ in range(LOOKUPS):
            began = time.perf_counter()
            client.lookup(TABLE, ids)
            ours.append(1e3 * (time.perf_counter() - began))
            began = time.perf_counter()
            redis.mget(keys)
            theirs.append(1e3 * (time.perf_counter() - began))
    return ours, theirs


def _version(benchmark: str) -> str:
    return subprocess.run([benchmark, "--version"], capture_output=True, text=True).stdout.split()[1]
