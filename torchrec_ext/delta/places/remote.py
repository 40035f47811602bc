"""A directory on a file system that PyArrow knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from torchrec_ext.delta.places.place import NewFile, Place
from torchrec_ext.files import stream_crc32
from torchrec_ext.urls import redacted, without_credentials

T = TypeVar("T")
R = TypeVar("R")

# What PyArrow and fsspec call stores in which a file appears at once, when it is whole, and folders are but
# prefixes of names.
OBJECT_STORES = ("s3", "s3a", "gcs", "gs", "abfs", "abfss", "az")
_REQUESTS = 16  # at a time
_PIECE = 8 << 20  # bytes of a request
_MAX_LINES = 3  # of an error of somebody else's


class RemotePlace(Place):
    """A directory on a file system of PyArrow, which tries again by itself what may succeed the next time.

    Args:
        filesystem: of PyArrow.
        root: the directory's path in it.
        uri: where both come from; its credentials are shown to nobody.
    """

    def __init__(self, filesystem: pafs.FileSystem, root: str, uri: str = "") -> None:
        self._fs = filesystem
        self._root = root
        self._uri = uri
        self._is_object_store = kind_of(filesystem) in OBJECT_STORES
        self._name = without_credentials(uri) if uri else f"{kind_of(filesystem)}://{root}"

    def __str__(self) -> str:
        return self._name

    def locate(self, folder: str, name: str) -> str:
        """See ``Place``: without the options that its URI has for PyArrow."""
        path = self._path(folder, name)
        kind = kind_of(self._fs)
        return path if kind in ("local", "file") else f"{kind}://{path}"  # as PyArrow and fsspec say it

    @contextlib.contextmanager
    def locked(self, folder: str, name: str) -> Iterator[None]:
        """See ``Place``."""
        yield

    def exists(self) -> bool:
        """See ``Place``."""
        return self._type() == pafs.FileType.Directory

    def make(self) -> None:
        """See ``Place``."""
        if self._type() == pafs.FileType.File:
            raise FileExistsError(f"{self} is a file")
        with self._explained("cannot be written to"):
            self._fs.create_dir(self._root, recursive=True)

    def entries(self, folder: str = "") -> list[str]:
        """See ``Place``."""
        with self._explained("cannot be listed", folder):
            selector = pafs.FileSelector(self._path(folder), allow_not_found=True)
            return sorted(info.base_name for info in self._fs.get_file_info(selector))

    def has(self, folder: str, name: str) -> bool:
        """See ``Place``."""
        return self._type(folder, name) == pafs.FileType.File

    def read(self, folder: str, name: str) -> bytes:
        """See ``Place``."""
        path = self._path(folder, name)
        with (
            self._explained("cannot be read", folder, name),
            self._fs.open_input_stream(path, compression=None) as file,
        ):
            return bytes(file.read())

    def size(self, folder: str, name: str) -> int:
        """See ``Place``."""
        with self._explained("cannot be read", folder, name):
            info = self._fs.get_file_info(self._path(folder, name))
            if info.type != pafs.FileType.File:
                raise FileNotFoundError("no such file")
            return int(info.size)

    def crc32(self, folder: str, name: str) -> int:
        """See ``Place``."""
        with (
            self._explained("cannot be read", folder, name),
            self._fs.open_input_stream(
                self._path(folder, name), compression=None, buffer_size=_PIECE
            ) as file,
        ):
            return stream_crc32(file)

    @contextlib.contextmanager
    def parquet(self, folder: str, name: str) -> Iterator[pq.ParquetFile]:
        """See ``Place``."""
        with (
            self._explained("cannot be read", folder, name),
            self._fs.open_input_file(self._path(folder, name)) as raw,
            pq.ParquetFile(raw, pre_buffer=True) as file,
        ):
            yield file

    def make_folder(self, folder: str) -> None:
        """See ``Place``."""
        if not self._is_object_store:
            with self._explained("cannot be written to", folder):
                self._fs.create_dir(self._path(folder), recursive=True)

    def create(self, folder: str, name: str) -> NewFile:
        """See ``Place``."""
        return _RemoteNewFile(self, folder, name)

    def put(self, folder: str, name: str, data: bytes) -> None:
        """See ``Place``; makes the folder, if it is not there."""
        self.make_folder(folder)
        new = self.create(folder, name)
        # If it fails it stays as it is: what a failed request left behind only that server knows.
        new.write(data)
        new.finish()

    def remove(self, folder: str, name: str) -> None:
        """See ``Place``."""
        with contextlib.suppress(FileNotFoundError), self._explained("cannot be removed", folder, name):
            self._fs.delete_file(self._path(folder, name))

    def remove_folder(self, folder: str) -> None:
        """See ``Place``."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._fs.delete_dir(self._path(folder))

    def prune(self, folder: str) -> None:
        """See ``Place``."""
        with contextlib.suppress(OSError):
            if not self.entries(folder):
                self.remove_folder(folder)

    def sync(self, folder: str = "") -> None:
        """See ``Place``."""

    def each(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """See ``Place``."""
        if len(items) == 1:
            return [work(items[0])]
        with ThreadPoolExecutor(_REQUESTS, "torchrec-ext-place") as threads:
            return list(threads.map(work, items))

    def _type(self, *names: str) -> pafs.FileType:
        with self._explained("cannot be reached", *names):
            return self._fs.get_file_info(self._path(*names)).type

    def _path(self, *names: str) -> str:
        return "/".join([self._root, *filter(None, names)])

    @contextlib.contextmanager
    def _explained(self, what: str, *names: str) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            kind = type(error) if isinstance(error, (FileNotFoundError, PermissionError)) else OSError
            path = "/".join([str(self), *filter(None, names)])
            raise kind(f"{path} {what}: {said(error, self._uri)}") from None


class _RemoteNewFile(NewFile):
    def __init__(self, place: RemotePlace, folder: str, name: str) -> None:
        self._place = place
        self._names = folder, name
        # A store shows a file once it is closed; elsewhere it is renamed then.
        self._drafted = folder, name if place._is_object_store else f".{name}.tmp"
        self._explained = lambda: place._explained("cannot be written", folder, name)
        with self._explained():
            raw = place._fs.open_output_stream(place._path(*self._drafted), compression=None)
        super().__init__(raw)

    def write(self, data: object) -> int:
        with self._explained():
            return super().write(data)

    def finish(self) -> None:
        with self._explained():
            self.close()
            if self._drafted != self._names:
                self._place._fs.move(self._place._path(*self._drafted), self._place._path(*self._names))

    def discard(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self.close()
        with contextlib.suppress(OSError):
            self._place.remove(*self._drafted)


def kind_of(filesystem: pafs.FileSystem) -> str:
    """What a file system is called, by PyArrow or by fsspec: ``s3``; a wrapper in Python may say so, too."""
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return kind_of(filesystem.base_fs)
    name = str(filesystem.type_name).rpartition("::")[2].rpartition("+")[2]
    return name.strip("()").partition(",")[0].strip("'")  # fsspec's may have several: ('s3', 's3a')


def said(error: BaseException, uri: str) -> str:
    """What an error says, without the credentials in a URI."""
    # Of a library that was not found HDFS lists all places where it was looked for.
    lines = redacted(str(error), uri).splitlines()
    return "; ".join(lines[:_MAX_LINES])
