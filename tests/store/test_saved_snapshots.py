"""Saved snapshots: what was saved is loaded, and nothing else ever is."""

from __future__ import annotations

import errno
import json
import multiprocessing as mp
import operator
import os
import pickle
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.dying import die_before_line
from tests.store.kinds import KINDS, opened
from tests.support.faults import full_disk, replaced_fsync
from tests.support.workers import start_process
from torchrec_ext.errors import CheckpointError
from torchrec_ext.files import json_crc32
from torchrec_ext.store import (
    SGD,
    AdaGrad,
    Adam,
    CounterFilter,
    DenseTable,
    DynamicTable,
    FileStore,
    MemoryStore,
    RowWiseAdaGrad,
    StoreOptimizer,
    StoreSnapshot,
    Table,
    Uniform,
    saved,
)
from torchrec_ext.store.saved import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    SavedSnapshot,
    is_saved_snapshot,
)
from torchrec_ext.store.saving import Pieces, SnapshotWriter

TABLES: list[Table] = [
    DenseTable("dense", 4, 11, first_key=5, initializer=Uniform(-1.0, 1.0, seed=3)),
    DynamicTable("a table/../of any name", 4, 200, filter=CounterFilter(2), default_value=0.5),
    DenseTable("wide", 6, 5),
    DynamicTable("empty", 6, 5),
]
DYNAMIC = TABLES[1]


def ids(*keys: int) -> torch.Tensor:
    return torch.tensor(keys, dtype=torch.int64)


def trained(optimizer: StoreOptimizer, seed: int = 0) -> StoreSnapshot:
    with MemoryStore() as store:
        store.create_tables(TABLES, optimizer)
        keys = torch.arange(20) * (seed + 3) - 5
        store.pull(DYNAMIC.name, torch.cat([keys, keys[:12]]), admit=True)
        store.update_many(
            [("dense", ids(5, 7, 15), torch.ones(3, 4)), (DYNAMIC.name, keys, torch.ones(20, 4))], step=3
        )
        return store.snapshot()


