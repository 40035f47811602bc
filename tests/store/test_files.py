"""Stores whose arrays are files: what they survive, and what they refuse."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

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
    RowWiseAdaGrad,
    SharedMemoryStore,
    Uniform,
)

TABLES = [DenseTable("a", 8, 100), DynamicTable("d", 8, 40, Uniform(-1.0, 1.0, seed=5))]


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def a_store(path: Path) -> FileStore:
    store = FileStore(path)
    store.create_tables(TABLES, RowWiseAdaGrad(0.5))
    return store


@pytest.fixture
def shared_name(tmp_path: Path) -> Iterator[str]:
    name = f"test-{os.getpid()}-{abs(hash(tmp_path))}"
    yield name
    SharedMemoryStore(name).unlink()


def test_a_reopened_store_has_every_row_and_slot(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    store.pull("d", ids(-7, 1 << 62, 3), admit=True)
    store.update_many([("a", ids(1, 99), torch.ones(2, 8)), ("d", ids(3), torch.ones(1, 8))], step=4)
    before = store.snapshot()
    store.close()

    reopened = FileStore(tmp_path)
    after = reopened.snapshot()
    assert (after.clock, after.step) == (before.clock, before.step)
    assert list(after.tables) == list(before.tables)
    for name, table in before.tables.items():
        again = after.tables[name]
        assert again.table == table.table and again.optimizer == table.optimizer
        assert torch.equal(again.keys, table.keys)
        assert torch.equal(again.weight, table.weight)
        assert torch.equal(again.slots["sum"], table.slots["sum"])
        assert torch.equal(again.versions, table.versions)
    assert torch.equal(after.tables["d"].frequencies, before.tables["d"].frequencies)
    assert reopened.create_tables(TABLES, RowWiseAdaGrad(0.5)) == []


def damage_cut_short(path: Path) -> str:
    file = next(path.glob("*weight.bin"))
    os.truncate(file, file.stat().st_size - 4)
    return r"weight.bin has \d+ bytes, 141 x 8 float32 have 4512: it was cut short"


def damage_missing(path: Path) -> str:
    next(path.glob("*sum.bin")).unlink()
    return r"sum.bin: No such file"


def damage_other_shape(path: Path) -> str:
    file = path / "store.json"
    content = json.loads(file.read_text())
    content["groups"][0]["tables"][0]["num_rows"] = 5
    file.write_text(json.dumps(content))
    return r"bytes, 46 x 8 float32 have"


def damage_other_version(path: Path) -> str:
    file = path / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))
    return "format version 99, this torchrec_ext reads 1"


def damage_other_byteorder(path: Path) -> str:
    file = path / "store.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "byteorder": "big"}))
    return "big-endian"


def damage_half_a_description(path: Path) -> str:
    file = path / "store.json"
    file.write_text(file.read_text()[:100])
    return "store.json cannot be read"


def damage_no_tables(path: Path) -> str:
    file = path / "store.json"
    content = json.loads(file.read_text())
    del content["groups"][0]["tables"]
    file.write_text(json.dumps(content))
    return "the store's description is damaged"


def damage_a_path_out(path: Path) -> str:
    file = path / "store.json"
    content = json.loads(file.read_text())
    content["groups"][0]["name"] = "../elsewhere"
    file.write_text(json.dumps(content))
    return "is not an array's name"


def damage_a_symlink(path: Path) -> str:
    file = next(path.glob("*weight.bin"))
    moved = path.parent / "moved.bin"
    file.rename(moved)
    file.symlink_to(moved)
    return "weight.bin: Too many levels of symbolic links"


def damage_a_stranger(path: Path) -> str:
    (path / "notes.txt").write_text("mine")
    return "holds something else than a store \\(notes.txt\\)"


@pytest.mark.parametrize(
    "damage", [value for name, value in list(globals().items()) if name.startswith("damage_")]
)
def test_a_damaged_store_is_refused_and_left_as_it_is(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "store"
    a_store(path).close()
    message = damage(path)
    left = {file.name: file.read_bytes() for file in path.iterdir()}
    with pytest.raises(StoreError, match=message):
        FileStore(path)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == left


def test_a_full_disk_is_an_error_when_a_table_is_made_and_not_later(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    room = os.statvfs(tmp_path)
    before = {file.name for file in tmp_path.iterdir()}
    rows = 2 * room.f_blocks * room.f_frsize // 4096
    with pytest.raises(StoreError, match="no room for"):
        store.create_tables([DenseTable("small", 4, 10), DenseTable("huge", 1024, rows)], SGD())
    assert {file.name for file in tmp_path.iterdir()} == before  # it takes no room either
    assert list(store.tables) == ["a", "d"]
    store.update("a", ids(1), torch.ones(1, 8))
    store.close()
    assert list(FileStore(tmp_path).tables) == ["a", "d"]


def test_what_a_creation_that_died_left_behind_is_cleared(tmp_path: Path) -> None:
    store = a_store(tmp_path)
    (tmp_path / "group_1_dim_4.weight.bin").write_bytes(b"half")
    store.create_tables([DenseTable("later", 4, 10)], SGD())
    assert store.pull("later", ids(9)).shape == (1, 4)
    other = tmp_path / "other"
    other.mkdir()
    (other / "clock.bin").write_bytes(b"half")
    assert not FileStore(other).tables


def test_a_shared_store_needs_a_plain_name() -> None:
    for name in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(ValueError, match="the name of a shared store"):
            SharedMemoryStore(name)


# Several processes


def _add_ones(name: str, times: int) -> None:
    torch.set_num_threads(1)
    store = SharedMemoryStore(name)
    for step in range(1, times + 1):
        store.update("a", ids(0, 1, 0), torch.full((3, 8), -1.0), step=step)
        store.pull("d", ids(step), admit=True)


def test_updates_from_processes_lose_none(shared_name: str) -> None:
    store = SharedMemoryStore(shared_name)
    store.create_tables(TABLES, SGD(1.0))
    store.write("a", ids(0, 1), torch.zeros(2, 8))
    held = store.pull_many([("a", ids(0, 2))])
    processes = [start_process(_add_ones, shared_name, 30) for _ in range(3)]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert torch.equal(store.pull("a", ids(0, 1)), torch.tensor([[180.0] * 8, [90.0] * 8]))
    assert store.refresh_many([("a", held[0])]) == 1
    snapshot = store.snapshot().tables["d"]
    assert snapshot.keys.tolist() == list(range(1, 31))
    assert torch.equal(snapshot.weight, Uniform(-1.0, 1.0, seed=5).rows(snapshot.keys, 8))
    store.close()


def _make_and_change(name: str) -> None:
    store = SharedMemoryStore(name)
    store.create_tables([DenseTable("new", 4, 10)], SGD())
    store.set_optimizer(["a", "d"], AdaGrad(0.25))


def test_what_another_process_makes_is_seen(shared_name: str) -> None:
    store = SharedMemoryStore(shared_name)
    store.create_tables(TABLES, RowWiseAdaGrad(0.5))
    process = start_process(_make_and_change, shared_name)
    process.join()
    assert process.exitcode == 0
    assert list(store.tables) == ["a", "d", "new"]
    assert store.optimizer("a") == AdaGrad(0.25)
    store.update("a", ids(1), torch.ones(1, 8))
    assert torch.equal(store.read("a", ids(1))[1]["sum"], torch.ones(1, 8))
    store.close()


def _die_while_changing(name: str, pipe: Connection) -> None:
    store = SharedMemoryStore(name)

    def slow(keys: torch.Tensor, dim: int) -> torch.Tensor:
        pipe.send("inside")
        signal.pause()
        raise AssertionError

    group = store.group_of("d")
    object.__setattr__(group.tables["d"].initializer, "rows", slow)
    store.pull("d", ids(5), admit=True)


def test_a_process_killed_in_the_middle_of_an_admission_leaves_a_whole_row(
    shared_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SharedMemoryStore(shared_name)
    store.create_tables(TABLES, RowWiseAdaGrad(0.5))
    store.pull("d", ids(1), admit=True)
    store.update("d", ids(1), torch.ones(1, 8), step=1)
    store.update("a", ids(1), torch.ones(1, 8), step=9)
    store.evict_unused("d", 1)  # its row, with what was in it, is the next to be given away
    ours, theirs = mp.Pipe(duplex=False)
    process = start_process(_die_while_changing, shared_name, theirs)
    assert ours.recv() == "inside"
    process.kill()
    process.join()
    rows, slots = store.read("d", ids(5))
    assert "a change of the store was not finished" in caplog.text
    assert torch.equal(rows, Uniform(-1.0, 1.0, seed=5).rows(ids(5), 8))
    assert not slots["sum"].any()
    caplog.clear()
    store.update("d", ids(5), torch.ones(1, 8))
    assert not caplog.text
    store.close()


def _train_with_little_memory(path: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = FileStore(path)
    rows = (4 << 30) // (64 * 4)
    store.create_tables([DenseTable("big", 64, rows, initializer=Constant(0.5))], SGD(1.0))
    generator = torch.Generator().manual_seed(0)
    for step in range(1, 21):
        keys = torch.randint(0, rows, (4096,), generator=generator)
        before = store.pull("big", keys[:1])
        store.update("big", keys, torch.ones(4096, 64), step=step)
        assert not torch.equal(before, store.pull("big", keys[:1]))
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            pipe.send(int(line.split()[1]) << 10)


@pytest.mark.skipif(
    os.statvfs("/tmp").f_bavail * os.statvfs("/tmp").f_frsize < 8 << 30, reason="needs 8 GiB of disk"
)
def test_a_table_of_4_gib_trains_in_less_than_1_gib(tmp_path: Path) -> None:
    ours, theirs = mp.Pipe(duplex=False)
    process = start_process(_train_with_little_memory, tmp_path / "store", theirs)
    theirs.close()
    anonymous = ours.recv()
    process.kill()
    process.join()
    for file in (tmp_path / "store").iterdir():
        file.unlink()  # pytest keeps its directories
    assert anonymous < 1 << 30
