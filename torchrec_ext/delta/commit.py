"""Writes a rank's files of a dump and commits the dump when every rank has written its own."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import torch.distributed as dist
from numpy.typing import NDArray

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.cut import Cut, TableDelta
from torchrec_ext.delta.generations import Generation, UncertainCommit
from torchrec_ext.delta.keys import NO_KEYS
from torchrec_ext.delta.manifest import (
    MANIFEST_NAME,
    DumpId,
    FileEntry,
    Manifest,
    RankStats,
    TableInfo,
)
from torchrec_ext.delta.ranks import leave
from torchrec_ext.delta.storage import StorageDtype
from torchrec_ext.errors import DeltaDumpError, DeltaLogError, FencedError
from torchrec_ext.ranks import gather

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _RankFiles:
    part: FileEntry
    fallback: FileEntry
    stats: RankStats


@dataclass(frozen=True)
class _Vote:
    """What a rank tells the others of a dump: its files, or why it has none, or may not have any.

    ``uncertain``: the dump may be committed all the same.
    """

    dump: DumpId
    files: _RankFiles | None
    error: str | None
    fenced: str | None
    uncertain: bool = False


class Committer:
    """Brings one dump after another to disk, on the writer's thread.

    A dump that fails on one rank is committed by none. What a rank had to say in it is kept and said
    in the next dump, unless that says something newer of the same key.

    Args:
        tables: what the manifest says of each table.
        generation: the run's right to commit.
        previous: the last dump committed before this run.
        group: used by nobody else while a dump is being committed; None in a single process.
        storage_dtype: how vectors are stored.

    Attributes:
        last_committed: the last dump of this run that was committed.
        group: the same, until ``close``. Others must not keep it: ranks that wait for this one go on
            waiting as long as anybody has it.
    """

    def __init__(
        self,
        tables: dict[str, TableInfo],
        generation: Generation,
        previous: DumpId | None,
        group: dist.ProcessGroup | None,
        storage_dtype: StorageDtype,
    ) -> None:
        self.last_committed: DumpId | None = None
        self._place = generation.place
        self._tables = tables
        self._generation = generation
        self._previous = previous
        self._supersedes: tuple[DumpId, ...] = ()
        self.group = group
        self._storage_dtype = storage_dtype
        self._rank = dist.get_rank(group) if group is not None else 0
        self._world_size = dist.get_world_size(group) if group is not None else 1
        self._uncommitted: dict[str, TableDelta] = {}
        self._own_files: list[str] = []
        self._abandoned: str | None = None
        self._uncertain: set[DumpId] = set()
        self._lost_rank = False

    def supersede(self, dumps: Sequence[DumpId]) -> None:
        """Makes the next dump that is committed void these."""
        self._supersedes += tuple(dumps)

    def uncommitted_keys(self) -> dict[str, NDArray[np.int64]]:
        """By table, the keys of which this rank said something that is not committed yet."""
        return {fqn: delta.keys for fqn, delta in self._uncommitted.items()}

    def commit(self, cut: Cut) -> Manifest | None:
        """Writes and commits a dump together with the other ranks.

        Returns:
            The manifest on rank 0, None on the others.

        Raises:
            DeltaDumpError: it was not committed; says which rank failed and why.
            FencedError: neither it nor any later one will be: a newer run has opened the log.
            RuntimeError: another rank is gone, so nobody can tell whether it was committed.
        """
        dump = DumpId(self._generation.number, cut.step)
        folder = dump.directory
        if self._lost_rank:  # the last dump may be committed, so its files must stay as they are
            cut.discard()
            raise RuntimeError("another rank is gone since an earlier dump")
        self._own_files = []
        files, error = None, cut.error
        if error is None:
            try:
                if dump in self._uncertain:
                    raise FileExistsError("it may be committed already, and cannot be written again")
                self._generation.check()
                files = self._write(folder, cut)
            except BaseException as caught:  # a stream brings what interrupted the training thread
                error = caught
        if files is None:
            cut.discard()
        try:
            manifest = self._agree(dump, cut, self._vote(dump, files, error))
        except DeltaDumpError as refused:
            self._keep(cut)
            if dump not in self._uncertain:
                self._remove_own_files(folder)
                self._abandoned = folder
            if error is not None:
                raise refused from error
            raise
        self._uncommitted.clear()
        self._supersedes = ()
        self._abandoned = None
        self._previous = self.last_committed = dump
        return manifest

    def close(self) -> None:
        """Leaves the log and the group, so that ranks which wait for this one fail instead."""
        self._remove_abandoned_directory()
        if self._rank == 0:
            with contextlib.suppress(OSError, DeltaLogError):
                self._generation.close()
        group, self.group = self.group, None
        leave(group)

    def _write(self, folder: str, cut: Cut) -> _RankFiles:
        if self._abandoned != folder:
            self._remove_abandoned_directory()
        self._place.make_folder(folder)
        name = fmt.part_name(self._rank, self._world_size)
        upserts = deletes = 0
        schema = fmt.part_schema(self._storage_dtype)
        with fmt.ParquetFileWriter(self._place.create(folder, name), schema) as file:
            for delta in self._with_uncommitted(cut.deltas):
                upserts += len(delta.upsert_keys)
                deletes += len(delta.delete_keys)
                for batch in self._batches(cut.step, delta):
                    file.write(batch)
        self._own_files.append(name)
        part = FileEntry(name, self._rank, file.rows, file.nbytes, file.crc32)
        name = fmt.fallback_name(self._rank, self._world_size)
        schema = fmt.fallback_schema(self._storage_dtype)
        with fmt.ParquetFileWriter(self._place.create(folder, name), schema) as file:
            for told in cut.answers:
                file.write(
                    fmt.fallback_batch(
                        told.fqn, told.shard, told.fallback, told.exceptions, self._storage_dtype
                    )
                )
        self._own_files.append(name)
        fallback = FileEntry(name, self._rank, file.rows, file.nbytes, file.crc32)
        self._place.sync(folder)
        return _RankFiles(part, fallback, RankStats(upserts, deletes, cut.stall_seconds))

    def _with_uncommitted(self, deltas: Iterable[TableDelta]) -> Iterable[TableDelta]:
        written: dict[str, list[NDArray[np.int64]]] = {}
        for delta in deltas:
            written.setdefault(delta.fqn, []).append(delta.keys)
            yield delta
        for fqn, delta in self._uncommitted.items():
            yield delta.without(np.concatenate(written.get(fqn, [NO_KEYS])))

    def _batches(self, step: int, delta: TableDelta) -> Iterable[pa.Table]:
        batch = partial(
            fmt.part_batch,
            global_step=step,
            rank=self._rank,
            world_size=self._world_size,
            feature_name=",".join(self._tables[delta.fqn].features),
            table_fqn=delta.fqn,
            source=self._tables[delta.fqn].source,
            storage_dtype=self._storage_dtype,
        )
        if len(delta.upsert_keys):
            keys = np.split(delta.upsert_keys, np.cumsum([len(v) for v in delta.vectors])[:-1])
            yield pa.concat_tables(
                [batch(op=fmt.UPSERT, keys=k, vectors=v) for k, v in zip(keys, delta.vectors, strict=True)]
            )
        if len(delta.delete_keys):
            yield batch(op=fmt.DELETE, keys=delta.delete_keys, vectors=None)

    def _agree(self, dump: DumpId, cut: Cut, vote: _Vote) -> Manifest | None:
        votes = self._exchange(vote)
        _raise_fenced(dump, votes)
        if any(v.dump != dump for v in votes):
            steps = ", ".join(f"{v.dump.step} on rank {rank}" for rank, v in enumerate(votes))
            raise self._refused(dump, f"All ranks must dump the same steps, but dumped step {steps}")
        failed = [f"rank {rank}: {v.error}" for rank, v in enumerate(votes) if v.files is None]
        if failed:
            raise self._refused(dump, "; ".join(failed))
        manifest = None
        error = None
        if self._rank == 0:
            try:
                manifest = self._manifest(dump, cut, [v.files for v in votes if v.files])
                self._generation.commit(dump, manifest.to_json())
            except Exception as caught:
                error = caught
            else:
                self._sync_folders(dump)
        committed = self._exchange(self._vote(dump, None, error))[0]
        if committed.uncertain:
            self._uncertain.add(dump)
            self._supersedes += (dump,)
        _raise_fenced(dump, [committed])
        if committed.error is not None:
            why = f"rank 0 could not write {MANIFEST_NAME}: {committed.error}"
            raise self._refused(dump, why, uncertain=committed.uncertain) from error
        return manifest

    def _refused(self, dump: DumpId, why: str, *, uncertain: bool = False) -> DeltaDumpError:
        what = "may be committed or not, nobody can tell" if uncertain else "was not committed"
        return DeltaDumpError(
            f"{self._place}: the dump of step {dump.step} {what}; its rows go out with the next one. {why}"
        )

    def _vote(self, dump: DumpId, files: _RankFiles | None, error: BaseException | None) -> _Vote:
        fenced = None
        if error is not None:
            # A newer run has removed what this one was about to write, or is about to.
            try:
                self._generation.check()
            except FencedError as why:
                fenced = str(why)
            except OSError:
                pass  # nobody can tell, and the others wait for this vote
        if isinstance(error, UncertainCommit):
            return _Vote(dump, files, str(error), fenced, uncertain=True)
        return _Vote(dump, files, None if error is None else f"{type(error).__name__}: {error}", fenced)

    def _sync_folders(self, dump: DumpId) -> None:
        # Readers see the dump by now: it is committed, though a power failure may still undo it.
        try:
            for folder in (dump.directory, ""):
                self._place.sync(folder)
        except Exception:
            logger.warning("%s is committed, but may not be on the disk yet", dump.directory, exc_info=True)

    def _exchange(self, vote: _Vote) -> list[_Vote]:
        try:
            return gather(self.group, vote)
        except RuntimeError as error:
            self._lost_rank = True
            raise RuntimeError(
                "another rank is gone, and nobody can tell whether this dump was committed"
            ) from error

    def _manifest(self, dump: DumpId, cut: Cut, files: list[_RankFiles]) -> Manifest:
        return Manifest(
            dump=dump,
            previous=self._previous,
            world_size=self._world_size,
            created_unix=cut.created_unix,
            committed_unix=time.time(),
            tables=self._tables,
            parts=tuple(f.part for f in files),
            fallbacks=tuple(f.fallback for f in files),
            stats=tuple(f.stats for f in files),
            supersedes=self._supersedes,
            run_id=self._generation.run_id,
            metadata=cut.metadata,
        )

    def _keep(self, cut: Cut) -> None:
        """Remembers what was not committed; a streamed cut is read anew by the training thread."""
        if cut.streamed:
            return
        for delta in cut.deltas:
            # without() copies the vectors: the cut's memory goes back to the pool.
            owned = delta.without(NO_KEYS)
            before = self._uncommitted.get(delta.fqn)
            self._uncommitted[delta.fqn] = before.without(delta.keys).plus(owned) if before else owned

    def _remove_own_files(self, folder: str) -> None:
        # Its own only: the directory is the other ranks' as well.
        for name in self._own_files:
            with contextlib.suppress(OSError):
                self._place.remove(folder, name)

    def _remove_abandoned_directory(self) -> None:
        # Not before this rank does something else: a rank ahead of it may try the same dump again.
        if self._abandoned is not None:
            self._place.prune(self._abandoned)  # unless it is not empty yet: another rank comes after us
            self._abandoned = None


def _raise_fenced(dump: DumpId, votes: Sequence[_Vote]) -> None:
    for vote in votes:
        if vote.fenced is not None:
            what = "may count or not, as the newer run saw it" if vote.uncertain else "was not committed"
            raise FencedError(f"the dump of step {dump.step} {what}: {vote.fenced}")
