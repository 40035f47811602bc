"""The inverse of a collision map: which raw id owns each row of a shard."""

from __future__ import annotations

import torch
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_ext.errors import CorruptTableError
from torchrec_ext.zch import internals
from torchrec_ext.zch.routing import NO_ID


class RowBinding:
    """Which raw id owns each local row of one ZCH shard.

    TorchRec maps a raw id to a slot and a slot to a row; this keeps the way back. It is brought up
    to date right after an eviction, where TorchRec has just sorted the whole map, so that a dump
    need not pass over the table. Nothing here waits for the device except ``catch_up`` of a map that
    was changed from outside, ``check`` and ``sentinel_row``.

    Args:
        mcm: this rank's managed-collision module, of ``n`` rows.

    Attributes:
        raw_ids: int64 ``[n]`` on the module's device; ``NO_ID`` where a row belongs to nobody.
    """

    def __init__(self, mcm: MCHManagedCollisionModule) -> None:
        self._mcm = mcm
        self._first_row = internals.first_row(mcm)
        sorted_ids, _ = internals.slots(mcm)
        self.num_rows = sorted_ids.numel()
        # One place more than there are rows: where slots that name a row outside the shard write to.
        self._raw_ids = sorted_ids.new_full((self.num_rows + 1,), NO_ID)
        self.raw_ids = self._raw_ids[:-1]
        self.refresh()

    def refresh(self) -> None:
        """Inverts the collision map anew."""
        self._seen = self._map_version()
        sorted_ids, rows = internals.slots(self._mcm)
        local = rows - self._first_row
        local.masked_fill_((local < 0) | (local >= self.num_rows), self.num_rows)
        self._raw_ids.index_copy_(0, local, sorted_ids)
        named = torch.zeros(self.num_rows + 1, dtype=torch.bool, device=rows.device)
        named.index_fill_(0, local, True)
        # As many slots as rows: every row is named if and only if none is named twice or outside.
        ordered = (sorted_ids[1:] > sorted_ids[:-1]) | (sorted_ids[1:] == NO_ID)
        self._intact = named[:-1].all() & ordered.all()

    def catch_up(self, *, force: bool = False) -> torch.Tensor | None:
        """Notices a map that was changed by anything but an eviction, such as ``load_state_dict``.

        Args:
            force: look even if PyTorch counts no write to the map.

        Returns:
            The local rows that may have another owner or vector, int64: all, if PyTorch counted a write,
            since what loads a map loads the rows too. None if the map is as it was seen last.
        """
        written = self._map_version() != self._seen
        if not written and not force:
            return None
        before = self.raw_ids.clone()
        self.refresh()
        if written:
            return torch.arange(self.num_rows, device=self.raw_ids.device)
        return (before != self.raw_ids).nonzero().flatten()

    def check(self, table_fqn: str, rank: int) -> None:
        """Raises ``CorruptTableError`` unless the map names each row of the shard, and each id, once."""
        if bool(self._intact):
            return
        sorted_ids, rows = (tensor.cpu() for tensor in internals.slots(self._mcm))
        first, last = self._first_row, self._first_row + self.num_rows - 1
        faults = []
        outside = ((rows < first) | (rows > last)).nonzero().flatten()
        if outside.numel():
            faults.append(
                f"{outside.numel()} of {self.num_rows} slots name a row outside the shard "
                f"[{first}, {last}]: {_examples(outside, sorted_ids, rows)}"
            )
        values, counts = rows.unique(return_counts=True)
        twice = torch.isin(rows, values[counts > 1]).nonzero().flatten()
        if twice.numel():
            faults.append(
                f"{int((counts > 1).sum())} rows are named by more than one slot: "
                f"{_examples(twice, sorted_ids, rows)}"
            )
        repeated = ((sorted_ids[1:] <= sorted_ids[:-1]) & (sorted_ids[1:] != NO_ID)).nonzero().flatten()
        if repeated.numel():
            faults.append(
                f"{repeated.numel()} slots repeat an id or are out of order: "
                f"{_examples(repeated + 1, sorted_ids, rows)}"
            )
        raise CorruptTableError(f"{table_fqn} on rank {rank}: {'; '.join(faults)}")

    def holds(self, ids: torch.Tensor) -> torch.Tensor:
        """Whether each id owns a row of this shard now, bool ``[n]`` for int64 ids ``[n]``."""
        sorted_ids, _ = internals.slots(self._mcm)
        found = torch.searchsorted(sorted_ids, ids).clamp_(max=self.num_rows - 1)
        return sorted_ids[found] == ids

    def sentinel_row(self) -> int:
        """The local row with which TorchRec answers the id ``NO_ID`` (2^63 - 1).

        TorchRec marks empty slots with that id, so a lookup of it finds the first empty slot.
        """
        sorted_ids, rows = internals.slots(self._mcm)
        slot = torch.searchsorted(sorted_ids[:-1], torch.full_like(sorted_ids[:1], NO_ID))
        return int(rows[slot]) - self._first_row

    def _map_version(self) -> tuple[int, ...]:
        # PyTorch counts in-place writes to a tensor; reading the counter costs no pass and no sync.
        return tuple(
            number for tensor in internals.slots(self._mcm) for number in (tensor.data_ptr(), tensor._version)
        )


def _examples(slots: torch.Tensor, sorted_ids: torch.Tensor, rows: torch.Tensor) -> str:
    shown = [
        f"slot {slot} (id {'none' if sorted_ids[slot] == NO_ID else int(sorted_ids[slot])}) "
        f"-> row {int(rows[slot])}"
        for slot in slots[:3].tolist()
    ]
    return ", ".join(shown) + (", ..." if slots.numel() > 3 else "")
