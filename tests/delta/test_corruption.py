"""A table that contradicts itself is not dumped: every rank hears of it, and once mended nothing is lost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import build, one_table
from tests.support.schedules import compare
from tests.support.training import train
from tests.support.workers import run_on
from torchrec_ext.delta import CorruptTableError, DeltaDumper, DeltaDumpError, DeltaLog
from torchrec_ext.zch import ZchTable, find_zch_tables

# Every shard of six rows admits five of thirty ids, then gives three of their rows to others.
FIRST_IDS = [0, 1, 2, 3, 4] * 4
LATER_IDS = [10, 11, 12, 2] * 5
CHANGED_LATER = [1, 2, 3, 4, 10, 11, 12]
ALL_IDS = [*range(60), 61, -1, 2**63 - 2]


def row_outside_the_shard(table: ZchTable) -> tuple[torch.Tensor, str]:
    rows = _mapping(table)
    first, last = table.first_row, table.first_row + table.num_rows - 1
    rows[0] = last + 3
    return rows, (
        rf"1 of {table.num_rows} slots name a row outside the shard \[{first}, {last}\]: "
        rf"slot 0 \(id \d+\) -> row {last + 3}"
    )


def negative_row(table: ZchTable) -> tuple[torch.Tensor, str]:
    rows = _mapping(table)
    rows[1:5] = -7
    return rows, (
        r"4 of \d+ slots name a row outside the shard \[\d+, \d+\]: "
        r"slot 1 \(id \d+\) -> row -7, slot 2 \(id \d+\) -> row -7, slot 3 \(id \d+\) -> row -7, \.\.\."
    )


def row_named_twice(table: ZchTable) -> tuple[torch.Tensor, str]:
    rows = _mapping(table)
    rows[0] = rows[1]
    row = int(rows[1])
    return rows, (
        rf"1 rows are named by more than one slot: slot 0 \(id \d+\) -> row {row}, "
        rf"slot 1 \(id \d+\) -> row {row}"
    )


def vector_not_finite(table: ZchTable) -> tuple[torch.Tensor, str]:
    weight = table.weight()
    trained = 30 * table.shard + 2
    slot = _collision_map(table)._mch_sorted_raw_ids.tolist().index(trained)
    weight[_mapping(table)[slot] - table.first_row, 3] = torch.nan
    return (
        weight,
        rf"1 of 4 changed vectors are not finite: ids {trained}; restart from a checkpoint, or repair",
    )


def every_vector_infinite(table: ZchTable) -> tuple[torch.Tensor, str]:
    weight = table.weight()
    weight[:-1] = torch.inf
    weight[0] = -torch.inf  # their sum is not a number
    return weight, r"4 of 4 changed vectors are not finite: ids \d+, \d+, \d+, \.\.\."


def fallback_row_not_finite(table: ZchTable) -> tuple[torch.Tensor, str]:
    weight = table.weight()
    weight[-1, 0] = torch.inf
    last = table.first_row + table.num_rows - 1
    return weight, rf"1 vector is not finite: that of the fallback row, row {last}"


Fault = Callable[[ZchTable], tuple[torch.Tensor, str]]
FAULTS: list[Fault] = [
    row_outside_the_shard,
    negative_row,
    row_named_twice,
    vector_not_finite,
    every_vector_infinite,
    fallback_row_not_finite,
]


@pytest.mark.parametrize(("world_size", "bad_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("fault", FAULTS)
def test_corrupt_table_is_reported_on_every_rank_and_loses_nothing_once_mended(
    fault: Fault, world_size: int, bad_rank: int, tmp_path: Path
) -> None:
    outcomes = run_on(world_size, _corrupt_and_mend, tmp_path / "deltas", fault, bad_rank)

    what = outcomes[bad_rank].fault
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is (CorruptTableError if rank == bad_rank else DeltaDumpError)
        assert re.search(rf"mc\.t0 on rank {bad_rank}: {what}", outcome.message), outcome.message
        assert outcome.committed_then == [1]
    log = DeltaLog(tmp_path / "deltas")
    assert [dump.step for dump in log.dumps()] == [1, 3]
    keys = log.read(3)["key_id"].to_pylist()
    assert set(keys) >= set(_on_every_shard(CHANGED_LATER, world_size))
    assert len(keys) == len(set(keys))


@dataclass
class Outcome:
    """What a rank saw of a corrupt table."""

    fault: str
    error: type[Exception] | None = None
    message: str = ""
    committed_then: list[int] | None = None


def _corrupt_and_mend(directory: Path, fault: Fault, bad_rank: int) -> Outcome:
    world_size = dist.get_world_size()
    spec = one_table(rows=6 * world_size, hash_size=30 * world_size, eviction_interval=1)
    model = build(spec)
    with DeltaDumper(model, directory, interval_steps=1) as dumper:
        train(model, spec, _on_every_shard(FIRST_IDS, world_size))
        dumper.step(1)
        dumper.flush()
        before = DeltaLog(directory).replay()["mc.t0"].lookup(ALL_IDS)
        train(model, spec, _on_every_shard(LATER_IDS, world_size))
        mend, text = _injected(model, fault)
        outcome = Outcome(text)
        if dist.get_rank() != bad_rank:
            mend()

        try:
            dumper.step(2)
            dumper.flush()
        except (CorruptTableError, DeltaDumpError) as error:
            outcome.error, outcome.message = type(error), str(error)
        dumper.flush()  # an error is said once
        log = DeltaLog(directory)
        outcome.committed_then = [dump.step for dump in log.dumps()]
        assert (log.replay()["mc.t0"].lookup(ALL_IDS) == before).all()

        # Nothing is trained in between: what the third dump holds is what the second failed to say.
        mend()
        dumper.step(3)
        dumper.flush()
        compare(model, spec, str(directory), ALL_IDS)
    return outcome


def _leave_while_corrupt(directory: Path, fault: Fault, bad_rank: int) -> None:
    spec = one_table(rows=12, hash_size=60, eviction_interval=1)
    model = build(spec)
    dumper = DeltaDumper(model, directory, interval_steps=1)
    train(model, spec, _on_every_shard(FIRST_IDS, 2))
    dumper.step(1)
    train(model, spec, _on_every_shard(LATER_IDS, 2))
    corrupt = dist.get_rank() == bad_rank
    if corrupt:
        _injected(model, fault)
    expected = CorruptTableError if corrupt else DeltaDumpError
    # Who goes on as if nothing had happened is told once more when the block ends.
    with pytest.raises(expected), dumper, pytest.raises(expected):
        dumper.step(2)
        dumper.flush()


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_leaving_the_block_with_a_corrupt_table_raises_on_every_rank(bad_rank: int, tmp_path: Path) -> None:
    run_on(2, _leave_while_corrupt, tmp_path / "deltas", row_named_twice, bad_rank)
    assert [dump.step for dump in DeltaLog(tmp_path / "deltas").dumps()] == [1]


def _on_every_shard(ids: list[int], world_size: int) -> list[int]:
    return [30 * shard + i for shard in range(world_size) for i in ids]


def _injected(model: nn.Module, fault: Fault) -> tuple[Callable[[], None], str]:
    """Does damage to this rank's shard; returns what undoes it and what the error says of it."""
    (table,) = find_zch_tables(model)
    with torch.no_grad():
        rows, weight = _mapping(table), table.weight()
        intact = [rows.clone(), weight.clone()]
        damaged, text = fault(table)

    @torch.no_grad()
    def mend() -> None:
        damaged.copy_(intact[0 if damaged is rows else 1])

    return mend, text


def _mapping(table: ZchTable) -> torch.Tensor:
    return _collision_map(table)._mch_remapped_ids_mapping


def _collision_map(table: ZchTable) -> nn.Module:
    return table.module._managed_collision_collection._managed_collision_modules[table.name]
