"""The gloo group of the ranks that dump together, apart from training's own groups."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch.distributed as dist

from torchrec_ext.delta.tracked import TrackedTable


def private_group(
    process_group: dist.ProcessGroup | None, tables: Sequence[TrackedTable]
) -> dist.ProcessGroup | None:
    """A new gloo group of the same ranks, for one thread alone; None in a single process.

    Raises:
        ValueError: the group leaves out ranks of the job, which torch needs to make a group, or a table
            is sharded over other ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    if len(ranks) != dist.get_world_size():
        raise ValueError(
            f"process_group has {len(ranks)} of the job's {dist.get_world_size()} ranks; it must have all"
        )
    for table in tables:
        if table.place is None and table.routing.num_shards != len(ranks):
            raise ValueError(
                f"{table.fqn} is sharded over {table.routing.num_shards} ranks, the job has {len(ranks)}"
            )
    return dist.new_group(ranks, backend="gloo")


def meet(group: dist.ProcessGroup | None) -> None:
    """Waits until all ranks are here."""
    if group is not None:
        dist.barrier(group)


def leave(group: dist.ProcessGroup | None) -> None:
    """Leaves a private group, so that ranks which wait for this one fail instead."""
    if group is not None:
        # The user may have torn down all groups already.
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
