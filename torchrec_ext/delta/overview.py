"""What is in a log, told from manifests and the Parquet files' footers: no row is read."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import without_superseded
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.errors import DeltaLogError


@dataclass(frozen=True)
class DumpOverview:
    """A committed dump, or a base that ``compact`` made of dumps.

    Attributes:
        step: the training step.
        generation: the run generation.
        superseded: whether a later dump makes it void.
        world_size: ranks that wrote it.
        upserts: rows upserted.
        deletes: rows deleted.
        nbytes: bytes of its files.
        created_unix: when the training step was over, seconds since 1970.
        committed_unix: when it was committed, seconds since 1970.
        lag_seconds: from the one to the other; None of a base, which is made long after.
        stall_seconds: how long training stood still for it, on the rank where it did longest.
        metadata: the user's own.
        compacted: of a base, how many dumps it stands for; 0 of a dump.
    """

    step: int
    generation: int
    superseded: bool
    world_size: int
    upserts: int
    deletes: int
    nbytes: int
    created_unix: float
    committed_unix: float
    lag_seconds: float | None
    stall_seconds: float
    metadata: dict[str, Any]
    compacted: int

    @property
    def is_base(self) -> bool:
        """Whether it is a base."""
        return self.compacted > 0


@dataclass(frozen=True)
class TableOverview:
    """A table of a log.

    Attributes:
        fqn: the table.
        dim: the embedding dimension.
        dtype: the table's own.
        storage_dtype: how the last dump that covers it stores vectors: ``float32``, ``float16``, ``int8``.
        key_space: what its keys are: ``raw``, ``hashed`` or ``row``.
        source: what kind of table it is: ``zch``, ``recstore`` or ``plain``.
        num_embeddings: rows of all shards.
        num_shards: shards.
        features: the features that look it up.
        covered: whether the last dump covers it.
        dumps: dumps in which rows of it changed, superseded ones left out.
        upserts: rows upserted in these.
        deletes: rows deleted in these.
    """

    fqn: str
    dim: int
    dtype: str
    storage_dtype: str
    key_space: str
    source: str
    num_embeddings: int
    num_shards: int
    features: tuple[str, ...]
    covered: bool
    dumps: int
    upserts: int
    deletes: int


@dataclass(frozen=True)
class LogOverview:
    """A log.

    Attributes:
        directory: where it is.
        dumps: its committed dumps, oldest first, superseded ones too. Where ``vacuum`` removed dumps, the
            first is the base that took their place.
        bases: the bases beside dumps that are still there, oldest first.
        tables: its tables, by FQN.
        uncommitted: directories of dumps that are being written, or were left by a run that died.
    """

    directory: str
    dumps: tuple[DumpOverview, ...]
    bases: tuple[DumpOverview, ...]
    tables: tuple[TableOverview, ...]
    uncommitted: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all committed dumps and bases."""
        return sum(dump.nbytes for dump in (*self.dumps, *self.bases))


def inspect_log(log: DeltaLog | str | os.PathLike[str]) -> LogOverview:
    """Tells what is in a log.

    Raises:
        DeltaLogError: a manifest is damaged, the chain of dumps is broken, or a file is missing or is not
            Parquet. Whether the rows are as they should be is for ``verify_log`` to say.
    """
    log = DeltaLog.of(log)
    return log.undisturbed(lambda: _overview(log))


def _overview(log: DeltaLog) -> LogOverview:
    manifests, bases, _ = log.listing()
    valid = without_superseded(manifests)
    tables = {fqn: info for manifest in manifests for fqn, info in manifest.tables.items()}
    rows: Counter[tuple[str, str]] = Counter()
    changed: Counter[str] = Counter()
    for manifest in valid:
        here = _rows_by_op(log, manifest)
        rows += here
        changed.update({fqn for fqn, _ in here})
    last = set(manifests[-1].tables) - set(manifests[-1].retired) if manifests else set()
    committed = {manifest.directory for manifest in manifests}
    return LogOverview(
        directory=str(log.place),
        dumps=tuple(_of_dump(manifest, manifest not in valid) for manifest in manifests),
        bases=tuple(_of_dump(base, False) for base in bases.values() if base not in manifests),
        tables=tuple(
            TableOverview(
                fqn=fqn,
                dim=info.dim,
                dtype=info.dtype,
                storage_dtype=info.storage_dtype,
                key_space=info.key_space,
                source=info.source,
                num_embeddings=info.num_embeddings,
                num_shards=info.num_shards,
                features=info.features,
                covered=fqn in last,
                dumps=changed[fqn],
                upserts=rows[fqn, fmt.UPSERT],
                deletes=rows[fqn, fmt.DELETE],
            )
            for fqn, info in sorted(tables.items())
        ),
        uncommitted=tuple(
            name
            for name in log.entries()
            if DumpId.from_directory(name)
            and name not in committed
            # One beside the chain is committed, though it counts for nothing.
            and log.manifest(name) is None
        ),
    )


def _of_dump(manifest: Manifest, superseded: bool) -> DumpOverview:
    return DumpOverview(
        step=manifest.step,
        generation=manifest.generation,
        superseded=superseded,
        world_size=manifest.world_size,
        upserts=manifest.upserts,
        deletes=manifest.deletes,
        nbytes=manifest.nbytes,
        created_unix=manifest.created_unix,
        committed_unix=manifest.committed_unix,
        lag_seconds=None if manifest.is_base else manifest.committed_unix - manifest.created_unix,
        stall_seconds=max((stats.stall_seconds for stats in manifest.stats), default=0.0),
        metadata=manifest.metadata,
        compacted=manifest.compacted,
    )


def _rows_by_op(log: DeltaLog, manifest: Manifest) -> Counter[tuple[str, str]]:
    """How many rows of each table have which op."""
    rows: Counter[tuple[str, str]] = Counter()
    for part in manifest.parts:
        where = f"{log.place}: {manifest.directory}: {part.name}"
        with log.opened(manifest, part) as file:
            try:
                for index, fqn in fmt.row_groups(file):
                    # The format has one op in a row group, and its statistics.
                    group = file.metadata.row_group(index)
                    statistics = group.column(file.schema_arrow.names.index("op")).statistics
                    rows[fqn, statistics.min] += group.num_rows
            except (ValueError, AttributeError) as error:
                raise DeltaLogError(f"{where} is not as the format says: {error}") from error
    return rows
