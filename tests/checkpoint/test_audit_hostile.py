"""What was made, or damaged, so that an audit might miss it, hang or fail is told like other damage."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.checkpoint.audit_cases import SAVE, as_snapshot, files_of, save_snapshot, tensors
from torchrec_ext.checkpoint import audit_checkpoint, repair_checkpoint
from torchrec_ext.checkpoint.audit.reading.tensors import PIECE_BYTES, row_pieces
from torchrec_ext.cli import main
from torchrec_ext.errors import CheckpointError
from torchrec_ext.store import AdaGrad, DenseTable, StoreSnapshot

FORMS = ["ordinary", "named", "flattened"]


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


def trained(form: str) -> dict[str, Any]:
    """A model and its optimizer, in one of the forms of their state dicts."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    if form == "ordinary":
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    return {"model": of_model, "optimizer": of_optimizer, "epoch": 4}


# Optimizers of which parts cannot be read


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "directory"])
def test_a_file_that_is_lost_is_a_finding_in_every_form(form: str, damage: str, tmp_path: Path) -> None:
    dcp.save(trained(form), checkpoint_id=tmp_path / "x")
    (file,) = files_of(tmp_path / "x")
    content = file.read_bytes()
    file.unlink()
    if damage == "directory":
        file.mkdir()
    elif damage != "missing":
        file.write_bytes(content[: len(content) // 3 if damage == "cut" else 0])
    report = audit_checkpoint(tmp_path / "x")
    assert {finding.kind for finding in report.findings} == {"unreadable"}
    assert not report.clean and "param_groups" in str(report)


@pytest.mark.parametrize("form", FORMS)
def test_every_value_that_is_no_tensor_is_found_when_it_is_damaged(form: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    dcp.save(trained(form), checkpoint_id=path)
    places = {
        index.fqn: info
        for index, info in dcp.FileSystemReader(path).read_metadata().storage_data.items()
        if index.offset is None
    }
    assert any("param_groups" in name for name in places)
    for name, info in places.items():
        file = path / info.relative_path
        whole = file.read_bytes()
        damaged = bytearray(whole)
        pickled = whole.find(b"\x80\x02", info.offset)  # how it begins
        assert info.offset < pickled < info.offset + info.length
        damaged[pickled + 3] ^= 0x04
        file.write_bytes(damaged)
        report = audit_checkpoint(path)
        assert [f.kind for f in report.findings] == ["unreadable"], name
        assert report.findings[0].table == name
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("groups", "where"),
    [(5, "param_groups"), ([5], "param_groups 0"), ([{"params": 5}], "param_groups 0.params")],
)
def test_groups_that_are_none_are_findings(groups: Any, where: str) -> None:
    state = {"w": {"exp_avg": torch.ones(2)}}
    report = audit_checkpoint({"optimizer": {"state": state, "param_groups": groups}})
    (finding,) = report.findings
    assert finding.kind == "unreadable" and f"optimizer.{where}" in str(finding)
    assert [slot.slot for slot in report.slots] == ["exp_avg"]


def test_what_an_optimizer_keeps_besides_its_state_is_looked_at() -> None:
    rate, extra = torch.tensor(0.1), torch.ones(3)
    state = {"w": {"exp_avg": torch.ones(2)}}
    content = {"state": state, "param_groups": [{"params": ["w"], "lr": rate}], "extra": extra}
    assert audit_checkpoint({"optimizer": content}).clean
    rate.fill_(float("nan"))
    extra[1] = float("inf")
    findings = audit_checkpoint({"optimizer": content}).findings
    assert [one.table for one in findings] == ["optimizer.param_groups.0.lr", "optimizer.extra"]


# Archives that torch.load reads as something else


def edited(file: Path, name: str, offset: int, bits: int) -> None:
    """Flips bits in the entry of a record in an archive's directory."""
    content = bytearray(file.read_bytes())
    at = content.rfind(name.encode()) - 46
    assert content[at : at + 4] == b"PK\x01\x02"
    content[at + offset] ^= bits
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("offset", "bits"),
    [(38, 0x10), (8, 0x01), (8, 0x20), (8, 0x40), (10, 0x08), (46 + len("x/data/"), 0x02)],
    ids=["directory", "encrypted", "patched", "strongly encrypted", "compressed", "another storage's"],
)
def test_records_that_torch_would_not_read_as_they_are_are_refused(
    offset: int, bits: int, tmp_path: Path
) -> None:
    torch.save({"w": torch.full((1000,), 3.0)}, tmp_path / "x.pt")
    assert audit_checkpoint(tmp_path / "x.pt").clean
    edited(tmp_path / "x.pt", "x/data/0", offset, bits)
    with pytest.raises(CheckpointError, match=r"x\.pt is no archive of torch\.save"):
        audit_checkpoint(tmp_path / "x.pt")


@pytest.mark.parametrize("at", range(len("data/1")))
def test_a_storage_of_which_the_record_has_another_name_is_lost(at: int, tmp_path: Path) -> None:
    torch.save({"v": torch.zeros(1000), "w": torch.ones(1000)}, tmp_path / "x.pt")
    edited(tmp_path / "x.pt", "x/data/1", 46 + len("x/") + at, 0x01)
    with pytest.raises(RuntimeError):
        torch.load(tmp_path / "x.pt")
    with contextlib.suppress(CheckpointError):
        (finding,) = audit_checkpoint(tmp_path / "x.pt").findings
        assert (finding.table, finding.kind) == ("w", "unreadable")


@pytest.mark.parametrize("letter", range(len("optimizer.extra")))
def test_a_name_that_was_changed_in_a_description_is_found(letter: int, tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "optimizer": {"extra": torch.ones(2)}}, checkpoint_id=tmp_path)
    file = tmp_path / ".metadata"
    content = bytearray(file.read_bytes())
    content[content.find(b"optimizer.extra") + letter] ^= 0x01
    file.write_bytes(content)
    (finding,) = audit_checkpoint(tmp_path).findings
    assert finding.kind == "unreadable" and "contradict each other" in finding.message


