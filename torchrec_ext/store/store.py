"""``Store``: what every place for rows can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

import torch
from typing_extensions import Self

from torchrec_ext.store.init_fns import InitFn
from torchrec_ext.store.mismatches import OnMismatch, RestoreReport
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.tables import Table

# The versions, in `Rows`, of keys without a row and of rows that were not read yet.
NO_ROW, UNREAD = -1, -2


@dataclass(frozen=True)
class Rows:
    """Rows as they were read, and what is needed to tell later whether they changed.

    Attributes:
        keys: int64 ``[n]``.
        rows: float32 ``[n, dim]``.
        versions: int64 ``[n]``: the store's clock when a row was written last; of keys without a row,
            ``NO_ROW``. A row that is given to another key counts as written.
    """

    keys: torch.Tensor
    rows: torch.Tensor
    versions: torch.Tensor


class Store(ABC):
    """Tables of rows, each with its optimizer state.

    Keys and rows are tensors on the store's device, the CPU unless the store says otherwise. A store may
    be used from any thread. A read sees every update that this process issued before it, waited for or
    not. A row and its optimizer state are allocated and initialised together, and an update changes them
    together: no reader, snapshot or other process sees one without the other.

    Every method that takes keys raises ``KeyError`` for a table that is not there and ``ValueError`` for
    keys that are not int64 or, in a dense table, out of its range; nothing was read or written then.
    """

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where keys and rows are."""

    @property
    @abstractmethod
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""

    @abstractmethod
    def create_tables(self, tables: Sequence[Table], optimizer: StoreOptimizer) -> list[str]:
        """Makes tables that share an optimizer, or finds them.

        Tables of one dimension that are created together lie together, so that one lookup can serve all.

        Returns:
            The names of those that were made just now, and hold initial rows; the others were there.

        Raises:
            ValueError: a table of the name is there, but another one.
        """

    @abstractmethod
    def optimizer(self, table: str) -> StoreOptimizer:
        """The optimizer whose state a table holds."""

    @abstractmethod
    def set_optimizer(self, tables: Iterable[str], optimizer: StoreOptimizer) -> None:
        """Changes the optimizer of tables; state of another kind makes room for initial state.

        That the state of rows that were written is discarded is logged as a warning.

        Tables that were created together change together: the other tables' names must be there too.
        """

    @abstractmethod
    def pull(self, table: str, keys: torch.Tensor, *, admit: bool = False) -> torch.Tensor:
        """Reads rows.

        Args:
            table: the table's name.
            keys: int64 ``[n]``, repeats allowed.
            admit: whether this is a lookup in training, which counts for a dynamic table's filter.

        Returns:
            float32 ``[n, dim]``; keys of a dynamic table without a row get the default row.
        """

    @abstractmethod
    def pull_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor]],
        *,
        admit: bool = False,
        counts: Sequence[torch.Tensor] | None = None,
        ahead: bool = False,
    ) -> list[Rows]:
        """Reads rows of several tables in one go, and when they were written last.

        Args:
            requests: tables and keys, int64 ``[n]`` each.
            admit: as for ``pull``.
            counts: how often each key was looked up, int64 ``[n]`` each; by default once each time it
                is given.
            ahead: whether ``refresh_many`` will bring these rows up to date before they are used, so
                that the store may prepare for it.
        """

    @abstractmethod
    def refresh_many(
        self,
        held: Sequence[tuple[str, Rows]],
        *,
        admit: bool = False,
        counts: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """Brings rows that were read earlier up to date, in place.

        Only rows written since are read again.

        Args:
            held: tables and what ``pull_many`` read of them.
            admit: as for ``pull``; the lookup counts now.
            counts: as for ``pull_many``.

        Returns:
            How many rows were read again.
        """

    def update(
        self,
        table: str,
        keys: torch.Tensor,
        grads: torch.Tensor,
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> None:
        """Applies gradients by the table's optimizer.

        Args:
            table: the table's name.
            keys: int64 ``[n]``; gradients of a key that occurs several times are added up. Keys of a
                dynamic table without a row are left out.
            grads: float32 ``[n, dim]``.
            step: the update's number, from 1.
            lr: the learning rate, by default the optimizer's.
        """
        self.update_many([(table, keys, grads)], step=step, lr=lr)

    @abstractmethod
    def update_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> None:
        """Applies gradients to several tables in one go; see ``update``."""

    @abstractmethod
    def update_async(
        self,
        table: str,
        keys: torch.Tensor,
        grads: torch.Tensor,
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> Future[None]:
        """Hands an update over, and returns at once; the tensors must not change any more.

        Returns:
            Its ``result()`` waits for the update and raises what went wrong; so does, once, ``drain``,
            which every read calls.
        """

    @abstractmethod
    def drain(self) -> None:
        """Waits for all asynchronous updates of this process.

        Raises:
            RuntimeError: one failed; the cause is chained.
        """

    @abstractmethod
    def read(self, table: str, keys: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Rows and their optimizer state, float32 ``[n, dim]`` and ``[n, 1]`` or ``[n, dim]`` by slot."""

    @abstractmethod
    def write(
        self,
        table: str,
        keys: torch.Tensor,
        rows: torch.Tensor | None = None,
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Overwrites rows, their optimizer state, or both.

        Args:
            table: the table's name.
            keys: int64 ``[n]``, no repeats. Keys of a dynamic table without a row are admitted, with
                initial values for what is not given.
            rows: float32 ``[n, dim]``.
            slots: by slot name, float32 ``[n, 1]`` or ``[n, dim]``.
        """

    @abstractmethod
    def snapshot(self, tables: Iterable[str] | None = None) -> StoreSnapshot:
        """A copy of tables at one moment, while others go on updating; by default of all."""

    @abstractmethod
    def restore(
        self,
        snapshot: StoreSnapshot,
        on_mismatch: OnMismatch = "initialize",
        *,
        init_fns: Mapping[str, InitFn] | None = None,
    ) -> RestoreReport:
        """Puts the tables of a snapshot back; others stay as they are.

        The store's tables may have other numbers of rows, initializers and filters than the snapshot's. What
        the snapshot lacks is a mismatch: keys that have a weight but no state of a slot, or the other way
        round, a slot that is not there at all, and keys of a dense table that are not there.

        Args:
            snapshot: the snapshot.
            on_mismatch: ``initialize``: every key is kept, and its weight gets the table's initial value, its
                state the optimizer's, where there is none. ``drop``: keys without a weight and all slots are
                left out; in a dense table, their rows get initial values. ``error``: it is an error.
            init_fns: by name of a dense table that a function filled, what fills its rows in place. It is
                called if the snapshot lacks some, before anything is changed.

        Returns:
            What was missing; it is logged as a warning if anything was.

        Raises:
            ValueError: the store has other tables or optimizers of these names, or the snapshot's tensors
                do not fit together; nothing was changed.
            CheckpointError: there are mismatches and they are to be an error, or dropping keys would leave
                none, or the snapshot has keys that a dense table does not have, or lacks rows of one that a
                function filled which is not there; nothing was changed.
            TableFullError: it has more keys than a table has rows; nothing was changed.
        """

    @abstractmethod
    def close(self) -> None:
        """Finishes what is under way and lets go of memory, files and connections; idempotent."""

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled, nor can a module that has its rows there: "
            "make another one and load the state_dict"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
