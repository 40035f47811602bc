"""The order of a log's dumps: each names the one before it, and the newest one decides which count."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.errors import DeltaLogError

logger = logging.getLogger(__name__)


def in_chain_order(manifests: Mapping[DumpId, Manifest]) -> list[Manifest]:
    """The chain that ends with the newest dump, oldest first.

    The truth is in the chain: a dump counts if the newest one leads back to it. One beside it is left out,
    if there is a reason for it to be there. Where nothing keeps a run that was fenced off from committing, it
    may commit late what a newer run has not seen and passes by. And where a request may be carried out that
    seemed to have failed, a run names such a dump among those that a later one of its own makes void.

    Raises:
        DeltaLogError: the chain has a gap, a fork or a loop; names the dumps.
    """
    if not manifests:
        return []
    chain = _back_from(max(manifests), manifests)
    places = {manifest.dump: place for place, manifest in enumerate(chain)}
    for dump in sorted(set(manifests) - set(places)):
        _check_left_behind(dump, manifests, chain, places)
        logger.debug("%s is not of the log: a later run went on without it", dump.directory)
    return chain


def without_superseded(chain: Sequence[Manifest]) -> list[Manifest]:
    """The dumps that no other one makes void; a void dump makes others void all the same."""
    void = {dump for manifest in chain for dump in manifest.supersedes}
    return [manifest for manifest in chain if manifest.dump not in void]


def branch_of(
    dump: Manifest, chain: Sequence[Manifest], strays: Sequence[Manifest]
) -> tuple[list[Manifest], int]:
    """The dumps beside a chain that lead up to one of them.

    Returns:
        These, oldest first, and how many dumps of the chain come before them.
    """
    places = {manifest.dump: place for place, manifest in enumerate(chain, 1)}
    beside = {manifest.dump: manifest for manifest in strays}
    branch = [dump]
    while branch[-1].previous is not None and branch[-1].previous not in places:
        branch.append(beside[branch[-1].previous])
    before = branch[-1].previous
    return branch[::-1], 0 if before is None else places[before]


def _back_from(newest: DumpId, manifests: Mapping[DumpId, Manifest]) -> list[Manifest]:
    chain: dict[DumpId, Manifest] = {}
    dump: DumpId | None = newest
    while dump is not None:
        if dump in chain:
            stray = min(chain)
            raise DeltaLogError(f"{stray.directory} is not connected to the first dump: a loop of dumps")
        chain[dump] = manifests[dump]
        dump = _before(manifests[dump], manifests)
    return [*chain.values()][::-1]


def _before(manifest: Manifest, manifests: Mapping[DumpId, Manifest]) -> DumpId | None:
    before = manifest.previous
    if before is not None and before not in manifests:
        raise DeltaLogError(
            f"{manifest.dump.directory} follows {before.directory}, which is missing: the chain has a gap"
        )
    return before


def _check_left_behind(
    dump: DumpId,
    manifests: Mapping[DumpId, Manifest],
    chain: Sequence[Manifest],
    places: Mapping[DumpId, int],
) -> None:
    """Checks that a dump beside the chain is of a run that was fenced off."""
    seen: set[DumpId] = set()
    branch, before = dump, _before(manifests[dump], manifests)
    while before is not None and before not in places:
        if before in seen:
            raise DeltaLogError(f"{dump.directory} is not connected to the first dump: a loop of dumps")
        seen.add(before)
        branch, before = before, _before(manifests[before], manifests)
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
