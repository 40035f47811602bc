"""Faults that a log can have, each planted into a healthy one so that as few checks as possible see it."""

from __future__ import annotations

import itertools
import json
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.support.logs import LogWriter, dense, zch
from torchrec_ext.delta import compact
from torchrec_ext.delta.manifest import sealed
from torchrec_ext.delta.verification import Check

FIRST, SECOND, THIRD, RESTARTED = (
    "step_000000000010.g0000",
    "step_000000000020.g0000",
    "step_000000000030.g0000",
    "step_000000000025.g0001",
)
PART, OTHER_PART = "part_00000_of_00002.parquet", "part_00001_of_00002.parquet"
BASE, BASE_PART = "base_000000000025.g0001", "part_00000_of_00001.parquet"
FALLBACK = "fallback_00000_of_00002.parquet"


def healthy(directory: Path) -> LogWriter:
    """A log of four dumps; the last one is of a restart and makes the third void."""
    tables = {"mc.t0": zch(dim=4, num_shards=2), "ebc.rows": dense(dim=4, rows=40)}
    writer = LogWriter(directory, tables)
    writer.dump(10, {"mc.t0": [1, 2, 3, 30], "ebc.rows": [0, 1, 2]})
    writer.dump(20, {"mc.t0": [3, 4, 31], "ebc.rows": [1]}, {"mc.t0": [1]})
    writer.dump(30, {"mc.t0": [1, 33]}, {"mc.t0": [2, 4]})
    writer.resume(20)
    writer.dump(25, {"mc.t0": [5]})
    return writer


@dataclass(frozen=True)
class Fault:
    """A fault: how it is planted, and what is to be found, where."""

    plant: Callable[[Path], object]
    check: Check
    where: str
    message: str
    others: tuple[Check, ...] = ()


def edit(
    directory: Path, dump: str, change: Callable[[dict[str, Any]], object], *, seal: bool = True
) -> None:
    """Changes a manifest; its checksum is then that of what it says, unless it is to be damaged."""
    path = directory / dump / "manifest.json"
    manifest = json.loads(path.read_bytes())
    change(manifest)
    path.write_bytes(sealed(manifest) if seal else json.dumps(manifest).encode())


def rewrite(
    directory: Path, dump: str, name: str, change: Callable[[pa.Table], pa.Table], more_upserts: int = 0
) -> None:
    """Changes a file's rows, and what the manifest says of the file."""
    path = directory / dump / name
    rows = change(pq.read_table(path))
    with pq.ParquetWriter(path, rows.schema) as file:
        columns = [rows[name].to_pylist() for name in ("table_fqn", "op") if name in rows.column_names]
        kinds = list(zip(*columns, strict=True))
        # A row group holds the rows of one table and op.
        cuts = [n for n in range(1, len(kinds)) if kinds[n] != kinds[n - 1]]
        for begin, end in itertools.pairwise([0, *cuts, len(kinds)]):
            file.write_table(rows.slice(begin, end - begin))
    reseal(directory, dump, name, len(rows), more_upserts)


def reseal(directory: Path, dump: str, name: str, num_rows: int | None = None, more_upserts: int = 0) -> None:
    """Makes a manifest say of a file what it is now."""
    data = (directory / dump / name).read_bytes()

    def change(manifest: dict[str, Any]) -> None:
        for entry in (*manifest["parts"], *manifest["fallbacks"]):
            if entry["name"] == name:
                entry.update(nbytes=len(data), crc32=zlib.crc32(data))
                entry["rows"] = entry["rows"] if num_rows is None else num_rows
        manifest["stats"][0]["upserts"] += more_upserts

    edit(directory, dump, change)


def put(column: str, value: Any, row: int | None = None, **of: Any) -> Callable[[pa.Table], pa.Table]:
    """Puts a value into a row of a column: of this number, or the first in which other columns are ``of``."""

    def change(rows: pa.Table) -> pa.Table:
        found = [n for n, one in enumerate(rows.to_pylist()) if all(one[c] == v for c, v in of.items())]
        values = rows[column].to_pylist()
        values[found[0] if row is None else row] = value
        place, field = rows.column_names.index(column), rows.schema.field(column)
        return rows.set_column(place, field.with_nullable(True), pa.array(values, field.type))

    return change


def part(
    change: Callable[[pa.Table], pa.Table], dump: str = FIRST, more_upserts: int = 0
) -> Callable[[Path], None]:
    """Changes the rows of the first rank's part."""
    return lambda directory: rewrite(directory, dump, PART, change, more_upserts)


def fallback(change: Callable[[pa.Table], pa.Table]) -> Callable[[Path], None]:
    """Changes the first rank's fallback rows."""
    return lambda directory: rewrite(directory, FIRST, FALLBACK, change)


def manifest(change: Callable[[dict[str, Any]], object], dump: str = FIRST) -> Callable[[Path], None]:
    """Changes a manifest."""
    return lambda directory: edit(directory, dump, change)


def flip_a_bit(directory: Path) -> None:
    path = directory / FIRST / PART
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(directory: Path) -> None:
    path = directory / FIRST / PART
    path.write_bytes(path.read_bytes()[:-1])


