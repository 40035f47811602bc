"""``torchrec-ext compact``."""

from __future__ import annotations

import click

from torchrec_ext.cli.output import (
    directory_argument,
    json_option,
    plain,
    print_json,
    progress,
    size,
    upto_option,
    user_errors,
)
from torchrec_ext.terminal import counted

_EXAMPLES = """\b
Examples:
  torchrec-ext compact deltas/
  torchrec-ext compact deltas/ --upto 40
  torchrec-ext compact deltas/ && torchrec-ext vacuum deltas/ --keep 7d
"""


@click.command("compact", epilog=_EXAMPLES)
@directory_argument
@upto_option
@click.option(
    "--memory",
    type=click.FloatRange(min=0.001),
    default=1.0,
    show_default=True,
    metavar="GB",
    help="Compare keys within this much memory, in several passes if need be.",
)
@json_option
def command(directory: str, upto: int | None, memory: float, as_json: bool) -> None:
    """Writes a base into DIR: one dump that holds what many do, so that replaying reads less.

    Nothing is removed: `vacuum` does that. Training, publishing and reading may go on meanwhile. One that was
    interrupted goes on where it stopped.

    The exit code is 0, also if there was nothing to do, or 2 if DIR cannot be read or written.
    """
    from torchrec_ext.delta import compact

    with user_errors(), progress("compacting", unit="rows") as shown:
        done = compact(directory, upto, max_memory_bytes=int(memory * 1e9), progress=shown)
    if as_json:
        content = plain(done)
        content["base"] = {"directory": done.base.directory, **plain(done.base.dump)}
        print_json(content)
    elif done.written:
        click.echo(
            f"{done.base.directory} holds {counted(done.dumps, 'dump')}: {done.rows:,} of "
            f"{counted(done.rows_read, 'row')}, "
            f"{size(done.nbytes)} of {size(done.nbytes_read)}"
        )
    else:
        click.echo(f"nothing to do: {done.base.directory} holds all dumps up to step {done.base.step:,}")
