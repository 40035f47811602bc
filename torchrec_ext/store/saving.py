"""``SnapshotWriter``: writes saved snapshots; ``saved`` defines their format."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Self

from torchrec_ext.errors import CheckpointError
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.saved import (
    FILE_NAME,
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_NAME,
    ArrayFile,
    check_arrays,
    crc32_of,
    disk_dtype,
)
from torchrec_ext.store.tables import Table, table_to_json

logger = logging.getLogger(__name__)

_HIDDEN_NAME = f".{MANIFEST_NAME}.tmp"
_PIECE_BYTES = 4 << 20


@dataclass(frozen=True)
class Pieces:
    """An array that is made piece by piece while it is saved.

    Attributes:
        shape: the whole array's.
        dtype: ``int64`` or ``float32``.
        pieces: along the first dimension, in order; one is written before the next one is made.
    """

    shape: tuple[int, ...]
    dtype: str
    pieces: Iterable[NDArray[Any]]


class SnapshotWriter:
    """Saves a snapshot, table by table, without holding it in memory.

    It is there when the ``with`` block is left, and takes the place of the one that was there before. When
    the block is left by an exception, or the process dies, that one stays.

    Args:
        path: the directory; made if it is not there.
        clock: the store's clock at that moment.
        step: its step.

    Raises:
        CheckpointError: the directory holds something else, another process is saving there, or the disk
            is full or fails.
    """

    def __init__(self, path: str | os.PathLike[str], *, clock: int, step: int) -> None:
        self._path = Path(path)
        self._content: dict[str, Any] = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "clock": clock,
            "step": step,
            "tables": [],
        }
        # Not the names of files that are there, be they of a snapshot or of a process that died.
        self._prefix = secrets.token_hex(4)
        self._files: list[Path] = []
        with self._explained():
            self._is_new = not self._path.exists()
            self._path.mkdir(parents=True, exist_ok=True)
            self._directory = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._lock()
            self._check_content()
        except BaseException:
            os.close(self._directory)
            raise

    def add(
        self,
        table: Table,
        optimizer: StoreOptimizer,
        arrays: Mapping[str, NDArray[Any] | torch.Tensor | Pieces],
    ) -> None:
        """Writes a table's arrays.

        Args:
            table: the table.
            optimizer: whose state it is.
            arrays: by name; see ``saved``.

        Raises:
            ValueError: they do not fit together, or the table was added before.
            CheckpointError: the disk is full or fails.
        """
        tables = self._content["tables"]
        if any(table.name == other["table"]["name"] for other in tables):
            raise ValueError(f"table {table.name!r} was added before")
        sources = {name: _as_pieces(array) for name, array in arrays.items()}
        check_arrays(table, optimizer, {name: (part.dtype, part.shape) for name, part in sources.items()})
        files = {
            name: asdict(self._write(f"{self._prefix}.{len(tables)}.{name}.npy", source))
            for name, source in sources.items()
        }
        tables.append({"table": table_to_json(table), "optimizer": optimizer.to_json(), "arrays": files})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            # Not remembered but looked up: an interrupt may come right after the renaming.
            if self._is_committed():
                self._tidy()
            else:
                self._discard()
            os.close(self._directory)

    def _write(self, name: str, source: Pieces) -> ArrayFile:
        path = self._path / name
        dtype = disk_dtype(source.dtype)
        header = {"descr": dtype.str, "fortran_order": False, "shape": source.shape}
        with self._explained(), path.open("xb", buffering=0) as raw:
            self._files.append(path)
            file = _Checksummed(raw)
            np.lib.format.write_array_header_1_0(file, header)
            rows = 0
            for piece in source.pieces:
                if piece.shape[1:] != source.shape[1:] or piece.dtype.name != source.dtype:
                    raise ValueError(f"{name}: a piece is {piece.dtype} {list(piece.shape)}")
                rows += len(piece)
                file.write(np.ascontiguousarray(piece, dtype).reshape(-1).view(np.uint8).data)
            if rows != source.shape[0]:
                raise ValueError(f"{name}: its pieces have {rows} rows, not {source.shape[0]}")
            os.fsync(raw.fileno())
        return ArrayFile(name, source.shape, source.dtype, file.nbytes, file.crc32)

    def _commit(self) -> None:
        content = {**self._content, "crc32": crc32_of(self._content)}
        hidden = self._path / _HIDDEN_NAME
        with self._explained():
            os.fsync(self._directory)
            self._files.append(hidden)
            with hidden.open("wb") as file:
                file.write(json.dumps(content, indent=1).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
            hidden.replace(self._path / MANIFEST_NAME)

    def _is_committed(self) -> bool:
        try:
            return self._prefix.encode() in (self._path / MANIFEST_NAME).read_bytes()
        except OSError:
            return False

    def _tidy(self) -> None:
        # Readers see the snapshot by now: it is saved, though a power failure may still undo it.
        try:
            os.fsync(self._directory)
            if self._is_new:
                _sync_directory(self._path.absolute().parent)
            kept = {file.name for file in self._files}
            for file in self._path.iterdir():
                if FILE_NAME.fullmatch(file.name) and file.name not in kept:
                    file.unlink()  # of the snapshot that was there, or of a process that died
        except OSError:
            logger.warning(
                "%s is saved, but may not be on the disk yet, or not be alone", self._path, exc_info=True
            )

    def _discard(self) -> None:
        for file in self._files:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
        if self._is_new:
            with contextlib.suppress(OSError):
                self._path.rmdir()

    def _lock(self) -> None:
        try:
            # The kernel takes it away from a process that dies.
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another snapshot is being saved in {self._path}: give each a directory of its own"
            ) from None
        except OSError:  # there are file systems without
            logger.debug("%s cannot be locked", self._path, exc_info=True)

    def _check_content(self) -> None:
        with self._explained():
            names = sorted(file.name for file in self._path.iterdir())
        ours = (MANIFEST_NAME, _HIDDEN_NAME)
        strangers = [name for name in names if name not in ours and not FILE_NAME.fullmatch(name)]
        if strangers:
            raise CheckpointError(
                f"{self._path} holds something else than a snapshot ({', '.join(strangers[:3])}): "
                "give it a directory of its own"
            )

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"cannot save a snapshot in {self._path}: {error.strerror}") from error


class _Checksummed:
    """Counts a file's bytes, and their CRC-32, on the way."""

    def __init__(self, raw: BinaryIO) -> None:
        self.nbytes = 0
        self.crc32 = 0
        self._raw = raw

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        self.crc32 = zlib.crc32(view, self.crc32)
        self.nbytes += len(view)
        while len(view):
            view = view[self._raw.write(view) :]


def _as_pieces(array: NDArray[Any] | torch.Tensor | Pieces) -> Pieces:
    if isinstance(array, Pieces):
        return array
    pieces: Iterable[Any] = _pieces(array)
    if isinstance(array, torch.Tensor):
        pieces = (piece.detach().cpu().numpy() for piece in pieces)
    return Pieces(tuple(array.shape), str(array.dtype).removeprefix("torch."), pieces)


def _pieces(array: Any) -> Iterator[Any]:
    rows = max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
