"""Snapshots in which weight and optimizer state have different keys: nothing uninitialised is restored."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.dying import die_before_line
from tests.store.kinds import KINDS, opened
from tests.support.workers import start_process
from torchrec_ext.errors import CheckpointError, TableFullError
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    Adam,
    ByFunction,
    Constant,
    CounterFilter,
    DenseTable,
    DynamicTable,
    FileStore,
    LocalStore,
    MemoryStore,
    MissingKeys,
    RemoteStore,
    RestoreReport,
    RowWiseAdaGrad,
    SharedMemoryStore,
    Store,
    StoreSnapshot,
    Table,
    Uniform,
)
from torchrec_ext.store.flight.shares import server_of
from torchrec_ext.store.mismatches import OnMismatch
from torchrec_ext.store.saved import SavedSnapshot
from torchrec_ext.store.tables import table_from_json, table_to_json

ADAM = Adam(0.5)
SLOTS = ("weight", "exp_avg", "exp_avg_sq")
POISON = 1e38

Keys = Sequence[int]
Arrays = dict[str, tuple[Any, Any]]


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with opened(request.param, tmp_path) as store:
        yield store


def values(slot: str, keys: Keys, dim: int) -> np.ndarray:
    """What a checkpoint has of keys: recognisable, and non-negative as second moments are."""
    rows = np.array([(key % 251) + 1 for key in keys], np.float32).reshape(-1, 1)
    return (rows * (1 + SLOTS.index(slot)) / 8 + np.arange(dim, dtype=np.float32) / 64).astype(np.float32)


def checkpoint(table: Table, keys_of: Mapping[str, Keys], step: int = 7) -> StoreSnapshot:
    arrays: Arrays = {
        slot: (np.array(keys, np.int64), values(slot, keys, table.dim)) for slot, keys in keys_of.items()
    }
    return StoreSnapshot.from_arrays({table.name: arrays}, [table], ADAM, step=step)


def reversed_order(snapshot: StoreSnapshot) -> StoreSnapshot:
    """The same, with keys that descend."""
    parts = {}
    for name, part in snapshot.tables.items():
        fields: dict[str, Any] = {
            field: getattr(part, field).flip(0) for field in ("keys", "weight", "versions")
        }
        for field in ("slots", "slot_keys"):
            fields[field] = {slot: tensor.flip(0) for slot, tensor in getattr(part, field).items()}
        parts[name] = replace(part, **fields)
    return replace(snapshot, tables=parts)


def poison_memory(*shapes: tuple[int, int]) -> None:
    """Leaves 1e38 in the memory that will be allocated next."""
    for rows, columns in shapes:
        blocks: list[Any] = [torch.full((rows, columns), POISON) for _ in range(16)]
        blocks += [np.full((rows, columns), POISON, np.float32) for _ in range(16)]
        del blocks


def poison_rows(store: Store, table: Table) -> None:
    """Leaves 1e38 in every row that a store has for a table."""
    if isinstance(table, DynamicTable):
        # Two servers do not share out keys evenly: one is full first.
        keys = torch.arange(table.max_rows * 3 // 4) - (1 << 40)
    else:
        keys = torch.arange(table.num_rows) + table.first_key
    poison = torch.full((len(keys), table.dim), POISON)
    store.write(table.name, keys, poison, {"exp_avg": poison, "exp_avg_sq": poison})
    if isinstance(table, DynamicTable):
        assert store.evict_unused(table.name, -1) == len(keys)  # type: ignore[attr-defined]


def expected(table: Table, keys_of: Mapping[str, Keys], on_mismatch: str) -> dict[str, dict[int, np.ndarray]]:
    """By slot and key, what a restored table holds."""
    sets = [set(keys) for keys in keys_of.values()]
    known = set.union(*sets) if on_mismatch == "initialize" else set.intersection(*sets)
    held = known
    if isinstance(table, DenseTable):
        held = set(range(table.first_key, table.first_key + table.num_rows))
    content: dict[str, dict[int, np.ndarray]] = {}
    for slot, keys in keys_of.items():
        saved = dict(zip(keys, values(slot, keys, table.dim), strict=True))
        initial = table.initializer.rows(ids(*held), table.dim).numpy()
        if slot != "weight":
            initial = np.zeros_like(initial)
        content[slot] = dict(zip(held, initial, strict=True))
        content[slot] |= {key: saved[key] for key in known if key in saved}
    return content


def content_of(snapshot: StoreSnapshot, table: Table) -> dict[str, dict[int, np.ndarray]]:
    part = snapshot.tables[table.name]
    assert not part.slot_keys
    return {
        slot: dict(zip(part.keys.tolist(), tensor.numpy(), strict=True))
        for slot, tensor in {"weight": part.weight, **part.slots}.items()
    }


def same(a: dict[str, dict[int, np.ndarray]], b: dict[str, dict[int, np.ndarray]]) -> bool:
    return a.keys() == b.keys() and all(
        a[slot].keys() == b[slot].keys() and all(np.array_equal(a[slot][k], b[slot][k]) for k in a[slot])
        for slot in a
    )


def counts(report: RestoreReport) -> dict[str, dict[str, int]]:
    return {
        name: {slot: missing.count for slot, missing in slots.items()}
        for name, slots in report.missing.items()
    }


# A parameter server's checkpoint, saved slot after slot while keys were admitted

NESTED = {"weight": range(7033), "exp_avg": range(7034), "exp_avg_sq": range(7035)}
NESTED_TABLE = DynamicTable("t", 8, 14_000, initializer=Uniform(-1.0, 1.0, seed=5))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_memory_below_gets_into_a_restored_table(kind: str, tmp_path: Path) -> None:
    table = NESTED_TABLE
    snapshot = checkpoint(table, NESTED)
    wanted = expected(table, NESTED, "initialize")
    for attempt in range(2):
        poison_memory((table.num_rows, 8), (7035, 8), (7034, 8), (2, 8), (1, 8))
        with opened(kind, tmp_path) as store:
            store.create_tables([table], ADAM)
            poison_rows(store, table)
            report = store.restore(snapshot)
            assert report == RestoreReport(
                {"t": {"weight": MissingKeys(2, (7033, 7034)), "exp_avg": MissingKeys(1, (7034,))}}
            )
            again = store.snapshot()
            assert same(content_of(again, table), wanted)
            again.save(tmp_path / f"saved-{kind}-{attempt}")
            saved = SavedSnapshot(tmp_path / f"saved-{kind}-{attempt}").tables["t"]
            for slot in SLOTS:
                assert np.array_equal(saved.keys(slot), np.arange(7035))
                assert np.array_equal(saved.values(slot), np.stack([wanted[slot][k] for k in range(7035)]))

            keys = ids(0, 7032, 7033, 7034)
            store.update("t", keys, torch.ones(4, 8), step=8)
            rows = store.pull("t", keys).numpy()
        assert np.allclose(rows, adam(wanted, keys.tolist(), step=8), rtol=1e-5, atol=1e-6)
        assert np.abs(rows).max() < 100


def adam(state: dict[str, dict[int, np.ndarray]], keys: Keys, step: int) -> np.ndarray:
    """The rows after an update by gradients of 1 (Kingma and Ba, 2015)."""
    weight, mean, square = (np.stack([state[slot][k] for k in keys]).astype(np.float64) for slot in SLOTS)
    mean = (0.9 * mean + 0.1) / (1 - 0.9**step)
    square = (0.999 * square + 0.001) / (1 - 0.999**step)
    return weight - 0.5 * mean / (np.sqrt(square) + 1e-8)


# Any mismatch

DYNAMIC = DynamicTable("t", 4, 12, initializer=Uniform(-1.0, 1.0, seed=5), default_value=0.25)
DENSE = DenseTable("t", 4, 6, first_key=3, initializer=Uniform(-1.0, 1.0, seed=5))
key_sets = {
    DYNAMIC: st.sets(st.sampled_from([-(2**63), -1, 0, 1, 2, 3, 2**40, 2**63 - 1])),
    DENSE: st.sets(st.integers(3, 8)),
}


def check_restore(
    store: Store, table: Table, keys_of: Mapping[str, Keys], on_mismatch: OnMismatch, descending: bool = False
) -> None:
    sets = {slot: set(keys) for slot, keys in keys_of.items()}
    known, common = set.union(*sets.values()), set.intersection(*sets.values())
    wanted = known if isinstance(table, DynamicTable) else set(range(3, 9))
    missing = {slot: len(wanted - keys) for slot, keys in sets.items() if wanted - keys}
    snapshot = checkpoint(table, keys_of)
    if descending:
        snapshot = reversed_order(snapshot)
    store.create_tables([table], ADAM)
    poison_rows(store, table)
    before = content_of(store.snapshot(), table)
    held = store.pull_many([("t", ids(3, 4, 5))])
    if missing and (on_mismatch == "error" or (on_mismatch == "drop" and known and not common)):
        with pytest.raises(CheckpointError, match=r"table 't'"):
            store.restore(snapshot, on_mismatch)
        assert same(content_of(store.snapshot(), table), before)
        return
    report = store.restore(snapshot, on_mismatch)
    assert counts(report) == ({"t": missing} if missing else {})
    for slot, found in report.missing.get("t", {}).items():
        assert found.examples == tuple(sorted(wanted - sets[slot])[:5])
    assert report.dropped == ({"t": len(known - common)} if missing and on_mismatch == "drop" else {})
    after = store.snapshot()
    assert same(content_of(after, table), expected(table, keys_of, on_mismatch))
    assert after.step == 7
    store.refresh_many([("t", held[0])])
    assert torch.equal(held[0].rows, store.pull("t", ids(3, 4, 5)))


some_keys = st.sampled_from([DYNAMIC, DENSE]).flatmap(
    lambda table: st.tuples(st.just(table), st.tuples(*[key_sets[table]] * 3))
)
on_mismatches = st.sampled_from(["initialize", "drop", "error"])


@settings(deadline=None)
@given(of=some_keys, on_mismatch=on_mismatches, descending=st.booleans())
def test_any_key_sets_are_restored_as_asked(of: Any, on_mismatch: OnMismatch, descending: bool) -> None:
    table, sets = of
    keys_of: Mapping[str, Keys] = {slot: sorted(keys) for slot, keys in zip(SLOTS, sets, strict=True)}
    with MemoryStore() as store:
        check_restore(store, table, keys_of, on_mismatch, descending)


@pytest.mark.parametrize("table", [DYNAMIC, DENSE], ids=["dynamic", "dense"])
@pytest.mark.parametrize("on_mismatch", ["initialize", "drop", "error"])
def test_all_stores_do_alike(store: Store, table: Table, on_mismatch: OnMismatch) -> None:
    keys_of: Mapping[str, Keys] = {"weight": [3, 4, 5], "exp_avg": [4, 5, 6], "exp_avg_sq": [3, 4, 7]}
    check_restore(store, table, keys_of, on_mismatch)


def test_a_slot_that_is_not_there_at_all_gets_initial_state(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    optimizer = AdaGrad(0.5, initial_accumulator_value=0.125)
    store.create_tables([DYNAMIC], optimizer)
    weight = {"weight": (np.arange(3), np.ones((3, 4), np.float32))}
    report = store.restore(StoreSnapshot.from_arrays({"t": weight}, [DYNAMIC], optimizer))
    assert report.missing == {"t": {"sum": MissingKeys(3, (0, 1, 2))}}
    assert (store.read("t", ids(0, 1, 2))[1]["sum"] == 0.125).all()
    logger = "torchrec_ext.store." + ("flight.remote" if isinstance(store, RemoteStore) else "local")
    assert [(record.name, record.levelname) for record in caplog.records].count((logger, "WARNING")) == 1
    with pytest.raises(CheckpointError, match="table 't': no key of the snapshot has a weight and all of"):
        store.restore(StoreSnapshot.from_arrays({"t": weight}, [DYNAMIC], optimizer), "drop")


def test_what_was_missing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore() as store:
        store.create_tables([DYNAMIC], ADAM)
        store.restore(checkpoint(DYNAMIC, {"weight": [1], "exp_avg": [1], "exp_avg_sq": [1]}))
        assert not caplog.records
        keys: dict[str, Keys] = {"weight": [1], "exp_avg": [*range(8)], "exp_avg_sq": [1]}
        store.restore(checkpoint(DYNAMIC, keys))
        store.restore(checkpoint(DYNAMIC, keys), "drop")
    assert [record.getMessage() for record in caplog.records] == [
        "the snapshot did not have weight and state of the same keys, the store initialized what was "
        "missing: table 't': no weight for 7 keys (0, 2, 3, 4, 5, ...), "
        "no exp_avg_sq for 7 keys (0, 2, 3, 4, 5, ...)",
        "the snapshot did not have weight and state of the same keys, the store left out 7 keys of 't': "
        "table 't': no weight for 7 keys (0, 2, 3, 4, 5, ...), no exp_avg_sq for 7 keys (0, 2, 3, 4, 5, ...)",
    ]


# Tables that are larger or smaller now


def test_a_table_that_grew_keeps_its_rows_and_gets_initial_ones(store: Store) -> None:
    small: list[Table] = [DENSE, DynamicTable("d", 4, 3)]
    large: list[Table] = [replace(DENSE, num_rows=40), DynamicTable("d", 4, 100, filter=CounterFilter(2))]
    with MemoryStore() as before:
        before.create_tables(small, ADAM)
        before.write("t", ids(8), torch.ones(1, 4), {"exp_avg": torch.ones(1, 4)})
        before.write("d", ids(-1, 5, 7), torch.ones(3, 4))
        snapshot = before.snapshot()
    store.create_tables(large, ADAM)
    report = store.restore(snapshot)
    assert counts(report) == {"t": dict.fromkeys(SLOTS, 34)}
    assert store.snapshot().tables["d"].keys.tolist() == [-1, 5, 7]
    rows, state = store.read("t", ids(8, 9, 42))
    assert torch.equal(rows[0], torch.ones(4)) and torch.equal(state["exp_avg"][0], torch.ones(4))
    assert torch.equal(rows[1:], DENSE.initializer.rows(ids(9, 42), 4)) and not state["exp_avg"][1:].any()


def test_keys_without_room_are_an_error_that_changes_nothing(store: Store) -> None:
    small: list[Table] = [replace(DYNAMIC, name="d", max_rows=4), DENSE]
    store.create_tables(small, ADAM)
    before = store.snapshot()

    def refused(error: type[Exception], message: str, *tables: Table, keys: Keys) -> None:
        parts = {
            table.name: checkpoint(table, dict.fromkeys(SLOTS, keys)).tables[table.name] for table in tables
        }
        with pytest.raises(error, match=message):
            store.restore(StoreSnapshot(0, 9, parts), "drop")
        after = store.snapshot()
        assert after.step == before.step
        for table in small:
            assert same(content_of(after, table), content_of(before, table))

    # With two servers, one of them has room for its share of the keys, which are not the same number.
    refused(
        TableFullError, "table 'd' is full: the snapshot has [345] keys", DENSE, DYNAMIC_D, keys=range(3, 8)
    )
    large = replace(DENSE, num_rows=50)
    message = r"table 't' has keys 3 to 8, but the snapshot 2 keys \(9, 10\) more"
    refused(CheckpointError, message, DYNAMIC_D, large, keys=[3, 9, 10])


DYNAMIC_D = replace(DYNAMIC, name="d")


def test_no_server_does_its_part_when_another_has_no_room_for_its_own(tmp_path: Path) -> None:
    table = replace(DYNAMIC, max_rows=4)
    keys = torch.arange(100)
    servers = server_of(table, keys, 2)
    of_servers = [*keys[servers == 0][:1].tolist(), *keys[servers == 1][:3].tolist()]
    with opened("two servers", tmp_path) as store:
        store.create_tables([table], ADAM)
        with pytest.raises(TableFullError, match="table 't' is full: the snapshot has 3 keys, max_rows=2"):
            store.restore(checkpoint(table, dict.fromkeys(SLOTS, sorted(of_servers))))
        assert not len(store.snapshot().tables["t"].keys)


@pytest.mark.parametrize(
    ("table", "optimizer", "message"),
    [
        (replace(DYNAMIC, name="z"), ADAM, r"the snapshot is of tables \['z'\]"),
        (replace(DYNAMIC, dim=8), ADAM, "the snapshot's table is DynamicTable.*dim=8.*, the store's"),
        (replace(DENSE), ADAM, "the snapshot's table is DenseTable.*, the store's DynamicTable"),
        (DYNAMIC, SGD(), "table 't': the snapshot holds state of SGD.*, the store of Adam.*; set the"),
    ],
)
def test_a_snapshot_of_something_else_is_refused(
    store: Store, table: Table, optimizer: Any, message: str
) -> None:
    store.create_tables([DYNAMIC], ADAM)
    with MemoryStore() as other:
        other.create_tables([table], optimizer)
        with pytest.raises(ValueError, match=message):
            store.restore(other.snapshot())
    with pytest.raises(ValueError, match="on_mismatch must be one of"):
        store.restore(store.snapshot(), "ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"slot_keys": {"exp_avg": ids(1, 1, 2)}}, "keys of exp_avg to load must not repeat"),
        ({"slot_keys": {"exp_avg": ids(1, 2)}}, r"slots.exp_avg must be float32 \[2, 4\]"),
        ({"slot_keys": {"other": ids(1, 2, 3)}}, "'slot_keys.other' is nothing that Adam"),
        ({"weight": torch.ones(3, 4).half()}, r"weight must be float32 \[3, 4\].* not float16"),
        ({"keys": ids(1, 2, 3).int()}, r"keys must be int64 \[3\].* not int32"),
        ({"candidates": ids(8, 8), "candidate_counts": ids(1, 1)}, "candidates to load must not repeat"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_snapshot_that_contradicts_itself_changes_nothing(
    store: Store, damage: dict[str, Any], message: str
) -> None:
    store.create_tables([DYNAMIC], ADAM)
    store.write("t", ids(1), torch.ones(1, 4))
    before = store.snapshot()
    whole = checkpoint(DYNAMIC, dict.fromkeys(SLOTS, range(1, 4)))
    with pytest.raises(ValueError, match=f"table 't': {message}"):
        store.restore(replace(whole, tables={"t": replace(whole.tables["t"], **damage)}))
    assert same(content_of(store.snapshot(), DYNAMIC), content_of(before, DYNAMIC))


# What belongs to keys besides weight and state


def test_keys_of_an_unknown_last_use_are_not_evicted_at_once() -> None:
    table = replace(DYNAMIC, max_rows=3, evict_after=5)
    with MemoryStore() as store:
        store.create_tables([table], ADAM)
        keys: dict[str, Keys] = {"weight": [1, 2], "exp_avg": [1, 2, 3], "exp_avg_sq": [1, 2]}
        store.restore(checkpoint(table, keys, step=1000))
        with pytest.raises(TableFullError):
            store.pull("t", ids(50), admit=True)
        store.update("t", ids(), torch.zeros(0, 4), step=1006)
        store.pull("t", ids(50), admit=True)
        assert store.snapshot().tables["t"].keys.tolist() == [50]


def test_frequencies_stay_with_their_keys_and_a_key_with_a_row_does_not_wait(store: Store) -> None:
    table = replace(DYNAMIC, filter=CounterFilter(2))
    store.create_tables([table], ADAM)
    store.pull("t", ids(5, 5, 5, 8, 8, 6, 7), admit=True)
    snapshot = store.snapshot()
    part = snapshot.tables["t"]
    assert part.candidates is not None and sorted(part.candidates.tolist()) == [6, 7]
    more = {"exp_avg": ids(2, 5, 6, 8)}
    part = replace(part, slots={**part.slots, "exp_avg": torch.ones(4, 4)}, slot_keys=more)
    store.restore(replace(snapshot, tables={"t": part}))
    after = store.snapshot().tables["t"]
    assert after.keys.tolist() == [2, 5, 6, 8]
    assert after.frequencies is not None and after.frequencies.tolist() == [0, 3, 0, 2]
    assert after.candidates is not None and after.candidates.tolist() == [7]


# Dense tables whose rows a function filled


def counting(rows: torch.Tensor) -> None:
    rows.copy_(torch.arange(rows.numel()).view(rows.shape))


class Holder:
    """Something that has the function, and rows besides it."""

    def fill(self, rows: torch.Tensor) -> None:
        counting(rows)


def test_rows_are_initialised_by_the_function_that_the_table_was_made_with() -> None:
    snapshot = checkpoint(DENSE, {"weight": [4], "exp_avg": [4], "exp_avg_sq": [4]})

    def restored(store: LocalStore, **init_fns: Callable[[torch.Tensor], Any]) -> torch.Tensor:
        store.restore(snapshot, init_fns=init_fns)
        return store.pull("t", ids(3, 8))

    whole = torch.empty(6, 4)
    counting(whole)
    holder = Holder()
    for made_with in (lambda: counting, lambda: holder.fill):
        with MemoryStore() as store:
            store.create_tables([DENSE], ADAM, init_fns={"t": made_with()})
            store.write("t", torch.arange(3, 9), torch.full((6, 4), POISON))
            assert torch.equal(restored(store), whole[[0, 5]])
            assert torch.equal(restored(store, t=lambda rows: rows.fill_(2.0)), torch.full((2, 4), 2.0))


def test_a_function_that_is_gone_is_asked_for(tmp_path: Path) -> None:
    snapshot = checkpoint(DENSE, {"weight": [4], "exp_avg": [4], "exp_avg_sq": [4]})
    with opened("file", tmp_path) as store:
        assert isinstance(store, LocalStore)
        store.create_tables([DENSE], ADAM, init_fns={"t": lambda rows: rows.fill_(1.0)})
        with pytest.raises(CheckpointError, match="table 't': the snapshot lacks rows, and the function"):
            store.restore(snapshot)
        assert (store.pull("t", ids(3, 4, 8)) == 1.0).all()
        store.restore(snapshot, init_fns={"t": counting})
        assert store.pull("t", ids(3)).tolist() == [[0.0, 1.0, 2.0, 3.0]]
        # One that is whole needs none.
        store.create_tables([DENSE], ADAM, init_fns={"t": lambda rows: rows.fill_(1.0)})
        assert not store.restore(store.snapshot()).missing


def test_a_store_that_was_opened_again_knows_that_a_function_filled_a_table(tmp_path: Path) -> None:
    table = replace(DENSE, initializer=Constant(0.0))
    snapshot = checkpoint(table, {"weight": [4], "exp_avg": [4], "exp_avg_sq": [4]})
    with FileStore(tmp_path / "rows") as store:
        store.create_tables([table], ADAM, init_fns={"t": counting})
    with FileStore(tmp_path / "rows") as store:
        assert store.create_tables([table], ADAM) == []  # it is the same table
        before = store.snapshot()
        assert before.tables["t"].table == replace(table, initializer=ByFunction())
        with pytest.raises(CheckpointError, match="the function that filled them when the table was made"):
            store.restore(snapshot)
        assert torch.equal(store.snapshot().tables["t"].weight, before.tables["t"].weight)
        store.restore(snapshot, init_fns={"t": counting})
        assert store.pull("t", ids(8)).tolist() == [[20.0, 21.0, 22.0, 23.0]]
        assert not list((tmp_path / "rows").glob("initial_rows*"))
        # Another table is another one still.
        with pytest.raises(ValueError, match="another table of this name"):
            store.create_tables([replace(table, num_rows=7)], ADAM)
        with pytest.raises(ValueError, match="another table of this name"):
            store.create_tables([DynamicTable("t", 4, 6)], ADAM)


@pytest.mark.parametrize("kind", ["remote", "two servers"])
def test_rows_on_other_hosts_are_filled_by_the_function_that_is_given(kind: str, tmp_path: Path) -> None:
    table = replace(DENSE, initializer=ByFunction())
    snapshot = checkpoint(table, {"weight": [4], "exp_avg": [4, 5], "exp_avg_sq": [4]})
    whole = torch.empty(6, 4)
    counting(whole)
    with opened(kind, tmp_path) as store:
        store.create_tables([table], ADAM)
        assert not store.pull("t", torch.arange(3, 9)).any()
        store.write("t", torch.arange(3, 9), whole + 1)
        with pytest.raises(CheckpointError, match="the function that filled them when the table was made"):
            store.restore(snapshot)
        assert torch.equal(store.pull("t", torch.arange(3, 9)), whole + 1)
        report = store.restore(snapshot, init_fns={"t": counting})
        assert report.missing["t"]["weight"].count == 5
        weight, state = store.read("t", torch.arange(3, 9))
        whole[1] = torch.from_numpy(values("weight", [4], 4)[0])
        assert torch.equal(weight, whole)
        assert state["exp_avg"].any(1).tolist() == [False, True, True, False, False, False]


def test_a_dynamic_table_is_not_filled_by_a_function() -> None:
    content = table_to_json(replace(DENSE, initializer=ByFunction()))
    assert table_from_json(content).initializer == ByFunction()
    dynamic = {**table_to_json(DYNAMIC), "initializer": content["initializer"]}
    with pytest.raises(ValueError, match="its rows come one by one"):
        table_from_json(dynamic)
    with pytest.raises(ValueError, match="its rows come one by one"):
        replace(DYNAMIC, initializer=ByFunction())


@pytest.mark.parametrize("kind", KINDS)
def test_a_function_that_fails_within_a_restore_leaves_the_store_as_it_was(kind: str, tmp_path: Path) -> None:
    tables = [replace(DENSE, name="a"), DENSE, replace(DYNAMIC, name="b"), replace(DENSE, name="z")]
    parts = {}
    for table in tables:
        parts |= checkpoint(table, {"weight": [4], "exp_avg": [4], "exp_avg_sq": [4]}).tables
    snapshot = StoreSnapshot(1, 99, parts)

    def fail(rows: torch.Tensor) -> None:
        rows[:3] = POISON
        raise RuntimeError("boom")

    with opened(kind, tmp_path) as store:
        store.create_tables(tables, ADAM)
        store.pull("b", ids(1, 2), admit=True)
        store.update("b", ids(1, 2), torch.ones(2, 4), step=5)
        before = store.snapshot()
        with pytest.raises(RuntimeError, match="boom"):
            store.restore(snapshot, init_fns={"a": counting, "t": fail})
        after = store.snapshot()
        assert (after.step, after.clock) == (before.step, before.clock)
        for name, part in before.tables.items():
            for array, tensor in part.arrays().items():
                assert torch.equal(after.tables[name].arrays()[array], tensor), (name, array)
        assert store.restore(snapshot, init_fns={"a": counting, "t": counting}).missing
        assert store.pull("a", ids(3)).tolist() == [[0.0, 1.0, 2.0, 3.0]]


# Some of a store's tables


@pytest.mark.parametrize("kind", KINDS)
def test_restoring_some_tables_does_not_turn_the_step_back(kind: str, tmp_path: Path) -> None:
    x, y = (DynamicTable(name, 4, 40, evict_after=10) for name in "xy")
    with opened(kind, tmp_path) as store:
        store.create_tables([x, y], ADAM)
        store.pull("x", ids(1), admit=True)
        store.update("x", ids(1), torch.ones(1, 4), step=3)
        old = store.snapshot(["x"])
        store.pull("y", ids(5), admit=True)
        store.update("x", ids(1), torch.ones(1, 4), step=100)
        store.restore(old)
        now = store.snapshot()
        assert now.step == 100
        # Of keys that are put back, the age is what it was.
        last_used = now.tables["x"].last_used
        assert last_used is not None and old.tables["x"].last_used is not None
        assert (last_used - old.tables["x"].last_used).tolist() == [97]
        assert now.tables["y"].last_used.tolist() == [4]  # type: ignore[union-attr]
        # All of them turn it back.
        store.restore(StoreSnapshot(1, 3, {**old.tables, "y": now.tables["y"]}))
        assert store.snapshot().step == 3


def test_tables_that_are_restored_one_by_one_are_as_old_as_they_were() -> None:
    x, y = (DynamicTable(name, 4, 40) for name in "xy")
    with MemoryStore() as store:
        store.create_tables([x, y], ADAM)
        store.pull_many([("x", ids(1)), ("y", ids(2))], admit=True)
        store.update("x", ids(1), torch.ones(1, 4), step=30)
        store.pull("y", ids(3), admit=True)
        whole, parts = store.snapshot(), [store.snapshot([name]) for name in "xy"]
    with MemoryStore() as store:
        store.create_tables([x, y], ADAM)
        for part in parts:
            store.restore(part)
        found = store.snapshot()
    assert found.step == whole.step == 30
    for name, table in whole.tables.items():
        assert torch.equal(found.tables[name].last_used, table.last_used)  # type: ignore[arg-type]


# A process that dies within


def _die_everywhere(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    table = replace(DYNAMIC, max_rows=8)
    keys_of: Mapping[str, Keys] = {"weight": [4, 5], "exp_avg": [4, 6], "exp_avg_sq": [4]}
    snapshot = checkpoint(table, keys_of)
    wanted = expected(table, keys_of, "initialize")
    outcomes = {"untouched": 0, "initial": 0, "restored": 0}
    files = ("moments.py", "keys.py", "hash_index.py", "group.py")
    killed = True
    for number in itertools.count(0, 11):
        with SharedMemoryStore(name) as store:
            store.create_tables([table], ADAM)
            poison_rows(store, table)
            poison = torch.full((8, 4), POISON)
            store.write("t", torch.arange(8), poison, {"exp_avg": poison, "exp_avg_sq": poison})
            before = content_of(store.snapshot(), table)
            killed = die_before_line(number, files, partial(store.restore, snapshot))
        with SharedMemoryStore(name) as store:  # repairs it
            found = content_of(store.snapshot(), table)
            zeros = {key: np.zeros(4, np.float32) for key in found["weight"]}
            rows = {key: table.initializer.rows(ids(key), 4).numpy()[0] for key in zeros}
            initial = {"weight": rows, "exp_avg": zeros, "exp_avg_sq": zeros}
            if same(found, before) or same(found, wanted):
                outcomes["untouched" if same(found, before) else "restored"] += 1
            else:
                assert same(found, initial), f"died before line {number}"
                outcomes["initial"] += 1
            store.unlink()
        if not killed:
            break
    pipe.send(outcomes)


def test_a_death_within_a_restore_leaves_no_row_without_its_state() -> None:
    ours, theirs = mp.Pipe(duplex=False)
    start_process(_die_everywhere, f"test-deaths-{os.getpid()}", theirs)
    theirs.close()
    outcomes = ours.recv()
    assert outcomes["initial"] > 5 and outcomes["untouched"] > 0 and outcomes["restored"] > 0, outcomes


# Foreign checkpoints


def test_arrays_are_taken_in_any_order_and_kind() -> None:
    keys, rows = np.array([5, -3, 9]), np.arange(12, dtype=np.float32).reshape(3, 4)
    read_only = rows[[1, 0, 2]].copy()
    read_only.flags.writeable = False
    snapshot = StoreSnapshot.from_arrays(
        {
            "t": {
                "weight": (keys[::-1], rows[::-1]),
                "exp_avg": (torch.tensor([-3, 5, 9]), read_only),
                "exp_avg_sq": (np.array([9]), torch.ones(1, 4)),
            }
        },
        [DYNAMIC],
        ADAM,
        step=3,
    )
    part = snapshot.tables["t"]
    assert part.keys.tolist() == [-3, 5, 9] and torch.equal(part.weight, torch.from_numpy(read_only))
    assert part.slot_keys.keys() == {"exp_avg_sq"}, "the others have the same keys"
    assert torch.equal(part.weight, part.slots["exp_avg"])


WRONG_ARRAYS: list[tuple[Arrays, str]] = [
    ({"exp_avg": (ids(1), torch.ones(1, 4))}, "there is no 'weight' among"),
    ({"weight": (ids(1), torch.ones(1, 4)), "sum": (ids(1), torch.ones(1, 4))}, r"has no slots \['sum'\]"),
    ({"weight": (ids(1, 2, 1), torch.ones(3, 4))}, "weight: 1 keys repeat, for instance 1"),
    ({"weight": (ids(1, 2), torch.ones(3, 4))}, r"weight: there are 2 keys, but values \[3, 4\]"),
    ({"weight": (ids(1), torch.ones(1, 8))}, r"weight must be float32 \[1, 4\].* not float32 \[1, 8\]"),
    ({"weight": (ids(1), np.ones((1, 4)))}, r"weight must be float32 \[1, 4\].* not float64"),
    ({"weight": (np.ones(1, np.int32), torch.ones(1, 4))}, r"weight: keys must be int64 \[n\], not .*int32"),
    ({"weight": (ids(1), np.ones((1, 4), ">f4"))}, "weight: given numpy array has byte order different"),
    ({"weight": (ids(1).view(1, 1), torch.ones(1, 4))}, r"weight: keys must be int64 \[n\]"),
]


@pytest.mark.parametrize(("arrays", "message"), WRONG_ARRAYS)
def test_wrong_arrays_name_the_table_and_the_slot(arrays: Arrays, message: str) -> None:
    with pytest.raises(ValueError, match=f"table 't'.*{message}"):
        StoreSnapshot.from_arrays({"t": arrays}, [DYNAMIC], ADAM)
    with pytest.raises(ValueError, match=r"no table describes the arrays of \['z'\]; there are \['t'\]"):
        StoreSnapshot.from_arrays({"z": arrays}, [DYNAMIC], ADAM)
    one = np.ones((1, 4), np.float32)
    with pytest.raises(ValueError, match=r"slots.sum must be float32 \[1, 1\]"):
        StoreSnapshot.from_arrays(
            {"t": {"weight": (ids(1), one), "sum": (ids(1), one)}}, [DYNAMIC], RowWiseAdaGrad()
        )


def test_initial_values_are_the_tables_own_and_not_the_snapshots() -> None:
    table = replace(DYNAMIC, initializer=Constant(3.0))
    with MemoryStore() as store:
        store.create_tables([table], ADAM)
        store.restore(checkpoint(DYNAMIC, {"weight": [1], "exp_avg": [2], "exp_avg_sq": [1]}))
        assert (store.pull("t", ids(2)) == 3.0).all()
