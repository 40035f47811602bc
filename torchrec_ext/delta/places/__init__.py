"""Where a log lies: a directory of this machine, or one on any file system that PyArrow knows.

A log has folders with files in them, and nothing deeper; all it does with them is a ``Place``. The two kinds
differ in what makes a file whole, and in how a run is kept from committing (``generations``, ``marked``): a
local file system renames atomically, an object store has no rename at all.
"""

from __future__ import annotations

from torchrec_ext.delta.places.local import LocalPlace
from torchrec_ext.delta.places.place import NewFile, Place, PlacedFile
from torchrec_ext.delta.places.remote import RemotePlace
from torchrec_ext.delta.places.uris import SCHEMES, open_place

__all__ = ["SCHEMES", "LocalPlace", "NewFile", "Place", "PlacedFile", "RemotePlace", "open_place"]
