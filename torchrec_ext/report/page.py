"""Writes the page: its text here, its plots drawn by Plotly from figures that the page carries along."""

from __future__ import annotations

import html
import json
import os
import time
from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path, PurePosixPath
from string import Template

from torchrec_ext import __version__
from torchrec_ext.delta.figures import SAMPLED_KEYS, LogFigures, figures_of
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId
from torchrec_ext.errors import DeltaLogError
from torchrec_ext.report.content import (
    Published,
    key_figures,
    plotted,
    published_at,
    read_publications,
    tables_of,
)
from torchrec_ext.terminal import counted

DUMPS_SHOWN = 500


def write_report(
    log: DeltaLog | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    sink: str | None = None,
    published: str | os.PathLike[str] | None = None,
    last: int = DUMPS_SHOWN,
    progress: Callable[[int, int], None] | None = None,
) -> LogFigures:
    """Writes a log's figures as one HTML page, replacing the one that is there.

    The page loads nothing: it has all that it shows and does, and forbids the browser to fetch anything.

    Args:
        log: a dump directory.
        path: the page.
        sink: the URL of a sink that the log is published to, for how far behind it is.
        published: a file with what ``torchrec-ext publish --json`` printed, for when each dump was published.
        last: of how many of the newest dumps to draw the figures; all dumps are read.
        progress: is told how many rows of how many have been read.

    Returns:
        The figures.

    Raises:
        ModuleNotFoundError: Plotly is not installed; names the extra.
        DeltaLogError: the log is empty, broken or damaged.
        ValueError: ``sink`` is not a sink's URL, ``published`` holds something else, or ``last`` is not
            positive.
        PublishError: the sink cannot be asked for its position.
        OSError: the page cannot be written, or ``published`` not read.
    """
    if last < 1:
        raise ValueError(f"last is {last}; a report shows at least one dump")
    library = _plotly()  # first: reading the log may take long
    log = DeltaLog.of(log)
    publications = [] if published is None else read_publications(Path(published))
    stands = None if sink is None else published_at(sink, log.dumps())
    figures = figures_of(log, progress=progress)
    if not figures.dumps:
        raise DeltaLogError(f"{log.place} holds no dump yet")
    _replace(Path(path), _page(figures, stands, publications, last, library))
    return figures


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a report needs {error.name}, which is not installed: pip install 'torchrec-ext[report]'",
            name=error.name,
        ) from error
    return str(get_plotlyjs())


def _page(
    figures: LogFigures,
    stands: Published | None,
    publications: Sequence[tuple[DumpId, float]],
    last: int,
    library: str,
) -> str:
    assets = files("torchrec_ext.report").joinpath("assets")
    read = {name: assets.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "page.js")}
    where = figures.directory
    if "://" not in where:
        where = str(Path(where).absolute())
    first, newest = figures.dumps[0], figures.dumps[-1]
    return Template(read["page.html"]).substitute(
        title=html.escape(PurePosixPath(where).name),
        directory=html.escape(where),
        dumps=counted(len(figures.dumps), "dump"),
        steps=f"step {first.dump.step:,} to {newest.dump.step:,}",
        begun=_moment(first.created_unix),
        ended=_moment(newest.committed_unix),
        cards="\n".join(map(_card, key_figures(figures, stands, publications))),
        tables="\n".join(_table_row(**table) for table in tables_of(figures)),
        options="\n".join(f"<option>{html.escape(fqn)}</option>" for fqn in sorted(figures.tables)),
        notes=" ".join(_notes(figures, last)),
        version=__version__,
        written=_moment(time.time()),
        css=read["page.css"],
        data=_in_script(json.dumps(plotted(figures, stands, last, publications), separators=(",", ":"))),
        library=library,
        js=read["page.js"],
    )


def _card(figure: tuple[str, str, str]) -> str:
    label, value, detail = map(html.escape, figure)
    return f"<div class=card><dt>{label}</dt><dd>{value}<small>{detail}</small></dd></div>"


def _table_row(fqn: str, **cells: str) -> str:
    name = html.escape(fqn)
    data = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells.values())
    return f'<tr data-table="{name}"><th scope=row><i></i><code>{name}</code></th>{data}</tr>'


def _notes(figures: LogFigures, last: int) -> list[str]:
    notes = []
    if len(figures.dumps) > last:
        notes.append(f"The plots show the newest {last:,} dumps.")
    if figures.superseded:
        notes.append(f"Left out: {counted(figures.superseded, 'dump')} that a restart made void.")
    notes.append(
        "A delete is an eviction if the id owned a row at the dump before. How far rows moved is the L2 norm "
        f"of the difference, of at most {SAMPLED_KEYS:,} ids of a table, always the same ones."
    )
    return notes


def _in_script(text: str) -> str:
    """JSON that cannot end the script element that it stands in."""
    return text.replace("<", "\\u003c")


def _moment(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix))


def _replace(path: Path, text: str) -> None:
    hidden = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        hidden.write_text(text, "utf-8")
        hidden.replace(path)
    except BaseException:
        hidden.unlink(missing_ok=True)
        raise
