"""Multi-probe ZCH: the log answers what the model answers, for ids with a slot and for those without."""

from __future__ import annotations

import re
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
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName

from tests.support.bits import assert_same_answers
from tests.support.probed_models import (
    ALL_FEATURES,
    EMPTY,
    HASH_SIZE,
    TABLES,
    answers,
    build,
    collision,
    lookup,
    window,
)
from tests.support.rounding import rounded
from tests.support.schedules import shared_directory
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog
from torchrec_ext.publish import EmbeddingClient
from torchrec_ext.zch import find_zch_tables, internals

IDS = list(range(HASH_SIZE))
KINDS = {
    "train": "forward and backward in train mode",
    "no_grad": "a lookup under no_grad in train mode: admits and resets, trains nothing",
    "forward_only": "a lookup in train mode whose loss is dropped",
    "eval_backward": "eval mode with a backward: trains, admits nothing",
    "save": "keeps a copy of the state dict",
    "load": "loads what was kept last",
}


@pytest.mark.parametrize(("world_size", "examples"), [(1, 5), (2, 4), (3, 3)])
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
            st.tuples(st.sampled_from(["train"] * 4 + list(KINDS)), st.booleans()), min_size=10, max_size=20
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
                assert_same_answers(found, expected, IDS, fqn)
            counts["hits"] += len(state)
            counts["misses"] += HASH_SIZE - len(state)
            assert not expected[~np.isin(IDS, state.keys)].any()
    dist.barrier()
    return counts


def _train_and_save(directory: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    model = build()
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        for step in range(1, 9):
            _take(model, "train", rng)
            dumper.step(step)
            if step % 4 == 0:
                dumper.dump(step)
        saved: dict[str, Any] = _copied(model)
        saved["dumper"] = dumper.state_dict()
        for step in (9, 10):
            _take(model, "train", rng)
            dumper.step(step)
    return saved


def _resume(directory: Path, saved: dict[str, Any], with_state: bool) -> tuple[int, int]:
    model = build()
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        _restore(model, saved)
        if with_state:
            dumper.load_state_dict(saved["dumper"])
        said_again = dumper.resume(8)
        assert said_again is not None
        _compare(model, directory)
        nothing = dumper.dump(9)
        dumper.flush()
        _take(model, "train", np.random.default_rng(1))
        dumper.dump(10)
        dumper.flush()
        _compare(model, directory)
    return said_again.rows, nothing.rows


@pytest.mark.parametrize("with_state", [True, False])
def test_log_goes_back_with_the_model_and_says_nothing_twice(tmp_path: Path, with_state: bool) -> None:
    log = tmp_path / "deltas"
    saved = run_on(2, _train_and_save, log)
    before = DeltaLog(log).dumps()[-1]
    told = run_on(2, _resume_own, log, saved, with_state)
    assert sum(rows for rows, _ in told) == before.rows
    assert sum(rows for _, rows in told) == 0


def _resume_own(directory: Path, saved: list[dict[str, Any]], with_state: bool) -> tuple[int, int]:
    return _resume(directory, saved[dist.get_rank()], with_state)


def _probes_as_written_down() -> None:
    rng = np.random.default_rng(0)
    model = build()
    for _ in range(10):
        _take(model, "no_grad", rng)
    for table in TABLES:
        mcm = collision(model, table)
        slots = mcm._hash_zch_identities.data.view(-1).tolist()
        mine = [one for one in IDS if mcm._start_bucket <= one // 17 < mcm._end_bucket]
        expected = [next((slot for slot in window(mcm, one) if slots[slot] == one), -1) for one in mine]
        assert internals.probe(mcm, torch.tensor(mine)).tolist() == expected
        assert max(expected) >= 0 > min(expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_ids_are_found_where_the_formula_says(world_size: int) -> None:
    run_on(world_size, _probes_as_written_down)


def _move_a_repeated_id(directory: Path) -> None:
    model = build()
    mcm = collision(model, "a")
    first, second, _ = window(mcm, 5)
    other = next(one for one in IDS if one != 5 and first in window(mcm, one))
    ids = mcm._hash_zch_identities.data.view(-1)
    with DeltaDumper(model, directory, interval_steps=10**9) as dumper:
        for number, (slot, one) in enumerate([(second, 5), (first, 5), (first, other)], 1):
            ids[slot] = one  # the second is what two threads of the kernel may do
            dumper.dump(number)
            dumper.flush()
            _compare(model, directory)


def test_an_id_that_two_slots_name_is_answered_as_by_the_model(tmp_path: Path) -> None:
    run_on(1, _move_a_repeated_id, tmp_path / "deltas")


def _refusals(options: dict[str, Any]) -> list[str | None]:
    return [table.unsupported for table in find_zch_tables(build(**options))]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable_fallback": False}, "may be any id's; give its .* disable_fallback=True"),
        ({"input_hash_size": 0}, "input_hash_size is 0; give it an upper bound"),
        ({"output_segments": [0, 1, 5, 9, 13, 17, 24]}, "make zch_size a multiple of total_num_buckets"),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    for found in run_on(1, _refusals, options)[0]:
        assert found is not None and re.search(reason, found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FBGEMM admits and evicts ids on CUDA only")
def test_on_cuda_replay_answers_what_the_model_answers(tmp_path: Path) -> None:
    rendezvous = f"file://{tmp_path}/rendezvous"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=rendezvous, rank=0, world_size=1)
    try:
        config = HashZchEvictionConfig(features=ALL_FEATURES, single_ttl=0)
        policy = HashZchEvictionPolicyName.LRU_EVICTION
        model = build(device="cuda", eviction_policy_name=policy, eviction_config=config)
        rng = np.random.default_rng(0)
        counts: Counter[str] = Counter()
        with DeltaDumper(model, tmp_path / "deltas", interval_steps=10**9) as dumper:
            for number, kind in enumerate(["train", "no_grad", "train", "forward_only", "train"] * 6, 1):
                _take(model, kind, rng)
                dumper.dump(number)
                dumper.flush()
                counts += _compare(model, tmp_path / "deltas")
        assert counts["hits"] and counts["misses"]
    finally:
        dist.destroy_process_group()
