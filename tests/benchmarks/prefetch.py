"""How much of the wait for rows that are far away prefetching hides."""

from __future__ import annotations

import multiprocessing as mp
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torchrec import EmbeddingBagConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.benchmarks.results import Measurement, Result
from tests.recstore.cases import InterfaceOnly
from torchrec_ext.recstore import RecStoreEmbeddingBagCollection, SparseSGD, prefetched
from torchrec_ext.store import MemoryStore, RemoteStore, Rows, Store, StoreServer

TABLES, ROWS, DIM, BATCH = 8, 100_000, 64, 2048
DEPTH = 2
READ_SECONDS = 0.005
COMPUTE_SECONDS = 0.03
FEATURES = [f"f{number}" for number in range(TABLES)]


def run(quick: bool) -> Result:
    """Trains with and without prefetch, and with rows that are near, in turn."""
    rounds, steps = (2, 6) if quick else (10, 20)
    torch.set_num_threads(1)
    measurements = []
    with served() as url:
        places: dict[str, Callable[[], Store]] = {
            "5 ms per read": lambda: SlowStore(MemoryStore()),
            "Arrow Flight": lambda: RemoteStore([url], writers="one"),
        }
        for place, make in places.items():
            for ids, batches in (("ids of a batch of their own", apart), ("power-law ids", popular)):
                hidden, waits, updates = _hidden(make(), batches(steps), rounds)
                measurements.append(Measurement(f"{place}, {ids}: wait per lookup", "ms", waits))
                measurements.append(Measurement(f"{place}, {ids}: of it hidden", "x", hidden))
                measurements.append(Measurement(f"{place}, {ids}: added to the update", "ms", updates))
    return Result(
        name="prefetch",
        title=f"the wait for rows that are elsewhere, with prefetch at depth {DEPTH} and without",
        measurements=tuple(measurements),
        settings={"tables": TABLES, "rows": ROWS, "dim": DIM, "batch": BATCH, "steps": steps},
        notes=(
            "wait: how much longer a lookup takes than with the rows in this process; hidden: the part of "
            "it that is gone with prefetch; added to the update: what bringing back rows costs there",
            f"a step: read, pool, {1000 * COMPUTE_SECONDS:.0f} ms in which an accelerator would compute, "
            "update",
            "with power-law ids nearly every batch needs rows that the batch before has just updated",
        ),
    )


def _hidden(
    store: Store, batches: Sequence[KeyedJaggedTensor], rounds: int
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    near, far = _collection(SlowStore(MemoryStore(), seconds=0.0)), _collection(store)
    runs = {
        "near": lambda: _train(*near, batches),
        "far": lambda: _train(*far, batches),
        "ahead": lambda: _train(*far, prefetched(far[0], batches, depth=DEPTH)),
    }
    order = random.Random(0)
    lookups: dict[str, list[float]] = {name: [] for name in runs}
    updates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name in order.sample(list(runs), len(runs)):
            lookup, update = runs[name]()
            lookups[name].append(lookup)
            updates[name].append(update)
    rows = list(zip(lookups["near"][1:], lookups["far"][1:], lookups["ahead"][1:], strict=True))
    waits = [far - near for near, far, _ in rows]
    hidden = [(far - ahead) / (far - near) for near, far, ahead in rows]
    added = [ahead - far for far, ahead in zip(updates["far"][1:], updates["ahead"][1:], strict=True)]
    store.close()
    return tuple(hidden), tuple(1000 * wait for wait in waits), tuple(1000 * more for more in added)


def _collection(store: Store) -> tuple[RecStoreEmbeddingBagCollection, SparseSGD]:
    collection = RecStoreEmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{f}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{f}"])
            for f in range(TABLES)
        ],
        store=store,
    )
    return collection, SparseSGD([collection], lr=0.01)


def _train(
    collection: RecStoreEmbeddingBagCollection,
    optimizer: SparseSGD,
    batches: Sequence[KeyedJaggedTensor] | Iterator[KeyedJaggedTensor],
) -> tuple[float, float]:
    """Seconds that a lookup and an update take, medians of all but the first, which nothing went before."""
    lookups, updates = [], []
    for batch in batches:
        began = time.perf_counter()
        pooled = collection(batch).values()
        lookups.append(time.perf_counter() - began)
        time.sleep(COMPUTE_SECONDS)
        pooled.sum().backward()
        began = time.perf_counter()
        optimizer.step()
        updates.append(time.perf_counter() - began)
    return float(np.median(lookups[DEPTH:])), float(np.median(updates[DEPTH:]))


def apart(steps: int) -> list[KeyedJaggedTensor]:
    """Batches of which no two within reach of the prefetch share an id."""
    generator = np.random.default_rng(0)
    batches = []
    for step in range(steps):
        period = DEPTH + 2
        ids = generator.integers(0, ROWS // period, TABLES * BATCH) * period + step % period
        batches.append(_batch(ids))
    return batches


def popular(steps: int) -> list[KeyedJaggedTensor]:
    """Batches whose ids are popular like words are."""
    popularity = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -1.0)
    popularity /= popularity[-1]
    generator = np.random.default_rng(0)
    return [
        _batch(np.searchsorted(popularity, generator.random(TABLES * BATCH)) * 48_271 % ROWS)
        for _ in range(steps)
    ]


def _batch(ids: np.ndarray) -> KeyedJaggedTensor:
    lengths = torch.ones(TABLES * BATCH, dtype=torch.int64)
    return KeyedJaggedTensor(FEATURES, torch.from_numpy(ids.astype(np.int64)), lengths=lengths)


class SlowStore(InterfaceOnly):
    """A store that is not in reach, and takes its time whenever rows are read."""

    def __init__(self, store: Store, seconds: float = READ_SECONDS) -> None:
        super().__init__(store)
        self._seconds = seconds

    def pull_many(self, *args: Any, **kwargs: Any) -> list[Rows]:
        time.sleep(self._seconds)
        return self.behind.pull_many(*args, **kwargs)

    def refresh_many(self, *args: Any, **kwargs: Any) -> int:
        read_again = self.behind.refresh_many(*args, **kwargs)
        if read_again:
            time.sleep(self._seconds)
        return read_again


@contextmanager
def served() -> Iterator[str]:
    """A server in a process of its own."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    server = StoreServer(MemoryStore())
    pipe.send(server.url)
    pipe.poll(None)
    server.close()
