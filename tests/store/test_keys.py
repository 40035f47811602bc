from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.store.key_arrays import (
    EXTREME,
    Arrays,
    ids,
    ignore,
    keys_that_collide,
    rows_by_key,
    slots_in_use,
    table,
)
from torchrec_ext.errors import TableFullError
from torchrec_ext.store.keys import DynamicKeys

LIKE_ZERO = keys_that_collide(4, start=0)
KEYS = st.sampled_from([*EXTREME, *range(2, 10), *LIKE_ZERO, *keys_that_collide(8)])
BATCHES = st.lists(KEYS, max_size=12)


class KeysOfATable(RuleBasedStateMachine):
    """Compares ``DynamicKeys`` to dictionaries."""

    @initialize(
        max_rows=st.integers(1, 10),
        filter_freq=st.integers(1, 3),
        evict_after=st.sampled_from([None, 1, 3]),
    )
    def make(self, max_rows: int, filter_freq: int, evict_after: int | None) -> None:
        self.table = table(max_rows, filter_freq, evict_after)
        self.arrays = Arrays()
        self.keys = DynamicKeys(self.table, self.arrays)
        self.rows: dict[int, int] = {}
        self.frequency: dict[int, int] = {}
        self.last_used: dict[int, int] = {}
        self.waiting: dict[int, int] = {}
        self.step = 0

    @rule(batch=BATCHES, steps=st.integers(-1, 2), as_times=st.booleans())
    def look_up(self, batch: list[int], steps: int, as_times: bool) -> None:
        step = max(0, self.step + steps)
        counts = Counter(batch)
        new = [key for key in counts if key not in self.rows]
        seen = {key: self.waiting.get(key, 0) + counts[key] for key in new}
        ready = [key for key in new if seen[key] >= self.table.filter.filter_freq]
        victims = self.victims(counts, len(ready), step)
        released: list[int] = []

        def release(rows: torch.Tensor) -> None:
            released.extend(self.keys.keys_of(rows).tolist())

        def act() -> tuple[torch.Tensor, torch.Tensor]:
            if not as_times:
                return self.keys.look_up(ids(*batch), step, release)
            return self.keys.look_up(ids(*counts), step, release, times=ids(*counts.values()))

        if victims is None:
            with pytest.raises(TableFullError, match=f"'t' is full.*max_rows={self.table.max_rows}"):
                act()
            return
        rows, new_rows = act()
        assert sorted(released) == sorted(victims)
        self.step = max(step, self.step)
        self.forget(victims)
        self.note_rows(list(counts) if as_times else batch, rows, new_rows, ready)
        for key, count in counts.items():
            if key in self.rows:
                self.frequency[key] = self.frequency.get(key, self.waiting.pop(key, 0)) + count
                self.last_used[key] = step
        self.note_candidates({key: seen[key] for key in new if key not in self.rows})

    @rule(batch=BATCHES)
    def admit(self, batch: list[int]) -> None:
        new = list({key for key in batch if key not in self.rows})
        victims = self.victims(batch, len(new), self.step)
        if victims is None:
            with pytest.raises(TableFullError):
                self.keys.admit(ids(*batch), ignore)
            return
        rows, new_rows = self.keys.admit(ids(*batch), ignore)
        self.forget(victims)
        self.note_rows(batch, rows, new_rows, new)
        for key in new:
            self.frequency[key] = self.waiting.pop(key, 0)
            self.last_used[key] = self.step

    @rule(batch=BATCHES)
    def find(self, batch: list[int]) -> None:
        assert self.keys.find(ids(*batch)).tolist() == [self.rows.get(key, 0) for key in batch]

    @rule(rows=st.lists(st.integers(0, 10)))
    def evict(self, rows: list[int]) -> None:
        rows = [row for row in rows if row <= self.table.max_rows]
        self.keys.evict(ids(*rows))
        self.forget([key for key, row in self.rows.items() if row in rows])

    @rule(steps=st.integers(0, 3))
    def evict_unused(self, steps: int) -> None:
        self.keys.evict(self.keys.unused_since(self.step - steps))
        self.forget([key for key, step in self.last_used.items() if step < self.step - steps])

    @rule()
    def reopen(self) -> None:
        self.arrays = self.arrays.copy()
        self.keys = DynamicKeys(self.table, self.arrays)

    @rule()
    def rebuild(self) -> None:
        self.keys.rebuild()

    @rule(shuffled=st.randoms(use_true_random=False))
    def load(self, shuffled: Any) -> None:
        order = shuffled.sample(list(self.rows), len(self.rows))
        waiting = (ids(*self.waiting), ids(*self.waiting.values()))
        rows = self.keys.load(
            ids(*order),
            ids(*(self.frequency[key] for key in order)),
            ids(*(self.last_used[key] for key in order)),
            *waiting,
        )
        self.rows = dict(zip(order, rows.tolist(), strict=True))
        self.step = max(self.last_used.values(), default=0)

    @rule()
    def clear(self) -> None:
        self.keys.clear()
        self.forget(list(self.rows))
        self.waiting.clear()
        self.step = 0

    @invariant()
    def everything_is_as_in_the_dictionaries(self) -> None:
        assert self.keys.check()
        assert len(self.keys) == len(self.rows)
        assert rows_by_key(self.keys) == self.rows
        assert sorted(set(self.rows.values())) == self.keys.rows_in_use().tolist()
        assert all(0 < row <= self.table.max_rows for row in self.rows.values())
        rows = ids(*self.rows.values())
        assert self.keys.frequencies(rows).tolist() == [self.frequency[key] for key in self.rows]
        assert self.keys.last_used(rows).tolist() == [self.last_used[key] for key in self.rows]
        assert self.candidates() == self.waiting

    def candidates(self) -> dict[int, int]:
        waiting, counts = self.keys.candidates()
        return dict(zip(waiting.tolist(), counts.tolist(), strict=True))

    def victims(self, batch: Any, count: int, step: int) -> list[int] | None:
        """The keys that make room for ``count`` others, None if there is none."""
        short = count - (self.table.max_rows - len(self.rows))
        if short <= 0:
            return []
        if self.table.evict_after is None:
            return None
        limit = step - self.table.evict_after
        unused = [key for key, last in self.last_used.items() if last < limit and key not in batch]
        return unused if len(unused) >= short else None

    def forget(self, victims: list[int]) -> None:
        for key in victims:
            del self.rows[key], self.frequency[key], self.last_used[key]

    def note_rows(self, batch: list[int], rows: torch.Tensor, new_rows: torch.Tensor, new: list[int]) -> None:
        answered = dict(zip(batch, rows.tolist(), strict=True))
        assert rows.tolist() == [answered[key] for key in batch]
        assert new_rows.unique().tolist() == sorted(answered[key] for key in new)
        assert not set(new_rows.tolist()) & set(self.rows.values())
        self.rows.update({key: answered[key] for key in new})
        assert answered == {key: self.rows.get(key, 0) for key in batch}

    def note_candidates(self, seen: dict[int, int]) -> None:
        new = {key for key in seen if key not in self.waiting}
        expected = {**self.waiting, **seen}
        self.waiting = self.candidates()
        if len(expected) <= self.table.max_rows:
            assert self.waiting == expected
            return
        # The least seen make room, old ones before new ones.
        assert self.waiting.items() <= expected.items()
        assert new <= self.waiting.keys() or self.waiting.keys() <= new
        assert len(self.waiting) > self.table.max_rows * 7 // 8 - 1
        for some in (new, expected.keys() - new):
            kept = [expected[key] for key in some if key in self.waiting]
            gone = [expected[key] for key in some if key not in self.waiting]
            assert not kept or not gone or max(gone) <= min(kept)


