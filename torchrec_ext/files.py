"""Files that are written once: on the disk when their writer says so, with a checksum of what was written."""

from __future__ import annotations

import io
import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO


class ChecksummedFile(io.RawIOBase):
    """A new file that counts its bytes, and their CRC-32, on the way.

    Attributes:
        nbytes: bytes written so far.
        crc32: CRC-32 of the bytes written so far.

    Raises:
        FileExistsError: it is there already.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self._raw: BinaryIO = path.open("xb", buffering=0)

    def writable(self) -> bool:
        """See ``io.IOBase``."""
        return True

    def write(self, data: object) -> int:
        """Writes all of it, unlike other raw files."""
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        written = 0
        while written < len(view):
            written += self._raw.write(view[written:])
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        return len(view)

    def tell(self) -> int:
        """See ``io.IOBase``."""
        return self.nbytes

    def sync(self) -> None:
        """Puts what was written on the disk."""
        os.fsync(self._raw.fileno())

    def close(self) -> None:
        """See ``io.IOBase``."""
        self._raw.close()
        super().close()


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    block = memoryview(bytearray(1 << 20))  # used again: fresh pages would take longer than the sum
    with path.open("rb", buffering=0) as file:
        crc = 0
        while count := file.readinto(block):
            crc = zlib.crc32(block[:count], crc)
    return crc


def json_crc32(content: dict[str, Any]) -> int:
    """CRC-32 of a JSON object, whatever its white space."""
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def sync(path: Path) -> None:
    """Puts a file, or a directory's entries, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
