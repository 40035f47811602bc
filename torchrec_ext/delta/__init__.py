"""Delta dumping: what changed in a model's tables, written as Parquet and read back.

Training side: ``DeltaDumper``. Reading side, without torch: ``DeltaLog``; ``compact`` and ``vacuum``, which
keep a log short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes
from torchrec_ext.delta.compaction import Compacted, compact
from torchrec_ext.delta.log import DeltaLog
from torchrec_ext.delta.manifest import DumpId, Manifest
from torchrec_ext.delta.replay import EmbeddingState
from torchrec_ext.delta.retention import Vacuumed, vacuum
from torchrec_ext.errors import (
    CorruptTableError,
    DeltaDumpError,
    DeltaLogError,
    FencedError,
    VacuumedError,
)

if TYPE_CHECKING:
    from torchrec_ext.delta.cut import DumpResult
    from torchrec_ext.delta.dumper import DeltaDumper

__all__ = [
    "Compacted",
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
    "Vacuumed",
    "VacuumedError",
    "compact",
    "vacuum",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {"DeltaDumper": "torchrec_ext.delta.dumper", "DumpResult": "torchrec_ext.delta.cut"},
    )
