"""Where a store's arrays are: in this process, or in files that several processes map.

A place hands out arrays by name and keeps one lock. The arrays of a ``Directory`` are files, one each, of
raw values in the machine's byte order, so that a directory in ``/dev/shm`` is shared memory and one on
a disk can be larger than memory.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import re
import stat
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrec_ext.errors import StoreError
from torchrec_ext.files import sync
from torchrec_ext.store.forks import when_forked

FORMAT = "torchrec_ext.store"
FORMAT_VERSION = 1
DESCRIPTION_NAME = "store.json"
LOCK_NAME = "lock"
TURN_NAME = "turn"
CLOCK_NAME = "clock"
_SUFFIX = ".bin"
_CACHE_LINE = 64  # bytes
_ARRAY_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


class Place(ABC):
    """Arrays by name, and a lock over all of them."""

    device = torch.device("cpu")

    @abstractmethod
    def array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, create: bool) -> torch.Tensor:
        """An array: a new one full of zeros, or the one that is there.

        Raises:
            StoreError: it is not there, or has another size, or there is no room for it.
        """

    @abstractmethod
    def description(self) -> dict[str, Any] | None:
        """What ``describe`` was told last; None before."""

    @abstractmethod
    def describe(self, content: dict[str, Any]) -> None:
        """Replaces the description, a JSON object, at once or not at all; drops what it leaves behind."""

    @abstractmethod
    def drop(self, prefix: str) -> None:
        """Removes the arrays whose names start so; who holds one keeps it."""

    @abstractmethod
    def locked(self, *, exclusive: bool) -> AbstractContextManager[None]:
        """A context in which nobody else writes, or, if exclusive, reads or writes; may be nested."""

    def sync(self) -> None:  # noqa: B027 (not all places have something to do)
        """Waits until what was written would survive a crash of the machine."""

    def close(self) -> None:  # noqa: B027 (not all places have something to do)
        """Lets go of what is not an array; nothing of the place may be used any more."""


class ProcessMemory(Place):
    """Arrays of this process alone.

    Args:
        device: where they are.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self.device = torch.device(device or "cpu")
        self._lock = threading.RLock()
        self._description: dict[str, Any] | None = None
        when_forked(self)

    def array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, create: bool) -> torch.Tensor:
        """See ``Place``."""
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # NumPy's zeros take memory only when they are touched, and ask the system for huge pages, which
        # makes lookups of many rows a third faster. Aligned to a cache line they are faster still.
        size = math.prod(shape) * dtype.itemsize
        raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
        start = -raw.ctypes.data % _CACHE_LINE
        return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)

    def description(self) -> dict[str, Any] | None:
        """See ``Place``."""
        return self._description

    def describe(self, content: dict[str, Any]) -> None:
        """See ``Place``."""
        self._description = content

    def drop(self, prefix: str) -> None:
        """See ``Place``."""

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """See ``Place``."""
        with self._lock:
            yield

    def after_fork(self) -> None:
        """See ``Forked``."""
        self._lock = threading.RLock()


