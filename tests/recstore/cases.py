"""Collections, batches and stores that the tests of ``recstore`` share."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType

from torchrec_ext.store import MemoryStore, Store

SUM, MEAN = PoolingType.SUM, PoolingType.MEAN


class InterfaceOnly(Store):
    """A store of which only the interface is in reach, as of one on another host."""

    def __init__(self, store: Store) -> None:
        self.behind = store

    @property
    def tables(self) -> Any:
        return self.behind.tables

    @property
    def device(self) -> Any:
        return self.behind.device


def _delegate(name: str) -> None:
    def call(self: InterfaceOnly, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.behind, name)(*args, **kwargs)

    setattr(InterfaceOnly, name, call)


for _name in Store.__abstractmethods__ - {"tables", "device"}:
    _delegate(_name)
abc.update_abstractmethods(InterfaceOnly)

STORES = {"local": MemoryStore, "interface only": lambda: InterfaceOnly(MemoryStore())}


def config(
    name: str, rows: int, dim: int, features: Sequence[str], pooling: PoolingType = SUM
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), pooling=pooling
    )


# Two features on one table, one feature on two tables, two dimensions that take turns, an unread table.
def various(mean: PoolingType = MEAN) -> list[EmbeddingBagConfig]:
    return [
        config("t0", 11, 4, ["a", "b"]),
        config("t1", 7, 8, ["c"], mean),
        config("t2", 5, 4, ["b"], mean),
        config("t3", 300, 8, ["d"]),
    ]


KEYS = ("d", "b", "unused", "a", "c")
ROWS = {"a": 11, "b": 5, "c": 7, "d": 300, "unused": 1 << 40}


def keyed(
    bags: Sequence[Sequence[Sequence[int]]],
    keys: Sequence[str] = KEYS,
    weights: torch.Tensor | None = None,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """A batch from bags of ids by feature and example."""
    flat = [i for feature in bags for bag in feature for i in bag]
    return KeyedJaggedTensor(
        keys=list(keys),
        values=torch.tensor(flat, dtype=dtype),
        lengths=torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int32),
        weights=weights,
    )


def random_batch(
    generator: torch.Generator,
    batch_size: int = 6,
    longest: int = 4,
    keys: Sequence[str] = KEYS,
    lengths_from: Sequence[int] | None = None,
    weighted: bool = False,
    dtype: torch.dtype = torch.int64,
) -> KeyedJaggedTensor:
    """A batch with empty bags and many repeats; weights are small multiples of 1/4."""
    choices = torch.tensor(lengths_from if lengths_from is not None else range(longest + 1))
    picks = torch.randint(len(choices), (len(keys) * batch_size,), generator=generator)
    lengths = choices[picks]
    values = []
    for key, of_key in zip(keys, lengths.view(len(keys), -1).sum(1).tolist(), strict=True):
        top = min(ROWS[key], 1 << 31) if dtype == torch.int32 else ROWS[key]
        values.append(torch.randint(top, (of_key,), generator=generator))
    flat = torch.cat(values).to(dtype)
    weights = torch.randint(1, 9, (len(flat),), generator=generator) / 4 if weighted else None
    return KeyedJaggedTensor(keys=list(keys), values=flat, lengths=lengths.int(), weights=weights)


def dyadic(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Multiples of 1/8 between -2 and 2: sums and products of a few are exact."""
    return torch.randint(-16, 17, shape, generator=generator) / 8
