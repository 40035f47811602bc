"""From a model that trains in two processes to a client that answers what it answers."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.models import Spec, Table, answers, build
from tests.support.redis_servers import RedisServer, needs_redis
from tests.support.schedules import STRANGE_IDS
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper
from torchrec_ext.publish import EmbeddingClient, publish

pytest.importorskip("redis", reason="the extra redis is not installed")

SPEC = Spec(
    {
        "mc": (
            Table("t0", ("f0",), rows=12, dim=8, hash_size=60, eviction_interval=1),
            Table("t1", ("f1",), rows=24, dim=4, hash_size=2**63 - 1, eviction_interval=2),
        )
    },
    optimizer="adagrad",
)
IDS = [*range(70), 1000, *STRANGE_IDS]


def train_and_publish(directory: str, url: str) -> int:
    """Trains, dumps, publishes and compares, step by step; returns how many answers were compared."""
    model = build(SPEC)
    compared = 0
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        for step in range(1, 9):
            rng = np.random.default_rng([step, dist.get_rank()])
            train(model, SPEC, (5 * step + rng.integers(0, 60, 60) ** 2 // 60) % 60)
            dumper.dump(step)
            dumper.flush()
            if dist.get_rank() == 0:
                publish(directory, url)
            dist.barrier()
            expected = {name: answers(model, SPEC, "mc", name, IDS).numpy() for name in ("t0", "t1")}
            for where in (url, directory):
                with EmbeddingClient(where) as client:
                    for name, vectors in expected.items():
                        found = client.lookup(f"mc.{name}", IDS)
                        assert np.array_equal(found.view(np.int32), vectors.view(np.int32)), (step, name)
                        compared += len(IDS)
            dist.barrier()
    return compared


@needs_redis
def test_client_answers_what_the_trained_model_answers(tmp_path: Path) -> None:
    with RedisServer() as server, tempfile.TemporaryDirectory() as directory:
        assert min(run_on(2, train_and_publish, f"{directory}/deltas", server.url)) == 8 * 2 * 2 * len(IDS)
