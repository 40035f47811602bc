"""Files as the package writes and reads them: with checksums, and nothing that is no file taken for one."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO


class Checksummed(io.RawIOBase):
    """Counts the bytes written to a file, and their CRC-32, on the way.

    Args:
        raw: an unbuffered file.

    Attributes:
        nbytes: bytes written so far.
        crc32: CRC-32 of the bytes written so far.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self._raw = raw

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

    def close(self) -> None:
        """See ``io.IOBase``."""
        self._raw.close()
        super().close()


class ChecksummedFile(Checksummed):
    """A new local file that counts its bytes, and their CRC-32, on the way.

    Raises:
        FileExistsError: it is there already.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("xb", buffering=0))

    def sync(self) -> None:
        """Puts what was written on the disk."""
        os.fsync(self._raw.fileno())


def open_plain(path: Path, *, follow: bool = False) -> io.FileIO:
    """Opens a file to read it, and nothing else: a pipe or a device could make a reader wait for ever.

    Args:
        path: the file.
        follow: whether it may be a symbolic link to one.

    Raises:
        OSError: it cannot be opened, or is no plain file.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link, which may lead anywhere", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return io.FileIO(descriptor, "rb")


def file_crc32(path: Path) -> int:
    """CRC-32 of a file's bytes."""
    with path.open("rb") as file:
        return stream_crc32(file)


def stream_crc32(file: BinaryIO) -> int:
    """CRC-32 of the bytes from where a file stands to its end."""
    crc = 0
    while block := file.read(1 << 20):
        crc = zlib.crc32(block, crc)
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
