"""Stores of several processes: some die anywhere, some fork, some wait for their turn."""

from __future__ import annotations

import fcntl
import multiprocessing as mp
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from tests.support.workers import start_process
from torchrec_ext.errors import StoreError
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    Constant,
    DenseTable,
    DynamicTable,
    FileStore,
    LocalStore,
    MemoryStore,
    SharedMemoryStore,
    StoreServer,
)
from torchrec_ext.store.flight.remote import RemoteStore
from torchrec_ext.store.places import TURN_NAME, Directory

DENSE = [DenseTable("a", 4, 6, initializer=Constant(1.0)), DenseTable("b", 8, 6, initializer=Constant(2.0))]
LATER = [DenseTable("c", 4, 6, initializer=Constant(3.0)), DynamicTable("d", 16, 6)]
WAIT_SECONDS = 240


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


@pytest.fixture
def shared_name(tmp_path: Path) -> Iterator[str]:
    name = f"test-{os.getpid()}-{abs(hash(tmp_path))}"
    yield name
    SharedMemoryStore(name).unlink()


def in_fork(do: Callable[[], Any]) -> int:
    """Does something in a forked process; returns its exit code, 0 if nothing was raised."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            do()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# Deaths


def dying_before_line(number: int, do: Callable[[], Any]) -> None:
    """Does something, but dies before the store's files execute their ``number``-th line from here."""
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(("table_changes.py", "state.py", "group.py", "places.py")):
            return None
        if event == "line":
            left -= 1
            if left < 0:
                os._exit(9)
        return trace

    sys.settrace(trace)
    do()
    sys.settrace(None)


