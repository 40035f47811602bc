"""Writes a copy of a checkpoint in which damaged rows start anew."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from torchrec_ext.checkpoint.audit.arrange import Slot
from torchrec_ext.checkpoint.audit.audit import (
    Audit,
    Opened,
    Progress,
    limit_of,
    open_checkpoint,
    unexpected_explained,
)
from torchrec_ext.checkpoint.audit.ids import values_at
from torchrec_ext.checkpoint.audit.reading.tensors import TensorEntry
from torchrec_ext.checkpoint.audit.repaired_files import write_rows
from torchrec_ext.checkpoint.audit.repaired_snapshots import write_snapshot
from torchrec_ext.checkpoint.audit.report import (
    EXAMPLES,
    AuditReport,
    Finding,
    Kind,
    as_json,
    named,
)
from torchrec_ext.checkpoint.audit.restore import Restored, restored_values
from torchrec_ext.checkpoint.audit.values import MAX_MAGNITUDE, OnRows
from torchrec_ext.errors import CheckpointError
from torchrec_ext.store.saved import WEIGHT, SavedSnapshot
from torchrec_ext.store.tables import ByFunction
from torchrec_ext.terminal import printable

_VALUES: frozenset[Kind] = frozenset({"non_finite", "absurd", "negative"})


@dataclass(frozen=True)
class Repaired:
    """Rows of a slot that start anew.

    Attributes:
        table: the table.
        slot: its slot.
        count: how many rows.
        rows: some of them; keys of a store's snapshot.
        start: what they hold now, for a reader.
        key: the name of the tensor in the checkpoint.
    """

    table: str
    slot: str
    count: int
    rows: tuple[int, ...]
    start: str
    key: str = ""

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.rows) else ""
        named = ", ".join(map(str, self.rows)) + more
        rows = "1 row is" if self.count == 1 else f"{self.count} rows are"
        return printable(f"{self.table} {self.slot}: {rows} {self.start} ({named})")


@dataclass(frozen=True)
class RepairReport:
    """What ``repair_checkpoint`` did.

    Attributes:
        audit: what was found in the checkpoint.
        out: the copy; None: none was written, as nothing is wrong, or something cannot be repaired.
        repaired: the rows that start anew in it.
        refused: what cannot be repaired, and why.
    """

    audit: AuditReport
    out: Path | None
    repaired: tuple[Repaired, ...] = ()
    refused: tuple[str, ...] = ()

    def to_json(self) -> str:
        """The audit's report as a JSON object, with what was done in ``repair``."""
        done = {
            "out": None if self.out is None else str(self.out),
            "repaired": [asdict(one) for one in self.repaired],
            "refused": list(self.refused),
        }
        return as_json({"clean": self.audit.clean, **asdict(self.audit), "repair": done})

    def __str__(self) -> str:
        if self.refused:
            return "\n".join(
                ["NOT REPAIRED, nothing was written:", *(f"  {printable(why)}" for why in self.refused)]
            )
        if self.out is None:
            return "nothing to repair, nothing was written"
        several = self.audit.several()
        return "\n".join(
            [
                printable(f"REPAIRED in {self.out}; what rows that start anew had learned is lost:"),
                *(f"  {named(one, one.key, several)}" for one in self.repaired),
            ]
        )


@dataclass
class TableRepair:
    """The rows of one table that start anew.

    Attributes:
        weight: its weight, if that is known.
        states: its optimizer state with an entry per row, of which the initial value is known.
        others: its other optimizer state: counters, and what cannot be repaired row by row.
        rows_of: the rows of tensors in which values are wrong, int64, ascending; of a snapshot their keys.
    """

    weight: Slot | None = None
    states: list[Slot] = field(default_factory=list)
    others: list[Slot] = field(default_factory=list)
    rows_of: dict[TensorEntry, torch.Tensor] = field(default_factory=dict)

    @property
    def slots(self) -> list[Slot]:
        """Those that can be repaired."""
        return [*([self.weight] if self.weight else []), *self.states]

    def anew(self, slot: Slot) -> torch.Tensor:
        """The rows of a slot that start anew: a row's whole state, and with a weight its state, too.

        State of another optimizer stays as it is.
        """
        together = [slot]
        if slot.role == "state":
            together = [one for one in self.slots if one.role == "weight" or one.owner == slot.owner]
        rows = [self.rows_of[one.tensor] for one in together if one.tensor in self.rows_of]
        return torch.cat([torch.empty(0, dtype=torch.int64), *rows]).unique()


