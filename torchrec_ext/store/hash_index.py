"""``HashIndex``: rows for int64 keys, in arrays that other processes may have open too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_ext.errors import CorruptTableError

Ints = npt.NDArray[np.int64]

Allocate = Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]
"""Makes the CPU array of a name, shape and dtype, full of zeros, or finds it as it was left."""

# An entry of the slots: 0, this, or a row with bits of its key's hash above it. The sign bit is neither.
_EMPTY, _TOMBSTONE = np.int32(0), np.int32(-(1 << 31))

# What the state array holds. All of it is 0 at first.
_DOUBLINGS = 0  # how often the slots in use were doubled
_HIGHEST = 1  # the highest row that was ever given
_FREE = 2  # how many rows up to it were given back
_TOMBSTONES = 3  # how many slots hold one
_REACH = 4  # how far from its home slot a key may be
_STATE_SIZE = 8

_SMALLEST_BITS = 10  # one page of slots
_CHUNK = 1 << 17  # keys at a time: temporary arrays of about a megabyte, which memory is reused for


class HashIndex:
    """Gives rows 1 to ``capacity`` to int64 keys, any of them; 0 says that a key has none.

    Open addressing with linear probing, vectorised: all keys of a call probe their next slot together. A
    slot holds the number of a row and, in the bits above it, a part of the key's hash, so that most keys
    are compared only with themselves. When more than 3/5 of the slots in use hold keys, their number is
    doubled; when more than 3/4 hold keys or tombstones, they are filled anew. All keys move then.

    The keys of rows, and which rows are taken, are the truth and are written first; slots and free rows
    can be made anew from them. A process that dies half-way leaves an index that ``check`` finds wanting.
    Finding ends even there: it goes no farther from a key's home than any key was ever put.

    Nothing is kept outside of the arrays, and nothing is locked.

    Args:
        capacity: how many keys there may be, below 2^31.
        allocate: where the arrays come from; only what is touched needs memory.
        name: a prefix of their names.
    """

    def __init__(self, capacity: int, allocate: Allocate, name: str) -> None:
        self.capacity = capacity
        self._largest_bits = _bits_for(capacity)
        self._smallest_bits = min(_SMALLEST_BITS, self._largest_bits)
        self._row_mask = np.int32((1 << capacity.bit_length()) - 1)

        def array(what: str, length: int, dtype: torch.dtype) -> npt.NDArray[Any]:
            return allocate(f"{name}_{what}", (length,), dtype).numpy()

        self._slots = array("slots", 1 << self._largest_bits, torch.int32)
        self._keys = array("keys", capacity + 1, torch.int64)
        self._taken = array("taken", capacity + 1, torch.bool)
        self._free = array("free", capacity, torch.int32)
        self._state = array("state", _STATE_SIZE, torch.int64)

    def __len__(self) -> int:
        return int(self._state[_HIGHEST] - self._state[_FREE])

    def find(self, keys: Ints) -> Ints:
        """The rows of keys, 0 where there is none."""
        if len(keys) <= _CHUNK:
            return self._probe(keys)[0].astype(np.int64)
        rows = np.empty(len(keys), np.int64)
        for start in range(0, len(keys), _CHUNK):
            rows[start : start + _CHUNK] = self._probe(keys[start : start + _CHUNK])[0]
        return rows

    def rows(self) -> Ints:
        """The rows that have a key, ascending."""
        return np.flatnonzero(self._taken[: self._state[_HIGHEST] + 1])

    def keys(self, rows: Ints) -> Ints:
        """The keys of rows that have one."""
        return self._keys.take(rows)

    def taken(self, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether rows have a key."""
        return self._taken.take(rows)

    def reserve(self, count: int) -> Ints:
        """Rows without a key, first those that had one; they stay free until ``bind``.

        Raises:
            ValueError: there are not as many.
        """
        if count > self.capacity - len(self):
            raise ValueError(f"{count} rows wanted, {self.capacity - len(self)} are free")
        free, highest = int(self._state[_FREE]), int(self._state[_HIGHEST])
        again = self._free[max(0, free - count) : free].astype(np.int64)
        return np.concatenate([again, np.arange(highest + 1, highest + 1 + count - len(again))])

    def bind(self, keys: Ints, rows: Ints) -> None:
        """Gives keys the rows that ``reserve`` just named.

        Args:
            keys: without repeats, and without a row.
            rows: as many.
        """
        if not len(keys):
            return
        state = self._state
        again = min(len(rows), int(state[_FREE]))
        self._keys[rows] = keys
        state[_HIGHEST] += len(rows) - again
        self._taken[rows] = True
        state[_FREE] -= again
        size, count = 1 << self._bits, len(self)
        if 5 * count > 3 * size or 4 * (count + int(state[_TOMBSTONES])) > 3 * size:
            self._fill_slots()
        else:
            self._place(rows)

    def drop(self, rows: Ints) -> None:
        """Takes the keys of rows away.

        Args:
            rows: without repeats, each with a key.
        """
        for start in range(0, len(rows), _CHUNK):
            some = rows[start : start + _CHUNK]
            slots = self._probe(self._keys[some])[1]
            self._taken[some] = False
            self._slots[slots] = _TOMBSTONE
            self._state[_TOMBSTONES] += len(some)
            free = int(self._state[_FREE])
            self._free[free : free + len(some)] = some
            self._state[_FREE] = free + len(some)

    def clear(self) -> None:
        """Takes all keys away."""
        self._taken[: self._state[_HIGHEST] + 1] = False
        self._slots[: 1 << self._bits] = _EMPTY
        self._state[:] = 0

    def check(self) -> str | None:
        """What is wrong with the slots or the free rows, if anything is."""
        doublings, highest, free, tombstones, reach = self._state[: _REACH + 1].tolist()
        if not (
            0 <= doublings <= self._largest_bits - self._smallest_bits
            and 0 <= free <= highest <= self.capacity
            and 0 <= reach < 1 << self._bits
        ):
            return f"its state is {self._state.tolist()}"
        rows = np.flatnonzero(self._taken)
        if len(rows) != len(self) or (len(rows) and not 0 < rows[0] <= rows[-1] <= highest):
            return f"{len(rows)} rows have a key, {len(self)} should"
        if not np.array_equal(np.sort(self._free[:free]), self._untaken(highest)):
            return "its list of free rows has other rows than those without a key"
        slots = self._slots[: 1 << self._bits]
        held = np.count_nonzero(slots & self._row_mask)
        if held != len(rows) or np.count_nonzero(slots == _TOMBSTONE) != tombstones:
            return f"{held} of its slots hold a row, {len(rows)} should"
        if (slots & self._row_mask).max() > self.capacity:
            return "its slots hold a row outside of the table"
        lost = np.count_nonzero(self.find(self._keys[rows]) != rows)
        return f"{lost} keys are not found" if lost else None

    def rebuild(self) -> None:
        """Makes slots and free rows anew; of rows with the same key, the first keeps it."""
        self._taken[0] = False
        rows = np.flatnonzero(self._taken)
        first = np.unique(self._keys[rows], return_index=True)[1]
        self._taken[np.delete(rows, first)] = False
        highest = int(rows.max(initial=0))
        free = self._untaken(highest)
        self._free[: len(free)] = free
        self._state[_HIGHEST], self._state[_FREE] = highest, len(free)
        self._fill_slots()

    @property
    def _bits(self) -> int:
        """The binary logarithm of the number of slots in use."""
        return self._smallest_bits + int(self._state[_DOUBLINGS])

    def _untaken(self, highest: int) -> Ints:
        """The rows without a key, ascending, up to the highest that was ever given."""
        return 1 + np.flatnonzero(~self._taken[1 : highest + 1])

    def _fill_slots(self) -> None:
        """Makes the slots anew, as many as the keys need, never fewer than before."""
        state, needed = self._state, _bits_for(len(self)) - self._smallest_bits
        most = self._largest_bits - self._smallest_bits
        state[_DOUBLINGS] = max(needed, min(max(0, int(state[_DOUBLINGS])), most))
        state[_TOMBSTONES] = state[_REACH] = 0
        self._slots[: 1 << self._bits] = _EMPTY
        self._place(self.rows())

    def _probe(self, keys: Ints) -> tuple[npt.NDArray[np.int32], Ints]:
        """The row of each key, 0 where there is none, and, of the others, the slot that holds it."""
        hashes = _hash(keys)
        slots = self._home(hashes)
        entries = self._slots.take(slots)
        rows = entries & self._row_mask
        found = self._keys.take(rows) == keys
        found &= rows != 0  # a tombstone is no row, though key 0 looks like row 0's
        rows *= found
        # Most keys are done. The others go on, fewer at every step.
        left = np.flatnonzero((entries != _EMPTY) & ~found)
        slot, key, tag = slots[left], keys[left], self._tags(hashes[left])
        mask, tag_mask = (1 << self._bits) - 1, ~self._row_mask
        for _ in range(self._state[_REACH]):
            if not len(left):
                break
            slot = (slot + 1) & mask
            entries = self._slots.take(slot)
            alike = np.flatnonzero((entries ^ tag) & tag_mask == 0)
            row = entries[alike] & self._row_mask
            same = self._keys.take(row) == key[alike]
            alike = alike[same]
            rows[left[alike]] = row[same]
            slots[left[alike]] = slot[alike]
            entries[alike] = _EMPTY  # these are done too
            on = np.flatnonzero(entries)
            left, slot, key, tag = left[on], slot[on], key[on], tag[on]
        return rows, slots

    def _place(self, rows: Ints) -> None:
        """Puts rows that are in no slot into the first open one from their key's home on.

        Raises:
            CorruptTableError: none is open.
        """
        for start in range(0, len(rows), _CHUNK):
            some = rows[start : start + _CHUNK]
            hashes = _hash(self._keys[some])
            self._enter(self._home(hashes), self._tags(hashes) | some.astype(np.int32))

    def _enter(self, slot: Ints, entry: npt.NDArray[np.int32]) -> None:
        """Puts entries, which are all different, into the first open slots from given ones on."""
        mask, state = (1 << self._bits) - 1, self._state
        for distance in range(mask + 1):
            state[_REACH] = max(distance, int(state[_REACH]))
            there = self._slots.take(slot)
            placed = np.flatnonzero(there & self._row_mask == 0)
            wanted, mine = slot[placed], entry[placed]
            self._slots[wanted] = mine
            # Of several entries that want a slot, one got it.
            placed = placed[self._slots.take(wanted) == mine]
            state[_TOMBSTONES] -= np.count_nonzero(there[placed])
            if len(placed) == len(slot):
                return
            left = np.ones(len(slot), np.bool_)
            left[placed] = False
            slot, entry = (slot[left] + 1) & mask, entry[left]
        raise CorruptTableError("no slot of the index is open, though it should be half empty; rebuild it")

    def _home(self, hashes: npt.NDArray[np.uint64]) -> Ints:
        return (hashes >> np.uint64(64 - self._bits)).view(np.int64)

    def _tags(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
        return (hashes & np.uint64(0x7FFFFFFF)).astype(np.int32) & ~self._row_mask


def _bits_for(count: int) -> int:
    """The binary logarithm of how many slots ``count`` keys need."""
    return (5 * count // 3).bit_length()


def _hash(keys: Ints) -> npt.NDArray[np.uint64]:
    """A one-to-one mixing of 64 bits; the upper bits choose the slot, the lower ones are the tag."""
    mixed = keys.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(32)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return mixed
