"""The pages of the documentation, and how the examples in them are run."""

from __future__ import annotations

import contextlib
import os
import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.docs.shell import run_shell
from tests.support.workers import start_process

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_CONTINUES = re.compile(r"^<!-- continues (?P<page>\S+) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: its text, its language, and where it stands."""

    text: str
    language: str
    page: str
    line: int

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str, *languages: str) -> list[Block]:
    """A page's blocks, those in some languages or all."""
    content = (ROOT / page).read_text()
    return [
        Block(match["text"], match["language"], page, content.count("\n", 0, match.start("text")) + 1)
        for match in _FENCE.finditer(content)
        if not languages or match["language"] in languages
    ]


def script_of(page: str) -> list[Block]:
    """A page's Python and shell blocks, after the Python of the page that it says it ``continues``."""
    before = _CONTINUES.search((ROOT / page).read_text())
    continued = script_of(before["page"]) if before else []
    return [*(block for block in continued if block.language == "python"), *blocks_of(page, "python", "sh")]


def run_script(blocks: list[Block], directory: Path, seed: int = 0) -> None:
    """Runs blocks one after another, in a process of its own with this working directory.

    Python blocks share a namespace; a shell block runs where it stands between them.
    """
    output = directory / "output.txt"
    process = start_process(_run, blocks, str(directory), str(output), seed)
    process.join()
    assert process.exitcode == 0, output.read_text()
    output.unlink()


def _run(blocks: list[Block], directory: str, output: str, seed: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    os.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with open(output, "w") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        try:
            for block in blocks:
                if block.language == "sh":
                    run_shell(block.text, str(block), ROOT, file)
                    continue
                # As many lines as stand above it: a traceback then names the page's own.
                code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
                exec(code, namespace)
        except BaseException:
            traceback.print_exc()
            raise SystemExit(1) from None
