"""Our routing of ids to shards is FBGEMM's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrec_ext.zch import ShardRouting

INT64 = st.integers(-(2**63), 2**63 - 1)


def _fbgemm_shards(ids: list[int], block_size: int, num_shards: int) -> list[int]:
    """Where ``block_bucketize_sparse_features`` puts each id, asked one bag per id."""
    lengths, indices, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones(len(ids), dtype=torch.int64),
        torch.tensor(ids, dtype=torch.int64),
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.tensor([block_size]),
        my_size=num_shards,
        keep_orig_idx=True,
        total_num_blocks=torch.tensor([num_shards]),
    )
    assert len(indices) == len(ids)
    return lengths.view(num_shards, len(ids)).argmax(dim=0).tolist()


@given(
    ids=st.lists(INT64 | st.integers(-5, 300), min_size=1, max_size=50),
    hash_size=st.sampled_from([1, 7, 60, 1000, 2**40 + 1, 2**62, 2**63 - 1]),
    num_shards=st.integers(1, 7),
)
def test_shards_are_those_of_fbgemm(ids: list[int], hash_size: int, num_shards: int) -> None:
    pytest.importorskip("fbgemm_gpu")
    routing = ShardRouting.for_hash_size(hash_size, num_shards)
    shards = routing.shard_of(np.array(ids, np.int64)).tolist()
    assert shards == _fbgemm_shards(ids, routing.block_size, num_shards)
    assert all(0 <= shard < num_shards for shard in shards)
    for shard in range(num_shards):
        inside = routing.in_block(np.array(ids, np.int64), shard)
        assert all(shards[i] == shard for i in np.flatnonzero(inside))


def test_small_ids_of_the_default_hash_size_all_live_on_the_first_shard() -> None:
    routing = ShardRouting.for_hash_size(2**63 - 1, 4)
    assert set(routing.shard_of(np.arange(10_000))) == {0}
