"""Checks the rows of one dump, file by file."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.keys import NO_KEYS, Keys
from torchrec_ext.delta.manifest import FileEntry, Manifest, TableInfo
from torchrec_ext.delta.storage import SCALE_AND_BIAS
from torchrec_ext.delta.verification.findings import Check, Findings
from torchrec_ext.zch.routing import NO_ID

_ROWS = 1 << 15  # in a piece


class DumpRows:
    """Checks the rows of a dump, fallback files first: they say which shard is on which rank.

    Args:
        manifest: the dump's.
        findings: takes what is found.

    Attributes:
        rows: rows read.
        keys: by table and op, the keys of all part files.
    """

    def __init__(self, manifest: Manifest, findings: Findings) -> None:
        self.rows = 0
        self.keys: dict[tuple[str, str], list[Keys]] = {}
        self._manifest = manifest
        self._findings = findings
        self._tables = {fqn: info for fqn, info in manifest.tables.items() if self._is_sane(fqn, info)}
        self._fallbacks: dict[str, Counter[int]] = {fqn: Counter() for fqn in self._tables}
        self._rank_of: dict[str, dict[int, int]] = {fqn: {} for fqn in self._tables}

    @property
    def _where(self) -> str:
        return self._manifest.directory

    def _is_sane(self, fqn: str, info: TableInfo) -> bool:
        """Whether rows can be compared with what the manifest says of their table."""
        sane = True
        for name, least in (("dim", 1), ("num_embeddings", 1), ("num_shards", 1), ("block_size", 0)):
            value = getattr(info, name)
            if not least <= value < 2**63:
                shown = value if abs(value) < 2**63 else "a number of more than 64 bits"
                self._findings.add("table", self._where, f"{fqn}: {name} is {shown}")
                sane = False
        return sane

    def check_fallbacks(self, entry: FileEntry, file: pq.ParquetFile) -> None:
        """Checks a fallback file."""
        where = f"{self._where}: {entry.name}"
        rows = file.read()
        self.rows += len(rows)
        if self._lacks_values(where, rows, fmt.FALLBACK_SCHEMA):
            return
        for fqn in rows["table_fqn"].unique().to_pylist():
            info = self._info(where, fqn)
            if info is None:
                continue
            of_table = rows.filter(pc.equal(rows["table_fqn"], fqn))
            shards = of_table["shard"].to_pylist()
            special = of_table["key_id"].to_pylist()
            for shard, key in zip(shards, special, strict=True):
                if not 0 <= shard < info.num_shards:
                    self._findings.add("fallback", where, f"{fqn} has no shard {shard}")
                elif key is None:
                    self._fallbacks[fqn][shard] += 1
                    self._rank_of[fqn][shard] = entry.rank
                elif key != NO_ID or info.source != "zch":
                    self._findings.add(
                        "fallback", where, f"{fqn}: key {key} cannot have an answer of its own"
                    )
            self._check_vectors(where, fqn, info, np.array(shards, np.int64), of_table["embedding"], "shard")
        self._findings.close(where)

    def check_shards(self) -> None:
        """Checks that each shard has one fallback row, once all files were read."""
        for fqn, info in self._tables.items():
            wanted = 0 if info.key_space == "row" else info.num_shards
            found = self._fallbacks[fqn]
            # However many shards a damaged manifest claims: of those without a row the first is named.
            missing = next((shard for shard in range(wanted) if shard not in found), None)
            for shard in sorted({*found, *([] if missing is None else [missing])}):
                if found[shard] != (shard < wanted):
                    rows = f"{found[shard]} fallback rows, not {int(shard < wanted)}"
                    self._findings.add("fallback", self._where, f"{fqn}: shard {shard} has {rows}")

    def check_part(self, entry: FileEntry, file: pq.ParquetFile) -> None:
        """Checks a part file."""
        where = f"{self._where}: {entry.name}"
        for index in range(file.num_row_groups):
            names: set[str] = set()
            for batch in file.iter_batches(_ROWS, row_groups=[index]):
                self.rows += len(batch)
                if self._lacks_values(where, batch, fmt.PART_SCHEMA):
                    continue
                names |= set(batch["table_fqn"].unique().to_pylist())
                for fqn in batch["table_fqn"].unique().to_pylist():
                    self._check_rows(where, entry.rank, fqn, batch.filter(pc.equal(batch["table_fqn"], fqn)))
            if len(names) > 1:
                message = f"row group {index} holds rows of {len(names)} tables: {sorted(names)}"
                self._findings.add("row-group", where, message)
        self._findings.close(where)

    def check_sums(self) -> None:
        """Checks what concerns all part files, once all were read: counts, and that no key comes twice."""
        for op, told in ((fmt.UPSERT, self._manifest.upserts), (fmt.DELETE, self._manifest.deletes)):
            found = sum(len(keys) for (_, of), pieces in self.keys.items() if of == op for keys in pieces)
            if found != told:
                self._findings.add("count", self._where, f"{found} {op}s, the manifest says {told}")
        for fqn in self._manifest.tables:
            keys = np.sort(self.said_of(fqn))
            twice = keys[1:][keys[1:] == keys[:-1]]
            self._findings.add_keys("key", self._where, f"{fqn}: keys that come more than once", twice)
        self._findings.close(self._where)

    def said_of(self, fqn: str, *ops: str) -> Keys:
        """The keys of a table that the dump says anything of."""
        pieces = [self.keys.get((fqn, op), []) for op in ops or (fmt.UPSERT, fmt.DELETE)]
        return np.concatenate([NO_KEYS, *(keys for piece in pieces for keys in piece)])

    def _lacks_values(self, where: str, rows: pa.Table | pa.RecordBatch, schema: pa.Schema) -> bool:
        """Whether there are rows of which nothing can be said, since a column that says it is null."""
        lacking = [f.name for f in schema if not f.nullable and rows[f.name].null_count]
        for name in lacking:
            self._findings.add("schema", where, f"column {name} has nulls")
        return bool(lacking)

    def _info(self, where: str, fqn: str) -> TableInfo | None:
        """What rows of a table can be compared with."""
        if fqn not in self._manifest.tables:
            self._findings.add("table", where, f"rows of {fqn}, which the manifest does not list")
        return self._tables.get(fqn)

    def _check_rows(self, where: str, rank: int, fqn: str, rows: pa.RecordBatch) -> None:
        info = self._info(where, fqn)
        if info is None:
            return
        self._check_columns(where, rank, fqn, info, rows)
        keys = rows["key_id"].to_numpy(zero_copy_only=False)
        upsert = pc.equal(rows["op"], fmt.UPSERT).to_numpy(zero_copy_only=False)
        delete = pc.equal(rows["op"], fmt.DELETE).to_numpy(zero_copy_only=False)
        for op, chosen in ((fmt.UPSERT, upsert), (fmt.DELETE, delete)):
            self.keys.setdefault((fqn, op), []).append(keys[chosen])
        add = self._findings.add_keys
        add("op", where, f"{fqn}: op is neither upsert nor delete", keys[~upsert & ~delete])
        present = rows["embedding"].is_valid().to_numpy(zero_copy_only=False)
        add("embedding", where, f"{fqn}: upserts without a vector", keys[upsert & ~present])
        add("embedding", where, f"{fqn}: deletes with a vector", keys[delete & present])
        with_vector = rows.filter(pa.array(present))
        self._check_vectors(where, fqn, info, keys[present], with_vector["embedding"], "key")
        if info.key_space == "row":
            outside = (keys < 0) | (keys >= info.num_embeddings)
            add("key", where, f"{fqn}: rows outside of 0 to {info.num_embeddings - 1}", keys[outside])
        elif (
            info.source == "zch"
            and not self._manifest.is_base
            and len(ranks := self._rank_of[fqn]) == info.num_shards
        ):
            # Only of these is it told here: a shard of another kind may be written by another rank.
            of_shard = np.array([ranks[shard] for shard in range(info.num_shards)])
            astray = (of_shard[info.routing.shard_of(keys)] != rank) & (keys != NO_ID)
            add("routing", where, f"{fqn}: keys that route to another rank", keys[astray])

    def _check_columns(self, where: str, rank: int, fqn: str, info: TableInfo, rows: pa.RecordBatch) -> None:
        if self._manifest.is_base:  # its rows are as they were in the dumps that it stands for
            return
        for column, expected in (
            ("global_step", self._manifest.step),
            ("rank", rank),
            ("world_size", self._manifest.world_size),
            ("feature_name", ",".join(map(str, info.features))),
            ("source", info.source),
        ):
            for value in set(rows[column].unique().to_pylist()) - {expected}:
                self._findings.add("column", where, f"{fqn}: {column} is {value!r}, not {expected!r}")

    def _check_vectors(
        self, where: str, fqn: str, info: TableInfo, owners: Keys, vectors: pa.Array, owner: str
    ) -> None:
        """Checks vectors, of a key each, or of a shard."""
        check: Check = "embedding" if owner == "key" else "fallback"
        lengths = pc.list_value_length(vectors).to_numpy()
        width = info.dim + (SCALE_AND_BIAS if vectors.type.value_type == pa.uint8() else 0)
        wrong = lengths != width
        self._findings.add_keys(check, where, f"{fqn}: vectors of another length than {width}", owners[wrong])
        values = pc.list_flatten(fmt.decoded(_chunked(vectors))).to_numpy()
        finite = np.isfinite(values)
        if not finite.all():
            row = np.repeat(np.arange(len(lengths)), np.maximum(lengths - (width - info.dim), 0))[~finite]
            what = f"{fqn}: {'vectors' if owner == 'key' else 'fallback rows'} that are not finite"
            self._findings.add_keys("finite", where, what, owners[np.unique(row)])


def _chunked(column: pa.Array | pa.ChunkedArray) -> pa.ChunkedArray:
    return column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column])
