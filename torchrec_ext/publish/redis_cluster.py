"""Rows in a Redis cluster: no command spans two slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.publish.redis_layout import Names
from torchrec_ext.publish.redis_wire import Wire, Writer, fenced_off

_COMMANDS_AT_ONCE = 4096


class Cluster(Wire):
    """A cluster. Commands go through redis-py's own pipelines, which follow slots that move.

    There is no transaction over slots, so a publisher learns only before its next few thousand commands that
    another one took over.
    """

    def __init__(self, client: Any, names: Names) -> None:
        super().__init__(names)
        self._client = client

    def get(self, *names: str) -> list[bytes | None]:
        """See ``Wire``."""
        return self._client.mget([self.names.of(name) for name in names])

    def get_rows(self, number: int, keys: NDArray[np.int64]) -> tuple[bytes | None, list[bytes | None]]:
        """See ``Wire``; one round trip to each node, and one more if a row is missing."""
        version = self.names.of("version")
        pipe = self._client.pipeline()
        pipe.get(version)
        for name in _keys_of(self.names.rows(number), keys):
            pipe.get(name)
        first, *rows = pipe.execute()
        # A row may be gone because the catalog changed after its version was read on another node.
        if None in rows and self._client.get(version) != first:
            return None, []
        return first, rows

    def all_keys(self) -> Iterator[bytes]:
        """See ``Wire``."""
        for pattern in self.names.patterns():
            yield from self._client.scan_iter(match=pattern, count=10_000)

    def evicts(self) -> bool:
        """See ``Wire``."""
        nodes = self._client.info("memory", target_nodes=self._client.PRIMARIES)
        return any(str(node.get("maxmemory_policy", "")).startswith("allkeys") for node in nodes.values())

    def take_over(self, token: bytes) -> None:
        """See ``Wire``."""
        self._client.set(self.names.of("publisher"), token)

    @contextlib.contextmanager
    def writing(self, token: bytes) -> Iterator[Writer]:
        """See ``Wire``."""
        writer = _Pipelines(self._client, self.names, token)
        yield writer
        writer.flush()

    def close(self) -> None:
        """See ``Wire``."""
        self._client.close()


class _Pipelines(Writer):
    def __init__(self, client: Any, names: Names, token: bytes) -> None:
        self._client = client
        self._names = names
        self._token = token
        self._pipe = client.pipeline()
        self._count = 0

    def set_rows(self, number: int, keys: NDArray[np.int64], values: NDArray[np.uint8]) -> None:
        """See ``Writer``."""
        for name, value in zip(_keys_of(self._names.rows(number), keys), values, strict=True):
            self._pipe.set(name, value.tobytes())
            self._added()

    def delete_rows(self, number: int, keys: NDArray[np.int64]) -> None:
        """See ``Writer``."""
        for name in _keys_of(self._names.rows(number), keys):
            self._pipe.delete(name)
            self._added()

    def set(self, values: Mapping[str, bytes]) -> None:
        """See ``Writer``."""
        self.flush()  # nodes do not wait for one another
        self._check()
        self._client.mset({self._names.of(name): value for name, value in values.items()})

    def flush(self) -> None:
        """Sends what is there, and waits for it."""
        if self._count:
            self._check()
            self._pipe.execute()
            self._count = 0

    def _added(self) -> None:
        self._count += 1
        if self._count == _COMMANDS_AT_ONCE:
            self.flush()

    def _check(self) -> None:
        if self._client.get(self._names.of("publisher")) != self._token:
            raise fenced_off()


def _keys_of(begin: bytes, keys: NDArray[np.int64]) -> Iterator[bytes]:
    for key in keys.view(np.uint64).tolist():
        yield begin + b"%016x" % key
