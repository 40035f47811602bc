"""How embeddings lie in Redis: keys, values, and the commands for many of them as one buffer each.

With the prefix ``P``, and braces as they stand (they put the four into one slot of a cluster)::

    {P}:tables      JSON: this format, its version, and what it takes to answer for each table
    {P}:fallbacks   the fallback rows and exceptions of all tables, float32, in the order of the JSON
    {P}:version     the version in the JSON: drawn anew whenever the two above change
    {P}:position    JSON: the last dump that is here whole
    {P}:publisher   who may write
    P:N:<16 hex>    the row of a key of table number N; the key as an unsigned 64-bit integer

A row is its vector, little-endian: float32, or, if the table or the log is of float16 and it loses nothing,
float16; its size tells which. A row with one byte more, or with none at all, belongs to a deleted key.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.publish.served import Position, ServedTable

FORMAT = {"format": "torchrec-ext", "version": 1}
_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)


@dataclass(frozen=True)
class Names:
    """The names of all keys under a prefix."""

    prefix: str

    def __post_init__(self) -> None:
        if not _PREFIX.fullmatch(self.prefix):
            raise ValueError(f"prefix {self.prefix!r}: 1 to 64 letters, digits, '_', '.' or '-'")

    def of(self, name: str) -> str:
        """The key of what there is once."""
        return f"{{{self.prefix}}}:{name}"

    def patterns(self) -> tuple[str, str]:
        """Globs that match every key of ours."""
        return f"{{{self.prefix}}}:*", f"{self.prefix}:*"

    def rows(self, number: int) -> bytes:
        """What the keys of a table's rows begin with."""
        return f"{self.prefix}:{number}:".encode()

    def row_of(self, key: bytes) -> tuple[int, int] | None:
        """The table's number and the id that a key of a row stands for."""
        match = re.fullmatch(re.escape(self.prefix.encode()) + rb":(\d+):([0-9a-f]{16})", key)
        if match is None:
            return None
        unsigned = int(match[2], 16)
        return int(match[1]), unsigned - (1 << 64 if unsigned >> 63 else 0)


@dataclass(frozen=True)
class Catalog:
    """The tables, and the numbers their rows have.

    Attributes:
        version: never the same for two catalogs.
        numbers: by table; never given twice, also to tables that are not served any more.
        tables: those served.
    """

    version: str = ""
    numbers: Mapping[str, int] = field(default_factory=dict)
    tables: Mapping[str, ServedTable] = field(default_factory=dict)
    last_number: int = -1
    dims: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def following(self, tables: Mapping[str, ServedTable], *, replaces: bool) -> Catalog:
        """The catalog with these tables in place of those it has; what changed shape gets new numbers."""
        numbers, dims, last = dict(self.numbers), dict(self.dims), self.last_number
        if replaces:
            numbers = {fqn: number for fqn, number in numbers.items() if fqn in tables}
        for fqn, table in tables.items():
            shape = (table.dim, table.dtype)
            if fqn not in numbers or dims[fqn] != shape:
                last += 1
                numbers[fqn] = last
            dims[fqn] = shape
        dims = {fqn: dims[fqn] for fqn in numbers}
        return Catalog(secrets.token_hex(8), numbers, dict(tables), last, dims)

    def to_bytes(self) -> tuple[bytes, bytes]:
        """What stands under ``tables`` and under ``fallbacks``."""
        plain = {
            **FORMAT,
            "catalog": self.version,
            "last_number": self.last_number,
            "rows": {
                fqn: {"number": number, "dim": self.dims[fqn][0], "dtype": self.dims[fqn][1]}
                for fqn, number in self.numbers.items()
            },
            "tables": {fqn: table.to_json() for fqn, table in self.tables.items()},
        }
        vectors = b"".join(table.vectors().astype("<f4").tobytes() for table in self.tables.values())
        return json.dumps(plain).encode(), vectors

    @classmethod
    def from_bytes(cls, data: bytes, vectors: bytes) -> Catalog:
        """The inverse of ``to_bytes``.

        Raises:
            ValueError: it is not what ``to_bytes`` made, or of another version.
        """
        try:
            plain = json.loads(data)
            mine = {name: plain.get(name) for name in FORMAT}
        except (ValueError, AttributeError):
            raise ValueError("it is not of this package") from None
        if mine != FORMAT:
            raise ValueError(f"it is {mine}; this torchrec_ext reads {FORMAT}")
        tables, begin = {}, 0
        for fqn, table in plain["tables"].items():
            count = (table["num_shards"] if table["key_space"] != "row" else 0) + len(table["exceptions"])
            end = begin + 4 * count * table["dim"]
            block = np.frombuffer(vectors[begin:end], "<f4").astype(np.float32).reshape(count, table["dim"])
            tables[fqn] = ServedTable.from_json(table, block)
            begin = end
        rows = plain["rows"]
        return cls(
            plain["catalog"],
            {fqn: row["number"] for fqn, row in rows.items()},
            tables,
            plain["last_number"],
            {fqn: (row["dim"], row["dtype"]) for fqn, row in rows.items()},
        )


