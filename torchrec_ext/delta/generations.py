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
from dataclasses import dataclass
from pathlib import Path

from torchrec_ext.delta import format as fmt
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId
from torchrec_ext.errors import DeltaLogError, FencedError
from torchrec_ext.files import sync

logger = logging.getLogger(__name__)

FOLDER = "generations"
"""Where a log keeps its generations, one directory for each."""

_NAME = re.compile(r"g(\d{4,})")
_OWNER, _OPEN = "owner.json", "open"
_TRIES = 1000


@dataclass(frozen=True)
class Generation:
    """A run's right to commit to a log, until another run opens it.

    A manifest is written in the generation's directory ``open`` and comes to its place by a rename, which
    is the commit. Who opens the log next removes ``open``, and only then looks where the log ends. So the
    file system itself decides a race between the two: either the rename was first, and the new run goes
    on from that dump, or there is nothing left to rename. That holds however long the old run was asleep
    and whatever it knew when it fell asleep; there is no clock and no lock.

    Attributes:
        directory: the log's.
        number: larger than that of any run before.
        run_id: random; tells the run from those of the same number in other logs.
    """

    directory: Path
    number: int
    run_id: str

    def commit(self, dump: DumpId, manifest: bytes) -> None:
        """Puts a dump's manifest in its place.

        Raises:
            OSError: it could not, and the dump is not committed; see ``check``.
        """
        hidden = self._open / f"{dump.directory}.json"
        fmt.write_synced(hidden, manifest)
        try:
            os.rename(hidden, self.directory / dump.directory / MANIFEST_NAME)
        except BaseException:
            hidden.unlink(missing_ok=True)
            raise

    def check(self) -> None:
        """Tells of another run that has opened the log since. What decides is ``commit`` alone.

        Raises:
            FencedError: there is one.
        """
        newer = self._own.with_name(_name(self.number + 1))
        if newer.exists():
            raise FencedError(
                f"this run is generation {self.number} of {self.directory}, and generation "
                f"{self.number + 1} ({_owner(newer)}) has opened it since: only the newest one may write. "
                "Stop this run, or restart it from a checkpoint"
            )

    def close(self) -> None:
        """Gives the right up."""
        _remove_open(self._own)

    @property
    def _own(self) -> Path:
        return self.directory / FOLDER / _name(self.number)

    @property
    def _open(self) -> Path:
        return self._own / _OPEN


def claim(directory: Path) -> Generation:
    """Begins a new generation; when it returns, no older one can commit any more.

    Raises:
        OSError: the directory cannot be written to.
    """
    folder = directory / FOLDER
    folder.mkdir(exist_ok=True)
    run_id = secrets.token_hex(8)
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "run_id": run_id, "opened_unix": time.time()}
    draft = folder / f".{run_id}"
    (draft / _OPEN).mkdir(parents=True)
    try:
        (draft / _OWNER).write_text(json.dumps(owner))
        number = _take_next(draft, directory)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    sync(folder)
    for older in sorted(folder.iterdir()):
        if (match := _NAME.fullmatch(older.name)) and int(match[1]) < number and _remove_open(older):
            logger.info("%s was not closed (%s); it cannot commit any more", older.name, _owner(older))
    return Generation(directory, number, run_id)


def remove_uncommitted(generation: Generation) -> None:
    """Removes what older generations left half-written, and can never commit now."""
    for entry in sorted(generation.directory.iterdir()):
        dump = DumpId.from_directory(entry.name)
        if dump is None or dump.generation >= generation.number or (entry / MANIFEST_NAME).exists():
            continue
        logger.info("removing %s, which was never committed", entry.name)
        # One that still runs may write to it meanwhile: what stays means nothing.
        shutil.rmtree(entry, ignore_errors=True)


def _take_next(draft: Path, directory: Path) -> int:
    """Gives a draft the lowest number that is higher than all others."""
    while True:
        names = [entry.name for entry in directory.iterdir()]
        dumps = (DumpId.from_directory(name) or DumpId.from_base_directory(name) for name in names)
        taken = [dump.generation for dump in dumps if dump is not None]
        taken += [int(match[1]) for entry in draft.parent.iterdir() if (match := _NAME.fullmatch(entry.name))]
        number = max(taken, default=-1) + 1
        try:
            os.rename(draft, draft.with_name(_name(number)))
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
        owner = json.loads((generation / _OWNER).read_bytes())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "of an unknown process"


def _name(number: int) -> str:
    return f"g{number:04d}"
