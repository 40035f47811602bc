"""``SavedSnapshot``: reads saved snapshots. This module defines their format; ``saving`` writes it.

A saved snapshot is one directory: an array per ``.npy`` file, and ``snapshot.json``, which describes them.
That file is written last and its presence is the commit: files that it does not name mean nothing. A
snapshot that takes another one's place in a directory has files of other names, so that the old one stays
whole until the new one is. The arrays of a table whose weight has ``n`` keys:

====================  ======================  =======================================================
``keys``              int64 ``[n]``           of the weight and all else; not of slots with their own
``weight``            float32 ``[n, dim]``
``versions``          int64 ``[n]``
``slots.<slot>``      float32 ``[n, 1]`` or   one for each kind of optimizer state
                      ``[n, dim]``
``slot_keys.<slot>``  int64 ``[k]``           of a slot, which is ``[k, ...]`` then, whose keys differ
``frequencies``       int64 ``[n]``           this one and those below: dynamic tables only
``last_used``         int64 ``[n]``
``candidates``        int64 ``[m]``
``candidate_counts``  int64 ``[m]``
====================  ======================  =======================================================

See ``TableSnapshot`` for what they mean. Nothing in a saved snapshot can name code to run, nor a file
outside of the directory.
"""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.errors import CheckpointError
from torchrec_ext.files import json_crc32, open_plain
from torchrec_ext.store.optimizers import StoreOptimizer, optimizer_from_json
from torchrec_ext.store.tables import Table, table_from_json

FORMAT = "torchrec_ext.snapshot"
FORMAT_VERSION = 1
MANIFEST_NAME = "snapshot.json"
FILE_NAME = re.compile(r"[0-9a-f]{8}\.\d+\.[A-Za-z0-9_.]+\.npy")
WEIGHT = "weight"

_HEADER_BYTES = 1 << 12  # those that we write are shorter
_OF_KEYS = ("keys", "versions", "frequencies", "last_used")
_OF_CANDIDATES = ("candidates", "candidate_counts")


def slot_name(slot: str) -> str:
    """The name of the array of a slot's values."""
    return f"slots.{slot}"


def slot_keys_name(slot: str) -> str:
    """The name of the array of a slot's keys, if they are not the weight's."""
    return f"slot_keys.{slot}"


@dataclass(frozen=True)
class ArrayFile:
    """One array of a saved table.

    Attributes:
        file: the name of its ``.npy`` file.
        shape: its shape.
        dtype: ``int64`` or ``float32``.
        nbytes: the file's size in bytes.
        crc32: CRC-32 of the file's bytes.
    """

    file: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class SavedTable:
    """A table of a saved snapshot. Nothing of its arrays is read until it is used.

    Attributes:
        directory: where its files are.
        table: what it is.
        optimizer: the optimizer whose state was saved.
        files: its arrays by name.
    """

    directory: Path
    table: Table
    optimizer: StoreOptimizer
    files: dict[str, ArrayFile]

    @property
    def slots(self) -> tuple[str, ...]:
        """The kinds of optimizer state that were saved."""
        return tuple(name.removeprefix("slots.") for name in self.files if name.startswith("slots."))

    def keys(self, slot: str = WEIGHT) -> NDArray[np.int64]:
        """The keys of the weight, or of a slot: int64 ``[n]``, mapped, read-only; see ``array``."""
        own = slot_keys_name(slot)
        return self.array(own if own in self.files else "keys")

    def values(self, slot: str = WEIGHT) -> NDArray[np.float32]:
        """The weight, or a slot, of ``keys(slot)``: float32 ``[n, columns]``, mapped, read-only."""
        return self.array(WEIGHT if slot == WEIGHT else slot_name(slot))

    def array(self, name: str, *, copy_on_write: bool = False) -> NDArray[Any]:
        """Maps an array.

        Args:
            name: one of ``files``.
            copy_on_write: whether it may be written to, which does not change the file.

        Raises:
            CheckpointError: its file is missing or was changed, as far as that shows without reading it.
        """
        return self.parsed(name, self.mapped(name, copy_on_write=copy_on_write))

    def verify(self) -> None:
        """Reads all files and compares their checksums.

        Raises:
            CheckpointError: a file is missing or is not what was saved; names it and the table.
        """
        for name in self.files:
            content = self.mapped(name)
            self.parsed(name, content)
            self.compare(name, content)

    def mapped(self, name: str, *, copy_on_write: bool = False) -> NDArray[np.uint8]:
        """Maps the file of an array, which is there as long as it is mapped, whoever removes it.

        Raises:
            CheckpointError: it is missing, has another size, or is no file.
        """
        file = self.files[name]
        try:
            with open_plain(self.directory / file.file) as opened:
                nbytes = os.fstat(opened.fileno()).st_size
                if nbytes != file.nbytes:
                    raise self._damaged(
                        name, f"has {nbytes} bytes, not {file.nbytes}: it was cut short or changed"
                    )
                return np.asarray(np.memmap(opened, np.uint8, "c" if copy_on_write else "r"))
        except FileNotFoundError:
            raise self._damaged(name, "is missing") from None
        except (OSError, ValueError) as error:  # NumPy's of an empty file
            raise self._damaged(name, f"cannot be read: {error}") from error

    def parsed(self, name: str, content: NDArray[np.uint8]) -> NDArray[Any]:
        """The array of which a file has this content; not copied.

        Raises:
            CheckpointError: it is another one.
        """
        file = self.files[name]
        header = io.BytesIO(content[:_HEADER_BYTES].tobytes())
        try:
            if np.lib.format.read_magic(header) != (1, 0):
                raise ValueError("it is of another version")
            shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(header)
            values = content[header.tell() :].view(dtype).reshape(shape, order="F" if is_fortran else "C")
        except Exception as error:  # NumPy's parser of damaged headers raises what it meets
            raise self._damaged(name, f"cannot be read: {error}") from error
        if values.shape != file.shape or values.dtype != disk_dtype(file.dtype):
            raise self._damaged(
                name, f"holds {values.dtype} {list(values.shape)}, not {file.dtype} {list(file.shape)}"
            )
        return values

    def compare(self, name: str, content: NDArray[np.uint8]) -> None:
        """Reads the content of a file, and compares its checksum.

        Raises:
            CheckpointError: it is not what was saved.
        """
        if zlib.crc32(content.data) != self.files[name].crc32:
            raise self._damaged(name, "is damaged: its checksum is not that of what was saved")

    def _damaged(self, name: str, what: str) -> CheckpointError:
        path = self.directory / self.files[name].file
        return CheckpointError(f"{path} ({name} of table {self.table.name!r}) {what}")


