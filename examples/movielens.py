"""MovieLens-100K: 100,000 ratings of 1,682 films by 943 people, with the second each was given.

Its licence forbids passing the data on, so nothing of it is kept here: it is taken from a package
that ships it, the wheel of RecBole 1.2.1.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

PACKAGE = "recbole==1.2.1"
MEMBER = "recbole/dataset_example/ml-100k/ml-100k.inter"
NUM_RATINGS = 100_000


class MovieLensError(RuntimeError):
    """The data could not be had, or is not what it should be; the message says what to do."""


@dataclass(frozen=True)
class Ratings:
    """Ratings in the order in which they were given.

    Attributes:
        user_id: int64 ``[n]``.
        item_id: int64 ``[n]``.
        liked: float32 ``[n]``, 1 for four or five stars, else 0.
    """

    user_id: torch.Tensor
    item_id: torch.Tensor
    liked: torch.Tensor

    def __len__(self) -> int:
        return len(self.liked)

    def __getitem__(self, rows: slice) -> Ratings:
        return Ratings(self.user_id[rows], self.item_id[rows], self.liked[rows])


def download_on_rank_zero(folder: Path) -> Path:
    """Downloads the ratings while the other ranks wait; all return the path, or raise the error."""
    outcome: list[Path | MovieLensError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome = [download(folder)]
        except MovieLensError as error:
            outcome = [error]
    dist.broadcast_object_list(outcome)
    if isinstance(outcome[0], MovieLensError):
        raise outcome[0]
    return outcome[0]


def download(folder: Path) -> Path:
    """Puts the ratings into a folder, unless they are there, and returns the file's path."""
    target = folder / Path(MEMBER).name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--only-binary=:all:", "--retries=1", "--dest", scratch, PACKAGE]
        pip = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if pip.returncode or not wheels:
            raise MovieLensError(
                f"pip could not download {PACKAGE}, which holds MovieLens-100K "
                "(is there a network?). With a copy of your own, pass --data PATH: its u.data or "
                f"ml-100k.inter.\n{pip.stderr.strip()}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            complete = Path(scratch, "ratings")
            complete.write_bytes(wheel.read(MEMBER))
        if (found := len(load(complete))) != NUM_RATINGS:
            raise MovieLensError(f"{PACKAGE} holds {found:,} ratings instead of {NUM_RATINGS:,}")
        complete.rename(target)
    return target


def load(path: Path) -> Ratings:
    """Reads tab-separated ``user, item, rating, timestamp``, with or without a header, by time."""
    try:
        with path.open() as lines:
            has_header = lines.readline().startswith("user_id")
        columns = np.loadtxt(path, delimiter="\t", skiprows=int(has_header), ndmin=2)
        user, item, rating, timestamp = columns.T
    except (OSError, ValueError) as error:
        raise MovieLensError(
            f"{path}: expected lines of user, item, rating and timestamp with tabs between: {error}"
        ) from error
    by_time = np.argsort(timestamp, kind="stable")
    return Ratings(
        user_id=torch.from_numpy(user[by_time]).long(),
        item_id=torch.from_numpy(item[by_time]).long(),
        liked=torch.from_numpy(rating[by_time] >= 4).float(),
    )
