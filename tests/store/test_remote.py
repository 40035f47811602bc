from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.ports import Port
from torchrec_ext.cli import main
from torchrec_ext.errors import StoreError, TableFullError
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    Adam,
    CounterFilter,
    DenseTable,
    DynamicTable,
    FileStore,
    MemoryStore,
    Rows,
    RowWiseAdaGrad,
    SharedMemoryStore,
    Store,
    StoreOptimizer,
    StoreSnapshot,
    Uniform,
)
from torchrec_ext.store.flight import shares, wire
from torchrec_ext.store.flight.remote import RemoteStore
from torchrec_ext.store.flight.server import StoreServer
from torchrec_ext.store.urls import TOKEN_VARIABLE, open_store

DENSE = DenseTable("dense", 4, 11, first_key=5, initializer=Uniform(-1.0, 1.0, seed=3))
TABLES = [
    DENSE,
    DenseTable("tiny", 4, 1),
    DenseTable("wide", 6, 5),
    DynamicTable("dynamic", 4, 200, filter=CounterFilter(2), default_value=0.5),
]
TOKEN = "open-sesame"


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def serve(stack: ExitStack, count: int = 1, **options: Any) -> list[str]:
    """Starts servers of empty memory stores in this process; returns their URLs."""
    urls = []
    for _ in range(count):
        server = StoreServer(MemoryStore(), **options)
        stack.callback(server.close)
        urls.append(server.url)
    return urls


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def address(stack: ExitStack) -> str:
    """Where one server after another can listen."""
    port = Port()
    stack.callback(port.release)
    return f"grpc://127.0.0.1:{port.number}"


class ServerProcess:
    """A server in a process of its own, started by the command."""

    def __init__(self, directory: Path, url: str, **env: str) -> None:
        ready = directory / "ready"
        options = ["--listen", url, "--ready-file", str(ready)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchrec_ext.cli", "serve-store", str(directory / "store"), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )
        self.first_line = self.line()
        self.url = ready.read_text()

    def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


Requests = Sequence[tuple[str, torch.Tensor]]


@contextmanager
def server_process(directory: Path, url: str = "grpc://127.0.0.1:0", **env: str) -> Iterator[ServerProcess]:
    server = ServerProcess(directory, url, **env)
    with server.process:  # closes its output
        try:
            yield server
        finally:
            server.kill()


# It answers like a store in memory

keys_of = {
    "dense": st.integers(5, 15),
    "tiny": st.just(0),
    "wide": st.integers(0, 4),
    "dynamic": st.integers(-6, 6) | st.sampled_from([2**63 - 1, -(2**63), 2**40]),
}
some_table = st.sampled_from(list(keys_of))
lookups = st.lists(some_table, min_size=1, max_size=4).flatmap(
    lambda names: st.tuples(
        *(
            st.tuples(st.just(name), st.lists(keys_of[name], max_size=6).map(lambda keys: ids(*keys)))
            for name in names
        )
    )
)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("pull_many"), lookups, st.booleans()),
        st.tuples(st.just("refresh_many"), st.booleans()),
        st.tuples(st.just("update_many"), lookups, st.integers(1, 5)),
        st.tuples(st.just("update_async"), lookups, st.integers(1, 5)),
        st.tuples(st.just("read"), lookups),
        st.tuples(st.just("write"), lookups, st.booleans()),
        st.tuples(st.just("evict_unused"), st.integers(0, 3)),
        st.tuples(st.just("set_optimizer"), st.sampled_from([SGD(0.5), AdaGrad(0.25), Adam(0.5)])),
        st.tuples(st.just("snapshot")),
        st.tuples(st.just("restore")),
    ),
    max_size=12,
)


