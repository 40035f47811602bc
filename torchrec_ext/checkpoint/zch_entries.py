"""Which entries of a checkpoint hold a ZCH table, and whether they fit the model's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import DTensor
from torchrec.distributed.types import ShardedTensor
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_ext.checkpoint.saved_tensors import SavedTensors
from torchrec_ext.zch import ZchTable, internals


@dataclass(frozen=True)
class Entry:
    """One tensor of a table.

    Attributes:
        key: its key in the checkpoint, flattened.
        keys: all its keys, should the state dict name it more than once.
        local: this rank's part, live: what is written here is in the model.
        size: of all shards.
        shards: each shard's rows, ``(first, behind the last)``.
    """

    key: str
    keys: tuple[str, ...]
    local: torch.Tensor
    size: torch.Size
    shards: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class TableEntries:
    """The tensors of one table.

    Attributes:
        table: the model's table.
        mcm: this rank's collision module.
        ids: the sorted raw ids.
        rows: each slot's global row.
        bounds: where the shards start.
        iteration: batches seen.
        metadata: what the eviction policy keeps, by its names.
        weight: the rows.
        states: optimizer state with one entry or row per row.
        per_shard: optimizer state with one value per shard.
        not_loaded: optimizer state that the state dict leaves out; this rank's part.
    """

    table: ZchTable
    mcm: MCHManagedCollisionModule
    ids: Entry
    rows: Entry
    bounds: Entry
    iteration: Entry
    metadata: Mapping[str, Entry]
    weight: Entry
    states: tuple[Entry, ...]
    per_shard: tuple[Entry, ...]
    not_loaded: tuple[torch.Tensor, ...]

    @property
    def collision(self) -> list[Entry]:
        """The entries of the collision map that are sharded by row."""
        return [self.ids, self.rows, *self.metadata.values()]

    @property
    def sharded_keys(self) -> frozenset[str]:
        """The keys of all that differs between numbers of shards."""
        entries = [*self.collision, self.bounds, self.weight, *self.states, *self.per_shard]
        return frozenset(key for entry in entries for key in entry.keys)


def find_entries(tables: Sequence[ZchTable], state_dict: Mapping[str, Any]) -> list[TableEntries]:
    """Finds the entries of tables in what ``torch.distributed.checkpoint.load`` would load.

    They are found by their memory, whatever they are called.

    Args:
        tables: tables of the model.
        state_dict: state dicts, nested in any way, whose tensors are the model's own.

    Raises:
        ValueError: a table's entries are not in it.
    """
    planner = DefaultLoadPlanner()
    planner.set_up_planner(dict(state_dict))
    places = _Places(planner.state_dict)
    return [_entries_of(table, places) for table in tables]


def faults(entries: TableEntries, saved: SavedTensors) -> Iterator[str]:
    """What does not fit between a table of the model and the checkpoint's."""
    table = entries.table
    if entries.weight.key not in saved:
        yield f"{table.fqn}: the checkpoint has no such table (no entry {entries.weight.key!r})"
        return
    prefix = entries.ids.key.rpartition(".")[0] + "."
    theirs = {key for key in saved if key.startswith(prefix)}
    ours = {entry.key for entry in (*entries.collision, entries.bounds, entries.iteration)}
    if theirs != ours:
        policy = type(internals.eviction_policy(entries.mcm)).__name__
        yield (
            f"{table.fqn}: the checkpoint has {_names(theirs, prefix)}, the model with its {policy} "
            f"{_names(ours, prefix)}: build the model with the eviction policy it was trained with"
        )
        return
    for entry in (*entries.collision, entries.weight):
        yield from _fault(entry, saved, table, "num_embeddings (zch_size), embedding_dim and data type")
    for entry in (entries.bounds, entries.iteration):
        yield from _fault(entry, saved, table, "TorchRec")
    for entry in entries.states:
        yield from _fault(entry, saved, table, "optimizer")
    for entry in entries.per_shard:
        if entry.key not in saved:
            yield f"{table.fqn}: the checkpoint has no entry {entry.key!r}; it needs the same optimizer"


