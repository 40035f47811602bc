"""Redis: a row per key, lookups in one round trip."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.errors import PublishError
from torchrec_ext.publish.redis_layout import (
    Catalog,
    decode_rows,
    encode_rows,
    position_from_bytes,
    position_to_bytes,
    row_bytes,
)
from torchrec_ext.publish.redis_wire import Wire, Writer, connect, fenced_off, speaking, split_prefix
from torchrec_ext.publish.served import UNFINISHED, Position, ServedTable
from torchrec_ext.publish.sink import Sink
from torchrec_ext.urls import without_credentials

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change

logger = logging.getLogger(__name__)


class RedisSink(Sink):
    """A server or cluster of Redis 7 or newer. See ``redis_layout`` for the keys.

    What a change writes comes in this order: new rows; then, at one moment, what answers keys without a row;
    then deletes; then the position. So a key has its old answer or its new one at any moment, and a change
    that was cut short can be made again.

    Args:
        url: ``redis://user:password@host:port/db``, ``rediss://...`` (TLS) or ``unix:///path?db=0``, with
            redis-py's own options in the query, and ``prefix``, which all keys begin with.

    Raises:
        ValueError: the URL is not well formed.
        PublishError: the client library is not installed, or Redis refuses user or password.
        SinkUnavailableError: the server does not answer.
    """

    def __init__(self, url: str) -> None:
        self._name = without_credentials(url)
        self._url, self._names = split_prefix(url, "torchrec")
        self._opened: Wire | None = None
        self._token: bytes | None = None
        self._catalog: Catalog | None = None

    def __str__(self) -> str:
        return f"{self._name} (prefix {self._names.prefix})"

    def position(self) -> Position | None:
        """See ``Sink.position``."""
        with speaking(self):
            catalog, position = self._wire.get("tables", "position")
            if catalog is None:
                if position is not None:
                    raise self._foreign(self._names.of("position").encode())
                return None
        return position_from_bytes(position) if position is not None else None

    def apply(self, change: Change) -> None:
        """See ``Sink.apply``."""
        with speaking(self):
            before, is_new = self._prepare(change)
            after = before.following(change.tables, replaces=change.replaces)
            with self._wire.writing(self._own_token()) as writer:
                if change.replaces:
                    writer.set({"position": position_to_bytes(UNFINISHED)})
                for fqn, keys, vectors in change.upserts():
                    writer.set_rows(after.numbers[fqn], keys, encode_rows(change.tables[fqn], vectors))
                self._write_catalog(writer, after)
                for fqn, keys, substitutes in change.deletes():
                    if change.on_delete == "delete":
                        writer.delete_rows(after.numbers[fqn], keys)
                    else:
                        values = _deleted(change.tables[fqn], keys, substitutes)
                        writer.set_rows(after.numbers[fqn], keys, values)
                # A first publication may have been begun before, from another log.
                if change.replaces or (change.base is None and not is_new):
                    for number, keys in self._left_over(after, change.keys()):
                        writer.delete_rows(number, keys)
                writer.set({"position": position_to_bytes(change.position)})

    def tables(self) -> Mapping[str, ServedTable]:
        """See ``Sink.tables``."""
        with speaking(self):
            self._catalog = self._read_catalog()
        return self._catalog.tables

    def read(
        self, table: str, keys: NDArray[np.int64]
    ) -> tuple[ServedTable, NDArray[np.bool_], NDArray[np.float32]]:
        """See ``Sink.read``; one round trip, and two more when a dump was published since the last one."""
        with speaking(self):
            catalog = self._catalog or self._read_catalog()
            while True:
                number = catalog.numbers.get(table, -1)
                version, values = self._wire.get_rows(number, keys)
                if version == catalog.version.encode():
                    break
                catalog = self._read_catalog()
            self._catalog = catalog
        if not catalog.tables:
            raise PublishError(f"{self}: nothing was published here")
        if table not in catalog.tables:
            raise KeyError(f"{self} holds no table {table}; it holds {sorted(catalog.tables)}")
        served = catalog.tables[table]
        size = row_bytes(served)
        owned = np.fromiter((v is not None and len(v) == size for v in values), np.bool_, len(values))
        return served, owned, decode_rows(served, (values[i] for i in np.flatnonzero(owned)))  # type: ignore[misc]

    def close(self) -> None:
        """Ends all connections."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _wire(self) -> Wire:
        # On first use, so that a sink can be made, and publish wait, before the server is up.
        if self._opened is None:
            self._opened = connect(self._url, self._names)
        return self._opened

    def _own_token(self) -> bytes:
        assert self._token is not None
        return self._token

    def _prepare(self, change: Change) -> tuple[Catalog, bool]:
        """Takes the sink over, as the change expects it; returns its catalog, and whether that is new."""
        publisher = self._names.of("publisher")
        if self._wire.get("tables") == [None]:
            for key in self._wire.all_keys():
                if key != publisher.encode():
                    raise self._foreign(key)
        (present,) = self._wire.get("publisher")
        if self._token is None or present is None:  # None: Redis lost its memory, or this is its first dump
            self._warn_of_eviction()
            self._token = secrets.token_hex(16).encode()
            self._wire.take_over(self._token)
        elif present != self._token:
            self._token = None
            raise fenced_off()
        data, vectors = self._wire.get("tables", "fallbacks")
        catalog = Catalog() if data is None else self._decode(data, vectors)
        self.expect(change, catalog.dims)  # only now: nobody else writes any more
        if data is not None:
            return catalog, False
        with self._wire.writing(self._token) as writer:  # from here on the prefix is ours
            self._write_catalog(writer, catalog)
        return catalog, True

    def _warn_of_eviction(self) -> None:
        if self._wire.evicts():
            logger.warning(
                "%s: with its maxmemory-policy Redis throws rows away when it is full; their keys are then "
                "answered by fallback rows. Set it to noeviction or volatile-lru",
                self,
            )

    def _read_catalog(self) -> Catalog:
        data, vectors = self._wire.get("tables", "fallbacks")
        if data is None:
            raise PublishError(f"{self}: nothing was published here")
        return self._decode(data, vectors)

    def _decode(self, data: bytes, vectors: bytes | None) -> Catalog:
        try:
            return Catalog.from_bytes(data, vectors or b"")
        except ValueError as error:
            raise PublishError(f"{self}: {self._names.of('tables')}: {error}. {_ANOTHER_PREFIX}") from error

    def _write_catalog(self, writer: Writer, catalog: Catalog) -> None:
        data, vectors = catalog.to_bytes()
        writer.set({"tables": data, "fallbacks": vectors, "version": catalog.version.encode()})

    def _left_over(
        self, catalog: Catalog, kept: Mapping[str, NDArray[np.int64]]
    ) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """The rows that are here and are not to be kept, some thousands at a time."""
        tables = {number: fqn for fqn, number in catalog.numbers.items()}
        found: dict[int, list[int]] = {}
        for key in self._wire.all_keys():
            if (row := self._names.row_of(key)) is None:
                if not key.startswith(self._names.of("").encode()):
                    raise self._foreign(key)
                continue
            number, raw = row
            held = kept.get(tables.get(number, ""), np.empty(0, np.int64))
            at = int(np.searchsorted(held, raw))
            if at == len(held) or held[at] != raw:
                found.setdefault(number, []).append(raw)
                if len(found[number]) == 4096:
                    yield number, np.array(found.pop(number), np.int64)
        for number, ids in found.items():
            yield number, np.array(ids, np.int64)

    def _foreign(self, key: bytes) -> PublishError:
        return PublishError(f"{self} holds other data, such as the key {key!r}. {_ANOTHER_PREFIX}")


def _deleted(
    table: ServedTable, keys: NDArray[np.int64], substitutes: NDArray[np.float32] | None
) -> NDArray[np.uint8]:
    """The values of deleted keys that leave something, uint8 ``[n, bytes]``."""
    if substitutes is None:
        return np.empty((len(keys), 0), np.uint8)
    mark = np.zeros((len(keys), 1), np.uint8)
    return np.concatenate([encode_rows(table, substitutes), mark], axis=1)


_ANOTHER_PREFIX = "Choose a prefix of your own: redis://...?prefix=NAME"