class Trainer:
    """Does operations to a store, and tells what it answered."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.held: list[tuple[str, Rows]] = []
        self.saved: StoreSnapshot | None = None
        store.create_tables(TABLES, RowWiseAdaGrad(0.5))

    def do(self, op: str, *args: Any) -> Any:
        return getattr(self, op)(*args)

    def pull_many(self, requests: Requests, admit: bool) -> Any:
        found = self.store.pull_many(requests, admit=admit, ahead=True)
        self.held += [(name, rows) for (name, _), rows in zip(requests, found, strict=True)]
        return [rows.rows.clone() for rows in found]

    def refresh_many(self, admit: bool) -> Any:
        counts = [torch.arange(len(rows.keys)) + 1 for _, rows in self.held]
        count = self.store.refresh_many(self.held, admit=admit, counts=counts)
        return count, [rows.rows.clone() for _, rows in self.held]

    def update_many(self, requests: Requests, step: int) -> None:
        self.store.update_many([(name, keys, gradients(name, keys)) for name, keys in requests], step=step)

    def update_async(self, requests: Requests, step: int) -> None:
        for name, keys in requests:
            self.store.update_async(name, keys, gradients(name, keys), step=step)

    def read(self, requests: Requests) -> Any:
        return [self.store.read(name, keys) for name, keys in requests]

    def write(self, requests: Requests, with_slots: bool) -> None:
        for name, repeated in requests:
            keys = repeated.unique()
            slots = self.store.read(name, keys)[1] if with_slots else {}
            self.store.write(
                name, keys, gradients(name, keys) + 7, {slot: value + 1 for slot, value in slots.items()}
            )

    def evict_unused(self, steps: int) -> Any:
        return self.store.evict_unused("dynamic", steps)  # type: ignore[attr-defined]

    def set_optimizer(self, optimizer: StoreOptimizer) -> Any:
        self.store.set_optimizer([table.name for table in TABLES], optimizer)
        self.saved = None
        return [self.store.optimizer(table.name) for table in TABLES]

    def snapshot(self) -> Any:
        self.saved = self.store.snapshot()
        return content(self.saved)

    def restore(self) -> None:
        if self.saved is not None:
            self.store.restore(self.saved)


def gradients(table: str, keys: torch.Tensor) -> torch.Tensor:
    dim = {table.name: table.dim for table in TABLES}[table]
    return (torch.arange(len(keys) * dim) % 5).view(len(keys), dim) / 4


def content(snapshot: StoreSnapshot) -> Any:
    """What a snapshot holds whoever took it: the clocks of several servers are not those of one."""
    tables = {}
    for name, part in snapshot.tables.items():
        waiting = None
        if part.candidates is not None and part.candidate_counts is not None:
            waiting = dict(zip(part.candidates.tolist(), part.candidate_counts.tolist(), strict=True))
        tables[name] = [
            part.table,
            part.optimizer,
            part.keys,
            part.weight,
            part.slots,
            part.frequencies,
            part.last_used,
            waiting,
        ]
    return snapshot.step, tables


def same(a: Any, b: Any) -> bool:
    """Whether two answers are bit-identical."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bool(a == b)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 3), writers=st.sampled_from(["many", "one"]), operations=operations)
def test_a_remote_store_answers_like_a_memory_store(count: int, writers: Any, operations: Any) -> None:
    with ExitStack() as stack:
        local = Trainer(MemoryStore())
        remote = Trainer(stack.enter_context(RemoteStore(serve(stack, count), writers=writers)))
        assert dict(remote.store.tables) == dict(local.store.tables)
        for operation in operations:
            expected = local.do(*operation)
            assert same(remote.do(*operation), expected), operation
        assert same(remote.snapshot(), local.snapshot())


@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_many_keys_travel_in_pieces_and_in_order(stack: ExitStack, count: int) -> None:
    store = stack.enter_context(RemoteStore(serve(stack, count)))
    big = DenseTable("big", 64, 50_000)
    store.create_tables([big], SGD(1.0))
    keys = torch.randperm(big.num_rows)
    expected = big.initializer.rows(keys, 64)
    assert torch.equal(store.pull("big", keys), expected)
    store.update("big", keys, torch.ones(len(keys), 64))
    assert torch.equal(store.pull("big", keys), expected - 1)


@pytest.mark.parametrize("count", [1, 2])
def test_errors_arrive_as_they_were_raised_and_nothing_was_done(stack: ExitStack, count: int) -> None:
    def wrong(store: Store) -> list[tuple[type, str]]:
        small = DynamicTable("small", 4, 2)
        store.create_tables([*TABLES, small], SGD(1.0))
        calls: list[Callable[[], Any]] = [
            lambda: store.pull("none", ids(1)),
            lambda: store.optimizer("none"),
            lambda: store.pull("dense", ids(5, 16)),
            lambda: store.pull("dense", torch.zeros(2)),
            lambda: store.update_many(
                [("dense", ids(5), torch.ones(1, 4)), ("dense", ids(4), torch.ones(1, 4))]
            ),
            lambda: store.write("dense", ids(6, 6), torch.ones(2, 4)),
            lambda: store.write("dense", ids(6), slots={"sum": torch.ones(1, 1)}),
            lambda: store.create_tables([DenseTable("dense", 8, 11)], SGD(1.0)),
            lambda: store.create_tables([DenseTable("twice", 8, 1), DenseTable("twice", 8, 1)], SGD(1.0)),
            lambda: store.set_optimizer(["dense"], Adam()),
            lambda: store.evict_unused("dense", 1),  # type: ignore[attr-defined]
            lambda: store.snapshot(["none"]),
            lambda: store.restore(StoreSnapshot(1, 1, {"none": store.snapshot(["dense"]).tables["dense"]})),
        ]
        raised = []
        for call in calls:
            with pytest.raises((KeyError, ValueError)) as caught:
                call()
            raised.append((caught.type, str(caught.value)))
        with pytest.raises(TableFullError, match="small"):
            store.pull("small", ids(1, 2, 3, 4, 5), admit=True)
        assert torch.equal(store.pull("dense", ids(5, 6)), DENSE.initializer.rows(ids(5, 6), 4))
        return raised

    remote = wrong(stack.enter_context(RemoteStore(serve(stack, count))))
    local = wrong(MemoryStore())
    for (kind, message), (expected_kind, expected) in zip(remote, local, strict=True):
        assert kind is expected_kind
        if count == 1 or "another" not in expected:  # which names what the server has of the table
            assert message == expected


