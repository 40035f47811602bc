"""Sets of keys are what Python's sets are, whatever the keys."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrec_ext.delta.keys as keys_module
from torchrec_ext.delta.keys import difference, last_places, union

KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5), max_size=30)


@given(sets=st.lists(KEYS, max_size=4))
def test_union_is_that_of_sets(sets: list[list[int]]) -> None:
    assert union(*(np.array(one, np.int64) for one in sets)).tolist() == sorted(set().union(*sets))


@given(one=KEYS, other=KEYS)
def test_difference_keeps_the_order_and_what_comes_twice(one: list[int], other: list[int]) -> None:
    found = difference(np.array(one, np.int64), np.array(other, np.int64))
    assert found.tolist() == [key for key in one if key not in other]


@pytest.mark.parametrize("count", [0, 1, 2, 255, 256, 5000])
@pytest.mark.parametrize(
    "lowest, highest", [(0, 1), (-1, 1), (-50, 50), (-(2**62), 2**62), (2**63 - 99, 2**63)]
)
@pytest.mark.parametrize("beside", [(), (-(2**63),), (-(2**63), 2**63 - 1)])
def test_last_places_are_those_of_a_dictionary_however_keys_are_sorted(
    count: int, lowest: int, highest: int, beside: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_SORTED_AT_ONCE", 1000)
    drawn = np.random.default_rng(0).integers(lowest, highest, count)
    keys = np.concatenate([drawn, np.array(beside, np.int64), drawn])
    last = {key: place for place, key in enumerate(keys.tolist())}
    assert last_places(keys).tolist() == [last[key] for key in sorted(last)]


@pytest.mark.parametrize("spare_bits", [-1, 0, 1])
def test_last_places_of_keys_that_just_fit_beside_their_place_are_right(spare_bits: int) -> None:
    count = 1000
    range_ = 1 << (63 - count.bit_length() - spare_bits)
    keys = np.random.default_rng(0).integers(0, 3, count) * (range_ // 2)
    keys[:2] = 0, range_ - 1
    last = {key: place for place, key in enumerate(keys.tolist())}
    for low in (-(2**63), -(range_ // 2), 0):
        assert last_places(keys + low).tolist() == [last[key] for key in sorted(last)]
