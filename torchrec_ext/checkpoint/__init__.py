"""Optimizer state that is never uninitialised, inherited or silently missing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchrec_ext._lazy import lazy_attributes

if TYPE_CHECKING:
    from torchrec_ext.checkpoint.audit.audit import audit_checkpoint
    from torchrec_ext.checkpoint.audit.repair import Repaired, RepairReport, repair_checkpoint
    from torchrec_ext.checkpoint.audit.report import AuditReport, Finding, Note, SlotAudit
    from torchrec_ext.checkpoint.backfill import BackfillReport, backfill_optimizer_state
    from torchrec_ext.checkpoint.reshard import reshard_zch
    from torchrec_ext.checkpoint.reshard_report import ReshardedTable, ReshardReport
    from torchrec_ext.zch.reset import OptimizerStateReset, reset_evicted_optimizer_state

__all__ = [
    "AuditReport",
    "BackfillReport",
    "Finding",
    "Note",
    "OptimizerStateReset",
    "RepairReport",
    "Repaired",
    "ReshardReport",
    "ReshardedTable",
    "SlotAudit",
    "audit_checkpoint",
    "backfill_optimizer_state",
    "repair_checkpoint",
    "reset_evicted_optimizer_state",
    "reshard_zch",
]

if not TYPE_CHECKING:  # a type checker reads the imports above; only some of them need TorchRec
    __getattr__ = lazy_attributes(
        __name__,
        {
            "AuditReport": "torchrec_ext.checkpoint.audit.report",
            "BackfillReport": "torchrec_ext.checkpoint.backfill",
            "Finding": "torchrec_ext.checkpoint.audit.report",
            "Note": "torchrec_ext.checkpoint.audit.report",
            "OptimizerStateReset": "torchrec_ext.zch.reset",
            "RepairReport": "torchrec_ext.checkpoint.audit.repair",
            "Repaired": "torchrec_ext.checkpoint.audit.repair",
            "ReshardReport": "torchrec_ext.checkpoint.reshard_report",
            "ReshardedTable": "torchrec_ext.checkpoint.reshard_report",
            "SlotAudit": "torchrec_ext.checkpoint.audit.report",
            "audit_checkpoint": "torchrec_ext.checkpoint.audit.audit",
            "backfill_optimizer_state": "torchrec_ext.checkpoint.backfill",
            "repair_checkpoint": "torchrec_ext.checkpoint.audit.repair",
            "reset_evicted_optimizer_state": "torchrec_ext.zch.reset",
            "reshard_zch": "torchrec_ext.checkpoint.reshard",
        },
    )
