"""What the page shows, as plain values."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torchrec_ext.delta.figures import DumpFigures, LogFigures, Spread, TableFigures
from torchrec_ext.delta.manifest import DumpId, Manifest

_COUNTS = ("updated", "admitted", "evicted", "deleted")


@dataclass(frozen=True)
class Published:
    """Where a sink stands.

    Attributes:
        dump: the dump that it holds; None: nothing, or one that is not in the log.
        behind: dumps of the log that it lacks.
        steps: how many steps it is behind the newest dump.
    """

    dump: DumpId | None
    behind: int
    steps: int


def published_at(url: str, dumps: Sequence[Manifest]) -> Published:
    """Asks a sink which of a log's dumps it holds."""
    from torchrec_ext.publish import open_sink

    with open_sink(url) as sink:
        position = sink.position()
    for place, dump in enumerate(dumps):
        if position is not None and (dump.generation, dump.step, dump.created_unix) == (
            position.generation,
            position.step,
            position.created_unix,
        ):
            return Published(dump.dump, len(dumps) - place - 1, dumps[-1].step - dump.step)
    return Published(None, len(dumps), dumps[-1].step if dumps else 0)


def read_publications(path: Path) -> list[tuple[DumpId, float]]:
    """What ``torchrec-ext publish --json`` printed: up to which dump, and how long after its step.

    Raises:
        ValueError: a line is something else.
        OSError: the file cannot be read.
    """
    found = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            told = json.loads(line)
            found.append((DumpId(int(told["generation"]), int(told["step"])), float(told["lag_seconds"])))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}, line {number} is not what `torchrec-ext publish --json` prints"
            ) from error
    return found


def lags_to_published(
    dumps: Sequence[DumpFigures], publications: Sequence[tuple[DumpId, float]]
) -> list[float | None]:
    """How long after its step each dump was published first; None: it was not, or is a base."""
    created = {dump.dump: dump.created_unix for dump in dumps}
    times = [(dump, created[dump] + lag) for dump, lag in publications if dump in created]
    return [
        None
        if dump.is_base
        else min((at - dump.created_unix for last, at in times if last >= dump.dump), default=None)
        for dump in dumps
    ]


def key_figures(
    figures: LogFigures, published: Published | None, publications: Sequence[tuple[DumpId, float]] = ()
) -> list[tuple[str, str, str]]:
    """What to tell first: a label, a value, and a detail of each."""
    dumps = figures.dumps
    totals = {name: sum(getattr(t, name) for d in dumps for t in d.tables.values()) for name in _COUNTS}
    nbytes = sum(dump.nbytes for dump in dumps)
    stalls = [dump.longest_stall_seconds for dump in dumps]
    lags = [dump.lag_seconds for dump in dumps if dump.lag_seconds is not None]
    newest = dumps[-1].tables.values()
    held, rows = (sum(getattr(table, name) for table in newest) for name in ("held", "num_embeddings"))
    cards = [
        (
            "Rows upserted",
            _short(totals["updated"] + totals["admitted"]),
            f"{_short(totals['admitted'])} of new ids",
        ),
        (
            "Ids evicted",
            _short(totals["evicted"]),
            f"{_short(totals['evicted'] + totals['deleted'])} deletes",
        ),
        ("Rows held", f"{held / rows:.1%}" if rows else "none", f"{_short(held)} of {_short(rows)}"),
        ("Written", _size(nbytes), f"{_size(nbytes / len(dumps))} a dump"),
        ("Training stood still", _time(sum(stalls)), _share(sum(stalls), dumps)),
    ]
    if lags:
        cards.append(("Step to commit", _time(median(lags)), f"{_time(max(lags))} at most"))
    if found := [lag for lag in lags_to_published(dumps, publications) if lag is not None]:
        cards.append(("Step to published", _time(median(found)), f"{_time(max(found))} at most"))
    if published is not None:
        cards.append(_card_of(published))
    return cards


