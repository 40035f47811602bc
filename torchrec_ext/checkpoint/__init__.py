"""Optimizer state that is never uninitialised, inherited or silently missing."""

from __future__ import annotations

from torchrec_ext.checkpoint.backfill import BackfillReport, backfill_optimizer_state
from torchrec_ext.zch.reset import OptimizerStateReset, reset_evicted_optimizer_state

__all__ = [
    "BackfillReport",
    "OptimizerStateReset",
    "backfill_optimizer_state",
    "reset_evicted_optimizer_state",
]
