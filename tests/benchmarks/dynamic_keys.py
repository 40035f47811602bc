"""What the keys of a dynamic table cost: memory, and time to find and to admit them."""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.benchmarks.results import Measurement, Result
from torchrec_ext.store.keys import DynamicKeys
from torchrec_ext.store.tables import DynamicTable

KEYS = 10_000_000
IDS = 200_000
PIECE = 1_000_000  # keys that are admitted at a time
OURS, SORTED, PANDAS = "ours", "torch.searchsorted", "pandas"

Lookup = Callable[[torch.Tensor], Any]


def run(quick: bool) -> Result:
    """Fills a table, and finds ids in it and in what one would use instead."""
    keys = _distinct_keys()
    arrays: list[torch.Tensor] = []
    owned = DynamicKeys(DynamicTable("t", 1, KEYS), _allocator(arrays))
    before = _anonymous_bytes()
    admit = [_seconds(lambda piece: owned.admit(piece, _nothing), piece) for piece in keys.split(PIECE)]
    taken = _anonymous_bytes() - before

    rows = owned.find(keys)
    lookups = _lookups(owned, keys)
    found = [
        Measurement("memory of a key, measured", "bytes", (taken / KEYS,)),
        Measurement("memory of a key, all arrays", "bytes", (sum(array.nbytes for array in arrays) / KEYS,)),
        Measurement(
            "keys admitted per second", "million", tuple(1e-6 * PIECE / seconds for seconds in admit)
        ),
    ]
    rounds = 3 if quick else 20
    for title, held in (("all have a row", 1.0), ("half have none", 0.5)):
        found.extend(_compare(f"find, {title}", lookups, keys, held, rounds))
    training = {"look up in training": lambda ids: owned.look_up(ids, 1, _nothing)}
    found.extend(_compare("all have a row", training, keys, 1.0, rounds))
    rebuild = [_seconds(lambda _: owned.rebuild(), keys) for _ in range(1 if quick else 3)]
    found.append(Measurement("rebuild after a crash", "s", tuple(rebuild)))
    assert torch.equal(owned.find(keys), rows)
    return Result(
        name="dynamic_keys",
        title="what the keys of a dynamic table cost",
        measurements=tuple(found),
        settings={"keys": KEYS, "ids per lookup": IDS, "torch threads": torch.get_num_threads()},
        notes=(
            "keys and ids are random 64-bit numbers, in no order: every id misses the caches",
            "memory is without weights and optimizer state; arrays are reserved for a full table, "
            "measured is what was touched",
            "torch.searchsorted: over sorted keys, and a comparison; pandas: Index.get_indexer",
            *(() if PANDAS in lookups else ("pandas is not installed, and left out",)),
        ),
    )


def _lookups(owned: DynamicKeys, keys: torch.Tensor) -> dict[str, Lookup]:
    """What finds ids; all of them find the same."""
    in_order = keys.sort().values

    def search(ids: torch.Tensor) -> torch.Tensor:
        place = torch.searchsorted(in_order, ids).clamp_(max=KEYS - 1)
        return torch.where(in_order[place] == ids, place + 1, 0)

    lookups: dict[str, Lookup] = {OURS: owned.find, SORTED: search}
    if importlib.util.find_spec("pandas"):
        import pandas as pd

        index = pd.Index(keys.numpy())
        lookups[PANDAS] = lambda ids: index.get_indexer(ids.numpy()) + 1
    ids = torch.cat([keys[:1000], keys[:1000] + 1])
    held = owned.find(ids) > 0
    for name, lookup in lookups.items():
        assert torch.equal(torch.as_tensor(lookup(ids)) > 0, held), name
    return lookups


def _compare(
    title: str, lookups: dict[str, Lookup], keys: torch.Tensor, held: float, rounds: int
) -> list[Measurement]:
    """Times lookups in turns, each round with other ids."""
    generator = torch.Generator().manual_seed(0)
    order = random.Random(0)
    ms: dict[str, list[float]] = {name: [] for name in lookups}
    for _ in range(rounds):
        ids = keys[torch.randint(KEYS, (IDS,), generator=generator)]
        ids[int(held * IDS) :] += 1  # hardly ever another key
        ids = ids[torch.randperm(IDS, generator=generator)]
        for name in order.sample(list(lookups), len(lookups)):
            ms[name].append(1e3 * _seconds(lookups[name], ids))
    found = [Measurement(f"{title}, {name}", "ms", tuple(samples)) for name, samples in ms.items()]
    found.extend(
        Measurement.ratio(f"{title}, {OURS} / {name}", ms[OURS], samples)
        for name, samples in ms.items()
        if name != OURS and OURS in ms
    )
    return found


def _distinct_keys() -> torch.Tensor:
    generator = np.random.default_rng(0)
    keys = generator.integers(-(1 << 63), 1 << 63, KEYS, dtype=np.int64)
    assert np.diff(np.sort(keys)).all()
    return torch.from_numpy(keys)


def _allocator(arrays: list[torch.Tensor]) -> Callable[[str, tuple[int, ...], torch.dtype], torch.Tensor]:
    def allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # NumPy's zeros take memory only when they are touched.
        arrays.append(torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype)))
        return arrays[-1]

    return allocate


def _nothing(rows: torch.Tensor) -> None:
    """No row loses its key here."""


def _seconds(call: Callable[[torch.Tensor], Any], ids: torch.Tensor) -> float:
    began = time.perf_counter()
    call(ids)
    return time.perf_counter() - began


def _anonymous_bytes() -> int:
    """The memory of this process that is not of files."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024
