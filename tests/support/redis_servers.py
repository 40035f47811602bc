"""Real Redis servers on unix sockets, and clusters on loopback, for as long as a test needs them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

import pytest

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="redis-server is not installed: apt-get install redis-server"
)
_READY_SECONDS = 30


class RedisServer:
    """A server without persistence on a unix socket.

    Args:
        directory: where its files go; by default a new one, with a path short enough for a socket.
        options: further arguments of ``redis-server``.
    """

    def __init__(self, directory: Path | None = None, *options: str) -> None:
        self._owned = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="trx-redis-"))
        self.directory.mkdir(exist_ok=True)
        self.socket = self.directory / "redis.sock"
        self.url = f"unix://{self.socket}"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Starts it, and waits until it answers."""
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        assert BINARY is not None
        self._process = subprocess.Popen(
            [
                BINARY,
                *("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.directory)),
                *("--save", "", "--daemonize", "no", *self._options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + _READY_SECONDS
        while True:
            try:
                redis.Redis(unix_socket_path=str(self.socket), retry=Retry(NoBackoff(), 0)).ping()
                return
            except redis.AuthenticationError:
                return
            except redis.ConnectionError:
                assert self._process.poll() is None, "redis-server ended"
                assert time.monotonic() < deadline, "redis-server does not answer"
                time.sleep(0.01)

    def client(self, **options: object) -> object:
        """redis-py's own client."""
        import redis

        return redis.Redis(unix_socket_path=str(self.socket), **options)

    def stop(self, number: int = signal.SIGKILL) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        if self._owned:
            shutil.rmtree(self.directory, ignore_errors=True)
