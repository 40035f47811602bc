"""What is committed to a place: the dumps and bases whose manifests are there."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torchrec_ext.delta.chain import in_chain_order
from torchrec_ext.delta.manifest import MANIFEST_NAME, DumpId, Manifest
from torchrec_ext.delta.places import Place
from torchrec_ext.errors import DeltaLogError

_Manifests = dict[DumpId, Manifest]


class Listing(NamedTuple):
    """All that is committed to a log.

    Attributes:
        chain: the dumps, superseded ones too, oldest first; where dumps were removed, the base that took
            their place comes first.
        bases: all of them, by the last dump in each.
        strays: dumps beside the chain that count as nothing. On a file system that renames atomically there
            are none of these. Elsewhere a run that was fenced off may have committed one late. It may have
            been the last dump for a while, until a newer run passed it by: who has taken it in has to put
            right the keys that it holds.
    """

    chain: list[Manifest]
    bases: dict[DumpId, Manifest]
    strays: list[Manifest]


def list_log(place: Place) -> Listing:
    """All that is committed, whatever trainers commit and ``vacuum`` removes meanwhile.

    Raises:
        DeltaLogError: a manifest is damaged, or the chain of dumps has a gap or forks; names the dump.
    """
    before = None
    while True:
        found = _committed(place)
        try:
            return _listing(place, *found)
        except DeltaLogError:
            # Not all is read at once: of two dumps the first may have come after its turn, the other before.
            if found == before:
                raise
            before = found


def committed_names(place: Place, known: Collection[str] = ()) -> frozenset[str]:
    """The names of committed dumps' directories: cheap to look at, unlike their manifests.

    Args:
        place: of the log.
        known: names of dumps that are known to be committed.

    Raises:
        DeltaLogError: it cannot be read.
    """
    try:
        names = [name for name in place.entries() if DumpId.from_directory(name)]
        new = [name for name in names if name not in known]
        there = place.each(lambda name: place.has(name, MANIFEST_NAME), new)
    except OSError as error:
        raise DeltaLogError(f"{place} cannot be read: {error}") from error
    gone = {name for name, is_there in zip(new, there, strict=True) if not is_there}
    return frozenset(names) - gone


def read_manifest(place: Place, name: str) -> Manifest | None:
    """What a dump's, or a base's, directory says of it; None if it is not committed.

    Raises:
        DeltaLogError: it is damaged.
    """
    try:
        data = place.read(name, MANIFEST_NAME)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DeltaLogError(f"{place}: {name}: {MANIFEST_NAME} cannot be read: {error}") from error
    with naming(place):
        return Manifest.from_json(data, name)


@contextlib.contextmanager
def naming(place: Place) -> Iterator[None]:
    """Puts the log's place before what errors say of its dumps."""
    try:
        yield
    except DeltaLogError as error:
        raise DeltaLogError(f"{place}: {error}") from error.__cause__


def entry_names(place: Place, folder: str = "") -> list[str]:
    """The names of what lies in the place, or in one of its folders; sorted.

    Raises:
        DeltaLogError: it cannot be listed.
    """
    try:
        return place.entries(folder)
    except OSError as error:
        raise DeltaLogError(str(error)) from error


def _committed(place: Place) -> tuple[_Manifests, _Manifests]:
    """The dumps, and the bases, whose manifests are there."""
    names = entry_names(place)
    while True:
        dump_names = [name for name in names if DumpId.from_directory(name)]
        base_names = [name for name in names if DumpId.from_base_directory(name)]
        dumps, bases = _manifests(place, dump_names), _manifests(place, base_names)
        if len(dumps) + len(bases) == len(dump_names) + len(base_names):
            return dumps, bases
        # Some are not committed, or were removed since. What took their place was committed before they went,
        # and bases are read after dumps: so it was found, or has come to the directory since.
        names = entry_names(place)
        if not any(DumpId.from_base_directory(name) for name in set(names).difference(base_names)):
            return dumps, bases


def _listing(place: Place, dumps: _Manifests, bases: _Manifests) -> Listing:
    with naming(place):
        chain = in_chain_order(dumps, bases)
    counts = {manifest.dump for manifest in chain}
    strays = [manifest for dump, manifest in sorted(dumps.items()) if dump not in counts]
    if chain and chain[0].is_base:  # what it has taken the place of is on its way out
        strays = [manifest for manifest in strays if manifest.dump > chain[0].dump]
    return Listing(chain, bases, strays)


def _manifests(place: Place, names: Sequence[str]) -> _Manifests:
    found = place.each(lambda name: read_manifest(place, name), names)
    return {manifest.dump: manifest for manifest in found if manifest is not None}
