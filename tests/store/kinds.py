"""Every kind of store, for tests of what all of them promise."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from torchrec_ext.store import FileStore, MemoryStore, RemoteStore, SharedMemoryStore, Store, StoreServer

KINDS = ["memory", "shared", "file", "remote", "two servers"]
_numbers = count()


@contextmanager
def opened(kind: str, directory: Path) -> Iterator[Store]:
    """A new store without tables; nothing of it stays."""
    with ExitStack() as stack:
        if kind == "memory":
            yield stack.enter_context(MemoryStore())
        elif kind == "shared":
            shared = stack.enter_context(SharedMemoryStore(f"test-{os.getpid()}-{next(_numbers)}"))
            stack.callback(shared.unlink)
            yield shared
        elif kind == "file":
            yield stack.enter_context(FileStore(directory / f"store-{next(_numbers)}"))
        else:
            servers = [StoreServer(MemoryStore()) for _ in range(2 if kind == "two servers" else 1)]
            for server in servers:
                stack.callback(server.close)
            yield stack.enter_context(RemoteStore([server.url for server in servers]))
