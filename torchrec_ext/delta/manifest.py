"""The manifest of a dump: plain dataclasses that alone define what makes a dump whole."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_type_hints

from torchrec_ext.delta.format import FORMAT_VERSION, fallback_name, part_name
from torchrec_ext.errors import DeltaLogError
from torchrec_ext.files import json_crc32
from torchrec_ext.zch.routing import ShardRouting

MANIFEST_NAME = "manifest.json"
RecordT = TypeVar("RecordT")
_DIRECTORY = re.compile(r"(step|base)_(\d{12,})\.g(\d{4,})")


@dataclass(frozen=True, order=True)
class DumpId:
    """Identifies a dump: the run generation and the training step."""

    generation: int
    step: int

    @property
    def directory(self) -> str:
        """The dump's directory name."""
        return f"step_{self.step:012d}.g{self.generation:04d}"

    @property
    def base_directory(self) -> str:
        """The directory name of a base that takes the place of this dump and all before it."""
        return f"base_{self.step:012d}.g{self.generation:04d}"

    @classmethod
    def from_directory(cls, name: str) -> DumpId | None:
        """The dump a directory name stands for, None if it is not one of ours."""
        dump = cls._parsed(name)
        return dump if dump and dump.directory == name else None

    @classmethod
    def from_base_directory(cls, name: str) -> DumpId | None:
        """The last dump in the base that a directory name stands for, None if it is not one of ours."""
        dump = cls._parsed(name)
        return dump if dump and dump.base_directory == name else None

    @classmethod
    def _parsed(cls, name: str) -> DumpId | None:
        match = _DIRECTORY.fullmatch(name)
        return cls(step=int(match[2]), generation=int(match[3])) if match else None


@dataclass(frozen=True)
class FileEntry:
    """One Parquet file of a dump.

    Attributes:
        name: the file's name in the dump's directory.
        rank: the rank that wrote it.
        rows: its rows.
        nbytes: its size in bytes.
        crc32: CRC-32 of its bytes.
    """

    name: str
    rank: int
    rows: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class TableInfo:
    """What a reader must know of a table.

    Attributes:
        dim: embedding dimension.
        dtype: the table's own dtype, such as ``float32``.
        key_space: ``raw`` ids, ids ``hashed`` by the table's ``input_hash_func``, or global ``row`` ids.
        num_embeddings: rows of all shards.
        num_shards: shards, each with a fallback row, unless every key has a row of its own.
        block_size: ids per shard, see ``torchrec_ext.zch.ShardRouting``.
        hash_size: the table's ``input_hash_size``, the second argument of its ``input_hash_func``; 0 if
            tables of its kind have none.
        features: the features that look it up.
        source: what kind of table it is: ``zch``, ``recstore`` or ``plain``.
        storage_dtype: how this dump stores its vectors: ``float32``, which is exact, ``float16`` or ``int8``.
    """

    dim: int
    dtype: str
    key_space: str
    num_embeddings: int
    num_shards: int
    block_size: int
    hash_size: int
    features: tuple[str, ...]
    source: str = "zch"
    storage_dtype: str = "float32"

    @property
    def routing(self) -> ShardRouting:
        """Which shard answers for an id."""
        return ShardRouting(self.num_shards, self.block_size)


@dataclass(frozen=True)
class RankStats:
    """What a dump cost a rank.

    Attributes:
        upserts: rows upserted.
        deletes: rows deleted.
        stall_seconds: how long the training thread stood still for it.
    """

    upserts: int
    deletes: int
    stall_seconds: float