def not_parquet(directory: Path) -> None:
    path = directory / FIRST / PART
    path.write_bytes(b"x" * path.stat().st_size)
    reseal(directory, FIRST, PART)


def symbolic_link(directory: Path) -> None:
    path = directory / FIRST / PART
    path.rename(directory / "elsewhere.parquet")
    path.symlink_to(directory / "elsewhere.parquet")


def copied(directory: Path) -> None:
    shutil.copytree(directory / FIRST, directory / "step_000000000011.g0000")


def forked(directory: Path) -> None:
    fork = "step_000000000021.g0000"
    shutil.copytree(directory / SECOND, directory / fork)
    edit(directory, fork, lambda m: m["dump"].update(step=21))


def out_of_order(directory: Path) -> None:
    last = "step_000000000015.g0000"
    (directory / SECOND).rename(directory / last)
    for dump in (THIRD, RESTARTED):
        edit(
            directory, dump, lambda m: m["previous"].update(step=15) if m["previous"]["step"] == 20 else None
        )
    edit(directory, last, lambda m: m["dump"].update(step=15))
    edit(directory, FIRST, lambda m: m["dump"].update(step=16))
    (directory / FIRST).rename(directory / "step_000000000016.g0000")
    edit(directory, last, lambda m: m["previous"].update(step=16))


def move_to_another_rank(directory: Path) -> None:
    is_one = (pc.field("table_fqn") == "mc.t0") & (pc.field("key_id") == 1)
    moved = put("rank", 1)(pq.read_table(directory / FIRST / PART).filter(is_one))
    rewrite(directory, FIRST, PART, lambda rows: rows.filter(~is_one))
    rewrite(directory, FIRST, OTHER_PART, lambda rows: pa.concat_tables([rows, moved.cast(rows.schema)]))


def two_tables_in_a_row_group(directory: Path) -> None:
    path = directory / FIRST / PART
    pq.write_table(pq.read_table(path), path)
    reseal(directory, FIRST, PART)


def forget_a_key(directory: Path) -> None:
    """The dump that makes another void says nothing of key 33, which the other upserted."""
    rewrite(directory, RESTARTED, OTHER_PART, lambda rows: rows.filter(pc.not_equal(rows["key_id"], 33)))
    edit(directory, RESTARTED, lambda m: m["stats"][1].update(deletes=m["stats"][1]["deletes"] - 1))


def stray(directory: Path) -> None:
    shutil.copy(directory / FIRST / PART, directory / FIRST / "part_00000_of_00001.parquet")


def base_without_a_key(directory: Path) -> None:
    compact(directory)
    rewrite(directory, BASE, BASE_PART, lambda rows: rows.filter(pc.field("key_id") != 5), more_upserts=-1)


def changed_dim(m: dict[str, Any]) -> None:
    m["tables"]["ebc.rows"]["key_space"] = "raw"


def few_rows(m: dict[str, Any]) -> None:
    m["tables"]["mc.t0"]["num_embeddings"] = 3


