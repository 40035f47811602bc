"""The order of a log's dumps: each names the one before it, and the newest one decides which count."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.errors import DeltaLogError

logger = logging.getLogger(__name__)


def in_chain_order(
    manifests: Mapping[DumpId, Manifest], bases: Mapping[DumpId, Manifest] | None = None
) -> list[Manifest]:
    """The chain that ends with the newest dump, oldest first.

    Where ``vacuum`` removed dumps, it begins with the base that took their place; else it has no base.

    A dump counts if the newest one leads back to it. One beside the chain is left out if there is a reason
    for it, both on object stores alone: a run that was fenced off committed it late (see ``marked``), or its
    own run could not tell whether it was committed, and made it void by a later one.

    Raises:
        DeltaLogError: the chain has a gap, a fork or a loop; names the dumps.
    """
    bases = bases or {}
    if not manifests and not bases:
        return []
    chain = _back_from(max([*manifests, *bases]), manifests, bases)
    places = {manifest.dump: place for place, manifest in enumerate(chain)}
    for dump in sorted(set(manifests) - set(places)):
        if not (chain[0].is_base and dump < chain[0].dump):  # else it is on its way out
            _check_left_behind(dump, manifests, chain, places)
            logger.debug("%s is not of the log: a later run went on without it", dump.directory)
    return chain


def without_superseded(chain: Sequence[Manifest]) -> list[Manifest]:
    """The dumps that no other one makes void; a void dump makes others void all the same.

    A base is never void, even if its last dump is: it holds the dumps before that one, too, and what it has
    of that one is said again by the dump that superseded it.
    """
    void = void_dumps(chain)
    return [manifest for manifest in chain if manifest.is_base or manifest.dump not in void]


def branch_of(
    dump: Manifest, chain: Sequence[Manifest], strays: Sequence[Manifest]
) -> tuple[list[Manifest], int | None]:
    """The dumps beside a chain that lead up to one of them.

    Returns:
        These, oldest first, and how many dumps of the chain come before them; None if nobody can tell any
        more what did, as it was removed.
    """
    places = {manifest.dump: place for place, manifest in enumerate(chain, 1)}
    beside = {manifest.dump: manifest for manifest in strays}
    branch = [dump]
    while (before := branch[-1].previous) is not None and before in beside:
        branch.append(beside[before])
    return branch[::-1], 0 if before is None else places.get(before)


def void_dumps(chain: Sequence[Manifest]) -> set[DumpId]:
    """The dumps that others make void."""
    return {dump for manifest in chain for dump in manifest.supersedes}


def since_base(
    dumps: Sequence[Manifest], bases: Mapping[DumpId, Manifest], void: set[DumpId]
) -> list[Manifest]:
    """The fewest that hold what dumps hold: the newest base that takes the place of some, and those after.

    Args:
        dumps: the first ones of a log, none void.
        bases: of the log.
        void: see ``void_dumps``.
    """
    for place in range(len(dumps) - 1, -1, -1):
        dump = dumps[place].dump
        if dump in bases and dump not in void:
            return [bases[dump], *dumps[place + 1 :]]
    return list(dumps)


def _back_from(
    newest: DumpId, manifests: Mapping[DumpId, Manifest], bases: Mapping[DumpId, Manifest]
) -> list[Manifest]:
    chain: dict[DumpId, Manifest] = {}
    dump: DumpId | None = newest
    while dump is not None and dump in manifests:
        if dump in chain:
            stray = min(chain)
            raise DeltaLogError(f"{stray.directory} is not connected to the first dump: a loop of dumps")
        chain[dump] = manifests[dump]
        dump = manifests[dump].previous
    backwards = list(chain.values())
    if dump is None:
        return backwards[::-1]
    if dump in bases:
        return [bases[dump], *backwards[::-1]]
    # Removed from the oldest on: what is left of the dumps in a base is on its way out.
    for place in range(len(backwards) - 1, -1, -1):
        if (start := backwards[place].dump) in bases:
            return [bases[start], *backwards[:place][::-1]]
    # A dump that was in doubt is in a base by now: who supersedes it follows the one before it.
    if doubted := [void for void in backwards[-1].supersedes if void in bases and void > dump]:
        return [bases[max(doubted)], *backwards[::-1]]
    raise _gap(backwards[-1].dump, dump)


def _gap(dump: DumpId, before: DumpId) -> DeltaLogError:
    return DeltaLogError(
        f"{dump.directory} follows {before.directory}, which is missing: the chain has a gap"
    )


def _check_left_behind(
    dump: DumpId,
    manifests: Mapping[DumpId, Manifest],
    chain: Sequence[Manifest],
    places: Mapping[DumpId, int],
) -> None:
    """Checks that a dump beside the chain is of a run that was fenced off."""
    seen: set[DumpId] = set()
    branch, before = dump, manifests[dump].previous
    while before is not None and before not in places:
        if before in seen:
            raise DeltaLogError(f"{dump.directory} is not connected to the first dump: a loop of dumps")
        seen.add(before)
        if before not in manifests:
            if chain[0].is_base and before < chain[0].dump and dump.generation < chain[-1].generation:
                return  # what it followed is in the base, and was removed
            raise _gap(branch, before)
        branch, before = before, manifests[before].previous
    place = 0 if before is None else places[before] + 1
    if place < len(chain):
        taken = chain[place].dump
        same_run_gave_up = taken in manifests[branch].supersedes or branch in manifests[taken].supersedes
        if dump.generation < chain[-1].generation and branch.generation != taken.generation:
            return
        if same_run_gave_up and branch.generation == taken.generation:
            return
    one, other = sorted([branch, chain[min(place, len(chain) - 1)].dump])
    raise DeltaLogError(
        f"{one.directory} and {other.directory} both follow {before.directory if before else 'nothing'}: "
        "two trainers wrote to one directory, or a dump was copied into it"
    )
