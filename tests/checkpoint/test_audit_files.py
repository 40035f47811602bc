"""What is in a checkpoint's files is never run, and whatever is wrong with them is said in plain words."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.audit_cases import SAVE, files_of, save_dcp, tensors
from torchrec_ext.checkpoint import audit_checkpoint
from torchrec_ext.cli import main
from torchrec_ext.errors import CheckpointError

KINDS = list(SAVE)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


class Opaque:
    """An object of a class that is not known to be harmless."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)


@pytest.fixture
def proof(tmp_path: Path) -> Path:
    """What a payload would make."""
    return tmp_path / "ran"


def test_a_description_that_would_run_something_is_refused(tmp_path: Path, proof: Path) -> None:
    save_dcp(tensors(5), tmp_path / "x")
    metadata = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    payload = Payload(proof)
    for content in (payload, {"state_dict_metadata": payload}, {**vars(metadata), "planner_data": payload}):
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match=r"it names (posix|nt)\.system"):
            audit_checkpoint(tmp_path / "x")
    metadata.storage_meta = payload
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        audit_checkpoint(tmp_path / "x")
    assert not proof.exists()
    with contextlib.suppress(AttributeError):  # of what the payload returned
        dcp.FileSystemReader(tmp_path / "x").read_metadata()
    assert proof.exists()  # the payload works


def test_the_functions_of_torch_that_load_are_not_admitted_either(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"ctorch\nload\n(S'x'\ntR.")
    with pytest.raises(CheckpointError, match=r"names torch\.load"):
        audit_checkpoint(tmp_path)


def test_objects_in_a_checkpoint_are_not_unpickled_and_said_to_be_left_out(
    tmp_path: Path, proof: Path
) -> None:
    dcp.save({"w": torch.ones(3), "odd": Opaque(), "bad": Payload(proof)}, checkpoint_id=tmp_path / "x")
    proof.unlink(missing_ok=True)
    report = audit_checkpoint(tmp_path / "x")
    assert report.clean and [slot.table for slot in report.slots] == ["w"]
    assert sorted(note.table for note in report.notes) == ["bad", "odd"]
    assert all("not audited" in note.message for note in report.notes)
    assert "Opaque" in str(report)
    for name, content in (("odd.pt", Opaque()), ("bad.pt", {"w": Payload(proof)})):
        torch.save(content, tmp_path / name)
        with pytest.raises(CheckpointError, match="objects other than tensors"):
            audit_checkpoint(tmp_path / name)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(CheckpointError, match=r"plain\.pt"):
        audit_checkpoint(tmp_path / "plain.pt")
    assert not proof.exists()


@pytest.mark.parametrize("way", ["above", "absolute", "link"])
def test_no_file_outside_of_the_directory_is_opened(way: str, tmp_path: Path) -> None:
    save_dcp(tensors(5), tmp_path / "x")
    (file,) = files_of(tmp_path / "x")
    outside = shutil.copy(file, tmp_path / "outside.distcp")
    if way == "link":
        file.unlink()
        file.symlink_to(outside)
    else:
        metadata = dcp.FileSystemReader(tmp_path / "x").read_metadata()
        for info in metadata.storage_data.values():
            info.relative_path = "../outside.distcp" if way == "above" else str(outside)
        (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    report = audit_checkpoint(tmp_path / "x")
    assert {finding.kind for finding in report.findings} == {"unreadable"}
    assert all("it was not opened" in finding.message for finding in report.findings)


def test_parts_that_are_lost_are_findings(tmp_path: Path) -> None:
    save_dcp(tensors(500), tmp_path / "x")
    (file,) = files_of(tmp_path / "x")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    report = audit_checkpoint(tmp_path / "x")
    assert {finding.kind for finding in report.findings} == {"unreadable"} and "cut short" in str(report)
    file.unlink()
    assert "No such file" in str(audit_checkpoint(tmp_path / "x"))

    file.write_bytes(whole)
    metadata = dcp.FileSystemReader(tmp_path / "x").read_metadata()
    (weight,) = [one for key, one in metadata.state_dict_metadata.items() if key.startswith("model.")]
    weight.chunks.clear()
    (tmp_path / "x" / ".metadata").write_bytes(pickle.dumps(metadata))
    (finding,) = audit_checkpoint(tmp_path / "x").findings
    assert (finding.slot, finding.kind) == (
        "weight",
        "unreadable",
    ) and "0 of its 8000 values" in finding.message


def test_files_of_a_snapshot_that_are_lost_are_findings(tmp_path: Path) -> None:
    SAVE["snapshot"](tensors(50), tmp_path / "x")
    files_of(tmp_path / "x")[0].unlink()
    (finding,) = audit_checkpoint(tmp_path / "x").findings
    assert (finding.slot, finding.kind) == ("weight", "unreadable") and "No such file" in finding.message


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {kind: tmp_path_factory.mktemp("small") / kind for kind in KINDS}
    for kind, path in paths.items():
        SAVE[kind](tensors(20), path)
    return paths


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_happens_to_the_files_nothing_but_our_error_is_raised(
    kind: str, small: dict[str, Path], tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "x"
    if small[kind].is_dir():
        shutil.copytree(small[kind], path, dirs_exist_ok=True)
        file = data.draw(st.sampled_from(sorted(path.iterdir())))
    else:
        file = Path(shutil.copy(small[kind], path))
    content = bytearray(file.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["byte", "cut", "insert"])):
            case "byte":
                content[at] ^= data.draw(st.integers(1, 255))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 50))]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=20))
        if not content:
            break
    file.write_bytes(content)
    try:
        str(audit_checkpoint(path))
    except CheckpointError as error:
        assert str(path) in str(error)


