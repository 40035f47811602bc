"""Which rows of a saved ZCH table a shard takes over when the number of shards changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_ext.checkpoint.saved_tensors import SavedTensors
from torchrec_ext.checkpoint.zch_entries import TableEntries
from torchrec_ext.errors import CheckpointError
from torchrec_ext.zch import NO_ID, ShardRouting, ZchTable, internals


@dataclass(frozen=True)
class Moves:
    """What one shard takes over from a checkpoint.

    Attributes:
        ids: the ids that own a row, sorted, int64 ``[k]``.
        rows: the row of each in the checkpoint, of all shards, int64 ``[k]``.
        metadata: what the eviction policy keeps of each, int64 ``[k]``, by its names.
        fallback_shard: the shard of the checkpoint whose fallback row it takes over.
        fallback_row: that row.
        evicted: ids that had a row and found no room, int64, sorted.
        unreachable: ids that owned a row on a shard where no lookup found them, int64, sorted.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    metadata: Mapping[str, torch.Tensor]
    fallback_shard: int
    fallback_row: int
    evicted: NDArray[np.int64]
    unreachable: NDArray[np.int64]


def plan_moves(entries: TableEntries, saved: SavedTensors) -> Moves:
    """Plans what this rank's shard takes over.

    Reads the ids of all saved shards, one shard after another, and the rest of the collision map where
    a shard has ids for this rank. Holds ``8 * (2 + len(metadata))`` bytes for each of those.

    Args:
        entries: a table of the model, and where it is in the checkpoint.
        saved: the checkpoint.

    Raises:
        CheckpointError: the saved map contradicts itself, the model routes ids differently, or its policy
            does not say which ids to evict.
    """
    table = entries.table
    shards = saved.shards(entries.ids.key)
    hash_size = next(iter(internals.routing_hash_sizes(table.module, table.name).values()))
    before = ShardRouting.for_hash_size(hash_size, len(shards))
    slots, unreachable = [], []
    for shard, (start, stop) in enumerate(shards):
        ids = _ids(entries, saved, shard, start, stop)
        mine = np.flatnonzero(table.routing.shard_of(ids) == table.shard)
        reachable = before.shard_of(ids[mine]) == shard
        unreachable.append(ids[mine[~reachable]])
        slots.append(_slots(entries, saved, ids, mine[reachable], start, stop))
    lost = np.sort(np.concatenate(unreachable))
    if lost.size and not _was_merged(entries, saved, shards):
        raise CheckpointError(
            f"{table.fqn}: {lost.size} ids, {lost[:3].tolist()} among them, are on another shard of the "
            f"checkpoint than input_hash_size={hash_size} routes them to; the model must have the "
            "input_hash_size and input_hash_func it was trained with"
        )
    fallback = _fallback_shard(table, before, [part.shape[1] for part in slots])
    found = torch.cat(slots, dim=1)
    found = found[:, found[0].argsort()]
    kept = torch.ones(found.shape[1], dtype=torch.bool)
    surplus = found.shape[1] - (table.num_rows - 1)  # the last row is the fallback row
    if surplus > 0:
        iteration = int(saved.read(entries.iteration.key, 0, 1))
        kept[_losers(entries, found[2:], iteration, surplus)] = False
    ids, rows, *values = found[:, kept]
    return Moves(
        ids,
        rows,
        dict(zip(entries.metadata, values, strict=True)),
        fallback,
        shards[fallback][1] - 1,
        found[0, ~kept].numpy(),
        lost,
    )


def _ids(entries: TableEntries, saved: SavedTensors, shard: int, start: int, stop: int) -> NDArray[np.int64]:
    """The ids that own a row of a saved shard; slot ``i`` holds the ``i``-th."""
    ids = saved.read(entries.ids.key, start, stop).numpy()
    if (ids[1:] < ids[:-1]).any() or ((ids[1:] == ids[:-1]) & (ids[1:] != NO_ID)).any():
        raise CheckpointError(
            f"{entries.table.fqn}: the ids of shard {shard} are out of order or repeat: the checkpoint is "
            "damaged, or was merged into one part by a tool"
        )
    return ids[: np.searchsorted(ids, NO_ID)]


