"""The report is one page that opens from a disk, draws its plots, and asks the network for nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.chromium import needs_browser, open_page
from tests.support.logs import LogWriter, zch
from torchrec_ext.cli import main
from torchrec_ext.delta import DeltaLog, DeltaLogError, compact
from torchrec_ext.publish import publish
from torchrec_ext.report import write_report

pytest.importorskip("plotly", reason="the extra report is not installed")

PLOTS = ("rows", "occupancy", "moves", "norms", "lag", "stall", "bytes")
HOSTILE = "mc.</script><b>&quot;t"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs") / "deltas"
    writer = LogWriter(directory, {"mc.t0": zch(4, 2), HOSTILE: zch(4, 1)}, lag_seconds=0.25)
    writer.dump(10, {"mc.t0": [1, 2, 3], HOSTILE: [1]})
    writer.dump(20, {"mc.t0": [3, 4]}, {"mc.t0": [1]})
    writer.dump(30, {"mc.t0": [1]})
    writer.resume(20)
    writer.dump(20, {"mc.t0": [9]})
    writer.dump(40, {"mc.t0": [3, 9], HOSTILE: [2]})
    return directory


@pytest.fixture(scope="module")
def page(log: Path) -> Path:
    done = CliRunner().invoke(main, ["report", str(log), "--out", str(log.parent / "report.html")])
    assert done.exit_code == 0, done.output
    return log.parent / "report.html"


def figures_in(page: Path) -> dict[str, object]:
    found = re.search(r"<script type=application/json id=data>(.*?)</script>", page.read_text("utf-8"))
    assert found is not None
    return dict(json.loads(found[1]))


def test_page_carries_the_figures_of_dumps_that_count(page: Path) -> None:
    data = figures_in(page)
    assert data["labels"] == ["10", "20 (g0)", "20 (g1)", "40"]
    table = data["tables"]["mc.t0"]  # type: ignore[index]
    assert table["admitted"] == [3, 1, 1, 0] and table["updated"] == [0, 1, 0, 2]
    assert table["evicted"] == [0, 1, 0, 0] and table["held"] == [3, 3, 4, 4]
    assert table["moves"]["p50"][0] is None and table["moves"]["max"][3] > 0
    assert data["lag"] == [0.25] * 4
    text = page.read_text("utf-8")
    assert "<dd>4<small>" not in text and "1 dump that a restart made void" in text


def test_page_tells_when_each_dump_was_published(log: Path, tmp_path: Path) -> None:
    told = tmp_path / "published.jsonl"
    told.write_text(run_publish(log, f"parquet://{tmp_path}/snapshot"))
    arguments = ["report", str(log), "--published", str(told), "--out"]
    done = CliRunner().invoke(main, [*arguments, str(tmp_path / "report.html")])
    assert done.exit_code == 0, done.output
    lags = figures_in(tmp_path / "report.html")["published_lag"]
    assert isinstance(lags, list) and len(lags) == 4
    assert lags == sorted(lags, reverse=True) and lags[-1] > 0  # all were published at once
    assert "Step to published" in (tmp_path / "report.html").read_text("utf-8")
    told.write_text("{}\n")
    done = CliRunner().invoke(main, [*arguments, str(tmp_path / "none.html")])
    assert done.exit_code == 2 and "line 1 is not what" in done.output
    assert not (tmp_path / "none.html").exists()


def run_publish(log: Path, url: str) -> str:
    done = CliRunner().invoke(main, ["publish", str(log), url, "--json"])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_page_names_nothing_that_would_have_to_be_loaded(page: Path) -> None:
    own = page.read_text("utf-8").replace(figures_library(), "")
    assert not re.search(r"""(src|href)\s*=(?!\s*["']?data:)""", own)
    assert not re.search(r"https?://", own) and "default-src 'none'" in own
    assert HOSTILE not in own, "a table's name is text, and never markup"


def figures_library() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


@needs_browser
@pytest.mark.parametrize("width", [1240, 390])
def test_browser_draws_all_plots_without_an_error_or_a_request(
    width: int, page: Path, tmp_path: Path
) -> None:
    opened = open_page(page, tmp_path, f"--window-size={width},1600")
    assert opened.console == [] and opened.requests == []
    assert 'data-drawn="yes"' in opened.dom
    for plot in PLOTS:
        element = re.search(rf'<div class="plot([^"]*)" id="?{plot}"?', opened.dom)
        assert element is not None, plot
        # A stall of nought seconds is drawn as words.
        assert ("js-plotly-plot" in element[1]) is (plot != "stall"), plot
    assert opened.dom.count('class="main-svg"') >= 2 * (len(PLOTS) - 1)


@needs_browser
def test_browser_tells_of_an_error_and_of_a_request(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<script>console.error('boo'); fetch('http://127.0.0.1:9/x').catch(() => {})</script>")
    opened = open_page(page, tmp_path)
    assert "boo" in opened.console[0] and opened.requests == ["http://127.0.0.1:9/x"]


def test_report_tells_how_far_a_sink_is_behind(tmp_path: Path) -> None:
    url, log = f"parquet://{tmp_path}/snapshots", tmp_path / "deltas"
    writer = LogWriter(log, {"mc.t0": zch(4, 2)})
    writer.dump(10, {"mc.t0": [1]})
    write_report(log, tmp_path / "r.html", sink=url)
    assert "<dt>Published</dt><dd>nothing<small>of this log" in (tmp_path / "r.html").read_text("utf-8")
    publish(log, url)
    write_report(log, tmp_path / "r.html", sink=url)
    assert "<dt>Published</dt><dd>step 10<small>up to date" in (tmp_path / "r.html").read_text("utf-8")
    writer.dump(40, {"mc.t0": [2]})
    write_report(log, tmp_path / "r.html", sink=url)
    text = (tmp_path / "r.html").read_text("utf-8")
    assert "<dt>Published</dt><dd>step 10<small>1 dump, 30 steps behind" in text
    assert figures_in(tmp_path / "r.html")["published"] == 0


def test_report_of_the_newest_dumps_only_says_so(log: Path, tmp_path: Path) -> None:
    write_report(log, tmp_path / "r.html", last=2)
    data = figures_in(tmp_path / "r.html")
    assert data["steps"] == [20, 40] and data["tables"]["mc.t0"]["held"] == [4, 4]  # type: ignore[index]
    assert "The plots show the newest 2 dumps." in (tmp_path / "r.html").read_text("utf-8")


def test_report_of_a_base_has_no_lag_for_it(log: Path, tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "deltas", {"mc.t0": zch(4, 2)})
    writer.dump(10, {"mc.t0": [1, 2]})
    writer.dump(20, {"mc.t0": [3]})
    compact(tmp_path / "deltas")
    for dump in DeltaLog(tmp_path / "deltas").dumps():
        for file in (tmp_path / "deltas" / dump.directory).iterdir():
            file.unlink()
    write_report(tmp_path / "deltas", tmp_path / "r.html")
    data = figures_in(tmp_path / "r.html")
    assert data["labels"] == ["20 (base)"] and data["lag"] == [None]


def test_report_is_replaced_as_a_whole(log: Path, tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("old")
    write_report(log, tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text("utf-8").startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]


def test_report_of_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "deltas").mkdir()
    with pytest.raises(DeltaLogError, match="holds no dump yet"):
        write_report(tmp_path / "deltas", tmp_path / "r.html")
    with pytest.raises(ValueError, match="last is 0"):
        write_report(tmp_path / "deltas", tmp_path / "r.html", last=0)


def test_a_missing_library_is_named_with_its_extra_and_exit_code_2(log: Path) -> None:
    code = (
        "import sys; sys.modules['plotly'] = None\n"
        "from torchrec_ext.cli import main; main(sys.argv[1:], prog_name='torchrec-ext')"
    )
    command = [sys.executable, "-c", code, "report", str(log), "--out", str(log.parent / "none.html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "pip install 'torchrec-ext[report]'" in done.stderr
