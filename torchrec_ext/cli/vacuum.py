"""``torchrec-ext vacuum``."""

from __future__ import annotations

import re

import click

from torchrec_ext.cli.output import (
    directory_argument,
    json_option,
    print_json,
    progress,
    size,
    user_errors,
)
from torchrec_ext.terminal import counted

_EXAMPLES = """\b
Examples:
  torchrec-ext vacuum deltas/ --dry-run
  torchrec-ext vacuum deltas/ --keep 7d --keep-dumps 10
  torchrec-ext vacuum deltas/ --json
"""

_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def _seconds(context: click.Context, parameter: click.Parameter, value: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", value)
    if match is None:
        raise click.BadParameter(f"{value!r} is not a time span such as 90s, 30m, 24h or 7d")
    return float(match[1]) * _SECONDS[match[2]]


@click.command("vacuum", epilog=_EXAMPLES)
@directory_argument
@click.option(
    "--keep",
    callback=_seconds,
    default="24h",
    show_default=True,
    metavar="SPAN",
    help="Dumps committed within this time can still be replayed, resumed and followed from.",
)
@click.option(
    "--keep-dumps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="And the newest so many, however old.",
)
@click.option(
    "--grace",
    callback=_seconds,
    default="1h",
    show_default=True,
    metavar="SPAN",
    help="Remove nothing before what replaces it has been there this long, for readers under way.",
)
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@json_option
def command(directory: str, keep: float, keep_dumps: int, grace: float, dry_run: bool, as_json: bool) -> None:
    """Removes dumps from DIR that a base stands for, and the rows of superseded dumps.

    It removes nothing where there is no base: run `compact` first.

    The exit code is 0, also if there was nothing to do, or 2 if DIR cannot be read or written.
    """
    from torchrec_ext.delta import vacuum

    with user_errors(), progress("removing") as shown:
        done = vacuum(
            directory,
            keep_seconds=keep,
            keep_dumps=keep_dumps,
            grace_seconds=grace,
            dry_run=dry_run,
            progress=shown,
        )
    if as_json:
        print_json(done)
        return
    for name in done.dumps:
        click.echo(name)
    for name in done.superseded:
        click.echo(f"{name} (superseded; its manifest stays)")
    verb = "would remove" if dry_run else "removed"
    why = f"; {done.reason}" if done.reason else ""
    click.echo(f"{verb} {counted(done.files, 'file')}, {size(done.nbytes)}{why}")
