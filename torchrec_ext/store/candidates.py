"""``Candidates``: how often keys without a row were seen."""

from __future__ import annotations

import numpy as np
import torch

from torchrec_ext.store.hash_index import Allocate, HashIndex, Ints


class Candidates:
    """Counts keys that wait to be admitted.

    Counts are exact as long as the keys fit. When they no longer do, those that were seen least make room,
    an eighth of all at once; new keys always enter, else keys that never come again would fill it for good.

    Args:
        capacity: how many keys are counted at most.
        allocate: where the arrays come from.
    """

    def __init__(self, capacity: int, allocate: Allocate) -> None:
        self._index = HashIndex(capacity, allocate, "candidate")
        # Row 0, which `find` answers for keys that are not here, stays 0.
        self._seen = allocate("candidate_seen", (capacity + 1,), torch.int64).numpy()

    def seen(self, keys: Ints) -> Ints:
        """How often keys were seen, as far as it is known."""
        return self._seen.take(self._index.find(keys))

    def note(self, keys: Ints, seen: Ints) -> None:
        """Sets how often keys, without repeats, were seen."""
        rows = self._index.find(keys)
        is_new = rows == 0
        self._seen[rows[~is_new]] = seen[~is_new]
        keys, seen = keys[is_new], seen[is_new]
        capacity = self._index.capacity
        if len(keys) > capacity:
            most = np.argpartition(-seen, capacity - 1)[:capacity]
            keys, seen = keys[most], seen[most]
        self._make_room(len(keys))
        rows = self._index.reserve(len(keys))
        self._seen[rows] = seen
        self._index.bind(keys, rows)

    def drop(self, keys: Ints) -> None:
        """Forgets keys, without repeats; some may not be here."""
        rows = self._index.find(keys)
        self._index.drop(rows[rows != 0])

    def all(self) -> tuple[Ints, Ints]:
        """The keys and how often each was seen."""
        rows = self._index.rows()
        return self._index.keys(rows), self._seen[rows]

    def clear(self) -> None:
        """Forgets all keys."""
        self._index.clear()

    def check(self) -> str | None:
        """See ``HashIndex``."""
        return self._index.check()

    def rebuild(self) -> None:
        """See ``HashIndex``."""
        self._index.rebuild()

    def _make_room(self, count: int) -> None:
        short = count - (self._index.capacity - len(self._index))
        if short > 0:
            rows = self._index.rows()
            short = min(max(short, self._index.capacity // 8), len(rows))
            self._index.drop(rows[np.argpartition(self._seen[rows], short - 1)[:short]])
