"""An id that takes over a row starts with fresh optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import Spec, Table, answers, build, keyed, loss_of, one_table
from tests.support.workers import run_on
from torchrec_ext.checkpoint import reset_evicted_optimizer_state
from torchrec_ext.delta import DeltaDumper
from torchrec_ext.errors import UnsupportedTableError
from torchrec_ext.zch import find_zch_tables, internals

OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad"]
ranks = pytest.mark.parametrize("world_size", [1, 2])


def _spec(optimizer: str) -> Spec:
    """One free row per rank: every new id evicts the one before."""
    rows = 2 * dist.get_world_size()
    return one_table(optimizer=optimizer, policy="lru", eviction_interval=1, rows=rows, hash_size=60)


def _train(model: nn.Module, ids: Sequence[int]) -> None:
    loss_of(model(keyed(["f0"], {"f0": [ids]}))).backward()


def _first_update(model: nn.Module, spec: Spec, new_id: int, vector: torch.Tensor | None) -> torch.Tensor:
    """Admits an id, gives its row a vector if told to, and returns what one update makes of it."""
    with torch.no_grad():
        model(keyed(["f0"], {"f0": [[new_id]]}))
    if vector is not None:
        (table,) = find_zch_tables(model)
        if table.shard == 0:
            table.weight()[0] = vector
    model.eval()  # trains, admits nothing
    _train(model, [new_id] if dist.get_rank() == 0 else [])
    model.train()
    return answers(model, spec, "mc", "t0", [new_id])[0]


def _updates(optimizer: str, reset: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The first update of an id that took over a row, and that of one on a row never trained."""
    spec = _spec(optimizer)
    model, fresh = build(spec), build(spec)
    handle = reset_evicted_optimizer_state(model) if reset else None
    for old_id in (1, 2, 1, 1):
        _train(model, [old_id])
    with torch.no_grad():
        model(keyed(["f0"], {"f0": [[3]]}))
    start = answers(model, spec, "mc", "t0", [3])[0]
    taken_over = _first_update(model, spec, 3, None)
    if handle is not None:
        handle.remove()
    # A model that was never trained admits the id to the same row, which gets the same vector.
    with reset_evicted_optimizer_state(fresh):
        return taken_over, _first_update(fresh, spec, 3, start)


@ranks
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_first_update_after_an_eviction_is_that_of_a_fresh_row(optimizer: str, world_size: int) -> None:
    for taken_over, fresh in run_on(world_size, _updates, optimizer, True):
        assert torch.equal(taken_over, fresh)


def test_torchrec_alone_lets_an_id_inherit_the_accumulator_with_adagrad() -> None:
    ((taken_over, fresh),) = run_on(1, _updates, "adagrad", False)
    assert not torch.equal(taken_over, fresh), "TorchRec has mended it: say so in the docs"


def test_torchrec_alone_fails_at_the_first_eviction_with_rowwise_adagrad_on_cpu() -> None:
    with pytest.raises(AssertionError, match="reset_weight_momentum"):
        run_on(1, _updates, "rowwise_adagrad", False)


def _states_of_two_tables() -> None:
    spec = Spec(
        {
            "mc": (
                Table("t0", ("f0",), rows=4 * dist.get_world_size(), policy="lru", eviction_interval=1),
                Table("t1", ("f1",), rows=6 * dist.get_world_size(), policy="lru", eviction_interval=1),
            )
        },
        optimizer="adagrad",
    )
    model = build(spec)
    block = 60 // dist.get_world_size()
    with reset_evicted_optimizer_state(model):
        for start in range(8):
            ids = [start + block * rank for rank in range(dist.get_world_size())]
            loss_of(model(keyed(spec.features, {"f0": [ids], "f1": [ids]}))).backward()
        for table in find_zch_tables(model):
            tbe, index = internals.table_batched_embedding(table.module, table.name)
            (state,) = internals.optimizer_states(tbe)[index]
            before = state.clone()
            evicted = _evict_all(model, spec, table.name)
            assert len(evicted), "the case was not staged"
            assert (before[evicted] != 0).any()
            assert (state[evicted] == 0).all()
            others = [row for row in range(table.num_rows) if row not in evicted]
            assert torch.equal(state[others], before[others])


def _evict_all(model: nn.Module, spec: Spec, table: str) -> list[int]:
    """Looks ids up that push others out of one table, without training; returns this rank's rows."""
    (watched,) = (t for t in find_zch_tables(model) if t.name == table)
    rows: list[int] = []
    evict = watched.module._managed_collision_collection.evict

    def spy() -> dict[str, torch.Tensor | None]:
        evictions = evict()
        if evictions[table] is not None:
            rows.extend(evictions[table].tolist())
        return evictions

    watched.module._managed_collision_collection.evict = spy
    block = 60 // dist.get_world_size()
    ids = [20 + block * rank for rank in range(dist.get_world_size())]
    feature = next(t.features[0] for t in spec.modules["mc"] if t.name == table)
    with torch.no_grad():
        model(keyed(spec.features, {feature: [ids]}))
    del watched.module._managed_collision_collection.evict
    return rows


@ranks
def test_only_the_state_of_evicted_rows_is_reset(world_size: int) -> None:
    run_on(world_size, _states_of_two_tables)


def _handles() -> None:
    model = build(_spec("adagrad"))
    (table,) = find_zch_tables(model)
    tbe, _ = internals.table_batched_embedding(table.module, table.name)
    first, second = reset_evicted_optimizer_state(model), reset_evicted_optimizer_state(model)
    assert "reset_embedding_weight_momentum" in vars(tbe)
    first.remove()
    first.remove()
    assert "reset_embedding_weight_momentum" in vars(tbe)
    second.remove()
    assert not [name for name in vars(tbe) if "reset" in name and "torchrec_ext" in name]
    assert "reset_embedding_weight_momentum" not in vars(tbe)
    with pytest.raises(ValueError, match="no sharded managed-collision table"):
        reset_evicted_optimizer_state(nn.Linear(2, 2))


def test_the_last_handle_to_go_restores_the_kernel() -> None:
    run_on(1, _handles)


def _dense() -> None:
    model = build(one_table(kernel="dense"))
    with pytest.raises(UnsupportedTableError, match=r"mc\.t0: a dense compute kernel.*'fused'"):
        reset_evicted_optimizer_state(model)
    with pytest.raises(UnsupportedTableError, match=r"mc\.t0: a dense compute kernel.*'fused'"):
        DeltaDumper(model, "unused", interval_steps=1)


@ranks
def test_dense_kernels_are_refused_with_what_to_use_instead(world_size: int) -> None:
    run_on(world_size, _dense)
