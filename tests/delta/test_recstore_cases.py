"""The cases in which a delta of a RecStore table is easily wrong, and what is refused."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.faults import full_disk, log_of
from tests.support.models import keyed
from tests.support.recstore_schedules import RecTable, collection, own_answers
from tests.support.schedules import shared_directory
from tests.support.workers import run_on, start_process
from torchrec_ext.delta import DeltaDumper, DeltaDumpError, DeltaLog
from torchrec_ext.errors import TableFullError, UnsupportedTableError
from torchrec_ext.recstore import DistEmbedding, SparseSGD
from torchrec_ext.store import LocalStore, MemoryStore, SharedMemoryStore, Uniform
from torchrec_ext.store.flight.remote import RemoteStore
from torchrec_ext.store.flight.server import StoreServer

INT64_MAX = 2**63 - 1
DENSE = RecTable("dense", ("f",), rows=6)
DYNAMIC = RecTable(
    "dynamic",
    ("g",),
    rows=4,
    dynamic={"initializer": Uniform(-1.0, 1.0), "evict_after": 1, "default_value": 0.25},
)
IDS = {"dense": range(6), "dynamic": [*range(-3, 12), 10**6, 2**62, INT64_MAX, -(2**63)]}


class Session:
    """A collection under training with a dumper attached; ``check`` dumps and compares."""

    def __init__(
        self,
        directory: str | Path,
        tables: Sequence[RecTable] = (DENSE, DYNAMIC),
        store: LocalStore | None = None,
        **options: Any,
    ) -> None:
        self.tables, self.directory = tables, directory
        self.store = store or MemoryStore()
        torch.manual_seed(0)
        self.ebc = collection(tables, store=self.store)
        self.model = nn.ModuleDict({"ebc": self.ebc})
        self.optimizer = SparseSGD([self.ebc], lr=0.5)
        self.dumper = DeltaDumper(self.model, directory, **{"interval_steps": 10**9, **options})
        self.step = 0

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: Any) -> None:
        self.dumper.__exit__(*error)

    @property
    def log(self) -> DeltaLog:
        return DeltaLog(self.directory)

    def train(self, **ids: Sequence[int]) -> None:
        """One step over these ids, by feature."""
        features = [feature for table in self.tables for feature in table.features]
        self.ebc(keyed(features, {name: [ids_] for name, ids_ in ids.items()})).values().sum().backward()
        self.optimizer.step()

    def dump(self) -> dict[str, list[tuple[str, int]]]:
        """Dumps; returns the dump's (op, key) rows by table."""
        self.step += 1
        self.dumper.dump(self.step)
        self.dumper.flush()
        rows: dict[str, list[tuple[str, int]]] = {}
        for row in self.log.read(self.step).to_pylist():
            assert row["source"] == "recstore"
            rows.setdefault(row["table_fqn"].removeprefix("ebc."), []).append((row["op"], row["key_id"]))
        return {table: sorted(pairs) for table, pairs in rows.items()}

    def check(self) -> dict[str, list[tuple[str, int]]]:
        """Dumps and compares; returns what ``dump`` does."""
        rows = self.dump()
        self.compare()
        return rows

    def compare(self) -> None:
        state = self.log.replay()
        for table in self.tables:
            ids = list(IDS.get(table.name, range(table.rows)))
            expected = own_answers(self.ebc, self.tables, table.name, ids).numpy()
            replayed = state[f"ebc.{table.name}"].lookup(ids)
            np.testing.assert_array_equal(replayed.view(np.int32), expected.view(np.int32))


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    with Session(tmp_path / "deltas") as session:
        session.dump()
        yield session


@pytest.fixture
def shared_name() -> Iterator[str]:
    name = f"test.{uuid.uuid4()}"
    yield name
    SharedMemoryStore(name).unlink()


# What is in a dump


