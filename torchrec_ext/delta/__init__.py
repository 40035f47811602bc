"""Delta dumping: what changed in a model's tables, written as Parquet and read back.

Training side: ``DeltaDumper``. Reading side, without torch: ``DeltaLog``; ``compact`` and ``vacuum``, which
keep a log short; ``inspect_log``, ``verify_log``, ``diff_log`` and ``figures_of``, which tell of one;
``write_state``, which writes what it comes to into one file.
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
    from torchrec_ext.delta.difference import diff_log
    from torchrec_ext.delta.dumper import DeltaDumper
    from torchrec_ext.delta.figures import figures_of
    from torchrec_ext.delta.overview import inspect_log
    from torchrec_ext.delta.state_file import write_state
    from torchrec_ext.delta.verification import verify_log

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
    "diff_log",
    "figures_of",
    "inspect_log",
    "vacuum",
    "verify_log",
    "write_state",
]

if not TYPE_CHECKING:  # a type checker reads the imports above
    __getattr__ = lazy_attributes(
        __name__,
        {
            "DeltaDumper": "torchrec_ext.delta.dumper",
            "DumpResult": "torchrec_ext.delta.cut",
            "diff_log": "torchrec_ext.delta.difference",
            "figures_of": "torchrec_ext.delta.figures",
            "inspect_log": "torchrec_ext.delta.overview",
            "verify_log": "torchrec_ext.delta.verification",
            "write_state": "torchrec_ext.delta.state_file",
        },
    )
