"""Tensors of a checkpoint, wherever they are: their shape now, their values piece by piece later."""

from __future__ import annotations

import io
import math
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from torchrec_ext.errors import CheckpointError
from torchrec_ext.files import open_plain

PIECE_BYTES = 4 << 20


class DamagedPart(CheckpointError):
    """A part of a tensor is not what was saved.

    Attributes:
        kind: whether its values could be read.
        crc32: the checksum that it has instead of the one that was saved.
    """

    def __init__(
        self, kind: Literal["checksum", "unreadable"], message: str, crc32: int | None = None
    ) -> None:
        super().__init__(message)
        self.kind: Literal["checksum", "unreadable"] = kind
        self.crc32 = crc32


@dataclass
class Record:
    """Bytes of a file that have one checksum.

    Attributes:
        path: the file.
        start: where in it they begin.
        nbytes: how many there are.
        crc32: their CRC-32 when they were saved; None: nobody wrote it down.
        follow: whether the file may be a symbolic link.
    """

    path: Path
    start: int
    nbytes: int
    crc32: int | None
    follow: bool = True
    _found: int | None = field(default=None, init=False, repr=False)

    def open(self) -> io.FileIO:
        """The file, at the record's first byte.

        Raises:
            DamagedPart: it is missing, or too short.
        """
        try:
            file = open_plain(self.path, follow=self.follow)
            size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DamagedPart("unreadable", f"{self.path}: {error.strerror}") from error
        if size < self.start + self.nbytes:
            file.close()
            raise DamagedPart(
                "unreadable",
                f"{self.path} has {size} bytes, not {self.start + self.nbytes}: it was cut short",
            )
        file.seek(self.start)
        return file

    def checksum(self, path: Path | None = None) -> int:
        """The CRC-32 of the bytes as they are, here or at the same place of another file."""
        crc32, left = 0, self.nbytes
        buffer = memoryview(bytearray(min(PIECE_BYTES, left)))
        with Record(path or self.path, self.start, self.nbytes, None).open() as file:
            while left:
                part = buffer[: min(left, len(buffer))]
                fill(file, part, self.path)
                crc32 = zlib.crc32(part, crc32)
                left -= len(part)
        return crc32

    def verify(self) -> None:
        """Compares the checksum, once.

        Raises:
            DamagedPart: it differs.
        """
        if self.crc32 is not None and self._found is None:
            self._found = self.checksum()
        if self._found is not None and self._found != self.crc32:
            raise self.differs(self._found)

    def differs(self, crc32: int) -> DamagedPart:
        """The error that the checksum is not what was saved."""
        stop = self.start + self.nbytes
        return DamagedPart(
            "checksum", f"{self.path}: bytes {self.start} to {stop - 1} are not those that were saved", crc32
        )


def fill(file: io.FileIO, buffer: memoryview, path: Path) -> None:
    """Reads as many bytes as fit into a buffer.

    Raises:
        DamagedPart: there are fewer, or the disk fails.
    """
    done = 0
    while done < len(buffer):
        try:
            count = file.readinto(buffer[done:])
        except OSError as error:
            raise DamagedPart("unreadable", f"{path}: {error.strerror}") from error
        if not count:
            raise DamagedPart("unreadable", f"{path} ends in the middle of what was saved")
        done += count


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        record: the bytes of its storage.
        dtype: its data type.
        size: its shape.
        stride: in elements.
        offset: the first byte in the record.
    """

    record: Record
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @property
    def contiguous(self) -> bool:
        """Whether its values lie one after another in the order of its rows."""
        expected = 1
        for length, stride in zip(reversed(self.size), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.size) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The bytes of one row's values."""
        return math.prod(self.size[1:]) * self.dtype.itemsize

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Reads it: first row and values ``[n, ...]``, which the next piece overwrites.

        Raises:
            DamagedPart: it cannot be read; or, after all pieces, its checksum differs.
        """
        if not self.nbytes:
            return
        if not self.contiguous:
            yield from self._mapped()
            return
        # Else others lie in the same record, and it is compared once for all of them.
        whole = self.record.nbytes == self.offset + self.nbytes and self.offset <= PIECE_BYTES
        rows = self.size[0] if self.size else 1
        step = max(1, PIECE_BYTES // self.row_bytes)
        buffer = memoryview(bytearray(min(rows, step) * self.row_bytes))
        with self.record.open() as file:
            head = memoryview(bytearray(self.offset if whole else 0))
            fill(file, head, self.record.path)
            crc32 = zlib.crc32(head)
            file.seek(self.record.start + self.offset)
            for start in range(0, rows, step):
                count = min(step, rows - start)
                part = buffer[: count * self.row_bytes]
                fill(file, part, self.record.path)
                if whole and self.record.crc32 is not None:
                    crc32 = zlib.crc32(part, crc32)
                yield start, torch.frombuffer(part, dtype=self.dtype).view(count, *self.size[1:])
        if not whole:
            self.record.verify()
        elif self.record.crc32 is not None and crc32 != self.record.crc32:
            raise self.record.differs(crc32)

    def at(self, element: int) -> torch.Tensor:
        """One value of a contiguous tensor, ``[1]``, by its number."""
        buffer = memoryview(bytearray(self.dtype.itemsize))
        with self.record.open() as file:
            file.seek(self.record.start + self.offset + element * self.dtype.itemsize)
            fill(file, buffer, self.record.path)
        return torch.frombuffer(buffer, dtype=self.dtype)

    def _mapped(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Of a tensor that is laid out in another order: its storage is mapped."""
        with self.record.open() as file:
            # The system takes pages of it back as it needs to. Nothing writes to the copy.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        elements = torch.frombuffer(
            mapped, dtype=self.dtype, count=self._span(), offset=self.record.start + self.offset
        )
        yield from row_pieces(elements.as_strided(self.size, self.stride))
        self.record.verify()

    def _span(self) -> int:
        return 1 + sum((length - 1) * stride for length, stride in zip(self.size, self.stride, strict=True))


