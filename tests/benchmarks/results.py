"""What a benchmark returns, and how it is shown."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Measurement:
    """One quantity, measured several times.

    Attributes:
        name: what was measured.
        unit: ``"x"`` for a ratio.
        samples: in the order in which they were taken.
    """

    name: str
    unit: str
    samples: tuple[float, ...]

    @classmethod
    def ratio(cls, name: str, of: Sequence[float], to: Sequence[float]) -> Measurement:
        """Ratios of samples that were taken in pairs."""
        return cls(name, "x", tuple(a / b for a, b in zip(of, to, strict=True)))

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        low, median, high = np.quantile(self.samples, (0.25, 0.5, 0.75)).tolist()
        return low, median, high


@dataclass(frozen=True)
class Result:
    """A benchmark's outcome.

    Attributes:
        name: the benchmark's.
        title: one line on what it measures.
        measurements: in the order in which they are shown.
        settings: sizes and counts that tell what was run.
        notes: what a reader must know to read the numbers, a line each.
    """

    name: str
    title: str
    measurements: tuple[Measurement, ...]
    settings: dict[str, str | int | float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def table(self) -> str:
        """The measurements as aligned text."""
        rows = [["", "", "lower quartile", "median", "upper quartile", "samples"]]
        for one in self.measurements:
            numbers = [_significant(number) for number in one.quartiles]
            rows.append([one.name, one.unit, *numbers, str(len(one.samples))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{self.name}: {self.title}"]
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        for text in (settings, *self.notes):
            lines.extend(textwrap.wrap(text, 108, initial_indent="  ", subsequent_indent="    "))
        for row in rows:
            words = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            numbers = [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  " + "  ".join(words + numbers))
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON-like values."""
        return {
            "title": self.title,
            "settings": self.settings,
            "notes": self.notes,
            "measurements": [
                {
                    "name": one.name,
                    "unit": one.unit,
                    **dict(zip(("lower_quartile", "median", "upper_quartile"), one.quartiles, strict=True)),
                    "samples": len(one.samples),
                }
                for one in self.measurements
            ],
        }


def _significant(number: float) -> str:
    """Three significant digits, and never an exponent."""
    digits = max(0, 2 - int(np.floor(np.log10(abs(number))))) if number else 0
    return f"{number:,.{digits}f}"
