"""``DynamicShards``: this rank's part of dynamic tables as a module, for a sharded ``state_dict``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.types import ShardedTensor

from torchrec_ext.recstore.fused_optimizer import StoreFusedOptimizer
from torchrec_ext.recstore.row_shards import RowShards
from torchrec_ext.recstore.table_modules import OF_CANDIDATES, OF_KEYS, tensors_of, with_tensors
from torchrec_ext.store import Store, StoreSnapshot, TableSnapshot
from torchrec_ext.zch.routing import ShardRouting

Tensors = dict[str, torch.Tensor]

_HAS_KEY = "has_key"


class DynamicShards(nn.Module):
    """The dynamic tables of a sharded collection: ``<table>.keys``, ``.weight``, ``.slots.<name>`` and so on.

    In the ``state_dict`` these are tensors over all ranks with ``num_embeddings`` entries, of which each
    rank fills as many of its own as it has keys. So their shapes do not depend on the number of ranks,
    and a checkpoint can be loaded by another: the entries are then sent to the ranks that their keys
    belong to. Loading replaces what the tables hold. All ranks have to save and load at the same time.

    Args:
        store: where the rows are.
        shared: whether it is one store for all ranks; then rank 0 saves and loads for all.
        rows: by the name of the table, how its entries are dealt out.
        optimizer: counts the updates in the backward pass; goes on from the step that was loaded.
    """

    def __init__(
        self, store: Store, shared: bool, rows: Mapping[str, RowShards], optimizer: StoreFusedOptimizer
    ) -> None:
        super().__init__()
        self._store, self._shared, self._optimizer = store, shared, optimizer
        self._rows = {name: shards.all_on_first_rank() if shared else shards for name, shards in rows.items()}

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        if not self._rows:
            return
        if self._shared:  # the other ranks' updates are in the store
            dist.barrier(self._process_group)
        snapshot = self._snapshot()
        step = destination[f"{prefix}step"] = torch.tensor(0 if snapshot is None else snapshot.step)
        if self._shared:
            dist.broadcast(step, group_src=0, group=self._process_group)
        for name, shards in self._rows.items():
            found = None if snapshot is None else snapshot.tables[name]
            for field, tensor in self._packed(name, found).items():
                destination[f"{prefix}{name}.{field}"] = shards.sharded(tensor)

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
        parts: dict[str, dict[str, Any]] = {}
        for name in self._rows:
            fields = list(self._shapes(name))
            if not isinstance(tensors.get(f"{prefix}{name}.keys"), ShardedTensor):
                fields.remove(_HAS_KEY)  # of a collection that is not sharded: every entry is in use
            parts[name] = {field: tensors.pop(f"{prefix}{name}.{field}", None) for field in fields}
        step = tensors.pop(f"{prefix}step", None)
        absent = [
            f"{prefix}{name}.{field}" for name, part in parts.items() for field in part if part[field] is None
        ]
        if self._rows and step is None:
            absent.append(f"{prefix}step")
        unexpected_keys += list(tensors) if strict else []
        missing_keys += absent if strict else []
        # A table without some of what belongs to its keys would be another one.
        if not self._rows or absent or (strict and tensors):
            return
        arrived = {name: self._arrived(part, self._rows[name]) for name, part in parts.items()}
        if self._shared:  # the other ranks have loaded what is theirs
            dist.barrier(self._process_group)
        if (now := self._snapshot()) is not None:
            loaded = {name: with_tensors(now.tables[name], part) for name, part in arrived.items()}
            self._store.restore(StoreSnapshot(now.clock, int(step), loaded))
        self._optimizer.set_optimizer_step(int(step))
        if self._shared:
            dist.barrier(self._process_group)

    @property
    def _process_group(self) -> dist.ProcessGroup:
        return next(iter(self._rows.values())).process_group

    def _snapshot(self) -> StoreSnapshot | None:
        """What this rank saves and loads; None: rank 0 does it for all."""
        elsewhere = self._shared and next(iter(self._rows.values())).rank > 0
        return None if elsewhere else self._store.snapshot(self._rows)

    def _shapes(self, table: str) -> dict[str, tuple[list[int], torch.dtype]]:
        """Of each tensor of a table: the shape of an entry, and the dtype."""
        dim = self._store.tables[table].dim
        return {
            **dict.fromkeys((*OF_KEYS, *OF_CANDIDATES), ([], torch.int64)),
            _HAS_KEY: ([], torch.bool),
            "weight": ([dim], torch.float32),
            **{
                f"slots.{slot.name}": ([slot.columns(dim)], torch.float32)
                for slot in self._store.optimizer(table).slots
            },
        }

    def _packed(self, table: str, found: TableSnapshot | None) -> Tensors:
        """This rank's entries, those in use first."""
        packed = {
            field: torch.zeros([self._rows[table].count, *shape], dtype=dtype)
            for field, (shape, dtype) in self._shapes(table).items()
        }
        if found is not None:
            packed[_HAS_KEY][: len(found.keys)] = True
            for field, values in tensors_of(found).items():
                packed[field][: len(values)] = values
        return packed

    def _arrived(self, part: Mapping[str, Any], shards: RowShards) -> Tensors:
        """What this rank has to hold, of what all ranks loaded."""
        whole = _HAS_KEY not in part
        local = dict(part) if whole else {field: shards.local(value) for field, value in part.items()}
        waiting = {field: local.pop(field) for field in OF_CANDIDATES}
        if not whole:
            used = local.pop(_HAS_KEY)
            local = {field: values[used] for field, values in local.items()}
            used = waiting["candidate_counts"] > 0
            waiting = {field: values[used] for field, values in waiting.items()}
        if self._shared or len(shards.sizes) == 1:
            return {**local, **waiting}
        route = _mine if whole else _exchanged
        return {**route(local, local["keys"], shards), **route(waiting, waiting["candidates"], shards)}


def _owners(keys: torch.Tensor, shards: RowShards) -> torch.Tensor:
    """The rank that each key belongs to, int64 ``[n]``."""
    return torch.from_numpy(ShardRouting(len(shards.sizes), 1).shard_of(keys.numpy()))


def _mine(entries: Tensors, keys: torch.Tensor, shards: RowShards) -> Tensors:
    """This rank's entries, of all."""
    mine = _owners(keys, shards) == shards.rank
    return {field: values[mine] for field, values in entries.items()}


def _exchanged(entries: Tensors, keys: torch.Tensor, shards: RowShards) -> Tensors:
    """This rank's entries, of those that each rank has some of."""
    owners = _owners(keys, shards)
    order = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=len(shards.sizes))
    expected = torch.empty_like(counts)
    dist.all_to_all_single(expected, counts, group=shards.process_group)
    arrived = {}
    for field, values in entries.items():
        arrived[field] = values.new_empty([int(expected.sum()), *values.shape[1:]])
        dist.all_to_all_single(
            arrived[field], values[order], expected.tolist(), counts.tolist(), group=shards.process_group
        )
    return arrived