# What would hang, or fill the memory


@pytest.mark.parametrize("kind", SAVE)
def test_pipes_are_not_waited_for(kind: str, tmp_path: Path) -> None:
    SAVE[kind](tensors(50), tmp_path / "x")
    file = files_of(tmp_path / "x")[0]
    file.unlink()
    os.mkfifo(file)
    result = run(tmp_path / "x")
    assert result.exit_code in (1, 2) and "no plain file" in result.output
    result = run(tmp_path / "x", "--repair", tmp_path / "out")
    assert result.exit_code == 2 and not (tmp_path / "out").exists()


def test_a_link_in_a_snapshot_is_not_followed(tmp_path: Path) -> None:
    save_snapshot(tensors(50), tmp_path / "x")
    file = files_of(tmp_path / "x")[0]
    file.rename(tmp_path / "outside.npy")
    file.symlink_to(tmp_path / "outside.npy")
    (finding,) = audit_checkpoint(tmp_path / "x").findings
    assert finding.kind == "unreadable" and "symbolic link" in finding.message


@pytest.mark.parametrize("shape", [(2**20, 2**10), (1, 2**30), (2**10, 2**20)])
def test_an_expanded_tensor_takes_no_memory(shape: tuple[int, int], tmp_path: Path) -> None:
    """It stands for 4 GB: in memory, pieces are small; in a file, too."""
    wide = torch.ones(1).expand(shape)
    assert sum(piece.nbytes for _, piece in row_pieces(wide)) == 4
    torch.save({"w": wide}, tmp_path / "x.pt")
    for source in ({"w": wide}, tmp_path / "x.pt"):
        assert audit_checkpoint(source).clean
    torch.save({"w": torch.full((1,), float("nan")).expand(shape)}, tmp_path / "x.pt")
    assert [f.kind for f in audit_checkpoint(tmp_path / "x.pt").findings] == ["non_finite"]


def test_pieces_are_small_and_together_the_tensor() -> None:
    long, wide = torch.arange(3_000_000.0).view(-1, 3), torch.arange(3_000_000.0).view(2, -1)
    for tensor in (long, wide, wide.t(), wide.view(2, 3, -1), torch.tensor(3.0)):
        pieces = list(row_pieces(tensor))
        assert all(piece.nbytes <= PIECE_BYTES for _, piece in pieces)
        assert torch.equal(torch.cat([piece.reshape(-1) for _, piece in pieces]), tensor.reshape(-1))
        rows = [row for row, _ in pieces]
        assert rows == sorted(rows) and len(pieces) < 100


