from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.store.key_arrays import EXTREME, Arrays, ids, ignore, keys_that_collide, rows_by_key, table
from torchrec_ext.store import candidates, hash_index, keys
from torchrec_ext.store.keys import DynamicKeys


@given(data=st.data())
@settings(deadline=None)
def test_a_damaged_index_is_noticed_and_made_anew_from_its_keys(data: st.DataObject) -> None:
    arrays = Arrays()
    owned = DynamicKeys(table(12), arrays)
    rows, _ = owned.admit(ids(*EXTREME, *keys_that_collide(5)), ignore)
    owned.evict(rows[data.draw(st.sets(st.integers(0, 9)).map(sorted))])
    before = rows_by_key(owned)
    name = data.draw(st.sampled_from(["key_slots", "key_free", "key_state"]))
    array = arrays[name]
    entries = st.integers(0, 12) | st.just(-(1 << 31))
    damage = data.draw(st.lists(entries, min_size=len(array), max_size=len(array)))
    good = array.clone()
    array.copy_(torch.tensor(damage))
    if name == "key_slots":
        owned.find(torch.arange(-50, 50))
        assert owned.check() == torch.equal(array, good)
    else:
        owned.check()
    owned.rebuild()
    assert owned.check()
    assert rows_by_key(owned) == before
    assert owned.find(ids(*before)).tolist() == list(before.values())


def test_of_rows_that_a_crash_of_the_machine_left_with_one_key_the_first_keeps_it() -> None:
    arrays = Arrays()
    owned = DynamicKeys(table(12), arrays)
    owned.admit(ids(5, 6, 7, 8), ignore)
    arrays["key_keys"][2:4] = 5  # as if the file's other pages had reached the disk, but not this one
    assert not owned.check()
    owned.rebuild()
    assert owned.check()
    assert rows_by_key(owned) == {5: 1, 8: 4}


class Killed(BaseException):
    pass


@contextmanager
def killed_before_line(number: int) -> Iterator[None]:
    """Stops the code of the keys before it executes its ``number``-th line from here."""
    files = {module.__file__ for module in (keys, candidates, hash_index)}
    left = number

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise Killed
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_a_call_that_was_killed_anywhere_loses_no_key_that_it_did_not_touch() -> None:
    described = table(8, filter_freq=2, evict_after=1)
    start = Arrays()
    owned = DynamicKeys(described, start)
    owned.look_up(ids(1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6), 1, ignore)
    owned.look_up(ids(1, 2, 3), 9, ignore)
    owned.evict(owned.find(ids(3)))
    before = rows_by_key(owned)
    stay, go, come = {1, 2}, {4, 5}, {6, 7, 8, 9, 10}

    kills = 0
    while True:
        arrays = start.copy()
        dying = DynamicKeys(described, arrays)
        released: set[int] = set()

        def release(rows: torch.Tensor, released: set[int] = released) -> None:
            released.update(rows.tolist())

        try:
            with killed_before_line(kills):
                dying.look_up(ids(1, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11), 10, release)
            break
        except Killed:
            kills += 1
        after = DynamicKeys(described, arrays)
        after.find(torch.arange(20))
        if not after.check():
            after.rebuild()
            assert after.check()
        now = rows_by_key(after)
        assert after.find(ids(*now)).tolist() == list(now.values())
        assert stay <= now.keys() <= stay | go | come
        for key, row in before.items():
            if now.get(key) != row:
                assert key in go and row in released
        for key in now.keys() & come:
            assert now[key] not in before.values() or now[key] in released
        admitted = ids(*(row for key, row in now.items() if key in come))
        assert (after.frequencies(admitted) >= 2).all()
        assert (after.last_used(admitted) == 10).all()
        # It goes on as if nothing had happened.
        rows, _ = after.look_up(ids(*stay, *come, *come), 11, ignore)
        assert after.check() and (rows > 0).all()
    assert kills > 100
    assert rows_by_key(dying).keys() == stay | come
