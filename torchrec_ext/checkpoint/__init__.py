"""Optimizer state that is never uninitialised, inherited or silently missing."""

from __future__ import annotations

from torchrec_ext.zch.reset import OptimizerStateReset, reset_evicted_optimizer_state

__all__ = ["OptimizerStateReset", "reset_evicted_optimizer_state"]
