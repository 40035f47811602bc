"""Reads a dump directory: which dumps are committed, what they hold, what a model answered."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.answers import HashFunction
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import since_base, void_dumps, without_superseded
from torchrec_ext.delta.dump_file import DumpFile, taken_by
from torchrec_ext.delta.listing import Listing, committed_names, entry_names, list_log, read_manifest
from torchrec_ext.delta.manifest import DumpId, FileEntry, Manifest
from torchrec_ext.delta.places import Place, open_place
from torchrec_ext.delta.replay import EmbeddingState, KeyFilter, Part, Replay, reading_threads
from torchrec_ext.errors import DeltaLogError, FileSchemaError, VacuumedError

T = TypeVar("T")

FILES_SCHEMA = pa.schema(
    [
        pa.field("path", pa.string(), nullable=False),
        pa.field("content", pa.string(), nullable=False),
        pa.field("chain_order", pa.int32(), nullable=False),
        pa.field("dump", pa.string(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("nbytes", pa.int64(), nullable=False),
    ]
)
"""What ``DeltaLog.files`` gives."""


class DeltaLog:
    """The dumps that a ``DeltaDumper`` committed to a directory. Needs no torch.

    Only committed dumps are seen: one that a trainer is writing, or left half-written when it died,
    is not there yet. What is read is checked against the manifest (size and CRC-32) on first use.

    Args:
        directory: the ``output_dir`` of the dumper.

    Attributes:
        place: where it lies.

    Raises:
        ValueError: it is a URI of something else.
        DeltaLogError: there is no such directory, or it was not reached.

    Example::

        log = DeltaLog("deltas/")
        for dump in log.dumps():
            print(dump.step, dump.upserts, dump.deletes, dump.nbytes)
        vectors = log.replay()["mc.t0"].lookup([17, 42])
    """

    def __init__(self, directory: str | os.PathLike[str] | pafs.FileSystem | Place) -> None:
        try:
            self.place = open_place(directory)
            found = self.place.exists()
        except OSError as error:
            raise DeltaLogError(str(error)) from error
        if not found:
            raise DeltaLogError(f"{self.place}: no such directory")
        self._verified: set[tuple[str, str]] = set()

    @staticmethod
    def of(log: DeltaLog | str | os.PathLike[str] | pafs.FileSystem | Place) -> DeltaLog:
        """The log itself, or that in a directory."""
        return log if isinstance(log, DeltaLog) else DeltaLog(log)

    def dumps(self, *, superseded: bool = False) -> list[Manifest]:
        """The committed dumps, oldest first.

        Where ``vacuum`` removed dumps, the first of the list is the base that took their place.

        Args:
            superseded: also those that a run which went back to an earlier step has made void; their rows
                may have been removed. In this form the list only ever grows at its end, and ``vacuum``
                shortens it at its start; but see ``Listing.strays``.

        Raises:
            DeltaLogError: a manifest is damaged, or the chain of dumps has a gap or forks; the
                message names the dump.
        """
        chain = self.listing().chain
        return chain if superseded else without_superseded(chain)

    def bases(self) -> list[Manifest]:
        """The bases that ``compact`` committed, oldest first.

        Raises:
            DeltaLogError: as ``dumps``.
        """
        return [*self.listing().bases.values()]

    def listing(self) -> Listing:
        """All that is committed.

        Raises:
            DeltaLogError: as ``dumps``.
        """
        return list_log(self.place)

    def committed(self, known: Collection[str] = ()) -> frozenset[str]:
        """See ``listing.committed_names``."""
        return committed_names(self.place, known)

    def manifest(self, name: str) -> Manifest | None:
        """See ``listing.read_manifest``."""
        return read_manifest(self.place, name)

    def entries(self, folder: str = "") -> list[str]:
        """See ``listing.entry_names``."""
        return entry_names(self.place, folder)

    def opened(self, dump: Manifest, entry: FileEntry) -> AbstractContextManager[pq.ParquetFile]:
        """One of a dump's files, as it is: nothing of it is compared with the manifest.

        Raises:
            VacuumedError: it was removed, and something else holds its rows.
            DeltaLogError: it is missing, or is not Parquet.
        """
        return DumpFile.of(self.place, dump, entry.name).open()

    def read(self, step: int, generation: int | None = None) -> pa.Table:
        """The rows of one dump, of every rank, with the columns of ``format.PART_SCHEMA``.

        Vectors that are stored as float16 or int8 are decoded.

        Args:
            step: the dump's step.
            generation: its run generation, of a superseded dump too; by default the newest that dumped
                this step.

        Raises:
            VacuumedError: its rows were removed.
            DeltaLogError: there is no such dump, or a file of it is missing or damaged.
        """
        dump = self._find(step, generation)
        rows = self.rows_of(dump, dump.parts, fmt.PART_SCHEMA)
        at = rows.schema.names.index("embedding")
        return rows.set_column(at, fmt.PART_SCHEMA.field("embedding"), fmt.decoded(rows["embedding"]))

    def replay(
        self,
        upto: int | None = None,
        *,
        hash_fns: Mapping[str, HashFunction] | None = None,
    ) -> dict[str, EmbeddingState]:
        """What the model answered at a dump, rebuilt from all dumps up to it.

        Args:
            upto: the last step to take in; by default all. With several generations, the newest dump
                at or before this step counts, and those it follows. Superseded dumps never count: after
                a run went back to step 150, 200 means what that run says of it, once it does.
            hash_fns: for tables with an ``input_hash_func``, that function by table FQN, so that
                ``lookup`` takes raw ids; without it, their keys are hashed ids. It is called as
                TorchRec calls it, ``fn(ids, input_hash_size)`` with an int64 tensor.

        Returns:
            A state per table FQN, of the tables that the last of these dumps covers.

        Raises:
            DeltaLogError: nothing is committed up to there, a table named in ``hash_fns`` is not
                covered, or a file is missing or damaged.
        """
        return self.undisturbed(lambda: self.states(self.history_upto(upto), hash_fns))

    def keys(self, upto: int | None = None) -> dict[str, NDArray[np.int64]]:
        """The ids that own a row after a dump, sorted int64, of every table in the log.

        Reads no vectors, but checks every file. A table that later dumps do not cover any more has
        its last ids.

        Args:
            upto: as in ``replay``.

        Raises:
            DeltaLogError: as ``replay``.
        """
        return self.undisturbed(lambda: self.history(self.history_upto(upto)).keys())

    def files(self, upto: int | None = None) -> pa.Table:
        """The files that hold what the model answered at a dump, for an engine that reads Parquet by itself.

        Args:
            upto: as in ``replay``.

        Returns:
            One row per file: ``path``; ``content``, which is ``part`` or ``fallback`` (those of the last
            dump only, as only they count); ``chain_order``, which grows from dump to dump; ``dump``, the
            name of its directory; ``num_rows``; ``nbytes``. Of the rows of parts with the same
            ``table_fqn`` and ``key_id``, that of the highest order counts.

        Raises:
            DeltaLogError: as ``replay``; files are not looked at.
        """
        rows = []
        dumps = self.history_upto(upto)
        for order, dump in enumerate(dumps):
            fallbacks = dump.fallbacks if dump is dumps[-1] else ()
            for content, entries in (("part", dump.parts), ("fallback", fallbacks)):
                rows += [
                    {
                        "path": self.place.locate(dump.directory, entry.name),
                        "content": content,
                        "chain_order": order,
                        "dump": dump.directory,
                        "num_rows": entry.rows,
                        "nbytes": entry.nbytes,
                    }
                    for entry in entries
                ]
        return pa.Table.from_pylist(rows, FILES_SCHEMA)

    def states(
        self, dumps: Sequence[Manifest], hash_fns: Mapping[str, HashFunction] | None = None
    ) -> dict[str, EmbeddingState]:
        """What the model answered at the last of some dumps; see ``replay``.

        Args:
            dumps: those that it is rebuilt from, as ``history_upto`` gives them.
            hash_fns: as in ``replay``.

        Raises:
            VacuumedError: some were removed since.
            DeltaLogError: as ``replay``.
        """
        replay = self.history(dumps)
        fallbacks = self.rows_of(dumps[-1], dumps[-1].fallbacks, fmt.FALLBACK_SCHEMA)
        return replay.states(dumps[-1], fallbacks, hash_fns or {})

    def history(self, dumps: Sequence[Manifest], keep: KeyFilter | None = None) -> Replay:
        """What dumps say, one after another.

        Args:
            dumps: some of ``dumps()``, oldest first.
            keep: the keys to take in; by default all.

        Raises:
            VacuumedError: some were removed since; also from what it returns, which reads vectors when asked.
            DeltaLogError: a file is missing or damaged.
        """
        replay = Replay(self.place, keep)

        def read(dump: Manifest, entry: FileEntry) -> Part:
            return replay.read_part(self.checked_file(dump, entry, fmt.PART_SCHEMA))

        with reading_threads() as threads:
            parts = [(dump, [threads.submit(read, dump, entry) for entry in dump.parts]) for dump in dumps]
            fallbacks = [
                threads.submit(self.checked_file, dump, entry, fmt.FALLBACK_SCHEMA)
                for dump in dumps
                for entry in dump.fallbacks
            ]
            try:
                for dump, coming in parts:
                    replay.add(dump, [part.result() for part in coming])
                for checked in fallbacks:
                    checked.result()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        return replay

    def history_upto(self, upto: int | None = None) -> list[Manifest]:
        """What has to be read for the state at a dump: a base, if there is one, and the dumps after it.

        Args:
            upto: as in ``replay``.

        Raises:
            DeltaLogError: nothing is committed up to there.
        """
        chain, bases, _ = self.listing()
        dumps, void = without_superseded(chain), void_dumps(chain)
        last = max(
            (i for i, d in enumerate(dumps) if (upto is None or d.step <= upto) and d.dump not in void),
            default=None,
        )
        if last is None:
            wanted = "" if upto is None else f" at or before step {upto}"
            where = ""
            if dumps:
                first = dumps[0]
                where = f"; {taken_by(first) if first.is_base else f'the first is of step {first.step}'}"
            raise DeltaLogError(f"{self.place}: no committed dump{wanted}{where}")
        return since_base(dumps[: last + 1], bases, void)

    def undisturbed(self, work: Callable[[], T]) -> T:
        """Reads what is committed, and begins anew for as long as ``vacuum`` removes some of it meanwhile.

        Args:
            work: lists the dumps, then reads them. It may be called several times.

        Raises:
            VacuumedError: nothing was removed since it listed them: it asks for what was gone before.
        """
        before = None
        while True:
            try:
                return work()
            except VacuumedError:  # what took its place is there by now
                if (now := self.listing()) == before:
                    raise
                before = now

    def rows_of(self, dump: Manifest, files: tuple[FileEntry, ...], schema: pa.Schema) -> pa.Table:
        """The rows of some of a dump's files, with the columns of ``schema``.

        Raises:
            VacuumedError: one was removed, and something else holds its rows.
            DeltaLogError: one is missing or damaged.
        """
        tables = []
        for entry in self.checked_files(dump, files, schema):
            with entry.open() as file:
                tables.append(file.read())
        return pa.concat_tables(tables)

    def checked_files(self, dump: Manifest, files: Sequence[FileEntry], schema: pa.Schema) -> list[DumpFile]:
        """A dump's files, after a check that they are what the manifest says.

        Raises:
            VacuumedError: one was removed, and something else holds its rows.
            DeltaLogError: one is not, or is missing.
        """
        return self.place.each(lambda entry: self.checked_file(dump, entry, schema), files)

    def checked_file(self, dump: Manifest, entry: FileEntry, schema: pa.Schema) -> DumpFile:
        """One of a dump's files, on any thread; see ``checked_files``."""
        found = DumpFile.of(self.place, dump, entry.name)
        if (dump.directory, entry.name) not in self._verified:
            found.check(entry.nbytes, entry.crc32)
        with found.open() as file:
            num_rows, faults = file.metadata.num_rows, fmt.schema_faults(file, schema)
        if num_rows != entry.rows:
            raise DeltaLogError(f"{found} holds {num_rows} rows, the manifest says {entry.rows}")
        if faults:
            raise FileSchemaError(str(found), faults)
        self._verified.add((dump.directory, entry.name))
        return found

    def _find(self, step: int, generation: int | None) -> Manifest:
        dumps = self.dumps(superseded=generation is not None)
        for dump in reversed(dumps):
            if dump.step == step and generation in (None, dump.generation) and not dump.is_base:
                return dump
        which = "" if generation is None else f" of generation {generation}"
        if dumps and dumps[0].is_base and DumpId(generation or 0, step) <= dumps[0].dump:
            gone = taken_by(dumps[0])
            raise VacuumedError(f"{self.place}: no rows of a dump of step {step}{which}; {gone}")
        raise DeltaLogError(f"{self.place}: no committed dump of step {step}{which}")
