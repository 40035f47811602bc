"""Reusable host memory for vectors on their way to the writer."""

from __future__ import annotations

import threading

import torch

from torchrec_ext.waits import wait_until

CHUNK_BYTES = 4 << 20
"""Small enough to be recycled by the allocator and to stay in a cache while it is checked."""


class BufferPool:
    """Hands out host chunks, of ``CHUNK_BYTES`` where vectors are not very long, and takes them back.

    Writing into fresh pages costs several times what writing into used ones does, so chunks are kept;
    for CUDA models they are pinned.

    Args:
        max_bytes: what may be handed out at a time; a request beyond it waits for chunks to come back.
        pin_memory: whether chunks are page-locked.
        row_bytes: of the longest vector; a chunk holds two of them at least.
    """

    def __init__(self, max_bytes: int, *, pin_memory: bool, row_bytes: int = 0) -> None:
        self.chunk_bytes = max(CHUNK_BYTES, 2 * row_bytes)
        self.max_chunks = max(1, max_bytes // self.chunk_bytes)
        self._pin_memory = pin_memory
        self._free: list[torch.Tensor] = []
        self._handed_out: set[torch.Tensor] = set()
        self._returned = threading.Condition()

    @property
    def handed_out(self) -> int:
        """Chunks that are in use."""
        return len(self._handed_out)

    def acquire(self, chunks: list[torch.Tensor]) -> None:
        """Appends a chunk, float32 ``[chunk_bytes / 4]``; waits while too many are handed out."""
        with self._returned:
            wait_until(self._returned, lambda: len(self._handed_out) < self.max_chunks)
            if self._free:
                chunk = self._free.pop()
            else:
                chunk = torch.empty(
                    self.chunk_bytes // 4, dtype=torch.float32, device="cpu", pin_memory=self._pin_memory
                )
            # A Ctrl-C may come in between: what counts as handed out, and nobody has, would never come back.
            chunks.append(chunk)
            self._handed_out.add(chunk)

    def release(self, chunks: list[torch.Tensor]) -> None:
        """Takes chunks back, and empties the list; those that are back already are not taken twice."""
        with self._returned:
            for chunk in chunks:
                if chunk in self._handed_out:
                    self._handed_out.remove(chunk)
                    self._free.append(chunk)
            chunks.clear()
            self._returned.notify_all()


class Arena:
    """The chunks of one dump, filled one matrix after another and given back together."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._chunks: list[torch.Tensor] = []
        self._used = 0

    def take(self, rows: int, dim: int) -> torch.Tensor:
        """Room for as many of ``rows`` vectors as fit in one piece, float32 ``[k, dim]``, ``k >= 1``."""
        room = (self._chunks[-1].numel() - self._used) // dim if self._chunks else 0
        if room == 0:
            self._pool.acquire(self._chunks)
            self._used = 0
            room = self._chunks[-1].numel() // dim
        count = min(rows, room)
        matrix = self._chunks[-1][self._used : self._used + count * dim].view(count, dim)
        self._used += count * dim
        return matrix

    def release(self) -> None:
        """Gives all chunks back, whose matrices must not be used any more; a second call does nothing."""
        self._pool.release(self._chunks)