# Ids


def zch(ids: list[int], rows: list[int] | None = None) -> dict[str, torch.Tensor]:
    prefix = "mc._managed_collision_collection._managed_collision_modules.t0"
    return {
        "mc._embedding_module.embedding_bags.t0.weight": torch.ones(len(ids), 2),
        f"{prefix}._mch_sorted_raw_ids": torch.tensor(ids),
        f"{prefix}._mch_remapped_ids_mapping": torch.tensor(rows or list(range(len(ids)))),
    }


EMPTY = 2**63 - 1


def test_ids_and_rows_that_repeat_are_found(tmp_path: Path) -> None:
    dcp.save({"model": zch([3, 5, 9, EMPTY, EMPTY])}, checkpoint_id=tmp_path / "clean")
    assert audit_checkpoint(tmp_path / "clean").clean
    dcp.save({"model": zch([3, 5, 5, 4, EMPTY], [0, 1, 2, 2, 7])}, checkpoint_id=tmp_path / "wrong")
    report = audit_checkpoint(tmp_path / "wrong")
    found = {(finding.slot, finding.kind): finding.rows for finding in report.findings}
    assert found == {
        ("_mch_sorted_raw_ids", "unordered"): (4,),
        ("_mch_sorted_raw_ids", "repeated"): (5,),
        ("_mch_remapped_ids_mapping", "repeated"): (2,),
        ("_mch_remapped_ids_mapping", "out_of_range"): (7,),
    }
    assert {finding.table for finding in report.findings} == {"mc.t0"}


def test_ids_of_several_shards_in_one_tensor_are_each_in_order() -> None:
    assert audit_checkpoint(zch([3, 9, EMPTY, 1, 4, EMPTY])).clean
    (finding,) = audit_checkpoint(zch([3, 9, EMPTY, 1, 9, EMPTY])).findings
    assert (finding.kind, finding.rows) == ("repeated", (9,))


# The command


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["audit", *map(str, arguments)])


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    content = tensors(20)
    content["weight"][4, 1] = float("nan")
    SAVE["file"](content, tmp_path / "damaged.pt")
    return tmp_path / "damaged.pt"


@pytest.mark.parametrize("kind", KINDS)
def test_the_exit_code_tells_clean_from_damaged(kind: str, small: dict[str, Path], damaged: Path) -> None:
    clean = run(small[kind])
    assert clean.exit_code == 0 and "clean; " in clean.stdout and "ebc.t0" in clean.stdout
    found = run(damaged)
    assert found.exit_code == 1 and "FINDING  ebc.t0 weight: 1 value NaN or infinite: row 4" in found.stdout


