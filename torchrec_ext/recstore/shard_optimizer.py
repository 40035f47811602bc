"""A sharded collection's optimizer state in the form of TorchRec's fused optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.types import ShardedTensor
from torchrec.optim.fused import FusedOptimizer

from torchrec_ext.recstore.shards import RowShards
from torchrec_ext.recstore.whole_tables import read_slots, write_rows
from torchrec_ext.store import Adam, DenseTable, Store


@dataclass(frozen=True)
class OptimizedShard:
    """A table whose state is saved with the optimizer.

    Attributes:
        table: this rank's shard, as a table of its own; None: a dynamic table, whose state is saved with
            its keys.
        rows: which rows it has.
        group: the position of its parameter group.
    """

    table: DenseTable | None
    rows: RowShards
    group: int


class ShardFusedOptimizer(FusedOptimizer):
    """Saves and loads the optimizer state that a store keeps, and holds the learning rates.

    Names and shapes are those of TorchRec's fused optimizers: ``<table>.momentum1`` is what the first
    slot holds. If the bias of moments is corrected, ``<table>.step`` is the number of updates.

    Args:
        store: where the state is.
        shards: by the name of their weights.
        learning_rates: of each parameter group; none if a ``Sparse*`` optimizer trains the rows.
    """

    def __init__(
        self, store: Store, shards: Mapping[str, OptimizedShard], learning_rates: Sequence[float]
    ) -> None:
        params = {name: torch.empty(0) for name in shards}
        self.steps = [torch.tensor(0, dtype=torch.int64) for _ in learning_rates]
        state = _LiveState(store, dict(zip(params.values(), shards.items(), strict=True)), self.steps)
        groups = [
            {"params": [params[name] for name, shard in shards.items() if shard.group == number], "lr": lr}
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
        """Does nothing: rows are updated in the backward pass."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Does nothing."""


class _LiveState(Mapping[torch.Tensor, "dict[str, Any]"]):
    """By table, its slots; asked for each time, as another optimizer has others."""

    def __init__(
        self,
        store: Store,
        shards: Mapping[torch.Tensor, tuple[str, OptimizedShard]],
        steps: Sequence[torch.Tensor],
    ) -> None:
        self._store, self._shards, self._steps = store, shards, steps

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        weight, shard = self._shards[param]
        name = weight.rpartition(".")[0]
        optimizer = self._store.optimizer(name)
        state: dict[str, Any] = {}
        if shard.table is not None:
            for position, slot in enumerate(optimizer.slots):
                of_torchrec = "momentum1" if position == 0 else slot.name
                state[f"{name}.{of_torchrec}"] = _SlotShard(self._store, shard.table, slot.name, shard.rows)
        if isinstance(optimizer, Adam) and self._steps:
            state[f"{name}.step"] = self._steps[shard.group]
        return state

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._shards)

    def __len__(self) -> int:
        return len(self._shards)


class _SlotShard:
    """One slot of a table: TorchRec's keyed optimizers save and load what has these two methods by them."""

    def __init__(self, store: Store, table: DenseTable, slot: str, rows: RowShards) -> None:
        self._store, self._table, self._slot, self._rows = store, table, slot, rows

    def state_dict(self) -> ShardedTensor:
        values = read_slots(self._store, self._table)[self._slot]
        return self._rows.sharded(values.squeeze(1) if self._per_row else values)

    def load_state_dict(self, values: torch.Tensor | ShardedTensor) -> None:
        local = self._rows.local(values)
        write_rows(
            self._store, self._table, slots={self._slot: local.unsqueeze(1) if self._per_row else local}
        )

    @property
    def _per_row(self) -> bool:
        slots = self._store.optimizer(self._table.name).slots
        return next(slot.per_row for slot in slots if slot.name == self._slot)
