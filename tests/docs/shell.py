"""Runs the shell blocks of the documentation."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

NOT_RUN = {
    "make": "`.ci/run` makes what a page says",
    "pip": "changes the environment",
}
"""Commands that are not run, and why."""

NEEDED = ("feast",)
"""Commands that may not be installed: then the block is not run."""

STANDS_FOR = {
    "--ready-file url": "--ready-file url --listen grpc://127.0.0.1:0",
    "checkpoints/1000": "clean.pt",
    "file:///data/rows": "file://$PWD/served-rows",
    "grpc://0.0.0.0:8815": "grpc://127.0.0.1:0",
    "redis://localhost:6379/0": "unix://$PWD/redis.sock",
    "rediss://trainer@redis.internal:6380/0": "unix://$PWD/redis.sock",
}
"""What stands in commands for something of the reader's own, and what is there when they are run."""

_READY_SECONDS = 240


def run_shell(text: str, where: str, checkout: Path, output: IO[str]) -> None:
    """Runs a block's commands, which must succeed, in the working directory.

    What would run for ever goes on beside those that come after it, and is told to end then. A publisher that
    follows a directory has published what is there before they run.

    Args:
        text: a command per line, or on several that end in a backslash.
        where: the block stands.
        checkout: where the package is.
        output: where what they print goes.
    """
    commands = [_made_to_run(line) for line in text.replace("\\\n", " ").splitlines()]
    names = [words[0] for command in commands if (words := shlex.split(command, comments=True))]
    if any(name in NEEDED and shutil.which(name) is None for name in names):
        return
    services = []
    output.flush()
    with tempfile.TemporaryDirectory() as bin_directory:
        ours = Path(bin_directory, "torchrec-ext")
        ours.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m torchrec_ext.cli "$@"\n')
        ours.chmod(0o755)
        path = f"{bin_directory}:{os.environ.get('PATH', os.defpath)}"
        environment = {**os.environ, "PATH": path, "PYTHONPATH": str(checkout)}
        try:
            for command in commands:
                words = shlex.split(command, comments=True)
                if not words or words[0] in NOT_RUN:
                    continue
                if "--follow" in words or "serve-store" in words:
                    if "--follow" in words:
                        _run(command.replace(" --follow", ""), environment, output, where)
                    # The signal is to reach the command, not a shell that waits for it.
                    services.append(_start(f"exec {command}", environment, output))
                else:
                    _run(command, environment, output, where)
            for service in services:
                _wait_until_it_can_be_stopped(service)
        finally:
            for service in services:
                service.terminate()
                service.wait()
    assert [service.returncode for service in services] == [0] * len(services), where


def _start(command: str, environment: dict[str, str], output: IO[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["bash", "-c", command],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
    )


def _run(command: str, environment: dict[str, str], output: IO[str], where: str) -> None:
    code = _start(command, environment, output).wait()
    assert code == 0, f"{where}: exit code {code}: {command}"


def _made_to_run(command: str) -> str:
    assert "<<" not in command, "write the file with Python: each line here is a command"
    for name, value in STANDS_FOR.items():
        command = command.replace(name, value)
    return command


def _wait_until_it_can_be_stopped(service: subprocess.Popen[bytes]) -> None:
    """Returns once it has a handler for SIGTERM, which Linux tells."""
    deadline = time.monotonic() + _READY_SECONDS
    while service.poll() is None:
        status = Path(f"/proc/{service.pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (signal.SIGTERM - 1) & 1:
            return
        assert time.monotonic() < deadline, f"it does not get ready: {service.args!r}"
        time.sleep(0.02)