def repair_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    max_magnitude: float = MAX_MAGNITUDE,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> RepairReport:
    """Writes a copy of a checkpoint in which damaged rows start anew.

    A row's optimizer state belongs together: where one slot is damaged, all its slots get their initial
    value. Where a weight is, the row and its state start anew: from the table's initializer in a store's
    snapshot; in other checkpoints, where it is not known, from zero. Keys that a snapshot's slots lack get
    initial values. Whatever else is wrong cannot be repaired; then nothing is written.

    The copy appears at once, when it was found to be clean. The checkpoint itself is only read.

    Args:
        path: the checkpoint.
        out: where to write; must not exist.
        max_magnitude: see ``audit_checkpoint``.
        exclude: see ``audit_checkpoint``.
        progress: see ``audit_checkpoint``.

    Raises:
        CheckpointError: the checkpoint cannot be read, or ``out`` exists, is inside of it, or cannot be
            written.
    """
    path, out = Path(path), Path(out)
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} exists; the repaired copy is written to a new place")
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    wrong: dict[TensorEntry, list[torch.Tensor]] = {}

    def collector(slot: Slot) -> OnRows:
        return lambda kind, rows: wrong.setdefault(slot.tensor, []).append(rows)

    with unexpected_explained(path):
        opened = open_checkpoint(path)
        if path.resolve() in out.resolve().parents:
            raise CheckpointError(f"{out} is inside of {path}, which is only read; write the copy elsewhere")
        report = Audit(opened, max_magnitude, patterns, progress, collector).report()
        if not report.findings:
            return RepairReport(report, None)
        tables = _tables(opened, report, {entry: torch.cat(rows).unique() for entry, rows in wrong.items()})
        restored = _restored(opened, report, tables, max_magnitude)
        if refused := [*_refused(report.findings, tables, restored), *_unlinked(opened, tables)]:
            return RepairReport(report, None, refused=tuple(refused))

    hidden = out.with_name(f".{out.name}.{secrets.token_hex(4)}")
    try:
        if path.is_dir():
            hidden.mkdir(mode=0o700)
        if opened.snapshot is not None:
            _rows_to_keys(opened.snapshot, tables)
            anew = {name: _anew(one) for name, one in tables.items()}
            write_snapshot(opened.snapshot, hidden, anew, restored)
        else:
            write_rows(path, hidden, _changes(tables), restored, opened.archive)
        with unexpected_explained(hidden):
            copied = Audit(open_checkpoint(hidden), max_magnitude, patterns).report()
        if not copied.clean:
            raise CheckpointError(f"the copy is not clean either, so it was removed: {copied.findings[0]}")
        if out.exists():
            raise CheckpointError(f"{out} exists by now; the repaired copy is written to a new place")
        if path.is_dir():
            shutil.copymode(path, hidden)
        hidden.rename(out)
    except OSError as error:
        raise CheckpointError(f"cannot write {out}: {error.strerror}") from error
    finally:
        if hidden.is_dir():
            shutil.rmtree(hidden, ignore_errors=True)
        else:
            hidden.unlink(missing_ok=True)
    return RepairReport(report, out, tuple(_told(opened, tables, report, restored)))


def _tables(
    opened: Opened, report: AuditReport, wrong: dict[TensorEntry, torch.Tensor]
) -> dict[str, TableRepair]:
    """The tables of which rows have to start anew."""
    tables = {one.table: TableRepair() for one in report.findings if one.kind in (*_VALUES, "missing_keys")}
    for slot in opened.arrangement.slots:
        table = tables.get(slot.table)
        if table is None:
            continue
        if slot.role == "weight":
            table.weight = slot
        elif slot.role == "state":
            (table.states if slot.initial is not None else table.others).append(slot)
        if slot.tensor in wrong:
            table.rows_of[slot.tensor] = wrong[slot.tensor]
    for table in tables.values():
        if table.weight is not None and opened.snapshot is None:
            rows = table.weight.tensor.rows
            table.others += [one for one in table.states if one.tensor.rows != rows]
            table.states = [one for one in table.states if one.tensor.rows == rows]
    return tables


def _rows_to_keys(snapshot: SavedSnapshot, tables: Mapping[str, TableRepair]) -> None:
    """Names rows by their keys: the slots of a table may have different ones."""
    for name, table in tables.items():
        for slot in table.slots:
            if (rows := table.rows_of.get(slot.tensor)) is not None:
                keys = snapshot.tables[name].keys(slot.name)[rows.numpy()]
                table.rows_of[slot.tensor] = torch.from_numpy(keys)


