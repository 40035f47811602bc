"""Reads parts of the tensors of a ``torch.distributed.checkpoint`` (DCP) checkpoint."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader

from torchrec_ext.errors import CheckpointError


class SavedTensors:
    """The tensors of one checkpoint, read through DCP's own reader.

    Args:
        reader: DCP's reader of the checkpoint.

    Raises:
        CheckpointError: there is no checkpoint, or some of its files are missing, damaged or too short.
    """

    def __init__(self, reader: StorageReader) -> None:
        self._reader = reader
        try:
            self.metadata: Metadata = reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(f"no checkpoint: {error}") from error
        except Exception as error:  # unpickling damaged bytes fails in any way
            raise _damaged("the checkpoint's metadata", error) from error
        _check_files(reader, self.metadata)

    def __contains__(self, key: str) -> bool:
        return isinstance(self.metadata.state_dict_metadata.get(key), TensorStorageMetadata)

    def __getitem__(self, key: str) -> TensorStorageMetadata:
        """What the checkpoint says of a tensor."""
        return cast(TensorStorageMetadata, self.metadata.state_dict_metadata[key])

    def __iter__(self) -> Iterator[str]:
        """Every entry's key, flattened as DCP does it."""
        return iter(self.metadata.state_dict_metadata)

    def shards(self, key: str) -> list[tuple[int, int]]:
        """The ranges of rows, ``(first, behind the last)``, in which a tensor was saved, in order.

        Raises:
            CheckpointError: they do not make up the whole tensor.
        """
        shards = sorted((chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) for chunk in self[key].chunks)
        starts, stops = zip(*shards, strict=True)
        if [*starts, self[key].size[0]] != [0, *stops]:
            raise CheckpointError(f"{key!r} was saved in parts that do not make it up: {shards}")
        return shards

    def read(self, key: str, start: int, stop: int) -> torch.Tensor:
        """Reads rows ``[start, stop)`` of a tensor.

        DCP's reader loads each part, as it was saved, whole: reading a saved shard takes twice its size
        for a moment, and its size afterwards.

        Returns:
            A new tensor on the CPU, ``[stop - start, ...]``, in the dtype it was saved in.

        Raises:
            CheckpointError: these rows are not there, or damaged.
        """
        saved = self[key]
        wanted = ChunkStorageMetadata(
            offsets=torch.Size([start] + [0] * (len(saved.size) - 1)),
            sizes=torch.Size([stop - start, *saved.size[1:]]),
        )
        target = torch.empty(wanted.sizes, dtype=saved.properties.dtype)
        items = create_read_items_for_chunk_list(key, saved, [wanted])
        if sum(math.prod(item.lengths) for item in items) != target.numel():
            raise CheckpointError(f"{key!r}: rows {start} to {stop - 1} were not saved, or twice")
        self._reader.set_up_storage_reader(self.metadata, is_coordinator=False)
        plan = self._reader.prepare_local_plan(LoadPlan(items))
        try:
            self._reader.read_data(plan, _Into(target)).wait()
        except Exception as error:
            raise _damaged(repr(key), error) from error
        return target


class AllBut(DefaultLoadPlanner):
    """DCP's planner, of a load that leaves some entries alone.

    Args:
        keys: their keys, flattened.
    """

    def __init__(self, keys: frozenset[str]) -> None:
        super().__init__()
        self._keys = keys

    def create_local_plan(self) -> LoadPlan:
        """See ``LoadPlanner.create_local_plan``."""
        wanted = {key: value for key, value in self.state_dict.items() if key not in self._keys}
        assert self.metadata is not None
        return create_default_local_load_plan(wanted, self.metadata)


class _Into(DefaultLoadPlanner):
    """A planner for whom there is one tensor only."""

    def __init__(self, target: torch.Tensor) -> None:
        super().__init__()
        self._target = target

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """See ``DefaultLoadPlanner.lookup_tensor``."""
        return self._target


def _damaged(what: str, error: Exception) -> CheckpointError:
    # What torch says of damaged bytes advises to load them unsafely; it is in the error's cause.
    return CheckpointError(
        f"{what} cannot be read ({type(error).__name__}): the checkpoint is damaged, load another one"
    )


def _check_files(reader: StorageReader, metadata: Metadata) -> None:
    """Raises ``CheckpointError`` if a file on disk does not reach as far as the checkpoint says."""
    if type(reader) is not FileSystemReader:
        return  # a subclass reads from elsewhere
    needed: dict[str, int] = {}
    storage: dict[Any, Any] = metadata.storage_data
    for part in storage.values():
        needed[part.relative_path] = max(needed.get(part.relative_path, 0), part.offset + part.length)
    for name, length in sorted(needed.items()):
        path = Path(os.fspath(reader.path)) / name
        if not path.exists():
            raise CheckpointError(f"the checkpoint lacks the file {path}")
        if path.stat().st_size < length:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, the checkpoint needs {length}")
