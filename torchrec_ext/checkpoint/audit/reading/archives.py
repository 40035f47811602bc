"""Files of ``torch.save``, and parts of files that are such: structure first, values where they lie.

``torch.save`` writes a ZIP archive without compression: ``data.pkl`` with the structure, and a record per
storage. Each has a CRC-32, which ``torch.load`` does not look at; it is zero everywhere if
``torch.serialization.set_crc32_options(False)`` was in force.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import torch

from torchrec_ext.checkpoint.audit.reading.tensors import DamagedPart, Record, StoredTensor
from torchrec_ext.errors import CheckpointError

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER = struct.Struct("<4s22x2H")  # signature, lengths of the name and of the extra field
_CENTRAL_HEADER = struct.Struct("<4s24x3H12x")  # signature, lengths of name, extra field and comment
_DESCRIPTOR_MAGIC = b"PK\x07\x08"
_ENCRYPTED = 0x61  # or patched, in the flags of a record
_DIRECTORY = 0x10  # in its attributes
_NUMBER = re.compile(r"[0-9]{1,20}")
_LOWEST_ADDRESS = 1 << 16
_SMALL = 1 << 20
_NAMED_CLASS = re.compile(r"(?:Unsupported (?:global|class)[^:]*: (?:GLOBAL )?|Can only[^`']*[`'])([\w.]+)")


class NotPlain(CheckpointError):
    """It holds objects other than tensors and plain values, which are not unpickled."""


class Archive:
    """An archive of ``torch.save``.

    Args:
        path: the file.
        start: where in it the archive begins.
        nbytes: its length; None: to the file's end.

    Raises:
        DamagedPart: it is missing, damaged, or its structure is not what was saved.
    """

    def __init__(self, path: Path, start: int = 0, nbytes: int | None = None) -> None:
        self.path, self.start = path, start
        try:
            self._nbytes = path.stat().st_size - start if nbytes is None else nbytes
        except OSError as error:
            raise DamagedPart("unreadable", f"{path}: {error.strerror}") from error
        with Record(path, start, self._nbytes, None).open() as file:
            view = _View(file, start, self._nbytes)
            try:
                self._read_directory(view)
            except DamagedPart:
                raise
            except Exception as error:  # of a damaged archive, zipfile raises anything
                raise self._damaged(f"is no archive of torch.save ({error})") from error

    def load(self) -> Any:
        """What was saved, with tensors on the meta device; ``stored`` finds their values.

        Raises:
            NotPlain: it holds objects other than tensors and plain values.
            DamagedPart: it cannot be read.
        """
        with Record(self.path, self.start, self._nbytes, None).open() as file:
            view = cast(IO[bytes], _View(file, self.start, self._nbytes))
            try:
                return _load(view, "meta")
            except pickle.UnpicklingError as error:
                raise _not_plain(str(self.path), error) from error
            except Exception as error:  # of a damaged archive, torch raises anything
                raise self._damaged(f"cannot be read ({type(error).__name__})") from error

    def stored(self, tensor: torch.Tensor) -> StoredTensor:
        """Where the values of a tensor that ``load`` gave are.

        Raises:
            DamagedPart: they are nowhere.
        """
        storage = tensor.untyped_storage()
        size, stride, dtype = tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype
        if not tensor.numel():
            return StoredTensor(Record(self.path, self.start, 0, None), dtype, size, stride, 0)
        # Read in torch 2.13 and 2.14; documented in its notes on torch.load and FakeTensorMode.
        start = getattr(storage, "_checkpoint_offset", None)
        record = None if start is None else self._records.get(start)
        if record is None or storage.nbytes() > record.nbytes:
            raise self._damaged("lacks the values of a tensor")
        return StoredTensor(record, dtype, size, stride, int(tensor.storage_offset()) * dtype.itemsize)

    def set_checksum(self, record: Record, path: Path) -> None:
        """Writes the checksum that a record has now into a copy of the file, where there is one."""
        if record.crc32 is None:
            return
        crc32 = struct.pack("<I", record.checksum(path))
        with path.open("r+b") as file:
            file.seek(self._checksums[record.start])
            file.write(crc32)
            file.seek(record.start + record.nbytes)
            if file.read(4) == _DESCRIPTOR_MAGIC:
                file.seek(record.start + record.nbytes + 4)
                file.write(crc32)

    def _read_directory(self, view: _View) -> None:
        """Finds the records and checks the small ones, of which the structure is made."""
        self._records: dict[int, Record] = {}
        self._checksums: dict[int, int] = {}
        with zipfile.ZipFile(view) as archive:
            infos, central = archive.infolist(), archive.start_dir
        _check_names([info.filename for info in infos])
        checked = any(info.CRC for info in infos if info.file_size)
        for info in infos:
            view.seek(central)
            magic, *lengths = _CENTRAL_HEADER.unpack(view.read(_CENTRAL_HEADER.size))
            view.seek(info.header_offset)
            local_magic, *local = _LOCAL_HEADER.unpack(view.read(_LOCAL_HEADER.size))
            # Others, torch.load takes for something else: of a directory it gives what was in memory.
            plain = not (info.compress_type or info.flag_bits & _ENCRYPTED or info.external_attr & _DIRECTORY)
            if (magic, local_magic) != (b"PK\x01\x02", ZIP_MAGIC) or not plain:
                raise ValueError(f"its record {info.filename} is not one that torch.save writes")
            start = info.header_offset + _LOCAL_HEADER.size + sum(local)
            if start + info.file_size > central and info.file_size:
                raise ValueError(f"its record {info.filename} is cut short")
            crc32 = info.CRC if checked else None
            record = Record(self.path, self.start + start, info.file_size, crc32)
            if "/data/" not in info.filename:
                self._check_structure(view, info, record, start)
            elif info.file_size:
                # torch counts from the archive's first byte.
                self._records[start] = record
                self._checksums[record.start] = self.start + central + 16
            central += _CENTRAL_HEADER.size + sum(lengths)

    def _check_structure(self, view: _View, info: zipfile.ZipInfo, record: Record, start: int) -> None:
        if info.file_size > _SMALL:
            record.verify()
            return
        view.seek(start)
        content = view.read(info.file_size)
        if record.crc32 is not None and zlib.crc32(content) != record.crc32:
            raise record.differs(zlib.crc32(content))
        if info.filename.endswith("/byteorder") and content.decode("ascii", "replace") != sys.byteorder:
            raise ValueError(f"it is {content!r}-endian")

    def _damaged(self, what: str) -> DamagedPart:
        where = f" at byte {self.start}" if self.start else ""
        return DamagedPart("unreadable", f"{self.path}{where} {what}")


def _check_names(names: Sequence[str]) -> None:
    """Raises a ``ValueError`` if torch would not find each storage's record by its name."""
    if len(set(names)) < len(names):
        raise ValueError("it has two records of one name")
    storages = [name.rpartition("/data/")[2] for name in names if "/data/" in name]
    if not all(map(_NUMBER.fullmatch, storages)):
        raise ValueError("it has records that torch.save does not write")
    numbers = sorted(map(int, storages))
    # Before torch 1.9 they were addresses.
    if numbers != list(range(len(numbers))) and numbers[0] < _LOWEST_ADDRESS:
        raise ValueError("its storages are not numbered from 0")


