"""Values that a checksum can bring back: of a record in which one value is visibly wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchrec_ext.checkpoint.audit.arrange import Slot
from torchrec_ext.checkpoint.audit.reading.crc import flipped_word
from torchrec_ext.checkpoint.audit.reading.tensors import DamagedPart, Part, StoredTensor
from torchrec_ext.checkpoint.audit.values import ValueChecks

# A value that is brought back is plausible if it is not much larger than the others.
_LARGER = 4.0
_ROWS_TRIED = 64


@dataclass(frozen=True)
class Restored:
    """A value as it was saved.

    Attributes:
        slot: its slot.
        part: the part it is in.
        row: its row in the whole tensor.
        element: its number in the part.
        value: what it was.
    """

    slot: Slot
    part: Part
    row: int
    element: int
    value: float


def restored_values(slot: Slot, rows: torch.Tensor, limit: float) -> Iterator[Restored | None]:
    """For each part of a slot of which the checksum differs, the value that explains it.

    None where there is no such: more than one value is visibly wrong, or none, or what explains the checksum
    is no likely value.

    Args:
        slot: the slot.
        rows: its rows with wrong values, int64 ``[n]``.
        limit: magnitudes above it are wrong.
    """
    for part in slot.tensor.parts:
        source = part.source()
        if not isinstance(source, StoredTensor) or source.record.crc32 is None:
            continue
        crc32 = source.record.checksum()
        if crc32 != source.record.crc32:
            yield _restored(slot, part, source, crc32, rows, limit)


def _restored(
    slot: Slot, part: Part, source: StoredTensor, crc32: int, rows: torch.Tensor, limit: float
) -> Restored | None:
    if not source.contiguous or source.dtype != torch.float32:
        return None
    columns = source.row_bytes // source.dtype.itemsize
    inside = rows[(rows >= part.first_row) & (rows < part.first_row + (part.sizes or (1,))[0])]
    wrong = []
    for row in inside[:_ROWS_TRIED].tolist():
        first = (row - part.first_row) * columns
        wrong += [one for one in range(first, first + columns) if not _fits(slot, source.at(one), limit)]
    if len(wrong) != 1 or len(inside) > _ROWS_TRIED:
        return None
    (element,) = wrong
    at = source.offset + element * source.dtype.itemsize
    word = flipped_word(source.record.crc32 or 0, crc32, source.record.nbytes, at)
    bits = int.from_bytes(source.at(element).view(torch.uint8).numpy().tobytes(), "little") ^ word
    value = torch.frombuffer(bytearray(bits.to_bytes(4, "little")), dtype=torch.float32)
    if not _fits(slot, value, min(limit, _LARGER * _largest(part, limit))):
        return None
    return Restored(slot, part, part.first_row + element // columns, element, float(value))


def _fits(slot: Slot, value: torch.Tensor, limit: float) -> bool:
    checks = ValueChecks(limit, slot.not_negative)
    checks.add(0, value)
    return not checks.wrong


def _largest(part: Part, limit: float) -> float:
    """The largest magnitude among the values of a part that are not wrong."""
    largest = 0.0
    with contextlib.suppress(DamagedPart):  # that its checksum differs is known
        for _, values in part.pieces():
            magnitudes = values.abs()
            likely = magnitudes[magnitudes <= limit]
            if likely.numel():
                largest = max(largest, float(likely.max()))
    return largest
