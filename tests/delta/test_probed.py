"""Multi-probe ZCH: the log answers what the model answers, for ids with a slot and for those without."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.support.probed_models import (
    ALL_FEATURES,
    EMPTY,
    HASH_SIZE,
    TABLES,
    answers,
    build,
    collision,
    lookup,
)
from tests.support.rounding import rounded
from tests.support.schedules import shared_directory
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.publish import EmbeddingClient

IDS = list(range(HASH_SIZE))
KINDS = {
    "train": "forward and backward in train mode",
    "no_grad": "a lookup under no_grad in train mode: admits and resets, trains nothing",
    "forward_only": "a lookup in train mode whose loss is dropped",
    "eval_backward": "eval mode with a backward: trains, admits nothing",
    "save": "keeps a copy of the state dict",
    "load": "loads what was kept last",
}


@pytest.mark.parametrize(("world_size", "examples"), [(1, 12), (2, 8), (3, 5)])
def test_replay_answers_what_the_model_answers(world_size: int, examples: int) -> None:
    seen: Counter[str] = Counter()

    # Not shrunk: an example takes a second.
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
    )
    @given(
        steps=st.lists(
            st.tuples(st.sampled_from(["train"] * 4 + list(KINDS)), st.booleans()), min_size=10, max_size=25
        ),
        seed=st.integers(0, 2**32 - 1),
        storage_dtype=st.sampled_from([None, None, "float16", "int8"]),
        pooling=st.sampled_from([("SUM", "SUM"), ("SUM", "MEAN")]),
        reserved=st.booleans(),
    )
    def every_schedule(
        steps: list[tuple[str, bool]],
        seed: int,
        storage_dtype: str | None,
        pooling: tuple[str, str],
        reserved: bool,
    ) -> None:
        options = {"opt_in_prob": 100, "percent_reserved_slots": 25} if reserved else {}
        for counts in run_on(world_size, _run, steps, seed, storage_dtype, pooling, options):
            seen.update(counts)

    every_schedule()
    assert min(seen[event] for event in ("evictions", "loads", "deletes", "hits", "misses")) > 0, seen


def _run(
    steps: list[tuple[str, bool]],
    seed: int,
    storage_dtype: str | None,
    pooling: tuple[str, str],
    options: dict[str, Any],
) -> Counter[str]:
    rng = np.random.default_rng(seed)  # the same on all ranks
    model = build(pooling=pooling, **options)
    counts: Counter[str] = Counter()
    saved = _copied(model)
    with (
        shared_directory() as directory,
        DeltaDumper(model, directory, interval_steps=10**9, storage_dtype=storage_dtype) as dumper,
    ):
        for number, (kind, dumps) in enumerate([*steps, ("train", True)], 1):
            if kind == "save":
                saved = _copied(model)
            elif kind == "load":
                _restore(model, saved)
                counts["loads"] += 1
            else:
                before = {table: _owned(model, table) for table in TABLES}
                _take(model, kind, rng)
                counts["evictions"] += sum(len(before[table] - _owned(model, table)) for table in TABLES)
            dumper.step(number)
            if dumps:
                dumper.dump(number)
                dumper.flush()
                counts["deletes"] += DeltaLog(directory).dumps()[-1].deletes
                counts += _compare(model, directory, storage_dtype)
    return counts


def _owned(model: nn.Module, table: str) -> set[int]:
    return set(collision(model, table)._hash_zch_identities.data.view(-1).tolist()) - {EMPTY}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        key: value.local_shards()[0].tensor if hasattr(value, "local_shards") else value
        for key, value in model.state_dict().items()
    }


def _copied(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in _tensors(model).items()}


def _restore(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """As a distributed checkpoint is loaded: in place, then by ``load_state_dict``."""
    for key, tensor in _tensors(model).items():
        tensor.copy_(saved[key])
    model.load_state_dict(model.state_dict())


def _take(model: nn.Module, kind: str, rng: np.random.Generator) -> None:
    ids = {feature: rng.integers(0, HASH_SIZE, (dist.get_world_size(), 5)) for feature in ALL_FEATURES}
    bags = {feature: of_ranks[dist.get_rank()].tolist() for feature, of_ranks in ids.items()}
    model.train(kind != "eval_backward")
    with torch.set_grad_enabled(kind != "no_grad"):
        loss = lookup(model, bags)
    model.train()
    if kind in ("train", "eval_backward"):
        loss.backward()


def _compare(model: nn.Module, directory: str | Path, storage_dtype: str | None = None) -> Counter[str]:
    counts: Counter[str] = Counter()
    with EmbeddingClient(directory) as client:
        for fqn, state in DeltaLog(directory).replay().items():
            expected = rounded(answers(model, fqn.removeprefix("mc."), IDS), storage_dtype)
            for found in (state.lookup(IDS), client.lookup(fqn, IDS)):
                wrong = (expected.view(np.int32) != found.view(np.int32)).any(axis=1)
                assert not wrong.any(), f"{fqn}: {np.flatnonzero(wrong)}"
            counts["hits"] += len(state)
            counts["misses"] += HASH_SIZE - len(state)
            assert not expected[~np.isin(IDS, state.keys)].any()
    dist.barrier()
    return counts
