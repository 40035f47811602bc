"""Who may write to a log where nothing is renamed: a run marks its generation, and looks for newer marks.

Of an object store three things are asked: a file appears whole, under its name, at once; whoever looks after
that sees it; and a list of names shows all that were there when it was asked for. S3, GCS and Azure promise
that. They cannot promise that a run does not commit after another one has opened the log: between a look and
a deed it may sleep as long as it likes. So three rules work together:

- A run marks its generation before it looks where the log ends.
- A run looks for newer marks before it puts a manifest, and again afterwards. Only if there is none even then
  is the dump committed: then it was there before any newer run looked, and all of them go on from it.
- Readers follow the chain back from the newest dump (``chain.in_chain_order``). A manifest that came later
  than a newer run looked is not on it, as soon as that run has dumped.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from dataclasses import dataclass

from torchrec_ext.delta.generations import (
    FOLDER,
    Generation,
    UncertainCommit,
    fenced,
    generation_name,
    generation_of,
    named_owner,
    next_number,
    owner_of,
)
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId
from torchrec_ext.delta.places import Place
from torchrec_ext.errors import DeltaLogError, FencedError

logger = logging.getLogger(__name__)

_TRIES = 20
_LONGEST_WAIT = 0.5  # seconds


@dataclass(frozen=True)
class MarkedGeneration(Generation):
    """A right that ends when a newer generation is marked."""

    def commit(self, dump: DumpId, manifest: bytes) -> None:
        """See ``Generation``."""
        self.check()
        try:
            self.place.put(dump.directory, MANIFEST_NAME, manifest)
        except Exception as error:
            # The request may have been carried out, or may still be.
            if not self._is_there(dump, manifest):
                raise UncertainCommit(f"{type(error).__name__}: {error}") from error
            logger.info("%s is there, although: %s", dump.directory, error)
        try:
            self.check()
        except FencedError as error:
            raise UncertainCommit("a newer run opened the log meanwhile") from error
        except OSError as error:
            raise UncertainCommit(f"{type(error).__name__}: {error}") from error

    def check(self) -> None:
        """See ``Generation``."""
        marked = (generation_of(name) for name in self.place.entries(FOLDER))
        newer = [number for number in marked if number is not None and number > self.number]
        if newer:
            raise fenced(self, min(newer), self._owner(min(newer)))

    def cannot_commit(self, older: int, newest: int) -> bool:
        """See ``Generation``: a manifest of it would not count, with nobody to have seen it before."""
        return older < min(newest, self.number)

    def _is_there(self, dump: DumpId, manifest: bytes) -> bool:
        try:
            return self.place.read(dump.directory, MANIFEST_NAME) == manifest
        except OSError:
            return False

    def _owner(self, number: int) -> str:
        folder = f"{FOLDER}/{generation_name(number)}"
        try:
            names = self.place.entries(folder)
            return named_owner(self.place.read(folder, names[0]) if names else b"")
        except OSError:
            return named_owner(b"")


def mark(place: Place) -> Generation:
    """Begins a new generation.

    Of runs that mark the same number at most one keeps it: each looks only after it has marked, so that of
    any two at least one sees the other's mark, and whoever sees another's takes a higher number.

    Raises:
        OSError: the place cannot be written to.
        DeltaLogError: others take every number.
    """
    run_id = secrets.token_hex(8)
    place.make_folder(FOLDER)
    for attempt in range(_TRIES):
        number = next_number(place)
        folder = f"{FOLDER}/{generation_name(number)}"
        place.put(folder, f"{run_id}.json", owner_of(run_id))
        if place.entries(folder) == [f"{run_id}.json"]:
            return MarkedGeneration(place, number, run_id)
        time.sleep(random.uniform(0, min(_LONGEST_WAIT, 0.01 * 2**attempt)))
    raise DeltaLogError(f"{place}: other runs open this log all the time")
