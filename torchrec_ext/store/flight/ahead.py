"""``RowsAhead``: rows that were read before they are needed, and what this process's updates made of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torchrec_ext.store.store import Rows

# Updates whose news of the same rows are kept; a row whose news are gone is asked for.
_NEWS_KEPT = 64


@dataclass(frozen=True)
class _News:
    """Some pulled rows as an update left them: ``[n, dim]``, their positions, int64 ``[n]``, and version."""

    positions: torch.Tensor
    rows: torch.Tensor
    version: int


@dataclass(frozen=True)
class _Pulled:
    """Rows that are wanted: their keys in order, int64 ``[n]``, where each of them is, and news of them."""

    keys: torch.Tensor
    positions: torch.Tensor
    news: deque[_News] = field(default_factory=lambda: deque(maxlen=_NEWS_KEPT))


@dataclass(frozen=True)
class Wanted:
    """Which of the rows that an update writes it shall bring back.

    Attributes:
        places: where they are among the update's keys, int64 ``[n]``.
        readers: whoever pulled some of them: which of ``places``, and where among what was pulled.
    """

    places: torch.Tensor
    readers: Sequence[tuple[_Pulled, torch.Tensor, torch.Tensor]] = ()


NOTHING = Wanted(torch.empty(0, dtype=torch.int64))


class RowsAhead:
    """Has updates bring back the rows that are wanted next, which saves a request for them.

    All tables are dense ones that nobody but this process writes. Rows are wanted from when they were
    pulled ahead until they are used, or nobody has them any more.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # By table, and by the versions of the rows, which tell them from others.
        self._pulled: dict[str, WeakTensorKeyDictionary] = {}

    def expect(self, table: str, rows: Rows) -> None:
        """Takes note of rows that were pulled ahead."""
        keys, positions = rows.keys.sort()
        with self._lock:
            of_table = self._pulled.setdefault(table, WeakTensorKeyDictionary())
            of_table[rows.versions] = _Pulled(keys, positions)

    def wanted(self, table: str, keys: torch.Tensor) -> Wanted:
        """Which rows of ``keys``, int64 ``[n]``, are wanted."""
        with self._lock:
            of_table = self._pulled.get(table)
            pulled = [one for one in of_table.values() if len(one.keys)] if of_table is not None else []
        if not pulled:
            return NOTHING
        nearest = [torch.searchsorted(one.keys, keys).clamp_(max=len(one.keys) - 1) for one in pulled]
        found = [one.keys[at] == keys for one, at in zip(pulled, nearest, strict=True)]
        places = torch.stack(found).any(0).nonzero().flatten()
        readers = []
        for one, at, mine in zip(pulled, nearest, found, strict=True):
            of_places = mine[places].nonzero().flatten()
            readers.append((one, of_places, one.positions[at[places[of_places]]]))
        return Wanted(places, readers)

    def learn(self, wanted: Wanted, rows: torch.Tensor, version: int) -> None:
        """Takes the wanted rows, ``[n, dim]``, as an update left them."""
        for pulled, of_places, positions in wanted.readers:
            news = _News(positions, rows.index_select(0, of_places), version)
            with self._lock:
                pulled.news.append(news)

    def use(self, table: str, held: Rows) -> None:
        """Brings rows up to date as far as updates told; they are used now, and not wanted any more."""
        with self._lock:
            of_table = self._pulled.get(table)
            pulled = of_table.pop(held.versions, None) if of_table is not None else None
        # Nobody adds to the news now: this process's updates were waited for.
        for news in sorted(pulled.news, key=lambda one: one.version) if pulled else ():
            held.rows.index_copy_(0, news.positions, news.rows)
            held.versions.index_fill_(0, news.positions, news.version)
