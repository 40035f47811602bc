"""``torchrec-ext diff``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from torchrec_ext.cli.output import (
    directory_argument,
    json_option,
    print_json,
    print_lines,
    progress,
    table,
    user_errors,
)
from torchrec_ext.terminal import printable
from torchrec_ext.urls import without_credentials

if TYPE_CHECKING:
    from rich.table import Table

    from torchrec_ext.delta.difference import LogDifference, TableDifference

_EXAMPLES = """\b
Examples:
  torchrec-ext diff deltas/ 20 60
  torchrec-ext diff deltas/ 20 60 --table mc.user_table --top 50
  torchrec-ext diff deltas/ 20 60 --json > moved.json
"""


@click.command("diff", epilog=_EXAMPLES)
@directory_argument
@click.argument("before", type=int)
@click.argument("after", type=int)
@click.option("--table", "only", metavar="FQN", help="Show this table only.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="Ids to list of each kind.",
)
@json_option
def command(directory: str, before: int, after: int, only: str | None, top: int, as_json: bool) -> None:
    """Shows, per table, which ids came, went and moved how far in DIR, from step BEFORE to step AFTER.

    Of each step counts the newest dump at or before it. An id came if it owns a row after and did not
    before; it moved if it owns one at both and its vector is another: how far is the L2 norm of the
    difference. The exit code is 0 whatever is found, 2 if DIR cannot be read.
    """
    from torchrec_ext.delta import diff_log

    with user_errors(), progress("comparing", unit="rows") as shown:
        difference = diff_log(directory, before, after, progress=shown)
        tables = difference.tables
        if only is not None:
            if only not in tables:
                where = without_credentials(directory)
                raise ValueError(f"{where} holds no table {only}; it holds {', '.join(tables)}")
            tables = {only: tables[only]}
    if as_json:
        content = {fqn: _listed(one, top) for fqn, one in tables.items()}
        print_json({"before": difference.before, "after": difference.after, "tables": content})
        return
    print_lines([_title(difference), _counts(tables)])
    for fqn, one in tables.items():
        if top and (len(one.came) or len(one.went) or len(one.moved)):
            print_lines([fqn, *_ids("came", one.came, top), *_ids("went", one.went, top)])
            if len(one.moved):
                print_lines([_movers(one, top)])


def _listed(one: TableDifference, top: int) -> dict[str, Any]:
    counts = {"came": len(one.came), "went": len(one.went), "moved": len(one.moved)}
    ids = {"came": one.came[:top], "went": one.went[:top]}
    moved = [
        {"id": key, "distance": far}
        for key, far in zip(one.moved[:top].tolist(), one.distances[:top].tolist(), strict=True)
    ]
    return {"counts": counts, **ids, "moved": moved, "mean_distance": _mean(one)}


def _mean(one: TableDifference) -> float | None:
    return float(one.distances.mean()) if len(one.distances) else None


def _title(difference: LogDifference) -> str:
    before, after = difference.before, difference.after
    return (
        f"step {before.step:,} of generation {before.generation} to step {after.step:,} of generation "
        f"{after.generation}"
    )


def _counts(tables: dict[str, TableDifference]) -> Table:
    shown = table("table", "came", "went", "moved", "mean", "median", "farthest", left=("table",))
    for fqn, one in tables.items():
        counts = [f"{len(ids):,}" for ids in (one.came, one.went, one.moved)]
        far = one.distances
        spread = [far.mean(), far[len(far) // 2], far[0]] if len(far) else []
        shown.add_row(printable(fqn), *counts, *(f"{value:.4g}" for value in spread))
    return shown


def _ids(label: str, ids: Any, top: int) -> list[str]:
    if not len(ids):
        return []
    more = f", and {len(ids) - top:,} more" if len(ids) > top else ""
    return [f"  {label}: {', '.join(map(str, ids[:top].tolist()))}{more}"]


def _movers(one: TableDifference, top: int) -> Table:
    shown = table("  moved farthest: id", "distance")
    for key, far in zip(one.moved[:top].tolist(), one.distances[:top].tolist(), strict=True):
        shown.add_row(str(key), f"{far:.4g}")
    return shown
