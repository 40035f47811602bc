"""Moves rows to and from one Redis server or a cluster."""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.errors import PublishError, SinkUnavailableError
from torchrec_ext.publish import redis_layout as layout
from torchrec_ext.publish.redis_layout import Names
from torchrec_ext.publish.sink import missing_extra
from torchrec_ext.urls import without_credentials

try:
    import redis
    from redis import exceptions
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as error:
    raise missing_extra("redis", error) from error

PASSWORD_VARIABLE = "TORCHREC_EXT_REDIS_PASSWORD"
_TRANSACTION_BYTES = 1 << 20
_KEYS_PER_COMMAND = 4096


class Wire(ABC):
    """What the sink asks of Redis. Every method may raise what ``speaking`` translates."""

    def __init__(self, client: Any, names: Names) -> None:
        self._client = client
        self.names = names

    def get(self, *names: str) -> list[bytes | None]:
        """Values of what there is once, all of one moment."""
        return self._client.mget([self.names.of(name) for name in names])

    @abstractmethod
    def get_rows(self, number: int, keys: NDArray[np.int64]) -> tuple[bytes | None, list[bytes | None]]:
        """The catalog's version, and rows none of which was deleted after it changed to a later one."""

    def all_keys(self) -> Iterator[bytes]:
        """All keys under the prefix."""
        for pattern in self.names.patterns():
            yield from self._client.scan_iter(match=pattern, count=10_000)

    @abstractmethod
    def evicts(self) -> bool:
        """Whether the server throws rows away when its memory is full."""

    def take_over(self, token: bytes) -> None:
        """Keeps every other publisher from writing."""
        self._client.set(self.names.of("publisher"), token)

    @abstractmethod
    def writing(self, token: bytes) -> contextlib.AbstractContextManager[Writer]:
        """A writer, for as long as the token is the last that took over."""

    def close(self) -> None:
        """Ends all connections."""
        self._client.close()


