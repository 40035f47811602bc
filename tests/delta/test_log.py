"""Reading a log: what is committed is read whole or an error says which dump is broken and how."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
import torch

from tests.support.faults import MortalRanks
from tests.support.training import IDS, TABLES, write_log
from tests.support.workers import run_on
from torchrec_ext.delta import DeltaLog, DeltaLogError, DumpId
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.manifest import sealed

STEPS = (10, 20, 30, 40)
SECOND = "step_000000000020.g0000"
PART = "part_00001_of_00002.parquet"

Answers = dict[int, dict[str, np.ndarray]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answers]:
    directory = tmp_path_factory.mktemp("log") / "deltas"
    return directory, run_on(2, write_log, directory, STEPS)[0]


@pytest.fixture
def directory(written: tuple[Path, Answers], tmp_path: Path) -> Path:
    """A log of its own for a test to break."""
    return shutil.copytree(written[0], tmp_path / "deltas")


@pytest.fixture
def answered(written: tuple[Path, Answers]) -> Answers:
    """What the model answered for ``IDS`` at each dump."""
    return written[1]


def test_dumps_are_listed_oldest_first_with_what_they_hold(directory: Path) -> None:
    dumps = DeltaLog(directory).dumps()
    assert [dump.dump for dump in dumps] == [DumpId(generation=0, step=step) for step in STEPS]
    assert [dump.previous and dump.previous.step for dump in dumps] == [None, 10, 20, 30]
    assert [dump.metadata for dump in dumps] == [{"checkpoint": f"ckpt/{step}"} for step in STEPS]
    for dump in dumps:
        rows = DeltaLog(directory).read(dump.step)
        ops = rows["op"].to_pylist()
        assert (ops.count("upsert"), ops.count("delete")) == (dump.upserts, dump.deletes)
        assert len(rows) == dump.rows
        assert dump.world_size == 2
        assert set(dump.tables) == set(TABLES)
    assert sum(dump.deletes for dump in dumps) > 0


def test_read_returns_the_rows_of_every_rank(directory: Path) -> None:
    rows = DeltaLog(directory).read(20)
    assert rows.schema.names == fmt.PART_SCHEMA.names
    assert set(rows["global_step"].to_pylist()) == {20}
    assert set(rows["rank"].to_pylist()) == {0, 1}
    assert set(rows["world_size"].to_pylist()) == {2}
    names = set(zip(rows["table_fqn"].to_pylist(), rows["feature_name"].to_pylist(), strict=True))
    assert names == {("mc.t0", "f0"), ("mc.t1", "f1,g1")}


@pytest.mark.parametrize("upto", [*STEPS, None, 39, 10**12])
def test_replay_answers_what_the_model_answered_at_that_step(
    directory: Path, answered: Answers, upto: int | None
) -> None:
    state = DeltaLog(directory).replay(upto=upto)
    step = max(s for s in STEPS if upto is None or s <= upto)
    assert set(state) == set(TABLES)
    for fqn in TABLES:
        expected = answered[step][fqn]
        assert state[fqn].lookup(IDS).view(np.int32).tolist() == expected.view(np.int32).tolist()


def test_keys_are_those_that_replay_holds(directory: Path) -> None:
    log = DeltaLog(directory)
    for upto in (20, 30, None):
        state, keys = log.replay(upto), log.keys(upto)
        for fqn in TABLES:
            assert keys[fqn].tolist() == state[fqn].keys.tolist() == sorted(set(keys[fqn].tolist()))
            assert len(state[fqn]) == len(keys[fqn]) > 0


def test_lookup_takes_lists_arrays_and_tensors_of_any_integer_type(
    directory: Path, answered: Answers
) -> None:
    state = DeltaLog(directory).replay()["mc.t0"]
    small = IDS[:60]
    expected = answered[40]["mc.t0"][:60]
    for ids in (
        small,
        tuple(small),
        range(60),
        np.array(small, np.int32),
        np.array(small, np.uint8),
        np.array(small)[::-1][::-1],
        torch.tensor(small),
        torch.tensor(small, dtype=torch.int32),
    ):
        assert np.array_equal(state.lookup(ids), expected)
    assert np.array_equal(state.lookup([7, 3, 7]), expected[[7, 3, 7]])
    assert np.array_equal(state.lookup(7), expected[[7]])


@pytest.mark.parametrize("ids", [[], (), np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)])
def test_lookup_of_no_ids_returns_no_vectors(directory: Path, ids: Any) -> None:
    assert DeltaLog(directory).replay()["mc.t1"].lookup(ids).shape == (0, 4)


@pytest.mark.parametrize(
    "ids",
    [[1.0], np.array([1.5]), np.array([2**63], np.uint64), [True], ["1"], [None], [2**64], [[1], [2, 3]]],
)
def test_lookup_refuses_what_is_no_64_bit_integer(directory: Path, ids: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        DeltaLog(directory).replay()["mc.t0"].lookup(ids)


def test_uncommitted_dump_is_not_there(directory: Path, answered: Answers) -> None:
    (directory / "step_000000000040.g0000" / "manifest.json").unlink()
    log = DeltaLog(directory)
    assert [dump.step for dump in log.dumps()] == [10, 20, 30]
    assert np.array_equal(log.replay()["mc.t0"].lookup(IDS), answered[30]["mc.t0"])
    with pytest.raises(DeltaLogError, match="no committed dump of step 40"):
        log.read(40)


def test_log_without_a_dump_lists_none_and_has_nothing_to_replay(tmp_path: Path) -> None:
    (tmp_path / "step_000000000001.g0000").mkdir()  # begun, never committed
    log = DeltaLog(tmp_path)
    assert log.dumps() == []
    with pytest.raises(DeltaLogError, match=f"{tmp_path}: no committed dump$"):
        log.replay()
    with pytest.raises(DeltaLogError, match=f"{tmp_path}: no committed dump$"):
        log.keys()


def test_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeltaLogError, match=f"{tmp_path}/nowhere: no such directory"):
        DeltaLog(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DeltaLogError, match="file: no such directory"):
        DeltaLog(str(tmp_path / "file"))


def test_step_that_was_not_dumped_is_an_error(directory: Path) -> None:
    log = DeltaLog(directory)
    with pytest.raises(DeltaLogError, match=r"no committed dump of step 25$"):
        log.read(25)
    with pytest.raises(DeltaLogError, match=r"no committed dump of step 20 of generation 3$"):
        log.read(20, generation=3)
    with pytest.raises(DeltaLogError, match=r"step 9; the first is of step 10$"):
        log.replay(upto=9)


def part_missing(dump: Path) -> str:
    (dump / PART).unlink()
    return f"{PART} is missing"


def fallback_missing(dump: Path) -> str:
    (dump / PART.replace("part", "fallback")).unlink()
    return "fallback_00001_of_00002.parquet is missing"


def part_truncated(dump: Path) -> str:
    data = (dump / PART).read_bytes()
    (dump / PART).write_bytes(data[:-1])
    return rf"{PART} has {len(data) - 1} bytes, the manifest says {len(data)}"


def part_empty(dump: Path) -> str:
    (dump / PART).write_bytes(b"")
    return rf"{PART} has 0 bytes"


def bit_flipped(dump: Path) -> str:
    data = bytearray((dump / PART).read_bytes())
    data[len(data) // 3] ^= 4
    (dump / PART).write_bytes(data)
    return f"{PART} is damaged: its checksum is not the manifest's"


def parts_of_two_ranks_swapped(dump: Path) -> str:
    first = dump / "part_00000_of_00002.parquet"
    data = first.read_bytes()
    first.write_bytes((dump / PART).read_bytes())
    (dump / PART).write_bytes(data)
    return "part_00000_of_00002.parquet (has|is damaged)"


def part_is_a_directory(dump: Path) -> str:
    (dump / PART).unlink()
    (dump / PART).mkdir()
    return PART


@pytest.mark.parametrize(
    "damage",
    [
        part_missing,
        fallback_missing,
        part_truncated,
        part_empty,
        bit_flipped,
        parts_of_two_ranks_swapped,
        part_is_a_directory,
    ],
)
def test_damaged_file_is_an_error_that_names_dump_and_file(
    directory: Path, answered: Answers, damage: Callable[[Path], str]
) -> None:
    what = damage(directory / SECOND)
    with pytest.raises(DeltaLogError, match=f"^{directory}: {SECOND}: .*{what}"):
        DeltaLog(directory).replay()
    # What does not need the damaged file is still readable.
    log = DeltaLog(directory)
    assert [dump.step for dump in log.dumps()] == list(STEPS)
    assert np.array_equal(log.replay(upto=10)["mc.t0"].lookup(IDS), answered[10]["mc.t0"])


def part_points_outside(directory: Path) -> None:
    outside = directory.parent / "outside.parquet"
    (directory / SECOND / PART).rename(outside)
    (directory / SECOND / PART).symlink_to(outside)


def manifest_points_outside(directory: Path) -> None:
    outside = directory.parent / "outside.json"
    (directory / SECOND / "manifest.json").rename(outside)
    (directory / SECOND / "manifest.json").symlink_to(outside)


def dump_points_outside(directory: Path) -> None:
    outside = directory.parent / "outside"
    (directory / SECOND).rename(outside)
    (directory / SECOND).symlink_to(outside, target_is_directory=True)


@pytest.mark.parametrize("link", [part_points_outside, manifest_points_outside, dump_points_outside])
def test_symbolic_link_is_not_followed(directory: Path, link: Callable[[Path], None]) -> None:
    link(directory)
    with pytest.raises(DeltaLogError, match=f"{SECOND}.*a symbolic link"):
        DeltaLog(directory).replay()


def test_log_may_itself_lie_behind_a_symbolic_link(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(directory, target_is_directory=True)
    assert len(DeltaLog(tmp_path / "link").replay()["mc.t0"]) > 0


def edit_manifest(dump: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = json.loads((dump / "manifest.json").read_bytes())
    change(manifest)
    (dump / "manifest.json").write_bytes(sealed(manifest))


def test_flipped_bit_of_a_manifest_is_an_error_or_changes_nothing(directory: Path) -> None:
    path = directory / SECOND / "manifest.json"
    whole, manifests = path.read_bytes(), DeltaLog(directory).dumps()
    detected = 0
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        try:
            assert DeltaLog(directory).dumps() == manifests, position
        except DeltaLogError as error:
            assert SECOND in str(error)
            detected += 1
    assert detected > len(whole) // 6, "only white space can be changed unnoticed"


@pytest.mark.parametrize("name", ["../x.parquet", "/etc/passwd", "part_00001_of_00003.parquet", ""])
@pytest.mark.parametrize("kind", ["parts", "fallbacks"])
def test_manifest_cannot_name_a_file_that_is_not_its_own(directory: Path, kind: str, name: Any) -> None:
    edit_manifest(directory / SECOND, lambda manifest: manifest[kind][1].update(name=name))
    with pytest.raises(DeltaLogError, match=f"^{directory}: {SECOND}: manifest.json names {name!r}"):
        DeltaLog(directory).dumps()


MANIFEST_FIELDS = [
    "dump",
    "previous",
    "world_size",
    "created_unix",
    "committed_unix",
    "tables",
    "parts",
    "fallbacks",
    "stats",
    "supersedes",
    "metadata",
]


@pytest.mark.parametrize("field", [*MANIFEST_FIELDS, "format_version"])
def test_manifest_that_lacks_a_field_is_an_error_that_names_dump_and_field(
    directory: Path, field: str
) -> None:
    edit_manifest(directory / SECOND, lambda manifest: manifest.pop(field))
    with pytest.raises(DeltaLogError, match=f"^{directory}: {SECOND}: manifest.json.*'{field}'"):
        DeltaLog(directory).dumps()


@pytest.mark.parametrize("value", ["?", 0, 7, None, [3], {"a": 1}, float("nan"), float("inf"), 10**400])
@pytest.mark.parametrize(
    "field",
    [
        *MANIFEST_FIELDS,
        "dump.step",
        "dump.generation",
        "previous.step",
        "tables.mc.t0",
        "tables.mc.t0.dim",
        "tables.mc.t0.num_shards",
        "tables.mc.t0.block_size",
        "tables.mc.t0.features",
        "parts.1",
        "parts.1.name",
        "parts.1.rows",
        "parts.1.nbytes",
        "parts.1.crc32",
        "stats.0.upserts",
    ],
)
def test_manifest_with_a_field_of_another_type_never_ends_in_another_error(
    directory: Path, field: str, value: Any
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        *path, last = field.replace("mc.t", "mc/t").split(".")
        place: Any = manifest
        for name in path:
            place = place[int(name) if isinstance(place, list) else name.replace("/", ".")]
        place[int(last) if isinstance(place, list) else last.replace("/", ".")] = value

    edit_manifest(directory / SECOND, change)
    try:
        log = DeltaLog(directory)
        assert [dump.rows >= 0 for dump in log.dumps()]
        log.replay()["mc.t0"].lookup(IDS)
    except DeltaLogError as error:
        assert SECOND in str(error)


def test_superseded_dumps_are_not_replayed(directory: Path) -> None:
    dumps = DeltaLog(directory).dumps()
    assert len(DeltaLog(directory).keys(20)["mc.t0"]) > 0
    edit_manifest(
        directory / SECOND,
        lambda manifest: manifest.update(supersedes=[{"generation": 0, "step": dumps[0].step}]),
    )
    log = DeltaLog(directory)
    assert [dump.step for dump in log.dumps()] == [20, 30, 40]
    assert [dump.step for dump in log.dumps(superseded=True)] == [10, 20, 30, 40]
    assert log.dumps()[0].supersedes == (dumps[0].dump,)
    only_second = set(log.read(20).filter(pc.equal(log.read(20)["op"], "upsert"))["key_id"].to_pylist())
    assert set(log.keys(20)["mc.t0"].tolist()) <= only_second
    with pytest.raises(DeltaLogError, match=r"no committed dump of step 10$"):
        log.read(10)
    assert len(log.read(10, generation=0)) == dumps[0].rows
    with pytest.raises(DeltaLogError, match=r"step 10; the first is of step 20$"):
        log.replay(upto=10)


def test_dump_that_a_superseded_one_made_void_stays_void(directory: Path) -> None:
    for step, void in ((30, 20), (40, 30)):
        edit_manifest(
            directory / f"step_{step:012d}.g0000",
            lambda manifest, void=void: manifest.update(supersedes=[{"generation": 0, "step": void}]),
        )
    assert [dump.step for dump in DeltaLog(directory).dumps()] == [10, 40]


def test_manifest_with_fields_of_a_later_version_of_the_package_is_read(
    directory: Path, answered: Answers
) -> None:
    def add(manifest: dict[str, Any]) -> None:
        for place in (manifest, manifest["dump"], manifest["parts"][0], manifest["tables"]["mc.t0"]):
            place["of_a_later_version"] = {"x": 1}

    edit_manifest(directory / SECOND, add)
    log = DeltaLog(directory)
    assert log.dumps()[1].dump == DumpId(generation=0, step=20)
    assert np.array_equal(log.replay()["mc.t0"].lookup(IDS), answered[40]["mc.t0"])


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b"{}", b"\x00" * 100])
def test_file_that_is_no_manifest_is_an_error_that_names_the_dump(directory: Path, data: bytes) -> None:
    (directory / SECOND / "manifest.json").write_bytes(data)
    with pytest.raises(DeltaLogError, match=f"^{directory}: {SECOND}: manifest.json is not a manifest"):
        DeltaLog(directory).dumps()


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_manifest_of_another_format_version_is_an_error_that_says_what_to_do(
    directory: Path, version: Any
) -> None:
    edit_manifest(directory / SECOND, lambda manifest: manifest.update(format_version=version))
    with pytest.raises(
        DeltaLogError,
        match=f"^{directory}: {SECOND}: format version {version!r}; .*use the one that wrote it",
    ):
        DeltaLog(directory).dumps()


@pytest.mark.parametrize(("kept", "stray"), [("step_000000000020.g0000", "step_000000000030.g0000")])
def test_gap_in_the_chain_is_an_error_that_names_both_dumps(directory: Path, kept: str, stray: str) -> None:
    shutil.rmtree(directory / kept)
    with pytest.raises(
        DeltaLogError,
        match=f"^{directory}: {stray} follows {kept}, whose manifest.json is missing: the chain has a gap",
    ):
        DeltaLog(directory).dumps()


def test_log_without_its_first_dump_is_an_error(directory: Path) -> None:
    shutil.rmtree(directory / "step_000000000010.g0000")
    with pytest.raises(
        DeltaLogError, match=f"^{directory}: {SECOND} follows step_000000000010.g0000, whose manifest"
    ):
        DeltaLog(directory).replay()


def test_copied_dump_is_an_error_that_names_both_directories(directory: Path) -> None:
    copy = "step_000000000050.g0000"
    shutil.copytree(directory / SECOND, directory / copy)
    with pytest.raises(
        DeltaLogError, match=f"^{directory}: {copy}: manifest.json is that of {SECOND}.* copied or renamed"
    ):
        DeltaLog(directory).dumps()


def _copy_of_second(directory: Path, step: int, generation: int, **fields: Any) -> str:
    copy = f"step_{step:012d}.g{generation:04d}"
    shutil.copytree(directory / SECOND, directory / copy)
    dump = {"step": step, "generation": generation}
    edit_manifest(directory / copy, lambda manifest: manifest.update(dump=dump, **fields))
    return copy


def test_two_dumps_after_the_same_one_are_an_error_that_names_all_three(directory: Path) -> None:
    fork = _copy_of_second(directory, 50, 0)
    with pytest.raises(
        DeltaLogError,
        match=f"^{directory}: {SECOND} and {fork} both follow step_000000000010.g0000: two trainers",
    ):
        DeltaLog(directory).dumps()


def test_late_dumps_of_a_run_that_was_fenced_off_are_left_out(directory: Path) -> None:
    # A new run went on from step 20. The old one never noticed: its file system let it commit 30 and 40.
    newest = _copy_of_second(directory, 21, 1, previous={"generation": 0, "step": 20})
    log = DeltaLog(directory)
    assert [dump.dump.directory for dump in log.dumps(superseded=True)][1:] == [SECOND, newest]
    assert [dump.step for dump in log.dumps()] == [10, 20, 21]
    assert log.replay()["mc.t0"].keys.tolist() == log.keys(20)["mc.t0"].tolist()


def test_late_dump_of_the_same_run_is_an_error(directory: Path) -> None:
    _copy_of_second(directory, 21, 1, previous={"generation": 0, "step": 20})
    fork = _copy_of_second(directory, 22, 1, previous={"generation": 0, "step": 20})
    with pytest.raises(DeltaLogError, match=f"and {fork} both follow {SECOND}: two trainers"):
        DeltaLog(directory).dumps()


def test_two_first_dumps_are_an_error(directory: Path) -> None:
    edit_manifest(directory / SECOND, lambda manifest: manifest.update(previous=None))
    with pytest.raises(
        DeltaLogError, match=f"^{directory}: step_000000000010.g0000 and {SECOND} both follow nothing"
    ):
        DeltaLog(directory).dumps()


def test_dumps_that_follow_each_other_in_a_circle_are_an_error(directory: Path) -> None:
    edit_manifest(directory / SECOND, lambda m: m["previous"].update(step=40))
    with pytest.raises(DeltaLogError, match=f"^{directory}: {SECOND} is not connected to the first dump"):
        DeltaLog(directory).dumps()


def test_entries_that_are_no_dumps_are_left_alone(directory: Path, answered: Answers) -> None:
    (directory / "notes.txt").write_text("mine")
    (directory / "step_20.g0").mkdir()
    (directory / "step_000000000020.g0000.bak").mkdir()
    assert np.array_equal(DeltaLog(directory).replay()["mc.t0"].lookup(IDS), answered[40]["mc.t0"])


def test_file_in_place_of_a_dump_is_an_error_that_names_it(directory: Path) -> None:
    (directory / "step_000000000050.g0000").write_text("not a directory")
    with pytest.raises(DeltaLogError, match=rf"^{directory}: step_000000000050\.g0000"):
        DeltaLog(directory).dumps()


def _dump_all_the_time(tell: Callable[..., None], directory: Path, dumps: int) -> None:
    write_log(directory, range(1, dumps + 1))
    tell("done")


def test_log_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    directory, dumps = tmp_path / "deltas", 60
    seen = [0]
    directory.mkdir()
    with MortalRanks(2, tmp_path / "meet", _dump_all_the_time, directory, dumps) as ranks:
        while seen[-1] < dumps:
            log = DeltaLog(directory)
            found = log.dumps()
            assert seen[-1] <= len(found)
            if found:
                assert len(log.read(found[-1].step)) == found[-1].rows
            seen.append(len(found))
        assert ranks.hear(0) == ("done",)
    assert len(set(seen)) > 10


WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "torchrec", "fbgemm_gpu"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, NoTorch())
from torchrec_ext.delta import DeltaLog
from torchrec_ext import DeltaLog as same
assert DeltaLog is same
log = DeltaLog(sys.argv[1])
print([dump.step for dump in log.dumps()], len(log.read(20)))
print(log.replay()["mc.t0"].lookup([1, 2, 1000]).tolist())
"""


def test_log_is_read_without_torch(directory: Path) -> None:
    log = DeltaLog(directory)
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(directory)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    dumps, vectors = ran.stdout.splitlines()
    assert dumps == f"{list(STEPS)} {len(log.read(20))}"
    assert json.loads(vectors) == log.replay()["mc.t0"].lookup([1, 2, 1000]).tolist()
