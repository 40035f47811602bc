"""``LocalStore``: rows in memory that this process can address, its own or shared with others."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager

import torch

from torchrec_ext.store import kernels, row_access
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.init_fns import InitFn, InitFns, filled_in
from torchrec_ext.store.mismatches import OnMismatch, RestoreReport, fit_snapshot
from torchrec_ext.store.moments import restore_snapshot, take_snapshot
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.places import Place
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.state import StoreState
from torchrec_ext.store.store import UNREAD, Rows, Store
from torchrec_ext.store.table_changes import create_tables, set_optimizer
from torchrec_ext.store.tables import KeyOf, Table
from torchrec_ext.store.update_queue import UpdateQueue

logger = logging.getLogger(__name__)

# Rows read or written under one lock, so that a long read does not hold up others.
ROWS_PER_LOCK = 1 << 16


class LocalStore(Store):
    """A store over one place for its arrays; see ``MemoryStore``, ``SharedMemoryStore``, ``FileStore``.

    Besides what every store can do, it lets lookups and updates run on the rows where they lie: that is
    the local fast path.

    Args:
        place: where the arrays are.

    Raises:
        StoreError: what is there cannot be used.
    """

    def __init__(self, place: Place) -> None:
        self._state = StoreState(place)
        self._updates = UpdateQueue()
        self._init_fns = InitFns()

    # What a store can do

    @property
    def device(self) -> torch.device:
        """Where keys and rows are."""
        return self._state.place.device

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""
        with self._state.locked(exclusive=False):
            return {name: self._state.group_of(name).tables[name] for name in self._state.names}

    @property
    def place(self) -> Place:
        """Where the arrays are.

        Raises:
            StoreError: the store was closed.
        """
        return self._state.place

    @property
    def clock(self) -> int:
        """Counts the store's changes, of all processes; rows are stamped with it."""
        return self._state.clock

    def create_tables(
        self,
        tables: Sequence[Table],
        optimizer: StoreOptimizer,
        *,
        init_fns: Mapping[str, InitFn] | None = None,
        key_of: KeyOf | None = None,
    ) -> list[str]:
        """Makes tables that share an optimizer, or finds them; see ``Store.create_tables``.

        Args:
            tables: the tables.
            optimizer: whose state they hold.
            init_fns: by name of a dense table, what fills its rows in place when it is made; its
                initializer is ``ByFunction`` then, whichever it was.
            key_of: what initializers take the keys of dense tables for; by default what they are.
        """
        made = create_tables(self._state, tables, optimizer, init_fns or {}, key_of)
        self._init_fns.remember(init_fns or {})
        return made

    def optimizer(self, table: str) -> StoreOptimizer:
        """See ``Store``."""
        with self._state.locked(exclusive=False):
            return self._state.group_of(table).optimizer

    def set_optimizer(self, tables: Iterable[str], optimizer: StoreOptimizer) -> None:
        """See ``Store``."""
        self.drain()
        set_optimizer(self._state, set(tables), optimizer)

    def pull(self, table: str, keys: torch.Tensor, *, admit: bool = False) -> torch.Tensor:
        """See ``Store``."""
        self.drain()
        with self._state.locked(exclusive=admit):
            group, rows = row_access.flat_rows(self._state, table, keys, admit=admit)
            return group.weight.index_select(0, rows)

    def pull_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor]],
        *,
        admit: bool = False,
        counts: Sequence[torch.Tensor] | None = None,
        ahead: bool = False,
    ) -> list[Rows]:
        """See ``Store``."""
        self.drain()
        self._check(requests)
        found = []
        for i, (table, keys) in enumerate(requests):
            held = Rows(
                keys,
                torch.empty(len(keys), self.group_of(table).dim, device=self.device),
                torch.full_like(keys, UNREAD),
            )
            found.append(held)
            for start in range(0, len(keys), ROWS_PER_LOCK):
                piece = slice(start, start + ROWS_PER_LOCK)
                part = Rows(held.keys[piece], held.rows[piece], held.versions[piece])
                with self._state.locked(exclusive=admit):
                    counted = counts[i][piece] if counts else None
                    row_access.refresh(self._state, table, part, admit=admit, counts=counted)
        return found

    def refresh_many(
        self,
        held: Sequence[tuple[str, Rows]],
        *,
        admit: bool = False,
        counts: Sequence[torch.Tensor] | None = None,
    ) -> int:
        """See ``Store``."""
        self.drain()
        with self._state.locked(exclusive=admit):
            return sum(
                row_access.refresh(
                    self._state, table, rows, admit=admit, counts=counts[i] if counts else None
                )
                for i, (table, rows) in enumerate(held)
            )

    def update_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> None:
        """See ``Store``."""
        self.drain()
        self._update_many(requests, step=step, lr=lr)

    def update_async(
        self,
        table: str,
        keys: torch.Tensor,
        grads: torch.Tensor,
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> Future[None]:
        """See ``Store``."""
        self._check([(table, keys)])
        return self._updates.submit(lambda: self._update_many([(table, keys, grads)], step=step, lr=lr))

    def drain(self) -> None:
        """See ``Store``."""
        self._updates.drain()

    def read(self, table: str, keys: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See ``Store``."""
        self.drain()
        with self._state.locked(exclusive=False):
            group, rows = row_access.flat_rows(self._state, table, keys)
            slots = {name: slot.index_select(0, rows) for name, slot in group.slots.items()}
            return group.weight.index_select(0, rows), slots

    def write(
        self,
        table: str,
        keys: torch.Tensor,
        rows: torch.Tensor | None = None,
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """See ``Store``."""
        self.drain()
        with self._state.locked(exclusive=True):
            row_access.write(self._state, table, keys, rows, slots or {})

    def evict_unused(self, table: str, steps: int) -> int:
        """Evicts keys of a dynamic table that were not looked up in training for ``steps`` steps.

        Returns:
            How many.
        """
        self.drain()
        with self._state.locked(exclusive=True):
            return row_access.evict_unused(self._state, table, steps)

    # The local fast path

    def group_of(self, table: str) -> RowGroup:
        """The group that a table's rows are in."""
        with self._state.locked(exclusive=False):
            return self._state.group_of(table)

    def weight(self, table: str) -> torch.Tensor:
        """A dense table's rows, a view ``[num_rows, dim]``. What is written there, ``touch`` makes known."""
        return self.group_of(table).rows_of(table)

    def reading(self) -> AbstractContextManager[None]:
        """Where nobody writes, so that what is read of groups is of one moment; ``drain`` before."""
        return self._state.locked(exclusive=False)

    def touch(self, table: str, rows: torch.Tensor | None = None) -> None:
        """Takes note that rows of a table were written through ``weight`` or ``slots``; by default all."""
        with self._state.locked(exclusive=True):
            row_access.touch(self._state, table, rows)

    def local_lookup_flat(self, group: RowGroup, bags: Bags) -> torch.Tensor:
        """Pools rows of a group, ``[batch_size, num_features * dim]``; see ``kernels.pool``."""
        self.drain()
        with self._state.locked(exclusive=False):
            return kernels.pool(group.weight, bags)

    def local_update_flat(
        self,
        group: RowGroup,
        bags: Bags,
        grad: torch.Tensor,
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> None:
        """Applies the gradient of what ``local_lookup_flat`` returned, by the group's optimizer.

        Args:
            group: the group.
            bags: what was looked up. Default rows are left as they are.
            grad: float32 ``[batch_size, num_features * dim]``.
            step: the update's number, from 1.
            lr: the learning rate, by default the optimizer's.
        """
        self.drain()
        with self._state.writing(step) as clock:
            group.update(bags, grad, step=step, lr=lr, clock=clock)

    # Snapshots

    def snapshot(self, tables: Iterable[str] | None = None) -> StoreSnapshot:
        """See ``Store``."""
        self.drain()
        with self._state.locked(exclusive=False):
            return take_snapshot(self._state, self._state.names if tables is None else tables)

    def restore(
        self,
        snapshot: StoreSnapshot,
        on_mismatch: OnMismatch = "initialize",
        *,
        init_fns: Mapping[str, InitFn] | None = None,
        key_of: KeyOf | None = None,
    ) -> RestoreReport:
        """See ``Store``; functions that tables were made with are known as long as they are there.

        Args:
            snapshot: the snapshot.
            on_mismatch: what to do about what it lacks.
            init_fns: see ``Store``.
            key_of: see ``create_tables``.
        """
        self.drain()
        with self._state.locked(exclusive=True):
            described = {
                name: (group.tables[name], group.optimizer)
                for group in self._state.groups
                for name in group.tables
            }
            fitted, report = fit_snapshot(snapshot, described, on_mismatch)
            needed = self._init_fns.to_restore(fitted, init_fns or {})
            filled = filled_in(self._state.place, fitted, needed)
            with filled as whole, self._state.writing() as clock:
                restore_snapshot(self._state, whole, clock, key_of)
        report.log(logger)
        return report

    def sync(self) -> None:
        """Waits until what was written would survive a crash of the machine."""
        self.drain()
        with self._state.locked(exclusive=False):
            self._state.place.sync()

    def close(self) -> None:
        """See ``Store``; views that were handed out stay valid."""
        if not self._state.is_open:
            return
        try:
            self.drain()
        finally:
            self._updates.close()
            self._state.close()

    def _check(self, requests: Iterable[tuple[str, torch.Tensor]]) -> None:
        with self._state.locked(exclusive=False):
            row_access.check_keys(self._state, requests)

    def _update_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
        *,
        step: int,
        lr: float | None,
    ) -> None:
        with self._state.locked(exclusive=True):
            row_access.update(self._state, requests, step=step, lr=lr)