def _card_of(published: Published) -> tuple[str, str, str]:
    if published.dump is None:
        return ("Published", "nothing", "of this log")
    if not published.behind:
        return ("Published", f"step {published.dump.step:,}", "up to date")
    dumps = f"{published.behind:,} dump{'s' * (published.behind > 1)}"
    return ("Published", f"step {published.dump.step:,}", f"{dumps}, {published.steps:,} steps behind")


def _share(stalled: float, dumps: Sequence[DumpFigures]) -> str:
    span = dumps[-1].created_unix - dumps[0].created_unix
    longest = max(dump.longest_stall_seconds for dump in dumps)
    return f"{stalled / span:.2%} of the time" if span > 0 else f"{_time(longest)} at most"


def tables_of(figures: LogFigures) -> list[dict[str, str]]:
    """A line for each table."""
    lines = []
    for fqn, info in sorted(figures.tables.items()):
        told = [dump.tables[fqn] for dump in figures.dumps if fqn in dump.tables]
        moves = [table.moves.p50 for table in told if table.moves is not None]
        lines.append(
            {
                "fqn": fqn,
                "kind": info.source,
                "shape": f"{info.num_embeddings:,} × {info.dim}",
                "held": f"{told[-1].held / info.num_embeddings:.1%}",
                "upserts": f"{sum(table.updated + table.admitted for table in told):,}",
                "evicted": f"{sum(table.evicted for table in told):,}",
                "moved": f"{median(moves):.3g}" if moves else "",
            }
        )
    return lines


def plotted(
    figures: LogFigures,
    published: Published | None,
    last: int,
    publications: Sequence[tuple[DumpId, float]] = (),
) -> dict[str, Any]:
    """What the plots are drawn from: columns, one entry per dump."""
    dumps = figures.dumps[-last:]
    return {
        "labels": _labels(dumps),
        "steps": [dump.dump.step for dump in dumps],
        "generations": [dump.dump.generation for dump in dumps],
        "committed": [round(dump.committed_unix, 3) for dump in dumps],
        "bytes": [dump.nbytes for dump in dumps],
        "stall": [_digits(dump.longest_stall_seconds) for dump in dumps],
        "lag": [None if dump.lag_seconds is None else _digits(dump.lag_seconds) for dump in dumps],
        "published_lag": [
            None if lag is None else _digits(lag) for lag in lags_to_published(dumps, publications)
        ],
        "published": next((n for n, d in enumerate(dumps) if published and d.dump == published.dump), None),
        "tables": {fqn: _columns([dump.tables.get(fqn) for dump in dumps]) for fqn in sorted(figures.tables)},
    }


def _labels(dumps: Sequence[DumpFigures]) -> list[str]:
    """A name for each dump: its step, its generation if that step comes again, whether it is a base."""
    steps = [dump.dump.step for dump in dumps]
    again = {step for step in steps if steps.count(step) > 1} if len(set(steps)) < len(steps) else set()
    return [
        f"{d.dump.step:,}" + f" (g{d.dump.generation})" * (d.dump.step in again) + " (base)" * d.is_base
        for d in dumps
    ]


def _columns(told: Sequence[TableFigures | None]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        name: [None if table is None else getattr(table, name) for table in told]
        for name in (*_COUNTS, "held", "num_embeddings")
    }
    for name in ("norms", "moves"):
        spreads: list[Spread | None] = [None if table is None else getattr(table, name) for table in told]
        columns[name] = {
            quantile: [None if spread is None else _digits(getattr(spread, quantile)) for spread in spreads]
            for quantile in ("p10", "p50", "p90", "max")
        }
    return columns


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _short(number: float) -> str:
    for unit in ("", "k", "M", "G"):
        if number < 10_000 or unit == "G":
            return f"{number:,.0f}{unit}" if number < 10_000 and not unit else f"{number:,.3g}{unit}"
        number /= 1000
    return ""


def _size(nbytes: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:,.3g} TB"


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:,.0f} min"
