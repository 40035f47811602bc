from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec.optim
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.errors import StoreError, TableFullError
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    Adam,
    Constant,
    CounterFilter,
    DenseTable,
    DynamicTable,
    FileStore,
    LocalStore,
    MemoryStore,
    RowWiseAdaGrad,
    SharedMemoryStore,
    StoreOptimizer,
    Uniform,
)
from torchrec_ext.store.tables import table_from_json, table_to_json

OPTIMIZERS = [SGD(0.5), AdaGrad(0.5), RowWiseAdaGrad(0.5), Adam(0.5)]
TABLES = [
    DenseTable("a", 8, 100, initializer=Uniform(-1.0, 1.0, seed=3)),
    DenseTable("b", 8, 50, first_key=10),
    DenseTable("c", 4, 10, initializer=Constant(2.0)),
    DynamicTable("d", 8, 40, initializer=Uniform(-1.0, 1.0, seed=5), default_value=0.25),
]


@pytest.fixture(params=["memory", "shared", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LocalStore]:
    if request.param == "memory":
        store: LocalStore = MemoryStore()
    elif request.param == "shared":
        store = SharedMemoryStore(f"test-{tmp_path.name}-{id(tmp_path)}")
    else:
        store = FileStore(tmp_path / "store")
    store.create_tables(TABLES, RowWiseAdaGrad(0.5))
    yield store
    store.close()
    if isinstance(store, SharedMemoryStore):
        store.unlink()


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def torch_optimizer(optimizer: StoreOptimizer, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    if isinstance(optimizer, SGD):
        return torch.optim.SGD([weight], lr=optimizer.lr)
    if isinstance(optimizer, AdaGrad):
        return torch.optim.Adagrad([weight], lr=optimizer.lr)
    if isinstance(optimizer, RowWiseAdaGrad):
        return torchrec.optim.RowWiseAdagrad([weight], lr=optimizer.lr)
    return torch.optim.SparseAdam([weight], lr=optimizer.lr)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_rows_are_updated_as_torch_does(optimizer: StoreOptimizer) -> None:
    store = MemoryStore()
    store.create_tables([DenseTable("t", 4, 20, initializer=Uniform(-1, 1))], optimizer)
    weight = torch.nn.Parameter(store.pull("t", torch.arange(20)).clone())
    reference = torch_optimizer(optimizer, weight)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 6):
        keys = torch.randint(0, 20, (30,), generator=generator)
        grads = torch.randint(-8, 8, (30, 4), generator=generator).float() / 8
        store.update("t", keys, grads, step=step)
        summed = torch.zeros(20, 4).index_add_(0, keys, grads)
        if isinstance(optimizer, Adam):
            there = keys.unique()
            weight.grad = torch.sparse_coo_tensor(there.unsqueeze(0), summed[there], (20, 4))
        else:
            weight.grad = summed
        reference.step()
    torch.testing.assert_close(store.pull("t", torch.arange(20)), weight.data, rtol=1e-5, atol=1e-6)


def test_initial_rows_depend_on_the_key_and_not_on_its_shard() -> None:
    whole, shard = MemoryStore(), MemoryStore()
    initializer = Uniform(-0.5, 0.25, seed=11)
    whole.create_tables([DenseTable("t", 16, 1000, initializer=initializer)], SGD())
    shard.create_tables([DenseTable("t", 16, 300, first_key=400, initializer=initializer)], SGD())
    keys = torch.arange(400, 700)
    rows = whole.pull("t", keys)
    assert torch.equal(rows, shard.pull("t", keys))
    assert rows.min() >= -0.5 and rows.max() < 0.25
    assert len(torch.unique(whole.pull("t", torch.arange(1000)))) > 15_900  # of 2^24 values


def test_initial_rows_of_a_custom_function(store: LocalStore) -> None:
    made = store.create_tables(
        [DenseTable("e", 3, 5)], SGD(), init_fns={"e": lambda rows: torch.nn.init.constant_(rows, 7.0)}
    )
    assert made == ["e"]
    assert torch.equal(store.pull("e", ids(4)), torch.full((1, 3), 7.0))


def test_tables_that_are_there_are_found_and_others_of_their_name_refused(store: LocalStore) -> None:
    assert store.create_tables(TABLES, RowWiseAdaGrad(0.5)) == []
    assert store.tables == {table.name: table for table in TABLES}
    with pytest.raises(ValueError, match="holds another table of this name"):
        store.create_tables([DenseTable("a", 8, 101)], SGD())
    with pytest.raises(ValueError, match="tables of one name"):
        store.create_tables([DenseTable("x", 8, 1), DenseTable("x", 8, 1)], SGD())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_tables_travel_as_json(table: DenseTable | DynamicTable) -> None:
    assert table_from_json(table_to_json(table)) == table
    with pytest.raises(ValueError, match="not a table's description"):
        table_from_json({"kind": "DenseTable"})


def test_wrong_keys_and_values_name_the_table_and_change_nothing(store: LocalStore) -> None:
    before = store.snapshot()
    for keys, message in [
        (ids(9), r"table 'b' has keys 10 to 59; got 9"),
        (ids(10, 60), r"table 'b' has keys 10 to 59; got 60"),
        (torch.tensor([10], dtype=torch.int32), r"table 'b': keys must be int64 \[n\], not torch.int32"),
        (ids(10).unsqueeze(0), r"table 'b': keys must be int64 \[n\]"),
    ]:
        grads = torch.ones(keys.numel(), 8)
        for use in (
            lambda: store.pull("b", keys),  # noqa: B023
            lambda: store.update("b", keys, grads),  # noqa: B023
            lambda: store.update_async("b", keys, grads),  # noqa: B023
            lambda: store.write("b", keys, grads),  # noqa: B023
            lambda: store.pull_many([("a", ids(1)), ("b", keys)]),  # noqa: B023
            lambda: store.update_many([("a", ids(1), torch.ones(1, 8)), ("b", keys, grads)]),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message):
                use()
    with pytest.raises(KeyError, match="no table 'z'"):
        store.pull("z", ids(1))
    with pytest.raises(ValueError, match=r"table 'a': gradients must be \[1, 8\], not \[1, 7\]"):
        store.update("a", ids(1), torch.ones(1, 7))
    with pytest.raises(ValueError, match=r"table 'a': rows must be \[1, 8\], not \[2, 8\]"):
        store.write("a", ids(1), torch.ones(2, 8))
    with pytest.raises(ValueError, match="table 'a': keys to write must not repeat"):
        store.write("a", ids(1, 1), torch.ones(2, 8))
    with pytest.raises(ValueError, match="table 'a' has no slot 'exp_avg', it has \\['sum'\\]"):
        store.write("a", ids(1), slots={"exp_avg": torch.ones(1, 8)})
    with pytest.raises(ValueError, match="table 'a' is dense"):
        store.evict_unused("a", 1)
    after = store.snapshot()
    for name, table in before.tables.items():
        assert torch.equal(table.weight, after.tables[name].weight)


def test_only_rows_written_since_are_read_again(store: LocalStore) -> None:
    held = store.pull_many([("a", ids(1, 5, 9)), ("c", ids(0, 3))])
    named = list(zip(["a", "c"], held, strict=True))
    assert store.refresh_many(named) == 0
    store.update("a", ids(5, 6), torch.ones(2, 8))
    store.write("c", ids(3), torch.zeros(1, 4))
    assert store.refresh_many(named) == 2
    assert torch.equal(held[0].rows, store.pull("a", ids(1, 5, 9)))
    assert torch.equal(held[1].rows, store.pull("c", ids(0, 3)))
    store.touch("a")
    assert store.refresh_many(named) == 3


@given(st.data())
def test_refreshed_rows_are_those_of_a_read_now(data: st.DataObject) -> None:
    store = MemoryStore()
    dynamic = DynamicTable("d", 2, 6, Uniform(), CounterFilter(2), evict_after=1, default_value=0.5)
    store.create_tables([DenseTable("a", 2, 8), dynamic], SGD(0.5))
    keys = st.lists(st.integers(0, 7), min_size=1, max_size=6, unique=True).map(lambda k: ids(*k))
    held: list[tuple[str, object]] = []
    for step in range(1, data.draw(st.integers(2, 8)) + 1):
        action = data.draw(st.sampled_from(["read", "update", "look up", "evict", "write"]))
        table, some = data.draw(st.sampled_from(["a", "d"])), data.draw(keys)
        if action == "read":
            held.append((table, store.pull_many([(table, some)])[0]))
        elif action == "update":
            store.update(table, some, torch.ones(len(some), 2), step=step)
        elif action == "look up" and len(some) <= 3:
            store.evict_unused("d", 1)
            store.pull(table, some, admit=True)
        elif action == "evict":
            store.evict_unused("d", data.draw(st.integers(0, 3)))
        elif table == "a":
            store.write(table, some, torch.full((len(some), 2), float(step)))
    store.refresh_many(held)  # type: ignore[arg-type]
    for table, rows in held:
        assert torch.equal(rows.rows, store.pull(table, rows.keys))  # type: ignore[attr-defined]


def test_a_read_sees_updates_that_nobody_waited_for(store: LocalStore) -> None:
    before = store.pull("a", ids(7)).clone()
    for step in range(1, 51):
        store.update_async("a", ids(7), torch.full((1, 8), 0.5), step=step)
    sequential = MemoryStore()
    sequential.create_tables(TABLES, RowWiseAdaGrad(0.5))
    for step in range(1, 51):
        sequential.update("a", ids(7), torch.full((1, 8), 0.5), step=step)
    assert torch.equal(store.pull("a", ids(7)), sequential.pull("a", ids(7)))
    assert not torch.equal(before, store.pull("a", ids(7)))


def test_an_update_that_fails_in_the_background_is_not_lost(store: LocalStore) -> None:
    future = store.update_async("a", ids(7), torch.ones(1, 9))
    with pytest.raises(RuntimeError, match="an asynchronous update of the store failed: table 'a'"):
        store.pull("a", ids(7))
    assert isinstance(future.exception(), ValueError)
    store.pull("a", ids(7))


def test_an_update_that_was_cancelled_is_not_waited_for(store: LocalStore) -> None:
    before = store.pull("a", ids(7))
    with store._state.locked(exclusive=True):
        first, second = (store._updates.submit(lambda: store._update_many([], step=1, lr=None)) for _ in "ab")
        assert second.cancel()
    first.result()
    assert torch.equal(store.pull("a", ids(7)), before)


def test_rows_and_their_state_are_read_and_written_together(store: LocalStore) -> None:
    store.update("a", ids(3), torch.full((1, 8), 2.0))
    rows, slots = store.read("a", ids(3, 4))
    assert torch.equal(slots["sum"], torch.tensor([[4.0], [0.0]]))
    store.write("a", ids(50, 51), rows, slots)
    again, state = store.read("a", ids(50, 51))
    assert torch.equal(again, rows) and torch.equal(state["sum"], slots["sum"])


def test_writing_admits_keys_with_initial_values_for_what_is_not_given(store: LocalStore) -> None:
    store.write("d", ids(-5, 1 << 60), torch.ones(2, 8))
    rows, slots = store.read("d", ids(1 << 60, -5, 3))
    assert torch.equal(rows, torch.tensor([[1.0] * 8, [1.0] * 8, [0.25] * 8]))
    assert not slots["sum"].any()
    store.write("d", ids(9), slots={"sum": torch.full((1, 1), 3.0)})
    rows, slots = store.read("d", ids(9))
    assert torch.equal(rows, Uniform(-1.0, 1.0, seed=5).rows(ids(9), 8))
    assert slots["sum"].item() == 3.0


def test_updates_leave_out_keys_without_a_row(store: LocalStore) -> None:
    store.update("d", ids(77), torch.ones(1, 8))
    assert torch.equal(store.pull("d", ids(77)), torch.full((1, 8), 0.25))
    store.pull("d", ids(77), admit=True)
    assert torch.equal(store.pull("d", ids(77)), Uniform(-1.0, 1.0, seed=5).rows(ids(77), 8))


def test_a_key_that_comes_back_finds_nothing_of_what_was_there(store: LocalStore) -> None:
    store.pull("d", ids(77), admit=True)
    fresh, state = store.read("d", ids(77))
    store.update("d", ids(77), torch.ones(1, 8), step=1)
    store.update("a", ids(0), torch.zeros(1, 8), step=9)
    assert store.evict_unused("d", 5) == 1
    assert torch.equal(store.pull("d", ids(77)), torch.full((1, 8), 0.25))
    store.pull("d", ids(77), admit=True)
    again, state_again = store.read("d", ids(77))
    assert torch.equal(fresh, again) and torch.equal(state["sum"], state_again["sum"])


def test_a_full_table_is_an_error_that_changes_nothing(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.pull("d", torch.arange(39), admit=True)
    before = store.snapshot().tables["d"]
    with pytest.raises(TableFullError, match="table 'd' is full: 2 keys need a row, 1 of max_rows=40"):
        store.pull("d", ids(100, 101), admit=True)
    after = store.snapshot().tables["d"]
    assert torch.equal(before.keys, after.keys) and torch.equal(before.weight, after.weight)
    assert not caplog.text


def test_another_optimizer_starts_with_its_initial_state_and_the_same_one_keeps_it(
    store: LocalStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.update("a", ids(1), torch.ones(1, 8))
    names = list(store.tables)
    store.set_optimizer(names, RowWiseAdaGrad(0.125))
    assert store.optimizer("a").lr == 0.125
    assert store.read("a", ids(1))[1]["sum"].item() == 1.0
    assert not caplog.text
    store.set_optimizer(names, AdaGrad(0.5, initial_accumulator_value=0.25))
    assert "the state of RowWiseAdaGrad" in caplog.text and "is discarded" in caplog.text
    assert torch.equal(store.read("a", ids(1))[1]["sum"], torch.full((1, 8), 0.25))
    with pytest.raises(ValueError, match="share their optimizer"):
        store.set_optimizer(["a"], SGD())


def test_a_snapshot_puts_everything_back(store: LocalStore) -> None:
    store.pull("d", ids(-1, 5, 6), admit=True)
    for table in store.tables:
        store.update(table, ids(), torch.zeros(0, store.tables[table].dim), step=3)
    store.update("d", ids(5), torch.ones(1, 8))
    snapshot = store.snapshot()
    store.pull("d", ids(100, 101), admit=True)
    store.update_many([("a", ids(1), torch.ones(1, 8)), ("d", ids(5, 100), torch.ones(2, 8))], step=20)
    store.evict_unused("d", 1)
    store.restore(snapshot)
    again = store.snapshot()
    assert again.step == snapshot.step == 3
    for name, table in snapshot.tables.items():
        back = again.tables[name]
        assert torch.equal(back.keys, table.keys)
        assert torch.equal(back.weight, table.weight)
        assert torch.equal(back.slots["sum"], table.slots["sum"])
        if table.frequencies is not None:
            assert torch.equal(back.frequencies, table.frequencies)
            assert torch.equal(back.last_used, table.last_used)
    assert torch.equal(store.pull("d", ids(100)), torch.full((1, 8), 0.25))


def test_a_snapshot_of_some_tables_leaves_the_others(store: LocalStore) -> None:
    snapshot = store.snapshot(["a"])
    before = store.pull("c", ids(1)).clone()
    store.update_many([("a", ids(1), torch.ones(1, 8)), ("c", ids(1), torch.ones(1, 4))])
    store.restore(snapshot)
    assert list(snapshot.tables) == ["a"]
    assert torch.equal(store.pull("a", ids(1)), snapshot.tables["a"].weight[1:2])
    assert not torch.equal(store.pull("c", ids(1)), before)


def test_a_snapshot_of_other_tables_is_refused(store: LocalStore) -> None:
    other = MemoryStore()
    other.create_tables([DenseTable("z", 8, 100)], SGD())
    with pytest.raises(ValueError, match=r"the snapshot is of tables \['z'\], the store has"):
        store.restore(other.snapshot())
    same_names = MemoryStore()
    same_names.create_tables(TABLES, SGD())
    with pytest.raises(ValueError, match="holds state of SGD"):
        store.restore(same_names.snapshot())


DAMAGE: list[dict[str, Any]] = [
    {"keys": ids(1, 1, 2)},
    {
        "keys": torch.arange(41),
        "weight": torch.zeros(41, 8),
        "slots": {"sum": torch.zeros(41, 1)},
        "frequencies": torch.arange(41),
        "last_used": torch.arange(41),
    },
    {"keys": torch.arange(41)},
    {"weight": torch.zeros(3, 4)},
    {"slots": {"other": torch.zeros(3, 1)}},
    {"weight": torch.zeros(3, 8, dtype=torch.float64)},
    {"slots": {"sum": torch.zeros(2, 1)}},
    {"frequencies": ids(1, 2)},
    {"last_used": ids(1, 2)},
    {"candidates": ids(9)},
]


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: "-".join(damage))
def test_a_snapshot_that_does_not_fit_together_changes_nothing(
    store: LocalStore, damage: dict[str, Any]
) -> None:
    store.pull("d", ids(-1, 5, 6), admit=True)
    before = store.snapshot()
    tables = {"a": before.tables["a"], "d": replace(before.tables["d"], **damage)}
    store.update_many([("a", ids(1), torch.ones(1, 8)), ("d", ids(5), torch.ones(1, 8))])
    held = store.snapshot()
    with pytest.raises((ValueError, TableFullError), match="table 'd'"):
        store.restore(replace(before, tables=tables))
    after = store.snapshot()
    for name, table in held.tables.items():
        assert torch.equal(after.tables[name].keys, table.keys)
        assert torch.equal(after.tables[name].weight, table.weight)
        assert torch.equal(after.tables[name].versions, table.versions)


def test_rows_that_lost_their_keys_cannot_be_touched(store: LocalStore) -> None:
    store.pull("d", ids(3, 4), admit=True)
    rows = store.group_of("d").local_rows("d", ids(3, 4))
    store.evict_unused("d", -1)
    versions = store.group_of("d").versions_of("d").clone()
    store.touch("d", torch.cat([rows, ids(0)]))
    assert torch.equal(store.group_of("d").versions_of("d"), versions)


def test_updates_from_threads_lose_none(store: LocalStore) -> None:
    store.set_optimizer(store.tables, SGD(1.0))
    before = store.pull("c", ids(0, 1)).clone()

    def work() -> None:
        for _ in range(50):
            store.update("c", ids(0, 1, 0), torch.full((3, 4), -1.0))

    run_in_threads(work, 4)
    assert torch.equal(store.pull("c", ids(0, 1)), before + torch.tensor([[400.0], [200.0]]))


def test_snapshots_during_updates_are_of_one_moment(store: LocalStore) -> None:
    store.set_optimizer(store.tables, AdaGrad(0.0))
    store.write("c", ids(*range(10)), torch.zeros(10, 4), {"sum": torch.zeros(10, 4)})
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            store.update("c", torch.arange(10), torch.ones(10, 4))

    def look() -> None:
        try:
            for _ in range(20):
                state = store.snapshot().tables["c"]
                assert len(torch.unique(state.slots["sum"])) == 1
                assert len(torch.unique(state.versions)) == 1
        finally:
            stop.set()

    run_in_threads(work, 2, look)


def test_a_closed_store_says_so(store: LocalStore) -> None:
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store is closed"):
        store.pull("a", ids(1))
    if isinstance(store, SharedMemoryStore):
        store.unlink()


def run_in_threads(work: Callable[[], None], count: int, *more: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(f,)) for f in [work] * count + list(more)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