def test_the_report_as_json(small: dict[str, Path], damaged: Path) -> None:
    found = run(damaged, "--json")
    assert found.exit_code == 1
    content = json.loads(found.stdout)
    (finding,) = content["findings"]
    assert content["clean"] is False and content["checksums"] is True
    assert (finding["table"], finding["kind"], finding["rows"]) == ("ebc.t0", "non_finite", [4])
    assert finding["values"] == ["nan"]
    assert json.loads(run(small["dcp"], "--json").stdout)["clean"] is True


def test_options_reach_the_audit(small: dict[str, Path], damaged: Path, tmp_path: Path) -> None:
    assert run(small["file"], "--max-magnitude", "0.01").exit_code == 1
    assert run(damaged, "--exclude", "ebc.t0.weight").exit_code == 0
    repaired = run(damaged, "--repair", tmp_path / "out.pt")
    assert repaired.exit_code == 1 and "REPAIRED" in repaired.stdout and "ZERO" in repaired.stdout
    assert run(tmp_path / "out.pt").exit_code == 0
    as_json = run(damaged, "--json", "--repair", tmp_path / "out2.pt")
    content = json.loads(as_json.stdout)
    assert not content["clean"] and "REPAIRED" in as_json.stderr
    done = content["repair"]
    assert (done["out"], done["refused"]) == (str(tmp_path / "out2.pt"), [])
    assert {one["slot"]: (one["count"], one["rows"]) for one in done["repaired"]} == {
        "weight": (1, [4]),
        "momentum1": (1, [4]),
    }


def no_such(path: Path) -> list[object]:
    return [path / "nothing"]


def no_checkpoint(path: Path) -> list[object]:
    (path / "x").mkdir()
    (path / "x" / "notes.txt").write_text("mine")
    return [path / "x"]


def a_text(path: Path) -> list[object]:
    (path / "x.txt").write_text("mine")
    return [path / "x.txt"]


def an_empty_file(path: Path) -> list[object]:
    (path / "x.pt").touch()
    return [path / "x.pt"]


def a_torn_file(path: Path) -> list[object]:
    SAVE["file"](tensors(50), path / "x.pt")
    content = (path / "x.pt").read_bytes()
    (path / "x.pt").write_bytes(content[: len(content) // 2])
    return [path / "x.pt"]


def out_that_exists(path: Path) -> list[object]:
    SAVE["file"](tensors(50), path / "x.pt")
    return [path / "x.pt", "--repair", path / "x.pt"]


@pytest.mark.parametrize(
    "mistake", [no_such, no_checkpoint, a_text, an_empty_file, a_torn_file, out_that_exists]
)
def test_a_mistake_is_told_without_a_traceback(
    mistake: Callable[[Path], list[object]], tmp_path: Path
) -> None:
    result = run(*mistake(tmp_path))
    assert result.exit_code == 2 and not result.stdout
    assert result.stderr.startswith("Error: ") and "Traceback" not in result.stderr
    assert str(tmp_path) in result.stderr


def test_wrong_usage_is_exit_code_2(damaged: Path) -> None:
    assert run().exit_code == 2
    assert run(damaged, "--max-magnitude", "-1").exit_code == 2


def test_a_repair_that_is_refused_is_exit_code_2(tmp_path: Path) -> None:
    weight = {"state": {"a": {"step": torch.tensor(float("nan"))}}, "param_groups": [{"params": ["a"]}]}
    torch.save(weight, tmp_path / "x.pt")
    result = run(tmp_path / "x.pt", "--repair", tmp_path / "out.pt")
    assert result.exit_code == 2 and "NOT REPAIRED" in result.stdout and not (tmp_path / "out.pt").exists()


def test_help_does_not_import_torch() -> None:
    program = (
        "import sys; from torchrec_ext.cli import main; main(['audit', '--help'], standalone_mode=False); "
    )
    program += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "Examples:" in done.stdout


def test_an_audit_of_files_does_not_import_torchrec(small: dict[str, Path]) -> None:
    program = "import sys; from torchrec_ext.checkpoint import audit_checkpoint; "
    program += f"assert audit_checkpoint({str(small['dcp'])!r}).clean; assert 'torchrec' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
