"""Directories of ``torch.distributed.checkpoint`` (DCP), read without DCP's reader.

That one unpickles ``.metadata``, which may run anything. Here only the classes that torch writes there are
admitted, and stand-ins are made for them.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrec_ext.checkpoint.audit.reading.archives import Archive, NotPlain
from torchrec_ext.checkpoint.audit.reading.tensors import (
    DamagedPart,
    NotRead,
    Part,
    StoredTensor,
    TensorEntry,
    Unreadable,
)
from torchrec_ext.checkpoint.audit.reading.trees import entries_of
from torchrec_ext.errors import CheckpointError

METADATA_NAME = ".metadata"


class _Described:
    """Stands in for an object that torch describes a checkpoint with."""

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        return state.get(name) if isinstance(state, dict) else None


class _Tensor(_Described):
    pass


class _Bytes(_Described):
    pass


class _Size(tuple[int, ...]):
    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("a size has no state")


class _Unused(_Described):
    """Stands in for what is not needed."""

    def __init__(self, *args: Any) -> None:
        pass


_METADATA = "torch.distributed.checkpoint.metadata"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_STAND_INS: dict[tuple[str, str], Any] = {
    (_METADATA, "Metadata"): _Described,
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    (_METADATA, "TensorProperties"): _Described,
    (_METADATA, "ChunkStorageMetadata"): _Described,
    (_METADATA, "MetadataIndex"): _Described,
    (_METADATA, "StorageMeta"): _Described,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _Unused,
    (_OLD, "TensorProperties"): _Described,
    (_OLD, "MEM_FORMAT_ENCODING"): _Unused,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Described,
    ("torch", "Size"): _Size,
    ("torch.serialization", "_get_layout"): _Unused,
    ("collections", "OrderedDict"): collections.OrderedDict,
    **{
        (module, kind): _Unused
        for module in ("pathlib", "pathlib._local")
        for kind in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (found := _STAND_INS.get((module, name))) is not None:
            return found
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(f"it names {module}.{name}, which describes no checkpoint")


@dataclass(frozen=True)
class _Place:
    """Where DCP put something."""

    file: str
    offset: int
    length: int
    transformed: bool


class DcpCheckpoint:
    """A checkpoint of DCP.

    Args:
        path: its directory.

    Attributes:
        tree: all that was saved, nested as it was: ``TensorEntry``, ``NotRead`` and plain values.

    Raises:
        CheckpointError: it is none, its description is damaged, or names other things than a description.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = (path / METADATA_NAME).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{path} is no checkpoint: {METADATA_NAME}: {error.strerror}") from error
        try:
            metadata = _MetadataUnpickler(io.BytesIO(content)).load()
            self._kinds: dict[str, Any] = dict(metadata.state_dict_metadata)
            self._paths: dict[str, tuple[Any, ...]] = dict(metadata.planner_data or {})
            self._places = {
                (index.fqn, None if index.offset is None else tuple(index.offset)): _Place(
                    str(info.relative_path),
                    int(info.offset),
                    int(info.length),
                    bool(info.transform_descriptors),
                )
                for index, info in dict(metadata.storage_data).items()
            }
            self.tree = self._tree()
        except Exception as error:  # unpickling damaged bytes fails in any way, as does what they describe
            raise CheckpointError(
                f"{path / METADATA_NAME} cannot be read: {error}. It is damaged, of a planner or storage of "
                "your own, or was made to run something; nothing in it was run"
            ) from error

    def _tree(self) -> dict[Any, Any]:
        tree: dict[Any, Any] = {}
        for key, kind in self._kinds.items():
            path = self._paths.get(key, () if self._paths else (key,))
            if ".".join(map(str, path)) != key:  # as DCP names what it flattens
                tree[key] = NotRead("the names that it was saved under contradict each other", damaged=True)
                continue
            *outer, last = path
            node = tree
            for name in outer:
                node = node.setdefault(name, {})
            node[last] = self._tensor(key, kind) if isinstance(kind, _Tensor) else self._value(key)
        return tree

    def _tensor(self, key: str, kind: _Tensor) -> TensorEntry | NotRead:
        try:
            dtype = kind.properties.state[0]
            size = tuple(int(length) for length in kind.size)
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in kind.chunks]
            places = [self._places.get((key, offsets)) for offsets, _ in boxes]
            saved = sum(math.prod(sizes) for _, sizes in boxes)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            return NotRead(f"its description is damaged: {error}", damaged=True)
        if any(place is not None and place.transformed for place in places):
            return NotRead("it was saved through an extension, for instance compressed")
        parts: list[Part] = [
            DcpPart(self, key, offsets, sizes, dtype, place)
            for (offsets, sizes), place in zip(boxes, places, strict=True)
        ]
        if saved != math.prod(size):
            why = f"{saved} of its {math.prod(size)} values were saved"
            parts.append(Part((0,) * len(size), (0,) * len(size), Unreadable(why)))
        return TensorEntry(key, size, dtype, parts, sharded=True)

    def _value(self, key: str) -> Any:
        place = self._places.get((key, None))
        if place is not None and place.transformed:
            return NotRead("it was saved through an extension, for instance compressed")
        try:
            archive = self.archive(place)
            return entries_of(archive.load(), (key,), archive)
        except NotPlain as error:
            return NotRead(str(error))
        except DamagedPart as error:
            return NotRead(str(error), damaged=True)

    def archive(self, place: _Place | None) -> Archive:
        """What DCP put at a place.

        Raises:
            DamagedPart: it is not there, or outside of the directory.
        """
        if place is None:
            raise DamagedPart("unreadable", f"{self.path / METADATA_NAME} does not say where it is")
        file = self.path / place.file
        if not file.resolve().is_relative_to(self.path.resolve()):
            raise DamagedPart("unreadable", f"{place.file!r} is not in {self.path}: it was not opened")
        if place.offset < 0 or place.length < 0:
            raise DamagedPart("unreadable", f"{self.path / METADATA_NAME} does not say where it is")
        return Archive(file, place.offset, place.length)


class DcpPart(Part):
    """A part of a tensor as one rank saved it; its archive is opened when it is asked for."""

    def __init__(
        self,
        checkpoint: DcpCheckpoint,
        key: str,
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
        dtype: torch.dtype,
        place: _Place | None,
    ) -> None:
        super().__init__(offsets, sizes)
        self._checkpoint, self._key, self._dtype, self._place = checkpoint, key, dtype, place

    def archive(self) -> Archive:
        """The archive that it is in."""
        return self._checkpoint.archive(self._place)

    def source(self) -> StoredTensor | Unreadable:
        """See ``Part.source``."""
        try:
            archive = self.archive()
            tensor = archive.load()
            if not isinstance(tensor, torch.Tensor):
                return Unreadable(f"{archive.path}: {self._key!r} is no tensor there")
            stored = archive.stored(tensor)
        except CheckpointError as error:
            return Unreadable(str(error))
        if (stored.size, stored.dtype) != (self.sizes, self._dtype):
            return Unreadable(
                f"{archive.path}: {self._key!r} is {stored.dtype} {list(stored.size)}, "
                f"not {self._dtype} {list(self.sizes)}"
            )
        return stored


def is_dcp(path: Path) -> bool:
    """Whether a directory was written by DCP."""
    return (path / METADATA_NAME).is_file()


def nested_lists(tree: Any) -> Any:
    """A tree of which DCP wrote the lists as numbered entries, with lists."""
    if not isinstance(tree, Mapping):
        return tree
    nested = {key: nested_lists(value) for key, value in tree.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[key] for key in sorted(nested)]
    return nested