def test_a_change_of_many_tables_is_one_change(stack: ExitStack) -> None:
    store = stack.enter_context(RemoteStore(serve(stack)))
    store.create_tables(TABLES, SGD(1.0))
    before = store.clock
    store.update_many([("dense", ids(5), torch.ones(1, 4)), ("wide", ids(0), torch.ones(1, 6))])
    assert store.clock == before + 1


@pytest.mark.parametrize("writers", ["many", "one"])
def test_updates_from_several_threads_and_clients_all_count(stack: ExitStack, writers: Any) -> None:
    urls = serve(stack, 2)
    stores = [stack.enter_context(RemoteStore(urls, writers=writers)) for _ in range(2)]
    stores[0].create_tables(TABLES, SGD(1.0))
    stores[0].write("dense", ids(5, 6, 7), torch.zeros(3, 4))

    def work(thread: int) -> None:
        for _ in range(20):
            stores[thread % 2].update("dense", ids(5, 6), torch.ones(2, 4))
            stores[thread % 2].update_async("dense", ids(7), torch.ones(1, 4))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for store in stores:
        store.drain()
    assert torch.equal(stores[0].pull("dense", ids(5, 6, 7)), torch.full((3, 4), -80.0))


# Exact prefetch


def test_only_rows_that_another_client_wrote_are_read_again(stack: ExitStack) -> None:
    urls = serve(stack, 2)
    reader, writer = (stack.enter_context(RemoteStore(urls)) for _ in range(2))
    reader.create_tables(TABLES, SGD(1.0))
    (held,) = reader.pull_many([("dense", ids(*range(5, 16)))])
    assert reader.refresh_many([("dense", held)]) == 0
    writer.update("dense", ids(7, 8, 15), torch.ones(3, 4))
    assert reader.refresh_many([("dense", held)]) == 3
    assert torch.equal(held.rows, reader.pull("dense", held.keys))
    assert reader.refresh_many([("dense", held)]) == 0


def test_the_only_writer_asks_no_server_about_rows_that_it_did_not_write() -> None:
    server = StoreServer(MemoryStore())
    with RemoteStore([server.url], writers="one") as store:
        store.create_tables(TABLES, SGD(1.0))
        written, unwritten = store.pull_many([("dense", ids(5, 6)), ("dense", ids(7, 8))])
        store.update("dense", ids(6), torch.ones(1, 4))
        assert store.refresh_many([("dense", written)]) == 1
        server.close()
        assert store.refresh_many([("dense", written), ("dense", unwritten)]) == 0
        with pytest.raises(StoreError, match="may have been made, or not"):
            store.update("dense", ids(7), torch.ones(1, 4))
        with pytest.raises(StoreError, match="cannot be reached"):  # perhaps it was
            store.refresh_many([("dense", unwritten)])