VECTOR = [0.0, 1.0, 2.0, 3.0]
FAULTS: dict[str, Fault] = {
    "manifest-damaged": Fault(
        lambda d: edit(d, FIRST, lambda m: m.update(world_size=3), seal=False),
        "manifest",
        FIRST,
        "is damaged: its checksum",
    ),
    "manifest-not-json": Fault(
        lambda d: (d / FIRST / "manifest.json").write_bytes(b"{"), "manifest", FIRST, "is not a manifest"
    ),
    "manifest-incomplete": Fault(manifest(lambda m: m.pop("stats")), "manifest", FIRST, "is incomplete"),
    "format-version-unknown": Fault(
        manifest(lambda m: m.update(format_version=99)),
        "manifest",
        FIRST,
        "format version 99; this torchrec_ext reads",
    ),
    "dump-copied": Fault(copied, "manifest", "step_000000000011.g0000", f"is that of {FIRST}"),
    "dump-removed": Fault(lambda d: shutil.rmtree(d / SECOND), "chain", THIRD, "the chain has a gap"),
    "chain-forked": Fault(forked, "chain", SECOND, "both follow", ("column",)),
    "chain-out-of-order": Fault(
        out_of_order, "chain", "step_000000000015.g0000", "is not older", ("column",)
    ),
    "file-missing": Fault(lambda d: (d / FIRST / PART).unlink(), "file", f"{FIRST}: {PART}", "is missing"),
    "file-truncated": Fault(truncate, "file", f"{FIRST}: {PART}", "bytes, the manifest says"),
    "bit-flipped": Fault(flip_a_bit, "file", f"{FIRST}: {PART}", "its checksum is not the manifest's"),
    "file-not-parquet": Fault(not_parquet, "file", f"{FIRST}: {PART}", "cannot be read"),
    "file-is-a-link": Fault(symbolic_link, "file", f"{FIRST}: {PART}", "a symbolic link"),
    "file-of-no-dump": Fault(stray, "file", f"{FIRST}: part_00000_of_00001.parquet", "is not of this dump"),
    "rows-lost": Fault(
        lambda d: edit(d, FIRST, lambda m: m["parts"][0].update(rows=99)),
        "file",
        f"{FIRST}: {PART}",
        "the manifest says 99",
    ),
    "column-missing": Fault(
        part(lambda rows: rows.drop_columns(["source"])),
        "schema",
        f"{FIRST}: {PART}",
        "column source is missing",
    ),
    "column-of-another-type": Fault(
        part(lambda rows: rows.set_column(0, "global_step", rows["global_step"].cast(pa.float64()))),
        "schema",
        f"{FIRST}: {PART}",
        "column global_step is double, not int64",
    ),
    "value-missing": Fault(
        part(put("key_id", None)), "schema", f"{FIRST}: {PART}", "column key_id has nulls", ("count",)
    ),
    "row-group-of-two-tables": Fault(
        two_tables_in_a_row_group, "row-group", f"{FIRST}: {PART}", "holds rows of 2 tables"
    ),
    "table-not-listed": Fault(
        part(put("table_fqn", "mc.t9")),
        "table",
        f"{FIRST}: {PART}",
        "rows of mc.t9, which the manifest does not",
        ("count",),
    ),
    "table-changed": Fault(
        manifest(changed_dim, SECOND), "table", SECOND, "before it had row keys", ("fallback", "table")
    ),
    "step-of-another-dump": Fault(
        part(put("global_step", 99)), "column", f"{FIRST}: {PART}", "global_step is 99, not 10"
    ),
    "op-unknown": Fault(
        part(put("op", "insert")),
        "op",
        f"{FIRST}: {PART}",
        "op is neither upsert nor delete: 1 row, key 1",
        ("count",),
    ),
    "upsert-without-vector": Fault(
        part(put("embedding", None)),
        "embedding",
        f"{FIRST}: {PART}",
        "upserts without a vector: 1 row, key 1",
    ),
    "delete-with-vector": Fault(
        part(put("embedding", VECTOR, op="delete"), SECOND),
        "embedding",
        f"{SECOND}: {PART}",
        "deletes with a vector",
    ),
    "vector-of-another-length": Fault(
        part(put("embedding", VECTOR[:3])),
        "embedding",
        f"{FIRST}: {PART}",
        "another length than 4: 1 row, key 1",
    ),
    "vector-not-finite": Fault(
        part(put("embedding", [0.0, float("nan"), 0.0, float("inf")])),
        "finite",
        f"{FIRST}: {PART}",
        "vectors that are not finite: 1 row, key 1",
    ),
    "key-twice-in-a-part": Fault(
        part(lambda rows: pa.concat_tables([rows.slice(0, 1), rows]), more_upserts=1),
        "key",
        FIRST,
        "more than once: 1 row, key 1",
    ),
    "key-on-two-ranks": Fault(
        lambda d: rewrite(d, FIRST, OTHER_PART, put("key_id", 1)),
        "key",
        FIRST,
        "more than once: 1 row, key 1",
        ("routing",),
    ),
    "row-outside-the-table": Fault(
        part(put("key_id", 40, row=-1)), "key", f"{FIRST}: {PART}", "rows outside of 0 to 39: 1 row, key 40"
    ),
    "key-on-another-rank": Fault(
        move_to_another_rank,
        "routing",
        f"{FIRST}: {OTHER_PART}",
        "keys that route to another rank: 1 row, key 1",
    ),
    "counts-wrong": Fault(
        manifest(lambda m: m["stats"][0].update(upserts=77)), "count", FIRST, "7 upserts, the manifest says"
    ),
    "fallback-row-missing": Fault(
        fallback(lambda rows: rows.slice(1)), "fallback", FIRST, "mc.t0: shard 0 has 0 fallback rows, not 1"
    ),
    "fallback-row-twice": Fault(
        fallback(lambda rows: pa.concat_tables([rows, rows])),
        "fallback",
        FIRST,
        "mc.t0: shard 0 has 2 fallback rows, not 1",
    ),
    "fallback-row-not-finite": Fault(
        fallback(put("embedding", [0.0, 0.0, float("inf"), 0.0])),
        "finite",
        f"{FIRST}: {FALLBACK}",
        "fallback rows that are not finite",
    ),
    "fallback-row-of-another-length": Fault(
        fallback(put("embedding", VECTOR[:1])),
        "fallback",
        f"{FIRST}: {FALLBACK}",
        "vectors of another length than 4",
    ),
    "answer-of-an-ordinary-id": Fault(
        lambda d: rewrite(d, FIRST, "fallback_00001_of_00002.parquet", put("key_id", 7, row=-1)),
        "fallback",
        f"{FIRST}: fallback_00001_of_00002.parquet",
        "key 7 cannot have an answer of its own",
    ),
    "superseding-dump-forgets-a-key": Fault(
        forget_a_key, "supersedes", RESTARTED, "of which it says nothing: 1 row, key 33"
    ),
    "more-keys-than-rows": Fault(manifest(few_rows), "occupancy", FIRST, "4 keys own a row of 3"),
    "base-without-a-key": Fault(base_without_a_key, "base", BASE, "mc.t0: keys missing: 1 row, key 5"),
}
