"""Serving beside the training: a Redis, and a publisher that keeps it as fresh as the dumps.

In production both run elsewhere. All that they share with training is the dump directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from torchrec_ext.delta import DeltaLog
from torchrec_ext.publish import EmbeddingClient


def what_is_missing() -> str | None:
    """What publishing to Redis needs and is not installed, and how to get it."""
    if shutil.which("redis-server") is None:
        return "redis-server is not installed (on Debian: apt-get install redis-server)"
    if importlib.util.find_spec("redis") is None:
        return "the package redis is not installed (pip install 'redis[hiredis]')"
    return None


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """Rank 0 starts one on a unix socket; yields its URL, on every rank."""
    with contextlib.ExitStack() as at_the_end:
        url = [""]
        if dist.get_rank() == 0:
            directory = at_the_end.enter_context(tempfile.TemporaryDirectory())
            command = ["redis-server", "--port", "0", "--unixsocket", "redis.sock", "--save", ""]
            server = subprocess.Popen(command, cwd=directory, stdout=subprocess.DEVNULL)
            at_the_end.callback(server.wait)
            at_the_end.callback(server.terminate)
            wait_until_it_listens(f"{directory}/redis.sock", server)
            url = [f"unix://{directory}/redis.sock"]
        dist.broadcast_object_list(url)
        yield url[0]
        dist.barrier()  # nobody asks it any more


def wait_until_it_listens(path: str, server: subprocess.Popen[bytes]) -> None:
    """Returns when a server is there at a unix socket."""
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(path) != 0:
            if server.poll() is not None:
                raise RuntimeError(f"redis-server ended with exit code {server.returncode}")
            time.sleep(0.02)


@contextlib.contextmanager
def publisher(deltas: Path, url: str) -> Iterator[None]:
    """Rank 0 starts one, which follows the dumps; on leaving it ends, once the last of them was published."""
    if dist.get_rank() == 0:
        deltas.mkdir(parents=True, exist_ok=True)  # there may be no dump yet
        log = deltas.with_name(f"{deltas.name}.publisher.log")
        command = [sys.executable, "-m", "torchrec_ext.cli"]  # torchrec-ext, wherever it is installed
        command += ["publish", str(deltas), url, "--follow", "--poll", "0.2"]
        with log.open("w") as lines:
            process = subprocess.Popen(command, stdout=lines, stderr=lines)
        try:
            yield
            wait_until_published(deltas, url, process, log)
        finally:
            process.terminate()  # it finishes the dump at hand
            process.wait()
    else:
        yield
    dist.barrier()


def wait_until_published(deltas: Path, url: str, publisher: subprocess.Popen[bytes], log: Path) -> None:
    """Returns when the last dump is at the URL."""
    began = time.monotonic()
    last = DeltaLog(deltas).dumps()[-1]
    with EmbeddingClient(url) as client:
        while (at := client.position) is None or (at.generation, at.step) != (last.generation, last.step):
            if publisher.poll() is not None:
                raise RuntimeError(f"the publisher ended with exit code {publisher.returncode}: see {log}")
            time.sleep(0.02)
    waited = time.monotonic() - began
    print(f"Redis had the last dump {waited:.2f} s after training ended (log: {log})", flush=True)