def test_a_dump_holds_the_rows_that_were_written_and_no_others(session: Session) -> None:
    assert session.check() == {}
    session.train(f=[1, 4, 4], g=[7])
    assert session.check() == {"dense": [("upsert", 1), ("upsert", 4)], "dynamic": [("upsert", 7)]}
    session.store.write("dynamic", torch.tensor([7, 8]), torch.randn(2, 4))
    session.store.write("dense", torch.tensor([5]), torch.full((1, 4), -0.0))
    assert session.check() == {"dense": [("upsert", 5)], "dynamic": [("upsert", 7), ("upsert", 8)]}
    session.ebc.embedding_bags["dense"].weight.data[2] = 1.5
    session.store.touch("dense", torch.tensor([2]))
    assert session.check() == {"dense": [("upsert", 2)]}


def test_an_evicted_key_is_deleted_and_answered_by_the_default_row(session: Session) -> None:
    session.train(g=[1, INT64_MAX])
    assert session.check()["dynamic"] == [("upsert", 1), ("upsert", INT64_MAX)]
    session.train(f=[0])
    session.train(g=[2])
    assert session.store.evict_unused("dynamic", 1) == 2
    assert session.check()["dynamic"] == [("delete", 1), ("delete", INT64_MAX), ("upsert", 2)]
    state = session.log.replay()["ebc.dynamic"]
    assert state.lookup([1, INT64_MAX]).tolist() == [[0.25] * 4] * 2
    assert state.keys.tolist() == [2]


def test_a_key_that_returns_within_an_interval_is_upserted_and_not_deleted(session: Session) -> None:
    session.train(g=[1, 2])
    session.check()
    for returns in ([1], [3, 1]):  # to its row, to another one
        session.train(f=[0])
        session.train(f=[0])
        assert session.store.evict_unused("dynamic", 1)
        session.train(g=returns)
        rows = session.check()["dynamic"]
        assert ("upsert", 1) in rows
        assert ("delete", 1) not in rows


def test_updates_that_are_under_way_are_in_the_dump(session: Session) -> None:
    keys = torch.arange(6)
    for _ in range(300):
        session.store.update_async("dense", keys, torch.randn(6, 4))
    assert len(session.check()["dense"]) == 6


def test_the_manifest_says_what_keys_are(session: Session) -> None:
    (dump,) = session.log.dumps()
    dense, dynamic = dump.tables["ebc.dense"], dump.tables["ebc.dynamic"]
    assert (dense.key_space, dense.num_embeddings, dense.features) == ("row", 6, ("f",))
    assert (dynamic.key_space, dynamic.source, dense.source) == ("raw", "recstore", "recstore")
    assert [fallback.rows for fallback in dump.fallbacks] == [1], "dense tables have no fallback row"


def test_a_lookup_of_a_row_that_is_not_in_the_table_raises_as_the_model_does(session: Session) -> None:
    state = session.log.replay()["ebc.dense"]
    for wrong in (-1, 6, INT64_MAX):
        with pytest.raises(ValueError, match=rf"ebc\.dense has rows 0 to 5; got {wrong}"):
            state.lookup([0, wrong])
        with pytest.raises(ValueError, match=str(wrong)):
            own_answers(session.ebc, session.tables, "dense", [wrong])


def test_a_log_that_began_with_changes_knows_the_rows_that_changed(tmp_path: Path) -> None:
    with Session(tmp_path, first_dump="delta") as session:
        session.train(f=[3], g=[1])
        assert session.dump() == {"dense": [("upsert", 3)], "dynamic": [("upsert", 1)]}
        state = session.log.replay()["ebc.dense"]
        np.testing.assert_array_equal(
            state.lookup([3]), own_answers(session.ebc, session.tables, "dense", [3])
        )
        with pytest.raises(ValueError, match=r"ebc\.dense: row 2 is not in the log"):
            state.lookup([3, 2])


def test_rows_of_a_dense_table_and_keys_of_a_dynamic_one_can_be_marked(session: Session) -> None:
    session.train(g=[1, 2, 3])
    session.check()
    session.dumper.mark("ebc.dense", torch.tensor([5, 0]))
    session.dumper.mark("ebc.dynamic", torch.tensor([2, 99]))
    assert session.check() == {"dense": [("upsert", 0), ("upsert", 5)], "dynamic": [("upsert", 2)]}
    session.dumper.mark("ebc.dynamic")
    session.dumper.mark("ebc.dense")
    assert [len(rows) for rows in session.check().values()] == [6, 3]
    with pytest.raises(ValueError, match=r"rows of ebc\.dense are 0 to 5; got 0 to 6"):
        session.dumper.mark("ebc.dense", torch.tensor([0, 6]))


