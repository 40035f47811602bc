"""Reads a dump directory: which dumps are committed, what they hold, what a model answered."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
from numpy.typing import NDArray

from torchrec_ext.answers import HashFunction
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import in_chain_order, without_superseded
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, FileEntry, Manifest
from torchrec_ext.delta.places import Place, PlacedFile, open_place
from torchrec_ext.delta.replay import EmbeddingState, KeyFilter, Replay
from torchrec_ext.errors import DeltaLogError


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
        self._verified: set[tuple[DumpId, str]] = set()

    def dumps(self, *, superseded: bool = False) -> list[Manifest]:
        """The committed dumps, oldest first.

        Args:
            superseded: also those that a run which went back to an earlier step has made void. In this
                form the list only ever grows, at its end; but see ``chain_and_strays``.

        Raises:
            DeltaLogError: a manifest is damaged, or the chain of dumps has a gap or forks; the
                message names the dump.
        """
        chain, _ = self.chain_and_strays()
        return chain if superseded else without_superseded(chain)

    def chain_and_strays(self) -> tuple[list[Manifest], list[Manifest]]:
        """The committed dumps, superseded ones too, and those beside them that count as nothing.

        On a file system that renames atomically there are none of these. Elsewhere a run that was fenced off
        may have committed one late. It may have been the last dump for a while, until a newer run passed it
        by: who has taken it in has to put right the keys that it holds.

        Raises:
            DeltaLogError: as ``dumps``.
        """
        manifests = {manifest.dump: manifest for manifest in self._manifests()}
        chain = in_chain_order(manifests)
        counts = {manifest.dump for manifest in chain}
        return chain, [manifest for dump, manifest in sorted(manifests.items()) if dump not in counts]

    def _manifests(self) -> list[Manifest]:
        def read(name: str) -> Manifest | None:
            try:
                data = self.place.read(name, MANIFEST_NAME)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise DeltaLogError(f"{name}: {MANIFEST_NAME} cannot be read: {error}") from error
            return Manifest.from_json(data, name)

        try:
            names = [name for name in self.place.entries() if DumpId.from_directory(name)]
        except OSError as error:
            raise DeltaLogError(str(error)) from error
        return [manifest for manifest in self.place.each(read, names) if manifest is not None]

    def committed(self, known: Collection[str] = ()) -> frozenset[str]:
        """The names of committed dumps' directories: cheap to look at, unlike their manifests.

        Args:
            known: names of dumps that are known to be committed.

        Raises:
            DeltaLogError: it cannot be read.
        """
        try:
            names = [name for name in self.place.entries() if DumpId.from_directory(name)]
            new = [name for name in names if name not in known]
            there = self.place.each(lambda name: self.place.has(name, MANIFEST_NAME), new)
        except OSError as error:
            raise DeltaLogError(f"{self.place} cannot be read: {error}") from error
        gone = {name for name, is_there in zip(new, there, strict=True) if not is_there}
        return frozenset(names) - gone

    def remove(self, dump: DumpId) -> None:
        """Removes a dump, or what is left of one that was not committed.

        Its manifest goes first, so that nobody finds a dump without its files. Whether anybody may need it,
        or another dump follows it, is the caller's to know.

        Raises:
            OSError: its manifest cannot be removed.
        """
        self.place.remove(dump.directory, MANIFEST_NAME)
        self.place.remove_folder(dump.directory)

    def read(self, step: int, generation: int | None = None) -> pa.Table:
        """The rows of one dump, of every rank, with the columns of ``format.PART_SCHEMA``.

        Args:
            step: the dump's step.
            generation: its run generation, of a superseded dump too; by default the newest that dumped
                this step.

        Raises:
            DeltaLogError: there is no such dump, or a file of it is missing or damaged.
        """
        dump = self._find(step, generation)
        return self.rows_of(dump, dump.parts, fmt.PART_SCHEMA)

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
        dumps = self._upto(upto)
        replay = self.history(dumps)
        fallbacks = self.rows_of(dumps[-1], dumps[-1].fallbacks, fmt.FALLBACK_SCHEMA)
        return replay.states(dumps[-1], fallbacks, hash_fns or {})

    def keys(self, upto: int | None = None) -> dict[str, NDArray[np.int64]]:
        """The ids that own a row after a dump, sorted int64, of every table in the log.

        Reads no vectors, but checks every file. A table that later dumps do not cover any more has
        its last ids.

        Args:
            upto: as in ``replay``.

        Raises:
            DeltaLogError: as ``replay``.
        """
        return self.history(self._upto(upto)).keys()

    def history(self, dumps: Sequence[Manifest], keep: KeyFilter | None = None) -> Replay:
        """What dumps say, one after another.

        Args:
            dumps: some of ``dumps()``, oldest first.
            keep: the keys to take in; by default all.

        Raises:
            DeltaLogError: a file is missing or damaged.
        """
        replay = Replay(keep)
        for dump in dumps:
            for file in self.checked_files(dump, dump.parts, fmt.PART_SCHEMA):
                replay.add_part(dump, file)
            self.checked_files(dump, dump.fallbacks, fmt.FALLBACK_SCHEMA)
        return replay

    def _upto(self, upto: int | None) -> list[Manifest]:
        dumps = self.dumps()
        last = max((i for i, d in enumerate(dumps) if upto is None or d.step <= upto), default=None)
        if last is None:
            wanted = "" if upto is None else f" at or before step {upto}"
            raise DeltaLogError(f"{self.place}: no committed dump{wanted}")
        return dumps[: last + 1]

    def rows_of(self, dump: Manifest, files: tuple[FileEntry, ...], schema: pa.Schema) -> pa.Table:
        """The rows of some of a dump's files, with the columns of ``schema``.

        Raises:
            DeltaLogError: a file is missing or damaged.
        """
        tables = []
        for entry in self.checked_files(dump, files, schema):
            with entry.open() as file:
                tables.append(file.read())
        return pa.concat_tables(tables)

    def _find(self, step: int, generation: int | None) -> Manifest:
        for dump in reversed(self.dumps(superseded=generation is not None)):
            if dump.step == step and generation in (None, dump.generation):
                return dump
        which = "" if generation is None else f" of generation {generation}"
        raise DeltaLogError(f"{self.place}: no committed dump of step {step}{which}")

    def checked_files(
        self, dump: Manifest, files: Sequence[FileEntry], schema: pa.Schema
    ) -> list[PlacedFile]:
        """A dump's files, after a check that they are what the manifest says.

        Raises:
            DeltaLogError: one is not, or is missing.
        """
        return self.place.each(lambda entry: self._checked(dump, entry, schema), files)

    def _checked(self, dump: Manifest, entry: FileEntry, schema: pa.Schema) -> PlacedFile:
        placed = PlacedFile(self.place, dump.dump.directory, entry.name)
        if (dump.dump, entry.name) not in self._verified:
            placed.check(entry.nbytes, entry.crc32)
        with placed.open() as file:
            num_rows, columns = file.metadata.num_rows, set(file.schema_arrow.names)
        if num_rows != entry.rows:
            raise DeltaLogError(f"{placed} holds {num_rows} rows, the manifest says {entry.rows}")
        if missing := set(schema.names) - columns:
            raise DeltaLogError(f"{placed} lacks the columns {sorted(missing)}")
        self._verified.add((dump.dump, entry.name))
        return placed
