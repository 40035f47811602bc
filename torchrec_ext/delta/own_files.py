"""Which files in the folder of a dump or a base are ours to remove."""

from __future__ import annotations

import re

from torchrec_ext.delta.manifest import MANIFEST_NAME
from torchrec_ext.delta.places import Place

_OWN_FILES = re.compile(
    r"\.?(part|fallback)_\d+_of_\d+\.parquet(\.tmp)?|\.?(manifest|plan)\.json(\.tmp)?|\.lock"
)


def own_files(place: Place, folder: str) -> list[str]:
    """The names of those files in a folder that a dumper or ``compact`` would have written."""
    return [name for name in place.entries(folder) if _OWN_FILES.fullmatch(name)]


def remove_own_files(place: Place, folder: str) -> None:
    """Removes the files of a dump or a base, its manifest first; the folder if nothing else is in it."""
    place.remove(folder, MANIFEST_NAME)
    for name in own_files(place, folder):
        place.remove(folder, name)
    place.prune(folder)
