"""What a model that was restored from a checkpoint has in common with a log."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch.distributed as dist

from torchrec_ext.delta.chain import without_superseded
from torchrec_ext.delta.following import Followers
from torchrec_ext.delta.keys import NO_KEYS, Keys, difference, union
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.opening import OpenedLog, describe, own_keys
from torchrec_ext.delta.position import Branch, LogPosition, branch_at
from torchrec_ext.delta.replay import Replay
from torchrec_ext.delta.standing import Standing
from torchrec_ext.delta.tracked import TrackedTable
from torchrec_ext.delta.tracker import Tracker
from torchrec_ext.errors import DeltaLogError
from torchrec_ext.ranks import gather, on_every_rank

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK = 4096  # vectors of a table that are compared although the log's word is taken for them


class Restart:
    """What a dumper knows from when it was constructed until it resumes, or dumps without.

    Args:
        opened: its log.
        trackers: of this rank.
        followers: of the tables' modules and stores.
        tables: the FQNs of all tables that are dumped, by whatever rank.
        partial: whether a consumer of an empty log begins with the checkpoint.
    """

    def __init__(
        self,
        opened: OpenedLog,
        trackers: Mapping[str, Tracker],
        followers: Followers,
        *,
        tables: Iterable[str],
        partial: bool,
    ) -> None:
        self.saved: LogPosition | None = None
        self._opened = opened
        self._trackers = trackers
        self._followers = followers
        self._tables = frozenset(tables)
        self._partial = partial

    def go_on_from(self, step: int, group: dist.ProcessGroup | None, *, marked: bool) -> Branch:
        """Makes the trackers go on from what the log says up to a step, on all ranks together.

        Args:
            step: of the checkpoint that the model was restored from.
            group: of all ranks, used by nobody else meanwhile.
            marked: whether rows of this rank were written since by other means.

        Raises:
            ValueError: the position that was saved is that of a later step, or ranks name different steps.
            CorruptTableError: a table of this rank contradicts itself.
            DeltaLogError: the log is damaged, or not the same on all ranks.
        """
        saved, marked = self._agree(step, group, marked)

        def stand() -> tuple[Branch, dict[str, tuple[Standing, Keys]]]:
            branch = branch_at(without_superseded(self._opened.dumps_now()), step, saved)
            return branch, self._standings(branch, trusted=not marked)

        try:
            on_every_rank(group, self._followers.pause)
            branch, standings = self._on_one_branch(group, stand)
        finally:
            self._followers.resume()
        for name, (standing, held) in standings.items():
            self._trackers[name].adopt(standing, held)
        if left := {fqn for dump in branch.ahead for fqn in dump.tables} - self._tables:
            logger.warning(
                "dumps after step %d hold tables that are not dumped now, %s: who has read them keeps the "
                "later rows; dump these tables as well",
                step,
                ", ".join(sorted(left)),
            )
        logger.info(
            "%s resumes at step %d, after %s, by %s; %d later dumps are superseded, %d rows of this rank "
            "are not in the log as they are",
            self._opened.log.place,
            step,
            branch.kept[-1].directory if branch.kept else "nothing",
            "the vectors in the log" if branch.saved is None else "the state in the checkpoint",
            len(branch.ahead),
            sum(int((standing.owned & ~standing.said).sum()) for standing, _ in standings.values()),
        )
        return branch

    def _agree(
        self, step: int, group: dist.ProcessGroup | None, marked: bool
    ) -> tuple[LogPosition | None, bool]:
        """The position that was saved, if all ranks know the same; and whether any has marked rows since."""
        crc = None if self.saved is None else zlib.crc32(self.saved.to_bytes())
        steps, crcs, marks = zip(*gather(group, (step, crc, marked)), strict=True)
        if len(set(steps)) > 1:
            raise ValueError(f"ranks resume at different steps: {list(steps)}; pass the checkpoint's on all")
        if any(marks):
            return None, True
        if len(set(crcs)) > 1:
            logger.warning("not all ranks have loaded the same state of the dumper: comparing with the log")
            return None, False
        return self.saved, False

    def _on_one_branch(
        self, group: dist.ProcessGroup | None, stand: Callable[[], tuple[Branch, T]]
    ) -> tuple[Branch, T]:
        """What ``stand`` gives on each rank, of one branch on all: vacuum may come when some have listed it.

        Where the checkpoint's position is gone, another of the dumps may be the last to stand.
        """
        before: list[int] | None = None
        while True:
            branch, standings = on_every_rank(group, lambda: self._opened.log.undisturbed(stand))
            names = [[dump.directory for dump in dumps] for dumps in (branch.kept, branch.ahead)]
            seen = gather(group, zlib.crc32(repr(names).encode()))
            if len(set(seen)) == 1:
                return branch, standings
            if seen == before:
                raise DeltaLogError(f"ranks see different logs in {self._opened.log.place}")
            before = seen

    def _standings(self, branch: Branch, *, trusted: bool) -> dict[str, tuple[Standing, Keys]]:
        if self._opened.dumps:
            comparison = Comparison(self._opened.log, branch, self._trackers)
            return {name: comparison.of(tracker) for name, tracker in self._trackers.items()}
        standings = {name: tracker.stand() for name, tracker in self._trackers.items()}
        if self._partial and trusted:
            for standing in standings.values():
                standing.trust()
        return {name: (standing, NO_KEYS) for name, standing in standings.items()}


class Comparison:
    """Compares what trackers' tables hold with what a log says, of the keys of this rank.

    Where the checkpoint's position in the log is known, the log is asked for keys, and for vectors only
    of rows that it may show as they were later. Else the vectors of all keys are read and compared, a row
    group at a time.

    Args:
        log: the log.
        branch: where training goes on.
        trackers: of this rank.

    Raises:
        DeltaLogError: a file is missing or damaged.
    """

    def __init__(self, log: DeltaLog, branch: Branch, trackers: Mapping[str, Tracker]) -> None:
        keep = own_keys([tracker.table for tracker in trackers.values()])
        self._branch = branch
        self._keep = keep
        self._kept = log.history(branch.kept, keep)
        self._since = log.history(branch.since, keep)
        self._ahead = log.history(branch.ahead, keep)

    def of(self, tracker: Tracker) -> tuple[Standing, Keys]:
        """How a table's rows stand, and the keys that a consumer of the log may hold, int64."""
        fqn = tracker.table.fqn
        standing = self._by_position(tracker) or self._by_vectors(tracker)
        # Whatever they hold: a consumer that was ahead must hear of them again.
        ahead = self._ahead.said_of(fqn)
        standing.doubt(ahead)
        # What was not said at the checkpoint may have been said since, and then is among the kept.
        unsaid = difference(self._unsaid(fqn), self._since.said_of(fqn))
        kept = self._kept.keys_of(fqn)
        self._warn_of_losses(tracker.table, kept, standing)
        held = union(kept, ahead, unsaid)
        return standing, held[tracker.table.keeps(held)]

    def _warn_of_losses(self, table: TrackedTable, kept: Keys, standing: Standing) -> None:
        kept = kept[table.keeps(kept)]
        lost = difference(kept, standing.owners[standing.owned])
        if 2 * len(lost) > len(kept):
            logger.warning(
                "%s: of %d ids that own a row in the log, %d own none in the model and are deleted: was the "
                "checkpoint loaded into the model before resume()?",
                table.fqn,
                len(kept),
                len(lost),
            )

    def _by_position(self, tracker: Tracker) -> Standing | None:
        fqn = tracker.table.fqn
        saved = self._branch.saved
        if saved is None or fqn not in saved.unsaid or self._has_changed(tracker.table):
            return None
        standing = tracker.stand()
        standing.trust()
        doubtful = union(self._unsaid(fqn), self._since.said_of(fqn))
        standing.doubt(doubtful)
        if self._branch.since:
            _confirm(standing, self._kept, fqn, doubtful)
        if self._is_another_model(standing, tracker.table, doubtful):
            logger.warning(
                "%s: the model's vectors are not those that its last dump before the checkpoint wrote, as "
                "the state of the dumper in the checkpoint implies: comparing all with the log",
                fqn,
            )
            return None
        return standing

    def _has_changed(self, table: TrackedTable) -> bool:
        """Whether the table has other rows, or another dtype, than at the checkpoint's position."""
        dump = self._branch.kept[-1 - len(self._branch.since)]
        before, now = dump.tables.get(table.fqn), describe(table)
        return before is None or (before.num_embeddings, before.dtype) != (now.num_embeddings, now.dtype)

    def _is_another_model(self, standing: Standing, table: TrackedTable, doubtful: Keys) -> bool:
        """Looks at the vectors dumped last, which tell a mix-up of checkpoints, or another model."""
        keys = difference(self._kept.by_age(table.fqn), doubtful)
        keys = keys[table.keeps(keys)][-_LOOK:]
        compared = [standing.confirm(*found) for found in self._kept.latest(table.fqn, keys)]
        counts = [count for count in compared if count is not None]
        return any(different for _, different in counts) or (bool(counts) and not any(s for s, _ in counts))

    def _by_vectors(self, tracker: Tracker) -> Standing:
        standing = tracker.stand()
        _confirm(standing, self._kept, tracker.table.fqn, None)
        return standing

    def _unsaid(self, fqn: str) -> Keys:
        saved = self._branch.saved
        keys = NO_KEYS if saved is None else saved.unsaid.get(fqn, NO_KEYS)
        return keys[self._keep(fqn, keys)]


def _confirm(standing: Standing, history: Replay, fqn: str, among: Keys | None) -> None:
    for keys, vectors, storage_dtype in history.latest(fqn, among):
        standing.confirm(keys, vectors, storage_dtype)