@pytest.mark.parametrize("count", [1, 2])
def test_the_only_writers_updates_bring_back_the_rows_that_were_read_ahead(
    stack: ExitStack, count: int
) -> None:
    store = stack.enter_context(RemoteStore(serve(stack, count), writers="one"))
    store.create_tables(TABLES, SGD(1.0))
    first, dropped, second = (
        store.pull_many([("dense", keys)], ahead=True)[0] for keys in (ids(5, 6, 9), ids(7, 8), ids(6, 7, 10))
    )
    del dropped
    store.update_many([("dense", ids(6, 7, 6, 8), torch.ones(4, 4)), ("wide", ids(1), torch.ones(1, 6))])
    store.update("dense", ids(9), torch.ones(1, 4))
    with asked(store) as requests:
        assert store.refresh_many([("dense", first)]) == 2
        assert store.refresh_many([("dense", second)]) == 2
    assert requests == []
    assert torch.equal(first.rows, store.pull("dense", ids(5, 6, 9)))
    assert torch.equal(second.rows, store.pull("dense", ids(6, 7, 10)))
    # Nobody waits for rows any more.
    (late,) = store.pull_many([("dense", ids(6))])
    store.update("dense", ids(6), torch.ones(1, 4))
    with asked(store) as requests:
        assert store.refresh_many([("dense", late)]) == 1
    assert requests == ["refresh_many"]


def test_rows_that_were_read_ahead_long_ago_are_exact(stack: ExitStack) -> None:
    store = stack.enter_context(RemoteStore(serve(stack), writers="one"))
    store.create_tables(TABLES, SGD(1.0))
    (held,) = store.pull_many([("dense", ids(9, 5, 6, 9))], ahead=True)
    store.update("dense", ids(5), torch.ones(1, 4))
    for _ in range(100):  # more updates than are remembered
        store.update("dense", ids(6, 9), torch.ones(2, 4))
    assert store.refresh_many([("dense", held)]) == 4
    assert torch.equal(held.rows, store.pull("dense", held.keys))


@contextmanager
def asked(store: RemoteStore) -> Iterator[list[str]]:
    """What is asked of a store's servers."""
    ops: list[str] = []
    ask = store._servers.ask

    def heard(op: str, *args: Any, **kwargs: Any) -> Any:
        ops.append(op)
        return ask(op, *args, **kwargs)

    store._servers.ask = heard  # type: ignore[method-assign]
    try:
        yield ops
    finally:
        del store._servers.ask


@contextmanager
def held_up(server: StoreServer, store: RemoteStore, op: str) -> Iterator[None]:
    """A request arrives, and is not answered before its time is over; others have all the time they need."""
    arrived, goes_on = threading.Event(), threading.Event()
    handlers = server._flight._requests._handlers
    handler, ask = handlers[op], store._servers.ask

    def late(args: dict[str, Any], tensors: Sequence[torch.Tensor]) -> Any:
        arrived.set()
        goes_on.wait(600)
        return handler(args, tensors)

    def impatient(asked: str, *args: Any, **kwargs: Any) -> Any:
        if asked != op:
            return ask(asked, *args, **kwargs)
        while True:  # one whose time was over before it arrived was never asked
            try:
                return ask(asked, *args, **{**kwargs, "timeout": 0.5})
            except StoreError:
                if arrived.is_set():
                    raise

    handlers[op], store._servers.ask = late, impatient  # type: ignore[method-assign]
    try:
        yield
    finally:
        handlers[op] = handler
        del store._servers.ask
        goes_on.set()


def test_the_only_writer_asks_about_rows_that_may_have_been_written() -> None:
    local = MemoryStore()
    server = StoreServer(local)
    with RemoteStore([server.url], writers="one") as store:
        store.create_tables(TABLES, SGD(1.0))
        (held,) = store.pull_many([("dense", ids(5))])
        before = local.clock
        with held_up(server, store, "update_many"), pytest.raises(StoreError, match="did not answer"):
            store.update("dense", ids(5), torch.ones(1, 4))
        while local.clock == before:  # the server goes on by itself
            local.pull("dense", ids(5))
        assert store.refresh_many([("dense", held)]) == 1
    server.close()


def test_the_only_writer_asks_about_rows_that_it_may_have_restored() -> None:
    local = MemoryStore()
    server = StoreServer(local)
    with RemoteStore([server.url], writers="one") as store:
        store.create_tables(TABLES, SGD(1.0))
        snapshot = store.snapshot()
        store.update("dense", ids(5), torch.ones(1, 4))
        (held,) = store.pull_many([("dense", ids(5))])
        before = local.clock
        with held_up(server, store, "restore"), pytest.raises(StoreError, match="did not answer"):
            store.restore(snapshot)
        while local.clock == before:  # the server goes on by itself
            local.pull("dense", ids(5))
        assert store.refresh_many([("dense", held)]) == 1
        assert torch.equal(held.rows, DENSE.initializer.rows(ids(5), 4))
    server.close()


