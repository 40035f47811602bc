"""``DeltaDumper``: attach it to a model, and what training changes lands on disk."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

import pyarrow.fs as pafs
import torch
import torch.distributed as dist
from torch import nn

from torchrec_ext.delta.arguments import check_arguments, json_object, row_numbers
from torchrec_ext.delta.buffers import BufferPool
from torchrec_ext.delta.columns import ColumnJoiner, split_bands
from torchrec_ext.delta.commit import Committer
from torchrec_ext.delta.cut import DumpResult
from torchrec_ext.delta.cutter import Cutter
from torchrec_ext.delta.following import find_tables, followers_of
from torchrec_ext.delta.opening import check_places, describe, open_log, place_for, select_tables
from torchrec_ext.delta.places import Place
from torchrec_ext.delta.position import LogPosition
from torchrec_ext.delta.ranks import leave, private_group
from torchrec_ext.delta.resuming import Restart
from torchrec_ext.delta.saving import current_position, from_state_dict, to_state_dict
from torchrec_ext.delta.schedule import schedule_of
from torchrec_ext.delta.steps import Steps, checked_step
from torchrec_ext.delta.tracker import trackers_of
from torchrec_ext.delta.writer import DumpWriter

logger = logging.getLogger(__name__)

DEFAULT_MAX_PENDING_BYTES = 1 << 30


class DeltaDumper:
    """Writes what training changes in a model's tables to a directory, while training goes on.

    It follows ZCH tables, sharded by TorchRec; the tables of ``EmbeddingBagCollection`` and
    ``EmbeddingCollection``, however sharded, or not sharded in a single process; and those of RecStore
    modules. Tables that cannot be followed exactly are left out with a warning that says why.

    Every rank of the group constructs it, at the same point of the program, and calls ``step`` after
    each update. It changes nothing of what the model computes. Read the directory with ``DeltaLog``.

    A directory that holds a log already is continued, and an older run that still writes to it is fenced
    off: its dumps are refused (``FencedError``). After a checkpoint was loaded, ``resume`` makes the log go
    back to it. Without that, the first dump holds every row, and deletes the keys that the model does not
    hold (any more), so that replaying stays exact.

    It is a ``torch.distributed.checkpoint`` ``Stateful``: saved with the model, it need not read the whole
    log when training resumes.

    Args:
        model: the model; ZCH modules in it are sharded by TorchRec (``DistributedModelParallel``).
        output_dir: a directory, shared by all ranks; made if it is not there. A path, or a URI that PyArrow
            takes (``s3://bucket/deltas``), or one of its file systems, of which it is the root.
        interval_steps: dump whenever the step number reaches or passes a multiple of this.
        interval_seconds: dump about this often instead, by the clock of the group's rank 0.
        tables: ``fnmatch`` patterns of table FQNs (``"mc.*"``); by default all that are supported.
        first_dump: ``"full"``: the first dump holds every row that an id owns. ``"delta"``: only those
            that change from now on, for consumers that start from a checkpoint.
        storage_dtype: how vectors are stored. None: exactly, whatever the table's dtype. ``"float16"``, or
            ``"int8"`` by FBGEMM's row-wise quantisation: smaller, and replaying gives the vectors so rounded.
            Vectors are rounded on their way to the disk only, so that errors do not add up.
        max_pending: dumps that may wait for the disk, the one being written included, before training does.
        max_pending_bytes: host memory for vectors that wait for the disk, by default 1 GiB. A dump that
            is larger is written in pieces while training stands still.
        process_group: the ranks that dump; by default all.

    Raises:
        ValueError: an argument is wrong, or the directory holds something else; names it.
        UnsupportedTableError: a table selected by ``tables`` cannot be followed exactly; says why.
        DeltaLogError: the directory holds a broken log.

    Example::

        with DeltaDumper(model, "deltas/", interval_steps=1000) as dumper:
            for step, batch in enumerate(loader, 1):
                train_step(batch)  # forward, backward, optimizer
                dumper.step(step)
    """

    def __init__(
        self,
        model: nn.Module,
        output_dir: str | os.PathLike[str] | pafs.FileSystem,
        *,
        interval_steps: int | None = None,
        interval_seconds: float | None = None,
        tables: Sequence[str] | None = None,
        first_dump: Literal["full", "delta"] = "full",
        storage_dtype: Literal["float16", "int8"] | None = None,
        max_pending: int = 2,
        max_pending_bytes: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        check_arguments(
            interval_steps,
            interval_seconds,
            tables,
            first_dump,
            storage_dtype,
            max_pending,
            max_pending_bytes,
        )
        stored = storage_dtype or "float32"
        self._place = place_for(output_dir)
        found = select_tables(find_tables(model), tables, model)
        self._steps = Steps()
        self._resumed_from = LogPosition()
        self._marked = False
        self._closed = False
        group = private_group(process_group, found)
        split = split_bands(found)
        self._followers = followers_of(found, process_group, split)
        try:
            check_places(group, found)
            opened = open_log(self._place, group, found)
            self._schedule = schedule_of(interval_steps, interval_seconds, group)
            publish_all = first_dump == "full" or bool(opened.dumps)
            parts = {table: self._followers.rows_of(table, all_changed=publish_all) for table in found}
            self._rows = {table.fqn: [rows for _, rows in parts[table]] for table in found}
            trackers = trackers_of(parts, opened.held, group, publish_all, stored)
            pool = BufferPool(
                max_pending_bytes or DEFAULT_MAX_PENDING_BYTES,
                row_bytes=4 * max((table.dim for table in found), default=0),
                pin_memory=any(rows.device.type == "cuda" for held in self._rows.values() for rows in held),
            )
            infos = {table.fqn: describe(table, stored) for table in found}
            previous = opened.dumps[-1].dump if opened.dumps else None
            # From here on the group is the writer's, unless it has nothing to write.
            self._committer = Committer(infos, opened.generation, previous, group, stored)
            joiner = ColumnJoiner(self._committer, split, self._followers.lose) if group and split else None
        except BaseException:
            self._followers.detach()
            leave(group)
            raise
        self._trackers = trackers
        self._generation = opened.generation
        self._restart: Restart | None = Restart(
            opened, trackers, self._followers, tables=self._rows, partial=first_dump == "delta"
        )
        self._writer = DumpWriter(self._committer, max_pending)
        self._cutter = Cutter(trackers, self._followers, pool, self._writer, self.generation, joiner)
        self._unclosed = weakref.finalize(self, _warn_unclosed, self._place)
        if opened.dumps and first_dump == "delta":
            logger.info("%s holds a log: the first dump is full, unless training resumes", self._place)
        logger.info("dumping %s to %s, generation %d", ", ".join(infos), self._place, self.generation)

    @property
    def tables(self) -> tuple[str, ...]:
        """The FQNs of the tables that are dumped."""
        return tuple(self._rows)

    @property
    def generation(self) -> int:
        """The run generation of its dumps."""
        return self._generation.number

    def step(self, global_step: int) -> DumpResult | None:
        """Takes note that a training step is over, and dumps if a dump is due.

        Args:
            global_step: the step's number, the same on every rank, larger than the one before.

        Returns:
            This rank's share of the dump, None if none was due.

        Raises:
            ValueError: the step number does not grow.
            CorruptTableError: a table of this rank contradicts itself.
            DeltaDumpError: an earlier dump was not committed, here or on another rank; or a vector is too
                large for ``storage_dtype``.
            FencedError: nor will a later one be: a newer run has opened the log.
        """
        self._check_open()
        global_step = self._steps.take(global_step)
        due = self._schedule.due(global_step) and global_step != self._steps.dumped
        result = self._dump(global_step, {}) if due else None
        # Only now: all ranks take the same dumps, whenever each of them hears of an error.
        self._writer.raise_errors()
        return result

    def dump(self, global_step: int, metadata: Mapping[str, Any] | None = None) -> DumpResult:
        """Dumps now, on every rank at the same step.

        To dump at a step of your choice, call it before ``step`` of the same number, which then does
        not dump again.

        Args:
            global_step: the step's number, larger than that of the last dump.
            metadata: a JSON object, goes into the manifest (rank 0's counts), such as the path of the
                checkpoint it belongs to.

        Returns:
            This rank's share. It is committed when ``flush`` returns.

        Raises:
            ValueError: the step number does not grow, or ``metadata`` is not a JSON object.
            CorruptTableError: a table of this rank contradicts itself.
            DeltaDumpError: an earlier dump was not committed, here or on another rank; or a vector is too
                large for ``storage_dtype``.
            FencedError: nor will a later one be: a newer run has opened the log.
        """
        self._check_open()
        result = self._dump(self._steps.checked_dump(global_step), json_object(metadata or {}))
        self._writer.raise_errors()
        return result

    @torch.no_grad()
    def resume(self, global_step: int) -> DumpResult | None:
        """Goes on from a checkpoint that was loaded into the model, on every rank before the first step.

        Where the log is ahead, the dumps that came after the checkpoint are superseded at once: a dump of
        this step says again what they said anything of, as it is in the model now, or deletes it. When
        this returns, it is committed. Where the log is not ahead, what changed before the checkpoint and
        was not dumped goes out with the next dump.

        If the dumper was saved in the checkpoint and loaded with the model, only keys are read from the
        log, at any world size. Else, or if the log is another one, the vectors in it are compared with the
        model's, and what differs goes out.

        Args:
            global_step: the step of the checkpoint; steps are counted on from there.

        Returns:
            This rank's share of the dump, None if the log is not ahead.

        Raises:
            ValueError: a step or dump was taken before, or the loaded state is of a later step.
            CorruptTableError: a table of this rank contradicts itself.
            DeltaLogError: the log is damaged.
            DeltaDumpError: the dump was not committed; it goes out with the next one.
            FencedError: nor will a later one be: a newer run has opened the log.
        """
        self._check_open()
        global_step = checked_step(global_step, None)
        if self._restart is None or self._steps.last is not None:
            raise ValueError("resume comes first, once, before any step or dump of this DeltaDumper")
        branch = self._restart.go_on_from(global_step, self._committer.group, marked=self._marked)
        self._restart = None
        self._marked = False
        self._steps.resumed = global_step
        self._schedule.go_on_after(global_step)
        if branch.kept:
            self._resumed_from = LogPosition(branch.kept[-1].dump, branch.kept[-1].run_id)
        if not branch.ahead:
            return None
        self._committer.supersede([dump.dump for dump in branch.ahead])
        result = self._dump(global_step, {})
        self.flush()
        return result

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, on every rank the same: the last dump, and the keys changed since.

        All ranks call it (``torch.distributed.checkpoint.save`` does). It waits for dumps under way. Eight
        bytes for each key that changed since the last dump; a checkpoint right after a dump keeps none.
        """
        if self._closed or self._restart is not None:  # nothing is known
            return to_state_dict(LogPosition())
        self._cutter.settle()
        self._writer.wait_until_written()
        position = current_position(
            self._resumed_from,
            self._generation.run_id,
            self._committer,
            self._followers,
            self._trackers,
            self._steps.told,
        )
        return to_state_dict(position)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes what ``state_dict`` gave, at any world size, for the ``resume`` that follows.

        Raises:
            ValueError: it is something else, or a step or dump was taken before.
        """
        self._check_open()
        if self._restart is None or self._steps.last is not None:
            raise ValueError("load_state_dict comes before resume, and before any step or dump")
        self._restart.saved = from_state_dict(state_dict)

    def mark(self, table: str, rows: torch.Tensor | None = None) -> None:
        """Takes note that rows were written by other means than training.

        They go out with the next dump. After the last step's dump there is none: call ``dump`` then.

        What ``load_state_dict`` and a store's own methods write is seen without it. So are in-place writes
        to weights of tables without managed collision, but for those that PyTorch does not count: by way of
        ``.data``, NumPy, a collective or the DTensors of a state dict. What is written to a store's weights
        directly may be told to ``LocalStore.touch`` as well.

        Args:
            table: the table's FQN.
            rows: global rows, integers ``[n]``, those of other ranks' shards are left to them; of a
                dynamic RecStore table keys, those without a row on this rank are left out; by default
                all.

        Raises:
            ValueError: the table is not dumped, or a row is not one of the table's.
        """
        self._check_open()
        if table not in self._rows:
            raise ValueError(f"table {table!r} is not dumped; dumped are {list(self._rows)}")
        numbers = None if rows is None else row_numbers(rows)
        for part in self._rows[table]:
            part.mark(numbers)
        self._marked = True

    def flush(self) -> None:
        """Waits until every dump handed over so far is committed.

        Raises:
            DeltaDumpError: one was not, here or on another rank.
        """
        self._cutter.settle()
        self._writer.wait_until_written()
        self._writer.raise_errors()

    def close(self) -> None:
        """Dumps what changed since the last dump, waits for the writer and leaves the model as it was.

        Every rank must call it. A second call does nothing.

        Raises:
            CorruptTableError: a table of this rank contradicts itself.
            DeltaDumpError: the last dump was not committed; what it held is not in the log.
        """
        if self._closed:
            return
        try:
            if self._steps.last is None and self._steps.dumped is None:
                logger.warning("nothing was dumped to %s: step() was never called", self._place)
            self._cutter.settle()
            if (owed := self._step_owed()) is not None:
                self._dump(owed, {})
        finally:
            self._leave(wait=True)
        if self._writer.last_dump_failed():
            self._writer.raise_errors()

    def __enter__(self) -> DeltaDumper:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        elif not self._closed:
            # The other ranks may never come: neither dump nor wait for them.
            self._leave(wait=False)

    def _dump(self, global_step: int, metadata: dict[str, Any]) -> DumpResult:
        if self._restart is not None and self._restart.saved is not None:
            logger.warning(
                "the state that was loaded into the dumper is not used: call resume() after loading a "
                "checkpoint. The first dump holds every row"
            )
        self._restart = None
        self._steps.dumped = global_step
        self._marked = False
        return self._cutter.cut(global_step, metadata)

    def _step_owed(self) -> int | None:
        """The step of the dump that is still due when the dumper is closed, the same on every rank."""
        if (undumped := self._steps.undumped) is not None:
            return undumped
        if self._steps.dumped is not None and self._writer.last_dump_failed():
            return self._steps.dumped  # its rows wait for the next dump: there is no other
        if self._marked:  # on this rank; the others may not know
            logger.warning("rows marked after the last dump are not in %s: dump() after mark()", self._place)
        return None

    def _leave(self, *, wait: bool) -> None:
        self._closed = True
        self._unclosed.detach()
        self._followers.detach()
        self._writer.close(wait=wait)

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this DeltaDumper is closed; construct a new one")


def _warn_unclosed(place: Place) -> None:
    logger.warning("a DeltaDumper was not closed: what came after its last dump is not in %s", place)
