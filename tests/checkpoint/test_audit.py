"""An audit finds what is wrong, names where it is, and finds nothing in what is right."""

from __future__ import annotations

import math
import multiprocessing as mp
import os
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.audit_cases import (
    PARAMETER,
    SAVE,
    SLOT,
    TABLE,
    Tensors,
    as_snapshot,
    as_state_dict,
    files_of,
    flip,
    generator,
    offset_of,
    tensors,
)
from tests.support.workers import start_process
from torchrec_ext.checkpoint import AuditReport, Finding, audit_checkpoint
from torchrec_ext.checkpoint.audit.reading.crc import flipped_bits, flipped_word
from torchrec_ext.store import AdaGrad, Adam, DenseTable, DynamicTable, StoreSnapshot

ROWS = 1_000_000
KINDS = list(SAVE)


@pytest.fixture(scope="module")
def large() -> Tensors:
    """A million rows."""
    return tensors(ROWS)


@pytest.fixture(scope="module")
def saved(large: Tensors, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A million rows, in files of each kind."""
    paths = {kind: tmp_path_factory.mktemp("large") / kind for kind in KINDS}
    for kind, path in paths.items():
        SAVE[kind](large, path)
    return paths


def only(report: AuditReport) -> Finding:
    """The one finding there is."""
    assert not report.clean
    (finding,) = report.findings
    return finding


def planted(content: Tensors, slot: str, row: int, column: int, value: float) -> Tensors:
    changed = content[slot].clone()
    (changed[row] if changed.dim() == 2 else changed)[column if changed.dim() == 2 else row] = value
    return {**content, slot: changed}


def exponent_flipped(value: float) -> float:
    return float((torch.tensor(value).view(torch.int32) ^ (1 << 30)).view(torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_checkpoint_of_a_million_rows_is_clean(saved: dict[str, Path], kind: str) -> None:
    report = audit_checkpoint(saved[kind])
    assert report.clean and not report.notes and report.checksums
    rows = {slot.slot: slot.rows for slot in report.slots if slot.table == "ebc.t0"}
    assert rows["weight"] == rows[SLOT[kind]] == ROWS


@pytest.mark.parametrize("slot", ["weight", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_value_planted_among_a_million_rows_is_found(
    kind: str, slot: str, large: Tensors, tmp_path: Path
) -> None:
    draw = generator(kind, slot)
    row, column = draw.randrange(ROWS), draw.randrange(16) if slot == "weight" else 0
    was = float(large[slot].view(ROWS, -1)[row, column])
    wrong = {
        "non_finite": draw.choice([math.nan, math.inf, -math.inf]),
        "absurd": draw.choice([1e37, exponent_flipped(was)]),
        "negative": -was,
    }
    what = draw.choice(["non_finite", "absurd"] if slot == "weight" else list(wrong))
    SAVE[kind](planted(large, slot, row, column, wrong[what]), tmp_path / "damaged")
    finding = only(audit_checkpoint(tmp_path / "damaged"))
    expected = "weight" if slot == "weight" else SLOT[kind]
    assert (finding.table, finding.slot, finding.kind, finding.count) == ("ebc.t0", expected, what, 1)
    assert finding.rows == ((int(large["keys"][row]),) if kind == "snapshot" else (row,))
    assert str(finding.rows[0]) in str(finding)
    for file in files_of(tmp_path / "damaged"):
        file.unlink()  # pytest keeps its directories


@pytest.mark.parametrize("slot", ["weight", "sum"])
@pytest.mark.parametrize("kind", KINDS)
def test_any_bit_that_flips_in_a_file_of_a_million_rows_is_found(
    kind: str, slot: str, large: Tensors, saved: dict[str, Path]
) -> None:
    draw = generator("bits", kind, slot)
    nbytes = large[slot].nbytes
    file = next(
        f
        for f in files_of(saved[kind])
        if f.stat().st_size > nbytes and f.read_bytes().find(large[slot].numpy().tobytes()) >= 0
    )
    start = offset_of(file, large[slot])
    for _ in range(3):
        byte, bit = draw.randrange(nbytes), draw.randrange(8)
        flip(file, start + byte, bit)
        findings = audit_checkpoint(saved[kind]).findings
        flip(file, start + byte, bit)
        row = byte // (nbytes // ROWS)
        named = int(large["keys"][row]) if kind == "snapshot" else row
        assert "checksum" in [finding.kind for finding in findings]
        expected = "weight" if slot == "weight" else SLOT[kind]
        assert {(f.table, f.slot, f.rows) for f in findings} == {("ebc.t0", expected, (named,))}
    assert audit_checkpoint(saved[kind]).clean


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_in_memory_one_wrong_value_is_one_finding(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40))
    content = tensors(rows)
    slot = data.draw(st.sampled_from(["weight", "sum"]))
    row, column = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, 15))
    values = [math.nan, math.inf, -math.inf, 1e37, -1e37, *([] if slot == "weight" else [-1e-30, -2.0])]
    damaged = planted(content, slot, row, column, data.draw(st.sampled_from(values)))
    finding = only(audit_checkpoint(as_state_dict(damaged)))
    assert (finding.table, finding.count, finding.rows) == ("ebc.t0", 1, (row,))
    finding = only(audit_checkpoint(as_snapshot(damaged)))
    assert (finding.slot, finding.rows) == (slot, (int(content["keys"][row]),))


def test_all_wrong_values_are_counted_and_some_rows_named() -> None:
    content = tensors(100)
    content["weight"][20:60, 3] = math.nan
    content["weight"][70, :2] = -1e38
    found = {finding.kind: finding for finding in audit_checkpoint(as_state_dict(content)).findings}
    assert found["non_finite"].count == 40 and found["non_finite"].rows == tuple(range(20, 30))
    assert found["absurd"].count == 2 and found["absurd"].rows == (70,)


@settings(max_examples=50, deadline=None)
@given(content=st.binary(min_size=4, max_size=300), data=st.data())
def test_a_checksum_tells_which_bit_flipped_and_what_was_overwritten(
    content: bytes, data: st.DataObject
) -> None:
    saved, changed = zlib.crc32(content), bytearray(content)
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed[bit // 8] ^= 1 << bit % 8
    assert flipped_bits(saved, zlib.crc32(changed), len(content)) == [bit]
    at = data.draw(st.integers(0, len(content) - 4))
    changed = bytearray(content)
    changed[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    word = flipped_word(saved, zlib.crc32(changed), len(content), at)
    was = int.from_bytes(changed[at : at + 4], "little") ^ word
    assert was == int.from_bytes(content[at : at + 4], "little")


# Structure


def nested(counts: tuple[int, int, int]) -> StoreSnapshot:
    """The key sets of a store that saved weight and moments one after another."""
    arrays: dict[str, Any] = {}
    for slot, count in zip(("weight", "exp_avg", "exp_avg_sq"), counts, strict=True):
        arrays[slot] = torch.arange(count), torch.full((count, 4), 0.5)
    return StoreSnapshot.from_arrays({"t": arrays}, [DynamicTable("t", 4, 10_000)], Adam())


def test_keys_that_other_slots_have_are_missing(tmp_path: Path) -> None:
    snapshot = nested((7033, 7034, 7036))
    snapshot.save(tmp_path / "nested")
    for source in (snapshot, tmp_path / "nested"):
        report = audit_checkpoint(source)
        missing = {f.slot: (f.kind, f.count, f.rows) for f in report.findings}
        assert missing == {
            "weight": ("missing_keys", 3, (7033, 7034, 7035)),
            "exp_avg": ("missing_keys", 2, (7034, 7035)),
        }
        assert {s.slot: s.missing for s in report.slots if s.missing} == {"weight": 3, "exp_avg": 2}


def test_a_slot_that_was_not_saved_misses_all_keys() -> None:
    keys = torch.arange(3)
    snapshot = StoreSnapshot.from_arrays(
        {"t": {"weight": (keys, torch.zeros(3, 2))}}, [DenseTable("t", 2, 5)], AdaGrad()
    )
    found = {f.slot: (f.count, f.rows) for f in audit_checkpoint(snapshot).findings}
    assert found == {"weight": (2, (3, 4)), "sum": (5, (0, 1, 2, 3, 4))}


ADAM = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(4, 2), "exp_avg_sq": torch.zeros(4, 2)}
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999)}


def adam_of(**states: dict[str, Any] | None) -> dict[str, Any]:
    group = {**OPTIONS, "params": ["a", "b", "c"]}
    return {"state": {"a": ADAM, "b": ADAM, "c": ADAM, **states}, "param_groups": [group]}


def test_a_state_of_which_a_part_is_missing_is_found() -> None:
    lacking = {name: value for name, value in ADAM.items() if name != "exp_avg_sq"}
    finding = only(audit_checkpoint(adam_of(b=lacking)))
    assert (finding.table, finding.slot, finding.kind) == ("b", "exp_avg_sq", "missing_slot")
    flattened = {f"state.{p}.{slot}": value for p in "abc" for slot, value in ADAM.items()}
    flattened |= {f"param_groups.{p}.{name}": value for p in "abc" for name, value in OPTIONS.items()}
    assert audit_checkpoint(flattened).clean
    del flattened["state.c.step"]
    assert only(audit_checkpoint(flattened)).slot == "step"


def test_state_without_entries_is_found_and_no_state_is_noted() -> None:
    finding = only(audit_checkpoint(adam_of(b=dict.fromkeys(ADAM))))
    assert (finding.table, finding.kind) == ("b", "empty_state")
    assert only(audit_checkpoint(adam_of(b={}))).kind == "empty_state"
    without = adam_of()
    del without["state"]["b"]
    report = audit_checkpoint(without)
    assert report.clean and [note.table for note in report.notes] == ["b"]


def test_state_of_other_rows_than_the_weight_is_found() -> None:
    content = as_state_dict(tensors(8))
    content["optimizer"]["state"][PARAMETER]["t0.momentum1"] = torch.zeros(7)
    finding = only(audit_checkpoint(content))
    assert (finding.table, finding.slot, finding.kind, finding.count) == (
        "ebc.t0",
        "momentum1",
        "other_rows",
        1,
    )


def test_options_of_different_optimizers_are_no_damage() -> None:
    """A flattened dict of two optimizers: each has its own entries."""
    flattened: dict[str, Any] = {
        "state.a.exp_avg": torch.zeros(2),
        "state.a.exp_avg_sq": torch.zeros(2),
        "state.b.momentum_buffer": -torch.ones(2),
        "param_groups.a.betas": (0.9, 0.99),
        "param_groups.b.momentum": 0.9,
        "param_groups.c.momentum": 0.0,
    }
    report = audit_checkpoint(flattened)
    assert report.clean and not report.notes


def test_state_that_may_be_signed_is_no_damage() -> None:
    """Of TorchRec's momentum1, a value per column and alone is LARS-SGD's, or Adagrad's."""
    values = torch.zeros(2000, 4)
    values[:20] = torch.randn(20, 4)  # those of which a row was looked up
    content = {"state": {"ebc.embedding_bags.t.weight": {"t.momentum1": values}}}
    assert audit_checkpoint(content).clean
    content["state"]["ebc.embedding_bags.t.weight"]["t.momentum1"] = values[:, 0]  # row-wise Adagrad's
    assert only(audit_checkpoint(content)).kind == "negative"
    adam = {"t.momentum1": torch.randn(50, 4), "t.exp_avg_sq": torch.rand(50, 4)}
    assert audit_checkpoint({"state": {"ebc.embedding_bags.t.weight": adam}}).clean


def test_what_is_excluded_is_not_looked_at() -> None:
    mask = torch.full((4, 4), -math.inf)
    content = {"model": {"attention.mask": mask, "attention.weight": torch.ones(4, 4)}}
    assert only(audit_checkpoint(content)).table == "attention.mask"
    assert audit_checkpoint(content, exclude=["attention.mask"]).clean
    assert audit_checkpoint(content, exclude="model.*.mask").clean


def test_a_pattern_that_excludes_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    content = {"model": {"attention.mask": torch.ones(4, 4)}}
    audit_checkpoint(content, exclude=["attention.*", "*.mask", "atention.mask"])
    assert [record.getMessage() for record in caplog.records] == [
        "exclude: 'atention.mask' matches no table, parameter or key"
    ]


def test_max_magnitude_sets_what_is_absurd() -> None:
    content = tensors(8)
    content["weight"][2, 3], content["sum"][5] = 50.0, 900.0
    assert audit_checkpoint(as_state_dict(content)).clean
    finding = only(audit_checkpoint(as_state_dict(content), max_magnitude=40.0))
    assert (finding.slot, finding.rows) == ("weight", (2,))  # 900 < 40 * 40
    assert len(audit_checkpoint(as_state_dict(content), max_magnitude=20.0).findings) == 2
    with pytest.raises(ValueError, match="max_magnitude must be positive"):
        audit_checkpoint(as_state_dict(content), max_magnitude=0.0)


def test_metrics_of_eight_bytes_may_be_large() -> None:
    assert audit_checkpoint({"metrics": {"examples": torch.tensor(3e12, dtype=torch.float64)}}).clean


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_floating_point_type_is_looked_at(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.ones(10, 4, dtype=dtype)
    values[7, 2] = math.nan
    torch.save({"w": values, "ids": torch.arange(4)}, tmp_path / "x.pt")
    assert only(audit_checkpoint(tmp_path / "x.pt")).rows == (7,)


def test_views_of_one_storage_are_each_looked_at(tmp_path: Path) -> None:
    whole = torch.rand(100, 6)
    parts = {"first": whole[:50], "second": whole[50:], "across": whole.t(), "even": whole[::2, ::3]}
    torch.save(parts, tmp_path / "clean.pt")
    assert audit_checkpoint(tmp_path / "clean.pt").clean
    whole[60, 3] = math.inf
    torch.save(parts, tmp_path / "wrong.pt")
    rows = {finding.table: finding.rows for finding in audit_checkpoint(tmp_path / "wrong.pt").findings}
    assert rows == {"second": (10,), "across": (3,), "even": (30,)}


def test_files_of_before_torch_1_6_are_read(tmp_path: Path) -> None:
    content = tensors(30)
    content["weight"][4, 4] = math.nan
    torch.save(as_state_dict(content), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    report = audit_checkpoint(tmp_path / "old.pt")
    assert only(report).rows == (4,) and not report.checksums


def test_files_without_checksums_are_said_to_have_none(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        SAVE["file"](tensors(30), tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = audit_checkpoint(tmp_path / "x.pt")
    assert report.clean and not report.checksums and "no checksums" in str(report)


def test_progress_is_told_up_to_the_end(tmp_path: Path) -> None:
    SAVE["file"](tensors(100_000), tmp_path / "x.pt")
    told: list[tuple[int, int]] = []
    audit_checkpoint(tmp_path / "x.pt", progress=lambda done, total: told.append((done, total)))
    assert len(told) > 1 and told == sorted(told)
    assert told[-1] == (100_000 * 17 * 4, 100_000 * 17 * 4)


# Memory


def _audit_and_tell(path: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    audit_checkpoint(path / "warm-up.pt")
    before = _anonymous()
    report = audit_checkpoint(path / "large")
    pipe.send((report.clean, _anonymous() - before))


def _anonymous() -> int:
    """The most memory that this process has had and that no file backs, as far as it can be told: bytes."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return (int(fields["VmHWM"].split()[0]) - int(fields["RssFile"].split()[0])) << 10


@pytest.mark.parametrize("kind", KINDS)
def test_an_audit_holds_a_fraction_of_the_checkpoint(
    kind: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "warm-up.pt")
    (tmp_path / "large").symlink_to(saved[kind])
    ours, theirs = mp.Pipe(duplex=False)
    process = start_process(_audit_and_tell, tmp_path, theirs)
    theirs.close()
    clean, used = ours.recv()
    process.join()
    size = sum(file.stat().st_size for file in files_of(saved[kind]))
    assert clean and used < size / 2, (used, size)


def test_files_in_memory_are_left_as_they_are(saved: dict[str, Path]) -> None:
    for path in saved.values():
        before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files_of(path)}
        audit_checkpoint(path)
        assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in files_of(path)} == before
        assert os.access(path, os.W_OK)


def test_a_dcp_checkpoint_is_what_dcp_loads(saved: dict[str, Path], large: Tensors) -> None:
    """The test's own checkpoint is a real one."""
    target = as_state_dict({name: torch.empty_like(value) for name, value in large.items()})
    dcp.load(target, checkpoint_id=saved["dcp"])
    assert torch.equal(target["model"][PARAMETER], large["weight"])
    assert TABLE.name == "ebc.t0"
