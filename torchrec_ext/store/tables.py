"""What a table is, whatever holds its rows: plain data that can be compared, stored and sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

# Weights are initialised in pieces of about this size, so that a table larger than memory can be.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class Constant:
    """Initial rows that hold one value everywhere."""

    value: float = 0.0

    def rows(self, keys: torch.Tensor, dim: int) -> torch.Tensor:
        """The initial rows of ``keys``, int64 ``[n]``: float32 ``[n, dim]``, on the keys' device."""
        return torch.full((len(keys), dim), self.value, device=keys.device)


@dataclass(frozen=True)
class Uniform:
    """Initial rows drawn uniformly from ``[low, high)``.

    A row depends on its key and the seed alone: not on the order in which keys arrive, nor on the
    shard that holds them. The numbers are SplitMix64's (Steele, Lea and Flood, "Fast splittable
    pseudorandom number generators", 2014), one per column, of which 24 bits are used.
    """

    low: float = 0.0
    high: float = 1.0
    seed: int = 0

    def rows(self, keys: torch.Tensor, dim: int) -> torch.Tensor:
        """The initial rows of ``keys``, int64 ``[n]``: float32 ``[n, dim]``, on the keys' device."""
        columns = torch.arange(dim, dtype=torch.int64, device=keys.device)
        state = _mix(keys + _wrap(self.seed * _GOLDEN)).unsqueeze(1) + (columns + 1) * _wrap(_GOLDEN)
        bits = (_mix(state) >> 40) & 0xFFFFFF
        return bits.float().mul_((self.high - self.low) / (1 << 24)).add_(self.low)


Initializer = Constant | Uniform


@dataclass(frozen=True)
class ByFunction:
    """Initial rows of a dense table that a function fills, or whoever makes the table writes there.

    No row can be drawn anew without the function. Rows hold zeros until somebody fills them.
    """


_GOLDEN = 0x9E3779B97F4A7C15


def _wrap(value: int) -> int:
    """``value`` modulo 2^64 as an int64."""
    return ((value + (1 << 63)) % (1 << 64)) - (1 << 63)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser on int64 tensors; a shift right has to be made a logical one."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _wrap(0xBF58476D1CE4E5B9)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _wrap(0x94D049BB133111EB)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@dataclass(frozen=True)
class CounterFilter:
    """Admits a key to a dynamic table when it was seen ``filter_freq`` times in training.

    Args:
        filter_freq: 1 admits at first sight.
    """

    filter_freq: int = 1

    def __post_init__(self) -> None:
        if self.filter_freq < 1:
            raise ValueError(f"filter_freq must be at least 1, not {self.filter_freq}")


@dataclass(frozen=True)
class DenseTable:
    """A table with a row for every key of a range.

    Attributes:
        name: unique in its store.
        dim: the embedding dimension.
        num_rows: how many keys there are.
        first_key: the first of them; a row-wise shard does not start at 0.
        initializer: what the rows hold at first.
    """

    name: str
    dim: int
    num_rows: int
    first_key: int = 0
    initializer: Initializer | ByFunction = field(default_factory=Uniform)

    def __post_init__(self) -> None:
        _check(self.name, dim=self.dim, num_rows=self.num_rows + 1)  # a shard may be empty
        if self.first_key < 0:
            raise ValueError(f"table {self.name!r}: first_key must not be negative, not {self.first_key}")


@dataclass(frozen=True)
class DynamicTable:
    """A table of any int64 keys, each of which gets a row when it is admitted.

    Keys that were not admitted, and keys that were evicted, are answered by the default row, which is
    constant.

    Attributes:
        name: unique in its store.
        dim: the embedding dimension.
        max_rows: how many keys may have a row at the same time. Memory is reserved for them, but taken
            only as keys are admitted.
        initializer: what a row holds when its key is admitted.
        filter: when that is.
        evict_after: keys that were not looked up in training for this many steps make room when the
            table is full; None: a full table is an error.
        default_value: what the default row holds, in every column.
    """

    name: str
    dim: int
    max_rows: int
    initializer: Initializer = field(default_factory=Uniform)
    filter: CounterFilter = field(default_factory=CounterFilter)
    evict_after: int | None = None
    default_value: float = 0.0

    def __post_init__(self) -> None:
        _check(self.name, dim=self.dim, max_rows=self.max_rows)
        if not isinstance(self.initializer, Initializer):
            raise ValueError(f"table {self.name!r}: its rows come one by one, {self.initializer} has none")
        if self.evict_after is not None and self.evict_after < 1:
            raise ValueError(f"table {self.name!r}: evict_after must be at least 1, not {self.evict_after}")

    @property
    def num_rows(self) -> int:
        """Rows to reserve: those of keys, after the default row, which is row 0."""
        return self.max_rows + 1


