"""Optimizer state that is never uninitialised, inherited or silently missing."""

from __future__ import annotations

from torchrec_ext.checkpoint.backfill import BackfillReport, backfill_optimizer_state
from torchrec_ext.checkpoint.reshard import reshard_zch
from torchrec_ext.checkpoint.reshard_report import ReshardedTable, ReshardReport
from torchrec_ext.zch.reset import OptimizerStateReset, reset_evicted_optimizer_state

__all__ = [
    "BackfillReport",
    "OptimizerStateReset",
    "ReshardReport",
    "ReshardedTable",
    "backfill_optimizer_state",
    "reset_evicted_optimizer_state",
    "reshard_zch",
]
