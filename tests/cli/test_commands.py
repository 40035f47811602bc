"""The commands: their output for people and programs, their exit codes, what they say of a user's mistake."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests.cli.faults import FIRST, edit, healthy
from tests.docs.pages import ROOT
from tests.support.logs import LogWriter, zch
from torchrec_ext.cli import main
from torchrec_ext.cli.lazy import LazyGroup
from torchrec_ext.delta import DeltaLog

PAGE = (ROOT / "docs" / "command-line.md").read_text()
assert isinstance(main, LazyGroup)
COMMANDS = {name: known.load() for name, known in main.commands_by_name.items()}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("intact") / "deltas"
    healthy(directory)
    return directory


@pytest.fixture
def log(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "deltas"))


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def parsed(*arguments: object) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_inspect_tells_what_manifests_and_rows_say(log: Path) -> None:
    content = parsed("inspect", log)
    dumps = DeltaLog(log).dumps(superseded=True)
    assert [
        (d["generation"], d["step"], d["upserts"], d["deletes"], d["nbytes"]) for d in content["dumps"]
    ] == [(d.generation, d.step, d.upserts, d.deletes, d.nbytes) for d in dumps]
    assert [d["superseded"] for d in content["dumps"]] == [False, False, True, False]
    rows = [DeltaLog(log).read(d.step, d.generation).to_pylist() for d in DeltaLog(log).dumps()]
    for table in content["tables"]:
        of_table = [row for dump in rows for row in dump if row["table_fqn"] == table["fqn"]]
        counts = [sum(row["op"] == op for row in of_table) for op in ("upsert", "delete")]
        assert counts == [table["upserts"], table["deletes"]]


def test_inspect_for_people_lists_the_newest_and_what_is_left_out(log: Path) -> None:
    (log / "step_000000000099.g0001").mkdir()
    shown = run("inspect", log, "--last", 2).stdout
    assert "4 dumps" in shown and "mc.t0" in shown and "superseded" in shown
    assert "2 older dumps not listed: --all" in shown
    assert "not committed (being written, or left by a run that died): step_000000000099.g0001" in shown
    assert "older dumps" not in run("inspect", log, "--all").stdout


def test_one_thing_is_not_several(tmp_path: Path) -> None:
    log = tmp_path / "deltas"
    LogWriter(log, {"mc.t": zch(4, 1)}).dump(10, {"mc.t": [1]})
    shown = run("inspect", log).stdout + run("verify", log).stdout + run("compact", log).stdout
    assert "1 dump," in shown and "1 dump:" in shown and "1 row," in shown
    assert not re.search(r"\b1 (dump|row|file)s", shown)


def test_inspect_of_an_empty_directory_shows_no_empty_tables(tmp_path: Path) -> None:
    assert run("inspect", tmp_path).stdout.splitlines() == [f"{tmp_path}: 0 dumps, 0 B"]


def test_inspect_shows_how_vectors_are_stored(tmp_path: Path) -> None:
    LogWriter(tmp_path, {"mc.t": zch(4, 1)}).dump(10, {"mc.t": [1]}, storage_dtype="int8")
    assert "float32 as int8" in run("inspect", tmp_path).stdout
    assert parsed("inspect", tmp_path)["tables"][0]["storage_dtype"] == "int8"


@pytest.mark.parametrize("command", ["inspect", "verify", "diff"])
def test_output_that_nobody_reads_any_more_is_no_error_message(command: str, log: Path) -> None:
    arguments = ["10", "20"] if command == "diff" else []
    words = [sys.executable, "-m", "torchrec_ext.cli", command, str(log), *arguments]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None and running.stderr is not None
        running.stdout.close()  # as `| head` does
        assert running.stderr.read() == ""


def test_names_that_look_like_markup_are_shown_as_they_are(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.[red]t": zch(4, 1)})
    writer.dump(10, {"mc.[red]t": [1]})
    writer.dump(20, {"mc.[red]t": [2]})
    assert "mc.[red]t" in run("inspect", tmp_path / "deltas").stdout
    assert "mc.[red]t" in run("diff", tmp_path / "deltas", 10, 20).stdout


def test_names_do_nothing_to_the_terminal(tmp_path: Path) -> None:
    log, name = tmp_path / "deltas", "mc.\x1b[2Jt"
    writer = LogWriter(log, {name: zch(4, 1)})
    writer.dump(10, {name: [1]})
    writer.dump(20, {name: [2]})
    shown = [run("inspect", log), run("diff", log, 10, 20), run("replay", log, "--out", tmp_path / "x")]
    edit(log, FIRST, lambda manifest: manifest["tables"][name].update(dim=5))
    shown.append(run("verify", log, code=1))
    shown.append(run("lookup", log, "\x1b[2J", 1, code=2))
    for result in shown:
        assert "\x1b" not in result.output and "\\x1b[2J" in result.output


def test_verify_is_0_for_a_clean_log(log: Path) -> None:
    assert run("verify", log).stdout.startswith("clean; read 4 dumps, 16 files")
    assert parsed("verify", log)["clean"] is True


def test_verify_shows_findings_to_people(log: Path) -> None:
    (log / FIRST / "part_00000_of_00002.parquet").unlink()
    shown = run("verify", log, code=1).stdout
    assert f"FINDING  {FIRST}: part_00000_of_00002.parquet: is missing [file]" in shown
    assert "1 finding; read" in shown


def test_replay_writes_all_rows_and_never_over_a_file(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "state.parquet"
    assert "step 25 of generation 1" in run("replay", log, "--out", out).stdout
    assert pq.read_schema(out).names == ["table_fqn", "key_id", "embedding"]
    assert "is there already" in run("replay", log, "--out", out, code=2).stderr
    assert parsed("replay", log, "--out", tmp_path / "at_20.parquet", "--upto", 20)["rows"]["mc.t0"] == 5


def test_diff_names_ids(log: Path) -> None:
    table = parsed("diff", log, 10, 20)["tables"]["mc.t0"]
    assert (table["came"], table["went"]) == ([4, 31], [1])
    assert [one["id"] for one in table["moved"]] == [3] and table["moved"][0]["distance"] > 0
    shown = run("diff", log, 10, 20, "--table", "mc.t0").stdout
    assert "came: 4, 31" in shown and "went: 1" in shown and "ebc.rows" not in shown
    assert "came: 4, and 1 more" in run("diff", log, 10, 20, "--top", 1).stdout
    assert parsed("diff", log, 20, 20)["tables"]["mc.t0"]["counts"] == {"came": 0, "went": 0, "moved": 0}


def test_compact_and_vacuum_leave_a_clean_log_that_says_the_same(log: Path) -> None:
    before = DeltaLog(log).keys()["mc.t0"].tolist()
    assert parsed("compact", log)["base"]["step"] == 25
    assert run("compact", log).stdout.startswith("nothing to do")
    assert run("verify", log).stdout.startswith("clean")
    keep = ("--keep", "0s", "--grace", "0")
    assert run("vacuum", log, *keep, "--dry-run").stdout.splitlines()[-1].startswith("would remove")
    assert FIRST in parsed("vacuum", log, *keep)["dumps"]
    assert not (log / FIRST).exists() and DeltaLog(log).keys()["mc.t0"].tolist() == before
    assert run("verify", log).stdout.startswith("clean; read 1 dump, ")
    assert parsed("inspect", log)["dumps"][0]["compacted"] == 3
    assert "base of 3 dumps" in run("inspect", log).stdout


def test_rows_that_vacuum_took_from_superseded_dumps_are_no_fault(log: Path) -> None:
    assert parsed("vacuum", log, "--keep", "0", "--grace", "0")["superseded"]
    assert run("verify", log).stdout.startswith("clean")


def test_report_tells_where_it_is(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="the extra report is not installed")
    assert "report.html: 3 dumps" in run("report", log, "--out", tmp_path / "report.html").stdout
    dumps = parsed("report", log, "--out", tmp_path / "report.html")["dumps"]
    assert [dump["dump"]["step"] for dump in dumps] == [10, 20, 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "{tmp}/nowhere"], "nowhere: no such directory"),
        (["inspect", "{log}/" + FIRST + "/manifest.json"], "no such directory"),
        (["verify", "{tmp}/nowhere"], "nowhere: no such directory"),
        (["replay", "{log}"], "Missing option '--out'"),
        (["replay", "{log}", "--out", "{tmp}/no/such/file"], "is not a directory: make it first"),
        (["replay", "{log}", "--out", "{tmp}"], "is a directory: name a file"),
        (["replay", "{log}", "--out", "{tmp}/x", "--upto", "9"], "no committed dump at or before step 9"),
        (["replay", "{tmp}", "--out", "{tmp}/x"], "no committed dump"),
        (["diff", "{log}", "20", "10"], "step 20 is later than step 10: name the earlier one first"),
        (["diff", "{log}", "1", "10"], "no committed dump at or before step 1"),
        (["diff", "{log}", "10", "20", "--table", "mc.t9"], "holds no table mc.t9; it holds ebc.rows, mc.t0"),
        (["diff", "{log}", "ten", "20"], "'ten' is not a valid integer"),
        (["compact", "{tmp}"], "no committed dump"),
        (["compact", "{tmp}/nowhere"], "nowhere: no such directory"),
        (["vacuum", "{log}", "--keep", "long"], "'long' is not a time span such as 90s, 30m, 24h or 7d"),
        (["vacuum", "{tmp}/nowhere"], "nowhere: no such directory"),
        (["report", "{tmp}", "--out", "{tmp}/r.html"], "holds no dump yet"),
        (
            ["report", "{log}", "--out", "{tmp}/r.html", "--sink", "nosuch://u:s3cret@h"],
            "'nosuch://h' is not a sink",
        ),
        (["lookup", "{log}", "mc.t9", "1"], "holds no table mc.t9"),
        (["lookup", "{tmp}", "mc.t0", "1"], "no dump is committed yet"),
        (["publish", "{tmp}/nowhere", "parquet://x"], "nowhere: no such directory"),
        (["audit", "{tmp}/nowhere"], "nowhere"),
        (["serve-store", "--tls-cert", "x"], "go together"),
        (["inspcet", "{log}"], "No such command 'inspcet'"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_and_exit_code_2(
    arguments: list[str], message: str, log: Path, tmp_path: Path
) -> None:
    if arguments[0] == "report":
        pytest.importorskip("plotly", reason="the extra report is not installed")
    (tmp_path / "empty").mkdir()
    result = run(*(one.format(log=log, tmp=tmp_path / "empty") for one in arguments), code=2)
    assert message in result.stderr and "Traceback" not in result.stderr and "s3cret" not in result.output
    assert not result.stdout


@pytest.mark.parametrize("command", ["inspect", "replay", "diff", "compact", "report"])
def test_a_damaged_log_is_exit_code_2_and_names_the_dump(command: str, log: Path, tmp_path: Path) -> None:
    if command == "report":
        pytest.importorskip("plotly", reason="the extra report is not installed")
    (log / FIRST / "manifest.json").write_bytes(b"{}")
    more = {"replay": ["--out", tmp_path / "x"], "diff": [10, 20], "report": ["--out", tmp_path / "r"]}
    result = run(command, log, *more.get(command, []), code=2)
    assert FIRST in result.stderr and "Traceback" not in result.stderr


def test_interrupting_is_exit_code_130(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("torchrec_ext.delta.verify_log", interrupted, raising=False)
    run("verify", log, code=130)


def test_progress_is_shown_on_a_terminal_only(log: Path) -> None:
    script = shutil.which("script")
    if script is None:
        pytest.skip("script is not installed: apt-get install bsdutils")
    command = f"{sys.executable} -m torchrec_ext.cli verify {log}"
    shown = subprocess.run([script, "-qec", command, "/dev/null"], capture_output=True, text=True, check=True)
    assert "reading" in shown.stdout and "clean" in shown.stdout
    piped = subprocess.run(command.split(), capture_output=True, text=True, check=True)
    assert piped.stderr == "" and piped.stdout.startswith("clean")


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_with_examples_that_the_documentation_shows(name: str) -> None:
    shown = run(name, "--help").stdout
    assert "Examples:" in shown and "exit code is" in " ".join(shown.split())
    epilog = COMMANDS[name].epilog
    assert epilog is not None
    examples = [line.strip() for line in epilog.splitlines()[1:] if line.strip() and "Examples" not in line]
    assert examples and all(example in PAGE for example in examples)
    assert re.search(rf"^## `?{name}", PAGE, re.MULTILINE)


def test_commands_take_the_arguments_of_their_examples() -> None:
    for name, command in COMMANDS.items():
        for line in (command.epilog or "").splitlines():
            words = re.split(r"&&|>", line)[0].split()
            if words[:2] == ["torchrec-ext", name]:
                command.make_context(name, words[2:])


def test_help_imports_nothing_slow() -> None:
    code = (
        "import sys; from torchrec_ext.cli import main; main(['--help'], standalone_mode=False); "
        "slow = {'torch', 'numpy', 'pyarrow', 'rich', 'plotly'} & set(sys.modules); assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in done.stdout for name in COMMANDS)


def test_reading_commands_import_no_torch(log: Path, tmp_path: Path) -> None:
    runs = [
        ["inspect", log],
        ["verify", log],
        ["diff", log, 10, 20],
        ["compact", log],
        ["lookup", log, "mc.t0", 1],
    ]
    runs.append(["replay", log, "--out", tmp_path / "x.parquet"])
    code = (
        f"import sys; from torchrec_ext.cli import main\nfor a in {[[str(w) for w in r] for r in runs]!r}:\n"
    )
    code += "    try: main(a)\n    except SystemExit as end: assert not end.code, (a, end.code)\n"
    code += "assert 'torch' not in sys.modules and 'plotly' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_module_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torchrec_ext.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("torchrec-ext, version") and isinstance(main, click.Group)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_heard_while_the_main_thread_has_the_lock_of_the_event(number: signal.Signals) -> None:
    code = f"""
import signal
from torchrec_ext.cli.output import set_by_signals
stop = set_by_signals()
with stop._cond:  # as it is for a moment in each call of stop.wait
    signal.raise_signal({int(number)})
assert stop.wait(240)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