def test_what_a_failed_dump_held_is_in_the_next_one(session: Session) -> None:
    session.train(f=[1], g=[1, 2])
    with full_disk(), pytest.raises(DeltaDumpError):
        session.dump()
    session.train(f=[2])
    session.train(f=[2])
    session.store.evict_unused("dynamic", 1)
    rows = session.check()
    assert rows == {
        "dense": [("upsert", 1), ("upsert", 2)],
        "dynamic": [("delete", 1), ("delete", 2)],
    }


def test_a_checkpoint_that_does_not_fit_changes_nothing_of_what_is_dumped(session: Session) -> None:
    session.train(g=[1, 2])
    session.check()
    larger = collection((DENSE, RecTable("dynamic", ("g",), rows=9, dynamic=DYNAMIC.dynamic)))
    larger.store.write("dynamic", torch.arange(9))
    with pytest.raises(TableFullError, match="table 'dynamic' is full"):
        session.ebc.load_state_dict(larger.state_dict())
    assert set(session.check()) == {"dense"}  # which fits
    session.train(f=[0])
    session.train(f=[0])
    session.store.evict_unused("dynamic", 1)
    assert session.check()["dynamic"] == [("delete", 1), ("delete", 2)]


def test_keys_of_an_old_log_that_the_model_does_not_hold_are_deleted(tmp_path: Path) -> None:
    with Session(tmp_path) as session:
        session.train(g=[1, 2])
        session.dump()
    smaller = RecTable("dense", ("f",), rows=4)
    with Session(tmp_path, (smaller, DYNAMIC)) as session:
        session.train(g=[2, 3])
        rows = session.dump()
        assert rows["dynamic"] == [("delete", 1), ("upsert", 2), ("upsert", 3)]
        assert rows["dense"] == [*(("delete", key) for key in (4, 5)), *(("upsert", key) for key in range(4))]
        with pytest.raises(ValueError, match="has rows 0 to 3; got 4"):
            session.log.replay()["ebc.dense"].lookup([4])


def test_a_dist_embedding_is_dumped_as_it_answers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    embedding = DistEmbedding(5, 3, "users")
    optimizer = SparseSGD([embedding], lr=0.5)
    with DeltaDumper(nn.ModuleDict({"emb": embedding}), tmp_path, interval_steps=1) as dumper:
        for step in range(1, 4):
            embedding(torch.tensor([step, step])).sum().backward()
            optimizer.step()
            embedding.weight[torch.tensor([0])] = torch.full((1, 3), -0.0)
            dumper.step(step)
    with torch.no_grad():
        expected = embedding(torch.arange(5)).numpy()
    replayed = DeltaLog(tmp_path).replay()["emb.users"].lookup(range(5))
    np.testing.assert_array_equal(replayed.view(np.int32), expected.view(np.int32))
    assert [dump.upserts for dump in DeltaLog(tmp_path).dumps()] == [5, 2, 2]


def test_a_dumper_changes_nothing_of_what_a_store_holds(tmp_path: Path) -> None:
    held = []
    for attach in (True, False):
        session = Session(tmp_path / "deltas", interval_steps=1)
        if not attach:
            session.dumper.close()
        for step in range(1, 9):
            session.train(f=[step % 6, 1], g=[step, 0])
            if attach:
                session.dumper.step(step)
        held.append(session.store.snapshot())
        session.dumper.close()
    assert held[0].clock == held[1].clock
    for name, ours in held[0].tables.items():
        theirs = held[1].tables[name]
        assert torch.equal(ours.keys, theirs.keys)
        assert torch.equal(ours.weight, theirs.weight)
        assert torch.equal(ours.versions, theirs.versions)


# Others who write to the store