def same(a: Any, b: Any) -> bool:
    """Whether two snapshots are bit-identical."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, StoreSnapshot) or hasattr(a, "slot_keys"):
        return same(vars(a), vars(b))
    return bool(a == b)


def files(path: Path) -> dict[str, Path]:
    """The files of the dynamic table by the name of the array."""
    return {name: path / file.file for name, file in SavedSnapshot(path).tables[DYNAMIC.name].files.items()}


# What was saved is loaded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [SGD(), AdaGrad(), RowWiseAdaGrad(), Adam()], ids=str)
def test_a_snapshot_that_was_saved_restores_the_store(
    kind: str, optimizer: StoreOptimizer, tmp_path: Path
) -> None:
    snapshot = trained(optimizer)
    snapshot.save(tmp_path / "some" / "where")
    loaded = StoreSnapshot.load(tmp_path / "some" / "where")
    assert same(loaded, snapshot)
    with opened(kind, tmp_path) as store:
        store.create_tables(TABLES, optimizer)
        assert not store.restore(loaded, "error").missing
        again = store.snapshot()
    for name, part in snapshot.tables.items():
        back = again.tables[name]
        assert torch.equal(back.keys, part.keys) and torch.equal(back.weight, part.weight)
        assert same(back.slots, part.slots)
        for field in ("frequencies", "last_used"):
            assert same(getattr(back, field), getattr(part, field))


def test_what_is_loaded_can_be_written_to_and_does_not_change_the_files(tmp_path: Path) -> None:
    snapshot = trained(Adam())
    snapshot.save(tmp_path / "saved")
    loaded = StoreSnapshot.load(tmp_path / "saved")
    for part in loaded.tables.values():
        part.weight.fill_(7.0)
    loaded.save(tmp_path / "saved")  # over the files that it is mapped from
    assert all((part.weight == 7.0).all() for part in StoreSnapshot.load(tmp_path / "saved").tables.values())
    assert all((part.weight == 7.0).all() for part in loaded.tables.values())


def test_numpy_alone_reads_the_arrays(tmp_path: Path) -> None:
    snapshot = trained(Adam())
    snapshot.save(tmp_path)
    for name, file in files(tmp_path).items():
        array = np.load(file, allow_pickle=False)
        assert np.array_equal(array, snapshot.tables[DYNAMIC.name].arrays()[name].numpy())


array_sizes = st.integers(0, 5)


@settings(max_examples=25, deadline=None)
@given(sizes=st.tuples(array_sizes, array_sizes, array_sizes), pieces=st.integers(1, 3))
def test_any_key_sets_are_saved_whole_or_in_pieces(
    sizes: tuple[int, int, int], pieces: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("saved")
    arrays = {
        name: (np.arange(size) + offset, np.random.default_rng(size).random((size, 4), np.float32))
        for offset, (name, size) in enumerate(zip(("weight", "exp_avg", "exp_avg_sq"), sizes, strict=True))
    }
    snapshot = StoreSnapshot.from_arrays({DYNAMIC.name: arrays}, [DYNAMIC], Adam(), step=4)
    snapshot.save(path)
    assert same(StoreSnapshot.load(path), snapshot)
    with SnapshotWriter(path, clock=0, step=4) as writer:
        whole = snapshot.tables[DYNAMIC.name].arrays()
        cut = {
            name: Pieces(
                tuple(array.shape),
                str(array.dtype).removeprefix("torch."),
                (piece.numpy() for piece in array.split(pieces)) if len(array) else (),
            )
            for name, array in whole.items()
        }
        writer.add(DYNAMIC, Adam(), cut)
    assert same(StoreSnapshot.load(path), snapshot)
    table = SavedSnapshot(path).tables[DYNAMIC.name]
    for name, (keys, rows) in arrays.items():
        assert np.array_equal(table.keys(name), keys) and np.array_equal(table.values(name), rows)
        assert not table.values(name).flags.writeable


def test_saving_takes_no_memory_for_another_copy(tmp_path: Path) -> None:
    table = DenseTable("t", 64, 200_000)
    with MemoryStore() as store:
        store.create_tables([table], SGD())
        snapshot = store.snapshot()
    rows = snapshot.tables["t"].weight.numpy()
    tracemalloc.start()
    try:
        # Of NumPy arrays, whose memory is traced.
        with SnapshotWriter(tmp_path, clock=1, step=1) as writer:
            writer.add(table, SGD(), {"keys": np.arange(len(rows)), "weight": rows})
        assert tracemalloc.get_traced_memory()[1] < rows.nbytes / 4
    finally:
        tracemalloc.stop()


# Nothing else is


def change(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def replace_by_pickle(file: Path) -> None:
    size = file.stat().st_size
    array = np.empty(1, object)
    array[0] = Exploding()
    np.save(file, array, allow_pickle=True)
    with file.open("ab") as opened:
        opened.write(b"\0" * (size - file.stat().st_size))


class Exploding:
    def __reduce__(self) -> Any:
        return os.abort, ()


def replace_by_other_values(file: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """Another array in a file of the same size."""
    size = file.stat().st_size
    with file.open("wb") as opened:
        np.lib.format.write_array_header_1_0(opened, {"descr": dtype, "fortran_order": False, "shape": shape})
        opened.write(b"\0" * (size - opened.tell()))


def make_a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_a_link(file: Path) -> None:
    outside = file.parent.with_name(f"outside_{file.name}")
    file.rename(outside)
    file.symlink_to(outside)


DAMAGES: list[tuple[str, Callable[[Path], object], str]] = [
    ("weight", lambda file: change(file, -1), "is damaged: its checksum"),
    ("keys", lambda file: change(file, -20), "is damaged: its checksum"),
    ("slots.exp_avg", truncate, r"has \d+ bytes, not \d+: it was cut short"),
    ("slots.exp_avg", lambda file: change(file, 1), "cannot be read"),
    ("weight", Path.unlink, "is missing"),
    ("weight", lambda file: (file.unlink(), file.mkdir()), "has .* bytes|cannot be read"),
    ("weight", make_a_pipe, "it is no plain file"),
    ("weight", make_a_link, "it is a symbolic link"),
    ("weight", replace_by_pickle, "cannot be read"),
    ("weight", lambda file: file.write_bytes(b"PK\3\4" + bytes(file.stat().st_size - 4)), "cannot be read"),
    ("weight", lambda file: replace_by_other_values(file, "<f8", (12, 2)), "holds float64 .*, not float32"),
    ("weight", lambda file: replace_by_other_values(file, "<f4", (4, 12)), r"holds float32 \[4, 12\], not"),
    ("weight", lambda file: replace_by_other_values(file, "<f4", (9999, 4)), "cannot be read"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damaged_files_are_named_with_their_table(
    name: str, damage: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    trained(Adam()).save(tmp_path)
    file = files(tmp_path)[name]
    damage(file)
    with pytest.raises(CheckpointError, match=message) as caught:
        StoreSnapshot.load(tmp_path)
    assert str(file) in str(caught.value) and f"({name} of table {DYNAMIC.name!r})" in str(caught.value)


@pytest.mark.parametrize("bits", [0x01, 0x12, 0x80])
def test_no_damage_of_a_files_header_is_anything_but_a_checkpoint_error(bits: int, tmp_path: Path) -> None:
    trained(Adam()).save(tmp_path)
    file = files(tmp_path)["candidate_counts"]
    data = file.read_bytes()
    for position in range(128):
        file.write_bytes(data[:position] + bytes([data[position] ^ bits]) + data[position + 1 :])
        with pytest.raises(CheckpointError, match="candidate_counts"):
            StoreSnapshot.load(tmp_path)


def edit(path: Path, edit_content: Callable[[Any], object]) -> None:
    """Changes the description, with a checksum that is right."""
    content = json.loads((path / MANIFEST_NAME).read_bytes())
    del content["crc32"]
    edit_content(content)
    (path / MANIFEST_NAME).write_text(json.dumps({**content, "crc32": json_crc32(content)}))


def array_of(content: Any, name: str) -> Any:
    return content["tables"][1]["arrays"][name]


def all_have_rows(content: Any, rows: Any) -> None:
    for array in content["tables"][1]["arrays"].values():
        array["shape"][0] = rows


EDITS: list[tuple[Callable[[Any], object], str]] = [
    (
        lambda c: c.update(format_version=FORMAT_VERSION + 1),
        "is of format version 2, this torchrec_ext reads 1",
    ),
    (lambda c: c.update(format="another"), "does not describe a snapshot"),
    (lambda c: c.pop("tables"), "is damaged"),
    (lambda c: c.update(tables=[1]), "is damaged"),
    (lambda c: c.update(clock="noon"), "is damaged"),
    (lambda c: c["tables"].append(c["tables"][0]), "describes a table twice"),
    (lambda c: c["tables"][1]["table"].pop("dim"), "is damaged: not a table's description"),
    (lambda c: c["tables"][1]["optimizer"].update(kind="os.system"), "is damaged: not an optimizer's"),
    (lambda c: array_of(c, "weight").update(file="../weight.npy"), "'../weight.npy' is not the name of a"),
    (lambda c: array_of(c, "weight").update(file="/etc/passwd"), "'/etc/passwd' is not the name of a"),
    (lambda c: array_of(c, "weight").update(file="weight"), "'weight' is not the name of a"),
    (lambda c: array_of(c, "weight").update(file=7), "is damaged"),
    (lambda c: array_of(c, "weight").update(dtype="object"), r"weight must be float32 \[12, 4\]"),
    (lambda c: array_of(c, "weight").update(dtype="float64"), r"weight must be float32 \[12, 4\]"),
    (lambda c: array_of(c, "keys").update(shape=[13]), r"must be .*13"),
    (lambda c: array_of(c, "keys").update(shape=[]), r"must be"),
    (
        lambda c: array_of(c, "slots.exp_avg").update(shape=[12, 1]),
        r"slots.exp_avg must be float32 \[12, 4\]",
    ),
    (lambda c: array_of(c, "candidates").update(shape=[1]), r"must be int64 \[1\]"),
    (lambda c: c["tables"][1]["arrays"].pop("keys"), "has no keys"),
    (lambda c: c["tables"][1]["arrays"].pop("weight"), "has no weight"),
    (lambda c: c["tables"][1]["arrays"].update(x=array_of(c, "keys")), "'x' is nothing that Adam"),
    (lambda c: c.update(step=-1), "-1 is no number of anything"),
    (lambda c: c.update(step=3.0), "3.0 is no number of anything"),
    (lambda c: c.update(clock=True), "True is no number of anything"),
    (lambda c: array_of(c, "weight").update(nbytes=-1), "-1 is no number of anything"),
    (lambda c: array_of(c, "weight").update(crc32="1"), "'1' is no number of anything"),
    (partial(all_have_rows, rows=-5), "-5 is no number of anything"),
    (partial(all_have_rows, rows=1 << 64), "is no number of anything"),
    (partial(all_have_rows, rows=5.0), "5.0 is no number of anything"),
    (lambda c: c["tables"][1].update(arrays=[]), "is damaged"),
    (lambda c: c["tables"][1]["table"].update(name=5), "not a table's description"),
    (lambda c: c["tables"][1]["table"].update(dim="4"), "not a table's description"),
    (lambda c: c["tables"][1]["table"].update(evict_after="soon"), "not a table's description"),
    (
        lambda c: c["tables"][1]["table"].update(initializer={"kind": "ByFunction"}),
        "its rows come one by one",
    ),
    (lambda c: c["tables"][0]["table"]["initializer"].update(low="x"), "not a table's description"),
    (lambda c: c["tables"][1]["optimizer"].update(lr="x"), "not an optimizer's description"),
    (lambda c: c["tables"][1]["optimizer"].update(lr=float("nan")), "not an optimizer's description"),
]


@pytest.mark.parametrize(("edit_content", "message"), EDITS)
def test_a_description_that_is_wrong_is_refused(
    edit_content: Callable[[Any], object], message: str, tmp_path: Path
) -> None:
    trained(Adam()).save(tmp_path)
    edit(tmp_path, edit_content)
    with pytest.raises(CheckpointError, match=message) as caught:
        StoreSnapshot.load(tmp_path)
    assert str(tmp_path / MANIFEST_NAME) in str(caught.value)


def test_what_is_no_snapshot_is_refused(tmp_path: Path) -> None:
    trained(Adam()).save(tmp_path / "saved")
    manifest = tmp_path / "saved" / MANIFEST_NAME
    content = manifest.read_bytes()
    for damaged in (content[:-10], b"", b"[]", b"{}", b"\xff", b"[" * 100_000, pickle.dumps(Exploding())):
        manifest.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=MANIFEST_NAME):
            StoreSnapshot.load(tmp_path / "saved")
    manifest.write_bytes(content.replace(b'"step": 3', b'"step": 4'))
    with pytest.raises(CheckpointError, match="its checksum is not its own"):
        StoreSnapshot.load(tmp_path / "saved")
    for make in (make_a_pipe, make_a_link):
        make(manifest)
        with pytest.raises(CheckpointError, match=r"cannot be read: .*(no plain file|symbolic link)"):
            StoreSnapshot.load(tmp_path / "saved")
    manifest.unlink()
    manifest.mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        StoreSnapshot.load(tmp_path / "saved")
    (tmp_path / "a file").touch()
    for path in (tmp_path / "nothing", tmp_path / "a file", tmp_path):
        assert not is_saved_snapshot(path)
        with pytest.raises(CheckpointError, match="is not a saved snapshot, or its saving was not finished"):
            StoreSnapshot.load(path)


# A snapshot is saved as a whole or not at all


def strays(path: Path) -> set[str]:
    """Files of a saved snapshot that it does not name."""
    named = {file.file for table in SavedSnapshot(path).tables.values() for file in table.files.values()}
    return {file.name for file in path.iterdir()} - named - {MANIFEST_NAME}


def test_a_snapshot_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    for seed in range(3):
        trained(Adam(), seed).save(tmp_path)
        assert same(StoreSnapshot.load(tmp_path), trained(Adam(), seed))
        assert not strays(tmp_path)


@contextmanager
def when_called(name: str, *do: Callable[[], object]) -> Iterator[None]:
    """Does one thing after the other whenever the reader of snapshots calls a function of this name."""
    left = iter(do)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == saved.__file__ and frame.f_code.co_name == name:
            sys.setprofile(None)
            next(left)()
            sys.setprofile(profile if operator.length_hint(left) else None)

    sys.setprofile(profile)
    try:
        yield
        assert sys.getprofile() is None
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("moment", ["_table", "mapped", "parsed", "compare"])
def test_what_is_loaded_while_another_takes_its_place_is_one_of_them(moment: str, tmp_path: Path) -> None:
    old, new = trained(Adam()), trained(Adam(), seed=1)
    old.save(tmp_path)
    with when_called(moment, lambda: new.save(tmp_path)):
        loaded = StoreSnapshot.load(tmp_path)
    # From when all files were mapped, it is the old one.
    assert same(loaded, old if moment in ("parsed", "compare") else new)


def test_what_is_loaded_while_others_take_its_place_again_and_again_is_the_last(tmp_path: Path) -> None:
    snapshots = [trained(Adam(), seed) for seed in range(4)]
    snapshots[0].save(tmp_path)
    with when_called("mapped", *(partial(snapshot.save, tmp_path) for snapshot in snapshots[1:])):
        loaded = StoreSnapshot.load(tmp_path)
    assert same(loaded, snapshots[-1])


@pytest.mark.parametrize("free_bytes", [0, 100, 200, 300, 420, 700, 2000])
def test_a_full_disk_is_said_and_leaves_the_old_snapshot(free_bytes: int, tmp_path: Path) -> None:
    old = trained(Adam())
    old.save(tmp_path / "old")
    before = sorted(os.listdir(tmp_path / "old"))
    for path in (tmp_path / "old", tmp_path / "new"):
        message = f"cannot save a snapshot in {path}: File too large"
        with pytest.raises(CheckpointError, match=message), full_disk(free_bytes):
            trained(Adam(), 1).save(path)
    assert same(StoreSnapshot.load(tmp_path / "old"), old)
    assert sorted(os.listdir(tmp_path / "old")) == before
    assert os.listdir(tmp_path) == ["old"]


def test_a_disk_that_fails_to_sync_is_said_and_leaves_the_old_snapshot(tmp_path: Path) -> None:
    old = trained(Adam())
    old.save(tmp_path)
    synced = failing = 0

    def fsync(descriptor: int) -> None:
        nonlocal synced
        synced += 1
        if synced == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(1, 100):
        synced, failing = 0, number
        with replaced_fsync(fsync), suppress(CheckpointError):
            trained(Adam(), 1).save(tmp_path)
            break
        assert same(StoreSnapshot.load(tmp_path), old)
        assert not strays(tmp_path)
    assert failing > 20
    # What failed last was to sync the directory, of what readers see already.
    assert same(StoreSnapshot.load(tmp_path), trained(Adam(), 1))


def _die_everywhere(path: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    old, new = (
        replace(snapshot, tables={DYNAMIC.name: snapshot.tables[DYNAMIC.name]})
        for snapshot in (trained(SGD()), trained(SGD(), 1))
    )
    outcomes = []
    for number in range(0, 10_000, 23):
        for has_old in (True, False):
            directory = path / f"{number}-{has_old}"
            if has_old:
                old.save(directory)
            killed = die_before_line(number, ("saving.py",), partial(new.save, directory))
            try:
                found = StoreSnapshot.load(directory)
            except CheckpointError as error:
                assert "is not a saved snapshot" in str(error) and not has_old
                outcomes.append("none")
            else:
                is_new = same(found, new)
                assert is_new or (has_old and same(found, old))
                outcomes.append("new" if is_new else "old")
            assert killed or outcomes[-1] == "new"
            new.save(directory)  # goes on from whatever is there
            assert same(StoreSnapshot.load(directory), new) and not strays(directory)
        if not killed:
            break
    pipe.send(outcomes)


def test_a_process_that_is_killed_leaves_the_old_snapshot_or_the_new_one(tmp_path: Path) -> None:
    ours, theirs = mp.Pipe(duplex=False)
    start_process(_die_everywhere, tmp_path, theirs)
    theirs.close()
    outcomes = ours.recv()
    assert all(outcomes.count(outcome) > 1 for outcome in ("old", "new", "none")), outcomes


def test_an_interrupt_right_after_the_commit_does_not_undo_it(tmp_path: Path) -> None:
    snapshot = trained(Adam())

    with pytest.raises(KeyboardInterrupt), SnapshotWriter(tmp_path, clock=1, step=1) as writer:
        for part in snapshot.tables.values():
            writer.add(part.table, part.optimizer, part.arrays())
        writer._commit()
        raise KeyboardInterrupt
    assert StoreSnapshot.load(tmp_path).tables.keys() == snapshot.tables.keys()


def test_two_do_not_save_in_one_directory_at_a_time(tmp_path: Path) -> None:
    snapshot = trained(Adam())
    message = "another snapshot is being saved in"
    with SnapshotWriter(tmp_path, clock=1, step=1), pytest.raises(CheckpointError, match=message):
        snapshot.save(tmp_path)
    snapshot.save(tmp_path)
    assert same(StoreSnapshot.load(tmp_path), snapshot)


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A directory that holds something else."""
    (tmp_path / "notes.npy").write_bytes(b"precious")
    yield tmp_path
    assert (tmp_path / "notes.npy").read_bytes() == b"precious"