def position_to_bytes(position: Position) -> bytes:
    """What stands under ``position``."""
    return json.dumps(asdict(position)).encode()


def position_from_bytes(data: bytes) -> Position:
    """The inverse of ``position_to_bytes``."""
    return Position(**json.loads(data))


def encode_rows(
    table: ServedTable, keys: NDArray[np.int64], vectors: NDArray[np.float32]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
    """The values of rows of a table, those of one size together: keys and uint8 ``[n, bytes]``."""
    if "float16" in (table.dtype, table.storage_dtype):
        with np.errstate(over="ignore"):
            halves = np.ascontiguousarray(vectors, "<f2")
        exact = (halves.astype(np.float32) == vectors).all(axis=1)
        if exact.any():
            yield keys[exact], halves[exact].view(np.uint8).reshape(-1, 2 * table.dim)
        keys, vectors = keys[~exact], vectors[~exact]
    if len(keys):
        yield keys, np.ascontiguousarray(vectors, "<f4").view(np.uint8).reshape(len(keys), -1)


def decode_rows(
    table: ServedTable, values: Sequence[bytes | None]
) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
    """The inverse of ``encode_rows``: which values are those of rows, bool ``[n]``, and the rows of these."""
    sizes = np.fromiter((-1 if value is None else len(value) for value in values), np.int64, len(values))
    owned = (sizes == 4 * table.dim) | (sizes == 2 * table.dim)
    sizes = sizes[owned]
    rows = [value for value, is_row in zip(values, owned, strict=True) if is_row]
    vectors = np.empty((len(rows), table.dim), np.float32)
    for bytes_each in (2, 4):
        here = sizes == bytes_each * table.dim
        data = b"".join(row for row, is_here in zip(rows, here, strict=True) if is_here)  # type: ignore[misc]
        vectors[here] = np.frombuffer(data, f"<f{bytes_each}").reshape(-1, table.dim)
    return owned, vectors


def key_records(begin: bytes, keys: NDArray[np.int64], tail: int = 0) -> NDArray[np.uint8]:
    """RESP bulk strings of row keys, uint8 ``[n, bytes + tail]``, with room for what follows each."""
    head = b"$%d\r\n" % (len(begin) + 16) + begin
    records = np.empty((len(keys), len(head) + 18 + tail), np.uint8)
    records[:, : len(head)] = np.frombuffer(head, np.uint8)
    digits = _HEX[keys.astype(">i8").view(np.uint8)].view(np.uint8).reshape(len(keys), 16)
    records[:, len(head) : len(head) + 16] = digits
    records[:, len(head) + 16 : len(head) + 18] = np.frombuffer(b"\r\n", np.uint8)
    return records


def mset(begin: bytes, keys: NDArray[np.int64], values: NDArray[np.uint8]) -> tuple[bytes, NDArray[np.uint8]]:
    """One MSET of rows; ``values`` uint8 ``[n, bytes]``."""
    size = values.shape[1]
    head = b"$%d\r\n" % size
    records = key_records(begin, keys, len(head) + size + 2)
    at = records.shape[1] - size - 2
    records[:, at - len(head) : at] = np.frombuffer(head, np.uint8)
    records[:, at : at + size] = values
    records[:, at + size :] = np.frombuffer(b"\r\n", np.uint8)
    return b"*%d\r\n$4\r\nMSET\r\n" % (1 + 2 * len(keys)), records.reshape(-1)


def many(command: bytes, begin: bytes, keys: NDArray[np.int64], *first: bytes) -> tuple[bytes, Any]:
    """One command over the keys of rows, such as MGET or DEL; ``first`` are keys that come before them."""
    head = b"*%d\r\n" % (1 + len(first) + len(keys)) + bulk(command, *first)
    return head, key_records(begin, keys).reshape(-1)


def packed(*words: bytes) -> bytes:
    """One command in RESP."""
    return b"*%d\r\n" % len(words) + bulk(*words)


def bulk(*words: bytes) -> bytes:
    """Words as RESP bulk strings."""
    return b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)
