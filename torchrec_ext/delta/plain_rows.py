"""Rows of tables without managed collision, for the tracker: a flag per row, or a copy of what was dumped."""

from __future__ import annotations

import collections
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.distributed.embedding_kernel import BaseEmbedding

from torchrec_ext.delta.tracked import checked_rows, flagged
from torchrec_ext.plain import LookupWatch, PlainTable, TablePart
from torchrec_ext.plain.holders import KernelHolder, WeightHolder
from torchrec_ext.zch import internals

# Values compared, or copied, at a time: bounds the temporary tensors.
_CHUNK = 1 << 21


class PlainFollower:
    """Follows the tables of one module; see ``Follower``.

    All flags are in one tensor, so that a kernel's backward costs one scatter however many tables it has.
    Its first flag belongs to no row: to it goes what a kernel reports of tables that are not followed.

    Args:
        table: a table of the module.
        all_changed: whether to begin with all rows marked, else with none.
    """

    def __init__(self, table: PlainTable, *, all_changed: bool) -> None:
        self._module = table.module
        self._all_changed = all_changed
        self._parts: list[PartRows] = []
        self._kernels: dict[BaseEmbedding, LookupWatch] = {}
        self._spans: dict[BaseEmbedding, torch.Tensor] = {}
        self._slices: dict[BaseEmbedding, list[NDArray[np.bool_]]] = {}
        self._weights: dict[WeightHolder, list[torch.Tensor]] = {}
        self._num_flags = 1
        self._flags: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are, and the flags with them, also of parts of which nothing is here."""
        found = (weight.device for weights in self._weights.values() for weight in weights)
        return next(found, torch.device("cpu"))

    @property
    def flags(self) -> torch.Tensor:
        """The flags of all parts; their room is taken when they are used first."""
        if self._flags is None or len(self._flags) < self._num_flags:
            make = torch.ones if self._all_changed else torch.zeros
            self._flags = make(self._num_flags, dtype=torch.bool, device=self.device)
        return self._flags

    def rows_of(self, table: PlainTable) -> list[tuple[TablePart, PartRows]]:
        """The parts of a table that are on this rank; all tables are asked for before one is dumped."""
        found = []
        for part in table.parts():
            for local in part.local:
                self._weights[local.holder] = local.holder.weights()
            rows = PartRows(part, self._num_flags, self)
            if table.by_lookup:
                for local in part.local:
                    assert isinstance(local.holder, KernelHolder)
                    self._watch(local.holder.kernel, local.index, rows)
            self._num_flags += part.num_rows
            self._parts.append(rows)
            found.append((part, rows))
        return found

    def live(self, part: TablePart) -> tuple[torch.Tensor, ...]:
        """A part's weights as they are now, ``[num_rows, columns]`` side by side."""
        if not part.local:
            return (torch.empty(0, part.dim, dtype=part.dtype, device=self.device),)
        return tuple(self._weights[local.holder][local.index][local.rows] for local in part.local)

    def gradient_arrived(self, kernel: BaseEmbedding, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """What the watch reports; see ``LookupListener``."""
        if self.flags.device.type == "cpu" and self._flag_slices(kernel, rows, counts):
            return
        # With its size given, repeat_interleave need not wait for the device to tell it.
        starts, sizes = (
            torch.repeat_interleave(span, counts, output_size=len(rows)) for span in self._spans[kernel]
        )
        rows = rows.long()
        # FBGEMM looks up row 0 for an id that is out of its table.
        rows = torch.where((rows >= 0) & (rows < sizes), rows, 0).add_(starts)
        self.flags.index_fill_(0, rows, True)

    def _flag_slices(self, kernel: BaseEmbedding, rows: torch.Tensor, counts: torch.Tensor) -> bool:
        """Flags each feature's rows on CPU, without a copy of them; whether all are rows of their tables."""
        if kernel not in self._slices:
            flags = self.flags.numpy()
            self._slices[kernel] = [
                flags[start : start + size] for start, size in self._spans[kernel].T.tolist()
            ]
        numbers = rows.numpy()
        if len(numbers) and numbers.min() < 0:
            return False
        stop = 0
        try:
            for flags, count in zip(self._slices[kernel], counts.tolist(), strict=True):
                start, stop = stop, stop + count
                if len(flags):
                    flags[numbers[start:stop]] = True
        except IndexError:
            return False
        return True

    def catch_up(self) -> None:
        """See ``Follower``.

        Raises:
            RuntimeError: the module was sharded anew.
        """
        if self._kernels:
            present = set(internals.embedding_kernels(self._module))
            if not present.issuperset(self._kernels):
                raise RuntimeError(
                    f"the tables {', '.join(rows.part.fqn for rows in self._parts)} were sharded anew "
                    "since the DeltaDumper was constructed; construct a new one"
                )
        for holder in self._weights:
            holder.flush()
            self._weights[holder] = holder.weights()
        for rows in self._parts:
            rows.catch_up()

    def detach(self) -> None:
        """See ``Follower``."""
        for watch in self._kernels.values():
            watch.leave(self)
        self._kernels.clear()
        self._slices.clear()
        self._parts.clear()

    def _watch(self, kernel: BaseEmbedding, index: int, rows: PartRows) -> None:
        tables = kernel.config.embedding_tables
        if kernel not in self._kernels:
            self._kernels[kernel] = LookupWatch.join(kernel, self)
            # For each feature of the kernel: where its rows' flags start, and how many there are.
            num_features = sum(table.num_features() for table in tables)
            self._spans[kernel] = torch.zeros(2, num_features, dtype=torch.int64, device=rows.device)
        first = sum(table.num_features() for table in tables[:index])
        features = slice(first, first + tables[index].num_features())
        self._spans[kernel][0, features] = rows.start
        self._spans[kernel][1, features] = rows.part.num_rows


class PartRows:
    """The rows of one part of a table; see ``RowSource``.

    If training moves only rows that a gradient reached, a row has a flag, whatever the number of steps
    between dumps. Else the part is kept as it was dumped, and a dump compares it with what it is now.

    Args:
        part: the part.
        start: where its flags start.
        follower: its module's.
    """

    def __init__(self, part: TablePart, start: int, follower: PlainFollower) -> None:
        self.part = part
        self.start = start
        self._follower = follower
        self._lost: collections.deque[NDArray[np.int64]] = collections.deque()
        self._kept = None if part.by_lookup else [weight.clone() for weight in self.weights()]
        self._versions = self._written()

    @property
    def device(self) -> torch.device:
        """See ``RowSource``."""
        return self._follower.device

    @property
    def _flags(self) -> torch.Tensor:
        return self._follower.flags[self.start : self.start + self.part.num_rows]

    def catch_up(self) -> None:
        """Marks rows that were moved by anything but a backward, or lost with a dump that failed."""
        if self._kept is not None:
            self._compare()
        elif self._written() != self._versions:
            # What writes to weights by PyTorch's means, such as load_state_dict, may write all of them.
            self._flags.fill_(True)
            self._versions = self._written()
        while self._lost:
            self.mark(torch.from_numpy(self._lost.popleft()))

    def lose(self, keys: NDArray[np.int64]) -> None:
        """Takes note, on any thread, that keys which were read did not get into a dump."""
        self._lost.append(keys)

    def mark(self, rows: torch.Tensor | None) -> None:
        """See ``RowSource``."""
        if rows is None:
            self._flags.fill_(True)
        else:
            self._flags.index_fill_(0, checked_rows(self.part, rows).to(self.device), True)

    def marked(self) -> NDArray[np.int64]:
        """The rows that ``changed`` names, as keys."""
        return flagged(self._flags).cpu().numpy() + self.part.first_row

    def at_rest(self) -> AbstractContextManager[None]:
        """See ``RowSource``: nobody but the training thread changes rows, and it is dumping."""
        return nullcontext()

    def changed(self, since: int | None) -> tuple[torch.Tensor, int]:
        """See ``RowSource``; flags know of no moments."""
        if since is None:
            return torch.arange(self.part.num_rows, device=self.device), 0
        return flagged(self._flags), 0

    def settle(self, rows: torch.Tensor) -> None:
        """See ``RowSource``."""
        self._flags.index_fill_(0, rows, False)
        if self._kept is not None:
            step = max(1, _CHUNK // self.part.dim)
            for start in range(0, len(rows), step):
                some = rows[start : start + step]
                for kept, weight in zip(self._kept, self.weights(), strict=True):
                    kept.index_copy_(0, some, weight.index_select(0, some))

    def owe(self, rows: torch.Tensor) -> torch.Tensor:
        """See ``RowSource``."""
        self._flags.index_fill_(0, rows, True)
        return rows[:0]

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """See ``RowSource``."""
        keys = rows.cpu().numpy()
        if self.part.first_row:
            keys = keys + self.part.first_row
        return keys, np.ones(len(keys), np.bool_)

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See ``RowSource``: of all ranks, since each row is on one of them."""
        return self.part.is_row(keys)

    def locate(self, keys: NDArray[np.int64], rows: torch.Tensor, moment: int) -> torch.Tensor:
        """See ``RowSource``."""
        return rows

    def weights(self) -> tuple[torch.Tensor, ...]:
        """See ``RowSource``."""
        return self._follower.live(self.part)

    def fallback_rows(self) -> dict[int | None, int]:
        """See ``RowSource``: each id has its row."""
        return {}

    def _written(self) -> list[tuple[int, int]]:
        # PyTorch counts in-place writes to a tensor, but not those of FBGEMM's kernels.
        return [(weight.data_ptr(), weight._version) for weight in self.weights()]

    def _compare(self) -> None:
        assert self._kept is not None
        step = max(1, _CHUNK // self.part.dim)
        for kept, weight in zip(self._kept, self.weights(), strict=True):
            for start in range(0, self.part.num_rows, step):
                piece = slice(start, start + step)
                self._flags[piece] |= _differs(kept[piece], weight[piece])


def _differs(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Which rows differ in a bit, bool ``[n]``."""
    bits = torch.int32 if one.dtype == torch.float32 else torch.int16
    return (one.view(bits) != other.view(bits)).any(dim=1)
