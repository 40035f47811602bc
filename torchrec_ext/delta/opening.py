"""What a dumper does once, before training goes on: choose tables, open the directory, join the ranks."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, Manifest, TableInfo
from torchrec_ext.delta.tracked import TrackedTable
from torchrec_ext.errors import DeltaLogError, UnsupportedTableError
from torchrec_ext.ranks import gather, on_every_rank
from torchrec_ext.zch import has_unsharded_zch

logger = logging.getLogger(__name__)


def select_tables(
    found: list[TrackedTable], patterns: Sequence[str] | None, model: nn.Module
) -> list[TrackedTable]:
    """The tables to dump.

    Args:
        found: all tables of the model.
        patterns: ``fnmatch`` patterns of FQNs; None for all that are supported.
        model: for the error's sake.

    Raises:
        ValueError: there is no table, or a pattern matches none.
        UnsupportedTableError: a selected table cannot be followed, or none can.
    """
    if not found:
        hint = (
            "it holds managed-collision modules that are not sharded: "
            "wrap it in DistributedModelParallel first"
            if has_unsharded_zch(model)
            else "it needs a sharded ManagedCollisionEmbeddingBagCollection or "
            "ManagedCollisionEmbeddingCollection, an EmbeddingBagCollection or EmbeddingCollection, "
            "or a RecStoreEmbeddingBagCollection"
        )
        raise ValueError(f"the model has no table that can be dumped: {hint}")
    names = [table.fqn for table in found]
    for pattern in patterns or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"tables: {pattern!r} matches no table; the model has {names}")
    if patterns is not None:
        if not patterns:
            raise ValueError("tables is empty; leave it out to dump all tables")
        found = [t for t in found if any(fnmatchcase(t.fqn, pattern) for pattern in patterns)]
    unsupported = [table for table in found if table.unsupported]
    reasons = "; ".join(f"{table.fqn}: {table.unsupported}" for table in unsupported)
    supported = [table for table in found if not table.unsupported]
    if unsupported and (patterns is not None or not supported):
        raise UnsupportedTableError(f"cannot dump {reasons}")
    if unsupported:
        logger.warning("not dumped: %s", reasons)
    return supported


def describe(table: TrackedTable) -> TableInfo:
    """What the manifest says of a table."""
    return TableInfo(
        dim=table.dim,
        dtype=str(table.dtype).removeprefix("torch."),
        key_space=table.key_space,
        num_embeddings=table.num_embeddings,
        num_shards=table.routing.num_shards,
        block_size=table.routing.block_size,
        hash_size=table.hash_size,
        features=table.features,
        source=table.kind,
    )


def check_places(group: dist.ProcessGroup | None, tables: Sequence[TrackedTable]) -> None:
    """Checks that ranks which are to see the same rows do.

    Raises:
        ValueError: they do not.
    """
    places = gather(group, [table.place for table in tables])
    for table, *of_ranks in zip(tables, *places, strict=True):
        if len(set(of_ranks)) > 1:
            raise ValueError(
                f"{table.fqn} is not sharded, and the ranks keep its rows in {len(set(of_ranks))} places; "
                "shard it, or open one SharedMemoryStore in all ranks of one host"
            )


def open_log(
    directory: Path, group: dist.ProcessGroup | None, tables: Sequence[TrackedTable]
) -> tuple[list[Manifest], dict[str, NDArray[np.int64]]]:
    """Makes the directory ready for a new run, on all ranks together.

    Returns:
        The dumps that are there already, and of each table the keys that a consumer of them holds,
        of those that route to this rank.

    Raises:
        ValueError: the directory holds something else, or is not shared by all ranks.
        DeltaLogError: it holds a broken log, or one of other tables.
    """
    rank = dist.get_rank(group) if group is not None else 0
    on_every_rank(group, lambda: prepare_directory(directory, rank))
    log = on_every_rank(group, lambda: read_log(directory, tables))
    heads = gather(group, log[-1].dump if log else None)
    if len(set(heads)) > 1:
        raise DeltaLogError(f"ranks see different logs in {directory}, which end with {heads}")
    return log, on_every_rank(group, lambda: held_keys(directory, log, tables))


def prepare_directory(directory: Path, rank: int) -> None:
    """On rank 0: makes the directory and clears what a run that died left half-written.

    Raises:
        ValueError: it is a file, or holds something else than dumps.
        DeltaLogError: it holds a broken log; nothing is removed then.
    """
    if rank != 0:
        return
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output_dir {directory} is not a directory")
    directory.mkdir(parents=True, exist_ok=True)
    entries = sorted(directory.iterdir())
    strangers = [entry.name for entry in entries if DumpId.from_directory(entry.name) is None]
    if strangers:
        raise ValueError(
            f"output_dir {directory} holds something else than dumps "
            f"({', '.join(strangers[:3])}); use a directory of its own"
        )
    DeltaLog(directory).dumps()
    for entry in entries:
        if not (entry / MANIFEST_NAME).exists():
            logger.info("removing %s, which was never committed", entry.name)
            shutil.rmtree(entry)


def read_log(directory: Path, tables: Sequence[TrackedTable]) -> list[Manifest]:
    """The dumps that are there already, after a check that these tables can continue them.

    Raises:
        ValueError: the ranks do not share the directory.
        DeltaLogError: the log is broken, or holds a table of another dimension or key space.
    """
    if not directory.is_dir():
        raise ValueError(f"output_dir {directory} is not there; it must be shared by all ranks")
    log = DeltaLog(directory).dumps()
    known = {fqn: info for dump in log for fqn, info in dump.tables.items()}
    for table in tables:
        before, now = known.get(table.fqn), describe(table)
        if before and (before.dim, before.key_space) != (now.dim, now.key_space):
            raise DeltaLogError(
                f"{table.fqn} has {before.key_space} keys and dimension {before.dim} in {directory}, "
                f"{now.key_space} keys and dimension {now.dim} in the model; use another directory"
            )
    return log


def held_keys(
    directory: Path, log: list[Manifest], tables: Sequence[TrackedTable]
) -> dict[str, NDArray[np.int64]]:
    """The keys that a consumer of the log holds, of those that route to this rank, by table."""
    if not log:
        return {}
    held = DeltaLog(directory).keys()
    return {
        table.fqn: held[table.fqn][table.routing.shard_of(held[table.fqn]) == table.shard]
        for table in tables
        if table.fqn in held
    }