class SavedSnapshot:
    """A saved snapshot, of which only the description was read.

    Args:
        path: the directory.

    Attributes:
        path: the directory.
        clock: the store's clock at that moment.
        step: its step.
        tables: by name.

    Raises:
        CheckpointError: there is none, its saving was not finished, it is of a newer format, or its
            description is damaged. The files of the arrays were not looked at; see ``verify``.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._content = content = _read_manifest(self.path)
        try:
            self.clock, self.step = _counts(content["clock"], content["step"])
            tables = [_table(self.path, described) for described in content["tables"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{self.path / MANIFEST_NAME} is damaged: {error}") from error
        self.tables = {table.table.name: table for table in tables}
        if len(self.tables) < len(tables):
            raise CheckpointError(f"{self.path / MANIFEST_NAME} is damaged: it describes a table twice")

    def verify(self) -> None:
        """Reads all files and compares their checksums.

        Raises:
            CheckpointError: a file is missing or is not what was saved; names it and the table.
        """
        for table in self.tables.values():
            table.verify()

    def is_same(self, other: SavedSnapshot) -> bool:
        """Whether another one is this, and none that took its place."""
        return self._content == other._content


def is_saved_snapshot(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a saved snapshot, be it a damaged one."""
    return (Path(path) / MANIFEST_NAME).is_file()


def check_arrays(
    table: Table, optimizer: StoreOptimizer, arrays: Mapping[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Checks that a table's arrays fit together.

    Args:
        table: the table.
        optimizer: whose state it is.
        arrays: the dtype and the shape of each array, by name.

    Raises:
        ValueError: they do not; names the table and the array.
    """
    columns = {slot.name: slot.columns(table.dim) for slot in optimizer.slots}
    for name in ("keys", WEIGHT):
        if name not in arrays:
            raise ValueError(f"table {table.name!r}: the snapshot has no {name}")
    lengths = {name: shape[0] if shape else 0 for name, (_, shape) in arrays.items()}
    for name, (dtype, shape) in arrays.items():
        kind, _, slot = name.partition(".")
        count = lengths["keys"]
        expected: tuple[str, list[int]]
        if name == WEIGHT:
            expected = "float32", [count, table.dim]
        elif name in _OF_KEYS:
            expected = "int64", [count]
        elif name in _OF_CANDIDATES:
            expected = "int64", [lengths.get("candidates", 0)]
        elif kind in ("slots", "slot_keys") and slot in columns:
            count = lengths.get(slot_keys_name(slot), count)
            expected = ("float32", [count, columns[slot]]) if kind == "slots" else ("int64", [count])
        else:
            raise ValueError(f"table {table.name!r}: {name!r} is nothing that {optimizer} keeps")
        if (dtype, list(shape)) != expected:
            raise ValueError(
                f"table {table.name!r}: {name} must be {expected[0]} {expected[1]}, as there are {count} "
                f"keys, not {dtype} {list(shape)}"
            )


def disk_dtype(name: str) -> np.dtype[Any]:
    """A dtype as it is in files."""
    return np.dtype(name).newbyteorder("<")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_NAME
    try:
        with open_plain(file) as opened:
            content = json.loads(opened.readall())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            f"{path} is not a saved snapshot, or its saving was not finished: it has no {MANIFEST_NAME}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CheckpointError(f"{file} does not describe a snapshot of a store")
    if content.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{file} is of format version {content.get('format_version')!r}, this torchrec_ext reads "
            f"{FORMAT_VERSION}; use the version that wrote it, or a newer one"
        )
    if content.pop("crc32", None) != json_crc32(content):
        raise CheckpointError(f"{file} is damaged: its checksum is not its own")
    return content


def _table(path: Path, described: dict[str, Any]) -> SavedTable:
    table = table_from_json(described["table"])
    optimizer = optimizer_from_json(described["optimizer"])
    files = {
        name: ArrayFile(
            array["file"], _counts(*array["shape"]), array["dtype"], *_counts(array["nbytes"], array["crc32"])
        )
        for name, array in described["arrays"].items()
    }
    # Only names that we would have given: a description cannot send a reader anywhere else.
    for strange in (array.file for array in files.values() if not FILE_NAME.fullmatch(array.file)):
        raise ValueError(f"table {table.name!r}: {strange!r} is not the name of a snapshot's file")
    check_arrays(table, optimizer, {name: (array.dtype, array.shape) for name, array in files.items()})
    return SavedTable(path, table, optimizer, files)


def _counts(*values: Any) -> tuple[int, ...]:
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{value!r} is no number of anything")
    return values
