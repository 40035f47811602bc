"""Host memory on its way to the writer is bounded and reused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from torchrec_ext.delta.buffers import CHUNK_BYTES, Arena, BufferPool


def test_an_arena_packs_matrices_into_chunks_and_gives_them_back() -> None:
    pool = BufferPool(10 * CHUNK_BYTES, pin_memory=False)
    arena = Arena(pool)
    per_chunk = CHUNK_BYTES // (4 * 24)
    first = arena.take(10, 24)
    second = arena.take(per_chunk, 24)
    third = arena.take(per_chunk, 24)
    assert (first.shape, len(second)) == ((10, 24), per_chunk - 10)
    assert len(third) == per_chunk, "a new chunk"
    assert pool.handed_out == 2
    first.fill_(1.0)
    second.fill_(2.0)
    assert float(first.sum()) == 240.0
    arena.release()
    assert pool.handed_out == 0
    again = Arena(pool)
    addresses = {again.take(per_chunk, 24).data_ptr() for _ in range(2)}
    assert first.data_ptr() in addresses and third.data_ptr() in addresses


def test_a_request_beyond_the_limit_waits_until_chunks_come_back() -> None:
    pool = BufferPool(CHUNK_BYTES, pin_memory=False)
    held: list[torch.Tensor] = []
    pool.acquire(held)
    asking, order = threading.Event(), []

    def ask() -> None:
        asking.set()
        pool.acquire([])
        order.append("acquired")

    thread = threading.Thread(target=ask)
    thread.start()
    asking.wait()
    order.append("released")
    pool.release(held)
    thread.join(240)
    assert order == ["released", "acquired"]
    assert pool.handed_out == 1


def test_an_interrupt_while_memory_is_taken_leaves_no_chunk_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty

    def interrupted(*args: Any, **options: Any) -> torch.Tensor:
        empty(*args, **options)
        raise KeyboardInterrupt

    pool = BufferPool(CHUNK_BYTES, pin_memory=False)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(torch, "empty", interrupted)
        pool.acquire([])
    assert pool.handed_out == 0
    pool.acquire([])  # would wait for ever


def test_chunks_that_are_given_back_twice_are_there_once() -> None:
    pool = BufferPool(2 * CHUNK_BYTES, pin_memory=False)
    held: list[torch.Tensor] = []
    pool.acquire(held)
    pool.acquire(held)
    again = [*held]
    pool.release(held)
    pool.release(again)
    assert held == [] and pool.handed_out == 0
    for _ in range(2):
        pool.acquire(held)
    assert len({chunk.data_ptr() for chunk in held}) == 2
