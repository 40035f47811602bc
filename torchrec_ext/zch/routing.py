"""Which shard answers for an id. NumPy only: readers of a dump use it without torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

NO_ID = np.iinfo(np.int64).max
"""What TorchRec stores in an empty slot. As an id it is special: see ``RowBinding.sentinel_row``."""


@dataclass(frozen=True)
class ShardRouting:
    """TorchRec's row-wise routing of ids to shards.

    The rule is that of ``fbgemm::block_bucketize_sparse_features`` as
    ``torchrec.distributed.sharding.rw_sharding.RwSparseFeaturesDist`` calls it for managed
    collision: the id, read as unsigned, goes to block ``id // block_size`` if there is such a shard,
    else to ``id % num_shards``.

    Args:
        num_shards: the world size the table is sharded over.
        block_size: ids per shard, ``ceil(input_hash_size / num_shards)``; 0 routes by remainder only.
    """

    num_shards: int
    block_size: int

    @classmethod
    def for_hash_size(cls, input_hash_size: int, num_shards: int) -> ShardRouting:
        """The routing of a table with this ``input_hash_size`` over ``num_shards`` ranks."""
        return cls(num_shards, -(-input_hash_size // num_shards))

    def shard_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The shard of each id.

        Args:
            ids: int64 ``[n]``, any value.

        Returns:
            int64 ``[n]`` in ``[0, num_shards)``.
        """
        unsigned = np.ascontiguousarray(ids, dtype=np.int64).view(np.uint64)
        shards = unsigned % np.uint64(self.num_shards)
        if self.block_size > 0:
            block = unsigned // np.uint64(self.block_size)
            shards = np.where(block < self.num_shards, block, shards)
        return shards.astype(np.int64)

    def in_block(self, ids: NDArray[np.int64], shard: int) -> NDArray[np.bool_]:
        """Whether each id lies in the shard's own block; ids that do not may still route to it.

        Args:
            ids: int64 ``[n]``.
            shard: the shard.

        Returns:
            bool ``[n]``, at a fraction of the cost of ``shard_of``.
        """
        offsets = (ids - np.int64(self.block_size * shard)).view(np.uint64)
        return offsets < np.uint64(self.block_size)
