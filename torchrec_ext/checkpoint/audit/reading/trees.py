"""State dicts as trees of entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchrec_ext.checkpoint.audit.reading.archives import Archive
from torchrec_ext.checkpoint.audit.reading.tensors import (
    DamagedPart,
    LiveTensor,
    NotRead,
    Part,
    StoredTensor,
    TensorEntry,
    Unreadable,
)

Path = tuple[Any, ...]


def entries_of(value: Any, path: Path = (), archive: Archive | None = None) -> Any:
    """A state dict in which tensors are replaced by where their values are.

    Args:
        value: a state dict, nested in any way.
        path: its keys on the way here.
        archive: the file its tensors are in; None: in memory.

    Returns:
        Dicts and lists as they were, ``TensorEntry``, ``NotRead`` and plain values.
    """
    if isinstance(value, Mapping):
        return {key: entries_of(inner, (*path, key), archive) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [entries_of(inner, (*path, number), archive) for number, inner in enumerate(value)]
    key = ".".join(map(str, path))
    if isinstance(value, ShardedTensor):
        return _sharded(key, value)
    if isinstance(value, DTensor):
        return _dtensor(key, value, archive)
    if isinstance(value, torch.Tensor):
        return _tensor(key, value, archive)
    if hasattr(value, "state_dict"):  # TorchRec's keyed optimizers put such into their state
        return entries_of(value.state_dict(), path, archive)
    return value


def _tensor(key: str, tensor: torch.Tensor, archive: Archive | None) -> TensorEntry | NotRead:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        what = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else tensor.layout
        return NotRead(f"it is a {what} tensor")
    size = tuple(tensor.size())
    part = Part((0,) * len(size), size, _place(tensor, archive))
    return TensorEntry(key, size, tensor.dtype, [part])


def _place(tensor: torch.Tensor, archive: Archive | None) -> StoredTensor | LiveTensor | Unreadable:
    if archive is None:
        return LiveTensor(tensor)
    try:
        return archive.stored(tensor)
    except DamagedPart as error:
        return Unreadable(str(error))


def _sharded(key: str, tensor: ShardedTensor) -> TensorEntry:
    parts = [
        Part(shard.metadata.shard_offsets, shard.metadata.shard_sizes, LiveTensor(shard.tensor))
        for shard in tensor.local_shards()
    ]
    return TensorEntry(key, tuple(tensor.size()), tensor.dtype, parts, sharded=True)


def _dtensor(key: str, tensor: DTensor, archive: Archive | None) -> TensorEntry | NotRead:
    size = tuple(tensor.size())
    try:
        sizes, offsets = compute_local_shape_and_global_offset(size, tensor.device_mesh, tensor.placements)
    except Exception as error:  # a mesh that was loaded from a file may be of no process group
        return NotRead(f"it is a DTensor whose layout is not known here ({error})")
    part = Part(offsets, sizes, _place(tensor.to_local(), archive))
    return TensorEntry(key, size, tensor.dtype, [part], sharded=True)
