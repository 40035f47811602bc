"""Looks through a checkpoint for state that is damaged, uninitialised or missing."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torchrec_ext.checkpoint.audit.arrange import PER_ROW, Arrangement, Slot, arrange
from torchrec_ext.checkpoint.audit.ids import id_findings, values_at
from torchrec_ext.checkpoint.audit.reading.archives import ZIP_MAGIC, Archive, load_in_memory
from torchrec_ext.checkpoint.audit.reading.crc import flipped_bits
from torchrec_ext.checkpoint.audit.reading.dcp import DcpCheckpoint, is_dcp, nested_lists
from torchrec_ext.checkpoint.audit.reading.tensors import DamagedPart, Part, StoredTensor
from torchrec_ext.checkpoint.audit.reading.trees import entries_of
from torchrec_ext.checkpoint.audit.report import AuditReport, Finding, SlotAudit
from torchrec_ext.checkpoint.audit.snapshots import arrange_live, arrange_saved, key_findings
from torchrec_ext.checkpoint.audit.values import MAX_MAGNITUDE, OnRows, ValueChecks
from torchrec_ext.errors import CheckpointError
from torchrec_ext.files import open_plain
from torchrec_ext.store.saved import SavedSnapshot, is_saved_snapshot
from torchrec_ext.store.snapshots import StoreSnapshot

Progress = Callable[[int, int], None]

logger = logging.getLogger(__name__)


def audit_checkpoint(
    checkpoint: str | os.PathLike[str] | Mapping[str, Any] | StoreSnapshot,
    *,
    max_magnitude: float = MAX_MAGNITUDE,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> AuditReport:
    """Looks for values and state that no training leaves behind, and compares checksums.

    Nothing that is in the checkpoint is run, and it is read piece by piece: a checkpoint may be larger
    than memory, unless ``torch.save`` wrote it in its format of before 1.6.

    Args:
        checkpoint: a directory of ``torch.distributed.checkpoint``, a file of ``torch.save``, a saved
            store snapshot; or a state dict, nested in any way, or a store's snapshot, in memory. Of a
            sharded tensor in memory, this rank's part counts.
        max_magnitude: larger weights, and averages of gradients, are absurd; second moments if they are
            larger than its square.
        exclude: ``fnmatch`` patterns of tables, parameters or keys whose values are not looked at. One that
            matches nothing is a warning.
        progress: is called with the bytes that were read, and all there are.

    Returns:
        What was found. ``report.clean`` says whether something was looked at and nothing is wrong with it.

    Raises:
        CheckpointError: it cannot be audited at all: it is not there, no checkpoint, its description is
            damaged, or it holds objects that would have to be unpickled.
        ValueError: an argument is wrong.

    Example::

        report = audit_checkpoint("checkpoints/1000")
        assert report.clean, report
    """
    if not isinstance(checkpoint, (str, os.PathLike, Mapping, StoreSnapshot)):
        raise ValueError(
            f"a path, state dict or store snapshot is audited, not a {type(checkpoint).__name__}"
        )
    if not max_magnitude > 0:
        raise ValueError(f"max_magnitude must be positive, not {max_magnitude}")
    patterns = (exclude,) if isinstance(exclude, str) else tuple(exclude)
    with unexpected_explained(checkpoint):
        return Audit(open_checkpoint(checkpoint), max_magnitude, patterns, progress).report()


@contextlib.contextmanager
def unexpected_explained(checkpoint: object) -> Iterator[None]:
    """Where whatever else fails is a ``CheckpointError``: a checkpoint can be made to fail in any way."""
    try:
        yield
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:
        where = checkpoint if isinstance(checkpoint, (str, os.PathLike)) else "the checkpoint"
        logger.debug("%s cannot be audited", where, exc_info=True)
        raise CheckpointError(
            f"{where} cannot be audited, reading it failed with {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose structure was read.

    Attributes:
        source: what it is, for a reader.
        arrangement: its tables.
        archive: the file it is, if it is one of ``torch.save``.
        snapshot: the saved snapshot it is, if it is one.
    """

    source: str
    arrangement: Arrangement
    archive: Archive | None = None
    snapshot: SavedSnapshot | None = None