class Directory(Place):
    """Arrays in the files of a directory, mapped into every process that opens it.

    Args:
        path: the directory; made if it is not there.
        random_access: tells the kernel not to read ahead, as befits a disk.
        private: whether it lies where every user may make directories: then this user must have made it.

    Raises:
        StoreError: the directory holds something else, or a store of another format, or is another's.
    """

    def __init__(self, path: Path, *, random_access: bool = False, private: bool = False) -> None:
        self.path = path
        self._random_access = random_access
        self._threads = threading.RLock()
        self._depth = 0
        self._holds_exclusive = False
        # Weakly, so that what was dropped goes with the last tensor.
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if private:
                self._check_owner()
            self._check_content()
            self._open_locks()
            when_forked(self)
        except OSError as error:
            raise StoreError(f"cannot have a store in {path}: {error.strerror} ({error.filename})") from error

    def array(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, create: bool) -> torch.Tensor:
        """See ``Place``."""
        if not _ARRAY_NAME.fullmatch(name):
            raise StoreError(f"{self.path}: {name!r} is not an array's name")
        file = self.path / f"{name}{_SUFFIX}"
        size = math.prod(shape) * dtype.itemsize
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(file, flags | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        except OSError as error:
            raise StoreError(f"{file}: {error.strerror}") from error
        try:
            if create and size:
                try:
                    # Reserved now: a disk that is full later would kill the process that touches a page.
                    os.posix_fallocate(fd, 0, size)
                except OSError as error:
                    os.unlink(file)
                    raise StoreError(
                        f"{file}: no room for {size} bytes ({error.strerror})"
                        + ("; /dev/shm is too small" if self.path.is_relative_to("/dev/shm") else "")
                    ) from error
            found = os.fstat(fd).st_size
            if found != size:
                raise StoreError(
                    f"{file} has {found} bytes, {_words(shape, dtype)} have {size}: "
                    "it was cut short, or belongs to another store"
                )
            if not size:
                return torch.zeros(shape, dtype=dtype)
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        if self._random_access:
            mapped.madvise(mmap.MADV_RANDOM)
        self._maps.add(mapped)
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    def description(self) -> dict[str, Any] | None:
        """See ``Place``."""
        file = self.path / DESCRIPTION_NAME
        try:
            content = json.loads(file.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{file} cannot be read: {error}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise StoreError(f"{file} does not describe a store")
        if content.get("version") != FORMAT_VERSION:
            raise StoreError(
                f"{file} is of format version {content.get('version')}, "
                f"this torchrec_ext reads {FORMAT_VERSION}"
            )
        if content.get("byteorder") != sys.byteorder:
            raise StoreError(f"{file}: its arrays are {content.get('byteorder')}-endian, this machine is not")
        return content

    def describe(self, content: dict[str, Any]) -> None:
        """See ``Place``."""
        content = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "byteorder": sys.byteorder,
            **content,
        }
        hidden = self.path / _hidden(DESCRIPTION_NAME)
        try:
            with open(hidden, "w") as file:
                json.dump(content, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self.path / DESCRIPTION_NAME)
            sync(self.path)
        except OSError as error:
            raise StoreError(f"{self.path / DESCRIPTION_NAME}: {error.strerror}") from error

    def drop(self, prefix: str) -> None:
        """See ``Place``."""
        for file in self.path.glob(f"*{_SUFFIX}"):
            if file.name.startswith(prefix):
                file.unlink()

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """See ``Place``."""
        with self._threads:
            if self._depth == 0:
                if self._lock.closed:
                    self._open_locks()
                # In turn: else those who read, one after the other, would keep out who writes for good.
                fcntl.flock(self._turn, fcntl.LOCK_EX)
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
                finally:
                    fcntl.flock(self._turn, fcntl.LOCK_UN)
                self._holds_exclusive = exclusive
            elif exclusive and not self._holds_exclusive:
                raise RuntimeError("cannot write to a store inside of a read")
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    fcntl.flock(self._lock, fcntl.LOCK_UN)

    def sync(self) -> None:
        """See ``Place``."""
        for mapped in self._maps:
            mapped.flush()

    def close(self) -> None:
        """See ``Place``."""
        self._lock.close()
        self._turn.close()

    def after_fork(self) -> None:
        """See ``Forked``."""
        self._threads = threading.RLock()
        self._depth = 0
        # They are the parent's too: they would exclude neither from the other, and would stay taken if the
        # parent died.
        self.close()

    def _check_owner(self) -> None:
        found = self.path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise StoreError(
                f"{self.path} was made by another user, or others may write to it: what is in it cannot be "
                "trusted; use another name, or remove it"
            )

    def _check_content(self) -> None:
        ours = {DESCRIPTION_NAME, _hidden(DESCRIPTION_NAME), LOCK_NAME, TURN_NAME, f"{CLOCK_NAME}{_SUFFIX}"}
        strangers = sorted({entry.name for entry in self.path.iterdir()} - ours)
        # Asked after the directory was listed: another process makes the description before other arrays.
        if (self.path / DESCRIPTION_NAME).exists():
            strangers = [name for name in strangers if not name.endswith(_SUFFIX)]
        if strangers:
            raise StoreError(
                f"{self.path} holds something else than a store ({', '.join(strangers[:3])}), or its "
                f"{DESCRIPTION_NAME} is missing; give the store a directory of its own"
            )

    def _open_locks(self) -> None:
        # The kernel takes the locks away from a process that dies.
        self._lock = open(self.path / LOCK_NAME, "a")  # noqa: SIM115 (stays open)
        self._turn = open(self.path / TURN_NAME, "a")  # noqa: SIM115


def _hidden(name: str) -> str:
    return f".{name}"


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{' x '.join(map(str, shape))} {str(dtype).removeprefix('torch.')}"
