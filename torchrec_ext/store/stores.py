"""The stores whose rows this process can address: its own, the host's, and those on a disk."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import torch

from torchrec_ext.errors import StoreError
from torchrec_ext.store.local import LocalStore
from torchrec_ext.store.places import Directory, ProcessMemory

_SHARED_MEMORY = Path("/dev/shm")


class MemoryStore(LocalStore):
    """Rows in this process's memory.

    Args:
        device: where they are, the CPU by default. Dynamic tables need the CPU.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__(ProcessMemory(device))


class SharedMemoryStore(LocalStore):
    """Rows in shared memory, for all processes of a host that open it by the same name.

    They stay when the processes are gone, until ``unlink`` or a reboot.

    Args:
        name: letters, digits, ``_``, ``-`` and ``.``.

    Raises:
        ValueError: the name has other characters.
        StoreError: what is there cannot be used, or was made by another user.
    """

    def __init__(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
            raise ValueError(f"the name of a shared store is letters, digits, '_', '-' and '.', not {name!r}")
        self.path = _SHARED_MEMORY / f"torchrec_ext.{name}"
        super().__init__(Directory(self.path, private=True))

    def unlink(self) -> None:
        """Removes the rows, once the processes that have the store open close it; idempotent.

        Raises:
            StoreError: they cannot be removed.
        """
        try:
            shutil.rmtree(self.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(f"cannot remove {self.path}: {error.strerror}") from error


class FileStore(LocalStore):
    """Rows in memory-mapped files, for tables larger than memory, and to be there after a restart.

    What was written is in the files as soon as it is in memory, whatever happens to the process;
    ``sync`` and ``close`` make it survive the machine too.

    Args:
        path: a directory; made if it is not there.

    Raises:
        StoreError: the directory holds something else, or files that are damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        super().__init__(Directory(self.path, random_access=True))

    def close(self) -> None:
        """See ``Store``; waits for the disk."""
        if self._state.is_open:
            self.sync()
        super().close()
