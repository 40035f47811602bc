"""What a log needs of the place where it lies."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from torchrec_ext.errors import DeltaLogError, MissingFileError
from torchrec_ext.files import Checksummed

T = TypeVar("T")
R = TypeVar("R")


class NewFile(Checksummed):
    """A file that is being written; nobody sees it under its name until it is whole."""

    def finish(self) -> None:
        """Puts it in its place, to stay.

        Raises:
            FileExistsError: there is such a file already; it is left as it is.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Removes what was written; never raises."""
        raise NotImplementedError


class Place(ABC):
    """A directory with folders. Operations raise ``OSError``, without a credential in its text.

    ``str`` of it is what messages call it.
    """

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def locate(self, folder: str, name: str) -> str:
        """A file's path or URI, for an engine that reads it by itself."""

    @abstractmethod
    def locked(self, folder: str, name: str) -> contextlib.AbstractContextManager[None]:
        """Keeps other processes from entering with the same names; ends with the process, however it ends.

        Where nothing can be locked, as on an object store, it keeps nobody.

        Raises:
            BlockingIOError: another process has entered.
        """

    @abstractmethod
    def exists(self) -> bool:
        """Whether it is a directory."""

    @abstractmethod
    def make(self) -> None:
        """Makes it, if it is not there.

        Raises:
            FileExistsError: it is a file.
        """

    @abstractmethod
    def entries(self, folder: str = "") -> list[str]:
        """The names of what is in it, or in one of its folders, sorted; none if there is no such folder."""

    @abstractmethod
    def has(self, folder: str, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def read(self, folder: str, name: str) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: there is none.
            DeltaLogError: it is a symbolic link, and so may be anywhere.
        """

    @abstractmethod
    def size(self, folder: str, name: str) -> int:
        """Of a file, in bytes."""

    @abstractmethod
    def crc32(self, folder: str, name: str) -> int:
        """Of a file's bytes, all of which are read."""

    @abstractmethod
    def parquet(self, folder: str, name: str) -> contextlib.AbstractContextManager[pq.ParquetFile]:
        """Opens a Parquet file; local ones are mapped into memory."""

    @abstractmethod
    def make_folder(self, folder: str) -> None:
        """Makes a folder, if it is not there."""

    @abstractmethod
    def create(self, folder: str, name: str) -> NewFile:
        """Begins a file.

        Raises:
            FileExistsError: another process is writing it.
        """

    @abstractmethod
    def put(self, folder: str, name: str, data: bytes) -> None:
        """Writes a small file; whoever sees it sees all of it. Takes the place of one of this name."""

    @abstractmethod
    def remove(self, folder: str, name: str) -> None:
        """Removes a file, if it is there."""

    @abstractmethod
    def remove_folder(self, folder: str) -> None:
        """Removes a folder and what is in it, as far as that can be done; never raises."""

    @abstractmethod
    def prune(self, folder: str) -> None:
        """Removes a folder if nothing is in it; never raises."""

    @abstractmethod
    def sync(self, folder: str = "") -> None:
        """Puts a folder's entries on the disk, so that they outlive a power failure."""

    @abstractmethod
    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Does some work on each item, on several at a time if that is any quicker."""


@dataclass(frozen=True)
class PlacedFile:
    """A file of a dump.

    Attributes:
        place: of the log.
        folder: of the dump.
        name: its name there.
    """

    place: Place
    folder: str
    name: str

    def __str__(self) -> str:
        return f"{self.place}: {self.folder}: {self.name}"

    def check(self, nbytes: int, crc32: int) -> None:
        """Checks that it is what was written.

        Raises:
            MissingFileError: it is not there.
            DeltaLogError: it is not.
        """
        with self.explained():
            if (size := self.place.size(self.folder, self.name)) != nbytes:
                raise DeltaLogError(f"{self} has {size} bytes, the manifest says {nbytes}")
            if self.place.crc32(self.folder, self.name) != crc32:
                raise DeltaLogError(f"{self} is damaged: its checksum is not the manifest's")

    @contextlib.contextmanager
    def open(self) -> Iterator[pq.ParquetFile]:
        """Opens it to be read.

        Raises:
            MissingFileError: it is not there.
            DeltaLogError: it cannot be read.
        """
        with self.explained(), self.place.parquet(self.folder, self.name) as file:
            yield file

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Names the file in the errors of what is done with it.

        Raises:
            MissingFileError: it is not there.
            DeltaLogError: it cannot be read.
        """
        try:
            yield
        except FileNotFoundError as error:
            raise MissingFileError(f"{self} is missing") from error
        except (pa.ArrowException, OSError) as error:
            raise DeltaLogError(f"{self} cannot be read: {error}") from error