def open_checkpoint(checkpoint: str | os.PathLike[str] | Mapping[str, Any] | StoreSnapshot) -> Opened:
    """Reads the structure of a checkpoint; see ``audit_checkpoint``."""
    if isinstance(checkpoint, StoreSnapshot):
        return Opened("a snapshot in memory", arrange_live(checkpoint))
    if isinstance(checkpoint, Mapping):
        return Opened("a state dict in memory", arrange(entries_of(checkpoint)))
    path = Path(checkpoint)
    if is_saved_snapshot(path):
        snapshot = SavedSnapshot(path)
        return Opened(f"{path}: a store's snapshot", arrange_saved(snapshot), snapshot=snapshot)
    if is_dcp(path):
        tree = nested_lists(DcpCheckpoint(path).tree)
        return Opened(f"{path}: a checkpoint of torch.distributed.checkpoint", arrange(tree))
    if path.is_dir():
        raise CheckpointError(
            f"{path} is no checkpoint: it has neither a .metadata, as torch.distributed.checkpoint writes, "
            "nor a snapshot.json, as a store's snapshot has"
        )
    try:
        with open_plain(path, follow=True) as file:
            magic = file.read(len(ZIP_MAGIC))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    if magic != ZIP_MAGIC:
        tree, archive = entries_of(load_in_memory(path)), None
    else:
        archive = Archive(path)
        tree = entries_of(archive.load(), (), archive)
    return Opened(f"{path}: a file of torch.save", arrange(tree), archive)


class Audit:
    """One look through a checkpoint.

    Args:
        opened: the checkpoint.
        max_magnitude: see ``audit_checkpoint``.
        exclude: patterns of what is left out.
        progress: see ``audit_checkpoint``.
        on_rows: is told, for each slot, the rows in which values are wrong.
    """

    def __init__(
        self,
        opened: Opened,
        max_magnitude: float = MAX_MAGNITUDE,
        exclude: Sequence[str] = (),
        progress: Progress | None = None,
        on_rows: Callable[[Slot], OnRows] | None = None,
    ) -> None:
        self._opened, self._max_magnitude, self._exclude = opened, max_magnitude, exclude
        self._unmatched = dict.fromkeys(exclude)
        self._progress, self._on_rows = progress, on_rows
        self._slots = [slot for slot in opened.arrangement.slots if not self._excluded(slot.table, slot)]
        self._total = sum(slot.tensor.nbytes for slot in self._slots)  # of expanded ones there is less
        self._done = 0
        self._checksums = True

    def report(self) -> AuditReport:
        """Reads everything."""
        structure = self._opened.arrangement
        findings = [one for one in structure.findings if not self._excluded(one.table)]
        findings += _row_findings(self._slots)
        of_keys = list(key_findings(self._slots))
        findings += of_keys
        missing = {(one.table, one.slot): one.count for one in of_keys if one.kind == "missing_keys"}
        audited: list[SlotAudit] = []
        for slot in self._slots:
            findings += self._values(slot, audited, missing.get((slot.table, slot.name), 0))
            if slot.role in ("ids", "rows", "keys"):
                findings += id_findings(slot)
        snapshot = self._opened.snapshot
        if findings and snapshot is not None and not SavedSnapshot(snapshot.path).is_same(snapshot):
            raise CheckpointError(
                f"{snapshot.path}: another snapshot took its place meanwhile; audit that one"
            )
        notes = tuple(note for note in structure.notes if not self._excluded(note.table))
        for pattern in self._unmatched:
            logger.warning("exclude: %r matches no table, parameter or key", pattern)
        return AuditReport(
            self._opened.source,
            tuple(audited),
            tuple(findings),
            notes,
            self._checksums and bool(audited),
        )

    def _excluded(self, table: str, slot: Slot | None = None) -> bool:
        names = [table] if slot is None else [table, f"{table}.{slot.name}", slot.tensor.key]
        matching = [p for p in self._exclude if any(fnmatchcase(name, p) for name in names)]
        for pattern in matching:
            self._unmatched.pop(pattern, None)
        return bool(matching)

    def _values(self, slot: Slot, audited: list[SlotAudit], missing: int) -> Iterator[Finding]:
        entry = slot.tensor
        checks = ValueChecks(
            limit_of(slot, self._max_magnitude),
            slot.not_negative,
            None if self._on_rows is None else self._on_rows(slot),
        )
        damaged = list(self._read(slot, checks))
        audited.append(
            SlotAudit(
                slot.table,
                slot.name,
                entry.key,
                str(entry.dtype).removeprefix("torch."),
                entry.size,
                entry.rows,
                missing,
                **{kind: wrong.count for kind, wrong in checks.wrong.items()},
                largest=checks.largest,
            )
        )
        for kind, wrong in checks.wrong.items():
            rows = wrong.rows if slot.keys is None else values_at(slot.keys, wrong.rows)
            yield Finding(
                slot.table,
                slot.name,
                kind,
                wrong.count,
                tuple(rows),
                keyed=slot.keys is not None,
                values=tuple(wrong.values),
                key=slot.tensor.key,
            )
        yield from damaged

    def _read(self, slot: Slot, checks: ValueChecks) -> Iterator[Finding]:
        for part in slot.tensor.parts:
            source = part.source()
            if not isinstance(source, StoredTensor) or (source.nbytes and source.record.crc32 is None):
                self._checksums = False
            try:
                for start, values in source.pieces():
                    checks.add(part.first_row + start, values)
                    self._done += values.nbytes
                    if self._progress is not None:
                        self._progress(self._done, self._total)
            except DamagedPart as error:
                yield _damage_finding(slot, part, source, error)