def test_rows_that_were_read_ahead_and_dropped_take_no_memory(stack: ExitStack) -> None:
    store = stack.enter_context(RemoteStore(serve(stack), writers="one"))
    store.create_tables(TABLES, SGD(1.0))
    kept = store.pull_many([("dense", ids(5, 6)), ("wide", ids(1))], ahead=True)
    dropped = []
    for _ in range(50):
        keys = ids(7, 8)
        dropped.append(weakref.ref(keys))
        store.pull_many([("dense", keys)], ahead=True)
        del keys
    store.pull_many([("wide", ids(2))], ahead=True)
    assert not any(keys() is not None for keys in dropped)
    store.update("dense", ids(6), torch.ones(1, 4))
    with asked(store) as requests:
        assert store.refresh_many([("dense", kept[0]), ("wide", kept[1])]) == 1
    assert requests == []


def test_a_table_may_have_another_size_after_a_restart(stack: ExitStack) -> None:
    first = StoreServer(MemoryStore(), address(stack))
    store = stack.enter_context(RemoteStore([first.url], writers="one"))
    store.create_tables([DenseTable("a", 4, 3)], SGD(1.0))
    held = store.pull_many([("a", ids(2))], ahead=True)
    store.update("a", ids(2), torch.ones(1, 4))
    first.close()
    stack.callback(StoreServer(MemoryStore(), first.url).close)
    with pytest.raises(StoreError, match="was restarted"):
        store.pull("a", ids(2))
    store.create_tables([DenseTable("a", 4, 300)], SGD(1.0))
    held += store.pull_many([("a", ids(2, 299))], ahead=True)
    store.update("a", ids(2, 299), torch.ones(2, 4))
    assert store.refresh_many([("a", rows) for rows in held]) == 3
    assert torch.equal(held[1].rows, store.pull("a", ids(2, 299)))


def test_a_server_that_died_when_it_began_can_be_started_again(stack: ExitStack, tmp_path: Path) -> None:
    StoreServer(FileStore(tmp_path)).close()
    os.truncate(tmp_path / "share.bin", 0)
    store = stack.enter_context(RemoteStore([_served_files(stack, tmp_path)]))
    store.create_tables(TABLES, SGD(1.0))
    assert torch.equal(store.pull("dense", ids(5)), DENSE.initializer.rows(ids(5), 4))


def _served_files(stack: ExitStack, path: Path) -> str:
    server = StoreServer(FileStore(path))
    stack.callback(server.close)
    return server.url


def test_the_only_writer_asks_about_rows_that_it_restored(stack: ExitStack) -> None:
    store = stack.enter_context(RemoteStore(serve(stack), writers="one"))
    store.create_tables(TABLES, SGD(1.0))
    snapshot = store.snapshot()
    store.update("dense", ids(5), torch.ones(1, 4))
    (held,) = store.pull_many([("dense", ids(5))])
    store.restore(snapshot)
    assert store.refresh_many([("dense", held)]) == 1
    assert torch.equal(held.rows, DENSE.initializer.rows(ids(5), 4))


@pytest.mark.parametrize("writers", ["many", "one"])
def test_whatever_reads_sees_the_updates_that_nobody_waited_for(stack: ExitStack, writers: Any) -> None:
    store = stack.enter_context(RemoteStore(serve(stack, 2), writers=writers))
    store.create_tables(TABLES, SGD(1.0))
    store.write("dense", ids(5, 6), torch.zeros(2, 4))
    (held,) = store.pull_many([("dense", ids(5, 6))])

    def refreshed() -> torch.Tensor:
        store.refresh_many([("dense", held)])
        return held.rows

    reads: list[Callable[[], torch.Tensor]] = [
        refreshed,
        lambda: store.pull("dense", ids(5, 6)),
        lambda: store.read("dense", ids(5, 6))[0],
        lambda: store.snapshot().tables["dense"].weight[:2],
    ]
    for count, read in enumerate(reads, 1):
        for _ in range(20):
            store.update_async("dense", ids(5, 6), torch.ones(2, 4))
        assert torch.equal(read(), torch.full((2, 4), -20.0 * count))


# Servers that are gone, come back, or are others