Table = DenseTable | DynamicTable


def is_same(there: Table, wanted: Table) -> bool:
    """Whether a table is the one that is wanted. What a function filled may have been told otherwise."""
    if ByFunction() not in (there.initializer, wanted.initializer):
        return there == wanted
    return isinstance(wanted, DenseTable) and there == replace(wanted, initializer=there.initializer)


KeyOf = Callable[[DenseTable, torch.Tensor], torch.Tensor]
"""Which keys of a whole table those are of a part of it that is stored without gaps, int64 ``[n]`` each."""


def _check(name: str, **positive: int) -> None:
    if not name:
        raise ValueError("a table needs a name")
    for what, value in positive.items():
        if value < 1:
            raise ValueError(f"table {name!r}: {what} must be positive, not {value}")


@torch.no_grad()
def fill_initial_rows(
    table: DenseTable, initializer: Initializer, rows: torch.Tensor, key_of: KeyOf | None = None
) -> None:
    """Gives every row of a new dense table its initial value, piece by piece.

    Args:
        table: the table.
        initializer: its initializer.
        rows: its rows, float32 ``[num_rows, dim]``.
        key_of: which keys initial values are those of, by the table's own; by default these.
    """
    step = max(1, CHUNK_BYTES // (4 * table.dim))
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        first = table.first_key + start
        keys = torch.arange(first, first + len(chunk), device=rows.device)
        chunk.copy_(initializer.rows(keys if key_of is None else key_of(table, keys), table.dim))


def check_keys(table: Table, keys: torch.Tensor) -> None:
    """Checks keys of a table.

    Raises:
        ValueError: they are not int64, not a vector, or out of a dense table's range.
    """
    if keys.dtype != torch.int64 or keys.dim() != 1:
        raise ValueError(f"table {table.name!r}: keys must be int64 [n], not {keys.dtype} {list(keys.shape)}")
    if isinstance(table, DenseTable) and len(keys):
        low, high = (int(bound) for bound in torch.aminmax(keys))
        first, stop = table.first_key, table.first_key + table.num_rows
        if low < first or high >= stop:
            wrong = low if low < first else high
            raise ValueError(f"table {table.name!r} has keys {first} to {stop - 1}; got {wrong}")


def table_to_json(table: Table) -> dict[str, Any]:
    """A table as a JSON object."""
    content = {"kind": type(table).__name__, **asdict(table)}
    content["initializer"] = {"kind": type(table.initializer).__name__, **content["initializer"]}
    return content


def table_from_json(content: dict[str, Any]) -> Table:
    """The table that ``table_to_json`` described.

    Raises:
        ValueError: it describes none.
    """
    try:
        fields = dict(content)
        initializer = dict(fields.pop("initializer"))
        kinds = {"Constant": Constant, "Uniform": Uniform, "ByFunction": ByFunction}
        kind = kinds[initializer.pop("kind")]
        check_types(initializer, value=float, low=float, high=float, seed=int)
        fields["initializer"] = kind(**initializer)
        check_types(fields, dim=int, num_rows=int, first_key=int, max_rows=int, name=str, default_value=float)
        if fields.pop("kind") == "DenseTable":
            return DenseTable(**fields)
        if fields.get("evict_after") is not None:
            check_types(fields, evict_after=int)
        check_types(fields["filter"], filter_freq=int)
        fields["filter"] = CounterFilter(**fields["filter"])
        return DynamicTable(**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a table's description: {content}") from error


def check_types(fields: Mapping[str, Any], **types: type) -> None:
    """Checks those of a JSON object's fields that are there; a whole number may stand for a ``float``.

    Raises:
        TypeError: a field is of another type, or a number is not finite.
    """
    for name, kind in types.items():
        value = fields.get(name, kind())
        fits = type(value) is kind or (kind is float and type(value) is int)
        if not fits or (kind is float and not math.isfinite(value)):
            raise TypeError(f"{name} is {value!r}, no {kind.__name__}")
