"""``SoleWriter``: what a remote store that alone writes its rows need not ask the servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from torchrec_ext.store.flight.ahead import NOTHING, RowsAhead, Wanted
from torchrec_ext.store.flight.connection import Answer, Run
from torchrec_ext.store.flight.shares import Place
from torchrec_ext.store.flight.versions import first_of, version_of
from torchrec_ext.store.flight.written import WrittenRows
from torchrec_ext.store.store import Rows
from torchrec_ext.store.tables import DenseTable, Table


class SoleWriter:
    """Knows which rows of dense tables this process wrote, and has its updates bring back those in use.

    That holds while nobody else writes them: ``RemoteStore(writers="one")``. Rows of dynamic tables are
    always asked for.
    """

    def __init__(self) -> None:
        self._written = WrittenRows()
        self.after_fork()

    def after_fork(self) -> None:
        """See ``Forked``."""
        self._ahead = RowsAhead()
        self._writing = threading.Lock()

    def expect(self, tables: Sequence[Table], found: Sequence[Rows]) -> None:
        """Takes note of rows that were pulled ahead."""
        for table, rows in zip(tables, found, strict=True):
            if isinstance(table, DenseTable):
                self._ahead.expect(table.name, rows)

    def wanted(self, table: Table, keys: torch.Tensor) -> Wanted:
        """Which of the keys' rows an update shall bring back."""
        return self._ahead.wanted(table.name, keys) if isinstance(table, DenseTable) else NOTHING

    def learn(self, answer: Answer, asked_back: Sequence[Wanted]) -> None:
        """Takes the rows that an update has brought back."""
        for wanted, rows in zip(asked_back, answer.tensors, strict=True):
            self._ahead.learn(wanted, rows, version_of(answer))

    def change(
        self,
        ask: Callable[[], list[Answer]],
        tables: Sequence[Table],
        keys: Sequence[torch.Tensor],
        places: Sequence[Sequence[Place]],
    ) -> list[Answer]:
        """Asks for a change of rows, and takes note which were changed.

        Args:
            ask: asks the servers.
            tables: whose rows.
            keys: of each table, int64 ``[n]``.
            places: by server, which of these are there.
        """
        dense = [(j, table) for j, table in enumerate(tables) if isinstance(table, DenseTable)]
        with self._writing:
            for j, table in dense:
                self._written.begin(table, keys[j])
            answers = ask()
            for answer, here in zip(answers, places, strict=True):
                for j, table in dense:
                    self._written.end(table, keys[j][here[j]], version_of(answer))
        return answers

    def refresh(
        self, table: Table, held: Rows, runs: Sequence[Run], here: Sequence[Place]
    ) -> tuple[int, bool]:
        """Brings rows up to date as far as can be without a server.

        Returns:
            How many were, and whether all rows are up to date now.
        """
        if not isinstance(table, DenseTable):
            return 0, False
        written = self._written.versions(table, held.keys)
        changed = int((written > held.versions).sum())
        self._ahead.use(table.name, held)
        left = int((written > held.versions).sum()) if changed else 0
        restarted = any(
            run.epoch and bool((held.versions[place] < first_of(run.epoch)).any())
            for run, place in zip(runs, here, strict=True)
        )
        return changed - left, not left and not restarted