def _fault(entry: Entry, saved: SavedTensors, table: ZchTable, same: str) -> Iterator[str]:
    if entry.key not in saved:
        yield (
            f"{table.fqn}: the checkpoint has no entry {entry.key!r}; "
            f"the model must have the {same} it was trained with"
        )
        return
    theirs, ours = saved[entry.key], entry
    if (theirs.size, theirs.properties.dtype) != (ours.size, ours.local.dtype):
        yield (
            f"{table.fqn}: {entry.key!r} is {theirs.properties.dtype} {list(theirs.size)} in the checkpoint, "
            f"{ours.local.dtype} {list(ours.size)} in the model; "
            f"the model must have the {same} it was trained with"
        )


def _names(keys: set[str], prefix: str) -> str:
    return ", ".join(sorted(key.removeprefix(prefix) for key in keys)) or "nothing"


class _Places:
    """The entries of a flattened state dict, by the memory they lie in."""

    def __init__(self, flat: Mapping[str, Any]) -> None:
        self._flat = flat
        self._keys: dict[tuple[int, int], list[str]] = {}
        for key, value in flat.items():
            if (local := _local_part(value)) is not None:
                self._keys.setdefault(_memory(local), []).append(key)

    def find(self, tensor: torch.Tensor) -> Entry | None:
        """The entry of a tensor of the model."""
        keys = self._keys.get(_memory(tensor))
        return None if keys is None else self.entry(*keys)

    def entry(self, *keys: str) -> Entry:
        """The entry under a key."""
        value = self._flat[keys[0]]
        local = cast(torch.Tensor, _local_part(value))
        if not isinstance(value, ShardedTensor):
            return Entry(keys[0], keys, local, local.size(), ((0, local.size(0)),))
        starts = [
            (shard.shard_offsets[0], shard.shard_sizes[0]) for shard in value.metadata().shards_metadata
        ]
        shards = tuple(sorted((start, start + size) for start, size in starts))
        return Entry(keys[0], keys, local, value.size(), shards)

    def siblings(self, key: str) -> list[str]:
        """The keys of tensors that differ in their last two parts from a key: the same parameter's state."""
        prefix = ".".join(key.split(".")[:-2]) + "."
        return [k for keys in self._keys.values() for k in keys if k.startswith(prefix)]


def _local_part(value: Any) -> torch.Tensor | None:
    """This rank's part of a tensor that lies in one place."""
    if isinstance(value, ShardedTensor):
        shards = value.local_shards()
        value = shards[0].tensor if len(shards) == 1 else None
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.numel():
        return None
    return value


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _entries_of(table: ZchTable, places: _Places) -> TableEntries:
    mcm = cast(MCHManagedCollisionModule, internals.collision_modules(table.module)[table.name])

    def find(tensor: torch.Tensor, what: str) -> Entry:
        entry = places.find(tensor)
        if entry is None:
            raise ValueError(
                f"{table.fqn}: its {what} is not in state_dict, so it would not be loaded; "
                'pass {"model": model, ...} as it was saved'
            )
        return entry

    ids, rows = internals.slots(mcm)
    tbe, index = internals.table_batched_embedding(table.module, table.name)
    states = internals.optimizer_states(tbe)[index]
    found = [(state, places.find(state)) for state in states]
    entries = tuple(entry for _, entry in found if entry is not None)
    own = {key for entry in entries for key in entry.keys}
    siblings = [key for key in places.siblings(entries[0].key) if key not in own] if entries else []
    return TableEntries(
        table,
        mcm,
        ids=find(ids, "collision map"),
        rows=find(rows, "collision map"),
        bounds=find(internals.shard_bounds(mcm), "collision map"),
        iteration=find(internals.iteration(mcm), "batch count"),
        metadata={
            name: find(values, f"eviction metadata {name!r}")
            for name, values in internals.eviction_metadata(mcm).items()
        },
        weight=find(internals.local_weight(tbe, index), "weight"),
        states=entries,
        per_shard=tuple(places.entry(key) for key in siblings),
        not_loaded=tuple(state for state, entry in found if entry is None),
    )
