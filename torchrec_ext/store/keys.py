"""``DynamicKeys``: which keys of a dynamic table have a row, how often they were seen, and when last."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import torch

from torchrec_ext.errors import TableFullError
from torchrec_ext.store.candidates import Candidates
from torchrec_ext.store.hash_index import Allocate, HashIndex, Ints
from torchrec_ext.store.tables import DynamicTable

logger = logging.getLogger(__name__)

Release = Callable[[torch.Tensor], None]
"""Is told of rows, int64 ``[n]``, right before they lose their keys."""


class DynamicKeys:
    """The keys of a dynamic table.

    Rows are numbers from 1 to ``table.max_rows``; 0 is the default row, which no key owns. Everything is in
    arrays that come from ``allocate`` full of zeros, so that another process that has them, now or later,
    has the same keys. Nothing is locked here: who changes keys must be alone, who reads them must not meet
    a change. All tensors are on the CPU.

    After a process died within a change, finding keys still ends, but some may be missing; ``check`` tells,
    and ``rebuild`` puts it right. A key that it was about to admit then has a row or has none. Whether
    that row was initialised, the caller has to know; so that it can, it hears of rows before they lose
    their keys, and may be given to others.

    As many keys as the table has rows can wait to be admitted; see ``Candidates``.

    Args:
        table: the table.
        allocate: makes the array of a name, or finds it. Each is as large as a full table needs, but only
            what keys need so far is touched.

    Raises:
        ValueError: the table has too many rows for 32-bit numbers.
    """

    def __init__(self, table: DynamicTable, allocate: Allocate) -> None:
        if table.max_rows >= 1 << 31:
            raise ValueError(
                f"table {table.name!r}: max_rows must be below 2^31, not {table.max_rows}; use more shards"
            )
        self._table = table
        self._index = HashIndex(table.max_rows, allocate, "key")
        self._frequency = allocate("frequency", (table.num_rows,), torch.int64).numpy()
        self._last_used = allocate("last_used", (table.num_rows,), torch.int64).numpy()
        self._newest_step = allocate("newest_step", (1,), torch.int64).numpy()
        self._candidates: Candidates | None = None
        if table.filter.filter_freq > 1:
            self._candidates = Candidates(table.max_rows, allocate)

    def __len__(self) -> int:
        """How many keys have a row."""
        return len(self._index)

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """The rows of keys, int64 ``[n]`` each; 0 for keys without one."""
        return torch.from_numpy(self._index.find(self._array(keys)))

    def look_up(
        self, keys: torch.Tensor, step: int, release: Release, times: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds keys in training: counts them, and admits those that were seen often enough.

        Args:
            keys: int64 ``[n]``; a key that repeats counts as often.
            step: the step of training.
            release: hears of the rows of keys that make room: if there are too few rows, all keys that
                the ``table.evict_after`` steps before this one did not look up, nor this call does.
            times: how often each of ``keys`` counts, int64 ``[n]``; by default once.

        Returns:
            The rows, int64 ``[n]``, 0 for keys without one, and those that were given to keys just now,
            int64 ``[m]``, without repeats.

        Raises:
            TableFullError: there are too few rows; nothing was changed.
        """
        wanted = self._array(keys)
        counts = np.ones_like(wanted) if times is None else times.numpy()
        rows = self._index.find(wanted)
        is_new = rows == 0
        if not is_new.any():
            self._count(rows, counts, step)
            return torch.from_numpy(rows), torch.empty(0, dtype=torch.int64)

        new, inverse = np.unique(wanted[is_new], return_inverse=True)
        seen = self._seen_before(new)
        np.add.at(seen, inverse, counts[is_new])
        ready = seen >= self._table.filter.filter_freq
        held = rows[~is_new]
        given = self._give(new[ready], seen[ready], step, held, release)
        if self._candidates is not None:
            self._candidates.note(new[~ready], seen[~ready])
        self._count(held, counts[~is_new], step)
        answer = np.zeros_like(new)
        answer[ready] = given
        rows[is_new] = answer[inverse]
        return torch.from_numpy(rows), torch.from_numpy(given)

    def admit(self, keys: torch.Tensor, release: Release) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds keys, and admits those without a row, however often they were seen.

        It does not count as a lookup, but new keys are as recent as the newest step.

        Args:
            keys: int64 ``[n]``, repeats allowed.
            release: as for ``look_up``.

        Returns:
            As ``look_up``; every key has a row.

        Raises:
            TableFullError: there are too few rows; nothing was changed.
        """
        wanted = self._array(keys)
        rows = self._index.find(wanted)
        is_new = rows == 0
        new, inverse = np.unique(wanted[is_new], return_inverse=True)
        step = int(self._newest_step[0])
        given = self._give(new, self._seen_before(new), step, rows[~is_new], release)
        rows[is_new] = given[inverse]
        return torch.from_numpy(rows), torch.from_numpy(given)

    def evict(self, rows: torch.Tensor) -> None:
        """Takes rows away from their keys, with frequency and all; rows without a key are left out."""
        distinct = _distinct(rows.numpy())
        self._index.drop(distinct[self._index.taken(distinct)])

    def unused_since(self, step: int) -> torch.Tensor:
        """The rows, int64 ``[n]``, whose keys were last looked up in training before ``step``."""
        return torch.from_numpy(self._unused_since(step))

    def rows_in_use(self) -> torch.Tensor:
        """The rows that have a key, int64 ``[n]``, ascending."""
        return torch.from_numpy(self._index.rows())

    def keys_of(self, rows: torch.Tensor) -> torch.Tensor:
        """The keys of rows in use, int64 ``[n]`` each."""
        return torch.from_numpy(self._index.keys(rows.numpy()))

    def frequencies(self, rows: torch.Tensor) -> torch.Tensor:
        """How often the keys of rows in use were looked up in training, int64 ``[n]``."""
        return torch.from_numpy(self._frequency.take(rows.numpy()))

    def last_used(self, rows: torch.Tensor) -> torch.Tensor:
        """The step at which the keys of rows in use were last looked up in training, int64 ``[n]``."""
        return torch.from_numpy(self._last_used.take(rows.numpy()))

    def candidates(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys that wait to be admitted, and how often each was seen, int64 ``[n]`` both."""
        if self._candidates is None:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        keys, seen = self._candidates.all()
        return torch.from_numpy(keys), torch.from_numpy(seen)

    def clear(self) -> None:
        """Forgets all keys."""
        self._index.clear()
        self._newest_step[0] = 0
        if self._candidates is not None:
            self._candidates.clear()

    def load(
        self,
        keys: torch.Tensor,
        frequencies: torch.Tensor | None = None,
        last_used: torch.Tensor | None = None,
        candidates: torch.Tensor | None = None,
        candidate_counts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Replaces all keys.

        Args:
            keys: those that get a row, int64 ``[n]``.
            frequencies: what ``frequencies`` answers for them, int64 ``[n]``; by default 0.
            last_used: what ``last_used`` answers for them, int64 ``[n]``; by default 0.
            candidates: keys that wait to be admitted, int64 ``[m]``.
            candidate_counts: how often each was seen, int64 ``[m]``.

        Returns:
            The rows of ``keys``, int64 ``[n]``.

        Raises:
            TableFullError: there are too few rows; nothing was changed.
            ValueError: keys repeat; nothing was changed.
        """
        self.check_load(keys)
        wanted = self._array(keys)
        self.clear()
        rows = self._index.reserve(len(wanted))
        self._frequency[rows] = 0 if frequencies is None else frequencies.numpy()
        self._last_used[rows] = 0 if last_used is None else last_used.numpy()
        self._newest_step[0] = self._last_used[rows].max(initial=0)
        self._index.bind(wanted, rows)
        if self._candidates is not None and candidates is not None and candidate_counts is not None:
            self._candidates.note(self._array(candidates), candidate_counts.numpy())
        return torch.from_numpy(rows)

    def check_load(self, keys: torch.Tensor) -> None:
        """Checks that ``load`` can take keys; see there what it raises."""
        wanted = self._array(keys)
        if len(_distinct(wanted)) < len(wanted):
            raise ValueError(f"table {self._table.name!r}: keys to load must not repeat")
        if len(wanted) > self._table.max_rows:
            raise self._full(len(wanted), self._table.max_rows)

    def check(self) -> bool:
        """Whether no call was left unfinished; if one was, logs what is wrong."""
        wrong = self._index.check()
        if wrong is None and self._candidates is not None:
            wrong = self._candidates.check()
        if wrong is not None:
            logger.warning("table %r: the index of its keys is damaged: %s", self._table.name, wrong)
        return wrong is None

    def rebuild(self) -> None:
        """Puts right what an unfinished call left: no key that had a row before the call loses it."""
        self._index.rebuild()
        if self._candidates is not None:
            self._candidates.rebuild()

    def _array(self, keys: torch.Tensor) -> Ints:
        if keys.dtype != torch.int64 or keys.dim() != 1:
            raise ValueError(
                f"table {self._table.name!r}: keys must be int64 [n], not {keys.dtype} {list(keys.shape)}"
            )
        return keys.numpy()

    def _seen_before(self, keys: Ints) -> Ints:
        return np.zeros_like(keys) if self._candidates is None else self._candidates.seen(keys)

    def _count(self, rows: Ints, counts: Ints, step: int) -> None:
        np.add.at(self._frequency, rows, counts)
        self._last_used[rows] = step
        self._newest_step[0] = max(step, int(self._newest_step[0]))

    def _give(self, keys: Ints, seen: Ints, step: int, held: Ints, release: Release) -> Ints:
        """Gives rows to keys without one; the rows in ``held`` stay with their keys."""
        self._make_room(len(keys), step, held, release)
        rows = self._index.reserve(len(keys))
        if self._candidates is not None:
            self._candidates.drop(keys)
        self._frequency[rows] = seen
        self._last_used[rows] = step
        self._index.bind(keys, rows)
        return rows

    def _make_room(self, count: int, step: int, held: Ints, release: Release) -> None:
        free = self._table.max_rows - len(self)
        if count <= free:
            return
        if self._table.evict_after is None:
            raise self._full(count, free)
        unused = self._unused_since(step - self._table.evict_after)
        unused = unused[np.isin(unused, held, invert=True)]
        if count > free + len(unused):
            raise self._full(count, free, len(unused))
        release(torch.from_numpy(unused))
        self._index.drop(unused)

    def _unused_since(self, step: int) -> Ints:
        rows = self._index.rows()
        return rows[self._last_used.take(rows) < step]

    def _full(self, count: int, free: int, unused: int = 0) -> TableFullError:
        table = self._table
        remedy = "set evict_after"
        if table.evict_after is not None:
            remedy = f"evict earlier (evict_after={table.evict_after} makes room for {unused})"
        return TableFullError(
            f"table {table.name!r} is full: {count} keys need a row, {free} of max_rows={table.max_rows} are "
            f"free; raise max_rows (a collection's num_embeddings), {remedy}, or admit keys later "
            f"(filter_freq={table.filter.filter_freq})"
        )


def _distinct(values: Ints) -> Ints:
    """Values without repeats, ascending; ``np.unique`` hashes in some versions, which is a lot slower."""
    in_order = np.sort(values)
    first = np.ones(len(in_order), np.bool_)
    np.not_equal(in_order[1:], in_order[:-1], out=first[1:])
    return in_order[first]
