"""The gloo group of the ranks that dump together, apart from training's own groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch.distributed as dist

from torchrec_ext.delta.tracked import TrackedTable
from torchrec_ext.errors import DeltaLogError

T = TypeVar("T")


# What another rank's error may be raised as; anything else is a RuntimeError that names it.
_RAISED: tuple[type[Exception], ...] = (ValueError, DeltaLogError, OSError, *OSError.__subclasses__())
_KINDS = {kind.__name__: kind for kind in _RAISED}


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


def on_every_rank(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Does something on every rank; if it fails on one, it raises on all of them."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    failures = gather(group, None if error is None else (type(error).__name__, str(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            name, text = failure
            if name in _KINDS:
                raise _KINDS[name](f"rank {rank}: {text}")
            raise RuntimeError(f"rank {rank}: {name}: {text}")
    return result[0]


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, by rank."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


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
