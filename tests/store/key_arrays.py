"""What the tests of a dynamic table's keys share."""

from __future__ import annotations

import numpy as np
import torch

from torchrec_ext.store import hash_index
from torchrec_ext.store.keys import DynamicKeys
from torchrec_ext.store.tables import CounterFilter, DynamicTable

EXTREME = (0, -1, 1, -(1 << 63), (1 << 63) - 1)


class Arrays(dict[str, torch.Tensor]):
    """Arrays that are found again by their names."""

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        array = self.setdefault(name, torch.zeros(shape, dtype=dtype))
        assert array.shape == shape and array.dtype == dtype
        return array

    def copy(self) -> Arrays:
        return Arrays({name: array.clone() for name, array in self.items()})


def table(max_rows: int, filter_freq: int = 1, evict_after: int | None = None) -> DynamicTable:
    return DynamicTable("t", 4, max_rows, filter=CounterFilter(filter_freq), evict_after=evict_after)


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def ignore(rows: torch.Tensor) -> None:
    pass


def rows_by_key(of: DynamicKeys) -> dict[int, int]:
    rows = of.rows_in_use()
    return dict(zip(of.keys_of(rows).tolist(), rows.tolist(), strict=True))


def keys_that_collide(count: int, start: int = (0xABCDEF << 40) + 0x1234567) -> list[int]:
    """Keys that want the same slot, however many there are, and look alike there."""
    first, second = (pow(odd, -1, 1 << 64) for odd in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9))
    found = []
    for number in range(count):
        mixed = (start + (number << 31)) * second % (1 << 64)
        key = (mixed ^ mixed >> 32) * first % (1 << 64)
        found.append(key - (1 << 64) if key >> 63 else key)
    hashes = hash_index._hash(np.array(found))
    assert len(np.unique(hashes >> np.uint64(40))) == 1
    return found


def slots_in_use(arrays: Arrays) -> int:
    return 1 << (10 + int(arrays["key_state"][0]))