def test_a_server_that_was_killed_is_named_and_found_again_with_its_rows(
    stack: ExitStack, tmp_path: Path
) -> None:
    url = address(stack)
    with server_process(tmp_path, url) as first:
        assert first.url == url
        store = stack.enter_context(RemoteStore([url]))
        store.create_tables(TABLES, AdaGrad(0.5))
        store.update("dense", ids(5, 6), torch.ones(2, 4))
        before = store.read("dense", ids(5, 6, 7))
        (held,) = store.pull_many([("dense", ids(5, 6, 7))])
        first.kill()
        with pytest.raises(
            StoreError, match=f"{url} cannot be reached.*; the change may have been made, or not"
        ):
            store.update("dense", ids(7), torch.ones(1, 4))
        for read in (lambda: store.pull("dense", ids(5)), lambda: store.refresh_many([("dense", held)])):
            with pytest.raises(StoreError, match=f"{url} cannot be reached"):
                read()
        with pytest.raises(StoreError, match=f"{url} cannot be reached"):
            RemoteStore([url])

    stack.callback(StoreServer(FileStore(tmp_path / "store"), url).close)
    assert same(store.read("dense", ids(5, 6, 7)), before)
    assert store.refresh_many([("dense", held)]) == 3  # a restart may have lost what was written
    store.update("dense", ids(7), torch.ones(1, 4))
    assert torch.equal(store.pull("dense", ids(7)), before[0][2:] - 0.5)


def test_a_restart_that_nobody_noticed_is_told_once(stack: ExitStack, tmp_path: Path) -> None:
    first = StoreServer(FileStore(tmp_path), address(stack))
    store = stack.enter_context(RemoteStore([first.url]))
    store.create_tables(TABLES, SGD(1.0))
    held = store.pull_many([("dense", ids(5, 6))])
    first.close()
    stack.callback(StoreServer(FileStore(tmp_path), first.url).close)
    with pytest.raises(StoreError, match=f"{first.url} was restarted"):
        store.update("dense", ids(5), torch.ones(1, 4))
    assert torch.equal(store.pull("dense", ids(5)), DENSE.initializer.rows(ids(5), 4))
    assert store.refresh_many([("dense", held[0])]) == 2


def test_rows_read_before_a_restart_are_never_taken_for_later_ones(stack: ExitStack) -> None:
    first = StoreServer(MemoryStore(), address(stack))
    store = stack.enter_context(RemoteStore([first.url], writers="one"))
    store.create_tables(TABLES, SGD(1.0))
    store.update("dense", ids(5), torch.ones(1, 4))
    (held,) = store.pull_many([("dense", ids(5, 6))])
    first.close()
    stack.callback(StoreServer(MemoryStore(), first.url).close)
    with pytest.raises(StoreError, match="was restarted"):
        store.pull("dense", ids(5))
    store.create_tables(TABLES, SGD(1.0))
    store.update("dense", ids(5), torch.full((1, 4), 8.0))  # the same clock, another row
    assert store.refresh_many([("dense", held)]) == 2
    assert torch.equal(held.rows, store.pull("dense", held.keys))


def test_servers_remember_their_share_of_the_keys(stack: ExitStack, tmp_path: Path) -> None:
    with ExitStack() as before:
        servers = [StoreServer(FileStore(tmp_path / str(index))) for index in range(2)]
        for server in servers:
            before.callback(server.close)
        store = before.enter_context(RemoteStore([server.url for server in servers]))
        store.create_tables(TABLES, SGD(1.0))
        store.update("dense", ids(5, 6), torch.ones(2, 4))

    servers = [StoreServer(FileStore(tmp_path / str(index))) for index in range(2)]
    for server in servers:
        stack.callback(server.close)
    a, b = (server.url for server in servers)
    for urls in ([b, a], [a], [a, b, *serve(stack)]):
        with pytest.raises(StoreError, match=r"the server holds share \d of 2, not \d of"):
            RemoteStore(urls)
    with RemoteStore([a, b]) as store:
        expected = DENSE.initializer.rows(ids(5, 6, 7), 4)
        expected[:2] -= 1
        assert torch.equal(store.pull("dense", ids(5, 6, 7)), expected)


def test_one_server_cannot_be_two(stack: ExitStack) -> None:
    (url,) = serve(stack)
    for urls in ([url, url], [url, url.replace("127.0.0.1", "localhost")]):
        with pytest.raises(ValueError, match=r"different servers|the same server"):
            RemoteStore(urls)


def test_a_server_that_does_not_answer_is_given_up_after_the_timeout(stack: ExitStack) -> None:
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    url = f"grpc://127.0.0.1:{silent.getsockname()[1]}"
    with pytest.raises(StoreError, match=f"{url} did not answer within 0.2 s"):
        RemoteStore([url], timeout=0.2)


