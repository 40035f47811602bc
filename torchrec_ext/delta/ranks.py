"""The gloo group of the ranks that dump together, apart from training's own groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchrec_ext.zch import ZchTable

T = TypeVar("T")


def private_group(
    process_group: dist.ProcessGroup | None, tables: list[ZchTable]
) -> dist.ProcessGroup | None:
    """A new gloo group of the same ranks, for the writer's thread alone; None in a single process.

    Raises:
        ValueError: a table is sharded over other ranks.
    """
    if not dist.is_available() or not dist.is_initialized():
        return None
    ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    for table in tables:
        if table.routing.num_shards != len(ranks):
            raise ValueError(
                f"{table.fqn} is sharded over {table.routing.num_shards} ranks, but process_group "
                f"has {len(ranks)}; pass the group that the table is sharded over"
            )
    return dist.new_group(ranks, backend="gloo")


def on_every_rank(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Does something on every rank; if it fails on one, it raises on all of them."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    failures: list[tuple[type[Exception], str] | None] = []
    if group is not None:
        failures = [None] * dist.get_world_size(group)
        failure = None if error is None else (type(error), str(error))
        dist.all_gather_object(failures, failure, group=group)
    if error is not None:
        raise error
    for rank, other in enumerate(failures):
        if other is not None:
            kind, text = other
            raise kind(f"rank {rank}: {text}")
    return result[0]


def leave(group: dist.ProcessGroup | None) -> None:
    """Leaves a private group, so that ranks which wait for this one fail instead."""
    if group is not None:
        # The user may have torn down all groups already.
        with contextlib.suppress(Exception):
            dist.destroy_process_group(group)
