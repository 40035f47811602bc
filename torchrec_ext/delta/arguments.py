"""Checks what a user hands to a dumper: a wrong argument is a ``ValueError`` that says what to do."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch


def check_arguments(
    interval_steps: int | None,
    interval_seconds: float | None,
    tables: Sequence[str] | None,
    first_dump: str,
    max_pending: int,
    max_pending_bytes: int | None,
) -> None:
    """Checks the arguments of ``DeltaDumper`` that can be checked without a model.

    Raises:
        ValueError: one is wrong; names it.
    """
    if (interval_steps is None) == (interval_seconds is None):
        raise ValueError(
            "give exactly one of interval_steps and interval_seconds, "
            f"not {'neither' if interval_steps is None else 'both'}"
        )
    if interval_steps is not None and not (is_integer(interval_steps) and interval_steps > 0):
        raise ValueError(f"interval_steps must be a positive integer, not {interval_steps!r}")
    if interval_seconds is not None and not (
        isinstance(interval_seconds, (int, float)) and 0 < interval_seconds < math.inf
    ):
        raise ValueError(f"interval_seconds must be a positive number, not {interval_seconds!r}")
    if isinstance(tables, str):
        raise ValueError(f"tables must be a sequence of patterns: tables=[{tables!r}]")
    if first_dump not in ("full", "delta"):
        raise ValueError(f"first_dump must be 'full' or 'delta', not {first_dump!r}")
    if not (is_integer(max_pending) and max_pending >= 1):
        raise ValueError(f"max_pending must be an integer, at least 1, not {max_pending!r}")
    if max_pending_bytes is not None and not (is_integer(max_pending_bytes) and max_pending_bytes > 0):
        raise ValueError(f"max_pending_bytes must be a positive integer, not {max_pending_bytes!r}")


def is_integer(value: object) -> bool:
    """Whether a value is an integer, NumPy's too, and no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def row_numbers(rows: torch.Tensor) -> torch.Tensor:
    """The rows that somebody names, int64 ``[n]``.

    Raises:
        ValueError: they are no integers.
    """
    rows = torch.as_tensor(rows)
    if rows.dtype == torch.bool or rows.is_floating_point() or rows.is_complex():
        raise ValueError(f"rows must be integers, the rows' numbers, not {rows.dtype}")
    return rows.flatten().long()


def json_object(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of ``metadata`` as JSON reads it back.

    Raises:
        ValueError: JSON cannot hold it.
    """
    try:
        if not isinstance(metadata, Mapping):
            raise TypeError(f"a {type(metadata).__name__} instead of a mapping")
        return json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be a JSON object: {error}") from error