class StrangeServer(flight.FlightServerBase):  # type: ignore[misc]
    """Says what it is told to."""

    def __init__(self, hello: bytes) -> None:
        super().__init__("grpc://127.0.0.1:0")
        self._hello = hello

    def do_action(self, context: Any, action: Any) -> list[bytes]:
        return [self._hello]


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (b"hi", "is not a store's server"),
        (
            b'{"protocol": 99, "instance": "x", "share": null}',
            f"speaks protocol 99, this client {wire.PROTOCOL}",
        ),
    ],
)
def test_servers_of_another_kind_are_refused(stack: ExitStack, hello: bytes, message: str) -> None:
    server = stack.enter_context(StrangeServer(hello))
    with pytest.raises(StoreError, match=message):
        RemoteStore([f"grpc://127.0.0.1:{server.port}"])


def test_what_fails_in_the_background_is_raised_where_it_is_waited_for(stack: ExitStack) -> None:
    server = StoreServer(MemoryStore())
    store = RemoteStore([server.url])
    store.create_tables(TABLES, SGD(1.0))
    server.close()
    future = store.update_async("dense", ids(5), torch.ones(1, 4))
    with pytest.raises(StoreError, match="may have been made, or not"):
        future.result()
    with pytest.raises(RuntimeError, match="asynchronous update"):
        store.pull("dense", ids(5))
    store.close()
    store.close()
    with pytest.raises(StoreError, match="the store is closed"):
        store.pull("dense", ids(5))


# Who may connect


def test_only_who_knows_the_token_may_do_anything(stack: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    (url,) = serve(stack, token=TOKEN)
    with pytest.raises(StoreError, match=f"{url} wants a token"):
        RemoteStore([url])
    with pytest.raises(StoreError, match=f"{url} refused the token") as refused:
        RemoteStore([url], token=f"{TOKEN}-not")
    with RemoteStore([url], token=TOKEN) as store:
        store.create_tables(TABLES, SGD(1.0))
        assert store.pull("dense", ids(5)).shape == (1, 4)
        assert TOKEN not in repr(store) + repr(vars(store)) + str(refused.value) + caplog.text
    with pytest.raises(flight.FlightUnauthenticatedError):
        list(flight.FlightClient(url).do_action(flight.Action(wire.HELLO, b"")))
    with pytest.raises(ValueError, match="visible ASCII"):
        RemoteStore([url], token="two\nlines")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_the_server_proves_who_it_is_by_its_certificate(stack: ExitStack, tmp_path: Path) -> None:
    def certificate(name: str) -> tuple[bytes, bytes]:
        key, cert = tmp_path / f"{name}.key", tmp_path / f"{name}.crt"
        options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
        options += " -addext subjectAltName=IP:127.0.0.1"
        subprocess.run(
            ["openssl", "req", *options.split(), "-keyout", key, "-out", cert],
            check=True,
            capture_output=True,
        )
        return cert.read_bytes(), key.read_bytes()

    tls, other = certificate("server"), certificate("other")
    server = StoreServer(MemoryStore(), "grpc+tls://127.0.0.1:0", token=TOKEN, tls=tls)
    stack.callback(server.close)
    store = stack.enter_context(RemoteStore([server.url], token=TOKEN, tls_root_certs=tls[0]))
    store.create_tables(TABLES, SGD(1.0))
    assert store.pull("dense", ids(5)).shape == (1, 4)
    with pytest.raises(StoreError, match="cannot be reached"):
        RemoteStore([server.url], token=TOKEN, tls_root_certs=other[0])


def test_other_hosts_are_not_let_in_without_a_token() -> None:
    with MemoryStore() as store:
        with pytest.raises(ValueError, match="give the server a token"):
            StoreServer(store, "grpc://0.0.0.0:0")
        StoreServer(store, "grpc://0.0.0.0:0", token=TOKEN).close()
    StoreServer(MemoryStore(), "grpc://0.0.0.0:0", insecure=True).close()


def test_two_servers_cannot_have_one_address(stack: ExitStack) -> None:
    (url,) = serve(stack)
    with MemoryStore() as store, pytest.raises(StoreError, match=f"cannot listen on {url}"):
        StoreServer(store, url)


# Messages


def test_a_message_that_is_cut_short_or_none_at_all_changes_nothing(stack: ExitStack) -> None:
    local = MemoryStore()
    local.create_tables(TABLES, SGD(1.0))
    server = StoreServer(local)
    stack.callback(server.close)
    client = stack.enter_context(flight.FlightClient(server.url))
    (hello,) = client.do_action(flight.Action(wire.HELLO, b""))
    args = {"tables": ["dense"], "step": 1, "lr": None}
    header = {"op": "update_many", "args": args, "instance": json.loads(hello.body.to_pybytes())["instance"]}
    update = {**header, "tensors": [["int64", [1]], ["float32", [1, 4]]]}
    whole = [ids(5).numpy().view("uint8"), torch.ones(1, 4).numpy().reshape(-1).view("uint8")]
    clock = local.clock
    for metadata, pieces, message in [
        (json.dumps(update), whole[:1], "cut short"),
        (json.dumps(update), [*whole, *whole], "longer than announced"),
        (json.dumps({**header, "tensors": [["object", [1]]]}), [], "something else"),
        (json.dumps({**header, "tensors": [["int64", [-1]]]}), [], "something else"),
        ("hello", [], "something else"),
    ]:
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""))
        writer.begin(wire.SCHEMA)
        writer.write_metadata(metadata.encode())
        for piece in pieces:
            writer.write_batch(pa.RecordBatch.from_arrays([pa.array(piece)], schema=wire.SCHEMA))
        writer.done_writing()
        answer, _ = wire.receive(reader)
        writer.close()
        assert answer["error"]["kind"] == "StoreError"
        assert message in answer["error"]["message"]
    assert local.clock == clock