def test_a_directory_that_holds_something_else_is_left_as_it_is(precious: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds something else than a snapshot \(notes.npy\)"):
        trained(Adam()).save(precious)
    assert os.listdir(precious) == ["notes.npy"]
    with FileStore(tmp_path / "store") as store:
        store.create_tables(TABLES, SGD())
        with pytest.raises(CheckpointError, match="holds something else"):
            store.snapshot().save(tmp_path / "store")
    with pytest.raises(CheckpointError, match=r"cannot save a snapshot in .*: (Not a directory|File exists)"):
        trained(Adam()).save(precious / "notes.npy")


def test_a_snapshot_that_does_not_fit_together_is_not_saved(tmp_path: Path) -> None:
    snapshot = trained(Adam())
    part = snapshot.tables[DYNAMIC.name]
    for damage, message in [
        ({"weight": part.weight[:3]}, "weight must be"),
        ({"weight": part.weight.bfloat16()}, "not bfloat16"),
        ({"slots": {"x": part.weight}}, "'slots.x' is nothing that"),
    ]:
        damaged = replace(part, **damage)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=message):
            replace(snapshot, tables={**snapshot.tables, DYNAMIC.name: damaged}).save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


def test_pieces_that_are_not_what_was_announced_are_refused(tmp_path: Path) -> None:
    keys = np.arange(2)
    for pieces, message in [
        ([np.zeros((1, 4), np.float32)], "its pieces have 1 rows, not 2"),
        ([np.zeros((2, 4), np.float64)], "a piece is float64"),
        ([np.zeros((2, 3), np.float32)], r"a piece is float32 \[2, 3\]"),
    ]:
        with ExitStack() as stack:
            stack.enter_context(pytest.raises(ValueError, match=message))
            writer = stack.enter_context(SnapshotWriter(tmp_path / "saved", clock=0, step=0))
            writer.add(DYNAMIC, SGD(), {"keys": keys, "weight": Pieces((2, 4), "float32", pieces)})
        assert not (tmp_path / "saved").exists()
    with (
        pytest.raises(ValueError, match="was added before"),
        SnapshotWriter(tmp_path, clock=0, step=0) as writer,
    ):
        for _ in range(2):
            writer.add(DYNAMIC, SGD(), {"keys": keys, "weight": np.zeros((2, 4), np.float32)})
