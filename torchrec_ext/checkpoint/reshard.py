"""Loads a checkpoint with ZCH tables into a model that is sharded over another number of ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.storage import StorageReader
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from torchrec_ext.checkpoint.reshard_report import (
    ReshardReport,
    Share,
    log_report,
    table_report,
)
from torchrec_ext.checkpoint.saved_tensors import AllBut, SavedTensors
from torchrec_ext.checkpoint.zch_entries import TableEntries, faults, find_entries
from torchrec_ext.checkpoint.zch_moves import Moves, plan_moves
from torchrec_ext.errors import CheckpointError, UnsupportedTableError
from torchrec_ext.ranks import gather, on_every_rank
from torchrec_ext.zch import NO_ID, ZchTable, find_zch_tables, internals
from torchrec_ext.zch.discovery import why_rows_are_not_unique

logger = logging.getLogger(__name__)

T = TypeVar("T")


def reshard_zch(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    model: nn.Module | None = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> ReshardReport:
    """Loads a checkpoint as ``torch.distributed.checkpoint.load`` does, at any number of ranks.

    The ids of ZCH tables are routed to the model's shards; their rows, optimizer state and eviction
    metadata move with them. Where a shard gets more ids than it has rows, the table's own policy evicts.
    Everything else, and tables whose shards are those of the checkpoint, DCP loads.

    All ranks call it. Nothing is written before every rank has checked that everything fits.

    Args:
        state_dict: what DCP's ``load`` takes, in the structure that was saved: the model and its fused
            optimizer themselves, or state dicts whose tensors are theirs.
        checkpoint_id: the checkpoint's directory.
        model: the model, if it is not itself a value of ``state_dict``.
        storage_reader: DCP's reader of a checkpoint that is no directory; instead of ``checkpoint_id``.
        process_group: the ranks over which the tables are sharded; by default all.

    Returns:
        What was done with each table. Rank 0 logs it, too.

    Raises:
        ValueError: the model has no sharded ZCH table, or ``state_dict`` lacks a part of one.
        UnsupportedTableError: a table cannot be re-sharded.
        CheckpointError: the checkpoint does not fit the model, or cannot be read. On every rank.

    Example::

        reshard_zch({"model": model, "optimizer": model.fused_optimizer}, "checkpoints/1000")
    """
    if (checkpoint_id is None) == (storage_reader is None):
        raise ValueError("give either checkpoint_id or storage_reader")
    reader = storage_reader or FileSystemReader(os.fspath(checkpoint_id or ""))
    group = process_group or dist.group.WORLD
    tables = _tables(state_dict, model, dist.get_world_size(group))
    live = {key: one.state_dict() if isinstance(one, Stateful) else one for key, one in state_dict.items()}
    plan = _Plan(live, find_entries(tables, live), reader)
    report = plan.report(gather(group, _together(group, plan.make)))
    load(state_dict, storage_reader=reader, planner=AllBut(plan.keys), process_group=group)
    try:
        _together(group, plan.carry_out)
    except CheckpointError as error:
        raise CheckpointError(f"the model is loaded in part only, do not use it: {error}") from error
    if dist.get_rank(group) == 0:
        log_report(report, logger)
    return report


class _Plan:
    """What this rank is going to do.

    Args:
        live: the state dicts to load into.
        entries: the model's tables, and where they are in the checkpoint.
        reader: of the checkpoint.
    """

    def __init__(
        self, live: Mapping[str, Any], entries: Sequence[TableEntries], reader: StorageReader
    ) -> None:
        self.entries = entries
        self.moves: dict[str, Moves] = {}
        self.shards_before: dict[str, list[tuple[int, int]]] = {}
        self._live = live
        self._reader = reader

    def make(self) -> dict[str, Share]:
        """Reads and checks all that is needed to know; returns what this rank has of the report."""
        self._saved = SavedTensors(self._reader)
        found = [fault for one in self.entries for fault in faults(one, self._saved)]
        if found:
            raise CheckpointError("; ".join(found))
        shares = {}
        for one in self.entries:
            name = one.table.fqn
            self.shards_before[name] = self._saved.shards(one.ids.key)
            if self.shards_before[name] != list(one.ids.shards):
                moves = self.moves[name] = plan_moves(one, self._saved)
                shares[name] = Share.of(moves)
        rest = AllBut(self.keys)
        rest.set_up_planner(dict(self._live), self._saved.metadata)
        rest.create_local_plan()  # fails if it does not fit
        return shares

    def report(self, shares: Sequence[Mapping[str, Share]]) -> ReshardReport:
        """What all ranks are going to do, from what ``make`` returned on each."""
        tables = {}
        for one in self.resharded:
            name = one.table.fqn
            before = len(self.shards_before[name])
            tables[name] = table_report(one, before, [share[name] for share in shares])
        return ReshardReport(tables, tuple(name for name in self.shards_before if name not in tables))

    @property
    def resharded(self) -> list[TableEntries]:
        """The tables whose shards change."""
        return [one for one in self.entries if one.table.fqn in self.moves]

    @property
    def keys(self) -> frozenset[str]:
        """The entries that DCP must leave alone."""
        return frozenset(key for one in self.resharded for key in one.sharded_keys)

    @torch.no_grad()
    def carry_out(self) -> None:
        """Writes this rank's shards, one saved shard of one tensor after another."""
        for one in self.resharded:
            _write(one, self.moves[one.table.fqn], self._saved, self.shards_before[one.table.fqn])