def _die_everywhere(name: str, change: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    deaths = 0
    while True:
        with SharedMemoryStore(name) as store:
            store.create_tables(DENSE, SGD(1.0))

            def do(store: LocalStore = store) -> None:
                if change == "set_optimizer":
                    store.set_optimizer(["a", "b"], AdaGrad(1.0, initial_accumulator_value=4.0))
                else:
                    store.create_tables(LATER, SGD(1.0))

            code = in_fork(partial(dying_before_line, 5 * deaths, do))
            assert code in (0, 9)
            with SharedMemoryStore(name) as opened:  # who comes later sees what who was there sees
                assert dict(store.tables) == dict(opened.tables)
                assert store.optimizer("a") == opened.optimizer("a") and opened.optimizer("a") in (
                    SGD(1.0),
                    AdaGrad(1.0, initial_accumulator_value=4.0),
                )
                opened.update_many([("a", ids(1), torch.ones(1, 4)), ("b", ids(1), torch.ones(1, 8))])
                for slot in ("a", "b"):
                    ours, theirs = store.read(slot, ids(1)), opened.read(slot, ids(1))
                    assert torch.equal(ours[0], theirs[0]) and ours[1].keys() == theirs[1].keys()
                    assert all(torch.equal(ours[1][key], theirs[1][key]) for key in ours[1])
                    assert all((value == 5.0).all() for value in ours[1].values())
            do()
            files = {file.name for file in store.path.iterdir()}
            assert store.create_tables(LATER, SGD(1.0)) in ([], ["c", "d"])
            assert (store.pull("c", ids(0, 5)) == 3.0).all()
            assert not {file for file in files if "slots_0" in file and change == "set_optimizer"}
            store.unlink()
        if code == 0:
            break
        deaths += 1
    pipe.send(deaths)


@pytest.mark.parametrize("change", ["create_tables", "set_optimizer"])
def test_a_death_anywhere_in_a_change_of_tables_leaves_the_old_ones_or_the_new_ones(
    shared_name: str, change: str
) -> None:
    ours, theirs = mp.Pipe(duplex=False)
    start_process(_die_everywhere, shared_name, change, theirs)
    theirs.close()
    assert ours.recv() > 15


# Forks


def _fork_while_threads_update(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    stores: list[LocalStore] = [SharedMemoryStore(name), MemoryStore()]
    for store in stores:
        store.create_tables(DENSE, SGD(1.0))
        inside, go = threading.Event(), threading.Event()

        def hold(
            store: LocalStore = store, inside: threading.Event = inside, go: threading.Event = go
        ) -> None:
            with store._state.locked(exclusive=True):
                inside.set()
                go.wait()

        def use(store: LocalStore = store) -> None:
            store.update("a", ids(1), torch.ones(1, 4))
            store.update_async("a", ids(1), torch.ones(1, 4)).result()
            assert (store.pull("a", ids(1)) == -1.0).all()

        done = store._updates.submit(hold)
        inside.wait()
        pid = os.fork()
        if pid == 0:
            os._exit(in_fork(use))
        go.set()
        pipe.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        done.result()
        store.drain()


def test_a_store_can_be_used_after_a_fork_whatever_its_threads_were_doing(shared_name: str) -> None:
    ours, theirs = mp.Pipe(duplex=False)
    process = start_process(_fork_while_threads_update, shared_name, theirs)
    theirs.close()
    for _ in range(2):
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv() == 0
    process.join()
    assert (SharedMemoryStore(shared_name).pull("a", ids(1)) == -1.0).all()


def _fork_with_a_remote_store(url: str, pipe: Connection) -> None:
    store = RemoteStore([url])

    def use() -> None:
        with pytest.raises(StoreError, match="cannot be used after a fork"):
            store.pull("a", ids(1))
        store.close()

    pipe.send(in_fork(use))
    pipe.send(bool((store.pull("a", ids(1)) == 1.0).all()))


def test_a_remote_store_says_that_it_cannot_be_used_after_a_fork() -> None:
    with MemoryStore() as local:
        local.create_tables(DENSE, SGD(1.0))
        server = StoreServer(local)
        ours, theirs = mp.Pipe(duplex=False)
        start_process(_fork_with_a_remote_store, server.url, theirs)
        theirs.close()
        assert ours.poll(WAIT_SECONDS)
        assert ours.recv() == 0
        assert ours.recv()
        server.close()


# Turns


def test_who_waits_to_write_comes_before_those_who_want_to_read_later(tmp_path: Path) -> None:
    reading, writing, later = (Directory(tmp_path) for _ in range(3))
    order = []

    def enter(place: Directory, exclusive: bool) -> None:
        with place.locked(exclusive=exclusive):
            order.append("write" if exclusive else "read")

    with reading.locked(exclusive=False):
        writer = threading.Thread(target=enter, args=(writing, True))
        writer.start()
        with open(tmp_path / TURN_NAME) as turn:
            taken = False
            while not taken:  # until the writer waits
                try:
                    fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(turn, fcntl.LOCK_UN)
                except BlockingIOError:
                    taken = True
        reader = threading.Thread(target=enter, args=(later, False))
        reader.start()
    writer.join()
    reader.join()
    assert order == ["write", "read"]


# Whose directory it is


def prepare_open_to_all(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def prepare_a_link(path: Path) -> None:
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def prepare_another_users(path: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "prepare",
    [
        prepare_open_to_all,
        prepare_a_link,
        pytest.param(
            prepare_another_users, marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root gives away")
        ),
    ],
)
def test_shared_memory_that_another_user_may_have_prepared_is_refused(
    prepare: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_ext.store.stores._SHARED_MEMORY", tmp_path)
    path = tmp_path / "torchrec_ext.mine"
    prepare(path)
    with pytest.raises(StoreError, match="made by another user, or others may write to it"):
        SharedMemoryStore("mine")
    assert not list(path.iterdir())


@pytest.mark.parametrize(
    "names", [["weights.bin"], ["group_0_dim_8.weight.bin", "clock.bin", "lock", "turn"]]
)
def test_files_that_no_description_names_are_not_touched(names: list[str], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(StoreError, match=r"holds something else than a store .*store.json is missing"):
        FileStore(tmp_path)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == dict.fromkeys(names, b"precious")


# Changes that fail


def test_a_change_of_the_optimizer_that_fails_changes_nothing(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    store.create_tables(DENSE, SGD(1.0))
    (tmp_path / "store" / ".store.json").mkdir()  # the description cannot be written
    for optimizer in (SGD(0.5), AdaGrad()):
        with pytest.raises(StoreError, match=r"store.json: Is a directory"):
            store.set_optimizer(["a", "b"], optimizer)
        assert store.optimizer("a") == store.optimizer("b") == SGD(1.0)
    with pytest.raises(StoreError, match=r"store.json: Is a directory"):
        store.create_tables(LATER, SGD())
    assert list(store.tables) == ["a", "b"]
    store.update_many([("a", ids(1), torch.ones(1, 4)), ("b", ids(1), torch.ones(1, 8))])
    assert (store.pull("b", ids(1)) == 1.0).all()
    shutil.rmtree(tmp_path / "store")  # no state can be made
    with pytest.raises(StoreError, match="No such file"):
        store.set_optimizer(["a", "b"], AdaGrad())
    assert (store.pull("b", ids(1)) == 1.0).all()
    assert store.optimizer("a") == SGD(1.0)


def test_state_that_was_replaced_takes_no_memory(shared_name: str) -> None:
    with SharedMemoryStore(shared_name) as store, SharedMemoryStore(shared_name) as other:
        store.create_tables(DENSE, AdaGrad())
        group = other.group_of("a")
        for optimizer in (SGD(), AdaGrad(), SGD(), AdaGrad(0.5)):
            store.set_optimizer(["a", "b"], optimizer)
        store.update("a", ids(1), torch.ones(1, 4))
        assert other.group_of("a") is group and group.optimizer == AdaGrad(0.5)
        assert (group.slots["sum"][1] == 1.0).all()
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if shared_name in line]
        assert not [line for line in mapped if "deleted" in line]
        assert len([name for name in store.path.iterdir() if "slots_" in name.name]) == 2
