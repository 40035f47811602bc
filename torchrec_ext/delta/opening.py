"""What a dumper does once, before training goes on: choose tables, open the directory, join the ranks."""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import pyarrow.fs as pafs
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from torchrec_ext.delta.chain import without_superseded
from torchrec_ext.delta.generations import FOLDER, Generation, claim, remove_uncommitted
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest, TableInfo
from torchrec_ext.delta.marked import mark
from torchrec_ext.delta.places import LocalPlace, Place, open_place
from torchrec_ext.delta.replay import KeyFilter
from torchrec_ext.delta.storage import StorageDtype
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


def describe(table: TrackedTable, storage_dtype: StorageDtype = "float32") -> TableInfo:
    """What the manifest says of a table, of which vectors are stored so."""
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
        storage_dtype=storage_dtype,
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


@dataclass(frozen=True)
class OpenedLog:
    """A log that this run may commit to.

    Attributes:
        generation: the run's right to.
        log: the log.
        dumps: those that are committed, superseded ones too, oldest first; no older run can add any.
        held: of each table the keys that a consumer holds, of those that route to this rank.
    """

    generation: Generation
    log: DeltaLog
    dumps: list[Manifest]
    held: dict[str, NDArray[np.int64]]

    def dumps_now(self) -> list[Manifest]:
        """The same dumps; where ``vacuum`` has removed some since, the base that took their place."""

        def read() -> list[Manifest]:
            return self.log.dumps(superseded=True)

        return up_to(self.dumps[-1].dump, read(), read) if self.dumps else []


def open_log(place: Place, group: dist.ProcessGroup | None, tables: Sequence[TrackedTable]) -> OpenedLog:
    """Opens the directory for a new run, on all ranks together; fences an older run off that still lives.

    What can be wrong is found before the older run loses its right to commit.

    Raises:
        ValueError: the directory holds something else, or is not shared by all ranks.
        DeltaLogError: it holds a broken log, or one of other tables.
    """
    rank = dist.get_rank(group) if group is not None else 0
    on_every_rank(group, lambda: prepare_directory(place, rank))
    log = on_every_rank(group, lambda: shared_log(place))

    def read() -> list[Manifest]:
        return read_log(log, tables)

    def with_keys(dumps: list[Manifest]) -> tuple[list[Manifest], dict[str, NDArray[np.int64]]]:
        return dumps, held_keys(log, dumps, tables)

    seen, held = on_every_rank(group, lambda: log.undisturbed(lambda: with_keys(read())))
    mine = on_every_rank(group, lambda: take_over(place, seen) if rank == 0 else None)
    # Not all of it: each rank reaches the place by its own means.
    claimed = gather(group, None if mine is None else (type(mine), mine.number, mine.run_id))[0]
    assert claimed is not None
    kind, number, run_id = claimed
    generation: Generation = kind(place, number, run_id)
    dumps = on_every_rank(group, read)
    end = gather(group, dumps[-1].dump if dumps else None)[0]
    # On an object store the older run may commit even now. Rank 0 decides what the others take in.
    dumps = on_every_rank(group, lambda: up_to(end, dumps, read))
    # The older run may have been quick: it committed once more, and ranks may have seen it or not. One that
    # has nothing to read anew takes part all the same: others wait for it.
    anew = dumps != seen
    dumps, held = on_every_rank(
        group, lambda: log.undisturbed(lambda: with_keys(up_to(end, read(), read)) if anew else (seen, held))
    )
    ends = gather(group, dumps[-1].dump if dumps else None)
    if len(set(ends)) > 1:
        generation.check()  # a newer run has begun to write already
        raise DeltaLogError(f"ranks see different logs in {place}, which end with {ends}")
    return OpenedLog(generation, log, dumps, held)


def up_to(end: DumpId | None, dumps: list[Manifest], again: Callable[[], list[Manifest]]) -> list[Manifest]:
    """The dumps up to one of them, read again if it was not there yet; if it is not even then, all."""
    if end is None:
        return []
    if end not in (dump.dump for dump in dumps):
        dumps = again()
    ids = [dump.dump for dump in dumps]
    return dumps[: ids.index(end) + 1] if end in ids else dumps


def place_for(output_dir: str | os.PathLike[str] | pafs.FileSystem) -> Place:
    """Where to dump.

    Raises:
        ValueError: it is no place, or was not reached.
    """
    try:
        return open_place(output_dir)
    except (OSError, ValueError) as error:
        raise ValueError(f"output_dir {error}") from error


def prepare_directory(place: Place, rank: int) -> None:
    """On rank 0: makes the directory.

    Raises:
        ValueError: it is a file, or holds something else than dumps.
    """
    if rank != 0:
        return
    try:
        place.make()
    except FileExistsError as error:
        raise ValueError(f"output_dir {place} is not a directory") from error
    strangers = [
        name
        for name in place.entries()
        if DumpId.from_directory(name) is None and DumpId.from_base_directory(name) is None and name != FOLDER
    ]
    if strangers:
        raise ValueError(
            f"output_dir {place} holds something else than dumps "
            f"({', '.join(strangers[:3])}); use a directory of its own"
        )


def shared_log(place: Place) -> DeltaLog:
    """The log in a directory.

    Raises:
        ValueError: this rank does not see the directory.
    """
    if not place.exists():
        raise ValueError(f"output_dir {place} is not there; it must be shared by all ranks")
    return DeltaLog(place)


def take_over(place: Place, seen: Sequence[Manifest]) -> Generation:
    """Begins a generation, and clears what runs that died, or were fenced off, left half-written.

    Args:
        place: of the log.
        seen: the dumps that were committed a moment ago.
    """
    generation = claim(place) if isinstance(place, LocalPlace) else mark(place)
    newest = seen[-1].generation if seen else -1
    remove_uncommitted(generation, newest, {manifest.dump.directory for manifest in seen})
    return generation


def read_log(log: DeltaLog, tables: Sequence[TrackedTable]) -> list[Manifest]:
    """The dumps that are there already, superseded ones too, after a check that these tables fit them.

    Raises:
        DeltaLogError: the log is broken, or holds a table of another dimension or key space.
    """
    dumps = log.dumps(superseded=True)
    known = {fqn: info for dump in without_superseded(dumps) for fqn, info in dump.tables.items()}
    for table in tables:
        before, now = known.get(table.fqn), describe(table)
        if before and (before.dim, before.key_space) != (now.dim, now.key_space):
            raise DeltaLogError(
                f"{table.fqn} has {before.key_space} keys and dimension {before.dim} in {log.place}, "
                f"{now.key_space} keys and dimension {now.dim} in the model; use another directory"
            )
    return dumps


def held_keys(
    log: DeltaLog, dumps: Sequence[Manifest], tables: Sequence[TrackedTable]
) -> dict[str, NDArray[np.int64]]:
    """The keys that a consumer of the log holds, of those that route to this rank, by table."""
    return log.history(without_superseded(dumps), own_keys(tables)).keys()


def own_keys(tables: Sequence[TrackedTable]) -> KeyFilter:
    """Which keys of these tables, or parts of tables, are up to this rank; of other tables none."""
    known: dict[str, list[TrackedTable]] = defaultdict(list)
    for table in tables:
        known[table.fqn].append(table)

    def keep(fqn: str, keys: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept = np.zeros(len(keys), np.bool_)
        for table in known.get(fqn, ()):
            kept |= table.keeps(keys)
        return kept

    return keep