def test_rows_that_others_write_while_a_dump_is_read_are_those_of_their_keys(tmp_path: Path) -> None:
    # So wide that a dump is read in pieces, while training stands still and others do not.
    dynamic = {"initializer": Uniform(-1.0, 1.0), "default_value": 0.25}
    wide = RecTable("wide", ("f",), rows=5000, dim=1024, dynamic=dynamic)
    with Session(tmp_path, (wide,), max_pending_bytes=1) as session:
        keys = torch.arange(3000)
        session.store.write("wide", keys)

        def meddle(message: str) -> None:
            if "training stands still while it is written" in message:
                session.store.update("wide", keys[:1500], torch.ones(1500, 1024), step=10)
                session.store.pull("wide", keys[:1500], admit=True)
                session.store.evict_unused("wide", 1)
                session.store.write("wide", keys[:1500] + 10_000)
                session.store.write("wide", keys[2000:2100])

        logger = logging.getLogger("torchrec_ext.delta.cutter")
        logger.setLevel(logging.INFO)
        with log_of(logger.name, meddle):
            rows = dict((key, op) for op, key in session.dump()["wide"])
        logger.setLevel(logging.NOTSET)
        assert [rows[key] for key in (0, 1600, 2050)] == ["upsert", "delete", "upsert"]
        state = session.log.replay()["ebc.wide"]
        held = session.store.read("wide", torch.from_numpy(state.keys))[0]
        np.testing.assert_array_equal(state.vectors, held.numpy())
        assert 10_000 not in state.keys
        session.check()
        ids = [0, 1499, 1500, 2050, 10_000, 11_499, 11_500]
        np.testing.assert_array_equal(
            session.log.replay()["ebc.wide"].lookup(ids),
            own_answers(session.ebc, session.tables, "wide", ids),
        )


def _die_in_an_update(name: str, pipe: Connection) -> None:
    store = SharedMemoryStore(name)
    with store._state.writing():
        store.group_of("dense").rows_of("dense")[3] = 7.0
        store.group_of("dynamic").rows_of("dynamic")[1] = 7.0
        pipe.send("written")
        pipe.recv()


def test_rows_of_an_update_that_a_process_died_over_are_dumped(tmp_path: Path, shared_name: str) -> None:
    with Session(tmp_path, store=SharedMemoryStore(shared_name)) as session:
        session.train(g=[1])
        session.check()
        ours, theirs = mp.Pipe()
        process = start_process(_die_in_an_update, shared_name, theirs)
        assert ours.recv() == "written"
        process.kill()
        process.join()
        rows = session.check()
        assert ("upsert", 3) in rows["dense"]
        assert ("upsert", 1) in rows["dynamic"]
        assert (session.log.replay()["ebc.dense"].lookup([3]) == 7.0).all()


def _several_trainers(name: str) -> None:
    rank = dist.get_rank()
    with shared_directory() as directory:
        tables = (DENSE, RecTable("dynamic", ("g",), rows=30, dynamic=DYNAMIC.dynamic))
        session = Session(f"{directory}/deltas", tables, SharedMemoryStore(name))
        rng = np.random.default_rng(rank)
        with session:
            assert session.dumper.tables == ("ebc.dense", "ebc.dynamic")
            for dump in range(1, 6):
                # Rank 0 is at the dump long before rank 1, which goes on writing.
                for _ in range(3 if rank == 0 else 40):
                    session.train(f=rng.integers(0, 6, 3).tolist(), g=rng.integers(-3, 12, 3).tolist())
                if rank == 1:
                    session.store.evict_unused("dynamic", 5)
                    session.store.update_async("dense", torch.arange(6), torch.ones(6, 4))
                    session.dumper.mark("ebc.dynamic", torch.tensor([1]))
                result = session.dumper.dump(dump)
                assert rank == 0 or not result.rows, "rank 0 dumps for all"
                session.dumper.flush()
                dist.barrier()
                session.compare()
                dist.barrier()
            for _ in range(3 if rank == 0 else 40):
                session.train(f=rng.integers(0, 6, 3).tolist(), g=rng.integers(-3, 12, 3).tolist())
            session.dumper.step(99)
        dist.barrier()
        session.compare()
        dist.barrier()


def test_ranks_that_train_in_one_shared_memory_are_all_in_the_dump(shared_name: str) -> None:
    run_on(2, _several_trainers, shared_name)


