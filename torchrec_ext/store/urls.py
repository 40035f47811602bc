"""``open_store``: a store by its URL."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from torchrec_ext.store.flight.remote import RemoteStore
from torchrec_ext.store.store import Store
from torchrec_ext.store.stores import FileStore, MemoryStore, SharedMemoryStore

TOKEN_VARIABLE = "TORCHREC_EXT_STORE_TOKEN"
TOKEN_FILE_VARIABLE = "TORCHREC_EXT_STORE_TOKEN_FILE"


def open_store(url: str, **options: Any) -> Store:
    """Opens a store.

    Args:
        url: ``memory:`` (this process's memory), ``shm://name`` (shared memory of this host),
            ``file:///path`` or a path (files), ``grpc://host:port`` or ``grpc+tls://host:port`` (servers;
            several are ``host:port,host:port``).
        options: those of ``RemoteStore``, for servers only. The token is, if not given, that of
            ``environment_token``.

    Raises:
        ValueError: the URL is none of these, or there are options where there are none.
        StoreError: the store cannot be opened.
    """
    scheme, separator, rest = url.partition("://")
    if separator and scheme in ("grpc", "grpc+tls"):
        options.setdefault("token", environment_token())
        return RemoteStore([f"{scheme}://{server.strip()}" for server in rest.split(",")], **options)
    if options:
        raise ValueError(f"{url} takes no options; got {sorted(options)}")
    if url == "memory:":
        return MemoryStore()
    if not separator:
        return FileStore(url)
    if scheme == "shm":
        return SharedMemoryStore(rest)
    if scheme == "file" and not urlsplit(url).netloc:
        return FileStore(unquote(urlsplit(url).path))
    raise ValueError(
        f"{url!r} is not a store: give memory:, shm://name, file:///path, a path, "
        "grpc://host:port[,host:port...] or grpc+tls://..."
    )


def environment_token() -> str | None:
    """The token in the environment: the first line of the file, if one is named, else the value itself."""
    if path := os.environ.get(TOKEN_FILE_VARIABLE):
        return read_token(path)
    return os.environ.get(TOKEN_VARIABLE) or None


def read_token(path: str | os.PathLike[str]) -> str:
    """The token that a file holds, in its first line.

    Raises:
        ValueError: the file is empty.
        OSError: it cannot be read.
    """
    token = Path(path).read_text().partition("\n")[0].strip()
    if not token:
        raise ValueError(f"{path} holds no token")
    return token
