"""What the dumper must know of a table and of its rows on this rank, whatever holds them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.zch import ShardRouting

NO_ROW = -1
"""Stands for a row of zeros."""


class TrackedTable(Protocol):
    """One table of a model, as this rank holds it: a ``ZchTable``, ``RecStoreTable`` or ``PlainTable``."""

    @property
    def fqn(self) -> str:
        """The module's path in the model (wrappers left out) and the table's name, ``"mc.t0"``."""

    @property
    def part(self) -> str:
        """What deltas call it: ``fqn``, or a name of its own where other ranks have the other columns."""

    @property
    def columns(self) -> slice | NDArray[np.int64]:
        """Which of a whole vector's columns it has."""

    @property
    def kind(self) -> str:
        """``zch``, ``recstore`` or ``plain``: the ``source`` of its rows in a dump."""

    @property
    def features(self) -> tuple[str, ...]:
        """The features that look it up."""

    @property
    def shard(self) -> int:
        """This rank's shard."""

    @property
    def num_rows(self) -> int:
        """Rows of this rank's shard."""

    @property
    def first_row(self) -> int:
        """The global row at which the shard starts."""

    @property
    def num_embeddings(self) -> int:
        """Rows of all shards."""

    @property
    def dim(self) -> int:
        """The embedding dimension."""

    @property
    def dtype(self) -> torch.dtype:
        """The rows' own dtype."""

    @property
    def key_space(self) -> str:
        """``raw`` ids, ids ``hashed`` by the table's ``input_hash_func``, or global ``row`` ids.

        A key of ``row`` ids always has its row; any other may come to own one, and lose it.
        """

    @property
    def hash_size(self) -> int:
        """The second argument of the table's ``input_hash_func``; 0 where tables have none."""

    @property
    def routing(self) -> ShardRouting:
        """Which shard answers for a key."""

    @property
    def place(self) -> str | None:
        """Where the rows are, if all ranks see, and may write, the same ones: rank 0 alone dumps them."""

    @property
    def unsupported(self) -> str | None:
        """Why the table cannot be followed exactly; None if it can."""

    def keeps(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether it is up to this rank to dump, or delete, each key: bool ``[n]`` for int64 ``[n]``."""

    def as_answered_(self, vectors: torch.Tensor) -> None:
        """Turns rows, float32 ``[n, dim]``, into what a lookup of one id with weight 1 answers."""


class RowSource(Protocol):
    """A table's rows on this rank: which may have changed, what they hold, which keys own them.

    Rows are local, int64 on the table's device. Everything but ``at_rest`` and ``mark`` is called inside
    of ``at_rest``; one ``Tracker`` uses it.
    """

    @property
    def device(self) -> torch.device:
        """Where the rows are."""

    def at_rest(self) -> AbstractContextManager[None]:
        """Where no row and no owner changes; short, since others may wait."""

    def changed(self, since: int | None) -> tuple[torch.Tensor, int]:
        """The rows that may have changed.

        Args:
            since: the moment that an earlier call returned; None: all rows that a key may own.

        Returns:
            The rows, without repeats, and this moment.

        Raises:
            CorruptTableError: the table does not name each row exactly once.
        """

    def settle(self, rows: torch.Tensor) -> None:
        """Takes note that ``changed`` need not name these rows again unless they change again."""

    def owe(self, rows: torch.Tensor) -> torch.Tensor:
        """Makes ``changed`` name settled rows again; returns those that it cannot."""

    def owners(self, rows: torch.Tensor) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """The key that owns each row, and whether one does: int64 and bool ``[n]``."""

    def holds(self, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each key owns a row of this rank now."""

    def locate(self, keys: NDArray[np.int64], rows: torch.Tensor, moment: int) -> torch.Tensor:
        """Where keys are that owned ``rows`` at a moment: ``rows`` itself if all are where they were.

        Else int64 ``[n]``, -1 for a key that owns no row any more.
        """

    def weights(self) -> tuple[torch.Tensor, ...]:
        """The live rows, matrices ``[num_rows, columns]`` that side by side have ``dim`` columns."""

    def fallback_rows(self) -> Mapping[int | None, int]:
        """The rows that answer keys which own none: all keys of the shard (None), or just one.

        ``NO_ROW`` stands for a vector of zeros.
        """

    def mark(self, rows: torch.Tensor | None) -> None:
        """Makes ``changed`` name rows (global rows or keys, as ``DeltaDumper.mark`` says), or all."""


class Follower(Protocol):
    """Follows what happens to the tables of one module, or one store, until it is detached."""

    def catch_up(self) -> None:
        """Takes in what was done to the tables, but not reported yet."""

    def detach(self) -> None:
        """Lets go of the module; its rows must not be asked any more."""


def checked_rows(table: TrackedTable, rows: torch.Tensor) -> torch.Tensor:
    """This rank's rows among global ones, local.

    Raises:
        ValueError: one is not of the table.
    """
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < table.num_embeddings:
        raise ValueError(
            f"rows of {table.fqn} are 0 to {table.num_embeddings - 1}; "
            f"got {int(rows.min())} to {int(rows.max())}"
        )
    local = rows - table.first_row
    return local[(local >= 0) & (local < table.num_rows)]


def copy_rows(weights: tuple[torch.Tensor, ...], rows: torch.Tensor, matrix: torch.Tensor) -> None:
    """Copies rows of matrices that stand side by side into one, float32 ``[n, dim]`` in host memory."""
    column = 0
    for weight in weights:
        columns = matrix[:, column : column + weight.shape[1]]
        column += weight.shape[1]
        if weight.device.type == "cpu" and weight.dtype == torch.float32 and len(weights) == 1:
            torch.index_select(weight, 0, rows, out=columns)
        else:
            columns.copy_(weight.index_select(0, rows))


def flagged(flags: torch.Tensor) -> torch.Tensor:
    """Where a bool tensor is set, int64. NumPy skips runs of zeros, which torch does not on CPU."""
    if flags.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return flags.nonzero().flatten()
