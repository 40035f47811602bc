"""What the processes of a store agree on: its groups of rows, its clock, and whose turn it is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from torchrec_ext.errors import StoreError, TableFullError
from torchrec_ext.store.forks import when_forked
from torchrec_ext.store.group import RowGroup
from torchrec_ext.store.places import CLOCK_NAME, Place

logger = logging.getLogger(__name__)

# Where in the clock's array what stands.
_CLOCK, _STEP, _WRITING, _DESCRIPTION = range(4)


class StoreState:
    """The groups of a store, as all processes that have it open see them.

    Nothing of it may be read or changed but inside of ``locked`` or ``writing``.

    Args:
        place: where the arrays are.

    Raises:
        StoreError: what is there cannot be used.
    """

    def __init__(self, place: Place) -> None:
        self._place: Place | None = place
        self._depth = 0
        self._seen_description = 0
        self.groups: list[RowGroup] = []
        self._group_of: dict[str, RowGroup] = {}
        with place.locked(exclusive=True):
            exists = place.description() is not None
            if not exists:
                place.drop(f"{CLOCK_NAME}.")  # what a process that died here left
            self._clocks = place.array(CLOCK_NAME, (4,), torch.int64, create=not exists)
            if not exists:
                self._clocks[_CLOCK] = 1
                place.describe({"groups": []})
        with self.locked(exclusive=True):
            pass  # maps what is there
        when_forked(self)

    @property
    def place(self) -> Place:
        """Where the arrays are.

        Raises:
            StoreError: the store was closed.
        """
        if self._place is None:
            raise StoreError("the store is closed")
        return self._place

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called yet."""
        return self._place is not None

    @property
    def clock(self) -> int:
        """Counts the changes, of all processes."""
        return int(self._clocks[_CLOCK])

    @property
    def step(self) -> int:
        """The largest step number that an update brought."""
        return int(self._clocks[_STEP])

    @step.setter
    def step(self, step: int) -> None:
        self._clocks[_STEP] = step

    @property
    def names(self) -> list[str]:
        """The tables' names."""
        return list(self._group_of)

    def group_of(self, table: str) -> RowGroup:
        """The group that holds a table.

        Raises:
            KeyError: there is no such table.
        """
        try:
            return self._group_of[table]
        except KeyError:
            raise KeyError(f"the store has no table {table!r}; it has {sorted(self._group_of)}") from None

    def publish(self, groups: list[RowGroup]) -> None:
        """Makes groups known to the other processes."""
        # First: of a description that was counted but not made, nobody has to know; the other way round,
        # those who have the store open would never hear of it.
        self._clocks[_DESCRIPTION] += 1
        self.place.describe({"groups": [group.to_json() for group in groups]})
        self._seen_description = int(self._clocks[_DESCRIPTION])
        self._adopt(groups)

    def close(self) -> None:
        """Lets go of the arrays."""
        if self._place is not None:
            self._place.close()
        self._place = None
        self._adopt([])

    def after_fork(self) -> None:
        """See ``Forked``."""
        self._depth = 0

    @contextmanager
    def locked(self, *, exclusive: bool) -> Iterator[None]:
        """Where nobody else writes; if exclusive, nor reads. May be nested."""
        place = self.place
        with ExitStack() as stack:
            stack.enter_context(place.locked(exclusive=exclusive))
            while not exclusive and self._depth == 0 and self._clocks[_WRITING]:
                stack.close()
                with self.locked(exclusive=True):
                    pass  # puts right what was left unfinished
                stack.enter_context(place.locked(exclusive=False))
            if self._seen_description != int(self._clocks[_DESCRIPTION]):
                self._reopen(place)
            if self._depth == 0 and exclusive and self._clocks[_WRITING]:
                self._repair()
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextmanager
    def writing(self, step: int = 0) -> Iterator[int]:
        """Where rows may be changed; yields the clock to stamp them with.

        What an exception or a process's death leaves unfinished, the next one to come repairs.
        """
        with self.locked(exclusive=True):
            clocks = self._clocks
            inner = bool(clocks[_WRITING])
            clocks[_CLOCK] += 1
            clocks[_STEP] = max(step, int(clocks[_STEP]))
            clocks[_WRITING] = 1
            full = None
            try:
                yield int(clocks[_CLOCK])
            except TableFullError as error:
                full = error  # nothing was changed then
            if not inner:
                clocks[_WRITING] = 0
            if full is not None:
                raise full

    def _repair(self) -> None:
        logger.warning(
            "a change of the store was not finished: some rows of one update may have it and others not; "
            "no row is without its optimizer state"
        )
        self._clocks[_CLOCK] += 1
        for group in self.groups:
            group.repair(self.clock)
        self._clocks[_WRITING] = 0

    def _adopt(self, groups: list[RowGroup]) -> None:
        self.groups = groups
        self._group_of = {name: group for group in groups for name in group.tables}

    def _reopen(self, place: Place) -> None:
        """Maps what another process made, or what was there before this one."""
        content = place.description() or {}
        known = {group.name: group for group in self.groups}
        groups = []
        try:
            for part in content["groups"]:
                group = known.get(part["name"])
                if group is None:
                    group = RowGroup.from_json(place, part)
                else:  # the same object: callers hold it
                    group.follow(part)
                groups.append(group)
        except (KeyError, TypeError, ValueError) as error:
            raise StoreError(f"the store's description is damaged: {error}") from error
        self._seen_description = int(self._clocks[_DESCRIPTION])
        self._adopt(groups)
