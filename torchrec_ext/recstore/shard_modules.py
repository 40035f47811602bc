"""This rank's shards as modules, so that a sharded collection's ``state_dict`` holds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer

from torchrec_ext.recstore.shards import RowShards
from torchrec_ext.recstore.table_modules import DenseRows, load_weight
from torchrec_ext.recstore.whole_tables import read_table
from torchrec_ext.store import DenseTable, DynamicTable, Store, StoreSnapshot, TableSnapshot
from torchrec_ext.zch.routing import ShardRouting

# The attribute of parameters that other optimizers leave alone, as torch and TorchRec name it.
_OPTIMIZED_ELSEWHERE = "_in_backward_optimizers"


class DenseShard(DenseRows):
    """This rank's rows of a dense table: ``weight``, in the ``state_dict`` a tensor over all ranks.

    The parameter is there if the rows are in reach.

    Args:
        store: where the rows are; its table may be larger than the shard.
        table: the shard as a table of its own.
        rows: which rows they are.
    """

    def __init__(self, store: Store, table: DenseTable, rows: RowShards) -> None:
        super().__init__(store, table)
        self._shards = rows
        for parameter in self.parameters():
            setattr(parameter, _OPTIMIZED_ELSEWHERE, [EmptyFusedOptimizer()])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        assert self._store is not None
        destination[f"{prefix}weight"] = self._shards.sharded(read_table(self._store, self._table))

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = f"{prefix}weight"
        if key in state_dict:
            try:
                state_dict = {**state_dict, key: self._shards.local(state_dict[key])}
            except ValueError as error:
                error_msgs.append(f"{key}: {error}")
                return
        load_weight(
            self._store, self._table, state_dict, prefix, strict, missing_keys, unexpected_keys, error_msgs
        )


@dataclass(frozen=True)
class DynamicShardSpec:
    """One dynamic table of a sharded collection.

    Attributes:
        table: this rank's part, or the whole table if all ranks share the store.
        rows: how many entries of the ``state_dict``'s tensors each rank has.
    """

    table: DynamicTable
    rows: RowShards


class DynamicShards(nn.Module):
    """The dynamic tables of a sharded collection: ``<table>.keys``, ``.weight``, ``.slots.<name>`` and so on.

    In the ``state_dict`` these are tensors over all ranks with ``num_embeddings`` entries, in which each
    rank fills as many of its own as it has keys. So their shape does not depend on the number of
    ranks, and a checkpoint can be loaded by another: entries are then sent to the ranks that their
    keys belong to. Loading replaces what the tables hold, and all ranks have to take part.

    Args:
        store: where the rows are.
        shared: whether it is one store for all ranks; then rank 0 saves and loads for all.
        tables: the tables.
    """

    def __init__(self, store: Store, shared: bool, tables: Mapping[str, DynamicShardSpec]) -> None:
        super().__init__()
        self._store, self._shared, self._tables = store, shared, dict(tables)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self._tables:
            return
        snapshot = self._snapshot()
        destination[f"{prefix}step"] = torch.tensor(0 if snapshot is None else snapshot.step)
        for name, spec in self._tables.items():
            found = None if snapshot is None else snapshot.tables[name]
            for key, tensor in self._packed(spec, found).items():
                destination[f"{prefix}{name}.{key}"] = spec.rows.sharded(tensor)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        tensors = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        parts = {}
        for name, spec in self._tables.items():
            parts[name] = {key: tensors.pop(f"{prefix}{name}.{key}", None) for key in self._shapes(spec)}
        absent = [
            f"{prefix}{name}.{key}" for name, part in parts.items() for key in part if part[key] is None
        ]
        step = tensors.pop(f"{prefix}step", None)
        unexpected_keys += list(tensors) if strict else []
        missing_keys += absent if strict else []
        # A table without some of what belongs to its keys would be another one.
        if not self._tables or absent or (strict and tensors):
            return
        arrived = {name: self._arrived(self._tables[name], part) for name, part in parts.items()}
        if (now := self._snapshot()) is not None:
            loaded = {name: _restored(now.tables[name], part) for name, part in arrived.items()}
            self._store.restore(
                StoreSnapshot(now.clock, now.step if step is None else int(step), {**now.tables, **loaded})
            )
        if self._shared:
            dist.barrier(next(iter(self._tables.values())).rows.process_group)

    def _snapshot(self) -> StoreSnapshot | None:
        """What this rank saves and loads, None: another does."""
        spec = next(iter(self._tables.values()))
        return None if self._shared and spec.rows.rank else self._store.snapshot()

    def _shapes(self, spec: DynamicShardSpec) -> dict[str, tuple[list[int], torch.dtype]]:
        """Of each tensor of a table: the shape of an entry, and the dtype."""
        integers: tuple[list[int], torch.dtype] = ([], torch.int64)
        slots = {
            f"slots.{slot.name}": ([slot.columns(spec.table.dim)], torch.float32)
            for slot in self._store.optimizer(spec.table.name).slots
        }
        return {
            **dict.fromkeys(_INTEGERS, integers),
            "has_key": ([], torch.bool),
            "weight": ([spec.table.dim], torch.float32),
            **slots,
        }

    def _packed(self, spec: DynamicShardSpec, found: TableSnapshot | None) -> dict[str, torch.Tensor]:
        """This rank's entries, those in use first."""
        packed = {
            key: torch.zeros([spec.rows.count, *shape], dtype=dtype)
            for key, (shape, dtype) in self._shapes(spec).items()
        }
        if found is not None:
            packed["has_key"][: len(found.keys)] = True
            for key, values in _tensors_of(found).items():
                packed[key][: len(values)] = values
        return packed

    def _arrived(self, spec: DynamicShardSpec, part: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What this rank has to hold, of what all ranks loaded."""
        local = {key: spec.rows.local(value) for key, value in part.items()}
        waiting = local["candidate_counts"] > 0
        keyed = local.pop("has_key")
        rows = {key: value[waiting if key.startswith("candidate") else keyed] for key, value in local.items()}
        world_size = len(spec.rows.sizes)
        if self._shared or world_size == 1:
            return rows
        routing = ShardRouting(world_size, 1)
        arrived = {}
        for keys_name, prefix in (("keys", ""), ("candidates", "candidate")):
            owners = torch.from_numpy(routing.shard_of(rows[keys_name].numpy()))
            order = owners.argsort(stable=True)
            counts = torch.bincount(owners, minlength=world_size)
            for key, values in rows.items():
                if key.startswith("candidate") == bool(prefix):
                    arrived[key] = _exchange(values[order], counts, spec.rows.process_group)
        return arrived


_INTEGERS = ("keys", "frequencies", "last_used", "candidates", "candidate_counts")


def _tensors_of(table: TableSnapshot) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(table, name) for name in (*_INTEGERS, "weight")}
    return {**tensors, **{f"slots.{name}": values for name, values in table.slots.items()}}


def _restored(table: TableSnapshot, tensors: Mapping[str, torch.Tensor]) -> TableSnapshot:
    fields: dict[str, Any] = {name: tensors[name] for name in (*_INTEGERS, "weight")}
    return replace(
        table,
        **fields,
        slots={name: tensors[f"slots.{name}"] for name in table.slots},
        versions=torch.zeros_like(tensors["keys"]),
    )


def _exchange(values: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sends the first ``counts[0]`` rows to rank 0, the next to rank 1, and so on; what came back."""
    expected = torch.empty_like(counts)
    dist.all_to_all_single(expected, counts, group=group)
    received = values.new_empty([int(expected.sum()), *values.shape[1:]])
    dist.all_to_all_single(received, values.contiguous(), expected.tolist(), counts.tolist(), group=group)
    return received
