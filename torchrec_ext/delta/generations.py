"""Who may write to a log: the run that opened it last, and nobody else."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId
from torchrec_ext.delta.places import LocalPlace, Place
from torchrec_ext.delta.places.local import write_synced
from torchrec_ext.errors import DeltaLogError, FencedError
from torchrec_ext.files import sync

logger = logging.getLogger(__name__)

FOLDER = "generations"
"""Where a log keeps its generations, one directory for each."""

_NAME = re.compile(r"g(\d{4,})")
_OWNER, _OPEN = "owner.json", "open"
_TRIES = 1000


class UncertainCommit(Exception):
    """A manifest may be in its place, or come to it later, or never."""


@dataclass(frozen=True)
class Generation(ABC):
    """A run's right to commit to a log, until another run opens it.

    Attributes:
        place: the log's.
        number: larger than that of any run before.
        run_id: random; tells the run from those of the same number in other logs.
    """

    place: Place
    number: int
    run_id: str

    @abstractmethod
    def commit(self, dump: DumpId, manifest: bytes) -> None:
        """Puts a dump's manifest in its place. When it returns, every later run goes on from the dump.

        Raises:
            OSError: it could not, and the dump is not committed; see ``check``.
            FencedError: nor is it, and another run has opened the log.
            UncertainCommit: nobody can tell.
        """

    @abstractmethod
    def check(self) -> None:
        """Tells of another run that has opened the log since.

        Raises:
            FencedError: there is one.
        """

    @abstractmethod
    def cannot_commit(self, older: int, newest: int) -> bool:
        """Whether an older generation cannot commit any more, given the newest one of which a dump counts."""

    def close(self) -> None:  # noqa: B027  # not all have anything to do
        """Gives the right up."""


@dataclass(frozen=True)
class RenamingGeneration(Generation):
    """A right that the file system itself grants.

    A manifest is written in the generation's directory ``open`` and comes to its place by a rename, which
    is the commit. Who opens the log next removes ``open``, and only then looks where the log ends. So the
    file system itself decides a race between the two: either the rename was first, and the new run goes
    on from that dump, or there is nothing left to rename. That holds however long the old run was asleep
    and whatever it knew when it fell asleep; there is no clock and no lock.
    """

    place: LocalPlace

    def commit(self, dump: DumpId, manifest: bytes) -> None:
        """See ``Generation``; there is always somebody who can tell."""
        hidden = self._open / f"{dump.directory}.json"
        write_synced(hidden, manifest)
        place = self.place.path / dump.directory / MANIFEST_NAME
        try:
            os.rename(hidden, place)
        except FileNotFoundError:
            # NFS may repeat a request whose answer was lost, and then find nothing to rename any more.
            with suppress(OSError):
                if place.read_bytes() == manifest:
                    return
            raise
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def check(self) -> None:
        """See ``Generation``. What decides is ``commit`` alone."""
        newer = self._own.with_name(generation_name(self.number + 1))
        if newer.exists():
            raise fenced(self, self.number + 1, _owner(newer))

    def cannot_commit(self, older: int, newest: int) -> bool:
        """See ``Generation``."""
        return older < self.number

    def close(self) -> None:
        """See ``Generation``."""
        _remove_open(self._own)

    @property
    def _own(self) -> Path:
        return self.place.path / FOLDER / generation_name(self.number)

    @property
    def _open(self) -> Path:
        return self._own / _OPEN


def claim(place: LocalPlace) -> Generation:
    """Begins a new generation; when it returns, no older one can commit any more.

    Raises:
        OSError: the directory cannot be written to.
    """
    folder = place.path / FOLDER
    folder.mkdir(exist_ok=True)
    run_id = secrets.token_hex(8)
    draft = folder / f".{run_id}"
    (draft / _OPEN).mkdir(parents=True)
    try:
        (draft / _OWNER).write_bytes(owner_of(run_id))
        number = _take_next(draft, place)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(folder)
    for older in sorted(folder.iterdir()):
        taken = generation_of(older.name)
        if taken is not None and taken < number and _remove_open(older):
            logger.info("%s was not closed (%s); it cannot commit any more", older.name, _owner(older))
    return RenamingGeneration(place, number, run_id)


def remove_uncommitted(generation: Generation, newest: int, committed: Collection[str]) -> None:
    """Removes what older generations left half-written, and can never commit now.

    Args:
        generation: this run's.
        newest: generation of which a dump counts; -1 if there is none.
        committed: names of dumps that are known to be.
    """
    for name in generation.place.entries():
        dump = DumpId.from_directory(name)
        if dump is None or name in committed or not generation.cannot_commit(dump.generation, newest):
            continue
        if generation.place.has(name, MANIFEST_NAME):
            continue
        logger.info("removing %s, which was never committed", name)
        # One that still runs may write to it meanwhile: what stays means nothing.
        generation.place.remove_folder(name)


def next_number(place: Place) -> int:
    """The lowest generation that is higher than all others."""
    dumps = (DumpId.from_directory(name) or DumpId.from_base_directory(name) for name in place.entries())
    taken = [dump.generation for dump in dumps if dump is not None]
    taken += [number for name in place.entries(FOLDER) if (number := generation_of(name)) is not None]
    return max(taken, default=-1) + 1


def _take_next(draft: Path, place: Place) -> int:
    """Gives a draft the next number."""
    while True:
        number = next_number(place)
        try:
            os.rename(draft, draft.with_name(generation_name(number)))
        except OSError as error:
            # Another run was faster. A number's directory is never removed, so never given twice.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return number


def _remove_open(generation: Path) -> bool:
    """Ends a generation; whether it had not ended before."""
    folder = generation / _OPEN
    for _ in range(_TRIES):
        try:
            for entry in folder.iterdir():
                entry.unlink(missing_ok=True)
            folder.rmdir()
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # Its run has just written another manifest, to no avail.
    raise DeltaLogError(f"{folder} cannot be removed: something keeps writing to it")


def _owner(generation: Path) -> str:
    try:
        return named_owner((generation / _OWNER).read_bytes())
    except OSError:
        return named_owner(b"")


def owner_of(run_id: str) -> bytes:
    """What a run says of itself when it opens a log."""
    return json.dumps(
        {"host": socket.gethostname(), "pid": os.getpid(), "run_id": run_id, "opened_unix": time.time()}
    ).encode()


def named_owner(said: bytes) -> str:
    """The run that ``owner_of`` describes, as messages name it."""
    try:
        owner = json.loads(said)
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "of an unknown process"


def fenced(generation: Generation, newer: int, owner: str) -> FencedError:
    """The error of a run when a newer one has opened the log."""
    return FencedError(
        f"this run is generation {generation.number} of {generation.place}, and generation "
        f"{newer} ({owner}) has opened it since: only the newest one may write. "
        "Stop this run, or restart it from a checkpoint"
    )


def last_opened(place: Place) -> tuple[int, float]:
    """The newest generation, -1 if there is none, and when it was opened, seconds since 1970.

    Raises:
        OSError: the place cannot be read.
    """
    number = max((n for name in place.entries(FOLDER) if (n := generation_of(name)) is not None), default=-1)
    folder = f"{FOLDER}/{generation_name(number)}"
    for name in place.entries(folder) if number >= 0 else ():
        with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            if name.endswith(".json"):
                return number, float(json.loads(place.read(folder, name))["opened_unix"])
    return number, 0.0


def generation_name(number: int) -> str:
    """The name of a generation's folder."""
    return f"g{number:04d}"


def generation_of(name: str) -> int | None:
    """The generation that a folder's name stands for."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None
