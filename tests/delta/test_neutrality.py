"""A dumper changes nothing of what the model computes, and its memory does not grow."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models import Spec, Table
from tests.support.session import Session
from tests.support.workers import run_on
from torchrec_ext.checkpoint import reset_evicted_optimizer_state

SPEC = {
    "mc": (
        Table("t0", ("f0", "f1"), rows=14, policy="lru", eviction_interval=1),
        Table("t1", ("f2",), rows=10, dim=4, policy="distance_lfu", eviction_interval=3),
    )
}


def _train(optimizer: str, attach: bool) -> dict[str, Any]:
    """Trains with or without a dumper; returns everything the model computed and holds, as bytes."""
    rng = np.random.default_rng(0)
    losses = []
    with Session(Spec(SPEC, optimizer=optimizer), attach=attach, interval_steps=3) as session:
        reset_evicted_optimizer_state(session.model)
        for _ in range(20):
            bags = {f: [rng.integers(0, 55, 4).tolist()] for f in session.spec.features}
            losses.append(session.train(bags))
        tensors = {
            **{f"weight {n}": p for n, p in session.model.module.named_parameters()},
            **{f"buffer {n}": b for n, b in session.model.module.named_buffers()},
        }
        state = session.model.fused_optimizer.state_dict()["state"]
        for name, slots in state.items():
            for slot, value in slots.items():
                local = value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
                tensors[f"optimizer {name} {slot}"] = local
        assert session.map_of()
        return {"losses": losses} | {n: t.detach().numpy().tobytes() for n, t in tensors.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_is_bit_identical_with_and_without_a_dumper(world_size: int, optimizer: str) -> None:
    without = run_on(world_size, _train, optimizer, False)
    with_dumper = run_on(world_size, _train, optimizer, True)
    assert without == with_dumper


def _memory_after(steps: int) -> int:
    rng = np.random.default_rng(0)
    with Session(Spec(SPEC), first_dump="delta") as session:
        for _ in range(steps):
            session.train({f: [rng.integers(0, 55, 4).tolist()] for f in session.spec.features})
        gc.collect()
        return _reachable_bytes(session.dumper)


def _reachable_bytes(root: object) -> int:
    """Bytes of all objects and tensors held by ``root``, not counting the model and code."""
    seen: set[int] = set()
    queue, total = [root], 0
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, (type, nn.Module, type(sys), type(_memory_after))):
            continue
        seen.add(id(item))
        total += sys.getsizeof(item)
        if isinstance(item, torch.Tensor):
            total += item.untyped_storage().nbytes()
        queue.extend(gc.get_referents(item))
    return total


def test_memory_is_the_same_after_1000_steps_without_a_dump_as_after_10() -> None:
    (after_10,) = run_on(1, _memory_after, 10)
    (after_1000,) = run_on(1, _memory_after, 1000)
    # A few bytes: Python's own integers grow with the step number.
    assert abs(after_1000 - after_10) < 200
