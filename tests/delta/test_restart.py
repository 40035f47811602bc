"""A new run continues the log of an old one, at any world size."""

from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.support.models import answers, build, keyed, loss_of, one_table
from tests.support.schedules import shared_directory
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaDumper, DeltaLog, FencedError

IDS = [*range(-2, 60), 2**62, 2**63 - 1]


def _run(directory: str, seed: int, first_dump: str, dim: int = 8) -> dict[str, Any]:
    """Trains a fresh model for some steps on a directory; returns what model and log say then."""
    spec = one_table(policy="lru", eviction_interval=1, rows=12, seed=seed, dim=dim)
    model = build(spec)
    rng = np.random.default_rng([seed, dist.get_rank()])
    with DeltaDumper(model, directory, interval_steps=2, first_dump=first_dump) as dumper:
        for step in range(1, 6):
            bags = {"f0": [rng.integers(0, 59, 3).tolist() for _ in range(2)]}
            loss_of(model(keyed(["f0"], bags))).backward()
            dumper.step(step)
            if step == 2:
                dumper.flush()
                dist.barrier()
                _compare(model, spec, directory)
    _compare(model, spec, directory)
    return {"generation": dumper.generation}


def _compare(model: Any, spec: Any, directory: str) -> None:
    expected = answers(model, spec, "mc", "t0", IDS).numpy()
    replayed = DeltaLog(directory).replay()["mc.t0"].lookup(IDS)
    np.testing.assert_array_equal(replayed, expected)
    dist.barrier()


@pytest.mark.parametrize("first_dump", ["full", "delta"])
def test_a_fresh_model_on_an_old_directory_is_exact_from_its_first_dump(first_dump: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        for generation, world_size in enumerate([2, 3, 1, 2]):
            # A first run that is told to publish deltas only has nothing to be compared with.
            which = "full" if generation == 0 else first_dump
            for result in run_on(world_size, _run, directory, generation, which):
                assert result["generation"] == generation
        log = DeltaLog(directory)
        dumps = log.dumps()
        assert [(d.generation, d.step) for d in dumps] == [
            (generation, step) for generation in range(4) for step in (2, 4, 5)
        ]
        assert log.read(2).num_rows == log.read(2, generation=3).num_rows == dumps[9].rows
        assert set(log.read(2, generation=0)["world_size"].to_pylist()) == {2}
        # A consumer that follows plain files sees every key of the old runs overwritten or deleted.
        latest: dict[int, str] = {}
        for dump in dumps:
            for row in log.read(dump.step, dump.generation).to_pylist():
                latest[row["key_id"]] = row["op"]
        held = [key for key, op in latest.items() if op == "upsert"]
        assert sorted(held) == log.keys()["mc.t0"].tolist()


def test_a_table_of_another_dimension_is_refused() -> None:
    with tempfile.TemporaryDirectory() as directory:
        run_on(2, _run, directory, 0, "full")
        with pytest.raises(AssertionError, match=r"dimension 8 in .*dimension 16 in the model"):
            run_on(2, _run, directory, 1, "full", 16)
        assert len(DeltaLog(directory).dumps()) == 3


def _smaller_group() -> None:
    model = build(one_table())
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    with pytest.raises(ValueError, match=r"process_group has 1 of the job's 2 ranks; it must have all"):
        DeltaDumper(model, "unused", interval_steps=1, process_group=alone)


def test_a_group_that_is_not_the_table_s_is_refused() -> None:
    run_on(2, _smaller_group)


def _two_trainers() -> None:
    with shared_directory() as directory:
        spec = one_table(policy="lru", eviction_interval=1)
        first, second = build(spec), build(one_table(policy="lru", eviction_interval=1, seed=1))
        with (
            DeltaDumper(first, directory, interval_steps=10**9) as ours,
            DeltaDumper(second, directory, interval_steps=10**9) as theirs,
        ):
            for model, ids in ((first, [1, 2]), (second, [3, 4])):
                loss_of(model(keyed(["f0"], {"f0": [ids]}))).backward()
            ours.dump(1)
            with pytest.raises(FencedError, match=r"generation 0 .* generation 1 .*only the newest one"):
                ours.flush()
            theirs.dump(1)
            theirs.flush()
            _compare(second, spec, directory)
            ours.__exit__(KeyboardInterrupt, None, None)


@pytest.mark.parametrize("world_size", [1, 2])
def test_of_two_trainers_in_one_directory_the_newer_one_writes(world_size: int) -> None:
    run_on(world_size, _two_trainers)
