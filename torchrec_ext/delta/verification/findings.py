"""What ``verify_log`` reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

Check = Literal[
    "manifest",
    "chain",
    "file",
    "schema",
    "row-group",
    "table",
    "column",
    "op",
    "embedding",
    "finite",
    "key",
    "routing",
    "count",
    "fallback",
    "supersedes",
    "occupancy",
    "base",
]
"""What was looked at when a fault was found."""

CHECKS: tuple[Check, ...] = get_args(Check)

_EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        check: what was looked at.
        where: the dump, or the dump and the file: ``step_000000000010.g0000: manifest.json``.
        message: what is wrong.
    """

    check: Check
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.check}]"


@dataclass(frozen=True)
class Verification:
    """What became of a verification.

    Attributes:
        directory: the log.
        dumps: committed dumps looked at, superseded ones and bases too.
        files: Parquet files read.
        rows: rows read.
        nbytes: bytes read.
        findings: what is wrong, in the order of the dumps.
    """

    directory: str
    dumps: int
    files: int
    rows: int
    nbytes: int
    findings: tuple[Finding, ...]

    @property
    def clean(self) -> bool:
        """Whether there is something, and nothing is wrong with it."""
        return self.dumps > 0 and not self.findings


@dataclass
class Findings:
    """Collects faults; those of one kind in one file become one finding."""

    _found: dict[Finding, None] = field(default_factory=dict)
    _keys: dict[tuple[Check, str, str], list[NDArray[np.int64]]] = field(default_factory=dict)

    @property
    def found(self) -> tuple[Finding, ...]:
        """The faults so far, each once."""
        return tuple(self._found)

    def add(self, check: Check, where: str, message: str) -> None:
        """Takes note of a fault."""
        self._found[Finding(check, where, message)] = None

    def add_keys(self, check: Check, where: str, what: str, keys: NDArray[np.int64]) -> None:
        """Takes note of faulty rows by their keys, int64 ``[n]``; of none if there are none."""
        if len(keys):
            self._keys.setdefault((check, where, what), []).append(keys)

    def close(self, where: str) -> None:
        """Sums up the rows of a file, or of a dump."""
        for check, place, what in [kind for kind in self._keys if kind[1] == where]:
            keys = np.concatenate(self._keys.pop((check, place, what)))
            named = ", ".join(str(key) for key in keys[:_EXAMPLES])
            more = ", ..." if len(keys) > _EXAMPLES else ""
            self.add(check, place, f"{what}: {len(keys)} row{'s' * (len(keys) > 1)}, key {named}{more}")