def _restored(
    opened: Opened, report: AuditReport, tables: Mapping[str, TableRepair], max_magnitude: float
) -> list[Restored]:
    """What checksums bring back, of slots in which they bring back all; these rows stay as they are."""
    damaged = {one.key for one in report.findings if one.kind == "checksum"}
    found: list[Restored] = []
    for slot in opened.arrangement.slots:
        table = tables.get(slot.table)
        if table is None or slot.tensor.key not in damaged or slot.tensor not in table.rows_of:
            continue
        rows = table.rows_of[slot.tensor]
        values = list(restored_values(slot, rows, limit_of(slot, max_magnitude)))
        those = [one for one in values if one is not None]
        if len(those) == len(values):
            found += those
            table.rows_of[slot.tensor] = rows[~torch.isin(rows, torch.tensor([one.row for one in those]))]
    return found


def _refused(
    findings: Sequence[Finding], tables: Mapping[str, TableRepair], restored: Sequence[Restored]
) -> Iterator[str]:
    known_again = {one.slot.tensor.key for one in restored}
    for finding in findings:
        if finding.kind == "checksum" and finding.key in known_again:
            continue
        if finding.kind in ("missing_slot", "empty_state"):
            yield f"{finding}; see backfill_optimizer_state"
        elif finding.kind not in (*_VALUES, "missing_keys"):
            yield f"{finding}; what it was is not known: use another checkpoint"
        elif finding.kind in _VALUES and finding.key not in {
            slot.tensor.key for slot in tables[finding.table].slots
        }:
            yield f"{finding}; what a new row has in {finding.slot!r} is not known"


def _unlinked(opened: Opened, tables: Mapping[str, TableRepair]) -> Iterator[str]:
    """Tables whose weight is damaged, where it is not known which optimizer state is theirs."""
    if opened.snapshot is not None:
        return
    numbered = sorted({slot.table for slot in opened.arrangement.slots if slot.table.endswith("]")})
    for name, table in tables.items():
        weight = table.weight
        if weight is None or weight.tensor not in table.rows_of:
            continue
        if others := [one.name for one in table.others if one.tensor.rows > 1]:
            yield f"{name}: its {weight.name} is damaged, and what a new row has in {others} is not known"
        if not table.states and numbered:
            yield (
                f"{name}: its {weight.name} is damaged, and which of {', '.join(numbered[:3])} is its "
                "optimizer state is not said: torch.distributed.checkpoint.state_dict saves it by name"
            )


def _anew(table: TableRepair) -> dict[str, torch.Tensor]:
    """By slot, the rows that start anew."""
    return {slot.name: rows for slot in table.slots if len(rows := table.anew(slot))}


def _changes(tables: Mapping[str, TableRepair]) -> Iterator[tuple[Slot, torch.Tensor, float]]:
    for table in tables.values():
        for slot in table.slots:
            if len(rows := table.anew(slot)):
                yield slot, rows, slot.initial or 0.0


def _told(
    opened: Opened, tables: Mapping[str, TableRepair], report: AuditReport, restored: Sequence[Restored]
) -> Iterator[Repaired]:
    for name, table in tables.items():
        for slot in table.slots:
            if not len(rows := table.anew(slot)):
                continue
            start = "drawn anew" if _is_drawn(opened, name) else "ZERO"
            if slot.role == "state":
                start = f"at the initial value {slot.initial:g}"
            some = tuple(rows[:EXAMPLES].tolist())
            yield Repaired(name, slot.name, len(rows), some, start, slot.tensor.key)
    for one in restored:
        where = [one.row] if one.slot.keys is None else values_at(one.slot.keys, [one.row])
        start = f"as saved: the checksum tells that it was {one.value:g}"
        yield Repaired(one.slot.table, one.slot.name, 1, tuple(where), start, one.slot.tensor.key)
    for finding in report.findings:
        if finding.kind == "missing_keys":
            drawn = finding.slot != WEIGHT or _is_drawn(opened, finding.table)
            start = "added, with initial values" if drawn else "added, as ZERO"
            yield Repaired(finding.table, finding.slot, finding.count, finding.rows, start)


def _is_drawn(opened: Opened, table: str) -> bool:
    """Whether it is known what rows of a table hold at first."""
    if opened.snapshot is None:
        return False
    return not isinstance(opened.snapshot.tables[table].table.initializer, ByFunction)
