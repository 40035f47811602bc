"""This rank's shards of a collection's tables, and TorchRec's sharded tensors of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torchrec.distributed.types import (
    ParameterSharding,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingType,
    ShardMetadata,
)

from torchrec_ext.store import DenseTable
from torchrec_ext.zch import internals


@dataclass(frozen=True)
class RowShards:
    """How the rows of a table are dealt out to the ranks.

    Attributes:
        starts: the row at which each shard begins.
        sizes: its number of rows; some may have none.
        ranks: the rank of each, in the world.
        rank: this rank's place among the shards.
        process_group: of the ranks.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    rank: int
    process_group: dist.ProcessGroup

    @classmethod
    def of(
        cls, table: str, sharding: ParameterSharding, rank: int, process_group: dist.ProcessGroup
    ) -> RowShards:
        """The row-wise shards of a sharding plan.

        Raises:
            ValueError: the plan is not row-wise, or its shards are not those that TorchRec sends ids to.
        """
        if sharding.sharding_type != ShardingType.ROW_WISE.value:
            raise ValueError(
                f"table {table!r}: RecStore tables are sharded {ShardingType.ROW_WISE.value}, "
                f"not {sharding.sharding_type}"
            )
        shards = sharding.sharding_spec.shards
        sizes = tuple(shard.shard_sizes[0] for shard in shards)
        total, world_size = sum(sizes), process_group.size()
        block = -(-total // world_size)
        starts = tuple(min(number * block, total) for number in range(world_size))
        if sizes != tuple(min(block, total - start) for start in starts):
            raise ValueError(
                f"table {table!r}: {total} rows on {world_size} ranks are sharded into blocks of {block}, "
                f"not {list(sizes)}"
            )
        return cls(
            starts,
            sizes,
            tuple(shard.placement.rank() for shard in shards),
            rank,
            process_group,
        )

    @property
    def first(self) -> int:
        """The first row of this rank's shard."""
        return self.starts[self.rank]

    @property
    def count(self) -> int:
        """The number of rows of this rank's shard."""
        return self.sizes[self.rank]

    def shard_of(self, table: DenseTable) -> DenseTable:
        """This rank's rows of a table, as a table of its own."""
        return replace(table, first_key=self.first, num_rows=self.count)

    def all_on_first_rank(self) -> RowShards:
        """The same rows as one shard, on rank 0."""
        total = sum(self.sizes)
        others = len(self.sizes) - 1
        return replace(self, starts=(0, *[total] * others), sizes=(total, *[0] * others))

    def sharded(self, local: torch.Tensor) -> ShardedTensor:
        """The tensor of all ranks of which this rank has ``local``, ``[count, ...]``, without a copy."""
        columns = list(local.shape[1:])
        shards = [
            ShardMetadata([start] + [0] * len(columns), [size, *columns], f"rank:{rank}/{local.device}")
            for start, size, rank in zip(self.starts, self.sizes, self.ranks, strict=True)
        ]
        metadata = ShardedTensorMetadata(
            shards_metadata=shards,
            size=torch.Size([sum(self.sizes), *columns]),
            tensor_properties=TensorProperties(dtype=local.dtype),
        )
        return internals.sharded_tensor([Shard(local, shards[self.rank])], metadata, self.process_group)

    def local(self, value: torch.Tensor | ShardedTensor) -> torch.Tensor:
        """This rank's rows of a tensor that is sharded as these rows are, or whole.

        Raises:
            ValueError: it has another number of rows, or is sharded otherwise.
        """
        if value.size()[0] != (total := sum(self.sizes)):
            raise ValueError(f"expected {total} rows, not {value.size()[0]}")
        if not isinstance(value, ShardedTensor):
            return value.narrow(0, self.first, self.count)
        shards = value.local_shards()
        local = shards[0].tensor if shards else torch.empty(0, *value.size()[1:])
        if len(local) != self.count:
            raise ValueError(
                f"this rank has {self.count} of the rows, not {len(local)}: tensors of another number of "
                "ranks are for torch.distributed.checkpoint to load"
            )
        return local
