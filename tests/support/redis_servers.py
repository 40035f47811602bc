"""Real Redis servers on unix sockets, and clusters on loopback, for as long as a test needs them."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from tests.support.ports import Port

BINARY = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    BINARY is None, reason="redis-server is not installed: apt-get install redis-server"
)
_READY_SECONDS = 120


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
        self._port: Port | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @classmethod
    def with_tls(cls) -> RedisServer:
        """One that also speaks TLS on loopback, with a certificate of its own in ``ca.pem``."""
        directory = Path(tempfile.mkdtemp(prefix="trx-redis-"))
        certificate, key = directory / "ca.pem", directory / "key.pem"
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=127.0.0.1"),
                *("-addext", "subjectAltName=IP:127.0.0.1", "-out", str(certificate), "-keyout", str(key)),
            ],
            check=True,
            capture_output=True,
        )
        port = Port()
        files = [f"--tls-{name}-file" for name in ("cert", "key", "ca-cert")]
        paths = [str(certificate), str(key), str(certificate)]
        options = [word for pair in zip(files, paths, strict=True) for word in pair]
        options += ["--tls-port", str(port.number), "--bind", "127.0.0.1", "--tls-auth-clients", "no"]
        server = cls(directory, *options)
        server._owned, server._port = True, port
        server.url = f"rediss://127.0.0.1:{port.number}/0?ssl_ca_certs={certificate}"
        return server

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

    def client(self, **options: Any) -> Any:
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
        if self._port is not None:
            self._port.release()
        if self._owned:
            shutil.rmtree(self.directory, ignore_errors=True)


class RedisCluster:
    """Two nodes on loopback that share the slots."""

    def __init__(self) -> None:
        import redis

        assert BINARY is not None
        self._directory = Path(tempfile.mkdtemp(prefix="trx-cluster-"))
        self._ports = [Port() for _ in range(4)]
        ports = [port.number for port in self._ports]
        self._processes = []
        for number in range(2):
            path = self._directory / str(number)
            path.mkdir()
            arguments = ["--port", str(ports[number]), "--cluster-port", str(ports[2 + number])]
            arguments += ["--bind", "127.0.0.1", "--cluster-enabled", "yes", "--dir", str(path), "--save", ""]
            arguments += ["--cluster-node-timeout", "600000"]  # milliseconds: who is slow is not dead
            self._processes.append(
                subprocess.Popen([BINARY, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            )
        nodes = [redis.Redis(host="127.0.0.1", port=port) for port in ports[:2]]
        _until(lambda: all(node.ping() for node in nodes))
        for number, node in enumerate(nodes):
            node.execute_command("CLUSTER ADDSLOTSRANGE", 8192 * number, 8192 * number + 8191)
        nodes[0].execute_command("CLUSTER MEET", "127.0.0.1", ports[1], ports[3])
        _until(lambda: all(b"cluster_state:ok" in _info(node) for node in nodes))
        self.url = f"redis://127.0.0.1:{ports[0]}"
        self.nodes = nodes

    def __enter__(self) -> RedisCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for port in self._ports:
            port.release()
        shutil.rmtree(self._directory, ignore_errors=True)


def _info(node: Any) -> bytes:
    found = node.execute_command("CLUSTER INFO")
    return found if isinstance(found, bytes) else "".join(f"{k}:{v}" for k, v in found.items()).encode()


def _until(holds: Callable[[], object]) -> None:
    import redis

    deadline = time.monotonic() + _READY_SECONDS
    while True:
        try:
            if holds():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "the cluster does not come up"
        time.sleep(0.02)