def load_in_memory(path: Path) -> Any:
    """What ``torch.save`` of old wrote, which is no archive, with its values.

    Raises:
        NotPlain: it holds objects other than tensors and plain values.
        CheckpointError: it is no file of ``torch.save``, or damaged.
    """
    try:
        return _load(path, "cpu")
    except pickle.UnpicklingError as error:
        if _NAMED_CLASS.search(str(error)):
            raise _not_plain(str(path), error) from error
        raise CheckpointError(f"{path} is no file of torch.save, or damaged") from error
    except Exception as error:  # of another file, torch raises anything
        raise CheckpointError(
            f"{path} is no file of torch.save, or damaged ({type(error).__name__})"
        ) from error


def _load(file: Path | IO[bytes], device: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other pickle protocols
        return torch.load(file, map_location=device, weights_only=True)


def _not_plain(what: str, error: Exception) -> NotPlain:
    # torch's own words advise to load it unsafely; they are in the error's cause.
    named = _NAMED_CLASS.search(str(error))
    return NotPlain(
        f"{what} holds objects other than tensors and plain values"
        f"{f' ({named[1]})' if named else ''}, which are not unpickled: that could run anything"
    )


class _View(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.RawIOBase | Any, start: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._start, self._nbytes = file, start, nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError("a position before the beginning")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = max(0, min(len(buffer), self._nbytes - self._at))
        self._file.seek(self._start + self._at)
        count: int = self._file.readinto(memoryview(buffer)[:wanted]) or 0
        self._at += count
        return count
