"""Finds what is wrong with a log, all of it at once, where readers stop at the first fault."""

from __future__ import annotations

from torchrec_ext.delta.verification.findings import CHECKS, Check, Finding, Verification
from torchrec_ext.delta.verification.verify import verify_log

__all__ = ["CHECKS", "Check", "Finding", "Verification", "verify_log"]
