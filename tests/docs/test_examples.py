"""The documentation's examples run as they stand, and its queries find what ``DeltaLog`` finds."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from tests.docs.pages import PAGES, ROOT, Block, blocks_of, run_script, script_of
from tests.docs.shell import NOT_RUN, STANDS_FOR
from tests.support.redis_servers import BINARY, RedisServer
from torchrec_ext.delta import DeltaLog, verify_log
from torchrec_ext.delta.storage import encode, rounded

QUICK_START = "docs/quickstart.md"
PACKAGES = {"redis": "redis", "deltalake": "deltalake", "write_report": "plotly"}
"""What is needed, beyond what is always there, by pages with a word in their code."""
# Those that find the files themselves; that of docs/scaling.md wants views, and tests/delta runs it.
QUERIES = [block for page in PAGES for block in blocks_of(page, "sql") if "read_parquet" in block.text]
DATA = [block for page in PAGES for block in blocks_of(page, "json", "toml")]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks_of(page, "python", "sh")])
def test_examples_run(page: str, tmp_path: Path) -> None:
    text = "".join(block.text for block in blocks_of(page, "python", "sh"))
    for word, package in PACKAGES.items():
        if word in text:
            pytest.importorskip(package, reason=f"{package}, an extra, is not installed")
    if "redis" in text and BINARY is None:
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    needs_server = "redis://localhost" in text and "redis-server" not in text
    with RedisServer(tmp_path) if needs_server else contextlib.nullcontext():
        run_script(script_of(page), tmp_path)


@pytest.mark.parametrize("block", DATA, ids=str)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "json":
        json.loads(block.text)
    else:
        pytest.importorskip("tomllib", reason="Python 3.11 reads TOML").loads(block.text)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_run_or_read_or_only_shows_what_is_printed(page: str) -> None:
    blocks = blocks_of(page)
    assert {block.language for block in blocks} <= {"python", "sh", "sql", "json", "toml", "text"}
    # None is indented, or fenced in another way: those would not be found.
    assert len(re.findall(r"^\s*(?:```|~~~)", (ROOT / page).read_text(), re.MULTILINE)) == 2 * len(blocks)


def test_what_is_said_of_shell_blocks_is_needed() -> None:
    shell = "".join(block.text for page in PAGES for block in blocks_of(page, "sh"))
    assert [name for name in STANDS_FOR if name not in shell] == []
    assert [name for name in NOT_RUN if not re.search(rf"^{name} ", shell, re.MULTILINE)] == []


@pytest.fixture(scope="module")
def one_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the quick start was run."""
    directory = tmp_path_factory.mktemp("one_run")
    run_script(script_of(QUICK_START), directory)
    assert sum(dump.deletes for dump in DeltaLog(directory / "deltas").dumps()) > 0
    return directory


@pytest.fixture(scope="module")
def restarted(one_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it was run twice, so that its steps came round again; and a third run died in a dump."""
    directory = tmp_path_factory.mktemp("restarted") / "cwd"
    shutil.copytree(one_run, directory)
    run_script(script_of(QUICK_START), directory, seed=1)
    assert {dump.generation for dump in DeltaLog(directory / "deltas").dumps()} == {0, 1}
    uncommitted = directory / "deltas" / "step_000000000020.g0002"
    uncommitted.mkdir()
    for name in ("part", "fallback"):
        (uncommitted / f"{name}_00000_of_00001.parquet").write_bytes(b"PAR1")
    return directory


def test_verify_finds_nothing_in_logs_of_real_runs(one_run: Path, restarted: Path) -> None:
    for directory in (one_run, restarted):
        assert verify_log(directory / "deltas").findings == ()


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_queries_find_what_replay_finds(query: Block, one_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _compare(query, one_run, monkeypatch)


@pytest.mark.parametrize("query", [q for q in QUERIES if "manifest.json" in q.text], ids=str)
def test_general_queries_find_it_after_restarts_too(
    query: Block, restarted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _compare(query, restarted, monkeypatch)


def _compare(query: Block, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    with duckdb.connect() as connection:
        found = connection.sql(query.text).to_arrow_table().to_pydict()
    (name,) = set(found["table_fqn"])
    state = DeltaLog("deltas").replay()[name]
    vectors = np.array(found["embedding"], np.float32).view(np.int32)
    if "shard" in found:
        rows = zip(found["shard"], found["key_id"], strict=True)
        expected = [state.fallback[shard] if key is None else state.lookup(key)[0] for shard, key in rows]
        assert found["key_id"].count(None) == len(state.fallback)
        assert np.array_equal(vectors, np.stack(expected).view(np.int32))
    else:
        assert sorted(found["key_id"]) == state.keys.tolist()
        assert np.array_equal(vectors, state.lookup(found["key_id"]).view(np.int32))


def test_replay_without_this_package_finds_what_replay_finds(
    one_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(one_run)
    _, block = blocks_of("docs/format.md", "python")
    namespace: dict[str, dict[tuple[str, int], list[float]]] = {}
    exec(block.text, namespace)
    states = DeltaLog("deltas").replay()
    assert len(namespace["vectors"]) == sum(len(state) for state in states.values())
    for (name, key), vector in namespace["vectors"].items():
        assert states[name].lookup(key)[0].tolist() == vector


def test_int8_rows_are_decoded_without_this_package_as_with_it() -> None:
    decoder, _ = blocks_of("docs/format.md", "python")
    namespace: dict[str, Any] = {}
    exec(decoder.text, namespace)
    vectors = np.random.default_rng(0).standard_normal((100, 24)).astype(np.float32)
    found = namespace["decode_int8"](encode(vectors, "int8"), 24)
    assert np.array_equal(found.view(np.int32), rounded(vectors, "int8").view(np.int32))


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    broken = []
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", (ROOT / page).read_text()):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def test_every_page_is_linked_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page for page in PAGES[1:] if f"]({page})" not in readme] == []


def _anchors(page: Path) -> set[str]:
    """A page's headings as its links name them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
