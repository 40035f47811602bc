"""What the ranks of a group do together, whoever they are: tell each other values, and fail together."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from torchrec_ext.errors import CheckpointError, DeltaLogError

T = TypeVar("T")

# What another rank's error may be raised as; anything else is a RuntimeError that names it.
_RAISED: tuple[type[Exception], ...] = (
    ValueError,
    CheckpointError,
    DeltaLogError,
    OSError,
    *OSError.__subclasses__(),
)
_KINDS = {kind.__name__: kind for kind in _RAISED}


def gather(group: dist.ProcessGroup | None, value: T) -> list[T]:
    """Every rank's value, by rank; without a group this process's alone."""
    if group is None:
        return [value]
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def on_every_rank(group: dist.ProcessGroup | None, work: Callable[[], T]) -> T:
    """Does something on every rank; if it fails on one, it raises on all of them."""
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as caught:
        error = caught
    failures = gather(group, None if error is None else (_kind_of(error), str(error)))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            name, text = failure
            if name in _KINDS:
                raise _KINDS[name](f"rank {rank}: {text}")
            raise RuntimeError(f"rank {rank}: {name}: {text}")
    return result[0]


def _kind_of(error: Exception) -> str:
    """The name of the kind that it may be raised as on other ranks; its own if there is none."""
    return next(
        (kind.__name__ for kind in type(error).__mro__ if kind.__name__ in _KINDS), type(error).__name__
    )
