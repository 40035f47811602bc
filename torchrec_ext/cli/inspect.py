"""``torchrec-ext inspect``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from torchrec_ext.cli.output import (
    directory_argument,
    duration,
    json_option,
    moment,
    print_json,
    print_lines,
    size,
    table,
    user_errors,
)
from torchrec_ext.terminal import counted, printable

if TYPE_CHECKING:
    from rich.table import Table

    from torchrec_ext.delta.overview import DumpOverview, LogOverview

_EXAMPLES = """\b
Examples:
  torchrec-ext inspect deltas/
  torchrec-ext inspect deltas/ --all
  torchrec-ext inspect deltas/ --json > inspected.json
"""


@click.command("inspect", epilog=_EXAMPLES)
@directory_argument
@click.option(
    "--last", default=20, show_default=True, metavar="N", help="How many of the newest dumps to list."
)
@click.option("--all", "all_dumps", is_flag=True, help="List all dumps.")
@json_option
def command(directory: str, last: int, all_dumps: bool, as_json: bool) -> None:
    """Shows what is in DIR: dumps, tables, rows by op, bytes, and how long after its step each was committed.

    Reads manifests and footers only, so that it is quick however large DIR is; `verify` reads all. JSON has
    all dumps. The exit code is 0, or 2 if DIR cannot be read.
    """
    from torchrec_ext.delta import inspect_log

    with user_errors():
        overview = inspect_log(directory)
    if as_json:
        print_json(overview)
        return
    shown = overview.dumps if all_dumps else overview.dumps[max(0, len(overview.dumps) - max(last, 0)) :]
    print_lines(_summary(overview))
    if overview.dumps:
        print_lines([_tables(overview), _dumps(shown)])
    if overview.bases:
        print_lines(["bases, beside the dumps that they stand for:", _dumps(overview.bases)])
    print_lines(_notes(overview, len(shown)))


def _summary(overview: LogOverview) -> list[str]:
    lines = [f"{overview.directory}: {counted(len(overview.dumps), 'dump')}, {size(overview.nbytes)}"]
    if overview.dumps:
        newest = overview.dumps[-1]
        ago = duration(max(0.0, time.time() - newest.committed_unix))
        lines.append(
            f"newest: step {newest.step:,} of generation {newest.generation}, "
            f"committed {moment(newest.committed_unix)}, {ago} ago"
        )
    return lines


def _tables(overview: LogOverview) -> Table:
    shown = table(
        "table", "kind", "keys", "rows × dim", "dtype", "dumps", "upserts", "deletes",
        left=("table", "kind", "keys", "dtype"),
    )  # fmt: skip
    for one in overview.tables:
        shown.add_row(
            printable(one.fqn if one.covered else f"{one.fqn} (not in the newest dump)"),
            one.source,
            one.key_space,
            f"{one.num_embeddings:,} × {one.dim}",
            one.dtype if one.storage_dtype == "float32" else f"{one.dtype} as {one.storage_dtype}",
            f"{one.dumps:,}",
            f"{one.upserts:,}",
            f"{one.deletes:,}",
        )
    return shown


def _dumps(dumps: tuple[DumpOverview, ...]) -> Table:
    shown = table(
        "step", "gen.", "upserts", "deletes", "bytes", "stalled", "lag", "committed", "",
        left=("committed", ""),
    )  # fmt: skip
    for dump in dumps:
        shown.add_row(
            f"{dump.step:,}",
            str(dump.generation),
            f"{dump.upserts:,}",
            f"{dump.deletes:,}",
            size(dump.nbytes),
            "" if dump.is_base else duration(dump.stall_seconds),
            "" if dump.lag_seconds is None else duration(dump.lag_seconds),
            moment(dump.committed_unix),
            "superseded" if dump.superseded else f"base of {counted(dump.compacted, 'dump')}" * dump.is_base,
        )
    return shown


def _notes(overview: LogOverview, shown: int) -> list[str]:
    notes = []
    if (left_out := len(overview.dumps) - shown) > 0:
        notes.append(f"{counted(left_out, 'older dump')} not listed: --all")
    if overview.uncommitted:
        named = ", ".join(overview.uncommitted)
        notes.append(f"not committed (being written, or left by a run that died): {named}")
    return notes
