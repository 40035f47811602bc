"""Opens a page in a headless Chromium, and tells what became of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="there is no Chromium to open a page in: apt-get install chromium"
)

_NOBODY = "not an origin"
_QUIET = (
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-sync",
    "--no-first-run",
    "--no-pings",
)


@dataclass(frozen=True)
class Opened:
    """A page once its scripts have run.

    Attributes:
        dom: its elements then.
        console: what it wrote there, errors and refused requests among it.
        requests: the URLs that it asked for.
    """

    dom: str
    console: list[str]
    requests: list[str]


def open_page(page: Path, scratch: Path, *options: str, screenshot: Path | None = None) -> Opened:
    """Opens a file; ``scratch`` is a directory for the browser's own use."""
    assert BROWSER is not None
    net_log = scratch / "net.json"
    shot = () if screenshot is None else (f"--screenshot={screenshot}",)
    done = subprocess.run(
        [
            BROWSER,
            "--headless=new",
            "--no-sandbox",  # tests may run as root
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={scratch / 'profile'}",
            f"--log-net-log={net_log}",
            "--enable-logging=stderr",
            "--virtual-time-budget=5000",
            *_QUIET,
            *options,
            *(shot or ("--dump-dom",)),
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    console = re.findall(r"CONSOLE[:(].*", done.stderr)
    return Opened(done.stdout, console, _requests(net_log))


def _requests(net_log: Path) -> list[str]:
    log = json.loads(net_log.read_text())
    kind = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [event.get("params", {}) for event in log["events"] if event["type"] == kind]
    # The browser asks its maker for news whatever it is told; such requests have no page that began them.
    of_pages = [params for params in started if params.get("initiator", _NOBODY) != _NOBODY]
    return [params["url"] for params in of_pages if not params["url"].startswith("data:")]