class Writer(ABC):
    """Writes in order. All of it is acknowledged once the block is left without an exception."""

    @abstractmethod
    def set_rows(self, number: int, keys: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """Sets rows to values uint8 ``[n, bytes]``."""

    @abstractmethod
    def delete_rows(self, number: int, keys: NDArray[np.int64]) -> None:
        """Deletes rows; some may not be there."""

    @abstractmethod
    def set(self, values: Mapping[str, bytes]) -> None:
        """Sets what there is once, all at one moment."""


def connect(url: str, names: Names) -> Wire:
    """Connects to the server of a URL, or to the cluster that it is part of."""
    options: dict[str, Any] = {"protocol": 2, "retry": Retry(NoBackoff(), 0), "client_name": "torchrec-ext"}
    if (password := os.environ.get(PASSWORD_VARIABLE)) and "@" not in url and "password=" not in url:
        options["password"] = password
    try:
        client = redis.Redis.from_url(url, **options)
    except ValueError:
        client = None
    if client is None:  # not inside the handler: its error may quote the password, and would be chained
        raise ValueError(f"{without_credentials(url)} is not a Redis URL: redis://user:password@host:port/db")
    with speaking(without_credentials(url)):
        try:
            mode = client.info("server").get("redis_mode")
        except TypeError as error:
            raise ValueError(
                f"{without_credentials(url)}: an unknown option in the query: {error}"
            ) from error
        if mode != "cluster":
            return SingleServer(client, names)
        client.close()
        from torchrec_ext.publish.redis_cluster import Cluster

        return Cluster(redis.RedisCluster.from_url(url, **options), names)


def split_prefix(url: str, default: str) -> tuple[str, Names]:
    """Takes ``prefix`` out of a URL's query."""
    base, mark, query = url.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    names = Names(options.pop("prefix", default))
    return base + (mark + urlencode(options) if options else ""), names


@contextlib.contextmanager
def speaking(where: object) -> Iterator[None]:
    """Gives errors of Redis a place, and tells those that may pass from those that will not."""
    try:
        yield
    except exceptions.AuthenticationError as error:
        raise PublishError(
            f"{where}: Redis refuses the user or password ({error}). Give them in the URL, "
            f"redis://user:password@host, or the password in the environment, in {PASSWORD_VARIABLE}"
        ) from error
    except (exceptions.NoPermissionError, exceptions.AuthorizationError) as error:
        raise PublishError(f"{where}: the user lacks a right in Redis: {error}") from error
    except exceptions.OutOfMemoryError as error:
        raise PublishError(f"{where}: Redis is full; raise its maxmemory, then publish again") from error
    except (
        exceptions.ConnectionError,
        exceptions.TimeoutError,
        exceptions.ReadOnlyError,
        exceptions.ClusterError,
        exceptions.AskError,
        exceptions.TryAgainError,
        exceptions.RedisClusterException,
    ) as error:
        raise SinkUnavailableError(f"{where}: Redis does not answer: {error}") from error
    except exceptions.RedisError as error:
        raise PublishError(f"{where}: Redis refuses: {error}") from error


def fenced_off() -> PublishError:
    """The error of a publisher that is not the last one any more."""
    return PublishError(
        "another publisher has taken over here; only one may write. If that was a mistake, stop it and "
        "publish again"
    )


class SingleServer(Wire):
    """One server: lookups are one command, writes are transactions that only the present publisher makes."""

    def get_rows(self, number: int, keys: NDArray[np.int64]) -> tuple[bytes | None, list[bytes | None]]:
        """See ``Wire``; one round trip."""
        version = self.names.of("version").encode()
        commands: list[Any] = []
        pieces = [keys[at : at + _KEYS_PER_COMMAND] for at in range(0, max(1, len(keys)), _KEYS_PER_COMMAND)]
        for piece in pieces:
            # One command is one moment: version and rows belong together.
            commands.extend(layout.many(b"MGET", self.names.rows(number), piece, version))
        with self._connection() as connection:
            connection.send_packed_command(commands)
            replies = [connection.read_response() for _ in pieces]
        if len(replies) == 1:
            return replies[0][0], replies[0][1:]
        found = {reply[0] for reply in replies}
        if len(found) > 1:  # a dump was published in between; nobody expects this version
            return None, []
        return found.pop(), [row for reply in replies for row in reply[1:]]

    def evicts(self) -> bool:
        """See ``Wire``."""
        return str(self._client.info("memory").get("maxmemory_policy", "")).startswith("allkeys")

    @contextlib.contextmanager
    def writing(self, token: bytes) -> Iterator[Writer]:
        """See ``Wire``."""
        with self._connection() as connection:
            writer = _Transactions(connection, self.names, token)
            yield writer
            writer.finish()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[Any]:
        connection = self._client.connection_pool.get_connection()
        try:
            yield connection
        except BaseException:
            connection.disconnect()  # replies that nobody read may be on their way
            raise
        finally:
            self._client.connection_pool.release(connection)


class _Transactions(Writer):
    """Gathers commands into transactions, and sends one while the server works on the one before.

    A transaction takes place only if the publisher's token is still ours: it is watched, and read, after the
    transaction before.
    """

    def __init__(self, connection: Any, names: Names, token: bytes) -> None:
        self._connection = connection
        self._names = names
        self._token = token
        self._commands: list[Any] = []
        self._count = 0
        self._bytes = 0
        key = names.of("publisher").encode()
        self._guard = layout.packed(b"WATCH", key) + layout.packed(b"GET", key)
        self._sent = -1  # commands of the transaction on its way; -1: just the guard
        connection.send_packed_command([self._guard])

    def set_rows(self, number: int, keys: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """See ``Writer``."""
        at_once = max(1, min(_KEYS_PER_COMMAND, _TRANSACTION_BYTES // (values.shape[1] + 64)))
        for at in range(0, len(keys), at_once):
            piece = slice(at, at + at_once)
            self._add(*layout.mset(self._names.rows(number), keys[piece], values[piece]))

    def delete_rows(self, number: int, keys: NDArray[np.int64]) -> None:
        """See ``Writer``."""
        for at in range(0, len(keys), _KEYS_PER_COMMAND):
            self._add(*layout.many(b"DEL", self._names.rows(number), keys[at : at + _KEYS_PER_COMMAND]))

    def set(self, values: Mapping[str, bytes]) -> None:
        """See ``Writer``."""
        words = [word for name, value in values.items() for word in (self._names.of(name).encode(), value)]
        self._add(layout.packed(b"MSET", *words))

    def finish(self) -> None:
        """Sends the last transaction and waits for it."""
        if self._commands:
            self._send()
        self._await()
        self._connection.send_packed_command([layout.packed(b"UNWATCH")])
        self._connection.read_response()

    def _add(self, *buffers: Any) -> None:
        size = sum(len(buffer) for buffer in buffers)
        if self._commands and self._bytes + size > _TRANSACTION_BYTES:
            self._send()
        self._commands.extend(buffers)
        self._count += 1
        self._bytes += size

    def _send(self) -> None:
        self._await()
        self._connection.send_packed_command(
            [layout.packed(b"MULTI"), *self._commands, layout.packed(b"EXEC") + self._guard]
        )
        self._sent = self._count
        self._commands, self._count, self._bytes = [], 0, 0

    def _await(self) -> None:
        """Reads what the server said of the last transaction, and whether the token was ours after it."""
        if self._sent >= 0:
            for _ in range(1 + self._sent):
                self._connection.read_response()
            if (outcome := self._connection.read_response()) is None:
                raise fenced_off()
            for reply in outcome:
                if isinstance(reply, Exception):
                    raise reply
        self._connection.read_response()
        if self._connection.read_response() != self._token:
            raise fenced_off()
        self._sent = -1
