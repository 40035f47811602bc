"""What an audit found: as data, as JSON, as a table on a terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchrec_ext.terminal import counted, printable

Kind = Literal[
    "non_finite",
    "absurd",
    "negative",
    "missing_keys",
    "extra_keys",
    "missing_slot",
    "empty_state",
    "other_rows",
    "repeated",
    "unordered",
    "out_of_range",
    "checksum",
    "unreadable",
]

EXAMPLES = 10
"""How many rows or keys a finding names."""

_EXPLAINED: dict[Kind, str] = {
    "non_finite": "NaN or infinite",
    "absurd": "finite, but larger than any that training makes",
    "negative": "negative, where none can be",
    "missing_keys": "missing that the table should have",
    "extra_keys": "there that the table cannot have",
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        table: the table, ``"mc.t0"``, or the parameter.
        slot: ``"weight"`` of a table, ``"value"`` of another tensor of a module, or what the checkpoint
            calls an optimizer's state or a table's buffer.
        kind: what is wrong.
        count: how many values, keys or rows it is about.
        rows: some of their rows; keys, if ``keyed``.
        message: details, for a reader.
        keyed: whether ``rows`` are keys, as they are in tables that have such.
        values: the value of each of ``rows``, or the first wrong one in it.
        key: the name of the tensor in the checkpoint, which tells apart what has one table and slot; empty
            if it is about none, or about several.
    """

    table: str
    slot: str
    kind: Kind
    count: int
    rows: tuple[int, ...] = ()
    message: str = ""
    keyed: bool = False
    values: tuple[float, ...] = ()
    key: str = ""

    def __str__(self) -> str:
        number = counted(self.count, "key" if self.kind.endswith("_keys") else "value")
        what = self.message or f"{number} {_EXPLAINED.get(self.kind, self.kind)}"
        where = ""
        if self.rows:
            named = [str(row) for row in self.rows]
            if self.values:
                named = [f"{row} ({value:g})" for row, value in zip(named, self.values, strict=True)]
            more = ", ..." if self.count > len(named) and self.kind != "checksum" else ""
            where = f": {'key' if self.keyed else 'row'} {', '.join(named)}{more}"
        return printable(f"{self.table} {self.slot}: {what}{where}")


@dataclass(frozen=True)
class Note:
    """Something to know of a table, which is no damage by itself."""

    table: str
    message: str

    def __str__(self) -> str:
        return printable(f"{self.table}: {self.message}")


@dataclass(frozen=True)
class SlotAudit:
    """One tensor of a table, and what was counted in it.

    Attributes:
        table: the table.
        slot: its slot.
        key: its name in the checkpoint.
        dtype: its data type, ``"float32"``.
        shape: its shape.
        rows: its rows; of a table with keys, the keys that have one.
        missing: keys that have a row in another slot of the table and none here.
        non_finite: values that are NaN or infinite.
        absurd: values that are finite, but too large.
        negative: values that are negative and cannot be.
        largest: the largest magnitude among the finite values; None: there are none, or they are no
            floating-point numbers.
    """

    table: str
    slot: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    rows: int
    missing: int = 0
    non_finite: int = 0
    absurd: int = 0
    negative: int = 0
    largest: float | None = None


@dataclass(frozen=True)
class AuditReport:
    """What ``audit_checkpoint`` found.

    Attributes:
        source: what was audited.
        slots: all its tensors.
        findings: what is wrong; empty: nothing.
        notes: what to know besides: what could not be looked into, parameters without state.
        checksums: whether the values were compared with checksums that were saved with them.
    """

    source: str
    slots: tuple[SlotAudit, ...]
    findings: tuple[Finding, ...]
    notes: tuple[Note, ...]
    checksums: bool

    @property
    def clean(self) -> bool:
        """Whether something was audited, and nothing is wrong with it."""
        return bool(self.slots) and not self.findings

    def to_json(self) -> str:
        """The report as a JSON object."""
        return as_json({"clean": self.clean, **asdict(self)})

    def __str__(self) -> str:
        lines = [printable(self.source), *_columns(self.slots), ""]
        lines += [f"NOTE     {note}" for note in self.notes]
        several = self.several()
        lines += [f"FINDING  {named(finding, finding.key, several)}" for finding in self.findings]
        checked = "checksums compared" if self.checksums else "there are no checksums to compare"
        found = "clean" if self.clean else "nothing audited"
        if self.findings:
            found = counted(len(self.findings), "finding")
        lines.append(f"{found}; {counted(len(self.slots), 'tensor')}; {checked}")
        return "\n".join(lines)

    def several(self) -> frozenset[str]:
        """The keys of tensors that have table and slot in common with another one."""
        taken = Counter((slot.table, slot.slot) for slot in self.slots)
        return frozenset(slot.key for slot in self.slots if taken[slot.table, slot.slot] > 1)


def named(what: object, key: str, several: Iterable[str]) -> str:
    """What is said of a tensor, with its key if it is one of several."""
    return f"{what} [{printable(key)}]" if key in several else str(what)


def as_json(content: dict[str, Any]) -> str:
    """A JSON object, of which numbers that JSON does not have are strings."""
    return json.dumps(_finite(content), indent=2, allow_nan=False)


_HEADINGS = ("table", "slot", "dtype", "rows", "missing", "non-finite", "absurd", "negative", "largest")


def _columns(slots: Sequence[SlotAudit]) -> list[str]:
    cells = [_HEADINGS] + [
        (
            printable(slot.table),
            printable(slot.slot),
            slot.dtype,
            str(slot.rows),
            *(str(count or "") for count in (slot.missing, slot.non_finite, slot.absurd, slot.negative)),
            "" if slot.largest is None else f"{slot.largest:.4g}",
        )
        for slot in slots
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _finite(value: Any) -> Any:
    """A value in which floats that JSON does not have are strings."""
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)
    return value
