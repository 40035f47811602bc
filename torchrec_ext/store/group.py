"""``RowGroup``: the rows of tables of one dimension, one after the other in flat arrays."""

from __future__ import annotations

from typing import Any

import torch

from torchrec_ext.store import kernels
from torchrec_ext.store.bags import Bags
from torchrec_ext.store.hash_index import Allocate
from torchrec_ext.store.keys import DynamicKeys
from torchrec_ext.store.optimizers import StoreOptimizer, optimizer_from_json
from torchrec_ext.store.places import Place
from torchrec_ext.store.tables import (
    DynamicTable,
    Table,
    check_keys,
    table_from_json,
    table_to_json,
)


class RowGroup:
    """Tables of one dimension that share an optimizer, in flat arrays over all of them.

    Attributes:
        name: its place's name for it.
        dim: the embedding dimension.
        tables: by name, in the order of their rows.
        first_row: where each table starts. A dense table's row of a key is ``first_row + key -
            first_key``; a dynamic table's first row is its default row.
        optimizer: whose state the slots hold.
        weight: float32 ``[num_rows, dim]``.
        slots: the optimizer state by slot name, float32 ``[num_rows, 1]`` or ``[num_rows, dim]``.
        versions: the store's clock when each row was written last, int64 ``[num_rows]``; 0: never;
            negative: the row belongs to no key since then.
    """

    def __init__(
        self,
        place: Place,
        name: str,
        tables: list[Table],
        optimizer: StoreOptimizer,
        *,
        slots_version: int = 0,
        create: bool,
    ) -> None:
        self._place = place
        self.name = name
        self.dim = tables[0].dim
        self.tables = {table.name: table for table in tables}
        self.first_row: dict[str, int] = {}
        self.num_rows = 0
        for table in tables:
            self.first_row[table.name] = self.num_rows
            self.num_rows += table.num_rows
        self.weight = self._array("weight", self.dim, torch.float32, create=create)
        self.versions = self._array("versions", 1, torch.int64, create=create).view(-1)
        self.keys = {
            table.name: DynamicKeys(table, self._allocator(position, create=create))
            for position, table in enumerate(tables)
            if isinstance(table, DynamicTable)
        }
        self.optimizer = optimizer
        self.slots_version = slots_version
        self.slots = self._slots(optimizer, slots_version, create=create)
        # A lookup gives these for keys without a row; an update must not touch them.
        self.default_rows = torch.tensor(
            [self.first_row[name] for name in self.keys], dtype=torch.int64, device=place.device
        )
        if create:
            for table in tables:
                if isinstance(table, DynamicTable):
                    self.rows_of(table.name)[0] = table.default_value

    @classmethod
    def from_json(cls, place: Place, content: dict[str, Any]) -> RowGroup:
        """The group that ``to_json`` described, in the arrays that are there."""
        return cls(
            place,
            str(content["name"]),
            [table_from_json(table) for table in content["tables"]],
            optimizer_from_json(content["optimizer"]),
            slots_version=int(content["slots_version"]),
            create=False,
        )

    def to_json(self) -> dict[str, Any]:
        """It as a JSON object."""
        return {
            "name": self.name,
            "tables": [table_to_json(table) for table in self.tables.values()],
            "optimizer": self.optimizer.to_json(),
            "slots_version": self.slots_version,
        }

    def rows_of(self, table: str) -> torch.Tensor:
        """A table's rows, a view ``[num_rows, dim]`` of the weights."""
        return self.weight.narrow(0, self.first_row[table], self.tables[table].num_rows)

    def slots_of(self, table: str) -> dict[str, torch.Tensor]:
        """A table's optimizer state, views ``[num_rows, 1 or dim]`` by slot name."""
        first, count = self.first_row[table], self.tables[table].num_rows
        return {name: slot.narrow(0, first, count) for name, slot in self.slots.items()}

    def versions_of(self, table: str) -> torch.Tensor:
        """When a table's rows were written last, a view ``[num_rows]``."""
        return self.versions.narrow(0, self.first_row[table], self.tables[table].num_rows)

    def check_keys(self, table: str, keys: torch.Tensor) -> None:
        """Checks keys of a table.

        Raises:
            ValueError: they are not int64, not a vector, or out of a dense table's range.
        """
        check_keys(self.tables[table], keys)

    def local_rows(self, table: str, keys: torch.Tensor) -> torch.Tensor:
        """The table's rows of keys that were checked; the default row for those without one."""
        described = self.tables[table]
        if isinstance(described, DynamicTable):
            return self.keys[table].find(keys)
        return keys - described.first_key if described.first_key else keys

    @torch.no_grad()
    def initialize_rows(self, table: str, rows: torch.Tensor, clock: int) -> None:
        """Gives rows that keys of a dynamic table just received their initial weight and state.

        Args:
            table: the table's name.
            rows: the table's rows, int64 ``[n]``.
            clock: the store's clock.
        """
        if not len(rows):
            return
        described = self.tables[table]
        assert isinstance(described, DynamicTable)
        keys = self.keys[table].keys_of(rows)
        self.rows_of(table).index_copy_(0, rows, described.initializer.rows(keys, self.dim))
        for slot in self.optimizer.slots:
            self.slots_of(table)[slot.name].index_fill_(0, rows, self.optimizer.initial(slot))
        # Last: a row whose version is not positive is one that a process died over; see `repair`.
        self.versions_of(table).index_fill_(0, rows, clock)

    def release_rows(self, table: str, rows: torch.Tensor, clock: int) -> None:
        """Takes note that rows are about to lose their keys."""
        self.versions_of(table).index_fill_(0, rows, -clock)

    def update(self, bags: Bags, grad: torch.Tensor, *, step: int, lr: float | None, clock: int) -> None:
        """Applies the gradient of rows that were pooled; default rows are left as they are.

        Args:
            bags: which rows.
            grad: the gradient of what was pooled, float32 ``[batch_size, num_features * dim]``.
            step: the update's number, from 1.
            lr: the learning rate; None: the optimizer's.
            clock: the store's clock.
        """
        kernels.update_(
            self.weight,
            self.slots,
            self.versions,
            bags.without(self.default_rows) if len(self.default_rows) else bags,
            grad,
            self.optimizer,
            lr=self.optimizer.lr if lr is None else lr,
            step=step,
            version=clock,
        )

    def repair(self, clock: int) -> None:
        """Finishes what a process that died in the middle of a change left undone.

        Which rows the change had reached is not known: all of them count as written.
        """
        for name in self.tables:
            versions = self.versions_of(name)
            if name not in self.keys:
                versions.fill_(clock)
                continue
            keys = self.keys[name]
            if not keys.check():
                keys.rebuild()
            rows = keys.rows_in_use()
            self.initialize_rows(name, rows[versions[rows] <= 0], clock)
            left = versions > 0
            left[rows] = False
            versions.masked_fill_(left, -clock)
            versions.index_fill_(0, rows, clock)

    def new_slots(self, optimizer: StoreOptimizer) -> dict[str, torch.Tensor]:
        """Makes the initial state of another optimizer, for ``set_optimizer`` to put in place."""
        self.drop_new_slots()  # of a process that died
        return self._slots(optimizer, self.slots_version + 1, create=True)

    def set_optimizer(self, optimizer: StoreOptimizer, slots: dict[str, torch.Tensor] | None) -> None:
        """Changes the optimizer, and its state to what ``new_slots`` made; None: the state stays."""
        self.optimizer = optimizer
        if slots is not None:
            self.slots_version += 1
            self.slots = slots

    def follow(self, content: dict[str, Any]) -> None:
        """Takes over the optimizer, and its state, that another process gave to the group it describes."""
        optimizer, slots_version = optimizer_from_json(content["optimizer"]), int(content["slots_version"])
        if slots_version != self.slots_version:
            self.slots = self._slots(optimizer, slots_version, create=False)
        self.optimizer, self.slots_version = optimizer, slots_version

    def drop_new_slots(self) -> None:
        """Removes what ``new_slots`` made."""
        self._place.drop(f"{self.name}.slots_{self.slots_version + 1}.")

    def drop_old_slots(self) -> None:
        """Removes the state of optimizers that were replaced."""
        for version in range(self.slots_version):
            self._place.drop(f"{self.name}.slots_{version}.")

    def _slots(self, optimizer: StoreOptimizer, version: int, *, create: bool) -> dict[str, torch.Tensor]:
        slots = {}
        for slot in optimizer.slots:
            name = f"slots_{version}.{slot.name}"
            array = self._array(name, slot.columns(self.dim), torch.float32, create=create)
            if create and (value := optimizer.initial(slot)) != 0.0:
                array.fill_(value)
            slots[slot.name] = array
        return slots

    def _array(self, name: str, columns: int, dtype: torch.dtype, *, create: bool) -> torch.Tensor:
        return self._place.array(f"{self.name}.{name}", (self.num_rows, columns), dtype, create=create)

    def _allocator(self, position: int, *, create: bool) -> Allocate:
        def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return self._place.array(f"{self.name}.keys_{position}.{name}", shape, dtype, create=create)

        return allocate
