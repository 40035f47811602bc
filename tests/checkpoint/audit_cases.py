"""Checkpoints of three kinds with the same content, for tests that damage them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from torchrec_ext.store import DynamicTable, RowWiseAdaGrad, StoreSnapshot, TableSnapshot, Uniform

PARAMETER = "ebc.embedding_bags.t0.weight"
TABLE = DynamicTable("ebc.t0", dim=16, max_rows=1_000_000, initializer=Uniform(-0.1, 0.1, seed=3))
Tensors = dict[str, torch.Tensor]


def tensors(rows: int, dim: int = 16) -> Tensors:
    """A weight, the row-wise accumulators of an optimizer, and the rows' keys."""
    generator = torch.Generator().manual_seed(rows)
    updates = torch.rand(rows, generator=generator).pow(-1.5).clamp(max=1e6)  # a few rows get most
    return {
        "weight": torch.randn(rows, dim, generator=generator) * 0.05,
        "sum": updates * torch.rand(rows, generator=generator) * 1e-4,
        "keys": torch.arange(rows) * 7 - 100,
    }


def as_state_dict(content: Tensors) -> dict[str, Any]:
    """The content as TorchRec saves it."""
    state = {PARAMETER: {"t0.momentum1": content["sum"]}}
    return {"model": {PARAMETER: content["weight"]}, "optimizer": {"state": state}, "step": 7}


def as_snapshot(content: Tensors) -> StoreSnapshot:
    """The content as a store's snapshot."""
    keys = content["keys"]
    ones = torch.ones_like(keys)
    table = TableSnapshot(
        TABLE,
        RowWiseAdaGrad(),
        keys,
        content["weight"],
        {"sum": content["sum"].unsqueeze(1)},
        versions=ones,
        frequencies=ones,
        last_used=ones,
        candidates=keys[:0],
        candidate_counts=keys[:0],
    )
    return StoreSnapshot(5, 7, {TABLE.name: table})


def save_dcp(content: Tensors, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.save(as_state_dict(content), checkpoint_id=path)


def save_file(content: Tensors, path: Path) -> None:
    torch.save(as_state_dict(content), path)


def save_snapshot(content: Tensors, path: Path) -> None:
    as_snapshot(content).save(path)


SAVE: dict[str, Callable[[Tensors, Path], None]] = {
    "dcp": save_dcp,
    "file": save_file,
    "snapshot": save_snapshot,
}
SLOT = {"dcp": "momentum1", "file": "momentum1", "snapshot": "sum"}
"""What each kind calls the accumulators."""


def files_of(path: Path) -> list[Path]:
    """The files that hold values, the largest first."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if not file.name.startswith(".")]
    return sorted((f for f in files if f.suffix != ".json"), key=lambda file: -file.stat().st_size)


def offset_of(file: Path, values: torch.Tensor) -> int:
    """Where the bytes of a tensor are in a file."""
    found = file.read_bytes().find(values.numpy().tobytes())
    assert found >= 0
    return found


def flip(file: Path, byte: int, bit: int) -> None:
    """Flips one bit of a file, or flips it back."""
    with file.open("r+b") as opened:
        opened.seek(byte)
        value = opened.read(1)[0]
        opened.seek(byte)
        opened.write(bytes([value ^ (1 << bit)]))


def generator(*seed: object) -> random.Random:
    return random.Random(repr(seed))
