"""What a sink is, and how one is opened by its URL."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import TracebackType
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.errors import PublishError, SinkUnavailableError
from torchrec_ext.publish.served import Position, ServedTable
from torchrec_ext.urls import without_credentials

if TYPE_CHECKING:
    from torchrec_ext.publish.changes import Change

ENTRY_POINTS = "torchrec_ext.sinks"
"""The group in which a package names its sinks: the URL's scheme, and a callable that takes the URL."""


class Sink(ABC):
    """Where embeddings are served from.

    A sink writes what a ``Change`` says and then its position, in that order: whoever finds the position
    finds the rows. Opening one writes nothing.

    Attributes:
        takes: what a change holds: ``backlog``, all dumps that the sink lacks, as one; ``each``, one dump;
            ``everything``, all rows of the log, whatever the sink held.
    """

    takes: Literal["backlog", "each", "everything"] = "backlog"

    @abstractmethod
    def position(self) -> Position | None:
        """The last dump it holds; None: it is empty, and was never published to.

        Raises:
            PublishError: it is not ours, or is broken.
            SinkUnavailableError: it does not answer now.
        """

    @abstractmethod
    def apply(self, change: Change) -> None:
        """Makes the change, and stores ``change.position`` once all of it is there to stay.

        May be cut short anywhere, and is then called again with a change that names the same keys, and
        perhaps more. Only a change that ``replaces`` may be followed by one of another log, if the position
        is ``UNFINISHED`` meanwhile.

        Raises:
            PublishError: it cannot; the message says what to do.
            SinkUnavailableError: it does not answer now.
        """

    def expect(self, change: Change, shapes: Mapping[str, tuple[int, str]]) -> None:
        """Checks that a change fits what the sink holds; one that ``replaces`` always does.

        Args:
            change: the change.
            shapes: dimension and dtype of the tables whose rows are here.

        Raises:
            PublishError: a table has another dimension or dtype than its rows here.
            SinkUnavailableError: it holds another dump than the change was made for, by now.
        """
        if change.replaces:
            return
        for fqn, table in change.tables.items():
            if (shape := shapes.get(fqn)) not in (None, (table.dim, table.dtype)):
                raise PublishError(
                    f"{self}: {fqn} has dimension {table.dim} and dtype {table.dtype}, its rows here have "
                    f"{shape[0]} and {shape[1]}. Publish to another place, or with restart=True "
                    "(torchrec-ext publish --restart), which writes all rows anew"
                )
        if (base := self.position()) != change.base:
            raise SinkUnavailableError(f"{self} now holds {base}, not {change.base}")

    def tables(self) -> Mapping[str, ServedTable]:
        """The tables it answers for, as of its position."""
        raise PublishError(f"{self}: nothing can be looked up here")

    def read(
        self, table: str, keys: NDArray[np.int64]
    ) -> tuple[ServedTable, NDArray[np.bool_], NDArray[np.float32]]:
        """The rows that keys own.

        Args:
            table: its FQN.
            keys: int64 ``[n]``, in any order, with repeats.

        Returns:
            The table as it was when the rows were read; which keys own a row, bool ``[n]``; the rows of
            those, float32 ``[m, dim]``.

        Raises:
            KeyError: it holds no such table.
        """
        raise PublishError(f"{self}: nothing can be looked up here")

    def close(self) -> None:  # noqa: B027  # many have nothing to close
        """Lets go of connections and files."""

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_SINKS = {
    "redis": "torchrec_ext.publish.redis_sink:RedisSink",
    "rediss": "torchrec_ext.publish.redis_sink:RedisSink",
    "unix": "torchrec_ext.publish.redis_sink:RedisSink",
    "parquet": "torchrec_ext.publish.parquet_sink:ParquetSink",
    "deltalake": "torchrec_ext.publish.deltalake_sink:DeltaLakeSink",
    "feast": "torchrec_ext.publish.feast_sink:FeastSink",
}


def open_sink(url: str) -> Sink:
    """Opens a sink.

    Args:
        url: ``redis://host:port/db``, ``rediss://...``, ``unix:///path/to/socket``, ``parquet://path``,
            ``deltalake://path``, ``feast://path``, or a scheme that an installed package adds.

    Raises:
        ValueError: the URL is none of these, or not well formed.
        PublishError: a package that it needs is not installed, or it cannot be opened.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme in _SINKS:
        module, _, name = _SINKS[scheme].partition(":")
        sink: Callable[[str], Sink] = getattr(importlib.import_module(module), name)
        return sink(url)
    added = entry_points(group=ENTRY_POINTS)
    for point in added if separator else ():
        if point.name == scheme:
            sink = point.load()
            return sink(url)
    known = ", ".join(f"{name}://" for name in sorted({*_SINKS, *(point.name for point in added)}))
    raise ValueError(f"{without_credentials(url)!r} is not a sink: its URL begins with one of {known}")


def path_of(url: str) -> str:
    """The path of a URL like ``parquet://relative/path`` or ``parquet:///absolute/path``."""
    parts = urlsplit(url)
    path = unquote(parts.netloc + parts.path)
    if not path:
        raise ValueError(
            f"{url!r} names no path: {parts.scheme}://relative/path or {parts.scheme}:///absolute"
        )
    return path


def name_of(fqn: str) -> str:
    """A file name for a table that leads nowhere else: the FQN, if it has nothing odd."""
    quoted = quote(fqn, safe="").replace("~", "%7E")
    if quoted.startswith("."):
        quoted = f"%2E{quoted[1:]}"
    return quoted.replace("%", "~")  # "%" in names is more than Delta Lake takes


def missing_extra(extra: str, error: ModuleNotFoundError) -> PublishError:
    """The error of a sink that needs what is not installed."""
    return PublishError(
        f"this sink needs {error.name}, which is not installed: pip install 'torchrec-ext[{extra}]'"
    )
