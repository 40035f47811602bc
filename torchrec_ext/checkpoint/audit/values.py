"""Which values of a tensor cannot be right, whatever the model: counted piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from torchrec_ext.checkpoint.audit.report import EXAMPLES, Kind

MAX_MAGNITUDE = 2.0**32
"""Larger weights and gradients are absurd: float32 has steps of 512 there. Squares are above its square."""

# Types that have neither NaN nor infinity; and torch does not compute with them.
_FINITE = frozenset({getattr(torch, "float4_e2m1fn_x2", None)})

OnRows = Callable[[Kind, torch.Tensor], None]


@dataclass
class Wrong:
    """Values of one kind: how many, and the rows and values of some."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class ValueChecks:
    """Counts what cannot be right in one tensor.

    Args:
        limit: magnitudes above it are absurd.
        not_negative: whether negative values are wrong.
        on_rows: is told the rows of wrong values, int64 ``[n]``.
    """

    def __init__(self, limit: float, not_negative: bool, on_rows: OnRows | None = None) -> None:
        self.limit, self._not_negative, self._on_rows = limit, not_negative, on_rows
        self.wrong: dict[Kind, Wrong] = {}
        self.largest: float | None = None

    def add(self, first_row: int, values: torch.Tensor) -> None:
        """Looks at rows ``[n, ...]``, of which ``first_row`` is the first one's number."""
        if values.is_complex():
            values = torch.view_as_real(values)
        if not values.is_floating_point() or not values.numel() or values.dtype in _FINITE:
            return
        if values.dtype.itemsize < 4:
            values = values.float()
        rows = values.reshape(len(values), -1)
        low, high = (float(bound) for bound in torch.aminmax(rows))
        largest = max(abs(low), abs(high))
        # NaN compares as false.
        if largest <= self.limit and (low >= 0 or not self._not_negative):
            self._raise_largest(largest)
            return
        finite = rows.isfinite()
        magnitudes = rows.abs().masked_fill_(~finite, 0.0)
        self._raise_largest(float(magnitudes.max()))
        self._count("non_finite", ~finite, first_row, rows)
        absurd = magnitudes > self.limit
        self._count("absurd", absurd, first_row, rows)
        if self._not_negative:
            self._count("negative", (rows < 0) & finite & ~absurd, first_row, rows)

    def _raise_largest(self, largest: float) -> None:
        self.largest = largest if self.largest is None else max(self.largest, largest)

    def _count(self, kind: Kind, wrong: torch.Tensor, first_row: int, rows: torch.Tensor) -> None:
        of_rows = wrong.any(1).nonzero().flatten()
        if not len(of_rows):
            return
        found = self.wrong.setdefault(kind, Wrong())
        found.count += int(wrong.sum())
        for row in of_rows[: EXAMPLES - len(found.rows)].tolist():
            if first_row + row not in found.rows:
                found.rows.append(first_row + row)
                found.values.append(float(rows[row][wrong[row]][0]))
        if self._on_rows is not None:
            self._on_rows(kind, of_rows + first_row)