@dataclass(frozen=True)
class Manifest:
    """A committed dump, or a base that takes the place of many. Its file's presence is the commit.

    A base has the id, the times of training, the run and the metadata of the last dump in it.

    Attributes:
        dump: the dump's id.
        previous: the id of the dump before it; None for the first of a log.
        world_size: ranks that wrote it; one part and one fallback file each.
        created_unix: when the training step it shows was over, seconds since 1970.
        committed_unix: when it was committed, seconds since 1970.
        tables: the tables it covers, by FQN, whether rows of them changed or not.
        parts: the files of the rows that changed, by rank.
        fallbacks: the files of the fallback rows, by rank.
        stats: what it cost each rank.
        supersedes: dumps that this one makes void: readers leave them out.
        run_id: tells the run that wrote it from those of the same generation in other logs.
        metadata: the user's own, a JSON object.
        compacted: of a base, how many dumps it takes the place of; 0 for a dump.
        retired: of a base, those of ``tables`` that its last dump did not cover any more. Their rows are
            kept: a later dump may cover them again, and say only what changed.
        format_version: of the files and of this manifest.
    """

    dump: DumpId
    previous: DumpId | None
    world_size: int
    created_unix: float
    committed_unix: float
    tables: dict[str, TableInfo]
    parts: tuple[FileEntry, ...]
    fallbacks: tuple[FileEntry, ...]
    stats: tuple[RankStats, ...]
    supersedes: tuple[DumpId, ...] = ()
    run_id: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    compacted: int = 0
    retired: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    @property
    def is_base(self) -> bool:
        """Whether it takes the place of its dump and all before it."""
        return self.compacted > 0

    @property
    def directory(self) -> str:
        """The name of its directory."""
        return self.dump.base_directory if self.is_base else self.dump.directory

    @property
    def step(self) -> int:
        """The training step it shows."""
        return self.dump.step

    @property
    def generation(self) -> int:
        """The run generation that wrote it."""
        return self.dump.generation

    @property
    def upserts(self) -> int:
        """Rows upserted, all ranks."""
        return sum(stats.upserts for stats in self.stats)

    @property
    def deletes(self) -> int:
        """Rows deleted, all ranks."""
        return sum(stats.deletes for stats in self.stats)

    @property
    def rows(self) -> int:
        """Rows of all parts: upserts and deletes."""
        return sum(part.rows for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(entry.nbytes for entry in (*self.parts, *self.fallbacks))

    def to_json(self) -> bytes:
        """The manifest as it stands on disk."""
        return sealed(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, data: bytes, directory: str) -> Manifest:
        """Reads a manifest.

        Args:
            data: the file's bytes.
            directory: the name of the directory it was found in, which must be its own dump's.

        Raises:
            DeltaLogError: it is no manifest, of another format version, of another dump, or names files
                other than its ranks' own.
        """
        try:
            raw = json.loads(data)
            version = raw["format_version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            fault = _fault(error)
            raise DeltaLogError(f"{directory}: {MANIFEST_NAME} is not a manifest: {fault}") from error
        if version != FORMAT_VERSION:
            raise DeltaLogError(
                f"{directory}: format version {version!r}; this torchrec_ext reads version "
                f"{FORMAT_VERSION}, use the one that wrote it or a newer one"
            )
        if raw.pop("crc32", None) != json_crc32(raw):
            raise DeltaLogError(f"{directory}: {MANIFEST_NAME} is damaged: its checksum is not its own")
        try:
            manifest = cls(
                dump=_record(DumpId, raw["dump"]),
                previous=None if raw["previous"] is None else _record(DumpId, raw["previous"]),
                world_size=int(raw["world_size"]),
                created_unix=float(raw["created_unix"]),
                committed_unix=float(raw["committed_unix"]),
                tables={
                    fqn: _record(TableInfo, {**table, "features": tuple(table["features"])})
                    for fqn, table in raw["tables"].items()
                },
                parts=tuple(_record(FileEntry, entry) for entry in raw["parts"]),
                fallbacks=tuple(_record(FileEntry, entry) for entry in raw["fallbacks"]),
                stats=tuple(_record(RankStats, entry) for entry in raw["stats"]),
                supersedes=tuple(_record(DumpId, dump) for dump in raw["supersedes"]),
                run_id=str(raw.get("run_id", "")),
                metadata=dict(raw["metadata"]),
                compacted=int(raw.get("compacted", 0)),
                retired=tuple(str(fqn) for fqn in raw.get("retired", ())),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DeltaLogError(f"{directory}: {MANIFEST_NAME} is incomplete: {_fault(error)}") from error
        manifest._check(directory)
        return manifest

    def _check(self, directory: str) -> None:
        if self.directory != directory:
            raise DeltaLogError(
                f"{directory}: {MANIFEST_NAME} is that of {self.directory}; the directory was "
                "copied or renamed"
            )
        for kind, entries, name_of, files in (
            ("part", self.parts, part_name, len(self.parts) if self.is_base else self.world_size),
            ("fallback", self.fallbacks, fallback_name, 1 if self.is_base else self.world_size),
        ):
            # Only names we would have given: a manifest cannot send a reader anywhere else.
            strays = [e.name for r, e in enumerate(entries) if e.name != name_of(r, files)]
            if strays or not entries or len(entries) != files:
                fault = f"names {strays[0]!r}" if strays else f"names {len(entries)} {kind} files"
                whose = "a base" if self.is_base else f"a dump of {self.world_size} ranks"
                raise DeltaLogError(
                    f"{directory}: {MANIFEST_NAME} {fault}; {whose} has "
                    f"{name_of(0, files or 1)} to {name_of((files or 1) - 1, files or 1)}"
                )


def sealed(fields: dict[str, Any]) -> bytes:
    """The bytes of a manifest: its fields as JSON, with ``crc32``, the CRC-32 of all others, added."""
    fields = {name: value for name, value in fields.items() if name != "crc32"}
    return json.dumps({**fields, "crc32": json_crc32(fields)}, indent=1, sort_keys=True).encode() + b"\n"


def _fault(error: Exception) -> str:
    return f"there is no field {error}" if isinstance(error, KeyError) else str(error)


_JSON_TYPES: dict[Any, Any] = {int: int, float: (int, float), str: str}


def _record(kind: type[RecordT], raw: dict[str, Any]) -> RecordT:
    """A dataclass from the fields it knows: a later writer of this format may add some.

    Raises:
        TypeError: a field is missing, or its value is of another type.
    """
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    record = kind(**{field_.name: raw[field_.name] for field_ in fields if field_.name in raw})
    for name, kind_ in get_type_hints(kind).items():
        value = getattr(record, name)
        if not isinstance(value, _JSON_TYPES.get(kind_, object)) or isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}, not {kind_.__name__}")
    return record
