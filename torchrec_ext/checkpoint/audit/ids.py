"""Ids and keys of tables, and the rows they name: each once, and in order where readers rely on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.checkpoint.audit.arrange import Slot
from torchrec_ext.checkpoint.audit.reading.tensors import DamagedPart, Part, TensorEntry
from torchrec_ext.checkpoint.audit.report import EXAMPLES, Finding
from torchrec_ext.zch.routing import NO_ID

Ints = NDArray[np.int64]


def values_of(parts: Sequence[Part]) -> Ints:
    """Whole numbers, int64 ``[n]``. What cannot be read is left out; who audits the tensor tells of it."""
    read = []
    for part in parts:
        try:
            read += [values.reshape(-1).numpy().astype(np.int64) for _, values in part.pieces()]
        except DamagedPart:
            continue
    return np.concatenate(read) if read else np.empty(0, np.int64)


def values_at(entry: TensorEntry, rows: Sequence[int]) -> list[int]:
    """The whole numbers of some rows."""
    found = {}
    for part in entry.parts:
        try:
            for start, values in part.pieces():
                found.update(
                    {row: int(values[row - start]) for row in rows if start <= row < start + len(values)}
                )
        except DamagedPart:
            continue
    return [found.get(row, row) for row in rows]


def id_findings(slot: Slot) -> Iterator[Finding]:
    """What is wrong with a tensor of ids, of keys, or of the rows of ids.

    Reads one shard of it at a time, which takes 16 bytes a row.
    """
    groups = [[part] for part in slot.tensor.parts] if slot.tensor.sharded else [slot.tensor.parts]
    for parts in groups:
        ids = values_of(parts)
        if slot.role == "ids":
            # TorchRec looks them up by bisection; an unsharded tensor may be several shards' in a row.
            yield from _sorted_findings(slot, ids[ids != NO_ID], strict=slot.tensor.sharded)
        elif slot.role == "keys" and slot.in_use is not None:
            in_use = [part for part in slot.in_use.parts if part.offsets == parts[0].offsets]
            used = values_of(in_use if slot.tensor.sharded else slot.in_use.parts).astype(bool)
            yield from _sorted_findings(slot, ids[used] if len(used) == len(ids) else ids, strict=False)
        elif slot.role == "keys":
            yield from _sorted_findings(slot, ids, strict=False)
        else:
            yield from _row_findings(slot, ids, parts)


def _sorted_findings(slot: Slot, ids: Ints, *, strict: bool) -> Iterator[Finding]:
    behind = np.flatnonzero(ids[1:] < ids[:-1]) + 1
    if behind.size:
        if strict:
            yield _finding(slot, "unordered", ids[behind], "ids are out of order: lookups do not find all")
        ids = np.sort(ids)
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if repeated.size:
        yield _finding(slot, "repeated", repeated, "ids are there more than once")


def _row_findings(slot: Slot, rows: Ints, parts: Sequence[Part]) -> Iterator[Finding]:
    rows = np.sort(rows)
    repeated = rows[1:][rows[1:] == rows[:-1]]
    if repeated.size:
        yield _finding(slot, "repeated", repeated, "rows belong to more than one id", keyed=False)
    if slot.tensor.sharded:
        first = parts[0].first_row
        outside = rows[(rows < first) | (rows >= first + parts[0].sizes[0])]
        if outside.size:
            yield _finding(slot, "out_of_range", outside, "ids have rows of other shards", keyed=False)


def _finding(slot: Slot, kind: str, ids: Ints, what: str, *, keyed: bool = True) -> Finding:
    return Finding(
        slot.table,
        slot.name,
        kind,  # type: ignore[arg-type]
        int(ids.size),
        tuple(ids[:EXAMPLES].tolist()),
        f"{ids.size} {what}",
        keyed,
        key=slot.tensor.key,
    )
