"""Small models that train, and the logs they leave, for tests that are about something else."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from tests.support.models import Spec, Table, answers, build, keyed, loss_of
from torchrec_ext.delta import DeltaDumper

TWO_TABLES = Spec(
    {
        "mc": (
            Table("t0", ("f0",), rows=12, dim=8, hash_size=60, eviction_interval=1),
            Table("t1", ("f1", "g1"), rows=24, dim=4, hash_size=60, eviction_interval=2),
        )
    },
    optimizer="adagrad",
)
TABLES = ("mc.t0", "mc.t1")
IDS = [*range(60), 61, 1000, -1, -7, 2**63 - 2, 2**63 - 1]
"""Every id that ``write_log`` trains, and some that it never does."""


def train(model: nn.Module, spec: Spec, ids: Iterable[int]) -> None:
    """One step over these ids, each a bag of its own, for every feature."""
    bags = [[int(i)] for i in ids]
    loss_of(model(keyed(spec.features, dict.fromkeys(spec.features, bags)))).backward()


def write_log(directory: Path, steps: Iterable[int] = (10, 20, 30, 40)) -> dict[int, dict[str, NDArray]]:
    """Trains ``TWO_TABLES`` and dumps at these steps; all ranks call it.

    Returns:
        What the model answered for ``IDS`` at each step, by table FQN.
    """
    model = build(TWO_TABLES)
    answered = {}
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        for step in steps:
            rng = np.random.default_rng([step, dist.get_rank()])
            # The popular ids move on: rows change hands, so that keys are deleted.
            train(model, TWO_TABLES, (step // 2 + rng.integers(0, 60, 60) ** 2 // 60) % 60)
            dumper.dump(step, {"checkpoint": f"ckpt/{step}"})
            answered[step] = {fqn: answers(model, TWO_TABLES, *fqn.split("."), IDS).numpy() for fqn in TABLES}
    return answered