def _write(
    entries: TableEntries, moves: Moves, saved: SavedTensors, shards: Sequence[tuple[int, int]]
) -> None:
    """Writes this rank's shard of a table.

    Slot ``i`` gets the ``i``-th id and row ``i``, the layout with which TorchRec begins; the last row is
    the fallback row. Rows that nobody owns keep their vector: they get a fresh one when they are given
    away. Their optimizer state is the initial one, which they do not get then.
    """
    owned = moves.ids.numel()
    last = entries.table.num_rows - 1
    sources = torch.cat([moves.rows, torch.tensor([moves.fallback_row])])
    targets = torch.cat([torch.arange(owned), torch.tensor([last])])
    for state in entries.not_loaded:
        state.zero_()
    for entry in entries.states:
        entry.local[owned:last].zero_()
    for entry in (entries.weight, *entries.states):
        for start, stop in shards:
            here = (sources >= start) & (sources < stop)
            if here.any():
                part = saved.read(entry.key, start, stop)[sources[here] - start]
                entry.local.index_copy_(0, targets[here].to(entry.local.device), part.to(entry.local.device))
    for entry in entries.per_shard:
        # Counters of batches, the same on all shards.
        entry.local.copy_(saved.read(entry.key, 0, 1))
    first = entries.table.first_row
    entries.rows.local.copy_(torch.arange(first, first + last + 1))
    entries.ids.local.fill_(NO_ID)[:owned] = moves.ids
    for name, entry in entries.metadata.items():
        entry.local.zero_()[:owned] = moves.metadata[name]
    tbe, _ = internals.table_batched_embedding(entries.table.module, entries.table.name)
    internals.drop_cache(tbe)


def _tables(state_dict: Mapping[str, Any], model: nn.Module | None, num_ranks: int) -> list[ZchTable]:
    """The tables whose ids have to be routed anew: those whose collision map is a sorted list of ids."""
    models = [one for one in state_dict.values() if isinstance(one, nn.Module)] if model is None else [model]
    tables = [
        table
        for one in models
        for table in find_zch_tables(one)
        if isinstance(internals.collision_modules(table.module)[table.name], MCHManagedCollisionModule)
    ]
    if not tables:
        raise ValueError(
            "no sharded table with an MCHManagedCollisionModule: give the model, wrapped in "
            "DistributedModelParallel, as a value of state_dict or as model="
        )
    for table in tables:
        if (reason := _why_not(table, num_ranks)) is not None:
            raise UnsupportedTableError(f"{table.fqn}: {reason}")
    return tables


def _why_not(table: ZchTable, num_ranks: int) -> str | None:
    """Why a table cannot be re-sharded; None if it can."""
    if (reason := why_rows_are_not_unique(table.module, table.name)) is not None:
        return reason
    _, num_shards, _ = internals.shard_env(table.module)
    if num_shards != num_ranks:
        return f"it is sharded over {num_shards} ranks, process_group has {num_ranks}"
    return None


def _together(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Does something on every rank.

    Raises:
        CheckpointError: it failed on a rank; every rank raises it.
    """

    def checked() -> T:
        try:
            return work()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{type(error).__name__}: {error}") from error

    return on_every_rank(group, checked)
