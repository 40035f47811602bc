"""What a remote store's client and server say to each other.

A message is a JSON header and tensors. It travels as an Arrow Flight stream of record batches with one
column of bytes: the header is the metadata of the first, and the tensors are laid end to end. Nothing
that is sent can name code to run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from torchrec_ext.errors import CheckpointError, CorruptTableError, StoreError, TableFullError
from torchrec_ext.store.optimizers import optimizer_from_json
from torchrec_ext.store.snapshots import StoreSnapshot, TableSnapshot
from torchrec_ext.store.tables import table_from_json, table_to_json

# To be raised by whoever changes what is sent; both sides refuse another one.
PROTOCOL = 3

# The action that tells who a server is; it must mean the same in all versions of the protocol.
HELLO = "hello"

# The header that carries the token.
AUTHORIZATION = "authorization"

SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])

# Tensors travel in pieces of this size: the receiver copies one while the next is under way.
PIECE_BYTES = 1 << 20
# Smaller ones share a piece: a message costs more than a copy.
_SMALL_BYTES = 1 << 16

_DTYPES = {"int64": torch.int64, "float32": torch.float32}

Bytes = npt.NDArray[np.uint8]


def authorization(token: str) -> bytes:
    """What the header ``AUTHORIZATION`` holds.

    Raises:
        ValueError: the token is not one that a header can hold.
    """
    if not token or not all(" " < letter <= "~" for letter in token):
        raise ValueError("a token is one or more visible ASCII characters")
    return f"Bearer {token}".encode()


def send(writer: Any, header: dict[str, Any], tensors: Sequence[torch.Tensor] = ()) -> None:
    """Writes a message to a Flight stream that was not begun yet.

    Args:
        writer: the stream.
        header: a JSON object.
        tensors: int64 or float32, on the CPU.
    """
    described = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    metadata = json.dumps({**header, "tensors": described}).encode()
    writer.begin(SCHEMA)
    pieces = _pieces(tensors)
    first = next(pieces, None)
    if first is None:
        writer.write_metadata(metadata)
        return
    writer.write_with_metadata(_batch(first), metadata)
    for piece in pieces:
        writer.write_batch(_batch(piece))


def receive(reader: Any) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Reads a message from a Flight stream to its end.

    Raises:
        StoreError: it is none, or was cut short.
    """
    try:
        first = reader.read_chunk()
        header = json.loads(first.app_metadata.to_pybytes())
        tensors = [
            torch.empty([int(length) for length in shape], dtype=_DTYPES[dtype])
            for dtype, shape in header.pop("tensors")
        ]
    except (StopIteration, AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise StoreError(f"received something else than a store's message: {error!r}") from error
    rooms = (_bytes_of(tensor) for tensor in tensors if tensor.numel())
    room = next(rooms, None)
    for piece in _received(first, reader):
        while len(piece):
            if room is None:
                raise StoreError("received a message longer than announced")
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            room, piece = room[count:], piece[count:]
            if not len(room):
                room = next(rooms, None)
    if room is not None:
        raise StoreError("received a message that was cut short")
    return header, tensors


def _pieces(tensors: Iterable[torch.Tensor]) -> Iterator[Bytes]:
    """The tensors' bytes, end to end."""
    small: list[Bytes] = []
    size = 0
    for tensor in tensors:
        data = _bytes_of(tensor.detach().contiguous())
        if small and (len(data) >= _SMALL_BYTES or size >= PIECE_BYTES):
            yield np.concatenate(small)
            small, size = [], 0
        if len(data) < _SMALL_BYTES:
            small.append(data)
            size += len(data)
            continue
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]
    if size:
        yield np.concatenate(small)


def _received(chunk: Any, reader: Any) -> Iterator[Bytes]:
    while True:
        if chunk.data is not None:
            yield chunk.data.column(0).to_numpy()
        try:
            chunk = reader.read_chunk()
        except StopIteration:
            return


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    return tensor.numpy().reshape(-1).view(np.uint8)


def _batch(data: Bytes) -> pa.RecordBatch:
    array = pa.Array.from_buffers(pa.uint8(), len(data), [None, pa.py_buffer(data)])
    return pa.RecordBatch.from_arrays([array], schema=SCHEMA)


# Errors

_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (KeyError, ValueError, CheckpointError, CorruptTableError, StoreError, TableFullError)
}


def travels(error: Exception) -> bool:
    """Whether an error arrives as one of its own type."""
    return type(error) in _ERRORS.values()


def error_to_json(error: Exception) -> dict[str, str]:
    """An error as a JSON object; one that does not travel as it is becomes a ``StoreError``."""
    if travels(error):
        return {"kind": type(error).__name__, "message": str(error.args[0]) if error.args else ""}
    return {"kind": "StoreError", "message": f"the server failed: {type(error).__name__}: {error}"}


def raise_error(content: dict[str, str]) -> NoReturn:
    """Raises the error that ``error_to_json`` described."""
    raise _ERRORS.get(content["kind"], StoreError)(content["message"])


# Snapshots

# What only a dynamic table's has.
_OPTIONAL = ("frequencies", "last_used", "candidates", "candidate_counts")


def snapshot_to_message(snapshot: StoreSnapshot) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """A snapshot as a JSON object and tensors."""
    tables = []
    tensors: list[torch.Tensor] = []
    for part in snapshot.tables.values():
        optional = [name for name in _OPTIONAL if getattr(part, name) is not None]
        tables.append(
            {
                "table": table_to_json(part.table),
                "optimizer": part.optimizer.to_json(),
                "slots": list(part.slots),
                "slot_keys": list(part.slot_keys),
                "optional": optional,
            }
        )
        tensors += [part.keys, part.weight, part.versions, *part.slots.values(), *part.slot_keys.values()]
        tensors += [getattr(part, name) for name in optional]
    return {"clock": snapshot.clock, "step": snapshot.step, "tables": tables}, tensors


def snapshot_from_message(content: dict[str, Any], tensors: Sequence[torch.Tensor]) -> StoreSnapshot:
    """The snapshot that ``snapshot_to_message`` described."""
    rest = iter(tensors)
    tables = {}
    for described in content["tables"]:
        table = table_from_json(described["table"])
        keys, weight, versions = next(rest), next(rest), next(rest)
        tables[table.name] = TableSnapshot(
            table=table,
            optimizer=optimizer_from_json(described["optimizer"]),
            keys=keys,
            weight=weight,
            versions=versions,
            slots={name: next(rest) for name in described["slots"]},
            slot_keys={name: next(rest) for name in described["slot_keys"]},
            **{name: next(rest) for name in _OPTIONAL if name in described["optional"]},
        )
    return StoreSnapshot(content["clock"], content["step"], tables)
