"""The errors this package raises, all importable without torch."""

from __future__ import annotations

from collections.abc import Sequence


class CorruptTableError(RuntimeError):
    """A table's state contradicts itself: a row outside its shard, a row named twice, a non-finite vector."""


class UnsupportedTableError(ValueError):
    """A table that cannot be followed exactly; the message says why and what to use instead."""


class TorchRecVersionError(RuntimeError):
    """TorchRec lacks a private attribute this package reads; names it and the versions it was read in."""


class DeltaLogError(RuntimeError):
    """A dump directory is broken; the message names the dump, the file and what is wrong with it."""


class MissingFileError(DeltaLogError):
    """A file of a dump is not there; the message names it."""


class FileSchemaError(DeltaLogError):
    """A file of a dump lacks columns of the format, or has them with another type.

    Args:
        file: what to call it.
        faults: what is wrong with its columns, one by one.
    """

    def __init__(self, file: str, faults: Sequence[str]) -> None:
        super().__init__(f"{file}: {'; '.join(faults)}")
        self.faults = tuple(faults)


class VacuumedError(DeltaLogError):
    """A dump was removed by ``vacuum``; the message says what holds its rows now."""


class DeltaDumpError(RuntimeError):
    """A dump was not committed, or nobody can tell; its rows go out with the next dump that succeeds."""


class FencedError(DeltaDumpError):
    """A dump was refused: a newer run has opened the log, and only the newest may write to it."""


class StoreError(RuntimeError):
    """A store cannot be opened or reached, or is damaged; the message names the file or the address."""


class TableFullError(RuntimeError):
    """A dynamic table has no row for a new key; the message names the table, its size and what to do."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged or does not fit; the message names what, and says what to do."""


class PublishError(RuntimeError):
    """A sink cannot take what it is given; the message says what to do, and never holds a credential."""


class SinkUnavailableError(PublishError):
    """A sink does not answer now; ``publish`` tries again for a while."""
