"""Copies of files of ``torch.save`` and DCP in which some rows hold another value."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch

from torchrec_ext.checkpoint.audit.arrange import Slot
from torchrec_ext.checkpoint.audit.reading.archives import Archive
from torchrec_ext.checkpoint.audit.reading.dcp import DcpPart
from torchrec_ext.checkpoint.audit.reading.tensors import Part, Record, StoredTensor
from torchrec_ext.checkpoint.audit.restore import Restored
from torchrec_ext.errors import CheckpointError
from torchrec_ext.files import open_plain, sync

_PIECE_BYTES = 4 << 20


def write_rows(
    source: Path,
    copy: Path,
    changes: Iterable[tuple[Slot, torch.Tensor, float]],
    restored: Iterable[Restored],
    archive: Archive | None,
) -> None:
    """Copies a checkpoint, overwrites values in the copy, and renews the checksums.

    Args:
        source: the checkpoint, a file or a directory.
        copy: where to; a directory has to be there.
        changes: slots, their rows, int64 ``[n]``, and the value that these have then.
        restored: values that are put back.
        archive: the file's; None: a directory of DCP.

    Raises:
        CheckpointError: it cannot be copied, or the rows are in no order in which they can be overwritten.
        OSError: the disk is full or fails.
    """
    _copy(source, copy)
    touched: dict[tuple[Path, int], tuple[Archive, Record]] = {}

    def overwrite(slot: Slot, part: Part, elements: Iterable[int], values: torch.Tensor) -> None:
        stored = part.source()
        holder = part.archive() if isinstance(part, DcpPart) else archive
        if not isinstance(stored, StoredTensor) or not stored.contiguous or holder is None:
            raise CheckpointError(
                f"{slot.table} {slot.name}: it is not stored row by row, and cannot be repaired in a "
                "copy; load it, make it contiguous and save it again"
            )
        target = copy if source.is_file() else copy / stored.record.path.relative_to(source)
        content = values.to(stored.dtype).view(torch.uint8).numpy().tobytes()
        with target.open("r+b") as file:
            for element in elements:
                file.seek(stored.record.start + stored.offset + element * stored.dtype.itemsize)
                file.write(content)
        touched[target, stored.record.start] = holder, stored.record

    for slot, rows, value in changes:
        for part in slot.tensor.parts:
            count, columns = (part.sizes or (1,))[0], math.prod(part.sizes[1:])
            inside = rows[(rows >= part.first_row) & (rows < part.first_row + count)] - part.first_row
            if len(inside):
                overwrite(slot, part, (inside * columns).tolist(), torch.full((columns,), value))
    for one in restored:
        overwrite(one.slot, one.part, [one.element], torch.tensor([one.value]))
    for (target, _), (holder, record) in touched.items():
        holder.set_checksum(record, target)
    for target in {target for target, _ in touched}:
        sync(target)
    for original in reversed(_content(source)):
        shutil.copymode(original, copy / original.relative_to(source))


def _copy(source: Path, copy: Path) -> None:
    for file in _content(source):
        target = copy / file.relative_to(source)
        if file.is_dir():
            target.mkdir(mode=0o700)
            continue
        # Until it is done, nobody else reads what perhaps only its owner may read.
        descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open_plain(file, follow=True) as original, open(descriptor, "wb") as opened:
            shutil.copyfileobj(original, opened, _PIECE_BYTES)


def _content(source: Path) -> list[Path]:
    """All files and directories of a checkpoint, or the file that it is."""
    if not source.is_dir():
        return [source]
    content = sorted(source.rglob("*"))
    for file in content:
        # A link would have the copy hold, or worse, change what is elsewhere.
        if not file.resolve().is_relative_to(source.resolve()):
            raise CheckpointError(f"{file} leads out of the checkpoint: it was not copied")
    return content
