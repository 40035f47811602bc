"""``verify_log`` finds each fault that is planted into a log, says where, and finds none in a healthy one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.faults import FAULTS, FIRST, SECOND, edit, healthy
from tests.docs.pages import ROOT
from torchrec_ext.cli import main
from torchrec_ext.delta import DeltaLogError
from torchrec_ext.delta.verification import CHECKS, Finding, verify_log


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intact") / "deltas"
    healthy(directory)
    return directory


@pytest.fixture
def log(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "deltas"))


def test_nothing_is_found_in_a_healthy_log(log: Path) -> None:
    found = verify_log(log)
    assert found.findings == ()
    assert (found.dumps, found.files) == (4, 16)
    assert found.rows > 20 and found.nbytes == sum(path.stat().st_size for path in log.glob("*/*.parquet"))


def test_dumps_that_are_being_written_are_no_faults(log: Path) -> None:
    unfinished = log / "step_000000000040.g0001"
    unfinished.mkdir()
    (unfinished / "part_00000_of_00002.parquet").write_bytes(b"PAR1")
    (log / FIRST / ".part_00000_of_00002.parquet.tmp").write_bytes(b"PAR1")
    assert verify_log(log).clean


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_named_and_makes_the_exit_code_1(name: str, log: Path) -> None:
    fault = FAULTS[name]
    fault.plant(log)
    findings = verify_log(log).findings
    matching = [
        f
        for f in findings
        if f.check == fault.check and f.where.startswith(fault.where) and fault.message in f.message
    ]
    assert matching, findings
    assert {f.check for f in findings} <= {fault.check, *fault.others}, findings

    done = CliRunner().invoke(main, ["verify", str(log), "--json"])
    assert done.exit_code == 1
    content = json.loads(done.stdout)
    assert not content["clean"]
    assert [Finding(**one) for one in content["findings"]] == list(findings)


def test_all_faults_are_told_at_once(log: Path) -> None:
    names = ("bit-flipped", "delete-with-vector", "superseding-dump-forgets-a-key")
    for name in names:
        FAULTS[name].plant(log)
    assert [f.check for f in verify_log(log).findings] == [FAULTS[name].check for name in names]


@pytest.mark.parametrize("field", ["dim", "num_embeddings", "num_shards", "block_size"])
@pytest.mark.parametrize("value", [-1, 7, 2**62, 10**400], ids=["negative", "other", "large", "endless"])
def test_nonsense_in_a_sealed_manifest_is_a_finding_soon(field: str, value: int, log: Path) -> None:
    edit(log, FIRST, lambda manifest: manifest["tables"]["mc.t0"].update({field: value}))
    found = verify_log(log).findings
    assert all(finding.where.startswith((FIRST, SECOND)) for finding in found)
    assert found or (field, value) in [
        ("num_embeddings", 7),
        ("num_embeddings", 2**62),
        ("block_size", 2**62),
    ]


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeltaLogError, match="no such directory"):
        verify_log(tmp_path / "nowhere")


def test_each_check_is_planted_and_each_fault_is_in_the_documentation() -> None:
    assert {fault.check for fault in FAULTS.values()} == set(CHECKS)
    page = (ROOT / "docs" / "command-line.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \| `[a-z-]+` \|", page, re.MULTILINE)) == set(FAULTS)


def test_progress_ends_with_all_bytes(log: Path) -> None:
    told: list[tuple[int, int]] = []
    found = verify_log(log, progress=lambda done, total: told.append((done, total)))
    assert told == sorted(told) and told[-1] == (found.nbytes, found.nbytes)
