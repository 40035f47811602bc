"""A small model that trains in one process, and its checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyarrow.fs import FileSystem
from torch import nn

from tests.support.models import keyed
from tests.support.recstore_schedules import RecTable, collection, own_answers
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.recstore import SparseSGD
from torchrec_ext.store import Uniform

TABLE = RecTable("t", ("f",), rows=16, dim=4, dynamic={"initializer": Uniform(-1.0, 1.0), "evict_after": 2})
FQN = "ebc.t"
IDS = range(40)


class Trainer:
    """A dynamic table under training, whose keys come and go."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self._seed = seed
        self.ebc = collection([TABLE])
        self.model = nn.ModuleDict({"ebc": self.ebc})
        self._optimizer = SparseSGD([self.ebc], lr=0.5)

    def train(self, step: int) -> None:
        """One step over four ids that depend on seed and step; those of two steps ago are evicted."""
        ids = [(5 * self._seed + 3 * step + i) % 40 for i in range(4)]
        values = self.ebc(keyed(["f"], {"f": [ids]})).values()
        (values * values + values).sum().backward()
        self._optimizer.step()
        self.ebc.store.evict_unused("t", 2)

    def answers(self) -> list[list[float]]:
        """What it answers for ``IDS``."""
        return own_answers(self.ebc, [TABLE], "t", list(IDS)).tolist()

    def keys(self) -> list[int]:
        """The keys that own a row."""
        keys = self.ebc.store.group_of("t").keys["t"]
        return keys.keys_of(keys.rows_in_use()).tolist()

    def attach(self, log: Path | FileSystem, **options: Any) -> DeltaDumper:
        """A dumper of it, which dumps when it is told to."""
        return DeltaDumper(self.model, log, **{"interval_steps": 10**9, **options})

    def save(self, dumper: DeltaDumper | None = None) -> dict[str, Any]:
        """A checkpoint, with the dumper's state if one is given."""
        state: dict[str, Any] = {
            "ebc": {name: tensor.clone() for name, tensor in self.ebc.state_dict().items()},
            "optimizer": copy.deepcopy(self._optimizer.state_dict()),
        }
        return state if dumper is None else {**state, "dumper": dumper.state_dict()}

    def load(self, saved: dict[str, Any], dumper: DeltaDumper | None = None) -> None:
        """Loads a checkpoint, and the dumper's state if it is in there."""
        self.ebc.load_state_dict(saved["ebc"])
        self._optimizer.load_state_dict(saved["optimizer"])
        if dumper is not None and "dumper" in saved:
            dumper.load_state_dict(saved["dumper"])

    def compare(self, log: Path | FileSystem) -> None:
        """Compares what the log replays with what the model answers, bit for bit."""
        answers = np.array(self.answers(), np.float32)
        assert np.array_equal(DeltaLog(log).replay()[FQN].lookup(IDS), answers)


def dump(dumper: DeltaDumper, step: int) -> dict[int, str]:
    """Dumps; what the dump says, as key and op."""
    dumper.dump(step)
    dumper.flush()
    rows = DeltaLog(dumper._place).read(step, dumper.generation).to_pylist()
    return {row["key_id"]: row["op"] for row in rows}
