"""``vacuum``: removes dumps that nobody needs any more."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.chain import void_dumps
from torchrec_ext.delta.compaction import Progress, remove_unfinished
from torchrec_ext.delta.generations import last_opened
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, Manifest
from torchrec_ext.delta.own_files import own_files, remove_own_files

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Vacuumed:
    """What ``vacuum`` removed, or would remove.

    Attributes:
        dumps: directories that went as a whole, oldest first: dumps that a base takes the place of, older
            bases, and what was left half-written among them.
        superseded: directories of superseded dumps that lost their rows and keep their manifest.
        files: how many files went.
        nbytes: their bytes.
        dry_run: whether they are still there.
        reason: why nothing went; empty if something did.
    """

    dumps: tuple[str, ...]
    superseded: tuple[str, ...]
    files: int
    nbytes: int
    dry_run: bool
    reason: str = ""


def vacuum(
    log: DeltaLog | str | os.PathLike[str],
    *,
    keep_seconds: float = 86_400.0,
    keep_dumps: int = 1,
    grace_seconds: float = 3_600.0,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Vacuumed:
    """Removes the dumps that a base takes the place of, and the rows of superseded ones.

    Whatever can be replayed, resumed or followed from among the dumps that are kept still can be, since a
    dump is kept with all that its state needs: the newest base at or before it, and the dumps since. So
    nothing goes where there is no base: ``compact`` first.

    A run that is interrupted leaves a log that can be read; the next one finishes.

    Args:
        log: a dump directory.
        keep_seconds: dumps committed less than this long ago are kept; superseded ones, those that were
            superseded less than this long ago.
        keep_dumps: so are the last so many that are not superseded, however old.
        grace_seconds: nothing goes before what takes its place has been there for so long. An engine that
            reads the files itself has that long for those that it has listed; ``DeltaLog`` lists again.
        dry_run: only tell.
        progress: is called with how many bytes were removed, and how many will be.

    Raises:
        ValueError: an argument is negative, or ``keep_dumps`` is not positive.
        DeltaLogError: the log is broken, or the base that would stay is damaged; nothing was removed.
        OSError: a file cannot be removed.
    """
    _check_arguments(keep_seconds, keep_dumps, grace_seconds)
    log = DeltaLog.of(log)

    def decided() -> _Removal:
        removal = _Removal(log, keep_seconds, keep_dumps, grace_seconds)
        if not dry_run:
            removal.check_base()
        return removal

    removal = log.undisturbed(decided)
    if not dry_run:
        removal.carry_out(progress)
        logger.info(
            "%s: removed dumps=%d, superseded=%d, %d bytes",
            log.place,
            len(removal.whole),
            len(removal.void),
            sum(removal.sizes.values()),
        )
    return Vacuumed(
        tuple(removal.whole),
        tuple(removal.void),
        len(removal.sizes),
        sum(removal.sizes.values()),
        dry_run,
        "" if removal.sizes else removal.why_nothing(grace_seconds),
    )


class _Removal:
    """Decides what goes.

    Attributes:
        whole: directories to remove, in this order.
        void: directories that lose their rows.
        sizes: the bytes of each file to remove, by directory and name.
    """

    def __init__(self, log: DeltaLog, keep_seconds: float, keep_dumps: int, grace_seconds: float) -> None:
        self._log = log
        self._place = log.place
        self._now = now = time.time()
        newest, opened = last_opened(log.place)  # before the list: a dump may come meanwhile
        chain, bases, _ = log.listing()
        self._bases = bases
        void = void_dumps(chain)
        if chain and newest > chain[-1].generation:
            # It has not dumped yet, and on an object store may pass by what was committed after it looked.
            certain = {dump.dump for dump in chain if dump.committed_unix < opened - grace_seconds}
            bases = {dump: base for dump, base in bases.items() if dump in certain}
        self._awaited = newest if len(bases) < len(self._bases) else None
        self._base = _base_to_keep(chain, bases, void, now - keep_seconds, keep_dumps, now - grace_seconds)
        self.whole = self._before_base()
        going = {*self.whole}
        since = _superseded_since(chain)
        limit = now - max(keep_seconds, grace_seconds)
        self.void = [
            dump.directory
            for dump in chain
            if dump.dump in void
            and not dump.is_base
            and dump.directory not in going
            and since[dump.dump] <= limit
        ]
        rows = {
            name: [own for own in own_files(self._place, name) if own != MANIFEST_NAME] for name in self.void
        }
        self.void = [name for name in self.void if rows[name]]
        self.sizes: dict[tuple[str, str], int] = {}
        for name in self.whole:
            self._measure(name, own_files(self._place, name))
        for name in self.void:
            self._measure(name, rows[name])

    def why_nothing(self, grace_seconds: float) -> str:
        """Why there is nothing to remove."""
        if not self._bases:
            return "no base stands for dumps: compact first"
        if self._awaited is not None:
            return f"run {self._awaited} has opened the log, and has not dumped yet"
        newest = max(self._bases.values(), key=lambda base: base.dump)
        if newest.committed_unix > self._now - grace_seconds:
            return f"{newest.directory} is younger than the grace that readers are given"
        return "all that is there is to be kept"

    def check_base(self) -> None:
        """Checks that the base is whole, before what it takes the place of goes."""
        if self._base is None or not self.whole:
            return
        self._log.checked_files(self._base, self._base.parts, fmt.PART_SCHEMA)
        self._log.checked_files(self._base, self._base.fallbacks, fmt.FALLBACK_SCHEMA)

    def carry_out(self, progress: Progress | None) -> None:
        """Removes it, the oldest first: a query that takes in what it finds never sees an older row win."""
        done, total = 0, sum(self.sizes.values())
        for name in [*self.whole, *self.void]:
            if name in self.void:
                for own in [own for directory, own in self.sizes if directory == name]:
                    self._place.remove(name, own)
                logger.debug("removed the rows of %s, which was superseded", name)
            elif self._place.has(name, MANIFEST_NAME) or DumpId.from_directory(name):
                remove_own_files(self._place, name)
                logger.debug("removed %s", name)
            else:
                remove_unfinished(self._place, name)
            done += sum(size for (directory, _), size in self.sizes.items() if directory == name)
            if progress is not None:
                progress(done, total)

    def _before_base(self) -> list[str]:
        """The directories of what the base takes the place of, oldest first."""
        if self._base is None:
            return []
        found = []
        for name in self._place.entries():
            dump, base = DumpId.from_directory(name), DumpId.from_base_directory(name)
            if (dump is not None and dump <= self._base.dump) or (
                base is not None and base < self._base.dump
            ):
                found.append((dump or base, base is None, name))
        # Of a base and its last dump the base goes first: it holds nothing that the dumps after it need.
        return [name for _, _, name in sorted(found)]

    def _measure(self, directory: str, names: Sequence[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # somebody else was faster
                self.sizes[directory, name] = self._place.size(directory, name)


def _base_to_keep(
    chain: Sequence[Manifest],
    bases: Mapping[DumpId, Manifest],
    void: set[DumpId],
    not_before: float,
    keep_dumps: int,
    base_before: float,
) -> Manifest | None:
    """The newest base that the dumps to keep can be replayed from, None if there is none."""
    counting = [dump for dump in chain if dump.dump not in void]
    kept = [
        place
        for place, dump in enumerate(counting)
        if place >= len(counting) - keep_dumps or dump.committed_unix > not_before
    ]
    if not kept:
        return None
    found = [
        bases[dump.dump]
        for dump in counting[: kept[0] + 1]
        if dump.dump in bases and bases[dump.dump].committed_unix <= base_before
    ]
    return found[-1] if found else None


def _superseded_since(chain: Sequence[Manifest]) -> dict[DumpId, float]:
    """When each superseded dump became so, seconds since 1970."""
    since: dict[DumpId, float] = {}
    for dump in chain:
        for void in dump.supersedes:
            since.setdefault(void, dump.committed_unix)
    return since


def _check_arguments(keep_seconds: float, keep_dumps: int, grace_seconds: float) -> None:
    for name, value, least in (
        ("keep_seconds", keep_seconds, 0),
        ("keep_dumps", keep_dumps, 1),
        ("grace_seconds", grace_seconds, 0),
    ):
        if not value >= least:
            raise ValueError(f"{name} must be at least {least}, not {value!r}")
