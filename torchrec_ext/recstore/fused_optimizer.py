"""A collection's optimizer state in the form of TorchRec's fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.optim.fused import FusedOptimizer

from torchrec_ext.recstore.whole_tables import read_slots, write_rows
from torchrec_ext.store import DenseTable, Store


class StoreFusedOptimizer(FusedOptimizer):
    """Saves and loads the optimizer state that a store keeps for dense tables.

    It does not train: a ``Sparse*`` optimizer does. It is what ``DistributedModelParallel`` and
    ``CombinedOptimizer`` ask of a module that keeps its optimizer state itself.

    Args:
        store: where the state is.
        tables: by the name of their weights in the module.
    """

    def __init__(self, store: Store, tables: Mapping[str, DenseTable]) -> None:
        params = {name: torch.empty(0) for name in tables}
        tables_of = dict(zip(params.values(), tables.values(), strict=True))
        super().__init__(params, _LiveState(store, tables_of), [])

    def step(self, closure: Any = None) -> None:
        """Does nothing."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""


class _LiveState(Mapping[torch.Tensor, dict[str, "_TableState"]]):
    """By table, its slots; asked for each time, as another optimizer has others."""

    def __init__(self, store: Store, tables: Mapping[torch.Tensor, DenseTable]) -> None:
        self._store, self._tables = store, tables

    def __getitem__(self, param: torch.Tensor) -> dict[str, _TableState]:
        table = self._tables[param]
        return {
            f"{table.name}.{slot.name}": _TableState(self._store, table, slot.name)
            for slot in self._store.optimizer(table.name).slots
        }

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (param for param, table in self._tables.items() if self._store.optimizer(table.name).slots)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _TableState:
    """One slot of a table: TorchRec's keyed optimizers save and load what has these two methods by them."""

    def __init__(self, store: Store, table: DenseTable, slot: str) -> None:
        self._store, self._table, self._slot = store, table, slot

    def state_dict(self) -> torch.Tensor:
        return read_slots(self._store, self._table)[self._slot]

    def load_state_dict(self, values: torch.Tensor) -> None:
        write_rows(self._store, self._table, slots={self._slot: values})
