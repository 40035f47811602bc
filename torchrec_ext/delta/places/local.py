"""A directory of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq

from torchrec_ext.delta.places.place import NewFile, Place
from torchrec_ext.errors import DeltaLogError
from torchrec_ext.files import file_crc32, sync

T = TypeVar("T")
R = TypeVar("R")


class LocalPlace(Place):
    """A directory of this machine, or on a file system with POSIX semantics."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        """See ``Place``."""
        return self.path.is_dir()

    def make(self) -> None:
        """See ``Place``."""
        self.path.mkdir(parents=True, exist_ok=True)

    def entries(self, folder: str = "") -> list[str]:
        """See ``Place``."""
        try:
            return sorted(os.listdir(self.path / folder))
        except FileNotFoundError:
            return []

    def has(self, folder: str, name: str) -> bool:
        """See ``Place``."""
        return (self.path / folder / name).exists()

    def read(self, folder: str, name: str) -> bytes:
        """See ``Place``."""
        return self._inside(folder, name).read_bytes()

    def size(self, folder: str, name: str) -> int:
        """See ``Place``."""
        return self._inside(folder, name).stat().st_size

    def crc32(self, folder: str, name: str) -> int:
        """See ``Place``."""
        return file_crc32(self._inside(folder, name))

    def parquet(self, folder: str, name: str) -> contextlib.AbstractContextManager[pq.ParquetFile]:
        """See ``Place``."""
        opened: pq.ParquetFile = pq.ParquetFile(self._inside(folder, name), memory_map=True)
        return opened

    def make_folder(self, folder: str) -> None:
        """See ``Place``."""
        (self.path / folder).mkdir(exist_ok=True)

    def create(self, folder: str, name: str) -> NewFile:
        """See ``Place``."""
        return _LocalNewFile(self.path / folder / name)

    def put(self, folder: str, name: str, data: bytes) -> None:
        """See ``Place``."""
        path = self.path / folder / name
        hidden = _hidden(path)
        try:
            write_synced(hidden, data)
            hidden.replace(path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def remove(self, folder: str, name: str) -> None:
        """See ``Place``."""
        (self.path / folder / name).unlink(missing_ok=True)

    def remove_folder(self, folder: str) -> None:
        """See ``Place``."""
        shutil.rmtree(self.path / folder, ignore_errors=True)

    def prune(self, folder: str) -> None:
        """See ``Place``."""
        with contextlib.suppress(OSError):
            (self.path / folder).rmdir()

    def sync(self, folder: str = "") -> None:
        """See ``Place``."""
        sync(self.path / folder)

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See ``Place``."""
        return [work(item) for item in items]

    def _inside(self, folder: str, name: str) -> Path:
        for step in (path := self.path / folder, path := path / name):
            if step.is_symlink():
                raise DeltaLogError(f"{step}: a symbolic link; a dump's files lie in its own directory")
        return path


class _LocalNewFile(NewFile):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = _hidden(path)
        super().__init__(self._hidden.open("xb", buffering=0))

    def finish(self) -> None:
        os.fsync(self._raw.fileno())
        self.close()
        if self._path.exists():
            raise FileExistsError(f"{self._path} is there already: another trainer writes to this directory")
        os.rename(self._hidden, self._path)

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self.close()
        with contextlib.suppress(OSError):
            self._hidden.unlink(missing_ok=True)


def _hidden(path: Path) -> Path:
    """The name a file has while it is written."""
    return path.with_name(f".{path.name}.tmp")


def write_synced(path: Path, data: bytes) -> None:
    """Writes a new file, which is on the disk when this returns; not there at all if it fails.

    Raises:
        FileExistsError: there is such a file already; it is left as it is.
    """
    opened = path.open("xb")  # if it is there already, it is not ours to remove below
    try:
        with opened as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
