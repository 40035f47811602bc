"""The inverse of a collision map."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

from torchrec_ext.errors import CorruptTableError
from torchrec_ext.zch import NO_ID, RowBinding

OFFSET = 100


def _module(size: int, bound: dict[int, int]) -> MCHManagedCollisionModule:
    """A shard of ``size`` rows from row ``OFFSET`` on, in which ids own rows."""
    mcm = MCHManagedCollisionModule(
        zch_size=size,
        device=torch.device("cpu"),
        eviction_policy=LFU_EvictionPolicy(),
        eviction_interval=1,
        output_global_offset=OFFSET,
        output_segments=[0, OFFSET, OFFSET + size],
    )
    free = [row for row in range(size) if row not in bound.values()]
    ids = sorted(bound)
    mcm._mch_sorted_raw_ids[: len(ids)] = torch.tensor(ids, dtype=torch.int64)
    rows = [bound[i] for i in ids] + free
    mcm._mch_remapped_ids_mapping.copy_(torch.tensor(rows) + OFFSET)
    return mcm


@given(
    st.integers(2, 40).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.dictionaries(st.integers(-(2**63), 2**63 - 2), st.none(), max_size=size - 1),
            st.permutations(range(size - 1)),
        )
    )
)
def test_inverts_the_map(case: tuple[int, dict[int, None], list[int]]) -> None:
    size, ids, rows = case
    bound = dict(zip(ids, rows, strict=False))
    binding = RowBinding(_module(size, bound))
    binding.check("t", 0)
    owners = {row: raw_id for raw_id, row in bound.items()}
    assert binding.raw_ids.tolist() == [owners.get(row, NO_ID) for row in range(size)]
    asked = torch.tensor([*bound, 12345], dtype=torch.int64)
    assert binding.holds(asked).tolist() == [True] * len(bound) + [12345 in bound]


def test_the_special_id_finds_the_first_empty_slot_and_else_the_fallback_row() -> None:
    assert RowBinding(_module(4, {5: 2})).sentinel_row() == 0
    assert RowBinding(_module(4, {5: 2, 6: 0, 7: 1})).sentinel_row() == 3


@pytest.mark.parametrize("row", [OFFSET - 1, OFFSET + 6, -1, -(2**40)])
def test_a_row_outside_the_shard_is_named(row: int) -> None:
    mcm = _module(6, {10: 0, 11: 1})
    binding = RowBinding(mcm)
    mcm._mch_remapped_ids_mapping[1] = row
    assert binding.catch_up() is not None
    with pytest.raises(CorruptTableError, match=rf"a\.t on rank 3: 1 of 6 slots.*id 11.*row {row}"):
        binding.check("a.t", 3)
    mcm._mch_remapped_ids_mapping[1] = OFFSET + 1
    binding.catch_up()
    binding.check("a.t", 3)


def test_a_row_named_twice_is_named() -> None:
    mcm = _module(6, {10: 0, 11: 1})
    binding = RowBinding(mcm)
    mcm._mch_remapped_ids_mapping[0] = OFFSET + 1
    binding.catch_up()
    with pytest.raises(CorruptTableError, match=r"1 rows are named by more than one slot.*id 10"):
        binding.check("a.t", 0)


def test_an_id_in_two_slots_is_named() -> None:
    mcm = _module(6, {10: 0, 11: 1})
    binding = RowBinding(mcm)
    mcm._mch_sorted_raw_ids[1] = 10
    binding.catch_up()
    with pytest.raises(CorruptTableError, match=r"1 slots repeat an id.*slot 1 \(id 10\) -> row 101"):
        binding.check("a.t", 0)


def test_a_map_that_did_not_change_costs_no_pass() -> None:
    mcm = _module(6, {10: 0})
    binding = RowBinding(mcm)
    assert binding.catch_up() is None
    mcm._mch_sorted_raw_ids[0] = 9
    assert binding.catch_up().tolist() == [0, 1, 2, 3, 4, 5], "whoever wrote the map may have written rows"
    assert binding.catch_up() is None
    mcm._mch_sorted_raw_ids.data[0] = 8
    assert binding.catch_up() is None
    assert binding.catch_up(force=True).tolist() == [0]
