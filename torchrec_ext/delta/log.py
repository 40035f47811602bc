"""Reads a dump directory: which dumps are committed, what they hold, what a model answered."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from torchrec_ext.answers import HashFunction
from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import in_chain_order, without_superseded
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, FileEntry, Manifest
from torchrec_ext.delta.replay import EmbeddingState, KeyFilter, Replay
from torchrec_ext.errors import DeltaLogError
from torchrec_ext.files import file_crc32


class DeltaLog:
    """The dumps that a ``DeltaDumper`` committed to a directory. Needs no torch.

    Only committed dumps are seen: one that a trainer is writing, or left half-written when it died,
    is not there yet. What is read is checked against the manifest (size and CRC-32) on first use.

    Args:
        directory: the ``output_dir`` of the dumper.

    Raises:
        DeltaLogError: there is no such directory.

    Example::

        log = DeltaLog("deltas/")
        for dump in log.dumps():
            print(dump.step, dump.upserts, dump.deletes, dump.nbytes)
        vectors = log.replay()["mc.t0"].lookup([17, 42])
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise DeltaLogError(f"{self.directory}: no such directory")
        self._verified: set[tuple[DumpId, str]] = set()

    def dumps(self, *, superseded: bool = False) -> list[Manifest]:
        """The committed dumps, oldest first.

        Args:
            superseded: also those that a run which went back to an earlier step has made void. In this
                form the list only ever grows, at its end.

        Raises:
            DeltaLogError: a manifest is damaged, or the chain of dumps has a gap or forks; the
                message names the dump.
        """
        manifests = {}
        for entry in sorted(self.directory.iterdir()):
            if DumpId.from_directory(entry.name) is None:
                continue
            try:
                data = _no_symlink(entry / MANIFEST_NAME).read_bytes()
            except FileNotFoundError:
                continue
            except OSError as error:
                raise DeltaLogError(f"{entry.name}: {MANIFEST_NAME} cannot be read: {error}") from error
            manifest = Manifest.from_json(data, entry.name)
            manifests[manifest.dump] = manifest
        chain = in_chain_order(manifests)
        return chain if superseded else without_superseded(chain)

    def read(self, step: int, generation: int | None = None) -> pa.Table:
        """The rows of one dump, of every rank, with the columns of ``format.PART_SCHEMA``.

        Vectors that are stored as float16 or int8 are decoded.

        Args:
            step: the dump's step.
            generation: its run generation, of a superseded dump too; by default the newest that dumped
                this step.

        Raises:
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
            for part in dump.parts:
                replay.add_part(dump, self.checked_path(dump, part, fmt.PART_SCHEMA))
            for fallback in dump.fallbacks:
                self.checked_path(dump, fallback, fmt.FALLBACK_SCHEMA)
        return replay

    def _upto(self, upto: int | None) -> list[Manifest]:
        dumps = self.dumps()
        last = max((i for i, d in enumerate(dumps) if upto is None or d.step <= upto), default=None)
        if last is None:
            wanted = "" if upto is None else f" at or before step {upto}"
            raise DeltaLogError(f"{self.directory}: no committed dump{wanted}")
        return dumps[: last + 1]

    def rows_of(self, dump: Manifest, files: tuple[FileEntry, ...], schema: pa.Schema) -> pa.Table:
        """The rows of some of a dump's files, with the columns of ``schema``.

        Raises:
            DeltaLogError: a file is missing or damaged.
        """
        tables = []
        for entry in files:
            with pq.ParquetFile(self.checked_path(dump, entry, schema)) as file:
                tables.append(file.read())
        return pa.concat_tables(tables)

    def _find(self, step: int, generation: int | None) -> Manifest:
        for dump in reversed(self.dumps(superseded=generation is not None)):
            if dump.step == step and generation in (None, dump.generation):
                return dump
        which = "" if generation is None else f" of generation {generation}"
        raise DeltaLogError(f"{self.directory}: no committed dump of step {step}{which}")

    def checked_path(self, dump: Manifest, entry: FileEntry, schema: pa.Schema) -> Path:
        """The path of a dump's file, after a check that the file is what the manifest says.

        Raises:
            DeltaLogError: it is not, or is missing.
        """
        where = f"{dump.dump.directory}: {entry.name}"
        path = _no_symlink(self.directory / dump.dump.directory / entry.name)
        try:
            if (dump.dump, entry.name) not in self._verified:
                if (size := path.stat().st_size) != entry.nbytes:
                    raise DeltaLogError(f"{where} has {size} bytes, the manifest says {entry.nbytes}")
                if file_crc32(path) != entry.crc32:
                    raise DeltaLogError(f"{where} is damaged: its checksum is not the manifest's")
                self._verified.add((dump.dump, entry.name))
            with pq.ParquetFile(path) as file:
                num_rows, columns = file.metadata.num_rows, set(file.schema_arrow.names)
        except FileNotFoundError as error:
            raise DeltaLogError(f"{where} is missing") from error
        except (pa.ArrowException, OSError) as error:
            raise DeltaLogError(f"{where} cannot be read: {error}") from error
        if num_rows != entry.rows:
            raise DeltaLogError(f"{where} holds {num_rows} rows, the manifest says {entry.rows}")
        if missing := set(schema.names) - columns:
            raise DeltaLogError(f"{where} lacks the columns {sorted(missing)}")
        return path


def _no_symlink(path: Path) -> Path:
    for step in (path.parent, path):
        if step.is_symlink():
            raise DeltaLogError(f"{step}: a symbolic link; a dump's files lie in its own directory")
    return path
