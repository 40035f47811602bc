"""On what a benchmark ran."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "pyarrow", "numpy")


@dataclass(frozen=True)
class Machine:
    """A machine and its software. ``commit`` ends in ``-dirty`` if the checkout differs from it."""

    cpu: str
    cores: int
    load_average: float
    python: str
    packages: dict[str, str]
    date: str
    commit: str | None

    @classmethod
    def this(cls) -> Machine:
        return cls(
            cpu=_cpu(),
            cores=len(os.sched_getaffinity(0)),
            load_average=os.getloadavg()[0],
            python=platform.python_version(),
            packages=_versions(),
            date=datetime.now().astimezone().isoformat(timespec="seconds"),
            commit=_commit(),
        )

    def __str__(self) -> str:
        packages = ", ".join(f"{name} {version}" for name, version in self.packages.items())
        return (
            f"{self.cpu}, {self.cores} cores, load average {self.load_average:.1f}, {self.date}\n"
            f"Python {self.python}, {packages}\n"
            f"commit {self.commit or 'unknown'}"
        )


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
