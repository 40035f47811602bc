"""``EmbeddingClient``: what the model answers, from where it was published."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import TracebackType

import numpy as np
import pyarrow.fs as pafs
from numpy.typing import ArrayLike, NDArray

from torchrec_ext.answers import HashFunction, as_keys, hashed
from torchrec_ext.delta.places import SCHEMES
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.publish.sink import Sink, open_sink


class EmbeddingClient:
    """Looks embeddings up where they are served from. Needs no torch.

    Safe to use from several threads where the sink's own client is, as that of Redis.

    Args:
        url: a sink's URL (``redis://``, ``rediss://``, ``unix://``, ``feast://``), or a dump directory by its
            path or URI, which is read into memory; ``refresh`` then takes in later dumps.
        hash_fns: for tables with an ``input_hash_func``, that function by table FQN, as for
            ``DeltaLog.replay``: ``lookup`` then takes raw ids (and imports torch, as the function needs it).

    Raises:
        ValueError: the URL is not that of a sink.
        PublishError: it cannot be opened.
        DeltaLogError: there is no such directory.

    Example::

        with EmbeddingClient("redis://localhost:6379/0") as client:
            vectors = client.lookup("mc.user_table", [17, 42])
    """

    def __init__(
        self,
        url: str | os.PathLike[str] | pafs.FileSystem,
        *,
        hash_fns: Mapping[str, HashFunction] | None = None,
    ) -> None:
        self._sink = _open(url)
        self._hash_fns = dict(hash_fns or {})

    def lookup(self, table: str, ids: ArrayLike) -> NDArray[np.float32]:
        """What the model answers for each id, as one bag with weight 1, at the last dump published.

        While a dump is being published, each id is answered as before it or as after it.

        Args:
            table: the table's FQN, such as ``mc.user_table``.
            ids: integers ``[n]``, in any order, repeats allowed; raw ids, or what the table's key space says.

        Returns:
            float32 ``[n, dim]``; an id that was evicted, or was never known, gets its shard's fallback row.

        Raises:
            KeyError: no such table was published, or the last dump does not cover it any more.
            TypeError: ``ids`` are not integers.
            ValueError: the keys are ``row`` ids, and one is outside of the table or was never published.
            PublishError: nothing was published there, or it is not ours.
            SinkUnavailableError: it does not answer.
        """
        keys = as_keys(ids)
        if table in self._hash_fns and len(keys):
            keys = hashed(self._hash_fns[table], keys, self._sink.tables()[table].hash_size)
        served, owned, vectors = self._sink.read(table, keys)
        return served.answer(table, keys, owned, vectors)

    @property
    def tables(self) -> Mapping[str, ServedTable]:
        """The tables published, by FQN."""
        return self._sink.tables()

    @property
    def position(self) -> Position | None:
        """The last dump published."""
        return self._sink.position()

    def refresh(self) -> None:
        """Takes in the dumps that were committed to a directory since it was read; else does nothing."""
        refresh = getattr(self._sink, "refresh", None)
        if refresh is not None:
            refresh()

    def close(self) -> None:
        """Lets go of connections."""
        self._sink.close()

    def __enter__(self) -> EmbeddingClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open(url: str | os.PathLike[str] | pafs.FileSystem) -> Sink:
    if isinstance(url, str) and "://" in url and url.partition("://")[0] not in SCHEMES:
        return open_sink(url)
    from torchrec_ext.publish.directory import DirectoryReader

    return DirectoryReader(url)
