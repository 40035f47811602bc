"""A server on loopback that speaks S3, and a line to it that can be cut."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import selectors
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pyarrow.fs import FileSelector, FileType, S3FileSystem

from tests.support.ports import Port

needs_moto = pytest.mark.skipif(
    importlib.util.find_spec("moto") is None, reason="moto, which speaks S3, is not installed"
)

USER, SECRET = "AKIAUSER", "s3cret/+key"
_SERVE = """
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
input()
"""


class S3Server:
    """A process with one bucket, ``bucket``, in its memory.

    Args:
        knows: whether it knows our user; else it refuses everything.
    """

    def __init__(self, *, knows: bool = True) -> None:
        environment = {**os.environ} if knows else {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        if knows:
            self.client(allow_bucket_creation=True).create_dir("bucket")

    def uri(self, path: str, *, port: int | None = None, bucket: str = "bucket") -> str:
        """Of a directory, with credentials in it."""
        secret = SECRET.replace("/", "%2F").replace("+", "%2B")
        where = f"endpoint_override=127.0.0.1:{port or self.port}"
        return f"s3://{USER}:{secret}@{bucket}/{path}?scheme=http&region=us-east-1&{where}"

    def client(self, port: int | None = None, **options: object) -> S3FileSystem:
        """Sees all buckets."""
        return S3FileSystem(
            access_key=USER,
            secret_key=SECRET,
            scheme="http",
            region="us-east-1",
            endpoint_override=f"127.0.0.1:{port or self.port}",
            # Seconds; by default a server that is slow for a moment is one that does not answer.
            connect_timeout=120,
            request_timeout=120,
            **options,
        )

    def __enter__(self) -> S3Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()


class Line:
    """Hands connections on to a port, until it is cut: then there is nobody at its own port."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._port = Port()
        self.port = self._port.number
        self._sockets: list[socket.socket] = []
        self.mend()

    def cut(self) -> None:
        """Ends all connections, and takes no new ones."""
        _end(self._listener)
        self._thread.join()  # it may be at a last connection
        for opened in self._sockets:
            _end(opened)
        self._sockets.clear()

    def mend(self) -> None:
        """Takes connections again."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [ours, theirs]
                threading.Thread(target=_copy, args=(ours, theirs), daemon=True).start()


def _end(opened: socket.socket) -> None:
    with contextlib.suppress(OSError):
        opened.shutdown(socket.SHUT_RDWR)
    opened.close()


def _copy(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
        selector.register(one, selectors.EVENT_READ, other)
        selector.register(other, selectors.EVENT_READ, one)
        while True:
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not data:
                    one.close()
                    other.close()
                    return
                key.data.sendall(data)


def no_credentials(text: str) -> bool:
    """Whether a text may be shown."""
    return not any(secret in text for secret in (USER, SECRET, "s3cret", "%2F"))


def objects(server: S3Server, path: str) -> dict[str, bytes]:
    """All that is under a path."""
    client = server.client()
    infos = client.get_file_info(FileSelector(f"bucket/{path}", recursive=True))
    return {
        str(Path(info.path).relative_to(f"bucket/{path}")): client.open_input_stream(info.path).read()
        for info in infos
        if info.type == FileType.File
    }
