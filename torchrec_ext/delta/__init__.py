"""Delta dumping: what changed in a model's tables, written as Parquet and read back.

Training side: ``DeltaDumper``. Reading side, without torch: ``DeltaLog``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.delta.replay import EmbeddingState
from torchrec_ext.errors import CorruptTableError, DeltaDumpError, DeltaLogError, FencedError

if TYPE_CHECKING:
    from torchrec_ext.delta.cut import DumpResult
    from torchrec_ext.delta.dumper import DeltaDumper

__all__ = [
    "CorruptTableError",
    "DeltaDumpError",
    "DeltaDumper",
    "DeltaLog",
    "DeltaLogError",
    "DumpId",
    "DumpResult",
    "EmbeddingState",
    "FencedError",
    "Manifest",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {"DeltaDumper": "torchrec_ext.delta.dumper", "DumpResult": "torchrec_ext.delta.cut"},
    )
