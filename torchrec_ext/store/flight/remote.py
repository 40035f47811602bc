"""``RemoteStore``: rows that live on other hosts."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Literal

import torch

from torchrec_ext.store.flight import wire
from torchrec_ext.store.flight.ahead import NOTHING
from torchrec_ext.store.flight.connection import Answer, Connection, Part, Servers
from torchrec_ext.store.flight.known_tables import KnownTables
from torchrec_ext.store.flight.shares import (
    Place,
    Share,
    divide,
    join,
    join_snapshots,
    split_snapshot,
    take,
)
from torchrec_ext.store.flight.sole_writer import SoleWriter
from torchrec_ext.store.flight.versions import label, unlabel
from torchrec_ext.store.forks import when_forked
from torchrec_ext.store.init_fns import InitFn, InitFns, with_initial_rows
from torchrec_ext.store.mismatches import OnMismatch, RestoreReport, check_room, fit_snapshot
from torchrec_ext.store.optimizers import StoreOptimizer
from torchrec_ext.store.snapshots import StoreSnapshot
from torchrec_ext.store.store import Rows, Store
from torchrec_ext.store.tables import DynamicTable, Table, table_to_json
from torchrec_ext.store.update_queue import UpdateQueue

logger = logging.getLogger(__name__)

Tensors = Sequence[torch.Tensor]


class RemoteStore(Store):
    """A store whose rows are on one or several servers; see ``StoreServer`` and ``torchrec-ext serve-store``.

    Each call is one request to each server that has to do with it, all at the same time, however many
    tables it is about. Which server has a key depends on the key alone: see ``shares.server_of``.

    A server that is gone is a ``StoreError``; once it is back, the same object goes on. A read that has
    lost its connection is tried again once by itself. A change is not: the error says that it may have
    been made. With several servers, some may have made their part of it.

    With several servers, a dynamic table's rows are shared out evenly, so that one server is full a
    little before all are. A snapshot is one moment of each server: nobody else may write meanwhile if
    it is to be one moment of all.

    Args:
        urls: the servers, ``grpc://host:port`` or ``grpc+tls://host:port``, always in the same order.
        token: what the servers want to know.
        tls_root_certs: the certificates to trust, PEM; by default the system's.
        timeout: how many seconds a request about rows may take.
        bulk_timeout: how many one may take that makes or moves whole tables.
        writers: ``one`` promises that nobody else writes the rows of dense tables that this object reads:
            then ``refresh_many`` asks the server only if this object wrote one of them since.

    Raises:
        ValueError: an argument is not what it should be.
        StoreError: a server cannot be reached, or is not the one that it should be.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str | None = None,
        tls_root_certs: bytes | None = None,
        timeout: float = 60.0,
        bulk_timeout: float = 3600.0,
        writers: Literal["many", "one"] = "many",
    ) -> None:
        if isinstance(urls, str) or not urls or len(set(urls)) < len(urls):
            raise ValueError(f"urls must be a list of different servers, not {urls!r}")
        if writers not in ("many", "one"):
            raise ValueError(f"writers must be 'many' or 'one', not {writers!r}")
        self.urls = tuple(urls)
        self._servers = Servers(
            [
                Connection(url, Share(index, len(urls)), token=token, tls_root_certs=tls_root_certs)
                for index, url in enumerate(urls)
            ],
            timeout,
        )
        self._bulk_timeout = bulk_timeout
        self._known = KnownTables(self._servers)
        self._updates = UpdateQueue()
        self._sole_writer = SoleWriter() if writers == "one" else None
        when_forked(self)

    def after_fork(self) -> None:
        """See ``Forked``: gRPC's threads are not there."""
        self._servers.abandon()
        if self._sole_writer is not None:
            self._sole_writer.after_fork()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({list(self.urls)})"

    @property
    def device(self) -> torch.device:
        """Where keys and rows are."""
        return torch.device("cpu")

    @property
    def clock(self) -> int:
        """Counts the changes of all servers together."""
        return sum(answer.content["clock"] for answer in self._servers.ask("describe", ({}, ()), retry=True))

    # Tables

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables by name."""
        return {name: table for name, (table, _) in self._known.described().items()}

    def create_tables(self, tables: Sequence[Table], optimizer: StoreOptimizer) -> list[str]:
        """See ``Store``."""
        args = {"tables": [table_to_json(table) for table in tables], "optimizer": optimizer.to_json()}
        count = len(self.urls)
        parts = [({**args, "share": [index, count]}, ()) for index in range(count)]
        answers = self._servers.ask("create_tables", parts, timeout=self._bulk_timeout)
        self._known.add(tables)
        made = {name for answer in answers for name in answer.content["made"]}
        return [table.name for table in tables if table.name in made]

    def optimizer(self, table: str) -> StoreOptimizer:
        """See ``Store``."""
        return self._known.optimizer(table)

    def set_optimizer(self, tables: Iterable[str], optimizer: StoreOptimizer) -> None:
        """See ``Store``."""
        self.drain()
        args = {"tables": list(tables), "optimizer": optimizer.to_json()}
        self._servers.ask("set_optimizer", (args, ()), timeout=self._bulk_timeout)

    def pull(self, table: str, keys: torch.Tensor, *, admit: bool = False) -> torch.Tensor:
        """See ``Store``."""
        return self.pull_many([(table, keys)], admit=admit)[0].rows

    def pull_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor]],
        *,
        admit: bool = False,
        counts: Tensors | None = None,
        ahead: bool = False,
    ) -> list[Rows]:
        """See ``Store``; with ``admit``, a lookup that failed may have been counted."""
        tables = self._known.checked(requests)
        self.drain()
        keys = [part for _, part in requests]
        places = divide(tables, keys, len(self._servers))
        admit = admit and any(isinstance(table, DynamicTable) for table in tables)
        args = {"tables": [table.name for table in tables], "admit": admit}
        parts = []
        for here in places:
            tensors = take(keys, here)
            if admit and counts is not None:
                tensors += take(counts, here)
            parts.append((args, tensors))
        answers = self._servers.ask("pull_many", parts, retry=not admit)
        found = []
        for j, part in enumerate(keys):
            here = [of_server[j] for of_server in places]
            rows = join([answer.tensors[j] for answer in answers], here, len(part))
            versions = [label(answer.tensors[len(keys) + j], answer.epoch) for answer in answers]
            found.append(Rows(part, rows, join(versions, here, len(part))))
        if ahead and self._sole_writer is not None:
            self._sole_writer.expect(tables, found)
        return found

    def refresh_many(
        self,
        held: Sequence[tuple[str, Rows]],
        *,
        admit: bool = False,
        counts: Tensors | None = None,
    ) -> int:
        """See ``Store``; with ``admit``, a lookup that failed may have been counted."""
        tables = self._known.checked([(name, rows.keys) for name, rows in held])
        self.drain()
        places = divide(tables, [rows.keys for _, rows in held], len(self._servers))
        runs = self._servers.reach()
        changed = 0
        asked = []
        for j, table in enumerate(tables):
            brought, complete = 0, False
            if self._sole_writer is not None:
                brought, complete = self._sole_writer.refresh(
                    table, held[j][1], runs, [here[j] for here in places]
                )
            changed += brought
            if not complete:
                asked.append(j)
        if not asked:
            return changed
        admit = admit and any(isinstance(tables[j], DynamicTable) for j in asked)
        args = {"tables": [tables[j].name for j in asked], "admit": admit}
        parts = []
        for run, here in zip(runs, places, strict=True):
            tensors = [unlabel(held[j][1].versions[here[j]], run.epoch) for j in asked]
            tensors += [held[j][1].keys[here[j]] for j in asked]
            if admit and counts is not None:
                tensors += [counts[j][here[j]] for j in asked]
            parts.append((args, tensors))
        answers = self._servers.ask("refresh_many", parts, runs=runs, retry=not admit)
        for answer, here in zip(answers, places, strict=True):
            for i, j in enumerate(asked):
                positions, rows, versions = answer.tensors[3 * i : 3 * i + 3]
                place = here[j]
                if not isinstance(place, slice):
                    positions = place[positions]
                held[j][1].rows.index_copy_(0, positions, rows)
                held[j][1].versions.index_copy_(0, positions, label(versions, answer.epoch))
                changed += len(positions)
        return changed

    def update_many(
        self,
        requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> None:
        """See ``Store``."""
        tables = self._known.checked_update(requests)
        self.drain()
        self._update(tables, requests, step, lr)

    def update_async(
        self,
        table: str,
        keys: torch.Tensor,
        grads: torch.Tensor,
        *,
        step: int = 1,
        lr: float | None = None,
    ) -> Future[None]:
        """See ``Store``."""
        requests = [(table, keys, grads)]
        tables = self._known.checked_update(requests)
        return self._updates.submit(lambda: self._update(tables, requests, step, lr))

    def drain(self) -> None:
        """See ``Store``."""
        self._updates.drain()

    def read(self, table: str, keys: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """See ``Store``."""
        tables = self._known.checked([(table, keys)])
        self.drain()
        here = [of_server[0] for of_server in divide(tables, [keys], len(self._servers))]
        answers = self._servers.ask("read", [({"table": table}, [keys[place]]) for place in here], retry=True)
        weight, *slots = [
            join(list(parts), here, len(keys)) for parts in zip(*(a.tensors for a in answers), strict=True)
        ]
        return weight, dict(zip(answers[0].content["slots"], slots, strict=True))

    def write(
        self,
        table: str,
        keys: torch.Tensor,
        rows: torch.Tensor | None = None,
        slots: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """See ``Store``."""
        tables = self._known.checked([(table, keys)])
        if len(torch.unique(keys)) < len(keys):
            raise ValueError(f"table {table!r}: keys to write must not repeat")
        values = [rows] if rows is not None else []
        values += (slots or {}).values()
        for part in values:
            if len(part) != len(keys):
                raise ValueError(f"table {table!r}: {len(keys)} keys to write, but {len(part)} rows")
        self.drain()
        places = divide(tables, [keys], len(self._servers))
        args = {"table": table, "rows": rows is not None, "slots": list(slots or {})}
        parts = [(args, [keys[here], *(_float(part)[here] for part in values)]) for (here,) in places]
        self._change("write", parts, tables, [keys], places)

    def evict_unused(self, table: str, steps: int) -> int:
        """Evicts keys of a dynamic table that were not looked up in training for ``steps`` steps.

        Returns:
            How many.
        """
        self._known.checked([(table, torch.empty(0, dtype=torch.int64))])
        self.drain()
        args = {"table": table, "steps": steps}
        answers = self._servers.ask("evict_unused", (args, ()), timeout=self._bulk_timeout)
        return sum(answer.content["evicted"] for answer in answers)

    # Moments

    def snapshot(self, tables: Iterable[str] | None = None) -> StoreSnapshot:
        """See ``Store``; with several servers, see the class too."""
        self.drain()
        args = {"tables": None if tables is None else list(tables)}
        answers = self._servers.ask("snapshot", (args, ()), retry=True, timeout=self._bulk_timeout)
        if len(answers) > 1:
            clocks = self._servers.ask("describe", ({}, ()), retry=True)
            if any(a.content["clock"] != b.content["clock"] for a, b in zip(answers, clocks, strict=True)):
                logger.warning(
                    "it was changed while its servers' parts of a snapshot were taken: these are not of "
                    "one moment; let nobody write meanwhile"
                )
        return join_snapshots([wire.snapshot_from_message(a.content, a.tensors) for a in answers])

    def restore(
        self,
        snapshot: StoreSnapshot,
        on_mismatch: OnMismatch = "initialize",
        *,
        init_fns: Mapping[str, InitFn] | None = None,
    ) -> RestoreReport:
        """See ``Store``; rows that a function fills are made here."""
        self.drain()
        # Here, so that no server does its part when another one would refuse.
        fitted, report = fit_snapshot(snapshot, self._known.described(), on_mismatch)
        needed = InitFns().to_restore(fitted, init_fns or {})
        fitted = with_initial_rows(fitted, needed, lambda _, shape: torch.empty(shape))
        shares = split_snapshot(fitted, len(self.urls))
        for share in shares:
            for part in share.tables.values():
                check_room(part)
        try:
            self._servers.ask(
                "restore", [wire.snapshot_to_message(share) for share in shares], timeout=self._bulk_timeout
            )
        finally:  # some rows may be others, however it ended
            self._servers.forget()
        report.log(logger)
        return report

    def close(self) -> None:
        """See ``Store``; the servers go on."""
        try:
            self.drain()
        finally:
            self._updates.close()
            self._servers.close()

    def _update(
        self,
        tables: Sequence[Table],
        requests: Sequence[tuple[str, torch.Tensor, torch.Tensor]],
        step: int,
        lr: float | None,
    ) -> None:
        keys = [part for _, part, _ in requests]
        grads = [_float(part) for _, _, part in requests]
        places = divide(tables, keys, len(self._servers))
        parts = []
        asked_back = []
        for here in places:
            keys_here, grads_here = take(keys, here), take(grads, here)
            some = [j for j, part in enumerate(keys_here) if len(part)]
            wanted = [
                self._sole_writer.wanted(tables[j], keys_here[j]) if self._sole_writer else NOTHING
                for j in some
            ]
            args = {"tables": [tables[j].name for j in some], "step": step, "lr": lr}
            tensors = [*(keys_here[j] for j in some), *(grads_here[j] for j in some)]
            parts.append((args, [*tensors, *(part.places for part in wanted)]))
            asked_back.append(wanted)
        # To all servers, also to those with nothing to update: they count the steps.
        answers = self._change("update_many", parts, tables, keys, places)
        if self._sole_writer is not None:
            for answer, wanted in zip(answers, asked_back, strict=True):
                self._sole_writer.learn(answer, wanted)

    def _change(
        self,
        op: str,
        parts: Sequence[Part],
        tables: Sequence[Table],
        keys: Tensors,
        places: Sequence[Sequence[Place]],
    ) -> list[Answer]:
        """Asks for a change of rows, and takes note which rows were changed if that is of use."""
        if self._sole_writer is None:
            return self._servers.ask(op, parts)
        return self._sole_writer.change(lambda: self._servers.ask(op, parts), tables, keys, places)


def _float(values: torch.Tensor) -> torch.Tensor:
    return values.detach().to(torch.float32)