def test_keys_are_spread_evenly_over_the_servers() -> None:
    tables = [DenseTable("dense", 4, 10**6), DynamicTable("dynamic", 4, 10**6)]
    for table, count, stride in itertools.product(tables, (2, 3, 8), (1, 3, 1024)):
        if isinstance(table, DenseTable) and math.gcd(count, stride) > 1:
            continue  # dealt out in turn: all of them go to one
        servers = shares.server_of(table, torch.arange(900) * stride, count)
        assert torch.bincount(servers, minlength=count).min() > 0.8 * 900 / count


# The command


def test_a_server_that_is_told_to_stop_finishes_its_requests_and_closes_its_store(tmp_path: Path) -> None:
    with server_process(tmp_path, **{TOKEN_VARIABLE: TOKEN}) as server:
        url = server.url
        with RemoteStore([url], token=TOKEN) as store:
            store.create_tables(TABLES, SGD(1.0))
        client = flight.FlightClient(url)
        options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {TOKEN}".encode())])
        writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b""), options)
        writer.begin(wire.SCHEMA)
        # Answered after the request above arrived.
        (hello,) = client.do_action(flight.Action(wire.HELLO, b""), options)
        server.process.send_signal(signal.SIGTERM)
        assert "finishing requests" in server.line()
        instance = json.loads(hello.body.to_pybytes())["instance"]
        header = {"op": "describe", "args": {}, "instance": instance, "tensors": []}
        writer.write_metadata(json.dumps(header).encode())
        writer.done_writing()
        answer, _ = wire.receive(reader)
        assert len(answer["tables"]) == len(TABLES)
        writer.close()
        client.close()
        assert server.process.wait() == 0
        assert TOKEN not in server.first_line + server.line()
    with FileStore(tmp_path / "store") as store:
        assert set(store.tables) == {table.name for table in TABLES}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--listen", "grpc://0.0.0.0:0"], "give the server a token"),
        (["--listen", "http://127.0.0.1:0"], "a server listens on grpc://"),
        (["--tls-cert", "cert.pem"], "go together"),
        (["--listen", "grpc+tls://127.0.0.1:0"], "a certificate and its key"),
        (["grpc://127.0.0.1:1"], "is served already"),
        (["--token-file", "/nowhere/token"], "/nowhere/token"),
    ],
)
def test_the_command_says_what_is_wrong_with_its_arguments(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["serve-store", *arguments], env={TOKEN_VARIABLE: ""})
    assert result.exit_code == 2
    assert message in result.output


# URLs


def test_stores_are_opened_by_url(stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("TORCHREC_EXT_STORE_TOKEN_FILE", str(token_file))
    servers = serve(stack, 2, token=TOKEN)
    remote = "grpc://" + ",".join(url.removeprefix("grpc://") for url in servers)
    for url, kind in [
        ("memory:", "MemoryStore"),
        (str(tmp_path / "a"), "FileStore"),
        ((tmp_path / "b c").as_uri(), "FileStore"),
        (remote, "RemoteStore"),
    ]:
        with open_store(url) as store:
            assert type(store).__name__ == kind
            assert len(store.create_tables(TABLES, SGD(1.0))) == len(TABLES)
    assert (tmp_path / "b c").is_dir()
    with open_store(f"shm://test-{os.getpid()}-remote") as store:
        assert isinstance(store, SharedMemoryStore)
        store.unlink()
    for url in ("redis://host", "file://host/path", "grpc://host"):
        with pytest.raises(ValueError, match=r"is not a store|a store's server is"):
            open_store(url)
    with pytest.raises(ValueError, match="takes no options"):
        open_store("memory:", timeout=1.0)