@dataclass(frozen=True)
class LiveTensor:
    """A tensor in memory."""

    tensor: torch.Tensor

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``StoredTensor.pieces``."""
        for start, values in row_pieces(self.tensor.detach()):
            yield start, values.cpu().resolve_conj().resolve_neg()


def row_pieces(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """A tensor piece by piece: first row and values ``[n, ...]``; of a wide row ``[1, ...]``, several.

    Values that several rows or columns share, as an expanded tensor's do, are there once: it may stand for
    more values than fit into memory.
    """
    if not tensor.numel():
        return
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    tensor = tensor.unsqueeze(0) if tensor.dim() == 0 else tensor
    row_bytes = tensor[:1].nbytes
    if row_bytes > PIECE_BYTES:
        for number, row in enumerate(tensor):
            for _, piece in row_pieces(row):
                yield number, piece.unsqueeze(0)
        return
    step = PIECE_BYTES // row_bytes
    for start in range(0, len(tensor), step):
        yield start, tensor[start : start + step]


@dataclass(frozen=True)
class Unreadable:
    """A part that is known not to be there."""

    message: str

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """See ``StoredTensor.pieces``."""
        raise DamagedPart("unreadable", self.message)


class Part:
    """A box of a tensor that lies in one place.

    Args:
        offsets: where in the tensor it begins, per dimension.
        sizes: its shape.
    """

    def __init__(
        self,
        offsets: Sequence[int],
        sizes: Sequence[int],
        source: StoredTensor | LiveTensor | Unreadable | None = None,
    ) -> None:
        self.offsets, self.sizes = tuple(offsets), tuple(sizes)
        self._source = source

    @property
    def first_row(self) -> int:
        """The row of the tensor that is its first."""
        return self.offsets[0] if self.offsets else 0

    def source(self) -> StoredTensor | LiveTensor | Unreadable:
        """Where its values are."""
        assert self._source is not None
        return self._source

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Reads it: the tensor's row and values, see ``StoredTensor.pieces``."""
        for start, values in self.source().pieces():
            yield self.first_row + start, values


@dataclass(frozen=True, eq=False)
class TensorEntry:
    """A tensor of a checkpoint.

    Attributes:
        key: its name in it, flattened.
        size: its whole shape.
        dtype: its data type.
        parts: what there is of it.
        sharded: whether a part is what one rank had.
    """

    key: str
    size: tuple[int, ...]
    dtype: torch.dtype
    parts: Sequence[Part]
    sharded: bool = False

    @property
    def rows(self) -> int:
        """Its length; 1 of a number."""
        return self.size[0] if self.size else 1

    @property
    def nbytes(self) -> int:
        """The bytes of what there is of it."""
        return sum(math.prod(part.sizes) for part in self.parts) * self.dtype.itemsize


@dataclass(frozen=True)
class NotRead:
    """An entry of a checkpoint that cannot be looked into, and why."""

    reason: str
    damaged: bool = False
