"""The demo on made-up ratings, started as its users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.support.redis_servers import needs_redis

ROOT = Path(__file__).parents[2]


def run_demo(directory: Path, path: str | None = None) -> list[str]:
    """Runs it on 6,000 ratings, with this ``PATH``; returns the lines it printed."""
    rng = np.random.default_rng(0)
    users, items = 1 + rng.integers(0, 943, 6_000), 1 + rng.integers(0, 1_682, 6_000)
    ratings = np.stack([users, items, rng.integers(1, 6, 6_000), np.arange(6_000)], axis=1)
    np.savetxt(directory / "u.data", ratings, fmt="%d", delimiter="\t")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "examples/movielens_online.py"), "--data", "u.data", "--out", "dumps"]
    command += ["--batch-size", "64", "--interval-steps", "10"]
    demo = subprocess.run(
        command,
        cwd=directory,
        env=environment if path is None else {**environment, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert demo.returncode == 0, demo.stderr
    return demo.stdout.splitlines()


@needs_redis
def test_redis_answers_what_the_model_answers(tmp_path: Path) -> None:
    pytest.importorskip("redis", reason="the extra redis is not installed")
    lines = run_demo(tmp_path)
    assert any(line.startswith("EmbeddingClient('unix://") and line.endswith(": 0 wrong") for line in lines)
    log = (tmp_path / "dumps.publisher.log").read_text()
    assert "published step=46 generation=0" in log
    assert log.endswith("it holds step 46 of generation 0\n")


def test_without_redis_it_says_how_to_get_it_and_the_dumps_answer(tmp_path: Path) -> None:
    lines = run_demo(tmp_path, path="/nowhere")
    assert any("apt-get install redis-server" in line for line in lines)
    assert "EmbeddingClient('dumps') answered the same ids: 0 wrong" in lines
