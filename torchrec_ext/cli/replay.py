"""``torchrec-ext replay``."""

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
    upto_option,
    user_errors,
)
from torchrec_ext.terminal import counted, printable

_EXAMPLES = """\b
Examples:
  torchrec-ext replay deltas/ --out state.parquet
  torchrec-ext replay deltas/ --upto 40 --out at_40.parquet
"""


@click.command("replay", epilog=_EXAMPLES)
@directory_argument
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="The Parquet file to write; must not exist.",
)
@upto_option
@json_option
def command(directory: str, out: Path, upto: int | None, as_json: bool) -> None:
    """Writes the rows that keys own after the newest dump in DIR into one Parquet file.

    Its columns are table_fqn, key_id and embedding. Keys without a row are not in it: to have what the model
    answers for those too, publish to parquet://, or ask `lookup`.

    The exit code is 0, or 2 if DIR cannot be read or the file cannot be written.
    """
    from torchrec_ext.delta import write_state

    new_file(out)
    with user_errors(), progress("writing", unit="rows") as shown:
        written = write_state(directory, out, upto, progress=shown)
    if as_json:
        print_json(written)
        return
    for fqn, rows in sorted(written.rows.items()):
        click.echo(f"{printable(fqn)}: {counted(rows, 'row')}")
    click.echo(
        f"{written.path}: step {written.step} of generation {written.generation}, {size(written.nbytes)}"
    )