TestKeysOfATable = KeysOfATable.TestCase
TestKeysOfATable.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_thousands_of_keys_come_and_go_while_the_index_grows() -> None:
    arrays = Arrays()
    owned = DynamicKeys(table(30_000), arrays)
    generator = np.random.default_rng(0)
    expected: dict[int, int] = {}
    for _ in range(12):
        batch = torch.from_numpy(generator.integers(-(1 << 63), 1 << 63, 5_000, dtype=np.int64))
        for piece in batch.split(500):
            rows, new = owned.admit(piece, ignore)
            assert sorted(rows.tolist()) == sorted(new.tolist())
            expected.update(zip(piece.tolist(), rows.tolist(), strict=True))
            assert len(owned) <= 3 / 5 * slots_in_use(arrays)
        assert owned.check()
        assert rows_by_key(owned) == expected
        assert owned.find(ids(*expected)).tolist() == list(expected.values())
        assert not owned.find(batch + 1).any()
        assert arrays["key_slots"].count_nonzero() <= 3 / 4 * slots_in_use(arrays)
        gone = generator.choice(list(expected), len(expected) // 2, replace=False).tolist()
        owned.evict(ids(*(expected.pop(key) for key in gone)))
        assert owned.check()
        assert not owned.find(ids(*gone)).any()
    assert slots_in_use(arrays) < len(arrays["key_slots"])


@pytest.mark.parametrize("start", [1, 0])  # 0: key 0 is one of them
def test_hundreds_of_keys_that_want_one_slot_are_found(start: int) -> None:
    owned = DynamicKeys(table(1_000), Arrays())
    hostile = ids(*keys_that_collide(500, start)).flip(0)
    odd, even = hostile[::2], hostile[1::2]
    rows, new = owned.look_up(hostile, 1, ignore)
    assert sorted(rows.tolist()) == sorted(new.tolist())
    owned.evict(rows[::2])
    assert not owned.find(odd).any()
    assert torch.equal(owned.find(even), rows[1::2])
    again, _ = owned.look_up(odd[::2], 2, ignore)
    assert torch.equal(owned.find(odd[::2]), again)
    assert not owned.find(odd[1::2]).any()
    assert owned.check()


def test_who_maps_the_same_files_has_the_same_keys(tmp_path: Path) -> None:
    def mapped(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_file(str(tmp_path / name), shared=True, size=shape[0], dtype=dtype)

    described = table(20_000, filter_freq=2, evict_after=1)
    one, other = DynamicKeys(described, mapped), DynamicKeys(described, mapped)
    many = torch.arange(10_000)
    one.look_up(many, 3, ignore)
    rows, new = other.look_up(many, 4, ignore)
    assert len(new) == len(many)
    assert torch.equal(one.find(many), rows)
    one.evict(rows[:5_000])
    assert len(other) == 5_000 and other.check()
    assert not other.find(many[:5_000]).any()
    later = DynamicKeys(described, mapped)
    assert rows_by_key(later) == rows_by_key(other)
    assert torch.equal(later.frequencies(rows[5_000:]), torch.full((5_000,), 2))


def test_keys_that_are_written_count_as_recent_and_not_as_looked_up() -> None:
    owned = DynamicKeys(table(3, evict_after=2), Arrays())
    owned.look_up(ids(1), 7, ignore)
    owned.look_up(ids(2), 5, ignore)
    rows, _ = owned.admit(ids(1, 2, 3), ignore)
    assert owned.last_used(rows).tolist() == [7, 5, 7]
    assert owned.frequencies(rows).tolist() == [1, 1, 0]
    owned.look_up(ids(4), 8, ignore)
    assert owned.find(ids(1, 2, 3, 4)).bool().tolist() == [True, False, True, True]


def test_memory_is_taken_only_as_keys_come() -> None:
    def lazy(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    owned = DynamicKeys(table(20_000_000, filter_freq=2), lazy)
    before = resident()
    owned.look_up(torch.arange(2_000), 1, ignore)
    owned.look_up(torch.arange(1_000), 2, ignore)
    assert len(owned) == 1_000
    assert resident() - before < 50 << 20  # of 1.5 GB


def test_a_full_table_names_itself_and_what_to_do() -> None:
    owned = DynamicKeys(table(2), Arrays())
    with pytest.raises(TableFullError, match=r"'t' is full: 3 keys need a row, 2 of max_rows=2.*evict_after"):
        owned.admit(ids(1, 2, 3, 3), ignore)
    with pytest.raises(TableFullError, match="max_rows=2"):
        owned.load(ids(1, 2, 3))
    assert len(owned) == 0


def test_what_cannot_be_keys_is_refused() -> None:
    owned = DynamicKeys(table(2), Arrays())
    with pytest.raises(ValueError, match=r"'t': keys must be int64 \[n\], not torch.int32 \[1\]"):
        owned.find(torch.zeros(1, dtype=torch.int32))
    with pytest.raises(ValueError, match="'t': keys to load must not repeat"):
        owned.load(ids(1, 1))
    with pytest.raises(ValueError, match="'t': max_rows must be below 2"):
        DynamicKeys(table(1 << 31), Arrays())
