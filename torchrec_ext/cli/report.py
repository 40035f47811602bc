"""``torchrec-ext report``."""

from __future__ import annotations

from pathlib import Path

import click

from torchrec_ext.cli.output import (
    directory_argument,
    json_option,
    new_file,
    print_json,
    progress,
    size,
    user_errors,
)
from torchrec_ext.terminal import counted

_EXAMPLES = """\b
Examples:
  torchrec-ext report deltas/ --out report.html
  torchrec-ext report deltas/ --sink redis://localhost:6379/0
  torchrec-ext report deltas/ --json > figures.json
"""


@click.command("report", epilog=_EXAMPLES)
@directory_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="The page to write; one that is there is replaced.",
)
@click.option("--sink", metavar="URL", help="A sink that DIR is published to: shows how far behind it is.")
@click.option(
    "--published",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="What `publish --json` printed: shows when each dump was published.",
)
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    metavar="N",
    help="Of how many of the newest dumps to draw the figures.",
)
@json_option
def command(
    directory: str, out: Path, sink: str | None, published: Path | None, last: int, as_json: bool
) -> None:
    """Draws DIR as one HTML page that needs no network.

    It shows rows upserted, deleted and evicted per dump, bytes, how long training stood still, how long
    after its step each dump was committed and published, embedding norms, how far rows moved, and how full
    tables are.
    With --json, prints the figures too.

    The exit code is 0, 2 if DIR cannot be read or the page cannot be written, 3 if the sink does not answer.
    """
    new_file(out, replace=True)
    with user_errors(), progress("reading", unit="rows") as shown:
        from torchrec_ext.report import write_report

        figures = write_report(directory, out, sink=sink, published=published, last=last, progress=shown)
    if as_json:
        print_json(figures)
    else:
        click.echo(f"{out}: {counted(len(figures.dumps), 'dump')}, {size(out.stat().st_size)}")
