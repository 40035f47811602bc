"""A collection's optimizer state in the form of TorchRec's fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_ext.recstore.row_shards import RowShards
from torchrec_ext.recstore.whole_tables import read_slots, write_rows
from torchrec_ext.store import Adam, DenseTable, Store


@dataclass(frozen=True)
class OptimizedTable:
    """A table of a ``StoreFusedOptimizer``.

    Attributes:
        name: its name.
        table: what of it is here; None: a dynamic table, whose state is saved with its keys.
        shards: which rows these are; None: all.
        group: the position of its parameter group.
    """

    name: str
    table: DenseTable | None
    shards: RowShards | None = None
    group: int = 0


class StoreFusedOptimizer(FusedOptimizer):
    """Saves and loads the optimizer state that a store keeps, and holds the learning rates.

    It is what ``DistributedModelParallel`` and ``CombinedOptimizer`` ask of a module that keeps its
    optimizer state itself. Names and shapes are those of TorchRec's fused optimizers: ``<table>.momentum1``
    is what the first slot holds. If the step number counts, ``<table>.step`` is the number of updates.

    Args:
        store: where the state is.
        tables: by the names of their weights in the module.
        learning_rates: of each parameter group; none if a ``Sparse*`` optimizer trains the rows.
    """

    def __init__(
        self,
        store: Store,
        tables: Mapping[str, OptimizedTable],
        learning_rates: Sequence[float] = (),
    ) -> None:
        params = {name: torch.empty(0) for name in tables}
        self.steps = [torch.tensor(0, dtype=torch.int64) for _ in learning_rates]
        state = _LiveState(store, dict(zip(params.values(), tables.values(), strict=True)), self.steps)
        groups = [
            {"params": [params[name] for name, table in tables.items() if table.group == number], "lr": lr}
            for number, lr in enumerate(learning_rates)
        ]
        super().__init__(params, state, groups)

    def learning_rate(self, group: int) -> float:
        """The learning rate of a parameter group, now."""
        return float(self.param_groups[group]["lr"])

    def count_step(self, group: int) -> int:
        """The number of the next update of a parameter group's rows."""
        self.steps[group] += 1
        return int(self.steps[group])

    def set_optimizer_step(self, step: int) -> None:
        """Sets the number of updates so far."""
        for counter in self.steps:
            counter.fill_(step)

    def step(self, closure: Any = None) -> None:
        """Does nothing: rows are updated in the backward pass, or by a ``Sparse*`` optimizer."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""


class _LiveState(Mapping[torch.Tensor, "dict[str, Any]"]):
    """By table, its state; asked for each time, as another optimizer has other slots."""

    def __init__(
        self, store: Store, tables: Mapping[torch.Tensor, OptimizedTable], steps: Sequence[torch.Tensor]
    ) -> None:
        self._store, self._tables, self._steps = store, tables, steps

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        of = self._tables[param]
        optimizer = self._store.optimizer(of.name)
        state: dict[str, Any] = {}
        if of.table is not None:
            for position, slot in enumerate(optimizer.slots):
                of_torchrec = "momentum1" if position == 0 else slot.name
                state[f"{of.name}.{of_torchrec}"] = _SlotState(
                    self._store, of.table, slot.name, slot.per_row, of.shards
                )
        if isinstance(optimizer, Adam) and self._steps:
            state[f"{of.name}.step"] = self._steps[of.group]
        return state

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


@dataclass(frozen=True)
class _SlotState:
    """One slot of a table: TorchRec's keyed optimizers save and load what has these two methods by them."""

    store: Store
    table: DenseTable
    slot: str
    per_row: bool
    shards: RowShards | None

    def state_dict(self) -> torch.Tensor | ShardedTensor:
        values = read_slots(self.store, self.table)[self.slot]
        if self.per_row:
            values = values.squeeze(1)
        return values if self.shards is None else self.shards.sharded(values)

    def load_state_dict(self, values: torch.Tensor | ShardedTensor) -> None:
        local = values if self.shards is None else self.shards.local(values)
        if self.per_row:
            local = local.unsqueeze(1)
        write_rows(self.store, self.table, slots={self.slot: local})
