"""Snapshots while others update: each is a state that the store was in."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch

from tests.store.kinds import opened
from tests.support.workers import start_process
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    CounterFilter,
    DenseTable,
    DynamicTable,
    MemoryStore,
    RemoteStore,
    SharedMemoryStore,
    Store,
    StoreSnapshot,
    Table,
    TableSnapshot,
)

WORKERS = 4
GROUPS = 5  # of keys, for each worker
GROUP_SIZE = 12
SNAPSHOTS = 100
OPTIMIZER = AdaGrad(0.25)
TABLES: list[Table] = [
    DenseTable("dense", 4, WORKERS * GROUPS * GROUP_SIZE),
    DynamicTable("dynamic", 4, 1000, filter=CounterFilter(2)),
]


def keys_of(worker: int, group: int) -> torch.Tensor:
    """The keys of a group; those of the first groups are also in the dense table."""
    return torch.arange(GROUP_SIZE) + (worker + WORKERS * group) * GROUP_SIZE


def work(store: Store, worker: int, updated: Callable[[], object], go_on: Callable[[], bool]) -> None:
    """Updates one group of keys after the other, each time in both tables at once.

    A gradient of 1 adds 1 to the state: it counts the updates. Every call is one change of the store.

    Args:
        store: the store.
        worker: whose groups.
        updated: is called after each update.
        go_on: whether to.
    """
    for step in itertools.count(1):
        for group in range(GROUPS):
            keys = keys_of(worker, group)
            if step == 1:
                for _ in range(2):
                    store.pull("dynamic", keys, admit=True)
            ones = torch.ones(GROUP_SIZE, 4)
            store.update_many([("dense", keys, ones), ("dynamic", keys, ones)], step=step)
            updated()
            if not go_on():
                return


# What a row holds after each number of updates


def weights_by_count(longest: int) -> torch.Tensor:
    """How far a weight of 0 gets by 0, 1, ... updates, float32 ``[longest + 1]``."""
    with MemoryStore() as store:
        store.create_tables([DenseTable("t", 1, 1)], OPTIMIZER)
        store.write("t", torch.tensor([0]), torch.zeros(1, 1))
        found = [torch.zeros(1)]
        for _ in range(longest):
            store.update("t", torch.tensor([0]), torch.ones(1, 1))
            found.append(store.pull("t", torch.tensor([0])).flatten())
    return torch.cat(found)


def the_one(values: torch.Tensor) -> float:
    """The value that all are."""
    assert len(values.unique()) == 1
    return float(values.flatten()[0])


def group_in(part: TableSnapshot, keys: torch.Tensor) -> tuple[int, int]:
    """How often a group was updated, and its version; all its rows must agree."""
    here = torch.isin(part.keys, keys).nonzero().flatten()
    assert len(here) == GROUP_SIZE
    return int(the_one(part.slots["sum"][here])), int(the_one(part.versions[here]))


def check(
    snapshot: StoreSnapshot, clock_before: int, initial: dict[str, torch.Tensor], moved: torch.Tensor
) -> int:
    """Checks that a snapshot is what the store held after some number of changes; returns the updates."""
    dense, dynamic = snapshot.tables["dense"], snapshot.tables["dynamic"]
    for part in (dense, dynamic):
        assert not part.slot_keys
        assert len(part.keys) == len(part.weight) == len(part.slots["sum"]) == len(part.versions)
    assert dynamic.frequencies is not None and dynamic.candidates is not None
    assert dynamic.candidate_counts is not None
    updates = changes = 0
    versions = []
    for worker in range(WORKERS):
        counts = []
        for group in range(GROUPS):
            keys = keys_of(worker, group)
            count, version = group_in(dense, keys)
            counts.append(count)
            admitted = torch.isin(dynamic.keys, keys)
            waiting = torch.isin(dynamic.candidates, keys)
            assert int(admitted.sum()) in (0, GROUP_SIZE) and int(waiting.sum()) in (0, GROUP_SIZE)
            assert not (admitted.any() and waiting.any())
            if admitted.any():
                dynamic_count, dynamic_version = group_in(dynamic, keys)
                assert dynamic_count == count
                assert dynamic_version == version or count == 0
                assert (dynamic.frequencies[admitted] == 2).all()
                versions.append(dynamic_version)
            else:
                assert count == 0
                assert (dynamic.candidate_counts[waiting] == 1).all()
            changes += count + (2 if admitted.any() else 1 if waiting.any() else 0)
            updates += count
        # A worker updates its groups in turn.
        assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1
    # Every change counts one: so many as this moment's clock says were made, and all of them are here.
    assert changes == snapshot.clock - clock_before
    assert len(set(versions)) == len(versions) and max(versions, default=0) <= snapshot.clock
    for part in (dense, dynamic):
        counts_of = part.slots["sum"][:, 0].long()
        expected = initial[part.table.name][part.keys] + moved[counts_of].unsqueeze(1)
        torch.testing.assert_close(part.weight, expected, rtol=0, atol=1e-4)
    return updates


def initial_rows() -> dict[str, torch.Tensor]:
    keys = torch.arange(TABLES[0].num_rows)
    return {table.name: table.initializer.rows(keys, table.dim) for table in TABLES}


@pytest.mark.parametrize("kind", ["memory", "shared", "file", "remote"])
def test_each_snapshot_during_updates_of_threads_is_a_state_that_was(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as store:
        store.create_tables(TABLES, OPTIMIZER)
        clock_before = store.snapshot().clock
        stop, updated = threading.Event(), threading.Event()
        errors: list[BaseException] = []

        def guarded(worker: int) -> None:
            try:
                work(store, worker, updated.set, lambda: not stop.is_set())
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=guarded, args=(worker,)) for worker in range(WORKERS)]
        for thread in threads:
            thread.start()
        try:
            snapshots = snapshots_between(store, updated)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors
    check_all(snapshots, clock_before)


def snapshots_between(store: Store, updated: threading.Event | Event) -> list[StoreSnapshot]:
    """Snapshots while others update, and each time have since the one before."""
    snapshots = []
    for _ in range(SNAPSHOTS):
        assert updated.wait(timeout=240)
        updated.clear()
        snapshots.append(store.snapshot())
    return snapshots


def check_all(snapshots: list[StoreSnapshot], clock_before: int) -> None:
    initial = initial_rows()
    moved = weights_by_count(int(snapshots[-1].tables["dense"].slots["sum"].max()))
    updates = [check(snapshot, clock_before, initial, moved) for snapshot in snapshots]
    assert updates == sorted(updates)
    assert len(set(updates)) > SNAPSHOTS // 2, "hardly anything happened in between: the test proves little"


def test_a_snapshot_of_servers_that_were_changed_meanwhile_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened("two servers", tmp_path) as store:
        store.create_tables([DenseTable("t", 4, 10_000)], SGD())
        store.snapshot()
        assert not caplog.records
        assert isinstance(store, RemoteStore)
        stop = threading.Event()

        def change() -> None:
            with RemoteStore(store.urls) as other:
                while not stop.is_set():
                    other.update("t", torch.arange(10), torch.ones(10, 4))

        thread = threading.Thread(target=change)
        thread.start()
        try:
            while not caplog.records:
                store.snapshot()
        finally:
            stop.set()
            thread.join()
        assert "not of one moment" in caplog.text


def _work(name: str, worker: int, pipe: Connection, updated: Event) -> None:
    torch.set_num_threads(1)
    with SharedMemoryStore(name) as store:
        pipe.send("ready")
        work(store, worker, updated.set, lambda: not pipe.poll())
        pipe.recv()


@pytest.fixture
def shared_store() -> Iterator[SharedMemoryStore]:
    with SharedMemoryStore(f"test-cuts-{os.getpid()}") as store:
        yield store
        store.unlink()


def test_each_snapshot_during_updates_of_processes_is_a_state_that_was(
    shared_store: SharedMemoryStore,
) -> None:
    shared_store.create_tables(TABLES, OPTIMIZER)
    clock_before = shared_store.clock
    updated = mp.get_context("forkserver").Event()
    pipes = []
    for worker in range(WORKERS):
        ours, theirs = mp.Pipe()
        start_process(_work, shared_store.path.name.removeprefix("torchrec_ext."), worker, theirs, updated)
        theirs.close()
        pipes.append(ours)
    for pipe in pipes:
        assert pipe.recv() == "ready"
    snapshots = snapshots_between(shared_store, updated)
    for pipe in pipes:
        pipe.send("stop")
    for pipe in pipes:  # closed by those who are done
        with pytest.raises(EOFError):
            pipe.recv()
    check_all(snapshots, clock_before)