def _slots(
    entries: TableEntries,
    saved: SavedTensors,
    ids: NDArray[np.int64],
    mine: NDArray[np.int64],
    start: int,
    stop: int,
) -> torch.Tensor:
    """Some slots of a saved shard: their ids, rows and each metadata, int64 ``[2 + metadata, n]``."""
    slots = torch.from_numpy(mine)
    found = torch.empty(2 + len(entries.metadata), slots.numel(), dtype=torch.int64)
    if not slots.numel():
        return found
    rows = saved.read(entries.rows.key, start, stop)
    if not torch.equal(rows.sort().values, torch.arange(start, stop)):
        raise CheckpointError(
            f"{entries.table.fqn}: the saved collision map does not name each of the rows {start} to "
            f"{stop - 1} once: the checkpoint is damaged"
        )
    found[0], found[1] = torch.from_numpy(ids)[slots], rows[slots]
    for place, entry in enumerate(entries.metadata.values(), 2):
        found[place] = saved.read(entry.key, start, stop)[slots]
    return found


def _was_merged(entries: TableEntries, saved: SavedTensors, shards: Sequence[tuple[int, int]]) -> bool:
    """Whether TorchRec itself merged shards of this table in an earlier load.

    It then keeps the bounds of before, and ids on shards to which they do not route.
    """
    bounds = saved.read(entries.bounds.key, 0, entries.bounds.size[0])
    return bounds[bounds >= 0].tolist() != [0, *(stop for _, stop in shards)]


def _fallback_shard(table: ZchTable, before: ShardRouting, taken: Sequence[int]) -> int:
    """The saved shard whose fallback row a shard takes over: the one that most of its ids come from.

    The ids that own rows stand for those that do not, which the fallback row answers. Where there are
    none, the first id of the shard's own block decides.
    """
    if any(taken):
        return int(np.argmax(taken))
    first = table.routing.block_size * table.shard or table.shard
    return int(before.shard_of(np.array([first]))[0])


def _losers(entries: TableEntries, metadata: torch.Tensor, iteration: int, surplus: int) -> torch.Tensor:
    """The slots whose ids the table's own policy evicts if as many ids fill the next batch, time and again.

    Args:
        entries: the table.
        metadata: of the ids that compete, int64 ``[metadata, n]``.
        iteration: batches seen.
        surplus: how many must go.

    Returns:
        int64 ``[surplus]``.
    """
    policy = internals.eviction_policy(entries.mcm)
    size = metadata.shape[1] + 1  # a policy spares the last slot, of the fallback row
    histories = [info.metadata_name for info in policy.metadata_info if info.is_history_metadata]
    evicted, _ = policy.update_metadata_and_generate_eviction_scores(
        current_iter=iteration + 1,
        mch_size=size,
        coalesced_history_argsort_mapping=torch.arange(surplus),
        coalesced_history_sorted_unique_ids_counts=torch.full((surplus,), NO_ID),
        coalesced_history_mch_matching_elements_mask=torch.zeros(surplus, dtype=torch.bool),
        coalesced_history_mch_matching_indices=torch.empty(0, dtype=torch.int64),
        mch_metadata={
            name: torch.cat([values, values.new_zeros(1)])
            for name, values in zip(entries.metadata, metadata, strict=True)
        },
        coalesced_history_metadata={name: torch.full((surplus,), iteration + 1) for name in histories},
    )
    if evicted.unique().numel() != surplus or (evicted >= size - 1).any():
        raise CheckpointError(
            f"{entries.table.fqn}: {surplus} ids too many for shard {entries.table.shard}, and its "
            f"{type(policy).__name__} does not say which to evict; give the policy parameters that do"
        )
    return evicted