def limit_of(slot: Slot, max_magnitude: float) -> float:
    """The magnitude above which a slot's values are absurd."""
    # Numbers of 8 bytes are no weights: they are metrics and the like, which add up.
    squared = slot.squares or slot.tensor.dtype.itemsize > 4
    return max_magnitude**2 if squared else max_magnitude


def _damage_finding(slot: Slot, part: Part, source: Any, error: DamagedPart) -> Finding:
    count = part.sizes[0] if part.sizes else 1
    where = f"rows {part.first_row} to {part.first_row + count - 1}: " if part.sizes else ""
    message = f"{where}{error}"
    rows: tuple[int, ...] = ()
    values: tuple[float, ...] = ()
    if error.crc32 is not None and isinstance(source, StoredTensor) and source.contiguous:
        element = _flipped(source, error.crc32)
        if element is not None:
            row = part.first_row + element * source.dtype.itemsize // source.row_bytes
            rows = (row,) if slot.keys is None else tuple(values_at(slot.keys, [row]))
            values = (float(source.at(element).float()),)
            message += "; if one bit was flipped, it is one of"
    keyed = slot.keys is not None and bool(rows)
    return Finding(slot.table, slot.name, error.kind, count, rows, message, keyed, values, slot.tensor.key)


def _flipped(source: StoredTensor, crc32: int) -> int | None:
    """The number of the value in which one bit was flipped, if that explains the checksum."""
    record = source.record
    bits = flipped_bits(record.crc32 or 0, crc32, record.nbytes)
    elements = {(bit // 8 - source.offset) // source.dtype.itemsize for bit in bits}
    inside = [one for one in elements if 0 <= one < source.nbytes // source.dtype.itemsize]
    return inside[0] if len(bits) == len(inside) == 1 else None


def _row_findings(slots: Sequence[Slot]) -> Iterator[Finding]:
    """Tables whose slots have other numbers of rows than their keys or weights."""
    weights = {slot.table: slot.tensor.rows for slot in slots if slot.name == "weight"}
    for slot in slots:
        rows, expected = slot.tensor.rows, None
        if slot.keys is not None:
            expected = slot.keys.rows
        elif slot.role == "state" and slot.name in PER_ROW:
            expected = weights.get(slot.table)
        if expected is None or rows == expected:
            continue
        # Of a table that is sharded by columns, TorchRec saves row-wise state once for each shard.
        if len(slot.tensor.size) == 1 and expected and rows % expected == 0 and slot.keys is None:
            continue
        message = f"it has {rows} rows, where the table has {expected}"
        count = abs(rows - expected)
        yield Finding(slot.table, slot.name, "other_rows", count, (), message, key=slot.tensor.key)