def _write_for_ever(name: str, pipe: Connection) -> None:
    store = SharedMemoryStore(name)
    rng = np.random.default_rng(0)
    step = 0
    while not pipe.poll():
        step += 1
        store.update("dense", torch.from_numpy(rng.integers(0, 6, 3)), torch.ones(3, 4), step=step)
        keys = torch.from_numpy(rng.integers(-3, 40, 4))
        store.pull("dynamic", keys, admit=True)
        store.update("dynamic", keys, torch.ones(4, 4), step=step)
        store.evict_unused("dynamic", 2)
        if step == 20:
            pipe.send("under way")
    pipe.recv()
    pipe.send(step)


def _wait_for_changes(store: LocalStore) -> None:
    """Returns once ``_write_for_ever`` has done all that it does in turn: each is one change of the store."""
    after = store.clock + 8
    while store.clock < after:
        os.sched_yield()


def test_a_process_that_writes_without_a_dumper_is_seen(tmp_path: Path, shared_name: str) -> None:
    tables = (DENSE, RecTable("dynamic", ("g",), rows=200, dynamic=DYNAMIC.dynamic))
    with Session(tmp_path, tables, SharedMemoryStore(shared_name), max_pending_bytes=1) as session:
        ours, theirs = mp.Pipe()
        start_process(_write_for_ever, shared_name, theirs)
        assert ours.recv() == "under way"
        for _ in range(15):
            _wait_for_changes(session.store)
            assert session.dump()
        ours.send("stop")
        assert ours.recv() > 20
        session.check()
        assert session.check() == {}


# What is refused


def _refusal(error: type[Exception], model: Mapping[str, nn.Module], **options: Any) -> str:
    with shared_directory() as directory, pytest.raises(error) as caught:
        DeltaDumper(nn.ModuleDict(model), directory, interval_steps=1, **options)
    return str(caught.value)


def _rows_of_ones_own() -> str:
    return _refusal(UnsupportedTableError, {"ebc": collection([DENSE])})


def test_ranks_with_rows_of_their_own_are_refused() -> None:
    for text in run_on(2, _rows_of_ones_own):
        assert "ebc.dense: each of the 2 ranks has its own rows in a MemoryStore" in text
        assert "shard the collection" in text
        assert "SharedMemoryStore" in text


def _different_places(name: str) -> str:
    store = SharedMemoryStore(f"{name}.{dist.get_rank()}")
    text = _refusal(ValueError, {"ebc": collection([DENSE], store=store)})
    store.unlink()
    return text


def test_ranks_with_different_shared_memory_are_refused() -> None:
    for text in run_on(2, _different_places, f"test.{uuid.uuid4()}"):
        assert "ebc.dense is not sharded, and the ranks keep its rows in 2 places" in text


def test_rows_out_of_reach_are_refused(tmp_path: Path) -> None:
    with closing(StoreServer(MemoryStore())) as server, RemoteStore([server.url]) as store:
        remote = collection([DENSE], store=store)
        with pytest.raises(UnsupportedTableError, match=r"far\.dense: its rows are in a RemoteStore"):
            DeltaDumper(nn.ModuleDict({"far": remote}), tmp_path, interval_steps=1)
        near = nn.ModuleDict({"far": remote, "near": collection([DENSE])})
        messages: list[str] = []
        with (
            log_of("torchrec_ext.delta.opening", messages.append),
            DeltaDumper(near, tmp_path, interval_steps=1) as dumper,
        ):
            dumper.step(1)
        assert dumper.tables == ("near.dense",)
        (warning,) = messages
        assert re.search(r"not dumped: far\.dense", warning)
        with pytest.raises(UnsupportedTableError, match=r"far\.dense"):
            DeltaDumper(near, tmp_path, interval_steps=1, tables=["*.dense"])


def test_a_collection_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    model = nn.ModuleDict({"ebc": collection([DENSE], device="meta")})
    with pytest.raises(UnsupportedTableError, match="on the meta device and has no rows; shard it"):
        DeltaDumper(model, tmp_path, interval_steps=1)


def test_a_table_that_was_a_dense_one_cannot_go_on_as_a_dynamic_one(tmp_path: Path) -> None:
    with Session(tmp_path, (DENSE,)) as session:
        session.dump()
    other = RecTable("dense", ("f",), dynamic=DYNAMIC.dynamic)
    with pytest.raises(RuntimeError, match=r"ebc\.dense has row keys .*, raw keys .* in the model"):
        Session(tmp_path, (other,))