def test_conjugate_and_negative_views_are_looked_at() -> None:
    values = torch.ones(3, dtype=torch.complex64)
    assert audit_checkpoint({"w": values.conj(), "v": values.conj().imag}).clean
    values[1] = complex(0.0, float("nan"))
    report = audit_checkpoint({"w": values.conj(), "v": values.conj().imag})
    assert [finding.rows for finding in report.findings] == [(1,), (1,)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_of_rare_kinds_do_not_keep_others_from_being_audited(tmp_path: Path) -> None:
    rare = {
        "sparse": torch.eye(3).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "packed": torch.zeros(4, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    }
    report = audit_checkpoint({**rare, "w": torch.tensor([float("nan")])})
    assert [finding.table for finding in report.findings] == ["w"]
    assert {note.table for note in report.notes} == {"sparse", "nested"}
    torch.save({"packed": rare["packed"]}, tmp_path / "x.pt")
    report = audit_checkpoint(tmp_path / "x.pt")
    assert report.clean and report.checksums


# The last resort


def in_itself() -> dict[str, Any]:
    content: dict[str, Any] = {"w": torch.ones(2)}
    content["again"] = content
    return content


def deep() -> dict[str, Any]:
    content: dict[str, Any] = {}
    inner = content
    for _ in range(5000):
        inner["x"] = inner = {}
    return content


@pytest.mark.parametrize("make", [in_itself, deep])
def test_whatever_fails_is_told_in_one_line(make: Callable[[], dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be audited"):
        audit_checkpoint(make())
    if make is in_itself:  # one that can be saved
        torch.save(make(), tmp_path / "x.pt")
        for more in ((), ("--repair", tmp_path / "out.pt")):
            result = run(tmp_path / "x.pt", *more)
            assert result.exit_code == 2 and not isinstance(result.exception, RecursionError)
            assert result.stderr.startswith(f"Error: {tmp_path / 'x.pt'} cannot be audited")


def test_where_nothing_was_looked_at_nothing_is_called_clean(tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "x.pt")
    torch.save({"w": torch.ones(2)}, tmp_path / "y.pt")
    for arguments in (["x.pt"], ["y.pt", "--exclude", "*"]):
        result = run(tmp_path / arguments[0], *arguments[1:])
        assert result.exit_code == 2 and "nothing audited; 0 tensors" in result.stdout
        assert '"clean": false' in run(tmp_path / arguments[0], *arguments[1:], "--json").stdout
    assert not audit_checkpoint({}).clean
    assert repair_checkpoint(tmp_path / "x.pt", tmp_path / "out.pt").out is None


def test_names_cannot_speak_to_the_terminal(tmp_path: Path) -> None:
    for number, name in enumerate(["a\nclean; 1 tensor\x1b[31m", "a\udcff", "\u202e", "e\u0301"]):
        path = tmp_path / f"{number}.pt"
        torch.save({name: torch.tensor([float("nan")])}, path)
        for more in ([], ["--repair", tmp_path / f"out{number}.pt"]):
            result = run(path, *more)
            assert result.exit_code == 1, result.output
            assert not {"\x1b", "\udcff", "\u202e"} & set(result.output)
            assert "\nclean;" not in result.output
    assert "e\u0301" in result.output  # letters stay
    result = run(tmp_path / "no\x1b[31m.pt")
    assert result.exit_code == 2 and "\x1b" not in result.output


def test_a_snapshot_that_another_one_replaces_meanwhile_is_not_called_damaged(tmp_path: Path) -> None:
    save_snapshot(tensors(50), tmp_path / "x")

    replacements = iter([tensors(60)])

    def replace(done: int, total: int) -> None:
        for content in replacements:
            save_snapshot(content, tmp_path / "x")

    with pytest.raises(CheckpointError, match="another snapshot took its place"):
        audit_checkpoint(tmp_path / "x", progress=replace)
    assert audit_checkpoint(tmp_path / "x").clean


# Keys that a table cannot have


@pytest.mark.parametrize("keys", [(0, 1, 2, 99), (0, 1, 2, 3, 99), (-1, 0, 1, 2, 3, 4)])
def test_keys_out_of_a_dense_tables_range_are_found_and_not_dropped(
    keys: tuple[int, ...], tmp_path: Path
) -> None:
    arrays = {name: (torch.tensor(keys), torch.ones(len(keys), 2)) for name in ("weight", "sum")}
    snapshot = StoreSnapshot.from_arrays({"t": arrays}, [DenseTable("t", 2, 5)], AdaGrad())
    snapshot.save(tmp_path / "x")
    outside = tuple(key for key in keys if not 0 <= key < 5)
    for source in (snapshot, tmp_path / "x"):
        extra = [one for one in audit_checkpoint(source).findings if one.kind == "extra_keys"]
        assert [(one.slot, one.rows) for one in extra] == [("weight", outside), ("sum", outside)]
        assert "1 key there that the table cannot have" in str(extra[0])
    report = repair_checkpoint(tmp_path / "x", tmp_path / "out")
    assert report.out is None and len(report.refused) == 2 and not (tmp_path / "out").exists()


def test_a_snapshot_in_memory_is_audited_as_a_saved_one(tmp_path: Path) -> None:
    snapshot = as_snapshot(tensors(20))
    snapshot.save(tmp_path / "x")
    live, saved = audit_checkpoint(snapshot), audit_checkpoint(tmp_path / "x")
    assert live.slots == saved.slots and live.clean and saved.clean
