from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow.flight as flight
import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

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
    Store,
    StoreOptimizer,
    StoreSnapshot,
    Uniform,
    wire,
)
from torchrec_ext.store.flight_server import StoreServer
from torchrec_ext.store.remote import RemoteStore
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


class ServerProcess:
    """A server in a process of its own, started by the command."""

    def __init__(self, directory: Path, *options: str, listen: str = "grpc://127.0.0.1:0", **env: str) -> None:
        self._ready = directory / "ready"
        self._ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "torchrec_ext.cli", "serve-store", str(directory / "store")]
        command += ["--listen", listen, "--ready-file", str(self._ready), *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        )

    @property
    def url(self) -> str:
        assert self.process.stdout is not None
        self.first_line = self.process.stdout.readline()  # printed once it serves
        return self._ready.read_text()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


Requests = Sequence[tuple[str, torch.Tensor]]


@contextmanager
def server_process(directory: Path, *options: str, **env: str) -> Iterator[ServerProcess]:
    directory.mkdir(exist_ok=True)
    server = ServerProcess(directory, *options, **env)
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
        *(st.tuples(st.just(name), st.lists(keys_of[name], max_size=6).map(lambda keys: ids(*keys))) for name in names)
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
        found = self.store.pull_many(requests, admit=admit)
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


@settings(max_examples=60, deadline=None)
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
            lambda: store.update_many([("dense", ids(5), torch.ones(1, 4)), ("dense", ids(4), torch.ones(1, 4))]),
            lambda: store.update_async("dense", ids(5), torch.ones(1, 3)),
            lambda: store.write("dense", ids(6, 6), torch.ones(2, 4)),
            lambda: store.write("dense", ids(6), slots={"sum": torch.ones(1, 1)}),
            lambda: store.create_tables([DenseTable("dense", 8, 11)], SGD(1.0)),
            lambda: store.create_tables([DenseTable("twice", 8, 1), DenseTable("twice", 8, 1)], SGD(1.0)),
            lambda: store.set_optimizer(["dense"], Adam()),
            lambda: store.evict_unused("dense", 1),  # type: ignore[attr-defined]
            lambda: store.restore(StoreSnapshot(1, 1)),
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
